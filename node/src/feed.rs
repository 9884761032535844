//! The feeder: follows each leased microbatch to its end.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use skein_protocol::id::{Attempt, Block, Fence, Microbatch, NodeId, Span};
use skein_protocol::message::control::{Grant, ToCoordinator};
use skein_protocol::message::data::{Frame, Hop, PeerMessage, Route, WorkId};
use skein_protocol::time::Time;

use crate::machine::{Action, Node};
use crate::route::{Candidate, LeastCompletion, RoutePolicy};

/// The feeder's microbatches of the open step.
pub(crate) struct Feed {
    fence: Fence,
    flights: BTreeMap<Microbatch, Flight>,
    policy: Box<dyn RoutePolicy>,
    /// When flights without a way are tried again.
    again: Option<Time>,
}

/// A host that failed may do better after so long, if there is no other.
const AGAIN_AFTER: Duration = Duration::from_millis(250);

/// One leased microbatch.
struct Flight {
    grant: Grant,
    retry: u32,
    /// The way it goes; none while there is no host for some block.
    route: Option<Route>,
    /// Hosts that failed it.
    avoid: BTreeSet<NodeId>,
}

impl Default for Feed {
    fn default() -> Self {
        Self { fence: Fence::default(), flights: BTreeMap::new(), policy: Box::new(LeastCompletion), again: None }
    }
}

impl Feed {
    pub(crate) fn clear(&mut self) {
        self.flights.clear();
        self.again = None;
    }

    pub(crate) fn next_timeout(&self) -> Option<Time> {
        self.again
    }

    fn in_flight(&self, node: NodeId) -> usize {
        self.flights.values().filter_map(|flight| flight.route.as_ref()).filter(|route| route.hops.iter().any(|hop| hop.node == node)).count()
    }
}

impl Node {
    /// Microbatches for this feeder. A newer lease of the same microbatch replaces the older one.
    pub(crate) fn leased(&mut self, fence: Fence, grants: Vec<Grant>, actions: &mut Vec<Action>) {
        if !self.is_current(fence) || fence < self.feed.fence {
            return;
        }
        if fence != self.feed.fence {
            self.feed.flights.clear();
            self.feed.fence = fence;
        }
        for grant in grants {
            let microbatch = grant.microbatch;
            if self.feed.flights.get(&microbatch).is_some_and(|flight| flight.grant.lease >= grant.lease) {
                continue;
            }
            self.feed.flights.insert(microbatch, Flight { grant, retry: 0, route: None, avoid: BTreeSet::new() });
            self.launch(microbatch, actions);
        }
    }

    /// Chooses a route and sends the microbatch on its way; it waits if some block has no host.
    fn launch(&mut self, microbatch: Microbatch, actions: &mut Vec<Action>) {
        let Some(route) = self.choose_route(microbatch) else {
            if let Some(flight) = self.feed.flights.get_mut(&microbatch) {
                flight.route = None;
                // Whoever failed it may do better next time.
                flight.avoid.clear();
            }
            let again = self.now + AGAIN_AFTER;
            self.feed.again.get_or_insert(again);
            return;
        };
        let fence = self.feed.fence;
        let Some(flight) = self.feed.flights.get_mut(&microbatch) else { return };
        let work = WorkId { fence, microbatch, attempt: Attempt { lease: flight.grant.lease, retry: flight.retry } };
        let first = route.hops[0].node;
        let message = PeerMessage::Forward { work, mask: flight.grant.mask.clone(), route: route.clone(), hop: 0 };
        flight.route = Some(route);
        self.send(first, Frame::from(message), actions);
    }

    fn choose_route(&mut self, microbatch: Microbatch) -> Option<Route> {
        let structure = &self.run.as_ref()?.structure;
        let flight = self.feed.flights.get(&microbatch)?;
        let blocks = u16::try_from(structure.blocks()).expect("checked when built");
        // Feeders know nothing of each other's flights: an order of its own for each keeps them from
        // all favouring the same host.
        let turn = self.placement.replicas(Block(0)).position(|seat| seat.node == self.settings.id).unwrap_or(0);
        let mut hops: Vec<Hop> = Vec::new();
        let mut block = Block(0);
        while block.0 < blocks {
            let mut usable: Vec<_> = self.placement.replicas(block).filter(|seat| !seat.suspect && !flight.avoid.contains(&seat.node)).collect();
            let first = turn.checked_rem(usable.len())?;
            usable.rotate_left(first);
            // Whoever computed these blocks before may still hold what came of it: where its
            // count stands, nothing is computed again.
            let held = flight.grant.holders.iter().find(|(span, node)| {
                span.first == block
                    && structure.uses_of(*span).is_disjoint(&flight.grant.mask)
                    && usable.iter().any(|seat| seat.node == *node && seat.span.end >= span.end)
            });
            let hop = if let Some((span, node)) = held {
                Hop { node: *node, span: *span }
            } else if let Some(seat) = usable.iter().find(|seat| block.0 == 0 && seat.node == self.settings.id) {
                // The feeder's own first span costs no hop.
                Hop { node: seat.node, span: Span { first: block, end: seat.span.end } }
            } else {
                let candidates: Vec<Candidate> =
                    usable.iter().map(|seat| Candidate { node: seat.node, rate: f64::from(seat.rate), in_flight: self.feed.in_flight(seat.node) }).collect();
                let seat = usable[self.feed.policy.choose(&candidates)];
                Hop { node: seat.node, span: Span { first: block, end: seat.span.end } }
            };
            block = hop.span.end;
            hops.push(hop);
        }
        Some(Route { feeder: self.settings.id, hops, last: flight.grant.last })
    }

    /// Flights that found no way try again.
    pub(crate) fn feed_timers(&mut self, actions: &mut Vec<Action>) {
        if self.feed.again.is_some_and(|again| again <= self.now) {
            self.feed.again = None;
            self.feed_replaced(actions);
        }
    }

    /// The first hop says that the backward pass has come through.
    pub(crate) fn flight_finished(&mut self, from: NodeId, work: WorkId) {
        if work.fence != self.feed.fence {
            return;
        }
        let finished = self
            .feed
            .flights
            .get(&work.microbatch)
            .is_some_and(|flight| flight.attempt() == work.attempt && flight.route.as_ref().is_some_and(|route| route.hops[0].node == from));
        if finished {
            self.feed.flights.remove(&work.microbatch);
        }
    }

    /// A hop cannot be reached or refuses: only what it would have done is done again, since all
    /// other hosts still hold what came of their hop.
    pub(crate) fn hop_failed(&mut self, work: WorkId, hop: u16, actions: &mut Vec<Action>) {
        if work.fence != self.feed.fence {
            return;
        }
        let Some(flight) = self.feed.flights.get_mut(&work.microbatch) else {
            // It came through, and something was lost behind it all the same.
            if self.session.welcomed {
                actions.push(Action::Tell(ToCoordinator::Returned { fence: work.fence, leases: vec![(work.microbatch, work.attempt)] }));
            }
            return;
        };
        if flight.attempt() != work.attempt {
            return;
        }
        if let Some(hop) = flight.route.as_ref().and_then(|route| route.hops.get(usize::from(hop))) {
            flight.avoid.insert(hop.node);
        }
        flight.retry += 1;
        self.launch(work.microbatch, actions);
    }

    /// Every flight through `node` takes another way.
    pub(crate) fn feed_avoid(&mut self, node: NodeId, actions: &mut Vec<Action>) {
        let affected: Vec<Microbatch> = self
            .feed
            .flights
            .iter()
            .filter(|(_, flight)| flight.route.as_ref().is_some_and(|route| route.hops.iter().any(|hop| hop.node == node)))
            .map(|(microbatch, _)| *microbatch)
            .collect();
        for microbatch in affected {
            if let Some(flight) = self.feed.flights.get_mut(&microbatch) {
                flight.avoid.insert(node);
                flight.retry += 1;
            }
            self.launch(microbatch, actions);
        }
    }

    /// A new placement: flights through nodes that are gone or suspect take another way, flights
    /// that waited for a host may have one.
    pub(crate) fn feed_replaced(&mut self, actions: &mut Vec<Action>) {
        let usable = |hop: &Hop| self.placement.replicas(hop.span.first).any(|seat| seat.node == hop.node && seat.span.end >= hop.span.end && !seat.suspect);
        let affected: Vec<Microbatch> = self
            .feed
            .flights
            .iter()
            .filter(|(_, flight)| flight.route.as_ref().is_none_or(|route| !route.hops.iter().all(usable)))
            .map(|(microbatch, _)| *microbatch)
            .collect();
        for microbatch in affected {
            if let Some(flight) = self.feed.flights.get_mut(&microbatch) {
                flight.retry += 1;
            }
            self.launch(microbatch, actions);
        }
    }
}

impl Flight {
    fn attempt(&self) -> Attempt {
        Attempt { lease: self.grant.lease, retry: self.retry }
    }
}
