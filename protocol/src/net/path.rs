//! One connection between two nodes, whatever carries it.

use std::net::SocketAddr;
use std::time::Duration;

use quinn::{Connection, ConnectionError, VarInt};

use super::delivery::Delivery;
use super::outgoing::Outgoing;
use super::quic;
use super::tcp::Lanes;

/// What carries a link, the best first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Kind {
    /// QUIC over UDP.
    Quic,
    /// TLS over several TCP connections.
    Tcp,
}

impl Kind {
    /// All kinds, the best first.
    pub const ALL: [Self; 2] = [Self::Quic, Self::Tcp];

    /// Its name, for people.
    pub fn name(self) -> &'static str {
        match self {
            Self::Quic => "quic",
            Self::Tcp => "tcp",
        }
    }
}

/// Why a side ends a connection on purpose. The numbers are on the wire.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Code {
    Done = 0,
    UnknownPeer = 1,
    BadFrame = 2,
    Replaced = 3,
}

impl Code {
    pub(super) fn from_byte(byte: u8) -> Option<Self> {
        [Self::Done, Self::UnknownPeer, Self::BadFrame, Self::Replaced].into_iter().find(|code| *code as u8 == byte)
    }

    /// For the other side's user.
    pub(super) fn explain(self) -> &'static str {
        match self {
            Self::Done => "the node stops",
            Self::UnknownPeer => "not a peer of this run",
            Self::BadFrame => "you sent a bad frame",
            Self::Replaced => "replaced by a new connection",
        }
    }

    pub(super) fn to_quic(self) -> VarInt {
        VarInt::from_u32(self as u32)
    }
}

/// How a connection ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct End {
    pub(super) reason: String,
    /// One of the two processes wanted it; else the path or the other process failed.
    pub(super) word: bool,
}

impl From<ConnectionError> for End {
    fn from(error: ConnectionError) -> Self {
        let word = matches!(error, ConnectionError::ApplicationClosed(_) | ConnectionError::LocallyClosed);
        Self { reason: error.to_string(), word }
    }
}

/// One connection.
pub(super) enum Path {
    Quic(Connection),
    Tcp(Lanes),
}

impl Path {
    pub(super) fn kind(&self) -> Kind {
        match self {
            Self::Quic(_) => Kind::Quic,
            Self::Tcp(_) => Kind::Tcp,
        }
    }

    /// Sends a frame; returns when the other side has it.
    pub(super) async fn send(&self, delivery: Delivery, outgoing: &Outgoing) -> Result<(), String> {
        match self {
            Self::Quic(connection) => quic::write_frame(connection, delivery, outgoing).await,
            Self::Tcp(lanes) => lanes.send(delivery, outgoing).await,
        }
    }

    pub(super) fn close(&self, code: Code, reason: &str) {
        match self {
            Self::Quic(connection) => connection.close(code.to_quic(), reason.as_bytes()),
            Self::Tcp(lanes) => lanes.close(code, reason),
        }
    }

    /// Ends it because nothing comes over it. QUIC knows that by itself.
    pub(super) fn abandon(&self, reason: &str) {
        match self {
            Self::Quic(_) => {}
            Self::Tcp(lanes) => lanes.abandon(reason),
        }
    }

    /// Waits, after its end, until the other side was told. QUIC's endpoint does that for all.
    pub(super) async fn left(&self) {
        match self {
            Self::Quic(_) => {}
            Self::Tcp(lanes) => lanes.left().await,
        }
    }

    /// How it ended, if it has.
    pub(super) fn ended(&self) -> Option<End> {
        match self {
            Self::Quic(connection) => connection.close_reason().map(End::from),
            Self::Tcp(lanes) => lanes.ended(),
        }
    }

    /// Waits for its end.
    pub(super) async fn closed(&self) -> End {
        match self {
            Self::Quic(connection) => connection.closed().await.into(),
            Self::Tcp(lanes) => lanes.closed().await,
        }
    }

    /// Smoothed round trip, once measured.
    pub(super) fn rtt(&self) -> Option<Duration> {
        match self {
            Self::Quic(connection) => Some(connection.rtt()),
            Self::Tcp(lanes) => lanes.rtt(),
        }
    }

    /// Rises whenever anything comes from the other side, which says something twice a second.
    pub(super) fn heard(&self) -> u64 {
        match self {
            Self::Quic(connection) => connection.stats().udp_rx.datagrams,
            Self::Tcp(lanes) => lanes.heard(),
        }
    }

    pub(super) fn remote(&self) -> SocketAddr {
        match self {
            Self::Quic(connection) => connection.remote_address(),
            Self::Tcp(lanes) => lanes.remote(),
        }
    }
}
