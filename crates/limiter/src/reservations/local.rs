//! Reservations whose charges are stored only on this server.

use std::sync::atomic::Ordering;

use tidegate::rate_limiter::{ChargesToRenew, OwnedCharges, release_slots};
use tidegate_core::{Refund, Renewal, Span, Store, Timestamp};

use super::final_charges::FinalCharges;
use crate::{
    ServerLimiter,
    backend::LimiterReceipt,
    reservation_state::{NotOutstanding, OutstandingReservation, ReservationError, ReservationId},
};

impl ServerLimiter {
    /// Ends a reservation, and refunds its unused units. Returns the charges of the reservation,
    /// and whether all unused units were refunded.
    pub(super) fn end_locally(
        &self,
        outstanding: OutstandingReservation,
        final_charges: &FinalCharges,
        now: Timestamp,
    ) -> (OwnedCharges, Refund) {
        let held = outstanding.held_for(now);
        let OutstandingReservation {
            charges: owned,
            receipt,
            ..
        } = outstanding;
        let (charges, settlements) = (owned.as_charges(), &final_charges.settlements);
        let refund = match (receipt, self.redis_store()) {
            (Some(LimiterReceipt::Memory(receipt)), _) => {
                let store = self.local_store();
                store.settle(&charges, receipt, settlements, now)
            }
            // The charges are in this server's share of the limits, not in Redis.
            (Some(LimiterReceipt::Redis(receipt)), Some(redis_store)) => {
                redis_store.settle_own_share(&charges, receipt, settlements, now)
            }
            (Some(LimiterReceipt::Redis(_)), None) | (None, _) => Refund::Complete,
        };
        drop(charges);
        release_slots(&self.waiters, &owned, held);
        (owned, refund)
    }

    /// Ends an expired reservation.
    pub(super) fn expire_locally(&self, outstanding: OutstandingReservation, now: Timestamp) {
        let final_charges = self.final_charges_of_expired(&outstanding.charges);
        self.end_locally(outstanding, &final_charges, now);
        self.reservations.expired.fetch_add(1, Ordering::Relaxed);
    }

    /// Renews a reservation. Returns the time to live of the reservation.
    pub(super) fn renew_locally(
        &self,
        id: &ReservationId,
        now: Timestamp,
        ttl: Span,
    ) -> Result<Span, ReservationError> {
        // The table stays locked, so that a concurrent settlement finds the reservation.
        let mut table = self.reservations.table();
        if table.is_moved {
            return Err(ReservationError::Moved);
        }
        let mut outstanding = table.remove(id).ok_or(NotOutstanding::Unknown)?;
        if outstanding.expires <= now {
            drop(table);
            self.expire_locally(outstanding, now);
            return Err(NotOutstanding::Expired.into());
        }
        let ChargesToRenew { charges, lease } = outstanding.charges.for_renewal(&self.rules(), now);
        let ttl = lease.map_or(ttl, |lease| ttl.min(lease));
        let mut renewal = Renewal::Held;
        if lease.is_some()
            && let Some(receipt) = &mut outstanding.receipt
        {
            // None of the charges is in Redis, so renewing never waits.
            let renewed = Store::renew(self, &charges.as_charges(), receipt, now).ready();
            renewal = renewed.unwrap_or(Renewal::Unknown);
        }
        let outstanding = outstanding.renewed(now.after(ttl));
        self.reservations.wake_expiry(outstanding.due_at, now);
        table.insert(*id, outstanding);
        drop(table);
        if renewal == Renewal::Lost {
            return Err(NotOutstanding::SlotLost.into());
        }
        Ok(ttl)
    }
}
