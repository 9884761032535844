//! Values that are not finite: a device or weights of one node that went bad, or a run that diverged.
//!
//! No such value reaches a sum: its host drops it and says so, and the microbatch is done elsewhere.
//! Where another host computes the same microbatch well, the node fetches its weights anew. Where
//! nobody does, the run stands still until a person has looked.

use std::collections::{BTreeMap, BTreeSet};

use skein_protocol::id::{Fence, Microbatch, NodeId, Span};

use crate::machine::{Action, Coordinator, Phase};

/// So often may hosts fail at one microbatch before the run counts as diverged.
const FAILURES_MAX: u32 = 16;

/// Who computed what that was not finite, in one step.
#[derive(Debug, Default)]
pub(crate) struct NotFinite {
    by_microbatch: BTreeMap<Microbatch, BTreeMap<NodeId, u32>>,
}

impl NotFinite {
    /// Notes a failure; how many there were at this microbatch, and whether it is the node's first.
    fn note(&mut self, node: NodeId, microbatch: Microbatch) -> (u32, bool) {
        let first = self.by_microbatch.values().all(|nodes| !nodes.contains_key(&node));
        let nodes = self.by_microbatch.entry(microbatch).or_default();
        *nodes.entry(node).or_default() += 1;
        (nodes.values().sum(), first)
    }

    /// Those who failed at a microbatch that `node` has now done; each is named once.
    fn outdone(&mut self, node: NodeId, microbatch: Microbatch) -> BTreeSet<NodeId> {
        self.by_microbatch.remove(&microbatch).unwrap_or_default().into_keys().filter(|other| *other != node).collect()
    }
}

impl Coordinator {
    /// A host computed values that are not finite.
    pub(crate) fn not_finite(&mut self, node: NodeId, fence: Fence, microbatch: Microbatch, actions: &mut Vec<Action>) {
        let in_batch = microbatch.0 < self.config.batch.microbatches;
        let Some(open) = self.open.as_mut().filter(|open| in_batch && open.ledger.fence() == fence && !open.ledger.missing(microbatch).is_empty()) else {
            return;
        };
        let (failures, first) = open.not_finite.note(node, microbatch);
        if first {
            self.report(format!("{} computed values that are not finite in step {}: done elsewhere", node.short(), fence.step), actions);
        }
        if failures >= FAILURES_MAX && self.phase == Phase::Training {
            let good = self
                .newest_checkpoint()
                .map_or_else(|| "there is no checkpoint yet".to_owned(), |(version, _)| format!("the last checkpoint is of version {version}"));
            let why = format!(
                "step {} to be looked at: nobody computes finite values for microbatch {microbatch}, so the run has diverged; {good}; lower the learning rate in a new run that begins from its export",
                fence.step
            );
            self.report(why.clone(), actions);
            self.phase = Phase::Paused { why };
        }
    }

    /// `node` did a microbatch well at which others failed that host the same blocks: they fetch
    /// their weights anew, if the run can do without them meanwhile.
    pub(crate) fn outdone(&mut self, node: NodeId, span: Span, microbatch: Microbatch, actions: &mut Vec<Action>) {
        let outdone = self.open.as_mut().map(|open| open.not_finite.outdone(node, microbatch)).unwrap_or_default();
        for other in outdone {
            let overlaps = self.placement.seat(other).is_some_and(|seat| seat.span.blocks().any(|block| span.contains(block)));
            if overlaps && self.is_replaceable(other) {
                self.report(format!("{} fetches its weights anew", other.short()), actions);
                self.unseat(other, actions);
                self.seat_newcomer(other, actions);
            }
        }
    }
}
