//! A trigram model: the yardstick that a language model has to beat.
//!
//! Interpolated Kneser-Ney smoothing (Chen and Goodman, 1998, "An empirical study of smoothing
//! techniques for language modeling", section 3): with `N` for counts and `N1+` for the number of
//! different continuations,
//!
//! - `P(c | a b) = (max(N(abc) - D3, 0) + D3 N1+(ab*) P(c | b)) / N(ab*)`
//! - `P(c | b) = (max(N1+(*bc) - D2, 0) + D2 N1+(*b*) P(c)) / N1+(*b*)`, where in the numerator's
//!   second term the different `c` after `b` are counted, in the others the different `a b c`
//! - `P(c) = (max(N1+(*c) - D1, 0) + D1 |c| / V) / N1+(**)`
//!
//! and the discount of each level `D = n1 / (n1 + 2 n2)` from how many n-grams occur once and twice.

use std::fmt;

/// Bits of one token in a packed n-gram.
const TOKEN_BITS: u32 = 21;

/// The yardstick is trained on at most so many tokens: memory is some 30 bytes for each.
#[cfg(feature = "shell")]
const YARDSTICK_TOKENS_MAX: u64 = 32 * 1024 * 1024;

/// Bits per byte that trigram models need for the held-out text of a data set.
#[cfg(feature = "shell")]
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Yardstick {
    /// A trigram model over bytes.
    pub over_bytes: f64,
    /// A trigram model over the data set's own tokens: much the stronger one.
    pub over_tokens: f64,
}

/// Trains trigram models on the training text of a data set (its first 32 Mi tokens), over bytes
/// and over tokens, and tells what they need for the held-out text.
#[cfg(feature = "shell")]
pub fn yardstick(store: &super::store::Store) -> Result<Yardstick, super::DataError> {
    let (vocab_size, text_bytes) = (store.manifest().vocab_size, store.manifest().valid.text_bytes);
    let (mut reader, mut train) = (store.train(), Vec::new());
    reader.read(0, usize::try_from(reader.len().min(YARDSTICK_TOKENS_MAX)).expect("32 Mi fit"), &mut train)?;
    let valid = store.valid().read_all()?;
    let too_large = |error: VocabularyTooLarge| super::DataError::Tokenizer(error.to_string());
    let over_tokens = Trigram::train(&train, vocab_size).map_err(too_large)?.bits_per_byte(&valid, text_bytes);
    let tokenizer = store.tokenizer()?;
    let bytes = |tokens: &[u32]| Ok::<Vec<u32>, super::DataError>(tokenizer.decode(tokens)?.bytes().map(u32::from).collect());
    let over_bytes = Trigram::train(&bytes(&train)?, 256).map_err(too_large)?.bits_per_byte(&bytes(&valid)?, text_bytes);
    Ok(Yardstick { over_bytes, over_tokens })
}

/// The vocabulary is too large for this model.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a trigram model has room for 2097152 tokens, the vocabulary has {0}")]
pub struct VocabularyTooLarge(pub u32);

/// A trigram model over tokens.
pub struct Trigram {
    vocab_size: u32,
    unigrams: Level,
    bigrams: Level,
    trigrams: Level,
}

impl fmt::Debug for Trigram {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Trigram({} of {} tokens)", self.trigrams.grams.len(), self.vocab_size)
    }
}

impl Trigram {
    /// Counts the trigrams of `tokens`, all of which must be below `vocab_size`.
    pub fn train(tokens: &[u32], vocab_size: u32) -> Result<Self, VocabularyTooLarge> {
        if vocab_size > 1 << TOKEN_BITS {
            return Err(VocabularyTooLarge(vocab_size));
        }
        let packed = tokens.windows(3).map(|window| window.iter().fold(0, |gram, token| gram << TOKEN_BITS | u64::from(*token)));
        let trigrams = Level::new(packed.collect());
        // Lower levels count in how many different contexts an n-gram follows, not how often.
        let shorten = |level: &Level, bits: u32| Level::new(level.grams.iter().map(|gram| gram.0 & ((1 << bits) - 1)).collect());
        let bigrams = shorten(&trigrams, 2 * TOKEN_BITS);
        let unigrams = shorten(&bigrams, TOKEN_BITS);
        Ok(Self { vocab_size, unigrams, bigrams, trigrams })
    }

    /// The probability of `token` after `a b`.
    pub fn probability(&self, a: u32, b: u32, token: u32) -> f64 {
        let gram = (u64::from(a) << TOKEN_BITS | u64::from(b)) << TOKEN_BITS | u64::from(token);
        let uniform = 1.0 / f64::from(self.vocab_size);
        let lower = self.unigrams.interpolate(u64::from(token), uniform);
        let lower = self.bigrams.interpolate(gram & ((1 << (2 * TOKEN_BITS)) - 1), lower);
        self.trigrams.interpolate(gram, lower)
    }

    /// Bits that the model needs for `tokens` after the first two.
    pub fn bits(&self, tokens: &[u32]) -> f64 {
        tokens.windows(3).map(|window| -self.probability(window[0], window[1], window[2]).log2()).sum()
    }

    /// Bits per byte on held-out tokens that stand for `text_bytes` bytes. (The first two tokens
    /// are context only and cost nothing; their bytes are counted in proportion.)
    pub fn bits_per_byte(&self, tokens: &[u32], text_bytes: u64) -> f64 {
        let predicted = tokens.len().saturating_sub(2);
        if predicted == 0 {
            return f64::NAN;
        }
        self.bits(tokens) / predicted as f64 * tokens.len() as f64 / text_bytes as f64
    }
}

/// Counts of n-grams of one length.
struct Level {
    /// Packed n-grams and how often each occurs, ascending: those of one context are neighbours.
    grams: Vec<(u64, u32)>,
    /// Packed contexts, the sum of their continuations' counts, and how many continuations differ; ascending.
    contexts: Vec<(u64, u64, u32)>,
    discount: f64,
}

impl Level {
    fn new(mut packed: Vec<u64>) -> Self {
        packed.sort_unstable();
        let mut grams: Vec<(u64, u32)> = Vec::new();
        for gram in packed {
            match grams.last_mut() {
                Some((last, count)) if *last == gram => *count = count.saturating_add(1),
                _ => grams.push((gram, 1)),
            }
        }
        let mut contexts: Vec<(u64, u64, u32)> = Vec::new();
        for (gram, count) in &grams {
            let context = gram >> TOKEN_BITS;
            match contexts.last_mut() {
                Some((last, total, different)) if *last == context => (*total, *different) = (*total + u64::from(*count), *different + 1),
                _ => contexts.push((context, u64::from(*count), 1)),
            }
        }
        let with_count = |count| grams.iter().filter(|gram| gram.1 == count).count() as f64;
        let (once, twice) = (with_count(1), with_count(2));
        // Small texts may have no n-gram that occurs just once; some mass must be left for the unseen.
        let discount = if once > 0.0 { once / (once + 2.0 * twice) } else { 0.5 };
        Self { grams, contexts, discount: discount.min(0.95) }
    }

    fn interpolate(&self, gram: u64, lower: f64) -> f64 {
        let Ok(context) = self.contexts.binary_search_by_key(&(gram >> TOKEN_BITS), |context| context.0) else {
            return lower;
        };
        let (_, total, different) = self.contexts[context];
        let count = self.grams.binary_search_by_key(&gram, |gram| gram.0).map_or(0, |index| self.grams[index].1);
        ((f64::from(count) - self.discount).max(0.0) + self.discount * f64::from(different) * lower) / total as f64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn probabilities_of_every_context_sum_to_one() {
        let tokens: Vec<u32> = (0..400_u32).map(|i| i * i % 7 + i % 3).collect();
        let model = Trigram::train(&tokens, 12).expect("small");
        for (a, b) in [(0, 0), (1, 2), (5, 3), (11, 11), (8, 0)] {
            let sum: f64 = (0..12).map(|token| model.probability(a, b, token)).sum();
            assert!((sum - 1.0).abs() < 1e-12, "after {a} {b}: {sum}");
            assert!((0..12).all(|token| model.probability(a, b, token) > 0.0));
        }
    }

    #[test]
    fn the_formula_by_hand() {
        // 0 1 0 1 2: trigrams 010, 101, 012, one each, so D3 = 1 is capped at 0.95. Bigrams by
        // different contexts: 10, 01, 12, one each. Unigrams by different contexts: 0, 1, 2, one each.
        let model = Trigram::train(&[0, 1, 0, 1, 2], 4).expect("small");
        let unigram = (0.05 + 0.95 * 3.0 / 4.0) / 3.0;
        let bigram = (0.05 + 0.95 * 2.0 * unigram) / 2.0;
        let trigram = (0.05 + 0.95 * 2.0 * bigram) / 2.0;
        assert!((model.probability(0, 1, 2) - trigram).abs() < 1e-12);
        // 3 was never seen: only the uniform share is left, through each level.
        let unseen = (0.95 * 3.0 / 4.0) / 3.0;
        assert!((model.probability(0, 1, 3) - 0.95 * 0.95 * unseen).abs() < 1e-12);
        // The context 3 3 was never seen at any level.
        assert!((model.probability(3, 3, 2) - unigram).abs() < 1e-12);
    }

    #[test]
    fn regular_text_costs_less_than_noise_and_noise_its_entropy() {
        let mut state = 1_u32;
        let mut noise = || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            state >> 28
        };
        let (train, valid): (Vec<u32>, Vec<u32>) = ((0..200_000).map(|_| noise()).collect(), (0..5_000).map(|_| noise()).collect());
        let bits = Trigram::train(&train, 16).expect("small").bits_per_byte(&valid, 5_000);
        assert!((3.95..4.1).contains(&bits), "{bits}");
        let cycle: Vec<u32> = (0..5_000).map(|i| i % 16).collect();
        let bits = Trigram::train(&cycle, 16).expect("small").bits_per_byte(&cycle[..500], 500);
        assert!(bits < 0.1, "{bits}");
    }

    #[cfg(feature = "shell")]
    #[test]
    fn the_yardstick_of_a_byte_data_set_is_the_same_over_bytes_and_tokens() {
        use crate::data::build::{BuildOptions, build};
        use crate::data::store::Store;
        use crate::data::tokenizer::TokenizerSpec;
        let folder = tempfile::tempdir().expect("temporary folder");
        let text = folder.path().join("text.txt");
        std::fs::write(&text, (0..400).map(|i| format!("{} green bottles\n\n", i * i % 91)).collect::<String>()).expect("writable");
        let options = BuildOptions { out: folder.path().join("data"), tokenizer: TokenizerSpec::Bytes, train: vec![text], valid: vec![], shard_tokens: 1000 };
        let manifest = build(&options, &mut |_| ()).expect("builds");
        let yardstick = yardstick(&Store::open(&options.out, manifest.name()).expect("complete")).expect("intact");
        assert_eq!(yardstick.over_bytes, yardstick.over_tokens);
        assert!((0.2..2.0).contains(&yardstick.over_bytes), "{yardstick:?}");
    }

    #[test]
    fn too_large_a_vocabulary_is_refused() {
        assert_eq!(Trigram::train(&[], 1 << 21 | 1).expect_err("too large"), VocabularyTooLarge(1 << 21 | 1));
        assert!(Trigram::train(&[], 1 << 21).expect("just fits").bits_per_byte(&[], 0).is_nan());
    }
}
