//! The libp2p swarm under the control plane: TCP, Noise, Yamux, and the protocols that keep a
//! connection honest.

use std::time::Duration;

use libp2p::core::muxing::StreamMuxerBox;
use libp2p::core::transport::Boxed;
use libp2p::core::upgrade::Version;
use libp2p::multiaddr::Protocol;
use libp2p::swarm::NetworkBehaviour;
use libp2p::{Multiaddr, PeerId, StreamProtocol, Swarm, Transport, connection_limits, dns, identify, memory_connection_limits, noise, ping, tcp, yamux};

use super::{Identity, NetError};
use crate::limits;

/// The protocol of the control substream.
pub(super) const CONTROL: StreamProtocol = StreamProtocol::new("/skein/control/1");

/// Yamux substreams of one connection: one for control, the rest for libp2p's own protocols.
const STREAMS_MAX: usize = 16;
/// Substreams whose protocol is still being agreed on.
const NEGOTIATING_MAX: usize = 8;
/// Connections in the middle of their handshake.
const PENDING_MAX: u32 = 256;
/// Connections of one peer: a new one, the one it replaces, and some that the system has not
/// noticed to be dead.
const PER_PEER_MAX: u32 = 8;
/// Share of the machine's memory above which the process takes no new connections.
const MEMORY_SHARE: f64 = 0.9;
/// How often a connection is probed.
const PING_EVERY: Duration = Duration::from_secs(2);

#[derive(NetworkBehaviour)]
pub(super) struct Behaviour {
    connections: connection_limits::Behaviour,
    memory: memory_connection_limits::Behaviour,
    identify: identify::Behaviour,
    ping: ping::Behaviour,
    pub(super) streams: libp2p_stream::Behaviour,
}

/// Builds a swarm. Connections without a control substream end after `idle`.
pub(super) fn build(identity: &Identity, idle: Duration, resolve_names: bool) -> Result<Swarm<Behaviour>, NetError> {
    let keypair = identity.keypair();
    let limits = connection_limits::ConnectionLimits::default()
        .with_max_pending_incoming(Some(PENDING_MAX))
        .with_max_established_incoming(Some(u32::try_from(limits::NODES_MAX).unwrap_or(u32::MAX)))
        .with_max_established_per_peer(Some(PER_PEER_MAX));
    let identify = identify::Config::new("/skein/1".to_owned(), keypair.public())
        .with_agent_version(concat!("skein/", env!("CARGO_PKG_VERSION")).to_owned())
        .with_cache_size(0);
    let behaviour = Behaviour {
        connections: connection_limits::Behaviour::new(limits),
        memory: memory_connection_limits::Behaviour::with_max_percentage(MEMORY_SHARE),
        identify: identify::Behaviour::new(identify),
        // A process that is only suspended comes back within its lease.
        ping: ping::Behaviour::new(ping::Config::new().with_interval(PING_EVERY).with_timeout(limits::LEASE)),
        streams: libp2p_stream::Behaviour::new(),
    };
    let config = libp2p::swarm::Config::with_tokio_executor().with_idle_connection_timeout(idle).with_max_negotiating_inbound_streams(NEGOTIATING_MAX);
    Ok(Swarm::new(transport(identity, resolve_names)?, behaviour, identity.peer_id(), config))
}

fn transport(identity: &Identity, resolve_names: bool) -> Result<Boxed<(PeerId, StreamMuxerBox)>, NetError> {
    let setup = |error: &dyn std::fmt::Display| NetError::Setup(error.to_string());
    let tcp = tcp::tokio::Transport::new(tcp::Config::default().nodelay(true));
    let stream = if resolve_names { dns::tokio::Transport::system(tcp).map_err(|error| setup(&error))?.boxed() } else { tcp.boxed() };
    let mut multiplexing = yamux::Config::default();
    multiplexing.set_max_num_streams(STREAMS_MAX);
    let noise = noise::Config::new(identity.keypair()).map_err(|error| setup(&error))?;
    Ok(stream.upgrade(Version::V1Lazy).authenticate(noise).multiplex(multiplexing).timeout(limits::HANDSHAKE_TIME_MAX).boxed())
}

/// Whether an address needs the name service.
pub(super) fn is_named(address: &Multiaddr) -> bool {
    address.iter().any(|part| matches!(part, Protocol::Dns(_) | Protocol::Dns4(_) | Protocol::Dns6(_) | Protocol::Dnsaddr(_)))
}
