//! Cutting a row of blocks into contiguous spans of nearly equal cost.

use std::ops::Range;

use skein_protocol::id::Span;

/// Cuts blocks of the given costs into `count` spans, none empty, so that the costliest is as
/// cheap as can be; among those cuts, one whose costs are even (sum of squares).
///
/// # Panics
/// If `count` is 0 or above the number of blocks, or there are 65536 blocks and more.
pub fn cut(costs: &[f64], count: usize) -> Vec<Span> {
    assert!((1..=costs.len()).contains(&count), "cannot cut {} blocks into {count} spans", costs.len());
    let mut prefix = vec![0.0];
    for cost in costs {
        prefix.push(prefix[prefix.len() - 1] + cost);
    }
    let cost = |range: Range<usize>| prefix[range.end] - prefix[range.start];

    // best[spans - 1][end]: the best cut of the first `end` blocks, and where its last span starts.
    let first = (0..=costs.len()).map(|end| Cut { start: 0, max: cost(0..end), squares: cost(0..end).powi(2) }).collect();
    let mut best: Vec<Vec<Cut>> = vec![first];
    for spans in 2..=count {
        let shorter = &best[spans - 2];
        let row = (0..=costs.len())
            .map(|end| (spans - 1..end).map(|start| shorter[start].and(start, cost(start..end))).reduce(Cut::better).unwrap_or(Cut::IMPOSSIBLE))
            .collect();
        best.push(row);
    }

    let mut spans = Vec::with_capacity(count);
    let mut end = costs.len();
    for row in best.iter().rev() {
        let start = row[end].start;
        spans.push(Span::new(index(start), index(end)));
        end = start;
    }
    spans.reverse();
    spans
}

#[derive(Clone, Copy)]
struct Cut {
    start: usize,
    max: f64,
    squares: f64,
}

impl Cut {
    const IMPOSSIBLE: Self = Self { start: 0, max: f64::INFINITY, squares: f64::INFINITY };

    /// This cut and one more span of `cost`, from `start`.
    fn and(self, start: usize, cost: f64) -> Self {
        Self { start, max: self.max.max(cost), squares: self.squares + cost * cost }
    }

    /// The better of two; the first if they are equal.
    fn better(self, other: Self) -> Self {
        let order = other.max.total_cmp(&self.max).then(other.squares.total_cmp(&self.squares));
        if order.is_lt() { other } else { self }
    }
}

fn index(block: usize) -> u16 {
    u16::try_from(block).expect("a model has fewer than 65536 blocks")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(costs: &[f64], count: usize, expected: &str) {
        let spans: Vec<String> = cut(costs, count).iter().map(Span::to_string).collect();
        assert_eq!(spans.join(" "), expected, "{costs:?} in {count}");
    }

    #[test]
    fn spans_cost_nearly_the_same() {
        check(&[1.0; 6], 1, "0-5");
        check(&[1.0; 6], 2, "0-2 3-5");
        check(&[1.0; 6], 6, "0 1 2 3 4 5");
        check(&[0.0, 4.0, 4.0, 4.0, 4.0, 3.0], 2, "0-2 3-5");
        check(&[9.0, 1.0, 1.0, 1.0], 2, "0 1-3");
        // The costliest span costs 9 in any case; the rest is still even.
        check(&[9.0, 1.0, 1.0, 1.0, 1.0], 3, "0 1-2 3-4");
    }

    #[test]
    fn no_cut_has_a_cheaper_costliest_span() {
        for seed in 0..200_u64 {
            let costs: Vec<f64> = (0..7).map(|i| ((seed * 31 + i * 17 + seed * i * 7) % 13 + 1) as f64).collect();
            for count in 1..=costs.len() {
                let max = |spans: &[Span]| spans.iter().map(|s| s.blocks().map(|b| costs[usize::from(b.0)]).sum::<f64>()).fold(0.0, f64::max);
                let mut least = f64::INFINITY;
                // Every set of `count - 1` places to cut at.
                for places in 0..1_u32 << (costs.len() - 1) {
                    if places.count_ones() as usize == count - 1 {
                        let mut bounds = vec![0];
                        bounds.extend((0..6_u16).filter(|i| places & (1 << i) != 0).map(|i| i + 1));
                        bounds.push(7);
                        let spans: Vec<Span> = bounds.windows(2).map(|w| Span::new(w[0], w[1])).collect();
                        least = least.min(max(&spans));
                    }
                }
                assert_eq!(max(&cut(&costs, count)), least, "{costs:?} in {count}");
            }
        }
    }
}
