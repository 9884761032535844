//! Feed-forward with a gate: `down(silu(gate(x)) * up(x))` (SwiGLU, Shazeer 2020).

use tch::{TchError, Tensor};

/// One feed-forward with its projections, each `[out, in]`.
pub struct SwiGlu<'a> {
    gate: &'a Tensor,
    up: &'a Tensor,
    down: &'a Tensor,
}

impl<'a> SwiGlu<'a> {
    /// A feed-forward with the projections gate and up, `[intermediate, hidden]`, and down, `[hidden, intermediate]`.
    pub fn new([gate, up, down]: [&'a Tensor; 3]) -> Self {
        Self { gate, up, down }
    }

    /// Computes `[.., hidden_size]`.
    ///
    /// # Errors
    /// If the shapes do not fit, or the device fails.
    pub fn forward(&self, x: &Tensor) -> Result<Tensor, TchError> {
        let gate = x.f_linear(self.gate, None::<&Tensor>)?.f_silu()?;
        let up = x.f_linear(self.up, None::<&Tensor>)?;
        gate.f_mul(&up)?.f_linear(self.down, None::<&Tensor>)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::reference::{self, check_layer, numbers};

    #[test]
    fn forward_and_backward_follow_the_formula() {
        let inputs = [numbers(1, 3 * 8), numbers(2, 12 * 8), numbers(3, 12 * 8), numbers(4, 8 * 12)];
        check_layer(
            &inputs,
            &[&[3, 8], &[12, 8], &[12, 8], &[8, 12]],
            |t| SwiGlu::new([&t[1], &t[2], &t[3]]).forward(&t[0]),
            |v| reference::swiglu(&v[0], [&v[1], &v[2], &v[3]], 8),
        );
    }
}
