//! `skein-sim run` and `replay`: drawn schedules of faults in virtual time.

use std::path::{Path, PathBuf};

use clap::Args;

use crate::judge::{judge, shortest_failing_prefix};
use crate::plan::Ending;
use crate::scenario::Scenario;
use crate::schedule::draw;

/// `skein-sim run`
#[derive(Debug, Args)]
pub struct RunArgs {
    /// A run written down; without one runs are drawn, model, nodes and faults
    #[arg(value_name = "SCENARIO")]
    scenario: Option<PathBuf>,
    /// The first seed; a scenario's own if none is given
    #[arg(long)]
    seed: Option<u64>,
    /// How many seeds
    #[arg(long, default_value_t = 1)]
    seeds: u64,
    /// Faults of each drawn schedule
    #[arg(long, default_value_t = 20, conflicts_with = "scenario")]
    faults: usize,
}

/// `skein-sim replay`
#[derive(Debug, Args)]
pub struct ReplayArgs {
    /// The seed
    #[arg(long)]
    seed: u64,
    /// Only so many of its first faults
    #[arg(long, default_value_t = 20)]
    faults: usize,
}

/// What schedules came to.
#[derive(Debug, Default)]
pub struct Summary {
    seeds: u64,
    struck: usize,
    commits: usize,
    redone: f64,
}

impl Summary {
    fn add(&mut self, ending: &Ending) {
        self.seeds += 1;
        self.struck += ending.faults_struck;
        self.commits += ending.commits;
        self.redone += ending.status.microbatches_redone;
    }
}

impl std::fmt::Display for Summary {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { seeds, struck, commits, redone } = self;
        writeln!(
            f,
            "{seeds} schedules: {struck} faults struck, {commits} commits, {redone:.1} microbatches redone; nothing lost, nothing counted twice, all weights as undisturbed"
        )
    }
}

/// Runs seeds until one fails.
///
/// # Errors
/// The first failing seed, how, and how to see it again.
pub fn run(args: &RunArgs) -> Result<String, String> {
    if let Some(path) = &args.scenario {
        return run_scenario(path, args);
    }
    let mut summary = Summary::default();
    let first = args.seed.unwrap_or_default();
    for seed in first..first.saturating_add(args.seeds) {
        let plan = draw(seed, args.faults);
        match judge(&plan) {
            Ok(ending) => summary.add(&ending),
            Err(problem) => {
                let (count, how) = shortest_failing_prefix(&plan).unwrap_or((args.faults, problem));
                return Err(format!("seed {seed} fails with its first {count} faults: {how}; see skein-sim replay --seed {seed} --faults {count}"));
            }
        }
    }
    Ok(summary.to_string())
}

/// Runs a scenario under one seed after the other.
fn run_scenario(path: &Path, args: &RunArgs) -> Result<String, String> {
    let text = std::fs::read_to_string(path).map_err(|error| format!("{}: {error}", path.display()))?;
    let mut scenario = Scenario::from_toml(&text).map_err(|problem| format!("{}: {problem}", path.display()))?;
    let first = args.seed.unwrap_or(scenario.run.seed);
    let mut summary = Summary::default();
    for seed in first..first.saturating_add(args.seeds) {
        scenario.run.seed = seed;
        let ending = scenario.run().map_err(|problem| format!("{} with seed {seed}: {problem}", path.display()))?;
        summary.add(&ending);
    }
    Ok(format!("{}: {summary}", scenario.title))
}

/// Runs one seed; everything that happens goes to the log.
///
/// # Errors
/// How it fails.
pub fn replay(args: &ReplayArgs) -> Result<String, String> {
    let mut plan = draw(args.seed, args.faults.max(20));
    plan.faults.truncate(args.faults);
    let described = format!("{plan:#?}\n");
    let ending = judge(&plan).map_err(|problem| format!("{described}{problem}"))?;
    Ok(format!("{described}trace {} after {:.3} s\n", ending.trace, ending.time.as_secs_f64()))
}
