//! A group's state: weights in generations, moments in place; how it begins, steps, and is copied.

use std::collections::{BTreeMap, BTreeSet};

use bytes::Bytes;
use skein_protocol::codec::Codec;
use skein_protocol::id::{Group, Step, Version};
use skein_protocol::message::control::Scalars;

use super::buffer::{AlignedBuffer, BufferPool};
use super::{Compute, Core, EngineError, Outcome, absent};
use crate::engine::{ReductionKey, Snapshot};
use crate::init;
use crate::optim::adamw::{AdamW, State};

/// Vectors of a snapshot: weights, first moment, second moment.
const VECTORS: usize = 3;

/// State of one group.
pub(super) struct GroupState {
    pub(super) version: Version,
    /// Weights of the present version, and of those before it until they are retired.
    generations: BTreeMap<Version, AlignedBuffer>,
    m: AlignedBuffer,
    v: AlignedBuffer,
}

impl GroupState {
    /// The weights of the present version.
    pub(super) fn weights(&self) -> &[f32] {
        self.generations.get(&self.version).expect("the present generation is never given back")
    }

    /// The weights of `version`, if they are here.
    pub(super) fn weights_at(&self, group: Group, version: Version) -> Result<&[f32], EngineError> {
        let buffer = self.generations.get(&version).ok_or(EngineError::WrongVersion { group, found: self.version, needed: version })?;
        Ok(buffer)
    }

    /// A copy of the state.
    pub(super) fn snapshot(&self, group: Group) -> Snapshot {
        let mut bytes = vec![0; VECTORS * 4 * self.m.len()];
        for (values, bytes) in [self.weights(), &self.m, &self.v].iter().zip(bytes.chunks_exact_mut(4 * self.m.len())) {
            Codec::None.encode(values, bytes);
        }
        Snapshot::new(group, self.version, Bytes::from(bytes))
    }

    /// Gives back generations of versions up to that of `step`, but never the present one. Graphs over them must be gone.
    pub(super) fn retire(&mut self, step: Step, pool: &mut BufferPool) {
        let present = self.version;
        for (_, buffer) in self.generations.extract_if(..=step.runs_on(), |version, _| *version != present) {
            pool.give(buffer);
        }
    }

    fn give_back(self, pool: &mut BufferPool) {
        self.generations.into_values().chain([self.m, self.v]).for_each(|buffer| pool.give(buffer));
    }

    fn check_version(&self, group: Group, needed: Version) -> Result<(), EngineError> {
        if self.version == needed { Ok(()) } else { Err(EngineError::WrongVersion { group, found: self.version, needed }) }
    }
}

impl<C: Compute> Core<C> {
    pub(super) fn draw(&mut self, groups: &[Group]) -> Result<(), EngineError> {
        for group in groups {
            self.plan.layout(*group)?;
        }
        for group in groups {
            let layout = self.plan.structure.layout(*group);
            let [mut weights, mut m, mut v] = [(); VECTORS].map(|()| self.pool.take(layout.len));
            init::draw(layout, self.plan.seed, self.plan.deviation, &mut weights);
            m.fill(0.0);
            v.fill(0.0);
            self.put(*group, Version(0), weights, m, v);
        }
        Ok(())
    }

    pub(super) fn install(&mut self, snapshot: &Snapshot) -> Result<(), EngineError> {
        let (group, bytes) = (snapshot.group, &snapshot.bytes);
        let len = self.plan.layout(group)?.len;
        let expected = VECTORS * 4 * len;
        if bytes.len() != expected {
            return Err(EngineError::WrongState { group, found: bytes.len(), expected });
        }
        let [mut weights, mut m, mut v] = [(); VECTORS].map(|()| self.pool.take(len));
        let decoded = [&mut weights, &mut m, &mut v]
            .into_iter()
            .zip(bytes.chunks_exact(4 * len))
            .try_for_each(|(values, bytes)| Codec::None.decode(bytes, values).map_err(|source| EngineError::Payload { what: "the state of a group", source }));
        let checked = decoded.and_then(|()| {
            let possible = v.iter().all(|value| *value >= 0.0);
            if possible { Ok(()) } else { Err(EngineError::Conflict(format!("the state of group {group} has a negative second moment"))) }
        });
        if let Err(error) = checked {
            [weights, m, v].into_iter().for_each(|buffer| self.pool.give(buffer));
            return Err(error);
        }
        self.put(group, snapshot.version, weights, m, v);
        Ok(())
    }

    /// Takes over a group's state. What was computed from other weights of the group is void.
    fn put(&mut self, group: Group, version: Version, weights: AlignedBuffer, m: AlignedBuffer, v: AlignedBuffer) {
        self.works.invalidate(group, &self.plan.structure.uses);
        let state = GroupState { version, generations: BTreeMap::from([(version, weights)]), m, v };
        if let Some(old) = self.groups.insert(group, state) {
            old.give_back(&mut self.pool);
        }
    }

    /// Forgets groups. Sums and results of theirs stay: what was counted outlives a placement.
    pub(super) fn forget(&mut self, groups: &[Group]) {
        for group in groups {
            self.works.drop_graphs(*group, &self.plan.structure.uses);
            self.groups.remove(group);
        }
        self.pool.clear();
        self.bytes.clear();
    }

    /// All groups step, or none does.
    pub(super) fn apply(&mut self, step: Step, reductions: &[ReductionKey], scalars: &Scalars) -> Result<Outcome, EngineError> {
        self.check_apply(step, reductions)?;
        let optimizer = AdamW::new(&self.plan.optimizer, scalars);
        for key in reductions {
            let layout = self.plan.structure.layout(key.group);
            let (Some(state), Some(reduction)) = (self.groups.get_mut(&key.group), self.reductions.get(key)) else { continue };
            let mut new = self.pool.take(layout.len);
            let old = state.generations.get(&state.version).expect("the present generation is never given back");
            optimizer.step(layout, State { old, new: &mut new, m: &mut state.m, v: &mut state.v, sum: &reduction.result });
            state.version = step.makes();
            state.generations.insert(state.version, new);
        }
        Ok(Outcome::Applied { step })
    }

    fn check_apply(&self, step: Step, reductions: &[ReductionKey]) -> Result<(), EngineError> {
        let mut groups = BTreeSet::new();
        for key in reductions {
            let group = key.group;
            if key.step != step || !groups.insert(group) {
                return Err(EngineError::Conflict(format!("group {group} is named twice or with a reduction of step {}, not {step}", key.step)));
            }
            let state = self.groups.get(&group).ok_or_else(|| absent(format!("state of group {group}")))?;
            state.check_version(group, step.runs_on())?;
            let what = || format!("reduction {} of group {group} at step {step}", key.attempt);
            let reduction = self.reductions.get(key).ok_or_else(|| absent(what()))?;
            if let Some(chunk) = reduction.first_missing() {
                return Err(absent(format!("chunk {chunk} of {}", what())));
            }
        }
        Ok(())
    }

    pub(super) fn take_snapshot(&mut self, group: Group, version: Version) -> Result<Outcome, EngineError> {
        let state = self.groups.get(&group).ok_or_else(|| absent(format!("state of group {group}")))?;
        state.check_version(group, version)?;
        Ok(Outcome::SnapshotTaken(state.snapshot(group)))
    }
}
