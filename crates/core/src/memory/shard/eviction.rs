//! Capacity and eviction: a shard's maximum number of keys and bytes, and the entries that a full
//! shard evicts.
//!
//! A decision first reserves the memory that it needs, and selects the entries to evict. The
//! reservation itself changes no entry. A charge then [evicts the selected
//! entries](Shard::evict_reserved), but a charge that does not fit evicts only expired entries. A
//! peek (a read-only decision) makes the same reservation, but drops the reservation and evicts
//! nothing. Therefore, a peek and a charge give the same result.

use super::Shard;
use crate::{
    algorithm::RetryAfter,
    eval::{Charge, Effect},
    hash_table::TableKey,
    memory::{WhenFull, key_entry::KeyEntry},
    time::{Span, Timestamp},
};

/// The maximum number of entries that a reservation inspects for expiry or eviction.
const SAMPLE: usize = 8;

/// The retry delay for a new key whose home slot is
/// [crowded](crate::hash_table::HashTable::is_crowded). It is a constant, because it is unknown
/// when an entry near the home slot will be removed.
const CROWDED: Span = Span::from_secs(1);

/// The capacity of a shard, and its policy when full.
#[derive(Clone, Copy, Debug)]
pub(in crate::memory) struct Capacity {
    pub(in crate::memory) keys: usize,
    pub(in crate::memory) bytes: usize,
    pub(in crate::memory) when_full: WhenFull,
}

/// The keys and bytes that a charge adds to a shard.
#[derive(Clone, Copy, Debug)]
pub(in crate::memory) struct Growth {
    keys: usize,
    /// Additional heap bytes for the key and its state.
    bytes: usize,
}

impl Growth {
    const NOTHING: Self = Self { keys: 0, bytes: 0 };

    #[inline]
    pub(in crate::memory) fn is_nothing(self) -> bool {
        self.keys == 0 && self.bytes == 0
    }
}

/// The memory reserved by the current decision, and the entries to evict for it.
#[derive(Debug, Default)]
pub(in crate::memory) struct RoomReservation {
    keys: usize,
    bytes: usize,
    /// The slots of the entries to evict.
    victims: Vec<usize>,
    /// The heap bytes freed by evicting the selected entries.
    freed_bytes: usize,
    /// The number of entries that this decision has inspected so far, starting at the cursor.
    inspected: usize,
    /// The slot after the last inspected entry.
    next: usize,
    /// The earliest expiry of the inspected entries.
    earliest_expiry: Option<Timestamp>,
}

impl RoomReservation {
    /// Clears the reservation. Returns the number of reserved keys.
    #[inline]
    pub(in crate::memory) fn clear(&mut self) -> usize {
        let keys = std::mem::take(&mut self.keys);
        (
            self.bytes,
            self.freed_bytes,
            self.inspected,
            self.earliest_expiry,
        ) = (0, 0, 0, None);
        self.victims.clear();
        keys
    }
}

/// The error for a full shard, with the time after which the shard may have room again.
#[derive(Debug)]
pub(in crate::memory) struct Full {
    pub(in crate::memory) retry_after: RetryAfter,
}

impl Shard {
    /// Returns the keys and bytes that `charge` adds to the shard. `found` is the slot of the key's
    /// entry, if it has one.
    #[inline]
    pub(in crate::memory) fn growth(
        &self,
        charge: &Charge<'_>,
        found: Option<usize>,
        effect: Effect,
    ) -> Growth {
        let cost = match effect {
            Effect::Charge | Effect::Peek => charge.cost.units(),
            // A refund itself does not need memory. If the limits have changed, the conversion of
            // the state can need memory.
            Effect::Refund if found.is_some() => 0,
            Effect::Refund | Effect::Look => return Growth::NOTHING,
        };
        match found {
            Some(number) => Growth {
                keys: 0,
                bytes: self.entries[number].growth_bytes(charge.limits, cost),
            },
            None => Growth {
                keys: 1,
                bytes: TableKey::heap_bytes_of(charge.key) + charge.limits.new_entry_bytes(cost),
            },
        }
    }

    /// Reserves room for one of the charges in `all`, which belong to one decision. Returns false
    /// if the charge does not fit and must be admitted without being counted.
    ///
    /// # Errors
    ///
    /// Returns [`Full`] if the charge does not fit and the policy is to deny.
    #[cold]
    pub(in crate::memory) fn reserve_for(
        &mut self,
        growth: Growth,
        hash: u64,
        all: &[Charge<'_>],
        now: Timestamp,
        effect: Effect,
    ) -> Result<bool, Full> {
        let is_crowded = growth.keys > 0 && self.entries.is_crowded(hash, all.len());
        let reserved = if is_crowded {
            let retry_after = RetryAfter::After(CROWDED);
            Err(Full { retry_after })
        } else {
            self.reserve(growth, all, now)
        };
        let Err(full) = reserved else {
            return Ok(true);
        };
        let (counts, once) = (&mut self.cold.counts, u64::from(effect.can_write()));
        if self.cold.capacity.when_full == WhenFull::Allow {
            counts.admitted_when_full += once;
            Ok(false)
        } else {
            counts.denied_when_full += once;
            Err(full)
        }
    }

    /// Adds `growth` to the reservation. If `growth` does not fit, selects entries to evict:
    /// expired entries and, under [`WhenFull::Evict`], entries that are not
    /// [hot](KeyEntry::is_hot). Inspects at most [`SAMPLE`] entries, and never selects the entry of
    /// a key in `decided`.
    fn reserve(
        &mut self,
        growth: Growth,
        decided: &[Charge<'_>],
        now: Timestamp,
    ) -> Result<(), Full> {
        let mut tries = SAMPLE;
        while !self.has_room(growth) {
            let Self { entries, cold, .. } = self;
            let reserved = &mut cold.reservation;
            if reserved.inspected == 0 {
                reserved.next = cold.cursor;
            }
            let found = entries.next_from(reserved.next);
            let is_left = tries > 0 && reserved.inspected < entries.len();
            let Some(number) = found.filter(|_| is_left) else {
                return Err(Full {
                    retry_after: retry_after(reserved.earliest_expiry, now),
                });
            };
            tries -= 1;
            reserved.inspected += 1;
            reserved.next = number + 1;
            let candidate = &entries[number];
            let expires = candidate.expires();
            let is_idle = cold.capacity.when_full == WhenFull::Evict && !candidate.is_hot();
            let is_decided = || decided.iter().any(|charge| charge.key == candidate.key());
            // Evict a live entry only if its eviction frees a slot that is needed, or frees some
            // bytes.
            let helps =
                reserved.keys + growth.keys > reserved.victims.len() || candidate.heap_bytes() > 0;
            if (expires <= now || is_idle && helps) && !is_decided() {
                reserved.victims.push(number);
                reserved.freed_bytes += candidate.heap_bytes();
            }
            reserved.earliest_expiry = Some(
                reserved
                    .earliest_expiry
                    .map_or(expires, |earliest_expiry| earliest_expiry.min(expires)),
            );
        }
        self.cold.reservation.keys += growth.keys;
        self.cold.reservation.bytes += growth.bytes;
        Ok(())
    }

    /// Evicts the entries that the reservation has selected, unless `effect` is read-only. Returns
    /// true if an entry was evicted. An eviction can change the slots of other entries.
    ///
    /// If the decision does not fit (`fits` is false), only expired entries are evicted. If such a
    /// decision evicted live entries, a client that is repeatedly rejected with [`Full`] would
    /// evict the counts of other clients.
    #[inline]
    pub(in crate::memory) fn evict_reserved(
        &mut self,
        now: Timestamp,
        effect: Effect,
        fits: bool,
    ) -> bool {
        if !effect.can_write() || self.cold.reservation.inspected == 0 {
            return false;
        }
        if !fits {
            let Self { entries, cold, .. } = self;
            let has_expired = |number: &usize| entries[*number].expires() <= now;
            cold.reservation.victims.retain(has_expired);
        }
        self.evict_selected(now)
    }

    #[cold]
    fn evict_selected(&mut self, now: Timestamp) -> bool {
        let reserved = &mut self.cold.reservation;
        let mut victims = std::mem::take(&mut reserved.victims);
        // Each removal shifts later entries back by up to one slot, so move the cursor back by one
        // slot per evicted entry.
        self.cold.cursor = reserved.next.saturating_sub(victims.len());
        (reserved.inspected, reserved.freed_bytes) = (0, 0);
        let has_moved = !victims.is_empty();
        // A removal shifts later entries back, so remove the highest slot first.
        victims.sort_unstable_by(|a, b| b.cmp(a));
        for number in victims.drain(..) {
            let has_expired = self.entries[number].expires() <= now;
            self.remove(number);
            let counts = &mut self.cold.counts;
            if has_expired {
                counts.expired += 1;
            } else {
                counts.evicted += 1;
            }
        }
        self.cold.reservation.victims = victims;
        has_moved
    }

    /// Makes room for the new `entry` with this hash. Returns false if there is no room, or if the
    /// home slot of the entry is crowded.
    pub(in crate::memory) fn make_room_for(
        &mut self,
        hash: u64,
        entry: &KeyEntry,
        now: Timestamp,
    ) -> bool {
        if self.entries.is_crowded(hash, 1) {
            return false;
        }
        let growth = Growth {
            keys: 1,
            bytes: entry.heap_bytes(),
        };
        let fits = self.reserve(growth, &[], now).is_ok();
        if fits {
            self.evict_selected(now);
        }
        self.cold.reservation.clear();
        fits
    }

    /// Returns whether `growth` fits, in addition to the stored and reserved data, once the
    /// selected entries are evicted.
    fn has_room(&self, growth: Growth) -> bool {
        let (capacity, reserved) = (&self.cold.capacity, &self.cold.reservation);
        let keys = reserved.keys + growth.keys;
        let more_keys = keys.saturating_sub(reserved.victims.len());
        let table_growth = self.entries.growth_bytes(more_keys);
        let bytes =
            self.bytes() - reserved.freed_bytes + reserved.bytes + growth.bytes + table_growth;
        self.entries.len() + more_keys <= capacity.keys && bytes <= capacity.bytes
    }
}

/// Returns the time until the first of the inspected entries expires, at least 1 µs. Returns
/// [`RetryAfter::Never`] if no entry was inspected: the charge does not fit even into an empty
/// shard.
fn retry_after(earliest_expiry: Option<Timestamp>, now: Timestamp) -> RetryAfter {
    earliest_expiry.map_or(RetryAfter::Never, |earliest_expiry| {
        RetryAfter::After(earliest_expiry.since(now).max(Span::from_micros(1)))
    })
}
