//! f32 as it is: 32 bits a value, little endian.

pub(super) fn encode(values: &[f32], bytes: &mut [u8]) {
    if cfg!(target_endian = "little") {
        bytes.copy_from_slice(bytemuck::cast_slice(values));
        return;
    }
    for (value, bytes) in values.iter().zip(bytes.as_chunks_mut::<4>().0) {
        *bytes = value.to_le_bytes();
    }
}

pub(super) fn decode(bytes: &[u8], values: &mut [f32]) {
    if cfg!(target_endian = "little") {
        bytemuck::cast_slice_mut(values).copy_from_slice(bytes);
        return;
    }
    for (value, bytes) in values.iter_mut().zip(bytes.as_chunks::<4>().0) {
        *value = f32::from_le_bytes(*bytes);
    }
}

pub(super) fn add(bytes: &[u8], sums: &mut [f32]) {
    for (sum, bytes) in sums.iter_mut().zip(bytes.as_chunks::<4>().0) {
        *sum += f32::from_le_bytes(*bytes);
    }
}

/// Whether all values are finite: no exponent has all its bits set.
pub(super) fn finite(bytes: &[u8]) -> bool {
    const EXPONENT: u32 = 0x7f80_0000;
    !bytes.as_chunks::<4>().0.iter().fold(false, |bad, bytes| bad | (u32::from_le_bytes(*bytes) & EXPONENT == EXPONENT))
}
