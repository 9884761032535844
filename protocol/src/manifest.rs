//! Hashed manifests of data: what a run learns from, named by one hash.
//!
//! A data set is a folder of files named by their BLAKE3 hashes: shards of tokens, and the
//! tokenizer. Its manifest lists them as canonical JSON, and the manifest's own hash is the data
//! set's name. So whoever knows the name can check everything that strangers send.

use std::io::Read;

use serde::{Deserialize, Serialize};

use crate::id::Hash;
use crate::limits;

/// The version of the format that this program writes and reads.
pub const FORMAT: u32 = 1;

/// What a data set consists of.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DataManifest {
    /// [`FORMAT`].
    pub format: u32,
    /// Every token is below this.
    pub vocab_size: u32,
    /// Bytes of one token in the shards, little endian: 2 or 4.
    pub token_bytes: u32,
    /// The tokenizer (`tokenizer.json` of the `tokenizers` libraries).
    pub tokenizer: FileEntry,
    /// What is learned from.
    pub train: Split,
    /// What is held out.
    pub valid: Split,
}

/// A file by its content.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FileEntry {
    /// BLAKE3 hash of the file.
    pub hash: Hash,
    /// Its length in bytes.
    pub bytes: u64,
}

/// A sequence of tokens, cut into shards.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Split {
    /// The shards in order.
    pub shards: Vec<Shard>,
    /// Bytes of UTF-8 that the tokens stand for: the divisor of bits per byte.
    pub text_bytes: u64,
}

/// One file of tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Shard {
    /// BLAKE3 hash of the file.
    pub hash: Hash,
    /// How many tokens it holds; at least one.
    pub tokens: u64,
}

/// Why bytes are no manifest of ours.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ManifestError {
    /// More bytes than a manifest may have.
    #[error("a manifest of {0} bytes, at most {max} are allowed", max = limits::MANIFEST_BYTES_MAX)]
    TooLong(usize),
    /// The bytes have another hash than the manifest's name.
    #[error("the manifest's hash is {found}, expected {expected}")]
    WrongHash {
        /// The name asked for.
        expected: Hash,
        /// The bytes' hash.
        found: Hash,
    },
    /// Another version wrote it.
    #[error("the manifest has format {0}, this program reads format {FORMAT}")]
    Format(u32),
    /// Not the JSON of a manifest, or not in its canonical form.
    #[error("malformed manifest: {0}")]
    Malformed(String),
    /// A value out of its range.
    #[error("manifest: {field} = {value}: {rule}")]
    Value {
        /// Which.
        field: &'static str,
        /// What it is.
        value: u64,
        /// What it must be.
        rule: &'static str,
    },
}

impl Split {
    /// How many tokens in all shards.
    pub fn tokens(&self) -> u64 {
        self.shards.iter().map(|shard| shard.tokens).sum()
    }
}

impl DataManifest {
    /// The canonical form: what is hashed, stored and sent.
    pub fn to_bytes(&self) -> Vec<u8> {
        serde_json::to_vec(self).expect("numbers, strings and lists have a JSON form")
    }

    /// The data set's name: the hash of the canonical form.
    pub fn name(&self) -> Hash {
        Hash::of(&self.to_bytes())
    }

    /// Reads the manifest called `name` from bytes of any origin, and checks all of it.
    pub fn from_bytes(name: Hash, bytes: &[u8]) -> Result<Self, ManifestError> {
        if bytes.len() > limits::MANIFEST_BYTES_MAX {
            return Err(ManifestError::TooLong(bytes.len()));
        }
        let found = Hash::of(bytes);
        if found != name {
            return Err(ManifestError::WrongHash { expected: name, found });
        }
        Self::parse(bytes)
    }

    fn parse(bytes: &[u8]) -> Result<Self, ManifestError> {
        #[derive(Deserialize)]
        struct Versioned {
            format: u32,
        }
        let malformed = |error: serde_json::Error| ManifestError::Malformed(error.to_string());
        let versioned: Versioned = serde_json::from_slice(bytes).map_err(malformed)?;
        if versioned.format != FORMAT {
            return Err(ManifestError::Format(versioned.format));
        }
        let manifest: Self = serde_json::from_slice(bytes).map_err(malformed)?;
        if manifest.to_bytes() != bytes {
            return Err(ManifestError::Malformed("not in canonical form".to_owned()));
        }
        manifest.validate()?;
        Ok(manifest)
    }

    /// Whether every value is in its range; a builder checks its own work with it.
    pub fn validate(&self) -> Result<(), ManifestError> {
        let value = |field, value, rule, holds| if holds { Ok(()) } else { Err(ManifestError::Value { field, value, rule }) };
        let (width, vocab) = (u64::from(self.token_bytes), u64::from(self.vocab_size));
        value("vocab_size", vocab, "must be from 1 to 4194304", (1..=limits::VOCAB_MAX).contains(&self.vocab_size))?;
        value("token_bytes", width, "must be 2, or 4 above 65536 tokens", self.token_bytes == Self::token_bytes_for(self.vocab_size))?;
        value("tokenizer.bytes", self.tokenizer.bytes, "must be from 1 byte to 64 MiB", (1..=limits::TOKENIZER_BYTES_MAX).contains(&self.tokenizer.bytes))?;
        let shards = self.train.shards.len() + self.valid.shards.len();
        value("shards", shards as u64, "must be at most 16384", shards <= limits::SHARDS_MAX)?;
        for shard in self.train.shards.iter().chain(&self.valid.shards) {
            let fits = (1..=limits::SHARD_BYTES_MAX / width).contains(&shard.tokens);
            value("shard.tokens", shard.tokens, "must be at least 1, and a shard at most 64 MiB", fits)?;
        }
        for split in [&self.train, &self.valid] {
            // A token stands for at least nothing and for at most a few hundred bytes.
            let most = split.tokens() * limits::TOKEN_TEXT_BYTES_MAX;
            value("text_bytes", split.text_bytes, "must be at most 1024 a token", split.text_bytes <= most)?;
        }
        Ok(())
    }

    /// How many bytes a token takes where tokens are below `vocab_size`.
    pub fn token_bytes_for(vocab_size: u32) -> u32 {
        if vocab_size <= 1 << 16 { 2 } else { 4 }
    }

    /// Every file of the data set, each once, the tokenizer first.
    pub fn files(&self) -> Vec<FileEntry> {
        let shards = self.train.shards.iter().chain(&self.valid.shards);
        let mut files = vec![self.tokenizer];
        let mut seen = std::collections::BTreeSet::from([self.tokenizer.hash]);
        files.extend(
            shards.filter(|shard| seen.insert(shard.hash)).map(|shard| FileEntry { hash: shard.hash, bytes: shard.tokens * u64::from(self.token_bytes) }),
        );
        files
    }
}

/// The BLAKE3 hash of all that `reader` holds and its length, read in pieces of bounded size.
pub fn hash_reader(mut reader: impl Read) -> std::io::Result<FileEntry> {
    let mut hasher = blake3::Hasher::new();
    let mut piece = vec![0; limits::STATE_CHUNK_BYTES];
    let mut bytes = 0;
    loop {
        match reader.read(&mut piece) {
            Ok(0) => return Ok(FileEntry { hash: Hash(*hasher.finalize().as_bytes()), bytes }),
            Ok(count) => {
                hasher.update(&piece[..count]);
                bytes += count as u64;
            }
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn manifest() -> DataManifest {
        let shard = |byte, tokens| Shard { hash: Hash([byte; 32]), tokens };
        DataManifest {
            format: FORMAT,
            vocab_size: 256,
            token_bytes: 2,
            tokenizer: FileEntry { hash: Hash([1; 32]), bytes: 10 },
            train: Split { shards: vec![shard(2, 5), shard(3, 4), shard(2, 5)], text_bytes: 14 },
            valid: Split { shards: vec![shard(4, 1)], text_bytes: 1 },
        }
    }

    fn check(change: impl FnOnce(&mut DataManifest)) -> String {
        let mut changed = manifest();
        change(&mut changed);
        DataManifest::from_bytes(changed.name(), &changed.to_bytes()).expect_err("out of range").to_string()
    }

    #[test]
    fn the_canonical_form_is_read_back_and_named_by_its_hash() {
        let manifest = manifest();
        assert_eq!(DataManifest::from_bytes(manifest.name(), &manifest.to_bytes()), Ok(manifest.clone()));
        let lengths: Vec<u64> = manifest.files().iter().map(|file| file.bytes).collect();
        assert_eq!(lengths, [10, 10, 8, 2], "the shard that occurs twice is one file");
    }

    #[test]
    fn only_the_named_bytes_in_canonical_form_are_accepted() {
        let mut bytes = manifest().to_bytes();
        bytes.push(b' ');
        assert!(matches!(DataManifest::from_bytes(manifest().name(), &bytes), Err(ManifestError::WrongHash { .. })));
        let error = DataManifest::from_bytes(Hash::of(&bytes), &bytes).expect_err("trailing space");
        assert_eq!(error, ManifestError::Malformed("not in canonical form".to_owned()));
        let long = vec![b' '; limits::MANIFEST_BYTES_MAX + 1];
        assert_eq!(DataManifest::from_bytes(Hash::of(&long), &long), Err(ManifestError::TooLong(long.len())));
    }

    #[test]
    fn values_out_of_range_are_named() {
        assert_eq!(check(|m| m.format = 2), "the manifest has format 2, this program reads format 1");
        assert_eq!(check(|m| m.vocab_size = 0), "manifest: vocab_size = 0: must be from 1 to 4194304");
        assert_eq!(check(|m| m.token_bytes = 0), "manifest: token_bytes = 0: must be 2, or 4 above 65536 tokens");
        assert_eq!(
            check(|m| m.train.shards[0].tokens = u64::MAX),
            format!("manifest: shard.tokens = {}: must be at least 1, and a shard at most 64 MiB", u64::MAX)
        );
        assert_eq!(check(|m| m.valid.shards[0].tokens = 0), "manifest: shard.tokens = 0: must be at least 1, and a shard at most 64 MiB");
        assert_eq!(check(|m| m.valid.text_bytes = 1025), "manifest: text_bytes = 1025: must be at most 1024 a token");
        assert_eq!(check(|m| m.tokenizer.bytes = 1 << 40), format!("manifest: tokenizer.bytes = {}: must be from 1 byte to 64 MiB", 1_u64 << 40));
        assert_eq!(check(|m| m.train.shards = vec![m.train.shards[0]; 16_384]), "manifest: shards = 16385: must be at most 16384");
    }

    #[test]
    fn a_file_is_hashed_in_pieces() {
        let data: Vec<u8> = (0..limits::STATE_CHUNK_BYTES + 7).map(|i| (i % 251) as u8).collect();
        let entry = hash_reader(data.as_slice()).expect("memory is readable");
        assert_eq!(entry, FileEntry { hash: Hash::of(&data), bytes: data.len() as u64 });
    }
}
