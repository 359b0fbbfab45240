//! The interval kernel: a token bucket that gets all the tokens of an interval at once.
//!
//! Face: `token_bucket` with `refill_mode: interval`. `R` tokens arrive at the end of every interval `I`,
//! up to the capacity `B`; what overflows is lost. A full bucket has no interval running: the next take
//! starts one, so that forgetting a full bucket changes nothing.
//!
//! The state is when the bucket will be full again, and how many tokens the last refill brings. The tokens
//! missing now follow from it, as they do from a GCRA's TAT:
//!
//! ```text
//!   missing = (m - 1) * R + last     m = ceil((full_at - now) / I) refills to come
//!
//!   now        R          R         last = full
//! ───┼─────────┼──────────┼──────────┼──▶
//!      m = 3      m = 2      m = 1   full_at
//! ```
//!
//! - **Promise.** Any half-open interval of `t` admits at most `B + R * ceil(t / I)`.
//! - **Memory.** 16 bytes; a key whose bucket is full is as good as new.
//! - **Weakness.** Everybody who ran dry together comes back together, at the refill.
//! - **Source.** Tanenbaum, Computer Networks (token bucket); the discrete refill of `bucket4j`'s "intervally".

use crate::{
    bounds::{self, check_count, check_rate},
    kernel::{Standing, narrow},
    limit::{LimitError, Rate},
    outcome::Retry,
    receipt::Place,
    remote::{Numbers, Terms},
    time::Timestamp,
};

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct IntervalState {
    /// When the bucket is full again, in microseconds since the epoch.
    pub(crate) full_at: u64,
    /// What the last refill brings: from 1 to the refill, of whoever left it.
    pub(crate) last: u64,
}

impl IntervalState {
    pub(crate) fn full_at(&self) -> Timestamp {
        Timestamp::from_micros(self.full_at)
    }
}

#[derive(Clone, Debug)]
pub(crate) struct Interval {
    refill: u64,
    every: u64,
    capacity: u64,
}

/// What is missing from a bucket, more than all of it where more was admitted under wider limits; and when the next refill
/// comes.
struct Missing {
    tokens: u128,
    next_refill: u64,
}

impl Interval {
    pub(crate) fn new(refill: Rate, capacity: u64) -> Result<Self, LimitError> {
        check_rate("refill", refill)?;
        check_count("capacity", capacity, 1)?;
        let intervals = u128::from(capacity.div_ceil(refill.count));
        if intervals * u128::from(refill.period.as_micros())
            > u128::from(bounds::MAX_DRAIN.as_micros())
        {
            let problem = format!(
                "{capacity} refilled by {refill} take longer than the maximum of 100 years; lower it or raise the refill"
            );
            return Err(LimitError::new("capacity", problem));
        }
        Ok(Self {
            refill: refill.count,
            every: refill.period.as_micros(),
            capacity,
        })
    }

    /// What a state is counted in.
    pub(crate) fn terms(&self) -> Terms {
        Terms::Interval {
            refill: self.refill,
            every: self.every,
        }
    }

    /// The same capacity, refilled by `refill` tokens `every` so many microseconds.
    pub(crate) fn with_refill(&self, refill: u64, every: u64) -> Self {
        Self {
            refill: refill.max(1),
            every: every.max(1),
            capacity: self.capacity,
        }
    }

    /// Whether [`Self::adopt`] keeps all of the tokens that were missing by `old`.
    pub(crate) fn adopts_all(&self, old: &Self, state: IntervalState, now: Timestamp) -> bool {
        state.full_at <= now.as_micros() || {
            let (kept, latest) = self.converted(old, state, now);
            kept.full_at <= latest.full_at
        }
    }

    /// The numbers for a store elsewhere.
    pub(crate) fn numbers(&self) -> Numbers<'static> {
        Numbers::Interval {
            refill: self.refill,
            every: self.every,
            capacity: self.capacity,
        }
    }

    /// The most that is left to the last refill, but where others have left more.
    pub(crate) fn largest_refill(&self) -> u64 {
        self.refill
    }

    pub(crate) fn admits(&self, state: &IntervalState, now: Timestamp, cost: u64) -> bool {
        cost <= self.capacity && self.missing(state, now).tokens <= u128::from(self.capacity - cost)
    }

    pub(crate) fn charge(&self, state: &mut IntervalState, now: Timestamp, cost: u64) {
        let missing = self.missing(state, now);
        let capacity = u128::from(self.capacity);
        if missing.tokens < capacity {
            let tokens = (missing.tokens + u128::from(cost)).min(capacity);
            *state = self.state_of(tokens, missing.next_refill);
        }
    }

    pub(crate) fn refund(&self, state: &mut IntervalState, now: Timestamp, units: u64) {
        if units == 0 {
            return;
        }
        let missing = self.missing(state, now);
        *state = match missing.tokens.saturating_sub(units.into()) {
            0 => IntervalState::default(),
            tokens => self.state_of(tokens, missing.next_refill),
        };
    }

    /// Takes up to `units` of a charge out that left the bucket full again at `full_at`: what the refills since may have
    /// brought of it has come back already.
    pub(crate) fn give_back(
        &self,
        state: &mut IntervalState,
        now: Timestamp,
        (place, full_at): (&Place, u64),
        units: u64,
    ) {
        let then = place.at.as_micros();
        let refills = full_at.saturating_sub(then).div_ceil(self.every).max(1);
        let next_refill = full_at.saturating_sub((refills - 1).saturating_mul(self.every));
        let passed = match now.as_micros().checked_sub(next_refill) {
            Some(since) => since / self.every + 1,
            None => 0,
        };
        let refilled = passed.saturating_mul(self.refill);
        self.refund(state, now, units.min(place.cost.saturating_sub(refilled)));
    }

    pub(crate) fn standing(&self, state: &IntervalState, now: Timestamp) -> Standing {
        let missing = self.missing(state, now).tokens;
        let remaining = u128::from(self.capacity).saturating_sub(missing);
        Standing {
            remaining: narrow(remaining),
            reset_after: state.full_at().since(now),
        }
    }

    pub(crate) fn retry(&self, state: &IntervalState, now: Timestamp, cost: u64) -> Retry {
        if cost > self.capacity {
            return Retry::Never;
        }
        let missing = self.missing(state, now);
        let short = missing.tokens.saturating_sub((self.capacity - cost).into());
        if short == 0 {
            return Retry::NOW;
        }
        let refills = narrow(short.div_ceil(self.refill.into()));
        let at = missing
            .next_refill
            .saturating_add((refills - 1).saturating_mul(self.every));
        Retry::After(Timestamp::from_micros(at).since(now))
    }

    /// Keeps the tokens that are missing, even if they are more than fit now: whoever took them may still go by his own numbers. The
    /// next refill comes when it would have, or sooner. At a slower rate they are missing no longer than they were, or than a
    /// whole bucket.
    pub(crate) fn adopt(
        &self,
        old: Option<&Self>,
        state: IntervalState,
        now: Timestamp,
    ) -> IntervalState {
        if state.full_at <= now.as_micros() {
            return IntervalState::default();
        }
        let Some(old) = old else {
            // Without the old numbers the bucket is full again when it would have been.
            let latest = now.after(bounds::MAX_DRAIN).as_micros();
            return IntervalState {
                full_at: state.full_at.min(latest),
                ..state
            };
        };
        let (kept, latest) = self.converted(old, state, now);
        if kept.full_at <= latest.full_at {
            kept
        } else {
            latest
        }
    }

    /// The tokens that are missing by `old`, and the latest state that they can come to.
    fn converted(
        &self,
        old: &Self,
        state: IntervalState,
        now: Timestamp,
    ) -> (IntervalState, IntervalState) {
        let missing = old.missing(&state, now);
        let next_refill = missing
            .next_refill
            .min(now.as_micros().saturating_add(self.every));
        let kept = self.state_of(missing.tokens, next_refill);
        let brim = self.state_of(self.capacity.into(), next_refill);
        let latest = IntervalState {
            full_at: brim.full_at.max(state.full_at),
            last: brim.last.max(state.last),
        };
        (kept, latest)
    }

    /// At most the capacity is missing at `at`, and the next refill comes within one interval. The phase
    /// of the refills stays.
    pub(crate) fn clamp(&self, state: &mut IntervalState, at: Timestamp) {
        let missing = self.missing(state, at);
        if missing.tokens > self.capacity.into() {
            *state = self.state_of(self.capacity.into(), missing.next_refill);
        }
    }

    fn missing(&self, state: &IntervalState, now: Timestamp) -> Missing {
        let now = now.as_micros();
        if state.full_at <= now {
            return Missing {
                tokens: 0,
                next_refill: now.saturating_add(self.every),
            };
        }
        let refills = (state.full_at - now).div_ceil(self.every);
        // Whoever left it under other numbers may have left more to the last refill than there is in one here.
        let last = state.last.min(self.refill);
        Missing {
            tokens: u128::from(refills - 1) * u128::from(self.refill) + u128::from(last),
            next_refill: state.full_at - (refills - 1) * self.every,
        }
    }

    fn state_of(&self, missing: u128, next_refill: u64) -> IntervalState {
        let refill = u128::from(self.refill);
        let before_the_last = missing.div_ceil(refill).max(1) - 1;
        let lasting = narrow(before_the_last).saturating_mul(self.every);
        IntervalState {
            full_at: next_refill.saturating_add(lasting),
            last: narrow(missing - before_the_last * refill),
        }
    }
}
