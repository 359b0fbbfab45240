//! Fixed window: a counter that is reset at the end of each window.
//!
//! This module implements the algorithm `fixed_window`. Windows are aligned to the epoch, to a
//! key's first request, or to a calendar.
//!
//! - **Guarantee.** At most `L` units are admitted in each window `[start, end)`.
//! - **Memory.** The state takes 16 bytes. A key expires when its window ends.
//! - **Counting in full.** If denied requests are counted in full, the count can exceed `L`. A
//!   count above `L` does not change decisions, because every request is denied if the count is `L`
//!   or higher.
//! - **Weakness.** In a short interval around a window boundary, up to `2 * L` units can be
//!   admitted: `L` just before and `L` just after the boundary. In general, with windows of length
//!   `W`, up to `L * (ceil(t / W) + 1)` units can be admitted in a half-open interval of length
//!   `t`. All keys with epoch-aligned or calendar windows are reset at the same instant.
//! - **Source.** The algorithm has no known author. Descriptions of the algorithm usually mention
//!   the burst at the window boundary.

use crate::{
    algorithm::{
        ChargePosition, Counter, CounterState, LimitStatus, Mark, Numbers, RetryAfter, Terms,
        counter::is_count,
    },
    digest::Digest,
    error::LimitError,
    limit::{
        Window,
        bounds::{self, check_count, check_period},
    },
    time::{Calendar, Span, Timestamp},
};

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct WindowState {
    pub(crate) count: u64,
    /// The end of the window in which `count` was counted, in microseconds since the epoch.
    pub(crate) end: u64,
}

impl WindowState {
    fn end(&self) -> Timestamp {
        Timestamp::from_micros(self.end)
    }

    fn count_at(&self, now: Timestamp) -> u64 {
        if self.end <= now.as_micros() {
            0
        } else {
            self.count
        }
    }
}

impl CounterState for WindowState {
    fn expires(&self) -> Timestamp {
        self.end()
    }

    fn move_back(&mut self, span: Span) {
        self.end = self.end.saturating_sub(span.as_micros());
    }

    fn write(&self, put: &mut dyn FnMut(u64)) {
        [self.count, self.end].into_iter().for_each(put);
    }

    fn read(next: &mut dyn FnMut() -> Option<u64>) -> Option<Self> {
        Some(Self {
            count: next().filter(is_count)?,
            end: next()?,
        })
    }
}

#[derive(Clone, Debug)]
pub(crate) struct FixedWindow {
    limit: u64,
    grid: Window,
    /// Whether denied requests are counted in full, so that the count can exceed the limit.
    in_full: bool,
}

impl FixedWindow {
    pub(crate) fn new(limit: u64, grid: &Window, in_full: bool) -> Result<Self, LimitError> {
        check_count("limit", limit, 0)?;
        if let Window::Epoch(span) | Window::FirstRequest(span) = grid {
            check_period("window", *span)?;
        }
        Ok(Self {
            limit,
            grid: grid.clone(),
            in_full,
        })
    }

    /// Returns the maximum value of the counter.
    fn largest_count(&self) -> u64 {
        if self.in_full {
            bounds::MAX_COUNT
        } else {
            self.limit
        }
    }

    /// Returns the end of the window that contains `now`. For windows that start with a key's first
    /// request, assumes that the window starts at `now`.
    fn end_at(&self, now: Timestamp) -> Timestamp {
        match &self.grid {
            Window::Epoch(span) => {
                let span = span.as_micros();
                Timestamp::from_micros((now.as_micros() / span + 1).saturating_mul(span))
            }
            Window::FirstRequest(span) => now.after(*span),
            Window::Calendar(calendar) => Calendar::window(calendar, now).1,
        }
    }
}

impl Counter for FixedWindow {
    type State = WindowState;

    fn numbers(&self, _cost: u64) -> Numbers<'_> {
        Numbers::Window {
            limit: self.limit,
            most: self.largest_count(),
            grid: &self.grid,
        }
    }

    fn terms(&self) -> Terms {
        match &self.grid {
            Window::FirstRequest(span) => Terms::FirstRequest {
                window: span.as_micros(),
            },
            grid => Terms::Digest(grid.digest(Digest::new()).folded()),
        }
    }

    fn in_terms(&self, terms: &Terms) -> Option<Self> {
        let Terms::FirstRequest { window } = *terms else {
            return None;
        };
        Some(Self {
            grid: Window::FirstRequest(Span::from_micros(window)),
            ..self.clone()
        })
    }

    fn largest_number(&self) -> u64 {
        self.largest_count()
    }

    fn fresh(&self) -> WindowState {
        WindowState::default()
    }

    /// Converts a state from a limit with other window parameters. If the old window overlaps the
    /// new window, the whole count is carried over to the new window.
    fn adopt(&self, old: Option<&Self>, state: &mut WindowState, now: Timestamp) {
        if state.end <= now.as_micros() {
            *state = WindowState::default();
            return;
        }
        let end = match (&self.grid, old.map(|old| &old.grid)) {
            (Window::FirstRequest(new), Some(Window::FirstRequest(old))) => {
                let start = state.end.saturating_sub(old.as_micros());
                start.saturating_add(new.as_micros())
            }
            (Window::FirstRequest(_), _) => state.end.min(self.end_at(now).as_micros()),
            (Window::Epoch(_) | Window::Calendar(_), _) => self.end_at(now).as_micros(),
        };
        if end <= now.as_micros() {
            *state = WindowState::default();
        } else {
            state.end = end;
        }
    }

    fn admits(&self, state: &mut WindowState, now: Timestamp, cost: u64) -> bool {
        cost <= self.limit && state.count_at(now) <= self.limit - cost
    }

    fn charge(&self, state: &mut WindowState, now: Timestamp, cost: u64) {
        let count = state.count_at(now);
        let most = self.largest_count();
        let spent = cost.min(most.saturating_sub(count));
        if spent == 0 {
            return;
        }
        if state.end <= now.as_micros() {
            state.end = self.end_at(now).as_micros();
        }
        state.count = count + spent;
    }

    /// If the state's window ends after `at`, replaces it with the window that contains `at`, and
    /// keeps the count. A window that started with a key's first request ends at its old end or one
    /// window length after `at`, whichever is earlier.
    fn clamp(&self, state: &mut WindowState, at: Timestamp) {
        if state.end <= at.as_micros() {
            return;
        }
        let end = self.end_at(at).as_micros();
        state.end = match self.grid {
            Window::FirstRequest(_) => state.end.min(end),
            // The new end must be a window boundary. If the count were reset in the middle of an
            // aligned window, up to twice the limit could be admitted in this window.
            Window::Epoch(_) | Window::Calendar(_) => end,
        };
    }

    /// Refunds `units`. If the count drops to zero, the state is reset to that of a new key, so
    /// that the next charge starts a new window.
    fn refund(&self, state: &mut WindowState, now: Timestamp, units: u64) {
        match state.count_at(now).saturating_sub(units) {
            0 => *state = WindowState::default(),
            left => state.count = left,
        }
    }

    fn mark(state: &WindowState) -> Mark {
        Mark::WindowEnd(state.end)
    }

    fn refund_charge(
        &self,
        state: &mut WindowState,
        now: Timestamp,
        position: &ChargePosition,
        units: u64,
    ) -> u64 {
        if position.mark == Mark::WindowEnd(state.end) {
            self.refund(state, now, units);
        }
        0
    }

    fn status(&self, state: &WindowState, now: Timestamp, _window: usize) -> LimitStatus {
        LimitStatus {
            remaining: self.limit.saturating_sub(state.count_at(now)),
            reset_after: state.end().since(now),
        }
    }

    fn retry(&self, state: &WindowState, now: Timestamp, _window: usize, cost: u64) -> RetryAfter {
        if cost > self.limit {
            return RetryAfter::Never;
        }
        RetryAfter::After(state.end().since(now))
    }

    /// Returns the number of units by which the count exceeds the limit.
    fn excess(&self, state: &WindowState, now: Timestamp) -> u64 {
        state.count_at(now).saturating_sub(self.limit)
    }
}
