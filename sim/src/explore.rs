//! `skein-sim run` and `replay`: drawn schedules of faults in virtual time.

use clap::Args;

use crate::judge::{judge, shortest_failing_prefix};
use crate::schedule::draw;

/// `skein-sim run`
#[derive(Debug, Args)]
pub struct RunArgs {
    /// The first seed
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// How many seeds
    #[arg(long, default_value_t = 1)]
    seeds: u64,
    /// Faults of each schedule
    #[arg(long, default_value_t = 20)]
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

/// Runs seeds until one fails.
///
/// # Errors
/// The first failing seed, how, and how to see it again.
pub fn run(args: &RunArgs) -> Result<String, String> {
    let mut summary = Summary::default();
    for seed in args.seed..args.seed.saturating_add(args.seeds) {
        let plan = draw(seed, args.faults);
        match judge(&plan) {
            Ok(ending) => {
                summary.seeds += 1;
                summary.struck += ending.faults_struck;
                summary.commits += ending.commits;
                summary.redone += ending.status.microbatches_redone;
            }
            Err(problem) => {
                let (count, how) = shortest_failing_prefix(&plan).unwrap_or((args.faults, problem));
                return Err(format!("seed {seed} fails with its first {count} faults: {how}; see skein-sim replay --seed {seed} --faults {count}"));
            }
        }
    }
    Ok(format!(
        "{} schedules: {} faults struck, {} commits, {:.1} microbatches redone; nothing lost, nothing counted twice, all weights as undisturbed\n",
        summary.seeds, summary.struck, summary.commits, summary.redone
    ))
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
