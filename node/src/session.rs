//! The node and the coordinator: hello, welcome, heartbeats, coming back.

use std::collections::VecDeque;
use std::time::Duration;

use skein_protocol::config::RunConfig;
use skein_protocol::id::{Hash, Step};
use skein_protocol::limits;
use skein_protocol::message::VERSIONS;
use skein_protocol::message::control::{Commit, FromCoordinator, Hello, Role, ToCoordinator, Welcome};
use skein_protocol::placement::{Placement, Standing};
use skein_protocol::time::Time;

use crate::engine::Task;
use crate::machine::{Action, Node, Report, Run};

/// Commits a node keeps: enough to show a coordinator that lost some.
const COMMITS_KEPT: usize = 16;

/// Commits in a hello, which must fit what a stranger may say.
const COMMITS_SHOWN: usize = 4;
/// How often a node dials a coordinator that is gone after the end of the run.
const DIALS_AFTER_END: u32 = 6;

/// Where the node stands with the coordinator.
#[derive(Debug, Default)]
pub(crate) struct Session {
    dialled: bool,
    connected: bool,
    pub(crate) welcomed: bool,
    failures: u32,
    retry_at: Option<Time>,
    heartbeat_at: Option<Time>,
    pub(crate) leaving: bool,
    /// The device hangs, and the user has been told.
    stuck: bool,
    finished: bool,
    /// The newest commits, oldest first.
    pub(crate) commits: VecDeque<Commit>,
}

impl Session {
    pub(crate) fn next_timeout(&self) -> Option<Time> {
        if !self.dialled {
            return Some(Time::default());
        }
        [self.retry_at, self.heartbeat_at].into_iter().flatten().min()
    }

    fn head(&self) -> Option<Hash> {
        self.commits.back().map(Commit::hash)
    }
}

impl Node {
    pub(crate) fn control_up(&mut self, actions: &mut Vec<Action>) {
        self.session.connected = true;
        self.session.retry_at = None;
        let holds_state = self.steps.version.is_some();
        let hello = Hello {
            versions: VERSIONS,
            run: self.run.as_ref().map(|run| run.id).or(self.settings.run),
            role: Role::Worker,
            capability: self.settings.capability,
            data_addresses: self.settings.data_addresses.clone(),
            data: self.settings.data,
            timeline: self.timeline(),
            span: self.span().filter(|_| holds_state),
            versions_held: self.steps.versions_held(&self.catchup),
            sums: self.host.sum_reports(),
            shards: self.catchup.shards().collect(),
            commits: self.session.commits.iter().skip(self.session.commits.len().saturating_sub(COMMITS_SHOWN)).cloned().collect(),
        };
        actions.push(Action::Tell(ToCoordinator::Hello(Box::new(hello))));
        self.session.heartbeat_at = Some(self.now + limits::HEARTBEAT_EVERY);
    }

    pub(crate) fn control_down(&mut self, reason: String, actions: &mut Vec<Action>) {
        (self.session.connected, self.session.welcomed) = (false, false);
        self.session.heartbeat_at = None;
        if self.session.leaving {
            actions.push(Action::Exit { ok: true, reason: "left the run".to_owned() });
            return;
        }
        // A coordinator that restarts after the last step may still want it saved.
        if self.session.finished && self.session.failures >= DIALS_AFTER_END {
            actions.push(Action::Exit { ok: true, reason: "the run is finished and the coordinator gone".to_owned() });
            return;
        }
        // Twice as long each time, at most the maximum; the node's name spreads those who lost
        // the coordinator at the same moment.
        let doubled = limits::RECONNECT_MIN * 2u32.saturating_pow(self.session.failures.min(16));
        let spread = Duration::from_millis(u64::from(self.settings.id.0[0]));
        let wait = doubled.min(limits::RECONNECT_MAX) + spread;
        self.session.failures += 1;
        self.session.retry_at = Some(self.now + wait);
        actions.push(Action::Report(Report::Trouble(format!("no connection to the coordinator ({reason}): trying again in {:.1} s", wait.as_secs_f64()))));
    }

    pub(crate) fn session_timers(&mut self, actions: &mut Vec<Action>) {
        if !self.session.dialled || self.session.retry_at.is_some_and(|at| at <= self.now) {
            self.session.dialled = true;
            self.session.retry_at = None;
            actions.push(Action::Connect);
        }
        if self.session.heartbeat_at.is_some_and(|at| at <= self.now) {
            self.session.heartbeat_at = Some(self.now + limits::HEARTBEAT_EVERY);
            let stuck = self.queue.is_stuck(self.now);
            if !stuck {
                actions.push(Action::Tell(ToCoordinator::Heartbeat));
            } else if !self.session.stuck {
                let line = "the device does not answer: others take over this node's work until it does";
                actions.push(Action::Report(Report::Trouble(line.to_owned())));
            }
            self.session.stuck = stuck;
        }
    }

    pub(crate) fn leave(&mut self, actions: &mut Vec<Action>) {
        self.session.leaving = true;
        if self.session.welcomed {
            actions.push(Action::Tell(ToCoordinator::Leaving));
        } else {
            actions.push(Action::Exit { ok: true, reason: "left the run".to_owned() });
        }
    }

    pub(crate) fn control(&mut self, message: FromCoordinator, actions: &mut Vec<Action>) {
        match message {
            FromCoordinator::Welcome(welcome) => self.welcome(*welcome, actions),
            FromCoordinator::Refused { reason } => {
                actions.push(Action::Exit { ok: false, reason: format!("the coordinator refused this node: {reason}") });
            }
            FromCoordinator::Placement(placement) => self.placed(*placement, actions),
            FromCoordinator::Peers(peers) => actions.push(Action::Peers(peers)),
            FromCoordinator::Lease { fence, grants } => self.leased(fence, grants, actions),
            FromCoordinator::Counted { fence, verdicts } => self.counted(fence, &verdicts),
            FromCoordinator::Void { fence, sums } => self.void(fence, &sums),
            FromCoordinator::Seal(seal) => self.sealed(*seal, actions),
            FromCoordinator::Commit(commit) => self.committed(*commit, actions),
            FromCoordinator::Retire { fence } => self.retired(fence),
            FromCoordinator::Checkpoint { timeline, version, groups } => self.checkpoint_wanted(timeline, version, groups, actions),
            FromCoordinator::CheckpointComplete { version: _, keep_from } => {
                self.catchup.prune(keep_from);
                actions.push(Action::PruneShards { keep_from });
            }
            FromCoordinator::Finished { version } => {
                self.session.finished = true;
                actions.push(Action::Report(Report::State(format!("the run is finished at step {version}"))));
            }
            FromCoordinator::Notice { text } => actions.push(Action::Report(Report::State(text))),
        }
    }

    fn welcome(&mut self, welcome: Welcome, actions: &mut Vec<Action>) {
        let config = match RunConfig::from_toml(&welcome.config) {
            Ok(config) if config.run_id(self.settings.coordinator) == welcome.run => config,
            Ok(_) => return self.exit("the coordinator's configuration does not belong to its run", actions),
            Err(error) => return self.exit(&format!("the coordinator's configuration is not valid: {error}"), actions),
        };
        if self.run.is_none() {
            let structure = self.settings.structure.clone().unwrap_or_else(|| config.structure());
            self.run = Some(Run { id: welcome.run, config, structure });
        }
        self.session.welcomed = true;
        self.session.failures = 0;
        if self.session.leaving {
            actions.push(Action::Tell(ToCoordinator::Leaving));
        }
        actions.push(Action::Peers(welcome.peers));
        let same_timeline = welcome.placement.timeline == self.timeline();
        self.placed(welcome.placement, actions);
        if same_timeline {
            self.keep_only_sums(&welcome.live_sums);
        }
        for commit in welcome.commits {
            self.committed(commit, actions);
        }
        if let Some(step) = welcome.retired {
            self.retired(skein_protocol::id::Fence { timeline: self.timeline(), step });
        }
        self.report_again();
        self.report_reductions_again(actions);
        self.ready_if_caught_up(actions);
    }

    fn exit(&mut self, reason: &str, actions: &mut Vec<Action>) {
        actions.push(Action::Exit { ok: false, reason: reason.to_owned() });
    }

    /// A new placement: a new timeline voids everything older.
    fn placed(&mut self, placement: Placement, actions: &mut Vec<Action>) {
        if placement.timeline < self.placement.timeline || (placement.timeline == self.placement.timeline && placement.epoch < self.placement.epoch) {
            return;
        }
        if placement.timeline > self.placement.timeline && self.placement.timeline.0 > 0 {
            self.forget_everything();
        }
        self.placement = placement;
        let seat = self.placement.seat(self.settings.id).cloned();
        match seat {
            None if self.session.leaving && self.session.welcomed => {
                actions.push(Action::Exit { ok: true, reason: "left the run".to_owned() });
                return;
            }
            None => {
                if self.catchup.span().is_some() {
                    self.forget_everything();
                }
            }
            Some(seat) => match seat.standing {
                Standing::Joining { from } => self.acquire(seat.span, from, actions),
                Standing::Active if self.catchup.span() == Some(seat.span) => {}
                // The coordinator thinks that this node has state which it has not.
                Standing::Active => return self.start_over(actions),
            },
        }
        self.serve_joiners();
        self.feed_replaced(actions);
    }

    /// Drops state and work of the timeline that is over.
    pub(crate) fn forget_everything(&mut self) {
        self.feed.clear();
        self.host.clear();
        self.reduce.clear();
        self.steps.clear();
        self.catchup.forget_state();
        self.queue.push(Task::Reset);
    }

    /// Comes back as a newcomer: what this node holds is of no use.
    pub(crate) fn start_over(&mut self, actions: &mut Vec<Action>) {
        self.forget_everything();
        self.placement = Placement::default();
        (self.session.connected, self.session.welcomed) = (false, false);
        self.session.heartbeat_at = None;
        actions.push(Action::Report(Report::Trouble("this node's state is of no use: joining anew".to_owned())));
        actions.push(Action::Connect);
    }

    /// Whether a commit extends the chain that this node knows, and is the coordinator's (rule 16).
    pub(crate) fn accept_commit(&mut self, commit: &Commit) -> Result<bool, String> {
        let known = self.session.commits.back().map(|newest| (newest.fence.timeline, newest.fence.step));
        if known.is_some_and(|known| (commit.fence.timeline, commit.fence.step) <= known) {
            return Ok(false);
        }
        if !self.settings.signer.verify(self.settings.coordinator, &commit.hash().0, &commit.signature) {
            return Err(format!("the commit of step {} does not bear the coordinator's signature", commit.fence.step));
        }
        // A node that was away longer than commits are kept has a gap and is caught up by a
        // snapshot, not by the chain.
        let adjacent = known.is_some_and(|(timeline, step)| timeline == commit.fence.timeline && step.next() == commit.fence.step);
        if adjacent && self.session.head() != Some(commit.previous) {
            return Err(format!("the commit of step {} does not extend the chain this node knows", commit.fence.step));
        }
        self.session.commits.push_back(commit.clone());
        while self.session.commits.len() > COMMITS_KEPT {
            self.session.commits.pop_front();
        }
        Ok(true)
    }

    /// The newest step that this node knows to be committed on its timeline.
    pub(crate) fn newest_commit(&self) -> Option<Step> {
        self.session.commits.iter().rev().find(|commit| commit.fence.timeline == self.timeline()).map(|commit| commit.fence.step)
    }
}
