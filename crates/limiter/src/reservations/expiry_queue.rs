//! The expiry queue of outstanding reservations in Redis, so that reservations expire even if the
//! server that made them has stopped.
//!
//! ```text
//!   reserve ──▶ 50 to 100 ms later: written to the queue ──▶ ended by this server: removed
//!      │                                                       │ this server has stopped
//!      └─▶ settled within 50 ms: never written                 ▼
//!                                          5 s after the expiry: ended by any other server
//! ```
//!
//! The expiry queue adds no Redis call to reserving and settling: reservations that last longer
//! than 50 ms are written and removed in batches. If the server is killed, only the reservations
//! that were not written yet stay charged.
//!
//! Any server may end a reservation of any other server, even of a running server, because the
//! guard in Redis ensures that a reservation ends only once.
//!
//! An entry has the format of a token without its tag, and contains the current expiry. The entry
//! contains the limits under which the charges were made. A server that has one of the rules can
//! end the whole reservation. Any server can end a reservation of counters, which have no rule.

use std::{sync::atomic::Ordering, time::Duration};

use futures_util::future::join_all;
use tidegate::rate_limiter::release_slots;
use tidegate_core::{Cost, Span, Timestamp};
use tidegate_redis::{
    ClaimedReservation, ExpiryQueueEntry, RedisStore, ReservationStatus, StoreError,
};

use super::expiry::{GRACE, MAX_LATENESS};
use crate::{
    ServerLimiter,
    reservation_state::{
        OutstandingReservation, ReservationId, ReservationKind, SharedCharge, TokenCharges,
        TokenContents, TokenHead, redis_receipt,
    },
};

/// The interval between two writes. A reservation is written when it was outstanding for a whole
/// interval, so it is written at most two intervals after it was made.
const WRITE_INTERVAL: Duration = Duration::from_millis(50);

/// The interval between two searches for expired reservations of other servers.
const SEARCH_INTERVAL: Duration = Duration::from_secs(1);

/// The maximum time for which any server could have ended a reservation that is still refunded. A
/// reservation that is found later stays charged, unless its guard shows that it was renewed or
/// settled.
const MAX_OVERDUE: Span = Span::from_micros(MAX_LATENESS.as_micros() - GRACE.as_micros());

/// The maximum number of reservations in one call. Decisions in the same batch wait until the call
/// is complete.
const MAX_ENTRIES: usize = 64;

/// The maximum number of bytes in one call, unless a single reservation is larger.
const MAX_BYTES: usize = 32 * 1_024;

/// The maximum number of claim calls in one search for expired reservations.
const MAX_CLAIMS: usize = 64;

/// The maximum time to write the last changes when the server stops.
const FLUSH_TIMEOUT: Duration = Duration::from_secs(1);

/// The delay before the last changes are written again, if Redis did not respond.
const FLUSH_RETRY_DELAY: Duration = Duration::from_millis(50);

/// The changes to the expiry queue in one call.
struct ExpiryQueueBatch {
    ended: Vec<ReservationId>,
    entries: Vec<ExpiryQueueEntry>,
}

/// What a server did with an expired reservation of another server.
enum OrphanResult {
    /// The reservation has ended.
    Ended(ReservationId),
    /// The reservation was renewed, so it expires later.
    Renewed(ExpiryQueueEntry),
    /// This server cannot end the reservation, but another server may be able to end it.
    Skipped(ReservationId),
    /// Redis did not answer, so this server or another server must try again.
    Failed,
}

impl ServerLimiter {
    /// Writes all changes to the expiry queue in Redis. Returns false if a call failed; its changes
    /// are written by the next call. Has no effect without Redis.
    ///
    /// If the future is dropped, the changes of the current call may be lost.
    pub async fn write_expiry_queue(&self) -> bool {
        self.reservations.table().expiry_queue.age();
        self.write_aged_changes().await
    }

    /// Writes the changes to the expiry queue like [`Self::write_expiry_queue`], without the recent
    /// reservations.
    async fn write_aged_changes(&self) -> bool {
        let Some(redis_store) = self.redis_store() else {
            return true;
        };
        let writer = &self.reservations.expiry_queue;
        let _write_lock = writer.write_lock.lock().await;
        loop {
            let ExpiryQueueBatch { ended, entries } = self.next_expiry_queue_batch();
            if ended.is_empty() && entries.is_empty() {
                return true;
            }
            let result = redis_store
                .store()
                .write_expiry_queue(&ended, &entries)
                .await;
            writer.record(&result);
            if result.is_err() {
                let written = entries.into_iter().map(|entry| entry.id);
                self.reservations
                    .table()
                    .expiry_queue
                    .restore(ended, written);
                return false;
            }
        }
    }

    /// Writes the last changes to the expiry queue before the server stops. Other servers then end
    /// the outstanding reservations of this server. Waits only for a short time.
    pub async fn flush_expiry_queue(&self) {
        let flush = async {
            while !self.write_expiry_queue().await {
                tokio::time::sleep(FLUSH_RETRY_DELAY).await;
            }
        };
        if tokio::time::timeout(FLUSH_TIMEOUT, flush).await.is_err() {
            tracing::warn!(
                "failed to write the latest reservation changes to Redis before shutdown; if this server made reservations in its last 100 ms, they stay charged until their windows end"
            );
        }
    }

    /// Writes the expiry queue every 50 ms, until the future is dropped.
    pub(super) async fn keep_writing_expiry_queue(&self) {
        while self.uses_expiry_queue() {
            self.write_aged_changes().await;
            self.reservations.table().expiry_queue.age();
            tokio::time::sleep(WRITE_INTERVAL).await;
        }
    }

    /// Ends expired reservations of other servers every second, until the future is dropped.
    pub(super) async fn keep_ending_orphans(&self) {
        while self.uses_expiry_queue() {
            self.end_orphaned_reservations().await;
            tokio::time::sleep(SEARCH_INTERVAL).await;
        }
    }

    fn uses_expiry_queue(&self) -> bool {
        self.redis_store().is_some() && !self.reservations.are_off()
    }

    /// Takes the next changes of the expiry queue.
    fn next_expiry_queue_batch(&self) -> ExpiryQueueBatch {
        let now = self.now();
        let ended = self
            .reservations
            .table()
            .expiry_queue
            .take_ended(MAX_ENTRIES);
        let (mut entries, mut bytes) = (Vec::new(), 0);
        while entries.len() < MAX_ENTRIES
            && bytes < MAX_BYTES
            && let Some(entry) = self.next_expiry_queue_entry(now)
        {
            bytes += entry.value.len();
            entries.push(entry);
        }
        ExpiryQueueBatch { ended, entries }
    }

    /// Takes the next reservation that the expiry queue does not contain yet.
    fn next_expiry_queue_entry(&self, now: Timestamp) -> Option<ExpiryQueueEntry> {
        loop {
            // Reserving and settling wait for the table, so one lock covers one reservation.
            let mut table = self.reservations.table();
            let id = table.expiry_queue.next_unwritten()?;
            // An expired reservation that is being ended is not in the table.
            let outstanding = table.get(&id);
            let entry = outstanding.and_then(|outstanding| queue_entry(id, outstanding, now));
            if entry.is_some() {
                table.expiry_queue.begin_write(id);
                return entry;
            }
        }
    }

    /// Ends the expired reservations of servers that have stopped. Has no effect without Redis.
    pub async fn end_orphaned_reservations(&self) {
        let Some(redis_store) = self.redis_store() else {
            return;
        };
        let store = redis_store.store();
        let mut skipped = Vec::new();
        self.end_claimed_reservations(store, &mut skipped).await;
        // No other server can end the skipped reservations while this server has claimed them, so
        // release the claims. Release them only after the last claim, because this server would
        // otherwise claim the same reservations again.
        if let Err(error) = store.release_claims(&skipped).await {
            tracing::debug!("failed to release reservations of other servers: {error}");
        }
    }

    /// Claims expired reservations, and ends them. Adds the reservations that this server cannot
    /// end to `skipped`.
    async fn end_claimed_reservations(&self, store: &RedisStore, skipped: &mut Vec<ReservationId>) {
        for _ in 0..MAX_CLAIMS {
            let claimed = match store.claim_expired().await {
                Ok(claimed) if claimed.is_empty() => return,
                Ok(claimed) => claimed,
                Err(error) => {
                    tracing::debug!("failed to search for expired reservations: {error}");
                    return;
                }
            };
            let now = self.now();
            let ends = claimed
                .into_iter()
                .map(|claimed| self.end_orphan(claimed, now));
            let (mut ended, mut renewed, mut has_failed) = (Vec::new(), Vec::new(), false);
            for result in join_all(ends).await {
                match result {
                    OrphanResult::Ended(id) => ended.push(id),
                    OrphanResult::Renewed(entry) => renewed.push(entry),
                    OrphanResult::Skipped(id) => skipped.push(id),
                    OrphanResult::Failed => has_failed = true,
                }
            }
            if let Err(error) = store.write_expiry_queue(&ended, &renewed).await {
                // Another search can claim the entries again. The reservations of these entries
                // have already ended.
                tracing::debug!("failed to remove ended reservations: {error}");
                return;
            }
            if has_failed {
                // Redis does not answer. Further claims would only prevent other servers from
                // ending the reservations.
                return;
            }
            // The calls above may complete without suspending this task.
            tokio::task::yield_now().await;
        }
    }

    /// Ends a reservation from the expiry queue, unless it was settled or renewed.
    async fn end_orphan(&self, claimed: ClaimedReservation, now: Timestamp) -> OrphanResult {
        let ClaimedReservation { id, overdue, value } = claimed;
        // The clock of this server may be wrong, so only the Redis clock counts.
        let is_late = overdue > MAX_OVERDUE;
        let (Some(redis_store), Some((mut contents, charges))) =
            (self.redis_store(), decode_entry(&value))
        else {
            // A newer version may have written the entry, so another server may know the format.
            return if is_late {
                self.lose_orphan(id)
            } else {
                OrphanResult::Skipped(id)
            };
        };
        let TokenHead { kind, expires, .. } = contents.head;
        let reservation = self.shared_reservation(kind, charges);
        if is_late {
            let charges = reservation.charges.as_charges();
            let in_redis = reservation.in_redis(&charges, id, expires);
            return match redis_store.store().read_guard(in_redis).await {
                Ok(Some(ReservationStatus::Outstanding(until))) => {
                    contents.head.expires = until;
                    OrphanResult::Renewed(entry_of(&contents, now))
                }
                Ok(Some(_)) => OrphanResult::Ended(id),
                // There is no guard: the reservation was neither renewed nor settled, or its guard
                // has expired. So this server does not know whether the reservation was settled.
                Ok(None) => self.lose_orphan(id),
                Err(error) => orphan_failed(&error),
            };
        }
        // Another service with the same prefix may have another `on_expiry`, so a server that has
        // none of the rules leaves the reservation to others.
        let mut rules = reservation.charges.with_rules().map(|(_, rule)| rule);
        let is_foreign = kind == ReservationKind::Request && rules.all(|rule| rule.is_none());
        if is_foreign || reservation.charges.list().is_empty() {
            return OrphanResult::Skipped(id);
        }
        let status = {
            let charges = reservation.charges.as_charges();
            let in_redis = reservation.in_redis(&charges, id, expires);
            let ended = self.end_expired(redis_store, in_redis, &reservation.charges, now);
            ended.await
        };
        match status {
            Ok(ReservationStatus::Ended(_)) => {
                // This server does not know how long the slots were in use.
                release_slots(&self.waiters, &reservation.charges, None);
                OrphanResult::Ended(id)
            }
            Ok(ReservationStatus::EndedBefore(..) | ReservationStatus::Expired) => {
                OrphanResult::Ended(id)
            }
            Ok(ReservationStatus::Outstanding(until)) => {
                contents.head.expires = until;
                OrphanResult::Renewed(entry_of(&contents, now))
            }
            Err(error) => orphan_failed(&error),
        }
    }

    fn lose_orphan(&self, id: ReservationId) -> OrphanResult {
        self.reservations.lost.fetch_add(1, Ordering::Relaxed);
        OrphanResult::Ended(id)
    }
}

fn orphan_failed(error: &StoreError) -> OrphanResult {
    tracing::debug!("failed to end an expired reservation of another server: {error}");
    OrphanResult::Failed
}

/// Returns the expiry queue entry of a reservation; `None` if its charges are not in Redis.
fn queue_entry(
    id: ReservationId,
    outstanding: &OutstandingReservation,
    now: Timestamp,
) -> Option<ExpiryQueueEntry> {
    let receipt = redis_receipt(outstanding.receipt.as_ref())?;
    let head = TokenHead {
        kind: ReservationKind::of(&outstanding.charges),
        id,
        expires: outstanding.expires,
        // The cost of the request is in its token.
        cost: Cost::ONE,
    };
    let value = head.encode_with(&outstanding.charges, receipt.parts());
    Some(entry(id, outstanding.expires, value, now))
}

/// Decodes the value of an entry; `None` if it has another format.
fn decode_entry(value: &[u8]) -> Option<(TokenContents, Vec<SharedCharge>)> {
    let contents = TokenContents::decode(value)?;
    let TokenCharges::InRedis(charges) = &contents.charges else {
        return None;
    };
    let charges = charges.clone();
    Some((contents, charges))
}

fn entry_of(contents: &TokenContents, now: Timestamp) -> ExpiryQueueEntry {
    entry(
        contents.head.id,
        contents.head.expires,
        contents.encode(),
        now,
    )
}

fn entry(
    id: ReservationId,
    expires: Timestamp,
    value: Vec<u8>,
    now: Timestamp,
) -> ExpiryQueueEntry {
    ExpiryQueueEntry {
        id,
        delay: expires.after(GRACE).since(now),
        value,
    }
}
