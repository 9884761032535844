//! The volunteer: feeds, hosts, averages and catches up.
//!
//! Start at [`machine`], the node as a state machine without I/O, and [`engine`], what it asks to
//! be computed. With feature `shell`, `driver` gives both sockets, disk, threads and a clock; with
//! feature `torch`, the engine runs on libtorch. The machine never reads a tensor's contents and
//! never touches clock, socket, disk, thread or ambient randomness.

pub mod checkpoint;
#[cfg(feature = "torch")]
pub mod doctor;
pub mod engine;
#[cfg(feature = "torch")]
pub mod eval;
#[cfg(feature = "torch")]
pub mod generate;
pub mod huggingface;
pub mod init;
pub mod machine;
#[cfg(feature = "torch")]
pub mod model;
pub mod optim;
pub mod solo;
