//! The world: coordinator, nodes and the links between them on one virtual clock.
//!
//! The machines are those that volunteers run; sockets, disks and devices are played. An event is
//! due at a time; ties are delivered in the order in which they were scheduled. Nothing here is
//! random but what comes from the seed, so a plan and a commit are a whole bug report.
//!
//! This file has the clock. `nodes` performs what nodes want, `coordinating` what the
//! coordinator wants, `faults` what goes wrong by plan.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use skein_coordinator::machine as coordinator;
use skein_coordinator::machine::Coordinator;
use skein_coordinator::record::Record;
use skein_node::engine::Snapshot;
use skein_node::engine::core::Core;
use skein_node::engine::toy::{self, Toy};

use skein_node::machine::{Event, Node};
use skein_protocol::id::{Group, Hash, NodeId, Timeline, Version};
use skein_protocol::message::control::{FromCoordinator, ToCoordinator};
use skein_protocol::message::data::Frame;
use skein_protocol::model::Structure;
use skein_protocol::time::Time;

use crate::fault::CrashPoint;
use crate::handover::Handover;
use crate::network::Network;
use crate::oracle::Ledger;
use crate::plan::{Ending, Plan};
use crate::schedule::{Fault, When};

mod coordinating;
mod faults;
mod nodes;

/// The coordinator's name.
const COORDINATOR: NodeId = NodeId([0xc0; 32]);

enum Happening {
    /// Something within a node: an answer of its engine or disk, a timer, the end of a link.
    Node {
        node: NodeId,
        life: u32,
        event: Event,
    },
    /// A frame is at its destination.
    Frame {
        from: (NodeId, u32),
        to: (NodeId, u32),
        frame: Frame,
    },
    NodeDialled {
        node: NodeId,
        life: u32,
    },
    /// A control connection stands.
    Established {
        node: NodeId,
        connection: u32,
    },
    /// Something comes over a control connection, which is numbered.
    ToNode {
        node: NodeId,
        connection: u32,
        message: FromCoordinator,
    },
    Closed {
        node: NodeId,
        connection: u32,
        reason: &'static str,
    },
    ToCoordinator {
        life: u32,
        node: NodeId,
        connection: u32,
        message: ToCoordinator,
    },
    Opened {
        life: u32,
        node: NodeId,
        connection: u32,
    },
    Hangup {
        life: u32,
        node: NodeId,
        connection: u32,
    },
    Coordinator {
        life: u32,
    },
    Start(NodeId),
    StartCoordinator,
    Leave(NodeId),
    Blackout,
    Fault(Fault),
}

struct Host {
    life: u32,
    alive: bool,
    machine: Node,
    engine: Core<Toy>,
    busy_until: Time,
    speed: f64,
    disk: BTreeMap<(Version, Group), (Timeline, Snapshot)>,
    /// The control connection's number and whether it stands, as the node sees it.
    connection: u32,
    connected: bool,
    /// The connection that the coordinator has open.
    accepted: Option<u32>,
    timer: Option<Time>,
    timeline: Timeline,
    /// It stands still, its device does not answer, its control connection carries nothing, its disk takes nothing until then.
    stopped_until: Time,
    hung_until: Time,
    muted_until: Time,
    disk_full_until: Time,
    /// Its user starts it again so long after it has left.
    returns: Option<Duration>,
    /// So many of its next computations give values that are not finite, or find no room.
    not_finite: u32,
    no_room: u32,
    /// So many of the next chunks of state that it gives are wrong.
    lies: u32,
    /// How far its clock is ahead of the world's. Nobody's clock is anybody else's.
    clock: Duration,
}

/// A run in virtual time.
pub struct World {
    plan: Plan,
    structure: Structure,
    now: Time,
    sequence: u64,
    queue: BTreeMap<(Time, u64), Happening>,
    network: Network,
    hosts: BTreeMap<NodeId, Host>,
    coordinator: Option<Coordinator>,
    coordinator_life: u32,
    coordinator_timer: Option<Time>,
    coordinator_stopped_until: Time,
    log: Vec<Record>,
    log_operations: usize,
    ledger: Ledger,
    reached: BTreeMap<CrashPoint, usize>,
    reached_by: BTreeMap<(NodeId, CrashPoint), usize>,
    killed: bool,
    faults_struck: usize,
    trace: blake3::Hasher,
    failures: Vec<String>,
    handover: Handover,
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
            network: Network::new(plan.seed, plan.jitter),
            hosts: BTreeMap::new(),
            coordinator: None,
            coordinator_life: 0,
            coordinator_timer: None,
            coordinator_stopped_until: Time::default(),
            log: Vec::new(),
            log_operations: 0,
            reached: BTreeMap::new(),
            reached_by: BTreeMap::new(),
            killed: false,
            faults_struck: 0,
            trace: blake3::Hasher::new(),
            failures: Vec::new(),
            handover: Handover::default(),
            plan,
        };
        world.schedule(Duration::ZERO, Happening::StartCoordinator);
        for index in 0..world.plan.speeds.len() {
            let late = world.plan.joiner.filter(|_| index + 1 == world.plan.speeds.len());
            let late = late.or(world.plan.starts.get(index).copied()).unwrap_or_default();
            world.schedule(late + Duration::from_millis(index as u64), Happening::Start(node_id(index)));
        }
        if let Some((index, at)) = world.plan.leaver {
            world.schedule(at, Happening::Leave(node_id(index)));
        }
        if let Some(at) = world.plan.blackout {
            world.schedule(at, Happening::Blackout);
        }
        for planned in world.plan.faults.clone() {
            if let When::At(at) = planned.when {
                world.schedule(at, Happening::Fault(planned.fault));
            }
        }
        world
    }

    /// Runs until all steps are committed and saved, or `limit` has passed.
    pub fn run(mut self, limit: Duration) -> Ending {
        let until = Time::default() + limit;
        while let Some(((time, sequence), happening)) = self.queue.pop_first() {
            if time > until || self.is_over() {
                break;
            }
            self.now = time;
            // Who stands still takes nothing in; it finds everything, in order, when it goes on.
            match self.stands_still(&happening) {
                Some(until) => drop(self.queue.insert((until, sequence), happening)),
                None => self.happen(happening),
            }
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
        let last = Version(self.plan.config.run.steps);
        let mut saved: BTreeMap<Group, BTreeSet<Hash>> = BTreeMap::new();
        for ((_, group), (_, snapshot)) in self.hosts.values().flat_map(|host| &host.disk).filter(|((version, _), _)| *version == last) {
            saved.entry(*group).or_default().insert(snapshot.root());
        }
        Ending {
            losses: status.losses.clone(),
            status,
            time: self.now,
            roots,
            saved,
            reached: self.reached,
            log_operations: self.log_operations,
            killed: self.killed,
            faults_struck: self.faults_struck,
            commits: self.ledger.commits(),
            trace: Hash(*self.trace.finalize().as_bytes()),
            failures: self.failures,
            taken_over: self.handover.taken_over,
        }
    }

    fn schedule(&mut self, after: Duration, happening: Happening) {
        self.schedule_at(self.now + after, happening);
    }

    fn schedule_at(&mut self, at: Time, happening: Happening) {
        self.sequence += 1;
        self.queue.insert((at, self.sequence), happening);
    }

    fn happen(&mut self, happening: Happening) {
        match happening {
            Happening::Start(node) => self.start_node(node),
            Happening::Node { node, life, event } => self.node_event(node, life, event),
            Happening::Frame { from, to, frame } => self.frame_came(from, to, frame),
            Happening::NodeDialled { node, life } => self.dialled(node, life),
            Happening::Established { node, connection } => self.established(node, connection),
            Happening::ToNode { node, connection, message } => self.told(node, connection, message),
            Happening::Closed { node, connection, reason } => self.closed(node, connection, reason),
            Happening::StartCoordinator => self.start_coordinator(),
            Happening::Coordinator { life } => self.coordinator_event(life, coordinator::Event::Timer),
            Happening::Opened { life, node, connection } => self.opened(life, node, connection),
            Happening::ToCoordinator { life, node, connection, message } => {
                if self.hosts.get(&node).is_some_and(|host| host.accepted == Some(connection)) {
                    self.coordinator_event(life, coordinator::Event::Received { from: node, message });
                }
            }
            Happening::Hangup { life, node, connection } => self.hung_up(life, node, connection),
            Happening::Leave(node) => {
                let life = self.hosts.get(&node).map_or(0, |host| host.life);
                self.node_event(node, life, Event::Leave);
            }
            Happening::Blackout => self.blackout(),
            Happening::Fault(fault) => self.strike(fault),
        }
    }

    /// Until when whoever this happens to stands still.
    fn stands_still(&self, happening: &Happening) -> Option<Time> {
        let node = match happening {
            Happening::Node { node, event: Event::Computed(_), .. } => {
                let hung = self.hosts.get(node).filter(|host| host.alive).map(|host| host.hung_until.max(host.stopped_until));
                return hung.filter(|until| self.now < *until);
            }
            Happening::Node { node, .. }
            | Happening::ToNode { node, .. }
            | Happening::Closed { node, .. }
            | Happening::NodeDialled { node, .. }
            | Happening::Established { node, .. } => node,
            Happening::Frame { to: (node, _), .. } | Happening::Leave(node) => node,
            Happening::Coordinator { .. } | Happening::Opened { .. } | Happening::ToCoordinator { .. } | Happening::Hangup { .. } => {
                return Some(self.coordinator_stopped_until).filter(|until| self.coordinator.is_some() && self.now < *until);
            }
            Happening::Start(_) | Happening::StartCoordinator | Happening::Blackout | Happening::Fault(_) => return None,
        };
        self.hosts.get(node).filter(|host| host.alive && self.now < host.stopped_until).map(|host| host.stopped_until)
    }

    fn note(&mut self, who: NodeId, event: &impl std::fmt::Debug) {
        tracing::trace!(at = self.now.as_secs_f64(), who = who.short(), ?event);
        self.trace.update(format!("{} {} {event:?}\n", self.now.0, who.short()).as_bytes());
    }
}
