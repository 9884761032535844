//! What needs more than one crate.

mod swarm;
