//! Checkpoints: which node saves what, when one is complete, stopping and finishing.

use std::collections::BTreeMap;
use std::time::Duration;

use skein_protocol::id::{Group, Hash, NodeId, Timeline, Version};
use skein_protocol::message::control::{FromCoordinator, Shard};

use skein_protocol::placement::Source;

use crate::machine::{Action, Coordinator, Phase, is_last, quorum};
use crate::record::Record;

/// How long those who were asked for the last checkpoint have before others are asked too.
const ASK_AGAIN_AFTER: Duration = Duration::from_secs(5);
/// Versions whose shards are remembered.
const VERSIONS_MAX: usize = 1024;

impl Coordinator {
    /// Whether `version` is one to save.
    pub(crate) fn is_checkpoint(&self, version: Version) -> bool {
        let every = self.config.checkpoint.every_steps;
        is_last(&self.config, version.step()) || (every > 0 && version.0.is_multiple_of(every))
    }

    /// Asks two replicas of every group (one where there is one) to save `version`.
    pub(crate) fn request_checkpoint(&mut self, version: Version, actions: &mut Vec<Action>) {
        let mut savers: BTreeMap<NodeId, Vec<Group>> = BTreeMap::new();
        for group in self.structure.group_ids() {
            let members = self.live_members(group, None);
            // Two holders, a different pair for each group, so that the load is spread.
            let first = usize::from(group.0) % members.len().max(1);
            for index in 0..quorum(members.len()).min(members.len()) {
                savers.entry(members[(first + index) % members.len()]).or_default().push(group);
            }
        }
        self.asked_checkpoint = self.now;
        let timeline = self.timeline();
        for (node, groups) in savers {
            actions.push(Action::Send { to: node, message: FromCoordinator::Checkpoint { timeline, version, groups } });
        }
    }

    /// A node has made shards durable.
    pub(crate) fn saved(&mut self, from: NodeId, timeline: Timeline, shards: Vec<Shard>, actions: &mut Vec<Action>) {
        if timeline != self.timeline() || shards.iter().any(|shard| usize::from(shard.group.0) >= self.structure.groups.len()) {
            return;
        }
        self.note_shards(from, &shards);
        let versions: Vec<Version> = shards.iter().map(|shard| shard.version).collect();
        actions.push(Action::Save(vec![Record::Saved { node: from, shards }]));
        for version in versions {
            self.complete_checkpoint(version, actions);
        }
    }

    /// Notes what a node says it has on its disk. It is checked against the root when it is read.
    pub(crate) fn note_shards(&mut self, node: NodeId, shards: &[Shard]) {
        let newest = self.chain.version();
        let known = |shard: &&Shard| usize::from(shard.group.0) < self.structure.groups.len() && shard.version <= newest && self.is_on_course(shard);
        let shards: Vec<Shard> = shards.iter().filter(known).copied().collect();
        for shard in &shards {
            self.shards.entry(shard.version).or_default().entry(shard.group).or_default().insert(node, *shard);
        }
        while self.shards.len() > VERSIONS_MAX {
            self.shards.pop_first();
        }
    }

    pub(crate) fn forget_shards(&mut self, node: NodeId) {
        for holders in self.shards.values_mut().flat_map(|groups| groups.values_mut()) {
            holders.remove(&node);
        }
    }

    /// Whether nobody, here or away, has a shard of some group of a checkpoint any more.
    pub(crate) fn is_destroyed(&self, version: Version) -> bool {
        let groups = self.shards.get(&version);
        self.structure.group_ids().any(|group| groups.and_then(|groups| groups.get(&group)).is_none_or(BTreeMap::is_empty))
    }

    /// Whether a shard belongs to this course of the run: no later timeline began before it.
    fn is_on_course(&self, shard: &Shard) -> bool {
        shard.timeline <= self.timeline() && self.bases.iter().all(|(timeline, base)| *timeline <= shard.timeline || shard.version <= *base)
    }

    /// The last checkpoint is asked for again while it is not complete: who was asked may be gone.
    pub(crate) fn insist_on_last_checkpoint(&mut self, actions: &mut Vec<Action>) {
        let version = match self.phase {
            Phase::Finished => self.chain.version(),
            Phase::Stopping { version } => version,
            Phase::Waiting { .. } | Phase::Recovering { .. } | Phase::Training | Phase::Paused { .. } => return,
        };
        if !self.complete.contains(&version) && self.now.since(self.asked_checkpoint) > ASK_AGAIN_AFTER {
            self.request_checkpoint(version, actions);
        }
    }

    pub(crate) fn complete_checkpoint(&mut self, version: Version, actions: &mut Vec<Action>) {
        let groups = self.structure.groups.len();
        // Version 0 is no checkpoint: it is drawn, or imported under a root of its own.
        if version == Version(0) || self.complete.contains(&version) || self.shards.get(&version).is_none_or(|shards| shards.len() < groups) {
            return;
        }
        actions.push(Action::Save(vec![Record::Checkpoint { version }]));
        self.complete.push(version);
        self.complete.sort_unstable();
        let keep = self.config.checkpoint.keep.max(1);
        let keep_from = self.complete[self.complete.len().saturating_sub(keep)];
        self.shards.retain(|version, _| *version >= keep_from);
        self.complete.retain(|version| *version >= keep_from);
        self.broadcast(&FromCoordinator::CheckpointComplete { version, keep_from }, actions);
        self.report(format!("checkpoint of version {version} is complete"), actions);
        self.stop_if_saved(actions);
    }

    /// Where a group's state at a complete checkpoint is: live nodes with equal roots.
    pub(crate) fn source(&self, version: Version, group: Group) -> Source {
        let shards = self.shards.get(&version).and_then(|groups| groups.get(&group));
        let live: Vec<(NodeId, Hash)> = shards
            .into_iter()
            .flatten()
            .filter(|(node, _)| self.members.get(node).is_some_and(super::membership::Member::is_live))
            .map(|(node, shard)| (*node, shard.root))
            .collect();
        let root = live.first().map(|(_, root)| *root).unwrap_or_default();
        Source { group, holders: live.iter().filter(|(_, other)| *other == root).map(|(node, _)| *node).collect(), root }
    }

    /// Where the imported model is, if a node that is here has all of it and its root is the one
    /// that the configuration names.
    pub(crate) fn imported(&self, import: Hash) -> Option<Vec<Source>> {
        let groups = self.shards.get(&Version(0))?;
        let whole = self.members.iter().filter(|(_, member)| member.is_live()).find_map(|(node, _)| {
            let roots: Option<Vec<Hash>> = self.structure.group_ids().map(|group| Some(groups.get(&group)?.get(node)?.root)).collect();
            roots.filter(|roots| Hash::root(roots) == import)
        })?;
        let holders = |group: Group, root: Hash| {
            let with_root = groups[&group].iter().filter(|(_, shard)| shard.root == root).map(|(node, _)| *node);
            with_root.filter(|node| self.members.get(node).is_some_and(super::membership::Member::is_live)).collect()
        };
        Some(self.structure.group_ids().zip(whole).map(|(group, root)| Source { group, holders: holders(group, root), root }).collect())
    }

    /// The newest complete checkpoint, and the root of each group's state in it.
    pub(crate) fn newest_checkpoint(&self) -> Option<(Version, Vec<(Group, Hash)>)> {
        let version = *self.complete.last()?;
        let groups = self.shards.get(&version)?;
        Some((version, groups.iter().filter_map(|(group, holders)| Some((*group, holders.values().next()?.root))).collect()))
    }

    /// The user wants to stop: the version that is safe now is saved. Work on the open step is
    /// given up; it was not committed, so nothing is lost.
    pub(crate) fn stop(&mut self, actions: &mut Vec<Action>) {
        let version = self.chain.version();
        let saved = self.complete.last() == Some(&version) || version.0 == 0;
        match self.phase {
            Phase::Training | Phase::Finished if !saved && self.uncovered().is_empty() => {
                self.phase = Phase::Stopping { version };
                self.report(format!("stopping: saving version {version}"), actions);
                self.request_checkpoint(version, actions);
                self.stop_if_saved(actions);
            }
            Phase::Stopping { .. } => {}
            Phase::Training | Phase::Finished | Phase::Waiting { .. } | Phase::Recovering { .. } | Phase::Paused { .. } => actions.push(Action::Stopped),
        }
    }

    fn stop_if_saved(&mut self, actions: &mut Vec<Action>) {
        if let Phase::Stopping { version } = self.phase
            && self.complete.contains(&version)
        {
            actions.push(Action::Stopped);
        }
    }

    /// All steps are committed and safe.
    pub(crate) fn finish(&mut self, actions: &mut Vec<Action>) {
        self.phase = Phase::Finished;
        let version = self.chain.version();
        self.report(format!("finished: {version} steps"), actions);
        self.broadcast(&FromCoordinator::Finished { version }, actions);
    }
}
