//! Causal self-attention with rotary positions and grouped keys and values:
//! `softmax(q k^T / sqrt(width)) v`, each query head with the keys of its group (Ainslie et al. 2023).

use skein_protocol::model::ModelConfig;
use tch::{Device, TchError, Tensor};

use super::dimension;
use super::rope::Rope;

/// One attention with its projections, each `[out, in]`.
pub struct Attention<'a> {
    query: &'a Tensor,
    key: &'a Tensor,
    value: &'a Tensor,
    output: &'a Tensor,
    heads: i64,
    key_heads: i64,
    width: i64,
}

impl<'a> Attention<'a> {
    /// An attention with the projections of queries, keys, values and the output.
    pub fn new([query, key, value, output]: [&'a Tensor; 4], config: &ModelConfig) -> Self {
        Self {
            query,
            key,
            value,
            output,
            heads: dimension(config.num_attention_heads),
            key_heads: dimension(config.num_key_value_heads),
            width: dimension(config.head_dim()),
        }
    }

    /// Attends within `[sequences, length, hidden_size]`.
    ///
    /// # Errors
    /// If the shapes do not fit, or the device fails.
    pub fn forward(&self, x: &Tensor, rope: &Rope) -> Result<Tensor, TchError> {
        let (sequences, length, hidden) = x.size3()?;
        let split = |x: Tensor, heads: i64| x.f_view([sequences, length, heads, self.width]);
        let query = split(x.f_linear(&rope.interleave(self.query)?, None::<&Tensor>)?, self.heads)?;
        let key = split(x.f_linear(&rope.interleave(self.key)?, None::<&Tensor>)?, self.key_heads)?;
        let value = split(x.f_linear(self.value, None::<&Tensor>)?, self.key_heads)?;
        let (query, key) = (rope.forward(&query)?, rope.forward(&key)?);
        let attended = attend(&query.f_transpose(1, 2)?, &self.share(&key)?, &self.share(&value)?)?;
        attended.f_transpose(1, 2)?.f_reshape([sequences, length, hidden])?.f_linear(self.output, None::<&Tensor>)
    }

    /// Keys or values `[sequences, length, key_heads, width]` as `[sequences, heads, length, width]`:
    /// each once for every query head of its group.
    fn share(&self, x: &Tensor) -> Result<Tensor, TchError> {
        let (sequences, length, _, width) = x.size4()?;
        let x = x.f_transpose(1, 2)?;
        if self.heads == self.key_heads {
            return Ok(x);
        }
        let shape = [sequences, self.key_heads, self.heads / self.key_heads, length, width];
        x.f_unsqueeze(2)?.f_expand(shape, false)?.f_reshape([sequences, self.heads, length, width])
    }
}

/// Causal attention of `[sequences, heads, length, width]`.
///
/// On a CPU the blocked kernel is named directly: `scaled_dot_product_attention` falls back to
/// several passes over all scores without a word where it thinks that the blocked one does not fit.
fn attend(query: &Tensor, key: &Tensor, value: &Tensor) -> Result<Tensor, TchError> {
    if query.device() == Device::Cpu {
        let (attended, _) = Tensor::f_internal_scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, true, None::<&Tensor>, None)?;
        return Ok(attended);
    }
    Tensor::f_scaled_dot_product_attention(query, key, value, None::<&Tensor>, 0.0, true, None, false)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::reference::{self, check_layer, model, numbers, values};

    #[test]
    fn forward_and_backward_follow_the_formula() {
        for key_heads in [4, 2, 1] {
            let config = ModelConfig { num_key_value_heads: key_heads, ..model() };
            let (length, hidden, narrow) = (5, config.hidden_size, key_heads * config.head_dim());
            let inputs = [
                numbers(1, 2 * length * hidden),
                numbers(2, hidden * hidden),
                numbers(3, narrow * hidden),
                numbers(4, narrow * hidden),
                numbers(5, hidden * hidden),
            ];
            let (h, n) = (hidden as i64, narrow as i64);
            check_layer(
                &inputs,
                &[&[2, 5, h], &[h, h], &[n, h], &[n, h], &[h, h]],
                |t| {
                    let rope = Rope::new(config.head_dim(), config.rope_theta, length, Device::Cpu)?;
                    Attention::new([&t[1], &t[2], &t[3], &t[4]], &config).forward(&t[0], &rope)
                },
                |v| reference::attention(&v[0], [&v[1], &v[2], &v[3], &v[4]], &config, length),
            );
        }
    }

    #[test]
    fn the_dispatcher_takes_the_blocked_kernel_too() {
        // The named kernel equals what the dispatcher chooses bit for bit, and the passes over all scores do not.
        let x = |seed| Tensor::from_slice(&numbers(seed, 2 * 3 * 100 * 16)).view([2, 3, 100, 16]);
        let (q, k, v) = (x(1), x(2), x(3));
        let ours = values(&attend(&q, &k, &v).expect("shapes fit"));
        let chosen = values(&Tensor::scaled_dot_product_attention(&q, &k, &v, None::<&Tensor>, 0.0, true, None, false));
        let none = None::<&Tensor>;
        let (passes, _) = Tensor::internal_scaled_dot_product_attention_math(&q, &k, &v, none, 0.0, true, none, None, false);
        assert!(ours == chosen);
        let passes = values(&passes);
        assert!(ours != passes);
        assert!(ours.iter().zip(&passes).all(|(a, b)| (a - b).abs() < 1e-5));
    }
}
