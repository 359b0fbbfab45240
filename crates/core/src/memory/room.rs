//! Room in a shard: for so many keys and bytes, and what makes way when it is full.
//!
//! A decision first reserves what it is going to insert and to let grow, and names the entries that make way for it;
//! nothing has changed then. A charge goes on to [carry that out](Shard::carry_out); a peek lets the reservation go and has
//! foreseen all the same whether there would have been room.

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

/// How many entries a reservation looks at to find such as have expired or may be forgotten.
const SAMPLE: usize = 8;

/// When it makes sense to try again with a key whose place in the table is crowded: nobody knows when one of the others
/// leaves.
const CROWDED: Span = Span::from_secs(1);

/// What a shard may hold.
#[derive(Clone, Copy, Debug)]
pub(super) struct Room {
    pub(super) keys: usize,
    pub(super) bytes: usize,
    pub(super) when_full: WhenFull,
}

/// What a charge takes of the room.
#[derive(Clone, Copy, Debug)]
pub(super) struct Wanted {
    keys: usize,
    /// On the heap, for the key and its state.
    bytes: usize,
}

impl Wanted {
    const NOTHING: Self = Self { keys: 0, bytes: 0 };

    #[inline]
    pub(super) fn is_nothing(self) -> bool {
        self.keys == 0 && self.bytes == 0
    }
}

/// What one decision has reserved so far.
#[derive(Debug, Default)]
pub(super) struct Reserved {
    keys: usize,
    bytes: usize,
    /// The numbers of the entries that make way.
    leaving: Vec<usize>,
    /// Bytes on the heap that they leave.
    freed: usize,
    /// How many entries were looked at, from the cursor on.
    looked: usize,
    /// The slot behind the last of them.
    next: usize,
    /// When the first of those that were looked at expires.
    soonest: Option<Timestamp>,
}

impl Reserved {
    /// Lets everything go; answers for how many keys there was room.
    #[inline]
    pub(super) fn clear(&mut self) -> usize {
        let keys = std::mem::take(&mut self.keys);
        (self.bytes, self.freed, self.looked, self.soonest) = (0, 0, 0, None);
        self.leaving.clear();
        keys
    }
}

/// There is no room, and this is when there may be.
#[derive(Debug)]
pub(super) struct Full {
    pub(super) retry_after: Retry,
}

impl Shard {
    /// What `charge` takes of the room, if its key was `found` in that entry or nowhere.
    #[inline]
    pub(super) fn wanted(
        &self,
        charge: &Charge<'_>,
        found: Option<usize>,
        effect: Effect,
    ) -> Wanted {
        let cost = match effect {
            Effect::Charge | Effect::Peek => charge.cost.units(),
            // What is given back takes no room, but the state may take another shape under limits that changed.
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

    /// Reserves what is wanted by one of `all` that are decided together; false if it is to pass uncounted.
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

    /// Reserves what is wanted, on top of what is reserved already. Where there is no room, entries are to make way that
    /// have expired or, if the policy is to evict, have hardly been used, but none of those that are being `decided`;
    /// a few are looked at.
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
            // What neither frees a slot that is wanted nor bytes is not forgotten for nothing.
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

    /// Lets the entries go that make way, unless the effect is to change nothing; true if there were any, and others have
    /// moved.
    #[inline]
    pub(super) fn carry_out(&mut self, now: Timestamp, effect: Effect) -> bool {
        effect.writes() && self.rest.reserved.looked > 0 && self.make_way(now)
    }

    #[cold]
    fn make_way(&mut self, now: Timestamp) -> bool {
        let reserved = &mut self.rest.reserved;
        let mut leaving = std::mem::take(&mut reserved.leaving);
        self.rest.cursor = reserved.next.saturating_sub(leaving.len());
        (reserved.looked, reserved.freed) = (0, 0);
        let has_moved = !leaving.is_empty();
        // Those behind one that is removed move up, so the largest number goes first.
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

    /// Makes room for an entry that is not in yet; false if there is none.
    pub(super) fn make_room_for(&mut self, entry: &Entry, now: Timestamp) -> bool {
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

    /// Whether what is wanted fits beside what is there and reserved, once those that make way have left.
    fn has_room(&self, wanted: Wanted) -> bool {
        let (room, reserved) = (&self.rest.room, &self.rest.reserved);
        let keys = reserved.keys + wanted.keys;
        let more_keys = keys.saturating_sub(reserved.leaving.len());
        let growth = self.entries.growth_bytes(more_keys);
        let bytes = self.bytes() - reserved.freed + reserved.bytes + wanted.bytes + growth;
        self.entries.len() + more_keys <= room.keys && bytes <= room.bytes
    }
}

/// What fits into no empty shard never will.
fn retry_after(soonest: Option<Timestamp>, now: Timestamp) -> Retry {
    soonest.map_or(Retry::Never, |soonest| {
        Retry::After(soonest.since(now).max(Span::from_micros(1)))
    })
}
