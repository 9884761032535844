//! Reduction of one group, chunk by chunk, into a buffer of its own: nothing crosses attempts, and
//! no sum is changed.

use skein_protocol::codec::Codec;
use skein_protocol::fixed::{self, FixedPoint};
use skein_protocol::id::{Chunk, Hash, SumId};
use skein_protocol::tensor::{Payload, PayloadError};

use super::buffer::{AlignedBuffer, BufferPool};
use super::sums::{add, add_fixed, total};
use super::{BytePool, Compute, Core, EngineError, GroupLayout, Outcome, decode, encode};
use crate::engine::{Part, ReductionKey};

/// The result of one attempt as far as it is here.
pub(super) struct Reduction {
    pub(super) result: AlignedBuffer,
    done: Vec<bool>,
}

impl Reduction {
    fn new(layout: &GroupLayout, chunk_len: usize, pool: &mut BufferPool) -> Self {
        Self { result: pool.take(layout.len), done: vec![false; layout.chunks(chunk_len) as usize] }
    }

    /// The first chunk that is not here yet.
    pub(super) fn first_missing(&self) -> Option<usize> {
        self.done.iter().position(|done| !done)
    }

    #[cfg(test)]
    pub(super) fn mark_missing(&mut self, chunk: usize) {
        self.done[chunk] = false;
    }
}

impl<C: Compute> Core<C> {
    pub(super) fn encode_chunk(&mut self, key: ReductionKey, chunk: Chunk, sums: &[SumId], codec: Codec) -> Result<Outcome, EngineError> {
        let range = self.plan.range(key, chunk)?;
        let payload = if self.plan.fixed.is_some() {
            let room = &mut self.desk.fixed_total[..range.len()];
            room.fill(0);
            add_fixed(&self.sums, key, sums, &range, room)?;
            self.bytes.encode_fixed(room)
        } else {
            let values = total(&self.sums, key, sums, &range, &mut self.desk.part)?;
            encode(&self.bytes, "the sum of gradients", codec, values)?
        };
        self.mark_read(sums);
        Ok(Outcome::Encoded { key, chunk, payload })
    }

    pub(super) fn reduce_chunk(&mut self, key: ReductionKey, chunk: Chunk, parts: &[Part], codec: Codec) -> Result<Outcome, EngineError> {
        self.add_parts(key, chunk, parts)?;
        let len = self.plan.range(key, chunk)?.len();
        let payload = round(&self.bytes, codec, &mut self.desk.total[..len])?;
        let squared_norm = squared_norm(&self.desk.total[..len]);
        let hash = self.store(key, chunk)?;
        for part in parts {
            match part {
                Part::Own(sums) => self.mark_read(sums),
                Part::Peer(_) => {}
            }
        }
        Ok(Outcome::Reduced { key, chunk, payload, hash, squared_norm })
    }

    pub(super) fn store_chunk(&mut self, key: ReductionKey, chunk: Chunk, payload: &Payload) -> Result<Outcome, EngineError> {
        let len = self.plan.range(key, chunk)?.len();
        decode("a reduced chunk", payload, &mut self.desk.total[..len])?;
        let hash = self.store(key, chunk)?;
        Ok(Outcome::Stored { key, chunk, hash })
    }

    pub(super) fn drop_reduction(&mut self, key: ReductionKey) {
        if let Some(reduction) = self.reductions.remove(&key) {
            self.pool.give(reduction.result);
        }
    }

    /// Adds the parts up in the desk's total: in `sync` strictly in order, in `exact` the order does
    /// not matter.
    fn add_parts(&mut self, key: ReductionKey, chunk: Chunk, parts: &[Part]) -> Result<(), EngineError> {
        if parts.is_empty() {
            return Err(EngineError::Conflict(format!("chunk {chunk} of group {} has no contributions", key.group)));
        }
        if let Some(fixed) = self.plan.fixed {
            return self.add_fixed_parts(fixed, key, chunk, parts);
        }
        let range = self.plan.range(key, chunk)?;
        let sum = &mut self.desk.total[..range.len()];
        for (index, part) in parts.iter().enumerate() {
            match part {
                Part::Own(ids) => {
                    let values = total(&self.sums, key, ids, &range, &mut self.desk.part)?;
                    if index == 0 { sum.copy_from_slice(values) } else { add(sum, values) }
                }
                Part::Peer(payload) if index == 0 => decode("a contribution", payload, sum)?,
                Part::Peer(payload) => payload
                    .expect(sum.len())
                    .and_then(|()| payload.meta.codec.decode_add(&payload.bytes, sum))
                    .map_err(|source| EngineError::Payload { what: "a contribution", source })?,
            }
        }
        Ok(())
    }

    fn add_fixed_parts(&mut self, fixed: FixedPoint, key: ReductionKey, chunk: Chunk, parts: &[Part]) -> Result<(), EngineError> {
        let range = self.plan.range(key, chunk)?;
        let sums = &mut self.desk.fixed_total[..range.len()];
        sums.fill(0);
        for part in parts {
            match part {
                Part::Own(ids) => add_fixed(&self.sums, key, ids, &range, sums)?,
                Part::Peer(payload) => {
                    let is_fixed = if payload.meta.codec == Codec::Fixed { Ok(()) } else { Err(PayloadError::NotATensor) };
                    is_fixed.and_then(|()| payload.expect(sums.len())).map_err(|source| EngineError::Payload { what: "a contribution", source })?;
                    fixed::add_encoded(&payload.bytes, sums);
                }
            }
        }
        fixed.to_f32(sums, &mut self.desk.total[..range.len()]);
        Ok(())
    }

    /// Puts the desk's total into the reduction's result; its hash.
    fn store(&mut self, key: ReductionKey, chunk: Chunk) -> Result<Hash, EngineError> {
        let range = self.plan.range(key, chunk)?;
        let values = &self.desk.total[..range.len()];
        let layout = self.plan.structure.layout(key.group);
        let reduction = self.reductions.entry(key).or_insert_with(|| Reduction::new(layout, self.plan.chunk_len, &mut self.pool));
        reduction.result[range].copy_from_slice(values);
        reduction.done[chunk.0 as usize] = true;
        Ok(hash_values(values))
    }
}

/// Encodes a result for everyone and leaves in `values` what everyone decodes.
fn round(bytes: &BytePool, codec: Codec, values: &mut [f32]) -> Result<Payload, EngineError> {
    let payload = encode(bytes, "the reduced gradient", codec, values)?;
    if codec != Codec::None {
        decode("the reduced gradient", &payload, values)?;
    }
    Ok(payload)
}

/// Sum of squares in f64, in index order: the same on every machine.
fn squared_norm(values: &[f32]) -> f64 {
    values.iter().fold(0.0, |sum, value| sum + f64::from(*value) * f64::from(*value))
}

/// BLAKE3 of the values as f32 little endian.
fn hash_values(values: &[f32]) -> Hash {
    if cfg!(target_endian = "little") {
        return Hash::of(bytemuck::cast_slice(values));
    }
    let mut hasher = blake3::Hasher::new();
    for value in values {
        hasher.update(&value.to_le_bytes());
    }
    Hash(*hasher.finalize().as_bytes())
}
