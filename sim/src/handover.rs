//! How long work waits that was in the hands of a node that is lost.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use skein_node::engine::{Task, WorkKey};
use skein_protocol::id::NodeId;
use skein_protocol::time::Time;

/// Watches who computes what.
#[derive(Default)]
pub(crate) struct Handover {
    /// What each node has begun and not added to a sum.
    in_hand: BTreeMap<NodeId, BTreeSet<WorkKey>>,
    waiting: Vec<Lost>,
    pub(crate) taken_over: Vec<Duration>,
}

/// What a node had in hand when it was lost.
struct Lost {
    node: NodeId,
    at: Time,
    works: BTreeSet<WorkKey>,
}

impl Handover {
    /// A node computes a task; perhaps what another one lost.
    pub(crate) fn computes(&mut self, node: NodeId, task: &Task, now: Time) {
        match task {
            Task::Forward { key, .. } | Task::Backward { key, .. } => {
                let again = |lost: &Lost| lost.node != node && lost.works.iter().any(|work| overlap(work, key));
                if let Some(index) = self.waiting.iter().position(again) {
                    self.taken_over.push(now.since(self.waiting.remove(index).at));
                }
                self.in_hand.entry(node).or_default().insert(*key);
            }
            Task::Add { key, .. } | Task::Discard { key } => {
                self.in_hand.entry(node).or_default().remove(key);
            }
            Task::Retire { step } => self.in_hand.entry(node).or_default().retain(|key| key.step > *step),
            Task::Reset
            | Task::Draw { .. }
            | Task::Install { .. }
            | Task::Forget { .. }
            | Task::InputGradient { .. }
            | Task::DropSums { .. }
            | Task::EncodeChunk { .. }
            | Task::ReduceChunk { .. }
            | Task::StoreChunk { .. }
            | Task::DropReduction { .. }
            | Task::Apply { .. }
            | Task::TakeSnapshot { .. } => {}
        }
    }

    /// A node is lost with what it has in hand.
    pub(crate) fn lost(&mut self, node: NodeId, at: Time) {
        let works = self.in_hand.remove(&node).unwrap_or_default();
        if !works.is_empty() {
            self.waiting.push(Lost { node, at, works });
        }
    }
}

fn overlap(one: &WorkKey, other: &WorkKey) -> bool {
    (one.step, one.microbatch) == (other.step, other.microbatch) && one.span.first < other.span.end && other.span.first < one.span.end
}
