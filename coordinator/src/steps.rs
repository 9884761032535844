//! A step's life: count, seal, commit, retire (rules 1 to 16).

use std::collections::{BTreeMap, BTreeSet};

use skein_protocol::id::{Chunk, Fence, Group, Hash, NodeId, ReduceAttempt, Step, SumId};
use skein_protocol::limits;
use skein_protocol::message::control::{Commit, Done, FromCoordinator, Seal, SliceOwner};
use skein_protocol::placement::{Seat, Standing};
use skein_protocol::time::Time;

use crate::guard::NotFinite;
use crate::ledger::StepLedger;
use crate::machine::{Action, Coordinator, Phase, is_last, quorum};
use crate::membership::Member;
use crate::record::Record;

/// The step that runs.
#[derive(Debug)]
pub(crate) struct OpenStep {
    pub(crate) ledger: StepLedger,
    pub(crate) groups: BTreeMap<Group, Sealed>,
    pub(crate) since: Time,
    pub(crate) not_finite: NotFinite,
}

/// A group that is being reduced.
#[derive(Debug)]
pub(crate) struct Sealed {
    seal: Seal,
    /// Who holds the result, and what it is.
    digests: BTreeMap<NodeId, Hash>,
    squared_norms: BTreeMap<Chunk, f64>,
}

/// A committed step whose leftovers are kept until its version is safe.
#[derive(Debug)]
pub(crate) struct Closing {
    pub(crate) fence: Fence,
    pub(crate) applied: BTreeSet<NodeId>,
    /// Who cannot get the result of a group anywhere.
    pub(crate) lacks: BTreeSet<(Group, NodeId)>,
}

impl Closing {
    pub(crate) fn new(fence: Fence) -> Self {
        Self { fence, applied: BTreeSet::new(), lacks: BTreeSet::new() }
    }
}

impl Coordinator {
    pub(crate) fn open_step_if_possible(&mut self) {
        let version = self.chain.version();
        if self.phase != Phase::Training || self.open.is_some() || is_last(&self.config, version.step()) || !self.is_covered_live() {
            return;
        }
        self.open = Some(self.new_step());
        self.reset_leases();
    }

    pub(crate) fn new_step(&self) -> OpenStep {
        let ledger = StepLedger::new(self.fence(), &self.structure, self.config.batch.microbatches as usize);
        OpenStep { ledger, groups: BTreeMap::new(), since: self.now, not_finite: NotFinite::default() }
    }

    pub(crate) fn reset_leases(&mut self) {
        if let Some(open) = &self.open {
            self.leases.reset(&open.ledger, self.config.batch.microbatches, self.attempts);
        }
    }

    /// What a host has computed (rules 1 and 2).
    pub(crate) fn done(&mut self, from: NodeId, fence: Fence, entries: &[Done], actions: &mut Vec<Action>) {
        let Some(seat) = self.placement.seat(from).filter(|seat| seat.standing == Standing::Active) else { return };
        let span = seat.span;
        if !matches!(self.phase, Phase::Training) {
            return;
        }
        let Some(open) = self.open.as_mut().filter(|open| open.ledger.fence() == fence) else { return };
        let mut verdicts = Vec::with_capacity(entries.len());
        let mut void = BTreeSet::new();
        let mut wrong = None;
        let mut done_well = Vec::new();
        for done in entries {
            match open.ledger.report(from, span, done) {
                Ok(verdict) => {
                    void.extend(done.sums.iter().map(|(_, sum)| *sum).filter(|sum| open.ledger.is_void(*sum)));
                    if let Some(feeder) = self.leases.settle(done.microbatch, &open.ledger, self.now)
                        && let Some(member) = self.members.get_mut(&feeder)
                    {
                        member.work.fed(self.now);
                    }
                    if !verdict.counted.is_empty()
                        && let Some(member) = self.members.get_mut(&from)
                    {
                        member.work.counted(self.structure.span_flops(span), self.now);
                        done_well.push(done.microbatch);
                    }
                    verdicts.push(verdict);
                }
                Err(error) => wrong = Some(error),
            }
        }
        if !verdicts.is_empty() {
            actions.push(Action::Send { to: from, message: FromCoordinator::Counted { fence, verdicts } });
        }
        if !void.is_empty() {
            actions.push(Action::Send { to: from, message: FromCoordinator::Void { fence, sums: void.into_iter().collect() } });
        }
        for microbatch in done_well {
            self.outdone(from, span, microbatch, actions);
        }
        if let Some(error) = wrong {
            self.report(format!("{} reported what it cannot have computed ({error}): disconnected", from.short()), actions);
            actions.push(Action::Disconnect(from));
        }
    }

    /// The holder says that these sums cannot be used.
    pub(crate) fn lost_sums(&mut self, from: NodeId, fence: Fence, sums: &[SumId]) {
        let Some(open) = self.open.as_ref().filter(|open| open.ledger.fence() == fence) else { return };
        let (live, _) = open.ledger.sums_of(from);
        let lost: Vec<SumId> = sums.iter().filter(|sum| live.contains(sum)).copied().collect();
        self.void_sums(&lost);
    }

    /// What these sums held is to be done again. Its leases end: their feeders may have seen the
    /// microbatches come through.
    fn void_sums(&mut self, sums: &[SumId]) {
        let Some(open) = &mut self.open else { return };
        for sum in sums {
            open.groups.retain(|_, sealed| !sealed.covers(*sum));
            let returned = open.ledger.void(*sum);
            self.leases.take_back(&returned);
        }
        self.leases.requeue(&open.ledger, self.config.batch.microbatches);
    }

    /// Voids the sums of a node that is given up (rule 18), except in groups whose result is
    /// already held by enough others. Whether there were any.
    pub(crate) fn void_sums_of(&mut self, node: NodeId, actions: &mut Vec<Action>) -> bool {
        let ready: Vec<Group> = self.structure.group_ids().filter(|group| self.agreed(*group, Some(node)).is_some()).collect();
        let Some(open) = &self.open else { return false };
        let (live, _) = open.ledger.sums_of(node);
        let void: Vec<SumId> = live.into_iter().filter(|sum| open.ledger.group_of(*sum).is_some_and(|group| !ready.contains(&group))).collect();
        let fence = open.ledger.fence();
        self.void_sums(&void);
        if void.is_empty() {
            return false;
        }
        if self.members.get(&node).is_some_and(|member| member.connected) {
            actions.push(Action::Send { to: node, message: FromCoordinator::Void { fence, sums: void } });
        }
        true
    }

    /// Opens again the groups whose reduction needs `node`; they are sealed anew without it.
    pub(crate) fn reseal_without(&mut self, node: NodeId) -> bool {
        let needed: Vec<Group> = self
            .open
            .iter()
            .flat_map(|open| &open.groups)
            .filter(|(group, sealed)| sealed.seal.owners.iter().any(|owner| owner.node == node) && self.agreed(**group, Some(node)).is_none())
            .map(|(group, _)| *group)
            .collect();
        if let Some(open) = &mut self.open {
            for group in &needed {
                open.groups.remove(group);
            }
        }
        !needed.is_empty()
    }

    /// Seals every group that has the whole batch (rule 8).
    pub(crate) fn seal_complete_groups(&mut self, actions: &mut Vec<Action>) {
        if self.phase != Phase::Training {
            return;
        }
        let mut seals = Vec::new();
        for group in self.structure.group_ids() {
            let Some(open) = &mut self.open else { return };
            if open.groups.contains_key(&group) || !open.ledger.is_complete(group) {
                continue;
            }
            // The seal waits for nothing else now: sums of silent holders are given up, and those that
            // stayed for the sake of a result which is void since, though their holder began anew.
            let gone: Vec<NodeId> = open.ledger.holders_of(group).into_iter().filter(|node| !self.is_live_member(*node, group)).collect();
            if !gone.is_empty() {
                for node in gone {
                    self.void_sums_of(node, actions);
                }
                continue;
            }
            if let Some(seal) = self.make_seal(group) {
                seals.push(seal);
            }
        }
        if seals.is_empty() {
            return;
        }
        actions.push(Action::Save(seals.iter().cloned().map(Record::Seal).collect()));
        for seal in seals {
            let mut receivers = seal.receivers.clone();
            receivers.extend(seal.cover.iter().map(|part| part.node));
            receivers.sort_unstable();
            receivers.dedup();
            for node in receivers {
                actions.push(Action::Send { to: node, message: FromCoordinator::Seal(Box::new(seal.clone())) });
            }
        }
    }

    fn make_seal(&mut self, group: Group) -> Option<Seal> {
        let fence = self.fence();
        let owners = self.live_members(group, None);
        if owners.is_empty() {
            return None;
        }
        let listeners = self.placement.seats.iter().filter(|seat| match seat.standing {
            Standing::Active => false,
            Standing::Joining { from } => from <= fence.step.runs_on() && self.structure.groups_of(seat.span).contains(&group),
        });
        let mut receivers = owners.clone();
        receivers.extend(listeners.map(|seat| seat.node).filter(|node| self.members.get(node).is_some_and(Member::is_live)));
        self.attempts += 1;
        let open = self.open.as_mut().expect("the caller has an open step");
        let chunks = self.structure.layout(group).chunks(self.config.reduce.chunk);
        let seal = Seal {
            fence,
            group,
            attempt: ReduceAttempt(self.attempts),
            cover: open.ledger.cover(group),
            receivers,
            owners: slices(&owners, chunks),
            gather: self.config.wire.gather,
        };
        open.groups.insert(group, Sealed { seal: seal.clone(), digests: BTreeMap::new(), squared_norms: BTreeMap::new() });
        Some(seal)
    }

    /// A member (or listener) holds a group's reduced gradient.
    #[expect(clippy::too_many_arguments, reason = "the fields of one message")]
    pub(crate) fn reduced(
        &mut self,
        from: NodeId,
        fence: Fence,
        group: Group,
        attempt: ReduceAttempt,
        digest: Hash,
        squared_norms: &[(Chunk, f64)],
        actions: &mut Vec<Action>,
    ) {
        let Some(open) = self.open.as_mut().filter(|open| open.ledger.fence() == fence) else { return };
        let Some(sealed) = open.groups.get_mut(&group).filter(|sealed| sealed.seal.attempt == attempt && sealed.seal.receivers.contains(&from)) else { return };
        let owned = |chunk: Chunk| sealed.seal.owners.iter().any(|owner| owner.node == from && owner.first <= chunk && chunk < owner.end);
        if !squared_norms.iter().all(|(chunk, norm)| owned(*chunk) && norm.is_finite() && *norm >= 0.0) {
            self.report(format!("{} reported norms of chunks that are not its own: disconnected", from.short()), actions);
            actions.push(Action::Disconnect(from));
            return;
        }
        sealed.squared_norms.extend(squared_norms.iter().copied());
        sealed.digests.insert(from, digest);
        let differ = sealed.digests.values().any(|other| *other != digest);
        if differ {
            self.report(format!("replicas of group {group} do not agree on its reduced gradient"), actions);
        }
    }

    /// Live members of a group in order, `except` one.
    pub(crate) fn live_members(&self, group: Group, except: Option<NodeId>) -> Vec<NodeId> {
        self.placement
            .active()
            .map(|seat| seat.node)
            .filter(|node| Some(*node) != except && self.is_live_member(*node, group))
            .take(limits::REDUCERS_MAX)
            .collect()
    }

    fn is_live_member(&self, node: NodeId, group: Group) -> bool {
        let hosts_it = |seat: &&Seat| seat.standing == Standing::Active && self.structure.groups_of(seat.span).contains(&group);
        self.placement.seat(node).filter(hosts_it).is_some() && self.members.get(&node).is_some_and(Member::is_live)
    }

    /// The digest on which enough live members agree (rule 13), once all norms are known.
    fn agreed(&self, group: Group, except: Option<NodeId>) -> Option<Hash> {
        let sealed = self.open.as_ref()?.groups.get(&group)?;
        // A replica that came back since the seal was sent fetches the result once it is committed.
        let mut members = self.live_members(group, except);
        members.retain(|node| sealed.seal.receivers.contains(node));
        let chunks = self.structure.layout(group).chunks(self.config.reduce.chunk);
        if members.is_empty() || sealed.squared_norms.len() != chunks as usize {
            return None;
        }
        let held: Vec<Hash> = members.iter().filter_map(|node| sealed.digests.get(node)).copied().collect();
        held.iter().find(|digest| held.iter().filter(|other| other == digest).count() >= quorum(members.len())).copied()
    }

    /// Commits the open step when every group's result is safe and the step before is retired.
    pub(crate) fn commit_if_possible(&mut self, actions: &mut Vec<Action>) {
        if self.phase != Phase::Training || self.closing.is_some() || self.open.is_none() {
            return;
        }
        let mut groups = Vec::new();
        for group in self.structure.group_ids() {
            let Some(digest) = self.agreed(group, None) else { return };
            groups.push((group, digest));
        }
        let open = self.open.take().expect("checked");
        let fence = open.ledger.fence();
        // Squared norms are added in group order, within a group in chunk order (rule 12).
        let squared_norm = open.groups.values().flat_map(|sealed| sealed.squared_norms.values()).sum();
        let mut commit = Commit {
            fence,
            previous: self.chain.head(),
            groups: groups.into_iter().map(|(group, digest)| (group, open.groups[&group].seal.attempt, digest)).collect(),
            scalars: self.config.scalars(fence.step, squared_norm),
            loss: open.ledger.loss(),
            signature: Vec::new(),
        };
        commit.signature = self.signer.sign(&commit.hash().0);
        assert_eq!(open.ledger.missing_pairs(), 0, "a committed step counts every microbatch in every block");
        actions.push(Action::Save(vec![Record::Commit(commit.clone())]));
        let next = commit.fence.step.makes();
        if self.is_checkpoint(next) {
            self.request_checkpoint(next, actions);
        }
        self.broadcast(&FromCoordinator::Commit(Box::new(commit.clone())), actions);
        self.note_commit(&open, &commit);
        self.closing = Some(Closing::new(fence));
        self.chain.push(commit);
    }

    /// A member has applied a step to all its groups.
    pub(crate) fn applied(&mut self, from: NodeId, fence: Fence, actions: &mut Vec<Action>) {
        if fence.timeline != self.timeline() || fence.step >= self.chain.version().step() {
            return;
        }
        if let Some(member) = self.members.get_mut(&from) {
            member.applied = member.applied.max(Some(fence.step));
        }
        if let Some(closing) = self.closing.as_mut().filter(|closing| closing.fence == fence) {
            closing.applied.insert(from);
        }
        self.retire_if_possible(actions);
    }

    /// A member cannot get a committed result. Where others have applied and freed it, the member
    /// begins anew from their state; else it may be lost for good ([`Self::go_back_if_lost`]).
    pub(crate) fn lacks(&mut self, node: NodeId, fence: Fence, group: Group, actions: &mut Vec<Action>) {
        let Some(closing) = self.closing.as_mut().filter(|closing| closing.fence == fence && !closing.applied.contains(&node)) else { return };
        closing.lacks.insert((group, node));
        let applied = closing.applied.clone();
        if self.live_members(group, Some(node)).iter().any(|other| applied.contains(other)) {
            self.report(format!("{} is too far behind: it begins anew", node.short()), actions);
            self.void_sums_of(node, actions);
            self.unseat(node, actions);
            self.seat_newcomer(node, actions);
        }
    }

    /// The newest version of a group went with its last holder (rule 15): everyone left is behind
    /// what is retired, or cannot get what is committed.
    pub(crate) fn go_back_if_lost(&mut self, actions: &mut Vec<Action>) {
        if self.phase != Phase::Training {
            return;
        }
        if let Some(group) = self.lost_before_it_was_got() {
            self.report(format!("version {} of group {group} went before anyone had got it", self.placement.base), actions);
            return self.go_back(actions);
        }
        let lost = self.structure.group_ids().find(|group| {
            let mut members = self.placement.active().filter(|seat| self.structure.groups_of(seat.span).contains(group)).peekable();
            members.peek().is_some() && members.all(|seat| self.is_without(seat.node, *group))
        });
        if let Some(group) = lost {
            self.report(format!("the newest version of group {group} went with its last holder"), actions);
            self.go_back(actions);
        }
    }

    fn is_without(&self, node: NodeId, group: Group) -> bool {
        let applied = self.members.get(&node).and_then(|member| member.applied);
        let lacks = self.closing.as_ref().is_some_and(|closing| closing.lacks.contains(&(group, node)) && !closing.applied.contains(&node));
        applied < self.retired_step() || lacks
    }

    /// Retires the committed step once enough members of every group have its version (rule 15).
    pub(crate) fn retire_if_possible(&mut self, actions: &mut Vec<Action>) {
        let Some(closing) = &self.closing else { return };
        let safe = self.structure.group_ids().all(|group| {
            let members = self.live_members(group, None);
            !members.is_empty() && members.iter().filter(|node| closing.applied.contains(node)).count() >= quorum(members.len())
        });
        if !safe {
            return;
        }
        let fence = closing.fence;
        self.closing = None;
        self.broadcast(&FromCoordinator::Retire { fence }, actions);
        if is_last(&self.config, self.chain.version().step()) && self.phase == Phase::Training {
            self.finish(actions);
        }
    }

    /// The newest step whose leftovers may go.
    pub(crate) fn retired_step(&self) -> Option<Step> {
        let newest = self.chain.version().0.checked_sub(1)?;
        let retired = if self.closing.is_some() { newest.checked_sub(1)? } else { newest };
        Some(Step(retired))
    }
}

impl Sealed {
    fn covers(&self, sum: SumId) -> bool {
        self.seal.cover.iter().any(|part| part.sum == sum)
    }
}

/// Cuts `chunks` into contiguous slices of nearly equal length, one an owner.
fn slices(owners: &[NodeId], chunks: u32) -> Vec<SliceOwner> {
    let count = u32::try_from(owners.len()).expect("bounded");
    let cut = |index: u32| Chunk(u32::try_from(u64::from(chunks) * u64::from(index) / u64::from(count)).expect("at most chunks"));
    (0..count)
        .map(|index| SliceOwner { node: owners[index as usize], first: cut(index), end: cut(index + 1) })
        .filter(|slice| slice.first < slice.end)
        .collect()
}
