//! `solo`.

#![expect(clippy::disallowed_methods, reason = "it reports tokens a second")]

use std::path::Path;
use std::time::Instant;

use anyhow::Context;
use skein_node::data::sampler::Sampler;
use skein_node::data::store::Store;
use skein_node::engine::core::Core;
use skein_node::engine::torch::{Torch, device};
use skein_node::engine::{Engine, Outcome, Snapshot, Task};
use skein_node::huggingface;
use skein_node::solo::solo_step_in_order;
use skein_protocol::config::RunConfig;
use skein_protocol::id::{Group, Hash, Microbatch, Step};

use super::{Progress, read_config};
use crate::settings::SoloArgs;

pub(crate) fn solo(args: &SoloArgs) -> anyhow::Result<()> {
    device::ensure_environment(args.threads).context("cannot set the environment for libtorch")?;
    let config = read_config(&args.run)?;
    let steps = args.steps.unwrap_or(config.run.steps);
    let store = Store::open(&args.data, config.data.manifest)?;
    let sampler = Sampler::new(&store, config.model.vocab_size, config.run.seed, config.batch)?;
    let _ = device::load_cuda();
    let place = device::choose(args.device)?;
    device::set_threads(args.threads);
    let structure = config.structure();
    let mut engine = Core::new(Torch::new(&config, Box::new(sampler), place)?, &config, structure.clone());
    let groups: Vec<Group> = structure.group_ids().collect();
    for task in beginning(&config, args.model.as_deref())? {
        if let Outcome::Failed { error, .. } = engine.run(task) {
            anyhow::bail!("{error}");
        }
    }
    let mut bar = Progress::new(steps, "{wide_bar} step {pos}/{len} {msg} {eta}");
    let mut losses: Vec<f32> = Vec::new();
    let mut seconds: Vec<f64> = Vec::new();
    for step in (0..steps).map(Step) {
        let begun = Instant::now();
        let done = solo_step_in_order(&mut engine, &config, &structure, step, order(&config, step, args.order_seed))?;
        seconds.push(begun.elapsed().as_secs_f64());
        losses.push(done.loss);
        let rate = config.batch.tokens_per_step() as f64 / seconds.last().copied().unwrap_or(1.0);
        bar.at(step.0 + 1, format!("loss {:.4}, {rate:.0} tokens/s", done.loss));
    }
    bar.finish();
    if let Some(out) = &args.out {
        let weights = groups.iter().map(|group| engine.weights(*group).unwrap_or_default().to_vec()).collect();
        super::model::write_model(out, &config.model, weights, Some(&store))?;
    }
    let total: f64 = seconds.iter().sum();
    let rate = config.batch.tokens_per_step() as f64 * steps as f64 / total.max(1e-9);
    let (first, last) = (losses.first().copied().unwrap_or(f32::NAN), losses.last().copied().unwrap_or(f32::NAN));
    if args.json {
        println!(
            "{}",
            serde_json::json!({ "steps": steps, "first_loss": first, "final_loss": last, "tokens_per_second": rate, "seconds": total, "losses": losses, "step_seconds": seconds })
        );
    } else {
        println!("{steps} steps, loss {first:.4} to {last:.4}, {rate:.0} tokens/s");
    }
    Ok(())
}

/// What gives the engine version 0: drawn, or imported as in a swarm.
fn beginning(config: &RunConfig, model: Option<&Path>) -> anyhow::Result<Vec<Task>> {
    match (config.data.import, model) {
        (None, None) => Ok(vec![Task::Draw { groups: config.structure().group_ids().collect() }]),
        (None, Some(_)) => anyhow::bail!("--model: run.toml imports no model; put what `skein-node import` prints into it"),
        (Some(_), None) => anyhow::bail!("run.toml imports a model: name its folder with --model"),
        (Some(wanted), Some(folder)) => {
            let snapshots = super::model::version_0(&huggingface::import(folder)?)?;
            let roots: Vec<Hash> = snapshots.iter().map(Snapshot::root).collect();
            anyhow::ensure!(
                Hash::root(&roots) == wanted,
                "{} is not the model that run.toml imports: `skein-node import` prints which it is",
                folder.display()
            );
            Ok(snapshots.into_iter().map(|snapshot| Task::Install { snapshot }).collect())
        }
    }
}

/// The step's microbatches by index, or shuffled by a seed.
fn order(config: &RunConfig, step: Step, seed: Option<u64>) -> Vec<Microbatch> {
    let mut order: Vec<Microbatch> = (0..config.batch.microbatches).map(Microbatch).collect();
    if let Some(seed) = seed {
        let place = |microbatch: &Microbatch| Hash::of(&[seed.to_le_bytes(), step.0.to_le_bytes(), u64::from(microbatch.0).to_le_bytes()].concat());
        order.sort_by_cached_key(place);
    }
    order
}
