//! bfloat16, the upper half of an f32, rounded to nearest even: 16 bits a value.

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

pub(super) fn add(bytes: &[u8], sums: &mut [f32]) {
    for (sum, bytes) in sums.iter_mut().zip(bytes.as_chunks::<2>().0) {
        *sum += widen(*bytes);
    }
}

/// Whether all values are finite: no exponent has all its bits set.
pub(super) fn finite(bytes: &[u8]) -> bool {
    const EXPONENT: u16 = 0x7f80;
    !bytes.as_chunks::<2>().0.iter().fold(false, |bad, bytes| bad | (u16::from_le_bytes(*bytes) & EXPONENT == EXPONENT))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use crate::codec::Codec::Bf16;
    use crate::tensor::PayloadError;

    #[test]
    fn every_pattern_comes_back_or_is_refused() {
        for pattern in 0..=u16::MAX {
            let bytes = pattern.to_le_bytes();
            let expected = half::bf16::from_bits(pattern);
            let (mut value, mut sum) = ([0.5], [1.0]);
            if expected.is_finite() {
                Bf16.decode(&bytes, &mut value).expect("finite");
                assert_eq!(value[0].to_bits(), expected.to_f32().to_bits(), "{pattern:04x}");
                let mut again = [0; 2];
                Bf16.encode(&value, &mut again);
                assert_eq!(again, bytes);
                Bf16.decode_add(&bytes, &mut sum).expect("finite");
                assert_eq!(sum[0], 1.0 + expected.to_f32());
            } else {
                assert_eq!(Bf16.decode(&bytes, &mut value), Err(PayloadError::NotFinite { index: 0 }));
                assert_eq!(Bf16.decode_add(&bytes, &mut sum), Err(PayloadError::NotFinite { index: 0 }));
                assert_eq!(sum, [1.0]);
            }
        }
    }

    #[test]
    fn ties_round_to_even_and_the_largest_overflows() {
        let encode = |bits: u32| {
            let mut bytes = [0; 2];
            Bf16.encode(&[f32::from_bits(bits)], &mut bytes);
            u16::from_le_bytes(bytes)
        };
        assert_eq!(encode(0x3f80_8000), 0x3f80);
        assert_eq!(encode(0x3f81_8000), 0x3f82);
        assert_eq!(encode(0x3f80_8001), 0x3f81);
        assert_eq!(encode(f32::MAX.to_bits()), 0x7f80);
        assert_eq!(encode(0x7f80_0001) & 0x7fff, 0x7fc0, "a NaN whose payload lies in the lower half stays a NaN");
    }

    proptest! {
        #[test]
        fn rounds_as_the_half_crate_does(bits: u32) {
            let value = f32::from_bits(bits);
            let mut bytes = [0; 2];
            Bf16.encode(&[value], &mut bytes);
            let (got, expected) = (half::bf16::from_le_bytes(bytes), half::bf16::from_f32(value));
            prop_assert!(got.to_bits() == expected.to_bits() || got.is_nan() && expected.is_nan());
        }
    }
}
