//! The coordinator: membership, ledger of work, placement.
//!
//! Start at [`machine`], the coordinator as a state machine without I/O. [`record`] is what it
//! makes durable. With feature `shell`, `driver` gives it libp2p, redb and HTTP. The machine never
//! touches clock, socket, disk or ambient randomness, and nothing here knows libtorch.

pub mod machine;
pub mod planner;
pub mod record;
pub mod status;
pub mod store;
