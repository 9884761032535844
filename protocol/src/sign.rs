//! Signing as the machines see it: a pure function that the shell provides.

/// Signs and verifies on behalf of one identity. Ed25519 signatures are deterministic, so a
/// machine that signs stays a pure function of its events.
pub trait Signer: Send + Sync {
    /// The signature over `bytes` by this identity.
    fn sign(&self, bytes: &[u8]) -> Vec<u8>;

    /// Whether `signature` over `bytes` is by `signer`.
    fn verify(&self, signer: crate::id::NodeId, bytes: &[u8], signature: &[u8]) -> bool;
}

/// Signs with nothing and accepts exactly that: for the simulator.
#[derive(Clone, Copy, Debug, Default)]
pub struct NullSigner;

impl Signer for NullSigner {
    fn sign(&self, _bytes: &[u8]) -> Vec<u8> {
        Vec::new()
    }

    fn verify(&self, _signer: crate::id::NodeId, _bytes: &[u8], signature: &[u8]) -> bool {
        signature.is_empty()
    }
}
