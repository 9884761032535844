//! The engine against the plain formulas and against itself.

use skein_protocol::id::{Group, Microbatch, Span, Step, Version};

use super::*;
use crate::engine::{Engine, Outcome, Task};
use crate::model::reference::{self, numbers};
use crate::solo::solo;

/// Tokens that follow from step and microbatch.
struct Counting {
    vocabulary: u32,
    count: u32,
}

impl Samples for Counting {
    fn tokens(&mut self, step: Step, microbatch: Microbatch) -> Result<Vec<u32>, EngineError> {
        let first = step.0 as u32 + 7 * microbatch.0;
        Ok((0..self.count).map(|index| (first + 3 * index) % self.vocabulary).collect())
    }
}

fn config(tied: bool) -> RunConfig {
    let text = format!(
        "[run]\nname = 'test'\nsteps = 1\n[data]\nmanifest = '{}'\n[batch]\nmicrobatches = 1\nsequences = 2\nlength = 6\n\
         [model]\nvocab_size = 11\nhidden_size = 16\nintermediate_size = 24\nnum_hidden_layers = 2\nnum_attention_heads = 4\n\
         num_key_value_heads = 2\nmax_position_embeddings = 32\nrope_theta = 100.0\ntie_word_embeddings = {tied}\n",
        "00".repeat(32)
    );
    RunConfig::from_toml(&text).expect("valid")
}

struct Bench {
    torch: Torch,
    structure: Structure,
    buffers: Vec<Vec<f32>>,
}

impl Bench {
    fn new(tied: bool) -> Self {
        device::set_threads(1);
        let config = config(tied);
        let structure = config.structure();
        let buffers = structure.groups.iter().zip(1..).map(|(layout, seed)| numbers(seed, layout.len)).collect();
        let torch = Torch::new(&config, Box::new(Counting { vocabulary: 11, count: 14 }), Device::Cpu).expect("a CPU");
        Self { torch, structure, buffers }
    }

    fn forward(&mut self, span: Span, input: Option<&[f32]>) -> Result<Forward<Graph>, EngineError> {
        let groups = (0u16..).map(Group).zip(self.buffers.iter().map(Vec::as_slice)).collect();
        self.torch.forward(&Weights { groups: &groups }, Work { step: Step(3), microbatch: Microbatch(1), span }, input)
    }

    /// Loss and every use's gradient in its layout, computed in the given spans.
    fn train(&mut self, spans: &[Span]) -> (f32, Vec<Vec<f32>>) {
        let (mut graphs, mut boundary, mut loss) = (Vec::new(), None::<Vec<f32>>, None);
        for span in spans {
            let forward = self.forward(*span, boundary.as_deref()).expect("forward");
            (boundary, loss) = (forward.output, forward.loss);
            graphs.push((*span, forward.graph));
        }
        let mut sums: Vec<Vec<f32>> = self.structure.uses.iter().map(|(group, _)| vec![f32::NAN; self.structure.layout(*group).len]).collect();
        let mut gradient = None::<Vec<f32>>;
        for (span, graph) in graphs.into_iter().rev() {
            let ahead = (span.first.0 > 0).then(|| self.torch.input_gradient(&graph, gradient.as_deref()).expect("input gradient"));
            let backward = self.torch.backward(graph, gradient.as_deref()).expect("backward");
            assert!(
                ahead.iter().flatten().map(|v| v.to_bits()).eq(backward.gradient.iter().flatten().map(|v| v.to_bits())),
                "made ahead or not: the same bits"
            );
            for one in self.structure.uses_of(span).iter() {
                backward.gradients.add_to(Use(one as u16), &mut sums[one], true);
            }
            gradient = backward.gradient;
        }
        assert!(gradient.is_none(), "tokens have no gradient");
        (loss.expect("the last span has the head"), sums)
    }

    /// Loss by the plain formulas.
    fn formula(&mut self) -> f64 {
        let wide = |group: usize, buffers: &[Vec<f32>]| -> Vec<Vec<f64>> {
            let tensors = &self.structure.groups[group].tensors;
            tensors.iter().map(|spec| buffers[group][spec.offset..][..spec.len()].iter().map(|v| f64::from(*v)).collect()).collect()
        };
        let model = reference::model();
        let tokens = Counting { vocabulary: 11, count: 14 }.tokens(Step(3), Microbatch(1)).expect("tokens");
        let table = &wide(0, &self.buffers)[0];
        let row = |token: &u32| table[16 * *token as usize..][..16].to_vec();
        let mut x: Vec<f64> = tokens.chunks(7).flat_map(|sequence| sequence[..6].iter().flat_map(row)).collect();
        for layer in 1..3 {
            x = reference::layer(&x, &wide(layer, &self.buffers), &model, 6);
        }
        let head = wide(3, &self.buffers);
        let logits = reference::linear(&reference::rms_norm(&x, &head[0], 1e-5), head.get(1).unwrap_or(table), 16);
        let targets: Vec<i64> = tokens.chunks(7).flat_map(|sequence| sequence[1..].iter().map(|token| i64::from(*token))).collect();
        reference::cross_entropy(&logits, &targets, 11)
    }
}

fn same_bits(a: &[Vec<f32>], b: &[Vec<f32>]) -> bool {
    a.iter().flatten().map(|v| v.to_bits()).eq(b.iter().flatten().map(|v| v.to_bits()))
}

#[test]
fn the_loss_follows_the_formulas() {
    for tied in [false, true] {
        let mut bench = Bench::new(tied);
        let (loss, _) = bench.train(&[Span::new(0, 4)]);
        let expected = bench.formula();
        assert!((f64::from(loss) - expected).abs() < 1e-4, "tied {tied}: got {loss}, expected {expected}");
    }
}

#[test]
fn however_the_model_is_cut_the_bits_are_the_same() {
    for tied in [false, true] {
        let mut bench = Bench::new(tied);
        let whole = bench.train(&[Span::new(0, 4)]);
        for spans in [&[Span::new(0, 1), Span::new(1, 4)][..], &[Span::new(0, 2), Span::new(2, 3), Span::new(3, 4)]] {
            let cut = bench.train(spans);
            assert_eq!(cut.0.to_bits(), whole.0.to_bits());
            assert!(same_bits(&cut.1, &whole.1), "tied {tied}, {spans:?}");
        }
    }
}

#[test]
fn the_same_work_twice_gives_the_same_bits() {
    let mut bench = Bench::new(true);
    let (first, second) = (bench.train(&[Span::new(0, 4)]), bench.train(&[Span::new(0, 4)]));
    assert_eq!(first.0.to_bits(), second.0.to_bits());
    assert!(same_bits(&first.1, &second.1));
}

#[test]
fn gradients_equal_those_of_one_uncut_graph() {
    for tied in [false, true] {
        let mut bench = Bench::new(tied);
        let (_, cut) = bench.train(&[Span::new(0, 4)]);
        let groups: BTreeMap<Group, &[f32]> = (0u16..).map(Group).zip(bench.buffers.iter().map(Vec::as_slice)).collect();
        let work = Work { step: Step(3), microbatch: Microbatch(1), span: Span::new(0, 4) };
        let (tokens, targets) = bench.torch.tokens(work).expect("tokens");
        let (mut x, mut leaves) = (tokens, Vec::new());
        for block in work.span.blocks() {
            let one = bench.torch.leaves(&Weights { groups: &groups }, block).expect("weights");
            x = bench.torch.model.forward(block, &one.tensors, &x).expect("shapes fit");
            leaves.push(one);
        }
        let loss = cross_entropy(&x, &targets).expect("shapes fit");
        let sources: Vec<&Tensor> = leaves.iter().flat_map(|one| &one.tensors).collect();
        let made = Tensor::run_backward(&[loss], &sources, false, false);
        for ((one, offset), tensor) in leaves.iter().flat_map(|one| &one.places).zip(made) {
            let whole: Vec<f64> = reference::values(&tensor).into_iter().map(f64::from).collect();
            reference::close(&cut[usize::from(one.0)][*offset..][..whole.len()], &whole, 1e-6);
        }
    }
}

#[test]
fn a_gradient_is_the_slope_of_the_loss() {
    let mut bench = Bench::new(true);
    let (_, gradients) = bench.train(&[Span::new(0, 4)]);
    // The table's slope is the sum over both its uses.
    for (group, uses, index) in [(0, vec![0, 4], 40), (1, vec![1], 100), (2, vec![2], 5), (3, vec![3], 2)] {
        let value = bench.buffers[group][index];
        let mut at = |x: f32| {
            bench.buffers[group][index] = x;
            bench.formula()
        };
        let slope = (at(value + 1e-3) - at(value - 1e-3)) / f64::from((value + 1e-3) - (value - 1e-3));
        at(value);
        let got: f32 = uses.iter().map(|one: &usize| gradients[*one][index]).sum();
        assert!((f64::from(got) - slope).abs() < 1e-3 * slope.abs().max(1.0), "group {group}: got {got}, expected {slope}");
    }
}

#[test]
fn adding_twice_doubles_and_padding_stays_zero() {
    let mut bench = Bench::new(false);
    let graph = bench.forward(Span::new(0, 4), None).expect("forward").graph;
    let gradients = bench.torch.backward(graph, None).expect("backward").gradients;
    let layout = bench.structure.groups[0].clone();
    let mut sum = vec![f32::NAN; layout.len];
    gradients.add_to(Use(0), &mut sum, true);
    let once = sum.clone();
    gradients.add_to(Use(0), &mut sum, false);
    assert!(once.iter().any(|value| *value != 0.0));
    assert!(sum.iter().zip(&once).all(|(twice, once)| *twice == 2.0 * once));
    assert!(sum[layout.tensors[0].len()..].iter().all(|value| *value == 0.0));
}

#[test]
fn a_value_that_is_not_finite_is_noticed() {
    assert_eq!(squared_norm(&[0.0, -1.0, 3.0]), 10.0);
    let many: Vec<f32> = (0..10_007).map(|index| (index % 7) as f32).collect();
    assert_eq!(squared_norm(&many), many.iter().map(|value| f64::from(value * value)).sum::<f64>());
    for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        let mut values = vec![0.0; 10_000];
        values[9_999] = bad;
        assert!(!squared_norm(&values).is_finite());
    }
    let mut bench = Bench::new(false);
    bench.buffers[0][0] = f32::INFINITY;
    let graph = bench.forward(Span::new(0, 4), None).expect("forward").graph;
    assert!(!bench.torch.backward(graph, None).expect("backward").gradients.squared_norm(Use(0)).is_finite());
}

#[test]
fn what_does_not_fit_is_an_error_and_not_a_panic() {
    let mut bench = Bench::new(false);
    let short = bench.forward(Span::new(1, 2), Some(&[0.0; 5])).map(drop);
    assert_eq!(short, Err(EngineError::Device("a boundary tensor has 192 values, got 5".to_owned())));
    assert!(bench.forward(Span::new(1, 2), None).map(drop).expect_err("no input").to_string().starts_with("no boundary tensor before block"));
    bench.buffers.pop();
    assert!(matches!(bench.forward(Span::new(0, 4), None).map(drop), Err(EngineError::Absent { .. })));
    bench.torch.samples = Box::new(Counting { vocabulary: 13, count: 14 });
    let error = bench.forward(Span::new(0, 1), None).map(drop).expect_err("a token too many");
    assert_eq!(error.to_string(), "training data: token 12 is not in the model's vocabulary of 11");
    bench.torch.samples = Box::new(Counting { vocabulary: 11, count: 13 });
    assert!(matches!(bench.forward(Span::new(0, 1), None).map(drop), Err(EngineError::Data(_))));
}

#[test]
fn errors_of_the_library_are_one_line() {
    let table = Tensor::from_slice(&[0.0f32; 4]).view([2, 2]);
    let error = EngineError::from(table.f_matmul(&Tensor::from_slice(&[0.0f32; 3])).expect_err("shapes do not fit"));
    assert_eq!(error.to_string().lines().count(), 1);
}

/// A model that solo trains on libtorch through the whole engine.
fn trained(steps: u64) -> (Vec<f32>, Vec<Vec<f32>>) {
    trained_in(skein_protocol::config::Mode::Sync, steps)
}

fn trained_in(mode: skein_protocol::config::Mode, steps: u64) -> (Vec<f32>, Vec<Vec<f32>>) {
    device::set_threads(1);
    let mut config = config(true);
    config.run.mode = mode;
    config.run.steps = steps;
    config.batch.microbatches = 3;
    config.optimizer.learning_rate = 1e-2;
    config.optimizer.warmup_steps = 2;
    let structure = config.structure();
    let torch = Torch::new(&config, Box::new(Counting { vocabulary: 11, count: 14 }), Device::Cpu).expect("a CPU");
    let mut engine = crate::engine::core::Core::new(torch, &config, structure.clone());
    let groups = structure.group_ids().collect();
    assert!(matches!(engine.run(Task::Draw { groups }), Outcome::Finished));
    let mut losses = Vec::new();
    solo(&mut engine, &config, &structure, Version(0), steps, &mut |step| losses.push(step.loss)).expect("steps");
    (losses, structure.group_ids().map(|group| engine.weights(group).expect("held").to_vec()).collect())
}

#[test]
fn a_model_learns_and_the_same_run_gives_the_same_bits() {
    let (losses, weights) = trained(20);
    assert!((losses[0] - 11f32.ln()).abs() < 0.1, "an untrained model knows nothing: {losses:?}");
    assert!(losses[19] < losses[0] - 0.5, "{losses:?}");
    let (again, same) = trained(20);
    assert_eq!(losses, again);
    assert!(same_bits(&weights, &same));
}

#[test]
fn in_mode_exact_a_model_learns_as_well() {
    let (sync, _) = trained(20);
    let (exact, weights) = trained_in(skein_protocol::config::Mode::Exact, 20);
    assert!(sync.iter().zip(&exact).all(|(a, b)| (a - b).abs() < 1e-3), "{sync:?} {exact:?}");
    let (again, same) = trained_in(skein_protocol::config::Mode::Exact, 20);
    assert_eq!(exact, again);
    assert!(same_bits(&weights, &same));
}
