//! Embedding: the row of each token.

use tch::{TchError, Tensor};

/// The embedding with its table `[vocab_size, hidden_size]`.
pub struct Embedding<'a> {
    table: &'a Tensor,
}

impl<'a> Embedding<'a> {
    /// An embedding with its group's only tensor.
    ///
    /// # Errors
    /// If there is not exactly one.
    pub fn new(weights: &'a [Tensor]) -> Result<Self, TchError> {
        let [table] = super::exactly("embedding", weights)?;
        Ok(Self { table })
    }

    /// Looks up i64 tokens `[sequences, length]`, all below the vocabulary's size.
    ///
    /// # Errors
    /// If a token has no row, or the device fails.
    pub fn forward(&self, tokens: &Tensor) -> Result<Tensor, TchError> {
        Tensor::f_embedding(self.table, tokens, -1, false, false)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::reference::{check_layer, numbers};

    #[test]
    fn a_token_that_occurs_twice_has_the_sum_of_both_gradients() {
        let tokens = [3i64, 0, 3, 1];
        check_layer(
            &[numbers(1, 4 * 2)],
            &[&[4, 2]],
            |t| Embedding::new(t)?.forward(&Tensor::from_slice(&tokens)),
            |v| tokens.iter().flat_map(|token| v[0][2 * *token as usize..][..2].to_vec()).collect(),
        );
    }
}
