//! QUIC as links use it: every bound of the transport, and frames on streams.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use quinn::crypto::rustls::{QuicClientConfig, QuicServerConfig};
use quinn::{Connection, ConnectionId, ConnectionIdGenerator, EndpointConfig, IdleTimeout, RecvStream, SendStream, TransportConfig, VarInt};
use rand::TryRng;
use rand::rngs::SysRng;
use rustls::pki_types::CertificateDer;
use tokio::time::timeout;

use super::NetError;
use super::arrivals::{self, Arrivals, Came, ReadFrameError};
use super::delivery::{DELIVERY_BYTES, Delivery};
use super::links::Congestion;
use super::outgoing::Outgoing;
use super::tls::{Remote, Tls};
use crate::id::NodeId;
use crate::limits;
use crate::wire::{self, DataHeader, WireError};

/// What a stream is reset with whose frame is not sent to its end.
const CODE_GIVEN_UP: VarInt = VarInt::from_u32(0);

/// Our protocol, so that a node never talks to another libp2p program by mistake.
const ALPN: &[u8] = b"skein-data/1";
/// A connection says something at least so often.
const KEEP_ALIVE: Duration = Duration::from_millis(400);
/// A peer that says nothing for so long is dead.
const IDLE_MAX: Duration = Duration::from_secs(5);
/// Datagrams between two ends on one machine: larger ones double the goodput. From about 9000
/// bytes on, segmentation offload would need more than a datagram's 64 KiB, and hangs.
const LOOPBACK_MTU: u16 = 6000;
/// Largest datagram that path discovery tries: an Ethernet frame's.
const MTU_MAX: u16 = 1452;
/// What one stream may have in flight: half the connection's window, so that one stream that is
/// not read never stops the others.
const STREAM_WINDOW: u32 = limits::LINK_WINDOW_BYTES / 2;
/// Handshakes that wait to be looked at, and what they may send meanwhile.
const INCOMING_MAX: usize = 256;

/// Long enough that no two connections of a node ever share a name.
const CONNECTION_ID_BYTES: usize = 8;

/// A server that takes any valid key: who is let in is decided after the handshake.
pub(super) fn server(tls: &Tls, transport: Arc<TransportConfig>) -> Result<quinn::ServerConfig, NetError> {
    let crypto = QuicServerConfig::try_from(tls.server(ALPN)?).map_err(|error| NetError::Setup(error.to_string()))?;
    let mut config = quinn::ServerConfig::with_crypto(Arc::new(crypto));
    let per_stranger = limits::STRANGER_BYTES_MAX as u64;
    config.max_incoming(INCOMING_MAX).incoming_buffer_size(per_stranger).incoming_buffer_size_total(per_stranger * INCOMING_MAX as u64);
    config.transport_config(transport);
    Ok(config)
}

/// A client that takes only `expected`.
pub(super) fn client(tls: &Tls, expected: NodeId, transport: Arc<TransportConfig>) -> Result<quinn::ClientConfig, NetError> {
    let crypto = QuicClientConfig::try_from(tls.client(expected, ALPN)?).map_err(|error| NetError::Setup(error.to_string()))?;
    let mut config = quinn::ClientConfig::new(Arc::new(crypto));
    config.transport_config(transport);
    Ok(config)
}

/// The endpoint's own settings. Its reset key follows from the identity: a process that comes
/// back on the same port ends the connections of its former self at once.
pub(super) fn endpoint(tls: &Tls) -> Result<EndpointConfig, NetError> {
    let mut config = EndpointConfig::new(Arc::new(ResetKey(tls.reset_key)));
    config.cid_generator(|| Box::new(AnyConnectionId));
    config.max_udp_payload_size(LOOPBACK_MTU).map_err(|error| NetError::Setup(error.to_string()))?;
    Ok(config)
}

/// Every bound of a connection. Streams are opened to a peer once it is let in.
pub(super) fn transport(congestion: Congestion, loopback: bool) -> Arc<TransportConfig> {
    let mut config = TransportConfig::default();
    config
        .max_concurrent_bidi_streams(VarInt::from_u32(0))
        .max_concurrent_uni_streams(VarInt::from_u32(0))
        .datagram_receive_buffer_size(None)
        .receive_window(VarInt::from_u32(limits::LINK_WINDOW_BYTES))
        .stream_receive_window(VarInt::from_u32(STREAM_WINDOW))
        .send_window(u64::from(limits::LINK_WINDOW_BYTES))
        // Frames of one priority one after the other: each arrives as early as it can.
        .send_fairness(false)
        .keep_alive_interval(Some(KEEP_ALIVE))
        .max_idle_timeout(IdleTimeout::try_from(IDLE_MAX).ok());
    match congestion {
        Congestion::Cubic => config.congestion_controller_factory(Arc::new(quinn::congestion::CubicConfig::default())),
        Congestion::Bbr => config.congestion_controller_factory(Arc::new(quinn::congestion::BbrConfig::default())),
    };
    if loopback {
        config.initial_mtu(LOOPBACK_MTU).min_mtu(LOOPBACK_MTU).mtu_discovery_config(None);
    } else {
        let mut discovery = quinn::MtuDiscoveryConfig::default();
        discovery.upper_bound(MTU_MAX);
        config.mtu_discovery_config(Some(discovery));
    }
    Arc::new(config)
}

/// Lets a peer that was accepted open streams.
pub(super) fn admit(connection: &Connection) {
    connection.set_max_concurrent_uni_streams(VarInt::from_u32(limits::LINK_STREAMS_MAX));
}

/// Who the other side of a connection is.
pub(super) fn remote(connection: &Connection) -> Option<Remote> {
    Remote::of(&connection.peer_identity()?.downcast::<Vec<CertificateDer<'static>>>().ok()?)
}

/// Draws connection names and takes any for its own. quinn's default recognises only those of
/// the same process, and would not reset the connections of its former self.
struct AnyConnectionId;

impl ConnectionIdGenerator for AnyConnectionId {
    fn generate_cid(&mut self) -> ConnectionId {
        let mut name = [0; CONNECTION_ID_BYTES];
        SysRng.try_fill_bytes(&mut name).expect("the system has random numbers");
        ConnectionId::new(&name)
    }

    fn cid_len(&self) -> usize {
        CONNECTION_ID_BYTES
    }

    fn cid_lifetime(&self) -> Option<Duration> {
        None
    }
}

/// Signs stateless resets: keyed BLAKE3.
struct ResetKey([u8; 32]);

impl quinn::crypto::HmacKey for ResetKey {
    fn sign(&self, data: &[u8], signature: &mut [u8]) {
        let hash = blake3::keyed_hash(&self.0, data);
        signature.copy_from_slice(&hash.as_bytes()[..signature.len()]);
    }

    fn signature_len(&self) -> usize {
        blake3::OUT_LEN
    }

    fn verify(&self, data: &[u8], signature: &[u8]) -> Result<(), quinn::crypto::CryptoError> {
        let signature: [u8; blake3::OUT_LEN] = signature.try_into().map_err(|_| quinn::crypto::CryptoError)?;
        // Compares in constant time.
        if blake3::keyed_hash(&self.0, data) == signature { Ok(()) } else { Err(quinn::crypto::CryptoError) }
    }
}

/// A stream that is reset if it is dropped before all was said: quinn would finish it, and half a
/// frame would look like a bad one.
struct Whole(SendStream);

impl Drop for Whole {
    fn drop(&mut self) {
        // Does nothing once all has been said.
        let _ = self.0.reset(CODE_GIVEN_UP);
    }
}

/// Sends one frame on a stream of its own; returns when the other side has all of it.
pub(super) async fn write_frame(connection: &Connection, delivery: Delivery, outgoing: &Outgoing) -> Result<(), String> {
    /// Sent bytes are held until all of their piece is acknowledged: small pieces free memory
    /// and the send window early.
    const PIECE: usize = 256 * 1024;
    let mut stream = Whole(connection.open_uni().await.map_err(|error| error.to_string())?);
    let stream = &mut stream.0;
    stream.set_priority(outgoing.class.priority()).map_err(|error| error.to_string())?;
    stream.write_chunk(Bytes::copy_from_slice(&delivery.to_bytes())).await.map_err(|error| error.to_string())?;
    stream.write_chunk(outgoing.head.clone()).await.map_err(|error| error.to_string())?;
    let mut rest = outgoing.payload.clone();
    while !rest.is_empty() {
        let piece = rest.split_to(rest.len().min(PIECE));
        stream.write_chunk(piece).await.map_err(|error| error.to_string())?;
    }
    stream.finish().map_err(|error| error.to_string())?;
    match stream.stopped().await {
        Ok(None) => Ok(()),
        Ok(Some(code)) => Err(format!("the other side does not want it (code {code})")),
        Err(error) => Err(error.to_string()),
    }
}

/// Reads the frame on `stream`. `waits_for_us` says whether it is this process that does not keep up.
pub(super) async fn read_frame(mut stream: RecvStream, arrivals: &Arrivals, waits_for_us: impl Fn() -> bool) -> Result<Came, ReadFrameError> {
    let begin = async {
        let mut delivery = [0; DELIVERY_BYTES];
        stream.read_exact(&mut delivery).await.map_err(|error| short(error, delivery.len()))?;
        let mut header = [0; wire::DATA_HEADER_BYTES];
        stream.read_exact(&mut header).await.map_err(|error| short(error, header.len()))?;
        let header = DataHeader::parse(&header)?;
        let mut message = vec![0; header.message_len];
        stream.read_exact(&mut message).await.map_err(|error| short(error, header.message_len))?;
        Ok::<_, ReadFrameError>((arrivals::delivery(delivery)?, header, header.message(&message)?))
    };
    let (delivery, header, message) = timeout(limits::HANDSHAKE_TIME_MAX, begin).await.map_err(|_| ReadFrameError::Stalled)??;
    let len = header.payload_len();
    let room = arrivals.room(len).await;
    let payload = read_payload(&mut stream, len, arrivals, waits_for_us).await?;
    Ok(Came { delivery, frame: header.frame(message, payload)?, room })
}

fn short(error: quinn::ReadExactError, needed: usize) -> ReadFrameError {
    match error {
        quinn::ReadExactError::FinishedEarly(len) => WireError::Truncated { len, needed }.into(),
        quinn::ReadExactError::ReadError(error) => ReadFrameError::cut(error),
    }
}

/// Reads exactly `len` bytes and the end of the stream, copying each byte once.
async fn read_payload(stream: &mut RecvStream, len: usize, arrivals: &Arrivals, waits_for_us: impl Fn() -> bool) -> Result<Bytes, ReadFrameError> {
    let mut payload = Vec::with_capacity(len);
    let mut pieces: [Bytes; 64] = std::array::from_fn(|_| Bytes::new());
    let mut pace = arrivals.pace();
    loop {
        let read = timeout(pace.look_again(), stream.read_chunks(&mut pieces)).await;
        pace.check(arrivals, &waits_for_us)?;
        let Ok(read) = read else { continue };
        let Some(count) = read.map_err(ReadFrameError::cut)? else { break };
        for piece in &mut pieces[..count] {
            if payload.len() + piece.len() > len {
                return Err(WireError::Trailing(payload.len() + piece.len() - len).into());
            }
            payload.extend_from_slice(piece);
            arrivals.add(piece.len());
            // Gives the datagram's buffer back.
            *piece = Bytes::new();
        }
    }
    if payload.len() < len { Err(WireError::Truncated { len: payload.len(), needed: len }.into()) } else { Ok(payload.into()) }
}
