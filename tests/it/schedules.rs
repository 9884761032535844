//! Thousands of drawn schedules of faults: whatever dies, the weights at the end are those of one
//! undisturbed process, bit for bit. What a seed found stays as a scenario (`tests/scenarios/found-*`): when
//! faults are added, seeds mean other schedules.

use skein_sim::judge::{judge, shortest_failing_prefix};
use skein_sim::schedule::draw;

/// Faults of each schedule.
const FAULTS: usize = 60;
/// Seeds of each of the tests below.
const SEEDS: u64 = 500;

fn seeds(first: u64) {
    let mut struck = 0;
    for seed in first * SEEDS..(first + 1) * SEEDS {
        let scenario = draw(seed, FAULTS);
        let plan = scenario.plan();
        match judge(&plan) {
            Ok(ending) => struck += ending.faults_struck,
            Err(problem) => {
                let (count, how) = shortest_failing_prefix(&plan).unwrap_or((FAULTS, problem));
                panic!("seed {seed} with its first {count} faults: {how}\nskein-sim replay --seed {seed} --faults {count}\n{scenario:#?}");
            }
        }
    }
    assert!(struck > 0, "no fault found anybody to strike: the test shows nothing");
}

macro_rules! blocks_of_seeds {
    ($($name:ident $first:literal),+ $(,)?) => { $(#[test] fn $name() { seeds($first); })+ };
}

blocks_of_seeds! {
    seeds_0 0, seeds_1 1, seeds_2 2, seeds_3 3, seeds_4 4,
    seeds_5 5, seeds_6 6, seeds_7 7, seeds_8 8, seeds_9 9,
    seeds_10 10, seeds_11 11, seeds_12 12, seeds_13 13, seeds_14 14,
    seeds_15 15, seeds_16 16, seeds_17 17, seeds_18 18, seeds_19 19,
}

#[test]
fn a_seed_is_a_whole_bug_report() {
    let run = || judge(&draw(4, FAULTS).plan()).expect("it ends well").trace;
    assert_eq!(run(), run());
}
