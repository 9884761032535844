//! The daemon: performs what the machine asks for and tells it what happens.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use skein_protocol::config::RunConfig;
use skein_protocol::id::{NodeId, RunId};
use skein_protocol::limits;
use skein_protocol::message::control::{Capability, FromCoordinator, ToCoordinator};
use skein_protocol::net::NetError;
use skein_protocol::net::control::{ControlClient, ControlEvent, CoordinatorAddress};
use skein_protocol::net::identity::Identity;
use skein_protocol::net::links::{Kind, LinkEvent, LinkSettings, Links};
use skein_protocol::time::Time;
use tokio::sync::mpsc;

use crate::checkpoint::{self, CheckpointError};
use crate::data::DataError;
use crate::data::sampler::Sampler;
use crate::engine::{Engine, EngineError, Samples};
use crate::machine::{Action, Event, Node, NodeSettings, Report};

use super::compute::{Answer, Compute, TimeSpent};
use super::data::{DataDesk, Taken};

/// The folder of an imported model within a node's state. It is filed under no run, so that any
/// run may begin with it.
pub const IMPORTED: &str = "imported";

/// How often traffic is told.
const TRAFFIC_EVERY: Duration = Duration::from_secs(1);
/// How long a graceful end may take.
const LEAVE_MAX: Duration = Duration::from_secs(15);

/// How the daemon is started.
pub struct DaemonSettings {
    /// Who this node is.
    pub identity: Identity,
    /// Whom it obeys.
    pub coordinator: CoordinatorAddress,
    /// Its folder: run, checkpoints, fetched data.
    pub state: PathBuf,
    /// Data that it brings along.
    pub data: Option<PathBuf>,
    /// Where the data plane listens.
    pub listen: SocketAddr,
    /// Dial these nodes elsewhere.
    pub dial_override: BTreeMap<NodeId, SocketAddr>,
    /// What may carry links.
    pub links: BTreeSet<Kind>,
    /// What it offers.
    pub capability: Capability,
}

/// Makes an engine on the compute thread.
pub type EngineMaker = Box<dyn FnOnce(RunConfig, Box<dyn Samples>) -> Result<Box<dyn Engine>, EngineError> + Send>;

/// Why the daemon ended other than it should. One line for the user.
#[derive(Debug, thiserror::Error)]
pub enum DaemonError {
    /// The network could not be set up.
    #[error(transparent)]
    Net(#[from] NetError),
    /// The data cannot be used.
    #[error(transparent)]
    Data(#[from] DataError),
    /// The checkpoints on disk cannot be read.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    /// The engine could not be made.
    #[error("the engine did not start: {0}; try `skein-node doctor`")]
    Engine(EngineError),
    /// The system refused something.
    #[error("{what}: {source}")]
    Io {
        /// What was tried, on what.
        what: String,
        /// Why.
        source: std::io::Error,
    },
    /// The machine ended its part.
    #[error("{0}")]
    Ended(String),
}

/// Runs the daemon until its part is over, or the user ends it; the reason why it ended well.
pub async fn run(settings: DaemonSettings, make_engine: EngineMaker) -> Result<String, DaemonError> {
    let (mut daemon, mut inbox) = Daemon::start(settings, make_engine).await?;
    let mut signals = Signals::new().map_err(|source| DaemonError::Io { what: "cannot listen for signals".to_owned(), source })?;
    let mut leave_by: Option<Instant> = None;
    daemon.handle(Event::Timer)?;
    loop {
        if let Some(end) = daemon.end.take() {
            return end.map_err(DaemonError::Ended);
        }
        let next = [daemon.machine.next_timeout(), daemon.data.next_timeout()].into_iter().flatten().min();
        let wake = next.unwrap_or_else(|| daemon.now() + Duration::from_secs(1)).since(daemon.now()).max(Duration::from_millis(1));
        let wake = leave_by.map_or(wake, |by| wake.min(by.saturating_duration_since(Instant::now())));
        tokio::select! {
            Some(event) = recv(&mut daemon.control) => daemon.control_event(event)?,
            Some(event) = inbox.links.recv() => daemon.link_event(event)?,
            Some(answer) = inbox.answers.recv() => daemon.answer(answer)?,
            Some(event) = inbox.disk.recv() => daemon.handle(event)?,
            Some(dialled) = inbox.dials.recv() => daemon.dialled(dialled)?,
            () = signals.recv() => {
                if leave_by.is_some() {
                    return Ok("ended at once".to_owned());
                }
                leave_by = Some(Instant::now() + LEAVE_MAX);
                tracing::info!("leaving; a second signal ends at once");
                daemon.handle(Event::Leave)?;
            }
            () = tokio::time::sleep(wake) => daemon.timer()?,
        }
        if leave_by.is_some_and(|by| by <= Instant::now()) {
            return Ok("left without waiting longer".to_owned());
        }
    }
}

async fn recv<T>(channel: &mut Option<mpsc::Receiver<T>>) -> Option<T> {
    match channel {
        Some(receiver) => receiver.recv().await,
        None => std::future::pending().await,
    }
}

type Dialled = (u64, Result<(ControlClient, mpsc::Receiver<ControlEvent<FromCoordinator>>), NetError>);

struct Inbox {
    links: mpsc::Receiver<LinkEvent>,
    answers: mpsc::Receiver<Answer>,
    disk: mpsc::Receiver<Event>,
    dials: mpsc::Receiver<Dialled>,
}

struct Daemon {
    machine: Node,
    identity: Arc<Identity>,
    coordinator: CoordinatorAddress,
    state: PathBuf,
    links: Links,
    data: DataDesk,
    control: Option<mpsc::Receiver<ControlEvent<FromCoordinator>>>,
    client: Option<ControlClient>,
    dial: u64,
    dials: mpsc::Sender<Dialled>,
    answers: mpsc::Sender<Answer>,
    disk: mpsc::Sender<Event>,
    make_engine: Option<EngineMaker>,
    compute: Option<Compute>,
    share: f64,
    /// The run, from its first welcome on.
    run: Option<(RunId, RunConfig)>,
    /// What the coordinator said since a welcome for which the data is not here yet.
    held_back: Vec<FromCoordinator>,
    begun: Instant,
    end: Option<Result<String, String>>,
    spent: TimeSpent,
    traffic: Traffic,
}

/// What the links had carried when it was told last.
struct Traffic {
    told: Instant,
    sent: u64,
    received: u64,
}

impl Daemon {
    async fn start(settings: DaemonSettings, make_engine: EngineMaker) -> Result<(Self, Inbox), DaemonError> {
        let data = DataDesk::new(settings.state.join("data"), settings.data.as_deref())?;
        let link_settings = LinkSettings { dial_override: settings.dial_override, kinds: settings.links, ..LinkSettings::new(settings.listen) };
        let (links, link_events) = Links::start(&settings.identity, link_settings).await?;
        let known_run = read_run(&settings.state);
        let mut shards = checkpoint::list(&settings.state.join(IMPORTED), RunId::default())?;
        if let Some(run) = known_run {
            shards.extend(checkpoint::list(&settings.state.join("checkpoints"), run)?);
        }
        let share = f64::from(settings.capability.compute_share);
        let identity = Arc::new(settings.identity);
        let machine = Node::new(NodeSettings {
            id: identity.node_id(),
            coordinator: settings.coordinator.node,
            signer: identity.clone(),
            capability: settings.capability,
            data_addresses: vec![reachable(links.local_addr(), &settings.coordinator).to_string()],
            data: data.name(),
            run: known_run,
            shards,
            boot: boot_number(),
            structure: None,
        });
        let (answers, answer_events) = mpsc::channel(limits::EVENT_QUEUE);
        let (disk, disk_events) = mpsc::channel(limits::EVENT_QUEUE);
        let (dials, dial_events) = mpsc::channel(1);
        let daemon = Self {
            machine,
            identity,
            coordinator: settings.coordinator,
            state: settings.state,
            links,
            data,
            control: None,
            client: None,
            dial: 0,
            dials,
            answers,
            disk,
            make_engine: Some(make_engine),
            compute: None,
            share,
            run: None,
            held_back: Vec::new(),
            begun: Instant::now(),
            end: None,
            spent: TimeSpent::default(),
            traffic: Traffic { told: Instant::now(), sent: 0, received: 0 },
        };
        Ok((daemon, Inbox { links: link_events, answers: answer_events, disk: disk_events, dials: dial_events }))
    }

    fn now(&self) -> Time {
        Time(u64::try_from(self.begun.elapsed().as_nanos()).unwrap_or(u64::MAX))
    }

    fn handle(&mut self, event: Event) -> Result<(), DaemonError> {
        let mut actions = Vec::new();
        self.machine.handle(self.now(), event, &mut actions);
        for action in actions {
            self.perform(action)?;
        }
        Ok(())
    }

    /// Tells what the links carry.
    fn tell_traffic(&mut self) {
        let seconds = self.traffic.told.elapsed().as_secs_f64();
        let Some(client) = self.client.as_ref().filter(|_| seconds >= TRAFFIC_EVERY.as_secs_f64()) else { return };
        let stats = self.links.stats();
        let (sent, received) = (stats.values().map(|link| link.bytes_sent).sum(), stats.values().map(|link| link.bytes_received).sum());
        let kinds: BTreeSet<&str> = stats.values().map(|link| link.kind.name()).collect();
        let rate = |now: u64, before: u64| now.saturating_sub(before) as f64 / seconds;
        client.send(&ToCoordinator::Traffic {
            links: kinds.into_iter().collect::<Vec<_>>().join(" "),
            sent_per_second: rate(sent, self.traffic.sent),
            received_per_second: rate(received, self.traffic.received),
        });
        self.traffic = Traffic { told: Instant::now(), sent, received };
    }

    fn timer(&mut self) -> Result<(), DaemonError> {
        if self.run.is_some() && self.held_back.is_empty() {
            self.tell_traffic();
        }
        self.ask_for_data();
        self.handle(Event::Timer)
    }

    fn control_event(&mut self, event: ControlEvent<FromCoordinator>) -> Result<(), DaemonError> {
        match event {
            ControlEvent::Up(_) => self.handle(Event::ControlUp),
            ControlEvent::Down { reason, .. } => {
                (self.control, self.client) = (None, None);
                self.held_back.clear();
                self.handle(Event::ControlDown { reason })
            }
            ControlEvent::Message(_, message) => self.said(message),
        }
    }

    /// The coordinator says something. From a welcome on, everything waits until the data is here.
    fn said(&mut self, message: FromCoordinator) -> Result<(), DaemonError> {
        if let FromCoordinator::Peers(peers) = &message {
            self.links.set_peers(peers);
            self.data.peers(self.identity.node_id(), peers);
        }
        if !self.held_back.is_empty() {
            if self.held_back.len() >= limits::EVENT_QUEUE {
                return Err(DaemonError::Ended("the run went on for too long before its data was here: start this node again".to_owned()));
            }
            self.held_back.push(message);
            self.ask_for_data();
            return Ok(());
        }
        if let FromCoordinator::Welcome(welcome) = &message {
            self.links.set_peers(&welcome.peers);
            if let Ok(config) = RunConfig::from_toml(&welcome.config) {
                self.run = Some((welcome.run, config.clone()));
                if self.data.open(config.data.manifest)?.is_none() {
                    tracing::info!("fetching the run's data");
                    self.data.peers(self.identity.node_id(), &welcome.peers);
                    self.held_back.push(message);
                    self.ask_for_data();
                    return Ok(());
                }
                self.enter(welcome.run, config)?;
            }
        }
        self.handle(Event::Control(message))
    }

    /// Goes on with what was held back once the data is here.
    fn data_came(&mut self) -> Result<(), DaemonError> {
        let Some((run, config)) = self.run.clone().filter(|_| !self.held_back.is_empty()) else { return Ok(()) };
        if self.data.open(config.data.manifest)?.is_none() {
            self.ask_for_data();
            return Ok(());
        }
        self.enter(run, config)?;
        for message in std::mem::take(&mut self.held_back) {
            self.handle(Event::Control(message))?;
        }
        Ok(())
    }

    fn ask_for_data(&mut self) {
        for (to, frame) in self.data.asks(self.now()) {
            self.links.send(to, frame);
        }
    }

    /// Starts the compute thread for the run.
    fn enter(&mut self, run: RunId, config: RunConfig) -> Result<(), DaemonError> {
        write_run(&self.state, run)?;
        if self.compute.is_some() {
            return Ok(());
        }
        let Some(store) = self.data.open(config.data.manifest)? else { return Ok(()) };
        let sampler = Sampler::new(store, config.model.vocab_size, config.run.seed, config.batch)?;
        let Some(make) = self.make_engine.take() else { return Ok(()) };
        let engine = move || make(config, Box::new(sampler) as Box<dyn Samples>);
        let compute = Compute::start(engine, self.share, self.answers.clone());
        self.compute = Some(compute.map_err(|source| DaemonError::Io { what: "cannot start the compute thread".to_owned(), source })?);
        Ok(())
    }

    fn link_event(&mut self, event: LinkEvent) -> Result<(), DaemonError> {
        match event {
            LinkEvent::Down { peer, reason } => {
                tracing::debug!(peer = peer.short(), reason, "link down");
                self.data.link_down(peer);
                self.handle(Event::LinkDown(peer))
            }
            LinkEvent::Frame { from, frame } => match self.data.take(from, frame)? {
                Taken::Answer(frame) => {
                    self.links.send(from, frame);
                    Ok(())
                }
                Taken::Nothing => self.data_came(),
                Taken::Other(frame) => self.handle(Event::Peer { from, frame }),
            },
        }
    }

    fn answer(&mut self, answer: Answer) -> Result<(), DaemonError> {
        match answer {
            Answer::Outcome(outcome) => self.handle(Event::Computed(outcome)),
            Answer::Failed(error) => Err(DaemonError::Engine(error)),
            Answer::Spent(spent) => {
                self.spent = spent;
                tracing::debug!(target: "skein_node::time", "{}", serde_json::to_string(&spent).unwrap_or_default());
                Ok(())
            }
        }
    }

    fn dialled(&mut self, (dial, result): Dialled) -> Result<(), DaemonError> {
        if dial != self.dial {
            return Ok(());
        }
        match result {
            Ok((client, events)) => {
                (self.client, self.control) = (Some(client), Some(events));
                Ok(())
            }
            Err(error) => self.handle(Event::ControlDown { reason: error.to_string() }),
        }
    }

    fn perform(&mut self, action: Action) -> Result<(), DaemonError> {
        match action {
            Action::Connect => self.connect(),
            Action::Tell(message) => {
                if let Some(client) = &self.client {
                    client.send(&message);
                }
            }
            Action::Send { to, frame } => self.links.send(to, frame),
            Action::Peers(peers) => self.links.set_peers(&peers),
            Action::Compute(task) => {
                let accepted = self.compute.as_ref().is_some_and(|compute| compute.submit(task));
                if !accepted {
                    return Err(DaemonError::Ended("the compute thread is gone".to_owned()));
                }
            }
            Action::SaveShard { timeline, snapshot } => self.save_shard(timeline, snapshot),
            Action::LoadShard { group, version } => self.load_shard(group, version),
            Action::PruneShards { keep_from } => {
                let folder = self.state.join("checkpoints");
                tokio::task::spawn_blocking(move || {
                    if let Err(error) = checkpoint::prune(&folder, keep_from) {
                        tracing::warn!("{error}");
                    }
                });
            }
            Action::Report(report) => show(&report),
            Action::Exit { ok, reason } => self.end = Some(if ok { Ok(reason) } else { Err(reason) }),
        }
        Ok(())
    }

    fn connect(&mut self) {
        self.dial += 1;
        // Dropped before dialling: the coordinator sees the old connection end.
        (self.client, self.control) = (None, None);
        self.held_back.clear();
        let (dial, identity, coordinator, dials) = (self.dial, self.identity.clone(), self.coordinator.clone(), self.dials.clone());
        tokio::spawn(async move {
            let result = ControlClient::connect(&identity, &coordinator).await;
            let _ = dials.send((dial, result)).await;
        });
    }

    fn save_shard(&self, timeline: skein_protocol::id::Timeline, snapshot: crate::engine::Snapshot) {
        let Some((run, config)) = &self.run else { return };
        let (run, folder, disk) = (*run, self.state.join("checkpoints"), self.disk.clone());
        let layout = config.structure().layout(snapshot.group).clone();
        tokio::task::spawn_blocking(move || {
            let (group, version) = (snapshot.group, snapshot.version);
            let result = checkpoint::save(&folder, &snapshot, &layout, run, timeline).map_err(|error| error.to_string());
            let _ = disk.blocking_send(Event::ShardSaved { group, version, result });
        });
    }

    fn load_shard(&self, group: skein_protocol::id::Group, version: skein_protocol::id::Version) {
        let Some((run, config)) = &self.run else { return };
        let structure = config.structure();
        let is_import = version == skein_protocol::id::Version(0);
        let (run, folder) = if is_import { (RunId::default(), self.state.join(IMPORTED)) } else { (*run, self.state.join("checkpoints")) };
        let disk = self.disk.clone();
        tokio::task::spawn_blocking(move || {
            let layout = structure.groups.get(usize::from(group.0));
            let loaded = layout.map(|layout| checkpoint::load(&folder, run, group, version, layout).map_err(|error| error.to_string()));
            let result = loaded.unwrap_or_else(|| Err(format!("the model has no group {group}")));
            let _ = disk.blocking_send(Event::ShardLoaded { group, version, result });
        });
    }
}

fn show(report: &Report) {
    match report {
        Report::State(line) => tracing::info!("{line}"),
        Report::Committed { step, loss } => tracing::info!(step, loss, "committed"),
        Report::Trouble(line) => tracing::warn!("{line}"),
    }
}

/// The address that others can reach this node at: where it listens, or, if it listens
/// everywhere, the address of the interface that leads to the coordinator.
fn reachable(local: SocketAddr, coordinator: &CoordinatorAddress) -> SocketAddr {
    if !local.ip().is_unspecified() {
        return local;
    }
    let outward = coordinator.socket_addr().and_then(|target| {
        let socket = UdpSocket::bind(if target.is_ipv4() { "0.0.0.0:0" } else { "[::]:0" }).ok()?;
        socket.connect(target).ok()?;
        socket.local_addr().ok()
    });
    let ip = outward.map_or(IpAddr::from([127, 0, 0, 1]), |address| address.ip());
    SocketAddr::new(ip, local.port())
}

/// Different at every start.
fn boot_number() -> u64 {
    let mut bytes = [0; 8];
    rand::TryRng::try_fill_bytes(&mut rand::rngs::SysRng, &mut bytes).map_or_else(|_| u64::from(std::process::id()), |()| u64::from_le_bytes(bytes))
}

fn run_file(state: &std::path::Path) -> PathBuf {
    state.join("run")
}

/// The run that a state folder belongs to.
fn read_run(state: &std::path::Path) -> Option<RunId> {
    std::fs::read_to_string(run_file(state)).ok()?.trim().parse().ok()
}

fn write_run(state: &std::path::Path, run: RunId) -> Result<(), DaemonError> {
    if read_run(state) == Some(run) {
        return Ok(());
    }
    let path = run_file(state);
    std::fs::write(&path, run.to_string()).map_err(|source| DaemonError::Io { what: format!("cannot write {}", path.display()), source })
}

struct Signals {
    interrupt: tokio::signal::unix::Signal,
    terminate: tokio::signal::unix::Signal,
}

impl Signals {
    fn new() -> std::io::Result<Self> {
        use tokio::signal::unix::{SignalKind, signal};
        Ok(Self { interrupt: signal(SignalKind::interrupt())?, terminate: signal(SignalKind::terminate())? })
    }

    async fn recv(&mut self) {
        tokio::select! {
            _ = self.interrupt.recv() => {}
            _ = self.terminate.recv() => {}
        }
    }
}
