//! Two counters over a sliding window of slots. The cost does not depend on the number of events.

use tidegate_core::{Span, Timestamp};

/// Number of slots per window. The window that is summed is between nine and ten slots long.
pub(crate) const SLOTS: usize = 10;

/// Two numbers that are counted together, such as requests and failures.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Counts {
    pub(crate) first: u64,
    pub(crate) second: u64,
}

/// Counters over the latest window.
#[derive(Clone, Debug)]
pub(crate) struct Recent {
    slot: Span,
    /// The number of the newest slot since the epoch.
    newest: u64,
    slots: [Counts; SLOTS],
}

impl Recent {
    /// Creates empty counters over `window`. A slot has at least one microsecond.
    pub(crate) fn over(window: Span) -> Self {
        let slots = u64::try_from(SLOTS).unwrap_or(u64::MAX);
        Self {
            slot: Span::from_micros((window.as_micros() / slots).max(1)),
            newest: 0,
            slots: [Counts::default(); SLOTS],
        }
    }

    /// Adds `counts` at `now`. An instant before the newest slot counts towards the newest slot.
    pub(crate) fn add(&mut self, counts: Counts, now: Timestamp) {
        self.turn(now);
        let slot = &mut self.slots[place(self.newest)];
        slot.first = slot.first.saturating_add(counts.first);
        slot.second = slot.second.saturating_add(counts.second);
    }

    /// Returns the sums over the window that ends at `now`.
    pub(crate) fn sum(&mut self, now: Timestamp) -> Counts {
        self.turn(now);
        let mut sum = Counts::default();
        for slot in &self.slots {
            sum.first = sum.first.saturating_add(slot.first);
            sum.second = sum.second.saturating_add(slot.second);
        }
        sum
    }

    /// Resets all counters.
    pub(crate) fn clear(&mut self) {
        self.slots = [Counts::default(); SLOTS];
    }

    fn turn(&mut self, now: Timestamp) {
        let current = now.as_micros() / self.slot.as_micros();
        if current <= self.newest {
            return;
        }
        let slots = u64::try_from(SLOTS).unwrap_or(u64::MAX);
        let first = (self.newest + 1).max(current.saturating_sub(slots - 1));
        for passed in first..=current {
            self.slots[place(passed)] = Counts::default();
        }
        self.newest = current;
    }
}

/// Returns the array index of the slot with this number.
fn place(slot: u64) -> usize {
    usize::try_from(slot % u64::try_from(SLOTS).unwrap_or(u64::MAX)).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(secs: u64) -> Timestamp {
        Timestamp::from_micros(1_000_000_000_000_000).after(Span::from_secs(secs))
    }

    #[test]
    fn counts_expire_slot_by_slot() {
        let mut recent = Recent::over(Span::from_secs(10));
        let one = Counts {
            first: 1,
            second: 2,
        };
        recent.add(one, at(0));
        recent.add(one, at(5));
        assert_eq!(recent.sum(at(9)).first, 2);
        assert_eq!(recent.sum(at(10)).first, 1);
        recent.add(one, at(3));
        assert_eq!(
            recent.sum(at(14)).second,
            4,
            "the late one counts as if at 10"
        );
        assert_eq!(recent.sum(at(15)).second, 2);
        assert_eq!(recent.sum(at(1_000_000)), Counts::default());
    }
}
