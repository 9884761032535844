//! What people see of the run.

use std::collections::VecDeque;

use skein_protocol::message::control::Commit;
use skein_protocol::placement::Standing;
use skein_protocol::time::Time;

use crate::machine::{Coordinator, Phase, push_bounded};
use crate::status::{NodeStatus, Status};
use crate::steps::OpenStep;

const EVENTS_KEPT: usize = 200;
const LOSSES_KEPT: usize = 100_000;
/// Tokens a second are taken over so many commits.
const RATE_COMMITS: usize = 8;
/// Weight of the newest step in running means.
const NEWEST: f64 = 0.3;

/// What happened so far.
#[derive(Debug, Default)]
pub(crate) struct History {
    events: VecDeque<(f64, String)>,
    losses: VecDeque<(u64, f32)>,
    commits: VecDeque<Time>,
    /// (use, microbatch) pairs that were computed again, in committed steps.
    redone: u64,
    /// (use, microbatch) pairs that committed steps lack.
    lost: u64,
}

impl History {
    pub(crate) fn event(&mut self, now: Time, line: String) {
        push_bounded(&mut self.events, (now.as_secs_f64(), line), EVENTS_KEPT);
    }
}

/// What one node does.
#[derive(Clone, Debug, Default)]
pub(crate) struct Work {
    /// In the open step: work counted in FLOP a token, microbatches counted, microbatches fed to their end.
    flops: f64,
    counted: u32,
    fed: u32,
    last_fed: Time,
    last_counted: Time,
    /// Running means over steps.
    mean_flops: f64,
    mean_rate: f64,
    mean_feed_rate: f64,
}

impl Work {
    pub(crate) fn counted(&mut self, flops: f64, now: Time) {
        self.flops += flops;
        self.counted += 1;
        self.last_counted = now;
    }

    pub(crate) fn fed(&mut self, now: Time) {
        self.fed += 1;
        self.last_fed = now;
    }

    /// Microbatches a second it computes; 0 if unknown.
    pub(crate) fn rate(&self) -> f64 {
        self.mean_rate
    }

    /// Microbatches a second it follows to their end; 0 if unknown.
    pub(crate) fn feed_rate(&self) -> f64 {
        self.mean_feed_rate
    }

    fn close_step(&mut self, since: Time) {
        let mean = |old: f64, new: f64| if old == 0.0 { new } else { old * (1.0 - NEWEST) + new * NEWEST };
        let rate = |count: u32, last: Time| f64::from(count) / last.since(since).as_secs_f64().max(1e-6);
        if self.counted > 0 {
            self.mean_rate = mean(self.mean_rate, rate(self.counted, self.last_counted));
        }
        if self.fed > 0 {
            self.mean_feed_rate = mean(self.mean_feed_rate, rate(self.fed, self.last_fed));
        }
        self.mean_flops = self.mean_flops * (1.0 - NEWEST) + self.flops * NEWEST;
        (self.flops, self.counted, self.fed) = (0.0, 0, 0);
    }
}

impl Coordinator {
    pub(crate) fn note_commit(&mut self, open: &OpenStep, commit: &Commit) {
        for member in self.members.values_mut() {
            member.work.close_step(open.since);
        }
        self.history.redone += open.ledger.returned();
        self.history.lost += open.ledger.missing_pairs() as u64;
        push_bounded(&mut self.history.losses, (commit.fence.step.0, commit.loss), LOSSES_KEPT);
        push_bounded(&mut self.history.commits, self.now, RATE_COMMITS + 1);
    }

    /// The run as people see it.
    pub fn status(&self, now: Time) -> Status {
        let steps = self.config.run.steps;
        let step = self.chain.version().0;
        let tokens_per_step = self.config.batch.tokens_per_step();
        let seconds_per_step = self.seconds_per_step(now);
        let training = matches!(self.phase, Phase::Training);
        let stalled = training && !self.is_covered_live();
        Status {
            name: self.config.run.name.clone(),
            run: self.run.to_string(),
            state: match &self.phase {
                Phase::Waiting { .. } => "waiting",
                Phase::Recovering { .. } => "recovering",
                Phase::Training if stalled => "stalled",
                Phase::Training => "training",
                Phase::Paused { .. } => "paused",
                Phase::Stopping { .. } => "stopping",
                Phase::Finished => "finished",
            }
            .to_owned(),
            waiting_for: self.waiting_for(stalled),
            timeline: self.timeline().0,
            epoch: self.placement.epoch.0,
            step,
            steps,
            losses: self.history.losses.iter().copied().collect(),
            tokens: step * tokens_per_step,
            tokens_per_second: seconds_per_step.map_or(0.0, |seconds| tokens_per_step as f64 / seconds),
            seconds_left: seconds_per_step.filter(|_| training).map(|seconds| seconds * steps.saturating_sub(step) as f64),
            microbatches_lost: self.history.lost,
            microbatches_redone: self.redone() as f64 / self.structure.uses.len() as f64,
            checkpoint: self.complete.last().map(|version| version.0),
            nodes: self.node_statuses(),
            events: self.history.events.iter().cloned().collect(),
        }
    }

    fn redone(&self) -> u64 {
        self.history.redone + self.open.as_ref().map_or(0, |open| open.ledger.returned())
    }

    fn seconds_per_step(&self, now: Time) -> Option<f64> {
        let commits = &self.history.commits;
        let (first, last) = (commits.front()?, commits.back()?);
        let steps = commits.len() - 1;
        if steps == 0 {
            return None;
        }
        let mean = last.since(*first).as_secs_f64() / steps as f64;
        // A step that takes longer than usual shows at once.
        let waited = now.since(*last).as_secs_f64();
        Some(if waited > 2.0 * mean { (mean * steps as f64 + waited) / (steps + 1) as f64 } else { mean })
    }

    fn waiting_for(&self, stalled: bool) -> Option<String> {
        match &self.phase {
            Phase::Waiting { why } | Phase::Paused { why } => Some(why.clone()),
            Phase::Recovering { awaited, .. } => Some(format!("{} nodes to come back", awaited.len())),
            Phase::Stopping { version } => Some(format!("version {version} to be saved")),
            Phase::Training if stalled => Some("a host for every block".to_owned()),
            Phase::Training | Phase::Finished => None,
        }
    }

    fn node_statuses(&self) -> Vec<NodeStatus> {
        let total: f64 = self.members.values().map(|member| member.work.mean_flops).sum();
        self.members
            .iter()
            .filter(|(_, member)| member.present)
            .map(|(node, member)| {
                let seat = self.placement.seat(*node);
                let state = match seat.map(|seat| seat.standing) {
                    _ if member.leaving => "leaving",
                    _ if !member.is_live() => "suspect",
                    Some(Standing::Active) => "active",
                    Some(Standing::Joining { .. }) => "joining",
                    None => "idle",
                };
                NodeStatus {
                    node: node.to_string(),
                    state: state.to_owned(),
                    span: seat.map(|seat| seat.span.to_string()).unwrap_or_default(),
                    share: if total > 0.0 { member.work.mean_flops / total } else { 0.0 },
                    link: member.links.clone(),
                    rate: member.work.rate(),
                    bytes_per_second: member.sent_per_second,
                    flops: member.capability.flops,
                }
            })
            .collect()
    }
}
