//! What frames share while they arrive on one connection: room for their payloads, and a pace
//! below which nobody is alive.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::Instant;

use super::delivery::{DELIVERY_BYTES, Delivery};
use crate::limits;
use crate::message::data::Frame;
use crate::wire::WireError;

/// Payload memory is counted in units of so many bytes, by sender and receiver alike.
const BUDGET_UNIT: usize = 1024;
/// Units of payload that one side may have on the way to the other at once: the largest tensor.
pub(super) const BUDGET: usize = limits::TENSOR_BYTES_MAX / BUDGET_UNIT;

/// Units that a payload of so many bytes takes.
pub(super) fn budget(bytes: usize) -> usize {
    bytes.div_ceil(BUDGET_UNIT)
}

/// A whole frame that has come.
#[derive(Debug)]
pub(super) struct Came {
    pub(super) delivery: Delivery,
    pub(super) frame: Frame,
    /// Holds its room: dropped when the frame is handed on.
    pub(super) room: Option<OwnedSemaphorePermit>,
}

/// Why a frame did not arrive.
#[derive(Debug, thiserror::Error)]
pub(super) enum ReadFrameError {
    /// The sender gave up, or the connection did.
    #[error("cut off: {0}")]
    Cut(String),
    /// The bytes are no frame.
    #[error("bad frame: {0}")]
    Bad(#[from] WireError),
    /// Nothing comes any more.
    #[error("stalled within a frame")]
    Stalled,
}

impl ReadFrameError {
    pub(super) fn cut(error: impl std::fmt::Display) -> Self {
        Self::Cut(error.to_string())
    }
}

/// Reads a frame's name.
pub(super) fn delivery(bytes: [u8; DELIVERY_BYTES]) -> Result<Delivery, ReadFrameError> {
    Delivery::from_bytes(bytes).ok_or_else(|| WireError::Malformed("a frame of no class".to_owned()).into())
}

/// What the frames of one connection share while they arrive.
pub(super) struct Arrivals {
    room: Arc<Semaphore>,
    /// Payload bytes that came on the whole connection.
    bytes: AtomicU64,
}

impl Arrivals {
    pub(super) fn new() -> Self {
        Self { room: Arc::new(Semaphore::new(BUDGET)), bytes: AtomicU64::new(0) }
    }

    /// Waits until there is room for a payload.
    pub(super) async fn room(&self, bytes: usize) -> Option<OwnedSemaphorePermit> {
        let units = u32::try_from(budget(bytes)).unwrap_or(u32::MAX);
        // Nobody closes it.
        if units == 0 { None } else { Arc::clone(&self.room).acquire_many_owned(units).await.ok() }
    }

    /// So many bytes of payload came.
    pub(super) fn add(&self, bytes: usize) {
        self.bytes.fetch_add(bytes as u64, Ordering::Relaxed);
    }

    /// Watches over the connection's pace while a frame is read.
    pub(super) fn pace(&self) -> Pace {
        Pace { bytes: self.bytes.load(Ordering::Relaxed), look_at: Instant::now() + LOOK_EVERY }
    }
}

/// Slower than this, in bytes a second over the whole connection, is not alive.
const RATE_MIN: u64 = 1024;
const LOOK_EVERY: Duration = limits::HANDSHAKE_TIME_MAX;

/// What had come at the last look.
pub(super) struct Pace {
    bytes: u64,
    look_at: Instant,
}

impl Pace {
    /// How long to wait for more before the next [`Pace::check`].
    pub(super) fn look_again(&self) -> Duration {
        self.look_at.saturating_duration_since(Instant::now())
    }

    /// Whether enough came since the last look. A frame may have to wait for more urgent ones; the
    /// connection may not.
    pub(super) fn check(&mut self, arrivals: &Arrivals, waits_for_us: impl Fn() -> bool) -> Result<(), ReadFrameError> {
        if !self.look_again().is_zero() {
            return Ok(());
        }
        let before = std::mem::replace(self, arrivals.pace());
        if self.bytes - before.bytes < RATE_MIN * LOOK_EVERY.as_secs() && !waits_for_us() { Err(ReadFrameError::Stalled) } else { Ok(()) }
    }
}
