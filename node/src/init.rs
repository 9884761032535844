//! Version 0: weights drawn from (seed, tensor name), the same on every machine.
//!
//! Only correctly rounded operations (`+ - * / sqrt`) are used, so that no library's `ln` or `cos`
//! makes one volunteer's weights differ from another's.

use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use skein_protocol::model::{GroupLayout, TensorSpec};

/// Fills a group's flat buffer with version 0: matrices are normal with mean 0 and standard
/// deviation `deviation`, scales of norms (one dimension) are one, biases are zero, padding is zero.
///
/// # Panics
/// If `buffer` is not as long as the layout says.
pub fn draw(layout: &GroupLayout, seed: u64, deviation: f64, buffer: &mut [f32]) {
    assert_eq!(buffer.len(), layout.len, "buffer of the group");
    buffer.fill(0.0);
    for tensor in &layout.tensors {
        let values = &mut buffer[tensor.offset..tensor.offset + tensor.len()];
        draw_tensor(tensor, seed, deviation, values);
    }
}

fn draw_tensor(tensor: &TensorSpec, seed: u64, deviation: f64, values: &mut [f32]) {
    if tensor.shape.len() >= 2 {
        let mut normal = Normal::new(seed, &tensor.name);
        values.fill_with(|| (normal.next() * deviation) as f32);
    } else {
        values.fill(if tensor.name.ends_with("bias") { 0.0 } else { 1.0 });
    }
}

/// Standard normal numbers by Marsaglia's polar method.
struct Normal {
    generator: ChaCha8Rng,
    spare: Option<f64>,
}

impl Normal {
    fn new(seed: u64, name: &str) -> Self {
        let mut hasher = blake3::Hasher::new_derive_key("skein initial weights v1");
        hasher.update(&seed.to_le_bytes());
        hasher.update(name.as_bytes());
        Self { generator: ChaCha8Rng::from_seed(*hasher.finalize().as_bytes()), spare: None }
    }

    fn next(&mut self) -> f64 {
        if let Some(spare) = self.spare.take() {
            return spare;
        }
        loop {
            let (x, y) = (self.symmetric(), self.symmetric());
            let square = x * x + y * y;
            if square > 0.0 && square < 1.0 {
                let scale = (-2.0 * ln(square) / square).sqrt();
                self.spare = Some(y * scale);
                return x * scale;
            }
        }
    }

    /// Uniform in [-1, 1), in steps of 2^-52.
    fn symmetric(&mut self) -> f64 {
        const STEP: f64 = 1.0 / (1_u64 << 52) as f64;
        (self.generator.next_u64() >> 11) as f64 * STEP - 1.0
    }
}

/// Natural logarithm of a positive normal number, to about one unit in the last place:
/// `x = m 2^e` with m near 1, and `ln m = 2 artanh((m - 1) / (m + 1))` as a series.
fn ln(x: f64) -> f64 {
    let bits = x.to_bits();
    let mut exponent = (bits >> 52) as i64 - 1023;
    let mut mantissa = f64::from_bits((bits & ((1 << 52) - 1)) | (1023 << 52));
    if mantissa > std::f64::consts::SQRT_2 {
        mantissa *= 0.5;
        exponent += 1;
    }
    let ratio = (mantissa - 1.0) / (mantissa + 1.0);
    let square = ratio * ratio;
    // Below 0.0295^13 / 27 of the first term after thirteen terms.
    let series = (0..13).rev().fold(0.0, |sum, n| sum * square + 1.0 / f64::from(2 * n + 1));
    exponent as f64 * std::f64::consts::LN_2 + 2.0 * ratio * series
}

#[cfg(test)]
mod tests {
    use super::*;

    fn layout() -> GroupLayout {
        GroupLayout::new([("norm.weight".to_owned(), vec![5]), ("w.weight".to_owned(), vec![100, 203]), ("w.bias".to_owned(), vec![3])])
    }

    fn drawn(seed: u64) -> Vec<f32> {
        let layout = layout();
        let mut buffer = vec![f32::NAN; layout.len];
        draw(&layout, seed, 0.02, &mut buffer);
        buffer
    }

    #[test]
    fn the_logarithm_is_the_logarithm() {
        for x in [1e-300_f64, 1e-9, 0.1, 0.5, 0.7, 0.708, 0.999_999, 1.0, 1.5, 3.0] {
            assert!((ln(x) - x.ln()).abs() <= 4e-16 * x.ln().abs(), "{x}: {} {}", ln(x), x.ln());
        }
    }

    #[test]
    fn matrices_are_normal_and_the_rest_is_constant() {
        let buffer = drawn(1);
        let matrix = &buffer[16..16 + 20_300];
        let n = matrix.len() as f64;
        let moment = |power: i32| matrix.iter().map(|v| (f64::from(*v) / 0.02).powi(power)).sum::<f64>() / n;
        // Standard errors: 1, sqrt 2, sqrt 15 and sqrt 96 over sqrt n; allow four of them.
        let allow = |deviation: f64| 4.0 * deviation / n.sqrt();
        assert!(moment(1).abs() < allow(1.0) && (moment(2) - 1.0).abs() < allow(1.42));
        assert!(moment(3).abs() < allow(3.88) && (moment(4) - 3.0).abs() < allow(9.8));
        assert_eq!(buffer[..16], [&[1.0; 5][..], &[0.0; 11]].concat());
        assert!(buffer[16 + 20_300..].iter().all(|v| *v == 0.0));
    }

    #[test]
    fn weights_depend_on_seed_and_name_alone() {
        assert_eq!(drawn(7), drawn(7));
        assert_ne!(drawn(7), drawn(8));
        // Pinned: a change here changes every run's version 0.
        assert_eq!(drawn(7)[16..19].iter().map(|v| v.to_bits()).collect::<Vec<_>>(), PINNED);
    }

    const PINNED: [u32; 3] = [1006238667, 3166368605, 3166771185];
}
