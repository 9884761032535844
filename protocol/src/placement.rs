//! Who hosts what: the document that the coordinator sends whenever it changes.

use bincode::{Decode, Encode};

use crate::id::{Block, Epoch, Group, Hash, NodeId, Span, Timeline, Version};

/// What a placed node is to the others.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Encode, Decode)]
pub enum Standing {
    /// Has the weights of its span and takes work.
    Active,
    /// Listens and fetches: it receives what is reduced from `from.step()` on, and donors keep a
    /// snapshot of version `from` for it. Takes no work; nobody waits for it.
    Joining {
        /// The version whose snapshot it fetches.
        from: Version,
    },
}

/// One node's place.
#[derive(Clone, Debug, PartialEq, Encode, Decode)]
pub struct Seat {
    /// The node.
    pub node: NodeId,
    /// What it hosts.
    pub span: Span,
    /// Whether it works or is still joining.
    pub standing: Standing,
    /// Whether the coordinator has not heard from it lately: no work should go there.
    pub suspect: bool,
    /// Measured microbatches a second through its span, for choosing routes.
    pub rate: f32,
}

/// Where a node that lacks state finds version `base` of a group.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
pub struct Source {
    /// The group.
    pub group: Group,
    /// Nodes that can serve it; empty means it is drawn from the seed (version 0) or imported.
    pub holders: Vec<NodeId>,
    /// Root of its state; means nothing without holders.
    pub root: Hash,
}

/// One version of the placement.
#[derive(Clone, Debug, Default, PartialEq, Encode, Decode)]
pub struct Placement {
    /// Rises with each change.
    pub epoch: Epoch,
    /// The timeline it belongs to.
    pub timeline: Timeline,
    /// The version that this timeline started from.
    pub base: Version,
    /// Where version `base` comes from when it is not drawn from the seed.
    pub sources: Vec<Source>,
    /// The seats, by ascending node.
    pub seats: Vec<Seat>,
}

impl Placement {
    /// The seat of `node`.
    pub fn seat(&self, node: NodeId) -> Option<&Seat> {
        self.seats.binary_search_by_key(&node, |seat| seat.node).ok().map(|index| &self.seats[index])
    }

    /// Active seats.
    pub fn active(&self) -> impl Iterator<Item = &Seat> {
        self.seats.iter().filter(|seat| seat.standing == Standing::Active)
    }

    /// Active seats that host `block`.
    pub fn replicas(&self, block: Block) -> impl Iterator<Item = &Seat> {
        self.active().filter(move |seat| seat.span.contains(block))
    }
}
