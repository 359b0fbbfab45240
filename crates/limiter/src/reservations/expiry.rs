//! Ends expired reservations, and refunds them unless `on_expiry` is `charge`.

use std::{sync::atomic::Ordering, time::Duration};

use futures_util::future::{join_all, join3};
use tidegate::rate_limiter::{OwnedCharges, release_slots};
use tidegate_core::{RuleSet, Settlement, Span, Timestamp};
use tidegate_redis::{
    FallbackStore, GUARD_KEPT, RedisReservation, ReservationEnd, ReservationStatus, StoreError,
};

use super::final_charges::FinalCharges;
use crate::{
    ServerLimiter,
    reservation_state::{MAX_SLEEP, OutstandingReservation, ReservationId, redis_receipt},
};

/// The maximum delay between the expiry of a reservation and its end in Redis. After a longer
/// delay, the reservation is not refunded.
pub(super) const MAX_LATENESS: Span = Span::from_secs(30);

const _: () = assert!(
    MAX_LATENESS.as_micros() < GUARD_KEPT.as_micros(),
    "Redis knows whether a reservation has ended for longer than a server refunds it"
);

/// The maximum number of expired reservations that are ended concurrently.
const EXPIRY_BATCH: usize = 64;

/// The delay before this server tries again to end a reservation, if Redis did not respond.
const RETRY_DELAY: Span = Span::from_secs(1);

/// How long after the expiry of a reservation only the server that made it, or that has renewed it
/// last, may end it. After that, any server may end it.
pub(super) const GRACE: Span = Span::from_secs(5);

const _: () = assert!(
    GRACE.as_micros() * 2 < MAX_LATENESS.as_micros(),
    "there is time for several servers to try to end a reservation"
);

/// The time after the expiry of a reservation for which only the server that has renewed it last,
/// and the servers that find it in the expiry queue, may end it. These servers know a renewed
/// concurrency slot.
const BACKUP_DELAY: Span = Span::from_micros(GRACE.as_micros() * 2);

const _: () = assert!(BACKUP_DELAY.as_micros() < MAX_LATENESS.as_micros());

impl ServerLimiter {
    /// Ends the expired reservations, and refunds them unless `on_expiry` is `charge`. Returns the
    /// instant at which the next reservation is due.
    pub async fn expire_reservations(&self) -> Option<Timestamp> {
        loop {
            let now = self.now();
            let batch: Vec<(ReservationId, OutstandingReservation)> = {
                let mut table = self.reservations.table();
                let due = std::iter::from_fn(|| table.remove_due(now));
                due.take(EXPIRY_BATCH).collect()
            };
            let is_full = batch.len() == EXPIRY_BATCH;
            let mut in_redis = Vec::new();
            for (id, outstanding) in batch {
                if redis_receipt(outstanding.receipt.as_ref()).is_some() {
                    in_redis.push(self.expire_in_redis(id, outstanding, now));
                } else {
                    self.expire_locally(outstanding, now);
                }
            }
            join_all(in_redis).await;
            if !is_full {
                return self.reservations.table().next_due_time();
            }
            // The calls above may complete without suspending this task, so the task must yield to
            // other tasks.
            tokio::task::yield_now().await;
        }
    }

    /// Ends reservations as they expire, until the future is dropped. With Redis, this method also
    /// ends the reservations of servers that have stopped.
    pub async fn keep_expiring_reservations(&self) {
        let own = self.keep_expiring_own_reservations();
        let (writes, orphans) = (self.keep_writing_expiry_queue(), self.keep_ending_orphans());
        join3(own, writes, orphans).await;
    }

    async fn keep_expiring_own_reservations(&self) {
        loop {
            let next = self.expire_reservations().await;
            let now = self.now();
            let sleep = next.map_or(MAX_SLEEP, |next| next.since(now).min(MAX_SLEEP));
            let sleep = Duration::from_micros(sleep.as_micros());
            let _ = tokio::time::timeout(sleep, self.reservations.added.notified()).await;
        }
    }

    /// Returns the final charges of a reservation that has expired.
    pub(super) fn final_charges_of_expired(&self, charges: &OwnedCharges) -> FinalCharges {
        FinalCharges::of_expired(charges, self.reservations.settings.on_expiry)
    }

    /// Returns the settlements of `charges` for each end of a reservation. `rules` are the rules in
    /// force.
    pub(super) fn settlements_of<'c>(
        &self,
        charges: &'c OwnedCharges,
        rules: &'c RuleSet,
    ) -> impl Fn(ReservationEnd) -> Vec<Settlement> + use<'c> {
        let on_expiry = self.reservations.settings.on_expiry;
        move |end| {
            let final_charges = match end {
                ReservationEnd::Settled(cost) => FinalCharges::new(charges, rules, cost),
                ReservationEnd::Expired => FinalCharges::of_expired(charges, on_expiry),
            };
            final_charges.settlements.into_vec()
        }
    }

    /// Ends `reservation` of `charges` in Redis, unless it was settled or renewed, and counts it.
    pub(super) async fn end_expired(
        &self,
        redis_store: &FallbackStore,
        reservation: RedisReservation<'_>,
        charges: &OwnedCharges,
        now: Timestamp,
    ) -> Result<ReservationStatus, StoreError> {
        let (end, rules) = (ReservationEnd::Expired, self.rules());
        let settlements = self.settlements_of(charges, &rules);
        let status = redis_store.end_reservation(reservation, settlements, end, now);
        let status = status.await?;
        if let ReservationStatus::Ended(_) = status {
            self.reservations.expired.fetch_add(1, Ordering::Relaxed);
        }
        Ok(status)
    }

    /// Ends an expired reservation of this server.
    async fn expire_in_redis(
        &self,
        id: ReservationId,
        mut outstanding: OutstandingReservation,
        now: Timestamp,
    ) {
        let (Some(redis_store), Some(receipt)) = (
            self.redis_store(),
            redis_receipt(outstanding.receipt.as_ref()),
        ) else {
            return;
        };
        if now.since(outstanding.expires) > MAX_LATENESS {
            // A server that finds the reservation in the expiry queue counts it, or the server that
            // has renewed it.
            let is_queued = self.reservations.table().expiry_queue.forget_queued(&id);
            if !is_queued && !outstanding.is_renewed_elsewhere {
                self.reservations.lost.fetch_add(1, Ordering::Relaxed);
            }
            return;
        }
        let final_charges = self.final_charges_of_expired(&outstanding.charges);
        let status = {
            let charges = outstanding.charges.as_charges();
            let reservation = RedisReservation {
                id,
                expires: outstanding.expires,
                charges: &charges,
                receipt,
                former_keys: &[],
            };
            let ended = self.end_expired(redis_store, reservation, &outstanding.charges, now);
            ended.await
        };
        // Until this point, the expiry queue must keep the reservation, in case the server is
        // killed.
        if let Ok(
            ReservationStatus::Ended(_)
            | ReservationStatus::EndedBefore(..)
            | ReservationStatus::Expired,
        ) = status
        {
            self.reservations.table().expiry_queue.end(&id);
        }
        match status {
            Ok(ReservationStatus::Ended(_)) => {
                let held = outstanding.held_for(now);
                release_slots(&self.waiters, &outstanding.charges, held);
                return self.settle_own_share(outstanding, &final_charges, now);
            }
            // Another server has settled the reservation, or a call on this server that has failed.
            Ok(ReservationStatus::EndedBefore(ReservationEnd::Settled(cost), _)) => {
                if outstanding.has_failed_settlement {
                    self.count_settled();
                }
                let final_charges = FinalCharges::new(&outstanding.charges, &self.rules(), cost);
                return self.settle_own_share(outstanding, &final_charges, now);
            }
            // An earlier call has ended the reservation, but its reply was lost.
            Ok(ReservationStatus::EndedBefore(..) | ReservationStatus::Expired) => {
                return self.settle_own_share(outstanding, &final_charges, now);
            }
            Ok(ReservationStatus::Outstanding(until)) => {
                outstanding.expires = until;
                outstanding.due_at = until.after(BACKUP_DELAY);
                outstanding.is_renewed_elsewhere = true;
            }
            Err(error) => {
                tracing::debug!("failed to end an expired reservation, and will retry: {error}");
                outstanding.due_at = now.after(RETRY_DELAY);
            }
        }
        let due_at = outstanding.due_at;
        self.reservations.table().insert_again(id, outstanding);
        self.reservations.wake_expiry(due_at, now);
    }
}
