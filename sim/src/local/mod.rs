//! Real processes on this machine.
pub mod cluster;
pub mod guard;
pub mod http;
pub mod process;
pub mod proxy;
