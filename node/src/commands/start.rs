//! `start` and `identity`.

use std::net::SocketAddr;
use std::path::Path;

use anyhow::Context;
use skein_node::engine::core::Core;
use skein_node::engine::torch::{Torch, device};
use skein_node::engine::{Engine, EngineError};
use skein_node::shell::driver::{DaemonSettings, EngineMaker, run};
use skein_node::shell::measure;
use skein_protocol::net::control::CoordinatorAddress;
use skein_protocol::net::identity::Identity;
use skein_protocol::net::peer_id;

use crate::settings::StartArgs;

/// The node's key file in its state folder.
const KEY_FILE: &str = "node.key";

pub(crate) fn identity(state: &Path) -> anyhow::Result<()> {
    let identity = Identity::load_or_create(&state.join(KEY_FILE))?;
    println!("{}", identity.node_id());
    Ok(())
}

pub(crate) fn start(args: StartArgs) -> anyhow::Result<()> {
    device::ensure_environment(args.threads).context("cannot set the environment for libtorch")?;
    std::fs::create_dir_all(&args.state).with_context(|| format!("cannot make the state folder {}", args.state.display()))?;
    let _lock = lock(&args.state)?;
    let identity = Identity::load_or_create(&args.state.join(KEY_FILE))?;
    match device::load_cuda() {
        device::CudaLibrary::Broken(problem) => tracing::warn!("CUDA is there and does not load ({problem}): computing without it"),
        device::CudaLibrary::Absent | device::CudaLibrary::Loaded(_) => {}
    }
    let place = device::choose(args.device)?;
    device::set_threads(args.threads);
    let (flops, fingerprint) = measure::device(place)?;
    let capability = measure::capability(flops, fingerprint, measure::memory(args.memory_limit), args.compute_share);
    let name = peer_id(identity.node_id()).map(|peer| peer.to_string()).unwrap_or_default();
    tracing::info!(
        node = identity.node_id().short(),
        peer = name,
        name = args.name,
        device = ?place,
        gflops = capability.flops / 1e9,
        memory_mib = capability.memory >> 20,
        share = args.compute_share,
        threads = args.threads,
        "starting"
    );
    let threads = args.threads;
    let make: EngineMaker = Box::new(move |config, samples| -> Result<Box<dyn Engine>, EngineError> {
        device::set_threads(threads);
        let structure = config.structure();
        Ok(Box::new(Core::new(Torch::new(&config, samples, place)?, &config, structure)))
    });
    let settings = DaemonSettings {
        listen: args.listen.unwrap_or_else(|| default_listen(&args.coordinator)),
        identity,
        coordinator: args.coordinator,
        state: args.state,
        data: args.data,
        dial_override: args.dial_override.into_iter().collect(),
        links: args.links.into_iter().collect(),
        capability,
    };
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().context("cannot start the runtime")?;
    let reason = runtime.block_on(run(settings, make))?;
    tracing::info!("{reason}");
    // Tasks of libraries that wait for timeouts are not waited for.
    runtime.shutdown_background();
    Ok(())
}

/// Everywhere; on loopback only where the coordinator is on this machine.
fn default_listen(coordinator: &CoordinatorAddress) -> SocketAddr {
    let local = coordinator.socket_addr().is_some_and(|address| address.ip().is_loopback());
    if local { ([127, 0, 0, 1], 0).into() } else { ([0, 0, 0, 0], 0).into() }
}

/// Two nodes must not share a folder.
fn lock(state: &Path) -> anyhow::Result<std::fs::File> {
    let path = state.join("lock");
    let file = std::fs::File::create(&path).with_context(|| format!("cannot write {}", path.display()))?;
    file.try_lock().map_err(|_| anyhow::anyhow!("{} is in use by another node: give each node a --state folder of its own", state.display()))?;
    Ok(file)
}
