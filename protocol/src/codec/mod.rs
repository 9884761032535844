//! How values become bytes for a link. One file a codec.
//!
//! Encoders refuse nothing and allocate nothing beyond the buffer they are handed; decoders get
//! the expected length from the task and refuse what is not finite.

use bincode::{Decode, Encode};
use serde::{Deserialize, Serialize};

use crate::tensor::PayloadError;

mod bf16;
mod none;

/// How a tensor is turned into bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Encode, Decode, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Codec {
    /// f32, little endian: 32 bits a value.
    #[default]
    None,
    /// bfloat16, rounded to nearest even: 16 bits a value.
    Bf16,
    /// Bytes that are no tensor (state, data files): 8 bits a value. Not to be configured.
    #[serde(skip)]
    Raw,
}

impl Codec {
    /// Exact length in bytes of `len` encoded values.
    pub fn byte_len(self, len: usize) -> usize {
        match self {
            Self::None => len * 4,
            Self::Bf16 => len * 2,
            Self::Raw => len,
        }
    }

    /// Encodes `values` into `bytes`, which has exactly [`Codec::byte_len`] bytes.
    ///
    /// # Panics
    /// If the lengths do not match: the caller made both.
    pub fn encode(self, values: &[f32], bytes: &mut [u8]) {
        assert_eq!(bytes.len(), self.byte_len(values.len()), "encode buffer");
        match self {
            Self::None => none::encode(values, bytes),
            Self::Bf16 => bf16::encode(values, bytes),
            Self::Raw => unreachable!("raw bytes are never encoded from values"),
        }
    }

    /// Decodes `bytes` over `values`, whose length is what the task expects. On an error `values`
    /// holds rubbish and must not be used.
    pub fn decode(self, bytes: &[u8], values: &mut [f32]) -> Result<(), PayloadError> {
        self.check(bytes, values.len())?;
        match self {
            Self::None => none::decode(bytes, values),
            Self::Bf16 => bf16::decode(bytes, values),
            Self::Raw => return Err(PayloadError::NotATensor),
        }
        check_finite(values)
    }

    /// Decodes `bytes` and adds each value to `sums`. On an error `sums` is unchanged.
    pub fn decode_add(self, bytes: &[u8], sums: &mut [f32]) -> Result<(), PayloadError> {
        self.check(bytes, sums.len())?;
        match self {
            Self::None => none::decode_add(bytes, sums),
            Self::Bf16 => bf16::decode_add(bytes, sums),
            Self::Raw => Err(PayloadError::NotATensor),
        }
    }

    fn check(self, bytes: &[u8], len: usize) -> Result<(), PayloadError> {
        let expected = self.byte_len(len);
        if bytes.len() == expected { Ok(()) } else { Err(PayloadError::Bytes { expected, got: bytes.len() }) }
    }
}

/// The first value that is not finite is an error.
pub fn check_finite(values: &[f32]) -> Result<(), PayloadError> {
    const EXPONENT: u32 = 0x7f80_0000;
    // A block at a time, so that the compiler vectorises the common case.
    for (block, chunk) in values.chunks(1024).enumerate() {
        if chunk.iter().fold(false, |bad, value| bad | (value.to_bits() & EXPONENT == EXPONENT)) {
            let inside = chunk.iter().position(|value| !value.is_finite()).unwrap_or_default();
            return Err(PayloadError::NotFinite { index: block * 1024 + inside });
        }
    }
    Ok(())
}
