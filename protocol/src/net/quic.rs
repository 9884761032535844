//! QUIC as links use it: TLS bound to the nodes' keys, every bound of the transport, and frames
//! on streams.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use bytes::Bytes;
use libp2p_tls::certificate;
use quinn::crypto::rustls::{QuicClientConfig, QuicServerConfig};
use quinn::{Connection, ConnectionId, ConnectionIdGenerator, EndpointConfig, IdleTimeout, RecvStream, TransportConfig, VarInt};
use rand::TryRng;
use rand::rngs::SysRng;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::aws_lc_rs::{cipher_suite, default_provider, sign::any_ecdsa_type};
use rustls::crypto::{CryptoProvider, WebPkiSupportedAlgorithms};
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use rustls::sign::{CertifiedKey, SingleCertAndKey};
use rustls::{CertificateError, DigitallySignedStruct, DistinguishedName, SignatureScheme};
use tokio::sync::Semaphore;
use tokio::time::timeout;

use super::links::Congestion;
use super::{Identity, NetError, node_id};
use crate::id::NodeId;
use crate::limits;
use crate::message::data::Frame;
use crate::wire::{self, DataHeader, WireError};

/// Closing codes.
pub(super) const CODE_DONE: VarInt = VarInt::from_u32(0);
pub(super) const CODE_UNKNOWN_PEER: VarInt = VarInt::from_u32(1);
pub(super) const CODE_BAD_FRAME: VarInt = VarInt::from_u32(2);
pub(super) const CODE_REPLACED: VarInt = VarInt::from_u32(3);

/// Our protocol, so that a node never talks to another libp2p program by mistake.
const ALPN: &[u8] = b"skein-data/1";
/// Certificates have no names; this one is asked for and never looked at.
pub(super) const SERVER_NAME: &str = "skein";
/// A connection says something at least so often.
const KEEP_ALIVE: Duration = Duration::from_secs(1);
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

/// This process's certificate and what goes with it.
pub(super) struct Tls {
    certificate: Arc<SingleCertAndKey>,
    provider: Arc<CryptoProvider>,
    reset_key: [u8; 32],
}

impl Tls {
    pub(super) fn new(identity: &Identity) -> Result<Self, NetError> {
        let setup = |error: &dyn std::fmt::Display| NetError::Setup(error.to_string());
        let (certificate, key) = certificate::generate(identity.keypair()).map_err(|error| setup(&error))?;
        let key = any_ecdsa_type(&key).map_err(|error| setup(&error))?;
        let mut provider = default_provider();
        // AES first: processors have instructions for it.
        provider.cipher_suites =
            vec![cipher_suite::TLS13_AES_128_GCM_SHA256, cipher_suite::TLS13_CHACHA20_POLY1305_SHA256, cipher_suite::TLS13_AES_256_GCM_SHA384];
        let reset_key = identity.keypair().derive_secret(b"skein stateless reset v1").ok_or_else(|| setup(&"the key derives no secrets"))?;
        let certificate = Arc::new(SingleCertAndKey::from(CertifiedKey::new(vec![certificate], key)));
        Ok(Self { certificate, provider: Arc::new(provider), reset_key })
    }

    /// A server that takes any valid key: who is let in is decided after the handshake.
    pub(super) fn server(&self, transport: Arc<TransportConfig>) -> Result<quinn::ServerConfig, NetError> {
        let verifier = Arc::new(Verifier { expected: None, algorithms: self.provider.signature_verification_algorithms });
        let mut tls = rustls::ServerConfig::builder_with_provider(Arc::clone(&self.provider))
            .with_protocol_versions(&[&rustls::version::TLS13])
            .map_err(|error| NetError::Setup(error.to_string()))?
            .with_client_cert_verifier(verifier)
            .with_cert_resolver(self.certificate.clone());
        tls.alpn_protocols = vec![ALPN.to_vec()];
        tls.send_tls13_tickets = 0;
        let crypto = QuicServerConfig::try_from(tls).map_err(|error| NetError::Setup(error.to_string()))?;
        let mut config = quinn::ServerConfig::with_crypto(Arc::new(crypto));
        let per_stranger = limits::STRANGER_BYTES_MAX as u64;
        config.max_incoming(INCOMING_MAX).incoming_buffer_size(per_stranger).incoming_buffer_size_total(per_stranger * INCOMING_MAX as u64);
        config.transport_config(transport);
        Ok(config)
    }

    /// A client that takes only `expected`.
    pub(super) fn client(&self, expected: NodeId, transport: Arc<TransportConfig>) -> Result<quinn::ClientConfig, NetError> {
        let verifier = Arc::new(Verifier { expected: Some(expected), algorithms: self.provider.signature_verification_algorithms });
        let mut tls = rustls::ClientConfig::builder_with_provider(Arc::clone(&self.provider))
            .with_protocol_versions(&[&rustls::version::TLS13])
            .map_err(|error| NetError::Setup(error.to_string()))?
            .dangerous()
            .with_custom_certificate_verifier(verifier)
            .with_client_cert_resolver(self.certificate.clone());
        tls.alpn_protocols = vec![ALPN.to_vec()];
        tls.enable_sni = false;
        tls.resumption = rustls::client::Resumption::disabled();
        let crypto = QuicClientConfig::try_from(tls).map_err(|error| NetError::Setup(error.to_string()))?;
        let mut config = quinn::ClientConfig::new(Arc::new(crypto));
        config.transport_config(transport);
        Ok(config)
    }

    /// The endpoint's own settings. Its reset key follows from the identity: a process that comes
    /// back on the same port ends the connections of its former self at once.
    pub(super) fn endpoint(&self) -> Result<EndpointConfig, NetError> {
        let mut config = EndpointConfig::new(Arc::new(ResetKey(self.reset_key)));
        config.cid_generator(|| Box::new(AnyConnectionId));
        config.max_udp_payload_size(LOOPBACK_MTU).map_err(|error| NetError::Setup(error.to_string()))?;
        Ok(config)
    }
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
pub(super) fn remote(connection: &Connection) -> Option<NodeId> {
    let certificates = connection.peer_identity()?.downcast::<Vec<CertificateDer<'static>>>().ok()?;
    let certificate = certificates.first()?;
    node_id(&certificate::parse(certificate).ok()?.peer_id())
}

/// Checks that a certificate is of an Ed25519 identity, and of the expected one.
#[derive(Debug)]
struct Verifier {
    expected: Option<NodeId>,
    algorithms: WebPkiSupportedAlgorithms,
}

impl Verifier {
    fn check(&self, certificate: &CertificateDer<'_>, others: &[CertificateDer<'_>]) -> Result<(), rustls::Error> {
        let refused = || rustls::Error::InvalidCertificate(CertificateError::ApplicationVerificationFailure);
        if !others.is_empty() {
            return Err(refused());
        }
        let node = node_id(&certificate::parse(certificate)?.peer_id()).ok_or_else(refused)?;
        if self.expected.is_none_or(|expected| expected == node) { Ok(()) } else { Err(refused()) }
    }

    fn check_signature(message: &[u8], certificate: &CertificateDer<'_>, signed: &DigitallySignedStruct) -> Result<HandshakeSignatureValid, rustls::Error> {
        certificate::parse(certificate)?.verify_signature(signed.scheme, message, signed.signature())?;
        Ok(HandshakeSignatureValid::assertion())
    }
}

impl ServerCertVerifier for Verifier {
    fn verify_server_cert(
        &self,
        certificate: &CertificateDer<'_>,
        others: &[CertificateDer<'_>],
        _name: &ServerName<'_>,
        _ocsp: &[u8],
        _now: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        self.check(certificate, others).map(|()| ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(&self, _: &[u8], _: &CertificateDer<'_>, _: &DigitallySignedStruct) -> Result<HandshakeSignatureValid, rustls::Error> {
        Err(rustls::Error::General("TLS 1.3 only".to_owned()))
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        Self::check_signature(message, certificate, signed)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.algorithms.supported_schemes()
    }
}

impl ClientCertVerifier for Verifier {
    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        &[]
    }

    fn verify_client_cert(&self, certificate: &CertificateDer<'_>, others: &[CertificateDer<'_>], _now: UnixTime) -> Result<ClientCertVerified, rustls::Error> {
        self.check(certificate, others).map(|()| ClientCertVerified::assertion())
    }

    fn verify_tls12_signature(&self, _: &[u8], _: &CertificateDer<'_>, _: &DigitallySignedStruct) -> Result<HandshakeSignatureValid, rustls::Error> {
        Err(rustls::Error::General("TLS 1.3 only".to_owned()))
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        Self::check_signature(message, certificate, signed)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.algorithms.supported_schemes()
    }
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

/// Payload memory is counted in units of so many bytes, by sender and receiver alike.
const BUDGET_UNIT: usize = 1024;
/// Units of payload that one side may have on the way to the other at once: the largest tensor.
pub(super) const BUDGET: usize = limits::TENSOR_BYTES_MAX / BUDGET_UNIT;

/// Units that a payload of so many bytes takes.
pub(super) fn budget(bytes: usize) -> usize {
    bytes.div_ceil(BUDGET_UNIT)
}

/// Sends one frame on a stream of its own; returns when the other side has all of it.
pub(super) async fn write_frame(connection: &Connection, priority: i32, head: Bytes, payload: Bytes) -> Result<(), String> {
    /// Sent bytes are held until all of their piece is acknowledged: small pieces free memory
    /// and the send window early.
    const PIECE: usize = 256 * 1024;
    let mut stream = connection.open_uni().await.map_err(|error| error.to_string())?;
    stream.set_priority(priority).map_err(|error| error.to_string())?;
    stream.write_chunk(head).await.map_err(|error| error.to_string())?;
    let mut rest = payload;
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

/// Why a frame did not arrive.
#[derive(Debug, thiserror::Error)]
pub(super) enum ReadFrameError {
    /// The sender gave up, or the connection did.
    #[error("cut off: {0}")]
    Cut(String),
    /// The bytes are no frame.
    #[error("bad frame: {0}")]
    Bad(#[from] WireError),
    /// Nothing comes any more.
    #[error("stalled within a frame")]
    Stalled,
}

impl ReadFrameError {
    fn cut(error: impl std::fmt::Display) -> Self {
        Self::Cut(error.to_string())
    }
}

/// What the frames of one connection share while they arrive.
pub(super) struct Arrivals {
    /// Room for payloads.
    room: Arc<Semaphore>,
    /// Payload bytes that came on the whole connection.
    bytes: AtomicU64,
}

impl Arrivals {
    pub(super) fn new() -> Self {
        Self { room: Arc::new(Semaphore::new(BUDGET)), bytes: AtomicU64::new(0) }
    }

    /// Payload bytes that came.
    pub(super) fn bytes(&self) -> u64 {
        self.bytes.load(Ordering::Relaxed)
    }
}

/// Reads the frame on `stream`. The permit holds its room: drop it when the frame is handed on.
/// `waits_for_us` says whether it is this process that does not keep up.
pub(super) async fn read_frame(
    mut stream: RecvStream,
    arrivals: &Arrivals,
    waits_for_us: impl Fn() -> bool,
) -> Result<(Frame, Option<tokio::sync::OwnedSemaphorePermit>), ReadFrameError> {
    let begin = async {
        let mut header = [0; wire::DATA_HEADER_BYTES];
        stream.read_exact(&mut header).await.map_err(|error| short(error, header.len()))?;
        let header = DataHeader::parse(&header)?;
        let mut message = vec![0; header.message_len];
        stream.read_exact(&mut message).await.map_err(|error| short(error, header.message_len))?;
        Ok::<_, ReadFrameError>((header, header.message(&message)?))
    };
    let (header, message) = timeout(limits::HANDSHAKE_TIME_MAX, begin).await.map_err(|_| ReadFrameError::Stalled)??;
    let len = header.payload_len();
    let units = u32::try_from(budget(len)).unwrap_or(u32::MAX);
    let room = match units {
        0 => None,
        units => Some(Arc::clone(&arrivals.room).acquire_many_owned(units).await.map_err(ReadFrameError::cut)?),
    };
    let payload = read_payload(&mut stream, len, arrivals, waits_for_us).await?;
    Ok((header.frame(message, payload)?, room))
}

fn short(error: quinn::ReadExactError, needed: usize) -> ReadFrameError {
    match error {
        quinn::ReadExactError::FinishedEarly(len) => WireError::Truncated { len, needed }.into(),
        quinn::ReadExactError::ReadError(error) => ReadFrameError::cut(error),
    }
}

/// Reads exactly `len` bytes and the end of the stream, copying each byte once.
async fn read_payload(stream: &mut RecvStream, len: usize, arrivals: &Arrivals, waits_for_us: impl Fn() -> bool) -> Result<Bytes, ReadFrameError> {
    /// Slower than this, in bytes a second over the whole connection, is not alive.
    const RATE_MIN: u64 = 1024;
    const LOOK_EVERY: Duration = limits::HANDSHAKE_TIME_MAX;
    let mut payload = Vec::with_capacity(len);
    let mut pieces: [Bytes; 64] = std::array::from_fn(|_| Bytes::new());
    let mut before = arrivals.bytes();
    loop {
        let Ok(read) = timeout(LOOK_EVERY, stream.read_chunks(&mut pieces)).await else {
            // A stream may have to wait for more urgent ones; the connection may not.
            let now = arrivals.bytes();
            if now - before < RATE_MIN * LOOK_EVERY.as_secs() && !waits_for_us() {
                return Err(ReadFrameError::Stalled);
            }
            before = now;
            continue;
        };
        let Some(count) = read.map_err(ReadFrameError::cut)? else { break };
        for piece in &mut pieces[..count] {
            if payload.len() + piece.len() > len {
                return Err(WireError::Trailing(payload.len() + piece.len() - len).into());
            }
            payload.extend_from_slice(piece);
            arrivals.bytes.fetch_add(piece.len() as u64, Ordering::Relaxed);
            // Gives the datagram's buffer back.
            *piece = Bytes::new();
        }
    }
    if payload.len() < len { Err(WireError::Truncated { len: payload.len(), needed: len }.into()) } else { Ok(payload.into()) }
}
