//! What goes wrong by plan.

use std::time::Duration;

use skein_node::machine::Event;
use skein_protocol::id::NodeId;
use skein_protocol::time::Time;

use super::{Happening, World, node_id};
use crate::fault::CrashPoint;
use crate::schedule::{Fault, When};

impl World {
    /// What the plan has for a node that reaches a point strikes.
    pub(super) fn strike_at(&mut self, node: NodeId, point: CrashPoint, nth: usize, nth_of_node: usize) {
        let is_due = |when: &When| match when {
            When::At(_) => false,
            When::Reached { point: at, node: None, nth: times } => (*at, *times) == (point, nth),
            When::Reached { point: at, node: Some(index), nth: times } => (*at, node_id(*index), *times) == (point, node, nth_of_node),
        };
        let due: Vec<Fault> = self.plan.faults.iter().filter(|planned| is_due(&planned.when)).map(|planned| planned.fault.clone()).collect();
        for fault in due {
            self.strike(fault);
        }
    }

    /// A fault of the schedule strikes. One that finds nobody to strike changes nothing and is not counted.
    pub(super) fn strike(&mut self, fault: Fault) {
        let now = self.now;
        tracing::debug!(at = now.as_secs_f64(), ?fault, "strikes");
        if let Fault::Kill { node, .. } | Fault::Stop { node, .. } | Fault::Hang { node, .. } | Fault::Blackhole { node, .. } = fault {
            self.handover.lost(node_id(node), now);
        }
        let struck = match fault {
            Fault::Kill { node, returns, wiped } => self.kill_for(node_id(node), returns, wiped),
            Fault::KillCoordinator => {
                let alive = self.coordinator.is_some();
                self.kill_coordinator();
                alive
            }
            Fault::StopCoordinator { lasts } => {
                self.coordinator_stopped_until = self.coordinator_stopped_until.max(now + lasts);
                self.coordinator.is_some()
            }
            Fault::Repeat { lasts } => {
                self.network.repeat(now + lasts);
                true
            }
            Fault::ClockJump { node, ahead } => self.clock_jumps(node_id(node), ahead),
            Fault::Lie { node, times } => self.alive(node).map(|host| host.lies += times).is_some(),
            Fault::Stop { node, lasts } => self.alive(node).map(|host| host.stopped_until = host.stopped_until.max(now + lasts)).is_some(),
            Fault::Hang { node, lasts } => self.alive(node).map(|host| host.hung_until = host.hung_until.max(now + lasts)).is_some(),
            Fault::Cut { from, to, both, lasts } => {
                let (from, to) = (node_id(from), node_id(to));
                self.network.cut(from, to, now + lasts);
                if both {
                    self.network.cut(to, from, now + lasts);
                }
                from != to
            }
            Fault::Blackhole { node, lasts } => self.blackhole(node_id(node), now + lasts),
            Fault::Flap { node } => {
                let node = node_id(node);
                let open = self.hosts.get(&node).filter(|host| host.alive && host.connected).map(|host| host.connection);
                self.drop_control(node);
                if let Some(host) = self.hosts.get(&node).filter(|_| open.is_some()) {
                    let (life, event) = (host.life, Event::ControlDown { reason: "reset".to_owned() });
                    self.schedule(Duration::ZERO, Happening::Node { node, life, event });
                }
                open.is_some()
            }
            Fault::Mute { node, lasts } => self.alive(node).map(|host| host.muted_until = host.muted_until.max(now + lasts)).is_some(),
            Fault::NotFinite { node, times } => self.alive(node).map(|host| host.not_finite += times).is_some(),
            Fault::OutOfMemory { node, times } => self.alive(node).map(|host| host.no_room += times).is_some(),
            Fault::DiskFull { node, lasts } => self.alive(node).map(|host| host.disk_full_until = host.disk_full_until.max(now + lasts)).is_some(),
            Fault::Leave { node, returns } => {
                let life = self.alive(node).map(|host| {
                    host.returns = Some(returns);
                    host.life
                });
                if let Some(life) = life {
                    self.schedule(Duration::ZERO, Happening::Node { node: node_id(node), life, event: Event::Leave });
                }
                life.is_some()
            }
        };
        self.faults_struck += usize::from(struck);
    }

    fn alive(&mut self, node: usize) -> Option<&mut super::Host> {
        self.hosts.get_mut(&node_id(node)).filter(|host| host.alive)
    }

    fn blackhole(&mut self, node: NodeId, until: Time) -> bool {
        let others: Vec<NodeId> = self.hosts.keys().copied().filter(|other| *other != node).collect();
        for other in others {
            self.network.silence(node, other, until);
        }
        self.hosts.get_mut(&node).filter(|host| host.alive).map(|host| host.muted_until = host.muted_until.max(until)).is_some()
    }

    fn clock_jumps(&mut self, node: NodeId, ahead: Duration) -> bool {
        let Some(host) = self.hosts.get_mut(&node).filter(|host| host.alive) else { return false };
        host.clock += ahead;
        host.timer = None;
        // Its timers may be due now.
        let life = host.life;
        self.schedule(Duration::ZERO, Happening::Node { node, life, event: Event::Timer });
        true
    }

    fn kill_for(&mut self, node: NodeId, returns: Duration, wiped: bool) -> bool {
        let Some(host) = self.hosts.get_mut(&node).filter(|host| host.alive) else { return false };
        if wiped {
            host.disk.clear();
        }
        self.kill(node);
        self.schedule(returns, Happening::Start(node));
        true
    }

    /// Everything dies at once and starts again.
    pub(super) fn blackout(&mut self) {
        let alive: Vec<NodeId> = self.hosts.iter().filter(|(_, host)| host.alive).map(|(node, _)| *node).collect();
        for node in alive {
            self.kill(node);
            self.schedule(Duration::from_secs(1), Happening::Start(node));
        }
        self.kill_coordinator();
    }
}
