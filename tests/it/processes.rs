//! The real programs with libtorch, as processes on loopback.

use skein_coordinator::status::Status;

use crate::cluster::{Cluster, output, read_json, run};

const STEPS: u64 = 20;

fn solo(cluster: &Cluster, more: &[&str]) -> Vec<f32> {
    let (run, data) = (cluster.shown("run.toml"), cluster.shown("data"));
    let printed = output("skein-node", &[&["solo", "--run", &run, "--data", &data, "--json"], more].concat());
    let answer: serde_json::Value = serde_json::from_str(printed.trim()).expect("JSON");
    answer["losses"].as_array().expect("losses").iter().map(|loss| loss.as_f64().expect("a number") as f32).collect()
}

fn losses(cluster: &Cluster) -> Vec<f32> {
    cluster.status().expect("it is up").losses.iter().map(|(_, loss)| *loss).collect()
}

#[test]
fn a_swarm_of_one_is_solo_bit_for_bit() {
    let mut cluster = Cluster::new(&format!("steps = {STEPS}"), "nodes_min = 1", "every_steps = 0");
    cluster.start_coordinator(false);
    cluster.start_node("a", &[]);
    cluster.until("the end", |status| status.state == "finished" && status.checkpoint == Some(STEPS));
    let alone = solo(&cluster, &["--out", &cluster.shown("solo")]);
    assert_eq!(alone.len() as u64, STEPS);
    assert_eq!(losses(&cluster), alone);
    output("skein-node", &["export", "--coordinator", &cluster.address(), "--out", &cluster.shown("model")]);
    let weights = |folder: &str| std::fs::read(cluster.path(folder).join("model.safetensors")).expect("exported");
    assert!(weights("model") == weights("solo"), "the weights differ");
}

/// What order alone does to each loss, over a few permutations of the microbatches.
fn spread(cluster: &Cluster, reference: &[f32]) -> Vec<f32> {
    let mut spread = vec![0f32; reference.len()];
    for seed in ["1", "2", "3", "4", "5", "6"] {
        for (widest, (loss, reference)) in spread.iter_mut().zip(solo(cluster, &["--order-seed", seed]).iter().zip(reference)) {
            *widest = widest.max((loss - reference).abs());
        }
    }
    spread
}

#[test]
fn two_spans_by_two_replicas_stay_with_solo_and_with_each_other() {
    let mut cluster = Cluster::new(&format!("steps = {STEPS}"), "nodes_min = 4\nspans = 2", "every_steps = 1\nkeep = 100");
    cluster.start_coordinator(false);
    for name in ["a", "b", "c", "d"] {
        cluster.start_node(name, &[]);
    }
    let status = cluster.until("the end", |status| status.state == "finished" && status.checkpoint == Some(STEPS));
    assert_eq!((status.microbatches_lost, status.microbatches_redone), (0, 0.0));
    let reference = solo(&cluster, &[]);
    let spread = spread(&cluster, &reference);
    // The spread of few permutations can be zero by chance where two sums round alike: nothing can be
    // told below two units in a loss's last place.
    for (step, ((loss, reference), spread)) in losses(&cluster).iter().zip(&reference).zip(&spread).enumerate() {
        let allowed = (3.0 * spread).max(2.0 * (reference.next_up() - reference));
        assert!((loss - reference).abs() <= allowed, "step {step}: {loss} beside {reference}, allowed {allowed}");
    }
    for version in 1..=STEPS {
        replicas_are_equal(&cluster, version);
    }
}

/// The roots of weights and optimizer state that nodes saved are equal for each group.
fn replicas_are_equal(cluster: &Cluster, version: u64) {
    let mut roots: std::collections::BTreeMap<String, Vec<String>> = std::collections::BTreeMap::new();
    for node in ["a", "b", "c", "d"] {
        let folder = cluster.path(node).join("checkpoints").join(format!("v{version:06}"));
        for entry in std::fs::read_dir(&folder).into_iter().flatten().flatten() {
            let name = entry.file_name().to_string_lossy().into_owned();
            if name.ends_with(".json") {
                let root = read_json(&entry.path()).expect("JSON")["manifest"]["root"].as_str().expect("a hash").to_owned();
                roots.entry(name).or_default().push(root);
            }
        }
    }
    assert_eq!(roots.len(), 6, "every group is saved");
    for (group, roots) in roots {
        assert_eq!(roots.len(), 2, "{group} of version {version} is saved twice");
        assert_eq!(roots[0], roots[1], "replicas of {group} differ at version {version}");
    }
}

#[test]
fn a_killed_node_costs_nothing_and_a_fresh_one_takes_its_place() {
    let mut cluster = Cluster::new("steps = 400", "nodes_min = 4\nspans = 2", "every_steps = 50");
    cluster.start_coordinator(false);
    for name in ["a", "b", "c", "d"] {
        cluster.start_node(name, &[]);
    }
    let known: Vec<String> = cluster.until("some steps", |status| status.step >= 20).nodes.into_iter().map(|node| node.node).collect();
    cluster.kill_node("b");
    cluster.start_node("e", &[]);
    let is_fresh_at_work = |status: &Status| status.nodes.iter().any(|node| node.state == "active" && !known.contains(&node.node));
    let status = cluster.until("the fresh node at work, or the end", |status| is_fresh_at_work(status) || status.state == "finished");
    assert!(status.state == "training", "the run was over before the fresh node was at work: {:?}", status.events);
    let status = cluster.until("the end", |status| status.state == "finished");
    assert_eq!((status.step, status.timeline, status.microbatches_lost), (400, 1, 0));
    assert!(losses(&cluster)[399] < losses(&cluster)[0]);
}

#[test]
fn a_killed_coordinator_loses_no_step_and_no_node_restarts() {
    let mut cluster = Cluster::new("steps = 100", "nodes_min = 2\nspans = 2", "every_steps = 0");
    cluster.start_coordinator(false);
    cluster.start_node("a", &[]);
    cluster.start_node("b", &[]);
    let before = cluster.until("some steps", |status| status.step >= 15).step;
    cluster.kill_coordinator();
    cluster.start_coordinator(true);
    let status = cluster.until("training again", |status| status.state == "training" && status.step > before);
    assert_eq!(status.timeline, 1, "nothing was gone back over");
    let status = cluster.until("the end", |status| status.state == "finished");
    assert_eq!((status.step, status.microbatches_lost), (100, 0));
    assert!(cluster.all_nodes_run());
    // The coordinator shows what was committed since it started: from the step it died in, without
    // a gap, and over the whole batch although half of it was counted before.
    let first = status.losses[0].0;
    assert!(first >= before, "step {first} was done again, {before} were committed");
    assert!(status.losses.iter().map(|(step, _)| *step).eq(first..100));
    let reference = solo(&cluster, &[]);
    for (step, loss) in &status.losses {
        let expected = reference[usize::try_from(*step).expect("small")];
        assert!((loss - expected).abs() < 1e-4, "step {step}: {loss} beside {expected}");
    }
}

#[test]
fn a_stopped_run_goes_on_from_its_checkpoint() {
    let mut cluster = Cluster::new("steps = 60", "nodes_min = 2\nspans = 1", "every_steps = 0");
    cluster.start_coordinator(false);
    cluster.start_node("a", &[]);
    cluster.start_node("b", &[]);
    let seen = cluster.until("some steps", |status| status.step >= 10).step;
    cluster.stop_coordinator();
    cluster.stop_nodes();
    cluster.start_coordinator(true);
    cluster.start_node("a", &[]);
    cluster.start_node("b", &[]);
    let status = cluster.until("the end", |status| status.state == "finished" && status.checkpoint == Some(60));
    assert_eq!((status.step, status.timeline), (60, 2));
    let first = status.losses.first().expect("steps were done").0;
    assert!(first >= seen, "went on at step {first}, had seen {seen}");
}

#[test]
fn a_corrupt_shard_is_named_and_another_copy_is_used() {
    let mut cluster = Cluster::new("steps = 40", "nodes_min = 2\nspans = 1", "every_steps = 10");
    cluster.start_coordinator(false);
    cluster.start_node("a", &[]);
    cluster.start_node("b", &[]);
    cluster.until("a checkpoint", |status| status.checkpoint.is_some_and(|version| version >= 10));
    cluster.stop_coordinator();
    cluster.stop_nodes();
    let checkpoints = cluster.path("a").join("checkpoints");
    let newest = std::fs::read_dir(&checkpoints).expect("saved").flatten().map(|entry| entry.path()).max().expect("a version");
    let version: u64 =
        newest.file_name().and_then(|name| name.to_str()).and_then(|name| name.strip_prefix('v')).and_then(|name| name.parse().ok()).expect("a version");
    let shard = newest.join("g0001.safetensors");
    let mut bytes = std::fs::read(&shard).expect("saved");
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    std::fs::write(&shard, bytes).expect("written");
    cluster.start_coordinator(true);
    cluster.start_node("a", &[]);
    cluster.start_node("b", &[]);
    let status = cluster.until("the end", |status| status.state == "finished");
    assert_eq!((status.step, status.timeline), (40, 2));
    assert_eq!(status.losses.first().map(|(step, _)| *step), Some(version), "the newest checkpoint is used, from the other's disk");
    assert!(cluster.log("a").contains("g0001.safetensors"), "the file is named: {}", cluster.log("a"));
}

#[test]
fn an_imported_model_is_version_0() {
    let mut cluster = Cluster::new("steps = 5\nseed = 1", "nodes_min = 1", "every_steps = 0");
    let drawn = solo(&cluster, &[]);
    let model = cluster.shown("untrained");
    output("skein-node", &["init", "--run", &cluster.shown("run.toml"), "--out", &model]);
    let printed = output("skein-node", &["import", "--model", &model, "--state", &cluster.shown("a")]);
    let import = printed.lines().find(|line| line.starts_with("import = ")).expect("the hash is printed");
    cluster.edit_run("[batch]", &format!("{import}\n[batch]"));
    // The same weights and the same samples, whether drawn or brought along.
    assert_eq!(solo(&cluster, &["--model", &model]), drawn);
    // With another seed both the samples and what would be drawn are others.
    cluster.edit_run("seed = 1", "seed = 2");
    let other = solo(&cluster, &["--model", &model]);
    assert_ne!(other, drawn);
    cluster.start_coordinator(false);
    cluster.start_node("b", &[]);
    cluster.until("a wait for the model", |status| status.waiting_for.as_deref().is_some_and(|why| why.contains("imported model")));
    cluster.start_node("a", &[]);
    cluster.until("the end", |status| status.state == "finished");
    let got = losses(&cluster);
    assert_eq!(got[0], other[0], "the first loss is that of the imported weights");
    assert!(got.iter().zip(&other).all(|(got, other)| (got - other).abs() < 1e-3), "{got:?} beside {other:?}");
    // The folder is checked against what run.toml names.
    output("skein-node", &["init", "--run", &cluster.shown("run.toml"), "--out", &cluster.shown("another")]);
    let wrong = run("skein-node", &["solo", "--run", &cluster.shown("run.toml"), "--data", &cluster.shown("data"), "--model", &cluster.shown("another")]);
    let said = String::from_utf8_lossy(&wrong.stderr);
    assert!(!wrong.status.success() && said.contains("is not the model that run.toml imports"), "{said}");
}

#[test]
fn a_model_that_knows_fewer_tokens_than_the_data_is_refused_in_one_line() {
    let cluster = Cluster::new("steps = 5", "nodes_min = 1", "every_steps = 0");
    cluster.edit_run("vocab_size = 256", "vocab_size = 255");
    let refused = run("skein-node", &["solo", "--run", &cluster.shown("run.toml"), "--data", &cluster.shown("data")]);
    let said = String::from_utf8_lossy(&refused.stderr);
    assert!(!refused.status.success() && said.lines().count() == 1 && said.contains("model.vocab_size is 255"), "{said}");
}

#[test]
fn a_model_that_fits_nobody_says_by_how_much_and_starts_when_it_fits() {
    let mut cluster = Cluster::new("steps = 5", "nodes_min = 1", "every_steps = 0");
    cluster.start_coordinator(false);
    cluster.start_node("small", &["--memory-limit", "100KiB"]);
    let waiting = cluster.until("a complaint", |status| status.waiting_for.as_deref().is_some_and(|why| why.contains("no host for blocks")));
    let why = waiting.waiting_for.expect("checked");
    assert!(why.contains("needed") && why.contains("KiB"), "{why}");
    cluster.start_node("large", &[]);
    cluster.until("the end", |status| status.state == "finished");
}

#[test]
fn two_nodes_do_not_share_a_folder_and_a_lone_one_keeps_trying() {
    let mut cluster = Cluster::new("steps = 5", "nodes_min = 2", "every_steps = 0");
    cluster.start_coordinator(false);
    cluster.start_node("a", &[]);
    cluster.until("the node", |status| status.nodes.len() == 1);
    let second = run("skein-node", &["start", "--coordinator", &cluster.address(), "--state", &cluster.shown("a")]);
    let said = String::from_utf8_lossy(&second.stderr);
    assert!(!second.status.success() && said.contains("in use by another node"), "{said}");
    let other = run(
        "skein-coordinator",
        &["start", "--run", &cluster.shown("run.toml"), "--state", &cluster.shown("coordinator"), "--listen", "127.0.0.1:0", "--resume"],
    );
    let said = String::from_utf8_lossy(&other.stderr);
    assert!(!other.status.success() && said.lines().count() == 1 && said.contains("in use by another coordinator"), "{said}");
    cluster.kill_coordinator();
    crate::cluster::wait_for("the node to say so", || cluster.log("a").contains("trying again").then_some(()));
    cluster.stop_nodes();
}
