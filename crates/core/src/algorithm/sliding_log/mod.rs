//! Sliding window log: a rate limit that stores the instant of every admitted request.
//!
//! This module implements the algorithm `sliding_window_log`. The sliding window log limits of a
//! rule share one log, unless they differ in how they count denied requests. For each window, the
//! state contains the log position at which the window starts, and the sum of the entries from that
//! position on. [`Lease`] implements the algorithm `concurrency` with a log of the held concurrency
//! slots. A slot is removed from the log when its request finishes, and no longer counts after its
//! lease has expired.
//!
//! ```text
//!   expired      1/min window            1/s window
//!   ▒▒▒▒▒▒│░░░░░░░░░░░░░░░░░░░░░░░░│█████████████│
//!         head of the longest      head          now
//!
//!   an entry at `t` counts while t > now - W
//! ```
//!
//! - **Guarantee.** At most `L` units are admitted in every half-open interval of length `W`. For
//!   `concurrency`, at most `L` slots are held at any instant. A slot is held if it was acquired or
//!   renewed less than one lease ago, and has not been released. The retry times of `concurrency`
//!   are estimates, because the end of a request cannot be predicted (see [`Lease`]).
//! - **Memory.** Each admission within the longest window takes 8 bytes. A request with a cost
//!   above 2,047 takes 8 bytes for every 2,047 units. There are at most `L` entries, plus an eighth
//!   of spare capacity. The capacity does not shrink until the key has been idle for a whole
//!   window.
//! - **Work.** The start position of each window moves past each entry once, so a decision takes
//!   amortized constant time. The first decision after a long idle time moves past all entries. For
//!   a denied request of cost `n`, computing the retry time reads at most `n` entries. A decision
//!   that must not change the state ([`Effect::Peek`](crate::Effect::Peek) or
//!   [`Effect::Look`](crate::Effect::Look)) charges the log and then undoes the charge. The
//!   decision copies the log only if the limits have changed or if they count denied requests.
//! - **Weakness.** Memory grows with the limit. A limit above 100,000 is rejected; use
//!   `sliding_window_counter` for larger limits.
//! - **Source.** ClassDojo 2015, "Better Rate Limiting With Redis Sorted Sets", describes two
//!   windows over one log.

mod lease;
mod state;

use std::collections::VecDeque;

use self::state::{WindowCursor, grown, stamps_for};
pub(crate) use self::{
    lease::Lease,
    state::{LogState, Stamp},
};

use crate::{
    algorithm::{ChargePosition, Counter, LimitStatus, Mark, Numbers, RetryAfter, Terms},
    digest::Digest,
    error::LimitError,
    limit::bounds::{self, check_count, check_period},
    time::{Span, Timestamp},
};

#[derive(Clone, Debug)]
pub(crate) struct Log {
    windows: Vec<LogWindow>,
    longest: Span,
    largest: u64,
}

#[derive(Clone, Copy, Debug)]
struct LogWindow {
    limit: u64,
    span: Span,
}

impl Log {
    pub(crate) fn new(limit: u64, span: Span) -> Result<Self, LimitError> {
        Self::of_field(limit, "window", span)
    }

    fn of_field(limit: u64, field: &'static str, span: Span) -> Result<Self, LimitError> {
        check_count("limit", limit, 0)?;
        check_period(field, span)?;
        if limit > bounds::MAX_LOG_LIMIT {
            let most = bounds::MAX_LOG_LIMIT;
            let problem = if field == "window" {
                format!(
                    "{limit} exceeds the sliding log's maximum of {most}; use sliding_window_counter for larger limits"
                )
            } else {
                format!("{limit} concurrent requests exceed the maximum of {most}")
            };
            return Err(LimitError::new("limit", problem));
        }
        Ok(Self {
            windows: vec![LogWindow { limit, span }],
            longest: span,
            largest: limit,
        })
    }

    /// Adds the windows of `other` to this log, so that both limits share one state.
    pub(crate) fn join(&mut self, other: &Self) {
        self.windows.extend_from_slice(&other.windows);
        self.longest = self.longest.max(other.longest);
        self.largest = self.largest.max(other.largest);
    }

    /// Moves the start position of every window past the entries that have left the window by
    /// `now`, and drops the entries that have left all windows.
    fn expire(&self, state: &mut LogState, now: Timestamp) {
        for (window, cursor) in self.windows.iter().zip(&mut state.cursors) {
            while let Some(stamp) = state.stamps.get(cursor.head)
                && now.since(stamp.at()) >= window.span
            {
                cursor.sum -= stamp.cost();
                cursor.head += 1;
            }
        }
        let expired = state
            .cursors
            .iter()
            .map(|cursor| cursor.head)
            .min()
            .unwrap_or(0);
        state.stamps.drain(..expired);
        for cursor in &mut state.cursors {
            cursor.head -= expired;
        }
    }
}

impl Counter for Log {
    type State = LogState;

    fn numbers(&self, _cost: u64) -> Numbers<'_> {
        let windows = self
            .windows
            .iter()
            .map(|window| (window.limit, window.span));
        Numbers::Log {
            windows: windows.collect(),
        }
    }

    fn terms(&self) -> Terms {
        let spans = self.windows.iter().map(|window| window.span.as_micros());
        Terms::Digest(spans.fold(Digest::new(), Digest::number).folded())
    }

    /// Returns the heap size, in bytes, of a new log after a charge of `cost`.
    fn new_entry_bytes(&self, cost: u64) -> usize {
        let stamps = grown(0, stamps_for(cost.min(self.largest)));
        size_of::<LogState>()
            + stamps * size_of::<Stamp>()
            + self.windows.len() * size_of::<WindowCursor>()
    }

    /// Returns the maximum number of bytes by which the log grows when `cost` is charged. At most
    /// the largest limit is charged, even if the cost is higher.
    fn growth_bytes(&self, state: &LogState, cost: u64) -> usize {
        state.growth_bytes(cost.min(self.largest))
    }

    fn fresh(&self) -> LogState {
        LogState {
            stamps: VecDeque::new(),
            cursors: vec![WindowCursor::default(); self.windows.len()].into(),
            longest: self.longest,
        }
    }

    fn is_compatible(&self, state: &LogState) -> bool {
        state.cursors.len() == self.windows.len() && state.longest == self.longest
    }

    /// Converts a state written with other windows. Keeps the entries within the longest old
    /// window, and computes the start position of every new window.
    fn adopt(&self, _old: Option<&Self>, state: &mut LogState, now: Timestamp) {
        let old = state.longest;
        while state
            .stamps
            .front()
            .is_some_and(|stamp| stamp.at().after(old) <= now)
        {
            state.stamps.pop_front();
        }
        state.longest = self.longest;
        let sum = state.stamps.iter().map(|stamp| stamp.cost()).sum();
        state.cursors = vec![WindowCursor { head: 0, sum }; self.windows.len()].into();
        self.expire(state, now);
    }

    fn admits(&self, state: &mut LogState, now: Timestamp, cost: u64) -> bool {
        self.denied(state, now, cost) == 0
    }

    fn denied(&self, state: &mut LogState, now: Timestamp, cost: u64) -> u16 {
        self.expire(state, now);
        let mut denied = 0;
        for (index, (window, cursor)) in self.windows.iter().zip(&state.cursors).enumerate() {
            if cost > window.limit || cursor.sum > window.limit - cost {
                denied |= 1 << index;
            }
        }
        denied
    }

    /// Charges `cost`. Keeps only the newest units, up to the largest limit. Older entries cannot
    /// affect a decision and are dropped. Therefore, a log that counts denied requests takes no
    /// more memory than any other log.
    fn charge(&self, state: &mut LogState, now: Timestamp, cost: u64) {
        let cost = cost.min(self.largest);
        if cost == 0 {
            return;
        }
        state.enter(now, cost);
        while let Some(oldest) = state.stamps.front()
            && state.units() - oldest.cost() >= self.largest
        {
            state.drop_oldest();
        }
    }

    /// Keeps only the newest units, up to the largest limit, and drops all other units. The dropped
    /// units affect no decision and must not be refunded. Only the states of limits that count
    /// denied requests contain units that affect no decision.
    fn trim(&self, state: &mut LogState, now: Timestamp) {
        self.expire(state, now);
        let mut beyond = state.units().saturating_sub(self.largest);
        while let Some(oldest) = state.stamps.front_mut()
            && beyond > 0
        {
            let cost = oldest.cost();
            if cost <= beyond {
                beyond -= cost;
                state.drop_oldest();
                continue;
            }
            *oldest = Stamp::new(oldest.at(), cost - beyond);
            for cursor in &mut state.cursors {
                if cursor.head == 0 {
                    cursor.sum -= beyond;
                }
            }
            beyond = 0;
        }
    }

    fn clamp(&self, state: &mut LogState, at: Timestamp) {
        state.clamp(at);
    }

    fn refund(&self, state: &mut LogState, now: Timestamp, mut units: u64) {
        self.expire(state, now);
        while units > 0
            && let Some(newest) = state.stamps.back()
        {
            let refunded = units.min(newest.cost());
            units -= refunded;
            state.take(state.stamps.len() - 1, refunded);
        }
    }

    fn mark(_state: &LogState) -> Mark {
        Mark::Stamped
    }

    /// Removes up to `units` from the log entries at the instant of the charge, beginning with the
    /// newest entry.
    fn refund_charge(
        &self,
        state: &mut LogState,
        now: Timestamp,
        position: &ChargePosition,
        units: u64,
    ) -> u64 {
        if position.mark == Mark::Stamped {
            self.expire(state, now);
            state.refund_at(position.at, units);
        }
        0
    }

    fn status(&self, state: &LogState, now: Timestamp, index: usize) -> LimitStatus {
        let (window, cursor) = (self.windows[index], state.cursors[index]);
        let empty_at = match state.stamps.back() {
            Some(last) if cursor.sum.min(window.limit) > 0 => last.at().after(window.span),
            _ => now,
        };
        LimitStatus {
            remaining: window.limit.saturating_sub(cursor.sum),
            reset_after: empty_at.since(now),
        }
    }

    fn retry(&self, state: &LogState, now: Timestamp, index: usize, cost: u64) -> RetryAfter {
        let (window, cursor) = (self.windows[index], state.cursors[index]);
        if cost > window.limit {
            return RetryAfter::Never;
        }
        let mut short = (cursor.sum + cost).saturating_sub(window.limit);
        for stamp in state.stamps.range(cursor.head..) {
            if short <= stamp.cost() {
                return RetryAfter::After(stamp.at().after(window.span).since(now));
            }
            short -= stamp.cost();
        }
        RetryAfter::NOW
    }
}
