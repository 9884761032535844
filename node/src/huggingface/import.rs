//! Reading a folder.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::io::{Read, Seek, SeekFrom};
use std::path::{Component, Path, PathBuf};

use safetensors::tensor::{Dtype, Metadata, TensorInfo};
use serde::Deserialize;
use skein_protocol::model::{ModelConfig, Structure, TensorSpec};

use super::config::{SpecialTokens, parse};
use super::{CONFIG, HuggingFaceError, INDEX, TOKENIZER_FILES, WEIGHTS};

/// The header of a safetensors file is no longer than this: the format's own bound.
const HEADER_BYTES_MAX: u64 = 100_000_000;

/// What a folder holds.
#[derive(Debug)]
pub struct Import {
    /// The model's shape.
    pub model: ModelConfig,
    /// Flat f32 weights of each group in its layout, padding zero; the index is the group's.
    pub weights: Vec<Vec<f32>>,
    /// Tokens with a meaning of their own.
    pub tokens: SpecialTokens,
    /// The tokenizer's files by name, as they are.
    pub files: Vec<(String, Vec<u8>)>,
}

/// Reads a folder with a Llama model in f32, f16 or bf16, in one safetensors file or several.
///
/// # Errors
/// If a file is missing or corrupt, or the model is of another kind.
pub fn import(dir: &Path) -> Result<Import, HuggingFaceError> {
    let path = dir.join(CONFIG);
    let text = fs::read_to_string(&path).map_err(|error| HuggingFaceError::io(&path, "read", &error))?;
    let (model, tokens) = parse(&path, &text)?;
    let structure = Structure::llama(&model, 1);
    let mut store = Store::open(dir)?;
    let mut weights = Vec::with_capacity(structure.groups.len());
    for layout in &structure.groups {
        // Before a buffer of a size that only the configuration claims.
        for spec in &layout.tensors {
            store.check(spec)?;
        }
        let mut buffer = vec![0.0; layout.len];
        for spec in &layout.tensors {
            store.read(spec, &mut buffer[spec.offset..spec.offset + spec.len()])?;
        }
        weights.push(buffer);
    }
    store.nothing_left_over(&structure, model.tie_word_embeddings)?;
    let mut files = Vec::new();
    for name in TOKENIZER_FILES {
        let path = dir.join(name);
        if path.is_file() {
            files.push((name.to_owned(), fs::read(&path).map_err(|error| HuggingFaceError::io(&path, "read", &error))?));
        }
    }
    Ok(Import { model, weights, tokens, files })
}

/// The safetensors files of a folder.
struct Store {
    dir: PathBuf,
    files: Vec<TensorFile>,
    /// Which file holds each tensor, and where.
    tensors: BTreeMap<String, (usize, TensorInfo)>,
}

struct TensorFile {
    path: PathBuf,
    file: File,
    /// Where the data begins.
    start: u64,
}

/// `model.safetensors.index.json`
#[derive(Deserialize)]
struct Index {
    weight_map: BTreeMap<String, String>,
}

impl Store {
    fn open(dir: &Path) -> Result<Self, HuggingFaceError> {
        let mut store = Self { dir: dir.to_owned(), files: Vec::new(), tensors: BTreeMap::new() };
        let index = dir.join(INDEX);
        if !index.is_file() {
            store.add(dir.join(WEIGHTS))?;
            return Ok(store);
        }
        let text = fs::read_to_string(&index).map_err(|error| HuggingFaceError::io(&index, "read", &error))?;
        let map: Index = serde_json::from_str(&text).map_err(|error| HuggingFaceError::Corrupt { path: index.clone(), problem: error.to_string() })?;
        for name in map.weight_map.into_values().collect::<BTreeSet<_>>() {
            // A name, not a path: a downloaded file must not reach outside its folder.
            let mut parts = Path::new(&name).components();
            if !matches!((parts.next(), parts.next()), (Some(Component::Normal(_)), None)) {
                return Err(HuggingFaceError::Corrupt { path: index, problem: format!("`{name}` is no file name") });
            }
            store.add(dir.join(name))?;
        }
        Ok(store)
    }

    /// Reads the header of one file.
    fn add(&mut self, path: PathBuf) -> Result<(), HuggingFaceError> {
        let io = |error: std::io::Error| HuggingFaceError::io(&path, "read", &error);
        let corrupt = |problem: String| HuggingFaceError::Corrupt { path: path.clone(), problem };
        let mut file = File::open(&path).map_err(io)?;
        let length = file.metadata().map_err(io)?.len();
        let mut prefix = [0; 8];
        file.read_exact(&mut prefix).map_err(io)?;
        let header_len = u64::from_le_bytes(prefix);
        if header_len > HEADER_BYTES_MAX || header_len > length.saturating_sub(8) {
            return Err(corrupt("no safetensors file".to_owned()));
        }
        let mut header = Vec::new();
        (&mut file).take(header_len).read_to_end(&mut header).map_err(io)?;
        let metadata: Metadata = serde_json::from_slice(&header).map_err(|error| corrupt(format!("its header: {error}")))?;
        let start = 8 + header_len;
        if length - start != metadata.data_len() as u64 {
            return Err(corrupt(format!("{} bytes of weights, expected {}", length - start, metadata.data_len())));
        }
        let number = self.files.len();
        for (name, info) in metadata.tensors() {
            if self.tensors.insert(name.clone(), (number, info.clone())).is_some() {
                return Err(corrupt(format!("tensor {name} is in two files")));
            }
        }
        self.files.push(TensorFile { path, file, start });
        Ok(())
    }

    /// Checks that a tensor is here, in a type and shape that fit.
    fn check(&self, spec: &TensorSpec) -> Result<(), HuggingFaceError> {
        let Some((number, info)) = self.tensors.get(&spec.name) else {
            return Err(self.wrong(None, &spec.name, "missing".to_owned()));
        };
        if info.shape != spec.shape {
            let problem = format!("expected the shape {:?} of {CONFIG}, found {:?}", spec.shape, info.shape);
            return Err(self.wrong(Some(*number), &spec.name, problem));
        }
        if !matches!(info.dtype, Dtype::F32 | Dtype::F16 | Dtype::BF16) {
            return Err(self.wrong(Some(*number), &spec.name, format!("type {:?}, expected F32, F16 or BF16", info.dtype)));
        }
        Ok(())
    }

    /// Reads a checked tensor as f32.
    fn read(&mut self, spec: &TensorSpec, values: &mut [f32]) -> Result<(), HuggingFaceError> {
        let Some((number, info)) = self.tensors.get(&spec.name) else {
            return Err(self.wrong(None, &spec.name, "missing".to_owned()));
        };
        let (start, end) = info.data_offsets;
        let mut bytes = vec![0; end - start];
        let TensorFile { path, file, start: data } = &mut self.files[*number];
        file.seek(SeekFrom::Start(*data + start as u64))
            .and_then(|_| file.read_exact(&mut bytes))
            .map_err(|error| HuggingFaceError::io(path, "read", &error))?;
        if info.dtype == Dtype::F32 {
            bytemuck::cast_slice_mut(values).copy_from_slice(&bytes);
            return Ok(());
        }
        let widen = if info.dtype == Dtype::F16 { |two| half::f16::from_le_bytes(two).to_f32() } else { |two| half::bf16::from_le_bytes(two).to_f32() };
        for (value, two) in values.iter_mut().zip(bytes.chunks_exact(2)) {
            *value = widen([two[0], two[1]]);
        }
        Ok(())
    }

    /// Checks that no weight would be ignored, unless it says nothing of its own.
    fn nothing_left_over(&self, structure: &Structure, tied: bool) -> Result<(), HuggingFaceError> {
        let known: BTreeSet<&str> = structure.groups.iter().flat_map(|layout| &layout.tensors).map(|spec| spec.name.as_str()).collect();
        // Old folders keep the rotary embedding's frequencies, and some the tied head a second time.
        let redundant = |name: &str| name.ends_with("rotary_emb.inv_freq") || (tied && name == "lm_head.weight");
        match self.tensors.iter().find(|(name, _)| !known.contains(name.as_str()) && !redundant(name)) {
            Some((name, (number, _))) => Err(self.wrong(Some(*number), name, format!("not a weight of the model in {CONFIG}"))),
            None => Ok(()),
        }
    }

    fn wrong(&self, file: Option<usize>, name: &str, problem: String) -> HuggingFaceError {
        let path = file.map_or(&self.dir, |number| &self.files[number].path).clone();
        HuggingFaceError::Tensor { path, name: name.to_owned(), problem }
    }
}
