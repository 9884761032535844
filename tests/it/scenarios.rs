//! Every scenario of `tests/scenarios`, under several seeds: each runs the interleaving that a rule of
//! the protocol prevents.

use std::collections::BTreeSet;
use std::path::PathBuf;

use skein_sim::scenario::Scenario;

/// Seeds of each: weights, samples and jitter differ.
const SEEDS: std::ops::Range<u64> = 1..6;

fn scenarios() -> Vec<(PathBuf, Scenario)> {
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("scenarios");
    let mut files: Vec<PathBuf> = std::fs::read_dir(folder).expect("it is there").map(|entry| entry.expect("readable").path()).collect();
    files.sort();
    let read = |path: PathBuf| {
        let text = std::fs::read_to_string(&path).expect("readable");
        let scenario = Scenario::from_toml(&text).unwrap_or_else(|problem| panic!("{}: {problem}", path.display()));
        (path, scenario)
    };
    files.into_iter().map(read).collect()
}

#[test]
fn every_scenario_ends_as_it_says() {
    for (path, scenario) in scenarios() {
        for seed in SEEDS {
            let mut scenario = scenario.clone();
            scenario.run.seed = seed;
            if let Err(problem) = scenario.run() {
                panic!("{} with seed {seed}: {problem}\nskein-sim run {} --seed {seed}", path.display(), path.display());
            }
        }
    }
}

/// Rules that no scenario can break, and where their tests are.
const ELSEWHERE: [(u8, &str); 8] = [
    (10, "node/src/engine/core/tests.rs: the owner applies what its encoding decodes to"),
    (11, "node/src/engine/core/tests.rs: sums over a fixed divisor"),
    (12, "protocol/src/config.rs: scalars of a commit"),
    (14, "node/src/optim/adamw.rs: bits of the optimizer; tests/it/swarm.rs: replicas agree"),
    (16, "coordinator/src/chain.rs: a chain that forks is refused"),
    (17, "node/src/limits: no queue of the host refuses a backward"),
    (19, "coordinator/src/leases.rs: a lease that brings nothing ends"),
    (23, "coordinator/src/store/tests.rs: one coordinator a store"),
];

#[test]
fn every_rule_has_a_test() {
    let mut rules: BTreeSet<u8> = scenarios().iter().flat_map(|(_, scenario)| scenario.rules.clone()).collect();
    rules.extend(ELSEWHERE.iter().map(|(rule, _)| rule));
    let missing: Vec<u8> = (1..=23).filter(|rule| !rules.contains(rule)).collect();
    assert!(missing.is_empty(), "rules without a scenario: {missing:?}");
}
