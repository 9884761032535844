//! TLS as all links use it: a certificate bound to the node's key on both sides, and who that makes
//! the other side.

use std::sync::Arc;

use libp2p_tls::certificate;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::aws_lc_rs::{cipher_suite, default_provider, sign::any_ecdsa_type};
use rustls::crypto::{CryptoProvider, WebPkiSupportedAlgorithms};
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use rustls::sign::{CertifiedKey, SingleCertAndKey};
use rustls::{CertificateError, DigitallySignedStruct, DistinguishedName, SignatureScheme};

use super::{Identity, NetError, node_id};
use crate::id::NodeId;

/// Certificates have no names; this one is asked for and never looked at.
pub(super) const SERVER_NAME: &str = "skein";

/// Which process of a node: each has a certificate of its own, and this is its hash.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Life([u8; 8]);

/// Who the other side of a connection is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Remote {
    pub(super) node: NodeId,
    pub(super) life: Life,
}

impl Remote {
    /// From the certificates of a handshake; `None` if it is of no Ed25519 identity.
    pub(super) fn of(certificates: &[CertificateDer<'static>]) -> Option<Self> {
        let certificate = certificates.first()?;
        let node = node_id(&certificate::parse(certificate).ok()?.peer_id())?;
        let life = Life(*blake3::hash(certificate).as_bytes().first_chunk()?);
        Some(Self { node, life })
    }
}

/// This process's certificate and what goes with it.
pub(super) struct Tls {
    certificate: Arc<SingleCertAndKey>,
    provider: Arc<CryptoProvider>,
    /// What QUIC's stateless resets are signed with; it follows from the identity.
    pub(super) reset_key: [u8; 32],
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
    pub(super) fn server(&self, protocol: &[u8]) -> Result<rustls::ServerConfig, NetError> {
        let verifier = Arc::new(Verifier { expected: None, algorithms: self.provider.signature_verification_algorithms });
        let mut config = rustls::ServerConfig::builder_with_provider(Arc::clone(&self.provider))
            .with_protocol_versions(&[&rustls::version::TLS13])
            .map_err(|error| NetError::Setup(error.to_string()))?
            .with_client_cert_verifier(verifier)
            .with_cert_resolver(self.certificate.clone());
        config.alpn_protocols = vec![protocol.to_vec()];
        config.send_tls13_tickets = 0;
        Ok(config)
    }

    /// A client that takes only `expected`.
    pub(super) fn client(&self, expected: NodeId, protocol: &[u8]) -> Result<rustls::ClientConfig, NetError> {
        let verifier = Arc::new(Verifier { expected: Some(expected), algorithms: self.provider.signature_verification_algorithms });
        let mut config = rustls::ClientConfig::builder_with_provider(Arc::clone(&self.provider))
            .with_protocol_versions(&[&rustls::version::TLS13])
            .map_err(|error| NetError::Setup(error.to_string()))?
            .dangerous()
            .with_custom_certificate_verifier(verifier)
            .with_client_cert_resolver(self.certificate.clone());
        config.alpn_protocols = vec![protocol.to_vec()];
        config.enable_sni = false;
        config.resumption = rustls::client::Resumption::disabled();
        Ok(config)
    }
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
