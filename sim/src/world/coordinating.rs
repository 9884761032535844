//! What the coordinator wants done, and what comes to it.

use std::sync::Arc;
use std::time::Duration;

use skein_coordinator::machine as coordinator;
use skein_coordinator::machine::Coordinator;
use skein_coordinator::record::Record;
use skein_protocol::id::NodeId;
use skein_protocol::sign::NullSigner;

use super::{COORDINATOR, Happening, World};
use crate::network::DELAY;

impl World {
    pub(super) fn start_coordinator(&mut self) {
        if self.coordinator.is_some() {
            return;
        }
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
        self.coordinator_stopped_until = self.now;
        self.coordinator_event(self.coordinator_life, coordinator::Event::Timer);
    }

    pub(super) fn kill_coordinator(&mut self) {
        if self.coordinator.take().is_none() {
            return;
        }
        let open: Vec<(NodeId, u32)> = self.hosts.iter().map(|(node, host)| (*node, host.connection)).collect();
        for (node, connection) in open {
            self.hosts.get_mut(&node).expect("listed").accepted = None;
            self.schedule(DELAY, Happening::Closed { node, connection, reason: "closed" });
        }
        self.schedule(Duration::from_secs(1), Happening::StartCoordinator);
    }

    /// A node's connection stands; it takes the place of one before it.
    pub(super) fn opened(&mut self, life: u32, node: NodeId, connection: u32) {
        if life == self.coordinator_life
            && let Some(host) = self.hosts.get_mut(&node)
        {
            host.accepted = Some(connection);
            self.coordinator_event(life, coordinator::Event::Connected(node));
        }
    }

    pub(super) fn hung_up(&mut self, life: u32, node: NodeId, connection: u32) {
        let Some(host) = self.hosts.get_mut(&node).filter(|host| host.accepted == Some(connection)) else { return };
        host.accepted = None;
        self.coordinator_event(life, coordinator::Event::Disconnected(node));
    }

    pub(super) fn coordinator_event(&mut self, life: u32, event: coordinator::Event) {
        if life != self.coordinator_life {
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
            self.schedule(at.since(self.now), Happening::Coordinator { life });
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
                if let Some((connection, muted)) = self.hosts.get(&to).and_then(|host| Some((host.accepted?, host.muted_until))) {
                    let at = (self.now + DELAY).max(muted);
                    self.schedule_at(at, Happening::ToNode { node: to, connection, message });
                }
            }
            coordinator::Action::Disconnect(node) => {
                if let Some((connection, muted)) = self.hosts.get(&node).and_then(|host| Some((host.accepted?, host.muted_until))) {
                    // What was sent before arrives first.
                    let at = (self.now + DELAY).max(muted);
                    self.schedule_at(at, Happening::Closed { node, connection, reason: "closed by the coordinator" });
                    let life = self.coordinator_life;
                    self.schedule(DELAY * 2, Happening::Hangup { life, node, connection });
                }
            }
            coordinator::Action::Report(line) => tracing::debug!(at = self.now.as_secs_f64(), line),
            coordinator::Action::Stopped => {}
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
}
