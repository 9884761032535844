//! What the coordinator shows: served as JSON at `/status`, printed by `status`.

use serde::{Deserialize, Serialize};

/// The run at a moment.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Status {
    /// The run's name for people.
    pub name: String,
    /// The run.
    pub run: String,
    /// `waiting`, `training`, `stalled`, `finished`.
    pub state: String,
    /// One line: what it waits for, if it waits.
    pub waiting_for: Option<String>,
    /// The timeline.
    pub timeline: u32,
    /// The epoch.
    pub epoch: u64,
    /// Steps committed.
    pub step: u64,
    /// Steps in the run.
    pub steps: u64,
    /// Mean loss of each committed step since this coordinator started, as (step, nats a token).
    pub losses: Vec<(u64, f32)>,
    /// Tokens trained on in committed steps.
    pub tokens: u64,
    /// Tokens a second over the last few commits.
    pub tokens_per_second: f64,
    /// Seconds to the end at this rate.
    pub seconds_left: Option<f64>,
    /// Microbatches of committed steps that were not counted in every block exactly once: always 0.
    pub microbatches_lost: u64,
    /// Microbatches, times blocks over all blocks, that had to be computed again.
    pub microbatches_redone: f64,
    /// Version of the newest complete checkpoint.
    pub checkpoint: Option<u64>,
    /// The nodes.
    pub nodes: Vec<NodeStatus>,
    /// The newest events, oldest first, as (seconds since start, line).
    pub events: Vec<(f64, String)>,
}

/// One node at a moment.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct NodeStatus {
    /// Its name.
    pub node: String,
    /// `active`, `joining`, `idle`, `suspect`, `leaving`.
    pub state: String,
    /// Its blocks as people read them, `0-2`; empty if it has none.
    pub span: String,
    /// Its share of the work done in recent steps, 0 to 1.
    pub share: f64,
    /// Kinds of its links; empty while it has none.
    pub link: String,
    /// Microbatches it finished a second.
    pub rate: f64,
    /// Bytes a second it sends.
    pub bytes_per_second: f64,
    /// Sustained FLOP/s it claims.
    pub flops: f64,
}
