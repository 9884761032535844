//! Names of things: small newtypes, all ordered, all with a fixed encoding.

use std::fmt;

use bincode::{Decode, Encode};
use serde::{Deserialize, Serialize};

macro_rules! number {
    ($(#[$doc:meta])* $name:ident($inner:ty)) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Encode, Decode, Serialize, Deserialize)]
        #[serde(transparent)]
        pub struct $name(pub $inner);

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.0.fmt(f)
            }
        }
    };
}

macro_rules! key {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Encode, Decode)]
        pub struct $name(pub [u8; 32]);

        impl $name {
            /// The first eight hexadecimal digits, for logs and tables.
            pub fn short(&self) -> String {
                hex::encode(&self.0[..4])
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&hex::encode(self.0))
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, concat!(stringify!($name), "({})"), self.short())
            }
        }

        impl std::str::FromStr for $name {
            type Err = ParseKeyError;

            fn from_str(text: &str) -> Result<Self, Self::Err> {
                let mut bytes = [0; 32];
                hex::decode_to_slice(text, &mut bytes).map_err(|_| ParseKeyError)?;
                Ok(Self(bytes))
            }
        }

        impl Serialize for $name {
            fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                serializer.collect_str(self)
            }
        }

        impl<'de> Deserialize<'de> for $name {
            fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                let text = String::deserialize(deserializer)?;
                text.parse().map_err(serde::de::Error::custom)
            }
        }
    };
}

/// The text is not 64 hexadecimal digits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("expected 64 hexadecimal digits")]
pub struct ParseKeyError;

key! {
    /// A node's (or the coordinator's) name: its Ed25519 public key.
    NodeId
}
key! {
    /// A run's name: a hash of the coordinator's key and of the settings that affect training.
    RunId
}
key! {
    /// A BLAKE3 hash.
    Hash
}

impl Hash {
    /// The BLAKE3 hash of `bytes`.
    pub fn of(bytes: &[u8]) -> Self {
        Self(*blake3::hash(bytes).as_bytes())
    }

    /// The hash of a list of hashes: the root of a flat hash tree.
    pub fn root<'a>(hashes: impl IntoIterator<Item = &'a Self>) -> Self {
        let mut hasher = blake3::Hasher::new();
        for hash in hashes {
            hasher.update(&hash.0);
        }
        Self(*hasher.finalize().as_bytes())
    }
}

number! {
    /// One version of the placement.
    Epoch(u64)
}
number! {
    /// Rises when the run goes back to a checkpoint.
    Timeline(u32)
}
number! {
    /// One optimizer step; step `s` runs on version `s` of every group in mode `sync`.
    Step(u64)
}
number! {
    /// The number of optimizer steps applied to a group.
    Version(u64)
}
number! {
    /// A microbatch's index within its step.
    Microbatch(u32)
}
number! {
    /// A block's index: 0 is the embedding, then the layers, last the head.
    Block(u16)
}
number! {
    /// A parameter group's index.
    Group(u16)
}
number! {
    /// A use's index: one block's use of one group ([`crate::model::Structure::uses`]).
    Use(u16)
}
number! {
    /// A chunk's index within a group's flat buffer.
    Chunk(u32)
}
number! {
    /// One try at reducing a group; unique within (timeline, step, group).
    ReduceAttempt(u32)
}

impl Step {
    /// The version this step runs on.
    pub fn runs_on(self) -> Version {
        Version(self.0)
    }

    /// The version this step makes.
    pub fn makes(self) -> Version {
        // A peer may name any step.
        Version(self.0.saturating_add(1))
    }

    /// The step after this one.
    pub fn next(self) -> Self {
        Self(self.0.saturating_add(1))
    }
}

impl Version {
    /// The step that runs on this version.
    pub fn step(self) -> Step {
        Step(self.0)
    }
}

/// One way of a microbatch through the swarm. Ordered: a later lease, and within a lease a later
/// try, supersedes earlier ones.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Encode, Decode, Serialize, Deserialize)]
pub struct Attempt {
    /// Which lease of the microbatch, counted by the coordinator.
    pub lease: u32,
    /// Which try within the lease, counted by the feeder.
    pub retry: u32,
}

/// One accumulator of gradients of one group at one host. Never reused: the first half is drawn
/// by the node at start, the second half counts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Encode, Decode, Serialize, Deserialize)]
pub struct SumId {
    /// Drawn when the holder's process started.
    pub boot: u64,
    /// Counted by the holder.
    pub count: u64,
}

/// What a message about a step must match to be acted on; anything else is void.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Encode, Decode, Serialize, Deserialize)]
pub struct Fence {
    /// The timeline the sender believes in.
    pub timeline: Timeline,
    /// The step.
    pub step: Step,
}

/// Contiguous blocks, `first..end`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Encode, Decode, Serialize, Deserialize)]
pub struct Span {
    /// The first block.
    pub first: Block,
    /// One past the last block.
    pub end: Block,
}

impl Span {
    /// The span `first..end`.
    pub fn new(first: u16, end: u16) -> Self {
        Self { first: Block(first), end: Block(end) }
    }

    /// The blocks in order.
    pub fn blocks(self) -> impl DoubleEndedIterator<Item = Block> + Clone {
        (self.first.0..self.end.0).map(Block)
    }

    /// How many blocks.
    pub fn len(self) -> usize {
        usize::from(self.end.0.saturating_sub(self.first.0))
    }

    /// Whether there is no block in it.
    pub fn is_empty(self) -> bool {
        self.len() == 0
    }

    /// Whether `block` is one of its blocks.
    pub fn contains(self, block: Block) -> bool {
        self.first <= block && block < self.end
    }
}

impl fmt::Display for Span {
    /// As a person reads it: the last block is included.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.len() == 1 { write!(f, "{}", self.first) } else { write!(f, "{}-{}", self.first, self.end.0.saturating_sub(1)) }
    }
}
