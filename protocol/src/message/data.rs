//! What nodes say to each other. A message may be followed by one tensor ([`Frame`]).

use bincode::{Decode, Encode};

use crate::id::{Attempt, Chunk, Fence, Group, Hash, Microbatch, NodeId, ReduceAttempt, Span, Timeline, Version};
use crate::set::BitSet;
use crate::tensor::Payload;

/// A message and its tensor.
#[derive(Clone, Debug, PartialEq)]
pub struct Frame {
    /// The message.
    pub message: PeerMessage,
    /// The tensor behind it.
    pub payload: Option<Payload>,
}

impl From<PeerMessage> for Frame {
    fn from(message: PeerMessage) -> Self {
        Self { message, payload: None }
    }
}

/// One node's part of a route.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Encode, Decode)]
pub struct Hop {
    /// The node.
    pub node: NodeId,
    /// The blocks it computes.
    pub span: Span,
}

/// The way of one microbatch through the swarm. Hops are in order of their blocks; each hop's
/// output goes to the hops that `next` names (today: the following one).
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
pub struct Route {
    /// Who follows it to its end.
    pub feeder: NodeId,
    /// The hops.
    pub hops: Vec<Hop>,
    /// Whether no more of the step is to come behind it: hosts then hurry for the ones before them.
    pub last: bool,
}

/// Which way and try of a microbatch a message belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Encode, Decode)]
pub struct WorkId {
    /// Timeline and step.
    pub fence: Fence,
    /// The microbatch.
    pub microbatch: Microbatch,
    /// The attempt; hosts obey the newest they know.
    pub attempt: Attempt,
}

/// From node to node.
#[derive(Clone, Debug, PartialEq, Encode, Decode)]
pub enum PeerMessage {
    /// Compute hop `hop` of the route forward. The payload is the boundary tensor before the
    /// hop's span; absent on the first hop, and where the receiver should hold it from an
    /// earlier attempt.
    Forward {
        /// The work.
        work: WorkId,
        /// The accumulate mask.
        mask: BitSet,
        /// The route.
        route: Route,
        /// The receiver's index in it.
        hop: u16,
    },
    /// The gradient of hop `hop`'s output; absent where the receiver should hold it already.
    Backward {
        /// The work.
        work: WorkId,
        /// The receiver's index in the route.
        hop: u16,
    },
    /// A marker without payload came, and the tensor is not here (any more): send it.
    Missing {
        /// The work.
        work: WorkId,
        /// The asker's index in the route.
        hop: u16,
        /// Whether the gradient is missing, else the input.
        backward: bool,
    },
    /// To the feeder: the backward pass has come through the first hop.
    Finished {
        /// The work.
        work: WorkId,
    },
    /// To the feeder: hop `hop` cannot be reached or refuses.
    HopFailed {
        /// The work.
        work: WorkId,
        /// The hop that failed.
        hop: u16,
        /// Whether it refused (wrong version, not its span); else it was unreachable.
        refused: bool,
    },
    /// One contributor's chunk, to the chunk's owner. Payload: the sum of its sums in the cover.
    Contribution {
        /// The step.
        fence: Fence,
        /// The group.
        group: Group,
        /// The attempt.
        attempt: ReduceAttempt,
        /// The chunk.
        chunk: Chunk,
    },
    /// One reduced chunk, from its owner (or from whoever holds it) to a receiver.
    ReducedChunk {
        /// The step.
        fence: Fence,
        /// The group.
        group: Group,
        /// The attempt.
        attempt: ReduceAttempt,
        /// The chunk.
        chunk: Chunk,
    },
    /// Please send me the reduced chunks of a committed step.
    FetchReduced {
        /// The step.
        fence: Fence,
        /// The group.
        group: Group,
        /// The attempt.
        attempt: ReduceAttempt,
    },
    /// Please describe your snapshot of a group.
    FetchSnapshot {
        /// The timeline.
        timeline: Timeline,
        /// The group.
        group: Group,
        /// The version.
        version: Version,
    },
    /// The answer: hashes of the snapshot's chunks of [`crate::limits::STATE_CHUNK_BYTES`].
    SnapshotManifest {
        /// The group.
        group: Group,
        /// The version.
        version: Version,
        /// Length in bytes.
        byte_len: u64,
        /// One hash a chunk.
        chunks: Vec<Hash>,
    },
    /// Please send one chunk of a snapshot.
    FetchStateChunk {
        /// The group.
        group: Group,
        /// The version.
        version: Version,
        /// The chunk.
        chunk: u32,
    },
    /// The answer; the payload holds the bytes.
    StateChunk {
        /// The group.
        group: Group,
        /// The version.
        version: Version,
        /// The chunk.
        chunk: u32,
    },
    /// The answer to any request for state or results that this node cannot serve.
    Unavailable {
        /// The group.
        group: Group,
        /// The version.
        version: Version,
    },
    /// Please send one chunk of a data file named by its hash (the manifest itself is one).
    FetchBlob {
        /// The file's hash.
        hash: Hash,
        /// The chunk of [`crate::limits::STATE_CHUNK_BYTES`].
        chunk: u32,
    },
    /// The answer; the payload holds the bytes.
    Blob {
        /// The file's hash.
        hash: Hash,
        /// The chunk.
        chunk: u32,
        /// Length of the whole file in bytes.
        byte_len: u64,
    },
    /// This node does not have that file.
    NoBlob {
        /// The file's hash.
        hash: Hash,
    },
}
