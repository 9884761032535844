//! Who routes which microbatch. Leases only advise: what counts is the ledger's to say.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use skein_protocol::id::{Attempt, Block, Fence, Microbatch, NodeId};
use skein_protocol::limits;
use skein_protocol::message::control::{FromCoordinator, Grant};
use skein_protocol::placement::Standing;
use skein_protocol::set::BitSet;
use skein_protocol::time::Time;

use crate::ledger::StepLedger;
use crate::machine::{Action, Coordinator, Phase};

/// A lease ends without a result after so many times the usual duration of one.
const PATIENCE: u32 = 10;

/// The leases of the open step.
#[derive(Debug)]
pub(crate) struct Leases {
    /// Microbatches that miss counts and that nobody routes.
    queue: BTreeSet<Microbatch>,
    held: BTreeMap<Microbatch, Lease>,
    number: u32,
    /// How long a lease usually takes: rises at once, forgets slowly. None before the first is done.
    usual: Option<Duration>,
}

/// How long a lease may take before any has shown how long it takes.
const UNKNOWN: Duration = Duration::from_secs(30);

#[derive(Debug)]
struct Lease {
    feeder: NodeId,
    mask: BitSet,
    since: Time,
}

impl Leases {
    pub(crate) fn new() -> Self {
        Self { queue: BTreeSet::new(), held: BTreeMap::new(), number: 0, usual: None }
    }

    /// Begins a step. Lease numbers go on rising, from at least `base`: the newest lease wins.
    pub(crate) fn reset(&mut self, ledger: &StepLedger, microbatches: u32, base: u32) {
        self.held.clear();
        self.queue.clear();
        self.number = self.number.max(base);
        self.requeue(ledger, microbatches);
    }

    /// Puts every microbatch that misses counts and is not leased into the queue.
    pub(crate) fn requeue(&mut self, ledger: &StepLedger, microbatches: u32) {
        for microbatch in (0..microbatches).map(Microbatch) {
            if !self.held.contains_key(&microbatch) && !ledger.missing(microbatch).is_empty() {
                self.queue.insert(microbatch);
            }
        }
    }

    /// Ends the lease of a microbatch if all it was for is counted; who held it.
    pub(crate) fn settle(&mut self, microbatch: Microbatch, ledger: &StepLedger, now: Time) -> Option<NodeId> {
        let missing = ledger.missing(microbatch);
        if missing.is_empty() {
            self.queue.remove(&microbatch);
        }
        let lease = self.held.get(&microbatch)?;
        if !lease.mask.is_disjoint(&missing) {
            return None;
        }
        let took = now.since(lease.since);
        self.usual = Some(self.usual.map_or(took, |usual| took.max(usual * 15 / 16)));
        let feeder = lease.feeder;
        self.held.remove(&microbatch);
        if !missing.is_empty() {
            self.queue.insert(microbatch);
        }
        Some(feeder)
    }

    /// Takes back what `feeder` holds.
    pub(crate) fn return_all_of(&mut self, feeder: NodeId) {
        let returned: Vec<Microbatch> = self.held.iter().filter(|(_, lease)| lease.feeder == feeder).map(|(microbatch, _)| *microbatch).collect();
        for microbatch in returned {
            self.held.remove(&microbatch);
            self.queue.insert(microbatch);
        }
    }

    /// Takes back what misses counts of `uses`: their host is gone, perhaps after its feeder saw the
    /// microbatch come through.
    pub(crate) fn return_missing(&mut self, uses: &BitSet, ledger: &StepLedger) {
        let returned: Vec<Microbatch> = self.held.keys().filter(|microbatch| !ledger.missing(**microbatch).is_disjoint(uses)).copied().collect();
        for microbatch in returned {
            self.held.remove(&microbatch);
            self.queue.insert(microbatch);
        }
    }

    /// Takes back the leases of microbatches whose counts are lost.
    pub(crate) fn take_back(&mut self, microbatches: &BitSet) {
        self.held.retain(|microbatch, _| !microbatches.contains(microbatch.0 as usize));
    }

    fn return_one(&mut self, feeder: NodeId, microbatch: Microbatch) {
        if self.held.get(&microbatch).is_some_and(|lease| lease.feeder == feeder) {
            self.held.remove(&microbatch);
            self.queue.insert(microbatch);
        }
    }

    fn held_by(&self, feeder: NodeId) -> usize {
        self.held.values().filter(|lease| lease.feeder == feeder).count()
    }
}

/// A node that may feed, and how fast it is.
struct Feeder {
    node: NodeId,
    held: usize,
    /// Microbatches a second; 0 if unknown.
    rate: f64,
}

impl Coordinator {
    /// The feeder cannot or will not go on with these.
    pub(crate) fn returned(&mut self, from: NodeId, fence: Fence, leases: &[(Microbatch, Attempt)]) {
        if self.open.as_ref().is_some_and(|open| open.ledger.fence() == fence) {
            for (microbatch, _) in leases {
                self.leases.return_one(from, *microbatch);
            }
        }
    }

    pub(crate) fn expire_leases(&mut self) {
        let patience = (self.leases.usual.unwrap_or(UNKNOWN) * PATIENCE).max(limits::LEASE);
        let expired: Vec<(NodeId, Microbatch)> = self
            .leases
            .held
            .iter()
            .filter(|(_, lease)| self.now.since(lease.since) > patience)
            .map(|(microbatch, lease)| (lease.feeder, *microbatch))
            .collect();
        for (feeder, microbatch) in expired {
            self.leases.return_one(feeder, microbatch);
        }
    }

    /// Keeps every feeder's hands full, in proportion to its speed.
    pub(crate) fn grant_leases(&mut self, actions: &mut Vec<Action>) {
        if self.phase != Phase::Training || !self.is_covered_live() {
            return;
        }
        let Some(open) = &self.open else { return };
        let window = self.hops() + 1;
        let feeders = self.feeders().len();
        let mut grants: BTreeMap<NodeId, Vec<Grant>> = BTreeMap::new();
        while !self.leases.queue.is_empty() {
            let Some(feeder) = self.next_feeder(window) else { break };
            let microbatch = self.leases.queue.pop_first().expect("checked");
            let mask = open.ledger.missing(microbatch);
            if mask.is_empty() {
                continue;
            }
            self.leases.number += 1;
            let grant = Grant {
                microbatch,
                lease: self.leases.number,
                mask: mask.clone(),
                holders: open.ledger.holders(microbatch),
                last: self.leases.queue.len() < feeders,
            };
            self.leases.held.insert(microbatch, Lease { feeder, mask, since: self.now });
            grants.entry(feeder).or_default().push(grant);
        }
        let fence = open.ledger.fence();
        for (node, grants) in grants {
            actions.push(Action::Send { to: node, message: FromCoordinator::Lease { fence, grants } });
        }
    }

    /// The feeder with a free hand that would finish one more microbatch first, unless the others
    /// would be done with everything before it (then it had better not start).
    fn next_feeder(&self, window: usize) -> Option<NodeId> {
        let feeders = self.feeders();
        let known: Vec<f64> = feeders.iter().map(|feeder| feeder.rate).filter(|rate| *rate > 0.0).collect();
        let typical = if known.is_empty() { 1.0 } else { known.iter().sum::<f64>() / known.len() as f64 };
        let rate = |feeder: &Feeder| if feeder.rate > 0.0 { feeder.rate } else { typical };
        let finish = |feeder: &Feeder| (feeder.held + 1) as f64 / rate(feeder);
        let best = feeders.iter().filter(|feeder| feeder.held < window).min_by(|a, b| finish(a).total_cmp(&finish(b)))?;
        let others: f64 = feeders.iter().filter(|feeder| feeder.node != best.node).map(rate).sum();
        let work: usize = feeders.iter().filter(|feeder| feeder.node != best.node).map(|feeder| feeder.held).sum();
        let others_finish = (work + self.leases.queue.len()) as f64 / others;
        (others == 0.0 || finish(best) <= others_finish + 1.0 / typical).then_some(best.node)
    }

    fn feeders(&self) -> Vec<Feeder> {
        self.placement
            .replicas(Block(0))
            .filter(|seat| !seat.suspect && self.members.get(&seat.node).is_some_and(super::membership::Member::is_live))
            .map(|seat| Feeder { node: seat.node, held: self.leases.held_by(seat.node), rate: self.members[&seat.node].work.feed_rate() })
            .collect()
    }

    /// How many hops a route has at least.
    pub(crate) fn hops(&self) -> usize {
        let blocks = self.structure.blocks();
        let mut block = 0;
        let mut hops = 0;
        while block < blocks {
            let here = Block(u16::try_from(block).expect("below the number of blocks"));
            let furthest = self.placement.replicas(here).filter(|seat| seat.standing == Standing::Active).map(|seat| usize::from(seat.span.end.0)).max();
            match furthest {
                Some(end) => block = end,
                None => return hops.max(1),
            }
            hops += 1;
        }
        hops.max(1)
    }
}
