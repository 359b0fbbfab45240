//! Reservations: charges of a request whose final cost is known only later. A reservation is made
//! by one call and settled by another, which may go to another server.
//!
//! ```text
//! reserve ─▶ admitted: charged, and a token ─┬─▶ settle: the unused part is refunded, or
//!                                            │           the excess is charged
//!                                            ├─▶ renew:  the reservation expires later
//!                                            └─▶ expired: everything is refunded
//! ```
//!
//! A reservation is charged when it is made, so reserved units and units of other requests together
//! never exceed a limit, and a retry after the announced time is admitted as always. What a refund
//! can return is described in the core crate's `receipt.rs`.
//!
//! **One end.** With the memory store, the server takes the reservation out of its table before it
//! settles it. With Redis, a guard beside the charges records the end, so a reservation ends once,
//! whichever server ends it.
//!
//! **Expiry.** The server that made a reservation refunds it when it expires. If this server is
//! killed before, the charges stay counted, which is safe. A server that is late by more than
//! `MAX_LATENESS` does not refund, because Redis no longer knows whether the reservation was
//! settled.

mod table;
mod token;

use std::{
    fmt,
    sync::{
        Arc, Mutex, MutexGuard, Once, PoisonError,
        atomic::{AtomicU64, AtomicUsize, Ordering},
    },
    time::Duration,
};

use futures_util::future::join_all;
use ring::rand::{SecureRandom as _, SystemRandom};
use tidegate::rate_limiter::{OwnedCharges, charge_excess, excess_costs, stretch};
use tidegate_config::{Password, ReservationExpiry, ReservationsConfig};
use tidegate_core::{
    Charge, CostSource, Effect, Renewal, Request, RequestError, Rule, RuleSet, Scratch, Settlement,
    Span, Store, StoreRequest, Timestamp, Verdict,
};
use tidegate_net::prometheus::{self, Metric, Page};
use tidegate_redis::{
    GUARD_KEPT, RedisReceipt, RedisReservation, ReservationEnd, ReservationStatus, StoreError,
};
use tokio::sync::Notify;

pub use self::token::NoTokenKey;
use self::{
    table::{Outstanding, OutstandingTable, Permit},
    token::{ReservationId, SharedCharge, TokenCharges, TokenContents, TokenKeys},
};
use crate::{LimiterReceipt, ServerLimiter};

/// How late a server may refund a reservation that has expired.
const MAX_LATENESS: Span = Span::from_secs(30);

const _: () = assert!(
    MAX_LATENESS.as_micros() < GUARD_KEPT.as_micros(),
    "Redis knows whether a reservation has ended for longer than a server refunds it"
);

/// The maximum number of reservations that are refunded at the same time.
const REFUND_BATCH: usize = 64;

/// The delay before a refund that Redis has not answered is tried again.
const RETRY_DELAY: Span = Span::from_secs(1);

/// The time to live of a reservation for which the caller gives none.
pub const DEFAULT_TTL: Span = Span::from_secs(60);

/// The longest time for which the task that refunds expired reservations sleeps.
const MAX_SLEEP: Span = Span::from_secs(1);

const OUTSTANDING: Metric = Metric::gauge(
    "tidegate_reservations_outstanding",
    [],
    "Reservations that this server has made, and that have neither expired nor been settled by a call to this server.",
);

const ENDED: Metric<1> = Metric::counter(
    "tidegate_reservations_ended_total",
    ["by"],
    "Reservations that this server has ended: because their holder settled them (`settle`), because they expired (`expiry`), or without a refund, because Redis was unreachable for too long after they expired (`lost`).",
);

/// The reservations of a server.
#[derive(Debug)]
pub struct Reservations {
    settings: ReservationsConfig,
    keys: TokenKeys,
    table: Mutex<OutstandingTable>,
    permits: Arc<AtomicUsize>,
    /// Wakes the task that refunds expired reservations.
    added: Notify,
    settled: AtomicU64,
    expired: AtomicU64,
    lost: AtomicU64,
}

impl Reservations {
    /// Creates reservations that are off.
    pub(crate) fn off() -> Self {
        let settings = ReservationsConfig {
            max: 0,
            ..ReservationsConfig::default()
        };
        Self::with_keys(settings, TokenKeys::default())
    }

    /// Creates the reservations of a server. `secrets` are the secrets with which tokens are
    /// sealed, separated by spaces: the first one seals, and all of them open. Without secrets,
    /// only this server accepts its tokens, until it is restarted.
    ///
    /// # Errors
    ///
    /// Fails without `secrets` if the operating system provides no random bytes.
    pub fn new(settings: ReservationsConfig, secrets: Option<&str>) -> Result<Self, NoTokenKey> {
        let keys = match secrets {
            Some(secrets) => TokenKeys::new(secrets),
            None => TokenKeys::random()?,
        };
        Ok(Self::with_keys(settings, keys))
    }

    fn with_keys(settings: ReservationsConfig, keys: TokenKeys) -> Self {
        Self {
            settings,
            keys,
            table: Mutex::default(),
            permits: Arc::default(),
            added: Notify::new(),
            settled: AtomicU64::new(0),
            expired: AtomicU64::new(0),
            lost: AtomicU64::new(0),
        }
    }

    /// Returns the settings.
    #[must_use]
    pub fn settings(&self) -> &ReservationsConfig {
        &self.settings
    }

    fn table(&self) -> MutexGuard<'_, OutstandingTable> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a reservation at `now`. Wakes the task that refunds expired reservations only if it
    /// would sleep for too long, because waking it takes longer than a reservation.
    fn insert(&self, id: ReservationId, outstanding: Outstanding, now: Timestamp) {
        let is_due_soon = outstanding.refund_at.since(now) < MAX_SLEEP;
        self.table().insert(id, outstanding);
        if is_due_soon {
            self.added.notify_one();
        }
    }

    pub(crate) fn collect(&self, page: &mut Page<'_>) {
        let outstanding = self.permits.load(Ordering::Relaxed);
        page.single(&OUTSTANDING, prometheus::count(outstanding));
        let ended = [
            ("settle", &self.settled),
            ("expiry", &self.expired),
            ("lost", &self.lost),
        ];
        page.family(
            &ENDED,
            ended
                .into_iter()
                .map(|(by, count)| ([by], count.load(Ordering::Relaxed))),
        );
    }
}

/// An admitted request whose charges are reserved.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reservation {
    /// The token with which the reservation is settled.
    pub token: String,
    /// The time until the reservation expires.
    pub expires_in: Span,
}

/// A reservation that was settled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SettledReservation {
    /// The number of units that stay charged.
    pub settled: u64,
    /// The number of reserved units that were not used. They are refunded, as far as the limits
    /// still count them.
    pub released: u64,
    /// The number of units beyond the reserved ones.
    pub over: u64,
}

/// The reason why a request is not reserved.
#[derive(Debug)]
pub enum ReserveError {
    /// The request is invalid.
    Request(RequestError),
    /// There are too many outstanding reservations; this is the maximum.
    TooMany(usize),
}

impl From<RequestError> for ReserveError {
    fn from(error: RequestError) -> Self {
        Self::Request(error)
    }
}

/// The reason why a reservation is not settled or renewed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ReservationError {
    /// The token is malformed, or was not sealed with a key of this server.
    Invalid,
    /// The reservation was settled before, has expired, or is known to another server only.
    NotOutstanding(&'static str),
    /// Redis did not answer, so the call may be repeated.
    Unavailable(StoreError),
}

impl ReservationError {
    /// Returns what is wrong with the token, or why the call failed, with advice.
    #[must_use]
    pub fn reason(&self) -> &'static str {
        match self {
            Self::Invalid => {
                "is not a token of this server; servers that share a Redis need the same \
                 `reservations.secret_env`"
            }
            Self::NotOutstanding(reason) => reason,
            Self::Unavailable(_) => {
                "Redis did not execute the call, or did not answer in time; repeat the call"
            }
        }
    }
}

impl fmt::Display for ReservationError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Invalid | Self::NotOutstanding(_) => write!(f, "reservation: {}", self.reason()),
            Self::Unavailable(_) => f.write_str(self.reason()),
        }
    }
}

impl std::error::Error for ReservationError {}

impl fmt::Display for ReserveError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Request(error) => error.fmt(f),
            Self::TooMany(0) => {
                f.write_str("reservations are off; remove `reservations: off` from the rules file")
            }
            Self::TooMany(max) => write!(
                f,
                "there are {max} outstanding reservations; settle them, or raise `reservations.max`"
            ),
        }
    }
}

impl std::error::Error for ReserveError {}

const SETTLED: ReservationError =
    ReservationError::NotOutstanding("was settled before, at another cost");
const LOST: ReservationError = ReservationError::NotOutstanding(
    "has lost its concurrency slot, because it was renewed too late",
);
const EXPIRED: ReservationError = ReservationError::NotOutstanding("has expired");
const UNKNOWN: ReservationError = ReservationError::NotOutstanding(
    "is not outstanding on this server: it was settled before, has expired, was made before a \
     restart, or was made by another server without Redis",
);

impl ServerLimiter {
    /// Decides `request` under `rules`, and reserves its cost for `ttl` if it is admitted. `ttl` is
    /// shortened to the maximum of the settings, and to the shortest lease of a concurrency slot.
    ///
    /// With the memory store, the future is ready when it is first polled.
    ///
    /// # Errors
    ///
    /// [`ReserveError`] if the request is invalid, or if there are too many reservations.
    pub async fn reserve<'a>(
        &self,
        rules: &'a Arc<RuleSet>,
        scratch: &'a mut Scratch,
        request: &Request<'_>,
        ttl: Span,
    ) -> Result<(Verdict<'a>, Option<Reservation>), ReserveError> {
        let max = self.reservations.settings.max;
        let permit = Permit::take(&self.reservations.permits, max);
        let permit = permit.ok_or(ReserveError::TooMany(max))?;
        let now = self.now();
        let mut charges = rules.charges(request, now, scratch)?;
        let mut outcomes = Vec::new();
        let mut receipt = None;
        let mut verdict = Verdict::unlimited();
        if !charges.is_empty() {
            if let Some(pending) = stretch(self, rules, &mut charges, now) {
                pending.finish(self, &mut charges).await;
            }
            let store_request = StoreRequest::new(&mut charges, now, Effect::Charge);
            let decided;
            (decided, receipt) = Store::reserve(self, store_request, &mut outcomes).await;
            verdict = decided.verdict(&charges, &outcomes);
        }
        if !verdict.allowed {
            return Ok((verdict, None));
        }
        let charges = OwnedCharges::new(rules, &charges);
        let ttl = ttl.min(self.reservations.settings.max_ttl);
        let ttl = charges.lease().map_or(ttl, |lease| ttl.min(lease));
        let expires = self.now().after(ttl);
        let contents = TokenContents {
            id: random_id(),
            expires,
            cost: request.cost(),
            charges: token_charges(&charges, receipt.as_ref()),
        };
        if let TokenCharges::InRedis(_) = &contents.charges {
            self.warn_of_own_key();
        }
        if receipt.is_some() {
            let outstanding = Outstanding {
                charges,
                receipt,
                expires,
                refund_at: expires,
                _permit: permit,
            };
            self.reservations.insert(contents.id, outstanding, now);
        }
        let reservation = Reservation {
            token: self.reservations.keys.seal(&contents),
            expires_in: ttl,
        };
        Ok((verdict, Some(reservation)))
    }

    /// Settles the reservation of `token` at the final `cost` of its request. A cost of 0 cancels
    /// the reservation.
    ///
    /// The cost applies to the rules that charge the cost of the request. Rules with a fixed cost,
    /// or with a cost from an entry, keep their charge, unless the cost is 0. All concurrency slots
    /// are released.
    ///
    /// With the memory store, the future is ready when it is first polled. If the future is
    /// dropped while it waits for Redis, the call may be repeated at the same cost.
    ///
    /// # Errors
    ///
    /// [`ReservationError`] if the reservation was not settled.
    pub async fn settle_reservation(
        &self,
        token: &str,
        cost: u64,
    ) -> Result<SettledReservation, ReservationError> {
        let contents = self.reservations.keys.open(token);
        let TokenContents {
            id,
            expires,
            cost: reserved,
            charges,
        } = contents.ok_or(ReservationError::Invalid)?;
        let (now, reserved) = (self.now(), reserved.units());
        let uncharged = match charges {
            TokenCharges::None if expires <= now => return Err(EXPIRED),
            TokenCharges::None => 0,
            TokenCharges::OnServer => {
                let outstanding = self.reservations.table().remove(&id).ok_or(UNKNOWN)?;
                if outstanding.expires <= now {
                    self.refund_locally(outstanding, now);
                    return Err(EXPIRED);
                }
                let due = self.end_locally(&outstanding.charges, outstanding.receipt, cost, now);
                self.charge_excess_of(&outstanding.charges, &due, now).await
            }
            TokenCharges::InRedis(shared) => {
                let shared = self.shared_reservation(shared);
                self.settle_in_redis(&shared, id, expires, cost, now)
                    .await?
            }
        };
        self.reservations.settled.fetch_add(1, Ordering::Relaxed);
        Ok(SettledReservation {
            settled: cost - uncharged,
            released: reserved.saturating_sub(cost),
            over: cost.saturating_sub(reserved),
        })
    }

    /// Renews the reservation of `token`: it expires after `ttl` from now, which is shortened as in
    /// [`Self::reserve`]. Also renews the leases of its concurrency slots. The returned token
    /// replaces `token`.
    ///
    /// # Errors
    ///
    /// [`ReservationError`] if the reservation was not renewed.
    pub async fn renew_reservation(
        &self,
        token: &str,
        ttl: Span,
    ) -> Result<Reservation, ReservationError> {
        let contents = self.reservations.keys.open(token);
        let mut contents = contents.ok_or(ReservationError::Invalid)?;
        let (now, ttl) = (self.now(), ttl.min(self.reservations.settings.max_ttl));
        let expires_in = match &mut contents.charges {
            TokenCharges::None if contents.expires <= now => return Err(EXPIRED),
            TokenCharges::None => ttl,
            TokenCharges::OnServer => self.renew_locally(&contents.id, now, ttl)?,
            TokenCharges::InRedis(shared) => {
                let former = std::mem::take(shared);
                let (id, expires) = (contents.id, contents.expires);
                let (ttl, renewed) = self.renew_in_redis(former, id, expires, now, ttl).await?;
                *shared = renewed;
                ttl
            }
        };
        contents.expires = now.after(expires_in);
        Ok(Reservation {
            token: self.reservations.keys.seal(&contents),
            expires_in,
        })
    }

    /// Refunds the reservations that have expired. Returns the instant of the next refund.
    pub async fn refund_expired_reservations(&self) -> Option<Timestamp> {
        loop {
            let now = self.now();
            let due: Vec<(ReservationId, Outstanding)> = {
                let mut table = self.reservations.table();
                let due = std::iter::from_fn(|| table.remove_due(now));
                due.take(REFUND_BATCH).collect()
            };
            if due.is_empty() {
                return self.reservations.table().next_refund();
            }
            let mut in_redis = Vec::new();
            for (id, outstanding) in due {
                if redis_receipt(outstanding.receipt.as_ref()).is_some() {
                    in_redis.push(self.refund_in_redis(id, outstanding, now));
                } else {
                    self.refund_locally(outstanding, now);
                }
            }
            if !in_redis.is_empty() {
                join_all(in_redis).await;
                // If Redis is down, no refund waits, and other tasks need their turn.
                tokio::task::yield_now().await;
            }
        }
    }

    /// Refunds reservations as they expire, until the future is dropped.
    pub async fn keep_refunding_reservations(&self) {
        loop {
            let next = self.refund_expired_reservations().await;
            let now = self.now();
            let sleep = next.map_or(MAX_SLEEP, |next| next.since(now).min(MAX_SLEEP));
            let sleep = Duration::from_micros(sleep.as_micros());
            let _ = tokio::time::timeout(sleep, self.reservations.added.notified()).await;
        }
    }

    /// Warns once if servers that share a Redis cannot settle the reservations of each other.
    fn warn_of_own_key(&self) {
        static ONCE: Once = Once::new();
        if self.reservations.settings.credential == Password::None {
            ONCE.call_once(|| {
                tracing::warn!(
                    "only this server settles its reservations, until it is restarted; for a fleet, set `reservations.secret_env`; logged once"
                );
            });
        }
    }

    /// Returns the reservations of this server.
    #[must_use]
    pub fn reservations(&self) -> &Reservations {
        &self.reservations
    }

    /// Ends a reservation whose charges only this server knows. Returns the final amount of each
    /// charge.
    fn end_locally(
        &self,
        charges: &OwnedCharges,
        mut receipt: Option<LimiterReceipt>,
        cost: u64,
        now: Timestamp,
    ) -> Vec<u64> {
        let FinalCharges { due, settlements } = FinalCharges::new(charges, cost);
        // Without charges in Redis, settling never waits.
        let charges = charges.as_charges();
        let settled = Store::settle(self, &charges, &mut receipt, &settlements, now);
        debug_assert!(settled.is_ready(), "the charges are in memory");
        due
    }

    /// Charges the part of each final amount in `due` that exceeds the reserved amount. Returns the
    /// largest number of units that the limits of a charge did not admit.
    async fn charge_excess_of(&self, charges: &OwnedCharges, due: &[u64], now: Timestamp) -> u64 {
        let charges = charges.as_charges();
        let mut uncharged = 0;
        for (at, excess) in excess_costs(&charges, due) {
            let charge = Charge {
                cost: excess,
                ..charges[at]
            };
            let charged = charge_excess(self, charge, now).await;
            uncharged = uncharged.max(excess.units() - charged);
        }
        uncharged
    }

    /// Ends a reservation that has expired and whose charges only this server knows.
    fn refund_locally(&self, outstanding: Outstanding, now: Timestamp) {
        let cost = self.cost_of_expired();
        self.end_locally(&outstanding.charges, outstanding.receipt, cost, now);
        self.reservations.expired.fetch_add(1, Ordering::Relaxed);
    }

    /// Returns the final cost of a request whose reservation has expired.
    fn cost_of_expired(&self) -> u64 {
        match self.reservations.settings.on_expiry {
            ReservationExpiry::Refund => 0,
            // Nothing is refunded, and only the slots are released.
            ReservationExpiry::Keep => u64::MAX,
        }
    }

    fn renew_locally(
        &self,
        id: &ReservationId,
        now: Timestamp,
        ttl: Span,
    ) -> Result<Span, ReservationError> {
        // The table stays locked, so that a settlement at the same time finds the reservation.
        let mut table = self.reservations.table();
        let mut outstanding = table.remove(id).ok_or(UNKNOWN)?;
        if outstanding.expires <= now {
            drop(table);
            self.refund_locally(outstanding, now);
            return Err(EXPIRED);
        }
        let lease = outstanding.charges.lease();
        let ttl = lease.map_or(ttl, |lease| ttl.min(lease));
        let mut renewal = Renewal::Held;
        if lease.is_some()
            && let Some(receipt) = &mut outstanding.receipt
        {
            let charges = outstanding.charges.as_charges();
            // Without charges in Redis, a renewal never waits.
            let renewed = Store::renew(self, &charges, receipt, now).ready();
            renewal = renewed.unwrap_or(Renewal::Unknown);
        }
        outstanding.expires = now.after(ttl);
        outstanding.refund_at = outstanding.expires;
        table.insert(*id, outstanding);
        drop(table);
        if ttl < MAX_SLEEP {
            self.reservations.added.notify_one();
        }
        if renewal == Renewal::Lost {
            return Err(LOST);
        }
        Ok(ttl)
    }

    /// Settles a reservation whose charges are in Redis. Returns the number of units of `cost` that
    /// the limits did not admit.
    async fn settle_in_redis(
        &self,
        shared: &SharedReservation,
        id: ReservationId,
        expires: Timestamp,
        cost: u64,
        now: Timestamp,
    ) -> Result<u64, ReservationError> {
        let redis_store = self.redis_store().ok_or(UNKNOWN)?;
        let FinalCharges { due, settlements } = FinalCharges::new(&shared.charges, cost);
        let status = {
            let charges = shared.charges.as_charges();
            let reservation = shared.in_redis(&charges, id, expires);
            let end = ReservationEnd::Settled(cost);
            let ended = redis_store.end_reservation(reservation, &settlements, end, now);
            ended.await.map_err(ReservationError::Unavailable)?
        };
        match status {
            ReservationStatus::Ended => {}
            // An earlier call with the same cost has ended the reservation, and its reply was lost.
            ReservationStatus::EndedBefore(end) if end == ReservationEnd::Settled(cost) => {
                return Ok(0);
            }
            ReservationStatus::EndedBefore(ReservationEnd::Settled(_)) => return Err(SETTLED),
            ReservationStatus::EndedBefore(ReservationEnd::Expired)
            | ReservationStatus::Expired
            | ReservationStatus::Outstanding(_) => return Err(EXPIRED),
        }
        let own = self.reservations.table().remove(&id);
        if let Some(own) = own {
            self.settle_own_share(own, cost, now);
        }
        Ok(self.charge_excess_of(&shared.charges, &due, now).await)
    }

    /// Settles what a reservation in Redis has charged to this server's share.
    fn settle_own_share(&self, own: Outstanding, cost: u64, now: Timestamp) {
        if let (Some(redis_store), Some(LimiterReceipt::Redis(receipt))) =
            (self.redis_store(), own.receipt)
        {
            let settlements = FinalCharges::new(&own.charges, cost).settlements;
            redis_store.settle_own_share(&own.charges.as_charges(), receipt, &settlements, now);
        }
    }

    /// Ends a reservation in Redis that has expired, unless it was settled or renewed.
    async fn refund_in_redis(
        &self,
        id: ReservationId,
        mut outstanding: Outstanding,
        now: Timestamp,
    ) {
        let (Some(redis_store), Some(receipt)) = (
            self.redis_store(),
            redis_receipt(outstanding.receipt.as_ref()),
        ) else {
            return;
        };
        if now.since(outstanding.expires) > MAX_LATENESS {
            self.reservations.lost.fetch_add(1, Ordering::Relaxed);
            return;
        }
        let cost = self.cost_of_expired();
        let settlements = FinalCharges::new(&outstanding.charges, cost).settlements;
        let status = {
            let charges = outstanding.charges.as_charges();
            let reservation = RedisReservation {
                id,
                expires: outstanding.expires,
                charges: &charges,
                receipt,
                former_keys: &[],
            };
            let end = ReservationEnd::Expired;
            let ended = redis_store.end_reservation(reservation, &settlements, end, now);
            ended.await
        };
        match status {
            Ok(ReservationStatus::Ended) => {
                self.reservations.expired.fetch_add(1, Ordering::Relaxed);
                return self.settle_own_share(outstanding, cost, now);
            }
            // Another server has settled the reservation.
            Ok(ReservationStatus::EndedBefore(ReservationEnd::Settled(cost))) => {
                return self.settle_own_share(outstanding, cost, now);
            }
            Ok(ReservationStatus::EndedBefore(_) | ReservationStatus::Expired) => {
                return self.settle_own_share(outstanding, cost, now);
            }
            Ok(ReservationStatus::Outstanding(until)) => {
                outstanding.expires = until;
                outstanding.refund_at = until;
            }
            Err(error) => {
                tracing::debug!("the refund of an expired reservation is tried again: {error}");
                outstanding.refund_at = now.after(RETRY_DELAY);
            }
        }
        self.reservations.insert(id, outstanding, now);
    }

    /// Renews a reservation whose charges are in Redis. Returns its time to live, and its charges
    /// for the new token.
    async fn renew_in_redis(
        &self,
        shared: Vec<SharedCharge>,
        id: ReservationId,
        expires: Timestamp,
        now: Timestamp,
        ttl: Span,
    ) -> Result<(Span, Vec<SharedCharge>), ReservationError> {
        let redis_store = self.redis_store().ok_or(UNKNOWN)?;
        let mut shared = self.shared_reservation(shared);
        let lease = shared.charges.lease();
        let ttl = lease.map_or(ttl, |lease| ttl.min(lease));
        let until = now.after(ttl);
        let list = shared.charges.as_charges();
        let reservation = shared.in_redis(&list, id, expires);
        let renewed = redis_store.renew_reservation(reservation, until, now).await;
        match renewed.map_err(ReservationError::Unavailable)? {
            ReservationStatus::Outstanding(_) => {}
            ReservationStatus::EndedBefore(ReservationEnd::Settled(_)) => return Err(SETTLED),
            ReservationStatus::EndedBefore(ReservationEnd::Expired)
            | ReservationStatus::Expired
            | ReservationStatus::Ended => return Err(EXPIRED),
        }
        if lease.is_some() {
            let mut receipt = shared.receipt.clone();
            let renewed = redis_store.store().renew(&list, &mut receipt).await;
            let renewed = renewed.map_err(ReservationError::Unavailable)?;
            shared.receipt = receipt;
            if renewed == Renewal::Lost {
                return Err(LOST);
            }
        }
        let mut table = self.reservations.table();
        if let Some(mut own) = table.remove(&id) {
            own.expires = until;
            own.refund_at = until;
            if let Some(LimiterReceipt::Redis(own)) = &mut own.receipt {
                own.set_redis(shared.receipt.clone());
            }
            table.insert(id, own);
        }
        drop(table);
        Ok((ttl, shared_charges(&shared.charges, &shared.receipt)))
    }

    /// Returns the charges of a token under the current rules.
    fn shared_reservation(&self, shared: Vec<SharedCharge>) -> SharedReservation {
        let rules = self.rules.load_full();
        let is_former = |charge: &&SharedCharge| rules.rule_of(&charge.charge.key).is_none();
        let former_keys = shared.iter().filter(is_former);
        let former_keys = former_keys
            .map(|charge| charge.charge.key.clone())
            .collect();
        let list = shared
            .into_iter()
            .map(|SharedCharge { charge, receipt }| (charge, receipt));
        let (charges, receipts) = OwnedCharges::of_known_rules(&rules, list);
        SharedReservation {
            charges,
            receipt: RedisReceipt::from_parts(receipts),
            former_keys,
        }
    }
}

/// The charges of a token under the current rules.
struct SharedReservation {
    charges: OwnedCharges,
    receipt: RedisReceipt,
    /// The keys of charges whose rules were removed since.
    former_keys: Vec<Box<[u8]>>,
}

impl SharedReservation {
    fn in_redis<'r>(
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
            former_keys: &self.former_keys,
        }
    }
}

/// What each charge of a reservation finally costs.
struct FinalCharges {
    due: Vec<u64>,
    settlements: Vec<Settlement>,
}

impl FinalCharges {
    /// Returns the final charges of a request with this final cost.
    fn new(charges: &OwnedCharges, cost: u64) -> Self {
        let reserved = || charges.list().iter().map(|charge| charge.cost.units());
        let due: Vec<u64> = charges
            .rules()
            .zip(reserved())
            .map(|(rule, reserved)| final_charge(rule, reserved, cost))
            .collect();
        let settlements = reserved().zip(&due).map(|(reserved, due)| Settlement {
            unused: reserved.saturating_sub(*due),
        });
        Self {
            settlements: settlements.collect(),
            due,
        }
    }
}

/// Returns the final charge of `rule`, which has charged `reserved`, for a request whose final cost
/// is `cost`.
fn final_charge(rule: &Rule, reserved: u64, cost: u64) -> u64 {
    match rule.cost() {
        // Excess slots would be held without a holder.
        CostSource::Request if rule.has_slots() => cost.min(reserved),
        CostSource::Request => cost,
        CostSource::Fixed(_) | CostSource::Entry(_) if cost == 0 => 0,
        CostSource::Fixed(_) | CostSource::Entry(_) => reserved,
    }
}

fn random_id() -> ReservationId {
    let mut id = ReservationId::default();
    if SystemRandom::new().fill(&mut id).is_err() {
        // The id only has to be unique, because tokens are sealed.
        let unique = u128::from_str_radix(&tidegate_redis::random_server_id(), 16);
        id = unique.unwrap_or_default().to_be_bytes();
    }
    id
}

/// Returns the receipt of charges in Redis, if the charges are in Redis.
fn redis_receipt(receipt: Option<&LimiterReceipt>) -> Option<&RedisReceipt> {
    match receipt? {
        LimiterReceipt::Memory(_) => None,
        LimiterReceipt::Redis(receipt) => receipt.redis(),
    }
}

fn token_charges(charges: &OwnedCharges, receipt: Option<&LimiterReceipt>) -> TokenCharges {
    match (receipt, redis_receipt(receipt)) {
        (None, _) => TokenCharges::None,
        (Some(_), None) => TokenCharges::OnServer,
        (_, Some(receipt)) => TokenCharges::InRedis(shared_charges(charges, receipt)),
    }
}

fn shared_charges(charges: &OwnedCharges, receipt: &RedisReceipt) -> Vec<SharedCharge> {
    let charges = charges.list().iter().zip(receipt.parts());
    charges
        .map(|(charge, receipt)| SharedCharge {
            charge: charge.clone(),
            receipt: receipt.clone(),
        })
        .collect()
}
