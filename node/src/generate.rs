//! Continuing a text.

use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use crate::engine::EngineError;
use crate::model::predictor::Predictor;

/// How to continue.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sampling {
    /// So many tokens at most.
    pub tokens: usize,
    /// Divides the logits before a token is drawn; 0 takes the likeliest.
    pub temperature: f64,
    /// All randomness follows from it.
    pub seed: u64,
    /// Ends the text; it is not part of the result.
    pub stop: Option<u32>,
}

/// Continues `prompt`: hands each new token to `on_token` as it comes, and returns them. Each
/// prediction sees the last tokens that the predictor's context has room for.
///
/// # Errors
/// If the prompt is empty or has a token that is not in the vocabulary, or the device fails.
pub fn generate(predictor: &Predictor, prompt: &[u32], sampling: Sampling, on_token: &mut dyn FnMut(u32)) -> Result<Vec<u32>, EngineError> {
    if prompt.is_empty() {
        return Err(EngineError::Data("the prompt has no tokens: give at least one character".to_owned()));
    }
    let mut generator = ChaCha8Rng::seed_from_u64(sampling.seed);
    let mut text = prompt.to_vec();
    for _ in 0..sampling.tokens {
        let seen = &text[text.len().saturating_sub(predictor.context())..];
        let token = draw(&predictor.next(seen)?, sampling.temperature, &mut generator)?;
        if sampling.stop == Some(token) {
            break;
        }
        text.push(token);
        on_token(token);
    }
    Ok(text.split_off(prompt.len()))
}

/// Draws from `softmax(logits / temperature)`; the likeliest, of equals the first, at temperature 0.
fn draw(logits: &[f32], temperature: f64, generator: &mut ChaCha8Rng) -> Result<u32, EngineError> {
    if logits.iter().any(|logit| !logit.is_finite()) {
        return Err(EngineError::NotFinite("a logit"));
    }
    let (mut best, mut token) = (f32::NEG_INFINITY, 0);
    for (candidate, logit) in (0..).zip(logits) {
        if *logit > best {
            (best, token) = (*logit, candidate);
        }
    }
    if temperature <= 0.0 {
        return Ok(token);
    }
    let weights: Vec<f64> = logits.iter().map(|logit| (f64::from(logit - best) / temperature).exp()).collect();
    // 53 random bits: a number in 0..1.
    let uniform = (generator.next_u64() >> 11) as f64 / (1u64 << 53) as f64;
    let mut left = uniform * weights.iter().sum::<f64>();
    for (candidate, weight) in (0..).zip(&weights) {
        left -= weight;
        if left < 0.0 {
            return Ok(candidate);
        }
    }
    // Rounding can leave a trace of what was drawn.
    Ok(token)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::predictor::tests::predictor;

    fn sampling(temperature: f64, seed: u64) -> Sampling {
        Sampling { tokens: 12, temperature, seed, stop: None }
    }

    #[test]
    fn the_likeliest_token_follows_from_the_last_ones_in_the_context() {
        let (predictor, _) = predictor(false, 5);
        let mut heard = Vec::new();
        let text = generate(&predictor, &[1, 2, 3], sampling(0.0, 0), &mut |token| heard.push(token)).expect("fits");
        assert_eq!((text.len(), &heard), (12, &text));
        let whole: Vec<u32> = [1, 2, 3].into_iter().chain(text.iter().copied()).collect();
        for end in 3..whole.len() {
            let logits = predictor.next(&whole[end.saturating_sub(5)..end]).expect("fits");
            let expected = whole[end] as usize;
            assert!(logits.iter().all(|logit| *logit <= logits[expected]), "token {end}");
        }
        // A prompt longer than the context counts by its end.
        let long = generate(&predictor, &whole, sampling(0.0, 0), &mut |_| ()).expect("fits");
        assert_eq!(long, generate(&predictor, &whole[whole.len() - 5..], sampling(0.0, 0), &mut |_| ()).expect("fits"));
    }

    #[test]
    fn a_seed_is_a_text_and_another_seed_another() {
        let (predictor, _) = predictor(true, 8);
        let text = |temperature, seed| generate(&predictor, &[1], sampling(temperature, seed), &mut |_| ()).expect("fits");
        assert_eq!(text(1.0, 7), text(1.0, 7));
        assert_ne!(text(5.0, 7), text(5.0, 8));
        assert_eq!(text(1e-6, 7), text(0.0, 0), "nearly no temperature");
    }

    #[test]
    fn tokens_are_drawn_as_often_as_the_logits_say() {
        let logits = [0.0f32, 3f32.ln(), f32::MIN];
        let mut generator = ChaCha8Rng::seed_from_u64(1);
        let mut counts = [0u32; 3];
        for _ in 0..10_000 {
            counts[draw(&logits, 1.0, &mut generator).expect("finite") as usize] += 1;
        }
        assert!((2_350..2_650).contains(&counts[0]) && counts[2] == 0, "{counts:?}: expected a quarter, three quarters, none");
        assert_eq!(draw(&[1.0, 2.0, 2.0], 0.0, &mut generator), Ok(1));
        assert_eq!(draw(&[f32::NAN], 1.0, &mut generator), Err(EngineError::NotFinite("a logit")));
    }

    #[test]
    fn a_text_ends_at_the_stop_token() {
        let (predictor, _) = predictor(false, 8);
        let text = generate(&predictor, &[1], sampling(0.0, 0), &mut |_| ()).expect("fits");
        let stop = Sampling { stop: Some(text[0]), ..sampling(0.0, 0) };
        assert_eq!(generate(&predictor, &[1], stop, &mut |_| ()), Ok(vec![]));
        assert!(generate(&predictor, &[], stop, &mut |_| ()).expect_err("nothing to go on").to_string().contains("no tokens"));
    }
}
