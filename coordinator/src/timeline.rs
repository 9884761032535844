//! Placements over time: beginning, joining, recovering after a restart, going back to a checkpoint.

use std::collections::BTreeSet;

use skein_protocol::id::{Block, Epoch, Fence, Group, Hash, NodeId, Span, Step, SumId, Timeline, Version};
use skein_protocol::limits;
use skein_protocol::message::control::{Commit, FromCoordinator, Hello, Role};
use skein_protocol::placement::{Placement, Seat, Source, Standing};

use crate::machine::{Action, Coordinator, Phase, is_last};
use crate::membership::Member;
use crate::planner::{self, Device};
use crate::record::Record;
use crate::steps::Closing;

/// What a timeline begins with.
struct Beginning {
    base: Version,
    sources: Vec<Source>,
    spans: Vec<(NodeId, Span)>,
}

impl Coordinator {
    /// After a restart, members of the log are awaited with what they hold.
    pub(crate) fn recover_from_log(&mut self, actions: &mut Vec<Action>) {
        if !self.has_begun() {
            return;
        }
        let awaited: BTreeSet<NodeId> = self.members.keys().copied().collect();
        self.report(format!("restarted at step {}, waiting for {} nodes", self.chain.version(), awaited.len()), actions);
        self.phase = Phase::Recovering { awaited, until: self.now + limits::LEASE };
        self.open = Some(self.new_step());
        if let Some(newest) = self.chain.version().0.checked_sub(1).filter(|_| self.chain.version() > self.placement.base) {
            self.closing = Some(Closing::new(Fence { timeline: self.timeline(), step: Version(newest).step() }));
        }
    }

    /// Whether a timeline has ever begun.
    fn has_begun(&self) -> bool {
        self.placement.timeline > Timeline(0)
    }

    /// Takes in what a node holds: its sums (rule 4), and its seat if it still has the state.
    /// Returns the sums that are live.
    pub(crate) fn recover_from_hello(&mut self, node: NodeId, hello: &Hello, actions: &mut Vec<Action>) -> Vec<SumId> {
        let current = hello.timeline == self.timeline() && hello.role == Role::Worker;
        if let Phase::Recovering { awaited, .. } = &mut self.phase {
            awaited.remove(&node);
            if let Some(span) = hello.span.filter(|span| current && self.holds_state(*span, hello)) {
                self.seat(Seat { node, span, standing: Standing::Active, suspect: false, rate: 0.0 });
                if hello.versions_held.iter().all(|(_, version)| *version >= self.chain.version())
                    && let Some(closing) = &mut self.closing
                {
                    closing.applied.insert(node);
                }
            }
        } else if self.placement.seat(node).is_some_and(|seat| seat.standing == Standing::Active && !self.holds_state(seat.span, hello)) {
            // Too far behind to be a replica: what it missed is retired.
            self.void_sums_of(node, actions);
            self.unseat(node, actions);
        }
        let Some(seat_span) = self.placement.seat(node).map(|seat| seat.span) else { return Vec::new() };
        let recovering = matches!(self.phase, Phase::Recovering { .. });
        let Some(open) = &mut self.open else { return Vec::new() };
        if !current {
            return Vec::new();
        }
        if recovering {
            return hello.sums.iter().filter(|report| open.ledger.adopt(node, seat_span, report)).map(|report| report.sum).collect();
        }
        // Sums that the ledger thinks live and the node does not list are void.
        let (live, _) = open.ledger.sums_of(node);
        let listed: BTreeSet<SumId> = hello.sums.iter().map(|report| report.sum).collect();
        let (kept, lost): (Vec<SumId>, Vec<SumId>) = live.into_iter().partition(|sum| listed.contains(sum));
        let fence = open.ledger.fence();
        self.lost_sums(node, fence, &lost);
        kept
    }

    /// Whether a node still can be a replica of `span`: its groups are at the current version, or
    /// at the one before while that step is not retired.
    fn holds_state(&self, span: Span, hello: &Hello) -> bool {
        let oldest = self.chain.version().0 - u64::from(self.closing.is_some());
        self.is_span(span)
            && self.structure.groups_of(span).iter().all(|group| hello.versions_held.iter().any(|(held, version)| held == group && version.0 >= oldest))
    }

    fn is_span(&self, span: Span) -> bool {
        !span.is_empty() && usize::from(span.end.0) <= self.structure.blocks()
    }

    /// Ends recovery when all are back, or at its deadline without those who are not.
    pub(crate) fn recovery_deadline(&mut self, actions: &mut Vec<Action>) {
        let Phase::Recovering { awaited, until } = &self.phase else { return };
        if self.now < *until && !awaited.is_empty() {
            return;
        }
        let missing: Vec<NodeId> = awaited.iter().copied().collect();
        for node in missing {
            self.members.remove(&node);
            actions.push(Action::Save(vec![Record::Gone { node }]));
        }
        if self.uncovered().is_empty() {
            self.phase = Phase::Training;
            self.reset_leases();
            self.publish_placement(actions);
            if is_last(&self.config, self.chain.version().step()) {
                self.finish(actions);
            }
            return self.seat_newcomers(actions);
        }
        self.go_back(actions);
    }

    /// Adopts commits that this coordinator signed and lost (rule 16).
    pub(crate) fn adopt_commits(&mut self, presented: &[Commit], actions: &mut Vec<Action>) {
        if !matches!(self.phase, Phase::Recovering { .. }) {
            return;
        }
        let timeline = self.timeline();
        let ours: Vec<Commit> = presented.iter().filter(|commit| commit.fence.timeline == timeline).cloned().collect();
        for commit in self.chain.extension(&ours, self.id, &*self.signer) {
            actions.push(Action::Save(vec![Record::Commit(commit.clone())]));
            self.closing = Some(Closing::new(commit.fence));
            self.chain.push(commit);
            self.open = Some(self.new_step());
        }
    }

    /// Blocks without an active replica.
    pub(crate) fn uncovered(&self) -> Vec<Block> {
        self.structure.whole().blocks().filter(|block| self.placement.replicas(*block).next().is_none()).collect()
    }

    /// Whether every block has a replica that answers.
    pub(crate) fn is_covered_live(&self) -> bool {
        self.structure.whole().blocks().all(|block| self.placement.replicas(block).any(|seat| self.members.get(&seat.node).is_some_and(Member::is_live)))
    }

    /// The state of some block is lost, or was never drawn: begin again from the newest checkpoint
    /// when there are nodes for it.
    pub(crate) fn go_back(&mut self, actions: &mut Vec<Action>) {
        let lost = self.uncovered();
        self.open = None;
        self.closing = None;
        self.phase = Phase::Waiting { why: String::new() };
        let why = if lost.is_empty() { String::new() } else { format!("no node holds blocks {} any more: ", as_ranges(&lost)) };
        self.report(format!("{why}going back to the newest checkpoint"), actions);
    }

    /// A group of the version that this timeline begins from that nobody holds and no disk of a
    /// member has any more: its joiners would ask for it for ever.
    pub(crate) fn lost_before_it_was_got(&self) -> Option<Group> {
        let base = self.placement.base;
        if self.open.is_some() || self.chain.version() != base {
            return None;
        }
        let on_disk = |group: &Group| {
            let shards = self.shards.get(&base).and_then(|groups| groups.get(group));
            shards.is_some_and(|holders| holders.keys().any(|node| self.members.contains_key(node)))
        };
        let hosted = |group: &Group| self.placement.active().any(|seat| self.structure.groups_of(seat.span).contains(group));
        let fetched = self.placement.sources.iter().filter(|source| !source.holders.is_empty()).map(|source| source.group);
        fetched.into_iter().find(|group| !on_disk(group) && !hosted(group))
    }

    /// Begins a timeline as soon as there are nodes that fit the model and, after the first, a
    /// checkpoint to begin from.
    pub(crate) fn begin_if_possible(&mut self, actions: &mut Vec<Action>) {
        if !matches!(self.phase, Phase::Waiting { .. }) {
            return;
        }
        match self.beginning() {
            Err(why) => {
                if self.phase != (Phase::Waiting { why: why.clone() }) {
                    self.report(why.clone(), actions);
                    self.phase = Phase::Waiting { why };
                }
            }
            Ok(beginning) => self.begin(beginning, actions),
        }
    }

    fn beginning(&self) -> Result<Beginning, String> {
        let devices: Vec<Device> = self
            .members
            .iter()
            .filter(|(_, member)| member.role == Role::Worker && member.is_live() && !member.leaving)
            .map(|(node, member)| device(*node, member))
            .collect();
        let wanted = if self.has_begun() { 1 } else { self.config.placement.nodes_min.max(1) };
        if devices.len() < wanted {
            return Err(format!("waiting for nodes: {} of {wanted}", devices.len()));
        }
        let (base, sources) = self.base()?;
        let spans = planner::plan(&self.structure, &self.config.batch, &self.config.placement, &devices, &[])
            .map_err(|error| format!("waiting for a host: {error}"))?;
        Ok(Beginning { base, sources, spans })
    }

    /// The newest complete checkpoint whose shards are all at nodes that are here.
    fn base(&self) -> Result<(Version, Vec<Source>), String> {
        let mut missing = None;
        // One whose shards are gone with their disks is not waited for.
        for version in self.complete.iter().rev().filter(|version| !self.is_destroyed(**version)) {
            let sources: Vec<Source> = self.structure.group_ids().map(|group| self.source(*version, group)).collect();
            let absent: Vec<Group> = sources.iter().filter(|source| source.holders.is_empty()).map(|source| source.group).collect();
            if absent.is_empty() {
                return Ok((*version, sources));
            }
            let groups = absent.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ");
            missing.get_or_insert(format!(
                "waiting for a node that has the checkpoint of version {version} (groups {groups}): start the nodes with their old --state folders"
            ));
        }
        if let (None, Some(import)) = (&missing, self.config.data.import) {
            let sources = self.imported(import).ok_or("waiting for a node that brings the imported model: run `skein-node import` into its --state folder")?;
            return Ok((Version(0), sources));
        }
        missing.map_or_else(
            || Ok((Version(0), self.structure.group_ids().map(|group| Source { group, holders: Vec::new(), root: Hash::default() }).collect())),
            Err,
        )
    }

    fn begin(&mut self, beginning: Beginning, actions: &mut Vec<Action>) {
        let Beginning { base, sources, spans } = beginning;
        let timeline = Timeline(self.placement.timeline.0 + 1);
        actions.push(Action::Save(vec![Record::Timeline { timeline, base }]));
        let mut seats: Vec<Seat> =
            spans.into_iter().map(|(node, span)| Seat { node, span, standing: Standing::Joining { from: base }, suspect: false, rate: 0.0 }).collect();
        seats.sort_by_key(|seat| seat.node);
        self.placement = Placement { epoch: self.placement.epoch, timeline, base, sources, seats };
        self.bases.push((timeline, base));
        self.chain.rewind(base);
        self.complete.retain(|version| *version <= base);
        self.shards.retain(|version, _| *version <= base);
        (self.open, self.closing) = (None, None);
        for member in self.members.values_mut() {
            member.applied = None;
        }
        self.phase = Phase::Training;
        self.report(format!("timeline {timeline} begins from version {base} on {} nodes", self.placement.seats.len()), actions);
        self.publish_placement(actions);
    }

    /// A joining node has caught up.
    pub(crate) fn ready(&mut self, node: NodeId, timeline: Timeline, span: Span, version: Version, actions: &mut Vec<Action>) {
        if timeline != self.timeline() {
            return;
        }
        let Ok(index) = self.placement.seats.binary_search_by_key(&node, |seat| seat.node) else { return };
        let seat = &mut self.placement.seats[index];
        if seat.span != span || !matches!(seat.standing, Standing::Joining { from } if from <= version) {
            return;
        }
        seat.standing = Standing::Active;
        if let Some(member) = self.members.get_mut(&node) {
            member.applied = member.applied.max(version.0.checked_sub(1).map(Step));
        }
        if let Some(closing) = self.closing.as_mut().filter(|closing| closing.fence.step.makes() <= version) {
            closing.applied.insert(node);
        }
        self.report(format!("{} hosts blocks {span}", node.short()), actions);
        self.publish_placement(actions);
        if is_last(&self.config, self.chain.version().step()) && self.uncovered().is_empty() && self.phase == Phase::Training && self.closing.is_none() {
            self.finish(actions);
        }
    }

    /// Finds a place for a node that has none, in a run that is going.
    pub(crate) fn seat_newcomer(&mut self, node: NodeId, actions: &mut Vec<Action>) {
        let Some(member) = self.members.get(&node).filter(|member| member.role == Role::Worker && member.is_live() && !member.leaving) else { return };
        if self.phase != Phase::Training || self.placement.seat(node).is_some() {
            return;
        }
        let version = self.chain.version();
        let from = if self.open.is_none() && version == self.placement.base { version } else { version.step().makes() };
        if is_last(&self.config, from.step()) || (from != self.placement.base && !self.uncovered().is_empty()) {
            return;
        }
        let present: Vec<(Device, Span)> =
            self.placement.seats.iter().filter_map(|seat| self.members.get(&seat.node).map(|member| (device(seat.node, member), seat.span))).collect();
        match planner::place_joiner(&self.structure, &self.config.batch, &self.config.placement, &present, device(node, member)) {
            Some(span) => {
                self.seat(Seat { node, span, standing: Standing::Joining { from }, suspect: false, rate: 0.0 });
                self.report(format!("{} will host blocks {span} from step {from}", node.short()), actions);
                self.publish_placement(actions);
            }
            None => self.report(format!("no span fits {} ({} MiB of memory)", node.short(), member.capability.memory >> 20), actions),
        }
    }

    fn seat_newcomers(&mut self, actions: &mut Vec<Action>) {
        let nodes: Vec<NodeId> = self.members.keys().copied().collect();
        for node in nodes {
            self.seat_newcomer(node, actions);
        }
    }

    fn seat(&mut self, seat: Seat) {
        match self.placement.seats.binary_search_by_key(&seat.node, |seat| seat.node) {
            Ok(index) => self.placement.seats[index] = seat,
            Err(index) => self.placement.seats.insert(index, seat),
        }
    }

    /// Takes a node's seat away.
    pub(crate) fn unseat(&mut self, node: NodeId, actions: &mut Vec<Action>) {
        self.leases.return_all_of(node);
        self.return_leases_through(node);
        self.void_sums_of(node, actions);
        self.reseal_without(node);
        self.placement.seats.retain(|seat| seat.node != node);
        self.publish_placement(actions);
        let loading = self.open.is_none() && self.chain.version() == self.placement.base;
        let hopeless = self
            .structure
            .whole()
            .blocks()
            .any(|block| !self.placement.seats.iter().any(|seat| seat.span.contains(block) && (seat.standing == Standing::Active || loading)));
        if hopeless && matches!(self.phase, Phase::Training | Phase::Finished) {
            self.go_back(actions);
        }
    }

    /// Microbatches that may have been lost at a node are leased anew.
    pub(crate) fn return_leases_through(&mut self, node: NodeId) {
        if let (Some(seat), Some(open)) = (self.placement.seat(node), &self.open) {
            self.leases.return_missing(&self.structure.uses_of(seat.span), &open.ledger);
        }
    }

    /// Tells everyone who hosts what, with the newest doubts and rates.
    pub(crate) fn publish_placement(&mut self, actions: &mut Vec<Action>) {
        let leaving: Vec<NodeId> = self.members.iter().filter(|(_, member)| member.leaving).map(|(node, _)| *node).collect();
        for index in 0..self.placement.seats.len() {
            let node = self.placement.seats[index].node;
            let replaceable = self.is_replaceable(node);
            let member = self.members.get(&node);
            let seat = &mut self.placement.seats[index];
            seat.suspect = !member.is_some_and(Member::is_live) || (leaving.contains(&node) && replaceable);
            seat.rate = member.map_or(0.0, |member| member.work.rate() as f32);
        }
        self.placement.epoch = Epoch(self.placement.epoch.0 + 1);
        self.broadcast(&FromCoordinator::Placement(Box::new(self.placement.clone())), actions);
    }

    /// Whether every block of a node's span has another replica that is live and stays.
    pub(crate) fn is_replaceable(&self, node: NodeId) -> bool {
        let stays = |node: &NodeId| self.members.get(node).is_some_and(|member| member.is_live() && !member.leaving);
        let has_other = |block| self.placement.replicas(block).any(|other| other.node != node && stays(&other.node));
        self.placement.seat(node).is_some_and(|seat| seat.span.blocks().all(has_other))
    }

    /// What a node that is back may have missed while it was away.
    pub(crate) fn resend_to(&mut self, node: NodeId, actions: &mut Vec<Action>) {
        if self.placement.seat(node).is_some() {
            self.publish_placement(actions);
        }
        match self.phase {
            Phase::Stopping { version } => self.request_checkpoint(version, actions),
            Phase::Finished => actions.push(Action::Send { to: node, message: FromCoordinator::Finished { version: self.chain.version() } }),
            Phase::Waiting { .. } | Phase::Recovering { .. } | Phase::Training | Phase::Paused { .. } => {}
        }
        if let Phase::Recovering { awaited, .. } = &self.phase
            && awaited.is_empty()
        {
            self.recovery_deadline(actions);
        }
    }
}

fn device(node: NodeId, member: &Member) -> Device {
    Device { node, flops: member.capability.flops, memory: member.capability.memory }
}

/// Blocks as people read them: `3-5, 7`.
fn as_ranges(blocks: &[Block]) -> String {
    let mut ranges: Vec<Span> = Vec::new();
    for block in blocks {
        match ranges.last_mut() {
            Some(range) if range.end == *block => range.end = Block(block.0 + 1),
            _ => ranges.push(Span::new(block.0, block.0 + 1)),
        }
    }
    ranges.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ")
}
