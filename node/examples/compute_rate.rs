//! How many tokens a second one thread trains: forward and backward of a whole model and the
//! addition into a sum, without optimizer or network.
//!
//!     cargo run --example compute_rate [SEQUENCES] [LENGTH] [HIDDEN] [LAYERS] [VOCABULARY]

use std::collections::BTreeMap;
use std::time::Instant;

use skein_node::engine::core::{Compute, Gradients, Weights, Work};
use skein_node::engine::torch::{Torch, device};
use skein_node::engine::{EngineError, Samples};
use skein_protocol::config::RunConfig;
use skein_protocol::id::{Group, Microbatch, Step, Use};

struct Counting(u32, u32);

impl Samples for Counting {
    fn tokens(&mut self, _: Step, microbatch: Microbatch) -> Result<Vec<u32>, EngineError> {
        Ok((0..self.1).map(|index| index.wrapping_mul(2_654_435_761).wrapping_add(microbatch.0) % self.0).collect())
    }
}

#[expect(clippy::print_stdout, reason = "the result of an example")]
#[expect(clippy::disallowed_methods, reason = "it measures time")]
fn main() -> Result<(), Box<dyn std::error::Error>> {
    let threads = std::env::var("OMP_NUM_THREADS").ok().and_then(|text| text.parse().ok()).unwrap_or(1);
    device::ensure_environment(threads)?;
    device::load_cuda();
    device::set_threads(threads);
    let arguments: Vec<usize> = std::env::args().skip(1).map(|text| text.parse()).collect::<Result<_, _>>()?;
    let argument = |index: usize, default| arguments.get(index).copied().unwrap_or(default);
    let (sequences, length, hidden, layers, vocabulary) = (argument(0, 8), argument(1, 256), argument(2, 384), argument(3, 6), argument(4, 256));
    let config = RunConfig::from_toml(&format!(
        "[run]\nname = 'rate'\nsteps = 1\n[data]\nmanifest = '{}'\n[batch]\nmicrobatches = 1\nsequences = {sequences}\nlength = {length}\n\
         [model]\nvocab_size = {vocabulary}\nhidden_size = {hidden}\nintermediate_size = {}\nnum_hidden_layers = {layers}\nnum_attention_heads = {}\n\
         num_key_value_heads = {}\nmax_position_embeddings = {length}\n",
        "00".repeat(32),
        (hidden * 8 / 3).next_multiple_of(64),
        hidden.div_ceil(64),
        hidden.div_ceil(64),
    ))?;
    let structure = config.structure();
    let buffers: Vec<Vec<f32>> = structure.groups.iter().map(|layout| (0..layout.len).map(|index| (index as f32 * 0.7).sin() * 0.02).collect()).collect();
    let groups: BTreeMap<Group, &[f32]> = structure.group_ids().zip(buffers.iter().map(Vec::as_slice)).collect();
    let mut sums: Vec<Vec<f32>> = structure.groups.iter().map(|layout| vec![0.0; layout.len]).collect();
    let count = u32::try_from(sequences * (length + 1))?;
    let mut torch = Torch::new(&config, Box::new(Counting(u32::try_from(vocabulary)?, count)), device::choose(device::DeviceChoice::Best)?)?;
    let mut seconds = Vec::new();
    for round in 0..(64 / sequences).clamp(6, 24) {
        let start = Instant::now();
        let work = Work { step: Step(0), microbatch: Microbatch(u32::try_from(round)?), span: structure.whole() };
        let forward = torch.forward(&Weights { groups: &groups }, work, None)?;
        let backward = torch.backward(forward.graph, None)?;
        for (index, (group, _)) in structure.uses.iter().enumerate() {
            backward.gradients.add_to(Use(u16::try_from(index)?), &mut sums[usize::from(group.0)], false);
        }
        drop(backward);
        seconds.push(start.elapsed().as_secs_f64());
    }
    seconds.sort_by(f64::total_cmp);
    let tokens = (sequences * length) as f64;
    let parameters = structure.parameters() as f64;
    for (what, time) in [("median", seconds[seconds.len() / 2]), ("best", seconds[0])] {
        println!(
            "{what}: {:.1} ms, {:.0} tokens/s, {:.1} GFLOP/s at {parameters} parameters, {sequences} x {length} tokens, {threads} threads",
            time * 1e3,
            tokens / time,
            6.0 * parameters * tokens / time / 1e9
        );
    }
    Ok(())
}
