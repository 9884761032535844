//! What happens in a run of the world, and what came of it.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use skein_coordinator::status::Status;
use skein_protocol::config::RunConfig;
use skein_protocol::id::{Group, Hash, NodeId, Version};
use skein_protocol::time::Time;

use crate::fault::CrashPoint;
use crate::schedule::Planned;

/// What happens in a run of the world beside training.
#[derive(Clone, Debug)]
pub struct Plan {
    /// The run.
    pub config: RunConfig,
    /// Speed of each node; its index is its name.
    pub speeds: Vec<f64>,
    /// Kill whichever node reaches this point for the n-th time (from 0).
    pub node_dies: Option<(CrashPoint, usize)>,
    /// Start the dead node again, with its disk, after so long.
    pub node_returns: Option<Duration>,
    /// Kill the coordinator at its n-th operation on the log, after it or before it is durable.
    pub coordinator_dies_at: Option<(usize, bool)>,
    /// A node that joins at a time.
    pub joiner: Option<Duration>,
    /// The node that leaves gracefully, and when.
    pub leaver: Option<(usize, Duration)>,
    /// Kill everything at a time and start it again: the run resumes from disks alone.
    pub blackout: Option<Duration>,
    /// Of the world's own randomness.
    pub seed: u64,
    /// Frames travel up to so much longer.
    pub jitter: Duration,
    /// When each node starts; at once where there are fewer.
    pub starts: Vec<Duration>,
    /// What goes wrong, and when.
    pub faults: Vec<Planned>,
}

impl Plan {
    /// A run on so many nodes of equal speed, undisturbed.
    pub fn new(config: RunConfig, nodes: usize) -> Self {
        Self {
            config,
            speeds: vec![1.0; nodes],
            node_dies: None,
            node_returns: None,
            coordinator_dies_at: None,
            joiner: None,
            leaver: None,
            blackout: None,
            seed: 0,
            jitter: Duration::ZERO,
            starts: Vec::new(),
            faults: Vec::new(),
        }
    }
}

/// What came of a run.
#[derive(Debug)]
pub struct Ending {
    /// The coordinator's status at the end.
    pub status: Status,
    /// When it ended.
    pub time: Time,
    /// Root of the state of each group at the end, by node.
    pub roots: BTreeMap<NodeId, BTreeMap<Group, (Version, Hash)>>,
    /// Roots of each group's last version on the disks, whatever timeline saved it.
    pub saved: BTreeMap<Group, BTreeSet<Hash>>,
    /// Faults of the schedule that found somebody to strike.
    pub faults_struck: usize,
    /// How often each crash point was reached.
    pub reached: BTreeMap<CrashPoint, usize>,
    /// Operations on the coordinator's log.
    pub log_operations: usize,
    /// Whether something was killed.
    pub killed: bool,
    /// Commits, all timelines together.
    pub commits: usize,
    /// Hash of everything that was delivered, in order.
    pub trace: Hash,
    /// Losses of committed steps, as the coordinator showed them.
    pub losses: Vec<(u64, f32)>,
    /// How long the work that each lost node had in hand waited for another to take it up.
    pub taken_over: Vec<Duration>,
    /// Exits of nodes that were no success.
    pub failures: Vec<String>,
}

/// The states that all who hold a group at the newest version agree on.
///
/// # Panics
/// If two replicas differ.
pub fn agreed_roots(ending: &Ending) -> BTreeMap<Group, (Version, Hash)> {
    let mut agreed: BTreeMap<Group, (Version, Hash)> = BTreeMap::new();
    let mut seen: BTreeSet<(Group, Version, Hash)> = BTreeSet::new();
    for roots in ending.roots.values() {
        for (group, (version, root)) in roots {
            seen.insert((*group, *version, *root));
        }
    }
    for (group, version, root) in seen {
        if let Some((other, found)) = agreed.get(&group)
            && *other == version
        {
            assert_eq!(*found, root, "replicas of group {group} differ at version {version}");
        }
        if agreed.get(&group).is_none_or(|(other, _)| *other < version) {
            agreed.insert(group, (version, root));
        }
    }
    agreed
}
