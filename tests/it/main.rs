//! What needs more than one crate.

mod cli;
mod cluster;
mod hello;
mod processes;
mod scenarios;
mod schedules;
mod swarm;
