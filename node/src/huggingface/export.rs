//! Writing a folder.

use std::fs::{self, File};
use std::path::Path;

use safetensors::tensor::{Dtype, TensorView};
use serde_json::Value;
use skein_protocol::model::{ModelConfig, Structure};

use super::config::{SpecialTokens, config_json, generation_json};
use super::{CONFIG, HuggingFaceError, WEIGHTS};

/// What goes into a folder.
pub struct Export<'a> {
    /// The model's shape.
    pub model: &'a ModelConfig,
    /// Flat f32 weights of each group in its layout; the index is the group's.
    pub weights: &'a [&'a [f32]],
    /// Tokens with a meaning of their own.
    pub tokens: SpecialTokens,
    /// Further files by name: the tokenizer's.
    pub files: &'a [(String, Vec<u8>)],
}

/// Writes a folder that Hugging Face `transformers` loads as `LlamaForCausalLM`. Each file is
/// written under another name, flushed and renamed; the configuration comes last, so that a folder
/// with one is complete.
///
/// # Errors
/// If the file system refuses.
///
/// # Panics
/// If the weights do not have the model's layout.
pub fn export(dir: &Path, what: &Export<'_>) -> Result<(), HuggingFaceError> {
    fs::create_dir_all(dir).map_err(|error| HuggingFaceError::io(dir, "create the folder", &error))?;
    write_weights(dir, what)?;
    for (name, bytes) in what.files {
        write(dir, name, bytes)?;
    }
    write(dir, "generation_config.json", &pretty(&generation_json(what.tokens)))?;
    write(dir, CONFIG, &pretty(&config_json(what.model, what.tokens)))
}

fn write_weights(dir: &Path, what: &Export<'_>) -> Result<(), HuggingFaceError> {
    // The layout of weights does not depend on the length of sequences.
    let structure = Structure::llama(what.model, 1);
    assert_eq!(structure.groups.len(), what.weights.len(), "weights of each group");
    let mut tensors = Vec::new();
    for (layout, weights) in structure.groups.iter().zip(what.weights) {
        assert_eq!(layout.len, weights.len(), "the group's layout");
        for spec in &layout.tensors {
            let bytes = bytemuck::cast_slice(&weights[spec.offset..spec.offset + spec.len()]);
            let view = TensorView::new(Dtype::F32, spec.shape.clone(), bytes).expect("a layout's lengths follow from its shapes");
            tensors.push((spec.name.as_str(), view));
        }
    }
    let (path, partial) = (dir.join(WEIGHTS), dir.join(format!("{WEIGHTS}.partial")));
    // transformers refuses a file that does not say this.
    let metadata = [("format".to_owned(), "pt".to_owned())].into_iter().collect();
    safetensors::serialize_to_file(tensors, Some(metadata), &partial).map_err(|error| HuggingFaceError::Io {
        path: partial.clone(),
        action: "write",
        reason: error.to_string(),
    })?;
    finish(&partial, &path)
}

fn write(dir: &Path, name: &str, bytes: &[u8]) -> Result<(), HuggingFaceError> {
    let (path, partial) = (dir.join(name), dir.join(format!("{name}.partial")));
    fs::write(&partial, bytes).map_err(|error| HuggingFaceError::io(&partial, "write", &error))?;
    finish(&partial, &path)
}

/// Flushes a file to disk and gives it its name.
fn finish(partial: &Path, path: &Path) -> Result<(), HuggingFaceError> {
    File::options()
        .write(true)
        .open(partial)
        .and_then(|file| file.sync_all())
        .and_then(|()| fs::rename(partial, path))
        .map_err(|error| HuggingFaceError::io(path, "write", &error))
}

fn pretty(value: &Value) -> Vec<u8> {
    let mut bytes = serde_json::to_vec_pretty(value).expect("plain JSON");
    bytes.push(b'\n');
    bytes
}
