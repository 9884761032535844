//! The node as a state machine: events in, actions out, no I/O.
//!
//! This file has what goes in and out, and who hears of it. Each concern has a file of its own:
//! [`crate::session`] (the coordinator), [`crate::feed`] and [`crate::route`] (leases and routes),
//! [`crate::host`] (computing and counting), [`crate::reduce`] (averaging), [`crate::steps`]
//! (commits, versions), [`crate::catchup`] (getting and giving state).

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use skein_protocol::config::RunConfig;
use skein_protocol::id::{Fence, Group, Hash, NodeId, RunId, Span, Step, Timeline, Version};
use skein_protocol::limits;
use skein_protocol::message::control::{Capability, FromCoordinator, Peer, Shard, ToCoordinator};
use skein_protocol::message::data::{Frame, PeerMessage};
use skein_protocol::model::Structure;
use skein_protocol::placement::Placement;
use skein_protocol::sign::Signer;
use skein_protocol::time::Time;

use crate::catchup::Catchup;
use crate::engine::{About, EngineError, Outcome, Snapshot, Task, WorkKey};
use crate::feed::Feed;
use crate::host::Host;
use crate::reduce::Reduce;
use crate::session::Session;
use crate::steps::Steps;

#[cfg(test)]
mod tests;

/// What happens to a node.
#[derive(Clone, Debug)]
pub enum Event {
    /// The control connection stands; the machine says hello.
    ControlUp,
    /// The control connection is gone, or could not be made.
    ControlDown {
        /// Why, for the user.
        reason: String,
    },
    /// The coordinator says something. The shell holds back a `Welcome` until the run's data is here.
    Control(FromCoordinator),
    /// A node says something. The shell has authenticated it and checked the frame's form.
    Peer {
        /// Who.
        from: NodeId,
        /// What.
        frame: Frame,
    },
    /// The link to a node is gone, or a frame to it could not be delivered.
    LinkDown(NodeId),
    /// The engine has done the oldest task it had not answered yet.
    Computed(Outcome),
    /// A shard is durable, or could not be saved.
    ShardSaved {
        /// The group.
        group: Group,
        /// The version.
        version: Version,
        /// What was saved, or why not.
        result: Result<Shard, String>,
    },
    /// A shard was read and verified, or could not be.
    ShardLoaded {
        /// The group.
        group: Group,
        /// The version.
        version: Version,
        /// The state, or why not.
        result: Result<Snapshot, String>,
    },
    /// The user wants to leave gracefully.
    Leave,
    /// Time has come for whatever [`Node::next_timeout`](crate::machine) named.
    Timer,
}

/// What a node wants done, in this order.
#[derive(Clone, Debug)]
pub enum Action {
    /// Dial the coordinator; ends in [`Event::ControlUp`] or [`Event::ControlDown`].
    Connect,
    /// Tell the coordinator.
    Tell(ToCoordinator),
    /// Tell a node; delivery is not certain, failure to deliver ends in [`Event::LinkDown`].
    Send {
        /// Whom.
        to: NodeId,
        /// What.
        frame: Frame,
    },
    /// These are the nodes to accept links from and where to find them.
    Peers(Vec<Peer>),
    /// Run a task; the engine answers in order.
    Compute(Task),
    /// Make a snapshot durable as a checkpoint shard.
    SaveShard {
        /// The timeline it belongs to.
        timeline: Timeline,
        /// The state.
        snapshot: Snapshot,
    },
    /// Read a checkpoint shard.
    LoadShard {
        /// The group.
        group: Group,
        /// The version.
        version: Version,
    },
    /// Delete checkpoint shards of versions below this.
    PruneShards {
        /// The oldest version to keep.
        keep_from: Version,
    },
    /// Something a person should see.
    Report(Report),
    /// The node's part is over: stop, with this line for the user.
    Exit {
        /// Whether this is how it should end.
        ok: bool,
        /// Why.
        reason: String,
    },
}

/// What a node tells its user.
#[derive(Clone, Debug, PartialEq)]
pub enum Report {
    /// Where the node stands, in words.
    State(String),
    /// A step is committed.
    Committed {
        /// The step.
        step: u64,
        /// Mean loss in nats a token.
        loss: f32,
    },
    /// Something is wrong, and what the node does about it.
    Trouble(String),
}

/// What a node is started with.
pub struct NodeSettings {
    /// Its name.
    pub id: NodeId,
    /// The coordinator's name: the only one it obeys.
    pub coordinator: NodeId,
    /// Checks the coordinator's signatures.
    pub signer: Arc<dyn Signer>,
    /// What it offers.
    pub capability: Capability,
    /// Where its data plane listens.
    pub data_addresses: Vec<String>,
    /// The manifest of the data it serves.
    pub data: Option<Hash>,
    /// The run that its state folder belongs to.
    pub run: Option<RunId>,
    /// Checkpoint shards on its disk.
    pub shards: Vec<Shard>,
    /// Drawn at start: makes sums of different lives different.
    pub boot: u64,
    /// The model's structure where it is not the configuration's (the toy model).
    pub structure: Option<Structure>,
}

/// How much a node keeps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Kept {
    /// Hops of microbatches with what came and went.
    pub works: usize,
    /// Sums.
    pub sums: usize,
    /// Frames for a version that is not here yet.
    pub early_frames: usize,
    /// Reductions.
    pub reductions: usize,
    /// Chunks that came before their seal.
    pub early_chunks: usize,
    /// Tasks at the engine.
    pub tasks: usize,
}

/// What follows from the run's configuration.
pub(crate) struct Run {
    pub(crate) id: RunId,
    pub(crate) config: RunConfig,
    pub(crate) structure: Structure,
}

/// A node.
pub struct Node {
    pub(crate) settings: NodeSettings,
    pub(crate) now: Time,
    pub(crate) run: Option<Run>,
    pub(crate) session: Session,
    pub(crate) placement: Placement,
    pub(crate) feed: Feed,
    pub(crate) host: Host,
    pub(crate) reduce: Reduce,
    pub(crate) steps: Steps,
    pub(crate) catchup: Catchup,
    pub(crate) queue: TaskQueue,
    /// Frames to itself: a feeder that is its own first host.
    local: VecDeque<Frame>,
}

impl Node {
    /// A node that has not dialled yet; its first event makes it.
    pub fn new(settings: NodeSettings) -> Self {
        Self {
            host: Host::new(settings.boot),
            catchup: Catchup::new(settings.shards.clone()),
            settings,
            now: Time::default(),
            run: None,
            session: Session::default(),
            placement: Placement::default(),
            feed: Feed::default(),
            reduce: Reduce::default(),
            steps: Steps::default(),
            queue: TaskQueue::default(),
            local: VecDeque::new(),
        }
    }

    /// Takes one event in; what is to be done comes out.
    pub fn handle(&mut self, now: Time, event: Event, actions: &mut Vec<Action>) {
        self.now = self.now.max(now);
        match event {
            Event::ControlUp => self.control_up(actions),
            Event::ControlDown { reason } => self.control_down(reason, actions),
            Event::Control(message) => self.control(message, actions),
            Event::Peer { from, frame } => self.peer(from, frame, actions),
            Event::LinkDown(node) => self.link_down(node, actions),
            Event::Computed(outcome) => self.computed(outcome, actions),
            Event::ShardSaved { group, version, result } => self.shard_saved(group, version, result, actions),
            Event::ShardLoaded { group, version, result } => self.shard_loaded(group, version, result, actions),
            Event::Leave => self.leave(actions),
            Event::Timer => {}
        }
        self.timers(actions);
        while let Some(frame) = self.local.pop_front() {
            self.peer(self.settings.id, frame, actions);
        }
        self.flush_done(actions);
        self.queue.issue(self.now, actions);
    }

    /// When to call with [`Event::Timer`] if nothing else happens.
    pub fn next_timeout(&self) -> Option<Time> {
        [self.session.next_timeout(), self.catchup.next_timeout(), self.reduce.next_timeout(), self.feed.next_timeout(), self.host.next_timeout()]
            .into_iter()
            .flatten()
            .min()
    }

    /// The version that the next step of this node's groups runs on, once it has their state.
    pub fn version(&self) -> Option<Version> {
        self.steps.version
    }

    /// The span that this node hosts, once it has its state.
    pub fn span(&self) -> Option<Span> {
        self.steps.version.and(self.catchup.span())
    }

    /// How much this machine keeps, for whoever watches bounds.
    pub fn kept(&self) -> Kept {
        let (works, sums, early_frames) = self.host.kept();
        let (reductions, early_chunks) = self.reduce.kept();
        Kept { works, sums, early_frames, reductions, early_chunks, tasks: self.queue.at_engine.len() }
    }

    /// Sends a frame, to itself without a detour.
    pub(crate) fn send(&mut self, to: NodeId, frame: Frame, actions: &mut Vec<Action>) {
        if to == self.settings.id {
            self.local.push_back(frame);
        } else {
            actions.push(Action::Send { to, frame });
        }
    }

    pub(crate) fn timeline(&self) -> Timeline {
        self.placement.timeline
    }

    pub(crate) fn is_current(&self, fence: Fence) -> bool {
        self.run.is_some() && fence.timeline == self.timeline()
    }

    fn timers(&mut self, actions: &mut Vec<Action>) {
        self.session_timers(actions);
        self.catchup_timers(actions);
        self.reduce_timers(actions);
        self.feed_timers(actions);
        self.host_timers(actions);
    }

    pub(crate) fn peer(&mut self, from: NodeId, frame: Frame, actions: &mut Vec<Action>) {
        let Frame { message, payload } = frame;
        match message {
            PeerMessage::Forward { work, mask, route, hop } => self.forward(from, work, mask, route, hop, payload, actions),
            PeerMessage::Backward { work, hop } => self.backward(from, work, hop, payload, actions),
            PeerMessage::Missing { work, hop, backward } => self.missing(from, work, hop, backward, actions),
            PeerMessage::Finished { work } => self.flight_finished(from, work),
            PeerMessage::HopFailed { work, hop, refused: _ } => self.hop_failed(work, hop, actions),
            PeerMessage::Contribution { fence, group, attempt, chunk } => self.contribution(from, fence, group, attempt, chunk, payload),
            PeerMessage::ReducedChunk { fence, group, attempt, chunk } => self.reduced_chunk(from, fence, group, attempt, chunk, payload),
            PeerMessage::FetchReduced { fence, group, attempt } => self.serve_reduced(from, fence, group, attempt, actions),
            PeerMessage::FetchSnapshot { timeline, group, version } => self.serve_manifest(from, timeline, group, version, actions),
            PeerMessage::SnapshotManifest { group, version, byte_len, chunks } => self.manifest_came(from, group, version, byte_len, chunks, actions),
            PeerMessage::FetchStateChunk { group, version, chunk } => self.serve_chunk(from, group, version, chunk, actions),
            PeerMessage::StateChunk { group, version, chunk } => self.chunk_came(from, group, version, chunk, payload, actions),
            PeerMessage::Unavailable { group, version } => self.unavailable(from, group, version, actions),
            // Data files are fetched and served by the shell before the machine hears of anything.
            PeerMessage::FetchBlob { .. } | PeerMessage::Blob { .. } | PeerMessage::NoBlob { .. } => {}
        }
    }

    fn link_down(&mut self, node: NodeId, actions: &mut Vec<Action>) {
        if self.session.welcomed {
            actions.push(Action::Tell(ToCoordinator::Unreachable(node)));
        }
        self.host_link_down(node, actions);
        self.feed_avoid(node, actions);
        self.reduce.link_down(node, self.now);
        self.catchup.link_down(node);
    }

    fn computed(&mut self, outcome: Outcome, actions: &mut Vec<Action>) {
        if !self.queue.answered(self.now) {
            return;
        }
        match outcome {
            Outcome::Finished => {}
            Outcome::Forwarded { key, output, loss } => self.forwarded(key, output, loss, actions),
            Outcome::InputGradient { key, gradient } => self.input_gradient_made(key, gradient, actions),
            Outcome::Backwarded { key, gradient, uses } => self.backwarded(key, gradient, &uses, actions),
            Outcome::Added { clamped: 0, .. } => {}
            Outcome::Added { key, clamped } => {
                let line = format!("{clamped} values of the gradient of microbatch {} were clamped to reduce.exact_limit", key.microbatch);
                actions.push(Action::Report(Report::Trouble(line)));
            }
            Outcome::Encoded { key, chunk, payload } => self.encoded(key, chunk, payload, actions),
            Outcome::Reduced { key, chunk, payload, hash, squared_norm } => self.chunk_reduced(key, chunk, payload, hash, squared_norm, actions),
            Outcome::Stored { key, chunk, hash } => self.chunk_stored(key, chunk, hash, actions),
            Outcome::Applied { step } => self.applied(step, actions),
            Outcome::SnapshotTaken(snapshot) => self.snapshot_taken(snapshot, actions),
            Outcome::Failed { error, about } => self.failed(&error, about, actions),
        }
    }

    fn failed(&mut self, error: &EngineError, about: About, actions: &mut Vec<Action>) {
        actions.push(Action::Report(Report::Trouble(error.to_string())));
        if matches!(error, EngineError::OutOfMemory(_)) {
            return self.offer_less(actions);
        }
        match about {
            About::Work(key) => {
                if matches!(error, EngineError::NotFinite(_) | EngineError::Norm { .. }) && self.session.welcomed {
                    let fence = Fence { timeline: self.timeline(), step: key.step };
                    actions.push(Action::Tell(ToCoordinator::NotFinite { fence, microbatch: key.microbatch }));
                }
                self.work_failed(key, actions);
            }
            About::Reduction(key, chunk) => self.reduction_failed(key, chunk, actions),
            // Without its weights a node is no replica: it comes back as a newcomer.
            About::State(_) | About::Step(_) => self.start_over(actions),
            About::Other => {}
        }
    }

    /// This node's span does not fit its device: it comes back as a newcomer that offers a quarter
    /// less memory, and so gets a smaller span or none.
    fn offer_less(&mut self, actions: &mut Vec<Action>) {
        let memory = self.settings.capability.memory / 4 * 3;
        self.settings.capability.memory = memory;
        actions.push(Action::Report(Report::Trouble(format!("this node offers {} MiB of memory from now on", memory >> 20))));
        self.start_over(actions);
    }
}

/// Tasks for the engine, most urgent first. The engine gets few at a time, so that a gradient
/// that comes in does not wait behind every activation that came before.
#[derive(Default)]
pub(crate) struct TaskQueue {
    /// State, sums, reductions: in order among themselves, before all computing.
    urgent: VecDeque<Task>,
    backward: VecDeque<Task>,
    forward: VecDeque<Task>,
    /// Tasks that the engine has and has not answered, in order.
    at_engine: VecDeque<AtEngine>,
    /// Since when the oldest of them is the engine's turn.
    turn_since: Time,
    /// How long a computation usually takes: rises at once, forgets slowly. None before the first.
    usual: Option<Duration>,
}

/// A computation is stuck after so many times the usual duration of one, within these bounds (rule
/// 19: progress keeps a lease). The first may have to wait for a device to wake up.
const STUCK_FACTOR: u32 = 3;
const STUCK_MIN: Duration = Duration::from_secs(1);
const STUCK_MAX: Duration = Duration::from_secs(10);
const STUCK_UNKNOWN: Duration = Duration::from_secs(60);

/// A task that the engine has.
struct AtEngine {
    /// The work that it computes, if any.
    computes: Option<WorkKey>,
    /// Whether everything was reset since.
    forgotten: bool,
}

impl TaskQueue {
    pub(crate) fn push(&mut self, task: Task) {
        match task {
            Task::Forward { .. } => self.forward.push_back(task),
            Task::InputGradient { .. } | Task::Backward { .. } => self.backward.push_back(task),
            Task::Reset => {
                self.forward.clear();
                self.backward.clear();
                self.urgent.clear();
                self.at_engine.iter_mut().for_each(|task| task.forgotten = true);
                self.urgent.push_back(task);
            }
            Task::Draw { .. }
            | Task::Install { .. }
            | Task::Forget { .. }
            | Task::Add { .. }
            | Task::Discard { .. }
            | Task::DropSums { .. }
            | Task::EncodeChunk { .. }
            | Task::ReduceChunk { .. }
            | Task::StoreChunk { .. }
            | Task::DropReduction { .. }
            | Task::Apply { .. }
            | Task::Retire { .. }
            | Task::TakeSnapshot { .. } => self.urgent.push_back(task),
        }
    }

    /// Queues a backward that needs the forward of the same work to come first. At the head both
    /// are queued at once; they go to the engine as a pair, so no other graph is kept meanwhile.
    pub(crate) fn push_behind_forward(&mut self, key: WorkKey, tasks: impl IntoIterator<Item = Task>) {
        let behind = self.forward.iter().position(|queued| matches!(queued, Task::Forward { key: of, .. } if *of == key));
        match behind {
            Some(index) => (index + 1..).zip(tasks).for_each(|(index, task)| self.forward.insert(index, task)),
            None => self.backward.extend(tasks),
        }
    }

    /// Notes that the oldest task at the engine is answered; false if the answer is to be ignored,
    /// since everything was reset meanwhile and the same names may mean something else.
    fn answered(&mut self, now: Time) -> bool {
        let Some(task) = self.at_engine.pop_front() else { return false };
        let took = now.since(self.turn_since);
        self.turn_since = now;
        if task.computes.is_some() {
            self.usual = Some(self.usual.map_or(took, |usual| took.max(usual * 15 / 16)));
        }
        !task.forgotten
    }

    /// Whether the engine has had its oldest task for far longer than tasks take: a device that
    /// hangs. Its node must not look alive.
    pub(crate) fn is_stuck(&self, now: Time) -> bool {
        let patience = self.usual.map_or(STUCK_UNKNOWN, |usual| (usual * STUCK_FACTOR).clamp(STUCK_MIN, STUCK_MAX));
        !self.at_engine.is_empty() && now.since(self.turn_since) > patience
    }

    /// Forgets what is queued to be computed of a work.
    pub(crate) fn drop_work(&mut self, key: WorkKey) {
        self.forward.retain(|task| task.computes() != Some(key));
        self.backward.retain(|task| task.computes() != Some(key));
    }

    /// Forgets what is queued to be computed of steps up to `step`.
    pub(crate) fn drop_step(&mut self, step: Step) {
        let later = |task: &Task| task.computes().is_none_or(|key| key.step > step);
        self.forward.retain(later);
        self.backward.retain(later);
    }

    /// Whether the engine still computes something of a work.
    pub(crate) fn is_at_engine(&self, key: WorkKey) -> bool {
        self.at_engine.iter().any(|task| task.computes == Some(key))
    }

    fn issue(&mut self, now: Time, actions: &mut Vec<Action>) {
        if self.at_engine.is_empty() {
            self.turn_since = now;
        }
        while self.at_engine.len() < limits::ENGINE_QUEUE {
            let next = self.urgent.pop_front().or_else(|| self.backward.pop_front()).or_else(|| self.forward.pop_front());
            let Some(task) = next else { return };
            self.at_engine.push_back(AtEngine { computes: task.computes(), forgotten: false });
            actions.push(Action::Compute(task));
        }
    }
}
