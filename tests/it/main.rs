//! What needs more than one crate.

mod cli;
mod cluster;
mod processes;
mod schedules;
mod swarm;
