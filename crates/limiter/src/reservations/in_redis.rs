//! Reservations whose charges are in Redis.

use std::sync::Arc;

use tidegate::rate_limiter::{ChargesToRenew, OwnedCharges, StoredCharge, release_slots};
use tidegate_core::{Charge, Refund, Renewal, RuleSet, Span, Timestamp};
use tidegate_redis::{
    FallbackReceipt, RedisReceipt, RedisReservation, ReservationEnd, ReservationStatus,
};

use super::final_charges::FinalCharges;
use crate::{
    ServerLimiter,
    backend::LimiterReceipt,
    reservation_state::{
        NotOutstanding, OutstandingReservation, ReservationError, ReservationId, ReservationKind,
        SharedCharge,
    },
};

/// The charges in a token, with their limits.
pub(super) struct SharedReservation {
    pub(super) charges: OwnedCharges,
    receipt: RedisReceipt,
    /// The charges without limits, which an earlier version has written, whose rules this server
    /// does not have.
    of_removed_rules: Vec<SharedCharge>,
    /// The keys of `of_removed_rules`.
    removed_keys: Vec<Box<[u8]>>,
}

impl SharedReservation {
    pub(super) fn in_redis<'r>(
        &'r self,
        charges: &'r [Charge<'r>],
        id: ReservationId,
        expires: Timestamp,
    ) -> RedisReservation<'r> {
        RedisReservation {
            id,
            expires,
            charges,
            receipt: &self.receipt,
            former_keys: &self.removed_keys,
        }
    }
}

/// Returns the charges of a moved reservation with their receipts. The limits are those under which
/// the charges were made. An earlier version has written charges without limits: they have the
/// limits of their keys at `now`, and are omitted if this server does not have their rules.
pub(super) fn moved_charges(
    rules: &Arc<RuleSet>,
    kind: ReservationKind,
    shared: Vec<SharedCharge>,
    now: Timestamp,
) -> (OwnedCharges, Vec<Vec<u8>>) {
    if kind == ReservationKind::Request {
        let list = shared
            .into_iter()
            .map(|shared| (shared.charge, shared.limits, shared.receipt));
        return OwnedCharges::with_limits(rules, list, now);
    }
    let with_limits = shared.into_iter().filter_map(|shared| {
        let StoredCharge { key, cost, .. } = shared.charge;
        Some(((key, shared.limits?, cost), shared.receipt))
    });
    let (charges, receipts): (Vec<_>, Vec<_>) = with_limits.unzip();
    (OwnedCharges::of_limits(charges), receipts)
}

impl ServerLimiter {
    /// Settles a reservation whose charges are in Redis. Returns the number of units of `cost` that
    /// the limits did not admit, and whether all unused units were refunded.
    pub(super) async fn settle_in_redis(
        &self,
        shared: &SharedReservation,
        id: ReservationId,
        expires: Timestamp,
        cost: u64,
        now: Timestamp,
    ) -> Result<(u64, Refund), ReservationError> {
        let redis_store = self.redis_store().ok_or(NotOutstanding::Unknown)?;
        // A reload must not make the refund and the excess differ.
        let rules = self.rules();
        let final_charges = FinalCharges::new(&shared.charges, &rules, cost);
        let status = {
            let charges = shared.charges.as_charges();
            let reservation = shared.in_redis(&charges, id, expires);
            let end = ReservationEnd::Settled(cost);
            let settlements = self.settlements_of(&shared.charges, &rules);
            redis_store
                .end_reservation(reservation, settlements, end, now)
                .await
                .inspect_err(|_| self.reservations.table().record_failed_settlement(&id))
                .map_err(ReservationError::Unavailable)?
        };
        let (refund, is_repeated) = match status {
            ReservationStatus::Ended(refund) => (refund, false),
            // An earlier call with the same cost has ended the reservation, but the reply was lost.
            ReservationStatus::EndedBefore(end, refund) if end == ReservationEnd::Settled(cost) => {
                (refund, true)
            }
            ReservationStatus::EndedBefore(ReservationEnd::Settled(_), _) => {
                return Err(NotOutstanding::Settled.into());
            }
            ReservationStatus::EndedBefore(ReservationEnd::Expired, _)
            | ReservationStatus::Expired
            | ReservationStatus::Outstanding(_) => return Err(NotOutstanding::Expired.into()),
        };
        // Nothing is refunded to charges without limits whose rules this server does not have.
        let refund = match shared.of_removed_rules.is_empty() {
            true => refund,
            false => Refund::Incomplete,
        };
        if is_repeated {
            self.end_own_part_of_settled(&shared.charges, &id, cost, &rules, now);
            return Ok((0, refund));
        }
        self.count_settled();
        let own = self.take_own_part(&id);
        self.end_own_part(&shared.charges, own, cost, &rules, now);
        let uncharged = self
            .charge_excess_of(&shared.charges, &final_charges, &rules, now)
            .await;
        Ok((uncharged, refund))
    }

    /// Ends this server's part of a reservation that an earlier call has settled in Redis at
    /// `cost`. If that call was sent by this server and failed, it was not counted yet.
    pub(super) fn end_own_part_of_settled(
        &self,
        charges: &OwnedCharges,
        id: &ReservationId,
        cost: u64,
        rules: &RuleSet,
        now: Timestamp,
    ) {
        if let Some(own) = self.take_own_part(id) {
            if own.has_failed_settlement {
                self.count_settled();
            }
            self.end_own_part(charges, Some(own), cost, rules, now);
        }
    }

    /// Removes a reservation that has ended in Redis from this server's table.
    pub(super) fn take_own_part(&self, id: &ReservationId) -> Option<OutstandingReservation> {
        let mut table = self.reservations.table();
        table.expiry_queue.end(id);
        table.remove(id)
    }

    /// Releases the slots of a reservation, and settles the charges that this server made in its
    /// memory, after Redis has ended the reservation at the final `cost`. `own` is the part of the
    /// reservation on this server.
    pub(super) fn end_own_part(
        &self,
        charges: &OwnedCharges,
        own: Option<OutstandingReservation>,
        cost: u64,
        rules: &RuleSet,
        now: Timestamp,
    ) {
        let held = own.as_ref().and_then(|own| own.held_for(now));
        release_slots(&self.waiters, charges, held);
        if let Some(own) = own {
            let own_charges = FinalCharges::new(&own.charges, rules, cost);
            self.settle_own_share(own, &own_charges, now);
        }
    }

    /// Settles those charges of a reservation that this server made in its memory, against its
    /// local share of the limits, while Redis was unreachable.
    pub(super) fn settle_own_share(
        &self,
        own: OutstandingReservation,
        final_charges: &FinalCharges,
        now: Timestamp,
    ) {
        if let (Some(redis_store), Some(LimiterReceipt::Redis(receipt))) =
            (self.redis_store(), own.receipt)
        {
            let (charges, settlements) = (own.charges.as_charges(), &final_charges.settlements);
            redis_store.settle_own_share(&charges, receipt, settlements, now);
        }
    }

    /// Renews a reservation whose charges are in Redis. Returns the reservation's time to live, and
    /// its charges for the new token.
    pub(super) async fn renew_in_redis(
        &self,
        shared: Vec<SharedCharge>,
        id: ReservationId,
        expires: Timestamp,
        now: Timestamp,
        ttl: Span,
    ) -> Result<(Span, Vec<SharedCharge>), ReservationError> {
        let redis_store = self.redis_store().ok_or(NotOutstanding::Unknown)?;
        let mut shared = self.shared_reservation(ReservationKind::Request, shared);
        let ChargesToRenew { charges, lease } = shared.charges.for_renewal(&self.rules(), now);
        let ttl = lease.map_or(ttl, |lease| ttl.min(lease));
        let until = now.after(ttl);
        let list = charges.as_charges();
        let reservation = shared.in_redis(&list, id, expires);
        let renewed = redis_store.renew_reservation(reservation, until, now).await;
        match renewed.map_err(ReservationError::Unavailable)? {
            ReservationStatus::Outstanding(_) => {}
            ReservationStatus::EndedBefore(ReservationEnd::Settled(_), _) => {
                return Err(NotOutstanding::Settled.into());
            }
            ReservationStatus::EndedBefore(ReservationEnd::Expired, _)
            | ReservationStatus::Expired
            | ReservationStatus::Ended(_) => return Err(NotOutstanding::Expired.into()),
        }
        let mut receipt = shared.receipt.clone();
        let renewed = match lease {
            Some(_) => {
                let store = redis_store.store();
                let renewed =
                    store.renew_leases_of_reservation(reservation, until, now, &mut receipt);
                renewed.await
            }
            None => Ok(Renewal::Held),
        };
        shared.receipt = receipt;
        let mut charges = SharedCharge::list(&shared.charges, shared.receipt.parts());
        // Another server may have these rules. Also, every server must find the same deciding
        // guard.
        charges.append(&mut shared.of_removed_rules);
        // The rest of the reservation is renewed even if its slot is lost.
        self.keep_renewed(shared, id, until, now);
        if renewed.map_err(ReservationError::Unavailable)? == Renewal::Lost {
            return Err(NotOutstanding::SlotLost.into());
        }
        Ok((ttl, charges))
    }

    /// Stores a renewed reservation, which this server then ends when it expires. If another server
    /// has made the reservation, that server does not know the renewed slot.
    fn keep_renewed(
        &self,
        shared: SharedReservation,
        id: ReservationId,
        until: Timestamp,
        now: Timestamp,
    ) {
        let SharedReservation {
            charges,
            receipt,
            of_removed_rules: _,
            removed_keys,
        } = shared;
        let mut table = self.reservations.table();
        let renewed = match table.remove(&id) {
            Some(own) => {
                let mut own = own.renewed(until);
                own.set_redis_receipts(&charges, &receipt);
                Some(own)
            }
            // Without these rules, this server knows only a part of the reservation.
            None if removed_keys.is_empty() => self.reservations.permit().map(|permit| {
                let receipt = LimiterReceipt::Redis(FallbackReceipt::in_redis(receipt));
                OutstandingReservation::new(charges, Some(receipt), None, until, permit)
            }),
            None => None,
        };
        // Without a permit, the server that made the reservation ends it.
        if let Some(renewed) = renewed {
            table.insert(id, renewed);
            drop(table);
            self.reservations.wake_expiry(until, now);
        }
    }

    /// Returns the charges of a reservation of this kind, with the limits under which they were
    /// made.
    pub(super) fn shared_reservation(
        &self,
        kind: ReservationKind,
        shared: Vec<SharedCharge>,
    ) -> SharedReservation {
        let rules = self.rules.load_full();
        let is_of_removed_rule = |shared: &SharedCharge| {
            shared.limits.is_none()
                && match kind {
                    ReservationKind::Request => rules.rule_of(&shared.charge.key).is_none(),
                    ReservationKind::Counters => true,
                }
        };
        let (of_removed_rules, charges) = if shared.iter().any(is_of_removed_rule) {
            shared.into_iter().partition(is_of_removed_rule)
        } else {
            (Vec::new(), shared)
        };
        let removed_keys = of_removed_rules
            .iter()
            .map(|shared| shared.charge.key.clone())
            .collect();
        let (charges, receipts) = moved_charges(&rules, kind, charges, self.now());
        SharedReservation {
            charges,
            receipt: RedisReceipt::from_parts(receipts),
            of_removed_rules,
            removed_keys,
        }
    }
}
