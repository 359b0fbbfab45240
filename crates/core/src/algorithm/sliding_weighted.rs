//! Weighted sliding window counter: approximates the window with the counts of two fixed windows.
//!
//! This module implements the algorithm `sliding_window_counter` without `buckets`. The requests of
//! the previous window are assumed to be spread evenly over that window. When a time `e` of the
//! current window has elapsed, `prev * (W - e) / W` units of the previous window still count. A
//! request of cost `n` is admitted if `prev * (W - e) + (cur + n) * W <= L * W`. The computation
//! uses only integers.
//!
//! ```text
//!   │      prev       │   cur           │
//!   ┼──────────────┼──┼──────────────┼──┼──▶
//!              now - W    e         now
//! ```
//!
//! - **Guarantee.** At most `L` units are admitted in each epoch-aligned window. In any half-open
//!   interval of length `W`, at most `2 * L - 1` units are admitted. The estimated count is at most
//!   `prev * (W - e) / W` higher than the true count, and at most `prev * e / W` lower.
//! - **Memory.** The state takes 32 bytes, plus about 30 bytes of overhead.
//! - **Weakness.** A client that exhausts its limit at the end of one window and sends slowly
//!   during the next window reaches the bound of `2 * L - 1`. Ordinary traffic stays far below `2 *
//!   L - 1`. If you need a strict bound, use `buckets`. A key that has been idle for almost `W` is
//!   still limited by the units it spent before.
//! - **Source.** Cloudflare 2017, "How we built rate limiting capable of scaling to millions of
//!   domains".

use crate::{
    algorithm::{
        ChargePosition, Counter, CounterState, Drain, LimitStatus, Mark, Numbers, RetryAfter,
        Terms, counter::is_count, is_instant,
    },
    digest::Digest,
    error::LimitError,
    limit::bounds::{check_count, check_period},
    time::{Span, Timestamp},
};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct WeightedState {
    /// The index of the current window, counted from the epoch.
    pub(crate) index: u64,
    pub(crate) previous: u64,
    pub(crate) current: u64,
    /// The length of a window in microseconds.
    pub(crate) window: u64,
}

impl WeightedState {
    fn advance(&mut self, now: Timestamp) {
        let index = now.as_micros() / self.window;
        if index <= self.index {
            return;
        }
        self.previous = if index == self.index + 1 {
            self.current
        } else {
            0
        };
        self.current = 0;
        self.index = index;
    }

    /// Returns the remaining time of the current window at `now`, in microseconds.
    fn left(&self, now: Timestamp) -> u64 {
        (self.index + 1)
            .saturating_mul(self.window)
            .saturating_sub(now.as_micros())
            .min(self.window)
    }
}

impl CounterState for WeightedState {
    fn expires(&self) -> Timestamp {
        let windows = match (self.previous, self.current) {
            (0, 0) => return Timestamp::default(),
            (_, 0) => 1,
            _ => 2,
        };
        Timestamp::from_micros((self.index + windows).saturating_mul(self.window))
    }

    /// Moves the current and the previous window back in time by `span`, rounded down to whole
    /// windows.
    fn move_back(&mut self, span: Span) {
        self.index = self.index.saturating_sub(span.as_micros() / self.window);
    }

    fn heap_bytes(&self) -> usize {
        size_of::<Self>()
    }

    fn write(&self, put: &mut dyn FnMut(u64)) {
        let numbers = [self.index, self.previous, self.current, self.window];
        numbers.into_iter().for_each(put);
    }

    fn read(next: &mut dyn FnMut() -> Option<u64>) -> Option<Self> {
        Some(Self {
            index: next().filter(is_instant)?,
            previous: next().filter(is_count)?,
            current: next().filter(is_count)?,
            window: next().filter(|window| *window > 0)?,
        })
    }
}

#[derive(Clone, Debug)]
pub(crate) struct WeightedWindow {
    limit: u64,
    window: u64,
}

impl WeightedWindow {
    pub(crate) fn new(limit: u64, window: Span) -> Result<Self, LimitError> {
        check_count("limit", limit, 0)?;
        check_period("window", window)?;
        Ok(Self {
            limit,
            window: window.as_micros(),
        })
    }

    /// Returns the remaining window time at or below which at most `free` of `weighed` units still
    /// count. The fraction of the units that still counts is the remaining fraction of the window.
    fn most_left(&self, weighed: u64, free: u64) -> u64 {
        if weighed == 0 {
            return self.window;
        }
        let left = u128::from(free) * u128::from(self.window) / u128::from(weighed);
        u64::try_from(left).unwrap_or(u64::MAX).min(self.window)
    }

    /// Returns the maximum cost that would be admitted now.
    fn room(&self, state: &WeightedState, now: Timestamp) -> u64 {
        let window = u128::from(self.window);
        let weighed = u128::from(state.previous) * u128::from(state.left(now));
        let free = (u128::from(self.limit) * window).saturating_sub(weighed) / window;
        u64::try_from(free)
            .unwrap_or(u64::MAX)
            .saturating_sub(state.current)
    }
}

impl Counter for WeightedWindow {
    type State = WeightedState;

    fn numbers(&self, _cost: u64) -> Numbers<'_> {
        Numbers::Weighted {
            limit: self.limit,
            window: self.window,
        }
    }

    fn terms(&self) -> Terms {
        Terms::Digest(Digest::new().numbers(&[5, self.window]).folded())
    }

    /// A conversion would lose spent units if the state has more units than the limit. The state
    /// drains with its former window length, which the state contains: at the end of each window,
    /// the units of the previous window are dropped.
    fn drain(
        &self,
        _old: Option<&Self>,
        state: &WeightedState,
        now: Timestamp,
        cost: u64,
    ) -> Option<Drain> {
        let mut state = *state;
        state.advance(now);
        if state.previous.saturating_add(state.current) <= self.limit {
            return None;
        }
        let windows = match state.current.saturating_add(cost) <= self.limit {
            true => 1,
            false => 2,
        };
        let at = (state.index + windows).saturating_mul(state.window);
        let retry_after = match cost <= self.limit {
            true => RetryAfter::After(Timestamp::from_micros(at).since(now)),
            false => RetryAfter::Never,
        };
        Some(Drain {
            retry_after,
            reset_after: state.expires().since(now),
        })
    }

    fn new_entry_bytes(&self, _cost: u64) -> usize {
        size_of::<WeightedState>()
    }

    fn fresh(&self) -> WeightedState {
        WeightedState {
            index: 0,
            previous: 0,
            current: 0,
            window: self.window,
        }
    }

    fn is_compatible(&self, state: &WeightedState) -> bool {
        state.window == self.window
    }

    /// Converts a state written with another window length. All units that still count are moved
    /// into the new current window, up to the limit.
    fn adopt(&self, _old: Option<&Self>, state: &mut WeightedState, now: Timestamp) {
        state.advance(now);
        if self.is_compatible(state) {
            return;
        }
        let mut new = self.fresh();
        new.advance(now);
        new.current = state.previous.saturating_add(state.current).min(self.limit);
        *state = new;
    }

    fn admits(&self, state: &mut WeightedState, now: Timestamp, cost: u64) -> bool {
        state.advance(now);
        cost <= self.limit && cost <= self.room(state, now)
    }

    fn charge(&self, state: &mut WeightedState, now: Timestamp, cost: u64) {
        state.advance(now);
        state.current = state
            .current
            .saturating_add(cost)
            .min(self.limit.max(state.current));
    }

    /// If the state's current window begins after `at`, moves the counts of the current and the
    /// previous window into the window that contains `at`, up to the limit.
    fn clamp(&self, state: &mut WeightedState, at: Timestamp) {
        let index = at.as_micros() / self.window;
        if state.index > index {
            let counted = state.previous.saturating_add(state.current);
            (state.index, state.previous) = (index, 0);
            state.current = counted.min(self.limit);
        }
    }

    fn refund(&self, state: &mut WeightedState, now: Timestamp, units: u64) {
        state.advance(now);
        let from_current = units.min(state.current);
        state.current -= from_current;
        state.previous = state.previous.saturating_sub(units - from_current);
    }

    fn mark(state: &WeightedState) -> Mark {
        Mark::WindowIndex(state.index)
    }

    /// Removes `units` from the window that contains the charge, if that window is the current or
    /// the previous window.
    fn refund_charge(
        &self,
        state: &mut WeightedState,
        now: Timestamp,
        position: &ChargePosition,
        units: u64,
    ) -> u64 {
        let Mark::WindowIndex(window) = position.mark else {
            return 0;
        };
        state.advance(now);
        if window == state.index {
            state.current = state.current.saturating_sub(units);
        } else if window + 1 == state.index {
            state.previous = state.previous.saturating_sub(units);
        }
        0
    }

    fn status(&self, state: &WeightedState, now: Timestamp, _window: usize) -> LimitStatus {
        LimitStatus {
            remaining: self.room(state, now),
            reset_after: state.expires().since(now),
        }
    }

    /// Returns the time until enough units have left the sliding window. Units of the previous
    /// window leave during the current window. If more units must leave, units of the current
    /// window leave during the next window.
    fn retry(
        &self,
        state: &WeightedState,
        now: Timestamp,
        _window: usize,
        cost: u64,
    ) -> RetryAfter {
        if cost > self.limit {
            return RetryAfter::Never;
        }
        let free = self.limit - cost;
        let (windows, weighed, free) = if state.current <= free {
            (0, state.previous, free - state.current)
        } else {
            (1, state.current, free)
        };
        let elapsed = self.window - self.most_left(weighed, free);
        let at = (state.index + windows)
            .saturating_mul(self.window)
            .saturating_add(elapsed);
        RetryAfter::After(Timestamp::from_micros(at).since(now))
    }
}
