//! What this machine offers: measured, not claimed.

use skein_protocol::id::Hash;
use skein_protocol::message::control::Capability;

#[cfg(feature = "torch")]
use crate::engine::EngineError;

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

/// Sustained FLOP/s of the device and a hash of what its kernels compute, by a small matrix
/// product like those of a transformer layer. Call on a thread whose libtorch thread count is set.
///
/// # Errors
/// If the device fails.
#[cfg(feature = "torch")]
pub fn device(device: tch::Device) -> Result<(f64, Hash), EngineError> {
    const ROWS: i64 = 64;
    const WIDTH: i64 = 384;
    let fill = |rows: i64, columns: i64, step: f32| -> Result<tch::Tensor, EngineError> {
        let values: Vec<f32> = (0..rows * columns).map(|index| ((index as f32 * step) % 2.0) - 1.0).collect();
        Ok(tch::Tensor::f_from_slice(&values)?.f_reshape([rows, columns])?.f_to_device(device)?)
    };
    let (a, b) = (fill(ROWS, WIDTH, 0.37)?, fill(WIDTH, WIDTH, 0.73)?);
    let product = a.f_matmul(&b)?.f_to_device(tch::Device::Cpu)?;
    let mut values = vec![0f32; usize::try_from(ROWS * WIDTH).expect("a small product")];
    let len = values.len();
    product.f_copy_data(&mut values, len)?;
    let fingerprint = Hash::of(bytemuck::cast_slice(&values));
    Ok((crate::doctor::matrix_rate(device, MEASURE_FOR)?, fingerprint))
}

/// What a node offers that computes a share of the time.
pub fn capability(flops: f64, fingerprint: Hash, memory: u64, compute_share: f32) -> Capability {
    Capability { flops: flops * f64::from(compute_share), memory, compute_share, fingerprint }
}
