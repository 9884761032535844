//! `skein-coordinator start`: from flags to a running coordinator, and back to a quiet disk.

use std::io::Write;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;

use anyhow::{Context, Result, bail};
use skein_protocol::config::RunConfig;
use skein_protocol::id::NodeId;
use skein_protocol::message::control::{FromCoordinator, ToCoordinator};
use skein_protocol::net::Identity;
use skein_protocol::net::control::{ControlEvent, ControlServer, CoordinatorAddress};
use tokio::sync::mpsc;

use crate::driver::{Control, Driver, End, QUESTIONS_MAX, Requests};
use crate::http;
use crate::machine::{Coordinator, Event};
use crate::record::Record;
use crate::settings::{StartArgs, check_log_exists, check_resume, read_config};
use crate::state::{Endpoints, IDENTITY_FILE, StateDir};
use crate::store::{LOG_FILE, RedbStore, Store};

/// Signals that are waited for: one to stop, one to stop at once.
const STOPS_MAX: usize = 2;

/// Coordinates until the user stops it.
pub async fn start(args: StartArgs) -> Result<()> {
    let config = read_config(&args.run)?;
    check_log_exists(&args)?;
    let state = StateDir::open(&args.state)?;
    Endpoints::remove(&state)?;
    let identity = Identity::load_or_create(&state.file(IDENTITY_FILE))?;
    let mut store = RedbStore::open(&state.file(LOG_FILE))?;
    let mut log = store.load()?;
    check_resume(&args, &config, identity.node_id(), &log)?;

    let stops = signals()?;
    let (listener, http) = http::listen(args.http).await?;
    let (server, events) = ControlServer::start(&identity, vec![args.listen.clone()]).await?;
    let endpoints = endpoints(&identity, &server, http);
    // Only now has a run begun: a start that failed before can be repeated as it was.
    if log.is_empty() {
        log.push(Record::Run { config: config.to_toml() });
        store.append(&log)?;
    }
    let boot = state.next_boot()?;
    introduce(&args, &config, &identity, &log, boot);
    let machine = Coordinator::new(config.clone(), config.structure(), identity.node_id(), Arc::new(identity), boot, log);

    let (ask, questions) = mpsc::channel(QUESTIONS_MAX);
    tokio::spawn(async move {
        if let Err(error) = http::serve(listener, ask).await {
            tracing::warn!("the status is not served any more: {error}");
        }
    });
    let mut driver = Driver::new(machine, store, Plane { server, events });
    // Whoever waits for this file finds everything working.
    endpoints.write(&state)?;
    join_line(&endpoints);

    let end = driver.run(Requests { stops, questions }).await;
    let finished = driver.status().state == "finished";
    driver.into_control().server.shutdown().await;
    // Nobody is there any more; that the file cannot be removed changes nothing for the user.
    let _ = Endpoints::remove(&state);
    match end.context("the coordinator stopped")? {
        End::Stopped if finished => tracing::info!("stopped; the run is finished"),
        End::Stopped => tracing::info!("stopped; go on with: {}", resume_command()),
        End::Unsaved => bail!("stopped before a checkpoint was saved; go on from the one before with: {}", resume_command()),
    }
    Ok(())
}

fn endpoints(identity: &Identity, server: &ControlServer, http: SocketAddr) -> Endpoints {
    let control = server.addresses().iter().map(|address| CoordinatorAddress::new(identity, address.clone()).to_string()).collect();
    Endpoints { control, http: format!("http://{http}"), peer_id: identity.peer_id().to_string() }
}

/// Prints what it works with.
fn introduce(args: &StartArgs, config: &RunConfig, identity: &Identity, log: &[Record], boot: u64) {
    let structure = config.structure();
    let run = config.run_id(identity.node_id());
    tracing::info!("run `{}` ({}), {} steps, seed {}", config.run.name, run.short(), config.run.steps, config.run.seed);
    tracing::info!(
        "{} parameters in {} blocks; {} microbatches x {} sequences x {} tokens a step",
        structure.parameters(),
        structure.blocks(),
        config.batch.microbatches,
        config.batch.sequences,
        config.batch.length
    );
    let commits = log.iter().filter(|record| matches!(record, Record::Commit(_))).count();
    tracing::info!("state in {}: start {boot}, {} records, {commits} commits", args.state.display(), log.len());
}

/// Prints the address to give to nodes: the one result of a start.
fn join_line(endpoints: &Endpoints) {
    tracing::info!("status at {}/status", endpoints.http);
    let elsewhere = endpoints.control.iter().find(|address| !address.starts_with("/ip4/127.") && !address.starts_with("/ip6/::1/"));
    if let Some(address) = elsewhere.or(endpoints.control.first()) {
        // Nobody may be reading; the address is in endpoints.json too.
        let _ = writeln!(std::io::stdout(), "join with: skein-node start --coordinator {address} --state DIR");
    }
}

/// How this process was started, with `--resume`.
fn resume_command() -> String {
    let mut words: Vec<String> = std::env::args().collect();
    if let Some(program) = words.first_mut() {
        *program = Path::new(program).file_name().map_or_else(|| program.clone(), |name| name.to_string_lossy().into_owned());
    }
    if !words.iter().any(|word| word == "--resume") {
        words.push("--resume".to_owned());
    }
    let plain = |word: &String| !word.is_empty() && word.chars().all(|c| c.is_alphanumeric() || "-_./:=@,+".contains(c));
    let words: Vec<String> = words.into_iter().map(|word| if plain(&word) { word } else { format!("'{}'", word.replace('\'', "'\\''")) }).collect();
    words.join(" ")
}

/// One item per Ctrl-C or request to terminate.
fn signals() -> Result<mpsc::Receiver<()>> {
    let (stop, stops) = mpsc::channel(STOPS_MAX);
    #[cfg(unix)]
    {
        use tokio::signal::unix::{SignalKind, signal};
        let mut interrupt = signal(SignalKind::interrupt()).context("cannot listen for Ctrl-C")?;
        let mut terminate = signal(SignalKind::terminate()).context("cannot listen for termination")?;
        tokio::spawn(async move {
            loop {
                tokio::select! { _ = interrupt.recv() => {}, _ = terminate.recv() => {} }
                if !told(&stop).await {
                    return;
                }
            }
        });
    }
    #[cfg(not(unix))]
    tokio::spawn(async move { while tokio::signal::ctrl_c().await.is_ok() && told(&stop).await {} });
    Ok(stops)
}

async fn told(stop: &mpsc::Sender<()>) -> bool {
    tracing::info!("stopping: a checkpoint is saved first; once more stops at once");
    stop.send(()).await.is_ok()
}

/// The control plane as the driver sees it.
struct Plane {
    server: ControlServer,
    events: mpsc::Receiver<ControlEvent<ToCoordinator>>,
}

impl Control for Plane {
    async fn next(&mut self) -> Option<Event> {
        self.events.recv().await.map(event_of)
    }

    fn try_next(&mut self) -> Option<Event> {
        self.events.try_recv().ok().map(event_of)
    }

    fn send(&mut self, to: NodeId, message: FromCoordinator) {
        self.server.send(to, &message);
    }

    fn disconnect(&mut self, node: NodeId) {
        self.server.disconnect(node);
    }
}

fn event_of(event: ControlEvent<ToCoordinator>) -> Event {
    match event {
        ControlEvent::Up(node) => Event::Connected(node),
        ControlEvent::Message(from, message) => Event::Received { from, message },
        ControlEvent::Down { node, reason } => {
            tracing::debug!(peer = %node.short(), "connection ended: {reason}");
            Event::Disconnected(node)
        }
    }
}
