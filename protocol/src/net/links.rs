//! The data plane: frames between nodes over QUIC, one connection a pair where possible, one
//! stream a frame.
//!
//! A connection is dialled when there is something to send. Both sides check the other's key; a
//! node is let in if [`Links::set_peers`] named it. A frame either arrives whole or ends in
//! [`LinkEvent::Down`]. Nothing here blocks the caller: what a peer does not take ends its link.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use futures::StreamExt;
use futures::stream::FuturesUnordered;
use quinn::{Connection, Endpoint, Incoming, TokioRuntime, TransportConfig};
use tokio::runtime::Handle;
use tokio::sync::{Notify, Semaphore, mpsc, watch};
use tokio::time::{Instant, sleep_until, timeout};
use tokio_util::sync::{CancellationToken, DropGuard};

use super::outgoing::{Outgoing, Queue, RateMeter};
use super::quic::{self, Arrivals, Tls};
use super::{Identity, NetError, parse_address};
use crate::id::NodeId;
use crate::limits;
use crate::message::control::Peer;
use crate::message::data::Frame;

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
    /// The link to a node is gone, or a frame to it could not be delivered. What was sent before
    /// and has not arrived is lost; the next frame dials again.
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
    /// What carries it.
    pub kind: &'static str,
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
/// A dial takes at most so long.
const DIAL_MAX: Duration = Duration::from_secs(3);
/// First and longest wait between failed dials of one node.
const BACKOFF: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(2));
/// How long a node that is not known yet may wait at the door: the coordinator tells some nodes
/// of a newcomer a moment before others.
const DOOR_MAX: Duration = Duration::from_secs(1);
/// Connections in the middle of a handshake or at the door.
const HANDSHAKES_MAX: usize = 128;
/// With more than so many, an address must prove itself before a handshake.
const HANDSHAKES_TRUSTED: usize = 32;
/// Frames that wait for this process to look at them; few, since each may be large.
const FRAMES_WAITING: usize = 32;

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
    /// For ends on one machine, and for all others.
    transports: [Arc<TransportConfig>; 2],
    servers: [Arc<quinn::ServerConfig>; 2],
    dial_override: BTreeMap<NodeId, SocketAddr>,
    runtime: Handle,
    links: Mutex<BTreeMap<NodeId, Arc<Link>>>,
    /// Rises when `links` changes.
    changed: watch::Sender<u64>,
    events: mpsc::Sender<LinkEvent>,
    downs: Mutex<BTreeMap<NodeId, String>>,
    down: Notify,
    stop: CancellationToken,
}

/// All about one node.
struct Link {
    node: NodeId,
    queue: Mutex<Queue>,
    work: Notify,
    /// It has connected to us.
    came: Notify,
    state: Mutex<LinkState>,
    sent: AtomicU64,
    received: AtomicU64,
    rate: Mutex<RateMeter>,
    stop: CancellationToken,
}

#[derive(Default)]
struct LinkState {
    addresses: Vec<SocketAddr>,
    /// Newest last.
    connections: Vec<Arc<Established>>,
}

struct Established {
    connection: Connection,
    outgoing: bool,
    arrivals: Arrivals,
    /// Whether its end was reported.
    reported: AtomicBool,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Links {
    /// Listens. Must be called within a tokio runtime.
    pub async fn start(identity: &Identity, settings: LinkSettings) -> Result<(Self, mpsc::Receiver<LinkEvent>), NetError> {
        let tls = Tls::new(identity)?;
        let transports = [true, false].map(|loopback| quic::transport(settings.congestion, loopback));
        let servers = [Arc::new(tls.server(Arc::clone(&transports[0]))?), Arc::new(tls.server(Arc::clone(&transports[1]))?)];
        let refused = |error: std::io::Error| {
            let address = format!("{} (UDP)", settings.listen);
            if error.kind() == std::io::ErrorKind::AddrInUse {
                NetError::AddressInUse { address }
            } else {
                NetError::Listen { address, problem: error.to_string() }
            }
        };
        let socket = std::net::UdpSocket::bind(settings.listen).map_err(refused)?;
        // The system gives as much of it as it allows.
        let buffers = socket2::SockRef::from(&socket);
        let _ = buffers.set_recv_buffer_size(limits::SOCKET_BUFFER_BYTES).and_then(|()| buffers.set_send_buffer_size(limits::SOCKET_BUFFER_BYTES));
        let local = socket.local_addr().map_err(refused)?;
        let server = quinn::ServerConfig::clone(&servers[1]);
        let endpoint = Endpoint::new(tls.endpoint()?, Some(server), socket, Arc::new(TokioRuntime)).map_err(refused)?;
        let (events, receiver) = mpsc::channel(FRAMES_WAITING);
        let stop = CancellationToken::new();
        let shared = Arc::new(Shared {
            me: identity.node_id(),
            endpoint,
            tls,
            transports,
            servers,
            dial_override: settings.dial_override,
            runtime: Handle::current(),
            links: Mutex::default(),
            changed: watch::Sender::new(0),
            events,
            downs: Mutex::default(),
            down: Notify::new(),
            stop: stop.clone(),
        });
        tokio::spawn(accept(Arc::clone(&shared)));
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
            let link = links.entry(peer.node).or_insert_with(|| self.shared.new_link(peer.node));
            lock(&link.state).addresses = addresses;
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
        if lock(&link.queue).push(outgoing) {
            link.work.notify_one();
        } else {
            // Its connections end, and with them what is on its way.
            self.shared.fail(&link, "it does not take what it is sent".to_owned());
            for established in std::mem::take(&mut lock(&link.state).connections) {
                established.reported.store(true, Ordering::Relaxed);
                established.connection.close(quic::CODE_DONE, b"you do not take what you are sent");
            }
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
        drop(self);
        endpoint.close(quic::CODE_DONE, b"the node stops");
        let _ = timeout(FAREWELL, endpoint.wait_idle()).await;
    }
}

impl Drop for Links {
    fn drop(&mut self) {
        self.shared.endpoint.close(quic::CODE_DONE, b"the node stops");
    }
}

fn addresses(peer: &Peer) -> Vec<SocketAddr> {
    let (good, bad): (Vec<_>, Vec<_>) = peer.addresses.iter().map(|text| parse_address(text).ok_or(text)).partition(Result::is_ok);
    for text in bad.into_iter().filter_map(Result::err) {
        tracing::warn!(peer = %peer.node.short(), address = %text.escape_debug(), "not an address: ignored");
    }
    good.into_iter().filter_map(Result::ok).take(ADDRESSES_MAX).collect()
}

impl Link {
    fn stats(&self) -> LinkStats {
        LinkStats {
            kind: "quic",
            rtt: self.current().map(|established| established.connection.rtt()),
            bytes_sent: self.sent.load(Ordering::Relaxed),
            bytes_received: self.received.load(Ordering::Relaxed),
            rate: lock(&self.rate).rate(),
        }
    }

    /// The newest connection that lives.
    fn current(&self) -> Option<Arc<Established>> {
        lock(&self.state).connections.iter().rev().find(|established| established.connection.close_reason().is_none()).cloned()
    }
}

impl Shared {
    fn new_link(self: &Arc<Self>, node: NodeId) -> Arc<Link> {
        let link = Arc::new(Link {
            node,
            queue: Mutex::default(),
            work: Notify::new(),
            came: Notify::new(),
            state: Mutex::default(),
            sent: AtomicU64::new(0),
            received: AtomicU64::new(0),
            rate: Mutex::default(),
            stop: self.stop.child_token(),
        });
        let (shared, sender) = (Arc::clone(self), Arc::clone(&link));
        self.runtime.spawn(async move {
            tokio::select! {
                () = shared.send_all(&sender) => {}
                () = sender.stop.cancelled() => {
                    for established in std::mem::take(&mut lock(&sender.state).connections) {
                        established.reported.store(true, Ordering::Relaxed);
                        established.connection.close(quic::CODE_DONE, b"not a peer any more");
                    }
                }
            }
        });
        link
    }

    fn report_down(&self, peer: NodeId, reason: String) {
        tracing::debug!(peer = %peer.short(), reason, "link is down");
        lock(&self.downs).entry(peer).or_insert(reason);
        self.down.notify_one();
    }

    /// Whatever waits to be sent to this node is lost.
    fn fail(&self, link: &Link, reason: String) {
        lock(&link.queue).clear();
        self.report_down(link.node, reason);
    }

    /// A connection, or a frame on it, failed: reported once a connection.
    fn fail_once(&self, link: &Link, established: &Established, reason: String) {
        if !established.reported.swap(true, Ordering::Relaxed) {
            self.fail(link, reason);
        }
    }

    /// Sends what is queued for one node, for ever.
    async fn send_all(self: &Arc<Self>, link: &Arc<Link>) {
        let (mut backoff, mut not_before) = (BACKOFF.0, Instant::now());
        loop {
            link.work.notified().await;
            while lock(&link.queue).is_ready() {
                let established = match link.current() {
                    Some(established) => established,
                    None => match self.connect(link, not_before).await {
                        Ok(established) => {
                            backoff = BACKOFF.0;
                            established
                        }
                        Err(reason) => {
                            not_before = Instant::now() + backoff;
                            backoff = (backoff * 2).min(BACKOFF.1);
                            self.fail(link, reason);
                            continue;
                        }
                    },
                };
                let Some(outgoing) = lock(&link.queue).start() else { continue };
                lock(&link.rate).start(Instant::now().into_std());
                tokio::spawn(Arc::clone(self).deliver(Arc::clone(link), established, outgoing));
            }
        }
    }

    async fn deliver(self: Arc<Self>, link: Arc<Link>, established: Arc<Established>, outgoing: Outgoing) {
        let (class, bytes) = (outgoing.class, outgoing.payload.len());
        let sent = quic::write_frame(&established.connection, class.priority(), outgoing.head, outgoing.payload).await;
        lock(&link.queue).done(class, bytes);
        lock(&link.rate).done(Instant::now().into_std(), if sent.is_ok() { bytes } else { 0 });
        link.work.notify_one();
        match sent {
            Ok(()) => {
                link.sent.fetch_add(bytes as u64, Ordering::Relaxed);
            }
            Err(reason) => {
                // The connection knows more than the stream.
                let reason = established.connection.close_reason().map_or(reason, |error| error.to_string());
                self.fail_once(&link, &established, reason);
            }
        }
    }

    /// Dials a node, unless it comes to us meanwhile.
    async fn connect(self: &Arc<Self>, link: &Arc<Link>, not_before: Instant) -> Result<Arc<Established>, String> {
        let came = async {
            loop {
                link.came.notified().await;
                if let Some(established) = link.current() {
                    return established;
                }
            }
        };
        let dialled = async {
            sleep_until(not_before).await;
            self.dial(link).await
        };
        tokio::select! {
            established = came => Ok(established),
            dialled = dialled => dialled,
        }
    }

    /// Dials all addresses of a node; the first that answers with its key wins.
    async fn dial(self: &Arc<Self>, link: &Arc<Link>) -> Result<Arc<Established>, String> {
        let addresses = match self.dial_override.get(&link.node) {
            Some(address) => vec![*address],
            None => lock(&link.state).addresses.clone(),
        };
        let mut problem = "no address is known".to_owned();
        let attempts: FuturesUnordered<_> = addresses.into_iter().map(|address| async move { (address, self.dial_one(link.node, address).await) }).collect();
        let first = async {
            let mut attempts = attempts;
            while let Some((address, result)) = attempts.next().await {
                match result {
                    Ok(connection) => return Some(connection),
                    Err(error) => problem = format!("{address}: {error}"),
                }
            }
            None
        };
        match timeout(DIAL_MAX, first).await {
            Ok(Some(connection)) => {
                quic::admit(&connection);
                Ok(self.establish(link, connection, true))
            }
            Ok(None) => Err(problem),
            Err(_) => Err(format!("no answer within {} s", DIAL_MAX.as_secs())),
        }
    }

    async fn dial_one(&self, node: NodeId, address: SocketAddr) -> Result<Connection, String> {
        let transport = &self.transports[usize::from(!address.ip().is_loopback())];
        let config = self.tls.client(node, Arc::clone(transport)).map_err(|error| error.to_string())?;
        let connecting = self.endpoint.connect_with(config, address, quic::SERVER_NAME).map_err(|error| error.to_string())?;
        connecting.await.map_err(|error| error.to_string())
    }

    fn establish(self: &Arc<Self>, link: &Arc<Link>, connection: Connection, outgoing: bool) -> Arc<Established> {
        let established = Arc::new(Established { connection, outgoing, arrivals: Arrivals::new(), reported: AtomicBool::new(false) });
        {
            let mut state = lock(&link.state);
            // A node dials only if it knows of no connection: its earlier ones are stale.
            let stale = |older: &Arc<Established>| !outgoing && !older.outgoing;
            for older in state.connections.iter().filter(|older| stale(older)) {
                older.connection.close(quic::CODE_REPLACED, b"replaced by a new connection");
            }
            state.connections.push(Arc::clone(&established));
        }
        tracing::debug!(peer = %link.node.short(), address = %established.connection.remote_address(), outgoing, "link is up");
        self.runtime.spawn(Arc::clone(self).receive(Arc::clone(link), Arc::clone(&established)));
        established
    }

    /// Takes frames from one connection until it ends.
    async fn receive(self: Arc<Self>, link: Arc<Link>, established: Arc<Established>) {
        let error = loop {
            match established.connection.accept_uni().await {
                Ok(stream) => {
                    // As many as the peer may have streams.
                    self.runtime.spawn(Arc::clone(&self).receive_one(Arc::clone(&link), Arc::clone(&established), stream));
                }
                Err(error) => break error,
            }
        };
        let newest = {
            let mut state = lock(&link.state);
            let newest = state.connections.last().is_some_and(|last| Arc::ptr_eq(last, &established));
            state.connections.retain(|other| !Arc::ptr_eq(other, &established));
            newest
        };
        if newest {
            self.fail_once(&link, &established, error.to_string());
        }
        // Frames that were to go there are to be dialled for.
        link.work.notify_one();
    }

    async fn receive_one(self: Arc<Self>, link: Arc<Link>, established: Arc<Established>, stream: quinn::RecvStream) {
        let busy = || self.events.capacity() == 0;
        match quic::read_frame(stream, &established.arrivals, busy).await {
            Ok((frame, room)) => {
                let bytes = frame.payload.as_ref().map_or(0, |payload| payload.bytes.len());
                link.received.fetch_add(bytes as u64, Ordering::Relaxed);
                let _ = self.events.send(LinkEvent::Frame { from: link.node, frame }).await;
                drop(room);
            }
            Err(quic::ReadFrameError::Cut(reason)) => tracing::debug!(peer = %link.node.short(), reason, "a frame was cut off"),
            Err(error @ (quic::ReadFrameError::Bad(_) | quic::ReadFrameError::Stalled)) => {
                established.connection.close(quic::CODE_BAD_FRAME, error.to_string().as_bytes());
                self.fail_once(&link, &established, error.to_string());
            }
        }
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

/// Lets nodes in.
async fn accept(shared: Arc<Shared>) {
    let handshakes = Arc::new(Semaphore::new(HANDSHAKES_MAX));
    while let Some(incoming) = shared.endpoint.accept().await {
        let Ok(handshake) = Arc::clone(&handshakes).try_acquire_owned() else {
            incoming.refuse();
            continue;
        };
        let busy = handshakes.available_permits() < HANDSHAKES_MAX - HANDSHAKES_TRUSTED;
        if busy && !incoming.remote_address_validated() && incoming.may_retry() {
            let _ = incoming.retry();
            continue;
        }
        let shared = Arc::clone(&shared);
        tokio::spawn(async move {
            let address = incoming.remote_address();
            if let Err(reason) = let_in(&shared, incoming).await {
                tracing::debug!(%address, reason, "a connection was not let in");
            }
            drop(handshake);
        });
    }
}

async fn let_in(shared: &Arc<Shared>, incoming: Incoming) -> Result<(), String> {
    let server = &shared.servers[usize::from(!incoming.remote_address().ip().is_loopback())];
    let connecting = incoming.accept_with(Arc::clone(server)).map_err(|error| error.to_string())?;
    let connection = timeout(limits::HANDSHAKE_TIME_MAX, connecting).await.map_err(|_| "handshake too slow".to_owned())?.map_err(|error| error.to_string())?;
    let node = quic::remote(&connection).ok_or_else(|| "no Ed25519 key".to_owned())?;
    let mut changed = shared.changed.subscribe();
    let known = async {
        loop {
            if let Some(link) = lock(&shared.links).get(&node).cloned() {
                return link;
            }
            if changed.changed().await.is_err() {
                std::future::pending::<()>().await;
            }
        }
    };
    match timeout(DOOR_MAX, known).await {
        Ok(link) => {
            quic::admit(&connection);
            shared.establish(&link, connection, false);
            link.came.notify_one();
            Ok(())
        }
        Err(_) => {
            connection.close(quic::CODE_UNKNOWN_PEER, b"not a peer of this run");
            Err(format!("{} is not a peer of this run", node.short()))
        }
    }
}

#[cfg(test)]
mod tests;
