//! The coordinator: membership, ledger of work, placement.
//!
//! Start at [`machine`], the coordinator as a state machine without I/O. [`record`] is what it
//! makes durable, [`store`] the log that it is kept in. With feature `shell`, `driver` gives the
//! machine connections, clock and log, and `start` puts it all together. The machine never touches
//! clock, socket, disk or ambient randomness, and nothing here knows libtorch.

mod chain;
mod checkpoints;
#[cfg(feature = "shell")]
pub mod driver;
mod guard;
#[cfg(feature = "shell")]
pub mod http;
mod leases;
pub mod ledger;
pub mod machine;
mod membership;
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
mod steps;
pub mod store;
mod timeline;
mod view;
