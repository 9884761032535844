//! Schedules of faults drawn from a seed: a seed and a commit are a whole bug report.

use std::time::Duration;

use rand::{Rng, RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use serde::{Deserialize, Serialize};
use skein_protocol::codec::Codec;
use skein_protocol::config::Mode;

use crate::fault::CrashPoint;
use crate::scenario::{Expect, NodesTable, RunTable, Scenario};

/// Something that goes wrong. Nodes are numbered from 0, times are in seconds where they are written.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub enum Fault {
    /// The process dies and starts again, with or without its disk.
    Kill {
        /// Which node.
        node: usize,
        /// When it starts again.
        #[serde(with = "seconds")]
        returns: Duration,
        /// Whether its disk is gone.
        #[serde(default)]
        wiped: bool,
    },
    /// The coordinator dies and starts again a second later.
    KillCoordinator,
    /// The coordinator stands still: nobody hears of it, and then everything is there at once.
    StopCoordinator {
        /// For how long.
        #[serde(with = "seconds")]
        lasts: Duration,
    },
    /// The process stands still (SIGSTOP, a suspended laptop): connected, silent.
    Stop {
        /// Which node.
        node: usize,
        /// For how long.
        #[serde(with = "seconds")]
        lasts: Duration,
    },
    /// The device does not answer; the process does.
    Hang {
        /// Which node.
        node: usize,
        /// For how long.
        #[serde(with = "seconds")]
        lasts: Duration,
    },
    /// Frames between two nodes are lost.
    Cut {
        /// From which node.
        from: usize,
        /// To which.
        to: usize,
        /// Whether the other direction too.
        #[serde(default)]
        both: bool,
        /// For how long.
        #[serde(with = "seconds")]
        lasts: Duration,
    },
    /// Nothing reaches the node or comes from it, and nobody is told: its network is gone.
    Blackhole {
        /// Which node.
        node: usize,
        /// For how long.
        #[serde(with = "seconds")]
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
        #[serde(with = "seconds")]
        lasts: Duration,
    },
    /// The next computations give values that are not finite.
    NotFinite {
        /// Which node.
        node: usize,
        /// How many.
        times: u32,
    },
    /// The next computations find no room on the device.
    OutOfMemory {
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
        #[serde(with = "seconds")]
        lasts: Duration,
    },
    /// The user asks the node to leave; it comes back later.
    Leave {
        /// Which node.
        node: usize,
        /// When it starts again.
        #[serde(with = "seconds")]
        returns: Duration,
    },
    /// Every frame and every word to the coordinator arrives twice, the second time later.
    Repeat {
        /// For how long.
        #[serde(with = "seconds")]
        lasts: Duration,
    },
    /// A node's clock goes forward at once: a suspended laptop, a virtual machine moved.
    ClockJump {
        /// Which node.
        node: usize,
        /// How far.
        #[serde(with = "seconds")]
        ahead: Duration,
    },
    /// The next chunks of state that a node gives are not what their hashes say.
    Lie {
        /// Which node.
        node: usize,
        /// How many.
        times: u32,
    },
}

/// A fault and when it strikes.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Planned {
    /// When.
    pub when: When,
    /// What.
    pub fault: Fault,
}

/// When a fault strikes.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub enum When {
    /// At a time from the start of the world.
    #[serde(with = "seconds")]
    At(Duration),
    /// When a node reaches a point of its work.
    Reached {
        /// The point.
        point: CrashPoint,
        /// Which node; whichever comes first if none is named.
        #[serde(default)]
        node: Option<usize>,
        /// For the how-many-th time, from 0.
        #[serde(default)]
        nth: usize,
    },
}

impl Planned {
    /// The nodes that it names.
    pub fn nodes(&self) -> Vec<usize> {
        let trigger = if let When::Reached { node, .. } = self.when { node } else { None };
        let struck = match self.fault {
            Fault::Kill { node, .. }
            | Fault::Stop { node, .. }
            | Fault::Hang { node, .. }
            | Fault::Blackhole { node, .. }
            | Fault::Flap { node }
            | Fault::Mute { node, .. }
            | Fault::NotFinite { node, .. }
            | Fault::OutOfMemory { node, .. }
            | Fault::DiskFull { node, .. }
            | Fault::Leave { node, .. }
            | Fault::ClockJump { node, .. }
            | Fault::Lie { node, .. } => vec![node],
            Fault::Cut { from, to, .. } => vec![from, to],
            Fault::KillCoordinator | Fault::StopCoordinator { .. } | Fault::Repeat { .. } => Vec::new(),
        };
        trigger.into_iter().chain(struck).collect()
    }
}

/// Durations as seconds.
mod seconds {
    use std::time::Duration;

    use serde::{Deserialize, Deserializer, Serializer};

    pub(super) fn serialize<S: Serializer>(duration: &Duration, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_f64(duration.as_secs_f64())
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Duration, D::Error> {
        Duration::try_from_secs_f64(f64::deserialize(deserializer)?).map_err(serde::de::Error::custom)
    }
}

/// Draws a whole run in mode `exact`: model, batch, nodes, and so many faults.
pub fn draw(seed: u64, faults: usize) -> Scenario {
    let mut random = ChaCha8Rng::seed_from_u64(seed);
    let layers = random.random_range(1..=4);
    let (tied, microbatches, steps) = (random.random(), random.random_range(3..=8), random.random_range(10..=14));
    let boundary = if random.random_range(0..4) == 0 { Codec::Bf16 } else { Codec::None };
    let checkpoint_every = random.random_range(0..=5);
    let spans = random.random_range(0..=3).min(layers + 2);
    let replicas = random.random_range(1..=3);
    let nodes = random.random_range(spans.max(1)..=6);
    let minimum = random.random_range(1..=nodes);
    let jitter = [0.0, 0.001, 0.005, 0.03][random.random_range(0..4)];
    let speeds = (0..nodes).map(|_| [0.25, 0.5, 1.0, 1.0, 2.0][random.random_range(0..5)]).collect();
    let mut start = || if random.random_range(0..4) == 0 { between(&mut random, 0, 1500).as_secs_f64() } else { 0.0 };
    let starts = (0..nodes).map(|_| start()).collect();
    let mut at = Duration::ZERO;
    let mut next = || {
        at += between(&mut random, 1, 120);
        Planned { when: When::At(at), fault: fault(&mut random, nodes) }
    };
    let faults = (0..faults).map(|_| next()).collect();
    Scenario {
        title: format!("drawn from seed {seed}"),
        rules: Vec::new(),
        run: RunTable { seed, mode: Mode::Exact, layers, tied, microbatches, steps, checkpoint_every, boundary },
        nodes: NodesTable { speeds, starts, minimum, spans, replicas, jitter },
        faults,
        // At the time it is due a fault may find nobody to strike.
        expect: Expect { all_strike: false, ..Expect::default() },
    }
}

fn fault(random: &mut impl Rng, nodes: usize) -> Fault {
    let node = random.random_range(0..nodes);
    match random.random_range(0..19) {
        0..3 => Fault::Kill { node, returns: between(random, 1, 3000), wiped: random.random_range(0..4) == 0 },
        3 => Fault::KillCoordinator,
        4 => Fault::Stop { node, lasts: between(random, 10, 4000) },
        5 | 6 => Fault::Cut { from: node, to: random.random_range(0..nodes), both: random.random(), lasts: between(random, 10, 2000) },
        7 => Fault::Flap { node },
        8 => Fault::Mute { node, lasts: between(random, 10, 4000) },
        9 => Fault::NotFinite { node, times: random.random_range(1..4) },
        10 => Fault::DiskFull { node, lasts: between(random, 10, 2000) },
        11 => Fault::StopCoordinator { lasts: between(random, 10, 3000) },
        12 => Fault::Repeat { lasts: between(random, 10, 500) },
        13 => Fault::ClockJump { node, ahead: between(random, 10, 3_600_000) },
        14 => Fault::Hang { node, lasts: between(random, 10, 15_000) },
        15 => Fault::Lie { node, times: random.random_range(1..4) },
        16 => Fault::Blackhole { node, lasts: between(random, 10, 5000) },
        17 => Fault::OutOfMemory { node, times: random.random_range(1..3) },
        _ => Fault::Leave { node, returns: between(random, 100, 3000) },
    }
}

fn between(random: &mut impl Rng, first_ms: u64, last_ms: u64) -> Duration {
    Duration::from_micros(random.random_range(first_ms * 1000..=last_ms * 1000))
}
