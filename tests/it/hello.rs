//! The coordinator by itself: what it makes of a hello.

use std::sync::Arc;

use skein_coordinator::machine::{Action, Coordinator, Event};
use skein_node::engine::toy;
use skein_protocol::id::{Attempt, Fence, Group, Hash, Microbatch, NodeId, Step, SumId, Timeline, Version};
use skein_protocol::message::VERSIONS;
use skein_protocol::message::control::{Capability, Done, FromCoordinator, Hello, Role, SumReport, ToCoordinator};
use skein_protocol::sign::NullSigner;
use skein_protocol::time::Time;

const NODE: NodeId = NodeId([1; 32]);
const FENCE: Fence = Fence { timeline: Timeline(1), step: Step(0) };

/// A coordinator with one node that hosts everything.
struct Bench {
    coordinator: Coordinator,
    groups: Vec<Group>,
    uses: usize,
}

impl Bench {
    fn new() -> Self {
        let config = toy::config(2, false, 2, 10);
        let structure = toy::structure(&config);
        let (groups, uses) = (structure.group_ids().collect(), structure.uses.len());
        let coordinator = Coordinator::new(config, structure, NodeId([9; 32]), Arc::new(NullSigner), 1, Vec::new());
        let mut bench = Self { coordinator, groups, uses };
        bench.handle(Event::Connected(NODE));
        bench.hear(ToCoordinator::Hello(Box::new(bench.hello(Vec::new()))));
        let span = skein_protocol::id::Span::new(0, 4);
        bench.hear(ToCoordinator::Ready { timeline: Timeline(1), span, version: Version(0) });
        bench
    }

    /// The hello of a node that has state, once the run has begun, and these sums.
    fn hello(&self, sums: Vec<SumReport>) -> Hello {
        let begun = !sums.is_empty() || self.coordinator.status(Time(1)).timeline > 0;
        Hello {
            versions: VERSIONS,
            run: None,
            role: Role::Worker,
            capability: Capability { flops: 1e9, memory: 1 << 30, compute_share: 1.0, fingerprint: Hash::default() },
            data_addresses: Vec::new(),
            data: None,
            timeline: Timeline(u32::from(begun)),
            span: begun.then(|| skein_protocol::id::Span::new(0, 4)),
            versions_held: self.groups.iter().map(|group| (*group, Version(0))).filter(|_| begun).collect(),
            sums,
            shards: Vec::new(),
            commits: Vec::new(),
        }
    }

    fn handle(&mut self, event: Event) -> Vec<FromCoordinator> {
        let mut actions = Vec::new();
        self.coordinator.handle(Time(1), event, &mut actions);
        actions.into_iter().filter_map(|action| if let Action::Send { message, .. } = action { Some(message) } else { None }).collect()
    }

    fn hear(&mut self, message: ToCoordinator) -> Vec<FromCoordinator> {
        self.handle(Event::Received { from: NODE, message })
    }

    /// Everything of microbatch 0 is counted, one sum a group.
    fn report(&mut self) {
        let sums = self.groups.iter().map(|group| (*group, sum(*group))).collect();
        let done = Done { microbatch: Microbatch(0), attempt: Attempt::default(), uses: (0..self.uses).collect(), sums, loss: None };
        let said = self.hear(ToCoordinator::Done { fence: FENCE, entries: vec![done] });
        let counted = said.iter().any(|message| matches!(message, FromCoordinator::Counted { verdicts, .. } if verdicts[0].counted.len() == self.uses));
        assert!(counted, "{said:?}");
    }

    /// The node dials anew, before its old connection is missed, and lists these sums; what it is asked to do then.
    fn comes_back_with(&mut self, groups: &[Group]) -> Vec<(Microbatch, usize)> {
        let report = |group: &Group| SumReport { sum: sum(*group), step: Step(0), group: *group, counted: Vec::new(), losses: Vec::new() };
        let hello = self.hello(groups.iter().map(report).collect());
        self.handle(Event::Connected(NODE));
        let said = self.hear(ToCoordinator::Hello(Box::new(hello)));
        let grants = said.iter().filter_map(|message| if let FromCoordinator::Lease { grants, .. } = message { Some(grants) } else { None });
        grants.flatten().map(|grant| (grant.microbatch, grant.mask.len())).collect()
    }
}

fn sum(group: Group) -> SumId {
    SumId { boot: 1, count: u64::from(group.0) + 1 }
}

/// Rule 4: what a node does not list any more is void, and only that is computed again.
#[test]
fn sums_that_a_node_does_not_list_are_computed_again() {
    let mut bench = Bench::new();
    bench.report();
    let all = bench.groups.clone();
    assert_eq!(bench.comes_back_with(&all), [], "all is there");
    let asked = bench.comes_back_with(&all[1..]);
    assert!(asked.contains(&(Microbatch(0), 1)), "the one use whose sum is gone is asked for: {asked:?}");
}
