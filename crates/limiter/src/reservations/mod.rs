//! Reservations, for requests whose final cost is known only later. One call makes a reservation,
//! and a later call settles it. Another server may receive the second call.
//!
//! ```text
//! reserve ─▶ admitted: charged, and a token ─┬─▶ settle: the unused part is refunded, or
//!                                            │           the excess is charged
//!                                            ├─▶ renew:  the reservation expires later
//!                                            └─▶ expired: everything is refunded,
//!                                                unless `on_expiry` is `charge`
//! ```
//!
//! The reserved units are charged when the reservation is made. Therefore, the reserved units and
//! the units of all other requests together never exceed a limit, and a denied request is admitted
//! if it is retried after the time in `Retry-After`. The core crate's `receipt.rs` describes which
//! units a refund can return.
//!
//! **Ends only once.** With the memory store, the server removes a reservation from its table
//! before settling it. With Redis, a guard record next to the charges stores that the reservation
//! has ended. A reservation therefore ends only once, whichever server ends it.
//!
//! **Expiry.** The server that made a reservation, or that has renewed it last, refunds it when it
//! expires, unless `on_expiry` is `charge`. If the server has stopped before that, another server
//! finds the reservation in the expiry queue in Redis (`expiry_queue.rs`), and refunds it. With the
//! memory store, the snapshot contains the outstanding reservations. If a server is late by more
//! than `MAX_LATENESS`, it does not refund, because Redis no longer stores whether the reservation
//! was settled.

mod counters;
mod expiry;
mod expiry_queue;
mod final_charges;
mod in_redis;
mod local;
mod moved;

use std::sync::{Arc, Once, atomic::Ordering};

use tidegate::rate_limiter::{OwnedCharges, Receipts, SlotTurn, TurnBuffers, TurnResult};
use tidegate_config::Password;
use tidegate_core::{Cost, Refund, Request, RuleSet, Scratch, Span, Verdict, bounds};

pub use self::counters::{CounterCharge, CounterSettlement, ReservedCounters, SettledCounter};
use self::final_charges::FinalCharges;
pub use crate::reservation_state::{
    NoTokenKey, NotOutstanding, ReservationError, Reservations, ReserveError,
};
use crate::{
    ServerLimiter,
    backend::LimiterReceipt,
    reservation_state::{
        ChargesHolder, OutstandingReservation, ReservationKind, ReservationPermit, TokenCharges,
        TokenContents, TokenHead, random_id, redis_receipt,
    },
};

/// The default time to live of a reservation.
pub const DEFAULT_TTL: Span = Span::from_secs(60);

/// An admitted request whose charges are reserved.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reservation {
    /// The token for settling the reservation.
    pub token: String,
    /// The time until the reservation expires.
    pub expires_in: Span,
}

/// A settled reservation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SettledReservation {
    /// The final cost of the request, minus the units that the limits did not admit.
    pub settled: u64,
    /// Unused units that were refunded; 0 if any rule keeps them.
    pub released: u64,
    /// The number of units by which the final cost exceeds the reserved units.
    pub over: u64,
}

impl ServerLimiter {
    /// Decides `request` under `rules`, and reserves its cost for `ttl` if it is admitted. `ttl` is
    /// limited to the configured maximum, and to the shortest lease of a concurrency slot. If no
    /// concurrency slot is free and the limit lets requests wait, the request waits for a slot as
    /// `turn` specifies, and is then decided under the rules that are active at that time. Passes
    /// the rules, the verdict and the reservation to `finish`, and returns the result of `finish`.
    ///
    /// With the memory store, the future is ready when it is first polled, unless the request
    /// waits.
    ///
    /// # Errors
    ///
    /// [`ReserveError`] if the request is invalid, or if there are too many reservations.
    pub async fn reserve<T>(
        &self,
        rules: &Arc<RuleSet>,
        scratch: &mut Scratch,
        request: &Request<'_>,
        ttl: Span,
        turn: SlotTurn<'_>,
        finish: impl FnOnce(&Arc<RuleSet>, &Verdict<'_>, Option<Reservation>) -> T,
    ) -> Result<T, ReserveError> {
        let max = self.reservations.settings.max;
        let permit = self.reservations.permit();
        let permit = permit.ok_or(ReserveError::TooMany(max))?;
        let turn = turn.with_receipts(Receipts::Wanted);
        let buffers = TurnBuffers {
            scratch,
            outcomes: &mut Vec::new(),
        };
        let reserve = |decided: TurnResult<'_, LimiterReceipt>| {
            let TurnResult {
                rules,
                charges,
                verdict,
                receipt,
            } = decided;
            let reservation = verdict.allowed.then(|| {
                let charges = OwnedCharges::new(rules, charges).with_plans_of(request);
                self.add_reservation(charges, receipt, request.cost(), ttl, permit)
            });
            finish(rules, &verdict, reservation)
        };
        // A variable for this future would make the future of this function twice as large.
        Ok(turn
            .decide_request(self, rules, request, buffers, reserve)
            .await?)
    }

    /// Adds the reservation of an admitted request, whose charges are `charges`.
    fn add_reservation(
        &self,
        charges: OwnedCharges,
        receipt: Option<LimiterReceipt>,
        cost: Cost,
        ttl: Span,
        permit: ReservationPermit,
    ) -> Reservation {
        let ttl = ttl.min(self.reservations.settings.max_ttl);
        let ttl = charges.lease().map_or(ttl, |lease| ttl.min(lease));
        let since = self.now();
        let expires = since.after(ttl);
        let head = TokenHead {
            kind: ReservationKind::Request,
            id: random_id(),
            expires,
            cost,
        };
        let token = self.seal_new_token(&head, &charges, receipt.as_ref());
        if receipt.is_some() {
            let outstanding =
                OutstandingReservation::new(charges, receipt, Some(since), expires, permit);
            self.reservations.insert(head.id, outstanding, since);
        }
        Reservation {
            token,
            expires_in: ttl,
        }
    }

    /// Settles the reservation of `token` at the final `cost` of its request. The cost is capped at
    /// [`bounds::MAX_COUNT`]. A cost of 0 cancels the reservation.
    ///
    /// The cost applies to rules that charge the request's cost. The charges of rules with a fixed
    /// cost, or with a cost from an entry, do not change unless `cost` is 0. All concurrency slots
    /// are released.
    ///
    /// With the memory store, the future is ready when it is first polled. If the future is dropped
    /// while it waits for Redis, the call may be repeated with the same cost.
    ///
    /// # Errors
    ///
    /// [`ReservationError`] if the reservation was not settled.
    pub async fn settle_reservation(
        &self,
        token: &str,
        cost: u64,
    ) -> Result<SettledReservation, ReservationError> {
        let settled = self.try_settle(token, cost).await;
        settled.inspect_err(|error| self.reservations.rejections.count(error))
    }

    async fn try_settle(
        &self,
        token: &str,
        cost: u64,
    ) -> Result<SettledReservation, ReservationError> {
        let TokenContents { head, charges } = self.reservations.open(token)?;
        let TokenHead { id, expires, .. } = head;
        let (now, reserved, cost) = (self.now(), head.cost.units(), cost.min(bounds::MAX_COUNT));
        let (uncharged, refund) = match charges {
            TokenCharges::None if expires <= now => return Err(NotOutstanding::Expired.into()),
            TokenCharges::None => {
                self.count_settled();
                (0, Refund::Complete)
            }
            TokenCharges::OnServer => {
                let outstanding = self.reservations.take(&id);
                let outstanding =
                    outstanding.map_err(|error| error.narrowed_by_expiry(expires, now))?;
                if outstanding.expires <= now {
                    self.expire_locally(outstanding, now);
                    return Err(NotOutstanding::Expired.into());
                }
                // A reload must not make the refund and the excess differ.
                let rules = self.rules();
                let final_charges = FinalCharges::new(&outstanding.charges, &rules, cost);
                let (charges, refund) = self.end_locally(outstanding, &final_charges, now);
                self.count_settled();
                let uncharged = self
                    .charge_excess_of(&charges, &final_charges, &rules, now)
                    .await;
                (uncharged, refund)
            }
            TokenCharges::InRedis(shared) => {
                let shared = self.shared_reservation(ReservationKind::Request, shared);
                // The future is boxed because it is large, and the memory store does not need it.
                let settled = self.settle_in_redis(&shared, id, expires, cost, now);
                Box::pin(settled).await?
            }
        };
        Ok(SettledReservation {
            settled: cost - uncharged,
            released: match refund {
                Refund::Complete => reserved.saturating_sub(cost),
                Refund::Incomplete => 0,
            },
            over: cost.saturating_sub(reserved),
        })
    }

    /// Renews the reservation of `token`, which then expires after `ttl`. `ttl` is limited as in
    /// [`Self::reserve`]. Also renews the leases of the reservation's concurrency slots. The
    /// returned token replaces `token`.
    ///
    /// # Errors
    ///
    /// [`ReservationError`] if the reservation was not renewed.
    pub async fn renew_reservation(
        &self,
        token: &str,
        ttl: Span,
    ) -> Result<Reservation, ReservationError> {
        let renewed = self.try_renew(token, ttl).await;
        renewed.inspect_err(|error| self.reservations.rejections.count(error))
    }

    async fn try_renew(&self, token: &str, ttl: Span) -> Result<Reservation, ReservationError> {
        let TokenContents { head, charges } = self.reservations.open(token)?;
        let TokenHead { id, expires, .. } = head;
        let (now, ttl) = (self.now(), ttl.min(self.reservations.settings.max_ttl));
        let (expires_in, charges) = match charges {
            TokenCharges::None if expires <= now => return Err(NotOutstanding::Expired.into()),
            TokenCharges::None => (ttl, TokenCharges::None),
            TokenCharges::OnServer => {
                let renewed = self.renew_locally(&id, now, ttl);
                let ttl = renewed.map_err(|error| error.narrowed_by_expiry(expires, now))?;
                (ttl, TokenCharges::OnServer)
            }
            TokenCharges::InRedis(shared) => {
                let (ttl, renewed) = self.renew_in_redis(shared, id, expires, now, ttl).await?;
                (ttl, TokenCharges::InRedis(renewed))
            }
        };
        let head = TokenHead {
            expires: now.after(expires_in),
            ..head
        };
        Ok(Reservation {
            token: self
                .reservations
                .keys
                .seal(&TokenContents { head, charges }),
            expires_in,
        })
    }

    fn count_settled(&self) {
        self.reservations.settled.fetch_add(1, Ordering::Relaxed);
    }

    /// Seals the token of a new reservation of `charges`, whose receipt is `receipt`.
    fn seal_new_token(
        &self,
        head: &TokenHead,
        charges: &OwnedCharges,
        receipt: Option<&LimiterReceipt>,
    ) -> String {
        let holder = match (receipt, redis_receipt(receipt)) {
            (None, _) => ChargesHolder::None,
            (Some(_), None) => ChargesHolder::Server,
            (_, Some(receipt)) => {
                self.warn_of_own_key();
                ChargesHolder::Redis(receipt.parts())
            }
        };
        self.reservations.keys.seal_new(head, charges, holder)
    }

    /// Logs one warning if the servers that share a Redis cannot settle each other's reservations.
    fn warn_of_own_key(&self) {
        static ONCE: Once = Once::new();
        if self.reservations.settings.credential == Password::None {
            ONCE.call_once(|| {
                tracing::warn!(
                    "only this server can settle its reservations, and only until it restarts; for a fleet, set `reservations.secret_env`; logged once"
                );
            });
        }
    }

    /// Returns the reservations of this server.
    #[must_use]
    pub fn reservations(&self) -> &Reservations {
        &self.reservations
    }
}
