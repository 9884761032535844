//! `skein-sim run` and `replay`: drawn schedules of faults in virtual time.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::Args;
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use serde::Serialize;
use skein_protocol::id::Hash;

use crate::fault::CrashPoint;
use crate::judge::{LIMIT, Violation, judge, shortest_failing_prefix};
use crate::plan::{Ending, Plan};
use crate::scenario::Scenario;
use crate::schedule::{Fault, Planned, When, draw};
use crate::world::World;

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
    #[arg(long, default_value_t = 60, conflicts_with = "scenario")]
    faults: usize,
    /// Run all seeds whatever fails, and print one line of JSON
    #[arg(long, conflicts_with = "scenario")]
    json: bool,
    /// Of so many schedules count the faults that changed what happened (costs a run for each fault)
    #[arg(long, value_name = "N", default_value_t = 0, conflicts_with = "scenario")]
    changed: u64,
}

/// `skein-sim replay`
#[derive(Debug, Args)]
pub struct ReplayArgs {
    /// The seed
    #[arg(long)]
    seed: u64,
    /// Only so many of its first faults
    #[arg(long, default_value_t = 60)]
    faults: usize,
}

/// What schedules came to.
#[derive(Debug, Default, Serialize)]
pub struct Summary {
    /// Schedules that ended as they must.
    schedules: u64,
    /// Faults that found somebody to strike.
    faults_struck: usize,
    /// Of the schedules looked at with `--changed`: their faults, and those without which the run
    /// would have gone otherwise.
    faults_looked_at: usize,
    faults_that_changed_the_trace: usize,
    commits: usize,
    microbatches_redone: f64,
    microbatches_lost: u64,
    /// How often each crash point was reached.
    reached: BTreeMap<CrashPoint, usize>,
    /// Violations by oracle, and the seeds that have them.
    assertions: usize,
    mismatches: usize,
    hangs: usize,
    blamed: usize,
    failing_seeds: Vec<u64>,
    seconds: f64,
}

impl Summary {
    fn add(&mut self, ending: &Ending) {
        self.schedules += 1;
        self.faults_struck += ending.faults_struck;
        self.commits += ending.commits;
        self.microbatches_redone += ending.status.microbatches_redone;
        self.microbatches_lost += ending.status.microbatches_lost;
        for (point, times) in &ending.reached {
            *self.reached.entry(*point).or_default() += times;
        }
    }

    fn fail(&mut self, seed: u64, violation: &Violation) {
        self.failing_seeds.push(seed);
        let count = match violation {
            Violation::Assertion(_) => &mut self.assertions,
            Violation::Weights(_) => &mut self.mismatches,
            Violation::Hang(_) => &mut self.hangs,
            Violation::Blame(_) => &mut self.blamed,
        };
        *count += 1;
    }
}

impl std::fmt::Display for Summary {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { schedules, faults_struck, commits, microbatches_redone, .. } = self;
        writeln!(
            f,
            "{schedules} schedules: {faults_struck} faults struck, {commits} commits, {microbatches_redone:.1} microbatches redone; \
             nothing lost, nothing counted twice, all weights as undisturbed"
        )
    }
}

/// Runs seeds until one fails, or all of them for `--json`.
///
/// # Errors
/// The first failing seed, how, and how to see it again.
#[expect(clippy::disallowed_methods, reason = "it reports how long it took")]
pub fn run(args: &RunArgs) -> Result<String, String> {
    if let Some(path) = &args.scenario {
        return run_scenario(path, args);
    }
    let begun = std::time::Instant::now();
    let mut summary = Summary::default();
    let first = args.seed.unwrap_or_default();
    for seed in first..first.saturating_add(args.seeds) {
        let plan = draw(seed, args.faults).plan();
        match judge(&plan) {
            Ok(ending) => summary.add(&ending),
            Err(violation) if args.json => summary.fail(seed, &violation),
            Err(violation) => {
                let (count, how) = shortest_failing_prefix(&plan).unwrap_or((args.faults, violation));
                return Err(format!("seed {seed} fails with its first {count} faults: {how}; see skein-sim replay --seed {seed} --faults {count}"));
            }
        }
        if seed - first < args.changed {
            summary.faults_looked_at += plan.faults.len();
            summary.faults_that_changed_the_trace += faults_that_changed(&plan);
        }
    }
    summary.seconds = begun.elapsed().as_secs_f64();
    if args.json { serde_json::to_string(&summary).map(|text| text + "\n").map_err(|error| error.to_string()) } else { Ok(summary.to_string()) }
}

/// How many faults of a plan make its run another than it is with only those before them.
fn faults_that_changed(plan: &Plan) -> usize {
    let traces: Vec<Hash> =
        (0..=plan.faults.len()).map(|count| World::new(Plan { faults: plan.faults[..count].to_vec(), ..plan.clone() }).run(LIMIT).trace).collect();
    traces.windows(2).filter(|pair| pair[0] != pair[1]).count()
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

/// Runs one seed; everything that happens goes to the log. What was drawn is printed as a scenario.
///
/// # Errors
/// How it fails.
pub fn replay(args: &ReplayArgs) -> Result<String, String> {
    let mut scenario = draw(args.seed, args.faults.max(20));
    scenario.faults.truncate(args.faults);
    let described = toml::to_string(&scenario).map_err(|error| error.to_string())?;
    let ending = judge(&scenario.plan()).map_err(|problem| format!("{problem}\n{described}"))?;
    Ok(format!("{described}# trace {} after {:.3} s\n", ending.trace, ending.time.as_secs_f64()))
}

/// `skein-sim recovery`
#[derive(Debug, Args)]
pub struct RecoveryArgs {
    /// How often each kind of loss is tried
    #[arg(long, default_value_t = 600)]
    samples: usize,
}

/// How long work waited that was in the hands of a lost node, and what had to be done again.
#[derive(Debug, Serialize)]
struct Recovery {
    kind: &'static str,
    samples: usize,
    median_seconds: f64,
    max_seconds: f64,
    redone_max: f64,
}

/// Makes the loss of a node that lasts so long.
type MakeFault = fn(usize, Duration) -> Fault;

/// Loses one of four nodes, two spans by two replicas, at a drawn moment, again and again.
///
/// # Errors
/// If a run does not end as it must.
pub fn recovery(args: &RecoveryArgs) -> Result<String, String> {
    let lasts = Duration::from_secs(40);
    let kinds: [(&str, MakeFault); 4] = [
        ("kill", |node, _| Fault::Kill { node, returns: Duration::from_secs(2), wiped: false }),
        ("blackhole", |node, lasts| Fault::Blackhole { node, lasts }),
        ("stop", |node, lasts| Fault::Stop { node, lasts }),
        ("hang", |node, lasts| Fault::Hang { node, lasts }),
    ];
    let mut found = Vec::new();
    for (kind, make) in kinds {
        let (mut waits, mut redone) = (Vec::new(), 0f64);
        let mut random = ChaCha8Rng::seed_from_u64(1);
        while waits.len() < args.samples {
            let fault = make(random.random_range(0..4), lasts);
            let at = Duration::from_micros(random.random_range(150_000..600_000));
            let mut scenario = Scenario { faults: vec![Planned { when: When::At(at), fault }], ..Scenario::default() };
            (scenario.run.seed, scenario.run.microbatches, scenario.nodes.jitter) = (random.random(), 8, 0.001);
            let ending = judge(&scenario.plan()).map_err(|problem| format!("{kind}: {problem}"))?;
            waits.extend(ending.taken_over.first().map(Duration::as_secs_f64));
            redone = redone.max(ending.status.microbatches_redone);
        }
        waits.sort_by(f64::total_cmp);
        let (median_seconds, max_seconds) = (waits[waits.len() / 2], waits[waits.len() - 1]);
        found.push(Recovery { kind, samples: waits.len(), median_seconds, max_seconds, redone_max: redone });
    }
    serde_json::to_string(&found).map(|text| text + "\n").map_err(|error| error.to_string())
}
