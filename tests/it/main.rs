//! What needs more than one crate.

mod cli;
mod cluster;
mod processes;
mod scenarios;
mod schedules;
mod swarm;
