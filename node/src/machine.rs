//! The node as a state machine: events in, actions out, no I/O.

use skein_protocol::id::{Group, NodeId, Version};
use skein_protocol::message::control::{FromCoordinator, Peer, ToCoordinator};
use skein_protocol::message::data::Frame;

use crate::engine::{Outcome, Snapshot, Task};

/// What happens to a node.
#[derive(Clone, Debug)]
pub enum Event {
    /// The control connection stands; the machine says hello.
    ControlUp,
    /// The control connection is gone, or could not be made.
    ControlDown {
        /// Why, for the user.
        reason: String,
    },
    /// The coordinator says something. The shell holds back a `Welcome` until the run's data is here.
    Control(FromCoordinator),
    /// A node says something. The shell has authenticated it and checked the frame's form.
    Peer {
        /// Who.
        from: NodeId,
        /// What.
        frame: Frame,
    },
    /// The link to a node is gone, or a frame to it could not be delivered.
    LinkDown(NodeId),
    /// The engine has done the oldest task it had not answered yet.
    Computed(Outcome),
    /// A shard is durable, or could not be saved.
    ShardSaved {
        /// The group.
        group: Group,
        /// The version.
        version: Version,
        /// Why not.
        result: Result<(), String>,
    },
    /// A shard was read and verified, or could not be.
    ShardLoaded {
        /// The group.
        group: Group,
        /// The version.
        version: Version,
        /// The state, or why not.
        result: Result<Snapshot, String>,
    },
    /// The user wants to leave gracefully.
    Leave,
    /// Time has come for whatever [`Node::next_timeout`](crate::machine) named.
    Timer,
}

/// What a node wants done, in this order.
#[derive(Clone, Debug)]
pub enum Action {
    /// Dial the coordinator; ends in [`Event::ControlUp`] or [`Event::ControlDown`].
    Connect,
    /// Tell the coordinator.
    Tell(ToCoordinator),
    /// Tell a node; delivery is not certain, failure to deliver ends in [`Event::LinkDown`].
    Send {
        /// Whom.
        to: NodeId,
        /// What.
        frame: Frame,
    },
    /// These are the nodes to accept links from and where to find them.
    Peers(Vec<Peer>),
    /// Run a task; the engine answers in order.
    Compute(Task),
    /// Make a snapshot durable as a checkpoint shard.
    SaveShard(Snapshot),
    /// Read a checkpoint shard.
    LoadShard {
        /// The group.
        group: Group,
        /// The version.
        version: Version,
    },
    /// Delete checkpoint shards of versions below this.
    PruneShards {
        /// The oldest version to keep.
        keep_from: Version,
    },
    /// Something a person should see.
    Report(Report),
    /// The node's part is over: stop, with this line for the user.
    Exit {
        /// Whether this is how it should end.
        ok: bool,
        /// Why.
        reason: String,
    },
}

/// What a node tells its user.
#[derive(Clone, Debug, PartialEq)]
pub enum Report {
    /// Where the node stands, in words.
    State(String),
    /// A step is committed.
    Committed {
        /// The step.
        step: u64,
        /// Mean loss in nats a token.
        loss: f32,
    },
    /// Something is wrong, and what the node does about it.
    Trouble(String),
}
