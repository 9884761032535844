//! What waits to be sent to one node: in order of urgency, bounded, with room left for the urgent.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use bytes::Bytes;

use super::arrivals::{BUDGET, budget};
use super::delivery::{AHEAD_MAX, Delivery};
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

    /// The class of this number; `None` if there is none.
    pub(super) fn from_byte(byte: u8) -> Option<Self> {
        CLASSES.into_iter().find(|class| *class as u8 == byte)
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

/// A frame ready to be sent. A clone shares its bytes.
#[derive(Clone, Debug)]
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

/// Numbers sessions of this process: a receiver may remember one whose link is long gone.
pub(super) type Sessions = Arc<AtomicU32>;

/// Frames that wait, and the names of those on their way.
pub(super) struct Queue {
    sessions: Sessions,
    session: u32,
    lines: [Line; 4],
    /// Units of payload on their way, as the receiver counts them: it never has to make one frame
    /// wait for another that we hold back.
    units: usize,
}

/// What waits in one class.
#[derive(Default)]
struct Line {
    waiting: VecDeque<Outgoing>,
    /// Frames whose connection ended before they were through, by their numbers.
    again: BTreeMap<u64, Outgoing>,
    under_way: BTreeSet<u64>,
    /// The number of the next frame that is sent for the first time.
    next: u64,
}

impl Line {
    fn first(&self) -> Option<&Outgoing> {
        self.again.values().next().or_else(|| self.waiting.front())
    }

    /// The other side need not remember more of what came out of order.
    fn is_ahead(&self) -> bool {
        self.again.is_empty() && self.under_way.first().is_some_and(|oldest| self.next - oldest >= AHEAD_MAX)
    }

    fn start(&mut self) -> Option<(u64, Outgoing)> {
        let (number, outgoing) = match self.again.pop_first() {
            Some(again) => again,
            None => {
                self.next += 1;
                (self.next - 1, self.waiting.pop_front()?)
            }
        };
        self.under_way.insert(number);
        Some((number, outgoing))
    }
}

impl Queue {
    pub(super) fn new(sessions: Sessions) -> Self {
        let session = sessions.fetch_add(1, Ordering::Relaxed);
        Self { sessions, session, lines: Default::default(), units: 0 }
    }

    /// Whether there is room for the frame.
    pub(super) fn push(&mut self, outgoing: Outgoing) -> bool {
        let waiting: usize = self.lines.iter().map(|line| line.waiting.len()).sum();
        let fits = waiting < limits::DATA_QUEUE;
        if fits {
            self.lines[outgoing.class as usize].waiting.push_back(outgoing);
        }
        fits
    }

    /// Forgets what waits and what is on its way; frames are named anew.
    pub(super) fn clear(&mut self) {
        *self = Self::new(Arc::clone(&self.sessions));
    }

    /// Whether a frame may start now.
    pub(super) fn is_ready(&self) -> bool {
        self.next().is_some()
    }

    /// Takes the frame that is to start now.
    pub(super) fn start(&mut self) -> Option<(Delivery, Outgoing)> {
        let class = self.next()?;
        let (number, outgoing) = self.lines[class as usize].start()?;
        self.units += budget(outgoing.payload.len());
        Some((Delivery { session: self.session, class, number }, outgoing))
    }

    /// A frame that was started is through.
    pub(super) fn done(&mut self, delivery: Delivery, bytes: usize) {
        if delivery.session == self.session && self.lines[delivery.class as usize].under_way.remove(&delivery.number) {
            self.units -= budget(bytes);
        }
    }

    /// A frame that was started may not have arrived: it is to start again, under its name.
    pub(super) fn again(&mut self, delivery: Delivery, outgoing: Outgoing) {
        let line = &mut self.lines[delivery.class as usize];
        if delivery.session == self.session && line.under_way.remove(&delivery.number) {
            self.units -= budget(outgoing.payload.len());
            line.again.insert(delivery.number, outgoing);
        }
    }

    /// The most urgent class that may start a frame. While its frame waits for room, less urgent
    /// ones with payload wait behind it.
    fn next(&self) -> Option<Class> {
        for class in CLASSES {
            let line = &self.lines[class as usize];
            let Some(first) = line.first() else { continue };
            if line.under_way.len() >= class.streams_max() || line.is_ahead() {
                continue;
            }
            let units = budget(first.payload.len());
            return (units == 0 || self.units + units <= BUDGET).then_some(class);
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

    fn started(queue: &mut Queue) -> Option<(Class, u64)> {
        queue.start().map(|(delivery, outgoing)| {
            assert_eq!(delivery.class, outgoing.class);
            (delivery.class, delivery.number)
        })
    }

    #[test]
    fn the_urgent_goes_first_and_never_waits_for_bulk() {
        let mut queue = Queue::new(Sessions::default());
        for _ in 0..Class::State.streams_max() + 1 {
            assert!(queue.push(state(10)));
        }
        while queue.start().is_some() {}
        assert!(!queue.is_ready(), "all streams of bulk are taken");
        assert!(queue.push(small()));
        assert_eq!(started(&mut queue), Some((Class::Control, 0)));
        queue.done(Delivery { session: 0, class: Class::State, number: 0 }, 10);
        assert!(queue.push(small()));
        assert_eq!(started(&mut queue), Some((Class::Control, 1)));
        assert_eq!(started(&mut queue), Some((Class::State, Class::State.streams_max() as u64)));
    }

    #[test]
    fn what_did_not_arrive_goes_first_under_its_name() {
        let mut queue = Queue::new(Sessions::default());
        for _ in 0..4 {
            assert!(queue.push(small()));
        }
        let started: Vec<(Delivery, Outgoing)> = std::iter::from_fn(|| queue.start()).collect();
        queue.done(started[1].0, 0);
        for number in [2, 0] {
            queue.again(started[number].0, started[number].1.clone());
        }
        assert!(queue.push(small()));
        let numbers: Vec<u64> = std::iter::from_fn(|| queue.start()).map(|(delivery, _)| delivery.number).collect();
        assert_eq!(numbers, [0, 2, 4]);
        // What was given up does not come back.
        queue.clear();
        queue.again(started[3].0, started[3].1.clone());
        assert!(!queue.is_ready());
        assert!(queue.push(small()));
        assert_eq!(queue.start().map(|(delivery, _)| (delivery.session, delivery.number)), Some((1, 0)));
    }

    #[test]
    fn no_frame_runs_too_far_ahead_of_the_oldest() {
        let mut queue = Queue::new(Sessions::default());
        assert!(queue.push(small()));
        let (oldest, frame) = queue.start().expect("there is room");
        let mut passed = 1;
        loop {
            assert!(queue.push(small()));
            let Some((delivery, _)) = queue.start() else { break };
            queue.done(delivery, 0);
            passed += 1;
        }
        assert_eq!(passed, AHEAD_MAX);
        // It may itself be sent again.
        queue.again(oldest, frame);
        assert_eq!(queue.start().map(|(delivery, _)| delivery), Some(oldest));
        queue.done(oldest, 0);
        assert!(queue.is_ready());
    }

    #[test]
    fn payloads_on_their_way_are_bounded_and_one_always_fits() {
        let mut queue = Queue::new(Sessions::default());
        let mut large = state(1);
        large.payload = vec![0; limits::TENSOR_BYTES_MAX].into();
        assert!(queue.push(large) && queue.push(state(1)));
        assert!(queue.start().is_some());
        assert!(!queue.is_ready());
        queue.done(Delivery { session: 0, class: Class::State, number: 0 }, limits::TENSOR_BYTES_MAX);
        assert!(queue.is_ready());
    }

    #[test]
    fn a_full_queue_takes_no_more() {
        let mut queue = Queue::new(Sessions::default());
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
