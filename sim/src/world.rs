//! The world: coordinator, nodes and the links between them on one virtual clock.
//!
//! The machines are those that volunteers run; sockets, disks and devices are played. An event is
//! due at a time; ties are delivered in the order in which they were scheduled. Nothing here is
//! random but what comes from the seed, so a plan and a commit are a whole bug report.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use skein_coordinator::machine as coordinator;
use skein_coordinator::machine::Coordinator;
use skein_coordinator::record::Record;
use skein_node::engine::core::Core;
use skein_node::engine::toy::{self, Toy};
use skein_node::engine::{Engine, Outcome, Part, ReductionKey, Snapshot, Task};
use skein_node::machine::{Action, Event, Node, NodeSettings};
use skein_protocol::id::{Group, Hash, NodeId, SumId, Timeline, Version};
use skein_protocol::message::control::{Capability, FromCoordinator, Shard};
use skein_protocol::model::Structure;
use skein_protocol::sign::NullSigner;
use skein_protocol::time::Time;

use crate::fault::CrashPoint;
use crate::oracle::Ledger;
use crate::plan::{Ending, Plan};

/// One way of a message through the world.
const DELAY: Duration = Duration::from_millis(2);
/// How long a broken link takes to be noticed by who sends over it.
const LINK_NOTICE: Duration = Duration::from_millis(20);
/// Time for one block forward on a device of speed 1.
const BLOCK_TIME: Duration = Duration::from_millis(4);
/// The coordinator's name.
const COORDINATOR: NodeId = NodeId([0xc0; 32]);

enum Happening {
    Node { node: NodeId, life: u32, event: Event },
    NodeDialled { node: NodeId, life: u32 },
    Start(NodeId),
    Coordinator { life: u32, event: coordinator::Event },
    StartCoordinator,
    Leave(NodeId),
    Blackout,
}

struct Host {
    life: u32,
    alive: bool,
    machine: Node,
    engine: Core<Toy>,
    busy_until: Time,
    speed: f64,
    disk: BTreeMap<(Version, Group), (Timeline, Snapshot)>,
    connected: bool,
    timer: Option<Time>,
    timeline: Timeline,
}

/// A run in virtual time.
pub struct World {
    plan: Plan,
    structure: Structure,
    now: Time,
    sequence: u64,
    queue: BTreeMap<(Time, u64), Happening>,
    hosts: BTreeMap<NodeId, Host>,
    coordinator: Option<Coordinator>,
    coordinator_life: u32,
    coordinator_timer: Option<Time>,
    log: Vec<Record>,
    log_operations: usize,
    ledger: Ledger,
    reached: BTreeMap<CrashPoint, usize>,
    killed: bool,
    trace: blake3::Hasher,
    failures: Vec<String>,
}

/// The name of the n-th node.
pub fn node_id(index: usize) -> NodeId {
    NodeId([u8::try_from(index + 1).expect("few nodes"); 32])
}

impl World {
    /// A world in which nothing has happened.
    pub fn new(plan: Plan) -> Self {
        let structure = toy::structure(&plan.config);
        let mut world = Self {
            ledger: Ledger::new(structure.clone(), plan.config.batch.microbatches),
            structure,
            now: Time::default(),
            sequence: 0,
            queue: BTreeMap::new(),
            hosts: BTreeMap::new(),
            coordinator: None,
            coordinator_life: 0,
            coordinator_timer: None,
            log: Vec::new(),
            log_operations: 0,
            reached: BTreeMap::new(),
            killed: false,
            trace: blake3::Hasher::new(),
            failures: Vec::new(),
            plan,
        };
        world.schedule(Duration::ZERO, Happening::StartCoordinator);
        for index in 0..world.plan.speeds.len() {
            let late = world.plan.joiner.filter(|_| index + 1 == world.plan.speeds.len());
            world.schedule(late.unwrap_or(Duration::from_millis(index as u64)), Happening::Start(node_id(index)));
        }
        if let Some((index, at)) = world.plan.leaver {
            world.schedule(at, Happening::Leave(node_id(index)));
        }
        if let Some(at) = world.plan.blackout {
            world.schedule(at, Happening::Blackout);
        }
        world
    }

    /// Runs until all steps are committed and saved, or `limit` has passed.
    pub fn run(mut self, limit: Duration) -> Ending {
        let until = Time::default() + limit;
        while let Some(((time, _), happening)) = self.queue.pop_first() {
            if time > until || self.is_over() {
                break;
            }
            self.now = time;
            self.happen(happening);
        }
        self.ending()
    }

    fn is_over(&self) -> bool {
        let Some(coordinator) = &self.coordinator else { return false };
        let steps = self.plan.config.run.steps;
        coordinator.is_finished() && coordinator.status(self.now).checkpoint == Some(steps)
    }

    fn ending(mut self) -> Ending {
        let status = self.coordinator.as_ref().map(|coordinator| coordinator.status(self.now)).unwrap_or_default();
        let roots = self
            .hosts
            .iter_mut()
            .filter(|(_, host)| host.alive)
            .map(|(node, host)| {
                let versions: Vec<(Group, Version)> = host.engine.versions().collect();
                let roots = versions.into_iter().map(|(group, version)| (group, (version, host.engine.state_root(group).unwrap_or_default()))).collect();
                (*node, roots)
            })
            .collect();
        Ending {
            losses: status.losses.clone(),
            status,
            time: self.now,
            roots,
            reached: self.reached,
            log_operations: self.log_operations,
            killed: self.killed,
            commits: self.ledger.commits(),
            trace: Hash(*self.trace.finalize().as_bytes()),
            failures: self.failures,
        }
    }

    fn schedule(&mut self, after: Duration, happening: Happening) {
        self.sequence += 1;
        self.queue.insert((self.now + after, self.sequence), happening);
    }

    fn happen(&mut self, happening: Happening) {
        match happening {
            Happening::Start(node) => self.start_node(node),
            Happening::Node { node, life, event } => self.node_event(node, life, event),
            Happening::NodeDialled { node, life } => self.dialled(node, life),
            Happening::StartCoordinator => self.start_coordinator(),
            Happening::Coordinator { life, event } => self.coordinator_event(life, event),
            Happening::Leave(node) => {
                let life = self.hosts.get(&node).map_or(0, |host| host.life);
                self.node_event(node, life, Event::Leave);
            }
            Happening::Blackout => {
                let alive: Vec<NodeId> = self.hosts.iter().filter(|(_, host)| host.alive).map(|(node, _)| *node).collect();
                for node in alive {
                    self.kill(node);
                    self.schedule(Duration::from_secs(1), Happening::Start(node));
                }
                self.kill_coordinator();
            }
        }
    }

    // Nodes.

    fn start_node(&mut self, node: NodeId) {
        let index = usize::from(node.0[0]) - 1;
        let old = self.hosts.remove(&node);
        let life = old.as_ref().map_or(0, |host| host.life + 1);
        let disk = old.map(|host| host.disk).unwrap_or_default();
        let shards = disk
            .iter()
            .map(|((version, group), (timeline, snapshot))| Shard { timeline: *timeline, group: *group, version: *version, root: snapshot.root() })
            .collect();
        let speed = self.plan.speeds[index];
        let settings = NodeSettings {
            id: node,
            coordinator: COORDINATOR,
            signer: Arc::new(NullSigner),
            capability: Capability { flops: 1e9 * speed, memory: 1 << 30, compute_share: 1.0, fingerprint: Hash::default() },
            data_addresses: vec![format!("10.0.0.{index}:1")],
            data: None,
            run: None,
            shards,
            boot: u64::from(life) << 32 | index as u64,
            structure: Some(self.structure.clone()),
        };
        let host = Host {
            life,
            alive: true,
            machine: Node::new(settings),
            engine: toy::engine(&self.plan.config),
            busy_until: self.now,
            speed,
            disk,
            connected: false,
            timer: None,
            timeline: Timeline(0),
        };
        self.hosts.insert(node, host);
        self.node_event(node, life, Event::Timer);
    }

    fn node_event(&mut self, node: NodeId, life: u32, event: Event) {
        let Some(host) = self.hosts.get(&node).filter(|host| host.alive && host.life == life) else { return };
        // Messages of a connection that is gone do not arrive.
        if matches!(event, Event::Control(_)) && !host.connected {
            return;
        }
        if CrashPoint::before(&event).is_some_and(|point| self.reach(node, point)) {
            return;
        }
        self.note(node, &event);
        let after = CrashPoint::after(&event);
        let mut actions = Vec::new();
        let now = self.now;
        let host = self.hosts.get_mut(&node).expect("checked");
        if let Event::Control(FromCoordinator::Placement(placement)) = &event {
            host.timeline = host.timeline.max(placement.timeline);
        }
        if let Event::Control(FromCoordinator::Welcome(welcome)) = &event {
            host.timeline = host.timeline.max(welcome.placement.timeline);
        }
        host.machine.handle(now, event, &mut actions);
        if after.is_some_and(|point| self.reach(node, point)) {
            return;
        }
        for action in actions {
            let point = CrashPoint::at(&action);
            self.perform(node, life, action);
            if point.is_some_and(|point| self.reach(node, point)) {
                return;
            }
        }
        self.set_timer(node);
    }

    fn set_timer(&mut self, node: NodeId) {
        let Some(host) = self.hosts.get_mut(&node).filter(|host| host.alive) else { return };
        let Some(at) = host.machine.next_timeout() else { return };
        if host.timer.is_none_or(|timer| at < timer || timer <= self.now) {
            host.timer = Some(at.max(self.now));
            let life = host.life;
            self.schedule(at.since(self.now), Happening::Node { node, life, event: Event::Timer });
        }
    }

    fn perform(&mut self, node: NodeId, life: u32, action: Action) {
        match action {
            Action::Connect => {
                self.drop_control(node);
                self.schedule(DELAY, Happening::NodeDialled { node, life });
            }
            Action::Tell(message) => {
                if self.hosts.get(&node).is_some_and(|host| host.connected) {
                    let life = self.coordinator_life;
                    self.schedule(DELAY, Happening::Coordinator { life, event: coordinator::Event::Received { from: node, message } });
                }
            }
            Action::Send { to, frame } => match self.hosts.get(&to).filter(|host| host.alive) {
                Some(host) => {
                    let life = host.life;
                    self.schedule(DELAY, Happening::Node { node: to, life, event: Event::Peer { from: node, frame } });
                }
                None => self.schedule(LINK_NOTICE, Happening::Node { node, life, event: Event::LinkDown(to) }),
            },
            Action::Peers(_) | Action::Report(_) => {}
            Action::Compute(task) => self.compute(node, life, task),
            Action::SaveShard { timeline, snapshot } => {
                let (group, version, root) = (snapshot.group, snapshot.version, snapshot.root());
                let result = Ok(Shard { timeline, group, version, root });
                // Durable only when the node hears of it: a crash in between leaves no shard.
                self.hosts.get_mut(&node).expect("it acts").disk.insert((version, group), (timeline, snapshot));
                self.schedule(DELAY, Happening::Node { node, life, event: Event::ShardSaved { group, version, result } });
            }
            Action::LoadShard { group, version } => {
                let found = self.hosts[&node].disk.get(&(version, group)).map(|(_, snapshot)| snapshot.clone());
                let result = found.ok_or_else(|| format!("no shard of group {group} at version {version}"));
                self.schedule(DELAY, Happening::Node { node, life, event: Event::ShardLoaded { group, version, result } });
            }
            Action::PruneShards { keep_from } => self.hosts.get_mut(&node).expect("it acts").disk.retain(|(version, _), _| *version >= keep_from),
            Action::Exit { ok, reason } => {
                if !ok {
                    self.failures.push(format!("{node:?}: {reason}"));
                }
                self.kill(node);
            }
        }
    }

    fn compute(&mut self, node: NodeId, life: u32, task: Task) {
        let host = self.hosts.get_mut(&node).expect("it acts");
        let duration = duration(&task, host.speed);
        if let Some((key, sums)) = reads(&task) {
            let mut contribution = BTreeMap::new();
            for sum in sums {
                for (pair, count) in host.engine.contributions(sum) {
                    *contribution.entry(pair).or_default() += count;
                }
            }
            self.ledger.contributed(host.timeline, key, node, contribution);
        }
        let outcome = host.engine.run(task);
        if let Outcome::Failed { error, about } = &outcome {
            panic!("at {:.3} s the engine of {node:?} failed: {error} ({about:?})", self.now.as_secs_f64());
        }
        host.busy_until = host.busy_until.max(self.now) + duration;
        let after = host.busy_until.since(self.now);
        self.schedule(after, Happening::Node { node, life, event: Event::Computed(outcome) });
    }

    /// Counts a crash point; whether the node is dead now.
    fn reach(&mut self, node: NodeId, point: CrashPoint) -> bool {
        let times = self.reached.entry(point).or_default();
        let nth = *times;
        *times += 1;
        if self.killed || self.plan.node_dies != Some((point, nth)) {
            return false;
        }
        self.killed = true;
        self.kill(node);
        if let Some(after) = self.plan.node_returns {
            self.schedule(after, Happening::Start(node));
        }
        true
    }

    fn kill(&mut self, node: NodeId) {
        self.drop_control(node);
        if let Some(host) = self.hosts.get_mut(&node) {
            host.alive = false;
        }
    }

    /// Ends a node's control connection; the coordinator hears of it.
    fn drop_control(&mut self, node: NodeId) {
        let Some(host) = self.hosts.get_mut(&node).filter(|host| host.connected) else { return };
        host.connected = false;
        let life = self.coordinator_life;
        self.schedule(DELAY, Happening::Coordinator { life, event: coordinator::Event::Disconnected(node) });
    }

    fn dialled(&mut self, node: NodeId, life: u32) {
        let Some(host) = self.hosts.get_mut(&node).filter(|host| host.alive && host.life == life) else { return };
        if self.coordinator.is_none() {
            let event = Event::ControlDown { reason: "refused".to_owned() };
            return self.schedule(DELAY, Happening::Node { node, life, event });
        }
        host.connected = true;
        let coordinator_life = self.coordinator_life;
        self.schedule(Duration::ZERO, Happening::Coordinator { life: coordinator_life, event: coordinator::Event::Connected(node) });
        self.schedule(DELAY, Happening::Node { node, life, event: Event::ControlUp });
    }

    // The coordinator.

    fn start_coordinator(&mut self) {
        self.coordinator_life += 1;
        let machine = Coordinator::new(
            self.plan.config.clone(),
            self.structure.clone(),
            COORDINATOR,
            Arc::new(NullSigner),
            u64::from(self.coordinator_life),
            self.log.clone(),
        );
        self.coordinator = Some(machine);
        self.coordinator_timer = None;
        self.coordinator_event(self.coordinator_life, coordinator::Event::Timer);
    }

    fn kill_coordinator(&mut self) {
        self.coordinator = None;
        let connected: Vec<(NodeId, u32)> = self.hosts.iter().filter(|(_, host)| host.connected).map(|(node, host)| (*node, host.life)).collect();
        for (node, life) in connected {
            self.hosts.get_mut(&node).expect("listed").connected = false;
            let event = Event::ControlDown { reason: "closed".to_owned() };
            self.schedule(DELAY, Happening::Node { node, life, event });
        }
        self.schedule(Duration::from_secs(1), Happening::StartCoordinator);
    }

    fn coordinator_event(&mut self, life: u32, event: coordinator::Event) {
        if life != self.coordinator_life {
            return;
        }
        if let coordinator::Event::Received { from, .. } = &event
            && !self.hosts.get(from).is_some_and(|host| host.connected || !host.alive)
        {
            return;
        }
        self.note(COORDINATOR, &event);
        let now = self.now;
        let Some(machine) = &mut self.coordinator else { return };
        let mut actions = Vec::new();
        machine.handle(now, event, &mut actions);
        for action in actions {
            if !self.perform_coordinator(action) {
                return;
            }
        }
        self.set_coordinator_timer();
    }

    fn set_coordinator_timer(&mut self) {
        let Some(at) = self.coordinator.as_ref().and_then(Coordinator::next_timeout) else { return };
        if self.coordinator_timer.is_none_or(|timer| at < timer || timer <= self.now) {
            self.coordinator_timer = Some(at.max(self.now));
            let life = self.coordinator_life;
            self.schedule(at.since(self.now), Happening::Coordinator { life, event: coordinator::Event::Timer });
        }
    }

    /// Whether the coordinator is still alive after it.
    fn perform_coordinator(&mut self, action: coordinator::Action) -> bool {
        match action {
            coordinator::Action::Save(records) => {
                let operation = self.log_operations;
                self.log_operations += 1;
                let dies = self.plan.coordinator_dies_at.filter(|(at, _)| *at == operation).map(|(_, durable)| durable);
                if dies != Some(false) {
                    self.judge(&records);
                    self.log.extend(records);
                }
                if dies.is_some() {
                    self.killed = true;
                    self.kill_coordinator();
                    return false;
                }
            }
            coordinator::Action::Send { to, message } => {
                if let Some(host) = self.hosts.get(&to).filter(|host| host.alive && host.connected) {
                    let life = host.life;
                    self.schedule(DELAY, Happening::Node { node: to, life, event: Event::Control(message) });
                }
            }
            coordinator::Action::Disconnect(node) => {
                if let Some(host) = self.hosts.get_mut(&node).filter(|host| host.connected) {
                    let life = host.life;
                    // What was sent before arrives first.
                    let event = Event::ControlDown { reason: "closed by the coordinator".to_owned() };
                    self.schedule(DELAY, Happening::Node { node, life, event });
                    let life = self.coordinator_life;
                    self.schedule(DELAY * 2, Happening::Coordinator { life, event: coordinator::Event::Disconnected(node) });
                }
            }
            coordinator::Action::Report(_) | coordinator::Action::Stopped => {}
        }
        true
    }

    fn judge(&mut self, records: &[Record]) {
        for record in records {
            match record {
                Record::Seal(seal) => self.ledger.sealed(seal),
                Record::Commit(commit) => self.ledger.committed(commit),
                Record::Run { .. }
                | Record::Member { .. }
                | Record::Gone { .. }
                | Record::Timeline { .. }
                | Record::Saved { .. }
                | Record::Checkpoint { .. } => {}
            }
        }
    }

    fn note(&mut self, who: NodeId, event: &impl std::fmt::Debug) {
        tracing::trace!(at = self.now.as_secs_f64(), who = who.short(), ?event);
        self.trace.update(format!("{} {} {event:?}\n", self.now.0, who.short()).as_bytes());
    }
}

/// The reduction that a task reads sums for, and which.
fn reads(task: &Task) -> Option<(ReductionKey, Vec<SumId>)> {
    let own = |parts: &[Part]| -> Vec<SumId> {
        parts
            .iter()
            .flat_map(|part| match part {
                Part::Own(sums) => sums.clone(),
                Part::Peer(_) => Vec::new(),
            })
            .collect()
    };
    match task {
        Task::EncodeChunk { key, sums, .. } => Some((*key, sums.clone())),
        Task::ReduceChunk { key, parts, .. } => Some((*key, own(parts))).filter(|(_, sums)| !sums.is_empty()),
        Task::Reset
        | Task::Draw { .. }
        | Task::Install { .. }
        | Task::Forget { .. }
        | Task::Forward { .. }
        | Task::InputGradient { .. }
        | Task::Backward { .. }
        | Task::Add { .. }
        | Task::Discard { .. }
        | Task::DropSums { .. }
        | Task::StoreChunk { .. }
        | Task::DropReduction { .. }
        | Task::Apply { .. }
        | Task::Retire { .. }
        | Task::TakeSnapshot { .. } => None,
    }
}

fn duration(task: &Task, speed: f64) -> Duration {
    let blocks = match task {
        Task::Forward { key, .. } | Task::InputGradient { key, .. } => key.span.len() as f64,
        Task::Backward { key, .. } => 2.0 * key.span.len() as f64,
        Task::Apply { .. } | Task::TakeSnapshot { .. } | Task::Install { .. } => 0.5,
        Task::Reset
        | Task::Draw { .. }
        | Task::Forget { .. }
        | Task::Add { .. }
        | Task::Discard { .. }
        | Task::DropSums { .. }
        | Task::EncodeChunk { .. }
        | Task::ReduceChunk { .. }
        | Task::StoreChunk { .. }
        | Task::DropReduction { .. }
        | Task::Retire { .. } => 0.05,
    };
    BLOCK_TIME.mul_f64(blocks / speed)
}
