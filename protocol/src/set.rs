//! A set of small numbers as bits: microbatches of a step, uses of a model.

use bincode::{Decode, Encode};

/// A set of numbers below [`crate::limits::SET_MEMBERS_MAX`]. Equal sets have equal encodings.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Encode, Decode)]
pub struct BitSet {
    words: Vec<u64>,
}

impl BitSet {
    /// The empty set.
    pub const fn new() -> Self {
        Self { words: Vec::new() }
    }

    /// The numbers below `count`.
    pub fn below(count: usize) -> Self {
        (0..count).collect()
    }

    /// Puts `number` in; whether it was missing.
    ///
    /// # Panics
    /// If `number` is not below the limit: callers check what comes from peers first.
    pub fn insert(&mut self, number: usize) -> bool {
        assert!(number < crate::limits::SET_MEMBERS_MAX, "set member {number} is over the limit");
        let (word, bit) = (number / 64, number % 64);
        if word >= self.words.len() {
            self.words.resize(word + 1, 0);
        }
        let missing = self.words[word] & (1 << bit) == 0;
        self.words[word] |= 1 << bit;
        missing
    }

    /// Takes `number` out; whether it was in.
    pub fn remove(&mut self, number: usize) -> bool {
        let present = self.contains(number);
        if present {
            self.words[number / 64] &= !(1 << (number % 64));
            self.trim();
        }
        present
    }

    /// Whether `number` is in.
    pub fn contains(&self, number: usize) -> bool {
        self.words.get(number / 64).is_some_and(|word| word & (1 << (number % 64)) != 0)
    }

    /// How many are in.
    pub fn len(&self) -> usize {
        self.words.iter().map(|word| word.count_ones() as usize).sum()
    }

    /// Whether none is in.
    pub fn is_empty(&self) -> bool {
        self.words.iter().all(|word| *word == 0)
    }

    /// The numbers in ascending order.
    pub fn iter(&self) -> impl Iterator<Item = usize> + '_ {
        self.words.iter().enumerate().flat_map(|(index, word)| (0..64).filter(move |bit| word & (1 << bit) != 0).map(move |bit| index * 64 + bit))
    }

    /// What is in both.
    pub fn intersection(&self, other: &Self) -> Self {
        let mut words: Vec<u64> = self.words.iter().zip(&other.words).map(|(a, b)| a & b).collect();
        while words.last() == Some(&0) {
            words.pop();
        }
        Self { words }
    }

    /// What is in this and not in `other`.
    pub fn difference(&self, other: &Self) -> Self {
        self.iter().filter(|number| !other.contains(*number)).collect()
    }

    /// What is in either.
    pub fn union(&self, other: &Self) -> Self {
        self.iter().chain(other.iter()).collect()
    }

    /// Whether nothing is in both.
    pub fn is_disjoint(&self, other: &Self) -> bool {
        self.intersection(other).is_empty()
    }

    /// Whether all of this is in `other`.
    pub fn is_subset(&self, other: &Self) -> bool {
        self.difference(other).is_empty()
    }

    /// Whether every member is below `count`: the check for a set that a peer sent.
    pub fn is_below(&self, count: usize) -> bool {
        self.words.len() <= count.div_ceil(64) && self.iter().all(|number| number < count)
    }

    fn trim(&mut self) {
        while self.words.last() == Some(&0) {
            self.words.pop();
        }
    }
}

impl FromIterator<usize> for BitSet {
    fn from_iter<I: IntoIterator<Item = usize>>(numbers: I) -> Self {
        let mut set = Self::new();
        for number in numbers {
            set.insert(number);
        }
        set
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn operations_agree_with_the_words_they_are_named_after() {
        let a: BitSet = [1, 64, 200].into_iter().collect();
        let b: BitSet = [64, 3].into_iter().collect();
        assert_eq!(a.intersection(&b).iter().collect::<Vec<_>>(), [64]);
        assert_eq!(a.difference(&b).iter().collect::<Vec<_>>(), [1, 200]);
        assert_eq!(a.union(&b).iter().collect::<Vec<_>>(), [1, 3, 64, 200]);
        assert_eq!((a.len(), a.is_below(201), a.is_below(200)), (3, true, false));
    }

    #[test]
    fn equal_sets_are_equal_however_they_came_about() {
        let mut a = BitSet::below(130);
        for number in 2..130 {
            assert!(a.remove(number));
        }
        assert_eq!(a, BitSet::below(2));
        assert!(!a.insert(1) && a.insert(2));
    }
}
