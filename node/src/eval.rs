//! How well a model predicts text it has not seen.

use crate::engine::EngineError;
use crate::model::predictor::Predictor;

/// What an evaluation found.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Evaluation {
    /// Mean loss in nats a predicted token.
    pub nats_per_token: f64,
    /// Loss in bits a byte of the text predicted: comparable between tokenizers.
    pub bits_per_byte: f64,
    /// Tokens predicted.
    pub tokens: u64,
    /// Bytes of text that those tokens stand for.
    pub bytes: u64,
}

/// Predicts every token of each sequence but the first, from those before it. Sequences of equal
/// length that follow each other are computed at most `together` at a time; `bytes_of` gives how
/// many bytes of text a token stands for; `on_batch` hears how many sequences are done.
///
/// # Errors
/// If there is nothing to predict, a sequence has fewer than two tokens or more than the predictor's
/// context and one, a token is not in the vocabulary, or the device fails.
pub fn evaluate(
    predictor: &Predictor,
    sequences: &[Vec<u32>],
    together: usize,
    bytes_of: &dyn Fn(u32) -> usize,
    on_batch: &mut dyn FnMut(usize),
) -> Result<Evaluation, EngineError> {
    let (mut nats, mut tokens, mut bytes, mut done) = (0.0, 0u64, 0u64, 0);
    for alike in sequences.chunk_by(|a, b| a.len() == b.len()) {
        for batch in alike.chunks(together.max(1)) {
            let predicted = batch.iter().map(|sequence| sequence.len().saturating_sub(1) as u64).sum::<u64>();
            nats += predictor.loss(&batch.concat(), batch.len())? * predicted as f64;
            tokens += predicted;
            bytes += batch.iter().flat_map(|sequence| &sequence[1..]).map(|token| bytes_of(*token) as u64).sum::<u64>();
            done += batch.len();
            on_batch(done);
        }
    }
    if tokens == 0 || bytes == 0 {
        return Err(EngineError::Data("there is no text to evaluate on".to_owned()));
    }
    let bits = nats / std::f64::consts::LN_2;
    Ok(Evaluation { nats_per_token: nats / tokens as f64, bits_per_byte: bits / bytes as f64, tokens, bytes })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::predictor::tests::predictor;

    #[test]
    fn a_model_that_knows_nothing_needs_the_logarithm_of_the_vocabulary() {
        let (known, mut weights) = predictor(false, 4);
        weights[3].fill(0.0);
        let blank = Predictor::new(known.config(), &weights, 4, tch::Device::Cpu).expect("a CPU");
        let sequences = vec![vec![1, 2, 3], vec![4, 5, 6], vec![7, 8]];
        // Token 8 stands for six bytes, the others for one.
        let found = evaluate(&blank, &sequences, 1, &|token| if token == 8 { 6 } else { 1 }, &mut |_| ()).expect("fits");
        assert_eq!((found.tokens, found.bytes), (5, 10));
        assert!((found.nats_per_token - 11f64.ln()).abs() < 1e-6);
        assert!((found.bits_per_byte - 11f64.log2() / 2.0).abs() < 1e-6);
    }

    #[test]
    fn batches_change_nothing_and_are_reported() {
        let (predictor, _) = predictor(true, 4);
        let sequences = vec![vec![1, 2, 3, 4, 5], vec![9, 8, 7, 6, 5], vec![0, 1, 0, 1, 0], vec![3, 3]];
        let mut heard = Vec::new();
        let one = evaluate(&predictor, &sequences, 1, &|_| 1, &mut |_| ()).expect("fits");
        let two = evaluate(&predictor, &sequences, 2, &|_| 1, &mut |done| heard.push(done)).expect("fits");
        assert_eq!(heard, [2, 3, 4]);
        assert!((one.nats_per_token - two.nats_per_token).abs() < 1e-5);
        let each: Vec<f64> = sequences.iter().map(|sequence| predictor.loss(sequence, 1).expect("fits")).collect();
        let mean = (4.0 * (each[0] + each[1] + each[2]) + each[3]) / 13.0;
        assert!((one.nats_per_token - mean).abs() < 1e-9);
    }

    #[test]
    fn nothing_to_predict_is_an_error() {
        let (predictor, _) = predictor(true, 4);
        let empty = evaluate(&predictor, &[], 1, &|_| 1, &mut |_| ()).expect_err("no text");
        assert_eq!(empty.to_string(), "training data: there is no text to evaluate on");
        for short in [vec![], vec![1]] {
            assert!(matches!(evaluate(&predictor, &[short], 1, &|_| 1, &mut |_| ()), Err(EngineError::Data(_))));
        }
    }
}
