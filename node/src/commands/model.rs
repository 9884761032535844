//! Models in and out: `init`, `import`, `export`, `generate`, `eval`.

use std::path::Path;

use anyhow::Context;
use bytes::Bytes;
use skein_node::checkpoint;
use skein_node::data::sampler::valid_sequences;
use skein_node::data::store::Store;
use skein_node::data::tokenizer::Tokenizer;
use skein_node::engine::Snapshot;
use skein_node::engine::torch::device;
use skein_node::eval::evaluate;
use skein_node::generate::{Sampling, generate as continue_text};
use skein_node::huggingface::{self, Export, Import, SpecialTokens};
use skein_node::init;
use skein_node::model::predictor::Predictor;
use skein_node::shell::reader::Reader;
use skein_protocol::id::{Group, Hash, RunId, Timeline, Version};
use skein_protocol::manifest::DataManifest;
use skein_protocol::model::{GroupLayout, ModelConfig, Structure};
use skein_protocol::net::control::CoordinatorAddress;

use super::{Progress, read_config};
use crate::settings::GenerateArgs;

/// Sequences computed together when a model is measured.
const TOGETHER: usize = 8;

/// Writes a Hugging Face folder, with the tokenizer of the data if there is data.
pub(crate) fn write_model(out: &Path, model: &ModelConfig, weights: Vec<Vec<f32>>, store: Option<&Store>) -> anyhow::Result<()> {
    let tokenizer = store.map(Store::tokenizer).transpose()?;
    write_with_tokenizer(out, model, &weights, tokenizer.as_ref())
}

fn write_with_tokenizer(out: &Path, model: &ModelConfig, weights: &[Vec<f32>], tokenizer: Option<&Tokenizer>) -> anyhow::Result<()> {
    let groups: Vec<&[f32]> = weights.iter().map(Vec::as_slice).collect();
    huggingface::export(out, &Export { model, weights: &groups, tokens: SpecialTokens::default(), files: &[] })?;
    if let Some(tokenizer) = tokenizer {
        tokenizer.save_pretrained(out, model.max_position_embeddings)?;
    }
    Ok(())
}

pub(crate) fn init(run: &Path, data: Option<&Path>, out: &Path) -> anyhow::Result<()> {
    let config = read_config(run)?;
    let store = data.map(|folder| Store::open(folder, config.data.manifest)).transpose()?;
    let weights = config
        .structure()
        .groups
        .iter()
        .map(|layout| {
            let mut weights = vec![0.0; layout.len];
            init::draw(layout, config.run.seed, config.model.initializer_range, &mut weights);
            weights
        })
        .collect();
    write_model(out, &config.model, weights, store.as_ref())?;
    println!("{}", out.display());
    Ok(())
}

/// The folder of an imported model within a node's state, and the run it is filed under: an
/// import belongs to no run, so that any run may name it.
pub(crate) const IMPORTED: &str = skein_node::shell::driver::IMPORTED;

pub(crate) fn import(model: &Path, state: &Path) -> anyhow::Result<()> {
    let imported = huggingface::import(model)?;
    let structure = Structure::llama(&imported.model, 1);
    let folder = state.join(IMPORTED);
    std::fs::create_dir_all(&folder).with_context(|| format!("cannot make {}", folder.display()))?;
    let mut roots = Vec::new();
    for (layout, snapshot) in structure.groups.iter().zip(version_0(&imported)?) {
        roots.push(checkpoint::save(&folder, &snapshot, layout, RunId::default(), Timeline(0))?.root);
    }
    let table = toml::to_string(&imported.model).context("cannot describe the model")?;
    println!("imported {} parameters into {}", structure.parameters(), state.display());
    println!("put this into run.toml and start a node with --state {}:\n\n[model]\n{table}\n[data]\nimport = \"{}\"", state.display(), Hash::root(&roots));
    Ok(())
}

/// An imported model as the state that a run begins with, by group.
pub(crate) fn version_0(imported: &Import) -> anyhow::Result<Vec<Snapshot>> {
    let layouts = Structure::llama(&imported.model, 1).groups;
    let snapshot = |(index, (layout, weights)): (usize, (&GroupLayout, &Vec<f32>))| {
        let group = Group(u16::try_from(index).context("the model has too many layers")?);
        // The optimizer starts from nothing: both its vectors are zero.
        let mut bytes: Vec<u8> = bytemuck::cast_slice(weights).to_vec();
        bytes.resize(layout.len * 4 * 3, 0);
        Ok(Snapshot::new(group, Version(0), Bytes::from(bytes)))
    };
    layouts.iter().zip(&imported.weights).enumerate().map(snapshot).collect()
}

pub(crate) fn export(coordinator: &CoordinatorAddress, out: &Path) -> anyhow::Result<()> {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().context("cannot start the runtime")?;
    let (model, version) = runtime.block_on(async {
        let mut reader = Reader::connect(coordinator).await?;
        let config = reader.config().clone();
        let version = reader.version()?;
        let structure = config.structure();
        let total: usize = structure.groups.iter().map(|layout| layout.len * 12).sum();
        let mut bar = Progress::new(total as u64, "{wide_bar} {bytes}/{total_bytes}");
        let mut done = 0;
        let snapshots = reader
            .checkpoint(|bytes| {
                done += bytes;
                bar.at(done, "fetching".to_owned());
            })
            .await?;
        bar.finish();
        let manifest = DataManifest::from_bytes(config.data.manifest, &reader.blob(config.data.manifest).await?)?;
        let tokenizer = Tokenizer::from_json(&reader.blob(manifest.tokenizer.hash).await?)?;
        let weights: Vec<Vec<f32>> = snapshots.iter().zip(&structure.groups).map(|(snapshot, layout)| weights_of(snapshot, layout.len)).collect();
        write_with_tokenizer(out, &config.model, &weights, Some(&tokenizer))?;
        anyhow::Ok((config.run.name, version))
    })?;
    runtime.shutdown_background();
    println!("{model} at step {version} in {}", out.display());
    Ok(())
}

fn weights_of(snapshot: &Snapshot, len: usize) -> Vec<f32> {
    snapshot.bytes.as_chunks::<4>().0.iter().take(len).map(|bytes| f32::from_le_bytes(*bytes)).collect()
}

/// A model to predict with, on one thread, and its tokenizer.
fn load(folder: &Path) -> anyhow::Result<(Predictor, Tokenizer)> {
    device::ensure_environment(1).context("cannot set the environment for libtorch")?;
    let imported = huggingface::import(folder)?;
    let tokenizer = Tokenizer::load(&folder.join("tokenizer.json"))?;
    let _ = device::load_cuda();
    device::set_threads(1);
    let place = device::choose(device::DeviceChoice::Best)?;
    let predictor = Predictor::new(&imported.model, &imported.weights, imported.model.max_position_embeddings, place)?;
    Ok((predictor, tokenizer))
}

pub(crate) fn generate(args: &GenerateArgs) -> anyhow::Result<()> {
    let (predictor, tokenizer) = load(&args.model)?;
    let prompt = tokenizer.encode(&args.prompt)?;
    let sampling = Sampling { tokens: args.tokens, temperature: args.temperature, seed: args.seed, stop: None };
    let mut bar = Progress::new(args.tokens as u64, "{wide_bar} {pos}/{len} tokens");
    let mut done = 0;
    let added = continue_text(&predictor, &prompt, sampling, &mut |_| {
        done += 1;
        bar.at(done, "generating".to_owned());
    })?;
    bar.finish();
    println!("{}", tokenizer.decode(&[prompt, added].concat())?);
    Ok(())
}

pub(crate) fn eval(model: &Path, data: &Path, sequences: u64, json: bool) -> anyhow::Result<()> {
    let (predictor, tokenizer) = load(model)?;
    let store = open_matching(data, &tokenizer)?;
    let length = u32::try_from(predictor.context()).context("the context is too long")?;
    let windows = valid_sequences(&store, length, sequences)?.collect::<Result<Vec<_>, _>>()?;
    let mut bar = Progress::new(windows.len() as u64, "{wide_bar} {pos}/{len} sequences");
    let found = evaluate(&predictor, &windows, TOGETHER, &|_| 1, &mut |done| bar.at(done as u64, "measuring".to_owned()))?;
    bar.finish();
    // Bytes by the mean length of a held-out token: tokens need not be whole characters.
    let valid = &store.manifest().valid;
    let bytes_per_token = valid.text_bytes as f64 / valid.tokens() as f64;
    let bits_per_byte = found.nats_per_token / std::f64::consts::LN_2 / bytes_per_token;
    if json {
        println!("{}", serde_json::json!({ "loss": found.nats_per_token, "bits_per_byte": bits_per_byte, "tokens": found.tokens }));
    } else {
        println!("{:.4} nats a token, {bits_per_byte:.4} bits a byte over {} held-out tokens", found.nats_per_token, found.tokens);
    }
    Ok(())
}

/// The data set of the folder that was made with this tokenizer.
fn open_matching(data: &Path, tokenizer: &Tokenizer) -> anyhow::Result<Store> {
    let hash = Hash::of(&tokenizer.to_json());
    for name in skein_node::data::store::data_sets(data)? {
        let store = Store::open(data, name)?;
        if store.manifest().tokenizer.hash == hash {
            return Ok(store);
        }
    }
    anyhow::bail!("no data in {} was made with the model's tokenizer: build it with `skein-node data build --tokenizer MODEL/tokenizer.json`", data.display())
}
