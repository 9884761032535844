//! What the machine asks to be computed, and what comes of it.
//!
//! An engine runs one [`Task`] at a time, in order, and answers each with one [`Outcome`]. It
//! owns all tensors; only encoded bytes cross. The same [`core::Core`] (flat buffers, sums,
//! reduction, optimizer, snapshots) stands under every engine; a [`core::Compute`] adds forward
//! and backward: the toy model in plain Rust, or libtorch.

pub mod core;
#[cfg(feature = "torch")]
pub mod torch;
pub mod toy;

use bytes::Bytes;
use skein_protocol::codec::Codec;
use skein_protocol::id::{Chunk, Group, Hash, Microbatch, ReduceAttempt, Span, Step, SumId, Use, Version};
use skein_protocol::message::control::Scalars;
use skein_protocol::set::BitSet;
use skein_protocol::tensor::Payload;

/// Names one host's work on one microbatch: where its graph and its scratch gradient live.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct WorkKey {
    /// The step.
    pub step: Step,
    /// The microbatch.
    pub microbatch: Microbatch,
    /// The blocks computed.
    pub span: Span,
}

/// Names one reduction: nothing crosses attempts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ReductionKey {
    /// The step.
    pub step: Step,
    /// The group.
    pub group: Group,
    /// The attempt.
    pub attempt: ReduceAttempt,
}

/// Immutable state of one group at one version: weights, then each of the optimizer's vectors, as
/// f32 little endian in the group's layout.
#[derive(Clone, PartialEq, Eq)]
pub struct Snapshot {
    /// The group.
    pub group: Group,
    /// The version.
    pub version: Version,
    /// The bytes.
    pub bytes: Bytes,
    /// BLAKE3 of each chunk of [`skein_protocol::limits::STATE_CHUNK_BYTES`].
    pub chunks: Vec<Hash>,
}

impl std::fmt::Debug for Snapshot {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Snapshot(group {} at version {}, {:?})", self.group, self.version, self.root())
    }
}

impl Snapshot {
    /// Describes `bytes` as a snapshot, hashing its chunks.
    pub fn new(group: Group, version: Version, bytes: Bytes) -> Self {
        let chunks = bytes.chunks(skein_protocol::limits::STATE_CHUNK_BYTES).map(Hash::of).collect();
        Self { group, version, bytes, chunks }
    }

    /// Root of the chunks' hashes.
    pub fn root(&self) -> Hash {
        Hash::root(&self.chunks)
    }
}

/// One unit of work for an engine.
#[derive(Clone, Debug)]
pub enum Task {
    /// Forget everything: sums, graphs, results, weights.
    Reset,
    /// Draw version 0 of these groups from the run's seed.
    Draw {
        /// The groups.
        groups: Vec<Group>,
    },
    /// Take over a group's state, weights and optimizer state, at the snapshot's version.
    Install {
        /// The state.
        snapshot: Snapshot,
    },
    /// Forget groups that are not hosted any more.
    Forget {
        /// The groups.
        groups: Vec<Group>,
    },
    /// Compute a span forward on version `key.step.runs_on()` and keep what its backward needs.
    Forward {
        /// The work.
        key: WorkKey,
        /// The boundary tensor before the span; none if the span begins with the embedding.
        input: Option<Payload>,
        /// How to encode the boundary after the span; it is not made if the span ends with the head.
        encode: Codec,
        /// Whether to keep the graph; else backward recomputes from the input.
        keep_graph: bool,
    },
    /// Compute only the gradient of a span's input, ahead of the [`Task::Backward`] that follows: it
    /// costs half of that and lets the host before go on. Needs a span that does not begin with the
    /// embedding.
    InputGradient {
        /// The work.
        key: WorkKey,
        /// The boundary tensor before the span, for recomputation where no graph was kept.
        input: Option<Payload>,
        /// Gradient of the boundary after the span; none if the span ends with the head.
        gradient: Option<Payload>,
        /// How to encode the gradient of the boundary before the span.
        encode: Codec,
    },
    /// Compute a span backward. The gradient of each use waits in scratch under `key`.
    Backward {
        /// The work.
        key: WorkKey,
        /// The boundary tensor before the span, for recomputation where no graph was kept.
        input: Option<Payload>,
        /// Gradient of the boundary after the span; none if the span ends with the head.
        gradient: Option<Payload>,
        /// How to encode the gradient of the boundary before the span; none if it is not wanted or the span begins with the embedding.
        encode: Option<Codec>,
    },
    /// Add the scratch gradients of some uses to sums, which are made where they do not exist. What
    /// was added leaves the scratch; the rest stays until it is added or discarded.
    Add {
        /// The work.
        key: WorkKey,
        /// Uses and their sums.
        sums: Vec<(Use, SumId)>,
    },
    /// Drop the graph and scratch of a work.
    Discard {
        /// The work.
        key: WorkKey,
    },
    /// Drop sums.
    DropSums {
        /// The sums.
        sums: Vec<SumId>,
    },
    /// Encode one chunk of the total of these sums, for its owner.
    EncodeChunk {
        /// The reduction.
        key: ReductionKey,
        /// The chunk.
        chunk: Chunk,
        /// This node's sums in the cover, in order.
        sums: Vec<SumId>,
        /// How.
        codec: Codec,
    },
    /// Add one chunk up, in the order given, encode it for everyone, and store what the encoding decodes to.
    ReduceChunk {
        /// The reduction.
        key: ReductionKey,
        /// The chunk.
        chunk: Chunk,
        /// The contributions in the cover's order.
        parts: Vec<Part>,
        /// How the result is encoded.
        codec: Codec,
    },
    /// Store a chunk that its owner has reduced.
    StoreChunk {
        /// The reduction.
        key: ReductionKey,
        /// The chunk.
        chunk: Chunk,
        /// The encoded result.
        payload: Payload,
    },
    /// Forget a reduction that will not be committed.
    DropReduction {
        /// The reduction.
        key: ReductionKey,
    },
    /// Apply the optimizer to groups with their reduced gradients: makes version `step.makes()`, keeps the version before until it is retired.
    Apply {
        /// The step.
        step: Step,
        /// The reduction that counts, for each group.
        reductions: Vec<ReductionKey>,
        /// The commit's scalars.
        scalars: Scalars,
    },
    /// Free what steps up to this one needed: sums, reductions, old weights, scratch, graphs.
    Retire {
        /// The step.
        step: Step,
    },
    /// Copy a group's state, which must be at `version`.
    TakeSnapshot {
        /// The group.
        group: Group,
        /// The version.
        version: Version,
    },
}

impl Task {
    /// The work of which it computes something, if it does.
    pub fn computes(&self) -> Option<WorkKey> {
        if let Self::Forward { key, .. } | Self::InputGradient { key, .. } | Self::Backward { key, .. } = self { Some(*key) } else { None }
    }

    /// What it is, for logs.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Reset => "reset",
            Self::Draw { .. } => "draw",
            Self::Install { .. } => "install",
            Self::Forget { .. } => "forget",
            Self::Forward { .. } => "forward",
            Self::InputGradient { .. } => "input gradient",
            Self::Backward { .. } => "backward",
            Self::Add { .. } => "add",
            Self::Discard { .. } => "discard",
            Self::DropSums { .. } => "drop sums",
            Self::EncodeChunk { .. } => "encode chunk",
            Self::ReduceChunk { .. } => "reduce chunk",
            Self::StoreChunk { .. } => "store chunk",
            Self::DropReduction { .. } => "drop reduction",
            Self::Apply { .. } => "apply",
            Self::Retire { .. } => "retire",
            Self::TakeSnapshot { .. } => "take snapshot",
        }
    }
}

/// One contribution to a chunk.
#[derive(Clone, Debug)]
pub enum Part {
    /// This node's own sums, in order.
    Own(Vec<SumId>),
    /// Another member's, encoded.
    Peer(Payload),
}

/// What came of a task.
#[derive(Clone, Debug)]
pub enum Outcome {
    /// [`Task::Reset`], [`Task::Draw`], [`Task::Install`], [`Task::Forget`], [`Task::Discard`], [`Task::DropSums`], [`Task::DropReduction`], [`Task::Retire`]: done.
    Finished,
    /// [`Task::Forward`]
    Forwarded {
        /// The work.
        key: WorkKey,
        /// The boundary after the span; none at the head.
        output: Option<Payload>,
        /// Mean loss in nats a token, at the head.
        loss: Option<f32>,
    },
    /// [`Task::InputGradient`]
    InputGradient {
        /// The work.
        key: WorkKey,
        /// Gradient of the boundary before the span.
        gradient: Payload,
    },
    /// [`Task::Backward`]
    Backwarded {
        /// The work.
        key: WorkKey,
        /// Gradient of the boundary before the span; none at the embedding.
        gradient: Option<Payload>,
        /// Uses whose gradients wait in scratch: all uses of the span.
        uses: BitSet,
    },
    /// [`Task::Add`]: the gradients are in the sums.
    Added {
        /// The work.
        key: WorkKey,
        /// Mode `exact`: values that were larger than the configuration's `reduce.exact_limit`.
        clamped: u64,
    },
    /// [`Task::EncodeChunk`]
    Encoded {
        /// The reduction.
        key: ReductionKey,
        /// The chunk.
        chunk: Chunk,
        /// The encoding.
        payload: Payload,
    },
    /// [`Task::ReduceChunk`]
    Reduced {
        /// The reduction.
        key: ReductionKey,
        /// The chunk.
        chunk: Chunk,
        /// The result, encoded for everyone.
        payload: Payload,
        /// Hash of the decoded values (f32 little endian).
        hash: Hash,
        /// Squared norm of the decoded values, summed in f64 in index order.
        squared_norm: f64,
    },
    /// [`Task::StoreChunk`]
    Stored {
        /// The reduction.
        key: ReductionKey,
        /// The chunk.
        chunk: Chunk,
        /// Hash of the decoded values.
        hash: Hash,
    },
    /// [`Task::Apply`]: the groups are at `step.makes()`.
    Applied {
        /// The step.
        step: Step,
    },
    /// [`Task::TakeSnapshot`]
    SnapshotTaken(Snapshot),
    /// The task could not be done. Nothing that other tasks rely on has changed.
    Failed {
        /// The task's name and what was wrong.
        error: EngineError,
        /// The work or reduction that it was part of.
        about: About,
    },
}

/// What a failed task was part of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum About {
    /// Work on a microbatch.
    Work(WorkKey),
    /// A reduction, and the chunk of it.
    Reduction(ReductionKey, Chunk),
    /// A group's state.
    State(Group),
    /// An optimizer step.
    Step(Step),
    /// None of these.
    Other,
}

/// Why a task could not be done.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum EngineError {
    /// A tensor is not what the task expects.
    #[error("{what}: {source}")]
    Payload {
        /// Which tensor.
        what: &'static str,
        /// What is wrong with it.
        source: skein_protocol::tensor::PayloadError,
    },
    /// A value computed here is not finite.
    #[error("{0} is not finite")]
    NotFinite(&'static str),
    /// A gradient is larger than any honest one.
    #[error("a gradient has the norm {norm:.3e}, reduce.norm_limit is {limit:.3e}")]
    Norm {
        /// Its norm.
        norm: f64,
        /// The largest allowed.
        limit: f64,
    },
    /// Something the task names is not here.
    #[error("no {what} here")]
    Absent {
        /// What.
        what: String,
    },
    /// The task contradicts what was done before it: a sum of another step, a gradient added twice.
    #[error("{0}")]
    Conflict(String),
    /// A group is at another version than the task needs.
    #[error("group {group} is at version {found}, needed {needed}")]
    WrongVersion {
        /// The group.
        group: Group,
        /// The version it is at.
        found: Version,
        /// The version needed.
        needed: Version,
    },
    /// A snapshot has the wrong length.
    #[error("the state of group {group} has {found} bytes, expected {expected}")]
    WrongState {
        /// The group.
        group: Group,
        /// Its length.
        found: usize,
        /// The length it must have.
        expected: usize,
    },
    /// The training data could not be read.
    #[error("training data: {0}")]
    Data(String),
    /// The device has no room for what the task needs, even after what can be computed again was freed.
    #[error("out of memory: {0}")]
    OutOfMemory(String),
    /// The device or its library failed.
    #[error("{0}")]
    Device(String),
}

/// Runs tasks.
pub trait Engine {
    /// Does one task.
    fn run(&mut self, task: Task) -> Outcome;
}

impl Engine for Box<dyn Engine> {
    fn run(&mut self, task: Task) -> Outcome {
        (**self).run(task)
    }
}

/// Where the tokens of a microbatch come from: a pure function of (run seed, step, index).
pub trait Samples: Send {
    /// The tokens of one microbatch: `sequences x (length + 1)` values, sequence after sequence.
    fn tokens(&mut self, step: Step, microbatch: Microbatch) -> Result<Vec<u32>, EngineError>;
}
