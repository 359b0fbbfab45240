//! The outstanding reservations that this server has made or renewed.

use std::{
    collections::BTreeSet,
    ops::Bound,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
};

use foldhash::{HashMap, HashMapExt};
use tidegate::rate_limiter::OwnedCharges;
use tidegate_core::{Span, Timestamp};
use tidegate_redis::RedisReceipt;

use super::{expiry_queue_changes::ExpiryQueueChanges, settled::SettledIds, token::ReservationId};
use crate::backend::LimiterReceipt;

/// An outstanding reservation.
#[derive(Debug)]
pub(crate) struct OutstandingReservation {
    pub(crate) charges: OwnedCharges,
    /// The receipt of the charges; `None` if nothing was charged.
    pub(crate) receipt: Option<LimiterReceipt>,
    /// The instant at which the reservation was made; `None` if another server made it, and this
    /// server has renewed it.
    pub(crate) since: Option<Timestamp>,
    /// The instant at which the reservation expires.
    pub(crate) expires: Timestamp,
    /// The instant at which the server ends the reservation: when it expires, or later if an
    /// attempt failed.
    pub(crate) due_at: Timestamp,
    /// Whether another server has renewed the reservation. That server ends the reservation and
    /// writes it to the expiry queue. This server ends the reservation only if the other server and
    /// the servers that read the expiry queue do not.
    pub(crate) is_renewed_elsewhere: bool,
    /// Whether a settlement on this server has failed. Redis may have executed it nevertheless, for
    /// example if only its reply was lost, so it is counted when Redis shows this.
    pub(crate) has_failed_settlement: bool,
    /// This permit counts the reservation until the permit is dropped.
    pub(crate) _permit: ReservationPermit,
}

impl OutstandingReservation {
    /// Creates a reservation that this server ends when it expires.
    pub(crate) fn new(
        charges: OwnedCharges,
        receipt: Option<LimiterReceipt>,
        since: Option<Timestamp>,
        expires: Timestamp,
        permit: ReservationPermit,
    ) -> Self {
        Self {
            charges,
            receipt,
            since,
            expires,
            due_at: expires,
            is_renewed_elsewhere: false,
            has_failed_settlement: false,
            _permit: permit,
        }
    }

    /// Returns the reservation after this server has renewed it until `until`.
    pub(crate) fn renewed(self, until: Timestamp) -> Self {
        Self {
            expires: until,
            due_at: until,
            is_renewed_elsewhere: false,
            ..self
        }
    }

    /// Replaces the Redis receipts of those charges that are also in `charges`, after their leases
    /// have been renewed. `receipt` is the receipt of `charges`.
    pub(crate) fn set_redis_receipts(&mut self, charges: &OwnedCharges, receipt: &RedisReceipt) {
        let Some(LimiterReceipt::Redis(own)) = &mut self.receipt else {
            return;
        };
        let Some(former) = own.redis() else { return };
        let renewed: HashMap<&[u8], &Vec<u8>> = charges
            .list()
            .iter()
            .zip(receipt.parts())
            .map(|(charge, receipt)| (&*charge.key, receipt))
            .collect();
        let own_charges = self.charges.list().iter().zip(former.parts());
        let parts = own_charges
            .map(|(charge, former)| Vec::clone(renewed.get(&*charge.key).unwrap_or(&former)));
        own.set_redis(RedisReceipt::from_parts(parts.collect()));
    }

    /// Returns the time for which the reservation has been held at `now`; `None` if it is unknown.
    pub(crate) fn held_for(&self, now: Timestamp) -> Option<Span> {
        self.since.map(|since| now.since(since))
    }
}

/// Returns the Redis receipt of the charges; `None` if the charges are not in Redis.
pub(crate) fn redis_receipt(receipt: Option<&LimiterReceipt>) -> Option<&RedisReceipt> {
    match receipt? {
        LimiterReceipt::Memory(_) => None,
        LimiterReceipt::Redis(receipt) => receipt.redis(),
    }
}

/// A permit for one outstanding reservation. The number of permits is bounded.
#[derive(Debug)]
pub(crate) struct ReservationPermit(Arc<AtomicUsize>);

impl ReservationPermit {
    /// Takes a permit, unless `max` permits are taken.
    pub(crate) fn take(taken: &Arc<AtomicUsize>, max: usize) -> Option<Self> {
        let added = |count| (count < max).then_some(count + 1);
        // The counter synchronises no other data.
        let result = taken.fetch_update(Ordering::Relaxed, Ordering::Relaxed, added);
        result.ok().map(|_| Self(Arc::clone(taken)))
    }
}

impl Drop for ReservationPermit {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// A reservation and its due time.
pub(crate) type DueId = (Timestamp, ReservationId);

/// Outstanding reservations, indexed by ID and ordered by due time.
#[derive(Debug)]
pub(crate) struct OutstandingTable {
    // Tokens are signed, so clients cannot choose the IDs, and the map can use a fast hash
    // function.
    by_id: HashMap<ReservationId, OutstandingReservation>,
    by_due_time: BTreeSet<DueId>,
    pub(crate) settled: SettledIds,
    /// The changes that have not been written to the expiry queue yet, and the reservations that
    /// the queue may contain.
    pub(crate) expiry_queue: ExpiryQueueChanges,
    /// Whether another process has taken over the reservations. After the takeover, this process
    /// must not end these reservations.
    pub(crate) is_moved: bool,
}

impl OutstandingTable {
    /// Creates the table of a server with at most `max` outstanding reservations.
    pub(crate) fn new(max: usize) -> Self {
        Self {
            by_id: HashMap::new(),
            by_due_time: BTreeSet::new(),
            settled: SettledIds::new(max),
            expiry_queue: ExpiryQueueChanges::new(max),
            is_moved: false,
        }
    }

    /// Adds a reservation, or replaces it.
    pub(crate) fn insert(&mut self, id: ReservationId, outstanding: OutstandingReservation) {
        let is_in_redis = redis_receipt(outstanding.receipt.as_ref()).is_some();
        if is_in_redis && !outstanding.is_renewed_elsewhere {
            self.expiry_queue.add(id);
        }
        let due = (outstanding.due_at, id);
        if let Some(replaced) = self.by_id.insert(id, outstanding) {
            self.by_due_time.remove(&(replaced.due_at, id));
        }
        self.by_due_time.insert(due);
        debug_assert_eq!(self.by_id.len(), self.by_due_time.len());
    }

    /// Adds a reservation again that [`Self::remove_due`] has returned, and that has not ended. If
    /// this server has renewed the reservation meanwhile, the renewal applies.
    pub(crate) fn insert_again(&mut self, id: ReservationId, outstanding: OutstandingReservation) {
        let outstanding = match self.remove(&id) {
            Some(renewed) => {
                let mut outstanding = outstanding.renewed(renewed.expires);
                if let Some(receipt) = redis_receipt(renewed.receipt.as_ref()) {
                    outstanding.set_redis_receipts(&renewed.charges, receipt);
                }
                outstanding
            }
            None => outstanding,
        };
        self.insert(id, outstanding);
    }

    pub(crate) fn remove(&mut self, id: &ReservationId) -> Option<OutstandingReservation> {
        let outstanding = self.by_id.remove(id)?;
        self.by_due_time.remove(&(outstanding.due_at, *id));
        Some(outstanding)
    }

    pub(crate) fn len(&self) -> usize {
        self.by_id.len()
    }

    /// Returns up to `most` reservations in the order of their due times, beginning after `last`.
    pub(crate) fn next_ids(&self, last: Option<DueId>, most: usize) -> Vec<DueId> {
        let start = last.map_or(Bound::Unbounded, Bound::Excluded);
        let ids = self.by_due_time.range((start, Bound::Unbounded));
        ids.take(most).copied().collect()
    }

    pub(crate) fn get(&self, id: &ReservationId) -> Option<&OutstandingReservation> {
        self.by_id.get(id)
    }

    /// Removes a reservation that is due to be ended at `now`, if there is one.
    pub(crate) fn remove_due(
        &mut self,
        now: Timestamp,
    ) -> Option<(ReservationId, OutstandingReservation)> {
        let (due_at, id) = *self.by_due_time.first()?;
        if due_at > now || self.is_moved {
            return None;
        }
        self.remove(&id).map(|outstanding| (id, outstanding))
    }

    /// Records that a settlement of a reservation has failed.
    pub(crate) fn record_failed_settlement(&mut self, id: &ReservationId) {
        if let Some(outstanding) = self.by_id.get_mut(id) {
            outstanding.has_failed_settlement = true;
        }
    }

    /// Returns the instant at which the next reservation is due; `None` if another process has
    /// taken over the reservations.
    pub(crate) fn next_due_time(&self) -> Option<Timestamp> {
        if self.is_moved {
            return None;
        }
        self.by_due_time.first().map(|(due_at, _)| *due_at)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ID: ReservationId = [1; 16];
    const OTHER_ID: ReservationId = [2; 16];

    fn second(second: u64) -> Timestamp {
        Timestamp::from_micros(second * 1_000_000)
    }

    fn expiring_at(expires: u64) -> OutstandingReservation {
        let permit = ReservationPermit::take(&Arc::default(), 1).unwrap();
        let charges = OwnedCharges::of_limits([]);
        OutstandingReservation::new(charges, None, None, second(expires), permit)
    }

    fn due_ids(table: &mut OutstandingTable, now: u64) -> Vec<ReservationId> {
        let due = std::iter::from_fn(|| table.remove_due(second(now)));
        due.map(|(id, _)| id).collect()
    }

    #[test]
    fn a_replaced_reservation_has_one_due_time() {
        let mut table = OutstandingTable::new(2);
        table.insert(ID, expiring_at(10));
        table.insert(ID, expiring_at(20));
        table.insert(OTHER_ID, expiring_at(30));
        assert_eq!(table.next_due_time(), Some(second(20)));
        table.remove(&ID).unwrap();
        assert_eq!(due_ids(&mut table, 30), [OTHER_ID]);
        assert_eq!(table.next_due_time(), None);
    }

    #[test]
    fn a_renewal_during_an_attempt_to_end_a_reservation_applies() {
        let mut table = OutstandingTable::new(1);
        table.insert(ID, expiring_at(10));
        let (_, mut taken) = table.remove_due(second(10)).unwrap();
        table.insert(ID, expiring_at(20));
        taken.due_at = second(30);
        taken.is_renewed_elsewhere = true;
        taken.since = Some(second(1));
        table.insert_again(ID, taken);
        let kept = table.get(&ID).unwrap();
        assert_eq!((kept.expires, kept.since), (second(20), Some(second(1))));
        assert!(!kept.is_renewed_elsewhere);
        assert_eq!(due_ids(&mut table, 20), [ID]);
        assert_eq!(table.next_due_time(), None);
    }
}
