//! A folder of data sets: `manifests/NAME.json` and `files/HASH`.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use bytes::Bytes;
use skein_protocol::id::Hash;
use skein_protocol::limits::{MANIFEST_BYTES_MAX, STATE_CHUNK_BYTES};
use skein_protocol::manifest::{DataManifest, FileEntry, Split, hash_reader};

use super::fetch::{Fetch, Fetched};
use super::{DataError, write_atomic};

/// Shards that a reader keeps open; far below what a process may open.
const OPEN_SHARDS_MAX: usize = 64;

/// One data set in a folder. Cheap to clone; clones share what was verified.
#[derive(Clone, Debug)]
pub struct Store {
    folder: PathBuf,
    name: Hash,
    manifest: Arc<DataManifest>,
    manifest_bytes: Bytes,
    files: Arc<BTreeMap<Hash, u64>>,
    verified: Arc<Mutex<BTreeSet<Hash>>>,
}

/// A part of a file, for a peer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Blob {
    /// The chunk's bytes.
    pub bytes: Bytes,
    /// Length of the whole file.
    pub byte_len: u64,
}

impl Store {
    /// Opens the data set called `name`; its files are verified when they are first used.
    pub fn open(folder: &Path, name: Hash) -> Result<Self, DataError> {
        let path = manifest_path(folder, name);
        let absent = || DataError::NoDataSet { folder: folder.to_owned(), name: Some(name) };
        let bytes = match read_at_most(&path, MANIFEST_BYTES_MAX as u64 + 1) {
            Err(DataError::Io { source, .. }) if source.kind() == std::io::ErrorKind::NotFound => return Err(absent()),
            read => read?,
        };
        let manifest = DataManifest::from_bytes(name, &bytes).map_err(|source| DataError::Manifest { path, source })?;
        let files = manifest.files().into_iter().map(|file| (file.hash, file.bytes)).collect();
        Ok(Self {
            folder: folder.to_owned(),
            name,
            manifest: Arc::new(manifest),
            manifest_bytes: bytes.into(),
            files: Arc::new(files),
            verified: Arc::default(),
        })
    }

    /// Opens the only data set of a folder.
    pub fn open_only(folder: &Path) -> Result<Self, DataError> {
        let names = data_sets(folder)?;
        match names.as_slice() {
            [] => Err(DataError::NoDataSet { folder: folder.to_owned(), name: None }),
            [name] => Self::open(folder, *name),
            _ => Err(DataError::Ambiguous { folder: folder.to_owned(), names }),
        }
    }

    /// The data set's name: its manifest's hash.
    pub fn name(&self) -> Hash {
        self.name
    }

    /// The manifest.
    pub fn manifest(&self) -> &DataManifest {
        &self.manifest
    }

    /// Verifies every file, calling `progress` with the bytes verified so far; the first that is
    /// missing or damaged is the error.
    pub fn verify(&self, mut progress: impl FnMut(u64)) -> Result<(), DataError> {
        let mut done = 0;
        for (hash, bytes) in self.files.iter() {
            self.file(*hash)?;
            done += bytes;
            progress(done);
        }
        Ok(())
    }

    /// One chunk of [`STATE_CHUNK_BYTES`] of a file of this data set, or of its manifest, for a
    /// peer; none if it is not of this data set, out of range, or not readable here.
    pub fn read_chunk(&self, hash: Hash, chunk: u32) -> Option<Blob> {
        let start = u64::from(chunk) * STATE_CHUNK_BYTES as u64;
        if hash == self.name {
            let byte_len = self.manifest_bytes.len() as u64;
            let range = usize::try_from(start).ok().filter(|start| *start < self.manifest_bytes.len())?;
            let end = (range + STATE_CHUNK_BYTES).min(self.manifest_bytes.len());
            return Some(Blob { bytes: self.manifest_bytes.slice(range..end), byte_len });
        }
        let byte_len = *self.files.get(&hash)?;
        let len = byte_len.checked_sub(start).filter(|left| *left > 0)?.min(STATE_CHUNK_BYTES as u64);
        let mut bytes = vec![0; usize::try_from(len).ok()?];
        self.file(hash).ok()?.read_exact_at(&mut bytes, start).ok()?;
        Some(Blob { bytes: bytes.into(), byte_len })
    }

    /// All of a file of this data set, verified.
    pub fn read(&self, hash: Hash) -> Result<Vec<u8>, DataError> {
        let path = file_path(&self.folder, hash);
        let len = *self.files.get(&hash).ok_or_else(|| DataError::Missing { path: path.clone() })?;
        let mut bytes = vec![0; usize::try_from(len).expect("a manifest's files fit in memory one by one")];
        self.file(hash)?.read_exact_at(&mut bytes, 0).map_err(DataError::io(&path))?;
        Ok(bytes)
    }

    /// The data set's tokenizer.
    #[cfg(feature = "shell")]
    pub fn tokenizer(&self) -> Result<super::tokenizer::Tokenizer, DataError> {
        super::tokenizer::Tokenizer::from_json(&self.read(self.manifest.tokenizer.hash)?)
    }

    /// The tokens that are learned from.
    pub fn train(&self) -> Tokens {
        Tokens::new(self.clone(), &self.manifest.train)
    }

    /// The tokens that are held out.
    pub fn valid(&self) -> Tokens {
        Tokens::new(self.clone(), &self.manifest.valid)
    }

    /// Opens a file, and verifies it the first time.
    fn file(&self, hash: Hash) -> Result<File, DataError> {
        let path = file_path(&self.folder, hash);
        let file = File::open(&path).map_err(|source| {
            if source.kind() == std::io::ErrorKind::NotFound {
                return DataError::Missing { path: path.clone() };
            }
            DataError::Io { path: path.clone(), source }
        })?;
        let mut verified = self.verified.lock().expect("no holder of this lock panics");
        if !verified.contains(&hash) {
            let found = hash_reader(&file).map_err(DataError::io(&path))?;
            let expected = FileEntry { hash, bytes: *self.files.get(&hash).unwrap_or(&0) };
            if found != expected {
                return Err(DataError::Corrupt { path, found: found.hash });
            }
            verified.insert(hash);
        }
        Ok(file)
    }
}

/// The names of the data sets in a folder, ascending.
pub fn data_sets(folder: &Path) -> Result<Vec<Hash>, DataError> {
    let mut names: Vec<Hash> = file_names(&folder.join("manifests"))?.iter().filter_map(|name| name.strip_suffix(".json")?.parse().ok()).collect();
    names.sort();
    Ok(names)
}

/// What to ask peers for, so that the folder holds the data set called `name`: intact files that
/// are there already are not asked for.
pub fn plan_fetch(folder: &Path, name: Hash) -> Result<Fetch, DataError> {
    let files = folder.join("files");
    let mut have = BTreeSet::new();
    for hash in file_names(&files)?.iter().filter_map(|name| name.parse::<Hash>().ok()) {
        let path = file_path(folder, hash);
        if hash_reader(File::open(&path).map_err(DataError::io(&path))?).map_err(DataError::io(&path))?.hash == hash {
            have.insert(hash);
        }
    }
    Ok(Fetch::new(name, have))
}

/// Saves what a [`Fetch`] has completed.
pub fn save_fetched(folder: &Path, fetched: &Fetched) -> Result<(), DataError> {
    if fetched.is_manifest { save_manifest(folder, fetched.hash, &fetched.bytes) } else { save_file(folder, fetched.hash, &fetched.bytes) }
}

pub(crate) fn save_file(folder: &Path, hash: Hash, bytes: &[u8]) -> Result<(), DataError> {
    let path = file_path(folder, hash);
    create_parent(&path)?;
    write_atomic(&path, bytes)
}

pub(crate) fn save_manifest(folder: &Path, name: Hash, bytes: &[u8]) -> Result<(), DataError> {
    let path = manifest_path(folder, name);
    create_parent(&path)?;
    write_atomic(&path, bytes)
}

fn manifest_path(folder: &Path, name: Hash) -> PathBuf {
    folder.join("manifests").join(format!("{name}.json"))
}

fn file_path(folder: &Path, hash: Hash) -> PathBuf {
    folder.join("files").join(hash.to_string())
}

fn create_parent(path: &Path) -> Result<(), DataError> {
    let parent = path.parent().expect("a path within a folder");
    std::fs::create_dir_all(parent).map_err(DataError::io(parent))
}

/// Names of the files in a folder; none if there is no such folder.
fn file_names(folder: &Path) -> Result<Vec<String>, DataError> {
    let entries = match std::fs::read_dir(folder) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries.map_err(DataError::io(folder))?,
    };
    let names = entries.map(|entry| entry.map(|entry| entry.file_name().to_string_lossy().into_owned()));
    names.collect::<Result<_, _>>().map_err(DataError::io(folder))
}

fn read_at_most(path: &Path, max: u64) -> Result<Vec<u8>, DataError> {
    use std::io::Read;
    let mut bytes = Vec::new();
    File::open(path).and_then(|file| file.take(max).read_to_end(&mut bytes)).map_err(DataError::io(path))?;
    Ok(bytes)
}

/// The tokens of one split as one sequence, read from its shards where they are needed.
#[derive(Debug)]
pub struct Tokens {
    store: Store,
    /// Where each shard starts, and its hash.
    shards: Vec<(u64, Hash)>,
    len: u64,
    open: BTreeMap<usize, File>,
}

impl Tokens {
    fn new(store: Store, split: &Split) -> Self {
        let mut len = 0;
        let mut shards = Vec::with_capacity(split.shards.len());
        for shard in &split.shards {
            shards.push((len, shard.hash));
            len += shard.tokens;
        }
        Self { store, shards, len, open: BTreeMap::new() }
    }

    /// How many tokens.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Appends the tokens `from..from + count` to `tokens`.
    ///
    /// # Panics
    /// If there are fewer tokens than that.
    pub fn read(&mut self, from: u64, count: usize, tokens: &mut Vec<u32>) -> Result<(), DataError> {
        assert!(from + count as u64 <= self.len, "tokens {from}..+{count} of {}", self.len);
        let (mut at, mut left) = (from, count);
        while left > 0 {
            let shard = self.shards.partition_point(|(start, _)| *start <= at) - 1;
            let end = self.shards.get(shard + 1).map_or(self.len, |(start, _)| *start);
            let here = left.min(usize::try_from(end - at).unwrap_or(left));
            self.read_shard(shard, at - self.shards[shard].0, here, tokens)?;
            at += here as u64;
            left -= here;
        }
        Ok(())
    }

    /// All tokens.
    pub fn read_all(&mut self) -> Result<Vec<u32>, DataError> {
        let count = usize::try_from(self.len).expect("a data set has fewer tokens than memory has addresses");
        let mut tokens = Vec::with_capacity(count);
        self.read(0, count, &mut tokens)?;
        Ok(tokens)
    }

    fn read_shard(&mut self, shard: usize, from: u64, count: usize, tokens: &mut Vec<u32>) -> Result<(), DataError> {
        let hash = self.shards[shard].1;
        let path = file_path(&self.store.folder, hash);
        if !self.open.contains_key(&shard) {
            let file = self.store.file(hash)?;
            if self.open.len() >= OPEN_SHARDS_MAX {
                self.open.pop_first();
            }
            self.open.insert(shard, file);
        }
        let width = self.store.manifest.token_bytes as usize;
        let mut bytes = vec![0; count * width];
        self.open[&shard].read_exact_at(&mut bytes, from * width as u64).map_err(DataError::io(&path))?;
        let start = tokens.len();
        tokens.extend(bytes.chunks_exact(width).map(|token| {
            let mut value = [0; 4];
            value[..width].copy_from_slice(token);
            u32::from_le_bytes(value)
        }));
        // A data set can be made by anyone: a token out of range would be read outside the embedding.
        let vocab_size = self.store.manifest.vocab_size;
        match tokens[start..].iter().find(|token| **token >= vocab_size) {
            Some(token) => Err(DataError::Token { path, token: *token, vocab_size }),
            None => Ok(()),
        }
    }
}

/// A data set made by hand, for tests of this module's readers.
#[cfg(test)]
pub(crate) fn store_of(folder: &Path, train: &[u16], valid: &[u16], shard_tokens: usize) -> Store {
    use skein_protocol::manifest::{FORMAT, Shard};
    let split = |tokens: &[u16]| Split {
        shards: tokens
            .chunks(shard_tokens)
            .map(|shard| {
                let bytes: Vec<u8> = shard.iter().flat_map(|token| token.to_le_bytes()).collect();
                save_file(folder, Hash::of(&bytes), &bytes).expect("a temporary folder is writable");
                Shard { hash: Hash::of(&bytes), tokens: shard.len() as u64 }
            })
            .collect(),
        text_bytes: tokens.len() as u64,
    };
    let tokenizer = FileEntry { hash: Hash::of(b"{}"), bytes: 2 };
    save_file(folder, tokenizer.hash, b"{}").expect("a temporary folder is writable");
    let manifest = DataManifest { format: FORMAT, vocab_size: 1 << 16, token_bytes: 2, tokenizer, train: split(train), valid: split(valid) };
    save_manifest(folder, manifest.name(), &manifest.to_bytes()).expect("a temporary folder is writable");
    Store::open(folder, manifest.name()).expect("just written")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn numbers(count: u16) -> Vec<u16> {
        (0..count).collect()
    }

    #[test]
    fn tokens_are_one_sequence_across_shards() {
        let folder = tempfile::tempdir().expect("temporary folder");
        let store = store_of(folder.path(), &numbers(1000), &[7], 64);
        let mut tokens = Vec::new();
        store.train().read(60, 200, &mut tokens).expect("intact");
        assert_eq!(tokens, (60..260).collect::<Vec<u32>>());
        // 1000 tokens in shards of 1: more shards than are kept open at once.
        let store = store_of(folder.path(), &numbers(1000), &[7], 1);
        assert_eq!(store.train().read_all().expect("intact"), (0..1000).collect::<Vec<u32>>());
    }

    #[test]
    fn a_missing_or_damaged_shard_is_named() {
        let folder = tempfile::tempdir().expect("temporary folder");
        let store = store_of(folder.path(), &numbers(100), &[7], 64);
        let path = file_path(folder.path(), store.manifest().train.shards[1].hash);
        let mut bytes = std::fs::read(&path).expect("just written");
        bytes[3] ^= 1;
        std::fs::write(&path, &bytes).expect("writable");
        let error = store.train().read_all().expect_err("damaged");
        assert!(matches!(&error, DataError::Corrupt { path: named, .. } if *named == path), "{error}");
        assert_eq!(store.read_chunk(store.manifest().train.shards[1].hash, 0), None, "damage is not served");
        std::fs::remove_file(&path).expect("removable");
        let error = store.verify(|_| ()).expect_err("missing");
        assert!(matches!(&error, DataError::Missing { path: named } if *named == path), "{error}");
        let mut tokens = Vec::new();
        store.train().read(0, 64, &mut tokens).expect("the other shard is intact");
    }

    #[test]
    fn the_wanted_data_set_is_found_or_named() {
        let folder = tempfile::tempdir().expect("temporary folder");
        assert!(matches!(Store::open_only(folder.path()), Err(DataError::NoDataSet { name: None, .. })));
        assert!(matches!(Store::open(folder.path(), Hash([1; 32])), Err(DataError::NoDataSet { name: Some(_), .. })));
        let first = store_of(folder.path(), &numbers(10), &[7], 64);
        assert_eq!(Store::open_only(folder.path()).expect("the only one").name(), first.name());
        store_of(folder.path(), &numbers(11), &[7], 64);
        assert!(matches!(Store::open_only(folder.path()), Err(DataError::Ambiguous { names, .. }) if names.len() == 2));
        std::fs::write(manifest_path(folder.path(), first.name()), b"{}").expect("writable");
        assert!(matches!(Store::open(folder.path(), first.name()), Err(DataError::Manifest { .. })));
    }

    #[test]
    fn only_files_of_the_data_set_are_served() {
        let folder = tempfile::tempdir().expect("temporary folder");
        let train: Vec<u16> = (0..600_000_u32).map(|i| (i % 60_000) as u16).collect();
        let store = store_of(folder.path(), &train, &[7], 1 << 20);
        let shard = store.manifest().train.shards[0].hash;
        let last = store.read_chunk(shard, 1).expect("the second chunk");
        assert_eq!((last.bytes.len(), last.byte_len), (1_200_000 - STATE_CHUNK_BYTES, 1_200_000));
        assert_eq!((store.read_chunk(shard, 2), store.read_chunk(shard, u32::MAX)), (None, None));
        assert_eq!(store.read_chunk(store.name(), 0).expect("the manifest").bytes, store.manifest().to_bytes());
        assert_eq!(store.read_chunk(store.name(), 1), None);
        save_file(folder.path(), Hash::of(b"private"), b"private").expect("writable");
        assert_eq!(store.read_chunk(Hash::of(b"private"), 0), None);
    }

    #[test]
    fn a_token_outside_the_vocabulary_is_an_error() {
        let folder = tempfile::tempdir().expect("temporary folder");
        let mut store = store_of(folder.path(), &[1, 2, 300], &[7], 64);
        Arc::make_mut(&mut store.manifest).vocab_size = 256;
        assert!(matches!(store.train().read_all(), Err(DataError::Token { token: 300, vocab_size: 256, .. })));
    }
}
