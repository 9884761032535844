//! bfloat16, the upper half of an f32, rounded to nearest even: 16 bits a value.

use crate::tensor::PayloadError;

pub(super) fn encode(values: &[f32], bytes: &mut [u8]) {
    for (value, bytes) in values.iter().zip(bytes.as_chunks_mut::<2>().0) {
        *bytes = round(*value).to_le_bytes();
    }
}

/// Rounds to nearest even. A NaN stays a NaN: the decoder refuses it.
fn round(value: f32) -> u16 {
    let bits = value.to_bits();
    let rounded = (bits.wrapping_add(0x7fff + ((bits >> 16) & 1)) >> 16) as u16;
    if value.is_nan() { (bits >> 16) as u16 | 0x40 } else { rounded }
}

fn widen(bytes: [u8; 2]) -> f32 {
    f32::from_bits(u32::from(u16::from_le_bytes(bytes)) << 16)
}

pub(super) fn decode(bytes: &[u8], values: &mut [f32]) {
    for (value, bytes) in values.iter_mut().zip(bytes.as_chunks::<2>().0) {
        *value = widen(*bytes);
    }
}

pub(super) fn decode_add(bytes: &[u8], sums: &mut [f32]) -> Result<(), PayloadError> {
    let bytes = bytes.as_chunks::<2>().0;
    if let Some(index) = bytes.iter().position(|bytes| !widen(*bytes).is_finite()) {
        return Err(PayloadError::NotFinite { index });
    }
    for (sum, bytes) in sums.iter_mut().zip(bytes) {
        *sum += widen(*bytes);
    }
    Ok(())
}
