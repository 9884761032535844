//! Where tensors live, and what must be in place before libtorch is first called.

use std::path::{Path, PathBuf};

use tch::Device;

use super::super::EngineError;

/// What a user may ask for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DeviceChoice {
    /// A GPU if there is one, else the CPU.
    #[default]
    Best,
    /// The CPU.
    Cpu,
    /// The CUDA device with this index.
    Cuda(usize),
    /// Apple's GPU.
    Mps,
}

impl std::str::FromStr for DeviceChoice {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "best" => Ok(Self::Best),
            "cpu" => Ok(Self::Cpu),
            "cuda" => Ok(Self::Cuda(0)),
            "mps" => Ok(Self::Mps),
            other => match other.strip_prefix("cuda:").map(str::parse) {
                Some(Ok(index)) => Ok(Self::Cuda(index)),
                Some(Err(_)) | None => Err(format!("unknown device `{other}`: use best, cpu, cuda, cuda:<index> or mps")),
            },
        }
    }
}

/// The device for a choice. Call [`load_cuda`] before.
///
/// # Errors
/// If the device asked for is not here.
pub fn choose(choice: DeviceChoice) -> Result<Device, EngineError> {
    let cuda = || usize::try_from(tch::Cuda::device_count()).unwrap_or(0);
    match choice {
        DeviceChoice::Best if cuda() > 0 => Ok(Device::Cuda(0)),
        DeviceChoice::Best if tch::utils::has_mps() => Ok(Device::Mps),
        DeviceChoice::Best | DeviceChoice::Cpu => Ok(Device::Cpu),
        DeviceChoice::Cuda(index) if index < cuda() => Ok(Device::Cuda(index)),
        DeviceChoice::Cuda(index) => Err(EngineError::Device(format!("no CUDA device {index} here ({} found): use --device cpu", cuda()))),
        DeviceChoice::Mps if tch::utils::has_mps() => Ok(Device::Mps),
        DeviceChoice::Mps => Err(EngineError::Device("no MPS device here: use --device cpu".to_owned())),
    }
}

/// What came of [`load_cuda`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CudaLibrary {
    /// This libtorch has no CUDA library beside it: it is the CPU form.
    Absent,
    /// CUDA's kernels are registered.
    Loaded(PathBuf),
    /// It is there and does not load.
    Broken(String),
}

/// Loads `libtorch_cuda.so` if it lies beside the `libtorch_cpu.so` of this process, so that a
/// binary linked against the CPU form has CUDA. Must come before any other call of libtorch;
/// harmless where there is no GPU.
pub fn load_cuda() -> CudaLibrary {
    let Some(library) = loaded_library("libtorch_cpu.so").map(|cpu| cpu.with_file_name("libtorch_cuda.so")).filter(|path| path.is_file()) else {
        return CudaLibrary::Absent;
    };
    load_library(library)
}

#[cfg(unix)]
fn load_library(library: PathBuf) -> CudaLibrary {
    match super::raw::load_forever(&library) {
        Ok(()) => CudaLibrary::Loaded(library),
        Err(error) => CudaLibrary::Broken(format!("{}: {error}", library.display())),
    }
}

#[cfg(not(unix))]
fn load_library(library: PathBuf) -> CudaLibrary {
    CudaLibrary::Broken(format!("{}: not on this system", library.display()))
}

/// The path of a library that this process has mapped (Linux; elsewhere there is no CUDA to look for).
pub(crate) fn loaded_library(name: &str) -> Option<PathBuf> {
    let maps = std::fs::read_to_string("/proc/self/maps").ok()?;
    // address permissions offset device inode path
    let mut paths = maps.lines().filter_map(|line| line.find('/').map(|start| Path::new(&line[start..])));
    paths.find(|path| path.file_name().is_some_and(|file| file == name)).map(Path::to_owned)
}

/// More threads than this are never used: libtorch starts every one it is told to.
pub const THREADS_MAX: usize = 256;

/// Sets how many threads libtorch computes with, from 1 to [`THREADS_MAX`]. The count belongs to
/// the calling thread, so call it on the compute thread.
pub fn set_threads(threads: usize) {
    tch::set_num_threads(i32::try_from(threads.clamp(1, THREADS_MAX)).expect("clamped"));
}

/// Environment variables that are read before `main`. OpenMP's workers that wait must sleep, or
/// they would burn the cores that the network needs. The C library's allocator must keep what is
/// freed: gradients come and go with every microbatch, and fresh pages fill ten times slower than
/// pages used before. That takes its one main arena: it gives back those of other threads, such as
/// the compute thread's, whatever the threshold.
#[cfg(unix)]
const ENVIRONMENT: [(&str, &str); 5] = [
    ("OMP_WAIT_POLICY", "PASSIVE"),
    ("MKL_DYNAMIC", "FALSE"),
    ("MALLOC_ARENA_MAX", "1"),
    ("MALLOC_MMAP_THRESHOLD_", "33554432"),
    ("MALLOC_TRIM_THRESHOLD_", "17179869184"),
];

/// Set in the process that [`ensure_environment`] starts, so that it starts only one.
#[cfg(unix)]
const GUARD: &str = "SKEIN_ENVIRONMENT_SET";

/// Starts this program anew in this process, with the same arguments, unless `OMP_WAIT_POLICY` and
/// `OMP_NUM_THREADS` are set. To be called first in `main`, with the number of compute threads.
///
/// # Errors
/// If the program cannot be started anew; it may go on, slower.
#[cfg(unix)]
pub fn ensure_environment(threads: usize) -> std::io::Result<()> {
    use std::os::unix::process::CommandExt;
    let missing: Vec<(&str, String)> = ENVIRONMENT
        .iter()
        .map(|(name, value)| (*name, (*value).to_owned()))
        .chain([("OMP_NUM_THREADS", threads.clamp(1, THREADS_MAX).to_string())])
        .filter(|(name, _)| std::env::var_os(name).is_none())
        .collect();
    if missing.is_empty() || std::env::var_os(GUARD).is_some() {
        return Ok(());
    }
    let mut arguments = std::env::args_os();
    let mut command = std::process::Command::new(std::env::current_exe()?);
    if let Some(name) = arguments.next() {
        command.arg0(name);
    }
    // Returns only if it fails.
    Err(command.args(arguments).envs(missing).env(GUARD, "1").exec())
}

/// Nothing to set on this system.
///
/// # Errors
/// None.
#[cfg(not(unix))]
pub fn ensure_environment(_threads: usize) -> std::io::Result<()> {
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_have_names() {
        assert_eq!("cuda:3".parse(), Ok(DeviceChoice::Cuda(3)));
        assert_eq!("best".parse(), Ok(DeviceChoice::Best));
        let error = "gpu".parse::<DeviceChoice>().expect_err("no such device");
        assert_eq!(error, "unknown device `gpu`: use best, cpu, cuda, cuda:<index> or mps");
    }

    #[test]
    fn a_device_that_is_not_here_is_an_error() {
        assert_eq!(choose(DeviceChoice::Cpu), Ok(Device::Cpu));
        let error = choose(DeviceChoice::Cuda(99)).expect_err("nobody has a hundred");
        assert!(error.to_string().starts_with("no CUDA device 99 here"));
    }

    #[test]
    fn a_mapped_library_is_found_by_name() {
        tch::set_num_threads(1);
        let path = loaded_library("libtorch_cpu.so").expect("this test runs on it");
        assert!(path.is_file());
        assert_eq!(loaded_library("libnothing.so"), None);
    }
}
