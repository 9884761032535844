//! The host: computes hops, keeps what came and went, adds what the ledger counts.
//!
//! Each (microbatch, span) has one [`Entry`] per step. An entry outlives attempts: a newer attempt
//! asks for the same results, and what is there is not computed again. So when a host is lost only
//! its hop is redone, whatever the route: its neighbours answer from what they keep.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use skein_protocol::codec::Codec;
use skein_protocol::id::{Group, Microbatch, NodeId, Step, SumId, Use};
use skein_protocol::message::control::SumReport;
use skein_protocol::message::data::{Frame, PeerMessage, Route, WorkId};
use skein_protocol::set::BitSet;
use skein_protocol::tensor::Payload;
use skein_protocol::time::Time;

use crate::engine::{Task, WorkKey};
use crate::machine::{Action, Node};

mod again;
mod count;

/// Frames of steps this node has not reached yet that are kept, and the bytes behind them.
const EARLY_FRAMES_MAX: usize = 4096;
const EARLY_BYTES_MAX: usize = 256 * 1024 * 1024;
/// Graphs kept at once; beyond that, backward recomputes.
const GRAPHS_MAX: usize = 16;

/// What this node hosts of the steps that are not retired.
pub(crate) struct Host {
    boot: u64,
    sums_made: u64,
    entries: BTreeMap<WorkKey, Entry>,
    /// The sum that a group's next report names.
    open_sums: BTreeMap<(Step, Group), SumId>,
    sums: BTreeMap<SumId, SumRecord>,
    /// Entries whose gradients wait in scratch and are to be reported.
    to_report: BTreeSet<WorkKey>,
    /// Work of steps whose version is not here yet.
    early: VecDeque<(NodeId, Frame)>,
    /// When what a node may have missed over a broken link is said again.
    say_again: BTreeMap<NodeId, Time>,
    /// Hops that failed, as their feeders were told.
    failed: BTreeSet<(NodeId, WorkId, u16)>,
}

/// What the ledger said of one sum.
struct SumRecord {
    step: Step,
    group: Group,
    counted: BTreeMap<Use, BitSet>,
}

/// One hop's work.
struct Entry {
    work: WorkId,
    mask: BitSet,
    route: Route,
    hop: usize,
    input: Option<Payload>,
    output: Option<Payload>,
    gradient: Option<Payload>,
    /// Whether the host behind has answered this attempt: its part is done.
    answered: bool,
    /// The host behind says that it has sent the gradient, in this life or another.
    lacks_gradient: bool,
    input_gradient: Option<Payload>,
    loss: Option<f32>,
    forward: Progress,
    backward: Progress,
    /// A computation of it failed; the engine has more of it, whose results will not do.
    failed: bool,
    /// Uses whose gradients wait in the engine's scratch.
    scratch: BitSet,
    /// Uses that were added while a backward was under way: perhaps from what it makes.
    taken: BitSet,
    /// The sums named in the report that is not answered yet.
    reported: Vec<(Group, SumId)>,
    counted: BTreeMap<Use, SumId>,
    /// To whom, in this attempt, output and input gradient went.
    sent_output: bool,
    sent_gradient: bool,
    /// Who has received them with their tensors, in any attempt.
    output_at: Option<NodeId>,
    gradient_at: Option<NodeId>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Progress {
    Idle,
    Queued,
    Done,
}

impl Host {
    pub(crate) fn new(boot: u64) -> Self {
        Self {
            boot,
            sums_made: 0,
            entries: BTreeMap::new(),
            open_sums: BTreeMap::new(),
            sums: BTreeMap::new(),
            to_report: BTreeSet::new(),
            early: VecDeque::new(),
            say_again: BTreeMap::new(),
            failed: BTreeSet::new(),
        }
    }

    pub(crate) fn next_timeout(&self) -> Option<Time> {
        self.say_again.values().min().copied()
    }

    pub(crate) fn clear(&mut self) {
        self.entries.clear();
        self.open_sums.clear();
        self.sums.clear();
        self.to_report.clear();
        self.early.clear();
        self.say_again.clear();
        self.failed.clear();
    }

    /// Live sums and what is counted in them, for the hello.
    pub(crate) fn sum_reports(&self) -> Vec<SumReport> {
        self.sums
            .iter()
            .map(|(sum, record)| SumReport {
                sum: *sum,
                step: record.step,
                group: record.group,
                counted: record.counted.iter().map(|(one, pairs)| (*one, pairs.clone())).collect(),
                losses: self.losses_in(*sum, record.group),
            })
            .collect()
    }

    /// Losses of the microbatches that count in a sum of the head's own group; a hello must stay
    /// small, so other sums do not repeat them.
    fn losses_in(&self, sum: SumId, group: Group) -> Vec<(Microbatch, f32)> {
        let counted = self.entries.iter().filter(|(key, entry)| key.span.end.0 == group.0 + 1 && entry.counted.values().any(|of| *of == sum));
        counted.filter_map(|(key, entry)| Some((key.microbatch, entry.loss?))).collect()
    }

    /// Hops, sums, and frames that came early.
    pub(crate) fn kept(&self) -> (usize, usize, usize) {
        (self.entries.len(), self.sums.len(), self.early.len())
    }

    /// How many (use, microbatch) pairs a sum holds.
    pub(crate) fn pairs(&self, sum: SumId) -> Option<usize> {
        self.sums.get(&sum).map(|record| record.counted.values().map(BitSet::len).sum())
    }

    /// A sealed sum is not added to any more (rule 8): the next report names a fresh one.
    pub(crate) fn close_sum(&mut self, step: Step, group: Group) {
        self.open_sums.remove(&(step, group));
    }

    fn open_sum(&mut self, step: Step, group: Group) -> SumId {
        if let Some(sum) = self.open_sums.get(&(step, group)) {
            return *sum;
        }
        self.sums_made += 1;
        let sum = SumId { boot: self.boot, count: self.sums_made };
        self.open_sums.insert((step, group), sum);
        self.sums.insert(sum, SumRecord { step, group, counted: BTreeMap::new() });
        sum
    }

    /// Frees what steps up to `step` kept.
    pub(crate) fn retire(&mut self, step: Step) {
        self.entries.retain(|key, _| key.step > step);
        self.failed.retain(|(_, work, _)| work.fence.step > step);
        self.to_report.retain(|key| key.step > step);
        self.open_sums.retain(|(of, _), _| *of > step);
        self.sums.retain(|_, record| record.step > step);
    }

    fn graphs(&self) -> usize {
        self.entries.values().filter(|entry| entry.forward != Progress::Idle && entry.backward != Progress::Done).count()
    }
}

impl Entry {
    fn new(work: WorkId, mask: BitSet, route: Route, hop: usize) -> Self {
        Self {
            work,
            mask,
            route,
            hop,
            input: None,
            output: None,
            gradient: None,
            answered: false,
            lacks_gradient: false,
            input_gradient: None,
            loss: None,
            forward: Progress::Idle,
            backward: Progress::Idle,
            failed: false,
            scratch: BitSet::new(),
            taken: BitSet::new(),
            reported: Vec::new(),
            counted: BTreeMap::new(),
            sent_output: false,
            sent_gradient: false,
            output_at: None,
            gradient_at: None,
        }
    }

    /// What makes the gradients of a hop. Behind the last microbatch of a step the host before waits
    /// idle, so the gradient for it comes first: this shortens the drain of the pipeline by a third
    /// (the idea of zero-bubble schedules, Qi et al. 2023). The way down is then computed twice, in
    /// time that would pass idle.
    fn backward_tasks(&self, key: WorkKey, encode: Option<Codec>) -> impl Iterator<Item = Task> + use<> {
        let ahead = encode.filter(|_| self.route.last);
        let (input, gradient) = (self.input.clone(), self.gradient.clone());
        let first = ahead.map(|encode| Task::InputGradient { key, input: input.clone(), gradient: gradient.clone(), encode });
        let encode = encode.filter(|_| ahead.is_none());
        first.into_iter().chain([Task::Backward { key, input, gradient, encode }])
    }

    fn is_first(&self) -> bool {
        self.hop == 0
    }

    fn is_last(&self) -> bool {
        self.hop + 1 == self.route.hops.len()
    }

    fn previous(&self) -> Option<NodeId> {
        self.hop.checked_sub(1).map(|hop| self.route.hops[hop].node)
    }

    fn next(&self) -> Option<NodeId> {
        self.route.hops.get(self.hop + 1).map(|hop| hop.node)
    }
}

impl Node {
    /// A hop is asked for.
    #[expect(clippy::too_many_arguments, reason = "the fields of one message")]
    pub(crate) fn forward(&mut self, from: NodeId, work: WorkId, mask: BitSet, route: Route, hop: u16, payload: Option<Payload>, actions: &mut Vec<Action>) {
        if !self.is_current(work.fence) {
            return;
        }
        if self.is_early(work) {
            return self.keep_early(from, PeerMessage::Forward { work, mask, route, hop }, payload);
        }
        let Some(structure) = self.run.as_ref().map(|run| &run.structure) else { return };
        let hop_index = usize::from(hop);
        let Some(mine) = route.hops.get(hop_index).copied().filter(|hop| hop.node == self.settings.id) else { return };
        let well_formed = route.hops.len() <= structure.blocks() && mask.is_below(structure.uses.len());
        let boundary = self.boundary_len();
        let payload_fits = payload.as_ref().is_none_or(|payload| payload.expect(boundary).is_ok());
        let hosted = self.span().is_some_and(|span| span.first <= mine.span.first && mine.span.end <= span.end && !mine.span.is_empty());
        let in_batch = work.microbatch.0 < self.run.as_ref().map_or(0, |run| run.config.batch.microbatches);
        if !well_formed || !in_batch || !payload_fits {
            return;
        }
        if !hosted || self.steps.version != Some(work.fence.step.runs_on()) {
            return self.tell_failed(route.feeder, work, hop, true, actions);
        }
        let key = WorkKey { step: work.fence.step, microbatch: work.microbatch, span: mine.span };
        match self.host.entries.get_mut(&key) {
            Some(entry) if work.attempt < entry.work.attempt => return,
            Some(entry) => {
                if work.attempt > entry.work.attempt {
                    (entry.work, entry.mask, entry.route, entry.hop) = (work, mask, route, hop_index);
                    (entry.sent_output, entry.sent_gradient, entry.answered) = (false, false, false);
                    // Asked again for what was reported: the report was lost with the coordinator.
                    if !entry.scratch.is_empty() {
                        self.host.to_report.insert(key);
                    }
                }
                if entry.input.is_none() {
                    entry.input = payload;
                }
            }
            None => {
                let mut entry = Entry::new(work, mask, route, hop_index);
                entry.input = payload;
                self.host.entries.insert(key, entry);
            }
        }
        self.advance(key, actions);
    }

    /// The gradient of a hop's output came.
    pub(crate) fn backward(&mut self, from: NodeId, work: WorkId, hop: u16, payload: Option<Payload>, actions: &mut Vec<Action>) {
        if !self.is_current(work.fence) {
            return;
        }
        if self.is_early(work) {
            return self.keep_early(from, PeerMessage::Backward { work, hop }, payload);
        }
        let boundary = self.boundary_len();
        let Some((key, entry)) = self.entry_of(work, hop) else { return };
        if payload.as_ref().is_some_and(|payload| payload.expect(boundary).is_err()) || entry.next() != Some(from) {
            return;
        }
        entry.answered = true;
        if entry.gradient.is_none() {
            match payload {
                Some(payload) => entry.gradient = Some(payload),
                None => {
                    entry.lacks_gradient = true;
                    return self.ask_for_gradient(key, actions);
                }
            }
        }
        self.advance(key, actions);
    }

    /// A neighbour lacks the tensor behind a marker.
    pub(crate) fn missing(&mut self, from: NodeId, work: WorkId, hop: u16, backward: bool, actions: &mut Vec<Action>) {
        let mine = if backward { hop.checked_add(1) } else { hop.checked_sub(1) };
        let Some(mine) = mine else { return };
        let Some((key, entry)) = self.entry_of(work, mine) else { return };
        if backward && entry.previous() == Some(from) {
            (entry.sent_gradient, entry.gradient_at) = (false, None);
        } else if !backward && entry.next() == Some(from) {
            (entry.sent_output, entry.output_at) = (false, None);
        } else {
            return;
        }
        self.advance(key, actions);
    }

    fn entry_of(&mut self, work: WorkId, hop: u16) -> Option<(WorkKey, &mut Entry)> {
        self.host
            .entries
            .iter_mut()
            .find(|(key, entry)| key.microbatch == work.microbatch && entry.work == work && entry.hop == usize::from(hop))
            .map(|(key, entry)| (*key, entry))
    }

    fn is_early(&self, work: WorkId) -> bool {
        let wanted = work.fence.step.runs_on();
        match self.steps.version {
            Some(version) => wanted > version,
            // A joiner takes part from a version on; work on older ones is not for it.
            None => self.catchup.from().is_some_and(|from| wanted >= from),
        }
    }

    fn keep_early(&mut self, from: NodeId, message: PeerMessage, payload: Option<Payload>) {
        // Only one step ahead can be honest; a flood pushes out its own oldest.
        let bytes = |frame: &Frame| frame.payload.as_ref().map_or(0, |payload| payload.bytes.len());
        let frame = Frame { message, payload };
        let mut total: usize = bytes(&frame) + self.host.early.iter().map(|(_, frame)| bytes(frame)).sum::<usize>();
        self.host.early.push_back((from, frame));
        while self.host.early.len() > EARLY_FRAMES_MAX || total > EARLY_BYTES_MAX {
            let Some((_, dropped)) = self.host.early.pop_front() else { break };
            total -= bytes(&dropped);
        }
    }

    /// Work that waited for a version this node now has.
    pub(crate) fn early_work(&mut self, actions: &mut Vec<Action>) {
        for (from, frame) in std::mem::take(&mut self.host.early) {
            self.peer(from, frame, actions);
        }
    }

    /// Values of a boundary tensor.
    fn boundary_len(&self) -> usize {
        self.run.as_ref().map_or(0, |run| run.config.batch.tokens_per_microbatch() * run.structure.boundary)
    }

    /// Does whatever is next for an entry: computes, sends on, reports.
    fn advance(&mut self, key: WorkKey, actions: &mut Vec<Action>) {
        // What is committed is not computed any more.
        if self.steps.version != Some(key.step.runs_on()) {
            return self.pass_on(key, actions);
        }
        let Some(run) = &self.run else { return };
        let encode = run.config.wire.boundary;
        let uses = run.structure.uses_of(key.span);
        let keep_graph = self.host.graphs() < GRAPHS_MAX;
        let Some(entry) = self.host.entries.get_mut(&key).filter(|entry| !entry.failed) else { return };
        if !entry.is_first() && entry.input.is_none() {
            let message = PeerMessage::Missing { work: entry.work, hop: hop_number(entry.hop), backward: false };
            if let Some(previous) = entry.previous() {
                self.send(previous, Frame::from(message), actions);
            }
            return;
        }
        // Counted or waiting uses are not computed again; a count that was lost is.
        let covered: BitSet = entry.counted.keys().map(|one| usize::from(one.0)).chain(entry.scratch.iter()).collect();
        let wanted = entry.mask.intersection(&uses).difference(&covered);
        let must_return = !entry.is_first() && entry.input_gradient.is_none();
        let backward_wanted = !wanted.is_empty() || must_return;
        let has_gradient = entry.is_last() || entry.gradient.is_some();
        if entry.backward == Progress::Done && backward_wanted {
            entry.backward = Progress::Idle;
        }
        let forward_wanted = if entry.is_last() { backward_wanted && entry.backward == Progress::Idle } else { entry.output.is_none() };
        if forward_wanted && entry.forward == Progress::Idle {
            entry.forward = Progress::Queued;
            self.queue.push(Task::Forward { key, input: entry.input.clone(), encode, keep_graph });
        }
        let ready = !entry.is_last() || entry.forward != Progress::Idle;
        if backward_wanted && has_gradient && ready && entry.backward == Progress::Idle && (entry.is_last() || entry.output.is_some()) {
            entry.backward = Progress::Queued;
            let tasks = entry.backward_tasks(key, must_return.then_some(encode));
            self.queue.push_behind_forward(key, tasks);
        }
        self.pass_on(key, actions);
    }

    /// Sends output and input gradient to the neighbours of the newest attempt. A neighbour that
    /// has the tensor already gets a marker.
    fn pass_on(&mut self, key: WorkKey, actions: &mut Vec<Action>) {
        let Some(entry) = self.host.entries.get_mut(&key) else { return };
        let mut frames = Vec::new();
        if let (Some(next), Some(output), false) = (entry.next(), &entry.output, entry.sent_output) {
            entry.sent_output = true;
            let message = PeerMessage::Forward { work: entry.work, mask: entry.mask.clone(), route: entry.route.clone(), hop: hop_number(entry.hop + 1) };
            let payload = (entry.output_at != Some(next)).then(|| output.clone());
            entry.output_at = Some(next);
            frames.push((next, Frame { message, payload }));
        }
        // What the host before needs may be there before the rest of the backward is.
        let settled = entry.backward == Progress::Done || entry.backward == Progress::Queued && entry.input_gradient.is_some();
        if settled && !entry.sent_gradient {
            entry.sent_gradient = true;
            match entry.previous() {
                None => frames.push((entry.route.feeder, Frame::from(PeerMessage::Finished { work: entry.work }))),
                Some(previous) => {
                    let message = PeerMessage::Backward { work: entry.work, hop: hop_number(entry.hop - 1) };
                    let payload = entry.input_gradient.clone().filter(|_| entry.gradient_at != Some(previous));
                    entry.gradient_at = Some(previous);
                    frames.push((previous, Frame { message, payload }));
                }
            }
        }
        for (to, frame) in frames {
            self.send(to, frame, actions);
        }
    }

    pub(crate) fn forwarded(&mut self, key: WorkKey, output: Option<Payload>, loss: Option<f32>, actions: &mut Vec<Action>) {
        let Some(entry) = self.host.entries.get_mut(&key) else { return };
        if entry.failed {
            return self.work_failed(key, actions);
        }
        entry.forward = Progress::Done;
        entry.output = output;
        entry.loss = loss.or(entry.loss);
        self.advance(key, actions);
    }

    /// The gradient of a hop's input came ahead of the rest of its backward.
    pub(crate) fn input_gradient_made(&mut self, key: WorkKey, gradient: Payload, actions: &mut Vec<Action>) {
        let Some(entry) = self.host.entries.get_mut(&key) else { return };
        if entry.failed {
            return self.work_failed(key, actions);
        }
        entry.input_gradient.get_or_insert(gradient);
        self.pass_on(key, actions);
    }

    pub(crate) fn backwarded(&mut self, key: WorkKey, gradient: Option<Payload>, uses: &BitSet, actions: &mut Vec<Action>) {
        let Some(entry) = self.host.entries.get_mut(&key) else {
            return self.queue.push(Task::Discard { key });
        };
        if entry.failed {
            return self.work_failed(key, actions);
        }
        entry.backward = Progress::Done;
        // The engine's graph is used up; a later forward at the head has to make a new one.
        if entry.is_last() {
            entry.forward = Progress::Idle;
        }
        entry.input_gradient = entry.input_gradient.take().or(gradient);
        let counted: BitSet = entry.counted.keys().map(|one| usize::from(one.0)).collect();
        let taken = std::mem::take(&mut entry.taken);
        entry.scratch = uses.intersection(&entry.mask).difference(&counted).difference(&taken);
        entry.reported.clear();
        if entry.scratch.is_empty() {
            self.queue.push(Task::Discard { key });
        } else {
            self.host.to_report.insert(key);
        }
        self.pass_on(key, actions);
    }

    /// The engine could not do a hop: someone else should.
    pub(crate) fn work_failed(&mut self, key: WorkKey, actions: &mut Vec<Action>) {
        self.queue.drop_work(key);
        if self.queue.is_at_engine(key) {
            if let Some(entry) = self.host.entries.get_mut(&key) {
                entry.failed = true;
            }
            return;
        }
        let Some(entry) = self.host.entries.remove(&key) else { return };
        self.host.to_report.remove(&key);
        self.queue.push(Task::Discard { key });
        self.tell_failed(entry.route.feeder, entry.work, hop_number(entry.hop), true, actions);
    }
}

fn hop_number(hop: usize) -> u16 {
    u16::try_from(hop).unwrap_or(u16::MAX)
}
