//! Models in and out as Hugging Face folders: `config.json`, safetensors, `generation_config.json`
//! and whatever files the tokenizer has. Plain Rust: needs no libtorch.
//!
//! Start at [`export`] and [`import`]. Only what this model computes is read: a folder whose
//! configuration asks for more is refused with one line, never half understood.

mod config;
mod export;
mod import;

#[cfg(test)]
mod tests;

use std::path::PathBuf;

pub use config::SpecialTokens;
pub use export::{Export, export};
pub use import::{Import, import};

/// Name of the configuration's file.
const CONFIG: &str = "config.json";
/// Name of the weights' file.
const WEIGHTS: &str = "model.safetensors";
/// Name of the file that says which of several files holds which weight.
const INDEX: &str = "model.safetensors.index.json";
/// Files that may belong to a tokenizer, which an import carries along.
const TOKENIZER_FILES: [&str; 3] = ["tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"];

/// Why a folder could not be read or written. One line for the user.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum HuggingFaceError {
    /// The file system refused.
    #[error("{}: cannot {action}: {reason}", path.display())]
    Io {
        /// Which file or folder.
        path: PathBuf,
        /// What was tried.
        action: &'static str,
        /// The system's words.
        reason: String,
    },
    /// A file is not in its format.
    #[error("{}: {problem}: download the model again", path.display())]
    Corrupt {
        /// Which file.
        path: PathBuf,
        /// What is wrong with it.
        problem: String,
    },
    /// The model needs something that is not computed here.
    #[error("{}: {key} = {value} is not supported: only Llama models with {wanted}", path.display())]
    Unsupported {
        /// Which file.
        path: PathBuf,
        /// The setting.
        key: &'static str,
        /// Its value.
        value: String,
        /// What would be.
        wanted: String,
    },
    /// A weight is missing, left over, or has another shape than the configuration says.
    #[error("{}: tensor {name}: {problem}", path.display())]
    Tensor {
        /// Which file or folder.
        path: PathBuf,
        /// The tensor's name.
        name: String,
        /// What is wrong with it.
        problem: String,
    },
}

impl HuggingFaceError {
    fn io(path: &std::path::Path, action: &'static str, error: &std::io::Error) -> Self {
        Self::Io { path: path.to_owned(), action, reason: error.to_string() }
    }
}
