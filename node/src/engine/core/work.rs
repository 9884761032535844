//! Forward and backward of one span over one microbatch: graphs and scratch gradients.

use std::collections::BTreeMap;

use skein_protocol::codec::Codec;
use skein_protocol::id::{Group, Span, Step, SumId, Use};
use skein_protocol::set::BitSet;
use skein_protocol::tensor::Payload;

use super::sums::Values;
use super::{Compute, Core, EngineError, Forward, Gradients, Outcome, Sum, Weights, Work, absent, decode, encode};
use crate::engine::WorkKey;

/// Graphs and scratch gradients, by work.
pub(super) struct Works<C: Compute> {
    kept: BTreeMap<WorkKey, Kept<C>>,
    /// Graphs kept at once at most; beyond that, backward computes forward again.
    graphs_max: usize,
}

/// What one work has left here.
struct Kept<C: Compute> {
    graph: Option<C::Graph>,
    scratch: Option<Scratch<C>>,
}

/// Gradients of a span's uses, until they are added or discarded.
struct Scratch<C: Compute> {
    gradients: C::Gradients,
    /// Uses that were not added yet: each is added once.
    left: BitSet,
}

impl<C: Compute> Default for Works<C> {
    fn default() -> Self {
        Self { kept: BTreeMap::new(), graphs_max: usize::MAX }
    }
}

impl<C: Compute> Works<C> {
    pub(super) fn clear(&mut self) {
        self.kept.clear();
    }

    pub(super) fn discard(&mut self, key: WorkKey) {
        self.kept.remove(&key);
    }

    pub(super) fn retire(&mut self, step: Step) {
        self.kept.retain(|key, _| key.step > step);
    }

    /// Drops all that was computed from the group's weights, which turn out to be others.
    pub(super) fn invalidate(&mut self, group: Group, uses: &[(Group, skein_protocol::id::Block)]) {
        self.kept.retain(|key, _| !touches(key.span, group, uses));
    }

    /// Drops graphs over the group's weights, which go away; gradients already made stay.
    pub(super) fn drop_graphs(&mut self, group: Group, uses: &[(Group, skein_protocol::id::Block)]) {
        for (_, kept) in self.kept.iter_mut().filter(|(key, _)| touches(key.span, group, uses)) {
            kept.graph = None;
        }
        self.kept.retain(|_, kept| kept.graph.is_some() || kept.scratch.is_some());
    }

    /// Keeps a graph, unless memory ran out with so many.
    fn keep_graph(&mut self, key: WorkKey, graph: C::Graph) {
        if self.graphs() < self.graphs_max {
            self.entry(key).graph = Some(graph);
        }
    }

    fn graphs(&self) -> usize {
        self.kept.values().filter(|kept| kept.graph.is_some()).count()
    }

    /// Drops all graphs, each of which can be computed again; half as many are kept from now on.
    fn make_room(&mut self) {
        self.graphs_max = self.graphs().min(self.graphs_max) / 2;
        self.kept.values_mut().for_each(|kept| kept.graph = None);
        self.kept.retain(|_, kept| kept.scratch.is_some());
    }

    fn take_graph(&mut self, key: WorkKey) -> Option<C::Graph> {
        self.kept.get_mut(&key).and_then(|kept| kept.graph.take())
    }

    fn keep_scratch(&mut self, key: WorkKey, gradients: C::Gradients, uses: BitSet) {
        self.entry(key).scratch = Some(Scratch { gradients, left: uses });
    }

    fn scratch(&self, key: WorkKey) -> Option<&Scratch<C>> {
        self.kept.get(&key)?.scratch.as_ref()
    }

    /// Notes that gradients were added; what is used up goes.
    fn used(&mut self, key: WorkKey, sums: &[(Use, SumId)]) {
        let Some(kept) = self.kept.get_mut(&key) else { return };
        if let Some(scratch) = &mut kept.scratch {
            for (one, _) in sums {
                scratch.left.remove(usize::from(one.0));
            }
            if scratch.left.is_empty() {
                kept.scratch = None;
            }
        }
        if kept.graph.is_none() && kept.scratch.is_none() {
            self.kept.remove(&key);
        }
    }

    fn entry(&mut self, key: WorkKey) -> &mut Kept<C> {
        self.kept.entry(key).or_insert(Kept { graph: None, scratch: None })
    }
}

/// Whether a block of `span` uses `group`.
fn touches(span: Span, group: Group, uses: &[(Group, skein_protocol::id::Block)]) -> bool {
    uses.iter().any(|(one, block)| *one == group && span.contains(*block))
}

impl<C: Compute> Core<C> {
    /// Runs a computation. Where memory runs out, it frees all that can be had again and tries once more.
    pub(super) fn with_room(&mut self, run: impl Fn(&mut Self) -> Result<Outcome, EngineError>) -> Result<Outcome, EngineError> {
        match run(self) {
            Err(EngineError::OutOfMemory(_)) => {
                self.works.make_room();
                self.pool.clear();
                self.bytes.clear();
                run(self)
            }
            done => done,
        }
    }

    pub(super) fn forward(&mut self, key: WorkKey, input: Option<&Payload>, codec: Codec, keep_graph: bool) -> Result<Outcome, EngineError> {
        let Forward { graph, output, loss } = self.compute_forward(key, input)?;
        let output = match output {
            Some(values) => Some(encode(&self.bytes, "the output of a span", codec, &values)?),
            None => None,
        };
        if loss.is_some_and(|loss| !loss.is_finite()) {
            return Err(EngineError::NotFinite("the loss"));
        }
        if keep_graph {
            self.works.keep_graph(key, graph);
        }
        Ok(Outcome::Forwarded { key, output, loss })
    }

    pub(super) fn input_gradient(&mut self, key: WorkKey, input: Option<&Payload>, gradient: Option<&Payload>, codec: Codec) -> Result<Outcome, EngineError> {
        let graph = self.graph_for_backward(key, input, gradient)?;
        let gradient = (!self.ends_with_head(key.span)).then_some(&*self.desk.gradient);
        let values = self.compute.input_gradient(&graph, gradient)?;
        self.works.keep_graph(key, graph);
        Ok(Outcome::InputGradient { key, gradient: encode(&self.bytes, "the gradient of a span's input", codec, &values)? })
    }

    pub(super) fn backward(&mut self, key: WorkKey, input: Option<&Payload>, gradient: Option<&Payload>, codec: Option<Codec>) -> Result<Outcome, EngineError> {
        let graph = self.graph_for_backward(key, input, gradient)?;
        let gradient = (!self.ends_with_head(key.span)).then_some(&*self.desk.gradient);
        let made = self.compute.backward(graph, gradient)?;
        let uses = self.plan.structure.uses_of(key.span);
        for one in uses.iter() {
            let norm = made.gradients.squared_norm(Use(u16::try_from(one).expect("below the number of uses"))).sqrt();
            if !norm.is_finite() {
                return Err(EngineError::NotFinite("a gradient"));
            }
            if norm > self.plan.norm_limit {
                return Err(EngineError::Norm { norm, limit: self.plan.norm_limit });
            }
        }
        let gradient = match (made.gradient, codec) {
            (Some(values), Some(codec)) => Some(encode(&self.bytes, "the gradient of a span's input", codec, &values)?),
            _ => None,
        };
        self.works.keep_scratch(key, made.gradients, uses.clone());
        Ok(Outcome::Backwarded { key, gradient, uses })
    }

    /// The graph of a span, computed again if it was not kept. The gradient of the span's output
    /// lies on the desk, except at the head.
    fn graph_for_backward(&mut self, key: WorkKey, input: Option<&Payload>, gradient: Option<&Payload>) -> Result<C::Graph, EngineError> {
        self.check_span(key.span)?;
        if !self.ends_with_head(key.span) {
            let payload = gradient.ok_or_else(|| absent(format!("gradient of the output of blocks {}", key.span)))?;
            decode("the gradient of a span's output", payload, &mut self.desk.gradient)?;
        }
        match self.works.take_graph(key) {
            Some(graph) => Ok(graph),
            None => Ok(self.compute_forward(key, input)?.graph),
        }
    }

    /// Runs the span forward on the version its step runs on, and checks the form of what comes out.
    fn compute_forward(&mut self, key: WorkKey, input: Option<&Payload>) -> Result<Forward<C::Graph>, EngineError> {
        self.check_span(key.span)?;
        let mut views = BTreeMap::new();
        for group in self.plan.structure.groups_of(key.span) {
            let state = self.groups.get(&group).ok_or_else(|| absent(format!("weights of group {group}")))?;
            views.insert(group, state.weights_at(group, key.step.runs_on())?);
        }
        let from_tokens = key.span.first.0 == 0;
        if !from_tokens {
            let payload = input.ok_or_else(|| absent(format!("input of blocks {}", key.span)))?;
            decode("the input of a span", payload, &mut self.desk.input)?;
        }
        let work = Work { step: key.step, microbatch: key.microbatch, span: key.span };
        let input = (!from_tokens).then_some(&*self.desk.input);
        let made = self.compute.forward(&Weights { groups: &views }, work, input)?;
        let at_head = self.ends_with_head(key.span);
        let output_len = made.output.as_ref().map(Vec::len);
        if output_len != (!at_head).then(|| self.plan.boundary_len()) || made.loss.is_some() != at_head {
            return Err(EngineError::Device(format!("forward of blocks {} made an output of {output_len:?} values", key.span)));
        }
        Ok(made)
    }

    /// Adds each gradient once: all or nothing, in the order of the uses whatever the task's order.
    pub(super) fn add(&mut self, key: WorkKey, mut sums: Vec<(Use, SumId)>) -> Result<Outcome, EngineError> {
        sums.sort_unstable();
        self.check_add(key, &sums)?;
        let Some(Scratch { gradients, .. }) = self.works.scratch(key) else { return Err(no_scratch(key)) };
        let mut clamped = 0;
        for (one, id) in sums.iter().copied() {
            let group = self.plan.structure.group_of(one);
            let layout = self.plan.structure.layout(group);
            let sum = self.sums.entry(id).or_insert_with(|| Sum::new(key.step, group, layout, self.plan.fixed.is_some(), &mut self.pool));
            match (&mut sum.values, self.plan.fixed) {
                (Values::Fixed(values), Some(fixed)) => {
                    // Each gradient is rounded by itself: what it adds does not depend on the others.
                    let term = &mut self.desk.term[..layout.len];
                    gradients.add_to(one, term, true);
                    clamped += fixed.add(term, values);
                }
                (Values::Float(values), _) => gradients.add_to(one, values, sum.added.is_empty()),
                (Values::Fixed(_), None) => unreachable!("sums are in fixed point in mode exact only"),
            }
            *sum.added.entry((one, key.microbatch)).or_default() += 1;
        }
        self.works.used(key, &sums);
        Ok(Outcome::Added { key, clamped })
    }

    fn check_add(&self, key: WorkKey, sums: &[(Use, SumId)]) -> Result<(), EngineError> {
        let Some(Scratch { left, .. }) = self.works.scratch(key) else { return Err(no_scratch(key)) };
        let mut groups = BTreeMap::new();
        for (index, (one, id)) in sums.iter().enumerate() {
            if !left.contains(usize::from(one.0)) {
                return Err(absent(format!("gradient of use {one} by blocks {}", key.span)));
            }
            if index > 0 && sums[index - 1].0 == *one {
                return Err(EngineError::Conflict(format!("use {one} of microbatch {} is to be added to two sums", key.microbatch)));
            }
            let group = self.plan.structure.group_of(*one);
            if *groups.entry(*id).or_insert(group) != group {
                return Err(EngineError::Conflict(format!("sum {id:?} is named for two groups")));
            }
            if let Some(sum) = self.sums.get(id) {
                sum.check_add(*id, key, *one, group)?;
            }
        }
        Ok(())
    }

    fn check_span(&self, span: Span) -> Result<(), EngineError> {
        let blocks = self.plan.structure.blocks();
        let valid = !span.is_empty() && usize::from(span.end.0) <= blocks;
        if valid { Ok(()) } else { Err(absent(format!("blocks {}..{}: the model has {blocks}", span.first, span.end))) }
    }

    fn ends_with_head(&self, span: Span) -> bool {
        usize::from(span.end.0) == self.plan.structure.blocks()
    }
}

fn no_scratch(key: WorkKey) -> EngineError {
    absent(format!("gradient of blocks {} for microbatch {} of step {}", key.span, key.microbatch, key.step))
}
