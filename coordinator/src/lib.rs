//! The coordinator: membership, ledger of work, placement.
//!
//! Start at [`machine`], the coordinator as a state machine without I/O. [`record`] is what it
//! makes durable. With feature `shell`, `driver` gives it libp2p, redb and HTTP. The machine never
//! touches clock, socket, disk or ambient randomness, and nothing here knows libtorch.

#[cfg(feature = "shell")]
pub mod driver;
#[cfg(feature = "shell")]
pub mod http;
pub mod machine;
pub mod planner;
pub mod record;
#[cfg(feature = "shell")]
pub mod settings;
#[cfg(feature = "shell")]
pub mod show;
#[cfg(feature = "shell")]
pub mod start;
#[cfg(feature = "shell")]
pub mod state;
pub mod status;
pub mod store;
