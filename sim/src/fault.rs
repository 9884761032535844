//! When a node dies: at every point of its work that a rule of the protocol guards.

use serde::{Deserialize, Serialize};
use skein_node::engine::Task;
use skein_node::machine::{Action, Event};
use skein_protocol::message::control::{FromCoordinator, ToCoordinator};
use skein_protocol::message::data::PeerMessage;

/// A point in a node's work. The coordinator's own are the operations of its log
/// ([`crate::plan::Plan::coordinator_dies_at`]).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum CrashPoint {
    /// Dialled, not welcomed.
    Handshake,
    /// A task is on its doorstep.
    BeforeAccept,
    /// Computing forward.
    MidForward,
    /// The activations are sent.
    AfterActivations,
    /// Computing backward.
    MidBackward,
    /// The input gradient is sent, the ledger does not know.
    AfterGradientBeforeDone,
    /// The ledger is told, its answer is on the way.
    AfterDoneBeforeCounted,
    /// The answer is here, the sum is not added to.
    AfterCountedBeforeAdd,
    /// Some of its contribution is sent.
    MidReduceScatter,
    /// Some of its reduced slice is sent.
    MidAllGather,
    /// It holds the result and has said so.
    AfterDigestBeforeCommit,
    /// The commit is on its doorstep.
    AfterCommitBeforeApply,
    /// It has applied and said so.
    AfterApplyBeforeRetire,
    /// A joiner has some of its snapshot.
    DonorMidSnapshot,
    /// It has some of a snapshot.
    JoinerMidCatchup,
    /// Leases are out.
    FeederWithLeases,
    /// It has said that it leaves.
    Draining,
    /// A shard is half written.
    WritingCheckpoint,
}

impl CrashPoint {
    /// All of them.
    pub const ALL: [Self; 18] = [
        Self::Handshake,
        Self::BeforeAccept,
        Self::MidForward,
        Self::AfterActivations,
        Self::MidBackward,
        Self::AfterGradientBeforeDone,
        Self::AfterDoneBeforeCounted,
        Self::AfterCountedBeforeAdd,
        Self::MidReduceScatter,
        Self::MidAllGather,
        Self::AfterDigestBeforeCommit,
        Self::AfterCommitBeforeApply,
        Self::AfterApplyBeforeRetire,
        Self::DonorMidSnapshot,
        Self::JoinerMidCatchup,
        Self::FeederWithLeases,
        Self::Draining,
        Self::WritingCheckpoint,
    ];

    /// The point reached when `event` is about to be delivered.
    pub fn before(event: &Event) -> Option<Self> {
        match event {
            Event::Peer { frame, .. } => match &frame.message {
                PeerMessage::Forward { .. } => Some(Self::BeforeAccept),
                PeerMessage::StateChunk { .. } => Some(Self::JoinerMidCatchup),
                PeerMessage::Backward { .. }
                | PeerMessage::Missing { .. }
                | PeerMessage::Finished { .. }
                | PeerMessage::HopFailed { .. }
                | PeerMessage::Contribution { .. }
                | PeerMessage::ReducedChunk { .. }
                | PeerMessage::FetchReduced { .. }
                | PeerMessage::FetchSnapshot { .. }
                | PeerMessage::SnapshotManifest { .. }
                | PeerMessage::FetchStateChunk { .. }
                | PeerMessage::Unavailable { .. }
                | PeerMessage::FetchBlob { .. }
                | PeerMessage::Blob { .. }
                | PeerMessage::NoBlob { .. } => None,
            },
            Event::Control(FromCoordinator::Commit(_)) => Some(Self::AfterCommitBeforeApply),
            Event::Control(_)
            | Event::ControlUp
            | Event::ControlDown { .. }
            | Event::LinkDown(_)
            | Event::Computed(_)
            | Event::ShardSaved { .. }
            | Event::ShardLoaded { .. }
            | Event::Leave
            | Event::Timer => None,
        }
    }

    /// The point reached when `event` has been handled and none of its actions performed.
    pub fn after(event: &Event) -> Option<Self> {
        match event {
            Event::Control(FromCoordinator::Counted { .. }) => Some(Self::AfterCountedBeforeAdd),
            Event::Control(FromCoordinator::Lease { .. }) => Some(Self::FeederWithLeases),
            Event::Control(_)
            | Event::Peer { .. }
            | Event::ControlUp
            | Event::ControlDown { .. }
            | Event::LinkDown(_)
            | Event::Computed(_)
            | Event::ShardSaved { .. }
            | Event::ShardLoaded { .. }
            | Event::Leave
            | Event::Timer => None,
        }
    }

    /// The point reached when `action` has been performed (a computation: begun).
    pub fn at(action: &Action) -> Option<Self> {
        match action {
            Action::Connect => Some(Self::Handshake),
            Action::Tell(ToCoordinator::Done { .. }) => Some(Self::AfterDoneBeforeCounted),
            Action::Tell(ToCoordinator::Reduced { .. }) => Some(Self::AfterDigestBeforeCommit),
            Action::Tell(ToCoordinator::Applied { .. }) => Some(Self::AfterApplyBeforeRetire),
            Action::Tell(ToCoordinator::Leaving) => Some(Self::Draining),
            Action::SaveShard { .. } => Some(Self::WritingCheckpoint),
            Action::Compute(Task::Forward { .. }) => Some(Self::MidForward),
            Action::Compute(Task::Backward { .. }) => Some(Self::MidBackward),
            Action::Send { frame, .. } => match &frame.message {
                PeerMessage::Forward { hop, .. } if *hop > 0 => Some(Self::AfterActivations),
                PeerMessage::Backward { .. } => Some(Self::AfterGradientBeforeDone),
                PeerMessage::Contribution { .. } => Some(Self::MidReduceScatter),
                PeerMessage::ReducedChunk { .. } => Some(Self::MidAllGather),
                PeerMessage::StateChunk { .. } => Some(Self::DonorMidSnapshot),
                PeerMessage::Forward { .. }
                | PeerMessage::Missing { .. }
                | PeerMessage::Finished { .. }
                | PeerMessage::HopFailed { .. }
                | PeerMessage::FetchReduced { .. }
                | PeerMessage::FetchSnapshot { .. }
                | PeerMessage::SnapshotManifest { .. }
                | PeerMessage::FetchStateChunk { .. }
                | PeerMessage::Unavailable { .. }
                | PeerMessage::FetchBlob { .. }
                | PeerMessage::Blob { .. }
                | PeerMessage::NoBlob { .. } => None,
            },
            Action::Tell(_)
            | Action::Peers(_)
            | Action::Compute(_)
            | Action::LoadShard { .. }
            | Action::PruneShards { .. }
            | Action::Report(_)
            | Action::Exit { .. } => None,
        }
    }
}
