//! Finds a key's busiest window, which is the window with the highest total cost.

use std::collections::VecDeque;

use tidegate_core::{Algorithm, Limit, Limits, Span, Timestamp};

/// The number of slices in a window. A counted window consists of whole slices, so it may be up to
/// one slice longer than the limit's window. Therefore, a suggested limit is never too low.
const PARTS: u64 = 60;

/// The busiest window of one key.
#[derive(Clone, Debug, Default)]
pub(crate) struct BusiestWindow {
    /// The slices of the window: each slice's index and total cost.
    parts: VecDeque<(u64, u64)>,
    /// The total cost of all slices. The total can exceed `u64`, because a log can have any number
    /// of requests.
    sum: u128,
    pub(crate) units: u64,
}

impl BusiestWindow {
    /// Counts a request with the cost `units` at `now`, which must not be earlier than in the last
    /// call.
    pub(crate) fn count(&mut self, now: Timestamp, window: Span, units: u64) {
        let part = now.as_micros() / (window.as_micros() / PARTS).max(1);
        while let Some((_, old)) = self.parts.pop_front_if(|(first, _)| *first + PARTS < part) {
            self.sum -= u128::from(old);
        }
        match self.parts.back_mut() {
            Some((last, counted)) if *last == part => {
                let before = std::mem::replace(counted, counted.saturating_add(units));
                self.sum += u128::from(*counted - before);
            }
            _ => {
                self.parts.push_back((part, units));
                self.sum += u128::from(units);
            }
        }
        let sum = u64::try_from(self.sum).unwrap_or(u64::MAX);
        self.units = self.units.max(sum);
    }
}

/// Returns the distinct window lengths among a rule's limits. A bucket has no window. For a bucket,
/// the report suggests bursts for several rates instead of a limit.
pub(crate) fn windows(limits: &Limits) -> Vec<Span> {
    let counts_in_windows = |limit: &&Limit| {
        matches!(
            limit.algorithm(),
            Algorithm::FixedWindow { .. }
                | Algorithm::SlidingWindowLog { .. }
                | Algorithm::SlidingWindowCounter { .. }
        )
    };
    let windows = limits.iter().filter(counts_in_windows);
    let mut windows: Vec<Span> = windows.map(Limit::window).collect();
    windows.sort_unstable();
    windows.dedup();
    windows
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_busiest_window_is_never_too_short() {
        let window = Span::from_secs(60);
        let mut busiest = BusiestWindow::default();
        let at = |second: u64| Timestamp::from_micros(second * 1_000_000);
        for second in [0, 59, 60, 61, 200, 201] {
            busiest.count(at(second), window, 1);
        }
        // The times 0 and 60 are one window apart. Nevertheless, requests at both times count in
        // the same window, because only whole slices are counted.
        assert_eq!(busiest.units, 3);
        busiest.count(at(202), window, 5);
        assert_eq!(busiest.units, 7);
        assert!(busiest.parts.len() <= 61);
    }
}
