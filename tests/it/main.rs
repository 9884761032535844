//! What needs more than one crate.

mod cluster;
mod processes;
mod swarm;
