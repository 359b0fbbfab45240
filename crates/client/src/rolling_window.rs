//! Two counters over a sliding window, which is divided into slots. The running time and the memory
//! of the counters do not depend on the number of events.

use tidegate_core::{Span, Timestamp};

/// The number of slots per window. The sum covers the last nine to ten slots.
const SLOT_COUNT: usize = 10;
/// [`SLOT_COUNT`] as a `u64`.
const SLOTS: u64 = SLOT_COUNT as u64;

/// Two numbers that are counted together: requests and events.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct WindowCounts {
    pub(crate) requests: u64,
    /// The number of events other than requests: failures, retries or accepted requests.
    pub(crate) events: u64,
}

impl WindowCounts {
    fn saturating_add(self, other: Self) -> Self {
        Self {
            requests: self.requests.saturating_add(other.requests),
            events: self.events.saturating_add(other.events),
        }
    }
}

/// The counters over the most recent window.
#[derive(Clone, Debug)]
pub(crate) struct RollingWindow {
    slot: Span,
    /// The number of the newest slot, counted since the epoch.
    newest: u64,
    slots: [WindowCounts; SLOT_COUNT],
}

impl RollingWindow {
    /// Creates empty counters over `window`. A slot lasts at least one microsecond.
    pub(crate) fn new(window: Span) -> Self {
        Self {
            slot: Span::from_micros((window.as_micros() / SLOTS).max(1)),
            newest: 0,
            slots: Default::default(),
        }
    }

    /// Adds `counts` at `now`. If `now` is before the newest slot, the counts are added to the
    /// newest slot.
    pub(crate) fn add(&mut self, counts: WindowCounts, now: Timestamp) {
        self.advance(now);
        let slot = &mut self.slots[index(self.newest)];
        *slot = slot.saturating_add(counts);
    }

    /// Returns the sums over the window that ends at `now`.
    pub(crate) fn sum(&mut self, now: Timestamp) -> WindowCounts {
        self.advance(now);
        let slots = self.slots.iter().copied();
        slots.fold(WindowCounts::default(), WindowCounts::saturating_add)
    }

    /// Resets all counters.
    pub(crate) fn clear(&mut self) {
        self.slots = Default::default();
    }

    /// Makes the slot that contains `now` the newest slot, and resets the slots that have left the
    /// window.
    fn advance(&mut self, now: Timestamp) {
        let current = now.as_micros() / self.slot.as_micros();
        if current <= self.newest {
            return;
        }
        // After a long pause, every slot has left the window. Reset each slot only once.
        let first = (self.newest + 1).max(current.saturating_sub(SLOTS - 1));
        debug_assert!(current - first < SLOTS);
        for expired in first..=current {
            self.slots[index(expired)] = WindowCounts::default();
        }
        self.newest = current;
    }
}

/// Returns the array index of the slot with the number `slot`.
fn index(slot: u64) -> usize {
    usize::try_from(slot % SLOTS).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(secs: u64) -> Timestamp {
        Timestamp::from_micros(1_000_000_000_000_000).after(Span::from_secs(secs))
    }

    #[test]
    fn counts_expire_slot_by_slot() {
        let mut window = RollingWindow::new(Span::from_secs(10));
        let one = WindowCounts {
            requests: 1,
            events: 2,
        };
        window.add(one, at(0));
        window.add(one, at(5));
        assert_eq!(window.sum(at(9)).requests, 2);
        assert_eq!(window.sum(at(10)).requests, 1);
        window.add(one, at(3));
        assert_eq!(
            window.sum(at(14)).events,
            4,
            "the late request counts as if it had arrived at 10 s"
        );
        assert_eq!(window.sum(at(15)).events, 2);
        assert_eq!(window.sum(at(1_000_000)), WindowCounts::default());
    }
}
