//! The coordinator's and node's own code in virtual time, or as real processes on this machine.
//!
//! Start at [`world`]: a clock, an event queue, links with delay, and the two machines with the
//! toy engine. [`fault`] says when something dies, [`oracle`] judges what was counted. With
//! feature `local`, `local` starts real processes instead.

pub mod fault;
pub mod oracle;
pub mod world;
