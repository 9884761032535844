//! What all engines share: flat buffers, sums, reduction, optimizer, snapshots.
//!
//! [`Core`] runs every [`Task`] by the rules of `PROTOCOL`: weights stand in generations by
//! version, gradients wait in scratch until they are counted, a reduction writes to a buffer of its
//! own and leaves every sum as it was, and everyone applies decoded bytes.

use std::collections::BTreeMap;

use skein_protocol::codec::{Codec, check_finite};
use skein_protocol::config::{BatchSection, OptimizerSection, RunConfig};
use skein_protocol::fixed::FixedPoint;
use skein_protocol::id::{Chunk, Group, Hash, Microbatch, Span, Step, SumId, Use, Version};
use skein_protocol::model::{GroupLayout, Structure};
use skein_protocol::tensor::{Payload, PayloadError};

use self::buffer::{AlignedBuffer, BufferPool, BytePool};
use self::reduction::Reduction;
use self::state::GroupState;
use self::sums::Sum;
use self::work::Works;
use super::{About, Engine, EngineError, Outcome, ReductionKey, Snapshot, Task};

mod buffer;
mod reduction;
mod state;
mod sums;
mod work;

#[cfg(test)]
mod room;
#[cfg(test)]
mod tests;

/// Forward and backward of a model: what differs between engines.
///
/// Weights are read from flat f32 buffers in the layouts of [`skein_protocol::model::Structure`].
/// Boundary tensors are f32, row-major `[sequences, length, boundary]`.
///
/// *Invariant*: a graph may hold views of the weights it was made from. [`Core`] neither moves,
/// writes nor frees the buffer of a version while a graph of that version exists: apply writes to
/// another buffer, and whatever gives a buffer back (retire, install, forget, reset) drops the
/// graphs over it first.
pub trait Compute {
    /// What forward keeps for backward.
    type Graph;
    /// Gradients of a span's uses, as the model made them.
    type Gradients: Gradients;

    /// Computes a span forward. `input` is none if the span begins with the embedding; the output
    /// is none and the loss is some if it ends with the head.
    fn forward(&mut self, weights: &Weights<'_>, work: Work, input: Option<&[f32]>) -> Result<Forward<Self::Graph>, EngineError>;

    /// Computes only the gradient of the boundary before a span that does not begin with the
    /// embedding, and leaves the graph for [`backward`](Self::backward), which makes the same bits.
    fn input_gradient(&mut self, graph: &Self::Graph, gradient: Option<&[f32]>) -> Result<Vec<f32>, EngineError>;

    /// Computes a span backward from a kept graph. `gradient` is none if the span ends with the head.
    fn backward(&mut self, graph: Self::Graph, gradient: Option<&[f32]>) -> Result<Backward<Self::Gradients>, EngineError>;
}

/// What is computed: a span over a microbatch.
#[derive(Clone, Copy, Debug)]
pub struct Work {
    /// The step.
    pub step: Step,
    /// The microbatch.
    pub microbatch: Microbatch,
    /// The span.
    pub span: Span,
}

/// The weights of one version, by group.
pub struct Weights<'a> {
    /// Flat buffers of the groups that are held, by group.
    pub groups: &'a BTreeMap<Group, &'a [f32]>,
}

/// What forward makes.
pub struct Forward<G> {
    /// What backward needs.
    pub graph: G,
    /// The boundary after the span.
    pub output: Option<Vec<f32>>,
    /// Mean loss in nats a token.
    pub loss: Option<f32>,
}

/// What backward makes.
pub struct Backward<G> {
    /// Gradient of the boundary before the span.
    pub gradient: Option<Vec<f32>>,
    /// Gradients of the span's uses.
    pub gradients: G,
}

/// Gradients of the uses of one span for one microbatch.
pub trait Gradients {
    /// Squared norm of the gradient of one use: not finite if one of its values is not, or is too
    /// large to be squared.
    fn squared_norm(&self, one: Use) -> f64;

    /// Writes the gradient of one use over all of `sum` if `first`, zero where the layout has
    /// padding; else adds it: flat, in the group's layout.
    fn add_to(&self, one: Use, sum: &mut [f32], first: bool);
}

/// What of a run's configuration the numbers depend on.
struct Plan {
    structure: Structure,
    batch: BatchSection,
    optimizer: OptimizerSection,
    chunk_len: usize,
    seed: u64,
    deviation: f64,
    /// Mode `exact`: how sums are kept.
    fixed: Option<FixedPoint>,
    /// The largest norm that a use's gradient of one microbatch may have.
    norm_limit: f64,
}

impl Plan {
    /// Values of a boundary tensor of one microbatch.
    fn boundary_len(&self) -> usize {
        self.batch.tokens_per_microbatch() * self.structure.boundary
    }

    /// The layout of a group that a task names.
    fn layout(&self, group: Group) -> Result<&GroupLayout, EngineError> {
        self.structure.groups.get(usize::from(group.0)).ok_or_else(|| absent(format!("group {group} in this model")))
    }

    /// The values of a chunk that a task names.
    fn range(&self, key: ReductionKey, chunk: Chunk) -> Result<std::ops::Range<usize>, EngineError> {
        let range = self.layout(key.group)?.chunk_range(chunk, self.chunk_len);
        if range.is_empty() { Err(absent(format!("chunk {chunk} in group {}", key.group))) } else { Ok(range) }
    }
}

/// The engine under every kind of compute.
pub struct Core<C: Compute> {
    compute: C,
    plan: Plan,
    groups: BTreeMap<Group, GroupState>,
    works: Works<C>,
    sums: BTreeMap<SumId, Sum>,
    reductions: BTreeMap<ReductionKey, Reduction>,
    pool: BufferPool,
    bytes: BytePool,
    desk: Desk,
}

/// Room for what one task has in hand.
struct Desk {
    /// The boundary before the span.
    input: AlignedBuffer,
    /// The gradient of the boundary after the span.
    gradient: AlignedBuffer,
    /// The total of a chunk.
    total: AlignedBuffer,
    /// One contribution to it.
    part: AlignedBuffer,
    /// Mode `exact`: the total of a chunk in fixed point.
    fixed_total: Vec<i64>,
    /// Mode `exact`: one gradient before it is added in fixed point.
    term: AlignedBuffer,
}

impl<C: Compute> Core<C> {
    /// An engine that holds nothing yet. `structure` is that of the model that `compute` computes.
    pub fn new(compute: C, config: &RunConfig, structure: Structure) -> Self {
        let plan = Plan {
            batch: config.batch,
            optimizer: config.optimizer,
            chunk_len: config.reduce.chunk,
            seed: config.run.seed,
            deviation: config.model.initializer_range,
            fixed: config.fixed_point(&structure),
            norm_limit: config.reduce.norm_limit,
            structure,
        };
        let chunk = plan.structure.groups.iter().map(|layout| layout.len.min(plan.chunk_len)).max().unwrap_or_default();
        let largest = plan.structure.groups.iter().map(|layout| layout.len).max().unwrap_or_default();
        let desk = Desk {
            input: AlignedBuffer::zeroed(plan.boundary_len()),
            gradient: AlignedBuffer::zeroed(plan.boundary_len()),
            total: AlignedBuffer::zeroed(chunk),
            part: AlignedBuffer::zeroed(chunk),
            fixed_total: vec![0; plan.fixed.map_or(0, |_| chunk)],
            term: AlignedBuffer::zeroed(plan.fixed.map_or(0, |_| largest)),
        };
        Self {
            compute,
            plan,
            groups: BTreeMap::new(),
            works: Works::default(),
            sums: BTreeMap::new(),
            reductions: BTreeMap::new(),
            pool: BufferPool::default(),
            bytes: BytePool::default(),
            desk,
        }
    }

    /// The model's structure.
    pub fn structure(&self) -> &Structure {
        &self.plan.structure
    }

    /// What computes forward and backward.
    pub fn compute_mut(&mut self) -> &mut C {
        &mut self.compute
    }

    /// The groups held, ascending, with their versions.
    pub fn versions(&self) -> impl Iterator<Item = (Group, Version)> + '_ {
        self.groups.iter().map(|(group, state)| (*group, state.version))
    }

    /// The version that a group is at; none if it is not held.
    pub fn version(&self, group: Group) -> Option<Version> {
        self.groups.get(&group).map(|state| state.version)
    }

    /// A group's weights at its version, in its layout; none if it is not held.
    pub fn weights(&self, group: Group) -> Option<&[f32]> {
        self.groups.get(&group).map(GroupState::weights)
    }

    /// A copy of a group's state at its version; none if it is not held.
    pub fn snapshot(&self, group: Group) -> Option<Snapshot> {
        self.groups.get(&group).map(|state| state.snapshot(group))
    }

    /// Root of the chunk hashes of a group's weights and optimizer state, equal to
    /// [`Snapshot::root`]; none if it is not held.
    pub fn state_root(&self, group: Group) -> Option<Hash> {
        self.snapshot(group).map(|snapshot| snapshot.root())
    }

    /// What was added to a sum, counted where it is added: how often each use's gradient of each
    /// microbatch. Empty if there is no such sum.
    pub fn contributions(&self, sum: SumId) -> BTreeMap<(Use, Microbatch), u32> {
        self.sums.get(&sum).map(|sum| sum.added.clone()).unwrap_or_default()
    }

    fn perform(&mut self, task: Task) -> Result<Outcome, EngineError> {
        match task {
            Task::Reset => self.reset(),
            Task::Draw { groups } => self.draw(&groups)?,
            Task::Install { snapshot } => self.install(&snapshot)?,
            Task::Forget { groups } => self.forget(&groups),
            Task::Forward { key, input, encode, keep_graph } => return self.with_room(|core| core.forward(key, input.as_ref(), encode, keep_graph)),
            Task::InputGradient { key, input, gradient, encode } => {
                return self.with_room(|core| core.input_gradient(key, input.as_ref(), gradient.as_ref(), encode));
            }
            Task::Backward { key, input, gradient, encode } => return self.with_room(|core| core.backward(key, input.as_ref(), gradient.as_ref(), encode)),
            Task::Add { key, sums } => return self.add(key, sums),
            Task::Discard { key } => self.works.discard(key),
            Task::DropSums { sums } => self.drop_sums(&sums),
            Task::EncodeChunk { key, chunk, sums, codec } => return self.encode_chunk(key, chunk, &sums, codec),
            Task::ReduceChunk { key, chunk, parts, codec } => return self.reduce_chunk(key, chunk, &parts, codec),
            Task::StoreChunk { key, chunk, payload } => return self.store_chunk(key, chunk, &payload),
            Task::DropReduction { key } => self.drop_reduction(key),
            Task::Apply { step, reductions, scalars } => return self.apply(step, &reductions, &scalars),
            Task::Retire { step } => self.retire(step),
            Task::TakeSnapshot { group, version } => return self.take_snapshot(group, version),
        }
        Ok(Outcome::Finished)
    }

    /// Forgets everything; graphs first, since they may hold views of weights.
    fn reset(&mut self) {
        self.works.clear();
        self.groups.clear();
        self.sums.clear();
        self.reductions.clear();
        self.pool.clear();
        self.bytes.clear();
    }

    /// Frees what steps up to `step` needed; graphs first, since they may hold views of weights.
    /// A group's present weights stay, however far behind it is.
    fn retire(&mut self, step: Step) {
        self.works.retire(step);
        for (_, sum) in self.sums.extract_if(.., |_, sum| sum.step <= step) {
            sum.values.give_back(&mut self.pool);
        }
        for (_, reduction) in self.reductions.extract_if(.., |key, _| key.step <= step) {
            self.pool.give(reduction.result);
        }
        for state in self.groups.values_mut() {
            state.retire(step, &mut self.pool);
        }
    }
}

impl<C: Compute> Engine for Core<C> {
    fn run(&mut self, task: Task) -> Outcome {
        let about = about(&task);
        self.perform(task).unwrap_or_else(|error| Outcome::Failed { error, about })
    }
}

/// What a task is part of.
fn about(task: &Task) -> About {
    match task {
        Task::Forward { key, .. } | Task::InputGradient { key, .. } | Task::Backward { key, .. } | Task::Add { key, .. } | Task::Discard { key } => {
            About::Work(*key)
        }
        Task::EncodeChunk { key, chunk, .. } | Task::ReduceChunk { key, chunk, .. } | Task::StoreChunk { key, chunk, .. } => About::Reduction(*key, *chunk),
        Task::Install { snapshot } => About::State(snapshot.group),
        Task::TakeSnapshot { group, .. } => About::State(*group),
        Task::Apply { step, .. } | Task::Retire { step } => About::Step(*step),
        Task::Reset | Task::Draw { .. } | Task::Forget { .. } | Task::DropSums { .. } | Task::DropReduction { .. } => About::Other,
    }
}

fn absent(what: impl Into<String>) -> EngineError {
    EngineError::Absent { what: what.into() }
}

/// Checks and decodes a payload that a task expects to fill `values`.
fn decode(what: &'static str, payload: &Payload, values: &mut [f32]) -> Result<(), EngineError> {
    payload.expect(values.len()).and_then(|()| payload.meta.codec.decode(&payload.bytes, values)).map_err(|source| EngineError::Payload { what, source })
}

/// Encodes values computed here, unless one is not finite or would not be once encoded.
fn encode(bytes: &BytePool, what: &'static str, codec: Codec, values: &[f32]) -> Result<Payload, EngineError> {
    match codec {
        Codec::None => check_finite(values).map_err(|_| EngineError::NotFinite(what))?,
        Codec::Bf16 => {
            // From here on bf16 rounds to infinity.
            const LIMIT: u32 = 0x7f7f_8000;
            if values.iter().fold(0, |max, value| max.max(value.to_bits() & 0x7fff_ffff)) >= LIMIT {
                return Err(EngineError::NotFinite(what));
            }
        }
        Codec::Fixed | Codec::Raw => return Err(EngineError::Payload { what, source: PayloadError::NotATensor }),
    }
    Ok(bytes.encode(codec, values))
}
