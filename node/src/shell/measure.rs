//! What this machine offers: measured, not claimed.

use skein_protocol::id::Hash;
use skein_protocol::message::control::Capability;

#[cfg(feature = "torch")]
use {
    crate::engine::core::Core,
    crate::engine::torch::Torch,
    crate::engine::{Engine, EngineError, Outcome, Samples, Task},
    crate::solo::solo,
    skein_protocol::config::RunConfig,
    skein_protocol::id::{Microbatch, Step, Version},
};

/// Memory left to the system when nothing else is said: one part in four.
const MEMORY_SHARE: u64 = 4;

/// How long the device is measured at start.
#[cfg(feature = "torch")]
const MEASURE_FOR: std::time::Duration = std::time::Duration::from_millis(200);

/// Bytes of memory that this node lends: the limit given, or three quarters of what is free.
pub fn memory(limit: Option<u64>) -> u64 {
    let Ok(mut system) = sysinfo::System::new() else { return limit.unwrap_or(0) };
    system.refresh_memory();
    let free = system.available_memory();
    limit.unwrap_or(free - free / MEMORY_SHARE).min(system.total_memory())
}

/// Sustained FLOP/s of the device, and its [`fingerprint`]. Call on a thread whose libtorch thread
/// count is set.
///
/// # Errors
/// If the device fails.
#[cfg(feature = "torch")]
pub fn device(device: tch::Device) -> Result<(f64, Hash), EngineError> {
    let fingerprint = fingerprint(device)?;
    Ok((crate::doctor::matrix_rate(device, MEASURE_FOR)?, fingerprint))
}

/// A hash of the weights and the optimizer's state after two steps of a small model in mode `exact`:
/// of what the device computes forward, backward and in sums. Devices with equal fingerprints are
/// taken for one kind; shapes of the run itself may still tell them apart.
#[cfg(feature = "torch")]
fn fingerprint(device: tch::Device) -> Result<Hash, EngineError> {
    let config = RunConfig::from_toml(PROBE).map_err(|error| EngineError::Device(error.to_string()))?;
    let structure = config.structure();
    let mut engine = Core::new(Torch::new(&config, Box::new(ProbeTokens), device)?, &config, structure.clone());
    if let Outcome::Failed { error, .. } = engine.run(Task::Draw { groups: structure.group_ids().collect() }) {
        return Err(error);
    }
    solo(&mut engine, &config, &structure, Version(0), config.run.steps, &mut |_| {}).map_err(|error| EngineError::Device(error.to_string()))?;
    let roots: Vec<Hash> = structure.group_ids().filter_map(|group| engine.state_root(group)).collect();
    Ok(Hash::root(&roots))
}

/// Grouped-query attention, an untied head, several microbatches: every kernel of a run, in small.
#[cfg(feature = "torch")]
const PROBE: &str = "\
[run]
name = 'probe'
steps = 2
mode = 'exact'
[model]
vocab_size = 256
hidden_size = 128
intermediate_size = 352
num_hidden_layers = 2
num_attention_heads = 4
num_key_value_heads = 2
max_position_embeddings = 64
[data]
manifest = '0000000000000000000000000000000000000000000000000000000000000000'
[batch]
microbatches = 2
sequences = 2
length = 64
";

#[cfg(feature = "torch")]
struct ProbeTokens;

#[cfg(feature = "torch")]
impl Samples for ProbeTokens {
    fn tokens(&mut self, step: Step, microbatch: Microbatch) -> Result<Vec<u32>, EngineError> {
        let first = u32::try_from(step.0).unwrap_or_default() + 31 * microbatch.0;
        Ok((0..2 * 65u32).map(|index| (first + index * index) % 256).collect())
    }
}

/// What a node offers that computes a share of the time.
pub fn capability(flops: f64, fingerprint: Hash, memory: u64, compute_share: f32) -> Capability {
    Capability { flops: flops * f64::from(compute_share), memory, compute_share, fingerprint }
}

#[cfg(all(test, feature = "torch"))]
mod tests {
    use super::*;

    #[test]
    fn a_device_has_the_same_fingerprint_every_time() {
        crate::engine::torch::device::set_threads(1);
        assert_eq!(fingerprint(tch::Device::Cpu), fingerprint(tch::Device::Cpu));
    }
}
