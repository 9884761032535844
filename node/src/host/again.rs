//! What a broken link may have lost is said again: a link's end does not tell which frames arrived.

use std::time::Duration;

use skein_protocol::id::NodeId;
use skein_protocol::message::data::{Frame, PeerMessage, WorkId};

use super::hop_number;
use crate::engine::WorkKey;
use crate::machine::{Action, Node};

/// What may have been lost with a link is said again after so long.
const SAY_AGAIN_AFTER: Duration = Duration::from_millis(250);

impl Node {
    pub(super) fn tell_failed(&mut self, feeder: NodeId, work: WorkId, hop: u16, refused: bool, actions: &mut Vec<Action>) {
        self.host.failed.insert((feeder, work, hop));
        self.send(feeder, Frame::from(PeerMessage::HopFailed { work, hop, refused }), actions);
    }

    /// Neighbours that wait behind a dead link get another way from their feeders. The link may
    /// also come back, and the feeder be behind it: everything is said again, as markers where the
    /// tensor may have arrived, until it gets through or the step is retired.
    pub(crate) fn host_link_down(&mut self, node: NodeId, actions: &mut Vec<Action>) {
        let mut failed = Vec::new();
        for entry in self.host.entries.values_mut() {
            if entry.sent_output && entry.next() == Some(node) && !entry.answered {
                entry.sent_output = false;
                failed.push((entry.route.feeder, entry.work, entry.hop + 1));
            }
            if entry.sent_gradient && entry.previous() == Some(node) {
                entry.sent_gradient = false;
                failed.push((entry.route.feeder, entry.work, entry.hop - 1));
            }
            if entry.sent_gradient && entry.is_first() && entry.route.feeder == node {
                entry.sent_gradient = false;
            }
        }
        if self.placement.seat(node).is_some() {
            self.host.say_again.insert(node, self.now + SAY_AGAIN_AFTER);
        }
        for (feeder, work, hop) in failed.into_iter().filter(|(feeder, _, _)| *feeder != node) {
            self.tell_failed(feeder, work, hop_number(hop), false, actions);
        }
    }

    /// Asks the host behind for a gradient of which only a marker came.
    pub(super) fn ask_for_gradient(&mut self, key: WorkKey, actions: &mut Vec<Action>) {
        let Some(entry) = self.host.entries.get(&key).filter(|entry| entry.lacks_gradient && entry.gradient.is_none()) else { return };
        if let Some(next) = entry.next() {
            let message = PeerMessage::Missing { work: entry.work, hop: hop_number(entry.hop), backward: true };
            self.send(next, Frame::from(message), actions);
        }
    }

    pub(crate) fn host_timers(&mut self, actions: &mut Vec<Action>) {
        let due: Vec<NodeId> = self.host.say_again.iter().filter(|(_, at)| **at <= self.now).map(|(node, _)| *node).collect();
        for node in due {
            self.host.say_again.remove(&node);
            let told: Vec<(NodeId, WorkId, u16)> = self.host.failed.iter().filter(|(feeder, _, _)| *feeder == node).copied().collect();
            for (feeder, work, hop) in told {
                self.send(feeder, Frame::from(PeerMessage::HopFailed { work, hop, refused: false }), actions);
            }
            let keys: Vec<WorkKey> = self.host.entries.keys().copied().collect();
            for key in keys {
                self.advance(key, actions);
                self.ask_for_gradient(key, actions);
            }
        }
    }
}
