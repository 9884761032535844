//! Fixed point for mode `exact`: sums of integers do not depend on the order of their terms.
//!
//! One step for all tensors, from the configuration alone. 62 bits hold a batch of 16 microbatches
//! with values up to 1024 in steps of 2^-48, finer than f32 is above 2^-24; so nothing has to be
//! learned from step to step, kept, or handed over (see docs/decisions.md).

/// Values that are looked at together.
const PIECE: usize = 1024;
/// 1.5 * 2^52: f64 around it are whole numbers.
const WHOLE: f64 = 6_755_399_441_055_744.0;
/// 2^51: up to here [`WHOLE`] stays the leading part of a sum.
const SMALL: f64 = 2_251_799_813_685_248.0;

/// Values of a gradient as i64: multiples of `2^-exponent`, each at most `limit` in magnitude.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct FixedPoint {
    exponent: i32,
    limit: f64,
}

impl FixedPoint {
    /// Fixed point in which sums of `terms` values of magnitude up to `limit` never overflow, with
    /// the finest steps that allow it. Both are rounded up to powers of two.
    pub fn new(terms: u32, limit: f64) -> Self {
        let term_bits = i32::try_from(u32::BITS - terms.max(1).saturating_sub(1).leading_zeros()).expect("at most 32");
        // The largest sum is 2^62 at most.
        let room = 62 - term_bits;
        let exponent = room - limit.log2().ceil() as i32;
        Self { exponent, limit: 2f64.powi(room) }
    }

    /// Adds `values` to `sums`, each rounded half to even; how many had to be clamped.
    ///
    /// # Panics
    /// If a value is not finite or the lengths differ: the caller has checked both.
    pub fn add(self, values: &[f32], sums: &mut [i64]) -> u64 {
        assert_eq!(values.len(), sums.len());
        let mut clamped = 0;
        for (values, sums) in values.chunks(PIECE).zip(sums.chunks_mut(PIECE)) {
            // The bits of magnitudes are in the order of their values.
            let largest = f32::from_bits(values.iter().fold(0, |largest, value| largest.max(value.to_bits() & 0x7fff_ffff)));
            assert!(largest.is_finite(), "checked before it came here");
            if f64::from(largest) * self.scale() < SMALL {
                self.add_small(values, sums);
            } else {
                clamped += self.add_any(values, sums);
            }
        }
        clamped
    }

    fn scale(self) -> f64 {
        2f64.powi(self.exponent)
    }

    /// Values below [`SMALL`] once scaled, in a form that compilers turn into vectors.
    fn add_small(self, values: &[f32], sums: &mut [i64]) {
        let scale = self.scale();
        for (sum, value) in sums.iter_mut().zip(values) {
            // Beside this constant an f64 has room for whole numbers only: the addition rounds half to
            // even, and the sum's low bits are the whole number.
            let shifted = f64::from(*value) * scale + WHOLE;
            let whole = shifted.to_bits().wrapping_sub(WHOLE.to_bits()) as i64;
            // Cannot overflow: so many terms of such a size have room.
            *sum = sum.wrapping_add(whole);
        }
    }

    fn add_any(self, values: &[f32], sums: &mut [i64]) -> u64 {
        let scale = self.scale();
        let mut clamped = 0;
        for (sum, value) in sums.iter_mut().zip(values) {
            // Exact: f64 has room for every f32 and the scale is a power of two.
            let scaled = f64::from(*value) * scale;
            clamped += u64::from(scaled.abs() > self.limit);
            *sum += scaled.clamp(-self.limit, self.limit).round_ties_even() as i64;
        }
        clamped
    }

    /// The values of finished sums.
    pub fn to_f32(self, sums: &[i64], values: &mut [f32]) {
        let step = 2f64.powi(-self.exponent);
        for (value, sum) in values.iter_mut().zip(sums) {
            *value = (*sum as f64 * step) as f32;
        }
    }
}

/// Adds encoded sums ([`crate::codec::Codec::Fixed`]: i64 little endian) to `sums`.
pub fn add_encoded(bytes: &[u8], sums: &mut [i64]) {
    for (sum, bytes) in sums.iter_mut().zip(bytes.as_chunks::<8>().0) {
        // What a liar sends may overflow; honest sums cannot.
        *sum = sum.wrapping_add(i64::from_le_bytes(*bytes));
    }
}

/// Encodes sums as i64 little endian.
pub fn encode(sums: &[i64], bytes: &mut [u8]) {
    for (bytes, sum) in bytes.as_chunks_mut::<8>().0.iter_mut().zip(sums) {
        *bytes = sum.to_le_bytes();
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn the_largest_batch_of_the_largest_values_does_not_overflow() {
        for terms in [1, 2, 3, 16, 1000, 65_535] {
            let fixed = FixedPoint::new(terms, 1024.0);
            let mut sums = [0];
            let clamped: u64 = (0..terms).map(|_| fixed.add(&[f32::MAX], &mut sums)).sum();
            assert_eq!(clamped, u64::from(terms));
            assert!(sums[0] > 1 << 60 && sums[0] <= 1 << 62, "{terms}: {}", sums[0]);
            let mut sums = [0];
            assert_eq!(fixed.add(&[1024.0,], &mut sums), 0);
        }
    }

    #[test]
    fn halves_round_to_even() {
        let fixed = FixedPoint::new(16, 1024.0);
        let step = 2f32.powi(-48);
        for (value, expected) in [(0.5, 0), (1.5, 2), (2.5, 2), (-0.5, 0), (-1.5, -2), (0.75, 1)] {
            let mut sums = [0];
            fixed.add(&[value * step], &mut sums);
            assert_eq!(sums[0], expected, "{value} steps");
        }
    }

    #[test]
    fn the_fast_way_gives_the_bits_of_the_plain_one() {
        let fixed = FixedPoint::new(16, 1024.0);
        let edge = (SMALL / fixed.scale()) as f32;
        let steps = (0..4096).map(|index| (index as f32 - 2048.0) * 0.25 * 2f32.powi(-48));
        let spread = (0..4096u32).map(|index| f32::from_bits(index.wrapping_mul(0x9e37_79b9)) % edge).filter(|value| value.is_finite());
        let values: Vec<f32> = steps.chain(spread).chain([edge.next_down(), -edge.next_down(), 0.0, -0.0, f32::MIN_POSITIVE, 1e-45]).collect();
        let (mut fast, mut plain) = (vec![7; values.len()], vec![7; values.len()]);
        assert_eq!(fixed.add(&values, &mut fast), 0);
        assert_eq!(fixed.add_any(&values, &mut plain), 0);
        assert_eq!(fast, plain);
        // A piece with one large value takes the plain way as a whole.
        let (mut one, mut each) = (vec![0; 3], vec![0; 3]);
        fixed.add(&[0.5, 2000.0, -0.25], &mut one);
        for (value, sum) in [0.5, 2000.0, -0.25].iter().zip(&mut each) {
            fixed.add(&[*value], std::slice::from_mut(sum));
        }
        assert_eq!(one, each);
    }

    proptest! {
        #[test]
        fn any_order_and_any_grouping_gives_the_same_bits(values in proptest::collection::vec(-10f32..10f32, 2..40), cut in 0usize..40) {
            let fixed = FixedPoint::new(64, 1024.0);
            let sum = |values: &mut dyn Iterator<Item = &f32>| {
                let mut sums = [0];
                values.for_each(|value| { fixed.add(&[*value], &mut sums); });
                sums[0]
            };
            let forward = sum(&mut values.iter());
            prop_assert_eq!(forward, sum(&mut values.iter().rev()));
            let (a, b) = values.split_at(cut.min(values.len()));
            let mut bytes = [0; 8];
            encode(&[sum(&mut a.iter())], &mut bytes);
            let mut total = [sum(&mut b.iter())];
            add_encoded(&bytes, &mut total);
            prop_assert_eq!(forward, total[0]);
            let mut value = [0.0];
            fixed.to_f32(&total, &mut value);
            let expected: f64 = values.iter().map(|v| f64::from(*v)).sum();
            prop_assert!((f64::from(value[0]) - expected).abs() <= 1e-6 * expected.abs() + 1e-9);
        }
    }
}
