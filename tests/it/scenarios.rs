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

/// Rules that no scenario can break, and the test of each.
const ELSEWHERE: [(u8, &str, &str); 6] = [
    (10, "node/src/engine/core/tests.rs", "everyone_holds_the_decoded_bytes"),
    (11, "protocol/src/config.rs", "clipping_scales_to_the_norm"),
    (12, "protocol/src/config.rs", "clipping_scales_to_the_norm"),
    (14, "node/src/optim/adamw.rs", "the_result_is_pinned_to_the_bit"),
    (16, "coordinator/src/chain.rs", "only_what_extends_the_chain_is_adopted"),
    (23, "coordinator/src/store/tests.rs", "a_second_coordinator_is_refused"),
];

#[test]
fn every_rule_has_a_test() {
    let mut rules: BTreeSet<u8> = scenarios().iter().flat_map(|(_, scenario)| scenario.rules.clone()).collect();
    for (rule, file, test) in ELSEWHERE {
        let source = std::fs::read_to_string(PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("..").join(file)).expect("the file is there");
        assert!(source.contains(&format!("fn {test}()")), "{file} has no test {test}");
        rules.insert(rule);
    }
    let missing: Vec<u8> = (1..=23).filter(|rule| !rules.contains(rule)).collect();
    assert!(missing.is_empty(), "rules without a test: {missing:?}");
}
