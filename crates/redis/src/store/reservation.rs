//! Reservations of charges. Any server can end a reservation, but only once. A guard in the hash
//! slot of the charges records that a reservation was renewed or has ended (`guard.lua`).
//!
//! If the charges are in several hash slots, each hash slot has its own guard. The guard in the
//! hash slot with the lowest number decides: only this guard is renewed, and the reservation ends
//! there first. Then the other hash slots end in the same way, even after the reservation has
//! expired. So if a node does not answer, the reservation has ended in no hash slot, or any later
//! call completes it in the way in which it began.
//!
//! Calls may run concurrently, so different calls may end different hash slots. The hash slot with
//! the highest number ends last. Only the call that ends the reservation there returns
//! [`ReservationStatus::Ended`].

use futures_util::future::join_all;
use smallvec::SmallVec;
use tidegate_core::{Charge, Refund, Settlement, Span, Timestamp, bounds::MAX_COUNT};

use super::{
    guard_reply::{GuardReply, ReservationEnd, ReservationStatus, guard_reply},
    reserve::{ChargeToSettle, SHARED_ARGS},
};
use crate::{
    RedisReceipt, RedisStore, StoreError, call::Call, client::hash_slot, exec::ExecError, layout,
    scripts,
};

/// How long a guard is kept after its reservation expires. After the guard has expired, the store
/// can no longer tell whether the reservation has ended.
pub const GUARD_KEPT: Span = Span::from_secs(60);

/// A reservation of charges in Redis.
#[derive(Clone, Copy, Debug)]
pub struct RedisReservation<'r> {
    /// A random number that identifies the reservation.
    pub id: [u8; 16],
    /// The instant at which the reservation expires, according to the clocks of the Tidegate
    /// servers. The result does not include a later renewal.
    pub expires: Timestamp,
    /// The charges under the active rules.
    pub charges: &'r [Charge<'r>],
    /// The receipt of `charges`.
    pub receipt: &'r RedisReceipt,
    /// The keys of charges whose rules have since been removed. Nothing is refunded to these keys,
    /// but they determine the hash slots of the guards.
    pub former_keys: &'r [Box<[u8]>],
}

/// The charges of a reservation in one hash slot.
#[derive(Debug, Default)]
struct ReservedHashSlot {
    /// The indices of the charges.
    indices: SmallVec<[usize; 2]>,
}

/// The hash slots of a reservation in the order of their numbers. Most reservations have one.
type ReservedHashSlots = SmallVec<[(Option<u16>, ReservedHashSlot); 1]>;

/// The guard of a reservation whose leases are renewed.
#[derive(Clone, Debug)]
pub(crate) struct RenewalGuard {
    pub(crate) key: Vec<u8>,
    /// The instant at which the reservation expires, for a guard that does not exist yet.
    pub(crate) expires: Timestamp,
    /// How long to keep the guard, in milliseconds.
    pub(crate) kept_ms: u64,
}

impl RedisStore {
    /// Ends `reservation`, and refunds the unused units. `settlements` returns the settlement of
    /// each charge for the given end. Does nothing if the reservation has already ended, or if
    /// `end` does not apply to it. A call whose result is unknown may be repeated: the repeated
    /// call completes the remaining work.
    ///
    /// If an earlier call has ended the reservation in some hash slots only, the call completes it
    /// in the way in which the earlier call began, even if this is not `end`.
    ///
    /// At most one call returns [`ReservationStatus::Ended`]. No call does so if the completing
    /// call has another `end` than the call that began. The returned [`Refund`] includes the
    /// refunds of earlier calls, except for a hash slot that was migrating when an earlier call
    /// ended the reservation there. The refund there counts as complete, because the guard was
    /// written first.
    ///
    /// # Errors
    ///
    /// [`StoreError`] if not everything was settled, or if the outcome is unknown.
    pub async fn end_reservation(
        &self,
        reservation: RedisReservation<'_>,
        settlements: impl Fn(ReservationEnd) -> Vec<Settlement>,
        end: ReservationEnd,
        now: Timestamp,
    ) -> Result<ReservationStatus, StoreError> {
        let mut slots = self.reserved_hash_slots(&reservation).into_iter();
        let Some((number, first)) = slots.next() else {
            return Ok(ReservationStatus::Ended(Refund::Complete));
        };
        let attempt = attempt(&reservation, end, now);
        let call = self.end_call(&reservation, number, &first, &settlements(end), &attempt);
        let in_first = self.end_in_hash_slot(&call).await?;
        let (actual_end, mut refund) = match in_first.status {
            ReservationStatus::Ended(refund) => (end, refund),
            ReservationStatus::EndedBefore(before, refund) => (before, refund),
            ReservationStatus::Expired | ReservationStatus::Outstanding(_) => {
                return Ok(in_first.status);
            }
        };
        let Some(last) = slots.next_back() else {
            return Ok(in_first.status);
        };
        let settlements = settlements(actual_end);
        let attempt = completion(&reservation, actual_end, now, in_first.guard_ttl_ms);
        let call =
            |(number, slot)| self.end_call(&reservation, number, &slot, &settlements, &attempt);
        let calls: Vec<Call> = slots.map(call).collect();
        let completed = calls
            .iter()
            .map(|call| self.complete_in_hash_slot(call, actual_end));
        for completed in join_all(completed).await {
            refund = refund.and(completed?.refund);
        }
        let in_last = self.complete_in_hash_slot(&call(last), actual_end).await?;
        Ok(match in_last.status {
            ReservationStatus::Ended(_) if actual_end == end => {
                ReservationStatus::Ended(refund.and(in_last.refund))
            }
            _ => ReservationStatus::EndedBefore(actual_end, refund.and(in_last.refund)),
        })
    }

    /// Runs a call that ends a reservation in a further hash slot, after it has ended in the first
    /// one. An earlier call may already have ended it there.
    async fn complete_in_hash_slot(
        &self,
        call: &Call,
        end: ReservationEnd,
    ) -> Result<GuardReply, StoreError> {
        let in_slot = self.end_in_hash_slot(call).await?;
        match in_slot.status {
            ReservationStatus::Ended(_) => Ok(in_slot),
            ReservationStatus::EndedBefore(before, _) if before == end => Ok(in_slot),
            // A repeated call would get the same reply until the guard expires.
            ReservationStatus::EndedBefore(before, _) => {
                tracing::warn!(
                    "a reservation has ended differently in two hash slots: {end:?} and \
                     {before:?}; Redis has probably lost a key in a failover or by eviction"
                );
                Ok(in_slot)
            }
            status @ (ReservationStatus::Expired | ReservationStatus::Outstanding(_)) => {
                Err(StoreError::Unknown(format!(
                    "a reservation has ended in one hash slot ({end:?}), but not in another \
                     ({status:?})"
                )))
            }
        }
    }

    /// Builds the call that ends `reservation` in one hash slot.
    fn end_call(
        &self,
        reservation: &RedisReservation<'_>,
        number: Option<u16>,
        slot: &ReservedHashSlot,
        settlements: &[Settlement],
        attempt: &[u8],
    ) -> Call {
        let RedisReservation {
            charges, receipt, ..
        } = reservation;
        let receipts = receipt.parts();
        let in_slot = slot.indices.iter().filter_map(|index| {
            Some(ChargeToSettle {
                charge: charges.get(*index)?,
                receipt: receipts.get(*index)?,
                settlement: *settlements.get(*index)?,
            })
        });
        let mut call = self.settle_call(in_slot);
        call.keys.push(self.guard(number, reservation));
        call.args[1] = attempt.to_vec();
        call
    }

    /// Runs a call that ends a reservation in one hash slot. If the hash slot is migrating, the
    /// guard may be on another node than the keys, so a separate call updates the guard.
    async fn end_in_hash_slot(&self, call: &Call) -> Result<GuardReply, StoreError> {
        match self.run_once(call).await {
            Err(ExecError::SplitHashSlot(_)) => {}
            reply => return guard_reply(reply.map_err(|error| error.into_store_error(call))?),
        }
        let (mut guard, mut refund) = (call.clone(), call.clone());
        guard.keys = call.keys.last().cloned().into_iter().collect();
        guard.args.truncate(SHARED_ARGS);
        refund.keys.pop();
        refund.args[1].clear();
        let mut in_slot = guard_reply(self.run(&guard).await?)?;
        if let ReservationStatus::Ended(_) = in_slot.status
            && !refund.keys.is_empty()
        {
            refund.args[2].clone_from(&in_slot.renewed_leases);
            in_slot.refund = self.run_refund(&refund).await?;
            in_slot.status = ReservationStatus::Ended(in_slot.refund);
        }
        Ok(in_slot)
    }

    /// Renews `reservation`, so that it expires at `until`. The caller must [renew](Self::renew)
    /// the leases of the concurrency slots separately.
    ///
    /// # Errors
    ///
    /// [`StoreError`] if the reservation was not renewed, or if the outcome is unknown.
    pub async fn renew_reservation(
        &self,
        reservation: RedisReservation<'_>,
        until: Timestamp,
        now: Timestamp,
    ) -> Result<ReservationStatus, StoreError> {
        let Some(guard) = self.first_guard(&reservation) else {
            return Ok(ReservationStatus::Outstanding(until));
        };
        let instants = [now, reservation.expires, until].map(Timestamp::as_micros);
        // A renewal can shorten the reservation, but the first token still expires later, and the
        // server that made the reservation still ends it at that instant.
        let kept = kept_ms(until.max(reservation.expires), now);
        let numbers = instants.into_iter().chain([kept]);
        let call = Call {
            script: &scripts::RENEW_RESERVATION,
            keys: vec![guard],
            args: numbers
                .map(|number| number.to_string().into_bytes())
                .collect(),
            on_late_reply: None,
        };
        Ok(guard_reply(self.run(&call).await?)?.status)
    }

    /// Returns the guard in the hash slot of `key`, for the renewal of the leases there.
    pub(crate) fn renewal_guard(
        &self,
        reservation: &RedisReservation<'_>,
        key: &[u8],
        until: Timestamp,
        now: Timestamp,
    ) -> RenewalGuard {
        let slot = self.hash_slot_of(key);
        let slots = self.reserved_hash_slots(reservation);
        let is_first = slots.first().is_some_and(|(first, _)| *first == slot);
        RenewalGuard {
            key: self.guard(slot, reservation),
            // Only the guard in the first hash slot decides whether the reservation has expired. In
            // a further hash slot, any end must succeed: 1 is above a settlement's instant (0) and
            // below an expiry's.
            expires: if is_first {
                until
            } else {
                Timestamp::from_micros(1)
            },
            kept_ms: kept_ms(until.max(reservation.expires), now),
        }
    }

    /// Returns what the guard of `reservation` records: that the reservation has ended, or the
    /// instant until which it was renewed; `None` without a guard.
    ///
    /// # Errors
    ///
    /// [`StoreError`] if Redis did not answer.
    pub async fn read_guard(
        &self,
        reservation: RedisReservation<'_>,
    ) -> Result<Option<ReservationStatus>, StoreError> {
        let Some(guard) = self.first_guard(&reservation) else {
            return Ok(None);
        };
        let call = Call {
            script: &scripts::READ_GUARD,
            keys: vec![guard],
            args: Vec::new(),
            on_late_reply: None,
        };
        let status = guard_reply(self.run(&call).await?)?.status;
        // Without a guard, the instant is 0.
        let no_guard = ReservationStatus::Outstanding(Timestamp::from_micros(0));
        Ok(Some(status).filter(|status| *status != no_guard))
    }

    /// Groups the charges of `reservation` by hash slot, in the order of the slots. If Redis is not
    /// a cluster, there is a single group without a number.
    fn reserved_hash_slots(&self, reservation: &RedisReservation<'_>) -> ReservedHashSlots {
        let mut slots = ReservedHashSlots::new();
        for (index, charge) in reservation.charges.iter().enumerate() {
            slot_at(&mut slots, self.hash_slot_of(charge.key))
                .indices
                .push(index);
        }
        for key in reservation.former_keys {
            slot_at(&mut slots, self.hash_slot_of(key));
        }
        slots
    }

    /// Returns the hash slot of a charge's key; `None` if Redis is not a cluster.
    fn hash_slot_of(&self, key: &[u8]) -> Option<u16> {
        let is_cluster = self.executor.is_cluster();
        is_cluster.then(|| hash_slot(&self.key(key)))
    }

    /// Returns the guard in the hash slot with the lowest number, which decides.
    fn first_guard(&self, reservation: &RedisReservation<'_>) -> Option<Vec<u8>> {
        let slots = self.reserved_hash_slots(reservation);
        let (number, _) = slots.first()?;
        Some(self.guard(*number, reservation))
    }

    fn guard(&self, slot: Option<u16>, reservation: &RedisReservation<'_>) -> Vec<u8> {
        layout::guard_key(self.prefix(), slot, &reservation.id)
    }
}

/// Returns the slot with this number, which is added if it is missing.
fn slot_at(slots: &mut ReservedHashSlots, number: Option<u16>) -> &mut ReservedHashSlot {
    let found = slots.binary_search_by_key(&number, |(number, _)| *number);
    let at = found.unwrap_or_else(|at| {
        slots.insert(at, (number, ReservedHashSlot::default()));
        at
    });
    // The slot at `at` was found or inserted.
    &mut slots[at].1
}

/// Encodes an attempt to end a reservation, for `guard.lua`.
fn attempt(reservation: &RedisReservation<'_>, end: ReservationEnd, now: Timestamp) -> Vec<u8> {
    let kept = kept_ms(reservation.expires.max(now), now);
    encode_attempt(reservation, end, now, kept)
}

/// Encodes an attempt to end a reservation in a further hash slot, after it has ended in the first
/// one. The attempt succeeds whether or not the reservation has expired. The guard is kept at least
/// as long as the guard in the first hash slot (`guard_ttl_ms`), because only that guard was
/// renewed.
fn completion(
    reservation: &RedisReservation<'_>,
    end: ReservationEnd,
    now: Timestamp,
    guard_ttl_ms: u64,
) -> Vec<u8> {
    let instant = match end {
        ReservationEnd::Settled(_) => Timestamp::from_micros(0),
        ReservationEnd::Expired => reservation.expires,
    };
    let kept = kept_ms(reservation.expires.max(now), now);
    encode_attempt(reservation, end, instant, kept.max(guard_ttl_ms))
}

/// Encodes an attempt. `instant` determines whether the reservation has expired. The guard is kept
/// for `kept_ms` milliseconds.
fn encode_attempt(
    reservation: &RedisReservation<'_>,
    end: ReservationEnd,
    instant: Timestamp,
    kept_ms: u64,
) -> Vec<u8> {
    let (is_expiry, cost) = match end {
        ReservationEnd::Settled(cost) => (0, cost.min(MAX_COUNT)),
        ReservationEnd::Expired => (1, 0),
    };
    let [instant, expires] = [instant, reservation.expires].map(Timestamp::as_micros);
    let numbers = [cost, instant, expires, kept_ms];
    let mut attempt = Vec::with_capacity(1 + 7 * numbers.len());
    attempt.push(is_expiry);
    for number in numbers {
        attempt.extend_from_slice(&number.to_be_bytes()[1..]);
    }
    attempt
}

/// Returns how long to keep the guard of a reservation that expires at `until`, in milliseconds.
fn kept_ms(until: Timestamp, now: Timestamp) -> u64 {
    until.after(GUARD_KEPT).since(now).as_millis_ceil()
}
