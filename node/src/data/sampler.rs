//! Which tokens belong to a microbatch: a pure function of (run seed, step, index).
//!
//! The training tokens are cut into windows of `length` predicted tokens; what is left at the end
//! and does not fill a window is never used. Samples are numbered through the run, and each pass
//! over the data visits every window once, in an order of its own: a keyed permutation, so that
//! nobody has to hold or agree on a list.

use skein_protocol::config::BatchSection;
use skein_protocol::id::{Microbatch, Step};

use super::DataError;
use super::store::{Store, Tokens};
use crate::engine::{EngineError, Samples};

/// Gives microbatches their tokens.
#[derive(Debug)]
pub struct Sampler {
    tokens: Tokens,
    seed: u64,
    batch: BatchSection,
    windows: u64,
    permutation: Permutation,
}

impl Sampler {
    /// Samples from the training tokens of `store` for a model of `vocab_size` tokens.
    ///
    /// # Errors
    /// If the model does not know every token of the data, or the data has no whole window.
    pub fn new(store: &Store, vocab_size: usize, seed: u64, batch: BatchSection) -> Result<Self, DataError> {
        let needed = store.manifest().vocab_size as usize;
        if vocab_size < needed {
            return Err(DataError::Vocabulary { model: vocab_size, data: needed });
        }
        let tokens = store.train();
        let windows = windows(&tokens, batch.length, "train")?;
        Ok(Self { tokens, seed, batch, windows, permutation: Permutation::new(seed, 0, windows) })
    }

    /// How many windows one pass over the data has.
    pub fn windows(&self) -> u64 {
        self.windows
    }

    /// The window of sample number `sample` of the run.
    fn window(&mut self, sample: u64) -> u64 {
        let pass = sample / self.windows;
        if self.permutation.pass != pass {
            self.permutation = Permutation::new(self.seed, pass, self.windows);
        }
        self.permutation.at(sample % self.windows)
    }
}

impl Samples for Sampler {
    fn tokens(&mut self, step: Step, microbatch: Microbatch) -> Result<Vec<u32>, EngineError> {
        let (sequences, length) = (u64::from(self.batch.sequences), u64::from(self.batch.length));
        // Wrapping: a step beyond any run still has an answer, the same for everyone.
        let unit = step.0.wrapping_mul(u64::from(self.batch.microbatches)).wrapping_add(u64::from(microbatch.0));
        let mut tokens = Vec::with_capacity(self.batch.sequences as usize * (self.batch.length as usize + 1));
        for sequence in 0..sequences {
            let window = self.window(unit.wrapping_mul(sequences).wrapping_add(sequence));
            self.tokens.read(window * length, self.batch.length as usize + 1, &mut tokens).map_err(|error| EngineError::Data(error.to_string()))?;
        }
        Ok(tokens)
    }
}

/// The held-out tokens as consecutive windows of `length + 1`, at most `max` of them.
pub fn valid_sequences(store: &Store, length: u32, max: u64) -> Result<impl Iterator<Item = Result<Vec<u32>, DataError>> + use<>, DataError> {
    let mut tokens = store.valid();
    let windows = windows(&tokens, length, "valid")?;
    Ok((0..windows.min(max)).map(move |window| {
        let mut sequence = Vec::with_capacity(length as usize + 1);
        tokens.read(window * u64::from(length), length as usize + 1, &mut sequence)?;
        Ok(sequence)
    }))
}

/// How many windows of `length` predicted tokens there are; at least one.
fn windows(tokens: &Tokens, length: u32, split: &'static str) -> Result<u64, DataError> {
    let needed = u64::from(length) + 1;
    if length == 0 || tokens.len() < needed {
        return Err(DataError::TooFew { split, tokens: tokens.len(), needed });
    }
    Ok((tokens.len() - 1) / u64::from(length))
}

/// A permutation of `0..size` that depends on (seed, pass): a Feistel network on the smallest even
/// number of bits that holds `size`, walked until the result is in range (at most four rounds of
/// the walk on average, as the network's range is less than four times `size`).
#[derive(Clone, Debug)]
struct Permutation {
    pass: u64,
    size: u64,
    half_bits: u32,
    key: [u8; 32],
}

impl Permutation {
    /// Rounds of the network: with a strong round function four give a pseudorandom permutation
    /// (Luby and Rackoff, 1988); the rest is for very short halves.
    const ROUNDS: u8 = 8;

    fn new(seed: u64, pass: u64, size: u64) -> Self {
        let bits = u64::BITS - (size - 1).leading_zeros();
        let mut material = [0; 16];
        material[..8].copy_from_slice(&seed.to_le_bytes());
        material[8..].copy_from_slice(&pass.to_le_bytes());
        Self { pass, size, half_bits: bits.div_ceil(2).max(1), key: blake3::derive_key("skein 2025 order of samples", &material) }
    }

    fn at(&self, index: u64) -> u64 {
        let mut value = index;
        loop {
            value = self.network(value);
            if value < self.size {
                return value;
            }
        }
    }

    fn network(&self, value: u64) -> u64 {
        let mask = (1_u64 << self.half_bits) - 1;
        let (mut left, mut right) = (value >> self.half_bits, value & mask);
        for round in 0..Self::ROUNDS {
            let mut input = [round; 9];
            input[..8].copy_from_slice(&right.to_le_bytes());
            let hash = blake3::keyed_hash(&self.key, &input);
            let word = u64::from_le_bytes(hash.as_bytes()[..8].try_into().expect("a hash has 32 bytes"));
            (left, right) = (right, left ^ (word & mask));
        }
        left << self.half_bits | right
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use crate::data::store::store_of;

    const BATCH: BatchSection = BatchSection { microbatches: 3, sequences: 2, length: 4 };
    /// That of `store_of`: every token of two bytes.
    const VOCABULARY: usize = 65_536;

    fn sampler(folder: &std::path::Path, tokens: u16, seed: u64) -> Sampler {
        let tokens: Vec<u16> = (0..tokens).collect();
        Sampler::new(&store_of(folder, &tokens, &[1], 7), VOCABULARY, seed, BATCH).expect("enough tokens")
    }

    fn first_tokens(sampler: &mut Sampler, steps: std::ops::Range<u64>) -> Vec<u32> {
        let units = steps.flat_map(|step| (0..BATCH.microbatches).map(move |index| (Step(step), Microbatch(index))));
        units.flat_map(|(step, index)| sampler.tokens(step, index).expect("intact").chunks(5).map(|sequence| sequence[0]).collect::<Vec<_>>()).collect()
    }

    #[test]
    fn every_size_is_permuted() {
        for size in (1..70).chain([1000, 4096, 4097]) {
            let permutation = Permutation::new(9, 2, size);
            let seen: BTreeSet<u64> = (0..size).map(|index| permutation.at(index)).collect();
            assert!(seen.len() as u64 == size && seen.last() == Some(&(size - 1)), "size {size}");
        }
    }

    #[test]
    fn a_pass_visits_every_window_once_and_the_next_in_another_order() {
        let folder = tempfile::tempdir().expect("temporary folder");
        // 99 tokens: 24 windows of 4 predicted tokens, two tokens are left over; 4 steps a pass.
        let mut sampler = sampler(folder.path(), 99, 1);
        assert_eq!(sampler.windows(), 24);
        let (first, second) = (first_tokens(&mut sampler, 0..4), first_tokens(&mut sampler, 4..8));
        let all: BTreeSet<u32> = (0..24).map(|window| window * 4).collect();
        assert_eq!(first.iter().copied().collect::<BTreeSet<_>>(), all);
        assert_eq!(second.iter().copied().collect::<BTreeSet<_>>(), all);
        assert_ne!(first, second);
        assert_ne!(first, all.into_iter().collect::<Vec<_>>());
    }

    #[test]
    fn samples_are_a_pure_function_of_seed_step_and_index() {
        let folder = tempfile::tempdir().expect("temporary folder");
        let (mut one, mut other) = (sampler(folder.path(), 99, 1), sampler(folder.path(), 99, 1));
        let forward: Vec<_> = (0..40).map(|step| one.tokens(Step(step), Microbatch(2)).expect("intact")).collect();
        let backward: Vec<_> = (0..40).rev().map(|step| other.tokens(Step(step), Microbatch(2)).expect("intact")).collect();
        assert!(forward.iter().eq(backward.iter().rev()));
        assert_ne!(first_tokens(&mut sampler(folder.path(), 99, 2), 0..4), first_tokens(&mut one, 0..4));
        assert!(one.tokens(Step(u64::MAX), Microbatch(u32::MAX)).is_ok(), "no peer's number can overflow");
    }

    #[test]
    fn windows_are_consecutive_tokens_that_overlap_by_one() {
        let folder = tempfile::tempdir().expect("temporary folder");
        let tokens = sampler(folder.path(), 99, 1).tokens(Step(0), Microbatch(0)).expect("intact");
        assert_eq!(tokens.len(), 10);
        for sequence in tokens.chunks(5) {
            assert!(sequence[0] % 4 == 0 && sequence.windows(2).all(|pair| pair[1] == pair[0] + 1), "{sequence:?}");
        }
    }

    #[test]
    fn too_little_text_is_an_error_that_says_how_much() {
        let folder = tempfile::tempdir().expect("temporary folder");
        let small = Sampler::new(&store_of(folder.path(), &[1, 2, 3, 4, 5], &[1], 7), VOCABULARY - 1, 0, BATCH).expect_err("a token is unknown");
        assert!(matches!(small, DataError::Vocabulary { model: 65_535, data: VOCABULARY }));
        let error = Sampler::new(&store_of(folder.path(), &[1, 2, 3, 4], &[1], 7), VOCABULARY, 0, BATCH).expect_err("five are needed");
        assert_eq!(error.to_string(), "the train data has 4 tokens, at least 5 are needed: add text, or lower batch.length");
        assert_eq!(sampler(folder.path(), 5, 0).windows(), 1);
    }

    #[test]
    fn held_out_windows_come_in_order() {
        let folder = tempfile::tempdir().expect("temporary folder");
        let tokens: Vec<u16> = (0..11).collect();
        let store = store_of(folder.path(), &tokens, &tokens, 7);
        let all = |max| valid_sequences(&store, 4, max).expect("enough").collect::<Result<Vec<_>, _>>().expect("intact");
        assert_eq!(all(9), [[0, 1, 2, 3, 4], [4, 5, 6, 7, 8]]);
        assert_eq!(all(1).len(), 1);
    }
}
