//! Real processes on this machine: one coordinator, several nodes, proxies between them.
//!
//! Start at [`session`], which starts, watches and stops a cluster; [`cluster`] is its description,
//! [`demo`] the tour for newcomers that runs one.

pub mod cluster;
pub mod command;
pub mod demo;
pub mod error;
pub mod guard;
pub mod http;
pub mod lines;
pub mod process;
pub mod programs;
pub mod progress;
pub mod proxy;
pub mod session;
pub mod stop;
pub mod summary;
pub mod view;
