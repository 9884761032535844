//! The ledger of one step: which microbatch counts in which sum.
//!
//! It keeps the rules that make every sample count once: a (use, microbatch) pair counts in at
//! most one live sum ([`StepLedger::report`], rule 2), a void sum gives its pairs back
//! ([`StepLedger::void`], rule 4), and a group's cover is exact ([`StepLedger::cover`], rule 8).

use std::collections::{BTreeMap, BTreeSet};

use skein_protocol::id::{Fence, Group, Microbatch, NodeId, Span, SumId, Use};
use skein_protocol::message::control::{CoverPart, Done, SumReport, Verdict};
use skein_protocol::model::Structure;
use skein_protocol::set::BitSet;

/// Sums that one node may have live in one step: a bound on what it can make the ledger hold.
const SUMS_PER_NODE_MAX: usize = 4096;

/// The record of one step.
#[derive(Clone, Debug)]
pub struct StepLedger {
    fence: Fence,
    structure: Structure,
    microbatches: usize,
    /// `counted[use][microbatch]`
    counted: Vec<Vec<Option<SumId>>>,
    sums: BTreeMap<SumId, Sum>,
    /// Per microbatch, who reported which span.
    reporters: Vec<BTreeMap<Span, NodeId>>,
    losses: Vec<Option<f32>>,
    returned: u64,
}

#[derive(Clone, Debug)]
struct Sum {
    node: NodeId,
    group: Group,
    state: SumState,
    counted: BTreeMap<Use, BitSet>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum SumState {
    Open,
    /// Named in a seal: nothing is added any more.
    Sealed,
    Void,
}

/// A `Done` that no honest node sends.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DoneError {
    /// The microbatch is not in the batch.
    #[error("microbatch {0} is not in the batch")]
    Microbatch(Microbatch),
    /// A use that the model or the node's span does not have.
    #[error("it names uses that its span does not have")]
    Uses,
    /// No sum is named for a use's group.
    #[error("no sum is named for group {0}")]
    NoSum(Group),
    /// The sum is another node's, or another group's.
    #[error("the sum of group {0} is not the sender's")]
    ForeignSum(Group),
    /// More sums than any node needs.
    #[error("it opens too many sums")]
    TooManySums,
}

impl StepLedger {
    /// A ledger in which nothing is counted.
    pub fn new(fence: Fence, structure: &Structure, microbatches: usize) -> Self {
        Self {
            fence,
            microbatches,
            counted: vec![vec![None; microbatches]; structure.uses.len()],
            sums: BTreeMap::new(),
            reporters: vec![BTreeMap::new(); microbatches],
            losses: vec![None; microbatches],
            structure: structure.clone(),
            returned: 0,
        }
    }

    /// The step.
    pub fn fence(&self) -> Fence {
        self.fence
    }

    /// Judges one report (rule 2): a pair counts in the first live sum it is reported for; a
    /// repeat for the same sum gets the same answer. Uses whose sum is void get no answer: the
    /// reporter is told of the void sum and reports again under another one.
    pub fn report(&mut self, node: NodeId, span: Span, done: &Done) -> Result<Verdict, DoneError> {
        self.check(node, span, done)?;
        let mut verdict = Verdict { microbatch: done.microbatch, sums: done.sums.clone(), counted: BitSet::new(), dropped: BitSet::new() };
        let index = done.microbatch.0 as usize;
        for one in done.uses.iter() {
            let id = Use(u16::try_from(one).expect("checked"));
            let group = self.structure.group_of(id);
            let sum_id = done.sums.iter().find(|(g, _)| *g == group).expect("checked").1;
            let sum = self.sums.entry(sum_id).or_insert(Sum { node, group, state: SumState::Open, counted: BTreeMap::new() });
            match (self.counted[one][index], sum.state) {
                (Some(holder), _) if holder == sum_id => {
                    verdict.counted.insert(one);
                }
                (None, SumState::Open) => {
                    self.counted[one][index] = Some(sum_id);
                    sum.counted.entry(id).or_default().insert(index);
                    verdict.counted.insert(one);
                }
                (_, SumState::Void) => {}
                // Another sum has it; or this one is sealed, and the pair stays to be done.
                (Some(_), SumState::Open | SumState::Sealed) | (None, SumState::Sealed) => {
                    verdict.dropped.insert(one);
                }
            }
        }
        if !verdict.counted.is_empty() {
            self.reporters[index].insert(span, node);
            if let Some(loss) = done.loss.filter(|loss| loss.is_finite()) {
                self.losses[index] = Some(loss);
            }
        }
        Ok(verdict)
    }

    fn check(&self, node: NodeId, span: Span, done: &Done) -> Result<(), DoneError> {
        if done.microbatch.0 as usize >= self.microbatches {
            return Err(DoneError::Microbatch(done.microbatch));
        }
        if !done.uses.is_below(self.structure.uses.len()) || !done.uses.is_subset(&self.structure.uses_of(span)) {
            return Err(DoneError::Uses);
        }
        for one in done.uses.iter() {
            let group = self.structure.uses[one].0;
            let sum_id = done.sums.iter().find(|(g, _)| *g == group).ok_or(DoneError::NoSum(group))?.1;
            if let Some(sum) = self.sums.get(&sum_id)
                && (sum.node != node || sum.group != group)
            {
                return Err(DoneError::ForeignSum(group));
            }
        }
        if self.sums.values().filter(|sum| sum.node == node).count() + done.sums.len() > SUMS_PER_NODE_MAX {
            return Err(DoneError::TooManySums);
        }
        Ok(())
    }

    /// Takes over a sum that survived a restart of the coordinator, if it is consistent with what
    /// is counted already; else it is void.
    pub fn adopt(&mut self, node: NodeId, span: Span, report: &SumReport) -> bool {
        let uses = self.structure.uses_of(span);
        let fits = report.step == self.fence.step
            && report.counted.is_sorted_by(|(a, _), (b, _)| a < b)
            && !self.sums.contains_key(&report.sum)
            && report.counted.iter().all(|(one, pairs)| {
                uses.contains(usize::from(one.0))
                    && self.structure.group_of(*one) == report.group
                    && pairs.is_below(self.microbatches)
                    && pairs.iter().all(|index| self.counted[usize::from(one.0)][index].is_none())
            });
        let mut sum = Sum { node, group: report.group, state: SumState::Void, counted: BTreeMap::new() };
        if fits {
            sum.state = SumState::Open;
            for (one, pairs) in &report.counted {
                for index in pairs.iter() {
                    self.counted[usize::from(one.0)][index] = Some(report.sum);
                    self.reporters[index].insert(span, node);
                }
                sum.counted.entry(*one).or_default().clone_from(pairs);
            }
            for (microbatch, loss) in report.losses.iter().filter(|(_, loss)| loss.is_finite()) {
                let index = microbatch.0 as usize;
                if report.counted.iter().any(|(_, pairs)| pairs.contains(index)) {
                    self.losses[index] = Some(*loss);
                }
            }
        }
        self.sums.entry(report.sum).or_insert(sum);
        fits
    }

    /// Makes a sum void; the microbatches of which something is missing again.
    pub fn void(&mut self, sum_id: SumId) -> BitSet {
        let mut returned = BitSet::new();
        let Some(sum) = self.sums.get_mut(&sum_id) else { return returned };
        if sum.state == SumState::Void {
            return returned;
        }
        sum.state = SumState::Void;
        for (one, pairs) in std::mem::take(&mut sum.counted) {
            for index in pairs.iter() {
                assert_eq!(self.counted[usize::from(one.0)][index].take(), Some(sum_id), "a pair counts in one live sum");
                self.returned += 1;
                returned.insert(index);
            }
        }
        returned
    }

    /// The sums of `node` that are not void, and those that are.
    pub fn sums_of(&self, node: NodeId) -> (Vec<SumId>, Vec<SumId>) {
        let of_node = self.sums.iter().filter(|(_, sum)| sum.node == node);
        let (void, live): (Vec<_>, Vec<_>) = of_node.partition(|(_, sum)| sum.state == SumState::Void);
        let ids = |sums: Vec<(&SumId, &Sum)>| sums.into_iter().map(|(id, _)| *id).collect();
        (ids(live), ids(void))
    }

    /// The group of a sum.
    pub fn group_of(&self, sum: SumId) -> Option<Group> {
        self.sums.get(&sum).map(|sum| sum.group)
    }

    /// Who holds live sums of `group` with something in them.
    pub fn holders_of(&self, group: Group) -> BTreeSet<NodeId> {
        self.sums.values().filter(|sum| sum.group == group && sum.state != SumState::Void && !sum.counted.is_empty()).map(|sum| sum.node).collect()
    }

    /// Whether a sum is known to be void.
    pub fn is_void(&self, sum: SumId) -> bool {
        self.sums.get(&sum).is_some_and(|sum| sum.state == SumState::Void)
    }

    /// Uses for which `microbatch` does not count yet.
    pub fn missing(&self, microbatch: Microbatch) -> BitSet {
        let index = microbatch.0 as usize;
        (0..self.counted.len()).filter(|one| self.counted[*one][index].is_none()).collect()
    }

    /// Whether every use of `group` has the whole batch.
    pub fn is_complete(&self, group: Group) -> bool {
        self.structure.uses_of_group(group).iter().all(|one| self.counted[one].iter().all(Option::is_some))
    }

    /// The exact cover of a complete group (rule 8), sealing its sums. Ordered by node and sum.
    ///
    /// # Panics
    /// If the cover is not exact: that would be a fault of this ledger.
    pub fn cover(&mut self, group: Group) -> Vec<CoverPart> {
        let mut parts = Vec::new();
        let mut covered: BTreeMap<Use, BitSet> = BTreeMap::new();
        for (id, sum) in self.sums.iter_mut().filter(|(_, sum)| sum.group == group && sum.state != SumState::Void && !sum.counted.is_empty()) {
            sum.state = SumState::Sealed;
            let mut pairs = 0;
            for (one, held) in &sum.counted {
                let so_far = covered.entry(*one).or_default();
                assert!(so_far.is_disjoint(held), "sums of a cover are disjoint");
                *so_far = so_far.union(held);
                pairs += held.len();
            }
            parts.push(CoverPart { node: sum.node, sum: *id, pairs: u32::try_from(pairs).expect("bounded by uses x microbatches") });
        }
        for one in self.structure.uses_of_group(group).iter() {
            let whole = covered.get(&Use(u16::try_from(one).expect("below the number of uses")));
            assert!(whole.is_some_and(|pairs| pairs.len() == self.microbatches), "a cover holds the whole batch");
        }
        parts.sort_by_key(|part| (part.node, part.sum));
        parts
    }

    /// Hosts that computed parts of a microbatch.
    pub fn holders(&self, microbatch: Microbatch) -> Vec<(Span, NodeId)> {
        self.reporters[microbatch.0 as usize].iter().map(|(span, node)| (*span, *node)).collect()
    }

    /// Mean loss of the batch over the microbatches that reported one, in index order.
    pub fn loss(&self) -> f32 {
        let known: Vec<f64> = self.losses.iter().flatten().map(|loss| f64::from(*loss)).collect();
        if known.is_empty() { f32::NAN } else { (known.iter().sum::<f64>() / known.len() as f64) as f32 }
    }

    /// (use, microbatch) pairs that void sums gave back: what had to be computed again.
    pub fn returned(&self) -> u64 {
        self.returned
    }

    /// (use, microbatch) pairs that are missing.
    pub fn missing_pairs(&self) -> usize {
        self.counted.iter().flatten().filter(|sum| sum.is_none()).count()
    }
}

#[cfg(test)]
mod tests {
    use skein_protocol::id::{Attempt, Step, Timeline};
    use skein_protocol::model::GroupLayout;

    use super::*;

    const A: NodeId = NodeId([1; 32]);
    const B: NodeId = NodeId([2; 32]);

    /// Three blocks, the last using group 0 once more: uses 0, 1, 2 and 3 = (group 0, block 2).
    fn ledger() -> StepLedger {
        let layouts = (0..3).map(|index| GroupLayout::new([(format!("w{index}"), vec![4])])).collect();
        let structure = Structure::new(layouts, true, vec![1.0; 3], 4, vec![1; 3]);
        StepLedger::new(Fence { timeline: Timeline(0), step: Step(0) }, &structure, 2)
    }

    fn sum(boot: u64, count: u64) -> SumId {
        SumId { boot, count }
    }

    fn done(microbatch: u32, uses: &[usize], boot: u64, counts: u64) -> Done {
        let sums = (0..3).map(|group| (Group(group), sum(boot, counts * 10 + u64::from(group)))).collect();
        Done { microbatch: Microbatch(microbatch), attempt: Attempt::default(), uses: uses.iter().copied().collect(), sums, loss: Some(1.0) }
    }

    fn whole() -> Span {
        Span::new(0, 3)
    }

    #[test]
    fn the_first_report_counts_a_later_one_is_dropped_a_repeat_is_answered_the_same() {
        let mut ledger = ledger();
        let first = ledger.report(A, whole(), &done(0, &[0, 1, 2, 3], 1, 1)).expect("honest");
        assert_eq!(first.counted.len(), 4);
        let other = ledger.report(B, whole(), &done(0, &[0, 1, 2, 3], 2, 1)).expect("honest");
        assert_eq!((other.counted.len(), other.dropped.len()), (0, 4));
        assert_eq!(ledger.report(A, whole(), &done(0, &[0, 1, 2, 3], 1, 1)).expect("honest"), first);
    }

    #[test]
    fn a_void_sum_gives_back_what_it_held_and_counts_no_more() {
        let mut ledger = ledger();
        ledger.report(A, whole(), &done(0, &[0, 1, 2, 3], 1, 1)).expect("honest");
        ledger.void(sum(1, 10));
        assert_eq!(ledger.missing(Microbatch(0)).iter().collect::<Vec<_>>(), [0, 3]);
        assert_eq!(ledger.returned(), 2);
        let late = ledger.report(A, whole(), &done(1, &[0, 1], 1, 1)).expect("honest");
        assert_eq!((late.counted.iter().collect::<Vec<_>>(), late.dropped.len()), (vec![1], 0));
        let fresh = ledger.report(A, whole(), &done(1, &[0], 1, 2)).expect("honest");
        assert_eq!(fresh.counted.len(), 1);
    }

    #[test]
    fn a_group_with_two_uses_is_complete_when_both_have_the_batch() {
        let mut ledger = ledger();
        for microbatch in 0..2 {
            ledger.report(A, Span::new(0, 2), &done(microbatch, &[0, 1], 1, 1)).expect("honest");
        }
        assert!(ledger.is_complete(Group(1)) && !ledger.is_complete(Group(0)));
        for microbatch in 0..2 {
            ledger.report(B, Span::new(2, 3), &done(microbatch, &[2, 3], 2, 1)).expect("honest");
        }
        let cover = ledger.cover(Group(0));
        assert_eq!(cover.iter().map(|part| (part.node, part.pairs)).collect::<Vec<_>>(), [(A, 2), (B, 2)]);
        // Nothing is added to a sealed sum, even when the group is opened again.
        ledger.void(sum(2, 10));
        let late = ledger.report(A, whole(), &done(0, &[3], 1, 1)).expect("honest");
        assert_eq!((late.counted.len(), late.dropped.len()), (0, 1));
    }

    #[test]
    fn reports_of_what_a_node_cannot_have_are_errors() {
        let mut ledger = ledger();
        assert_eq!(ledger.report(A, whole(), &done(2, &[0], 1, 1)), Err(DoneError::Microbatch(Microbatch(2))));
        assert_eq!(ledger.report(A, Span::new(0, 1), &done(0, &[1], 1, 1)), Err(DoneError::Uses));
        assert_eq!(ledger.report(A, whole(), &done(0, &[70], 1, 1)), Err(DoneError::Uses));
        ledger.report(A, whole(), &done(0, &[0], 1, 1)).expect("honest");
        assert_eq!(ledger.report(B, whole(), &done(1, &[0], 1, 1)), Err(DoneError::ForeignSum(Group(0))));
        let mut bare = done(0, &[0], 3, 1);
        bare.sums.clear();
        assert_eq!(ledger.report(B, whole(), &bare), Err(DoneError::NoSum(Group(0))));
    }

    #[test]
    fn after_a_restart_overlapping_sums_are_void() {
        let mut ledger = ledger();
        let report = |id, pairs: &[usize]| SumReport {
            sum: id,
            step: Step(0),
            group: Group(1),
            counted: vec![(Use(1), pairs.iter().copied().collect())],
            losses: pairs.iter().map(|index| (Microbatch(*index as u32), *index as f32)).collect(),
        };
        assert!(ledger.adopt(A, whole(), &report(sum(1, 1), &[0])));
        assert!(!ledger.adopt(B, whole(), &report(sum(2, 1), &[0, 1])));
        assert!(ledger.is_void(sum(2, 1)));
        assert!(ledger.adopt(B, whole(), &report(sum(2, 2), &[1])));
        assert!(ledger.is_complete(Group(1)));
        // What is shown of the step is over the whole batch, not only over what is reported again.
        assert_eq!(ledger.loss(), 0.5);
    }
}
