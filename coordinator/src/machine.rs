//! The coordinator as a state machine: events in, actions out, no I/O.

use std::sync::Arc;

use skein_protocol::config::RunConfig;
use skein_protocol::id::{NodeId, RunId};
use skein_protocol::message::control::{FromCoordinator, ToCoordinator};
use skein_protocol::model::Structure;
use skein_protocol::sign::Signer;
use skein_protocol::time::Time;

use crate::record::Record;
use crate::status::Status;

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

/// The coordinator.
#[derive(Debug)]
pub struct Coordinator {
    config: RunConfig,
    run: RunId,
}

impl Coordinator {
    /// A coordinator that goes on where `log` ends. `boot` counts its starts.
    pub fn new(config: RunConfig, _structure: Structure, id: NodeId, _signer: Arc<dyn Signer>, _boot: u64, _log: Vec<Record>) -> Self {
        Self { run: config.run_id(id), config }
    }

    /// Takes one event in; what is to be done comes out.
    pub fn handle(&mut self, _now: Time, event: Event, actions: &mut Vec<Action>) {
        if matches!(event, Event::Stop) {
            actions.push(Action::Stopped);
        }
    }

    /// When to call with [`Event::Timer`] if nothing else happens.
    pub fn next_timeout(&self) -> Option<Time> {
        None
    }

    /// The run that this coordinates.
    pub fn run(&self) -> RunId {
        self.run
    }

    /// The run at a moment.
    pub fn status(&self, _now: Time) -> Status {
        Status { name: self.config.run.name.clone(), run: self.run.to_string(), ..Status::default() }
    }
}
