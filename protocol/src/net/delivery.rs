//! Names of frames, and which of them have arrived: a frame that is sent again on another
//! connection is taken once.

use crate::net::outgoing::Class;

/// A frame's name between two processes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Delivery {
    /// Rises whenever what was under way is given up ([`super::links::LinkEvent::Down`]).
    pub(super) session: u32,
    pub(super) class: Class,
    /// Counts from 0 in each session and class.
    pub(super) number: u64,
}

/// Length of an encoded [`Delivery`].
pub(super) const DELIVERY_BYTES: usize = 13;
/// A frame may be so far ahead of the oldest that has not arrived.
pub(super) const AHEAD_MAX: u64 = 1024;

impl Delivery {
    pub(super) fn to_bytes(self) -> [u8; DELIVERY_BYTES] {
        let mut bytes = [0; DELIVERY_BYTES];
        bytes[..4].copy_from_slice(&self.session.to_le_bytes());
        bytes[4] = self.class as u8;
        bytes[5..].copy_from_slice(&self.number.to_le_bytes());
        bytes
    }

    /// `None` if there is no such class.
    pub(super) fn from_bytes(bytes: [u8; DELIVERY_BYTES]) -> Option<Self> {
        let [a, b, c, d, class, number @ ..] = bytes;
        Some(Self { session: u32::from_le_bytes([a, b, c, d]), class: Class::from_byte(class)?, number: u64::from_le_bytes(number) })
    }
}

/// What has arrived from one process.
#[derive(Debug, Default)]
pub(super) struct Arrived {
    session: u32,
    windows: [Window; 4],
}

/// One class of one session.
#[derive(Clone, Copy, Debug, Default)]
struct Window {
    /// All before it have arrived.
    next: u64,
    /// Which of those from `next` on have arrived: bit `number % AHEAD_MAX`.
    later: [u64; AHEAD_MAX as usize / 64],
}

/// The peer breaks the rule about [`AHEAD_MAX`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a frame too far ahead of those that are missing")]
pub(super) struct TooFarAhead;

impl Arrived {
    /// Notes that a frame is here; whether it is new. Frames of an older session were given up by
    /// their sender and are not.
    pub(super) fn take(&mut self, delivery: Delivery) -> Result<bool, TooFarAhead> {
        if delivery.session > self.session {
            *self = Self { session: delivery.session, ..Self::default() };
        }
        if delivery.session < self.session {
            return Ok(false);
        }
        self.windows[delivery.class as usize].take(delivery.number)
    }
}

impl Window {
    fn take(&mut self, number: u64) -> Result<bool, TooFarAhead> {
        if number < self.next {
            return Ok(false);
        }
        if number - self.next >= AHEAD_MAX {
            return Err(TooFarAhead);
        }
        let is_new = !self.replace(number, true);
        while self.replace(self.next, false) {
            self.next += 1;
        }
        Ok(is_new)
    }

    /// Sets a number's bit; what it was. Past the last number that has arrived it stays unset.
    fn replace(&mut self, number: u64, set: bool) -> bool {
        let place = (number % AHEAD_MAX) as usize;
        let (word, bit) = (&mut self.later[place / 64], 1 << (place % 64));
        let was = *word & bit != 0;
        if set {
            *word |= bit
        } else {
            *word &= !bit
        }
        was
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    fn named(session: u32, number: u64) -> Delivery {
        Delivery { session, class: Class::State, number }
    }

    #[test]
    fn names_survive_the_wire() {
        let name = Delivery { session: 7, class: Class::Reduction, number: u64::MAX - 3 };
        assert_eq!(Delivery::from_bytes(name.to_bytes()), Some(name));
        let mut bytes = name.to_bytes();
        bytes[4] = 4;
        assert_eq!(Delivery::from_bytes(bytes), None);
    }

    #[test]
    fn classes_and_sessions_count_by_themselves() {
        let mut arrived = Arrived::default();
        assert_eq!(arrived.take(named(1, 0)), Ok(true));
        assert_eq!(arrived.take(Delivery { class: Class::Control, ..named(1, 0) }), Ok(true));
        assert_eq!(arrived.take(named(2, 0)), Ok(true));
        assert_eq!(arrived.take(named(1, 1)), Ok(false), "given up by its sender");
    }

    #[test]
    fn nobody_may_run_ahead() {
        let mut arrived = Arrived::default();
        assert_eq!(arrived.take(named(0, AHEAD_MAX)), Err(TooFarAhead));
        assert_eq!(arrived.take(named(0, AHEAD_MAX - 1)), Ok(true));
        assert_eq!(arrived.take(named(0, 0)), Ok(true));
        assert_eq!(arrived.take(named(0, AHEAD_MAX)), Ok(true));
    }

    proptest! {
        /// As a set of all that ever came would say.
        #[test]
        fn each_is_new_once(draws in proptest::collection::vec(0u64..3000, 0..4000)) {
            let (mut arrived, mut known) = (Arrived::default(), BTreeSet::new());
            for number in draws {
                let missing = (0..).find(|number| !known.contains(number)).unwrap_or(0);
                let expected = if number >= missing + AHEAD_MAX { Err(TooFarAhead) } else { Ok(known.insert(number)) };
                prop_assert_eq!(arrived.take(named(0, number)), expected);
            }
        }
    }
}
