//! Tensors on the wire: bytes with a description, checked before use.

use bincode::{Decode, Encode};
use bytes::Bytes;

use crate::codec::Codec;

/// What a payload claims to be. A receiver compares it with what its task expects before it looks
/// at a single byte.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Encode, Decode)]
pub struct TensorMeta {
    /// How many values.
    pub len: u32,
    /// How they are encoded.
    pub codec: Codec,
}

impl TensorMeta {
    /// Exact length of the encoding in bytes.
    pub fn byte_len(self) -> usize {
        self.codec.byte_len(self.len as usize)
    }
}

/// An encoded tensor: what links carry and machines hold without reading.
#[derive(Clone, PartialEq, Eq)]
pub struct Payload {
    /// What the bytes are.
    pub meta: TensorMeta,
    /// The encoding, exactly [`TensorMeta::byte_len`] bytes.
    pub bytes: Bytes,
}

impl std::fmt::Debug for Payload {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Payload({} x {:?})", self.meta.len, self.meta.codec)
    }
}

/// A payload is not what its receiver's task expects.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PayloadError {
    /// The wrong number of values.
    #[error("expected {expected} values, got {got}")]
    Len {
        /// What the task expects.
        expected: usize,
        /// What the payload claims.
        got: usize,
    },
    /// The bytes do not match the claim.
    #[error("expected {expected} bytes, got {got}")]
    Bytes {
        /// What the description implies.
        expected: usize,
        /// What came.
        got: usize,
    },
    /// Raw bytes where a tensor belongs.
    #[error("raw bytes are no tensor")]
    NotATensor,
    /// An infinity or NaN.
    #[error("value {index} is not finite")]
    NotFinite {
        /// Which value.
        index: usize,
    },
}

impl Payload {
    /// Bytes that are no tensor.
    ///
    /// # Panics
    /// If there are 4 GiB or more.
    pub fn raw(bytes: Bytes) -> Self {
        let len = u32::try_from(bytes.len()).expect("a payload is below 4 GiB");
        Self { meta: TensorMeta { len, codec: Codec::Raw }, bytes }
    }

    /// Checks that this is `len` values, in as many bytes as their codec takes.
    pub fn expect(&self, len: usize) -> Result<(), PayloadError> {
        if self.meta.len as usize != len {
            return Err(PayloadError::Len { expected: len, got: self.meta.len as usize });
        }
        if self.bytes.len() != self.meta.byte_len() {
            return Err(PayloadError::Bytes { expected: self.meta.byte_len(), got: self.bytes.len() });
        }
        Ok(())
    }
}
