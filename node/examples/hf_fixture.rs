//! The Rust half of `scripts/test-hf`: random models as Hugging Face folders, and our logits.
//!
//!     hf_fixture write FOLDER     writes FOLDER/tied, untied and grouped, each with tokens.json and logits.json
//!     hf_fixture logits FOLDER    imports FOLDER and writes its logits.json for its tokens.json

use std::path::Path;

use anyhow::{Context, Result, bail};
use skein_node::engine::torch::device::set_threads;
use skein_node::huggingface::{Export, SpecialTokens, export, import};
use skein_node::init::draw;
use skein_node::model::predictor::Predictor;
use skein_protocol::model::{ModelConfig, Structure};

const LENGTH: usize = 48;

fn main() -> Result<()> {
    set_threads(1);
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["write", folder] => write_all(Path::new(folder)),
        ["logits", folder] => write_logits(Path::new(folder)),
        _ => bail!("usage: hf_fixture write|logits FOLDER"),
    }
}

fn write_all(folder: &Path) -> Result<()> {
    let base = ModelConfig {
        vocab_size: 101,
        hidden_size: 64,
        intermediate_size: 176,
        num_hidden_layers: 3,
        num_attention_heads: 4,
        num_key_value_heads: 4,
        max_position_embeddings: 128,
        rms_norm_eps: 1e-5,
        rope_theta: 10_000.0,
        tie_word_embeddings: false,
        initializer_range: 0.1,
    };
    let tied = ModelConfig { tie_word_embeddings: true, rms_norm_eps: 1e-6, ..base.clone() };
    let grouped = ModelConfig { num_key_value_heads: 2, rope_theta: 500_000.0, ..base.clone() };
    for (name, model, seed) in [("untied", base, 1), ("tied", tied, 2), ("grouped", grouped, 3)] {
        let folder = folder.join(name);
        let weights = random(&model, seed);
        let views: Vec<&[f32]> = weights.iter().map(Vec::as_slice).collect();
        export(&folder, &Export { model: &model, weights: &views, tokens: SpecialTokens::default(), files: &[] })?;
        let tokens: Vec<u32> = (0..LENGTH as u32).map(|index| (index * index * 7 + seed as u32) % 101).collect();
        std::fs::write(folder.join("tokens.json"), serde_json::to_vec(&tokens)?)?;
        write_logits(&folder)?;
    }
    Ok(())
}

/// Weights of every group; norms differ from one, so that leaving one out shows.
fn random(model: &ModelConfig, seed: u64) -> Vec<Vec<f32>> {
    let group = |layout: &skein_protocol::model::GroupLayout| {
        let mut buffer = vec![0.0; layout.len];
        draw(layout, seed, model.initializer_range, &mut buffer);
        for spec in layout.tensors.iter().filter(|spec| spec.shape.len() == 1) {
            for (index, value) in buffer[spec.offset..spec.offset + spec.len()].iter_mut().enumerate() {
                *value += 0.3 * (index as f32).sin();
            }
        }
        buffer
    };
    Structure::llama(model, LENGTH).groups.iter().map(group).collect()
}

fn write_logits(folder: &Path) -> Result<()> {
    let import = import(folder)?;
    let path = folder.join("tokens.json");
    let tokens: Vec<u32> = serde_json::from_slice(&std::fs::read(&path).with_context(|| path.display().to_string())?)?;
    let predictor = Predictor::new(&import.model, &import.weights, tokens.len(), tch::Device::Cpu)?;
    std::fs::write(folder.join("logits.json"), serde_json::to_vec(&predictor.logits(&tokens)?)?)?;
    Ok(())
}
