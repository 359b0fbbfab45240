//! The expiry queue of outstanding reservations in Redis. If a server stops, the other servers find
//! its expired reservations in the expiry queue, and end them.
//!
//! A reservation becomes available some time after it expires, so that the server that made the
//! reservation can end it first. A server that takes a reservation from the expiry queue *claims*
//! it. Unless the server then removes the reservation, it becomes available again. A server that
//! stops after a claim therefore loses nothing. If two servers end the same reservation, only the
//! first call has an effect (`guard.lua`).
//!
//! The expiry queue does not depend on the clocks of the Tidegate servers: the writing server sends
//! the remaining time until the reservation becomes available, and Redis adds this time to its own
//! clock.
//!
//! All keys of the expiry queue are in one hash slot.

use tidegate_core::Span;

use crate::{
    GUARD_KEPT, call::Reply, decode, error::StoreError, layout, scripts, store::RedisStore,
};

/// The maximum number of reservations in the expiry queue. Further reservations are not written.
const MAX_QUEUED: u64 = 1_000_000;

/// How long a claimed reservation is not available to other servers.
const CLAIM_LEASE: Span = Span::from_secs(2);

/// The maximum number of reservations that one call claims. Decisions in the same batch wait until
/// the call is complete.
const MAX_CLAIM: u64 = 64;

/// The maximum number of reservations that one call releases.
const MAX_RELEASE: usize = 64;

/// The maximum number of bytes that one call claims, unless a single reservation is larger.
const MAX_CLAIM_BYTES: u64 = 32 * 1_024;

/// The ID of a reservation.
type Id = [u8; 16];

/// An entry of the expiry queue.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExpiryQueueEntry {
    /// The ID of the reservation.
    pub id: Id,
    /// The time until any server may end the reservation.
    pub delay: Span,
    /// The reservation, as opaque bytes.
    pub value: Vec<u8>,
}

/// A reservation that a server has claimed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClaimedReservation {
    /// The ID of the reservation.
    pub id: Id,
    /// The time for which any server may have ended the reservation, by the clock of Redis.
    pub overdue: Span,
    /// The reservation, as opaque bytes.
    pub value: Vec<u8>,
}

impl RedisStore {
    /// Removes the reservations `ended` from the expiry queue, and then writes `entries`. An entry
    /// replaces an earlier entry of the same reservation. Returns the number of entries that were
    /// not written, because the expiry queue is full.
    ///
    /// Decisions in the same batch wait until the call is complete, so a call should be small.
    ///
    /// # Errors
    ///
    /// [`StoreError`] if not everything was written, or if the outcome is unknown. Retrying is
    /// safe.
    pub async fn write_expiry_queue(
        &self,
        ended: &[Id],
        entries: &[ExpiryQueueEntry],
    ) -> Result<u64, StoreError> {
        let mut args = vec![
            self.instant(),
            b"write".to_vec(),
            text(MAX_QUEUED),
            text(GUARD_KEPT.as_millis_ceil()),
            ended.len().to_string().into_bytes(),
        ];
        args.extend(ended.iter().map(|id| id.to_vec()));
        for ExpiryQueueEntry { id, delay, value } in entries {
            args.extend([id.to_vec(), text(delay.as_millis_ceil()), value.clone()]);
        }
        let reply = self.call_expiry_queue(args).await?;
        decode::integer(&reply).ok_or_else(StoreError::unexpected_reply)
    }

    /// Claims some of the reservations that any server may end now. The caller ends the claimed
    /// reservations, and then removes them with [`Self::write_expiry_queue`]. If the caller does
    /// not remove a reservation, any server can soon claim the reservation again.
    ///
    /// # Errors
    ///
    /// [`StoreError`] if nothing was claimed, or if the outcome is unknown. Retrying is safe.
    pub async fn claim_expired(&self) -> Result<Vec<ClaimedReservation>, StoreError> {
        let args = vec![
            self.instant(),
            b"claim".to_vec(),
            text(MAX_CLAIM),
            text(MAX_CLAIM_BYTES),
            text(CLAIM_LEASE.as_millis_ceil()),
        ];
        let reply = self.call_expiry_queue(args).await?;
        let parts = decode::keys(reply).ok_or_else(StoreError::unexpected_reply)?;
        let mut parts = parts.into_iter();
        let triples = std::iter::from_fn(|| Some((parts.next()?, parts.next()?, parts.next()?)));
        let claimed = triples.map(|(id, overdue, value)| {
            let overdue = std::str::from_utf8(&overdue).ok()?.parse().ok()?;
            Some(ClaimedReservation {
                id: Id::try_from(id).ok()?,
                overdue: Span::from_millis(overdue),
                value,
            })
        });
        let claimed = claimed.collect::<Option<_>>();
        claimed.ok_or_else(StoreError::unexpected_reply)
    }

    /// Releases claimed reservations that the caller cannot end. Other servers can claim the
    /// released reservations immediately.
    ///
    /// # Errors
    ///
    /// [`StoreError`] if not all reservations were released, or if the outcome is unknown. A
    /// reservation that was not released can be claimed when the lease of the claim ends.
    pub async fn release_claims(&self, ids: &[Id]) -> Result<(), StoreError> {
        for ids in ids.chunks(MAX_RELEASE) {
            let mut args = vec![self.instant(), b"release".to_vec()];
            args.extend(ids.iter().map(|id| id.to_vec()));
            self.call_expiry_queue(args).await?;
        }
        Ok(())
    }

    async fn call_expiry_queue(&self, args: Vec<Vec<u8>>) -> Result<Reply, StoreError> {
        let keys = layout::expiry_queue_keys(self.prefix());
        self.call(&scripts::EXPIRY_QUEUE, keys.to_vec(), args).await
    }
}

fn text(number: u64) -> Vec<u8> {
    number.to_string().into_bytes()
}
