//! Who is here: hellos, silence, leases, leaving.

use skein_protocol::config::Mode;
use skein_protocol::id::{NodeId, Step};
use skein_protocol::limits;
use skein_protocol::message::VERSIONS;
use skein_protocol::message::control::{Capability, FromCoordinator, Hello, Peer, Role, Welcome};
use skein_protocol::placement::Standing;
use skein_protocol::time::Time;

use crate::machine::{Action, Coordinator, HELLO_ITEMS_MAX, Phase};
use crate::record::Record;

/// A silent member's sums are given up after so many times [`limits::SUSPECT_AFTER`]; at once where
/// its connection closed, or where the whole batch is sealed and nothing else is waited for.
const SILENCE_BEFORE_VOID: u32 = 3;

/// A node that was admitted.
#[derive(Clone, Debug)]
pub(crate) struct Member {
    pub(crate) capability: Capability,
    pub(crate) role: Role,
    pub(crate) addresses: Vec<String>,
    pub(crate) has_data: bool,
    /// Whether its control connection stands and it has said hello on it.
    pub(crate) connected: bool,
    /// Whether it has said hello since this coordinator started.
    pub(crate) present: bool,
    /// Whether no work should go to it, because it is silent.
    pub(crate) suspect: bool,
    /// Whether what waited for it went elsewhere, since it was last heard.
    pub(crate) given_up: bool,
    /// Whether it asked to go.
    pub(crate) leaving: bool,
    pub(crate) heard: Time,
    /// The newest step it has applied.
    pub(crate) applied: Option<Step>,
    /// What its links are and carry, as it says: shown only.
    pub(crate) links: String,
    pub(crate) sent_per_second: f64,
    /// Microbatches counted for it in steps so far, for shares and routes.
    pub(crate) work: crate::view::Work,
}

impl Member {
    fn new(hello: &Hello, now: Time) -> Self {
        Self {
            capability: hello.capability,
            role: hello.role,
            addresses: hello.data_addresses.clone(),
            has_data: hello.data.is_some(),
            connected: true,
            present: true,
            suspect: false,
            given_up: false,
            leaving: false,
            heard: now,
            applied: None,
            links: String::new(),
            sent_per_second: 0.0,
            work: crate::view::Work::default(),
        }
    }

    pub(crate) fn from_log(capability: Capability) -> Self {
        Self {
            capability,
            role: Role::Worker,
            addresses: Vec::new(),
            has_data: false,
            connected: false,
            present: false,
            suspect: true,
            given_up: false,
            leaving: false,
            heard: Time::default(),
            applied: None,
            links: String::new(),
            sent_per_second: 0.0,
            work: crate::view::Work::default(),
        }
    }

    pub(crate) fn is_live(&self) -> bool {
        self.connected && !self.suspect
    }
}

impl Coordinator {
    pub(crate) fn connected(&mut self, node: NodeId) {
        // Nothing else is known and nothing is kept before the hello.
        self.strangers.insert(node);
    }

    pub(crate) fn hello(&mut self, node: NodeId, hello: Hello, actions: &mut Vec<Action>) {
        // A hello says what was so when the connection was made: a second one is out of date.
        if !self.strangers.remove(&node) {
            return;
        }
        if let Err(reason) = self.admit(&hello) {
            self.report(format!("refused {}: {reason}", node.short()), actions);
            actions.push(Action::Send { to: node, message: FromCoordinator::Refused { reason } });
            actions.push(Action::Disconnect(node));
            return;
        }
        let version = hello.versions.common(VERSIONS).expect("admitted");
        let returning = self.members.get(&node).map(|member| (member.work.clone(), member.role));
        // A process that started anew under the same name does not hold what the old one held.
        let anew = !self.is_same_life(node, &hello);
        if returning.is_some() && anew {
            self.void_sums_of(node, actions);
            self.unseat(node, actions);
        }
        let mut member = Member::new(&hello, self.now);
        member.applied = hello.versions_held.iter().map(|(_, version)| *version).min().and_then(|version| version.0.checked_sub(1)).map(Step);
        if let Some((work, _)) = &returning {
            member.work = work.clone();
        }
        if returning.is_none() && hello.role == Role::Worker {
            actions.push(Action::Save(vec![Record::Member { node, capability: hello.capability }]));
        }
        self.members.insert(node, member);
        self.report(format!("{} {}", node.short(), if returning.is_some() { "is back" } else { "joined" }), actions);
        self.adopt_commits(&hello.commits, actions);
        // What it does not list any more is gone with its disk.
        self.forget_shards(node);
        self.note_shards(node, &hello.shards);
        let live_sums = self.recover_from_hello(node, &hello, actions);
        self.hear_what_was_missed(node, &hello, actions);
        self.seat_newcomer(node, actions);
        let welcome = Welcome {
            version,
            run: self.run,
            config: self.config.to_toml(),
            placement: self.placement.clone(),
            step: self.chain.version().step(),
            peers: self.peers(),
            commits: self.chain.tail().cloned().collect(),
            live_sums,
            retired: self.retired_step(),
            checkpoint: self.newest_checkpoint(),
        };
        actions.push(Action::Send { to: node, message: FromCoordinator::Welcome(Box::new(welcome)) });
        self.broadcast_peers(actions);
        self.resend_to(node, actions);
    }

    /// What the node said while it was not connected, and what its hello says in its place.
    fn hear_what_was_missed(&mut self, node: NodeId, hello: &Hello, actions: &mut Vec<Action>) {
        let applied = self.members.get(&node).and_then(|member| member.applied);
        if hello.timeline == self.timeline()
            && let Some(closing) = self.closing.as_mut().filter(|closing| applied >= Some(closing.fence.step))
        {
            closing.applied.insert(node);
        }
        for shard in hello.shards.iter().filter(|shard| shard.timeline == hello.timeline) {
            self.complete_checkpoint(shard.version, actions);
        }
    }

    fn admit(&self, hello: &Hello) -> Result<(), String> {
        if hello.versions.common(VERSIONS).is_none() {
            return Err(format!("this node speaks wire versions {}, the coordinator {}: update the older one", hello.versions, VERSIONS));
        }
        if let Some(run) = hello.run.filter(|run| *run != self.run) {
            return Err(format!("this node's state is of run {}, the coordinator's run is {}: use another --state folder", run.short(), self.run.short()));
        }
        let items = hello.sums.len().max(hello.shards.len()).max(hello.commits.len()).max(hello.versions_held.len());
        if items > HELLO_ITEMS_MAX || hello.data_addresses.len() > 16 {
            return Err("the hello is larger than any node's".to_owned());
        }
        if self.config.run.mode == Mode::Exact {
            self.same_kind(hello)?;
        }
        if self.members.len() >= limits::NODES_MAX {
            return Err(format!("the run is full: it has {} nodes", limits::NODES_MAX));
        }
        Ok(())
    }

    /// In mode `exact` all workers compute equal bits, as far as their probes show.
    fn same_kind(&self, hello: &Hello) -> Result<(), String> {
        let mut workers = self.members.iter().filter(|(_, member)| member.role == Role::Worker);
        let other = workers.find(|(_, member)| member.capability.fingerprint != hello.capability.fingerprint);
        match other.filter(|_| hello.role == Role::Worker) {
            Some((node, _)) => Err(format!("mode exact needs one kind of device: this one does not compute the same bits as that of {}", node.short())),
            None => Ok(()),
        }
    }

    /// Whether the node still is the process that held its seat: it reports the span's state.
    fn is_same_life(&self, node: NodeId, hello: &Hello) -> bool {
        match self.placement.seat(node) {
            None => true,
            Some(seat) if seat.standing == Standing::Active => hello.span == Some(seat.span) && hello.timeline == self.timeline(),
            Some(_) => false,
        }
    }

    /// Notes that a member was heard; false if it is none.
    pub(crate) fn heard(&mut self, node: NodeId, actions: &mut Vec<Action>) -> bool {
        let now = self.now;
        let Some(member) = self.members.get_mut(&node).filter(|member| member.connected) else {
            return false;
        };
        member.heard = now;
        member.given_up = false;
        if member.suspect {
            member.suspect = false;
            self.report(format!("{} is heard again", node.short()), actions);
            self.publish_placement(actions);
        }
        true
    }

    pub(crate) fn disconnected(&mut self, node: NodeId, actions: &mut Vec<Action>) {
        self.strangers.remove(&node);
        let Some(member) = self.members.get_mut(&node).filter(|member| member.connected) else {
            return;
        };
        member.connected = false;
        member.suspect = true;
        if member.role == Role::Reader {
            self.members.remove(&node);
            return;
        }
        let left = member.leaving && self.placement.seat(node).is_none();
        if left || self.phase == Phase::Finished {
            return self.remove_member(node, "left", actions);
        }
        self.report(format!("lost the connection to {}", node.short()), actions);
        self.give_up_work_of(node, actions);
    }

    pub(crate) fn unreachable(&mut self, from: NodeId, node: NodeId, _actions: &mut Vec<Action>) {
        // A neighbour's report alone proves little: the two may just not reach each other, and
        // feeders route around that. It only shortens the wait for a node that is silent anyway.
        let now = self.now;
        if let Some(member) = self.members.get_mut(&node)
            && node != from
            && now.since(member.heard) > limits::HEARTBEAT_EVERY * 3
        {
            member.suspect = true;
        }
    }

    /// What a node's links carry; printable and short, whatever it says.
    pub(crate) fn traffic(&mut self, node: NodeId, links: String, sent_per_second: f64) {
        if let Some(member) = self.members.get_mut(&node) {
            member.links = links.chars().filter(|c| c.is_ascii_graphic() || *c == ' ').take(limits::LINK_KIND_BYTES_MAX).collect();
            member.sent_per_second = if sent_per_second.is_finite() { sent_per_second.max(0.0) } else { 0.0 };
        }
    }

    pub(crate) fn leaving(&mut self, node: NodeId, actions: &mut Vec<Action>) {
        if let Some(member) = self.members.get_mut(&node)
            && !member.leaving
        {
            member.leaving = true;
            self.report(format!("{} is leaving", node.short()), actions);
            self.publish_placement(actions);
        }
        self.release_leavers(actions);
    }

    /// A leaver goes when nothing needs its sums: between two steps, or at once if it holds none.
    pub(crate) fn release_leavers(&mut self, actions: &mut Vec<Action>) {
        let holds_sums = |node: NodeId| self.open.as_ref().is_some_and(|open| !open.ledger.sums_of(node).0.is_empty());
        let released: Vec<NodeId> =
            self.members.iter().filter(|(node, member)| member.leaving && member.connected && !holds_sums(**node)).map(|(node, _)| *node).collect();
        for node in released {
            // While a committed step is not safe everywhere, whoever goes may take its result along.
            let others_live = self.members.iter().any(|(other, member)| *other != node && member.is_live());
            if self.closing.is_some() && self.phase == Phase::Training && others_live && self.placement.seat(node).is_some() {
                continue;
            }
            let alone = self.placement.seat(node).is_some_and(|seat| {
                seat.standing == Standing::Active
                    && seat.span.blocks().any(|block| self.placement.replicas(block).filter(|other| other.node != node && !other.suspect).count() == 0)
            });
            // The only replica of a block takes the run's state with it; it goes when someone else has it.
            if alone && self.phase == Phase::Training && others_live {
                continue;
            }
            if self.placement.seat(node).is_some() {
                self.unseat(node, actions);
            }
            actions.push(Action::Disconnect(node));
        }
    }

    /// Looks for silence.
    pub(crate) fn tick(&mut self, actions: &mut Vec<Action>) {
        let mut suspects = Vec::new();
        let mut given_up = Vec::new();
        let mut gone = Vec::new();
        // Nothing else is waited for then (rule 18).
        let all_sealed = self.open.as_ref().is_some_and(|open| open.groups.len() == self.structure.groups.len());
        for (node, member) in self.members.iter_mut().filter(|(_, member)| member.present) {
            let silence = self.now.since(member.heard);
            if silence > limits::LEASE {
                gone.push(*node);
            } else if member.suspect && (all_sealed || silence > limits::SUSPECT_AFTER * SILENCE_BEFORE_VOID) {
                given_up.push(*node);
            } else if silence > limits::SUSPECT_AFTER && !member.suspect {
                member.suspect = true;
                suspects.push(*node);
            }
        }
        for node in suspects {
            self.report(format!("{} is silent", node.short()), actions);
            // Work in flight goes elsewhere at once; its sums wait a while for it to come back.
            self.leases.return_all_of(node);
            self.return_leases_through(node);
            self.publish_placement(actions);
        }
        for node in given_up {
            self.give_up_work_of(node, actions);
        }
        for node in gone {
            actions.push(Action::Disconnect(node));
            self.give_up_work_of(node, actions);
            self.remove_member(node, "is gone", actions);
        }
        self.recovery_deadline(actions);
        self.insist_on_last_checkpoint(actions);
        self.expire_leases();
        self.release_leavers(actions);
        self.go_back_if_lost(actions);
    }

    fn remove_member(&mut self, node: NodeId, what: &str, actions: &mut Vec<Action>) {
        if let Some(member) = self.members.remove(&node)
            && member.role == Role::Worker
        {
            actions.push(Action::Save(vec![Record::Gone { node }]));
            self.report(format!("{} {what}", node.short()), actions);
        }
        if self.placement.seat(node).is_some() {
            self.unseat(node, actions);
        }
    }

    /// Everything that waits for `node` goes elsewhere (rule 18).
    fn give_up_work_of(&mut self, node: NodeId, actions: &mut Vec<Action>) {
        if self.placement.seat(node).is_none() {
            return;
        }
        let again = self.members.get_mut(&node).is_some_and(|member| std::mem::replace(&mut member.given_up, true));
        if !again {
            self.return_leases_through(node);
        }
        self.leases.return_all_of(node);
        // Both: what it owns of a reduction need not be where its sums are.
        let was_needed = [self.void_sums_of(node, actions), self.reseal_without(node)];
        if was_needed.contains(&true) {
            self.publish_placement(actions);
        }
    }

    fn peers(&self) -> Vec<Peer> {
        self.members
            .iter()
            .filter(|(_, member)| member.present)
            .map(|(node, member)| Peer { node: *node, addresses: member.addresses.clone(), has_data: member.has_data })
            .collect()
    }

    fn broadcast_peers(&self, actions: &mut Vec<Action>) {
        self.broadcast(&FromCoordinator::Peers(self.peers()), actions);
    }
}
