//! What waits to be sent to one node: in order of urgency, bounded, with room left for the urgent.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use bytes::Bytes;

use super::quic;
use crate::limits;
use crate::message::data::{Frame, PeerMessage};
use crate::wire::{self, WireError};

/// How urgent a frame is. Ordered: the most urgent first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Class {
    /// Small messages that others wait for.
    Control,
    /// Activations and their gradients.
    Boundary,
    /// Chunks of gradients.
    Reduction,
    /// Snapshots and data.
    State,
}

const CLASSES: [Class; 4] = [Class::Control, Class::Boundary, Class::Reduction, Class::State];

impl Class {
    /// The class of a message.
    fn of(message: &PeerMessage) -> Self {
        match message {
            PeerMessage::Forward { .. } | PeerMessage::Backward { .. } => Self::Boundary,
            PeerMessage::Contribution { .. } | PeerMessage::ReducedChunk { .. } => Self::Reduction,
            PeerMessage::StateChunk { .. } | PeerMessage::Blob { .. } => Self::State,
            PeerMessage::Missing { .. }
            | PeerMessage::Finished { .. }
            | PeerMessage::HopFailed { .. }
            | PeerMessage::FetchReduced { .. }
            | PeerMessage::FetchSnapshot { .. }
            | PeerMessage::SnapshotManifest { .. }
            | PeerMessage::FetchStateChunk { .. }
            | PeerMessage::Unavailable { .. }
            | PeerMessage::FetchBlob { .. }
            | PeerMessage::NoBlob { .. } => Self::Control,
        }
    }

    /// The priority of its streams.
    pub(super) fn priority(self) -> i32 {
        match self {
            Self::Control => 3,
            Self::Boundary => 2,
            Self::Reduction => 1,
            Self::State => 0,
        }
    }

    /// Streams it may have open at once: together fewer than the peer allows, so that none takes
    /// another's.
    fn streams_max(self) -> usize {
        let share = limits::LINK_STREAMS_MAX as usize / 4;
        match self {
            Self::Control | Self::Boundary | Self::Reduction => share,
            Self::State => share / 2,
        }
    }
}

/// A frame ready to be sent.
pub(super) struct Outgoing {
    pub(super) class: Class,
    pub(super) head: Bytes,
    pub(super) payload: Bytes,
}

impl Outgoing {
    pub(super) fn new(frame: Frame) -> Result<Self, WireError> {
        let head = wire::data_head(&frame)?.into();
        Ok(Self { class: Class::of(&frame.message), head, payload: frame.payload.map(|payload| payload.bytes).unwrap_or_default() })
    }
}

/// Frames that wait and a count of those on their way.
#[derive(Default)]
pub(super) struct Queue {
    waiting: [VecDeque<Outgoing>; 4],
    streams: [usize; 4],
    /// Units of payload on their way, as the receiver counts them: it never has to make one frame
    /// wait for another that we hold back.
    units: usize,
}

impl Queue {
    /// Whether there is room for the frame.
    pub(super) fn push(&mut self, outgoing: Outgoing) -> bool {
        let waiting: usize = self.waiting.iter().map(VecDeque::len).sum();
        let fits = waiting < limits::DATA_QUEUE;
        if fits {
            self.waiting[outgoing.class as usize].push_back(outgoing);
        }
        fits
    }

    /// Forgets what waits.
    pub(super) fn clear(&mut self) {
        self.waiting.iter_mut().for_each(VecDeque::clear);
    }

    /// Whether a frame may start now.
    pub(super) fn is_ready(&self) -> bool {
        self.next().is_some()
    }

    /// Takes the frame that is to start now.
    pub(super) fn start(&mut self) -> Option<Outgoing> {
        let class = self.next()? as usize;
        let outgoing = self.waiting[class].pop_front()?;
        self.streams[class] += 1;
        self.units += quic::budget(outgoing.payload.len());
        Some(outgoing)
    }

    /// A frame that was started is through, or has failed.
    pub(super) fn done(&mut self, class: Class, bytes: usize) {
        self.streams[class as usize] -= 1;
        self.units -= quic::budget(bytes);
    }

    /// The most urgent class that may start a frame. While its frame waits for room, less urgent
    /// ones with payload wait behind it.
    fn next(&self) -> Option<Class> {
        for class in CLASSES {
            let Some(first) = self.waiting[class as usize].front() else { continue };
            if self.streams[class as usize] >= class.streams_max() {
                continue;
            }
            let units = quic::budget(first.payload.len());
            return (units == 0 || self.units + units <= quic::BUDGET).then_some(class);
        }
        None
    }
}

/// Goodput while something is on its way, smoothed.
#[derive(Default)]
pub(super) struct RateMeter {
    running: usize,
    since: Option<Instant>,
    bytes: usize,
    rate: f64,
}

impl RateMeter {
    /// Fewer bytes say nothing about a rate.
    const SAMPLE_BYTES_MIN: usize = 256 * 1024;
    /// A sample is taken at least so often while busy.
    const SAMPLE_TIME: Duration = Duration::from_millis(250);
    /// Weight of a new sample.
    const WEIGHT: f64 = 0.25;

    /// A frame starts.
    pub(super) fn start(&mut self, now: Instant) {
        self.running += 1;
        self.since.get_or_insert(now);
    }

    /// A frame has ended, with so many bytes delivered.
    pub(super) fn done(&mut self, now: Instant, bytes: usize) {
        self.running -= 1;
        self.bytes += bytes;
        let Some(since) = self.since else { return };
        let took = now.saturating_duration_since(since);
        if self.running > 0 && took < Self::SAMPLE_TIME {
            return;
        }
        if self.bytes >= Self::SAMPLE_BYTES_MIN && !took.is_zero() {
            let sample = self.bytes as f64 / took.as_secs_f64();
            self.rate = if self.rate == 0.0 { sample } else { self.rate + Self::WEIGHT * (sample - self.rate) };
            self.bytes = 0;
            self.since = (self.running > 0).then_some(now);
        } else if self.running == 0 {
            (self.bytes, self.since) = (0, None);
        }
    }

    /// Bytes a second.
    pub(super) fn rate(&self) -> f64 {
        self.rate
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::id::{Group, Hash, Version};
    use crate::tensor::Payload;

    fn state(bytes: usize) -> Outgoing {
        let message = PeerMessage::StateChunk { group: Group(0), version: Version(0), chunk: 0 };
        Outgoing::new(Frame { message, payload: Some(Payload::raw(vec![0; bytes].into())) }).expect("within the caps")
    }

    fn small() -> Outgoing {
        Outgoing::new(PeerMessage::NoBlob { hash: Hash([0; 32]) }.into()).expect("within the caps")
    }

    #[test]
    fn the_urgent_goes_first_and_never_waits_for_bulk() {
        let mut queue = Queue::default();
        for _ in 0..Class::State.streams_max() + 1 {
            assert!(queue.push(state(10)));
        }
        while queue.start().is_some() {}
        assert!(!queue.is_ready(), "all streams of bulk are taken");
        assert!(queue.push(small()));
        assert_eq!(queue.start().map(|outgoing| outgoing.class), Some(Class::Control));
        queue.done(Class::State, 10);
        assert!(queue.push(small()));
        assert_eq!(queue.start().map(|outgoing| outgoing.class), Some(Class::Control));
        assert_eq!(queue.start().map(|outgoing| outgoing.class), Some(Class::State));
    }

    #[test]
    fn payloads_on_their_way_are_bounded_and_one_always_fits() {
        let mut queue = Queue::default();
        let mut large = state(1);
        large.payload = vec![0; limits::TENSOR_BYTES_MAX].into();
        assert!(queue.push(large) && queue.push(state(1)));
        assert!(queue.start().is_some());
        assert!(!queue.is_ready());
        queue.done(Class::State, limits::TENSOR_BYTES_MAX);
        assert!(queue.is_ready());
    }

    #[test]
    fn a_full_queue_takes_no_more() {
        let mut queue = Queue::default();
        for _ in 0..limits::DATA_QUEUE {
            assert!(queue.push(small()));
        }
        assert!(!queue.push(small()));
        queue.clear();
        assert!(queue.push(small()));
    }

    #[test]
    #[expect(clippy::disallowed_methods, reason = "any moment will do to count from")]
    fn the_rate_counts_busy_time_only() {
        let (mut meter, start) = (RateMeter::default(), Instant::now());
        let at = |ms| start + Duration::from_millis(ms);
        meter.start(at(0));
        meter.start(at(10));
        meter.done(at(50), 1_000_000);
        meter.done(at(100), 1_000_000);
        assert!((meter.rate() - 2e7).abs() < 1.0);
        // Ten seconds of silence do not count; a crumb says nothing.
        meter.start(at(10_000));
        meter.done(at(11_000), 10);
        assert!((meter.rate() - 2e7).abs() < 1.0);
        meter.start(at(20_000));
        meter.done(at(20_100), 4_000_000);
        assert!((meter.rate() - 2.5e7).abs() < 1.0);
    }
}
