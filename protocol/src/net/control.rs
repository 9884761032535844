//! The control plane: one libp2p connection over TCP between a node and its coordinator, and on
//! it one substream that carries frames both ways for as long as the connection lives.
//!
//! TCP, because a killed process closes it at once. The coordinator answers a new substream with
//! an empty frame, so that a node knows that it is heard before it says hello.

#![expect(clippy::wildcard_enum_match_arm, reason = "libp2p's events and the system's errors grow; ours are matched in full")]

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures::{AsyncWriteExt, FutureExt, StreamExt};
use libp2p::core::transport::ListenerId;
use libp2p::multiaddr::Protocol;
use libp2p::swarm::dial_opts::DialOpts;
use libp2p::swarm::{ConnectionId, DialError, SwarmEvent};
use libp2p::{Multiaddr, PeerId, Stream, Swarm, TransportError, ping};
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio::time::{Instant, timeout, timeout_at};
use tokio_util::sync::{CancellationToken, DropGuard};

pub use super::identity::CoordinatorAddress;
use super::session::{self, First, Inbox, Outbox};
use super::swarm::{self, Behaviour, BehaviourEvent, CONTROL};
use super::{Identity, NetError, lock, node_id};
use crate::id::NodeId;
use crate::limits;
use crate::message::VERSIONS;
use crate::message::control::{FromCoordinator, ToCoordinator};
use crate::wire;

/// What happens on the control plane.
#[derive(Clone, Debug, PartialEq)]
pub enum ControlEvent<M> {
    /// A connection stands.
    Up(NodeId),
    /// Someone says something.
    Message(NodeId, M),
    /// A connection is gone.
    Down {
        /// Whose.
        node: NodeId,
        /// Why, for the user.
        reason: String,
    },
}

/// The coordinator's end. Dropping it ends everything at once; see [`ControlServer::shutdown`].
///
/// Per node, events come as `Up`, then messages, then `Down`. A second connection of a node ends
/// its first: `Down`, then `Up`. What is sent to a node between the two goes to the newer
/// connection or nowhere.
pub struct ControlServer {
    sessions: Sessions,
    stopped: mpsc::Receiver<()>,
    _stop: DropGuard,
    addresses: Vec<Multiaddr>,
}

struct Session {
    outbox: Outbox,
    number: u64,
    task: JoinHandle<()>,
}

type Sessions = Arc<Mutex<BTreeMap<NodeId, Session>>>;

impl ControlServer {
    /// Listens on all of `listen` and takes connections. Port 0 lets the system choose:
    /// [`ControlServer::addresses`] has what it chose. Must be called within a tokio runtime.
    pub async fn start(identity: &Identity, listen: Vec<Multiaddr>) -> Result<(Self, mpsc::Receiver<ControlEvent<ToCoordinator>>), NetError> {
        Self::start_with(identity, listen, limits::HANDSHAKE_TIME_MAX).await
    }

    /// As [`ControlServer::start`]; connections without a control substream end after `idle`.
    async fn start_with(identity: &Identity, listen: Vec<Multiaddr>, idle: Duration) -> Result<(Self, mpsc::Receiver<ControlEvent<ToCoordinator>>), NetError> {
        let mut swarm = swarm::build(identity, idle, false)?;
        let addresses = self::listen(&mut swarm, listen).await?;
        let (events, receiver) = mpsc::channel(limits::EVENT_QUEUE);
        let (hangups, hung_up) = mpsc::channel(limits::EVENT_QUEUE);
        let (running, stopped) = mpsc::channel(1);
        let (sessions, stop) = (Sessions::default(), CancellationToken::new());
        let server = Server { swarm, sessions: Arc::clone(&sessions), events, hangups, newest: BTreeMap::new(), opened: 0, _running: running };
        tokio::spawn(server.run(hung_up, stop.clone()));
        Ok((Self { sessions, stopped, _stop: stop.drop_guard(), addresses }, receiver))
    }

    /// Where it listens, without the key; see [`CoordinatorAddress`] for what people copy.
    pub fn addresses(&self) -> &[Multiaddr] {
        &self.addresses
    }

    /// Tells a node; never blocks. A node that does not take what it is sent is disconnected. To
    /// a node that is not connected nothing is sent: its `Down` is on its way.
    pub fn send(&self, node: NodeId, message: &FromCoordinator) {
        let outbox = lock(&self.sessions).get(&node).map(|session| session.outbox.clone());
        match outbox {
            Some(outbox) => outbox.push(message),
            None => tracing::debug!(peer = %node.short(), "not connected: message dropped"),
        }
    }

    /// Ends a node's connection after what was sent before.
    pub fn disconnect(&self, node: NodeId) {
        if let Some(session) = lock(&self.sessions).get(&node) {
            session.outbox.finish("disconnected by the coordinator");
        }
    }

    /// Stops listening, ends all connections after what was sent before, and returns when that is
    /// done or has taken too long.
    pub async fn shutdown(self) {
        let Self { sessions, mut stopped, _stop: stop, .. } = self;
        let tasks: Vec<JoinHandle<()>> = std::mem::take(&mut *lock(&sessions))
            .into_values()
            .map(|session| {
                session.outbox.finish("the coordinator stops");
                session.task
            })
            .collect();
        let _ = timeout(limits::HANDSHAKE_TIME_MAX, futures::future::join_all(tasks)).await;
        drop(stop);
        stopped.recv().await;
    }
}

/// Binds the listeners and waits until each is there.
async fn listen(swarm: &mut Swarm<Behaviour>, listen: Vec<Multiaddr>) -> Result<Vec<Multiaddr>, NetError> {
    let mut waiting: Vec<(ListenerId, Multiaddr)> = Vec::new();
    let refused = |address: &Multiaddr, error: &std::io::Error| {
        let address = address.to_string();
        match error.kind() {
            std::io::ErrorKind::AddrInUse => NetError::AddressInUse { address },
            _ => NetError::Listen { address, problem: error.to_string() },
        }
    };
    for address in listen {
        // libp2p shares ports between processes (SO_REUSEPORT); a coordinator must not.
        if let Some(socket) = socket_address(&address) {
            std::net::TcpListener::bind(socket).map_err(|error| refused(&address, &error))?;
        }
        let id = swarm.listen_on(address.clone()).map_err(|error| match error {
            TransportError::Other(error) => refused(&address, &system_error(&error)),
            TransportError::MultiaddrNotSupported(_) => {
                NetError::Listen { address: address.to_string(), problem: "expected an address like /ip4/0.0.0.0/tcp/7700".to_owned() }
            }
        })?;
        waiting.push((id, address));
    }
    let mut addresses = Vec::new();
    loop {
        // Once each has an address, only those that are there already: a wildcard has several.
        let event = if waiting.is_empty() { swarm.select_next_some().now_or_never() } else { Some(swarm.select_next_some().await) };
        match event {
            None => return Ok(addresses),
            Some(SwarmEvent::NewListenAddr { listener_id, address }) => {
                waiting.retain(|(id, _)| *id != listener_id);
                addresses.push(address);
            }
            Some(SwarmEvent::ListenerClosed { listener_id, reason: Err(error), .. }) => {
                if let Some((_, address)) = waiting.iter().find(|(id, _)| *id == listener_id) {
                    return Err(refused(address, &error));
                }
            }
            Some(_) => {}
        }
    }
}

fn socket_address(address: &Multiaddr) -> Option<SocketAddr> {
    match address.iter().collect::<Vec<_>>()[..] {
        [Protocol::Ip4(ip), Protocol::Tcp(port)] => Some((ip, port).into()),
        [Protocol::Ip6(ip), Protocol::Tcp(port)] => Some((ip, port).into()),
        _ => None,
    }
}

/// The system's error within transports' wrappings, which keep its text but neither its kind nor
/// a way to its source.
fn system_error(error: &std::io::Error) -> std::io::Error {
    let text = error.to_string();
    let code = text.rsplit_once("(os error ").and_then(|(_, rest)| rest.strip_suffix(')')).and_then(|code| code.parse().ok());
    code.map_or_else(|| std::io::Error::new(error.kind(), text), std::io::Error::from_raw_os_error)
}

struct Server {
    swarm: Swarm<Behaviour>,
    sessions: Sessions,
    events: mpsc::Sender<ControlEvent<ToCoordinator>>,
    /// Connections whose session is over.
    hangups: mpsc::Sender<ConnectionId>,
    /// The newest connection of each peer.
    newest: BTreeMap<PeerId, ConnectionId>,
    /// Sessions so far.
    opened: u64,
    /// Closed when the swarm is gone.
    _running: mpsc::Sender<()>,
}

impl Server {
    async fn run(mut self, mut hung_up: mpsc::Receiver<ConnectionId>, stop: CancellationToken) {
        let mut incoming = self.swarm.behaviour().streams.new_control().accept(CONTROL).expect("accepted once a swarm");
        loop {
            tokio::select! {
                event = self.swarm.select_next_some() => self.on_swarm(event),
                Some((peer, stream)) = incoming.next() => self.on_stream(peer, stream),
                Some(connection) = hung_up.recv() => {
                    self.swarm.close_connection(connection);
                }
                () = stop.cancelled() => break,
            }
        }
    }

    fn on_swarm(&mut self, event: SwarmEvent<BehaviourEvent>) {
        match event {
            SwarmEvent::ConnectionEstablished { peer_id, connection_id, .. } => {
                if node_id(&peer_id).is_none() {
                    self.swarm.close_connection(connection_id);
                } else if let Some(older) = self.newest.insert(peer_id, connection_id) {
                    tracing::debug!(peer = %peer_id, "a new connection replaces the old one");
                    self.swarm.close_connection(older);
                }
            }
            SwarmEvent::ConnectionClosed { peer_id, connection_id, cause, .. } => {
                tracing::debug!(peer = %peer_id, ?cause, "connection closed");
                if self.newest.get(&peer_id) == Some(&connection_id) {
                    self.newest.remove(&peer_id);
                }
            }
            SwarmEvent::Behaviour(BehaviourEvent::Ping(ping::Event { connection, result: Err(ping::Failure::Timeout), .. })) => {
                self.swarm.close_connection(connection);
            }
            SwarmEvent::IncomingConnectionError { send_back_addr, error, .. } => {
                tracing::debug!(address = %send_back_addr, %error, "a connection did not come about");
            }
            SwarmEvent::ListenerError { error, .. } => tracing::warn!(%error, "a listener has trouble"),
            other => tracing::trace!(event = ?other),
        }
    }

    fn on_stream(&mut self, peer: PeerId, stream: Stream) {
        // Others are not let in above.
        let Some(node) = node_id(&peer) else { return };
        self.opened += 1;
        let (number, connection) = (self.opened, self.newest.get(&peer).copied());
        let (outbox, inbox) = session::outbox();
        let mut sessions = lock(&self.sessions);
        let older = sessions.remove(&node).map(|older| {
            older.outbox.abort("replaced by a new connection of the same node");
            older.task
        });
        let (events, hangups, all) = (self.events.clone(), self.hangups.clone(), Arc::clone(&self.sessions));
        let served = outbox.clone();
        let task = tokio::spawn(async move {
            if let Some(older) = older {
                // Its last event comes before our first.
                let _ = older.await;
            }
            serve(node, stream, served, inbox, events).await;
            let mine = {
                let mut sessions = lock(&all);
                let mine = sessions.get(&node).is_some_and(|session| session.number == number);
                if mine {
                    sessions.remove(&node);
                }
                mine
            };
            if let (true, Some(connection)) = (mine, connection) {
                let _ = hangups.send(connection).await;
            }
        });
        sessions.insert(node, Session { outbox, number, task });
    }
}

/// One node's session at the coordinator, from `Up` to `Down`.
async fn serve(node: NodeId, mut stream: Stream, outbox: Outbox, inbox: Inbox, events: mpsc::Sender<ControlEvent<ToCoordinator>>) {
    if timeout(limits::HANDSHAKE_TIME_MAX, greet(&mut stream)).await.is_ok_and(|greeted| greeted.is_ok()) && events.send(ControlEvent::Up(node)).await.is_ok() {
        let reason = session::run(node, stream, outbox, inbox, First::Stranger(explain_versions), events.clone()).await;
        tracing::debug!(peer = %node.short(), reason, "control connection is down");
        let _ = events.send(ControlEvent::Down { node, reason }).await;
    }
}

async fn greet(stream: &mut Stream) -> std::io::Result<()> {
    stream.write_all(&wire::control_accepted()).await?;
    stream.flush().await
}

/// What to answer to a first message that cannot be read because it is of other versions.
fn explain_versions(message: &[u8]) -> Option<(String, Vec<u8>)> {
    let theirs = wire::hello_versions(message)?;
    if theirs.common(VERSIONS).is_some() {
        return None;
    }
    let reason = format!("this node speaks wire versions {theirs}, the coordinator {VERSIONS}: install the same release on both");
    let answer = wire::control_frame(&FromCoordinator::Refused { reason: reason.clone() }).ok()?;
    Some((reason, answer))
}

/// A node's end. Dropping it ends the connection after what was sent before.
pub struct ControlClient {
    outbox: Outbox,
}

impl ControlClient {
    /// Connects to a coordinator: one attempt, of at most [`limits::HANDSHAKE_TIME_MAX`]. The
    /// first event is `Up`. Must be called within a tokio runtime.
    pub async fn connect(identity: &Identity, coordinator: &CoordinatorAddress) -> Result<(Self, mpsc::Receiver<ControlEvent<FromCoordinator>>), NetError> {
        let deadline = Instant::now() + limits::HANDSHAKE_TIME_MAX;
        let unreachable = |problem: String| NetError::Unreachable { address: coordinator.dial.to_string(), problem };
        let late = |_| unreachable(format!("no answer within {} s: is the coordinator running, and the port open?", limits::HANDSHAKE_TIME_MAX.as_secs()));

        // Whoever holds the client decides when it ends, not a timer.
        let mut swarm = swarm::build(identity, Duration::from_secs(u64::from(u32::MAX)), swarm::is_named(&coordinator.dial))?;
        timeout_at(deadline, dial(&mut swarm, coordinator)).await.map_err(late)??;
        let control = swarm.behaviour().streams.new_control();
        let driver = AbortOnDrop(tokio::spawn(drive(swarm)));
        let stream = timeout_at(deadline, open(control, coordinator)).await.map_err(late)??;

        let (outbox, inbox) = session::outbox();
        let (events, receiver) = mpsc::channel(limits::EVENT_QUEUE);
        let (node, session) = (coordinator.node, outbox.clone());
        tokio::spawn(async move {
            let _ = events.send(ControlEvent::Up(node)).await;
            let reason = session::run(node, stream, session, inbox, First::Known, events.clone()).await;
            drop(driver);
            let _ = events.send(ControlEvent::Down { node, reason }).await;
        });
        Ok((Self { outbox }, receiver))
    }

    /// Tells the coordinator; never blocks. A coordinator that does not take what it is sent is
    /// disconnected. After `Down` nothing is sent.
    pub fn send(&self, message: &ToCoordinator) {
        self.outbox.push(message);
    }
}

impl Drop for ControlClient {
    fn drop(&mut self) {
        self.outbox.finish("closed by this node");
    }
}

struct AbortOnDrop(JoinHandle<()>);

impl Drop for AbortOnDrop {
    fn drop(&mut self) {
        self.0.abort();
    }
}

async fn dial(swarm: &mut Swarm<Behaviour>, coordinator: &CoordinatorAddress) -> Result<(), NetError> {
    let address = || coordinator.dial.to_string();
    let options = DialOpts::peer_id(coordinator.peer).addresses(vec![coordinator.dial.clone()]).build();
    let failed = |error: DialError| match error {
        DialError::WrongPeerId { obtained, .. } => NetError::WrongKey { address: address(), expected: coordinator.peer.to_string(), got: obtained.to_string() },
        DialError::LocalPeerId { .. } => NetError::Unreachable { address: address(), problem: "that is this node's own key".to_owned() },
        DialError::Transport(errors) => NetError::Unreachable { address: address(), problem: explain(&errors) },
        other @ (DialError::NoAddresses | DialError::DialPeerConditionFalse(_) | DialError::Aborted | DialError::Denied { .. }) => {
            NetError::Unreachable { address: address(), problem: other.to_string() }
        }
    };
    swarm.dial(options).map_err(failed)?;
    loop {
        match swarm.select_next_some().await {
            SwarmEvent::ConnectionEstablished { .. } => return Ok(()),
            SwarmEvent::OutgoingConnectionError { error, .. } => return Err(failed(error)),
            _ => {}
        }
    }
}

/// The system's words rather than the transports'.
fn explain(errors: &[(Multiaddr, TransportError<std::io::Error>)]) -> String {
    let Some((_, error)) = errors.first() else { return "no address".to_owned() };
    match error {
        TransportError::MultiaddrNotSupported(_) => "this kind of address is not supported; use /ip4/../tcp/..".to_owned(),
        TransportError::Other(error) => {
            let error = system_error(error);
            match error.kind() {
                std::io::ErrorKind::ConnectionRefused => "nobody listens there: is the coordinator running?".to_owned(),
                std::io::ErrorKind::TimedOut => "no answer: is the coordinator running, and the port open?".to_owned(),
                _ => error.to_string(),
            }
        }
    }
}

/// Opens the control substream and waits until it is taken. A coordinator to which many come at
/// once may drop a substream before it looked at it: then another try.
async fn open(mut control: libp2p_stream::Control, coordinator: &CoordinatorAddress) -> Result<Stream, NetError> {
    const RETRY_AFTER: Duration = Duration::from_millis(50);
    loop {
        let mut stream = control.open_stream(coordinator.peer, CONTROL).await.map_err(|error| match error {
            libp2p_stream::OpenStreamError::UnsupportedProtocol(protocol) => {
                NetError::Protocol { address: coordinator.dial.to_string(), problem: format!("it does not know {protocol}") }
            }
            other => NetError::Unreachable { address: coordinator.dial.to_string(), problem: other.to_string() },
        })?;
        match session::read_frame(&mut stream, 0, None).await {
            Ok(_) => return Ok(stream),
            Err(problem) if problem.starts_with("sent what is no frame") => {
                return Err(NetError::Protocol { address: coordinator.dial.to_string(), problem });
            }
            Err(_) => tokio::time::sleep(RETRY_AFTER).await,
        }
    }
}

/// Keeps a node's swarm going; an unanswered ping ends the connection.
async fn drive(mut swarm: Swarm<Behaviour>) {
    loop {
        match swarm.select_next_some().await {
            SwarmEvent::Behaviour(BehaviourEvent::Ping(ping::Event { connection, result: Err(ping::Failure::Timeout), .. })) => {
                swarm.close_connection(connection);
            }
            other => tracing::trace!(event = ?other),
        }
    }
}

#[cfg(test)]
mod tests;
