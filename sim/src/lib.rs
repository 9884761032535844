//! The coordinator's and node's own code in virtual time, or as real processes on this machine.
//!
//! Start at [`world`]: a clock, an event queue, links with delay, and the two machines with the
//! toy engine. [`fault`] says when something dies, [`oracle`] judges what was counted. With
//! feature `local`, [`local`] starts one coordinator and several nodes as processes instead, with
//! proxies between them that lose and cut, shows what happens and stops whatever it started.

mod device;
#[cfg(feature = "local")]
pub mod explore;
pub mod fault;
mod handover;
pub mod judge;
#[cfg(feature = "local")]
pub mod local;
mod network;
pub mod oracle;
pub mod plan;
pub mod scenario;
pub mod schedule;
pub mod world;
