//! Sliding window counter with buckets: the window is divided into sub-windows, called buckets.
//!
//! This module implements the algorithm `sliding_window_counter` with `buckets: k`. A window of
//! length `W` is divided into `k` buckets of length `w = W / k`, aligned to the epoch.
//!
//! ```text
//!   k = 3         │  b-3  │  b-2  │  b-1  │   b   │
//!                 ·  4    ·   2   ·   0   ·   1  now
//!   strict sums   ├───────────────────────────────┤   k + 1 buckets: never less than W before now
//!   loose sums            ├───────────────────────┤   k buckets: as little as W - w before now
//! ```
//!
//! - **Guarantee.** In strict mode, at most `L` units are admitted in every half-open interval of
//!   length `W`. In strict mode, a client that always sends more than the limit gets `L` units per
//!   `W + w`, which is `k / (k + 1)` of the limit. In loose mode, at most `L` units are admitted in
//!   any `k` consecutive buckets.
//! - **Memory.** The state takes 8 bytes per bucket, plus about 70 bytes. The size does not depend
//!   on the limit.
//! - **Work.** A decision reads each bucket once or twice. A state has at most 1,001 buckets.
//! - **Weakness.** In loose mode, up to `2 * L` units can be admitted in an interval of length `W`.
//!   In strict mode, a client waits up to one bucket length longer than with a sliding window log.
//! - **Source.** Figma 2017, "An alternative approach to rate limiting". .NET's
//!   `SlidingWindowRateLimiter` implements the loose mode.

use crate::{
    algorithm::{
        ChargePosition, Counter, CounterState, LimitStatus, Mark, Numbers, RetryAfter, Terms,
        counter::is_count, is_instant,
    },
    digest::Digest,
    error::LimitError,
    limit::bounds::{self, check_count, check_period},
    time::{Span, Timestamp},
};

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct BucketsState {
    /// The index of the newest bucket, counted from the epoch.
    pub(crate) newest: u64,
    /// The length of a bucket in microseconds.
    pub(crate) width: u64,
    /// A ring buffer: bucket `b` is at index `b % len`.
    pub(crate) counts: Box<[u64]>,
    pub(crate) total: u64,
}

impl BucketsState {
    /// Creates a state from its bucket counts, oldest first. The state has at least one bucket,
    /// even if `counts` is empty.
    pub(crate) fn from_counts(newest: u64, width: u64, counts: &[u64]) -> Self {
        // A limit has at most `most` buckets, and the sum of `most` counts does not overflow.
        let most = bounds::MAX_BUCKETS as usize + 1;
        let counts = &counts[counts.len().saturating_sub(most)..];
        let mut state = Self {
            newest,
            width: width.max(1),
            counts: vec![0; counts.len().max(1)].into(),
            total: 0,
        };
        for (oldest_first, count) in (newest.saturating_add(1)..).zip(counts) {
            let (slot, count) = (state.slot(oldest_first), (*count).min(bounds::MAX_COUNT));
            state.counts[slot] = count;
            state.total += count;
        }
        state
    }

    /// Returns the bucket counts, oldest first. In the ring buffer, the oldest bucket follows the
    /// newest bucket.
    pub(crate) fn oldest_first(&self) -> impl Iterator<Item = u64> {
        let buckets = (self.newest + 1..).take(self.counts.len());
        buckets.map(|bucket| self.count(bucket))
    }

    fn slot(&self, bucket: u64) -> usize {
        // The remainder is less than `counts.len()`, so it fits in a `usize`.
        usize::try_from(bucket % self.counts.len() as u64).unwrap_or(0)
    }

    fn count(&self, bucket: u64) -> u64 {
        self.counts[self.slot(bucket)]
    }

    /// Removes the oldest `units` from the buckets.
    fn drop_oldest(&mut self, mut units: u64) {
        self.total -= units;
        let len = self.counts.len() as u64;
        for bucket in (self.newest + 1).saturating_sub(len)..=self.newest {
            let slot = self.slot(bucket);
            let dropped = units.min(self.counts[slot]);
            self.counts[slot] -= dropped;
            units -= dropped;
        }
    }

    /// Removes the newest `units` from the buckets, or all units if there are fewer.
    fn drop_newest(&mut self, mut units: u64) {
        let len = self.counts.len() as u64;
        for bucket in ((self.newest + 1).saturating_sub(len)..=self.newest).rev() {
            let slot = self.slot(bucket);
            let dropped = units.min(self.counts[slot]);
            self.counts[slot] -= dropped;
            self.total -= dropped;
            units -= dropped;
        }
    }

    /// Makes the bucket that contains `now` the newest bucket, and drops the buckets that no longer
    /// fit in the ring buffer.
    fn advance(&mut self, now: Timestamp) {
        let bucket = now.as_micros() / self.width;
        if bucket <= self.newest {
            return;
        }
        if bucket - self.newest >= self.counts.len() as u64 {
            self.counts.fill(0);
            self.total = 0;
        } else {
            for passed in self.newest + 1..=bucket {
                let slot = self.slot(passed);
                self.total -= std::mem::take(&mut self.counts[slot]);
            }
        }
        self.newest = bucket;
    }
}

impl CounterState for BucketsState {
    fn expires(&self) -> Timestamp {
        if self.total == 0 {
            return Timestamp::default();
        }
        let len = self.counts.len() as u64;
        let newest = (0..len)
            .find(|back| self.count(self.newest.saturating_sub(*back)) > 0)
            .unwrap_or(0);
        Timestamp::from_micros((self.newest - newest + len).saturating_mul(self.width))
    }

    fn heap_bytes(&self) -> usize {
        size_of::<Self>() + self.counts.len() * size_of::<u64>()
    }

    /// Moves every bucket back in time by `span`, rounded down to whole buckets.
    fn move_back(&mut self, span: Span) {
        let counts: Vec<u64> = self.oldest_first().collect();
        let newest = self.newest.saturating_sub(span.as_micros() / self.width);
        *self = Self::from_counts(newest, self.width, &counts);
    }

    fn write(&self, put: &mut dyn FnMut(u64)) {
        let numbers = [self.newest, self.width, self.counts.len() as u64];
        let counts = self.counts.iter().copied();
        numbers.into_iter().chain(counts).for_each(put);
    }

    fn read(next: &mut dyn FnMut() -> Option<u64>) -> Option<Self> {
        let newest = next().filter(is_instant)?;
        let width = next().filter(|width| *width > 0)?;
        let most = u64::from(bounds::MAX_BUCKETS) + 1;
        let len = next().filter(|len| (1..=most).contains(len))?;
        let counts: Box<[u64]> = (0..len).map(|_| next()).collect::<Option<_>>()?;
        let sum = |sum: u64, count: &u64| sum.checked_add(*count);
        let total = counts.iter().try_fold(0, sum).filter(is_count)?;
        Some(Self {
            newest,
            width,
            counts,
            total,
        })
    }
}

#[derive(Clone, Debug)]
pub(crate) struct Buckets {
    limit: u64,
    width: u64,
    /// The number of buckets in the sum: the buckets of one window, plus one in strict mode.
    summed: usize,
}

impl Buckets {
    pub(crate) fn new(
        limit: u64,
        window: Span,
        buckets: u32,
        strict: bool,
    ) -> Result<Self, LimitError> {
        check_count("limit", limit, 0)?;
        check_period("window", window)?;
        if !(1..=bounds::MAX_BUCKETS).contains(&buckets) {
            return Err(LimitError::new(
                "buckets",
                format!("must be from 1 to {}, got {buckets}", bounds::MAX_BUCKETS),
            ));
        }
        if !window.as_micros().is_multiple_of(u64::from(buckets)) {
            return Err(LimitError::new(
                "buckets",
                format!(
                    "{window} cannot be divided into {buckets} equal parts of whole microseconds; choose another number of buckets"
                ),
            ));
        }
        let summed = buckets as usize + usize::from(strict);
        Ok(Self {
            limit,
            width: window.as_micros() / u64::from(buckets),
            summed,
        })
    }
}

impl Counter for Buckets {
    type State = BucketsState;

    fn numbers(&self, _cost: u64) -> Numbers<'_> {
        Numbers::Buckets {
            limit: self.limit,
            width: self.width,
            summed: self.summed,
        }
    }

    fn terms(&self) -> Terms {
        let numbers = [4, self.width, self.summed as u64];
        Terms::Digest(Digest::new().numbers(&numbers).folded())
    }

    fn new_entry_bytes(&self, _cost: u64) -> usize {
        size_of::<BucketsState>() + self.summed * size_of::<u64>()
    }

    fn fresh(&self) -> BucketsState {
        BucketsState {
            newest: 0,
            width: self.width,
            counts: vec![0; self.summed].into(),
            total: 0,
        }
    }

    fn is_compatible(&self, state: &BucketsState) -> bool {
        state.width == self.width && state.counts.len() == self.summed
    }

    /// Converts a state written with another bucket length or number of buckets. All units that
    /// still count are moved into the newest bucket.
    fn adopt(&self, _old: Option<&Self>, state: &mut BucketsState, now: Timestamp) {
        state.advance(now);
        if self.is_compatible(state) {
            return;
        }
        let mut new = self.fresh();
        new.advance(now);
        let slot = new.slot(new.newest);
        new.counts[slot] = state.total;
        new.total = state.total;
        *state = new;
    }

    fn admits(&self, state: &mut BucketsState, now: Timestamp, cost: u64) -> bool {
        state.advance(now);
        cost <= self.limit && state.total <= self.limit - cost
    }

    /// Charges `cost`. When the cost of a denied request is charged, the oldest units are dropped,
    /// so that the total does not exceed the limit. Therefore, a client that keeps sending requests
    /// stays denied.
    fn charge(&self, state: &mut BucketsState, now: Timestamp, cost: u64) {
        state.advance(now);
        let cost = cost.min(self.limit);
        let slot = state.slot(state.newest);
        state.counts[slot] += cost;
        state.total += cost;
        if state.total > self.limit {
            state.drop_oldest(state.total - self.limit);
        }
    }

    /// Moves the counts of all buckets later than `at` into the bucket that contains `at`.
    fn clamp(&self, state: &mut BucketsState, at: Timestamp) {
        let newest = at.as_micros() / state.width;
        let len = state.counts.len() as u64;
        let oldest = (state.newest + 1).saturating_sub(len);
        for later in oldest.max(newest + 1)..=state.newest {
            let (from, to) = (state.slot(later), state.slot(newest));
            // A later bucket can occupy the ring buffer slot of the bucket that contains `at`, so
            // remove its count first.
            let count = std::mem::take(&mut state.counts[from]);
            state.counts[to] += count;
        }
        state.newest = state.newest.min(newest);
    }

    fn refund(&self, state: &mut BucketsState, now: Timestamp, units: u64) {
        state.advance(now);
        state.drop_newest(units);
    }

    fn mark(state: &BucketsState) -> Mark {
        Mark::WindowIndex(state.newest)
    }

    /// Removes up to `units` from the charge's bucket, if this bucket is still in the ring buffer.
    fn refund_charge(
        &self,
        state: &mut BucketsState,
        now: Timestamp,
        position: &ChargePosition,
        units: u64,
    ) -> u64 {
        let Mark::WindowIndex(bucket) = position.mark else {
            return 0;
        };
        state.advance(now);
        let is_held = state.newest.saturating_sub(bucket) < state.counts.len() as u64;
        if is_held && bucket <= state.newest {
            let slot = state.slot(bucket);
            let taken = units.min(state.counts[slot]);
            state.counts[slot] -= taken;
            state.total -= taken;
        }
        0
    }

    fn status(&self, state: &BucketsState, now: Timestamp, _window: usize) -> LimitStatus {
        LimitStatus {
            remaining: self.limit.saturating_sub(state.total),
            reset_after: state.expires().since(now),
        }
    }

    /// Returns the time until enough of the oldest buckets have expired to admit `cost`.
    fn retry(&self, state: &BucketsState, now: Timestamp, _window: usize, cost: u64) -> RetryAfter {
        if cost > self.limit {
            return RetryAfter::Never;
        }
        let len = self.summed as u64;
        let mut short = (state.total + cost).saturating_sub(self.limit);
        for bucket in (state.newest + 1).saturating_sub(len)..=state.newest {
            let count = state.count(bucket);
            if short <= count {
                return RetryAfter::After(
                    Timestamp::from_micros((bucket + len).saturating_mul(self.width)).since(now),
                );
            }
            short -= count;
        }
        RetryAfter::NOW
    }
}
