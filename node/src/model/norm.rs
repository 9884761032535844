//! Root mean square norm: `y = x / sqrt(mean(x^2) + epsilon) * weight` over the last dimension
//! (Zhang and Sennrich 2019).

use tch::{TchError, Tensor};

/// One norm with its weight.
pub struct RmsNorm<'a> {
    weight: &'a Tensor,
    epsilon: f64,
}

impl<'a> RmsNorm<'a> {
    /// A norm over the width of `weight`, which is `[width]`.
    pub fn new(weight: &'a Tensor, epsilon: f64) -> Self {
        Self { weight, epsilon }
    }

    /// Norms `[.., width]`.
    ///
    /// # Errors
    /// If the shapes do not fit, or the device fails.
    pub fn forward(&self, x: &Tensor) -> Result<Tensor, TchError> {
        x.f_rms_norm(self.weight.size(), Some(self.weight), self.epsilon)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::reference::{self, check_layer, numbers};

    #[test]
    fn forward_and_backward_follow_the_formula() {
        let (rows, width) = (3, 8);
        let inputs = [numbers(1, rows * width), numbers(2, width)];
        check_layer(
            &inputs,
            &[&[3, 8], &[8]],
            |tensors| RmsNorm::new(&tensors[1], 1e-5).forward(&tensors[0]),
            |values| reference::rms_norm(&values[0], &values[1], 1e-5),
        );
    }

    #[test]
    fn epsilon_stands_under_the_root() {
        let x = Tensor::from_slice(&[1e-3f32, -1e-3]);
        let weight = Tensor::from_slice(&[1.0f32, 1.0]);
        let y = RmsNorm::new(&weight, 3e-6).forward(&x).expect("shapes fit");
        assert!((y.double_value(&[0]) - 0.5).abs() < 1e-6, "1e-3 / sqrt(1e-6 + 3e-6) = 0.5");
    }
}
