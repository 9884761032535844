//! The data plane: frames between nodes, over the best path that there is between the two: QUIC, or
//! TLS over TCP where QUIC cannot go.
//!
//! A connection is dialled when there is something to send. Both sides check the other's key; a
//! node is let in if [`Links::set_peers`] named it. A frame arrives once: if its connection ends
//! before it is through, it goes on another, of whatever kind, and the receiver takes it once. Only
//! if no connection comes about, or the other process is not the same any more, what was under way
//! is lost and [`LinkEvent::Down`] says so. Nothing here blocks the caller: what a peer does not
//! take ends its link.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use quinn::{Endpoint, TokioRuntime, TransportConfig};
use tokio::runtime::Handle;
use tokio::sync::{Notify, mpsc, watch};
use tokio::time::timeout;
use tokio_util::sync::{CancellationToken, DropGuard};

use self::link::Link;
use super::outgoing::{Outgoing, Sessions};
use super::path::Code;
pub use super::path::Kind;
use super::tls::Tls;
use super::{Identity, NetError, lock, parse_address, quic};
use crate::id::NodeId;
use crate::limits;
use crate::message::control::Peer;
use crate::message::data::Frame;

mod dial;
mod door;
mod link;

/// How connections share the path.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Congestion {
    /// CUBIC: fair to others.
    #[default]
    Cubic,
    /// BBR: better on paths that lose packets.
    Bbr,
}

/// How links are set up.
#[derive(Clone, Debug)]
pub struct LinkSettings {
    /// Where to listen; port 0 lets the system choose.
    pub listen: SocketAddr,
    /// Dial these nodes here, whatever their addresses say (proxies, forwarded ports).
    pub dial_override: BTreeMap<NodeId, SocketAddr>,
    /// Congestion control of what this node sends.
    pub congestion: Congestion,
    /// What may carry links.
    pub kinds: BTreeSet<Kind>,
}

impl LinkSettings {
    /// The usual settings, listening there.
    pub fn new(listen: SocketAddr) -> Self {
        Self { listen, dial_override: BTreeMap::new(), congestion: Congestion::default(), kinds: Kind::ALL.into() }
    }
}

/// What happens on the links.
#[derive(Clone, Debug, PartialEq)]
pub enum LinkEvent {
    /// A node says something.
    Frame {
        /// Who.
        from: NodeId,
        /// What.
        frame: Frame,
    },
    /// The node cannot be reached, or it has begun anew. What was sent before and has not arrived is
    /// lost; the next frame dials again.
    Down {
        /// Whose.
        peer: NodeId,
        /// Why, for the user.
        reason: String,
    },
}

/// What is known about the link to one node.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LinkStats {
    /// What carries it; what did last if there is no connection.
    pub kind: Kind,
    /// Smoothed round trip; `None` while there is no connection.
    pub rtt: Option<Duration>,
    /// Payload bytes delivered to it.
    pub bytes_sent: u64,
    /// Payload bytes received from it.
    pub bytes_received: u64,
    /// Measured goodput towards it in bytes a second; 0 until enough was sent.
    pub rate: f64,
}

/// Addresses of one node that are tried, all at once.
const ADDRESSES_MAX: usize = 8;
/// Frames that wait for this process to look at them; few, since each may be large.
const FRAMES_WAITING: usize = 32;
/// So many times the system is asked for a port that is free for UDP and for TCP.
const PORT_TRIES: usize = 32;

/// This node's links. Dropping it closes them.
pub struct Links {
    shared: Arc<Shared>,
    local: SocketAddr,
    _stop: DropGuard,
}

struct Shared {
    me: NodeId,
    endpoint: Endpoint,
    tls: Tls,
    kinds: BTreeSet<Kind>,
    /// For ends on one machine, and for all others.
    transports: [Arc<TransportConfig>; 2],
    servers: [Arc<quinn::ServerConfig>; 2],
    dial_override: BTreeMap<NodeId, SocketAddr>,
    runtime: Handle,
    links: Mutex<BTreeMap<NodeId, Arc<Link>>>,
    sessions: Sessions,
    /// Rises when `links` changes.
    changed: watch::Sender<u64>,
    events: mpsc::Sender<LinkEvent>,
    downs: Mutex<BTreeMap<NodeId, String>>,
    down: Notify,
    stop: CancellationToken,
}

impl Links {
    /// Listens. Must be called within a tokio runtime.
    pub async fn start(identity: &Identity, settings: LinkSettings) -> Result<(Self, mpsc::Receiver<LinkEvent>), NetError> {
        let tls = Tls::new(identity)?;
        let transports = [true, false].map(|loopback| quic::transport(settings.congestion, loopback));
        let servers = [Arc::new(quic::server(&tls, Arc::clone(&transports[0]))?), Arc::new(quic::server(&tls, Arc::clone(&transports[1]))?)];
        let (socket, listener) = bind(settings.listen)?;
        // The system gives as much of it as it allows.
        let buffers = socket2::SockRef::from(&socket);
        let _ = buffers.set_recv_buffer_size(limits::SOCKET_BUFFER_BYTES).and_then(|()| buffers.set_send_buffer_size(limits::SOCKET_BUFFER_BYTES));
        let refused = |error: &std::io::Error| refused(settings.listen, "UDP", error);
        let local = socket.local_addr().map_err(|error| refused(&error))?;
        let server = quinn::ServerConfig::clone(&servers[1]);
        let endpoint = Endpoint::new(quic::endpoint(&tls)?, Some(server), socket, Arc::new(TokioRuntime)).map_err(|error| refused(&error))?;
        let listener = listener.set_nonblocking(true).and_then(|()| tokio::net::TcpListener::from_std(listener)).map_err(|error| refused(&error))?;
        let acceptor = tokio_rustls::TlsAcceptor::from(Arc::new(tls.server(super::tcp::ALPN)?));
        let (events, receiver) = mpsc::channel(FRAMES_WAITING);
        let stop = CancellationToken::new();
        let shared = Arc::new(Shared {
            me: identity.node_id(),
            endpoint,
            tls,
            kinds: settings.kinds,
            transports,
            servers,
            dial_override: settings.dial_override,
            runtime: Handle::current(),
            links: Mutex::default(),
            sessions: Sessions::default(),
            changed: watch::Sender::new(0),
            events,
            downs: Mutex::default(),
            down: Notify::new(),
            stop: stop.clone(),
        });
        tokio::spawn(door::accept_quic(Arc::clone(&shared)));
        if shared.kinds.contains(&Kind::Tcp) {
            tokio::spawn(door::accept_tcp(Arc::clone(&shared), listener, acceptor));
        }
        tokio::spawn(report(Arc::clone(&shared)));
        Ok((Self { shared, local, _stop: stop.drop_guard() }, receiver))
    }

    /// Where it listens.
    pub fn local_addr(&self) -> SocketAddr {
        self.local
    }

    /// These nodes may connect, and are found there. Links to others are closed.
    pub fn set_peers(&self, peers: &[Peer]) {
        let mut links = lock(&self.shared.links);
        let named: BTreeSet<NodeId> = peers.iter().map(|peer| peer.node).collect();
        links.retain(|node, link| {
            let stays = named.contains(node);
            if !stays {
                link.stop.cancel();
            }
            stays
        });
        for peer in peers.iter().filter(|peer| peer.node != self.shared.me) {
            let addresses = addresses(peer);
            let link = links.entry(peer.node).or_insert_with(|| link::start(&self.shared, peer.node));
            link.set_addresses(addresses);
        }
        drop(links);
        self.shared.changed.send_modify(|changes| *changes += 1);
    }

    /// Sends a frame; never blocks. If it cannot be delivered, [`LinkEvent::Down`] follows.
    pub fn send(&self, to: NodeId, frame: Frame) {
        let Some(link) = lock(&self.shared.links).get(&to).cloned() else {
            return self.shared.report_down(to, "not a peer of this run".to_owned());
        };
        let outgoing = match Outgoing::new(frame) {
            Ok(outgoing) => outgoing,
            Err(error) => return self.shared.report_down(to, format!("a frame cannot be sent: {error}")),
        };
        if !link.push(outgoing) {
            // Its connections end, and with them what is on its way.
            self.shared.fail(&link, "it does not take what it is sent".to_owned());
            link.close_all(Code::Done, "you do not take what you are sent");
        }
    }

    /// What is known about each link.
    pub fn stats(&self) -> BTreeMap<NodeId, LinkStats> {
        let links: Vec<Arc<Link>> = lock(&self.shared.links).values().cloned().collect();
        links.into_iter().map(|link| (link.node, link.stats())).collect()
    }

    /// Closes all links, telling the other sides, and returns when that is done or has taken too
    /// long. What has not arrived is lost.
    pub async fn shutdown(self) {
        const FAREWELL: Duration = Duration::from_secs(1);
        let endpoint = self.shared.endpoint.clone();
        let links: Vec<Arc<Link>> = lock(&self.shared.links).values().cloned().collect();
        let connections: Vec<_> = links.iter().flat_map(|link| link.connections()).collect();
        drop(self);
        let left = futures::future::join_all(connections.iter().map(|established| established.left()));
        let _ = timeout(FAREWELL, futures::future::join(endpoint.wait_idle(), left)).await;
    }
}

impl Drop for Links {
    fn drop(&mut self) {
        for link in lock(&self.shared.links).values() {
            link.close_all(Code::Done, "the node stops");
        }
        self.shared.endpoint.close(Code::Done.to_quic(), b"the node stops");
    }
}

fn addresses(peer: &Peer) -> Vec<SocketAddr> {
    let (good, bad): (Vec<_>, Vec<_>) = peer.addresses.iter().map(|text| parse_address(text).ok_or(text)).partition(Result::is_ok);
    for text in bad.into_iter().filter_map(Result::err) {
        tracing::warn!(peer = %peer.node.short(), address = %text.escape_debug(), "not an address: ignored");
    }
    good.into_iter().filter_map(Result::ok).take(ADDRESSES_MAX).collect()
}

/// A port for UDP, and the same for TCP.
fn bind(listen: SocketAddr) -> Result<(std::net::UdpSocket, std::net::TcpListener), NetError> {
    let mut tries = if listen.port() == 0 { PORT_TRIES } else { 1 };
    loop {
        let socket = std::net::UdpSocket::bind(listen).map_err(|error| refused(listen, "UDP", &error))?;
        let local = socket.local_addr().map_err(|error| refused(listen, "UDP", &error))?;
        tries -= 1;
        match std::net::TcpListener::bind(local) {
            Ok(listener) => return Ok((socket, listener)),
            Err(error) if error.kind() == std::io::ErrorKind::AddrInUse && tries > 0 => {}
            Err(error) => return Err(refused(local, "TCP", &error)),
        }
    }
}

fn refused(address: SocketAddr, transport: &str, error: &std::io::Error) -> NetError {
    let address = format!("{address} ({transport})");
    if error.kind() == std::io::ErrorKind::AddrInUse { NetError::AddressInUse { address } } else { NetError::Listen { address, problem: error.to_string() } }
}

impl Shared {
    fn report_down(&self, peer: NodeId, reason: String) {
        tracing::debug!(peer = %peer.short(), reason, "link is down");
        lock(&self.downs).entry(peer).or_insert(reason);
        self.down.notify_one();
    }

    /// Whatever waits to be sent to this node, or is on its way there, is lost.
    fn fail(&self, link: &Link, reason: String) {
        link.give_up();
        self.report_down(link.node, reason);
    }
}

/// Reports ended links without making anyone wait.
async fn report(shared: Arc<Shared>) {
    loop {
        tokio::select! {
            () = shared.down.notified() => {}
            () = shared.stop.cancelled() => return,
        }
        let downs = std::mem::take(&mut *lock(&shared.downs));
        for (peer, reason) in downs {
            if shared.events.send(LinkEvent::Down { peer, reason }).await.is_err() {
                return;
            }
        }
    }
}

#[cfg(test)]
mod fallback_tests;
#[cfg(test)]
mod tests;
