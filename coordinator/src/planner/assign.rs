//! Giving devices to spans so that the tightest span is as fast as can be.

use std::cmp::Reverse;

use super::{Device, PlanError};
use skein_protocol::id::Span;

/// A span and what it costs.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Demand {
    pub(super) span: Span,
    /// FLOP a token; above 0.
    pub(super) flops: f64,
    /// Bytes a host needs.
    pub(super) bytes: u64,
}

/// Which span each device hosts.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Assignment {
    /// Per device, the index of its span; `None` for a device that none fits.
    pub(super) span_of: Vec<Option<usize>>,
    /// Hosts of the span that has fewest.
    pub(super) replicas: usize,
    /// Tokens a second through the tightest span.
    pub(super) throughput: f64,
}

/// Above so many devices only moves are tried, not swaps (which are quadratic).
const SWAPPED_MAX: usize = 256;

/// Assigns devices to spans: every span gets a host and, as far as the devices go, `replicas` of them.
pub(super) fn assign(demands: &[Demand], devices: &[Device], replicas: usize) -> Result<Assignment, PlanError> {
    let everyone: Vec<usize> = (0..devices.len()).collect();
    let each = |count: usize| vec![count; demands.len()];
    shortage(demands, devices, &each(1), &everyone).map_or(Ok(()), Err)?;
    let possible = devices.len() / demands.len();
    let target = (1..=replicas.min(possible)).rev().find(|count| shortage(demands, devices, &each(*count), &everyone).is_none()).unwrap_or(1);

    let mut board = Board { demands, devices, span_of: vec![None; devices.len()], flops: vec![0.0; demands.len()], hosts: vec![0; demands.len()] };
    board.deal(target);
    // Each round makes the tightest span faster, or ends the search.
    for _ in 0..4 * devices.len() {
        if !board.improve(target) {
            break;
        }
    }
    Ok(board.finish())
}

/// Why the devices at `left` cannot give each span as many hosts as it is owed; `None` if they can.
///
/// A device that fits a span fits every span that needs less, so matching both by size decides it.
fn shortage(demands: &[Demand], devices: &[Device], owed: &[usize], left: &[usize]) -> Option<PlanError> {
    let mut wanted: Vec<usize> = (0..demands.len()).flat_map(|span| std::iter::repeat_n(span, owed[span])).collect();
    wanted.sort_by_key(|span| (Reverse(demands[*span].bytes), *span));
    let mut memories: Vec<u64> = left.iter().map(|device| devices[*device].memory).collect();
    memories.sort_unstable_by_key(|memory| Reverse(*memory));
    wanted.iter().enumerate().find_map(|(rank, span)| match memories.get(rank) {
        Some(memory) if *memory >= demands[*span].bytes => None,
        Some(memory) => Some(PlanError::DoesNotFit { span: demands[*span].span, needed: demands[*span].bytes, largest: *memory }),
        None => Some(PlanError::TooFewDevices { spans: wanted.len(), devices: memories.len() }),
    })
}

struct Board<'a> {
    demands: &'a [Demand],
    devices: &'a [Device],
    span_of: Vec<Option<usize>>,
    flops: Vec<f64>,
    hosts: Vec<usize>,
}

impl Board<'_> {
    /// The largest device first, each to the span that is slowest relative to its cost, as long
    /// as the devices that are left can still give every span `target` hosts.
    fn deal(&mut self, target: usize) {
        let mut order: Vec<usize> = (0..self.devices.len()).collect();
        order.sort_by(|a, b| self.devices[*b].flops.total_cmp(&self.devices[*a].flops).then(self.devices[*a].node.cmp(&self.devices[*b].node)));
        for (rank, device) in order.iter().enumerate() {
            let left = &order[rank + 1..];
            let mut spans: Vec<usize> = (0..self.demands.len()).filter(|span| self.fits(*device, *span)).collect();
            spans.sort_by(|a, b| self.rate(*a).total_cmp(&self.rate(*b)).then(a.cmp(b)));
            let allowed = spans.into_iter().find(|span| {
                let mut owed: Vec<usize> = self.hosts.iter().map(|hosts| target.saturating_sub(*hosts)).collect();
                owed[*span] = owed[*span].saturating_sub(1);
                owed.iter().all(|count| *count == 0) || shortage(self.demands, self.devices, &owed, left).is_none()
            });
            if let Some(span) = allowed {
                self.put(*device, span);
            }
        }
    }

    /// Moves one device to the tightest span, or swaps one of its devices for a faster one, if
    /// that makes it faster and nobody as slow as it was. Whether there was such a change.
    fn improve(&mut self, target: usize) -> bool {
        let Some(tight) = (0..self.demands.len()).min_by(|a, b| self.rate(*a).total_cmp(&self.rate(*b)).then(a.cmp(b))) else { return false };
        let mut best: Option<(f64, usize, Option<usize>)> = None;
        let mut consider = |rate: f64, taken: usize, given: Option<usize>| {
            if best.is_none_or(|(least, ..)| rate > least) {
                best = Some((rate, taken, given));
            }
        };
        let mine: Vec<usize> = (0..self.devices.len()).filter(|device| self.span_of[*device] == Some(tight)).collect();
        for device in 0..self.devices.len() {
            let Some(from) = self.span_of[device].filter(|span| *span != tight) else { continue };
            if !self.fits(device, tight) {
                continue;
            }
            if self.hosts[from] > target {
                consider(self.rates_after(tight, from, self.devices[device].flops), device, None);
            }
            for other in mine.iter().filter(|other| self.devices.len() <= SWAPPED_MAX && self.fits(**other, from)) {
                consider(self.rates_after(tight, from, self.devices[device].flops - self.devices[*other].flops), device, Some(*other));
            }
        }
        // A gain beyond rounding, so that the search ends.
        let Some((_, taken, given)) = best.filter(|(rate, ..)| *rate > self.rate(tight) * (1.0 + 1e-9)) else { return false };
        let from = self.span_of[taken].expect("only placed devices are taken");
        self.put(taken, tight);
        if let Some(given) = given {
            self.put(given, from);
        }
        true
    }

    /// The slower of two spans after `flops` have gone from one to the other.
    fn rates_after(&self, to: usize, from: usize, flops: f64) -> f64 {
        ((self.flops[to] + flops) / self.demands[to].flops).min((self.flops[from] - flops) / self.demands[from].flops)
    }

    fn put(&mut self, device: usize, span: usize) {
        if let Some(old) = self.span_of[device].replace(span) {
            self.hosts[old] -= 1;
            self.flops[old] = self.total(old);
        }
        self.hosts[span] += 1;
        self.flops[span] = self.total(span);
    }

    /// Summed afresh in the order of devices: the same assignment has the same rates.
    fn total(&self, span: usize) -> f64 {
        self.span_of.iter().zip(self.devices).filter(|(at, _)| **at == Some(span)).map(|(_, device)| device.flops).sum()
    }

    fn fits(&self, device: usize, span: usize) -> bool {
        self.devices[device].memory >= self.demands[span].bytes
    }

    fn rate(&self, span: usize) -> f64 {
        self.flops[span] / self.demands[span].flops
    }

    fn finish(self) -> Assignment {
        let throughput = (0..self.demands.len()).map(|span| self.rate(span)).fold(f64::INFINITY, f64::min);
        Assignment { throughput, replicas: self.hosts.iter().copied().min().unwrap_or(0), span_of: self.span_of }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use skein_protocol::id::NodeId;

    fn devices(flops_and_memory: &[(f64, u64)]) -> Vec<Device> {
        flops_and_memory.iter().enumerate().map(|(i, (flops, memory))| Device { node: NodeId([i as u8 + 1; 32]), flops: *flops, memory: *memory }).collect()
    }

    fn demands(flops_and_bytes: &[(f64, u64)]) -> Vec<Demand> {
        flops_and_bytes.iter().enumerate().map(|(i, (flops, bytes))| Demand { span: Span::new(i as u16, i as u16 + 1), flops: *flops, bytes: *bytes }).collect()
    }

    /// The best throughput over every assignment that gives each span a host, or `None` if there is none.
    fn best_of_all(demands: &[Demand], devices: &[Device], replicas: usize) -> Option<f64> {
        let mut best = None;
        for code in 0..demands.len().pow(devices.len() as u32) {
            let span_of = |device: usize| code / demands.len().pow(device as u32) % demands.len();
            if (0..devices.len()).any(|device| devices[device].memory < demands[span_of(device)].bytes) {
                continue;
            }
            let hosts = |span: usize| (0..devices.len()).filter(move |device| span_of(*device) == span);
            if (0..demands.len()).any(|span| hosts(span).count() < replicas) {
                continue;
            }
            let rate = |span: usize| hosts(span).map(|device| devices[device].flops).sum::<f64>() / demands[span].flops;
            let tightest = (0..demands.len()).map(rate).fold(f64::INFINITY, f64::min);
            best = Some(best.map_or(tightest, |old: f64| old.max(tightest)));
        }
        best
    }

    #[test]
    fn close_to_the_best_of_all_assignments_and_never_without_a_host() {
        let mut random = 1_u64;
        let mut draw = |below: u64| {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (random >> 33) % below
        };
        let mut ratios = Vec::new();
        for case in 0..400 {
            let spans = 1 + draw(3) as usize;
            let demands = demands(&(0..spans).map(|_| (1.0 + draw(4) as f64, 10 + draw(20))).collect::<Vec<_>>());
            // Every device fits some span, so that the brute force need not leave any out.
            let smallest = demands.iter().map(|demand| demand.bytes).min().expect("at least one");
            let devices = devices(&(0..1 + draw(6)).map(|_| (1.0 + draw(9) as f64, smallest + draw(20))).collect::<Vec<_>>());
            let found = assign(&demands, &devices, 2);
            let Some(one) = best_of_all(&demands, &devices, 1) else {
                assert!(found.is_err(), "case {case}: {found:?}");
                continue;
            };
            let found = found.unwrap_or_else(|error| panic!("case {case}: {error}: {demands:?} {devices:?}"));
            let two = best_of_all(&demands, &devices, 2);
            assert_eq!(found.replicas >= 2, two.is_some(), "case {case}: two replicas where possible");
            let ratio = found.throughput / two.unwrap_or(one);
            assert!(ratio > 0.59, "case {case}: {ratio} of the best: {demands:?} {devices:?} {found:?}");
            ratios.push(ratio);
        }
        let mean = ratios.iter().sum::<f64>() / ratios.len() as f64;
        assert!(mean > 0.98, "on average {mean} of the best");
    }

    #[test]
    fn unequal_speeds_are_balanced() {
        // 6 | 4 + 2 for spans of equal cost.
        let found = assign(&demands(&[(1.0, 1), (1.0, 1)]), &devices(&[(4.0, 9), (2.0, 9), (6.0, 9)]), 1).expect("fits");
        assert_eq!(found.throughput, 6.0);
        // The span that costs twice as much gets two thirds.
        let found = assign(&demands(&[(2.0, 1), (1.0, 1)]), &devices(&[(1.0, 9); 6]), 2).expect("fits");
        assert_eq!(found.span_of.iter().filter(|span| **span == Some(0)).count(), 4);
    }

    #[test]
    fn the_fastest_device_goes_where_only_it_fits() {
        let found = assign(&demands(&[(1.0, 5), (1.0, 50)]), &devices(&[(9.0, 60), (1.0, 6), (1.0, 6)]), 2).expect("fits");
        assert_eq!(found.span_of, [Some(1), Some(0), Some(0)]);
    }

    #[test]
    fn a_device_that_fits_nothing_is_left_out() {
        let found = assign(&demands(&[(1.0, 5)]), &devices(&[(9.0, 4), (1.0, 5)]), 2).expect("fits");
        assert_eq!(found.span_of, [None, Some(0)]);
    }

    #[test]
    fn a_swap_mends_what_dealing_by_size_gets_wrong() {
        // Dealt by size: 5+4+3 on one side and 5+4 on the other; 5+5 and 4+4+3 is better.
        let found = assign(&demands(&[(1.0, 1), (1.0, 1)]), &devices(&[(5.0, 9), (5.0, 9), (4.0, 9), (4.0, 9), (3.0, 9)]), 2).expect("fits");
        assert_eq!(found.throughput, 10.0);
    }

    #[test]
    fn a_large_fleet_is_planned_too() {
        let many: Vec<(f64, u64)> = (0..1000_u64).map(|i| (1.0 + (i * 7919 % 100) as f64, 10 + i % 50)).collect();
        let devices: Vec<Device> =
            many.iter().enumerate().map(|(i, (flops, memory))| Device { node: NodeId([(i / 4) as u8; 32]), flops: *flops, memory: *memory }).collect();
        let found = assign(&demands(&[(1.0, 5), (2.0, 30), (1.5, 20), (1.0, 9)]), &devices, 2).expect("fits");
        let even = devices.iter().map(|device| device.flops).sum::<f64>() / 5.5;
        assert!(found.throughput > 0.95 * even, "{} of {even}", found.throughput);
    }
}
