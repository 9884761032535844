//! What all engines share: flat buffers, sums, reduction, optimizer, snapshots.

use skein_protocol::id::{Group, Microbatch, Span, Step, Use};

use super::EngineError;

/// Forward and backward of a model: what differs between engines.
///
/// Weights are read from flat f32 buffers in the layouts of [`skein_protocol::model::Structure`].
/// Boundary tensors are f32, row-major `[sequences, length, boundary]`.
pub trait Compute {
    /// What forward keeps for backward.
    type Graph;
    /// Gradients of a span's uses, as the model made them.
    type Gradients: Gradients;

    /// Computes a span forward. `input` is none if the span begins with the embedding; the output
    /// is none and the loss is some if it ends with the head.
    fn forward(&mut self, weights: &Weights<'_>, work: Work, input: Option<&[f32]>) -> Result<Forward<Self::Graph>, EngineError>;

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
    pub groups: &'a std::collections::BTreeMap<Group, &'a [f32]>,
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
    /// Whether every value is finite.
    fn are_finite(&self) -> bool;

    /// Writes the gradient of one use over `sum` if `first`, else adds it: flat, in the group's layout.
    fn add_to(&self, one: Use, sum: &mut [f32], first: bool);
}
