//! How long requests hold concurrency slots, and an estimate of when a slot becomes free.
//!
//! The time at which a slot becomes free depends on running requests and cannot be known. If `n`
//! slots are held for a time `t` each, one slot is released every `t / n` on average. Each request
//! ahead in the queue takes one of the released slots, so each request adds `t / n` to the wait.

use crate::time::Span;

/// A moving average of slot holding times. The average has a fixed size and uses integer
/// arithmetic.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HoldingTime {
    /// The average in fixed-point format, [`HoldingTime::PARTS`] per microsecond.
    parts: u64,
    /// The weight of the average, as a number of observations: at most [`HoldingTime::WINDOW`].
    weight: u64,
}

/// The input of an estimate, besides the holding time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SlotEstimate {
    /// The number of slots, all of which are held.
    pub slots: u64,
    /// The number of slots that must be released for the request.
    pub missing: u64,
    /// The number of requests waiting ahead of the request.
    pub ahead: u64,
    /// The longest wait time of a request. Waiting requests give up after this time.
    pub longest_wait: Span,
    /// The lease of a slot.
    pub lease: Span,
}

impl HoldingTime {
    const PARTS: u64 = 1 << 8;

    /// After this number of observations, the average becomes an exponential moving average, in
    /// which each further observation has a weight of 1 / `WINDOW`.
    const WINDOW: u64 = 32;

    /// The longest holding time that is added to the average. A longer time is replaced by this
    /// maximum, so that the arithmetic cannot overflow.
    const LONGEST: Span = Span::from_secs(366 * 86_400);

    /// The shortest estimate. One millisecond is the smallest unit of the retry times sent to
    /// clients.
    const SHORTEST: Span = Span::from_millis(1);

    /// Adds an observation: a request that held its slots for the time `held`.
    pub fn observe(&mut self, held: Span) {
        let parts = held.min(Self::LONGEST).as_micros() * Self::PARTS;
        self.weight = (self.weight + 1).min(Self::WINDOW);
        if parts >= self.parts {
            self.parts += (parts - self.parts) / self.weight;
        } else {
            self.parts -= (self.parts - parts) / self.weight;
        }
    }

    /// Returns the average, rounded up, or `None` before the first observation.
    #[must_use]
    pub fn average(&self) -> Option<Span> {
        let average = Span::from_micros(self.parts.div_ceil(Self::PARTS));
        (self.weight > 0).then_some(average)
    }

    /// Estimates how long a request that is denied now would wait for its slots. Returns `None`
    /// before the first observation. The estimate is at least 1 ms and at most the lease.
    #[must_use]
    pub fn estimate(&self, input: &SlotEstimate) -> Option<Span> {
        let average = u128::from(self.average()?.as_micros());
        let per_slots = |count: u64| {
            let micros = (average * u128::from(count)).div_ceil(u128::from(input.slots.max(1)));
            Span::from_micros(u64::try_from(micros).unwrap_or(u64::MAX))
        };
        let ahead = per_slots(input.ahead).min(input.longest_wait);
        let own = per_slots(input.missing.max(1));
        let total = Span::from_micros(ahead.as_micros().saturating_add(own.as_micros()));
        Some(total.max(Self::SHORTEST).min(input.lease))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const INPUT: SlotEstimate = SlotEstimate {
        slots: 20,
        missing: 1,
        ahead: 0,
        longest_wait: Span::from_secs(2),
        lease: Span::from_secs(60),
    };

    fn after(held: &[u64]) -> HoldingTime {
        let mut holding_time = HoldingTime::default();
        for millis in held {
            holding_time.observe(Span::from_millis(*millis));
        }
        holding_time
    }

    #[test]
    fn nothing_is_estimated_before_the_first_observation() {
        assert_eq!(HoldingTime::default().average(), None);
        assert_eq!(HoldingTime::default().estimate(&INPUT), None);
    }

    #[test]
    fn the_average_decays() {
        assert_eq!(after(&[500]).average(), Some(Span::from_millis(500)));
        assert_eq!(after(&[400, 600]).average(), Some(Span::from_millis(500)));
        let mut changed = vec![10; 1_000];
        changed.extend([1_000; 200]);
        let average = after(&changed).average().unwrap();
        assert!(average > Span::from_millis(990), "{average}");
    }

    #[test]
    fn requests_ahead_take_their_slots_first() {
        let half_second = after(&[500; 50]);
        let estimate = |input: SlotEstimate| half_second.estimate(&input).unwrap();
        assert_eq!(estimate(INPUT), Span::from_millis(25));
        let ahead = |ahead| SlotEstimate { ahead, ..INPUT };
        assert_eq!(estimate(ahead(40)), Span::from_millis(1_025));
        // The requests ahead give up after 2 s.
        assert_eq!(estimate(ahead(400)), Span::from_millis(2_025));
        let large = SlotEstimate {
            missing: 4,
            ..INPUT
        };
        assert_eq!(estimate(large), Span::from_millis(100));
    }

    #[test]
    fn an_estimate_is_bounded() {
        assert_eq!(after(&[0]).estimate(&INPUT), Some(Span::from_millis(1)));
        let mut holding_time = HoldingTime::default();
        holding_time.observe(Span::from_micros(u64::MAX));
        let extreme = SlotEstimate {
            slots: 1,
            missing: u64::MAX,
            ahead: u64::MAX,
            longest_wait: Span::from_micros(u64::MAX),
            lease: INPUT.lease,
        };
        assert_eq!(holding_time.estimate(&extreme), Some(INPUT.lease));
    }
}
