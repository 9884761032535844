//! What gives the machine sockets, disk, threads and a clock.
//!
//! [`driver`] is the daemon's loop. [`compute`] is the thread that owns all tensors, [`data`] gets
//! the run's data before the machine hears its welcome, [`reader`] fetches a checkpoint without
//! taking part, [`measure`] says what this machine offers.

#![expect(clippy::disallowed_methods, reason = "the shell is where clock and threads live")]

pub mod compute;
pub mod data;
pub mod driver;
pub mod measure;
pub mod reader;
