//! Links of the world: what a frame meets between two nodes.

use std::collections::BTreeMap;
use std::time::Duration;

use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use skein_protocol::id::NodeId;
use skein_protocol::time::Time;

/// One way of a message through the world.
pub(crate) const DELAY: Duration = Duration::from_millis(2);
/// How long a broken link takes to be noticed by who sends over it.
pub(crate) const LINK_NOTICE: Duration = Duration::from_millis(20);
/// How long a link may be silent before it is given up, as data links are configured.
pub(crate) const LINK_IDLE: Duration = Duration::from_secs(5);

/// The links between nodes. Each frame travels by itself, as on a QUIC stream of its own: with
/// jitter a later one may arrive before an earlier one.
pub(crate) struct Network {
    random: ChaCha8Rng,
    jitter: Duration,
    /// Directions that carry nothing until a time.
    cuts: BTreeMap<(NodeId, NodeId), Time>,
    /// Pairs between which nothing passes until a time, and nobody is told: links that time out.
    silences: BTreeMap<(NodeId, NodeId), Time>,
    /// Everything arrives twice until then.
    repeats_until: Time,
}

impl Network {
    pub(crate) fn new(seed: u64, jitter: Duration) -> Self {
        Self { random: ChaCha8Rng::seed_from_u64(seed), jitter, cuts: BTreeMap::new(), silences: BTreeMap::new(), repeats_until: Time::default() }
    }

    /// How long the next frame travels.
    pub(crate) fn delay(&mut self) -> Duration {
        DELAY + self.jitter.mul_f64(self.random.random::<f64>())
    }

    /// Nothing goes from one node to another until `until`.
    pub(crate) fn cut(&mut self, from: NodeId, to: NodeId, until: Time) {
        let end = self.cuts.entry((from, to)).or_insert(until);
        *end = until.max(*end);
    }

    /// Nothing passes between two nodes until `until`; only silence tells.
    pub(crate) fn silence(&mut self, one: NodeId, other: NodeId, until: Time) {
        for pair in [(one, other), (other, one)] {
            let end = self.silences.entry(pair).or_insert(until);
            *end = until.max(*end);
        }
    }

    /// How long the sender takes to notice that a frame does not arrive.
    pub(crate) fn notice(&self, from: NodeId, to: NodeId, now: Time) -> Duration {
        if self.silences.get(&(from, to)).is_some_and(|until| now < *until) { LINK_IDLE } else { LINK_NOTICE }
    }

    /// Everything arrives twice until `until`.
    pub(crate) fn repeat(&mut self, until: Time) {
        self.repeats_until = self.repeats_until.max(until);
    }

    /// How much later what is sent now arrives once more, if it does.
    pub(crate) fn repeats_after(&mut self, now: Time) -> Option<Duration> {
        (now < self.repeats_until).then(|| self.delay())
    }

    pub(crate) fn is_cut(&self, from: NodeId, to: NodeId, now: Time) -> bool {
        [&self.cuts, &self.silences].iter().any(|ends| ends.get(&(from, to)).is_some_and(|until| now < *until))
    }
}
