//! Reservations of counters. A counter belongs to no rule of the rules file, so the caller
//! specifies its limits. Counters are used for Envoy's rate limit descriptors.

use std::{sync::Arc, time::Duration};

use tidegate::rate_limiter::{OwnedCharge, OwnedCharges};
use tidegate_core::{
    Algorithm, Charge, Cost, Decision, DecisionAndReceipt, Effect, Limits, Outcome, Span, Store,
    StoreDecision, StoreRequest, bounds,
};
use tidegate_redis::{
    RedisReceipt, RedisReservation, ReservationEnd, ReservationStatus, StoreError,
};

use super::{Reservation, final_charges::FinalCharges};
use crate::{
    ServerLimiter,
    backend::LimiterReceipt,
    reservation_state::{
        NotOutstanding, OutstandingReservation, ReservationError, ReservationId, ReservationKind,
        ReservationPermit, ReserveError, SharedCharge, TokenCharges, TokenContents, TokenHead,
        random_id,
    },
};

/// A charge to a counter.
#[derive(Clone, Debug)]
pub struct CounterCharge {
    /// The key of the counter. No two charges of a reservation have the same key.
    pub key: Box<[u8]>,
    /// The limits of the counter.
    pub limits: Arc<Limits>,
    /// The cost.
    pub cost: Cost,
}

/// The result of a request to reserve counters.
#[derive(Debug)]
pub struct ReservedCounters {
    /// The decision.
    pub decided: StoreDecision,
    /// One outcome for each limit of each charge; empty if no limit was evaluated.
    pub outcomes: Vec<Outcome>,
    /// The reservation; `None` if nothing was charged.
    pub reservation: Option<Reservation>,
}

/// The result of settling a reservation of counters.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CounterSettlement {
    /// The reservation was settled.
    Settled(Vec<SettledCounter>),
    /// The reservation had already been settled. Nothing has changed.
    SettledBefore,
    /// The reservation has expired, is unknown, or has other counters than the request. Nothing has
    /// changed.
    NotOutstanding,
}

/// A counter of a settled reservation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SettledCounter {
    /// The key of the counter.
    pub key: Box<[u8]>,
    /// The number of reserved units that stay charged.
    pub charged: u64,
}

impl ServerLimiter {
    /// Makes all of `charges` or none of them, and reserves them for `ttl`. `ttl` is limited to the
    /// configured maximum, to the time until the first fixed window ends, and to the shortest
    /// lease. An expired reservation is always refunded, whatever `on_expiry` is. If Redis does not
    /// reply within `within`, it is treated as unavailable.
    ///
    /// # Errors
    ///
    /// [`ReserveError::TooMany`] if there are too many reservations.
    pub async fn reserve_counters(
        &self,
        charges: &[CounterCharge],
        ttl: Span,
        within: Option<Duration>,
    ) -> Result<ReservedCounters, ReserveError> {
        let max = self.reservations.settings.max;
        let permit = self.reservations.permit();
        let permit = permit.ok_or(ReserveError::TooMany(max))?;
        let mut list: Vec<Charge<'_>> = charges.iter().map(CounterCharge::as_charge).collect();
        let mut outcomes = Vec::new();
        let request = StoreRequest {
            within,
            ..StoreRequest::new(&mut list, self.now(), Effect::Charge)
        };
        let DecisionAndReceipt {
            decision: decided,
            receipt,
        } = Store::reserve(self, request, &mut outcomes).await;
        let reservation = match receipt {
            Some(receipt) if decided.decision == Decision::Admitted => {
                let ttl = ttl.min(self.reservations.settings.max_ttl);
                let ttl = window_left(&list, &outcomes).map_or(ttl, |left| ttl.min(left));
                let made =
                    |charge: &&CounterCharge| list.iter().any(|made| *made.key == *charge.key);
                let owned =
                    OwnedCharges::of_limits(charges.iter().filter(made).map(|charge| {
                        (charge.key.clone(), Arc::clone(&charge.limits), charge.cost)
                    }));
                Some(self.keep_counters(owned, receipt, ttl, permit))
            }
            _ => None,
        };
        Ok(ReservedCounters {
            decided,
            outcomes,
            reservation,
        })
    }

    /// Stores a reservation of `charges`, for which the store has issued `receipt`. Returns the
    /// reservation's token.
    fn keep_counters(
        &self,
        charges: OwnedCharges,
        receipt: LimiterReceipt,
        ttl: Span,
        permit: ReservationPermit,
    ) -> Reservation {
        let ttl = charges.lease().map_or(ttl, |lease| ttl.min(lease));
        let since = self.now();
        let expires = since.after(ttl);
        let costs = charges.list().iter().map(|charge| charge.cost);
        let head = TokenHead {
            kind: ReservationKind::Counters,
            id: random_id(),
            expires,
            cost: costs.max_by_key(|cost| cost.units()).unwrap_or(Cost::ONE),
        };
        let token = self.seal_new_token(&head, &charges, Some(&receipt));
        let outstanding =
            OutstandingReservation::new(charges, Some(receipt), Some(since), expires, permit);
        self.reservations.insert(head.id, outstanding, since);
        Reservation {
            token,
            expires_in: ttl,
        }
    }

    /// Settles the reservation of `token` at the final `cost`, which is capped at
    /// [`bounds::MAX_COUNT`]. Refunds the unused units. Unlike
    /// [`ServerLimiter::settle_reservation`], does not charge a cost above the reserved units.
    /// `limits_of` returns the limits of a counter, or `None` if the counter does not belong to
    /// this request. If `limits_of` returns `None`, the reservation is not settled.
    ///
    /// With the memory store, the future is ready when it is first polled.
    ///
    /// # Errors
    ///
    /// [`ReservationError::Unavailable`] if Redis did not reply, and [`ReservationError::Moved`] if
    /// another process has taken over the reservations. The caller may then repeat the call with
    /// the same cost.
    pub async fn settle_counters(
        &self,
        token: &str,
        limits_of: impl Fn(&[u8]) -> Option<Arc<Limits>>,
        cost: u64,
    ) -> Result<CounterSettlement, ReservationError> {
        let keys = &self.reservations.keys;
        let contents = keys.open(token, ReservationKind::Counters);
        let Some(TokenContents { head, charges }) = contents else {
            return Ok(self.not_outstanding(&ReservationError::Invalid));
        };
        let (id, cost) = (head.id, cost.min(bounds::MAX_COUNT));
        match charges {
            TokenCharges::None => Ok(self.unknown_counters()),
            TokenCharges::OnServer => self.settle_own_counters(id, limits_of, cost),
            TokenCharges::InRedis(shared) => {
                let Some((charges, receipt)) = known_counters(shared, limits_of) else {
                    return Ok(self.unknown_counters());
                };
                let list = charges.as_charges();
                let reservation = RedisReservation {
                    id,
                    expires: head.expires,
                    charges: &list,
                    receipt: &receipt,
                    former_keys: &[],
                };
                let settled = self.settle_counters_in_redis(reservation, &charges, cost);
                settled.await.map_err(ReservationError::Unavailable)
            }
        }
    }

    /// Settles a reservation whose charges are stored only on this server.
    fn settle_own_counters(
        &self,
        id: ReservationId,
        limits_of: impl Fn(&[u8]) -> Option<Arc<Limits>>,
        cost: u64,
    ) -> Result<CounterSettlement, ReservationError> {
        let now = self.now();
        let mut table = self.reservations.table();
        if table.is_moved {
            return Err(ReservationError::Moved);
        }
        if let Some(keys) = table.settled.counters(&id) {
            return Ok(if keys.iter().all(|key| limits_of(key).is_some()) {
                self.settled_before()
            } else {
                self.unknown_counters()
            });
        }
        let is_known = |outstanding: &&OutstandingReservation| {
            let mut charges = outstanding.charges.list().iter();
            charges.all(|charge| limits_of(&charge.key).is_some())
        };
        if table.get(&id).filter(is_known).is_none() {
            return Ok(self.unknown_counters());
        }
        let Some(outstanding) = table.remove(&id) else {
            return Ok(self.unknown_counters());
        };
        let is_expired = outstanding.expires <= now;
        if !is_expired {
            let charges = outstanding.charges.list().iter();
            let counters = charges.map(|charge| charge.key.clone()).collect();
            table.settled.record(id, outstanding.expires, counters, now);
        }
        drop(table);
        if is_expired {
            self.expire_locally(outstanding, now);
            return Ok(self.not_outstanding(&NotOutstanding::Expired.into()));
        }
        let is_charged = |at| {
            let receipt = outstanding.receipt.as_ref();
            receipt.is_some_and(|receipt| receipt.is_charged(at))
        };
        let settled = settled(&outstanding.charges, is_charged, cost);
        let final_charges = FinalCharges::new(&outstanding.charges, &self.rules(), cost);
        self.end_locally(outstanding, &final_charges, now);
        self.count_settled();
        Ok(CounterSettlement::Settled(settled))
    }

    /// Settles a reservation whose `charges` are in Redis.
    async fn settle_counters_in_redis(
        &self,
        reservation: RedisReservation<'_>,
        charges: &OwnedCharges,
        cost: u64,
    ) -> Result<CounterSettlement, StoreError> {
        let Some(redis_store) = self.redis_store() else {
            return Ok(self.unknown_counters());
        };
        let (id, receipt, now) = (reservation.id, reservation.receipt, self.now());
        let (end, rules) = (ReservationEnd::Settled(cost), self.rules());
        let settlements = self.settlements_of(charges, &rules);
        let ended = redis_store.end_reservation(reservation, settlements, end, now);
        let status = ended.await;
        match status.inspect_err(|_| self.reservations.table().record_failed_settlement(&id))? {
            ReservationStatus::Ended(_) => {}
            ReservationStatus::EndedBefore(ReservationEnd::Settled(cost), _) => {
                self.end_own_part_of_settled(charges, &id, cost, &rules, now);
                return Ok(self.settled_before());
            }
            ReservationStatus::EndedBefore(ReservationEnd::Expired, _)
            | ReservationStatus::Expired
            | ReservationStatus::Outstanding(_) => {
                return Ok(self.not_outstanding(&NotOutstanding::Expired.into()));
            }
        }
        let own = self.take_own_part(&id);
        self.end_own_part(charges, own, cost, &rules, now);
        self.count_settled();
        let settled = settled(charges, |at| receipt.is_charged(at), cost);
        Ok(CounterSettlement::Settled(settled))
    }

    fn settled_before(&self) -> CounterSettlement {
        self.reservations
            .rejections
            .count(&NotOutstanding::Settled.into());
        CounterSettlement::SettledBefore
    }

    fn unknown_counters(&self) -> CounterSettlement {
        self.not_outstanding(&NotOutstanding::Unknown.into())
    }

    /// Counts a settlement that failed for the reason `why`.
    fn not_outstanding(&self, why: &ReservationError) -> CounterSettlement {
        self.reservations.rejections.count(why);
        CounterSettlement::NotOutstanding
    }
}

impl CounterCharge {
    /// Returns the charge in the form that a store takes.
    #[must_use]
    pub fn as_charge(&self) -> Charge<'_> {
        Charge {
            key: &self.key,
            limits: &self.limits,
            cost: self.cost,
            longest_wait: None,
            blocked: None,
        }
    }
}

/// Returns the charges of a token with their limits and receipts; `None` if `limits_of` returns
/// `None` for any of them.
fn known_counters(
    shared: Vec<SharedCharge>,
    limits_of: impl Fn(&[u8]) -> Option<Arc<Limits>>,
) -> Option<(OwnedCharges, RedisReceipt)> {
    let mut receipts = Vec::with_capacity(shared.len());
    let mut charges = Vec::with_capacity(shared.len());
    for SharedCharge {
        charge,
        limits,
        receipt,
    } in shared
    {
        let current = limits_of(&charge.key)?;
        // The charge was made under the limits in the token.
        charges.push((charge.key, limits.unwrap_or(current), charge.cost));
        receipts.push(receipt);
    }
    let receipt = RedisReceipt::from_parts(receipts);
    Some((OwnedCharges::of_limits(charges), receipt))
}

/// Returns, for each charge that was made, how many of its reserved units stay charged at the final
/// `cost`. `is_charged` returns whether the charge at a given index was made. A charge is not made
/// if its limit is in shadow mode and would have denied it.
fn settled(
    charges: &OwnedCharges,
    is_charged: impl Fn(usize) -> bool,
    cost: u64,
) -> Vec<SettledCounter> {
    let made = charges.list().iter().enumerate();
    let made = made.filter(|(at, _)| is_charged(*at));
    let settled = |(_, charge): (usize, &OwnedCharge)| SettledCounter {
        key: charge.key.clone(),
        charged: charge.cost.units().min(cost),
    };
    made.map(settled).collect()
}

/// Returns the time until the first fixed window among the limits of `charges` ends.
fn window_left(charges: &[Charge<'_>], outcomes: &[Outcome]) -> Option<Span> {
    let limits = charges.iter().flat_map(|charge| charge.limits.iter());
    let windows = limits.zip(outcomes).filter_map(|(limit, outcome)| {
        let is_window = matches!(limit.algorithm(), Algorithm::FixedWindow { .. });
        is_window.then_some(outcome.reset_after)
    });
    windows.min()
}
