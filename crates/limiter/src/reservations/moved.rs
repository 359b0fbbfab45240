//! Reservations that move to another process, during an upgrade or in a snapshot. Only the
//! reservations of the memory store move. The tokens of reservations in Redis contain their
//! charges, and the expiry queue in Redis contains the reservations.
//!
//! A moved reservation has the format of a token's contents, preceded by the instant at which the
//! reservation was made (8 bytes). The receipts have the format of [`MemoryStore::move_receipt`].
//!
//! [`MemoryStore::move_receipt`]: tidegate_core::MemoryStore::move_receipt

use std::{collections::BTreeSet, io, path::Path};

use tidegate_core::{Cost, Receipt, Timestamp};

use super::in_redis::moved_charges;
use crate::{
    ServerLimiter,
    backend::LimiterReceipt,
    reservation_state::{
        OutstandingReservation, ReservationId, ReservationKind, TokenCharges, TokenContents,
        TokenHead,
    },
    snapshot,
};

/// The maximum number of IDs that are copied while the table is locked.
const IDS_PER_LOCK: usize = 256;

impl ServerLimiter {
    /// Returns whether another process has taken over the state of this process.
    #[must_use]
    pub fn has_moved(&self) -> bool {
        self.reservations.table().is_moved
    }

    /// Sets whether another process takes over the state of this process.
    pub(crate) fn set_moved(&self, is_moved: bool) {
        self.reservations.table().is_moved = is_moved;
    }

    /// Returns the reservations, for another process.
    pub(crate) fn reservations_to_move(&self) -> Vec<Vec<u8>> {
        self.encode_reservations(&self.outstanding_ids())
    }

    /// Returns the settled reservations of counters, for another process.
    pub(crate) fn settled_to_move(&self) -> Vec<Vec<u8>> {
        self.reservations.table().settled.encode()
    }

    /// Takes a settled reservation of another process. Returns false if the encoding of the
    /// reservation is not valid.
    pub(crate) fn take_settled(&self, moved: &[u8]) -> bool {
        let now = self.now();
        self.reservations.table().settled.take(moved, now)
    }

    /// Encodes the reservations in `ids` that are still outstanding.
    fn encode_reservations(&self, ids: &BTreeSet<ReservationId>) -> Vec<Vec<u8>> {
        let now = self.now();
        let encode = |id| {
            // Reserving and settling wait for the table, so one lock covers one reservation.
            let table = self.reservations.table();
            let outstanding = table.get(id)?;
            let contents = self.contents_to_move(id, outstanding, now)?;
            let since = outstanding.since?.as_micros().to_be_bytes();
            Some([&since[..], &contents].concat())
        };
        ids.iter().filter_map(encode).collect()
    }

    /// Encodes a reservation in the format of a token's contents; `None` if its charges are not in
    /// memory.
    fn contents_to_move(
        &self,
        id: &ReservationId,
        outstanding: &OutstandingReservation,
        now: Timestamp,
    ) -> Option<Vec<u8>> {
        let Some(LimiterReceipt::Memory(receipt)) = &outstanding.receipt else {
            return None;
        };
        let owned = &outstanding.charges;
        let charges = owned.as_charges();
        let receipts = self.local_store().move_receipt(&charges, receipt, now);
        let head = TokenHead {
            kind: ReservationKind::of(owned),
            id: *id,
            expires: outstanding.expires,
            // The cost of the request is in its token.
            cost: Cost::ONE,
        };
        Some(head.encode_with(owned, &receipts))
    }

    /// Writes a snapshot of the memory store and the outstanding reservations to the file at
    /// `path`.
    ///
    /// # Errors
    ///
    /// Returns the file system error. If writing fails, the previous snapshot is kept.
    pub fn save_snapshot(&self, path: &Path) -> io::Result<()> {
        // The store is copied while requests are served. A reservation that is outstanding both
        // before and after the copy was charged, and not refunded, in every part of the copy. If
        // another reservation were restored, its refund would remove units of other requests.
        let before = self.outstanding_ids();
        let reservations = || self.encode_reservations(&before);
        snapshot::save(self.local_store(), reservations, path, self.now())
    }

    /// Returns the outstanding reservations. A reservation that is made, or renewed for a shorter
    /// time, during the call may be missing.
    fn outstanding_ids(&self) -> BTreeSet<ReservationId> {
        let (mut ids, mut last) = (BTreeSet::new(), None);
        loop {
            // Reserving and settling wait for the table, so it is not locked for long.
            let next = self.reservations.table().next_ids(last, IDS_PER_LOCK);
            ids.extend(next.iter().map(|(_, id)| *id));
            last = next.last().copied();
            if last.is_none() {
                return ids;
            }
        }
    }

    /// Restores the reservations of a snapshot, whose keys the store has already restored. Returns
    /// the number of restored reservations. Reservations that are not valid, or exceed the
    /// configured maximum, stay charged.
    pub fn restore_reservations(&self, reservations: &[Vec<u8>]) -> usize {
        if reservations.is_empty() {
            return 0;
        }
        self.local_store().forget_refunds(self.now());
        for reservation in reservations {
            self.take_reservation(reservation);
        }
        self.reservations.table().len()
    }

    /// Takes a reservation of another process. Returns false if the encoding of the reservation is
    /// not valid.
    pub(crate) fn take_reservation(&self, moved: &[u8]) -> bool {
        let Some((since, contents)) = moved.split_first_chunk() else {
            return false;
        };
        let Some(TokenContents {
            head,
            charges: TokenCharges::InRedis(shared),
        }) = TokenContents::decode(contents)
        else {
            return false;
        };
        let now = self.now();
        let (charges, receipts) = moved_charges(&self.rules(), head.kind, shared, now);
        let Some(receipt) = Receipt::from_moved(&receipts) else {
            return false;
        };
        // With a lower maximum, the remaining reservations stay charged.
        if let Some(permit) = self.reservations.permit() {
            let receipt = Some(LimiterReceipt::Memory(receipt));
            let since = Some(Timestamp::from_micros(u64::from_be_bytes(*since)));
            let outstanding =
                OutstandingReservation::new(charges, receipt, since, head.expires, permit);
            self.reservations.insert(head.id, outstanding, now);
        }
        true
    }
}
