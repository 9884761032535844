//! The machine by itself: what it does with words that come late, in another order, or never.

use skein_protocol::id::{Microbatch, SumId};
use skein_protocol::message::control::{Commit, Done, Grant, Scalars, Verdict, Welcome};
use skein_protocol::placement::{Seat, Standing};
use skein_protocol::set::BitSet;
use skein_protocol::sign::NullSigner;

use super::*;
use crate::engine::Engine;
use crate::engine::core::Core;
use crate::engine::toy::{self, Toy};

const COORDINATOR: NodeId = NodeId([9; 32]);
const SELF: NodeId = NodeId([1; 32]);
const MEMORY: u64 = 1 << 30;

/// A node alone in its run, with its engine: whatever is to be computed is computed at once.
struct Alone {
    node: Node,
    engine: Core<Toy>,
    config: RunConfig,
    epoch: u64,
    /// Why it wants to end, if it does.
    exit: Option<String>,
}

impl Alone {
    /// A node that hosts the whole model at version 0, in a step of one microbatch.
    fn seated() -> Self {
        let config = toy::config(2, true, 1, 10);
        let settings = NodeSettings {
            id: SELF,
            coordinator: COORDINATOR,
            signer: Arc::new(NullSigner),
            capability: Capability { flops: 1e9, memory: MEMORY, compute_share: 1.0, fingerprint: Hash::default() },
            data_addresses: Vec::new(),
            data: None,
            run: None,
            shards: Vec::new(),
            boot: 1,
            structure: Some(toy::structure(&config)),
        };
        let mut alone = Self { node: Node::new(settings), engine: toy::engine(&config), config, epoch: 0, exit: None };
        alone.handle(Event::Timer);
        alone.handle(Event::ControlUp);
        let placement = alone.placement(Standing::Joining { from: Version(0) });
        let said = alone.welcome(placement, Vec::new());
        assert!(said.iter().any(|message| matches!(message, ToCoordinator::Ready { .. })), "{said:?}");
        let placement = alone.placement(Standing::Active);
        alone.handle(Event::Control(FromCoordinator::Placement(Box::new(placement))));
        alone
    }

    /// The coordinator's answer to a hello: nothing is committed, these sums are live.
    fn welcome(&mut self, placement: Placement, live_sums: Vec<SumId>) -> Vec<ToCoordinator> {
        let welcome = Welcome {
            version: 1,
            run: self.config.run_id(COORDINATOR),
            config: self.config.to_toml(),
            placement,
            step: Step(0),
            peers: Vec::new(),
            commits: Vec::new(),
            live_sums,
            retired: None,
            checkpoint: None,
        };
        self.handle(Event::Control(FromCoordinator::Welcome(Box::new(welcome))))
    }

    fn placement(&mut self, standing: Standing) -> Placement {
        self.epoch += 1;
        let seat = Seat { node: SELF, span: self.engine.structure().whole(), standing, suspect: false, rate: 0.0 };
        Placement { epoch: skein_protocol::id::Epoch(self.epoch), timeline: Timeline(1), base: Version(0), sources: Vec::new(), seats: vec![seat] }
    }

    /// What the node tells the coordinator upon an event and all that its engine answers.
    fn handle(&mut self, event: Event) -> Vec<ToCoordinator> {
        let (mut events, mut said) = (VecDeque::from([event]), Vec::new());
        while let Some(event) = events.pop_front() {
            let mut actions = Vec::new();
            self.node.handle(Time(1), event, &mut actions);
            for action in actions {
                match action {
                    Action::Compute(task) => events.push_back(Event::Computed(self.engine.run(task))),
                    Action::Tell(message) => said.push(message),
                    Action::Exit { reason, .. } => self.exit = Some(reason),
                    Action::Connect
                    | Action::Send { .. }
                    | Action::Peers(_)
                    | Action::SaveShard { .. }
                    | Action::LoadShard { .. }
                    | Action::PruneShards { .. }
                    | Action::Report(_) => {}
                }
            }
        }
        said
    }

    fn fence(&self) -> Fence {
        Fence { timeline: Timeline(1), step: Step(0) }
    }

    /// Gives the node the step's microbatch; its report.
    fn lease(&mut self) -> Done {
        self.lease_of(self.uses())
    }

    /// The same for some uses only, as after others were lost.
    fn lease_of(&mut self, mask: BitSet) -> Done {
        let grants = vec![Grant { microbatch: Microbatch(0), lease: 1, mask, holders: Vec::new(), last: true }];
        let said = self.handle(Event::Control(FromCoordinator::Lease { fence: self.fence(), grants }));
        only_report(&said)
    }

    fn uses(&self) -> BitSet {
        (0..self.engine.structure().uses.len()).collect()
    }

    fn answer(&mut self, done: &Done, counted: BitSet, dropped: BitSet) -> Vec<ToCoordinator> {
        let verdicts = vec![Verdict { microbatch: done.microbatch, sums: done.sums.clone(), counted, dropped }];
        self.handle(Event::Control(FromCoordinator::Counted { fence: self.fence(), verdicts }))
    }

    /// How many gradients are in these sums, and whether any is there twice.
    fn added(&self, done: &Done) -> (usize, bool) {
        let counts: Vec<u32> = done.sums.iter().flat_map(|(_, sum)| self.engine.contributions(*sum).into_values()).collect();
        (counts.len(), counts.iter().any(|count| *count != 1))
    }
}

fn only_report(said: &[ToCoordinator]) -> Done {
    let reports: Vec<&Done> =
        said.iter().filter_map(|message| if let ToCoordinator::Done { entries, .. } = message { Some(entries) } else { None }).flatten().collect();
    assert_eq!(reports.len(), 1, "{said:?}");
    reports[0].clone()
}

/// Rules 2 and 4: what a void sum was told belongs to that sum, whenever it arrives.
#[test]
fn a_late_verdict_on_a_void_sum_takes_nothing_from_the_next_report() {
    let mut alone = Alone::seated();
    let first = alone.lease();
    let void: Vec<SumId> = first.sums.iter().map(|(_, sum)| *sum).collect();
    let said = alone.handle(Event::Control(FromCoordinator::Void { fence: alone.fence(), sums: void }));
    let second = only_report(&said);
    assert!(second.sums.iter().all(|sum| !first.sums.contains(sum)), "ids of sums are never used again");
    alone.answer(&first, BitSet::new(), alone.uses());
    alone.answer(&second, alone.uses(), BitSet::new());
    assert_eq!(alone.added(&second), (alone.uses().len(), false));
    assert_eq!(alone.added(&first), (0, false));
}

/// Rule 5: what is done again is reported for the uses that miss it and for no other.
#[test]
fn redo_is_for_the_uses_that_miss_it() {
    let mut alone = Alone::seated();
    let missing: BitSet = [1, 3].into_iter().collect();
    assert_eq!(alone.lease_of(missing.clone()).uses, missing);
}

/// Rule 7: what was not answered when the connection went is reported again, under the sums it was.
#[test]
fn reports_are_made_again_after_a_reconnection() {
    let mut alone = Alone::seated();
    let first = alone.lease();
    alone.handle(Event::ControlDown { reason: "a reset".to_owned() });
    alone.handle(Event::ControlUp);
    let placement = alone.placement(Standing::Active);
    let live = first.sums.iter().map(|(_, sum)| *sum).collect();
    assert_eq!(only_report(&alone.welcome(placement, live)), first);
}

/// Rule 16: a coordinator whose commits fork is not obeyed.
#[test]
fn a_commit_that_forks_the_chain_is_refused() {
    let commit = |step, previous| Commit {
        fence: Fence { timeline: Timeline(1), step: Step(step) },
        previous,
        groups: Vec::new(),
        scalars: Scalars::default(),
        loss: 0.0,
        signature: Vec::new(),
    };
    let (first, other) = (commit(0, Hash::default()), commit(0, Hash([7; 32])));
    for (previous, refused) in [(first.hash(), false), (other.hash(), true)] {
        let mut alone = Alone::seated();
        alone.handle(Event::Control(FromCoordinator::Commit(Box::new(first.clone()))));
        alone.handle(Event::Control(FromCoordinator::Commit(Box::new(commit(1, previous)))));
        assert_eq!(alone.exit.as_ref().is_some_and(|reason| reason.contains("does not extend the chain")), refused, "{:?}", alone.exit);
    }
}

/// Rule 3: a verdict that comes twice adds once, one that drops adds nothing.
#[test]
fn a_verdict_adds_once_however_often_it_comes() {
    let mut alone = Alone::seated();
    let done = alone.lease();
    let tied: BitSet = [0].into_iter().collect();
    for _ in 0..2 {
        alone.answer(&done, alone.uses().difference(&tied), BitSet::new());
    }
    assert_eq!(alone.added(&done), (alone.uses().len() - 1, false));
    alone.answer(&done, BitSet::new(), tied.clone());
    alone.answer(&done, tied, BitSet::new());
    assert_eq!(alone.added(&done), (alone.uses().len() - 1, false), "what was dropped is gone");
}

/// A device without room for its span ends in an offer of less memory, not in the same failure again.
#[test]
fn a_node_whose_span_does_not_fit_comes_back_with_less_memory() {
    let mut alone = Alone::seated();
    let mut actions = Vec::new();
    let mask = alone.uses();
    let grants = vec![Grant { microbatch: Microbatch(0), lease: 1, mask, holders: Vec::new(), last: false }];
    alone.node.handle(Time(1), Event::Control(FromCoordinator::Lease { fence: alone.fence(), grants }), &mut actions);
    let Some(Action::Compute(Task::Forward { key, .. })) = actions.iter().find(|action| matches!(action, Action::Compute(_))) else { panic!("{actions:?}") };
    let failed = Outcome::Failed { error: EngineError::OutOfMemory("16 GiB".to_owned()), about: About::Work(*key) };
    let mut actions = Vec::new();
    alone.node.handle(Time(1), Event::Computed(failed), &mut actions);
    assert!(actions.iter().any(|action| matches!(action, Action::Connect)), "{actions:?}");
    let said = alone.handle(Event::ControlUp);
    let Some(ToCoordinator::Hello(hello)) = said.first() else { panic!("{said:?}") };
    assert_eq!((hello.capability.memory, hello.span), (MEMORY / 4 * 3, None));
}
