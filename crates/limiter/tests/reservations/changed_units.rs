//! The units of a key after a reload has changed its window, its lease, its algorithm or the number
//! of its limits.
//!
//! The twin does not know which server used the key under which limits, and how the store has
//! converted the state. So it knows only two numbers: the units that certainly count, and the units
//! that may count. A unit that is certainly counted stays counted, because no change of the limits
//! discards used units, unless the algorithm changes.

use crate::kind::{Change, Kind};

/// Units that were charged together.
#[derive(Clone, Debug)]
struct Entry {
    id: u64,
    /// When the units were charged, or renewed.
    at: u64,
    /// Whether the units were charged by the other algorithm of [`Change::Swapped`].
    is_swapped: bool,
    /// The units that certainly count, and until when.
    least: u64,
    least_until: u64,
    /// The units that may count, and until when.
    most: u64,
    most_until: u64,
}

/// The units of a key, except for buckets.
#[derive(Clone, Debug, Default)]
pub(crate) struct ChangedUnits {
    entries: Vec<Entry>,
    /// The units that refunds of charges from before a reset may have removed from any entry.
    stray: u64,
    charges: u64,
}

/// Whether a charge of slots is still held.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Holding {
    Held,
    Lost,
    Unknown,
}

/// The IDs of charges before the first change are their positions, which are smaller.
const FIRST_ID: u64 = 1 << 62;

impl ChangedUnits {
    /// Adds units that were charged before the first change, at the position `id`.
    pub(crate) fn add_earlier(&mut self, kind: Kind, id: u64, units: u64) {
        let (at, (least_until, most_until)) = match kind {
            // The position is the end of the window.
            Kind::FirstRequest => (id - kind.window(Change::None), (id, id)),
            _ => {
                let at = match kind {
                    Kind::Log | Kind::Slots => id,
                    Kind::Buckets => id * (kind.window(Change::None) / 6),
                    _ => id * kind.window(Change::None),
                };
                (at, kind.counted_until(Change::None, at))
            }
        };
        self.entries.push(Entry {
            id,
            at,
            is_swapped: false,
            least: units,
            least_until,
            most: units,
            most_until,
        });
    }

    /// Charges at least `least` and at most `most` units at `now`. Returns their ID.
    pub(crate) fn charge(
        &mut self,
        kind: Kind,
        change: Change,
        (least, most): (u64, u64),
        now: u64,
    ) -> u64 {
        let is_swapped = change == Change::Swapped;
        if least > 0 {
            // The counters of the other algorithm have been discarded.
            self.entries.retain(|entry| entry.is_swapped == is_swapped);
        }
        let until = kind.counted_until(change, now);
        self.add(is_swapped, (least, most), until, now)
    }

    fn add(
        &mut self,
        is_swapped: bool,
        (least, most): (u64, u64),
        (least_until, most_until): (u64, u64),
        now: u64,
    ) -> u64 {
        self.charges += 1;
        let id = FIRST_ID + self.charges;
        self.entries.push(Entry {
            id,
            at: now,
            is_swapped,
            least,
            least_until,
            most,
            most_until,
        });
        id
    }

    /// Changes the limits from `former` to `change` at `now`. Any later request may convert the
    /// units.
    pub(crate) fn change(&mut self, kind: Kind, former: Change, change: Change, now: u64) {
        self.entries.retain(|entry| entry.most_until > now);
        let (is_swapped, window) = (change == Change::Swapped, kind.window(change));
        for entry in &mut self.entries {
            if entry.is_swapped != is_swapped {
                // After a request, the counters of the new algorithm start empty.
                entry.least_until = entry.least_until.min(now);
                continue;
            }
            // Before a swap, these units may have had another window.
            if former != Change::Swapped && kind.window(former) == window {
                continue;
            }
            let (least, most) = match kind {
                Kind::Log | Kind::Slots => (entry.at + window, entry.at + window),
                // A window that began with a request ends one length after it began.
                Kind::FirstRequest => (now, entry.at + window),
                // The units count in the window in which they are converted.
                _ => {
                    let (least, _) = kind.counted_until(change, now);
                    (least, kind.counted_until(change, entry.most_until - 1).1)
                }
            };
            entry.least_until = entry.least_until.min(least);
            entry.most_until = entry.most_until.max(most);
        }
    }

    /// Returns the number of units that count under `change` at `now`: at least, and at most.
    pub(crate) fn counted(&self, change: Change, now: u64) -> (u64, u64) {
        let is_swapped = change == Change::Swapped;
        let own = self.entries.iter();
        let own = own.filter(|entry| entry.is_swapped == is_swapped);
        let (least, most) = own.fold((0, 0), |(least, most), entry| {
            let certain = if entry.least_until > now {
                entry.least
            } else {
                0
            };
            let possible = if entry.most_until > now {
                entry.most
            } else {
                0
            };
            (least + certain, most + possible)
        });
        (least.saturating_sub(self.stray), most)
    }

    /// Refunds `units` of the charge `id`. Returns the units that the charge may no longer have.
    pub(crate) fn refund(&mut self, id: u64, units: u64) -> u64 {
        let Some(entry) = self.find(id) else {
            return units;
        };
        let missing = units.saturating_sub(entry.least);
        entry.least = entry.least.saturating_sub(units);
        entry.most = entry.most.saturating_sub(units);
        missing
    }

    /// Records that `units` of the charge `id` may have been refunded.
    pub(crate) fn refund_possibly(&mut self, id: u64, units: u64) {
        if let Some(entry) = self.find(id) {
            entry.least = entry.least.saturating_sub(units);
        }
    }

    /// Records that any `units` may have been refunded: a reset has removed the charge, and the
    /// refund may remove units of other charges.
    pub(crate) fn refund_any(&mut self, units: u64) {
        self.stray += units;
    }

    /// Returns whether the slots of the charge `id` are held.
    pub(crate) fn holding(&self, id: u64, units: u64, now: u64) -> Holding {
        let entry = self.entries.iter().find(|entry| entry.id == id);
        match entry {
            Some(entry) if entry.least >= units + self.stray && entry.least_until > now => {
                Holding::Held
            }
            Some(entry) if entry.most > 0 && entry.most_until > now => Holding::Unknown,
            _ => Holding::Lost,
        }
    }

    /// Moves the slots of the charge `id` to `now`, or acquires them again. They are held until
    /// `until`: at least, and at most. Returns their new ID.
    pub(crate) fn renew(
        &mut self,
        id: u64,
        units: u64,
        until: (u64, u64),
        is_swapped: bool,
        now: u64,
    ) -> u64 {
        self.entries.retain(|entry| entry.id != id);
        self.add(is_swapped, (units, units), until, now)
    }

    /// Records that the slots of the charge `id` may have been renewed until `until`.
    pub(crate) fn renew_possibly(
        &mut self,
        id: u64,
        units: u64,
        until: u64,
        is_swapped: bool,
        now: u64,
    ) -> u64 {
        let former = self.entries.iter().position(|entry| entry.id == id);
        let least_until = former.map_or(now, |at| self.entries.remove(at).least_until);
        self.add(
            is_swapped,
            (units, units),
            (least_until.min(now), until),
            now,
        )
    }

    /// Records that the former limits are unknown after a restart. The state of a window that
    /// began with a request contains only its end, so the window may begin when it is converted.
    pub(crate) fn forget_starts(&mut self) {
        for entry in &mut self.entries {
            entry.at = entry.at.max(entry.most_until);
        }
    }

    /// Forgets all units, because of a reset.
    pub(crate) fn clear(&mut self) {
        self.entries.clear();
        self.stray = 0;
    }

    fn find(&mut self, id: u64) -> Option<&mut Entry> {
        self.entries.iter_mut().find(|entry| entry.id == id)
    }
}
