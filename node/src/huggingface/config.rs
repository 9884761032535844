//! `config.json`: the model's shape in Hugging Face terms.

use std::path::Path;

use serde::Deserialize;
use serde_json::{Value, json};
use skein_protocol::model::ModelConfig;

use super::HuggingFaceError;

/// Tokens with a meaning of their own.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SpecialTokens {
    /// Begins a text.
    pub bos: Option<u32>,
    /// Ends a text.
    pub eos: Option<u32>,
}

/// What `config.json` says of a model, as far as it matters here. Defaults are those of
/// transformers' `LlamaConfig`.
#[derive(Deserialize)]
struct Raw {
    model_type: String,
    vocab_size: usize,
    hidden_size: usize,
    intermediate_size: usize,
    num_hidden_layers: usize,
    num_attention_heads: usize,
    num_key_value_heads: Option<usize>,
    head_dim: Option<usize>,
    #[serde(default = "default_positions")]
    max_position_embeddings: usize,
    #[serde(default = "default_epsilon")]
    rms_norm_eps: f64,
    rope_theta: Option<f64>,
    /// Where transformers 5 keeps base and kind of the rotary embedding.
    rope_parameters: Option<Value>,
    rope_scaling: Option<Value>,
    #[serde(default)]
    tie_word_embeddings: bool,
    #[serde(default = "default_range")]
    initializer_range: f64,
    #[serde(default = "default_activation")]
    hidden_act: String,
    #[serde(default)]
    attention_bias: bool,
    #[serde(default)]
    mlp_bias: bool,
    quantization_config: Option<Value>,
    bos_token_id: Option<u32>,
    /// One token or several.
    eos_token_id: Option<Value>,
}

fn default_positions() -> usize {
    2048
}

fn default_epsilon() -> f64 {
    1e-6
}

fn default_range() -> f64 {
    0.02
}

fn default_activation() -> String {
    "silu".to_owned()
}

/// Parses a `config.json`; `path` names it in errors.
pub(super) fn parse(path: &Path, text: &str) -> Result<(ModelConfig, SpecialTokens), HuggingFaceError> {
    let corrupt = |problem: String| HuggingFaceError::Corrupt { path: path.to_owned(), problem };
    // The kind of model first: another's configuration may lack what Llama's has.
    let value: Value = serde_json::from_str(text).map_err(|error| corrupt(error.to_string()))?;
    let kind = value.get("model_type").cloned().unwrap_or(Value::Null);
    if kind != "llama" {
        return Err(unsupported(path, "model_type", &kind, "\"llama\""));
    }
    let raw: Raw = serde_json::from_value(value).map_err(|error| corrupt(error.to_string()))?;
    check(path, &raw)?;
    let model = ModelConfig {
        vocab_size: raw.vocab_size,
        hidden_size: raw.hidden_size,
        intermediate_size: raw.intermediate_size,
        num_hidden_layers: raw.num_hidden_layers,
        num_attention_heads: raw.num_attention_heads,
        num_key_value_heads: raw.num_key_value_heads.unwrap_or(raw.num_attention_heads),
        max_position_embeddings: raw.max_position_embeddings,
        rms_norm_eps: raw.rms_norm_eps,
        rope_theta: rope_theta(path, &raw)?,
        tie_word_embeddings: raw.tie_word_embeddings,
        initializer_range: raw.initializer_range,
    };
    let eos = raw.eos_token_id.as_ref().and_then(|eos| eos.as_u64().or_else(|| eos.get(0)?.as_u64())).and_then(|eos| u32::try_from(eos).ok());
    Ok((model, SpecialTokens { bos: raw.bos_token_id, eos }))
}

/// Refuses what is not computed here, and shapes that do not divide.
fn check(path: &Path, raw: &Raw) -> Result<(), HuggingFaceError> {
    debug_assert_eq!(raw.model_type, "llama");
    if raw.hidden_act != "silu" {
        return Err(unsupported(path, "hidden_act", &raw.hidden_act, "\"silu\""));
    }
    for (key, bias) in [("attention_bias", raw.attention_bias), ("mlp_bias", raw.mlp_bias)] {
        if bias {
            return Err(unsupported(path, key, &bias, "false"));
        }
    }
    if let Some(quantization) = raw.quantization_config.as_ref().filter(|value| !value.is_null()) {
        return Err(unsupported(path, "quantization_config", quantization, "weights in f32, f16 or bf16"));
    }
    for (key, value) in [
        ("vocab_size", raw.vocab_size),
        ("hidden_size", raw.hidden_size),
        ("intermediate_size", raw.intermediate_size),
        ("num_hidden_layers", raw.num_hidden_layers),
        ("num_attention_heads", raw.num_attention_heads),
        ("num_key_value_heads", raw.num_key_value_heads.unwrap_or(raw.num_attention_heads)),
        ("max_position_embeddings", raw.max_position_embeddings),
    ] {
        // Sizes of tensors are products of two of them.
        if value == 0 || value > 1 << 28 {
            return Err(unsupported(path, key, &value, "a value from 1 to 2^28"));
        }
    }
    if raw.num_hidden_layers >= 60_000 {
        return Err(unsupported(path, "num_hidden_layers", &raw.num_hidden_layers, "fewer than 60000 layers"));
    }
    let key_heads = raw.num_key_value_heads.unwrap_or(raw.num_attention_heads);
    if !raw.num_attention_heads.is_multiple_of(key_heads) {
        return Err(unsupported(path, "num_key_value_heads", &key_heads, &format!("a divisor of num_attention_heads = {}", raw.num_attention_heads)));
    }
    if !raw.hidden_size.is_multiple_of(2 * raw.num_attention_heads) {
        return Err(unsupported(path, "hidden_size", &raw.hidden_size, &format!("an even multiple of num_attention_heads = {}", raw.num_attention_heads)));
    }
    let width = raw.hidden_size / raw.num_attention_heads;
    match raw.head_dim {
        Some(head_dim) if head_dim != width => Err(unsupported(path, "head_dim", &head_dim, &format!("hidden_size / num_attention_heads = {width}"))),
        Some(_) | None => Ok(()),
    }
}

/// The base of the rotary embedding, wherever this version of transformers keeps it; any scaling is refused.
fn rope_theta(path: &Path, raw: &Raw) -> Result<f64, HuggingFaceError> {
    for (key, scaling) in [("rope_scaling", &raw.rope_scaling), ("rope_parameters", &raw.rope_parameters)] {
        let kind = scaling.as_ref().and_then(|value| value.get("rope_type").or_else(|| value.get("type")));
        let known = scaling.as_ref().is_none_or(|value| value.is_null() || (value.is_object() && kind.is_none_or(|kind| kind == "default")));
        if !known {
            return Err(unsupported(path, key, scaling.as_ref().unwrap_or(&Value::Null), "unscaled rotary positions"));
        }
    }
    let inner = raw.rope_parameters.as_ref().and_then(|value| value.get("rope_theta")).and_then(Value::as_f64);
    Ok(raw.rope_theta.or(inner).unwrap_or(10_000.0))
}

fn unsupported(path: &Path, key: &'static str, value: &(impl serde::Serialize + ?Sized), wanted: &str) -> HuggingFaceError {
    let value = serde_json::to_string(value).unwrap_or_default();
    HuggingFaceError::Unsupported { path: path.to_owned(), key, value, wanted: wanted.to_owned() }
}

/// `config.json` of a model with f32 weights.
pub(super) fn config_json(model: &ModelConfig, tokens: SpecialTokens) -> Value {
    json!({
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": model.vocab_size,
        "hidden_size": model.hidden_size,
        "intermediate_size": model.intermediate_size,
        "num_hidden_layers": model.num_hidden_layers,
        "num_attention_heads": model.num_attention_heads,
        "num_key_value_heads": model.num_key_value_heads,
        "head_dim": model.head_dim(),
        "hidden_act": "silu",
        "max_position_embeddings": model.max_position_embeddings,
        "rms_norm_eps": model.rms_norm_eps,
        "rope_theta": model.rope_theta,
        "rope_scaling": null,
        "attention_bias": false,
        "attention_dropout": 0.0,
        "mlp_bias": false,
        "tie_word_embeddings": model.tie_word_embeddings,
        "initializer_range": model.initializer_range,
        "pretraining_tp": 1,
        "use_cache": true,
        "torch_dtype": "float32",
        // Left out, transformers would take 1 and 2.
        "bos_token_id": tokens.bos,
        "eos_token_id": tokens.eos,
        "pad_token_id": null,
    })
}

/// `generation_config.json`: how to continue texts unless told otherwise.
pub(super) fn generation_json(tokens: SpecialTokens) -> Value {
    json!({ "_from_model_config": true, "bos_token_id": tokens.bos, "eos_token_id": tokens.eos })
}
