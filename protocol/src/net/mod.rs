//! Links: how what is said gets from one process to another.
//!
//! [`control`] is the libp2p connection between a node and its coordinator, [`links`] what carries
//! tensors between nodes: QUIC, or TLS over TCP where QUIC cannot go. Both authenticate the other side by the same Ed25519 key
//! ([`identity`]), which is its name. Nothing here decides what a message means, and nothing a
//! peer sends makes anything here panic, or hold more than [`crate::limits`] says.
//!
//! Mains install rustls's process-wide provider themselves; this module names its provider
//! wherever it needs one.

use std::net::SocketAddr;
use std::sync::{Mutex, MutexGuard, PoisonError};

use rand::TryRng;

use crate::id::NodeId;

mod arrivals;
pub mod control;
mod delivery;
pub mod identity;
pub mod links;
mod outgoing;
mod path;
mod quic;
mod session;
mod swarm;
mod tcp;
mod tls;

pub use identity::Identity;
pub use libp2p::{Multiaddr, PeerId};

/// Why something on the network did not work. One line for the user.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NetError {
    /// Another process has the address.
    #[error("cannot listen on {address}: the address is in use; stop the other process or choose another port")]
    AddressInUse {
        /// The address.
        address: String,
    },
    /// The address cannot be listened on.
    #[error("cannot listen on {address}: {problem}")]
    Listen {
        /// The address.
        address: String,
        /// What the system said.
        problem: String,
    },
    /// No connection came about.
    #[error("cannot reach {address}: {problem}")]
    Unreachable {
        /// The address.
        address: String,
        /// What went wrong.
        problem: String,
    },
    /// Someone else answers.
    #[error("{address} answers with the key {got}, not {expected}: the address is wrong or out of date")]
    WrongKey {
        /// The address.
        address: String,
        /// The key in the address.
        expected: String,
        /// The key that answered.
        got: String,
    },
    /// The other side does not speak the same framing.
    #[error("{address} does not speak this protocol: {problem}")]
    Protocol {
        /// The address.
        address: String,
        /// What is different.
        problem: String,
    },
    /// This machine lacks something.
    #[error("cannot set up the network: {0}")]
    Setup(String),
}

/// The name people see: a node's key in the form that addresses carry.
pub fn peer_id(node: NodeId) -> Option<PeerId> {
    identity::public_key(node).map(|key| key.to_peer_id())
}

/// The node that a peer is; `None` if its key is not Ed25519.
pub fn node_id(peer: &PeerId) -> Option<NodeId> {
    // The multihash of a short key is the key itself (code 0).
    let hash = peer.as_ref();
    if hash.code() != 0 {
        return None;
    }
    let key = libp2p::identity::PublicKey::try_decode_protobuf(hash.digest()).ok()?;
    key.try_into_ed25519().ok().map(|key| NodeId(key.to_bytes()))
}

/// Where a node says its data plane listens, if it is one: `ip:port`, not port 0.
fn parse_address(text: &str) -> Option<SocketAddr> {
    text.parse().ok().filter(|address: &SocketAddr| address.port() != 0 && !address.ip().is_unspecified())
}

/// What a panic left behind is as good as ever: nothing is changed in halves under these locks.
fn lock<T: ?Sized>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A number that nobody can foresee.
fn random() -> u64 {
    rand::rngs::SysRng.try_next_u64().expect("the system has random numbers")
}
