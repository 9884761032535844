//! The coordinator as a state machine: events in, actions out, no I/O.
//!
//! This file has its state, what goes in and out, and the clock. Each concern has a file of its
//! own: [`crate::membership`] (who is here), [`crate::timeline`] (placements, beginning and
//! recovering), [`crate::leases`] (who routes what), [`crate::steps`] (count, seal, commit,
//! retire), [`crate::checkpoints`], [`crate::view`] (what people see).

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use skein_protocol::config::RunConfig;
use skein_protocol::id::{Epoch, Fence, Group, NodeId, RunId, Step, Timeline, Version};
use skein_protocol::limits;
use skein_protocol::message::control::{FromCoordinator, Shard, ToCoordinator};
use skein_protocol::model::Structure;
use skein_protocol::placement::Placement;
use skein_protocol::sign::Signer;
use skein_protocol::time::Time;

use crate::chain::Chain;
use crate::leases::Leases;
use crate::membership::Member;
use crate::record::Record;
use crate::steps::{Closing, OpenStep};
use crate::view::History;

/// How often silence is looked at.
const TICK: Duration = Duration::from_millis(100);

/// What happens to the coordinator.
#[derive(Clone, Debug)]
pub enum Event {
    /// A node's control connection stands. It will say hello.
    Connected(NodeId),
    /// A node says something.
    Received {
        /// Who.
        from: NodeId,
        /// What.
        message: ToCoordinator,
    },
    /// A node's control connection is gone.
    Disconnected(NodeId),
    /// The user wants the run to stop: save a checkpoint, then [`Action::Stopped`].
    Stop,
    /// Time has come for whatever `Coordinator::next_timeout` named.
    Timer,
}

/// What the coordinator wants done, in this order: a `Save` is durable before anything after it
/// happens.
#[derive(Clone, Debug)]
pub enum Action {
    /// Append these records, durably.
    Save(Vec<Record>),
    /// Tell a node.
    Send {
        /// Whom.
        to: NodeId,
        /// What.
        message: FromCoordinator,
    },
    /// End a node's connection, after what was sent before.
    Disconnect(NodeId),
    /// Something a person should see.
    Report(String),
    /// After [`Event::Stop`]: everything worth saving is saved.
    Stopped,
}

/// Where the run stands.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Phase {
    /// Not enough nodes, or none that fits, to begin (again).
    Waiting {
        /// For the user.
        why: String,
    },
    /// After a restart: members of the log are awaited.
    Recovering {
        /// Who has not come back yet.
        awaited: BTreeSet<NodeId>,
        /// When those still missing are given up.
        until: Time,
    },
    /// Steps are done, or would be if every block had a host.
    Training,
    /// The run has diverged: nothing is done until a person has looked.
    Paused {
        /// For the user.
        why: String,
    },
    /// The user asked to stop; the checkpoint of this version is awaited.
    Stopping {
        /// The version.
        version: Version,
    },
    /// All steps are committed.
    Finished,
}

/// The coordinator.
pub struct Coordinator {
    pub(crate) config: RunConfig,
    pub(crate) structure: Structure,
    pub(crate) run: RunId,
    pub(crate) id: NodeId,
    pub(crate) signer: Arc<dyn Signer>,
    pub(crate) now: Time,
    pub(crate) phase: Phase,
    pub(crate) members: BTreeMap<NodeId, Member>,
    /// Whose connection stands and has brought no hello yet.
    pub(crate) strangers: BTreeSet<NodeId>,
    pub(crate) placement: Placement,
    pub(crate) chain: Chain,
    /// The step that runs, while one does.
    pub(crate) open: Option<OpenStep>,
    /// The committed step whose leftovers are not retired yet.
    pub(crate) closing: Option<Closing>,
    pub(crate) leases: Leases,
    /// Shards known to be durable, by version, group and holder.
    pub(crate) shards: BTreeMap<Version, BTreeMap<Group, BTreeMap<NodeId, Shard>>>,
    /// The timelines so far and the versions they began from.
    pub(crate) bases: Vec<(Timeline, Version)>,
    /// Complete checkpoints, ascending.
    pub(crate) complete: Vec<Version>,
    /// When a checkpoint was asked for last.
    pub(crate) asked_checkpoint: Time,
    /// Distinguishes reduction attempts of different lives of the coordinator.
    pub(crate) attempts: u32,
    pub(crate) history: History,
    started: bool,
    next_tick: Time,
}

impl Coordinator {
    /// A coordinator that goes on where `log` ends. `boot` counts its starts.
    pub fn new(config: RunConfig, structure: Structure, id: NodeId, signer: Arc<dyn Signer>, boot: u64, log: Vec<Record>) -> Self {
        let mut coordinator = Self {
            run: config.run_id(id),
            leases: Leases::new(),
            config,
            structure,
            id,
            signer,
            now: Time::default(),
            phase: Phase::Waiting { why: "no node has joined yet".to_owned() },
            members: BTreeMap::new(),
            strangers: BTreeSet::new(),
            // Nodes know epochs of earlier lives: those of this one are higher.
            placement: Placement { epoch: Epoch(boot << 32), ..Placement::default() },
            chain: Chain::default(),
            open: None,
            closing: None,
            shards: BTreeMap::new(),
            bases: Vec::new(),
            complete: Vec::new(),
            asked_checkpoint: Time::default(),
            // A coordinator makes far fewer than a million attempts a life.
            attempts: u32::try_from(boot % 4096).expect("below 4096") << 20,
            history: History::default(),
            started: false,
            next_tick: Time::default(),
        };
        for record in log {
            coordinator.replay(record);
        }
        coordinator
    }

    /// Takes one event in; what is to be done comes out.
    pub fn handle(&mut self, now: Time, event: Event, actions: &mut Vec<Action>) {
        self.now = self.now.max(now);
        if !self.started {
            self.started = true;
            self.recover_from_log(actions);
        }
        match event {
            Event::Connected(node) => self.connected(node),
            Event::Received { from, message } => self.received(from, message, actions),
            Event::Disconnected(node) => self.disconnected(node, actions),
            Event::Stop => self.stop(actions),
            Event::Timer => {}
        }
        if self.now >= self.next_tick {
            self.next_tick = self.now + TICK;
            self.tick(actions);
        }
        self.progress(actions);
    }

    /// When to call with [`Event::Timer`] if nothing else happens.
    pub fn next_timeout(&self) -> Option<Time> {
        Some(self.next_tick)
    }

    /// The run that this coordinates.
    pub fn run(&self) -> RunId {
        self.run
    }

    /// The number of committed steps: the version that the open step runs on.
    pub fn committed(&self) -> Version {
        self.chain.version()
    }

    /// Whether all steps are committed.
    pub fn is_finished(&self) -> bool {
        self.phase == Phase::Finished
    }

    pub(crate) fn timeline(&self) -> Timeline {
        self.placement.timeline
    }

    pub(crate) fn fence(&self) -> Fence {
        Fence { timeline: self.timeline(), step: self.chain.version().step() }
    }

    fn received(&mut self, from: NodeId, message: ToCoordinator, actions: &mut Vec<Action>) {
        if let ToCoordinator::Hello(hello) = message {
            return self.hello(from, *hello, actions);
        }
        if !self.heard(from, actions) {
            return;
        }
        match message {
            ToCoordinator::Hello(_) | ToCoordinator::Heartbeat => {}
            ToCoordinator::Done { fence, entries } => self.done(from, fence, &entries, actions),
            ToCoordinator::Lost { fence, sums } => self.lost_sums(from, fence, &sums),
            ToCoordinator::Reduced { fence, group, attempt, digest, squared_norms } => {
                self.reduced(from, fence, group, attempt, digest, &squared_norms, actions)
            }
            ToCoordinator::Applied { fence, roots: _ } => self.applied(from, fence, actions),
            ToCoordinator::Ready { timeline, span, version } => self.ready(from, timeline, span, version, actions),
            ToCoordinator::Unreachable(node) => self.unreachable(from, node, actions),
            ToCoordinator::Leaving => self.leaving(from, actions),
            ToCoordinator::Saved { timeline, shards } => self.saved(from, timeline, shards, actions),
            ToCoordinator::Traffic { links, sent_per_second, received_per_second: _ } => self.traffic(from, links, sent_per_second),
            ToCoordinator::Lacks { fence, group } => self.lacks(from, fence, group, actions),
            ToCoordinator::Returned { fence, leases } => self.returned(from, fence, &leases),
            ToCoordinator::NotFinite { fence, microbatch } => self.not_finite(from, fence, microbatch, actions),
        }
    }

    /// Everything that may have become possible through an event.
    fn progress(&mut self, actions: &mut Vec<Action>) {
        self.begin_if_possible(actions);
        self.seal_complete_groups(actions);
        self.commit_if_possible(actions);
        self.retire_if_possible(actions);
        self.open_step_if_possible();
        self.grant_leases(actions);
    }

    pub(crate) fn broadcast(&self, message: &FromCoordinator, actions: &mut Vec<Action>) {
        for (node, member) in &self.members {
            if member.connected {
                actions.push(Action::Send { to: *node, message: message.clone() });
            }
        }
    }

    pub(crate) fn report(&mut self, line: impl Into<String>, actions: &mut Vec<Action>) {
        let line = line.into();
        self.history.event(self.now, line.clone());
        actions.push(Action::Report(line));
    }

    fn replay(&mut self, record: Record) {
        match record {
            Record::Run { config: _ } => {}
            Record::Member { node, capability } => {
                self.members.insert(node, Member::from_log(capability));
            }
            Record::Gone { node } => {
                self.members.remove(&node);
            }
            Record::Timeline { timeline, base } => {
                self.placement.timeline = timeline;
                self.placement.base = base;
                self.bases.push((timeline, base));
                self.chain.rewind(base);
                self.complete.retain(|version| *version <= base);
                self.shards.retain(|version, _| *version <= base);
            }
            // A seal only matters to the attempt it began; attempts of another life never match.
            Record::Seal(_) => {}
            Record::Commit(commit) => self.chain.push(commit),
            Record::Saved { node, shards } => self.note_shards(node, &shards),
            Record::Checkpoint { version } => self.complete.push(version),
        }
    }
}

/// A bound on commits kept in memory: what a node that was away may ask for.
pub(crate) const COMMITS_KEPT: usize = 64;

/// The steps of a queue that is kept short.
pub(crate) fn push_bounded<T>(queue: &mut VecDeque<T>, item: T, bound: usize) {
    queue.push_back(item);
    while queue.len() > bound {
        queue.pop_front();
    }
}

/// How many members must hold or have applied something before it is safe (rules 13 and 15).
pub(crate) fn quorum(live: usize) -> usize {
    live.clamp(1, 2)
}

/// The step after which nothing more is done.
pub(crate) fn is_last(config: &RunConfig, step: Step) -> bool {
    step.0 >= config.run.steps
}

/// A hello carries at most as many sums and shards as this.
pub(crate) const HELLO_ITEMS_MAX: usize = limits::SET_MEMBERS_MAX;

#[cfg(test)]
mod tests {
    use super::*;

    /// Rule 13: what only one holds is not safe, unless there is only one.
    #[test]
    fn two_hold_what_is_safe_or_the_only_one() {
        assert_eq!([0, 1, 2, 3, 16].map(quorum), [1, 1, 2, 2, 2]);
    }
}
