//! What is wrong with this machine, and how to mend it: libtorch, device, threads.

use std::time::{Duration, Instant};

use tch::{Device, Kind, Tensor};

use crate::engine::EngineError;
use crate::engine::torch::device::{CudaLibrary, DeviceChoice, choose, loaded_library, set_threads};

/// How a thing looked at stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Health {
    /// As it should be.
    Good,
    /// Works, and could be better.
    Poor,
    /// Does not work.
    Bad,
}

/// One thing looked at.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding {
    /// What was looked at.
    pub what: &'static str,
    /// How it stands.
    pub health: Health,
    /// What was found, in one line.
    pub found: String,
    /// What to do about it; none where nothing is wrong.
    pub mend: Option<String>,
}

impl Finding {
    /// Nothing is wrong.
    pub fn good(what: &'static str, found: impl Into<String>) -> Self {
        Self { what, health: Health::Good, found: found.into(), mend: None }
    }

    /// It works, and could be better.
    pub fn poor(what: &'static str, found: impl Into<String>, mend: impl Into<String>) -> Self {
        Self { what, health: Health::Poor, found: found.into(), mend: Some(mend.into()) }
    }

    /// It does not work.
    pub fn bad(what: &'static str, found: impl Into<String>, mend: impl Into<String>) -> Self {
        Self { what, health: Health::Bad, found: found.into(), mend: Some(mend.into()) }
    }
}

/// Looks at libtorch, the device and the threads, and measures how fast matrices multiply; takes
/// about a second. `cuda` is what [`load_cuda`](crate::engine::torch::device::load_cuda) said.
pub fn examine(cuda: &CudaLibrary, choice: DeviceChoice, threads: usize) -> Vec<Finding> {
    let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    set_threads(threads.min(cores));
    let mut findings = vec![library(), cuda_library(cuda), count(threads, cores), waiting(std::env::var("OMP_WAIT_POLICY").ok().as_deref())];
    match choose(choice) {
        Ok(device) => {
            findings.push(Finding::good("device", name(device)));
            findings.push(speed(device));
        }
        Err(error) => findings.push(Finding::bad("device", error.to_string(), "choose another --device, or none")),
    }
    findings
}

fn library() -> Finding {
    let Some(path) = loaded_library("libtorch_cpu.so") else {
        return Finding::good("libtorch", "loaded");
    };
    // .../lib/libtorch_cpu.so, .../build-version
    let version = path.parent().and_then(|lib| std::fs::read_to_string(lib.parent()?.join("build-version")).ok());
    let version = version.as_deref().map_or("of unknown version", str::trim);
    Finding::good("libtorch", format!("{version} at {}", path.display()))
}

fn cuda_library(cuda: &CudaLibrary) -> Finding {
    match cuda {
        CudaLibrary::Absent => Finding::good("CUDA library", "none: this is the CPU form of libtorch (scripts/libtorch cuda prepares the other)"),
        CudaLibrary::Loaded(path) if tch::Cuda::device_count() > 0 => Finding::good("CUDA library", path.display().to_string()),
        CudaLibrary::Loaded(path) => {
            Finding::poor("CUDA library", format!("{} finds no GPU", path.display()), "install the GPU's driver, or ignore this where there is no GPU")
        }
        CudaLibrary::Broken(reason) => Finding::bad("CUDA library", reason.clone(), "run scripts/libtorch cuda, which fetches what it needs"),
    }
}

fn count(threads: usize, cores: usize) -> Finding {
    if threads > cores {
        return Finding::poor(
            "threads",
            format!("{threads} on {cores} cores"),
            format!("use --threads {cores} or fewer: threads that share a core wait for each other"),
        );
    }
    Finding::good("threads", format!("{threads} on {cores} cores"))
}

fn waiting(policy: Option<&str>) -> Finding {
    match policy {
        Some(policy) if policy.eq_ignore_ascii_case("passive") => Finding::good("OMP_WAIT_POLICY", policy),
        Some(policy) => Finding::poor("OMP_WAIT_POLICY", policy, "unset it: waiting threads that spin take the cores that the network needs"),
        None => Finding::poor("OMP_WAIT_POLICY", "not set", "set it to PASSIVE: waiting threads that spin take the cores that the network needs"),
    }
}

fn name(device: Device) -> String {
    match device {
        Device::Cpu => "CPU".to_owned(),
        Device::Cuda(index) => format!("CUDA device {index}"),
        Device::Mps => "MPS".to_owned(),
        Device::Vulkan => "Vulkan".to_owned(),
    }
}

fn speed(device: Device) -> Finding {
    match matrix_rate(device, Duration::from_millis(500)) {
        Ok(rate) => Finding::good("speed", format!("{:.0} GFLOP/s in f32", rate / 1e9)),
        Err(error) => Finding::bad("speed", error.to_string(), "use --device cpu"),
    }
}

/// Multiplies matrices in f32 for at least `time`: FLOP a second, sustained.
///
/// # Errors
/// If the device fails.
#[expect(clippy::disallowed_methods, reason = "it measures time")]
pub fn matrix_rate(device: Device, time: Duration) -> Result<f64, EngineError> {
    let _guard = tch::no_grad_guard();
    let side = if device == Device::Cpu { 512 } else { 4096 };
    let a = Tensor::f_ones([side, side], (Kind::Float, device))?;
    // Reading a value waits for the device.
    let wait = |product: &Tensor| product.f_double_value(&[0, 0]);
    wait(&a.f_mm(&a)?)?;
    let (start, mut rounds) = (Instant::now(), 0u32);
    while start.elapsed() < time {
        wait(&a.f_mm(&a)?)?;
        rounds += 1;
    }
    Ok(2.0 * (side as f64).powi(3) * f64::from(rounds) / start.elapsed().as_secs_f64())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_machine_with_a_cpu_can_compute() {
        let findings = examine(&CudaLibrary::Absent, DeviceChoice::Cpu, 1);
        assert!(findings.iter().all(|finding| finding.health != Health::Bad), "{findings:?}");
        assert!(findings.iter().all(|finding| finding.mend.is_some() == (finding.health != Health::Good)));
        assert!(findings.iter().any(|finding| finding.what == "speed" && finding.found.ends_with("GFLOP/s in f32")));
    }

    #[test]
    fn what_is_wrong_comes_with_what_to_do() {
        let findings = examine(&CudaLibrary::Broken("libtorch_cuda.so: no libcudart".to_owned()), DeviceChoice::Cuda(99), 1);
        let bad: Vec<_> = findings.iter().filter(|finding| finding.health == Health::Bad).map(|finding| finding.what).collect();
        assert_eq!(bad, ["CUDA library", "device"]);
        assert_eq!((count(3, 2).health, count(2, 2).health), (Health::Poor, Health::Good));
        assert_eq!(waiting(Some("ACTIVE")).health, Health::Poor);
        assert_eq!(waiting(Some("passive")).health, Health::Good);
        assert_eq!(waiting(None).health, Health::Poor);
    }

    #[test]
    fn the_rate_counts_what_was_multiplied() {
        tch::set_num_threads(1);
        let rate = matrix_rate(Device::Cpu, Duration::from_millis(50)).expect("a CPU");
        assert!((1e8..1e13).contains(&rate), "{rate}");
    }
}
