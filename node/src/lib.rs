//! The volunteer: feeds, hosts, averages and catches up.
//!
//! Start at [`machine`], the node as a state machine without I/O, and [`engine`], what it asks to
//! be computed. With feature `shell`, `driver` gives both sockets, disk, threads and a clock; with
//! feature `torch`, the engine runs on libtorch. The machine never reads a tensor's contents and
//! never touches clock, socket, disk, thread or ambient randomness.

mod catchup;
pub mod checkpoint;
pub mod data;
#[cfg(feature = "torch")]
pub mod doctor;
pub mod engine;
#[cfg(feature = "torch")]
pub mod eval;
mod feed;
#[cfg(feature = "torch")]
pub mod generate;
mod host;
pub mod huggingface;
pub mod init;
pub mod machine;
#[cfg(feature = "torch")]
pub mod model;
pub mod optim;
mod reduce;
pub mod route;
mod session;
#[cfg(feature = "shell")]
pub mod shell;
pub mod solo;
mod steps;
