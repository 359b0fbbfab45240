//! Capacity and eviction: the limits of a shard in keys and bytes, and which entries are evicted
//! when it is full.
//!
//! A decision first reserves what it will add, and selects the entries to evict for that. This
//! changes nothing yet. A charge then [evicts the selected entries](Shard::carry_out). A peek drops
//! the reservation; its answer has still accounted for the available room.

use super::{
    WhenFull,
    entry::{Entry, key_bytes},
    shard::Shard,
};
use crate::{
    charge::{Charge, Effect},
    outcome::Retry,
    time::{Span, Timestamp},
};

/// The maximum number of entries that a reservation inspects to find expired or evictable ones.
const SAMPLE: usize = 8;

/// The retry hint for a key whose home is crowded. It is not known when one of the other entries
/// there will be removed.
const CROWDED: Span = Span::from_secs(1);

/// The capacity of a shard, and its policy when full.
#[derive(Clone, Copy, Debug)]
pub(super) struct Room {
    pub(super) keys: usize,
    pub(super) bytes: usize,
    pub(super) when_full: WhenFull,
}

/// The growth that a charge causes in a shard.
#[derive(Clone, Copy, Debug)]
pub(super) struct Wanted {
    keys: usize,
    /// Heap bytes, for the key and its state.
    bytes: usize,
}

impl Wanted {
    const NOTHING: Self = Self { keys: 0, bytes: 0 };

    #[inline]
    pub(super) fn is_nothing(self) -> bool {
        self.keys == 0 && self.bytes == 0
    }
}

/// The reservation of the current decision.
#[derive(Debug, Default)]
pub(super) struct Reserved {
    keys: usize,
    bytes: usize,
    /// The slots of the entries to evict.
    leaving: Vec<usize>,
    /// Heap bytes that these entries release.
    freed: usize,
    /// The number of entries inspected so far, starting from the cursor.
    looked: usize,
    /// The slot after the last inspected entry.
    next: usize,
    /// The earliest expiry of the inspected entries.
    soonest: Option<Timestamp>,
}

impl Reserved {
    /// Clears the reservation; returns the number of keys that were reserved.
    #[inline]
    pub(super) fn clear(&mut self) -> usize {
        let keys = std::mem::take(&mut self.keys);
        (self.bytes, self.freed, self.looked, self.soonest) = (0, 0, 0, None);
        self.leaving.clear();
        keys
    }
}

/// A full shard, and when it may have room again.
#[derive(Debug)]
pub(super) struct Full {
    pub(super) retry_after: Retry,
}

impl Shard {
    /// Returns what `charge` adds. `found` is the slot of its key's entry, if it has one.
    #[inline]
    pub(super) fn wanted(
        &self,
        charge: &Charge<'_>,
        found: Option<usize>,
        effect: Effect,
    ) -> Wanted {
        let cost = match effect {
            Effect::Charge | Effect::Peek => charge.cost.units(),
            // A refund adds nothing itself, but the state may be converted if the limits changed.
            Effect::Refund if found.is_some() => 0,
            Effect::Refund | Effect::Look => return Wanted::NOTHING,
        };
        match found {
            Some(number) => Wanted {
                keys: 0,
                bytes: self.entries[number].growth_bytes(charge.limits, cost),
            },
            None => Wanted {
                keys: 1,
                bytes: key_bytes(charge.key) + charge.limits.newcomer_bytes(cost),
            },
        }
    }

    /// Reserves room for one of the charges in `all`, which are decided together. Returns false if
    /// the charge is to be admitted without counting it.
    ///
    /// # Errors
    ///
    /// [`Full`] if the charge does not fit and the policy is to deny.
    #[cold]
    pub(super) fn reserve_for(
        &mut self,
        (wanted, hash): (Wanted, u64),
        all: &[Charge<'_>],
        now: Timestamp,
        effect: Effect,
    ) -> Result<bool, Full> {
        let is_crowded = wanted.keys > 0 && self.entries.is_crowded(hash, all.len());
        let reserved = if is_crowded {
            let retry_after = Retry::After(CROWDED);
            Err(Full { retry_after })
        } else {
            self.reserve(wanted, all, now)
        };
        let Err(full) = reserved else {
            return Ok(true);
        };
        let (counts, once) = (&mut self.rest.counts, u64::from(effect.writes()));
        if self.rest.room.when_full == WhenFull::Allow {
            counts.newcomers_allowed += once;
            Ok(false)
        } else {
            counts.newcomers_denied += once;
            Err(full)
        }
    }

    /// Adds `wanted` to the reservation. If it does not fit, selects entries to evict: expired ones
    /// and, under [`WhenFull::Evict`], those that are not hot. It inspects at most [`SAMPLE`]
    /// entries and never selects a key that is being decided.
    fn reserve(
        &mut self,
        wanted: Wanted,
        decided: &[Charge<'_>],
        now: Timestamp,
    ) -> Result<(), Full> {
        let mut tries = SAMPLE;
        while !self.has_room(wanted) {
            let Self { entries, rest, .. } = self;
            let reserved = &mut rest.reserved;
            if reserved.looked == 0 {
                reserved.next = rest.cursor;
            }
            let found = entries.next_from(reserved.next);
            let is_left = tries > 0 && reserved.looked < entries.len();
            let Some(number) = found.filter(|_| is_left) else {
                return Err(Full {
                    retry_after: retry_after(reserved.soonest, now),
                });
            };
            tries -= 1;
            reserved.looked += 1;
            reserved.next = number + 1;
            let candidate = &entries[number];
            let expires = candidate.expires();
            let is_idle = rest.room.when_full == WhenFull::Evict && !candidate.pressed();
            let is_decided = || decided.iter().any(|charge| charge.key == candidate.key());
            // Do not evict an entry that would free neither a needed slot nor any bytes.
            let helps =
                reserved.keys + wanted.keys > reserved.leaving.len() || candidate.heap_bytes() > 0;
            if (expires <= now || is_idle && helps) && !is_decided() {
                reserved.leaving.push(number);
                reserved.freed += candidate.heap_bytes();
            }
            reserved.soonest = Some(
                reserved
                    .soonest
                    .map_or(expires, |soonest| soonest.min(expires)),
            );
        }
        self.rest.reserved.keys += wanted.keys;
        self.rest.reserved.bytes += wanted.bytes;
        Ok(())
    }

    /// Evicts the reserved victims unless `effect` is read-only. Returns true if any were evicted,
    /// in which case other entries may have moved.
    #[inline]
    pub(super) fn carry_out(&mut self, now: Timestamp, effect: Effect) -> bool {
        effect.writes() && self.rest.reserved.looked > 0 && self.make_way(now)
    }

    #[cold]
    fn make_way(&mut self, now: Timestamp) -> bool {
        let reserved = &mut self.rest.reserved;
        let mut leaving = std::mem::take(&mut reserved.leaving);
        // Removals shift later entries back by up to one slot each, so the cursor moves back, too.
        self.rest.cursor = reserved.next.saturating_sub(leaving.len());
        (reserved.looked, reserved.freed) = (0, 0);
        let has_moved = !leaving.is_empty();
        // A removal shifts later entries back, so remove the highest slot first.
        leaving.sort_unstable_by(|a, b| b.cmp(a));
        for number in leaving.drain(..) {
            let has_expired = self.entries[number].expires() <= now;
            self.remove(number);
            let counts = &mut self.rest.counts;
            if has_expired {
                counts.expired += 1;
            } else {
                counts.evicted += 1;
            }
        }
        self.rest.reserved.leaving = leaving;
        has_moved
    }

    /// Makes room for a new entry with this hash; returns false if there is none, or if its home is
    /// crowded.
    pub(super) fn make_room_for(&mut self, hash: u64, entry: &Entry, now: Timestamp) -> bool {
        if self.entries.is_crowded(hash, 1) {
            return false;
        }
        let wanted = Wanted {
            keys: 1,
            bytes: entry.heap_bytes(),
        };
        let fits = self.reserve(wanted, &[], now).is_ok();
        if fits {
            self.make_way(now);
        }
        self.rest.reserved.clear();
        fits
    }

    /// Returns whether `wanted` fits beside the stored and reserved data once the selected entries
    /// are evicted.
    fn has_room(&self, wanted: Wanted) -> bool {
        let (room, reserved) = (&self.rest.room, &self.rest.reserved);
        let keys = reserved.keys + wanted.keys;
        let more_keys = keys.saturating_sub(reserved.leaving.len());
        let growth = self.entries.growth_bytes(more_keys);
        let bytes = self.bytes() - reserved.freed + reserved.bytes + wanted.bytes + growth;
        self.entries.len() + more_keys <= room.keys && bytes <= room.bytes
    }
}

/// Returns when the first of the inspected entries expires: at least 1 µs from now.
/// [`Retry::Never`] if the shard was empty, because the charge will then never fit.
fn retry_after(soonest: Option<Timestamp>, now: Timestamp) -> Retry {
    soonest.map_or(Retry::Never, |soonest| {
        Retry::After(soonest.since(now).max(Span::from_micros(1)))
    })
}
