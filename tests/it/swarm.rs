//! Both machines in virtual time with the toy engine: every sample counts once, whatever dies.

use std::time::Duration;

use skein_node::engine::{Engine, Task, toy};
use skein_node::solo::solo;
use skein_protocol::config::{Mode, RunConfig};
use skein_protocol::id::Version;
use skein_sim::fault::CrashPoint;
use skein_sim::judge::judge;
use skein_sim::plan::{Ending, Plan, agreed_roots};
use skein_sim::schedule::{Fault, Planned, When};
use skein_sim::world::{World, node_id};

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

/// Five nodes: four from the start, one that joins in the middle of the run; one of the four leaves.
fn eventful(leaves: bool) -> Plan {
    let mut plan = Plan::new(config(2, 4), 5);
    plan.joiner = Some(Duration::from_millis(150));
    plan.leaver = leaves.then_some((1, Duration::from_millis(200)));
    plan
}

/// Kills whoever reaches `point` for the n-th time, for every n that an undisturbed run has, in each
/// mode, and demands that the run ends with everything counted once.
fn dies_at(point: CrashPoint, returns: Option<Duration>) {
    for mode in [Mode::Sync, Mode::Exact] {
        let mut plan = eventful(point == CrashPoint::Draining);
        plan.config.run.mode = mode;
        let undisturbed = World::new(plan.clone()).run(LIMIT);
        finished(&undisturbed, "undisturbed");
        let hits = undisturbed.reached.get(&point).copied().unwrap_or_default();
        assert!(hits > 0, "{point:?} is never reached: the test shows nothing");
        for nth in 0..hits {
            let what = format!("{point:?} {nth} returns {returns:?} {mode:?}");
            // In mode exact the weights must be those of an undisturbed process.
            let plan = Plan { node_dies: Some((point, nth)), node_returns: returns, ..plan.clone() };
            let ending = judge(&plan).unwrap_or_else(|problem| panic!("{what}: {problem}"));
            assert!(ending.killed, "{what} was not reached");
            assert_ne!(ending.trace, undisturbed.trace, "{what} changed nothing");
            finished(&ending, &what);
        }
    }
}

macro_rules! crash_points {
    ($($name:ident $point:ident),+ $(,)?) => {
        mod a_node_that_dies {
            use super::*;

            $(
                #[test]
                fn $name() {
                    dies_at(CrashPoint::$point, None);
                    dies_at(CrashPoint::$point, Some(Duration::from_millis(700)));
                }
            )+

            #[test]
            fn at_each_point_is_tested() {
                let tested = [$(CrashPoint::$point),+];
                assert_eq!(tested, CrashPoint::ALL);
            }
        }
    };
}

crash_points! {
    in_the_handshake Handshake,
    before_it_accepts BeforeAccept,
    mid_forward MidForward,
    after_activations AfterActivations,
    mid_backward MidBackward,
    after_the_gradient AfterGradientBeforeDone,
    after_done AfterDoneBeforeCounted,
    after_counted AfterCountedBeforeAdd,
    mid_reduce_scatter MidReduceScatter,
    mid_all_gather MidAllGather,
    after_its_digest AfterDigestBeforeCommit,
    after_the_commit AfterCommitBeforeApply,
    after_applying AfterApplyBeforeRetire,
    as_a_donor DonorMidSnapshot,
    as_a_joiner JoinerMidCatchup,
    as_a_feeder FeederWithLeases,
    while_draining Draining,
    while_saving WritingCheckpoint,
}

#[test]
fn the_coordinator_may_die_at_every_operation_of_its_log() {
    let undisturbed = World::new(eventful(false)).run(LIMIT);
    for operation in 0..undisturbed.log_operations {
        for durable in [false, true] {
            let plan = Plan { coordinator_dies_at: Some((operation, durable)), ..eventful(false) };
            let ending = World::new(plan).run(LIMIT);
            assert!(ending.killed);
            finished(&ending, &format!("operation {operation}, durable {durable}"));
            assert_eq!(ending.commits as u64, STEPS, "no committed step is lost or done again (operation {operation}, durable {durable})");
            for (step, loss) in &ending.losses {
                let expected = undisturbed.losses.iter().find(|(of, _)| of == step).expect("the same steps").1;
                assert!((loss - expected).abs() < 1e-4, "step {step} shows {loss}, not {expected} (operation {operation}, durable {durable})");
            }
        }
    }
}

#[test]
fn everything_may_die_at_once_and_goes_on_from_the_disks() {
    let plan = Plan { blackout: Some(Duration::from_millis(500)), ..eventful(false) };
    let ending = World::new(plan).run(LIMIT);
    finished(&ending, "blackout");
    assert_eq!(ending.status.timeline, 2, "the run went back to a checkpoint");
}

#[test]
fn who_leaves_gracefully_costs_no_work() {
    let ending = World::new(eventful(true)).run(LIMIT);
    finished(&ending, "a leaver");
    assert_eq!(ending.status.microbatches_redone, 0.0);
}

#[test]
fn a_run_that_diverged_stands_still_and_names_the_last_good_checkpoint() {
    let mut plan = Plan::new(config(2, 4), 4);
    let diverges = |node| Planned { when: When::At(Duration::from_millis(400)), fault: Fault::NotFinite { node, times: u32::MAX } };
    plan.faults = (0..4).map(diverges).collect();
    let ending = World::new(plan).run(LIMIT);
    assert_eq!(ending.status.state, "paused", "{:#?}", ending.status.events);
    let why = ending.status.waiting_for.expect("it says why");
    let checkpoint = ending.status.checkpoint.expect("there was one before");
    assert!(why.contains("diverged") && why.contains(&format!("the last checkpoint is of version {checkpoint}")), "{why}");
    assert!(ending.failures.is_empty(), "nobody is blamed: {:?}", ending.failures);
}
