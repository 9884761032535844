//! Judges what was counted, by what the engines say they added: the ledger does not judge itself.

use std::collections::BTreeMap;

use skein_node::engine::ReductionKey;
use skein_protocol::id::{Fence, Group, Microbatch, NodeId, Step, Timeline, Use};
use skein_protocol::message::control::{Commit, Seal};
use skein_protocol::model::Structure;

/// What one node's sums held when a reduction read them.
pub type Contribution = BTreeMap<(Use, Microbatch), u32>;

/// Oracle O1: in every committed step every microbatch counts exactly once for every use.
pub struct Ledger {
    structure: Structure,
    microbatches: u32,
    seals: BTreeMap<(Timeline, ReductionKey), Seal>,
    contributions: BTreeMap<(Timeline, ReductionKey, NodeId), Contribution>,
    committed: BTreeMap<Fence, ()>,
}

impl Ledger {
    /// A judge of a run of `structure` with so many microbatches a step.
    pub fn new(structure: Structure, microbatches: u32) -> Self {
        Self { structure, microbatches, seals: BTreeMap::new(), contributions: BTreeMap::new(), committed: BTreeMap::new() }
    }

    /// The coordinator sealed a group.
    pub fn sealed(&mut self, seal: &Seal) {
        let key = ReductionKey { step: seal.fence.step, group: seal.group, attempt: seal.attempt };
        let old = self.seals.insert((seal.fence.timeline, key), seal.clone());
        assert!(old.is_none(), "attempt {key:?} was sealed twice");
    }

    /// A node's reduction read its sums, which hold `contribution`.
    pub fn contributed(&mut self, timeline: Timeline, key: ReductionKey, node: NodeId, contribution: Contribution) {
        let old = self.contributions.insert((timeline, key, node), contribution.clone());
        assert!(old.is_none_or(|old| old == contribution), "the sums of {node:?} changed while {key:?} read them");
    }

    /// The coordinator committed a step.
    ///
    /// # Panics
    /// If a microbatch does not count exactly once for some use, or a step is skipped or repeated
    /// within a timeline.
    pub fn committed(&mut self, commit: &Commit) {
        let fence = commit.fence;
        let first = self.committed.keys().filter(|other| other.timeline == fence.timeline).count() == 0;
        let before = Fence { step: Step(fence.step.0.wrapping_sub(1)), ..fence };
        assert!(first || self.committed.contains_key(&before), "step {} was skipped", before.step);
        assert!(self.committed.insert(fence, ()).is_none(), "step {} was committed twice", fence.step);
        for (group, attempt, _) in &commit.groups {
            let key = ReductionKey { step: fence.step, group: *group, attempt: *attempt };
            let seal = self.seals.get(&(fence.timeline, key)).unwrap_or_else(|| panic!("{key:?} was committed and never sealed"));
            let mut total = Contribution::new();
            let mut nodes: Vec<NodeId> = seal.cover.iter().map(|part| part.node).collect();
            nodes.dedup();
            for node in nodes {
                let contribution = self.contributions.get(&(fence.timeline, key, node));
                let contribution = contribution.unwrap_or_else(|| panic!("{node:?} is in the cover of {key:?} and nothing read its sums"));
                for (pair, count) in contribution {
                    *total.entry(*pair).or_default() += count;
                }
            }
            self.check_total(key, *group, &total);
        }
        assert_eq!(commit.groups.len(), self.structure.groups.len(), "a commit names every group");
    }

    fn check_total(&self, key: ReductionKey, group: Group, total: &Contribution) {
        for one in self.structure.uses_of_group(group).iter() {
            for microbatch in (0..self.microbatches).map(Microbatch) {
                let one = Use(u16::try_from(one).expect("below the number of uses"));
                let count = total.get(&(one, microbatch)).copied().unwrap_or_default();
                assert_eq!(count, 1, "microbatch {microbatch} counts {count} times for use {one} in {key:?}");
            }
        }
        assert_eq!(total.len(), self.structure.uses_of_group(group).len() * self.microbatches as usize, "only the batch counts in {key:?}");
    }

    /// Committed steps, all timelines together.
    pub fn commits(&self) -> usize {
        self.committed.len()
    }
}
