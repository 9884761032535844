//! Memory of the engine: aligned f32 buffers and encoded bytes, both taken from pools.
//!
//! Fresh pages from the system cost about ten times as much as pages that were used before, so
//! buffers go back to a pool by their length instead of being freed.

use std::collections::BTreeMap;
use std::ops::{Deref, DerefMut};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use bytes::Bytes;
use skein_protocol::codec::Codec;
use skein_protocol::fixed;
use skein_protocol::limits::POOLED_BYTES_MAX;
use skein_protocol::tensor::{Payload, TensorMeta};

/// Bytes at whose multiples a buffer starts: results of CPU kernels can depend on it.
const ALIGN_BYTES: usize = 64;

/// A flat f32 buffer that starts at a multiple of 64 bytes. Its values never move while it lives,
/// however often the struct itself is moved.
pub(super) struct AlignedBuffer {
    /// The values and up to 15 more in front of them and behind; never grown, so never moved.
    values: Vec<f32>,
    start: usize,
    len: usize,
}

impl AlignedBuffer {
    /// A buffer of `len` zeros.
    pub(super) fn zeroed(len: usize) -> Self {
        let spare = ALIGN_BYTES / size_of::<f32>() - 1;
        let values = vec![0.0; len + spare];
        let start = values.as_ptr().align_offset(ALIGN_BYTES);
        assert!(start <= spare, "a vector of f32 is aligned to f32");
        Self { values, start, len }
    }
}

impl Deref for AlignedBuffer {
    type Target = [f32];

    fn deref(&self) -> &[f32] {
        &self.values[self.start..self.start + self.len]
    }
}

impl DerefMut for AlignedBuffer {
    fn deref_mut(&mut self) -> &mut [f32] {
        &mut self.values[self.start..self.start + self.len]
    }
}

/// Buffers that wait to be used again, by length.
#[derive(Default)]
pub(super) struct BufferPool {
    free: BTreeMap<usize, Vec<AlignedBuffer>>,
    free_fixed: BTreeMap<usize, Vec<Vec<i64>>>,
}

impl BufferPool {
    /// A buffer of `len` values with rubbish in it.
    pub(super) fn take(&mut self, len: usize) -> AlignedBuffer {
        self.free.get_mut(&len).and_then(Vec::pop).unwrap_or_else(|| AlignedBuffer::zeroed(len))
    }

    /// Takes a buffer back.
    pub(super) fn give(&mut self, buffer: AlignedBuffer) {
        self.free.entry(buffer.len()).or_default().push(buffer);
    }

    /// A fixed-point buffer of `len` zeros.
    pub(super) fn take_fixed(&mut self, len: usize) -> Vec<i64> {
        match self.free_fixed.get_mut(&len).and_then(Vec::pop) {
            Some(mut buffer) => {
                buffer.fill(0);
                buffer
            }
            None => vec![0; len],
        }
    }

    /// Takes a fixed-point buffer back.
    pub(super) fn give_fixed(&mut self, buffer: Vec<i64>) {
        self.free_fixed.entry(buffer.len()).or_default().push(buffer);
    }

    /// Gives all that waits back to the system.
    pub(super) fn clear(&mut self) {
        self.free.clear();
        self.free_fixed.clear();
    }
}

/// Byte vectors that wait to be used again, by length; they come back when the last
/// [`Bytes`] over them is dropped, wherever that is.
#[derive(Clone, Default)]
pub(super) struct BytePool {
    shelf: Arc<Mutex<Shelf>>,
}

#[derive(Default)]
struct Shelf {
    free: BTreeMap<usize, Vec<Vec<u8>>>,
    bytes: usize,
}

impl BytePool {
    /// Encodes `values` into pooled bytes.
    pub(super) fn encode(&self, codec: Codec, values: &[f32]) -> Payload {
        self.payload(codec, values.len(), |bytes| codec.encode(values, bytes))
    }

    /// Encodes sums in fixed point into pooled bytes.
    pub(super) fn encode_fixed(&self, sums: &[i64]) -> Payload {
        self.payload(Codec::Fixed, sums.len(), |bytes| fixed::encode(sums, bytes))
    }

    fn payload(&self, codec: Codec, len: usize, encode: impl FnOnce(&mut [u8])) -> Payload {
        let mut bytes = self.take(codec.byte_len(len));
        encode(&mut bytes);
        let bytes = Bytes::from_owner(Pooled { bytes, shelf: self.shelf.clone() });
        let len = u32::try_from(len).expect("a tensor on the wire has fewer than 2^32 values: limits::TENSOR_BYTES_MAX");
        Payload { meta: TensorMeta { len, codec }, bytes }
    }

    fn take(&self, len: usize) -> Vec<u8> {
        let mut shelf = lock(&self.shelf);
        match shelf.free.get_mut(&len).and_then(Vec::pop) {
            Some(bytes) => {
                shelf.bytes -= len;
                bytes
            }
            None => vec![0; len],
        }
    }

    /// Gives all that waits back to the system.
    pub(super) fn clear(&self) {
        *lock(&self.shelf) = Shelf::default();
    }
}

/// A panic elsewhere leaves the shelf usable: it holds nothing but spare memory.
fn lock(shelf: &Mutex<Shelf>) -> MutexGuard<'_, Shelf> {
    shelf.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Bytes that go back to their shelf.
struct Pooled {
    bytes: Vec<u8>,
    shelf: Arc<Mutex<Shelf>>,
}

impl AsRef<[u8]> for Pooled {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

impl Drop for Pooled {
    fn drop(&mut self) {
        let bytes = std::mem::take(&mut self.bytes);
        let mut shelf = lock(&self.shelf);
        if shelf.bytes + bytes.len() <= POOLED_BYTES_MAX {
            shelf.bytes += bytes.len();
            shelf.free.entry(bytes.len()).or_default().push(bytes);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffers_are_aligned_and_stay_where_they_are() {
        for len in [0, 16, 48, 4096] {
            let buffer = AlignedBuffer::zeroed(len);
            let address = buffer.as_ptr() as usize;
            assert_eq!((buffer.len(), address % ALIGN_BYTES), (len, 0));
            let moved = Box::new(buffer);
            assert_eq!(moved.as_ptr() as usize, address);
        }
    }

    #[test]
    fn buffers_of_a_length_are_used_again() {
        let mut pool = BufferPool::default();
        let buffer = pool.take(32);
        let address = buffer.as_ptr();
        pool.give(buffer);
        assert_ne!(pool.take(64).as_ptr(), address);
        assert_eq!(pool.take(32).as_ptr(), address);
    }

    #[test]
    fn bytes_come_back_when_the_last_owner_drops_them() {
        let pool = BytePool::default();
        let payload = pool.encode(Codec::None, &[1.0; 8]);
        let (address, copy) = (payload.bytes.as_ptr(), payload.bytes.slice(4..));
        drop(payload);
        assert_ne!(pool.encode(Codec::None, &[2.0; 8]).bytes.as_ptr(), address, "still held by the copy");
        drop(copy);
        let addresses: Vec<_> = [3.0, 4.0].map(|value| pool.encode(Codec::None, &[value; 8])).iter().map(|p| p.bytes.as_ptr()).collect();
        assert!(addresses.contains(&address));
    }

    #[test]
    fn the_pool_of_bytes_is_bounded() {
        let pool = BytePool::default();
        drop(pool.encode(Codec::None, &vec![0.0; POOLED_BYTES_MAX / 4 + 1]));
        assert_eq!(lock(&pool.shelf).bytes, 0);
    }
}
