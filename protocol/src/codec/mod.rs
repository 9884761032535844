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
    /// Sums in fixed point (mode `exact`), i64 little endian: 64 bits a value. Not to be configured.
    #[serde(skip)]
    Fixed,
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
            Self::Fixed => len * 8,
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
            Self::Fixed | Self::Raw => unreachable!("never encoded from f32 values"),
        }
    }

    /// Decodes `bytes` over `values`, whose length is what the task expects. On an error `values`
    /// holds rubbish and must not be used.
    pub fn decode(self, bytes: &[u8], values: &mut [f32]) -> Result<(), PayloadError> {
        self.check(bytes, values.len())?;
        let width = self.byte_len(BLOCK);
        for (index, (bytes, values)) in bytes.chunks(width).zip(values.chunks_mut(BLOCK)).enumerate() {
            match self {
                Self::None => none::decode(bytes, values),
                Self::Bf16 => bf16::decode(bytes, values),
                Self::Fixed | Self::Raw => return Err(PayloadError::NotATensor),
            }
            // At once, while the block is in the cache.
            check_block(index, values)?;
        }
        Ok(())
    }

    /// Decodes `bytes` and adds each value to `sums`. On an error `sums` is unchanged.
    pub fn decode_add(self, bytes: &[u8], sums: &mut [f32]) -> Result<(), PayloadError> {
        self.check(bytes, sums.len())?;
        let finite = match self {
            Self::None => none::finite,
            Self::Bf16 => bf16::finite,
            Self::Fixed | Self::Raw => return Err(PayloadError::NotATensor),
        };
        // All of it before the first addition.
        if let Some(block) = bytes.chunks(self.byte_len(BLOCK)).position(|bytes| !finite(bytes)) {
            let width = self.byte_len(1);
            let inside = bytes[block * self.byte_len(BLOCK)..].chunks(width).position(|bytes| !finite(bytes));
            return Err(PayloadError::NotFinite { index: block * BLOCK + inside.unwrap_or_default() });
        }
        match self {
            Self::None => none::add(bytes, sums),
            Self::Bf16 => bf16::add(bytes, sums),
            Self::Fixed | Self::Raw => return Err(PayloadError::NotATensor),
        }
        Ok(())
    }

    fn check(self, bytes: &[u8], len: usize) -> Result<(), PayloadError> {
        if matches!(self, Self::Fixed | Self::Raw) {
            return Err(PayloadError::NotATensor);
        }
        let expected = self.byte_len(len);
        if bytes.len() == expected { Ok(()) } else { Err(PayloadError::Bytes { expected, got: bytes.len() }) }
    }
}

/// Values looked at together: few enough for the fastest cache, many enough for whole vectors.
const BLOCK: usize = 2048;

/// The first value that is not finite is an error.
pub fn check_finite(values: &[f32]) -> Result<(), PayloadError> {
    values.chunks(BLOCK).enumerate().try_for_each(|(index, block)| check_block(index, block))
}

fn check_block(index: usize, block: &[f32]) -> Result<(), PayloadError> {
    const EXPONENT: u32 = 0x7f80_0000;
    // Without an early exit inside, so that the compiler vectorises it.
    if block.iter().fold(false, |bad, value| bad | (value.to_bits() & EXPONENT == EXPONENT)) {
        let inside = block.iter().position(|value| !value.is_finite()).unwrap_or_default();
        return Err(PayloadError::NotFinite { index: index * BLOCK + inside });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn encoded(codec: Codec, values: &[f32]) -> Vec<u8> {
        let mut bytes = vec![0; codec.byte_len(values.len())];
        codec.encode(values, &mut bytes);
        bytes
    }

    #[test]
    fn lengths_must_fit() {
        for codec in [Codec::None, Codec::Bf16] {
            let bytes = encoded(codec, &[1.0, 2.0, 3.0]);
            for (bytes, len) in [(&bytes[..], 2), (&bytes[..], 4), (&bytes[1..], 3), (&bytes[..0], 1)] {
                let (expected, got) = (codec.byte_len(len), bytes.len());
                let mut sums = vec![5.0; len];
                assert_eq!(codec.decode(bytes, &mut sums.clone()), Err(PayloadError::Bytes { expected, got }));
                assert_eq!(codec.decode_add(bytes, &mut sums), Err(PayloadError::Bytes { expected, got }));
                assert_eq!(sums, vec![5.0; len]);
            }
        }
        for codec in [Codec::Raw, Codec::Fixed] {
            assert_eq!(codec.decode(&[], &mut []), Err(PayloadError::NotATensor));
        }
        assert_eq!(Codec::Raw.decode_add(&[0; 4], &mut [0.0; 4]), Err(PayloadError::NotATensor));
    }

    #[test]
    fn one_value_that_is_not_finite_is_found_anywhere_and_changes_no_sum() {
        for codec in [Codec::None, Codec::Bf16] {
            for index in [0, 1, BLOCK - 1, BLOCK, 2 * BLOCK + 6] {
                for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
                    let mut values = vec![1.5; 2 * BLOCK + 7];
                    values[index] = bad;
                    let bytes = encoded(codec, &values);
                    let mut sums = vec![0.25; values.len()];
                    assert_eq!(codec.decode_add(&bytes, &mut sums), Err(PayloadError::NotFinite { index }));
                    assert!(sums.iter().all(|sum| *sum == 0.25));
                    assert_eq!(codec.decode(&bytes, &mut sums), Err(PayloadError::NotFinite { index }));
                    assert_eq!(check_finite(&values), Err(PayloadError::NotFinite { index }));
                }
            }
        }
    }

    proptest! {
        #[test]
        fn none_loses_nothing_and_adds_in_place(bits in prop::collection::vec(any::<u32>(), 0..5000)) {
            let values: Vec<f32> = bits.iter().map(|bits| f32::from_bits(*bits)).map(|value| if value.is_finite() { value } else { -0.0 }).collect();
            let bytes = encoded(Codec::None, &values);
            let mut back = vec![1.0; values.len()];
            Codec::None.decode(&bytes, &mut back).expect("finite");
            prop_assert!(values.iter().zip(&back).all(|(a, b)| a.to_bits() == b.to_bits()));
            let mut sums = vec![3.0; values.len()];
            Codec::None.decode_add(&bytes, &mut sums).expect("finite");
            prop_assert!(values.iter().zip(&sums).all(|(value, sum)| *sum == 3.0 + *value));
        }
    }
}
