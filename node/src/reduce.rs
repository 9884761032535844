//! Averaging: reduce-scatter, then all-gather, chunk by chunk (rules 8 to 13).
//!
//! A reduction is named by (step, group, attempt) and never mixes with another attempt. Each chunk
//! has an owner: contributors send it theirs, it adds them up in the cover's order, encodes the
//! result once for everyone and sends it to all receivers. Everyone, the owner too, keeps what the
//! encoding decodes to. Chunks are independent, so encoding, sending and adding overlap.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

use skein_protocol::id::{Chunk, Fence, Group, Hash, NodeId, ReduceAttempt, Step, SumId, Version};
use skein_protocol::message::control::{Commit, Seal, ToCoordinator};
use skein_protocol::message::data::{Frame, PeerMessage};
use skein_protocol::tensor::Payload;
use skein_protocol::time::Time;

use crate::engine::{Part, ReductionKey, Task};
use crate::machine::{Action, Node};

/// Chunks that came before their seal: a bound on what is kept of them.
const EARLY_CHUNKS_MAX: usize = 4096;
const EARLY_BYTES_MAX: usize = 256 * 1024 * 1024;
/// How long to wait before sending again over a link that went down.
const RESEND_AFTER: Duration = Duration::from_millis(300);
/// How long to wait for the chunks of a committed result before asking another holder.
const FETCH_AGAIN_AFTER: Duration = Duration::from_secs(1);
/// How long a reduction may bring nothing before its result is asked for: chunks may have come
/// before this node was in the timeline.
const STALLED_AFTER: Duration = Duration::from_secs(3);

/// The reductions of steps that are not retired.
#[derive(Default)]
pub(crate) struct Reduce {
    reductions: BTreeMap<ReductionKey, Reduction>,
    early: VecDeque<EarlyChunk>,
    /// Peers whose link went down, and when to send again what they may lack.
    resend: BTreeMap<NodeId, Time>,
}

struct EarlyChunk {
    from: NodeId,
    key: ReductionKey,
    chunk: Chunk,
    payload: Payload,
    reduced: bool,
}

struct Reduction {
    /// The order to reduce; none for a result that is only fetched after its commit.
    seal: Option<Seal>,
    /// This node's sums in the cover, in order.
    own: Vec<SumId>,
    /// Everyone with sums in the cover, in its order.
    contributors: Vec<NodeId>,
    chunks: Vec<ChunkState>,
    reported: bool,
    /// Digest of the whole, once all chunks are here.
    digest: Option<Hash>,
    fetch: Option<Fetch>,
}

/// Asking for a committed result.
struct Fetch {
    asked: BTreeSet<NodeId>,
    /// Who has said that it does not have it.
    refused: BTreeSet<NodeId>,
    at: Time,
}

#[derive(Clone, Default)]
struct ChunkState {
    contributions: BTreeMap<NodeId, Payload>,
    /// Whether the engine was asked to reduce or store it.
    asked: bool,
    result: Option<Payload>,
    hash: Option<Hash>,
    squared_norm: Option<f64>,
}

impl Reduce {
    pub(crate) fn clear(&mut self) {
        *self = Self::default();
    }

    pub(crate) fn next_timeout(&self) -> Option<Time> {
        let fetches =
            self.reductions.values().filter(|reduction| reduction.digest.is_none()).filter_map(|reduction| reduction.fetch.as_ref()).map(|fetch| fetch.at);
        self.resend.values().copied().chain(fetches).min()
    }

    pub(crate) fn link_down(&mut self, node: NodeId, now: Time) {
        if !self.reductions.is_empty() {
            self.resend.entry(node).or_insert(now + RESEND_AFTER);
        }
    }

    pub(crate) fn retire(&mut self, step: Step) {
        self.reductions.retain(|key, _| key.step > step);
        self.early.retain(|early| early.key.step > step);
    }

    /// Reductions, and chunks that came early.
    pub(crate) fn kept(&self) -> (usize, usize) {
        (self.reductions.len(), self.early.len())
    }

    /// Whether the result that a commit names is here.
    pub(crate) fn has(&self, key: ReductionKey, digest: Hash) -> bool {
        self.reductions.get(&key).is_some_and(|reduction| reduction.digest == Some(digest))
    }
}

impl Reduction {
    fn owner(&self, chunk: Chunk) -> Option<NodeId> {
        self.seal.as_ref()?.owners.iter().find(|owner| owner.first <= chunk && chunk < owner.end).map(|owner| owner.node)
    }
}

impl Node {
    /// The order to reduce a group.
    pub(crate) fn sealed(&mut self, seal: Seal, actions: &mut Vec<Action>) {
        if !self.is_current(seal.fence) {
            return;
        }
        let key = ReductionKey { step: seal.fence.step, group: seal.group, attempt: seal.attempt };
        if self.reduce.reductions.contains_key(&key) {
            return;
        }
        self.host.close_sum(key.step, key.group);
        let own: Vec<SumId> = seal.cover.iter().filter(|part| part.node == self.settings.id).map(|part| part.sum).collect();
        let unusable: Vec<SumId> = seal
            .cover
            .iter()
            .filter(|part| part.node == self.settings.id && self.host.pairs(part.sum) != Some(part.pairs as usize))
            .map(|part| part.sum)
            .collect();
        if !unusable.is_empty() {
            // Void on both sides: what they held is computed again.
            self.void(seal.fence, &unusable);
            actions.push(Action::Tell(ToCoordinator::Lost { fence: seal.fence, sums: unusable }));
            return;
        }
        if !self.is_member(seal.group) {
            return;
        }
        self.drop_older_attempts(key);
        let mut contributors: Vec<NodeId> = Vec::new();
        for part in &seal.cover {
            if !contributors.contains(&part.node) {
                contributors.push(part.node);
            }
        }
        let reduction = Reduction {
            own,
            contributors,
            chunks: vec![ChunkState::default(); self.chunk_count(seal.group)],
            seal: Some(seal),
            reported: false,
            digest: None,
            fetch: Some(Fetch { asked: BTreeSet::new(), refused: BTreeSet::new(), at: self.now + STALLED_AFTER }),
        };
        self.reduce.reductions.insert(key, reduction);
        self.contribute(key, None);
        self.take_early_chunks(key);
        self.add_up_owned(key);
    }

    fn is_member(&self, group: Group) -> bool {
        self.run.as_ref().zip(self.catchup.span()).is_some_and(|(run, span)| run.structure.groups_of(span).contains(&group))
    }

    fn chunk_count(&self, group: Group) -> usize {
        self.run.as_ref().map_or(0, |run| run.structure.layout(group).chunks(run.config.reduce.chunk) as usize)
    }

    fn chunk_len(&self, group: Group, chunk: Chunk) -> usize {
        self.run.as_ref().map_or(0, |run| run.structure.layout(group).chunk_range(chunk, run.config.reduce.chunk).len())
    }

    fn drop_older_attempts(&mut self, key: ReductionKey) {
        let older: Vec<ReductionKey> =
            self.reduce.reductions.keys().filter(|other| other.step == key.step && other.group == key.group && other.attempt < key.attempt).copied().collect();
        for old in older {
            self.reduce.reductions.remove(&old);
            self.queue.push(Task::DropReduction { key: old });
        }
    }

    /// Sums are void: an attempt that needs them will not be finished; one that is done keeps its
    /// result and contributes no more.
    pub(crate) fn reductions_without(&mut self, void: &[SumId]) {
        let concerned = |reduction: &Reduction| reduction.own.iter().any(|sum| void.contains(sum));
        let unfinished: Vec<ReductionKey> =
            self.reduce.reductions.iter().filter(|(_, reduction)| concerned(reduction) && reduction.digest.is_none()).map(|(key, _)| *key).collect();
        for key in unfinished {
            self.reduce.reductions.remove(&key);
            self.queue.push(Task::DropReduction { key });
        }
        for reduction in self.reduce.reductions.values_mut().filter(|reduction| concerned(reduction)) {
            reduction.own.clear();
        }
    }

    /// Encodes this node's part of the chunks that others own, or that `only` owns.
    fn contribute(&mut self, key: ReductionKey, only: Option<NodeId>) {
        let Some(run) = &self.run else { return };
        let Some(reduction) = self.reduce.reductions.get(&key) else { return };
        if reduction.own.is_empty() {
            return;
        }
        let me = self.settings.id;
        for owner in reduction.seal.iter().flat_map(|seal| &seal.owners).filter(|owner| owner.node != me && only.is_none_or(|only| only == owner.node)) {
            for chunk in (owner.first.0..owner.end.0).map(Chunk) {
                self.queue.push(Task::EncodeChunk { key, chunk, sums: reduction.own.clone(), codec: run.config.scatter_codec() });
            }
        }
    }

    pub(crate) fn encoded(&mut self, key: ReductionKey, chunk: Chunk, payload: Payload, actions: &mut Vec<Action>) {
        let Some(owner) = self.reduce.reductions.get(&key).and_then(|reduction| reduction.owner(chunk)) else { return };
        let fence = Fence { timeline: self.timeline(), step: key.step };
        let message = PeerMessage::Contribution { fence, group: key.group, attempt: key.attempt, chunk };
        self.send(owner, Frame { message, payload: Some(payload) }, actions);
    }

    /// A contributor's chunk came to its owner.
    pub(crate) fn contribution(&mut self, from: NodeId, fence: Fence, group: Group, attempt: ReduceAttempt, chunk: Chunk, payload: Option<Payload>) {
        let Some(payload) = payload.filter(|_| self.is_current(fence)) else { return };
        let key = ReductionKey { step: fence.step, group, attempt };
        if !self.reduce.reductions.contains_key(&key) {
            return self.keep_early_chunk(EarlyChunk { from, key, chunk, payload, reduced: false });
        }
        self.take_contribution(from, key, chunk, payload);
        self.add_up(key, chunk);
    }

    fn take_contribution(&mut self, from: NodeId, key: ReductionKey, chunk: Chunk, payload: Payload) {
        let len = self.chunk_len(key.group, chunk);
        let me = self.settings.id;
        let Some(reduction) = self.reduce.reductions.get_mut(&key) else { return };
        if reduction.owner(chunk) != Some(me) || !reduction.contributors.contains(&from) || payload.expect(len).is_err() {
            return;
        }
        let state = &mut reduction.chunks[chunk.0 as usize];
        if !state.asked {
            state.contributions.entry(from).or_insert(payload);
        }
    }

    fn add_up_owned(&mut self, key: ReductionKey) {
        let me = self.settings.id;
        let Some(seal) = self.reduce.reductions.get(&key).and_then(|reduction| reduction.seal.as_ref()) else { return };
        let owned: Vec<Chunk> = seal.owners.iter().filter(|owner| owner.node == me).flat_map(|owner| owner.first.0..owner.end.0).map(Chunk).collect();
        for chunk in owned {
            self.add_up(key, chunk);
        }
    }

    /// Asks the engine to add a chunk up once every contribution is here.
    fn add_up(&mut self, key: ReductionKey, chunk: Chunk) {
        let me = self.settings.id;
        let Some(reduction) = self.reduce.reductions.get_mut(&key) else { return };
        let owned = reduction.owner(chunk) == Some(me);
        let Some(codec) = reduction.seal.as_ref().map(|seal| seal.gather) else { return };
        let Some(state) = reduction.chunks.get_mut(chunk.0 as usize) else { return };
        let complete = reduction.contributors.iter().all(|node| *node == me || state.contributions.contains_key(node));
        if !owned || state.asked || !complete {
            return;
        }
        state.asked = true;
        let mut contributions = std::mem::take(&mut state.contributions);
        let parts = reduction
            .contributors
            .iter()
            .filter_map(|node| if *node == me { Some(Part::Own(reduction.own.clone())) } else { contributions.remove(node).map(Part::Peer) })
            .collect();
        self.queue.push(Task::ReduceChunk { key, chunk, parts, codec });
    }

    pub(crate) fn chunk_reduced(&mut self, key: ReductionKey, chunk: Chunk, payload: Payload, hash: Hash, squared_norm: f64, actions: &mut Vec<Action>) {
        let Some(reduction) = self.reduce.reductions.get_mut(&key) else { return };
        let state = &mut reduction.chunks[chunk.0 as usize];
        (state.result, state.hash, state.squared_norm) = (Some(payload.clone()), Some(hash), Some(squared_norm));
        let receivers = reduction.seal.as_ref().map(|seal| seal.receivers.clone()).unwrap_or_default();
        let me = self.settings.id;
        for node in receivers.into_iter().filter(|node| *node != me) {
            self.send_result(node, key, chunk, payload.clone(), actions);
        }
        self.complete_reduction(key, actions);
    }

    fn send_result(&mut self, to: NodeId, key: ReductionKey, chunk: Chunk, payload: Payload, actions: &mut Vec<Action>) {
        let fence = Fence { timeline: self.timeline(), step: key.step };
        let message = PeerMessage::ReducedChunk { fence, group: key.group, attempt: key.attempt, chunk };
        self.send(to, Frame { message, payload: Some(payload) }, actions);
    }

    /// A reduced chunk came from its owner, or from a holder that was asked.
    pub(crate) fn reduced_chunk(&mut self, from: NodeId, fence: Fence, group: Group, attempt: ReduceAttempt, chunk: Chunk, payload: Option<Payload>) {
        let Some(payload) = payload.filter(|_| self.is_current(fence)) else { return };
        let key = ReductionKey { step: fence.step, group, attempt };
        if !self.reduce.reductions.contains_key(&key) {
            return self.keep_early_chunk(EarlyChunk { from, key, chunk, payload, reduced: true });
        }
        self.take_result(from, key, chunk, payload);
    }

    fn take_result(&mut self, from: NodeId, key: ReductionKey, chunk: Chunk, payload: Payload) {
        let len = self.chunk_len(key.group, chunk);
        let Some(reduction) = self.reduce.reductions.get_mut(&key) else { return };
        let asked = reduction.fetch.as_ref().is_some_and(|fetch| fetch.asked.contains(&from));
        if !(asked || reduction.owner(chunk) == Some(from)) || payload.expect(len).is_err() {
            return;
        }
        let Some(state) = reduction.chunks.get_mut(chunk.0 as usize) else { return };
        if state.asked {
            return;
        }
        state.asked = true;
        state.result = Some(payload.clone());
        if let Some(fetch) = &mut reduction.fetch {
            fetch.at = fetch.at.max(self.now + FETCH_AGAIN_AFTER);
        }
        self.queue.push(Task::StoreChunk { key, chunk, payload });
    }

    pub(crate) fn chunk_stored(&mut self, key: ReductionKey, chunk: Chunk, hash: Hash, actions: &mut Vec<Action>) {
        let Some(reduction) = self.reduce.reductions.get_mut(&key) else { return };
        reduction.chunks[chunk.0 as usize].hash = Some(hash);
        self.complete_reduction(key, actions);
    }

    /// When every chunk is here: report (rule 13) and go on with the commit that may wait for it.
    fn complete_reduction(&mut self, key: ReductionKey, actions: &mut Vec<Action>) {
        let Some(reduction) = self.reduce.reductions.get_mut(&key) else { return };
        let hashes: Option<Vec<Hash>> = reduction.chunks.iter().map(|state| state.hash).collect();
        let Some(digest) = hashes.map(|hashes| Hash::root(&hashes)) else { return };
        reduction.digest = Some(digest);
        if !reduction.reported && reduction.seal.is_some() {
            reduction.reported = true;
            self.report_reduced(key, actions);
        }
        self.apply_if_possible(actions);
    }

    fn report_reduced(&self, key: ReductionKey, actions: &mut Vec<Action>) {
        let Some(reduction) = self.reduce.reductions.get(&key) else { return };
        let Some(digest) = reduction.digest else { return };
        let numbered = (0u32..).map(Chunk).zip(&reduction.chunks);
        let squared_norms = numbered.filter_map(|(chunk, state)| Some((chunk, state.squared_norm?))).collect();
        let fence = Fence { timeline: self.timeline(), step: key.step };
        if self.session.welcomed {
            actions.push(Action::Tell(ToCoordinator::Reduced { fence, group: key.group, attempt: key.attempt, digest, squared_norms }));
        }
    }

    fn keep_early_chunk(&mut self, early: EarlyChunk) {
        let in_model = self.run.as_ref().is_some_and(|run| usize::from(early.key.group.0) < run.structure.groups.len());
        let retired = self.steps.retired.is_some_and(|retired| early.key.step <= retired);
        if !in_model || retired {
            return;
        }
        let mut bytes: usize = early.payload.bytes.len() + self.reduce.early.iter().map(|early| early.payload.bytes.len()).sum::<usize>();
        self.reduce.early.push_back(early);
        while self.reduce.early.len() > EARLY_CHUNKS_MAX || bytes > EARLY_BYTES_MAX {
            let Some(dropped) = self.reduce.early.pop_front() else { break };
            bytes -= dropped.payload.bytes.len();
        }
    }

    fn take_early_chunks(&mut self, key: ReductionKey) {
        let (mine, rest): (VecDeque<EarlyChunk>, VecDeque<EarlyChunk>) = std::mem::take(&mut self.reduce.early).into_iter().partition(|early| early.key == key);
        self.reduce.early =
            rest.into_iter().filter(|early| (early.key.step, early.key.group) != (key.step, key.group) || early.key.attempt > key.attempt).collect();
        for early in mine {
            if early.reduced {
                self.take_result(early.from, key, early.chunk, early.payload);
            } else {
                self.take_contribution(early.from, key, early.chunk, early.payload);
            }
        }
    }

    /// The engine could not add up or store a chunk: what came was no good. It may come again.
    pub(crate) fn reduction_failed(&mut self, key: ReductionKey, chunk: Chunk, actions: &mut Vec<Action>) {
        if let Some(state) = self.reduce.reductions.get_mut(&key).and_then(|reduction| reduction.chunks.get_mut(chunk.0 as usize)) {
            *state = ChunkState::default();
            self.ask_holder(key, actions);
        }
    }

    /// Fetches the results of a commit that are not here from those who hold them.
    pub(crate) fn fetch_results(&mut self, commit: &Commit, actions: &mut Vec<Action>) {
        for (group, attempt, digest) in &commit.groups {
            let key = ReductionKey { step: commit.fence.step, group: *group, attempt: *attempt };
            if !self.is_member(*group) || self.reduce.has(key, *digest) {
                continue;
            }
            self.drop_older_attempts(key);
            let chunks = self.chunk_count(*group);
            let reduction = self.reduce.reductions.entry(key).or_insert_with(|| Reduction {
                seal: None,
                own: Vec::new(),
                contributors: Vec::new(),
                chunks: vec![ChunkState::default(); chunks],
                reported: true,
                digest: None,
                fetch: None,
            });
            // A whole result with another digest is not what was committed.
            if reduction.digest.is_some() {
                reduction.digest = None;
                reduction.chunks = vec![ChunkState::default(); chunks];
                self.queue.push(Task::DropReduction { key });
            }
            self.ask_holder(key, actions);
        }
    }

    /// A replica does not have the result that makes `version`.
    pub(crate) fn result_refused(&mut self, from: NodeId, group: Group, version: Version) {
        let wanted =
            self.reduce.reductions.iter_mut().filter(|(key, reduction)| key.group == group && key.step.makes() == version && reduction.digest.is_none());
        for fetch in wanted.filter_map(|(_, reduction)| reduction.fetch.as_mut()) {
            fetch.refused.insert(from);
        }
    }

    /// Asks the next replica; the first wait is for chunks that are on their way anyway.
    fn ask_holder(&mut self, key: ReductionKey, actions: &mut Vec<Action>) {
        let me = self.settings.id;
        let hosts_it = |span| self.run.as_ref().is_some_and(|run| run.structure.groups_of(span).contains(&key.group));
        let mut holders: Vec<(bool, NodeId)> =
            self.placement.active().filter(|seat| seat.node != me && hosts_it(seat.span)).map(|seat| (seat.suspect, seat.node)).collect();
        // Who is silent or leaving may be the only one who has it.
        holders.sort_unstable();
        let holders: Vec<NodeId> = holders.into_iter().map(|(_, node)| node).collect();
        let again = self.now + FETCH_AGAIN_AFTER;
        let Some(reduction) = self.reduce.reductions.get_mut(&key) else { return };
        let fetch = reduction.fetch.get_or_insert_with(|| Fetch { asked: BTreeSet::new(), refused: BTreeSet::new(), at: again });
        fetch.at = again;
        let next = holders.iter().find(|node| !fetch.asked.contains(node)).or(holders.first()).copied();
        let fence = Fence { timeline: self.placement.timeline, step: key.step };
        if holders.iter().all(|node| fetch.asked.contains(node)) {
            fetch.asked.clear();
        }
        let committed = self.session.commits.back().is_some_and(|newest| fence <= newest.fence);
        if holders.iter().all(|node| fetch.refused.contains(node)) && self.session.welcomed && committed {
            fetch.refused.clear();
            actions.push(Action::Tell(ToCoordinator::Lacks { fence, group: key.group }));
        }
        let Some(next) = next else { return };
        fetch.asked.insert(next);
        let message = PeerMessage::FetchReduced { fence, group: key.group, attempt: key.attempt };
        self.send(next, Frame::from(message), actions);
    }

    pub(crate) fn serve_reduced(&mut self, from: NodeId, fence: Fence, group: Group, attempt: ReduceAttempt, actions: &mut Vec<Action>) {
        let key = ReductionKey { step: fence.step, group, attempt };
        let results: Option<Vec<Payload>> = self
            .reduce
            .reductions
            .get(&key)
            .filter(|reduction| reduction.digest.is_some() && self.is_current(fence))
            .and_then(|reduction| reduction.chunks.iter().map(|state| state.result.clone()).collect());
        match results {
            None => self.send(from, Frame::from(PeerMessage::Unavailable { group, version: fence.step.makes() }), actions),
            Some(results) => {
                for (chunk, payload) in (0u32..).map(Chunk).zip(results) {
                    self.send_result(from, key, chunk, payload, actions);
                }
            }
        }
    }

    /// Sends again what a peer may have missed while its link was down, and asks again for results.
    pub(crate) fn reduce_timers(&mut self, actions: &mut Vec<Action>) {
        let due: Vec<NodeId> = self.reduce.resend.iter().filter(|(_, at)| **at <= self.now).map(|(node, _)| *node).collect();
        for node in due {
            self.reduce.resend.remove(&node);
            let keys: Vec<ReductionKey> = self.reduce.reductions.keys().copied().collect();
            for key in keys {
                self.contribute(key, Some(node));
                self.resend_results(key, node, actions);
            }
        }
        let asking: Vec<ReductionKey> = self
            .reduce
            .reductions
            .iter()
            .filter(|(_, reduction)| reduction.digest.is_none() && reduction.fetch.as_ref().is_some_and(|fetch| fetch.at <= self.now))
            .map(|(key, _)| *key)
            .collect();
        for key in asking {
            self.ask_holder(key, actions);
        }
    }

    fn resend_results(&mut self, key: ReductionKey, node: NodeId, actions: &mut Vec<Action>) {
        let Some(reduction) = self.reduce.reductions.get(&key) else { return };
        if !reduction.seal.as_ref().is_some_and(|seal| seal.receivers.contains(&node)) {
            return;
        }
        let owned: Vec<(Chunk, Payload)> = (0u32..)
            .map(Chunk)
            .zip(&reduction.chunks)
            .filter(|(chunk, state)| reduction.owner(*chunk) == Some(self.settings.id) && state.hash.is_some())
            .filter_map(|(chunk, state)| Some((chunk, state.result.clone()?)))
            .collect();
        for (chunk, payload) in owned {
            self.send_result(node, key, chunk, payload, actions);
        }
    }

    /// After a reconnection the coordinator may have missed the reports.
    pub(crate) fn report_reductions_again(&self, actions: &mut Vec<Action>) {
        for (key, reduction) in &self.reduce.reductions {
            if reduction.seal.is_some() {
                self.report_reduced(*key, actions);
            }
        }
    }
}
