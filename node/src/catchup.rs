//! Getting state (drawn, from disk, or from several donors) and giving it.
//!
//! A joiner fetches an immutable, chunked, hashed snapshot of one version while it already listens
//! to what is reduced from that version on; then it applies what was committed meanwhile.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use skein_protocol::id::{Group, Hash, NodeId, Span, Timeline, Version};
use skein_protocol::limits::STATE_CHUNK_BYTES;
use skein_protocol::message::control::{Shard, ToCoordinator};
use skein_protocol::message::data::{Frame, PeerMessage};
use skein_protocol::placement::{Source, Standing};
use skein_protocol::tensor::Payload;
use skein_protocol::time::Time;

use crate::engine::{Snapshot, Task};
use crate::machine::{Action, Node, Report};

/// Chunks asked for at once, over all donors.
const CHUNKS_IN_FLIGHT: usize = 8;
/// How long a donor has to answer before the next one is asked.
const ASK_AGAIN_AFTER: Duration = Duration::from_secs(2);
/// How long to wait after a donor said that it does not have the state (yet).
const RETRY_AFTER: Duration = Duration::from_millis(100);
/// How often every donor may say so, once the version is committed, before this node joins anew.
const REFUSALS_MAX: usize = 20;
/// Vectors of a group's state: weights and the optimizer's two moments.
const STATE_VECTORS: usize = 3;

/// State this node gets and gives.
pub(crate) struct Catchup {
    span: Option<Span>,
    groups: BTreeSet<Group>,
    /// The version this node got or gets its state at.
    from: Option<Version>,
    fetching: BTreeMap<Group, Acquire>,
    /// Snapshots that joiners and readers may fetch.
    snapshots: BTreeMap<(Version, Group), Snapshot>,
    asked_snapshots: BTreeSet<(Version, Group)>,
    wanted: BTreeMap<Version, BTreeSet<Group>>,
    /// Checkpoint shards on this node's disk.
    shards: BTreeMap<(Version, Group), Shard>,
    /// Who waits for a shard that is being read.
    readers: BTreeMap<(Version, Group), BTreeSet<NodeId>>,
}

/// How one group's state comes.
enum Acquire {
    /// From this node's disk.
    Disk,
    /// From donors.
    Fetch(Fetch),
}

struct Fetch {
    donors: Vec<NodeId>,
    next: usize,
    manifest: Option<Manifest>,
    at: Time,
    /// Donors that said they do not have it, since something came last.
    refusals: usize,
}

struct Manifest {
    hashes: Vec<Hash>,
    byte_len: usize,
    chunks: Vec<Option<Bytes>>,
    asked: BTreeMap<u32, NodeId>,
}

impl Catchup {
    pub(crate) fn new(shards: Vec<Shard>) -> Self {
        Self {
            span: None,
            groups: BTreeSet::new(),
            from: None,
            fetching: BTreeMap::new(),
            snapshots: BTreeMap::new(),
            asked_snapshots: BTreeSet::new(),
            wanted: BTreeMap::new(),
            shards: shards.into_iter().map(|shard| ((shard.version, shard.group), shard)).collect(),
            readers: BTreeMap::new(),
        }
    }

    pub(crate) fn forget_state(&mut self) {
        let shards = std::mem::take(&mut self.shards);
        *self = Self { shards, ..Self::new(Vec::new()) };
    }

    pub(crate) fn span(&self) -> Option<Span> {
        self.span
    }

    pub(crate) fn from(&self) -> Option<Version> {
        self.from
    }

    pub(crate) fn groups(&self) -> impl Iterator<Item = Group> + '_ {
        self.groups.iter().copied()
    }

    pub(crate) fn has_group(&self, group: Group) -> bool {
        self.groups.contains(&group)
    }

    pub(crate) fn shards(&self) -> impl Iterator<Item = Shard> + '_ {
        self.shards.values().copied()
    }

    pub(crate) fn prune(&mut self, keep_from: Version) {
        self.shards.retain(|(version, _), _| *version >= keep_from);
    }

    /// Groups whose state at `version` a joiner will fetch.
    pub(crate) fn wanted_at(&self, version: Version) -> BTreeSet<Group> {
        self.wanted.get(&version).cloned().unwrap_or_default()
    }

    /// Whether a snapshot is still to be asked for.
    pub(crate) fn ask_snapshot(&mut self, group: Group, version: Version) -> bool {
        self.asked_snapshots.insert((version, group))
    }

    pub(crate) fn keep_snapshot(&mut self, snapshot: Snapshot) {
        self.asked_snapshots.remove(&(snapshot.version, snapshot.group));
        if self.wanted_at(snapshot.version).contains(&snapshot.group) {
            self.snapshots.insert((snapshot.version, snapshot.group), snapshot);
        }
    }

    pub(crate) fn next_timeout(&self) -> Option<Time> {
        self.fetching.values().filter_map(|acquire| if let Acquire::Fetch(fetch) = acquire { Some(fetch.at) } else { None }).min()
    }

    pub(crate) fn link_down(&mut self, node: NodeId) {
        for acquire in self.fetching.values_mut() {
            if let Acquire::Fetch(fetch) = acquire {
                fetch.give_up(node);
            }
        }
    }
}

impl Fetch {
    /// Groups begin with different donors, which share the load.
    fn new(group: Group, donors: Vec<NodeId>, now: Time) -> Self {
        Self { donors, next: usize::from(group.0), manifest: None, at: now, refusals: 0 }
    }

    fn donor(&self) -> Option<NodeId> {
        self.donors.get(self.next % self.donors.len().max(1)).copied()
    }

    /// What was asked of a donor that is gone is asked of the next; chunks that came stay.
    fn give_up(&mut self, node: NodeId) {
        if self.donor() == Some(node) {
            self.next += 1;
        }
        if let Some(manifest) = &mut self.manifest {
            manifest.asked.retain(|_, donor| *donor != node);
        }
    }
}

impl Node {
    /// Gets the state of `span` at version `from`, unless that is under way.
    pub(crate) fn acquire(&mut self, span: Span, from: Version, actions: &mut Vec<Action>) {
        if self.catchup.span == Some(span) && self.catchup.from == Some(from) {
            self.refresh_donors();
            return self.ready_if_caught_up(actions);
        }
        if self.catchup.span.is_some() {
            self.forget_everything();
        }
        let Some(run) = &self.run else { return };
        self.catchup.span = Some(span);
        self.catchup.from = Some(from);
        self.catchup.groups = run.structure.groups_of(span).into_iter().collect();
        actions.push(Action::Report(Report::State(format!("getting blocks {span} at step {from}"))));
        let mut drawn = Vec::new();
        let groups: Vec<Group> = self.catchup.groups().collect();
        for group in groups {
            let donors = self.donors(group);
            if from == self.placement.base && self.source(group).is_none_or(|source| source.holders.is_empty()) {
                drawn.push(group);
            } else if self.is_own_shard_good(group, from) {
                actions.push(Action::LoadShard { group, version: from });
                self.catchup.fetching.insert(group, Acquire::Disk);
            } else {
                self.catchup.fetching.insert(group, Acquire::Fetch(Fetch::new(group, donors, self.now)));
            }
        }
        if !drawn.is_empty() {
            self.queue.push(Task::Draw { groups: drawn });
        }
        self.all_acquired(actions);
    }

    fn source(&self, group: Group) -> Option<&Source> {
        self.placement.sources.iter().find(|source| source.group == group)
    }

    /// Whether the shard on this node's disk is the one that the coordinator means: another
    /// timeline may have left one of the same version.
    fn is_own_shard_good(&self, group: Group, version: Version) -> bool {
        version == self.placement.base
            && self.catchup.shards.get(&(version, group)).is_some_and(|shard| self.source(group).is_some_and(|source| source.root == shard.root))
    }

    /// Whether the disk has a group's state at a version of this timeline, or the one that it began
    /// from: a version of another timeline is another state.
    fn has_shard_for_others(&self, group: Group, version: Version) -> bool {
        let of_this_timeline = self.catchup.shards.get(&(version, group)).is_some_and(|shard| shard.timeline == self.timeline());
        of_this_timeline || self.is_own_shard_good(group, version)
    }

    /// Who can give a group's state at the version this node needs.
    fn donors(&self, group: Group) -> Vec<NodeId> {
        let me = self.settings.id;
        if self.catchup.from == Some(self.placement.base)
            && let Some(source) = self.source(group).filter(|source| !source.holders.is_empty())
        {
            return source.holders.iter().copied().filter(|node| *node != me).collect();
        }
        let Some(run) = &self.run else { return Vec::new() };
        let hosts = self.placement.active().filter(|seat| seat.node != me && run.structure.groups_of(seat.span).contains(&group));
        let (silent, live): (Vec<_>, Vec<_>) = hosts.partition(|seat| seat.suspect);
        // A silent donor would only be waited for, unless nobody else has it.
        let donors = if live.is_empty() { silent } else { live };
        donors.into_iter().map(|seat| seat.node).collect()
    }

    fn refresh_donors(&mut self) {
        let groups: Vec<Group> = self.catchup.fetching.keys().copied().collect();
        for group in groups {
            let donors = self.donors(group);
            if let Some(Acquire::Fetch(fetch)) = self.catchup.fetching.get_mut(&group)
                && !donors.is_empty()
            {
                fetch.donors = donors;
            }
        }
    }

    /// Asks for whatever is due.
    pub(crate) fn catchup_timers(&mut self, actions: &mut Vec<Action>) {
        let due: Vec<Group> = self
            .catchup
            .fetching
            .iter()
            .filter(|(_, acquire)| matches!(acquire, Acquire::Fetch(fetch) if fetch.at <= self.now))
            .map(|(group, _)| *group)
            .collect();
        for group in due {
            // Nobody is left who has not lied: the list of hashes itself may have been the lie.
            let donors = self.donors(group);
            if let Some(Acquire::Fetch(fetch)) = self.catchup.fetching.get_mut(&group)
                && fetch.donors.is_empty()
            {
                (fetch.donors, fetch.manifest) = (donors, None);
            }
            self.ask(group, true, actions);
        }
    }

    /// Asks donors for the manifest, or for chunks; `again` if what was asked did not come in time.
    fn ask(&mut self, group: Group, again: bool, actions: &mut Vec<Action>) {
        let (now, timeline, from) = (self.now, self.timeline(), self.catchup.from.unwrap_or_default());
        let Some(Acquire::Fetch(fetch)) = self.catchup.fetching.get_mut(&group) else { return };
        fetch.at = now + ASK_AGAIN_AFTER;
        if fetch.donors.is_empty() {
            return;
        }
        let mut frames = Vec::new();
        match &mut fetch.manifest {
            None => {
                let donor = fetch.donors[fetch.next % fetch.donors.len()];
                fetch.next += 1;
                frames.push((donor, PeerMessage::FetchSnapshot { timeline, group, version: from }));
            }
            Some(manifest) => {
                if again {
                    manifest.asked.clear();
                }
                let missing: Vec<u32> = (0u32..)
                    .zip(&manifest.chunks)
                    .filter(|(chunk, bytes)| bytes.is_none() && !manifest.asked.contains_key(chunk))
                    .map(|(chunk, _)| chunk)
                    .take(CHUNKS_IN_FLIGHT.saturating_sub(manifest.asked.len()))
                    .collect();
                for chunk in missing {
                    let donor = fetch.donors[fetch.next % fetch.donors.len()];
                    fetch.next += 1;
                    manifest.asked.insert(chunk, donor);
                    frames.push((donor, PeerMessage::FetchStateChunk { group, version: from, chunk }));
                }
            }
        }
        for (to, message) in frames {
            self.send(to, Frame::from(message), actions);
        }
    }

    pub(crate) fn manifest_came(&mut self, from: NodeId, group: Group, version: Version, byte_len: u64, chunks: Vec<Hash>, actions: &mut Vec<Action>) {
        let expected = self.state_bytes(group);
        if self.catchup.from != Some(version) || usize::try_from(byte_len) != Ok(expected) || chunks.len() != expected.div_ceil(STATE_CHUNK_BYTES) {
            return;
        }
        let root = self.source(group).filter(|source| version == self.placement.base && !source.holders.is_empty()).map(|source| source.root);
        if root.is_some_and(|root| Hash::root(&chunks) != root) {
            return self.unavailable(from, group, version, actions);
        }
        let Some(Acquire::Fetch(fetch)) = self.catchup.fetching.get_mut(&group) else { return };
        if fetch.manifest.is_none() && fetch.donors.contains(&from) {
            fetch.manifest = Some(Manifest { byte_len: expected, chunks: vec![None; chunks.len()], hashes: chunks, asked: BTreeMap::new() });
            self.ask(group, false, actions);
        }
    }

    fn state_bytes(&self, group: Group) -> usize {
        self.run.as_ref().and_then(|run| run.structure.groups.get(usize::from(group.0))).map_or(0, |layout| layout.len * 4 * STATE_VECTORS)
    }

    pub(crate) fn chunk_came(&mut self, from: NodeId, group: Group, version: Version, chunk: u32, payload: Option<Payload>, actions: &mut Vec<Action>) {
        if self.catchup.from != Some(version) {
            return;
        }
        let Some(Acquire::Fetch(fetch)) = self.catchup.fetching.get_mut(&group) else { return };
        let Some(manifest) = &mut fetch.manifest else { return };
        let (Some(payload), Some(hash)) = (payload, manifest.hashes.get(chunk as usize)) else { return };
        if Hash::of(&payload.bytes) != *hash {
            actions.push(Action::Report(Report::Trouble(format!("{} sent a wrong chunk of group {group}: asking another donor", from.short()))));
            fetch.donors.retain(|donor| *donor != from);
            fetch.give_up(from);
            return self.ask(group, false, actions);
        }
        fetch.refusals = 0;
        manifest.asked.remove(&chunk);
        manifest.chunks[chunk as usize].get_or_insert(payload.bytes);
        let complete = manifest.chunks.iter().all(Option::is_some);
        if !complete {
            return self.ask(group, false, actions);
        }
        let mut bytes = BytesMut::with_capacity(manifest.byte_len);
        for chunk in manifest.chunks.iter().flatten() {
            bytes.extend_from_slice(chunk);
        }
        let snapshot = Snapshot { group, version, bytes: bytes.freeze(), chunks: std::mem::take(&mut manifest.hashes) };
        self.install(snapshot, actions);
    }

    fn install(&mut self, snapshot: Snapshot, actions: &mut Vec<Action>) {
        self.catchup.fetching.remove(&snapshot.group);
        self.queue.push(Task::Install { snapshot });
        self.all_acquired(actions);
    }

    /// When every group has come: this node has a version, and applies what was committed since.
    fn all_acquired(&mut self, actions: &mut Vec<Action>) {
        let Some(from) = self.catchup.from else { return };
        if !self.catchup.fetching.is_empty() || self.steps.version.is_some() {
            return;
        }
        self.steps.version = Some(from);
        self.take_snapshots();
        self.apply_if_possible(actions);
        self.ready_if_caught_up(actions);
        self.early_work(actions);
    }

    /// Tells the coordinator once that this node has caught up with what it knows to be committed.
    pub(crate) fn ready_if_caught_up(&mut self, actions: &mut Vec<Action>) {
        let (Some(version), Some(span)) = (self.steps.version, self.catchup.span) else { return };
        let joining = self.placement.seat(self.settings.id).is_some_and(|seat| seat.standing != Standing::Active);
        let behind = self.newest_commit().is_some_and(|newest| newest.makes() > version);
        if joining && !behind && self.session.welcomed {
            actions.push(Action::Tell(ToCoordinator::Ready { timeline: self.timeline(), span, version }));
        }
    }

    /// Notes which versions joiners will fetch; snapshots that nobody wants any more go.
    pub(crate) fn serve_joiners(&mut self) {
        let Some(run) = &self.run else { return };
        let mut wanted: BTreeMap<Version, BTreeSet<Group>> = BTreeMap::new();
        for seat in &self.placement.seats {
            if let Standing::Joining { from } = seat.standing {
                wanted.entry(from).or_default().extend(run.structure.groups_of(seat.span));
            }
        }
        let hosted = |groups: &BTreeSet<Group>| groups.iter().copied().filter(|group| self.catchup.has_group(*group)).collect();
        self.catchup.wanted = wanted.iter().map(|(version, groups)| (*version, hosted(groups))).collect();
        // Those read from the disk for others may be of groups that this node does not host.
        self.catchup.snapshots.retain(|(version, group), _| wanted.get(version).is_some_and(|groups| groups.contains(group)));
        self.take_snapshots();
    }

    pub(crate) fn serve_manifest(&mut self, from: NodeId, timeline: Timeline, group: Group, version: Version, actions: &mut Vec<Action>) {
        if timeline != self.timeline() {
            return self.send(from, Frame::from(PeerMessage::Unavailable { group, version }), actions);
        }
        if let Some(snapshot) = self.catchup.snapshots.get(&(version, group)) {
            let message = PeerMessage::SnapshotManifest { group, version, byte_len: snapshot.bytes.len() as u64, chunks: snapshot.chunks.clone() };
            self.send(from, Frame::from(message), actions);
        } else if self.has_shard_for_others(group, version) {
            let readers = self.catchup.readers.entry((version, group)).or_default();
            if readers.is_empty() {
                actions.push(Action::LoadShard { group, version });
            }
            readers.insert(from);
        } else {
            self.send(from, Frame::from(PeerMessage::Unavailable { group, version }), actions);
        }
    }

    pub(crate) fn serve_chunk(&mut self, from: NodeId, group: Group, version: Version, chunk: u32, actions: &mut Vec<Action>) {
        let start = chunk as usize * STATE_CHUNK_BYTES;
        if !self.catchup.snapshots.contains_key(&(version, group)) && self.has_shard_for_others(group, version) {
            // It was let go meanwhile: read again; the reader asks again.
            return self.serve_manifest(from, self.timeline(), group, version, actions);
        }
        let found = self.catchup.snapshots.get(&(version, group)).filter(|snapshot| start < snapshot.bytes.len());
        let frame = match found {
            None => Frame::from(PeerMessage::Unavailable { group, version }),
            Some(snapshot) => {
                let bytes = snapshot.bytes.slice(start..(start + STATE_CHUNK_BYTES).min(snapshot.bytes.len()));
                Frame { message: PeerMessage::StateChunk { group, version, chunk }, payload: Some(Payload::raw(bytes)) }
            }
        };
        self.send(from, frame, actions);
    }

    /// A donor does not have it (yet): another one is asked, after a moment.
    pub(crate) fn unavailable(&mut self, from: NodeId, group: Group, version: Version, actions: &mut Vec<Action>) {
        if let Some(Acquire::Fetch(fetch)) = self.catchup.fetching.get_mut(&group)
            && self.catchup.from == Some(version)
        {
            fetch.give_up(from);
            fetch.at = self.now + RETRY_AFTER;
            fetch.refusals += 1;
            // Donors that have gone past the version will never have it: another one is needed.
            if fetch.refusals > REFUSALS_MAX * fetch.donors.len().max(1) && self.newest_commit().is_some_and(|newest| newest.makes() > version) {
                self.start_over(actions);
            }
            return;
        }
        self.result_refused(from, group, version);
        // A committed result that its holders have freed: this node missed it for good.
        let behind = self.steps.version.is_some_and(|held| held < version) && self.steps.retire_passed(version);
        if behind {
            self.start_over(actions);
        }
    }

    pub(crate) fn shard_loaded(&mut self, group: Group, version: Version, result: Result<Snapshot, String>, actions: &mut Vec<Action>) {
        let own = matches!(self.catchup.fetching.get(&group), Some(Acquire::Disk)) && self.catchup.from == Some(version);
        let readers = self.catchup.readers.remove(&(version, group)).unwrap_or_default();
        match result {
            Ok(snapshot) => {
                if !readers.is_empty() {
                    self.catchup.snapshots.insert((version, group), snapshot.clone());
                    for reader in readers {
                        self.serve_manifest(reader, self.timeline(), group, version, actions);
                    }
                }
                if own {
                    self.install(snapshot, actions);
                }
            }
            Err(reason) => {
                actions.push(Action::Report(Report::Trouble(reason)));
                self.catchup.shards.remove(&(version, group));
                for reader in readers {
                    self.send(reader, Frame::from(PeerMessage::Unavailable { group, version }), actions);
                }
                if own {
                    let donors = self.donors(group);
                    self.catchup.fetching.insert(group, Acquire::Fetch(Fetch::new(group, donors, self.now)));
                    self.ask(group, false, actions);
                }
            }
        }
    }

    pub(crate) fn shard_saved(&mut self, group: Group, version: Version, result: Result<Shard, String>, actions: &mut Vec<Action>) {
        match result {
            Err(reason) => actions.push(Action::Report(Report::Trouble(format!("cannot save group {group} of version {version}: {reason}")))),
            Ok(shard) => {
                self.catchup.shards.insert((version, group), shard);
                if self.session.welcomed {
                    actions.push(Action::Tell(ToCoordinator::Saved { timeline: self.timeline(), shards: vec![shard] }));
                }
            }
        }
    }
}
