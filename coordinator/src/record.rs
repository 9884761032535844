//! What the coordinator makes durable. The log is the list of these, in order.

use skein_protocol::id::{NodeId, Timeline, Version};
use skein_protocol::message::control::{Capability, Commit, Seal, Shard};

use bincode::{Decode, Encode};

/// One entry of the log.
#[derive(Clone, Debug, PartialEq, Encode, Decode)]
pub enum Record {
    /// The first record: which run this is.
    Run {
        /// The canonical configuration.
        config: String,
    },
    /// A node was admitted; before its first `Counted`.
    Member {
        /// The node.
        node: NodeId,
        /// What it offers.
        capability: Capability,
    },
    /// A node is no member any more.
    Gone {
        /// The node.
        node: NodeId,
    },
    /// A timeline begins from a version.
    Timeline {
        /// The timeline.
        timeline: Timeline,
        /// The version it begins from.
        base: Version,
    },
    /// A group was sealed.
    Seal(Seal),
    /// A step was committed.
    Commit(Commit),
    /// Shards are durable at a node.
    Saved {
        /// The node.
        node: NodeId,
        /// The shards.
        shards: Vec<Shard>,
    },
    /// Every group has a durable shard of this version.
    Checkpoint {
        /// The version.
        version: Version,
    },
}
