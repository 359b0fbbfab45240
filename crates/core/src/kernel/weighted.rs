//! The counter kernel with two windows, weighted.
//!
//! Face: `sliding_window_counter` without `buckets`. The count of the last window is taken as if it had been
//! spread evenly: with `e` of the current window gone, `prev * (W - e) / W` of it is still counted. The
//! comparison is made in whole numbers, `prev * (W - e) + (cur + n) * W <= L * W`.
//!
//! ```text
//!   │      prev       │   cur           │
//!   ┼──────────────┼──┼──────────────┼──┼──▶
//!              now - W    e         now
//! ```
//!
//! - **Promise.** At most `L` in each window of the grid, and at most `2 * L - 1` in any half-open interval of length
//!   `W`. The estimate is at most `prev * (W - e) / W` above the true count, and at most `prev * e / W` below it.
//! - **Memory.** 32 bytes, and some 30 more.
//! - **Weakness.** That bound is reached by a client that spends its limit at the end of one window and
//!   trickles through the next. Natural traffic comes nowhere near; where a promise is needed take `buckets`. A key
//!   that has been idle for almost `W` is still held to what it spent before.
//! - **Source.** Cloudflare 2017, "How we built rate limiting capable of scaling to millions of domains".

use crate::{
    bounds::{check_count, check_period},
    digest::Digest,
    kernel::Standing,
    limit::LimitError,
    outcome::Retry,
    remote::{Numbers, Terms},
    time::{Span, Timestamp},
};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct WeightedState {
    /// The number of the current window since the epoch.
    pub(crate) index: u64,
    pub(crate) previous: u64,
    pub(crate) current: u64,
    /// The length of a window in microseconds.
    pub(crate) window: u64,
}

impl WeightedState {
    pub(crate) fn expires(&self) -> Timestamp {
        let windows = match (self.previous, self.current) {
            (0, 0) => return Timestamp::default(),
            (_, 0) => 1,
            _ => 2,
        };
        Timestamp::from_micros((self.index + windows).saturating_mul(self.window))
    }

    pub(crate) fn refund(&mut self, now: Timestamp, units: u64) {
        self.advance(now);
        let from_current = units.min(self.current);
        self.current -= from_current;
        self.previous = self.previous.saturating_sub(units - from_current);
    }

    /// Takes up to `units` out of the window of that number, if it is still held.
    pub(crate) fn give_back(&mut self, now: Timestamp, window: u64, units: u64) {
        self.advance(now);
        if window == self.index {
            self.current = self.current.saturating_sub(units);
        } else if window + 1 == self.index {
            self.previous = self.previous.saturating_sub(units);
        }
    }

    /// Moves both windows back by `span`, rounded down to whole windows.
    pub(crate) fn move_back(&mut self, span: Span) {
        self.index = self.index.saturating_sub(span.as_micros() / self.window);
    }

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

    /// What is left of the current window.
    fn left(&self, now: Timestamp) -> u64 {
        (self.index + 1)
            .saturating_mul(self.window)
            .saturating_sub(now.as_micros())
            .min(self.window)
    }
}

#[derive(Clone, Debug)]
pub(crate) struct Weighted {
    limit: u64,
    window: u64,
}

impl Weighted {
    pub(crate) fn new(limit: u64, window: Span) -> Result<Self, LimitError> {
        check_count("limit", limit, 0)?;
        check_period("window", window)?;
        Ok(Self {
            limit,
            window: window.as_micros(),
        })
    }

    /// What a state is counted in.
    pub(crate) fn terms(&self) -> Terms {
        Terms::Digest(Digest::new().numbers(&[5, self.window]).folded())
    }

    /// Whether no more is counted than the limit.
    pub(crate) fn holds(&self, state: &WeightedState, now: Timestamp) -> bool {
        let mut state = *state;
        state.advance(now);
        state.previous.saturating_add(state.current) <= self.limit
    }

    /// The numbers for a store elsewhere.
    pub(crate) fn numbers(&self) -> Numbers<'static> {
        Numbers::Weighted {
            limit: self.limit,
            window: self.window,
        }
    }

    pub(crate) fn fresh(&self) -> WeightedState {
        WeightedState {
            index: 0,
            previous: 0,
            current: 0,
            window: self.window,
        }
    }

    pub(crate) fn knows(&self, state: &WeightedState) -> bool {
        state.window == self.window
    }

    /// What the old windows still hold counts in full in the current new one, but not as more than all.
    pub(crate) fn adopt(&self, state: &WeightedState, now: Timestamp) -> WeightedState {
        let mut old = *state;
        old.advance(now);
        if self.knows(&old) {
            return old;
        }
        let mut new = self.fresh();
        new.advance(now);
        new.current = old.previous.saturating_add(old.current).min(self.limit);
        new
    }

    pub(crate) fn admits(&self, state: &mut WeightedState, now: Timestamp, cost: u64) -> bool {
        state.advance(now);
        cost <= self.limit && cost <= self.room(state, now)
    }

    pub(crate) fn charge(&self, state: &mut WeightedState, now: Timestamp, cost: u64) {
        state.advance(now);
        state.current = state
            .current
            .saturating_add(cost)
            .min(self.limit.max(state.current));
    }

    pub(crate) fn standing(&self, state: &WeightedState, now: Timestamp) -> Standing {
        Standing {
            remaining: self.room(state, now),
            reset_after: state.expires().since(now),
        }
    }

    /// What was counted in windows later than that of `at`, and in the one before them, counts in that of `at`,
    /// but not as more than the limit.
    pub(crate) fn clamp(&self, state: &mut WeightedState, at: Timestamp) {
        let index = at.as_micros() / self.window;
        if state.index > index {
            let counted = state.previous.saturating_add(state.current);
            (state.index, state.previous) = (index, 0);
            state.current = counted.min(self.limit);
        }
    }

    /// Within this window, once enough of the last one has slid out; else in the next, when this one has.
    pub(crate) fn retry(&self, state: &WeightedState, now: Timestamp, cost: u64) -> Retry {
        if cost > self.limit {
            return Retry::Never;
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
        Retry::After(Timestamp::from_micros(at).since(now))
    }

    /// The largest part of a window for which `weighed` still fits into `free`.
    fn most_left(&self, weighed: u64, free: u64) -> u64 {
        if weighed == 0 {
            return self.window;
        }
        let left = u128::from(free) * u128::from(self.window) / u128::from(weighed);
        u64::try_from(left).unwrap_or(u64::MAX).min(self.window)
    }

    /// The largest cost that fits now.
    fn room(&self, state: &WeightedState, now: Timestamp) -> u64 {
        let window = u128::from(self.window);
        let weighed = u128::from(state.previous) * u128::from(state.left(now));
        let free = (u128::from(self.limit) * window).saturating_sub(weighed) / window;
        u64::try_from(free)
            .unwrap_or(u64::MAX)
            .saturating_sub(state.current)
    }
}
