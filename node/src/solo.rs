//! Training in one process, without a swarm: the baseline, and the reference for the swarm's bits.
//!
//! The same tasks in the order that a swarm of one node runs them, so that both give the same loss
//! and weights to the bit.

use std::collections::BTreeMap;

use skein_protocol::config::RunConfig;
use skein_protocol::id::{Chunk, Group, Microbatch, ReduceAttempt, Step, SumId, Use, Version};
use skein_protocol::model::Structure;

use crate::engine::{Engine, EngineError, Outcome, Part, ReductionKey, Task, WorkKey};

/// What came of one step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SoloStep {
    /// The step.
    pub step: Step,
    /// Mean loss of the batch in nats a token.
    pub loss: f32,
    /// Norm of the mean gradient before clipping.
    pub gradient_norm: f32,
}

/// Why a step could not be done.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum SoloError {
    /// The engine failed.
    #[error("step {step}: {error}")]
    Engine {
        /// The step.
        step: Step,
        /// Why.
        error: EngineError,
    },
    /// The engine answered a task with the outcome of another: an error of this program.
    #[error("step {step}: the engine answered {task} with {answer}")]
    Unexpected {
        /// The step.
        step: Step,
        /// The task.
        task: &'static str,
        /// What came.
        answer: String,
    },
}

/// Runs `steps` steps from version `from`, which `engine` holds of every group.
pub fn solo(
    engine: &mut impl Engine,
    config: &RunConfig,
    structure: &Structure,
    from: Version,
    steps: u64,
    on_step: &mut dyn FnMut(SoloStep),
) -> Result<(), SoloError> {
    for step in (from.0..from.0 + steps).map(Step) {
        on_step(solo_step(engine, config, structure, step)?);
    }
    Ok(())
}

/// Runs one step: microbatches in the order of their indices.
pub fn solo_step(engine: &mut impl Engine, config: &RunConfig, structure: &Structure, step: Step) -> Result<SoloStep, SoloError> {
    solo_step_in_order(engine, config, structure, step, (0..config.batch.microbatches).map(Microbatch))
}

/// Runs one step with the batch's microbatches in another order: how far results spread by order alone.
pub fn solo_step_in_order(
    engine: &mut impl Engine,
    config: &RunConfig,
    structure: &Structure,
    step: Step,
    order: impl IntoIterator<Item = Microbatch>,
) -> Result<SoloStep, SoloError> {
    let mut run = Stepper { engine, structure, step };
    let mut losses = BTreeMap::new();
    for microbatch in order {
        losses.insert(microbatch, run.accumulate(microbatch)?);
    }
    let total: f64 = losses.values().map(|loss| f64::from(*loss)).sum();
    let squared_norm = run.reduce(config)?;
    let scalars = config.scalars(step, squared_norm);
    let reductions = structure.group_ids().map(|group| run.reduction(group)).collect();
    run.ask(Task::Apply { step, reductions, scalars })?;
    run.ask(Task::Retire { step })?;
    Ok(SoloStep { step, loss: (total / losses.len() as f64) as f32, gradient_norm: scalars.gradient_norm })
}

/// One step of one engine.
struct Stepper<'a, E> {
    engine: &'a mut E,
    structure: &'a Structure,
    step: Step,
}

impl<E: Engine> Stepper<'_, E> {
    /// Computes a microbatch through the whole model and adds its gradients; its loss.
    fn accumulate(&mut self, microbatch: Microbatch) -> Result<f32, SoloError> {
        let key = WorkKey { step: self.step, microbatch, span: self.structure.whole() };
        let encode = skein_protocol::codec::Codec::None;
        let outcome = self.ask(Task::Forward { key, input: None, encode, keep_graph: true })?;
        let Outcome::Forwarded { loss: Some(loss), .. } = outcome else { return Err(self.unexpected("forward", &outcome)) };
        self.ask(Task::Backward { key, input: None, gradient: None, encode: None })?;
        let uses = (0..u16::try_from(self.structure.uses.len()).expect("a model has fewer than 65536 uses")).map(Use);
        let sums = uses.map(|one| (one, self.sum(self.structure.group_of(one)))).collect();
        self.ask(Task::Add { key, sums })?;
        Ok(loss)
    }

    /// Reduces every group from the one sum there is; the squared norm over all of them.
    fn reduce(&mut self, config: &RunConfig) -> Result<f64, SoloError> {
        let mut squared_norm = 0.0;
        for group in self.structure.group_ids() {
            for chunk in (0..self.structure.layout(group).chunks(config.reduce.chunk)).map(Chunk) {
                let parts = vec![Part::Own(vec![self.sum(group)])];
                let task = Task::ReduceChunk { key: self.reduction(group), chunk, parts, codec: config.wire.gather };
                let outcome = self.ask(task)?;
                let Outcome::Reduced { squared_norm: part, .. } = outcome else { return Err(self.unexpected("reduce", &outcome)) };
                squared_norm += part;
            }
        }
        Ok(squared_norm)
    }

    fn sum(&self, group: Group) -> SumId {
        SumId { boot: self.step.0, count: u64::from(group.0) }
    }

    fn reduction(&self, group: Group) -> ReductionKey {
        ReductionKey { step: self.step, group, attempt: ReduceAttempt(0) }
    }

    fn ask(&mut self, task: Task) -> Result<Outcome, SoloError> {
        let outcome = self.engine.run(task);
        if let Outcome::Failed { error, .. } = outcome { Err(SoloError::Engine { step: self.step, error }) } else { Ok(outcome) }
    }

    fn unexpected(&self, task: &'static str, answer: &Outcome) -> SoloError {
        SoloError::Unexpected { step: self.step, task, answer: format!("{answer:?}") }
    }
}

#[cfg(test)]
mod tests {
    use skein_protocol::id::Hash;

    use super::*;
    use crate::engine::core::Core;
    use crate::engine::toy::{self, Toy};

    fn drawn(config: &RunConfig) -> Core<Toy> {
        let mut core = toy::engine(config);
        let groups = core.structure().group_ids().collect();
        assert!(matches!(core.run(Task::Draw { groups }), Outcome::Finished));
        core
    }

    fn train(config: &RunConfig, core: &mut Core<Toy>, from: u64, steps: u64) -> Vec<SoloStep> {
        let mut all = Vec::new();
        let structure = toy::structure(config);
        solo(core, config, &structure, Version(from), steps, &mut |step| all.push(step)).expect("the toy trains");
        all
    }

    fn roots(core: &Core<Toy>) -> Vec<Option<Hash>> {
        core.structure().group_ids().map(|group| core.state_root(group)).collect()
    }

    #[test]
    fn the_toy_learns() {
        for tied in [false, true] {
            let config = toy::config(2, tied, 8, 60);
            let steps = train(&config, &mut drawn(&config), 0, 60);
            let mean = |steps: &[SoloStep]| steps.iter().map(|step| step.loss).sum::<f32>() / steps.len() as f32;
            let (first, last) = (mean(&steps[..5]), mean(&steps[55..]));
            assert!(first > 3.0 && last < first - 0.8, "{first} {last}");
        }
    }

    #[test]
    fn stopping_and_installing_the_state_elsewhere_changes_nothing() {
        let config = toy::config(2, true, 4, 12);
        let mut whole = drawn(&config);
        let all = train(&config, &mut whole, 0, 12);
        let mut first = drawn(&config);
        train(&config, &mut first, 0, 5);
        let mut second = toy::engine(&config);
        for group in second.structure().group_ids().collect::<Vec<_>>() {
            let snapshot = first.snapshot(group).expect("held");
            assert!(matches!(second.run(Task::Install { snapshot }), Outcome::Finished));
        }
        assert_eq!(train(&config, &mut second, 5, 7), all[5..]);
        assert_eq!(roots(&second), roots(&whole));
    }

    #[test]
    fn the_order_of_microbatches_shows_in_the_bits_and_in_nothing_else() {
        let config = toy::config(2, false, 8, 4);
        let structure = toy::structure(&config);
        let (mut forward, mut backward) = (drawn(&config), drawn(&config));
        for step in (0..4).map(Step) {
            let a = solo_step(&mut forward, &config, &structure, step).expect("trains");
            let b = solo_step_in_order(&mut backward, &config, &structure, step, (0..8).rev().map(Microbatch)).expect("trains");
            assert!((a.loss - b.loss).abs() < 1e-4, "{} {}", a.loss, b.loss);
        }
        assert_ne!(roots(&forward), roots(&backward));
    }

    #[test]
    fn in_mode_exact_the_order_of_microbatches_shows_nowhere() {
        for boundary in [skein_protocol::codec::Codec::None, skein_protocol::codec::Codec::Bf16] {
            let mut config = toy::config(2, true, 8, 4);
            config.run.mode = skein_protocol::config::Mode::Exact;
            config.wire.boundary = boundary;
            let structure = toy::structure(&config);
            let (mut forward, mut backward) = (drawn(&config), drawn(&config));
            for step in (0..4).map(Step) {
                solo_step(&mut forward, &config, &structure, step).expect("trains");
                solo_step_in_order(&mut backward, &config, &structure, step, (0..8).rev().map(Microbatch)).expect("trains");
            }
            assert_eq!(roots(&forward), roots(&backward));
            // It is the same training, in other bits.
            config.run.mode = skein_protocol::config::Mode::Sync;
            let mut sync = drawn(&config);
            for step in (0..4).map(Step) {
                solo_step(&mut sync, &config, &structure, step).expect("trains");
            }
            assert_ne!(roots(&forward), roots(&sync));
            config.run.mode = skein_protocol::config::Mode::Exact;
            let a = solo_step(&mut forward, &config, &structure, Step(4)).expect("trains");
            config.run.mode = skein_protocol::config::Mode::Sync;
            let b = solo_step(&mut sync, &config, &structure, Step(4)).expect("trains");
            assert!((a.loss - b.loss).abs() < 2e-2, "{} {}", a.loss, b.loss);
        }
    }

    #[test]
    fn a_gradient_lost_or_doubled_shows() {
        let config = toy::config(2, false, 4, 4);
        let structure = toy::structure(&config);
        let mut lossy = drawn(&config);
        solo_step_in_order(&mut lossy, &config, &structure, Step(0), (0..3).map(Microbatch)).expect("trains");
        let mut whole = drawn(&config);
        train(&config, &mut whole, 0, 1);
        assert!(roots(&lossy).iter().zip(roots(&whole)).all(|(a, b)| *a != b));
        let twice = solo_step_in_order(&mut whole, &config, &structure, Step(1), [0, 1, 1].map(Microbatch));
        assert!(matches!(twice, Err(SoloError::Engine { error: EngineError::Conflict(_), .. })), "{twice:?}");
    }

    #[test]
    fn a_group_at_another_version_is_named() {
        let config = toy::config(1, true, 2, 4);
        let error = solo_step(&mut drawn(&config), &config, &toy::structure(&config), Step(3)).expect_err("version 3 is not here");
        assert_eq!(error.to_string(), "step 3: group 0 is at version 0, needed 3");
    }
}
