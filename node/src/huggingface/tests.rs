//! Folders written and read again, and folders that must be refused.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use safetensors::tensor::{Dtype, SafeTensors, TensorView};
use serde_json::{Value, json};
use skein_protocol::model::{ModelConfig, Structure};

use super::*;

fn model(tied: bool) -> ModelConfig {
    ModelConfig {
        vocab_size: 10,
        hidden_size: 8,
        intermediate_size: 12,
        num_hidden_layers: 2,
        num_attention_heads: 2,
        num_key_value_heads: 1,
        max_position_embeddings: 16,
        rms_norm_eps: 3e-5,
        rope_theta: 5e5,
        tie_word_embeddings: tied,
        initializer_range: 0.03,
    }
}

/// Weights whose value says where they are; padding zero.
fn weights(model: &ModelConfig) -> Vec<Vec<f32>> {
    let structure = Structure::llama(model, 1);
    let group = |(number, layout): (usize, &skein_protocol::model::GroupLayout)| {
        let mut buffer = vec![0.0; layout.len];
        for spec in &layout.tensors {
            for (index, value) in buffer[spec.offset..spec.offset + spec.len()].iter_mut().enumerate() {
                *value = number as f32 + (spec.offset + index) as f32 / 4096.0;
            }
        }
        buffer
    };
    structure.groups.iter().enumerate().map(group).collect()
}

fn written(dir: &Path, model: &ModelConfig) -> Vec<Vec<f32>> {
    let weights = weights(model);
    let views: Vec<&[f32]> = weights.iter().map(Vec::as_slice).collect();
    let files = [("tokenizer.json".to_owned(), b"{}".to_vec())];
    let tokens = SpecialTokens { bos: None, eos: Some(0) };
    export(dir, &Export { model, weights: &views, tokens, files: &files }).expect("a folder of its own");
    weights
}

fn edit(dir: &Path, change: impl FnOnce(&mut Value)) {
    let path = dir.join(CONFIG);
    let mut value: Value = serde_json::from_slice(&fs::read(&path).expect("written")).expect("JSON");
    change(&mut value);
    fs::write(path, value.to_string()).expect("writable");
}

/// A tensor's name, shape and bytes.
type Stored = (String, Vec<usize>, Vec<u8>);
/// A type, how a value is written in it, and what it is then.
type Narrow = (Dtype, fn(f32) -> Vec<u8>, fn(f32) -> f32);

/// Writes the folder's weights anew in another type, several files if `sharded`.
fn rewrite(dir: &Path, dtype: Dtype, encode: fn(f32) -> Vec<u8>, sharded: bool) {
    let bytes = fs::read(dir.join(WEIGHTS)).expect("written");
    let tensors = SafeTensors::deserialize(&bytes).expect("safetensors");
    let mut parts: [Vec<Stored>; 2] = Default::default();
    for (index, (name, view)) in tensors.tensors().into_iter().enumerate() {
        let value = |four: &[u8]| f32::from_le_bytes(four.try_into().expect("four bytes"));
        let encoded = view.data().chunks_exact(4).flat_map(|four| encode(value(four))).collect();
        parts[if sharded { index % 2 } else { 0 }].push((name, view.shape().to_vec(), encoded));
    }
    fs::remove_file(dir.join(WEIGHTS)).expect("written");
    let mut map = BTreeMap::new();
    for (number, part) in parts.iter().enumerate().filter(|(_, part)| !part.is_empty()) {
        let name = if sharded { format!("model-{number}.safetensors") } else { WEIGHTS.to_owned() };
        let views = part.iter().map(|(name, shape, data)| (name, TensorView::new(dtype, shape.clone(), data).expect("fits")));
        safetensors::serialize_to_file(views, None, &dir.join(&name)).expect("writable");
        map.extend(part.iter().map(|(tensor, ..)| (tensor.clone(), name.clone())));
    }
    if sharded {
        fs::write(dir.join(INDEX), json!({ "metadata": {}, "weight_map": map }).to_string()).expect("writable");
    }
}

#[test]
fn what_is_exported_is_imported() {
    for tied in [false, true] {
        let dir = tempfile::tempdir().expect("a folder");
        let weights = written(dir.path(), &model(tied));
        let import = import(dir.path()).expect("our own");
        assert_eq!(import.model, model(tied));
        assert_eq!(import.weights, weights);
        assert_eq!(import.tokens, SpecialTokens { bos: None, eos: Some(0) });
        assert_eq!(import.files, [("tokenizer.json".to_owned(), b"{}".to_vec())]);
        let left = fs::read_dir(dir.path()).expect("there").filter(|entry| entry.as_ref().expect("an entry").path().extension() == Some("partial".as_ref()));
        assert_eq!(left.count(), 0);
    }
}

#[test]
fn the_weights_are_marked_as_pytorchs() {
    let dir = tempfile::tempdir().expect("a folder");
    written(dir.path(), &model(true));
    let bytes = fs::read(dir.path().join(WEIGHTS)).expect("written");
    let (_, metadata) = SafeTensors::read_metadata(&bytes).expect("safetensors");
    assert_eq!(metadata.metadata().as_ref().and_then(|map| map.get("format")).map(String::as_str), Some("pt"));
    assert!(metadata.info("lm_head.weight").is_none(), "the head is tied");
}

#[test]
fn several_files_and_narrow_types_are_read() {
    let narrow: [Narrow; 3] = [
        (Dtype::F32, |v| v.to_le_bytes().to_vec(), |v| v),
        (Dtype::F16, |v| half::f16::from_f32(v).to_le_bytes().to_vec(), |v| half::f16::from_f32(v).to_f32()),
        (Dtype::BF16, |v| half::bf16::from_f32(v).to_le_bytes().to_vec(), |v| half::bf16::from_f32(v).to_f32()),
    ];
    for (dtype, encode, rounded) in narrow {
        for sharded in [false, true] {
            let dir = tempfile::tempdir().expect("a folder");
            let weights = written(dir.path(), &model(false));
            rewrite(dir.path(), dtype, encode, sharded);
            let expected: Vec<Vec<f32>> = weights.iter().map(|group| group.iter().map(|v| rounded(*v)).collect()).collect();
            assert_eq!(import(dir.path()).expect("readable").weights, expected, "{dtype:?}, sharded {sharded}");
        }
    }
}

#[test]
fn both_places_of_the_rotary_base_are_read() {
    let dir = tempfile::tempdir().expect("a folder");
    written(dir.path(), &model(false));
    edit(dir.path(), |config| {
        let config = config.as_object_mut().expect("an object");
        config.remove("rope_theta");
        config.insert("rope_parameters".to_owned(), json!({ "rope_theta": 777.0, "rope_type": "default" }));
    });
    assert_eq!(import(dir.path()).expect("readable").model.rope_theta, 777.0);
}

#[test]
fn what_is_not_computed_here_is_refused_in_one_line() {
    let cases = [
        ("model_type", json!("mixtral"), "\"llama\""),
        ("hidden_act", json!("gelu"), "\"silu\""),
        ("attention_bias", json!(true), "false"),
        ("mlp_bias", json!(true), "false"),
        ("head_dim", json!(16), "hidden_size / num_attention_heads = 4"),
        ("rope_scaling", json!({ "rope_type": "llama3", "factor": 8.0 }), "unscaled rotary positions"),
        ("rope_parameters", json!({ "rope_type": "yarn" }), "unscaled rotary positions"),
        ("quantization_config", json!({ "bits": 4 }), "weights in f32, f16 or bf16"),
        ("num_key_value_heads", json!(0), "a value from 1 to 2^28"),
        ("num_attention_heads", json!(3), "a divisor"),
    ];
    for (key, value, wanted) in cases {
        let dir = tempfile::tempdir().expect("a folder");
        written(dir.path(), &model(false));
        edit(dir.path(), |config| {
            config[key] = value;
            if key == "num_attention_heads" {
                config["num_key_value_heads"] = json!(2);
            }
        });
        let error = import(dir.path()).expect_err(key).to_string();
        assert!(error.contains(wanted) && error.lines().count() == 1, "{key}: {error}");
    }
}

#[test]
fn weights_that_do_not_fit_are_named() {
    let dir = tempfile::tempdir().expect("a folder");
    written(dir.path(), &model(false));
    edit(dir.path(), |config| config["num_hidden_layers"] = json!(3));
    assert!(import(dir.path()).expect_err("a layer is missing").to_string().ends_with("tensor model.layers.2.input_layernorm.weight: missing"));
    edit(dir.path(), |config| config["num_hidden_layers"] = json!(1));
    assert!(import(dir.path()).expect_err("a layer too many").to_string().contains("not a weight of the model"));
    edit(dir.path(), |config| {
        config["num_hidden_layers"] = json!(2);
        config["vocab_size"] = json!(200_000_000);
    });
    let error = import(dir.path()).expect_err("another shape").to_string();
    assert!(error.ends_with("expected the shape [200000000, 8] of config.json, found [10, 8]"), "{error}");
}

#[test]
fn damaged_folders_are_errors() {
    let empty = tempfile::tempdir().expect("a folder");
    assert!(matches!(import(empty.path()), Err(HuggingFaceError::Io { .. })));

    let dir = tempfile::tempdir().expect("a folder");
    written(dir.path(), &model(false));
    let path = dir.path().join(WEIGHTS);
    let whole = fs::read(&path).expect("written");
    let mut vast = whole.clone();
    vast[..8].copy_from_slice(&u64::MAX.to_le_bytes());
    let mut garbled = whole.clone();
    garbled[8..16].fill(b'x');
    for damaged in [&whole[..whole.len() - 1], &vast, &garbled] {
        fs::write(&path, damaged).expect("writable");
        assert!(matches!(import(dir.path()), Err(HuggingFaceError::Corrupt { .. })));
    }
    fs::write(&path, [0; 4]).expect("writable");
    assert!(matches!(import(dir.path()), Err(HuggingFaceError::Io { .. })));

    fs::write(&path, &whole).expect("writable");
    fs::write(dir.path().join(INDEX), json!({ "weight_map": { "a": "../model.safetensors" } }).to_string()).expect("writable");
    assert!(import(dir.path()).expect_err("outside its folder").to_string().contains("is no file name"));

    fs::write(dir.path().join(CONFIG), "{").expect("writable");
    assert!(matches!(import(dir.path()), Err(HuggingFaceError::Corrupt { .. })));
}
