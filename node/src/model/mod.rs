//! The model in the shape of Llama, one file a layer; the formulas are those of Hugging Face
//! `transformers`' `LlamaForCausalLM`.
//!
//! Start at [`Llama`], which computes one block from its weights and the boundary before it. All
//! files here know tensors and weights, never spans, gradients or messages. Weights come as
//! tensors in the order of their group's layout ([`skein_protocol::model::Structure`]).

pub mod attention;
pub mod embedding;
pub mod head;
pub mod layer;
pub mod mlp;
pub mod norm;
pub mod predictor;
pub mod rope;

#[cfg(test)]
pub(crate) mod reference;

use skein_protocol::id::Block;
use skein_protocol::model::ModelConfig;
use tch::{Device, TchError, Tensor};

use self::embedding::Embedding;
use self::head::Head;
use self::layer::Layer;
use self::rope::Rope;

/// A model without weights: its shape and what is computed once for all layers.
pub struct Llama {
    config: ModelConfig,
    rope: Rope,
}

impl Llama {
    /// The model for sequences of at most `length` tokens on `device`.
    ///
    /// # Errors
    /// If the device fails.
    pub fn new(config: &ModelConfig, length: usize, device: Device) -> Result<Self, TchError> {
        let rope = Rope::new(config.head_dim(), config.rope_theta, length, device)?;
        Ok(Self { config: config.clone(), rope })
    }

    /// The model's shape.
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// The last block, the head.
    pub fn head(&self) -> Block {
        Block(u16::try_from(self.config.num_hidden_layers + 1).expect("a model has fewer than 60000 layers: checked in its configuration"))
    }

    /// Computes one block. `weights` are the tensors of the block's uses, in order: its own group's,
    /// then, at a tied head, the embedding's.
    ///
    /// The embedding takes tokens as i64 `[sequences, length]`; the other blocks take
    /// `[sequences, length, hidden_size]`. The head gives logits `[sequences * length, vocab_size]`,
    /// the others `[sequences, length, hidden_size]`.
    ///
    /// # Errors
    /// If the shapes do not fit, or the device fails.
    pub fn forward(&self, block: Block, weights: &[Tensor], input: &Tensor) -> Result<Tensor, TchError> {
        if block == Block(0) {
            Embedding::new(weights)?.forward(input)
        } else if block == self.head() {
            Head::new(weights, &self.config)?.forward(input)
        } else {
            Layer::new(weights, &self.config)?.forward(input, &self.rope)
        }
    }
}

/// The weights as an array of the expected length.
fn exactly<'a, const N: usize>(layer: &str, weights: &'a [Tensor]) -> Result<&'a [Tensor; N], TchError> {
    weights.try_into().map_err(|_| TchError::Shape(format!("{layer}: expected {N} weights, got {}", weights.len())))
}

/// A dimension as libtorch counts.
pub(crate) fn dimension(value: usize) -> i64 {
    i64::try_from(value).expect("dimensions come from the model's configuration, whose tensors fit in memory")
}
