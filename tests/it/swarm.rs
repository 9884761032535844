//! Both machines in virtual time with the toy engine: every sample counts once, whatever dies.

use std::time::Duration;

use skein_node::engine::{Engine, Task, toy};
use skein_node::solo::solo;
use skein_protocol::config::RunConfig;
use skein_protocol::id::Version;
use skein_sim::fault::CrashPoint;
use skein_sim::world::{Ending, Plan, World, agreed_roots, node_id};

/// Virtual time within which every run of these tests must end.
const LIMIT: Duration = Duration::from_secs(300);
const STEPS: u64 = 6;

/// Two spans, tied head, four microbatches a step.
fn config(spans: usize, nodes_min: usize) -> RunConfig {
    let mut config = toy::config(4, true, 4, STEPS);
    config.placement.spans = spans;
    config.placement.nodes_min = nodes_min;
    config
}

fn finished(ending: &Ending, what: &str) {
    assert_eq!(ending.status.state, "finished", "{what}: {:?} events {:#?}", ending.status.waiting_for, ending.status.events);
    assert_eq!(ending.status.step, STEPS, "{what}");
    assert_eq!(ending.status.microbatches_lost, 0, "{what}");
    assert!(ending.failures.is_empty(), "{what}: {:?}", ending.failures);
    assert!(!agreed_roots(ending).is_empty(), "{what}");
}

#[test]
fn a_swarm_of_one_is_solo_bit_for_bit() {
    let config = config(0, 1);
    let ending = World::new(Plan::new(config.clone(), 1)).run(LIMIT);
    finished(&ending, "one node");
    let structure = toy::structure(&config);
    let mut engine = toy::engine(&config);
    engine.run(Task::Draw { groups: structure.group_ids().collect() });
    let mut losses = Vec::new();
    solo(&mut engine, &config, &structure, Version(0), STEPS, &mut |step| losses.push((step.step.0, step.loss))).expect("solo runs");
    assert_eq!(ending.losses, losses);
    let roots = &ending.roots[&node_id(0)];
    for group in structure.group_ids() {
        assert_eq!(Some(roots[&group].1), engine.state_root(group), "group {group}");
    }
}

#[test]
fn two_spans_by_two_replicas_train_and_agree() {
    let ending = World::new(Plan::new(config(2, 4), 4)).run(LIMIT);
    finished(&ending, "2 x 2");
    assert_eq!(ending.commits as u64, STEPS);
    assert_eq!(ending.status.microbatches_redone, 0.0);
    assert_eq!(ending.status.timeline, 1);
}

#[test]
fn the_same_plan_gives_the_same_trace() {
    let run = || World::new(Plan::new(config(2, 4), 4)).run(LIMIT).trace;
    assert_eq!(run(), run());
}
