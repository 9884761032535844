//! What a run learns from: text becomes tokens in hashed files, files become microbatches.
//!
//! `build` and `tokenizer` (feature `shell`) make a data set from text; [`store`] opens, checks
//! and serves one; [`fetch`] gets one from peers; [`sampler`] says which tokens belong to a
//! microbatch; [`trigram`] is the yardstick a model must beat. Nothing from the wire becomes a
//! path: files are found by hashes that the manifest lists.

#[cfg(feature = "shell")]
pub mod build;
pub mod fetch;
pub mod sampler;
pub mod store;
#[cfg(feature = "shell")]
pub mod tokenizer;
pub mod trigram;

use std::io::Write;
use std::path::{Path, PathBuf};

use skein_protocol::id::Hash;
use skein_protocol::manifest::ManifestError;

/// Why data cannot be used. One line for the user: what is wrong, where, what to do.
#[derive(Debug, thiserror::Error)]
pub enum DataError {
    /// The file system refused.
    #[error("{}: {source}", path.display())]
    Io {
        /// The file or folder.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// The folder holds no data set, or not the one wanted.
    #[error("no data set{} in {}: build it with `skein-node data build`, or let the node fetch it", name.map(|name| format!(" {}", name.short())).unwrap_or_default(), folder.display())]
    NoDataSet {
        /// The folder.
        folder: PathBuf,
        /// The data set wanted; none if any would do.
        name: Option<Hash>,
    },
    /// The folder holds several data sets, and none was named.
    #[error("{} holds {} data sets: name one of {}", folder.display(), names.len(), names.iter().map(Hash::to_string).collect::<Vec<_>>().join(", "))]
    Ambiguous {
        /// The folder.
        folder: PathBuf,
        /// Their names.
        names: Vec<Hash>,
    },
    /// The manifest is not what its name says, or not valid.
    #[error("{}: {source}; delete it and build or fetch the data again", path.display())]
    Manifest {
        /// Its file.
        path: PathBuf,
        /// What is wrong.
        source: ManifestError,
    },
    /// A file that the manifest lists is not there.
    #[error("{} is missing: {REPAIR}", path.display())]
    Missing {
        /// The file.
        path: PathBuf,
    },
    /// A file is not what the manifest says.
    #[error("{} is damaged: its hash is {}, not its name; {REPAIR}", path.display(), found.short())]
    Corrupt {
        /// The file.
        path: PathBuf,
        /// The hash it has.
        found: Hash,
    },
    /// Too little text.
    #[error("the {split} data has {tokens} tokens, at least {needed} are needed: add text, or lower batch.length")]
    TooFew {
        /// `train` or `valid`.
        split: &'static str,
        /// What there is.
        tokens: u64,
        /// What there must be.
        needed: u64,
    },
    /// The model knows fewer tokens than the data has.
    #[error("the data has {data} tokens in its vocabulary, model.vocab_size is {model}: raise it to {data} or more, or build the data with another tokenizer")]
    Vocabulary {
        /// Tokens that the model knows.
        model: usize,
        /// Tokens of the data's vocabulary.
        data: usize,
    },
    /// A token that the vocabulary does not have.
    #[error("{} holds token {token}, the vocabulary has {vocab_size}: {REPAIR}", path.display())]
    Token {
        /// The shard.
        path: PathBuf,
        /// The token.
        token: u32,
        /// Tokens of the vocabulary.
        vocab_size: u32,
    },
    /// The tokenizer cannot be made or used.
    #[error("tokenizer: {0}")]
    Tokenizer(String),
    /// The text cannot be used.
    #[error("{}: {problem}", path.display())]
    Text {
        /// The file.
        path: PathBuf,
        /// What is wrong and what to do.
        problem: String,
    },
    /// The data set would be beyond what a manifest may say.
    #[error("{0}: use a larger --shard-tokens, or less text")]
    TooLarge(ManifestError),
}

const REPAIR: &str = "build the data again from the same text, or let the node fetch it (`skein-node start` without --data)";

impl DataError {
    /// Wraps an error of the file system with the path it is about.
    pub(crate) fn io(path: &Path) -> impl FnOnce(std::io::Error) -> Self + use<> {
        let path = path.to_owned();
        move |source| Self::Io { path, source }
    }
}

/// Writes a file whole or not at all, durably: a temporary file beside it, fsync, rename, fsync of
/// the folder.
pub(crate) fn write_atomic(path: &Path, bytes: &[u8]) -> Result<(), DataError> {
    let name = path.file_name().expect("callers name a file").to_string_lossy();
    let temporary = path.with_file_name(format!(".{name}.{}", std::process::id()));
    let written = (|| {
        let mut file = std::fs::File::create(&temporary)?;
        file.write_all(bytes)?;
        file.sync_all()?;
        std::fs::rename(&temporary, path)?;
        let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
        std::fs::File::open(folder)?.sync_all()
    })();
    if written.is_err() {
        // What is left of the temporary file is useless, and its removal may fail for the same reason.
        let _ = std::fs::remove_file(&temporary);
    }
    written.map_err(DataError::io(path))
}
