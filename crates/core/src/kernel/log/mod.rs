//! The log kernel: the instants of what was admitted.
//!
//! Faces: `sliding_window_log`. All the windows of one rule share one log: each keeps its place in it and
//! the sum of what lies inside. And `concurrency`, whose log is of those who hold a place: they leave it when they are
//! done, and are not counted any more when their lease is over.
//!
//! ```text
//!   expired      1/min window            1/s window
//!   ▒▒▒▒▒▒│░░░░░░░░░░░░░░░░░░░░░░░░│█████████████│
//!         head of the longest      head          now         an entry at `t` counts while t > now - W
//! ```
//!
//! - **Promise.** Strict: every half-open interval of length `W` admits at most `L`, across every boundary.
//!   Of `concurrency`: at no instant do more than `L` hold a place that took or renewed it within the last lease and have not given
//!   it back. Its waits are estimates, since nobody knows when a holder will be done: see [`Log::hint`].
//! - **Memory.** 8 bytes for each admission that is still inside the longest window (more only for a cost
//!   over 2,047), at most `L` of them, and an eighth to spare; what a busy time took is kept until the key is idle
//!   for a whole window.
//! - **Work.** Each entry is passed once by each window, so that a decision costs a constant amount on
//!   average, though one that comes after a long silence passes all of them at once. A denied cost of `n` reads at most
//!   `n` entries to name its wait, and a peek or a look copies the log.
//! - **Weakness.** Memory grows with the limit: over 100,000 it is refused, and a counter is right.
//! - **Source.** Folklore; ClassDojo 2015, "Better Rate Limiting With Redis Sorted Sets", for two windows over one log.

mod state;

use std::collections::VecDeque;

pub(crate) use self::state::{LogState, Stamp};
use self::state::{Place, grown, stamps_for};

use crate::{
    bounds::{self, check_count, check_period},
    digest::Digest,
    kernel::{Standing, narrow},
    limit::LimitError,
    outcome::Retry,
    remote::{Numbers, Terms},
    time::{Span, Timestamp},
};

/// The shortest hint when to ask again for a place.
const LEAST_HINT: Span = Span::from_millis(100);

/// The longest one: so often clients may ask without doing harm, however long requests take.
const LONGEST_HINT: Span = Span::from_secs(10);

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
        Self::of_field(limit, ("window", span))
    }

    /// A log of those who hold a place for up to `lease`.
    pub(crate) fn new_lease(limit: u64, lease: Span) -> Result<Self, LimitError> {
        Self::of_field(limit, ("lease", lease))
    }

    fn of_field(limit: u64, (field, span): (&'static str, Span)) -> Result<Self, LimitError> {
        check_count("limit", limit, 0)?;
        check_period(field, span)?;
        if limit > bounds::MAX_LOG_LIMIT {
            let most = bounds::MAX_LOG_LIMIT;
            let problem = if field == "window" {
                format!(
                    "{limit} is over the log's maximum of {most}; use sliding_window_counter for larger limits"
                )
            } else {
                format!("{limit} at once is over the maximum of {most}")
            };
            return Err(LimitError::new("limit", problem));
        }
        Ok(Self {
            windows: vec![LogWindow { limit, span }],
            longest: span,
            largest: limit,
        })
    }

    /// Lets the windows of `other` share this log.
    pub(crate) fn join(&mut self, other: &Self) {
        self.windows.extend_from_slice(&other.windows);
        self.longest = self.longest.max(other.longest);
        self.largest = self.largest.max(other.largest);
    }

    /// What a state is counted in.
    pub(crate) fn terms(&self) -> Terms {
        let spans = self.windows.iter().map(|window| window.span.as_micros());
        Terms::Digest(spans.fold(Digest::new(), Digest::number).folded())
    }

    /// The numbers for a store elsewhere.
    pub(crate) fn numbers(&self) -> Numbers<'static> {
        let windows = self
            .windows
            .iter()
            .map(|window| (window.limit, window.span));
        Numbers::Log {
            windows: windows.collect(),
        }
    }

    /// The same of leases.
    pub(crate) fn lease_numbers(&self) -> Numbers<'static> {
        Numbers::Lease {
            limit: self.largest,
            lease: self.longest,
        }
    }

    pub(crate) fn fresh(&self) -> LogState {
        LogState {
            stamps: VecDeque::new(),
            places: vec![Place::default(); self.windows.len()].into(),
            longest: self.longest,
        }
    }

    /// What a new log holds once `cost` is charged.
    pub(crate) fn newcomer_bytes(&self, cost: u64) -> usize {
        let stamps = grown(0, stamps_for(cost.min(self.largest)));
        stamps * size_of::<Stamp>() + self.windows.len() * size_of::<Place>()
    }

    /// What charging `cost` may add; what can never fit is not charged.
    pub(crate) fn growth_bytes(&self, state: &LogState, cost: u64) -> usize {
        state.growth_bytes(cost.min(self.largest))
    }

    pub(crate) fn knows(&self, state: &LogState) -> bool {
        state.places.len() == self.windows.len() && state.longest == self.longest
    }

    /// The entries that the old windows still held stay as they are; every window finds its place among them.
    pub(crate) fn adopt(&self, state: &mut LogState, now: Timestamp) {
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
        state.places = vec![Place { head: 0, sum }; self.windows.len()].into();
        self.expire(state, now);
    }

    pub(crate) fn denied(&self, state: &mut LogState, now: Timestamp, cost: u64) -> u16 {
        self.expire(state, now);
        let mut denied = 0;
        for (part, (window, place)) in self.windows.iter().zip(&state.places).enumerate() {
            if cost > window.limit || place.sum > window.limit - cost {
                denied |= 1 << part;
            }
        }
        denied
    }

    /// Entries beyond the newest `largest` units can decide nothing, so a log that counts what it denies
    /// stays as small as any other.
    pub(crate) fn charge(&self, state: &mut LogState, now: Timestamp, cost: u64) {
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

    pub(crate) fn refund(&self, state: &mut LogState, now: Timestamp, mut units: u64) {
        self.expire(state, now);
        while units > 0
            && let Some(newest) = state.stamps.back()
        {
            let given_back = units.min(newest.cost());
            units -= given_back;
            state.take(state.stamps.len() - 1, given_back);
        }
    }

    /// Takes up to `units` of what was charged at `at` out, the newest entry first.
    pub(crate) fn give_back(
        &self,
        state: &mut LogState,
        now: Timestamp,
        at: Timestamp,
        units: u64,
    ) {
        self.expire(state, now);
        state.give_back(at, units);
    }

    /// [`LogState::renew`], as far as there are places.
    pub(crate) fn renew(
        &self,
        state: &mut LogState,
        now: Timestamp,
        place: (Timestamp, u64),
    ) -> bool {
        state.renew(now, place, self.largest)
    }

    pub(crate) fn standing(&self, state: &LogState, now: Timestamp, part: usize) -> Standing {
        let (window, place) = (self.windows[part], state.places[part]);
        let empty_at = match state.stamps.back() {
            Some(last) if place.sum.min(window.limit) > 0 => last.at().after(window.span),
            _ => now,
        };
        Standing {
            remaining: window.limit.saturating_sub(place.sum),
            reset_after: empty_at.since(now),
        }
    }

    pub(crate) fn retry(&self, state: &LogState, now: Timestamp, part: usize, cost: u64) -> Retry {
        let (window, place) = (self.windows[part], state.places[part]);
        if cost > window.limit {
            return Retry::Never;
        }
        let mut short = (place.sum + cost).saturating_sub(window.limit);
        for stamp in state.stamps.range(place.head..) {
            if short <= stamp.cost() {
                return Retry::After(stamp.at().after(window.span).since(now));
            }
            short -= stamp.cost();
        }
        Retry::NOW
    }

    /// When it makes sense to ask again for `cost` places, of which there are not enough now.
    ///
    /// The next place comes back when a holder is done, which nobody knows; a lease that runs out is the exception.
    /// The holders' ages are what is known. If requests take about as long as the oldest has until now, and begin
    /// evenly spread, then `n` holders give back a place each `age / n`. So that is the hint for each missing
    /// place: short where requests are short, and growing with the age while nobody is done, so that clients
    /// that follow it ask less and less often. It is at least [`LEAST_HINT`], at most [`LONGEST_HINT`], and
    /// never after the leases end that have to.
    pub(crate) fn hint(&self, state: &LogState, now: Timestamp, cost: u64) -> Retry {
        let Retry::After(leases) = self.retry(state, now, 0, cost) else {
            return Retry::Never;
        };
        let (held, age) = match state.stamps.front() {
            Some(oldest) => (state.places[0].sum, now.since(oldest.at())),
            None => (0, Span::ZERO),
        };
        let short = (held + cost).saturating_sub(self.largest);
        let spread = u128::from(age.as_micros()) * u128::from(short);
        let next = Span::from_micros(narrow(spread.div_ceil(u128::from(held.max(1)))));
        Retry::After(next.clamp(LEAST_HINT, LONGEST_HINT).min(leases))
    }

    /// Takes from the oldest entry what lies beyond the newest `largest` units, where what is denied is charged: it decides
    /// nothing, and is not to be given back either.
    pub(crate) fn trim(&self, state: &mut LogState, now: Timestamp) {
        self.expire(state, now);
        let beyond = state.units().saturating_sub(self.largest);
        let Some(oldest) = state.stamps.front_mut() else {
            return;
        };
        let beyond = beyond.min(oldest.cost());
        *oldest = Stamp::new(oldest.at(), oldest.cost() - beyond);
        for place in &mut state.places {
            if place.head == 0 {
                place.sum -= beyond;
            }
        }
    }

    /// Moves every window to where it begins now, and drops what has left the longest.
    fn expire(&self, state: &mut LogState, now: Timestamp) {
        for (window, place) in self.windows.iter().zip(&mut state.places) {
            while let Some(stamp) = state.stamps.get(place.head)
                && now.since(stamp.at()) >= window.span
            {
                place.sum -= stamp.cost();
                place.head += 1;
            }
        }
        let expired = state
            .places
            .iter()
            .map(|place| place.head)
            .min()
            .unwrap_or(0);
        state.stamps.drain(..expired);
        for place in &mut state.places {
            place.head -= expired;
        }
    }
}
