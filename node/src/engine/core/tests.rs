//! The rules that hold for every engine, on the toy model.

use bytes::Bytes;
use skein_protocol::id::ReduceAttempt;
use skein_protocol::message::control::Scalars;

use super::*;
use crate::engine::toy::{self, Toy};
use crate::engine::{Part, WorkKey};

const WHOLE: Span = Span { first: skein_protocol::id::Block(0), end: skein_protocol::id::Block(4) };

fn config() -> RunConfig {
    toy::config(2, true, 4, 10)
}

/// An engine with version 0 of every group.
fn drawn() -> Core<Toy> {
    let mut core = toy::engine(&config());
    let groups = core.structure().group_ids().collect();
    finished(core.run(Task::Draw { groups }));
    core
}

fn finished(outcome: Outcome) {
    assert!(matches!(outcome, Outcome::Finished), "{outcome:?}");
}

fn error(outcome: Outcome) -> EngineError {
    let Outcome::Failed { error, .. } = outcome else { panic!("{outcome:?} instead of a failure") };
    error
}

/// What a sum of mode `sync` holds.
fn floats(sum: &Sum) -> &[f32] {
    match &sum.values {
        sums::Values::Float(values) => values,
        sums::Values::Fixed(_) => panic!("a sum in fixed point"),
    }
}

fn work(microbatch: u32) -> WorkKey {
    WorkKey { step: Step(0), microbatch: Microbatch(microbatch), span: WHOLE }
}

fn id(count: u64) -> SumId {
    SumId { boot: 1, count }
}

fn reduction(group: u16, attempt: u32) -> ReductionKey {
    ReductionKey { step: Step(0), group: Group(group), attempt: ReduceAttempt(attempt) }
}

fn forward(core: &mut Core<Toy>, key: WorkKey, keep_graph: bool) -> Outcome {
    core.run(Task::Forward { key, input: None, encode: Codec::None, keep_graph })
}

fn backward(core: &mut Core<Toy>, key: WorkKey) -> Outcome {
    core.run(Task::Backward { key, input: None, gradient: None, encode: Some(Codec::None) })
}

/// Each use into the sum numbered like its group, plus `offset`.
fn every_use(core: &Core<Toy>, offset: u64) -> Vec<(Use, SumId)> {
    (0..core.structure().uses.len()).map(|one| Use(one as u16)).map(|one| (one, id(offset + u64::from(core.structure().group_of(one).0)))).collect()
}

/// Computes microbatches and adds them to sums numbered like their groups, plus `offset`.
fn compute(core: &mut Core<Toy>, microbatches: &[u32], offset: u64) {
    for microbatch in microbatches {
        forward(core, work(*microbatch), true);
        assert!(matches!(backward(core, work(*microbatch)), Outcome::Backwarded { .. }));
        let sums = every_use(core, offset);
        assert!(matches!(core.run(Task::Add { key: work(*microbatch), sums }), Outcome::Added { .. }));
    }
}

fn chunks(core: &Core<Toy>, group: u16) -> Vec<Chunk> {
    (0..core.structure().layout(Group(group)).chunks(64)).map(Chunk).collect()
}

/// Reduces every chunk of a group from these parts; hashes and norms.
fn reduce(core: &mut Core<Toy>, key: ReductionKey, codec: Codec, parts: impl Fn(Chunk) -> Vec<Part>) -> Vec<(Payload, Hash, f64)> {
    chunks(core, key.group.0)
        .into_iter()
        .map(|chunk| {
            let outcome = core.run(Task::ReduceChunk { key, chunk, parts: parts(chunk), codec });
            let Outcome::Reduced { payload, hash, squared_norm, .. } = outcome else { panic!("{outcome:?}") };
            (payload, hash, squared_norm)
        })
        .collect()
}

fn own(core: &mut Core<Toy>, attempt: u32) -> Vec<ReductionKey> {
    (0..4)
        .map(|group| {
            let key = reduction(group, attempt);
            reduce(core, key, Codec::None, |_| vec![Part::Own(vec![id(u64::from(group))])]);
            key
        })
        .collect()
}

fn apply(core: &mut Core<Toy>, step: Step, reductions: Vec<ReductionKey>) -> Outcome {
    let scalars = Scalars { gradient_scale: 0.25, learning_rate: 0.01, bias_correction1: 0.1, bias_correction2: 0.05, gradient_norm: 1.0 };
    core.run(Task::Apply { step, reductions, scalars })
}

fn roots(core: &Core<Toy>) -> Vec<Option<Hash>> {
    core.structure().group_ids().map(|group| core.state_root(group)).collect()
}

#[test]
fn a_graph_kept_and_a_forward_computed_again_give_the_same_gradients() {
    let mut results = Vec::new();
    for keep in [true, false] {
        let mut core = drawn();
        assert!(matches!(forward(&mut core, work(0), keep), Outcome::Forwarded { loss: Some(_), output: None, .. }));
        backward(&mut core, work(0));
        let sums = every_use(&core, 0);
        core.run(Task::Add { key: work(0), sums });
        results.push(core.sums.values().map(|sum| floats(sum).to_vec()).collect::<Vec<_>>());
    }
    assert_eq!(results[0], results[1]);
}

#[test]
fn spans_pass_boundaries_and_gradients_as_payloads() {
    let mut core = drawn();
    let (first, second) = (WorkKey { span: Span::new(0, 2), ..work(0) }, WorkKey { span: Span::new(2, 4), ..work(0) });
    let Outcome::Forwarded { output: Some(boundary), loss: None, .. } = forward(&mut core, first, true) else { panic!("no boundary") };
    let forward = Task::Forward { key: second, input: Some(boundary.clone()), encode: Codec::None, keep_graph: false };
    assert!(matches!(core.run(forward), Outcome::Forwarded { output: None, loss: Some(_), .. }));
    let again = |input| Task::Backward { key: second, input, gradient: None, encode: Some(Codec::None) };
    assert_eq!(error(core.run(again(None))), absent("input of blocks 2-3"));
    let ahead = Task::InputGradient { key: second, input: Some(boundary.clone()), gradient: None, encode: Codec::None };
    let Outcome::InputGradient { gradient: ahead, .. } = core.run(ahead) else { panic!("no gradient ahead") };
    let Outcome::Backwarded { gradient, uses, .. } = core.run(again(Some(boundary))) else { panic!("no gradient") };
    assert_eq!(uses.iter().collect::<Vec<_>>(), [2, 3, 4]);
    assert_eq!(gradient.as_ref(), Some(&ahead));
    let backward = |gradient| Task::Backward { key: first, input: None, gradient, encode: None };
    assert_eq!(error(core.run(backward(None))), absent("gradient of the output of blocks 0-1"));
    assert!(matches!(core.run(backward(gradient)), Outcome::Backwarded { gradient: None, .. }));
    // Cut or uncut, the sums are the same bits.
    core.run(Task::Add { key: first, sums: vec![(Use(0), id(0)), (Use(1), id(1))] });
    core.run(Task::Add { key: second, sums: vec![(Use(4), id(0)), (Use(2), id(2)), (Use(3), id(3))] });
    let mut uncut = drawn();
    compute(&mut uncut, &[0], 0);
    for (id, sum) in &core.sums {
        assert_eq!(floats(sum), floats(&uncut.sums[id]), "sum {id:?}");
    }
}

#[test]
fn a_payload_that_is_not_what_the_task_expects_is_refused() {
    let mut core = drawn();
    let key = WorkKey { span: Span::new(2, 3), ..work(0) };
    let len = core.plan.boundary_len();
    let mut run =
        |values: &[f32]| error(core.run(Task::Forward { key, input: Some(core.bytes.encode(Codec::None, values)), encode: Codec::None, keep_graph: true }));
    let refused = |source| EngineError::Payload { what: "the input of a span", source };
    assert_eq!(run(&vec![0.0; len - 1]), refused(PayloadError::Len { expected: len, got: len - 1 }));
    let mut bad = vec![0.0; len];
    bad[7] = f32::NAN;
    assert_eq!(run(&bad), refused(PayloadError::NotFinite { index: 7 }));
}

#[test]
fn a_gradient_is_added_once() {
    let mut core = drawn();
    compute(&mut core, &[0], 0);
    let sums = every_use(&core, 0);
    assert!(matches!(error(core.run(Task::Add { key: work(0), sums: sums.clone() })), EngineError::Absent { .. }), "the scratch is used up");
    // Computed again, it may go to another sum, but not to the one that has it.
    forward(&mut core, work(0), true);
    backward(&mut core, work(0));
    let before = floats(&core.sums[&id(1)]).to_vec();
    assert!(matches!(error(core.run(Task::Add { key: work(0), sums: sums.clone() })), EngineError::Conflict(_)));
    assert_eq!(floats(&core.sums[&id(1)]), before);
    assert!(matches!(error(core.run(Task::Add { key: work(0), sums: vec![(Use(1), id(7)), (Use(1), id(8))] })), EngineError::Conflict(_)));
    assert!(matches!(core.run(Task::Add { key: work(0), sums: vec![(Use(1), id(9))] }), Outcome::Added { .. }));
    assert_eq!(floats(&core.sums[&id(9)]), before);
    assert_eq!(core.contributions(id(0)), BTreeMap::from([((Use(0), Microbatch(0)), 1), ((Use(4), Microbatch(0)), 1)]));
    assert_eq!(core.contributions(id(9)), BTreeMap::from([((Use(1), Microbatch(0)), 1)]));
    let again = vec![(Use(1), id(10))];
    assert!(matches!(error(core.run(Task::Add { key: work(0), sums: again })), EngineError::Absent { .. }), "what was added is used up");
    assert!(matches!(core.run(Task::Add { key: work(0), sums: vec![(Use(2), id(11))] }), Outcome::Added { .. }), "the rest is not");
}

#[test]
fn a_sum_that_is_being_reduced_takes_nothing_more() {
    let mut core = drawn();
    compute(&mut core, &[0], 0);
    core.run(Task::EncodeChunk { key: reduction(1, 0), chunk: Chunk(0), sums: vec![id(1)], codec: Codec::None });
    forward(&mut core, work(1), true);
    backward(&mut core, work(1));
    assert!(matches!(error(core.run(Task::Add { key: work(1), sums: vec![(Use(1), id(1))] })), EngineError::Conflict(_)));
    assert!(matches!(core.run(Task::Add { key: work(1), sums: vec![(Use(2), id(2))] }), Outcome::Added { .. }), "the others stay open");
}

#[test]
fn a_reduction_adds_in_order_and_leaves_sums_as_they_were() {
    let mut core = drawn();
    compute(&mut core, &[0, 1], 0);
    compute(&mut core, &[2], 10);
    compute(&mut core, &[3], 20);
    let before: Vec<Vec<f32>> = core.sums.values().map(|sum| floats(sum).to_vec()).collect();
    let values = |count: u64, at: usize| floats(&core.sums[&id(count)])[at];
    let expected: Vec<f32> = (0..272).map(|at| values(21, at) + (values(1, at) + values(11, at))).collect();
    let peers: Vec<Payload> = chunks(&core, 1)
        .into_iter()
        .map(|chunk| {
            let outcome = core.run(Task::EncodeChunk { key: reduction(1, 0), chunk, sums: vec![id(1), id(11)], codec: Codec::None });
            let Outcome::Encoded { payload, .. } = outcome else { panic!("{outcome:?}") };
            payload
        })
        .collect();
    // Once with the pair as a peer's contribution, once as its own: the same bits.
    let one = reduce(&mut core, reduction(1, 0), Codec::None, |chunk| vec![Part::Own(vec![id(21)]), Part::Peer(peers[chunk.0 as usize].clone())]);
    assert_eq!(core.reductions[&reduction(1, 0)].result[..], expected);
    let two = reduce(&mut core, reduction(1, 1), Codec::None, |_| vec![Part::Own(vec![id(21)]), Part::Own(vec![id(1), id(11)])]);
    assert_eq!(one, two);
    for (chunk, (payload, hash, squared_norm)) in one.iter().enumerate() {
        let range = core.plan.range(reduction(1, 0), Chunk(chunk as u32)).expect("a chunk");
        let bytes: Vec<u8> = expected[range.clone()].iter().flat_map(|value| value.to_le_bytes()).collect();
        assert_eq!((payload.bytes.as_ref(), *hash), (&bytes[..], Hash::of(&bytes)));
        let mut norm = 0.0;
        expected[range].iter().for_each(|value| norm += f64::from(*value).powi(2));
        assert_eq!(*squared_norm, norm);
    }
    assert_eq!(core.sums.values().map(|sum| floats(sum).to_vec()).collect::<Vec<_>>(), before);
}

#[test]
fn everyone_holds_the_decoded_bytes() {
    let mut core = drawn();
    compute(&mut core, &[0], 0);
    let made = reduce(&mut core, reduction(1, 0), Codec::Bf16, |_| vec![Part::Own(vec![id(1)])]);
    let mut other = toy::engine(&config());
    for (chunk, (payload, hash, _)) in made.into_iter().enumerate() {
        let stored = other.run(Task::StoreChunk { key: reduction(1, 0), chunk: Chunk(chunk as u32), payload });
        assert!(matches!(stored, Outcome::Stored { hash: stored, .. } if stored == hash));
    }
    assert_eq!(*core.reductions[&reduction(1, 0)].result, *other.reductions[&reduction(1, 0)].result);
    assert_ne!(*core.reductions[&reduction(1, 0)].result, *floats(&core.sums[&id(1)]), "the owner rounds too");
}

#[test]
fn totals_that_are_not_finite_fail_and_leave_what_was_stored() {
    let mut core = drawn();
    compute(&mut core, &[0], 0);
    let key = reduction(1, 0);
    let good = reduce(&mut core, key, Codec::None, |_| vec![Part::Own(vec![id(1)])]);
    let huge = core.bytes.encode(Codec::None, &[f32::MAX; 64]);
    let task = |parts, codec| Task::ReduceChunk { key, chunk: Chunk(0), parts, codec };
    assert_eq!(error(core.run(task(vec![Part::Peer(huge.clone()), Part::Peer(huge.clone())], Codec::None))), EngineError::NotFinite("the reduced gradient"));
    assert_eq!(error(core.run(task(vec![Part::Peer(huge)], Codec::Bf16))), EngineError::NotFinite("the reduced gradient"), "it would round to infinity");
    let mut values = [1.0; 64];
    values[5] = f32::INFINITY;
    let bad = core.bytes.encode(Codec::None, &values);
    let parts = vec![Part::Own(vec![id(1)]), Part::Peer(bad.clone())];
    let refused = |what| EngineError::Payload { what, source: PayloadError::NotFinite { index: 5 } };
    assert_eq!(error(core.run(task(parts, Codec::None))), refused("a contribution"));
    assert_eq!(error(core.run(Task::StoreChunk { key, chunk: Chunk(0), payload: bad })), refused("a reduced chunk"));
    assert_eq!(hash_of(&core, key), good.iter().map(|(_, hash, _)| *hash).collect::<Vec<_>>());
}

fn hash_of(core: &Core<Toy>, key: ReductionKey) -> Vec<Hash> {
    core.reductions[&key].result.chunks(64).map(|values| Hash::of(bytemuck::cast_slice(values))).collect()
}

#[test]
fn reductions_name_what_is_not_here() {
    let mut core = drawn();
    compute(&mut core, &[0], 0);
    let encode = |key, chunk, sums| Task::EncodeChunk { key, chunk: Chunk(chunk), sums, codec: Codec::None };
    assert!(matches!(error(core.run(encode(reduction(1, 0), 0, vec![id(99)]))), EngineError::Absent { .. }));
    assert!(matches!(error(core.run(encode(reduction(1, 0), 0, vec![]))), EngineError::Absent { .. }));
    assert_eq!(error(core.run(encode(reduction(1, 0), 5, vec![id(1)]))), absent("chunk 5 in group 1"));
    assert_eq!(error(core.run(encode(reduction(9, 0), 0, vec![id(1)]))), absent("group 9 in this model"));
    assert!(matches!(error(core.run(encode(reduction(2, 0), 0, vec![id(1)]))), EngineError::Conflict(_)), "a sum of another group");
}

#[test]
fn apply_is_all_or_nothing_and_happens_once() {
    let mut core = drawn();
    compute(&mut core, &[0, 1, 2, 3], 0);
    let keys = own(&mut core, 0);
    let before = roots(&core);
    let mut wrong = keys.clone();
    wrong[3].attempt = ReduceAttempt(5);
    assert_eq!(error(apply(&mut core, Step(0), wrong)), absent("reduction 5 of group 3 at step 0"));
    core.reductions.get_mut(&keys[2]).expect("reduced").mark_missing(3);
    assert_eq!(error(apply(&mut core, Step(0), keys.clone())), absent("chunk 3 of reduction 0 of group 2 at step 0"));
    assert_eq!(roots(&core), before);
    let keys = own(&mut core, 0);
    assert!(matches!(apply(&mut core, Step(0), keys.clone()), Outcome::Applied { step: Step(0) }));
    let after = roots(&core);
    assert!(before.iter().zip(&after).all(|(a, b)| a != b));
    let again = EngineError::WrongVersion { group: Group(0), found: Version(1), needed: Version(0) };
    assert_eq!(error(apply(&mut core, Step(0), keys)), again);
    assert_eq!(roots(&core), after);
}

#[test]
fn both_generations_serve_until_the_step_retires() {
    let mut core = drawn();
    compute(&mut core, &[0], 0);
    forward(&mut core, work(1), true);
    let keys = own(&mut core, 0);
    let old = core.weights(Group(1)).expect("held").as_ptr();
    apply(&mut core, Step(0), keys);
    assert_ne!(core.weights(Group(1)).expect("held").as_ptr(), old, "the old version stays where graphs may point to it");
    // Redo of step 0 still runs on version 0, from the kept graph and from scratch; step 1 runs on version 1.
    assert!(matches!(backward(&mut core, work(1)), Outcome::Backwarded { .. }));
    assert!(matches!(forward(&mut core, work(0), false), Outcome::Forwarded { .. }));
    let next = WorkKey { step: Step(1), ..work(0) };
    assert!(matches!(forward(&mut core, next, true), Outcome::Forwarded { .. }));
    let ahead = WorkKey { step: Step(2), ..work(0) };
    let wrong = |needed| EngineError::WrongVersion { group: Group(0), found: Version(1), needed: Version(needed) };
    assert_eq!(error(forward(&mut core, ahead, true)), wrong(2));
    finished(core.run(Task::Retire { step: Step(0) }));
    assert_eq!(error(forward(&mut core, work(0), true)), wrong(0));
    assert_eq!((core.sums.len(), core.reductions.len()), (0, 0));
    assert!(matches!(error(core.run(Task::Add { key: work(1), sums: vec![] })), EngineError::Absent { .. }), "scratch of the step is gone");
    assert!(matches!(backward(&mut core, next), Outcome::Backwarded { .. }), "step 1 goes on");
}

#[test]
fn retiring_never_takes_the_present_weights() {
    let mut core = drawn();
    finished(core.run(Task::Retire { step: Step(5) }));
    assert_eq!(core.version(Group(0)), Some(Version(0)));
    assert!(matches!(forward(&mut core, work(0), false), Outcome::Forwarded { .. }));
}

#[test]
fn buffers_are_used_again_from_step_to_step() {
    let mut core = drawn();
    let mut places = std::collections::BTreeSet::new();
    for step in 0..6 {
        let at = |key: ReductionKey| ReductionKey { step: Step(step), ..key };
        let key = WorkKey { step: Step(step), ..work(0) };
        forward(&mut core, key, true);
        backward(&mut core, key);
        let sums = every_use(&core, step * 10);
        core.run(Task::Add { key, sums });
        let keys: Vec<_> = (0..4).map(|group| at(reduction(group, 0))).collect();
        for key in &keys {
            reduce(&mut core, *key, Codec::None, |_| vec![Part::Own(vec![id(step * 10 + u64::from(key.group.0))])]);
        }
        apply(&mut core, Step(step), keys);
        finished(core.run(Task::Retire { step: Step(step) }));
        places.insert(core.weights(Group(1)).expect("held").as_ptr());
    }
    // Weights, sum and result take turns: four buffers of this length serve for ever.
    assert!(places.len() <= 4, "{} buffers", places.len());
    assert_eq!(core.version(Group(3)), Some(Version(6)));
}

#[test]
fn a_snapshot_installs_elsewhere_and_steps_on_equally() {
    let mut core = drawn();
    compute(&mut core, &[0], 0);
    let keys = own(&mut core, 0);
    apply(&mut core, Step(0), keys);
    let mut other = toy::engine(&config());
    for group in core.structure().group_ids().collect::<Vec<_>>() {
        let needed = EngineError::WrongVersion { group, found: Version(1), needed: Version(2) };
        assert_eq!(error(core.run(Task::TakeSnapshot { group, version: Version(2) })), needed);
        let Outcome::SnapshotTaken(snapshot) = core.run(Task::TakeSnapshot { group, version: Version(1) }) else { panic!("no snapshot") };
        assert_eq!(snapshot.bytes.len(), 12 * core.structure().layout(group).len);
        assert_eq!(Some(snapshot.root()), core.state_root(group));
        finished(other.run(Task::Install { snapshot }));
    }
    assert_eq!(roots(&core), roots(&other));
    assert_eq!(other.versions().collect::<Vec<_>>(), core.versions().collect::<Vec<_>>());
}

#[test]
fn a_state_that_cannot_be_is_refused() {
    let mut core = drawn();
    let before = roots(&core);
    let state = |len: usize, at: usize, value: f32| {
        let mut values = vec![0.0_f32; len];
        values[at] = value;
        let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        Task::Install { snapshot: Snapshot::new(Group(1), Version(3), Bytes::from(bytes)) }
    };
    let len = 3 * 272;
    assert_eq!(error(core.run(state(len - 1, 0, 0.0))), EngineError::WrongState { group: Group(1), found: 4 * (len - 1), expected: 4 * len });
    assert!(matches!(error(core.run(state(len, 3, f32::NAN))), EngineError::Payload { .. }));
    assert!(matches!(error(core.run(state(len, 2 * 272 + 1, -1.0))), EngineError::Conflict(_)));
    assert_eq!(roots(&core), before);
}

#[test]
fn an_install_voids_what_was_computed_from_other_weights() {
    let mut core = drawn();
    forward(&mut core, work(0), true);
    backward(&mut core, work(0));
    let snapshot = core.snapshot(Group(1)).expect("held");
    finished(core.run(Task::Install { snapshot }));
    assert!(matches!(error(core.run(Task::Add { key: work(0), sums: vec![(Use(1), id(1))] })), EngineError::Absent { .. }));
}

#[test]
fn forgetting_keeps_what_was_counted_and_reset_keeps_nothing() {
    let mut core = drawn();
    compute(&mut core, &[0], 0);
    forward(&mut core, work(1), true);
    finished(core.run(Task::Forget { groups: vec![Group(1)] }));
    assert!(matches!(error(backward(&mut core, work(1))), EngineError::Absent { .. }));
    assert!(matches!(core.run(Task::EncodeChunk { key: reduction(1, 0), chunk: Chunk(0), sums: vec![id(1)], codec: Codec::None }), Outcome::Encoded { .. }));
    finished(core.run(Task::DropSums { sums: vec![id(1), id(77)] }));
    assert_eq!(core.sums.len(), 3);
    finished(core.run(Task::Reset));
    assert_eq!((core.versions().count(), core.sums.len()), (0, 0));
}

#[test]
fn gradients_that_are_not_finite_never_reach_scratch() {
    let mut core = drawn();
    let mut snapshot = core.snapshot(Group(3)).expect("held");
    // The logits overflow.
    let mut bytes = snapshot.bytes.to_vec();
    bytes.chunks_exact_mut(4).take(16).for_each(|bytes| bytes.copy_from_slice(&f32::MAX.to_le_bytes()));
    snapshot = Snapshot::new(Group(3), Version(0), Bytes::from(bytes));
    finished(core.run(Task::Install { snapshot }));
    assert!(matches!(error(forward(&mut core, work(0), true)), EngineError::NotFinite(_)));
    assert!(matches!(error(backward(&mut core, work(0))), EngineError::NotFinite(_)));
    assert!(matches!(error(core.run(Task::Add { key: work(0), sums: vec![] })), EngineError::Absent { .. }));
}

#[test]
fn a_gradient_beyond_the_bound_never_reaches_scratch() {
    let mut config = config();
    config.reduce.norm_limit = 1e-3;
    let mut core = toy::engine(&config);
    finished(core.run(Task::Draw { groups: toy::structure(&config).group_ids().collect() }));
    forward(&mut core, work(0), true);
    assert!(matches!(error(backward(&mut core, work(0))), EngineError::Norm { .. }));
    assert!(matches!(error(core.run(Task::Add { key: work(0), sums: vec![] })), EngineError::Absent { .. }));
}

#[test]
fn failures_say_what_they_were_part_of() {
    let mut core = toy::engine(&config());
    let Outcome::Failed { about, .. } = forward(&mut core, work(0), true) else { panic!("no weights yet") };
    assert_eq!(about, About::Work(work(0)));
    let Outcome::Failed { about, .. } = apply(&mut core, Step(4), vec![reduction(0, 0)]) else { panic!("no weights yet") };
    assert_eq!(about, About::Step(Step(4)));
    let beyond = WorkKey { span: Span::new(2, 5), ..work(0) };
    assert!(matches!(error(forward(&mut core, beyond, true)), EngineError::Absent { .. }));
}

#[test]
fn an_engine_can_move_to_its_thread() {
    fn movable<T: Send>(_: &T) {}
    movable(&drawn());
}
