//! A model with weights of its own that predicts and is not trained: for generation and evaluation.

use skein_protocol::id::Block;
use skein_protocol::model::{ModelConfig, Structure};
use tch::{Device, Tensor};

use super::head::cross_entropy;
use super::{Llama, dimension};
use crate::engine::EngineError;

/// A whole model with copies of its weights on one device.
pub struct Predictor {
    model: Llama,
    /// The weights of each block's uses, in order.
    blocks: Vec<Vec<Tensor>>,
    context: usize,
    device: Device,
}

impl Predictor {
    /// A predictor for sequences of at most `context` tokens. `weights` are the flat f32 buffers of
    /// all groups in their layouts; the index is the group's.
    ///
    /// # Errors
    /// If a buffer is missing or has another length than its layout, or the device fails.
    pub fn new(config: &ModelConfig, weights: &[impl AsRef<[f32]>], context: usize, device: Device) -> Result<Self, EngineError> {
        let model = Llama::new(config, context, device)?;
        let structure = Structure::llama(config, context);
        let mut groups = Vec::with_capacity(structure.groups.len());
        for (group, layout) in structure.group_ids().zip(&structure.groups) {
            let buffer = weights.get(usize::from(group.0)).ok_or_else(|| EngineError::Absent { what: format!("weights of group {group}") })?.as_ref();
            if buffer.len() != layout.len {
                return Err(EngineError::WrongState { group, found: 4 * buffer.len(), expected: 4 * layout.len });
            }
            let mut tensors = Vec::with_capacity(layout.tensors.len());
            for spec in &layout.tensors {
                let shape: Vec<i64> = spec.shape.iter().copied().map(dimension).collect();
                let flat = Tensor::f_from_slice(&buffer[spec.offset..spec.offset + spec.len()])?;
                tensors.push(flat.f_view(shape.as_slice())?.f_to_device(device)?);
            }
            groups.push(tensors);
        }
        let used = |block: Block| structure.uses.iter().filter(move |(_, user)| *user == block).flat_map(|(group, _)| &groups[usize::from(group.0)]);
        let blocks = structure.whole().blocks().map(|block| used(block).map(Tensor::shallow_clone).collect()).collect();
        Ok(Self { model, blocks, context, device })
    }

    /// The most tokens that one prediction sees.
    pub fn context(&self) -> usize {
        self.context
    }

    /// The model's shape.
    pub fn config(&self) -> &ModelConfig {
        self.model.config()
    }

    /// Logits `[tokens, vocab_size]`, row-major: row `i` predicts the token after `tokens[..=i]`.
    ///
    /// # Errors
    /// If there is no token, there are more than the context has, one is not in the vocabulary, or the device fails.
    pub fn logits(&self, tokens: &[u32]) -> Result<Vec<f32>, EngineError> {
        let _guard = tch::no_grad_guard();
        to_vector(&self.forward(tokens, 1)?)
    }

    /// Logits `[vocab_size]` of the token after `tokens`.
    ///
    /// # Errors
    /// As [`logits`](Self::logits).
    pub fn next(&self, tokens: &[u32]) -> Result<Vec<f32>, EngineError> {
        let _guard = tch::no_grad_guard();
        to_vector(&self.forward(tokens, 1)?.f_select(0, -1)?)
    }

    /// Mean loss in nats a token over `sequences` sequences of equal length, one after the other in
    /// `tokens`; the first token of each is only seen, not predicted.
    ///
    /// # Errors
    /// As [`logits`](Self::logits), or if the sequences do not divide the tokens or have fewer than two.
    pub fn loss(&self, tokens: &[u32], sequences: usize) -> Result<f64, EngineError> {
        let _guard = tch::no_grad_guard();
        let length = tokens.len().checked_div(sequences).unwrap_or(0);
        if length < 2 || length * sequences != tokens.len() {
            return Err(EngineError::Data(format!("{} tokens are not {sequences} sequences of two or more", tokens.len())));
        }
        let part = |range: std::ops::Range<usize>| -> Vec<u32> { tokens.chunks(length).flat_map(|sequence| &sequence[range.clone()]).copied().collect() };
        let logits = self.forward(&part(0..length - 1), sequences)?;
        let targets = self.check(&part(1..length))?;
        Ok(cross_entropy(&logits, &targets)?.f_double_value(&[])?)
    }

    fn forward(&self, tokens: &[u32], sequences: usize) -> Result<Tensor, EngineError> {
        let length = tokens.len() / sequences;
        if length == 0 || length > self.context {
            return Err(EngineError::Data(format!("{length} tokens at once, the context has 1 to {}", self.context)));
        }
        let mut x = self.check(tokens)?.f_view([dimension(sequences), dimension(length)])?;
        for (number, weights) in (0..).zip(&self.blocks) {
            x = self.model.forward(Block(number), weights, &x)?;
        }
        Ok(x)
    }

    /// Tokens as i64 on the device, all in the vocabulary.
    fn check(&self, tokens: &[u32]) -> Result<Tensor, EngineError> {
        let vocabulary = self.config().vocab_size;
        if let Some(token) = tokens.iter().find(|token| **token as usize >= vocabulary) {
            return Err(EngineError::Data(format!(
                "token {token} is not in the model's vocabulary of {vocabulary}: is this the tokenizer it was trained with?"
            )));
        }
        let wide: Vec<i64> = tokens.iter().copied().map(i64::from).collect();
        Ok(Tensor::f_from_slice(&wide)?.f_to_device(self.device)?)
    }
}

fn to_vector(tensor: &Tensor) -> Result<Vec<f32>, EngineError> {
    let flat = tensor.f_to_device(Device::Cpu)?.f_contiguous()?.f_view([-1])?;
    let mut values = vec![0.0f32; flat.numel()];
    flat.f_copy_data(&mut values, flat.numel())?;
    Ok(values)
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::model::reference::{self, close, model, numbers};

    /// A small predictor and its weights.
    pub(crate) fn predictor(tied: bool, context: usize) -> (Predictor, Vec<Vec<f32>>) {
        tch::set_num_threads(1);
        let config = ModelConfig { tie_word_embeddings: tied, ..model() };
        let weights: Vec<Vec<f32>> = Structure::llama(&config, context).groups.iter().zip(1..).map(|(layout, seed)| numbers(seed, layout.len)).collect();
        (Predictor::new(&config, &weights, context, Device::Cpu).expect("a CPU"), weights)
    }

    #[test]
    fn logits_and_loss_follow_the_formulas() {
        for tied in [false, true] {
            let (predictor, weights) = predictor(tied, 8);
            let structure = Structure::llama(predictor.config(), 8);
            let wide = |group: usize| -> Vec<Vec<f64>> {
                let tensors = &structure.groups[group].tensors;
                tensors.iter().map(|spec| weights[group][spec.offset..][..spec.len()].iter().map(|v| f64::from(*v)).collect()).collect()
            };
            let tokens = [3u32, 9, 0, 9, 10];
            let table = &wide(0)[0];
            let mut x: Vec<f64> = tokens.iter().flat_map(|token| table[16 * *token as usize..][..16].to_vec()).collect();
            for layer in 1..3 {
                x = reference::layer(&x, &wide(layer), predictor.config(), tokens.len());
            }
            let head = wide(3);
            let expected = reference::linear(&reference::rms_norm(&x, &head[0], 1e-5), head.get(1).unwrap_or(table), 16);
            let logits = predictor.logits(&tokens).expect("fits");
            close(&logits, &expected, 1e-5);
            assert_eq!(predictor.next(&tokens).expect("fits"), logits[4 * 11..]);
            let targets: Vec<i64> = tokens[1..].iter().copied().map(i64::from).collect();
            let loss = predictor.loss(&tokens, 1).expect("fits");
            assert!((loss - reference::cross_entropy(&expected[..4 * 11], &targets, 11)).abs() < 1e-4);
            // Sequences side by side do not see each other.
            let two = predictor.loss(&[3, 9, 0, 4, 4, 1], 2).expect("fits");
            let each = [[3, 9, 0], [4, 4, 1]].map(|sequence| predictor.loss(&sequence, 1).expect("fits"));
            assert!((two - (each[0] + each[1]) / 2.0).abs() < 1e-5);
        }
    }

    #[test]
    fn what_does_not_fit_is_an_error() {
        let (predictor, mut weights) = predictor(false, 4);
        let says = |error: EngineError, what: &str| assert!(error.to_string().contains(what), "{error}");
        says(predictor.logits(&[]).expect_err("nothing"), "0 tokens at once");
        says(predictor.logits(&[1; 5]).expect_err("too many"), "5 tokens at once, the context has 1 to 4");
        says(predictor.logits(&[11]).expect_err("unknown"), "token 11 is not in the model's vocabulary of 11");
        says(predictor.loss(&[1, 2, 3], 2).expect_err("odd"), "3 tokens are not 2 sequences");
        says(predictor.loss(&[], 0).expect_err("nothing"), "0 tokens are not 0 sequences");
        weights[2].pop();
        assert!(matches!(Predictor::new(predictor.config(), &weights, 4, Device::Cpu), Err(EngineError::WrongState { .. })));
        weights.truncate(2);
        assert!(matches!(Predictor::new(predictor.config(), &weights, 4, Device::Cpu), Err(EngineError::Absent { .. })));
    }
}
