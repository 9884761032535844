//! Which host computes which blocks of a microbatch: policies behind one trait.

use std::collections::BTreeMap;

use skein_protocol::id::NodeId;

/// One host that could take a hop.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Candidate {
    /// The host.
    pub node: NodeId,
    /// Microbatches a second through its span, measured; 0 if unknown.
    pub rate: f64,
    /// Microbatches of this feeder that are on their way through it.
    pub in_flight: usize,
}

/// Chooses hosts.
pub trait RoutePolicy: Send {
    /// The index of the candidate to take. There is at least one; the order is the feeder's own.
    fn choose(&mut self, candidates: &[Candidate]) -> usize;
}

/// Least expected completion time: (microbatches in flight + 1) / rate. Rates are measured under
/// noise: whoever comes within a tenth of the best is as good, and the first of them is taken.
/// Unknown rates count as the mean of the known ones.
#[derive(Clone, Copy, Debug, Default)]
pub struct LeastCompletion;

impl RoutePolicy for LeastCompletion {
    fn choose(&mut self, candidates: &[Candidate]) -> usize {
        let mean = mean_rate(candidates);
        let expected = |candidate: &Candidate| (candidate.in_flight + 1) as f64 / known(candidate.rate, mean);
        let best = candidates.iter().map(expected).fold(f64::INFINITY, f64::min);
        candidates.iter().position(|candidate| expected(candidate) <= best * 1.1).unwrap_or(0)
    }
}

/// Interleaved weighted round-robin as in SWARM: each host carries a running total of the time it
/// was given; the least one is next and is charged 1 / rate. A newcomer starts at the least total.
#[derive(Clone, Debug, Default)]
pub struct RoundRobin {
    busy: BTreeMap<NodeId, f64>,
}

impl RoutePolicy for RoundRobin {
    fn choose(&mut self, candidates: &[Candidate]) -> usize {
        let mean = mean_rate(candidates);
        let least = candidates.iter().filter_map(|candidate| self.busy.get(&candidate.node)).copied().fold(f64::INFINITY, f64::min);
        let start = if least.is_finite() { least } else { 0.0 };
        for candidate in candidates {
            self.busy.entry(candidate.node).or_insert(start);
        }
        let least_busy = candidates.iter().enumerate().min_by(|(_, a), (_, b)| self.busy[&a.node].total_cmp(&self.busy[&b.node]));
        let Some((index, chosen)) = least_busy else { return 0 };
        *self.busy.entry(chosen.node).or_default() += 1.0 / known(chosen.rate, mean);
        index
    }
}

fn mean_rate(candidates: &[Candidate]) -> f64 {
    let rates: Vec<f64> = candidates.iter().map(|candidate| candidate.rate).filter(|rate| *rate > 0.0).collect();
    if rates.is_empty() { 1.0 } else { rates.iter().sum::<f64>() / rates.len() as f64 }
}

fn known(rate: f64, mean: f64) -> f64 {
    if rate > 0.0 { rate } else { mean }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn candidate(name: u8, rate: f64, in_flight: usize) -> Candidate {
        Candidate { node: NodeId([name; 32]), rate, in_flight }
    }

    #[test]
    fn the_fastest_free_host_is_taken_until_it_is_full() {
        let mut policy = LeastCompletion;
        assert_eq!(policy.choose(&[candidate(1, 1.0, 0), candidate(2, 3.0, 1)]), 1);
        assert_eq!(policy.choose(&[candidate(1, 1.0, 0), candidate(2, 3.0, 3)]), 0);
        assert_eq!(policy.choose(&[candidate(2, 1.0, 1), candidate(1, 1.05, 1)]), 0, "as good as equal");
    }

    #[test]
    fn round_robin_shares_in_proportion_to_rate() {
        let mut policy = RoundRobin::default();
        let candidates = [candidate(1, 1.0, 0), candidate(2, 3.0, 0)];
        let second = (0..400).filter(|_| policy.choose(&candidates) == 1).count();
        assert!((299..=301).contains(&second), "{second} of 400");
    }
}
