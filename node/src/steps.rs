//! Commits and versions: what is final is applied, in order, by everyone alike.

use std::collections::{BTreeMap, BTreeSet};

use skein_protocol::id::{Fence, Group, Step, Timeline, Version};
use skein_protocol::message::control::{Commit, ToCoordinator};

use crate::catchup::Catchup;
use crate::engine::{ReductionKey, Task};
use crate::machine::{Action, Node, Report};

/// Checkpoints that may be asked for ahead of time.
const WANTED_MAX: usize = 16;

/// What this node has applied and is to apply.
#[derive(Default)]
pub(crate) struct Steps {
    /// The version of all groups of the span, once their state is here. Set when the engine has
    /// been asked for it: the engine does things in order.
    pub(crate) version: Option<Version>,
    /// Commits of this timeline that are not applied yet.
    pending: BTreeMap<Step, Commit>,
    pub(crate) retired: Option<Step>,
    /// Steps that the coordinator retired before this node had applied them.
    retire_after: Option<Step>,
    /// Versions to save, and which groups.
    checkpoints: BTreeMap<Version, BTreeSet<Group>>,
}

impl Steps {
    pub(crate) fn clear(&mut self) {
        *self = Self::default();
    }

    /// Whether the coordinator has retired the step that makes `version`.
    pub(crate) fn retire_passed(&self, version: Version) -> bool {
        self.retired.max(self.retire_after).is_some_and(|retired| retired.makes() >= version)
    }

    pub(crate) fn versions_held(&self, catchup: &Catchup) -> Vec<(Group, Version)> {
        self.version.map(|version| catchup.groups().map(|group| (group, version)).collect()).unwrap_or_default()
    }
}

impl Node {
    /// A step is final.
    pub(crate) fn committed(&mut self, commit: Commit, actions: &mut Vec<Action>) {
        if self.run.is_none() {
            return;
        }
        match self.accept_commit(&commit) {
            Ok(true) => {}
            Ok(false) => return,
            Err(reason) => return actions.push(Action::Exit { ok: false, reason: format!("refusing this coordinator: {reason}") }),
        }
        if commit.fence.timeline != self.timeline() {
            return;
        }
        actions.push(Action::Report(Report::Committed { step: commit.fence.step.0, loss: commit.loss }));
        let step = commit.fence.step;
        if self.steps.version.is_some_and(|version| step < version.step()) {
            return;
        }
        if self.catchup.from().is_some_and(|from| step.runs_on() >= from) {
            self.fetch_results(&commit, actions);
            self.steps.pending.insert(step, commit);
        }
        self.apply_if_possible(actions);
    }

    /// Applies the next commit as soon as the results it names are here.
    pub(crate) fn apply_if_possible(&mut self, actions: &mut Vec<Action>) {
        while let Some(version) = self.steps.version {
            let step = version.step();
            let Some(commit) = self.steps.pending.get(&step) else { return };
            let mine: Vec<(ReductionKey, _)> = commit
                .groups
                .iter()
                .filter(|(group, _, _)| self.catchup.has_group(*group))
                .map(|(group, attempt, digest)| (ReductionKey { step, group: *group, attempt: *attempt }, *digest))
                .collect();
            if !mine.iter().all(|(key, digest)| self.reduce.has(*key, *digest)) {
                return;
            }
            let scalars = commit.scalars;
            // Whatever is still to be computed of it counts no more.
            self.queue.drop_step(step);
            self.steps.pending.remove(&step);
            // A commit implies that the step before it is retired: its weights make room.
            if let Some(before) = step.0.checked_sub(1).map(Step) {
                self.retired(Fence { timeline: self.timeline(), step: before });
            }
            self.queue.push(Task::Apply { step, reductions: mine.into_iter().map(|(key, _)| key).collect(), scalars });
            self.steps.version = Some(step.makes());
            self.take_snapshots();
            self.early_work(actions);
        }
    }

    /// The engine has applied a step.
    pub(crate) fn applied(&mut self, step: Step, actions: &mut Vec<Action>) {
        let fence = Fence { timeline: self.timeline(), step };
        if self.session.welcomed {
            actions.push(Action::Tell(ToCoordinator::Applied { fence, roots: Vec::new() }));
        }
        if self.steps.retire_after.is_some_and(|retired| retired <= step) {
            self.steps.retire_after = None;
            self.retired(fence);
        }
        self.ready_if_caught_up(actions);
    }

    /// The step's leftovers may go: its version is safe.
    pub(crate) fn retired(&mut self, fence: Fence) {
        if !self.is_current(fence) || self.steps.retired.is_some_and(|retired| fence.step <= retired) {
            return;
        }
        if self.steps.version.is_none_or(|version| fence.step.makes() > version) {
            self.steps.retire_after = self.steps.retire_after.max(Some(fence.step));
            return;
        }
        self.steps.retired = Some(fence.step);
        self.host.retire(fence.step);
        self.reduce.retire(fence.step);
        self.queue.push(Task::Retire { step: fence.step });
    }

    /// The coordinator wants a version saved by this node.
    pub(crate) fn checkpoint_wanted(&mut self, timeline: Timeline, version: Version, groups: Vec<Group>, actions: &mut Vec<Action>) {
        if timeline != self.timeline() {
            return;
        }
        let saved: Vec<_> =
            self.catchup.shards().filter(|shard| shard.version == version && shard.timeline == timeline && groups.contains(&shard.group)).collect();
        let missing: BTreeSet<Group> =
            groups.into_iter().filter(|group| self.catchup.has_group(*group) && !saved.iter().any(|shard| shard.group == *group)).collect();
        if !saved.is_empty() {
            actions.push(Action::Tell(ToCoordinator::Saved { timeline, shards: saved }));
        }
        self.steps.checkpoints.entry(version).or_default().extend(missing);
        while self.steps.checkpoints.len() > WANTED_MAX {
            self.steps.checkpoints.pop_first();
        }
        self.take_snapshots();
    }

    /// Copies the state of this version if a checkpoint or a joiner wants it; the next step would
    /// overwrite it.
    pub(crate) fn take_snapshots(&mut self) {
        let Some(version) = self.steps.version else { return };
        let mut groups = self.steps.checkpoints.get(&version).cloned().unwrap_or_default();
        groups.extend(self.catchup.wanted_at(version));
        self.steps.checkpoints.retain(|wanted, _| *wanted >= version);
        for group in groups {
            if self.catchup.ask_snapshot(group, version) {
                self.queue.push(Task::TakeSnapshot { group, version });
            }
        }
    }

    pub(crate) fn snapshot_taken(&mut self, snapshot: crate::engine::Snapshot, actions: &mut Vec<Action>) {
        let wanted = self.steps.checkpoints.get_mut(&snapshot.version).is_some_and(|groups| groups.remove(&snapshot.group));
        if wanted {
            actions.push(Action::SaveShard { timeline: self.timeline(), snapshot: snapshot.clone() });
        }
        self.catchup.keep_snapshot(snapshot);
    }
}
