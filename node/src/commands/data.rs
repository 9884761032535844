//! `data build` and `trigram`.

use std::path::{Path, PathBuf};

use skein_node::data::build::{BuildOptions, build as build_data};
use skein_node::data::store::Store;
use skein_node::data::tokenizer::TokenizerSpec;
use skein_node::data::trigram::yardstick;

use super::{Progress, read_config};

pub(crate) fn build(out: PathBuf, tokenizer: TokenizerSpec, train: Vec<PathBuf>, valid: Vec<PathBuf>, shard_tokens: u64, json: bool) -> anyhow::Result<()> {
    let options = BuildOptions { out: out.clone(), tokenizer, train, valid, shard_tokens };
    let mut bar = Progress::new(1, "{msg} {wide_bar} {bytes}/{total_bytes}");
    let manifest = build_data(&options, &mut |progress| {
        bar.total(progress.total);
        bar.at(progress.done, progress.doing.to_owned());
    })?;
    bar.finish();
    let (name, train, valid) = (
        manifest.name(),
        manifest.train.shards.iter().map(|shard| shard.tokens).sum::<u64>(),
        manifest.valid.shards.iter().map(|shard| shard.tokens).sum::<u64>(),
    );
    if json {
        println!("{}", serde_json::json!({ "manifest": name, "vocab_size": manifest.vocab_size, "train_tokens": train, "valid_tokens": valid }));
    } else {
        println!("{train} tokens to learn from, {valid} held out, vocabulary of {} in {}", manifest.vocab_size, out.display());
        println!("put this into run.toml:\n\n[data]\nmanifest = \"{name}\"");
    }
    Ok(())
}

pub(crate) fn trigram(data: &Path, run: Option<&Path>, json: bool) -> anyhow::Result<()> {
    let store = match run {
        Some(run) => Store::open(data, read_config(run)?.data.manifest)?,
        None => Store::open_only(data)?,
    };
    let found = yardstick(&store)?;
    if json {
        println!("{}", serde_json::json!({ "bits_per_byte": found.over_bytes, "bits_per_byte_over_tokens": found.over_tokens }));
    } else {
        println!("trigram over bytes: {:.3} bits a byte; over tokens: {:.3}", found.over_bytes, found.over_tokens);
    }
    Ok(())
}
