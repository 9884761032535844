//! A tiny language model in plain Rust, for the simulator and the fault tests.
//!
//! Embedding, residual blocks `y = x + SHARE tanh(W x + b)` and a head (scale, projection, softmax
//! cross entropy), each token on its own. A few thousand parameters, f32 in a fixed order: results
//! depend on the order of additions and gradients on the weights, so that a contribution lost,
//! doubled or computed on another version shows in the bits.

use std::sync::Arc;

use skein_protocol::codec::Codec;
use skein_protocol::config::{
    BatchSection, CheckpointSection, DataSection, Mode, OptimizerSection, PlacementSection, ReduceSection, RunConfig, RunSection, WireSection,
};
use skein_protocol::id::{Block, Group, Hash, Microbatch, Step, Use};
use skein_protocol::model::{GroupLayout, ModelConfig, Structure, TENSOR_ALIGN};

use super::core::{Backward, Compute, Core, Forward, Gradients, Weights, Work};
use super::{EngineError, Samples};

/// How much a residual block adds to the stream.
const SHARE: f32 = 0.5;

/// A run of the toy model: `layers` residual blocks, `microbatches` a step. Small chunks, so that
/// groups are reduced in several.
pub fn config(layers: usize, tied: bool, microbatches: u32, steps: u64) -> RunConfig {
    RunConfig {
        run: RunSection { name: "toy".to_owned(), seed: 1, steps, mode: Mode::Sync },
        model: ModelConfig {
            vocab_size: 32,
            hidden_size: 16,
            intermediate_size: 16,
            num_hidden_layers: layers,
            num_attention_heads: 1,
            num_key_value_heads: 1,
            max_position_embeddings: 8,
            rms_norm_eps: 1e-5,
            rope_theta: 1e4,
            tie_word_embeddings: tied,
            initializer_range: 0.3,
        },
        data: DataSection { manifest: Hash::default(), import: None },
        batch: BatchSection { microbatches, sequences: 2, length: 8 },
        optimizer: OptimizerSection { learning_rate: 0.02, warmup_steps: 3, weight_decay: 0.01, ..OptimizerSection::default() },
        wire: WireSection { boundary: Codec::None, scatter: Codec::None, gather: Codec::None },
        reduce: ReduceSection { chunk: 64, ..ReduceSection::default() },
        placement: PlacementSection::default(),
        checkpoint: CheckpointSection { every_steps: 2, keep: 2 },
    }
}

/// The structure of the toy model that `config` describes: hand it to the machines and the engine
/// in place of [`RunConfig::structure`].
pub fn structure(config: &RunConfig) -> Structure {
    let model = &config.model;
    let (d, v, layers) = (model.hidden_size, model.vocab_size, model.num_hidden_layers);
    let mut groups = vec![GroupLayout::new([("embed.weight".to_owned(), vec![v, d])])];
    groups.extend((0..layers).map(|l| GroupLayout::new([(format!("layers.{l}.weight"), vec![d, d]), (format!("layers.{l}.bias"), vec![d])])));
    let mut head = vec![("norm.weight".to_owned(), vec![d])];
    if !model.tie_word_embeddings {
        head.push(("head.weight".to_owned(), vec![v, d]));
    }
    groups.push(GroupLayout::new(head));
    let mut flops = vec![6.0 * (d * d) as f64; layers + 2];
    (flops[0], flops[layers + 1]) = (2.0 * d as f64, 6.0 * (d * v) as f64);
    Structure::new(groups, model.tie_word_embeddings, flops, d, vec![2 * d; layers + 2])
}

/// A whole toy engine for `config`, holding nothing yet.
pub fn engine(config: &RunConfig) -> Core<Toy> {
    Core::new(Toy::new(config, Box::new(ToySamples::new(config))), config, structure(config))
}

/// Tokens by a hash of (seed, step, index), with a rule in them that can be learned.
#[derive(Clone, Copy, Debug)]
pub struct ToySamples {
    seed: u64,
    vocabulary: u32,
    sequences: usize,
    length: usize,
}

impl ToySamples {
    /// The samples of a run.
    pub fn new(config: &RunConfig) -> Self {
        Self {
            seed: config.run.seed,
            vocabulary: u32::try_from(config.model.vocab_size).expect("a vocabulary is below 2^32"),
            sequences: config.batch.sequences as usize,
            length: config.batch.length as usize,
        }
    }
}

impl Samples for ToySamples {
    /// Three times in four the next token follows from the last; else it is drawn.
    fn tokens(&mut self, step: Step, microbatch: Microbatch) -> Result<Vec<u32>, EngineError> {
        let mut hasher = blake3::Hasher::new_derive_key("skein toy samples v1");
        hasher.update(&self.seed.to_le_bytes()).update(&step.0.to_le_bytes()).update(&microbatch.0.to_le_bytes());
        let mut bytes = vec![0; self.sequences * (self.length + 1) * 4];
        hasher.finalize_xof().fill(&mut bytes);
        let mut last = 0;
        let draws = bytes.as_chunks::<4>().0.iter().map(|bytes| u32::from_le_bytes(*bytes));
        Ok(draws
            .map(|draw| {
                last = if draw.is_multiple_of(4) { (draw >> 2) % self.vocabulary } else { (last * 5 + 3) % self.vocabulary };
                last
            })
            .collect())
    }
}

/// Forward and backward of the toy model.
pub struct Toy {
    structure: Arc<Structure>,
    width: usize,
    vocabulary: usize,
    tied: bool,
    batch: BatchSection,
    samples: Box<dyn Samples>,
    edge: Option<Codec>,
}

/// What one block's backward needs; copies, since the weights may be gone by then.
enum Saved {
    /// The tokens looked up.
    Embedding(Vec<usize>),
    /// The block's input and `tanh(W x + b)`, and W.
    Residual { input: Vec<f32>, tanh: Vec<f32>, matrix: Vec<f32> },
    /// The head's input, the gradient of the logits, scale and projection.
    Head { input: Vec<f32>, logits: Vec<f32>, scale: Vec<f32>, projection: Vec<f32> },
}

/// What backward needs of a span, block by block.
pub struct ToyGraph {
    blocks: Vec<(Block, Saved)>,
}

/// Gradients by use, each flat in its group's layout.
pub struct ToyGradients {
    uses: Vec<(Use, Vec<f32>)>,
}

impl Gradients for ToyGradients {
    fn squared_norm(&self, one: Use) -> f64 {
        self.uses.iter().filter(|(used, _)| *used == one).flat_map(|(_, gradient)| gradient).map(|value| f64::from(*value).powi(2)).sum()
    }

    fn add_to(&self, one: Use, sum: &mut [f32], first: bool) {
        let (_, gradient) = self.uses.iter().find(|(used, _)| *used == one).expect("the core asks for uses of the span");
        if first {
            sum.copy_from_slice(gradient);
        } else {
            sum.iter_mut().zip(gradient).for_each(|(sum, value)| *sum += value);
        }
    }
}

impl Toy {
    /// The toy model that `config` describes, reading tokens from `samples`.
    ///
    /// # Panics
    /// If the width is not a multiple of [`TENSOR_ALIGN`]: tensors follow each other without padding here.
    pub fn new(config: &RunConfig, samples: Box<dyn Samples>) -> Self {
        assert!(config.model.hidden_size.is_multiple_of(TENSOR_ALIGN), "width of the toy model");
        Self {
            structure: Arc::new(structure(config)),
            width: config.model.hidden_size,
            vocabulary: config.model.vocab_size,
            tied: config.model.tie_word_embeddings,
            batch: config.batch,
            samples,
            edge: config.edge_codec(),
        }
    }

    /// The batch's tokens as (seen, predicted) pairs, in order.
    fn pairs(&mut self, work: Work) -> Result<Vec<(usize, usize)>, EngineError> {
        let tokens = self.samples.tokens(work.step, work.microbatch)?;
        let length = self.batch.length as usize;
        if tokens.len() != self.batch.sequences as usize * (length + 1) {
            return Err(EngineError::Data(format!("{} tokens for microbatch {}", tokens.len(), work.microbatch)));
        }
        if let Some(token) = tokens.iter().find(|token| **token as usize >= self.vocabulary) {
            return Err(EngineError::Data(format!("token {token} is not below {}", self.vocabulary)));
        }
        let pairs = tokens.chunks(length + 1).flat_map(|sequence| sequence.windows(2).map(|pair| (pair[0] as usize, pair[1] as usize)));
        Ok(pairs.collect())
    }

    fn last_block(&self) -> usize {
        self.structure.blocks() - 1
    }

    fn embed(&self, table: &[f32], tokens: Vec<usize>) -> (Vec<f32>, Saved) {
        let d = self.width;
        let output = tokens.iter().flat_map(|token| table[token * d..(token + 1) * d].iter().copied()).collect();
        (output, Saved::Embedding(tokens))
    }

    fn residual(&self, weights: &[f32], input: Vec<f32>) -> (Vec<f32>, Saved) {
        let d = self.width;
        let (matrix, bias) = (&weights[..d * d], &weights[d * d..d * d + d]);
        let tanh: Vec<f32> = input.chunks(d).flat_map(|x| (0..d).map(move |row| (dot(&matrix[row * d..(row + 1) * d], x) + bias[row]).tanh())).collect();
        let output = input.iter().zip(&tanh).map(|(x, t)| x + SHARE * t).collect();
        (output, Saved::Residual { input, tanh, matrix: matrix.to_vec() })
    }

    /// Mean cross entropy over the tokens, and the gradient of it by the logits.
    fn head(&self, scale: &[f32], projection: &[f32], input: Vec<f32>, targets: &[usize]) -> (f32, Saved) {
        let (d, v) = (self.width, self.vocabulary);
        let share = 1.0 / targets.len() as f32;
        let mut loss = 0.0;
        let mut logits = Vec::with_capacity(targets.len() * v);
        for (x, target) in input.chunks(d).zip(targets) {
            let scaled: Vec<f32> = x.iter().zip(scale).map(|(x, s)| x * s).collect();
            let row: Vec<f32> = projection.chunks(d).map(|p| dot(p, &scaled)).collect();
            let max = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            let exps: Vec<f32> = row.iter().map(|logit| (logit - max).exp()).collect();
            let total: f32 = exps.iter().sum();
            loss += (total.ln() + max - row[*target]) * share;
            logits.extend(exps.iter().enumerate().map(|(token, e)| (e / total - f32::from(u8::from(token == *target))) * share));
        }
        (loss, Saved::Head { input, logits, scale: scale.to_vec(), projection: projection.to_vec() })
    }

    /// Gradient of a block's input, and of each of its uses' parameters.
    fn block_backward(&self, saved: &Saved, gradient: &[f32]) -> (Vec<f32>, Vec<Vec<f32>>) {
        let d = self.width;
        match saved {
            Saved::Embedding(tokens) => {
                let mut table = vec![0.0; self.vocabulary * d];
                for (token, g) in tokens.iter().zip(gradient.chunks(d)) {
                    add_scaled(&mut table[token * d..(token + 1) * d], g, 1.0);
                }
                (Vec::new(), vec![table])
            }
            Saved::Residual { input, tanh, matrix } => {
                let mut parameters = vec![0.0; d * d + d];
                let mut before = gradient.to_vec();
                for ((x, t), (g, dx)) in input.chunks(d).zip(tanh.chunks(d)).zip(gradient.chunks(d).zip(before.chunks_mut(d))) {
                    for row in 0..d {
                        let inner = SHARE * g[row] * (1.0 - t[row] * t[row]);
                        add_scaled(&mut parameters[row * d..(row + 1) * d], x, inner);
                        parameters[d * d + row] += inner;
                        add_scaled(dx, &matrix[row * d..(row + 1) * d], inner);
                    }
                }
                (before, vec![parameters])
            }
            Saved::Head { input, logits, scale, projection } => self.head_backward(input, logits, scale, projection),
        }
    }

    fn head_backward(&self, input: &[f32], logits: &[f32], scale: &[f32], projection: &[f32]) -> (Vec<f32>, Vec<Vec<f32>>) {
        let (d, v) = (self.width, self.vocabulary);
        let (mut scale_gradient, mut projection_gradient, mut before) = (vec![0.0; d], vec![0.0; v * d], vec![0.0; input.len()]);
        for ((x, row), dx) in input.chunks(d).zip(logits.chunks(v)).zip(before.chunks_mut(d)) {
            let scaled: Vec<f32> = x.iter().zip(scale).map(|(x, s)| x * s).collect();
            let mut inner = vec![0.0; d];
            for (token, g) in row.iter().enumerate() {
                add_scaled(&mut projection_gradient[token * d..(token + 1) * d], &scaled, *g);
                add_scaled(&mut inner, &projection[token * d..(token + 1) * d], *g);
            }
            for at in 0..d {
                scale_gradient[at] += inner[at] * x[at];
                dx[at] = inner[at] * scale[at];
            }
        }
        if self.tied {
            (before, vec![scale_gradient, projection_gradient])
        } else {
            scale_gradient.extend(projection_gradient);
            (before, vec![scale_gradient])
        }
    }

    /// A boundary between blocks, rounded if the run rounds all of them.
    fn edge(&self, mut values: Vec<f32>) -> Result<Vec<f32>, EngineError> {
        if let Some(codec) = self.edge {
            let mut bytes = vec![0; codec.byte_len(values.len())];
            codec.encode(&values, &mut bytes);
            codec.decode(&bytes, &mut values).map_err(|source| EngineError::Payload { what: "a boundary", source })?;
        }
        Ok(values)
    }

    /// The uses of a block in order: its own group's, then the tied embedding's.
    fn uses_of(&self, block: Block) -> impl Iterator<Item = Use> + '_ {
        let indices = self.structure.uses.iter().enumerate().filter(move |(_, (_, used_by))| *used_by == block);
        indices.map(|(index, _)| Use(u16::try_from(index).expect("a model has fewer than 65536 uses")))
    }
}

impl Compute for Toy {
    type Graph = ToyGraph;
    type Gradients = ToyGradients;

    fn forward(&mut self, weights: &Weights<'_>, work: Work, input: Option<&[f32]>) -> Result<Forward<ToyGraph>, EngineError> {
        let pairs = self.pairs(work)?;
        let mut x = input.unwrap_or_default().to_vec();
        let mut blocks = Vec::new();
        let mut loss = None;
        for block in work.span.blocks() {
            let own = weights.groups[&Group(block.0)];
            let saved = if block.0 == 0 {
                let (output, saved) = self.embed(own, pairs.iter().map(|(seen, _)| *seen).collect());
                x = self.edge(output)?;
                saved
            } else if usize::from(block.0) == self.last_block() {
                let (scale, rest) = own.split_at(self.width);
                let projection = if self.tied { weights.groups[&Group(0)] } else { rest };
                let targets: Vec<usize> = pairs.iter().map(|(_, next)| *next).collect();
                let (mean, saved) = self.head(scale, projection, std::mem::take(&mut x), &targets);
                loss = Some(mean);
                saved
            } else {
                let (output, saved) = self.residual(own, x);
                x = self.edge(output)?;
                saved
            };
            blocks.push((block, saved));
        }
        let output = loss.is_none().then_some(x);
        Ok(Forward { graph: ToyGraph { blocks }, output, loss })
    }

    fn input_gradient(&mut self, graph: &ToyGraph, gradient: Option<&[f32]>) -> Result<Vec<f32>, EngineError> {
        let above = gradient.unwrap_or_default().to_vec();
        graph.blocks.iter().rev().try_fold(above, |gradient, (_, saved)| self.edge(self.block_backward(saved, &gradient).0))
    }

    fn backward(&mut self, graph: ToyGraph, gradient: Option<&[f32]>) -> Result<Backward<ToyGradients>, EngineError> {
        let mut gradient = gradient.unwrap_or_default().to_vec();
        let mut uses = Vec::new();
        let mut from_tokens = false;
        for (block, saved) in graph.blocks.iter().rev() {
            let (before, parameters) = self.block_backward(saved, &gradient);
            uses.extend(self.uses_of(*block).zip(parameters));
            gradient = self.edge(before)?;
            from_tokens = block.0 == 0;
        }
        Ok(Backward { gradient: (!from_tokens).then_some(gradient), gradients: ToyGradients { uses } })
    }
}

/// Product of two vectors, summed in index order.
fn dot(a: &[f32], b: &[f32]) -> f32 {
    a.iter().zip(b).fold(0.0, |sum, (a, b)| sum + a * b)
}

/// Adds `factor` times `values` to `total`.
fn add_scaled(total: &mut [f32], values: &[f32], factor: f32) {
    total.iter_mut().zip(values).for_each(|(total, value)| *total += factor * value);
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use skein_protocol::id::Span;

    use super::*;
    use crate::init;

    struct Model {
        toy: Toy,
        structure: Structure,
        weights: Vec<Vec<f32>>,
    }

    fn model(tied: bool) -> Model {
        let config = config(2, tied, 4, 10);
        let structure = structure(&config);
        let weights = structure
            .groups
            .iter()
            .map(|layout| {
                let mut buffer = vec![0.0; layout.len];
                init::draw(layout, 3, 0.3, &mut buffer);
                buffer
            })
            .collect();
        Model { toy: Toy::new(&config, Box::new(ToySamples::new(&config))), structure, weights }
    }

    impl Model {
        fn forward(&mut self, span: Span, input: Option<&[f32]>) -> Forward<ToyGraph> {
            let groups: BTreeMap<Group, &[f32]> = self.structure.group_ids().zip(self.weights.iter().map(Vec::as_slice)).collect();
            let work = Work { step: Step(1), microbatch: Microbatch(2), span };
            self.toy.forward(&Weights { groups: &groups }, work, input).expect("the toy computes")
        }

        fn loss(&mut self) -> f64 {
            let whole = self.structure.whole();
            f64::from(self.forward(whole, None).loss.expect("the head is in the span"))
        }

        /// Gradient of each use, and the loss, with the model cut at these blocks.
        fn cut(&mut self, cuts: &[u16]) -> (f32, BTreeMap<Use, Vec<f32>>) {
            let ends: Vec<u16> = cuts.iter().copied().chain([u16::try_from(self.structure.blocks()).expect("small")]).collect();
            let spans: Vec<Span> = [0].iter().chain(cuts).zip(&ends).map(|(first, end)| Span::new(*first, *end)).collect();
            let (mut input, mut graphs, mut loss) = (None, Vec::new(), None);
            for span in &spans {
                let made = self.forward(*span, input.as_deref());
                graphs.push(made.graph);
                (input, loss) = (made.output, made.loss);
            }
            let (mut gradient, mut all) = (None, BTreeMap::new());
            for graph in graphs.into_iter().rev() {
                let made = self.toy.backward(graph, gradient.as_deref()).expect("the toy computes");
                all.extend(made.gradients.uses);
                gradient = made.gradient;
            }
            assert!(gradient.is_none(), "nothing comes before the embedding");
            (loss.expect("the last span has the head"), all)
        }
    }

    #[test]
    fn gradients_agree_with_finite_differences() {
        for tied in [false, true] {
            let mut model = model(tied);
            let (_, gradients) = model.cut(&[]);
            assert_eq!(gradients.len(), model.structure.uses.len());
            for group in 0..model.structure.groups.len() {
                let mut whole = vec![0.0; model.structure.groups[group].len];
                for one in model.structure.uses_of_group(Group(u16::try_from(group).expect("small"))).iter() {
                    add_scaled(&mut whole, &gradients[&Use(u16::try_from(one).expect("small"))], 1.0);
                }
                // The largest components, where f32 has digits to spare.
                let mut order: Vec<usize> = (0..whole.len()).collect();
                order.sort_by(|a, b| whole[*b].abs().total_cmp(&whole[*a].abs()));
                for at in order.into_iter().take(12) {
                    let (before, step) = (model.weights[group][at], 0.01_f32);
                    model.weights[group][at] = before + step;
                    let above = model.loss();
                    model.weights[group][at] = before - step;
                    let below = model.loss();
                    model.weights[group][at] = before;
                    let (found, expected) = (f64::from(whole[at]), (above - below) / (2.0 * f64::from(step)));
                    assert!((found - expected).abs() < 0.01 * expected.abs() + 1e-4, "group {group} value {at}: {found} {expected}");
                }
            }
        }
    }

    #[test]
    fn cut_at_every_block_is_uncut_bit_for_bit() {
        for tied in [false, true] {
            let mut model = model(tied);
            let whole = model.cut(&[]);
            for cuts in [&[1][..], &[2], &[3], &[1, 2, 3]] {
                assert_eq!(model.cut(cuts), whole, "cut at {cuts:?}");
            }
        }
    }

    #[test]
    fn gradients_depend_on_every_group_of_weights() {
        for group in 0..4 {
            let mut model = model(false);
            let (_, before) = model.cut(&[]);
            model.weights[group].iter_mut().for_each(|weight| *weight *= 1.01);
            let (_, after) = model.cut(&[]);
            assert!(before.keys().all(|one| before[one] != after[one]), "weights of group {group}");
        }
    }

    #[test]
    fn samples_are_a_pure_function_of_seed_step_and_index() {
        let config = config(1, true, 4, 10);
        let tokens = |seed, step, index| {
            let mut samples = ToySamples { seed, ..ToySamples::new(&config) };
            samples.tokens(Step(step), Microbatch(index)).expect("tokens")
        };
        assert_eq!(tokens(1, 2, 3), tokens(1, 2, 3));
        assert_eq!(tokens(1, 2, 3).len(), 2 * 9);
        assert!([tokens(2, 2, 3), tokens(1, 3, 3), tokens(1, 2, 4)].iter().all(|other| *other != tokens(1, 2, 3)));
    }

    #[test]
    fn the_configuration_is_valid() {
        let config = config(3, true, 4, 10);
        assert_eq!(RunConfig::from_toml(&config.to_toml()), Ok(config));
    }
}
