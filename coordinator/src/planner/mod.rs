//! Who hosts what: a pure function of devices, model and wishes.
//!
//! Start at [`plan`]. It cuts the model into spans of nearly equal cost ([`spans`]), checks what
//! fits ([`memory`]), and deals devices to spans so that the tightest span is as fast as can be.
//! [`place_joiner`] finds a place for one more device while a run is going and nobody moves.
//! Links and the cost of moving are not weighed yet: more spans than needed are merely disliked.

mod assign;
pub mod memory;
pub mod spans;

use skein_protocol::config::{BatchSection, PlacementSection};
use skein_protocol::id::{Block, NodeId, Span};
use skein_protocol::model::Structure;

use assign::{Assignment, Demand, assign};
use memory::{human_bytes, span_bytes};

/// What a node offers.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Device {
    /// The node.
    pub node: NodeId,
    /// Sustained FLOP/s: measured, or claimed until it is measured.
    pub flops: f64,
    /// Bytes it lends.
    pub memory: u64,
}

/// Why there is no placement. One line for people, after `waiting for a host: `.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PlanError {
    /// Nobody is there.
    #[error("no node is here yet")]
    NoDevices,
    /// Fewer devices than spans.
    #[error("{spans} spans need as many nodes, {devices} here")]
    TooFewDevices {
        /// Spans wanted.
        spans: usize,
        /// Devices there are.
        devices: usize,
    },
    /// A span that no free device has room for.
    #[error("no host for blocks {span}: {} needed, largest free {}", human_bytes(*needed), human_bytes(*largest))]
    DoesNotFit {
        /// The blocks.
        span: Span,
        /// Bytes needed.
        needed: u64,
        /// Bytes that the largest device has which no larger span needs.
        largest: u64,
    },
}

/// Each further span costs a hop; until links are measured, it must pay at least so much.
const SPAN_DISLIKE: f64 = 0.9;

/// Assigns devices to spans: every block has a host, `wanted.replicas` of them as far as the
/// devices go, and the tightest span is as fast as can be. The answer is in the order of nodes;
/// devices that fit nowhere are not in it.
///
/// Nodes of `present` keep their spans and the others fill in, if that covers every block;
/// otherwise all are placed afresh. Pass an empty `present` to place all afresh at once.
pub fn plan(
    structure: &Structure,
    batch: &BatchSection,
    wanted: &PlacementSection,
    devices: &[Device],
    present: &[(NodeId, Span)],
) -> Result<Vec<(NodeId, Span)>, PlanError> {
    let mut devices: Vec<Device> = devices.iter().map(|device| Device { flops: usable(device.flops), ..*device }).collect();
    devices.sort_by_key(|device| device.node);
    devices.dedup_by_key(|device| device.node);
    if devices.is_empty() {
        return Err(PlanError::NoDevices);
    }
    if let Some(kept) = keep_and_fill(structure, batch, wanted, &devices, present) {
        return Ok(kept);
    }
    let demands = |spans: Vec<Span>| -> Vec<Demand> {
        let demand = |span| Demand { span, flops: structure.span_flops(span).max(1.0), bytes: span_bytes(structure, batch, span) };
        spans.into_iter().map(demand).collect()
    };
    let counts = if wanted.spans > 0 { wanted.spans..=wanted.spans } else { 1..=structure.blocks().min(devices.len()) };
    let mut best: Option<(Vec<Demand>, Assignment)> = None;
    let mut shortage = PlanError::NoDevices;
    for count in counts {
        if count > devices.len() {
            return Err(PlanError::TooFewDevices { spans: count, devices: devices.len() });
        }
        match cut_and_assign(structure, batch, count.min(structure.blocks()), &devices, wanted.replicas, &demands) {
            Ok(found) if best.as_ref().is_none_or(|old| better(&found, old, wanted.replicas)) => best = Some(found),
            Ok(_) => {}
            // The finest cut needs least: its shortage is what the user must mend.
            Err(error) => shortage = error,
        }
    }
    let (demands, assignment) = best.ok_or(shortage)?;
    Ok(devices.iter().zip(assignment.span_of).filter_map(|(device, span)| Some((device.node, demands[span?].span))).collect())
}

/// A span for one more device while everyone else stays: blocks without a host first, then the
/// span with too few replicas, then the slowest one relative to its cost; `None` if it fits none.
pub fn place_joiner(structure: &Structure, batch: &BatchSection, wanted: &PlacementSection, present: &[(Device, Span)], device: Device) -> Option<Span> {
    let fits = |span: Span| !span.is_empty() && device.memory >= span_bytes(structure, batch, span);
    let uncovered = uncovered(structure, present.iter().map(|(_, span)| *span));
    if let Some(gap) = uncovered.iter().find_map(|gap| longest_prefix(*gap, fits)) {
        return Some(gap);
    }
    let hosts = |block: Block| present.iter().filter(move |(_, span)| span.contains(block));
    let block_rate = |block: Block| hosts(block).map(|(host, span)| usable(host.flops) / structure.span_flops(*span).max(1.0)).sum::<f64>();
    let mut spans: Vec<Span> = present.iter().map(|(_, span)| *span).filter(|span| fits(*span)).collect();
    spans.sort_unstable();
    spans.dedup();
    let need = |span: Span| {
        let replicas = span.blocks().map(|block| hosts(block).count()).min().unwrap_or(0).min(wanted.replicas);
        (replicas, span.blocks().map(block_rate).fold(f64::INFINITY, f64::min))
    };
    spans.into_iter().map(|span| (need(span), span)).min_by(|(a, s), (b, t)| a.0.cmp(&b.0).then(a.1.total_cmp(&b.1)).then(s.cmp(t))).map(|(_, span)| span)
}

/// Microbatches a second of a device through a span, by its FLOP/s alone.
pub fn microbatch_rate(structure: &Structure, batch: &BatchSection, flops: f64, span: Span) -> f64 {
    usable(flops) / (structure.span_flops(span).max(1.0) * batch.tokens_per_microbatch().max(1) as f64)
}

/// The runs of blocks that none of the spans covers, ascending.
pub fn uncovered(structure: &Structure, spans: impl Iterator<Item = Span> + Clone) -> Vec<Span> {
    let mut gaps: Vec<Span> = Vec::new();
    for block in structure.whole().blocks().filter(|block| !spans.clone().any(|span| span.contains(*block))) {
        match gaps.last_mut() {
            Some(gap) if gap.end == block => gap.end = Block(block.0 + 1),
            Some(_) | None => gaps.push(Span { first: block, end: Block(block.0 + 1) }),
        }
    }
    gaps
}

/// Everyone at their present place and the others beside them, if that covers every block.
fn keep_and_fill(
    structure: &Structure,
    batch: &BatchSection,
    wanted: &PlacementSection,
    devices: &[Device],
    present: &[(NodeId, Span)],
) -> Option<Vec<(NodeId, Span)>> {
    let seat = |node: NodeId| present.iter().find(|(other, _)| *other == node).map(|(_, span)| *span);
    let mut placed: Vec<(Device, Span)> = devices.iter().filter_map(|device| Some((*device, seat(device.node)?))).collect();
    if placed.is_empty() {
        return None;
    }
    let mut joiners: Vec<Device> = devices.iter().filter(|device| seat(device.node).is_none()).copied().collect();
    joiners.sort_by(|a, b| b.flops.total_cmp(&a.flops).then(a.node.cmp(&b.node)));
    for joiner in joiners {
        if let Some(span) = place_joiner(structure, batch, wanted, &placed, joiner) {
            placed.push((joiner, span));
        }
    }
    let covered = uncovered(structure, placed.iter().map(|(_, span)| *span)).is_empty();
    let mut seats: Vec<(NodeId, Span)> = placed.into_iter().map(|(device, span)| (device.node, span)).collect();
    seats.sort_by_key(|(node, _)| *node);
    covered.then_some(seats)
}

/// The cut that is even in FLOP; if it does not fit, the one that is even in bytes.
fn cut_and_assign(
    structure: &Structure,
    batch: &BatchSection,
    count: usize,
    devices: &[Device],
    replicas: usize,
    demands: &impl Fn(Vec<Span>) -> Vec<Demand>,
) -> Result<(Vec<Demand>, Assignment), PlanError> {
    let by_flops = demands(spans::cut(&structure.flops_per_token, count));
    let first = assign(&by_flops, devices, replicas);
    if let Ok(assignment) = first {
        return Ok((by_flops, assignment));
    }
    let bytes: Vec<f64> = structure.whole().blocks().map(|block| span_bytes(structure, batch, Span::new(block.0, block.0 + 1)) as f64).collect();
    let by_bytes = demands(spans::cut(&bytes, count));
    let assignment = assign(&by_bytes, devices, replicas)?;
    Ok((by_bytes, assignment))
}

/// More replicas first (as far as wanted), then throughput, with fewer spans preferred.
fn better(new: &(Vec<Demand>, Assignment), old: &(Vec<Demand>, Assignment), replicas: usize) -> bool {
    let safe = |plan: &(Vec<Demand>, Assignment)| plan.1.replicas.min(replicas);
    let further = i32::try_from(new.0.len() - old.0.len()).unwrap_or(i32::MAX);
    safe(new).cmp(&safe(old)).then((new.1.throughput * SPAN_DISLIKE.powi(further)).total_cmp(&old.1.throughput)).is_gt()
}

fn longest_prefix(gap: Span, fits: impl Fn(Span) -> bool) -> Option<Span> {
    (gap.first.0 + 1..=gap.end.0).rev().map(|end| Span::new(gap.first.0, end)).find(|span| fits(*span))
}

/// A claim as a number to divide by: what a peer says may be anything.
fn usable(flops: f64) -> f64 {
    if flops.is_finite() { flops.clamp(1.0, 1e21) } else { 1.0 }
}

#[cfg(test)]
mod tests {
    use super::*;
    use skein_protocol::model::GroupLayout;

    const BATCH: BatchSection = BatchSection { microbatches: 8, sequences: 1, length: 16 };
    const GIB: u64 = 1 << 30;

    /// Blocks of equal cost in FLOP, and state of the given MiB.
    fn structure(mib: &[usize]) -> Structure {
        let groups = mib.iter().map(|mib| GroupLayout::new([("w".to_owned(), vec![mib * (1 << 20) / memory::BYTES_PER_PARAMETER as usize])])).collect();
        Structure::new(groups, false, vec![1e6; mib.len()], 1, vec![1; mib.len()])
    }

    fn node(index: u8) -> NodeId {
        NodeId([index; 32])
    }

    fn devices(flops: &[f64], memory: u64) -> Vec<Device> {
        flops.iter().enumerate().map(|(i, flops)| Device { node: node(i as u8 + 1), flops: *flops, memory }).collect()
    }

    fn wanted(spans: usize) -> PlacementSection {
        PlacementSection { spans, ..PlacementSection::default() }
    }

    fn show(plan: &[(NodeId, Span)]) -> String {
        plan.iter().map(|(node, span)| format!("{}:{span}", node.0[0])).collect::<Vec<_>>().join(" ")
    }

    #[test]
    fn four_equal_nodes_and_two_spans_make_two_replicas_each() {
        let found = plan(&structure(&[1; 6]), &BATCH, &wanted(2), &devices(&[1e9; 4], GIB), &[]).expect("fits");
        assert_eq!(show(&found), "1:0-2 2:3-5 3:0-2 4:3-5");
    }

    #[test]
    fn the_whole_model_on_each_node_if_it_fits() {
        let found = plan(&structure(&[1; 6]), &BATCH, &wanted(0), &devices(&[1e9, 2e9, 3e9], GIB), &[]).expect("fits");
        assert_eq!(show(&found), "1:0-5 2:0-5 3:0-5");
    }

    #[test]
    fn as_few_spans_as_memory_demands() {
        let found = plan(&structure(&[100; 6]), &BATCH, &wanted(0), &devices(&[1e9; 4], 310 << 20), &[]).expect("fits in halves");
        assert_eq!(show(&found), "1:0-2 2:3-5 3:0-2 4:3-5");
    }

    #[test]
    fn a_cut_that_is_even_in_bytes_is_tried_where_the_even_one_in_flops_does_not_fit() {
        let found = plan(&structure(&[300, 10, 10, 10]), &BATCH, &wanted(2), &devices(&[1e9; 2], 305 << 20), &[]).expect("fits");
        assert_eq!(show(&found), "1:0 2:1-3");
    }

    #[test]
    fn what_does_not_fit_is_told_by_how_much() {
        let error = plan(&structure(&[1024; 6]), &BATCH, &wanted(2), &devices(&[1e9; 2], 2 * GIB), &[]).expect_err("3 GiB a span");
        assert_eq!(error.to_string(), "no host for blocks 0-2: 3.0 GiB needed, largest free 2.0 GiB");
        let error = plan(&structure(&[1; 6]), &BATCH, &wanted(3), &devices(&[1e9; 2], GIB), &[]).expect_err("two nodes");
        assert_eq!(error.to_string(), "3 spans need as many nodes, 2 here");
        assert_eq!(plan(&structure(&[1; 6]), &BATCH, &wanted(0), &[], &[]), Err(PlanError::NoDevices));
    }

    #[test]
    fn whoever_has_a_place_keeps_it_and_a_newcomer_fills_in() {
        let structure = structure(&[1; 6]);
        let present = [(node(1), Span::new(0, 3)), (node(2), Span::new(3, 6)), (node(3), Span::new(0, 3)), (node(9), Span::new(3, 6))];
        let found = plan(&structure, &BATCH, &wanted(2), &devices(&[1e9; 4], GIB), &present).expect("fits");
        assert_eq!(show(&found), "1:0-2 2:3-5 3:0-2 4:3-5");
    }

    #[test]
    fn a_gap_that_no_newcomer_fills_places_all_afresh() {
        let present = [(node(1), Span::new(0, 3)), (node(2), Span::new(0, 3))];
        let found = plan(&structure(&[1; 6]), &BATCH, &wanted(2), &devices(&[1e9; 2], GIB), &present).expect("fits");
        assert_eq!(show(&found), "1:0-2 2:3-5");
    }

    #[test]
    fn a_joiner_goes_to_the_gap_then_to_too_few_replicas_then_to_the_slowest() {
        let structure = structure(&[100; 6]);
        let (left, right) = (Span::new(0, 3), Span::new(3, 6));
        let join = |present: &[(Device, Span)], memory| place_joiner(&structure, &BATCH, &wanted(2), present, Device { node: node(9), flops: 1e9, memory });
        let d = devices(&[9e9, 1e9, 1e9, 1e9], GIB);
        assert_eq!(join(&[(d[0], left)], GIB), Some(right), "blocks without a host");
        assert_eq!(join(&[(d[0], left)], 250 << 20), Some(Span::new(3, 5)), "as many of them as fit");
        assert_eq!(join(&[(d[1], left), (d[2], left), (d[0], right)], GIB), Some(right), "one replica, though the fastest");
        assert_eq!(join(&[(d[0], left), (d[1], left), (d[2], right), (d[3], right)], GIB), Some(right), "the slowest");
        assert_eq!(join(&[(d[0], left), (d[1], right)], 1 << 20), None, "no room for any");
    }

    #[test]
    fn every_block_is_covered_whatever_the_fleet() {
        let mut random = 7_u64;
        let mut draw = |below: u64| {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (random >> 33) % below
        };
        let mut planned = 0;
        for case in 0..500 {
            let structure = structure(&(0..2 + draw(6)).map(|_| 1 + draw(100) as usize).collect::<Vec<_>>());
            let devices: Vec<Device> = (0..1 + draw(8))
                .map(|i| Device { node: node(i as u8 + 1), flops: [f64::NAN, -1.0, 1e9, 2e9, 7e9][draw(5) as usize], memory: draw(400) << 20 })
                .collect();
            let spans = draw(4) as usize % structure.blocks();
            let Ok(found) = plan(&structure, &BATCH, &wanted(spans), &devices, &[]) else { continue };
            planned += 1;
            assert_eq!(uncovered(&structure, found.iter().map(|(_, span)| *span)), [], "case {case}");
            for (node, span) in &found {
                let device = devices.iter().find(|device| device.node == *node).expect("a device of the fleet");
                assert!(span_bytes(&structure, &BATCH, *span) <= device.memory, "case {case}: {span} does not fit {node:?}");
            }
            let mut reversed = devices.clone();
            reversed.reverse();
            assert_eq!(plan(&structure, &BATCH, &wanted(spans), &reversed, &[]).as_ref(), Ok(&found), "case {case}: the order of devices does not matter");
        }
        assert!(planned > 200, "only {planned} of the fleets could be planned");
    }
}
