//! Interval bucket: a token bucket to which all tokens of an interval are added at once, at the end
//! of the interval.
//!
//! This module implements `token_bucket` with `refill_mode: interval`. At the end of every interval
//! `I`, `R` tokens are added, up to the capacity `B`. While the bucket is full, no interval is
//! running, and the next charge starts an interval. Therefore, the state of a full bucket can be
//! dropped without changing any decision.
//!
//! The state consists of the instant at which the bucket will be full again, and the number of
//! tokens that the refill at that instant will add. The number of tokens missing now is computed
//! from this state:
//!
//! ```text
//!   missing = (m - 1) * R + last     m = ceil((full_at - now) / I) refills to come
//!
//!   now        R          R         last = full
//! ───┼─────────┼──────────┼──────────┼──▶
//!      m = 3      m = 2      m = 1   full_at
//! ```
//!
//! - **Guarantee.** At most `B + R * ceil(t / I)` units are admitted in any half-open interval of
//!   length `t`.
//! - **Memory.** The state takes 16 bytes. A key expires when its bucket is full.
//! - **Weakness.** All clients of an exhausted key retry at the same time, right after the refill.
//! - **Source.** Tanenbaum, Computer Networks (token bucket); the library `bucket4j` calls this
//!   refill "intervally".

use crate::{
    algorithm::{
        ChargePosition, Counter, CounterState, Drain, LimitStatus, Mark, Numbers, RetryAfter,
        Terms, counter::is_count, narrow,
    },
    error::LimitError,
    limit::{
        Rate,
        bounds::{self, check_count},
        rate::check_rate,
    },
    time::{Span, Timestamp},
};

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct IntervalState {
    /// The instant at which the bucket is full again, in microseconds since the epoch.
    pub(crate) full_at: u64,
    /// The number of tokens that the refill at `full_at` adds. This number is at least 1, and at
    /// most the refill of the limit under which the state was written.
    pub(crate) last: u64,
}

impl IntervalState {
    pub(crate) fn full_at(&self) -> Timestamp {
        Timestamp::from_micros(self.full_at)
    }
}

impl CounterState for IntervalState {
    fn expires(&self) -> Timestamp {
        self.full_at()
    }

    fn move_back(&mut self, span: Span) {
        self.full_at = self.full_at.saturating_sub(span.as_micros());
    }

    fn write(&self, put: &mut dyn FnMut(u64)) {
        [self.full_at, self.last].into_iter().for_each(put);
    }

    fn read(next: &mut dyn FnMut() -> Option<u64>) -> Option<Self> {
        Some(Self {
            full_at: next()?,
            last: next().filter(is_count)?,
        })
    }
}

#[derive(Clone, Debug)]
pub(crate) struct Interval {
    refill: u64,
    every: u64,
    capacity: u64,
}

/// The number of tokens missing from a bucket, and the time of the next refill. The number of
/// missing tokens can exceed the capacity if the bucket was charged under a higher limit.
struct MissingUnits {
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
                "refilling {capacity} at {refill} takes longer than the maximum of 100 years; lower `capacity` or raise \
                 `refill`"
            );
            return Err(LimitError::new("capacity", problem));
        }
        Ok(Self {
            refill: refill.count,
            every: refill.period.as_micros(),
            capacity,
        })
    }

    /// Converts `state`, which was written under `old`. Returns two states: one with the same
    /// number of missing tokens, and one with the latest `full_at` that [`Self::adopt`] can set.
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
        let empty = self.state_of(self.capacity.into(), next_refill);
        let latest = IntervalState {
            full_at: empty.full_at.max(state.full_at),
            last: empty.last.max(state.last),
        };
        (kept, latest)
    }

    fn missing(&self, state: &IntervalState, now: Timestamp) -> MissingUnits {
        let now = now.as_micros();
        if state.full_at <= now {
            return MissingUnits {
                tokens: 0,
                next_refill: now.saturating_add(self.every),
            };
        }
        let refills = (state.full_at - now).div_ceil(self.every);
        // `state.last` can exceed the refill of this bucket if the state was written under a limit
        // with a larger refill.
        let last = state.last.min(self.refill);
        MissingUnits {
            tokens: u128::from(refills - 1) * u128::from(self.refill) + u128::from(last),
            next_refill: state.full_at - (refills - 1) * self.every,
        }
    }

    fn state_of(&self, missing: u128, next_refill: u64) -> IntervalState {
        let refill = u128::from(self.refill);
        let before_the_last = missing.div_ceil(refill).max(1) - 1;
        let duration = narrow(before_the_last).saturating_mul(self.every);
        IntervalState {
            full_at: next_refill.saturating_add(duration),
            last: narrow(missing - before_the_last * refill),
        }
    }
}

impl Counter for Interval {
    type State = IntervalState;

    fn numbers(&self, _cost: u64) -> Numbers<'_> {
        Numbers::Interval {
            refill: self.refill,
            every: self.every,
            capacity: self.capacity,
        }
    }

    fn terms(&self) -> Terms {
        Terms::Interval {
            refill: self.refill,
            every: self.every,
        }
    }

    fn in_terms(&self, terms: &Terms) -> Option<Self> {
        let Terms::Interval { refill, every } = *terms else {
            return None;
        };
        Some(Self {
            refill: refill.max(1),
            every: every.max(1),
            capacity: self.capacity,
        })
    }

    fn drain(
        &self,
        old: Option<&Self>,
        state: &IntervalState,
        now: Timestamp,
        cost: u64,
    ) -> Option<Drain> {
        let old = old.filter(|_| state.full_at > now.as_micros())?;
        let (kept, latest) = self.converted(old, *state, now);
        (kept.full_at > latest.full_at).then(|| Drain {
            retry_after: old.retry(state, now, 0, cost),
            reset_after: old.status(state, now, 0).reset_after,
        })
    }

    /// Returns the maximum value of the state's `last` field.
    fn largest_number(&self) -> u64 {
        self.refill
    }

    fn fresh(&self) -> IntervalState {
        IntervalState::default()
    }

    /// Converts a state written under `old`. The number of missing tokens normally does not change,
    /// even if it exceeds the capacity, because servers with the old limit may still use the key.
    /// The next refill then happens at its old time or earlier. However, the new `full_at` is at
    /// most the old `full_at` or the instant at which an empty bucket would be full, whichever is
    /// later. If the missing tokens would lead to a later `full_at`, the conversion loses spent
    /// units.
    fn adopt(&self, old: Option<&Self>, state: &mut IntervalState, now: Timestamp) {
        if state.full_at <= now.as_micros() {
            *state = IntervalState::default();
            return;
        }
        let Some(old) = old else {
            // If the old limit is unknown, keep the instant at which the bucket is full again.
            let latest = now.after(bounds::MAX_DRAIN).as_micros();
            state.full_at = state.full_at.min(latest);
            return;
        };
        let (kept, latest) = self.converted(old, *state, now);
        *state = if kept.full_at <= latest.full_at {
            kept
        } else {
            latest
        };
    }

    fn admits(&self, state: &mut IntervalState, now: Timestamp, cost: u64) -> bool {
        cost <= self.capacity && self.missing(state, now).tokens <= u128::from(self.capacity - cost)
    }

    fn charge(&self, state: &mut IntervalState, now: Timestamp, cost: u64) {
        let missing = self.missing(state, now);
        let capacity = u128::from(self.capacity);
        if missing.tokens < capacity {
            let tokens = (missing.tokens + u128::from(cost)).min(capacity);
            *state = self.state_of(tokens, missing.next_refill);
        }
    }

    /// If the number of missing tokens exceeds the capacity, reduces it to the capacity. The next
    /// refill then happens at most one interval after `at`, on the same schedule of refills.
    fn clamp(&self, state: &mut IntervalState, at: Timestamp) {
        let missing = self.missing(state, at);
        if missing.tokens > self.capacity.into() {
            *state = self.state_of(self.capacity.into(), missing.next_refill);
        }
    }

    fn refund(&self, state: &mut IntervalState, now: Timestamp, units: u64) {
        if units == 0 {
            return;
        }
        let missing = self.missing(state, now);
        *state = match missing.tokens.saturating_sub(units.into()) {
            0 => IntervalState::default(),
            tokens => self.state_of(tokens, missing.next_refill),
        };
    }

    /// Refunds up to `units` of the charge at `position`. Tokens that refills may already have
    /// added back are not refunded again. The position of a charge is the instant at which the
    /// bucket would be full again, computed right after the charge.
    fn refund_charge(
        &self,
        state: &mut IntervalState,
        now: Timestamp,
        position: &ChargePosition,
        units: u64,
    ) -> u64 {
        let Mark::FullAt(full_at) = position.mark else {
            return 0;
        };
        let then = position.at.as_micros();
        let refills = full_at.saturating_sub(then).div_ceil(self.every).max(1);
        let next_refill = full_at.saturating_sub((refills - 1).saturating_mul(self.every));
        let passed = match now.as_micros().checked_sub(next_refill) {
            Some(since) => since / self.every + 1,
            None => 0,
        };
        let refilled = passed.saturating_mul(self.refill);
        self.refund(
            state,
            now,
            units.min(position.cost.saturating_sub(refilled)),
        );
        0
    }

    fn mark(state: &IntervalState) -> Mark {
        Mark::FullAt(state.full_at)
    }

    fn status(&self, state: &IntervalState, now: Timestamp, _window: usize) -> LimitStatus {
        let missing = self.missing(state, now).tokens;
        let remaining = u128::from(self.capacity).saturating_sub(missing);
        LimitStatus {
            remaining: narrow(remaining),
            reset_after: state.full_at().since(now),
        }
    }

    fn retry(
        &self,
        state: &IntervalState,
        now: Timestamp,
        _window: usize,
        cost: u64,
    ) -> RetryAfter {
        if cost > self.capacity {
            return RetryAfter::Never;
        }
        let missing = self.missing(state, now);
        let short = missing.tokens.saturating_sub((self.capacity - cost).into());
        if short == 0 {
            return RetryAfter::NOW;
        }
        let refills = narrow(short.div_ceil(self.refill.into()));
        let at = missing
            .next_refill
            .saturating_add((refills - 1).saturating_mul(self.every));
        RetryAfter::After(Timestamp::from_micros(at).since(now))
    }
}
