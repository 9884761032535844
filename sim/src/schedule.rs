//! Schedules of faults drawn from a seed: a seed and a commit are a whole bug report.

use std::time::Duration;

use rand::{Rng, RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use skein_node::engine::toy;
use skein_protocol::codec::Codec;
use skein_protocol::config::Mode;

use crate::plan::Plan;

/// Something that goes wrong. Nodes are numbered from 0.
#[derive(Clone, Debug, PartialEq)]
pub enum Fault {
    /// The process dies and starts again, with or without its disk.
    Kill {
        /// Which node.
        node: usize,
        /// When it starts again.
        returns: Duration,
        /// Whether its disk is gone.
        wiped: bool,
    },
    /// The coordinator dies and starts again a second later.
    KillCoordinator,
    /// The process stands still (SIGSTOP, a suspended laptop): connected, silent.
    Stop {
        /// Which node.
        node: usize,
        /// For how long.
        lasts: Duration,
    },
    /// Frames between two nodes are lost.
    Cut {
        /// From which node.
        from: usize,
        /// To which.
        to: usize,
        /// Whether the other direction too.
        both: bool,
        /// For how long.
        lasts: Duration,
    },
    /// The control connection is closed; the node dials again.
    Flap {
        /// Which node.
        node: usize,
    },
    /// The control connection carries nothing for a while, and then everything.
    Mute {
        /// Which node.
        node: usize,
        /// For how long.
        lasts: Duration,
    },
    /// The next computations give values that are not finite.
    NotFinite {
        /// Which node.
        node: usize,
        /// How many.
        times: u32,
    },
    /// Checkpoints cannot be written.
    DiskFull {
        /// Which node.
        node: usize,
        /// For how long.
        lasts: Duration,
    },
    /// The user asks the node to leave; it comes back later.
    Leave {
        /// Which node.
        node: usize,
        /// When it starts again.
        returns: Duration,
    },
}

/// A fault and when it strikes.
#[derive(Clone, Debug, PartialEq)]
pub struct Timed {
    /// When, from the start of the world.
    pub at: Duration,
    /// What.
    pub fault: Fault,
}

/// Draws a whole run in mode `exact`: model, batch, nodes, and at least `faults` faults.
pub fn draw(seed: u64, faults: usize) -> Plan {
    let mut random = ChaCha8Rng::seed_from_u64(seed);
    let layers = random.random_range(1..=4);
    let mut config = toy::config(layers, random.random(), random.random_range(3..=8), random.random_range(10..=14));
    config.run.mode = Mode::Exact;
    config.run.seed = seed;
    config.wire.boundary = if random.random_range(0..4) == 0 { Codec::Bf16 } else { Codec::None };
    config.checkpoint.every_steps = random.random_range(0..=5);
    config.placement.spans = random.random_range(0..=3).min(layers + 2);
    config.placement.replicas = random.random_range(1..=3);
    let nodes = random.random_range(config.placement.spans.max(1)..=6);
    config.placement.nodes_min = random.random_range(1..=nodes);
    let mut plan = Plan::new(config, nodes);
    plan.seed = seed;
    plan.jitter = Duration::from_millis([0, 1, 5, 30][random.random_range(0..4)]);
    plan.speeds = (0..nodes).map(|_| [0.25, 0.5, 1.0, 1.0, 2.0][random.random_range(0..5)]).collect();
    plan.starts = (0..nodes).map(|_| if random.random_range(0..4) == 0 { between(&mut random, 0, 1500) } else { Duration::ZERO }).collect();
    let mut at = Duration::ZERO;
    for _ in 0..faults {
        at += between(&mut random, 1, 150);
        plan.faults.push(Timed { at, fault: fault(&mut random, nodes) });
    }
    plan
}

fn fault(random: &mut impl Rng, nodes: usize) -> Fault {
    let node = random.random_range(0..nodes);
    match random.random_range(0..12) {
        0..3 => Fault::Kill { node, returns: between(random, 1, 3000), wiped: random.random_range(0..4) == 0 },
        3 => Fault::KillCoordinator,
        4 => Fault::Stop { node, lasts: between(random, 10, 4000) },
        5 | 6 => Fault::Cut { from: node, to: random.random_range(0..nodes), both: random.random(), lasts: between(random, 10, 2000) },
        7 => Fault::Flap { node },
        8 => Fault::Mute { node, lasts: between(random, 10, 4000) },
        9 => Fault::NotFinite { node, times: random.random_range(1..4) },
        10 => Fault::DiskFull { node, lasts: between(random, 10, 2000) },
        _ => Fault::Leave { node, returns: between(random, 100, 3000) },
    }
}

fn between(random: &mut impl Rng, first_ms: u64, last_ms: u64) -> Duration {
    Duration::from_micros(random.random_range(first_ms * 1000..=last_ms * 1000))
}
