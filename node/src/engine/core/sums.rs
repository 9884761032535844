//! Sums: accumulators of gradients, open until a reduction reads them.

use std::collections::BTreeMap;
use std::ops::Range;

use skein_protocol::id::{Group, Microbatch, Step, SumId, Use};
use skein_protocol::model::GroupLayout;

use super::buffer::{AlignedBuffer, BufferPool};
use super::{Compute, Core, EngineError, absent};
use crate::engine::{ReductionKey, WorkKey};

/// One accumulator.
pub(super) struct Sum {
    pub(super) step: Step,
    pub(super) group: Group,
    pub(super) values: Values,
    /// How often each gradient was added, counted where it is added.
    pub(super) added: BTreeMap<(Use, Microbatch), u32>,
    /// Whether a reduction has read it: from then on it is immutable.
    pub(super) read: bool,
}

/// What a sum adds up in, flat in its group's layout.
pub(super) enum Values {
    /// Mode `sync`.
    Float(AlignedBuffer),
    /// Mode `exact`: the order of additions does not show.
    Fixed(Vec<i64>),
}

impl Values {
    pub(super) fn give_back(self, pool: &mut BufferPool) {
        match self {
            Self::Float(buffer) => pool.give(buffer),
            Self::Fixed(buffer) => pool.give_fixed(buffer),
        }
    }
}

impl Sum {
    /// An empty sum. In f32 its first gradient overwrites whatever the pooled buffer held, its padding is zero.
    pub(super) fn new(step: Step, group: Group, layout: &GroupLayout, fixed: bool, pool: &mut BufferPool) -> Self {
        let values = if fixed { Values::Fixed(pool.take_fixed(layout.len)) } else { Values::Float(clean(pool.take(layout.len), layout)) };
        Self { step, group, values, added: BTreeMap::new(), read: false }
    }

    /// Whether a gradient may be added to this sum.
    pub(super) fn check_add(&self, id: SumId, key: WorkKey, one: Use, group: Group) -> Result<(), EngineError> {
        self.check(id, key.step, group)?;
        if self.read {
            return Err(EngineError::Conflict(format!("sum {id:?} is being reduced: nothing can be added to it")));
        }
        if self.added.contains_key(&(one, key.microbatch)) {
            return Err(EngineError::Conflict(format!("use {one} of microbatch {} is in sum {id:?} already", key.microbatch)));
        }
        Ok(())
    }

    fn check(&self, id: SumId, step: Step, group: Group) -> Result<(), EngineError> {
        if (self.step, self.group) == (step, group) {
            return Ok(());
        }
        Err(EngineError::Conflict(format!("sum {id:?} is of step {} and group {}, not of step {step} and group {group}", self.step, self.group)))
    }
}

/// Zeroes what lies between the tensors.
fn clean(mut buffer: AlignedBuffer, layout: &GroupLayout) -> AlignedBuffer {
    let starts = layout.tensors.iter().skip(1).map(|tensor| tensor.offset).chain([layout.len]);
    for (tensor, next) in layout.tensors.iter().zip(starts) {
        buffer[tensor.offset + tensor.len()..next].fill(0.0);
    }
    buffer
}

/// Adds the parts of `ids` within `range` to `total`.
pub(super) fn add_fixed(sums: &BTreeMap<SumId, Sum>, key: ReductionKey, ids: &[SumId], range: &Range<usize>, total: &mut [i64]) -> Result<(), EngineError> {
    for id in ids {
        let sum = sums.get(id).ok_or_else(|| absent(format!("sum {id:?}")))?;
        sum.check(*id, key.step, key.group)?;
        let Values::Fixed(values) = &sum.values else { return Err(EngineError::Conflict(format!("sum {id:?} is not in fixed point"))) };
        for (total, value) in total.iter_mut().zip(&values[range.clone()]) {
            *total = total.wrapping_add(*value);
        }
    }
    Ok(())
}

/// The total of `ids` over `range`, in order: a view of the sum where there is one, else made in `room`.
pub(super) fn total<'a>(
    sums: &'a BTreeMap<SumId, Sum>,
    key: ReductionKey,
    ids: &[SumId],
    range: &Range<usize>,
    room: &'a mut [f32],
) -> Result<&'a [f32], EngineError> {
    let mut slices = ids.iter().map(|id| {
        let sum = sums.get(id).ok_or_else(|| absent(format!("sum {id:?}")))?;
        sum.check(*id, key.step, key.group)?;
        let Values::Float(values) = &sum.values else { return Err(EngineError::Conflict(format!("sum {id:?} is in fixed point"))) };
        Ok::<_, EngineError>(&values[range.clone()])
    });
    let first = slices.next().ok_or_else(|| absent("sum in an empty list of sums"))??;
    if ids.len() == 1 {
        return Ok(first);
    }
    let room = &mut room[..range.len()];
    room.copy_from_slice(first);
    for slice in slices {
        add(room, slice?);
    }
    Ok(room)
}

/// Adds `values` to `total`, each to each.
pub(super) fn add(total: &mut [f32], values: &[f32]) {
    for (total, value) in total.iter_mut().zip(values) {
        *total += value;
    }
}

impl<C: Compute> Core<C> {
    pub(super) fn drop_sums(&mut self, ids: &[SumId]) {
        for sum in ids.iter().filter_map(|id| self.sums.remove(id)) {
            sum.values.give_back(&mut self.pool);
        }
    }

    /// Makes sums immutable: a reduction has read from them.
    pub(super) fn mark_read(&mut self, ids: &[SumId]) {
        for id in ids {
            if let Some(sum) = self.sums.get_mut(id) {
                sum.read = true;
            }
        }
    }
}
