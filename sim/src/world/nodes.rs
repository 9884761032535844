//! What nodes want done, and what comes to them.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use skein_node::engine::toy;
use skein_node::engine::{About, Engine, EngineError, Outcome, Part, ReductionKey, Task};
use skein_node::machine::{Action, Event, Kept, Node, NodeSettings};
use skein_protocol::id::{Hash, NodeId, SumId, Timeline};
use skein_protocol::limits;
use skein_protocol::message::control::{Capability, FromCoordinator, Shard};
use skein_protocol::message::data::{Frame, PeerMessage};
use skein_protocol::sign::NullSigner;
use skein_protocol::time::Time;

use super::{COORDINATOR, Happening, Host, World};
use crate::device::duration;
use crate::fault::CrashPoint;
use crate::network::DELAY;

/// A group is sealed at most so often in one step: more would be a loop.
const SEALS_MAX: usize = 64;

impl World {
    pub(super) fn start_node(&mut self, node: NodeId) {
        let index = usize::from(node.0[0]) - 1;
        if self.hosts.get(&node).is_some_and(|host| host.alive) {
            return;
        }
        let old = self.hosts.remove(&node);
        let (connection, accepted) = old.as_ref().map_or((0, None), |host| (host.connection, host.accepted));
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
            connection,
            connected: false,
            accepted,
            timer: None,
            timeline: Timeline(0),
            stopped_until: Time::default(),
            hung_until: Time::default(),
            muted_until: Time::default(),
            disk_full_until: Time::default(),
            returns: None,
            not_finite: 0,
            no_room: 0,
            lies: 0,
            clock: Duration::from_secs(1000 * index as u64),
        };
        self.hosts.insert(node, host);
        self.node_event(node, life, Event::Timer);
    }

    pub(super) fn node_event(&mut self, node: NodeId, life: u32, event: Event) {
        if !self.lives(node, life) {
            return;
        }
        if CrashPoint::before(&event).is_some_and(|point| self.reach(node, point)) {
            return;
        }
        self.note(node, &event);
        let after = CrashPoint::after(&event);
        let mut actions = Vec::new();
        let host = self.hosts.get_mut(&node).expect("checked");
        let now = self.now + host.clock;
        if let Event::Control(FromCoordinator::Placement(placement)) = &event {
            host.timeline = host.timeline.max(placement.timeline);
        }
        if let Event::Control(FromCoordinator::Welcome(welcome)) = &event {
            host.timeline = host.timeline.max(welcome.placement.timeline);
        }
        host.machine.handle(now, event, &mut actions);
        let kept = host.machine.kept();
        self.check_bounds(node, kept);
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

    /// Oracle O4: what a node keeps stays below what two steps can need.
    fn check_bounds(&self, node: NodeId, kept: Kept) {
        let (blocks, groups) = (self.structure.blocks(), self.structure.groups.len());
        let microbatches = self.plan.config.batch.microbatches as usize;
        // Each step's microbatches once for every span that routes have cut, and a sum for each
        // seal that closed one.
        let works = 2 * microbatches * blocks * blocks;
        let bounds = [
            ("hops", kept.works, works),
            ("sums", kept.sums, 2 * groups * (microbatches + SEALS_MAX)),
            ("early frames", kept.early_frames, 4096),
            ("reductions", kept.reductions, 2 * groups * SEALS_MAX),
            ("early chunks", kept.early_chunks, 4096),
            ("tasks at the engine", kept.tasks, limits::ENGINE_QUEUE),
        ];
        if let Some((what, found, bound)) = bounds.into_iter().find(|(_, found, bound)| found > bound) {
            panic!("{node:?} keeps {found} {what}, at most {bound} are allowed");
        }
    }

    fn set_timer(&mut self, node: NodeId) {
        let Some(host) = self.hosts.get_mut(&node).filter(|host| host.alive) else { return };
        let Some(at) = host.machine.next_timeout() else { return };
        let at = Time::default() + at.since(Time::default() + host.clock);
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
                let host = &self.hosts[&node];
                if host.connected {
                    let (at, life, connection) = ((self.now + DELAY).max(host.muted_until), self.coordinator_life, host.connection);
                    if let Some(later) = self.network.repeats_after(self.now) {
                        let message = message.clone();
                        self.schedule_at(at + later, Happening::ToCoordinator { life, node, connection, message });
                    }
                    self.schedule_at(at, Happening::ToCoordinator { life, node, connection, message });
                }
            }
            Action::Send { to, frame } => self.send(node, life, to, frame),
            Action::Report(report) => tracing::debug!(at = self.now.as_secs_f64(), who = node.short(), ?report),
            Action::Peers(_) => {}
            Action::Compute(task) => self.compute(node, life, task),
            Action::SaveShard { timeline, snapshot } => {
                let (group, version, root) = (snapshot.group, snapshot.version, snapshot.root());
                let now = self.now;
                let host = self.hosts.get_mut(&node).expect("it acts");
                let result = if now < host.disk_full_until {
                    Err("no space left on device".to_owned())
                } else {
                    host.disk.insert((version, group), (timeline, snapshot));
                    Ok(Shard { timeline, group, version, root })
                };
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
                if let Some(after) = self.hosts[&node].returns {
                    self.schedule(after, Happening::Start(node));
                }
            }
        }
    }

    fn send(&mut self, node: NodeId, life: u32, to: NodeId, mut frame: Frame) {
        let Some(to) = self.hosts.get(&to).filter(|host| host.alive && !self.network.is_cut(node, to, self.now)).map(|host| (to, host.life)) else {
            let notice = self.network.notice(node, to, self.now);
            return self.schedule(notice, Happening::Node { node, life, event: Event::LinkDown(to) });
        };
        let host = self.hosts.get_mut(&node).expect("it acts");
        if let (PeerMessage::StateChunk { .. }, Some(payload), 1..) = (&frame.message, &mut frame.payload, host.lies) {
            host.lies -= 1;
            let mut bytes = payload.bytes.to_vec();
            bytes[0] ^= 1;
            payload.bytes = bytes.into();
        }
        let delay = self.network.delay();
        if let Some(later) = self.network.repeats_after(self.now) {
            self.schedule(delay + later, Happening::Frame { from: (node, life), to, frame: frame.clone() });
        }
        self.schedule(delay, Happening::Frame { from: (node, life), to, frame });
    }

    fn compute(&mut self, node: NodeId, life: u32, task: Task) {
        let host = self.hosts.get_mut(&node).expect("it acts");
        let duration = duration(&task, host.speed);
        self.handover.computes(node, &task, self.now);
        if let Some((key, sums)) = reads(&task) {
            let mut contribution = BTreeMap::new();
            for sum in sums {
                for (pair, count) in host.engine.contributions(sum) {
                    *contribution.entry(pair).or_default() += count;
                }
            }
            self.ledger.contributed(host.timeline, key, node, contribution);
        }
        let outcome = match spoilt(host, &task) {
            Some(failed) => failed,
            None => {
                let outcome = host.engine.run(task);
                if let Outcome::Failed { error, about } = &outcome {
                    panic!("at {:.3} s the engine of {node:?} failed: {error} ({about:?})", self.now.as_secs_f64());
                }
                outcome
            }
        };
        host.busy_until = host.busy_until.max(self.now) + duration;
        let after = host.busy_until.since(self.now);
        self.schedule(after, Happening::Node { node, life, event: Event::Computed(outcome) });
    }

    /// Counts a crash point; whether the node is dead now.
    fn reach(&mut self, node: NodeId, point: CrashPoint) -> bool {
        let nth = count(&mut self.reached, point);
        let nth_of_node = count(&mut self.reached_by, (node, point));
        let life = self.hosts[&node].life;
        self.strike_at(node, point, nth, nth_of_node);
        if !self.lives(node, life) {
            return true;
        }
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

    pub(super) fn kill(&mut self, node: NodeId) {
        self.drop_control(node);
        if let Some(host) = self.hosts.get_mut(&node) {
            host.alive = false;
        }
    }

    /// Whether this life of the node goes on.
    fn lives(&self, node: NodeId, life: u32) -> bool {
        self.hosts.get(&node).is_some_and(|host| host.alive && host.life == life)
    }

    /// A frame is there, unless its link was cut on the way or its receiver is not who it was for.
    pub(super) fn frame_came(&mut self, from: (NodeId, u32), to: (NodeId, u32), frame: Frame) {
        if self.lives(to.0, to.1) && !self.network.is_cut(from.0, to.0, self.now) {
            return self.node_event(to.0, to.1, Event::Peer { from: from.0, frame });
        }
        let notice = self.network.notice(from.0, to.0, self.now);
        self.schedule(notice, Happening::Node { node: from.0, life: from.1, event: Event::LinkDown(to.0) });
    }

    /// Ends a node's control connection from its side; the coordinator hears of it.
    pub(super) fn drop_control(&mut self, node: NodeId) {
        let Some(host) = self.hosts.get_mut(&node).filter(|host| host.connected) else { return };
        host.connected = false;
        let (life, connection) = (self.coordinator_life, host.connection);
        self.schedule(DELAY, Happening::Hangup { life, node, connection });
    }

    pub(super) fn dialled(&mut self, node: NodeId, life: u32) {
        if !self.lives(node, life) {
            return;
        }
        if self.coordinator.is_none() {
            let event = Event::ControlDown { reason: "refused".to_owned() };
            return self.schedule(DELAY, Happening::Node { node, life, event });
        }
        let host = self.hosts.get_mut(&node).expect("it lives");
        host.connected = true;
        host.connection += 1;
        let connection = host.connection;
        self.schedule(Duration::ZERO, Happening::Opened { life: self.coordinator_life, node, connection });
        self.schedule(DELAY, Happening::Established { node, connection });
    }

    pub(super) fn established(&mut self, node: NodeId, connection: u32) {
        let Some(host) = self.hosts.get(&node).filter(|host| host.connected && host.connection == connection) else { return };
        self.node_event(node, host.life, Event::ControlUp);
    }

    /// The coordinator's word comes over a connection, if it is still the node's.
    pub(super) fn told(&mut self, node: NodeId, connection: u32, message: FromCoordinator) {
        let Some(host) = self.hosts.get(&node).filter(|host| host.connected && host.connection == connection) else { return };
        self.node_event(node, host.life, Event::Control(message));
    }

    /// The other side has closed a connection.
    pub(super) fn closed(&mut self, node: NodeId, connection: u32, reason: &str) {
        let Some(host) = self.hosts.get_mut(&node).filter(|host| host.connected && host.connection == connection) else { return };
        host.connected = false;
        let life = host.life;
        self.node_event(node, life, Event::ControlDown { reason: reason.to_owned() });
    }
}

/// Counts an event; how many there were before.
fn count<K: Ord>(counts: &mut BTreeMap<K, usize>, key: K) -> usize {
    let times = counts.entry(key).or_default();
    *times += 1;
    *times - 1
}

/// How a computation fails, if it is its turn to.
fn spoilt(host: &mut Host, task: &Task) -> Option<Outcome> {
    let (Task::Forward { key, .. } | Task::Backward { key, .. }) = task else { return None };
    let error = if host.not_finite > 0 {
        host.not_finite -= 1;
        EngineError::NotFinite("a gradient")
    } else if host.no_room > 0 {
        host.no_room -= 1;
        EngineError::OutOfMemory("no room".to_owned())
    } else {
        return None;
    };
    Some(Outcome::Failed { error, about: About::Work(*key) })
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
