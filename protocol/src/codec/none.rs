//! f32 as it is: 32 bits a value, little endian.

use crate::tensor::PayloadError;

pub(super) fn encode(values: &[f32], bytes: &mut [u8]) {
    if cfg!(target_endian = "little") {
        bytes.copy_from_slice(bytemuck::cast_slice(values));
        return;
    }
    for (value, bytes) in values.iter().zip(bytes.chunks_exact_mut(4)) {
        bytes.copy_from_slice(&value.to_le_bytes());
    }
}

pub(super) fn decode(bytes: &[u8], values: &mut [f32]) {
    for (value, bytes) in values.iter_mut().zip(bytes.as_chunks::<4>().0) {
        *value = f32::from_le_bytes(*bytes);
    }
}

pub(super) fn decode_add(bytes: &[u8], sums: &mut [f32]) -> Result<(), PayloadError> {
    let bytes = bytes.as_chunks::<4>().0;
    check(bytes)?;
    for (sum, bytes) in sums.iter_mut().zip(bytes) {
        *sum += f32::from_le_bytes(*bytes);
    }
    Ok(())
}

fn check(bytes: &[[u8; 4]]) -> Result<(), PayloadError> {
    const EXPONENT: u32 = 0x7f80_0000;
    for (block, chunk) in bytes.chunks(1024).enumerate() {
        if chunk.iter().fold(false, |bad, bytes| bad | (u32::from_le_bytes(*bytes) & EXPONENT == EXPONENT)) {
            let inside = chunk.iter().position(|bytes| !f32::from_le_bytes(*bytes).is_finite()).unwrap_or_default();
            return Err(PayloadError::NotFinite { index: block * 1024 + inside });
        }
    }
    Ok(())
}
