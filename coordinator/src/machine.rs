//! The coordinator as a state machine: events in, actions out, no I/O.

use skein_protocol::id::NodeId;
use skein_protocol::message::control::{FromCoordinator, ToCoordinator};

use crate::record::Record;

/// What happens to the coordinator.
#[derive(Clone, Debug)]
pub enum Event {
    /// A node's control connection stands. It will say hello.
    Connected(NodeId),
    /// A node says something.
    Received {
        /// Who.
        from: NodeId,
        /// What.
        message: ToCoordinator,
    },
    /// A node's control connection is gone.
    Disconnected(NodeId),
    /// The user wants the run to stop: save a checkpoint, then [`Action::Stopped`].
    Stop,
    /// Time has come for whatever `Coordinator::next_timeout` named.
    Timer,
}

/// What the coordinator wants done, in this order: a `Save` is durable before anything after it
/// happens.
#[derive(Clone, Debug)]
pub enum Action {
    /// Append these records, durably.
    Save(Vec<Record>),
    /// Tell a node.
    Send {
        /// Whom.
        to: NodeId,
        /// What.
        message: FromCoordinator,
    },
    /// End a node's connection, after what was sent before.
    Disconnect(NodeId),
    /// Something a person should see.
    Report(String),
    /// After [`Event::Stop`]: everything worth saving is saved.
    Stopped,
}
