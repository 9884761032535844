//! The coordinator's and node's own code in virtual time, or as real processes on this machine.
//!
//! With feature `local`, [`local`] starts one coordinator and several nodes as processes, with
//! proxies between them that lose and cut, shows what happens and stops whatever it started.

#[cfg(feature = "local")]
pub mod local;
