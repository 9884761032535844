//! One transformer layer: `x + attention(norm(x))`, then `x + mlp(norm(x))`.

use skein_protocol::model::ModelConfig;
use tch::{TchError, Tensor};

use super::attention::Attention;
use super::mlp::SwiGlu;
use super::norm::RmsNorm;
use super::rope::Rope;

/// One layer with its weights.
pub struct Layer<'a> {
    attention_norm: RmsNorm<'a>,
    attention: Attention<'a>,
    mlp_norm: RmsNorm<'a>,
    mlp: SwiGlu<'a>,
}

impl<'a> Layer<'a> {
    /// A layer with its group's tensors in the layout's order.
    ///
    /// # Errors
    /// If there are not nine.
    pub fn new(weights: &'a [Tensor], config: &ModelConfig) -> Result<Self, TchError> {
        let [norm, query, key, value, output, second_norm, gate, up, down] = super::exactly("layer", weights)?;
        Ok(Self {
            attention_norm: RmsNorm::new(norm, config.rms_norm_eps),
            attention: Attention::new([query, key, value, output], config),
            mlp_norm: RmsNorm::new(second_norm, config.rms_norm_eps),
            mlp: SwiGlu::new([gate, up, down]),
        })
    }

    /// Computes `[sequences, length, hidden_size]`.
    ///
    /// # Errors
    /// If the shapes do not fit, or the device fails.
    pub fn forward(&self, x: &Tensor, rope: &Rope) -> Result<Tensor, TchError> {
        let x = x.f_add(&self.attention.forward(&self.attention_norm.forward(x)?, rope)?)?;
        x.f_add(&self.mlp.forward(&self.mlp_norm.forward(&x)?)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::reference::{self, check_layer, layer_weights, model, numbers};

    #[test]
    fn forward_and_backward_follow_the_formula() {
        let config = model();
        let length = 4;
        let (weights, shapes) = layer_weights(&config);
        let mut inputs = vec![numbers(1, 2 * length * config.hidden_size)];
        inputs.extend(weights);
        let mut all_shapes = vec![vec![2, 4, config.hidden_size as i64]];
        all_shapes.extend(shapes);
        let shapes: Vec<&[i64]> = all_shapes.iter().map(Vec::as_slice).collect();
        check_layer(
            &inputs,
            &shapes,
            |t| {
                let rope = Rope::new(config.head_dim(), config.rope_theta, length, tch::Device::Cpu)?;
                Layer::new(&t[1..], &config)?.forward(&t[0], &rope)
            },
            |v| reference::layer(&v[0], &v[1..], &config, length),
        );
    }

    #[test]
    fn a_missing_weight_is_an_error() {
        let weights: Vec<Tensor> = (0..8).map(|_| Tensor::from_slice(&[0.0f32])).collect();
        let error = Layer::new(&weights, &model()).err().expect("eight are too few");
        assert!(error.to_string().contains("expected 9 weights, got 8"));
    }
}
