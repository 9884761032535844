//! Head: the final norm, the projection to the vocabulary, and the loss.

use skein_protocol::model::ModelConfig;
use tch::{Reduction, TchError, Tensor};

use super::norm::RmsNorm;

/// The head with its weights.
pub struct Head<'a> {
    norm: RmsNorm<'a>,
    projection: &'a Tensor,
}

impl<'a> Head<'a> {
    /// A head with the final norm's weight and a projection `[vocab_size, hidden_size]`: its own or the embedding's.
    ///
    /// # Errors
    /// If there are not two.
    pub fn new(weights: &'a [Tensor], config: &ModelConfig) -> Result<Self, TchError> {
        let [norm, projection] = super::exactly("head", weights)?;
        Ok(Self { norm: RmsNorm::new(norm, config.rms_norm_eps), projection })
    }

    /// Logits `[positions, vocab_size]` of `[.., hidden_size]`.
    ///
    /// # Errors
    /// If the shapes do not fit, or the device fails.
    pub fn forward(&self, x: &Tensor) -> Result<Tensor, TchError> {
        let flat = x.f_view([-1, *x.size().last().unwrap_or(&0)])?;
        self.norm.forward(&flat)?.f_linear(self.projection, None::<&Tensor>)
    }
}

/// Mean of `-ln softmax(logits)[target]` over positions, in nats a token. `logits` are
/// `[positions, vocab_size]`, `targets` i64 `[positions]`.
///
/// # Errors
/// If the shapes do not fit, or the device fails.
pub fn cross_entropy(logits: &Tensor, targets: &Tensor) -> Result<Tensor, TchError> {
    // No target is -100: targets are tokens.
    logits.f_cross_entropy_loss(targets, None::<&Tensor>, Reduction::Mean, -100, 0.0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::reference::{self, check_layer, model, numbers};

    #[test]
    fn logits_follow_the_formula() {
        let config = model();
        let hidden = config.hidden_size;
        let inputs = [numbers(1, 3 * hidden), numbers(2, hidden), numbers(3, 5 * hidden)];
        let h = hidden as i64;
        check_layer(
            &inputs,
            &[&[1, 3, h], &[h], &[5, h]],
            |t| Head::new(&t[1..], &config)?.forward(&t[0]),
            |v| reference::linear(&reference::rms_norm(&v[0], &v[1], config.rms_norm_eps), &v[2], hidden),
        );
    }

    #[test]
    fn loss_follows_the_formula() {
        let targets = [4i64, 0, 2];
        check_layer(
            &[numbers(1, 3 * 5)],
            &[&[3, 5]],
            |t| cross_entropy(&t[0], &Tensor::from_slice(&targets)),
            |v| vec![reference::cross_entropy(&v[0], &targets, 5)],
        );
    }
}
