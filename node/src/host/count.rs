//! Counting: reports what was computed, adds what the ledger counts, drops what it does not.

use std::collections::{BTreeMap, BTreeSet};

use skein_protocol::id::{Fence, Group, Microbatch, Step, SumId, Use};
use skein_protocol::message::control::{Done, ToCoordinator, Verdict};
use skein_protocol::set::BitSet;

use super::Progress;
use crate::engine::{Task, WorkKey};
use crate::machine::{Action, Node};

impl Node {
    /// Reports what waits in scratch (rule 1), one message for all that one event brought.
    pub(crate) fn flush_done(&mut self, actions: &mut Vec<Action>) {
        if self.host.to_report.is_empty() || !self.session.welcomed {
            return;
        }
        let Some(run) = &self.run else { return };
        let mut by_step: BTreeMap<Step, Vec<Done>> = BTreeMap::new();
        for key in std::mem::take(&mut self.host.to_report) {
            let Some(entry) = self.host.entries.get(&key) else { continue };
            let groups: BTreeSet<Group> = entry.scratch.iter().map(|one| run.structure.uses[one].0).collect();
            let (microbatch, attempt, uses, loss) = (key.microbatch, entry.work.attempt, entry.scratch.clone(), entry.loss);
            let sums: Vec<(Group, SumId)> = groups.into_iter().map(|group| (group, self.host.open_sum(key.step, group))).collect();
            if let Some(entry) = self.host.entries.get_mut(&key) {
                entry.reported.clone_from(&sums);
            }
            by_step.entry(key.step).or_default().push(Done { microbatch, attempt, uses, sums, loss });
        }
        for (step, entries) in by_step {
            let fence = Fence { timeline: self.timeline(), step };
            actions.push(Action::Tell(ToCoordinator::Done { fence, entries }));
        }
    }

    /// The ledger's answers: add what is counted (rule 3), drop what another sum has.
    pub(crate) fn counted(&mut self, fence: Fence, verdicts: &[Verdict]) {
        if !self.is_current(fence) {
            return;
        }
        for verdict in verdicts {
            let keys = self.keys_of(fence.step, verdict.microbatch);
            for key in keys {
                self.count_entry(key, verdict);
            }
        }
    }

    fn keys_of(&self, step: Step, microbatch: Microbatch) -> Vec<WorkKey> {
        self.host.entries.keys().filter(|key| key.step == step && key.microbatch == microbatch).copied().collect()
    }

    fn count_entry(&mut self, key: WorkKey, verdict: &Verdict) {
        let Some(run) = &self.run else { return };
        let Some(entry) = self.host.entries.get_mut(&key) else { return };
        let mut adds = Vec::new();
        let named = |one: usize| verdict.sums.iter().find(|(of, _)| *of == run.structure.uses[one].0);
        for one in entry.scratch.intersection(&verdict.counted).iter() {
            let Some((_, sum)) = named(one) else { continue };
            // The sum was voided while the answer was on its way.
            let Some(record) = self.host.sums.get_mut(sum) else { continue };
            let one_id = Use(u16::try_from(one).expect("below the number of uses"));
            entry.counted.insert(one_id, *sum);
            entry.scratch.remove(one);
            if entry.backward == Progress::Queued {
                entry.taken.insert(one);
            }
            // Another span of this node may have been counted for it.
            if record.counted.entry(one_id).or_default().insert(key.microbatch.0 as usize) {
                adds.push((one_id, *sum));
            }
        }
        // What was reported again since, under another sum, has an answer of its own to come.
        let reported = &entry.reported;
        let dropped: BitSet = verdict.dropped.iter().filter(|one| named(*one).is_some_and(|pair| reported.contains(pair))).collect();
        entry.scratch = entry.scratch.difference(&dropped);
        // A backward under way puts gradients of its own there.
        let empty = entry.scratch.is_empty() && entry.backward != Progress::Queued;
        if !adds.is_empty() {
            self.queue.push(Task::Add { key, sums: adds });
        }
        if empty {
            self.queue.push(Task::Discard { key });
        }
    }

    /// Sums that count no more; gradients reported for them are reported again for fresh ones.
    pub(crate) fn void(&mut self, fence: Fence, sums: &[SumId]) {
        if !self.is_current(fence) {
            return;
        }
        let void: Vec<SumId> = sums.iter().filter(|sum| self.host.sums.remove(sum).is_some()).copied().collect();
        self.host.open_sums.retain(|_, sum| !void.contains(sum));
        for (key, entry) in &mut self.host.entries {
            entry.counted.retain(|_, sum| !void.contains(sum));
            if !entry.scratch.is_empty() && entry.reported.iter().any(|(_, sum)| void.contains(sum)) {
                self.host.to_report.insert(*key);
            }
        }
        if !void.is_empty() {
            self.reductions_without(&void);
            self.queue.push(Task::DropSums { sums: void });
        }
    }

    /// After a welcome: sums that are not live any more are void (rule 4).
    pub(crate) fn keep_only_sums(&mut self, live: &[SumId]) {
        let by_step: Vec<(Step, SumId)> = self.host.sums.iter().filter(|(sum, _)| !live.contains(sum)).map(|(sum, record)| (record.step, *sum)).collect();
        for (step, sum) in by_step {
            // Sums of a committed step stay until it is retired.
            if self.newest_commit().is_none_or(|committed| step > committed) {
                self.void(Fence { timeline: self.timeline(), step }, &[sum]);
            }
        }
    }

    /// Reports again whatever was not answered when the connection went.
    pub(crate) fn report_again(&mut self) {
        let waiting: Vec<WorkKey> = self.host.entries.iter().filter(|(_, entry)| !entry.scratch.is_empty()).map(|(key, _)| *key).collect();
        self.host.to_report.extend(waiting);
    }
}
