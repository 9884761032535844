//! What a node and the coordinator say to each other.

use bincode::{Decode, Encode};

use crate::codec::Codec;
use crate::id::{Attempt, Chunk, Fence, Group, Hash, Microbatch, NodeId, ReduceAttempt, RunId, Span, Step, SumId, Timeline, Use, Version};
use crate::message::Versions;
use crate::placement::Placement;
use crate::set::BitSet;

/// From a node to the coordinator.
#[derive(Clone, Debug, PartialEq, Encode, Decode)]
pub enum ToCoordinator {
    /// The first message on every control connection.
    Hello(Box<Hello>),
    /// Said every [`crate::limits::HEARTBEAT_EVERY`] when there is nothing else to say.
    Heartbeat,
    /// Microbatches whose gradients wait in this node's scratch buffers.
    Done {
        /// The step.
        fence: Fence,
        /// What was computed.
        entries: Vec<Done>,
    },
    /// This node cannot add what was counted to this sum any more.
    Lost {
        /// The step.
        fence: Fence,
        /// The sums that are void.
        sums: Vec<SumId>,
    },
    /// The reduced gradient of a group lies here.
    Reduced {
        /// The step.
        fence: Fence,
        /// The group.
        group: Group,
        /// The attempt, as in the seal.
        attempt: ReduceAttempt,
        /// Root over the hashes of the decoded chunks.
        digest: Hash,
        /// Squared norm of each chunk that this node owns, summed in f64 in index order.
        squared_norms: Vec<(Chunk, f64)>,
    },
    /// All groups of this node's span are at the version that the step makes.
    Applied {
        /// The step.
        fence: Fence,
        /// Root of weights and optimizer state of each group, in steps where they are asked for.
        roots: Vec<(Group, Hash)>,
    },
    /// The joining node has caught up to `version` in all groups of its span.
    Ready {
        /// The timeline.
        timeline: Timeline,
        /// The span it was to fetch.
        span: Span,
        /// The version it has.
        version: Version,
    },
    /// A neighbour does not answer.
    Unreachable(NodeId),
    /// The node leaves: no new work, please.
    Leaving,
    /// Shards of a checkpoint are durable here.
    Saved {
        /// The timeline.
        timeline: Timeline,
        /// What was saved.
        shards: Vec<Shard>,
    },
    /// What the node's links carry, about once a second; shown, never used.
    Traffic {
        /// Kinds of its links, such as `quic`; at most [`crate::limits::LINK_KIND_BYTES_MAX`] are shown.
        links: String,
        /// Bytes a second it sends.
        sent_per_second: f64,
        /// Bytes a second it receives.
        received_per_second: f64,
    },
    /// A step is committed, and nobody whom the node can reach has its result of a group.
    Lacks {
        /// The step.
        fence: Fence,
        /// The group.
        group: Group,
    },
    /// The feeder cannot route this microbatch now; its lease goes back.
    Returned {
        /// The step.
        fence: Fence,
        /// The leases.
        leases: Vec<(Microbatch, Attempt)>,
    },
    /// The node computed values of a microbatch that are not finite; none of them went anywhere.
    NotFinite {
        /// The step.
        fence: Fence,
        /// The microbatch.
        microbatch: Microbatch,
    },
}

/// What a node says first.
#[derive(Clone, Debug, PartialEq, Encode, Decode)]
pub struct Hello {
    /// Wire versions it speaks.
    pub versions: Versions,
    /// The run it was in, if any.
    pub run: Option<RunId>,
    /// What it wants to be.
    pub role: Role,
    /// What it offers.
    pub capability: Capability,
    /// Where its data plane listens, as `ip:port`.
    pub data_addresses: Vec<String>,
    /// The manifest of the data it can serve.
    pub data: Option<Hash>,
    /// The timeline it was in.
    pub timeline: Timeline,
    /// The span it hosts, if it still holds its state.
    pub span: Option<Span>,
    /// Version of each group it holds.
    pub versions_held: Vec<(Group, Version)>,
    /// Its live sums and what the ledger said was counted in them.
    pub sums: Vec<SumReport>,
    /// Checkpoint shards on its disk.
    pub shards: Vec<Shard>,
    /// The newest commits it knows, oldest first.
    pub commits: Vec<Commit>,
}

/// What a peer wants.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Encode, Decode)]
pub enum Role {
    /// To be placed and to compute.
    Worker,
    /// To read the run's state: export, tools. Never placed.
    Reader,
}

/// What a device offers. Claims are ceilings only; placement uses what is measured.
#[derive(Clone, Copy, Debug, Default, PartialEq, Encode, Decode)]
pub struct Capability {
    /// Sustained FLOP/s, compute share included.
    pub flops: f64,
    /// Memory it lends, in bytes.
    pub memory: u64,
    /// Share of the time it computes, 0 to 1.
    pub compute_share: f32,
    /// Hash of what its kernels compute: nodes with equal fingerprints compute equal bits.
    pub fingerprint: Hash,
}

/// One sum as its holder knows it.
#[derive(Clone, Debug, PartialEq, Encode, Decode)]
pub struct SumReport {
    /// The sum.
    pub sum: SumId,
    /// The step it belongs to.
    pub step: Step,
    /// The group.
    pub group: Group,
    /// Per use, the microbatches counted in it.
    pub counted: Vec<(Use, BitSet)>,
    /// Losses of microbatches counted in it, where the holder's span has the head: what a
    /// coordinator that has restarted shows for the step.
    pub losses: Vec<(Microbatch, f32)>,
}

/// One group's state on a node's disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Encode, Decode)]
pub struct Shard {
    /// The timeline it was saved in: after going back, later versions of an older one are void.
    pub timeline: Timeline,
    /// The group.
    pub group: Group,
    /// The version.
    pub version: Version,
    /// Root of its state (weights and optimizer state).
    pub root: Hash,
}

/// One microbatch that a host has computed through its span.
#[derive(Clone, Debug, PartialEq, Encode, Decode)]
pub struct Done {
    /// The microbatch.
    pub microbatch: Microbatch,
    /// The attempt it was computed under.
    pub attempt: Attempt,
    /// The uses whose gradients wait to be added.
    pub uses: BitSet,
    /// The open sum of each group that those uses belong to.
    pub sums: Vec<(Group, SumId)>,
    /// Mean loss in nats a token, if the span has the head. Shown, never used.
    pub loss: Option<f32>,
}

/// From the coordinator to a node.
#[derive(Clone, Debug, PartialEq, Encode, Decode)]
pub enum FromCoordinator {
    /// The answer to a hello.
    Welcome(Box<Welcome>),
    /// The node may not take part, and why; the connection ends.
    Refused {
        /// For the user: what is wrong and what to do.
        reason: String,
    },
    /// Who hosts what from now on.
    Placement(Box<Placement>),
    /// Where nodes' data planes listen.
    Peers(Vec<Peer>),
    /// Microbatches for this feeder.
    Lease {
        /// The step.
        fence: Fence,
        /// What to route.
        grants: Vec<Grant>,
    },
    /// The ledger's answers to `Done`.
    Counted {
        /// The step.
        fence: Fence,
        /// One verdict an entry.
        verdicts: Vec<Verdict>,
    },
    /// These sums count no more; what they held is redone elsewhere.
    Void {
        /// The step.
        fence: Fence,
        /// The sums.
        sums: Vec<SumId>,
    },
    /// A group's batch is complete: reduce it.
    Seal(Box<Seal>),
    /// A step is final.
    Commit(Box<Commit>),
    /// The step's sums, results, kept tensors and old weights may go.
    Retire {
        /// The step.
        fence: Fence,
    },
    /// On reaching `version`, save these groups.
    Checkpoint {
        /// The timeline.
        timeline: Timeline,
        /// The version.
        version: Version,
        /// The groups this node saves.
        groups: Vec<Group>,
    },
    /// A checkpoint is complete: older ones than `keep_from` may go.
    CheckpointComplete {
        /// The newest complete version.
        version: Version,
        /// The oldest version to keep.
        keep_from: Version,
    },
    /// The run is over; the final version stays available until the connection ends.
    Finished {
        /// The final version.
        version: Version,
    },
    /// Where things stand, for people: step, loss, who waits for what.
    Notice {
        /// One line.
        text: String,
    },
}

/// The answer to a hello.
#[derive(Clone, Debug, PartialEq, Encode, Decode)]
pub struct Welcome {
    /// The wire version to use.
    pub version: u16,
    /// The run.
    pub run: RunId,
    /// The run's configuration as canonical TOML.
    pub config: String,
    /// The placement.
    pub placement: Placement,
    /// The step that is open.
    pub step: Step,
    /// Where the others listen.
    pub peers: Vec<Peer>,
    /// The newest commits, oldest first: what the node may have missed.
    pub commits: Vec<Commit>,
    /// Sums of the hello that are live; all others are void.
    pub live_sums: Vec<SumId>,
    /// The highest step whose leftovers may go.
    pub retired: Option<Step>,
    /// The newest complete checkpoint, and the root of each group's state in it.
    pub checkpoint: Option<(Version, Vec<(Group, Hash)>)>,
}

/// Where a node's data plane listens.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
pub struct Peer {
    /// The node.
    pub node: NodeId,
    /// Its addresses as `ip:port`, best first.
    pub addresses: Vec<String>,
    /// Whether it serves the run's data.
    pub has_data: bool,
}

/// One microbatch leased to a feeder.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
pub struct Grant {
    /// The microbatch.
    pub microbatch: Microbatch,
    /// The lease number; retries within it are the feeder's to count.
    pub lease: u32,
    /// The accumulate mask: uses whose count is missing.
    pub mask: BitSet,
    /// Hosts that computed parts of it before and may still hold them.
    pub holders: Vec<(Span, NodeId)>,
    /// Whether too little of the step waits behind it for every feeder to get one more.
    pub last: bool,
}

/// The ledger's answer to one [`Done`].
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
pub struct Verdict {
    /// The microbatch.
    pub microbatch: Microbatch,
    /// The sums named in the `Done`: a report may be answered after the next one was made.
    pub sums: Vec<(Group, SumId)>,
    /// Uses to add to these sums.
    pub counted: BitSet,
    /// Uses that another sum has: drop them.
    pub dropped: BitSet,
}

/// One sum of a cover.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Encode, Decode)]
pub struct CoverPart {
    /// Who holds it.
    pub node: NodeId,
    /// The sum.
    pub sum: SumId,
    /// How many (use, microbatch) pairs it holds: the holder checks.
    pub pairs: u32,
}

/// The order to reduce one group.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
pub struct Seal {
    /// The step.
    pub fence: Fence,
    /// The group.
    pub group: Group,
    /// The attempt.
    pub attempt: ReduceAttempt,
    /// Disjoint live sums whose union is the batch, in the order in which they are added.
    pub cover: Vec<CoverPart>,
    /// Everyone who gets the result: members first, then those who only listen.
    pub receivers: Vec<NodeId>,
    /// Who adds up which chunks: ascending, contiguous, together all chunks.
    pub owners: Vec<SliceOwner>,
    /// How results are encoded for everyone, the owner too.
    pub gather: Codec,
}

/// A contiguous slice of a group's chunks and who adds it up.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Encode, Decode)]
pub struct SliceOwner {
    /// The owner.
    pub node: NodeId,
    /// The first chunk.
    pub first: Chunk,
    /// One past the last chunk.
    pub end: Chunk,
}

/// A final step: one link of the signed chain.
#[derive(Clone, Debug, PartialEq, Encode, Decode)]
pub struct Commit {
    /// The timeline and step.
    pub fence: Fence,
    /// Hash of the commit before it.
    pub previous: Hash,
    /// Per group the attempt that counts and its digest.
    pub groups: Vec<(Group, ReduceAttempt, Hash)>,
    /// All an optimizer step needs beside the gradient.
    pub scalars: Scalars,
    /// Mean loss of the batch in nats a token; shown, never used.
    pub loss: f32,
    /// The coordinator's signature over [`Commit::hash`].
    pub signature: Vec<u8>,
}

/// All an optimizer step needs beside the reduced gradient, equal for everyone.
#[derive(Clone, Copy, Debug, Default, PartialEq, Encode, Decode)]
pub struct Scalars {
    /// The reduced sum is multiplied by this: one over the microbatches of a step, times clipping.
    pub gradient_scale: f32,
    /// Learning rate.
    pub learning_rate: f32,
    /// `1 - beta1^t`, t counted from 1.
    pub bias_correction1: f32,
    /// `1 - beta2^t`.
    pub bias_correction2: f32,
    /// Norm of the mean gradient before clipping; shown.
    pub gradient_norm: f32,
}

impl Commit {
    /// What is signed and what the next commit names: everything but the signature.
    pub fn hash(&self) -> Hash {
        let unsigned = Self { signature: Vec::new(), ..self.clone() };
        Hash::of(&crate::wire::encode(&unsigned))
    }
}
