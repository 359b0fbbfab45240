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
//! [`MAX_LATENESS`] does not refund, because Redis no longer knows whether the reservation was
//! settled.

mod table;
mod token;

use std::{
    fmt,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, AtomicUsize, Ordering},
    },
    time::Duration,
};

use ring::rand::{SecureRandom as _, SystemRandom};
use tidegate::rate_limiter::{OwnedCharges, charge_excess, excess_costs, stretch};
use tidegate_config::{ReservationExpiry, ReservationsConfig};
use tidegate_core::{
    Charge, CostSource, Effect, Renewal, Request, RequestError, Rule, RuleSet, Scratch, Settlement,
    Span, Store, StoreRequest, Timestamp, Verdict,
};
use tidegate_net::prometheus::{self, Metric, Page};
use tidegate_redis::{
    RedisReceipt, RedisReservation, ReservationEnd, ReservationStatus, StoreError,
};
use tokio::sync::Notify;

pub use self::token::NoTokenKey;
use self::{
    table::{Outstanding, OutstandingTable, Permit},
    token::{ReservationId, SharedCharge, TokenContents, TokenKeys},
};
use crate::{LimiterReceipt, ServerLimiter};

/// How late a server may refund a reservation that has expired. Redis keeps guards for longer.
const MAX_LATENESS: Span = Span::from_secs(30);

/// The delay before a refund that Redis has not answered is tried again.
const RETRY_DELAY: Span = Span::from_secs(1);

/// The time to live of a reservation for which the caller gives none.
pub const DEFAULT_TTL: Span = Span::from_secs(60);

/// The longest time for which the task that refunds expired reservations sleeps.
const MAX_SLEEP: Duration = Duration::from_secs(1);

const OUTSTANDING: Metric = Metric::gauge(
    "tidegate_reservations_outstanding",
    [],
    "Reservations of this server that were neither settled nor have expired.",
);

const ENDED: Metric<1> = Metric::counter(
    "tidegate_reservations_ended_total",
    ["by"],
    "Reservations that this server has ended: because their holder settled them (`settle`), or because they expired (`expiry`).",
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

    fn insert(&self, id: ReservationId, outstanding: Outstanding) {
        self.table().insert(id, outstanding);
        self.added.notify_one();
    }

    pub(crate) fn collect(&self, page: &mut Page<'_>) {
        let outstanding = self.permits.load(Ordering::Relaxed);
        page.single(&OUTSTANDING, prometheus::count(outstanding));
        let ended = [("settle", &self.settled), ("expiry", &self.expired)];
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
                "Redis did not answer in time; repeat the call, which takes effect once"
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

/// The reason why reservations are not possible, with advice.
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

const ENDED_BEFORE: ReservationError =
    ReservationError::NotOutstanding("was settled before, or has expired");
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
            shared: shared_charges(&charges, receipt.as_ref()),
        };
        let outstanding = Outstanding {
            charges,
            receipt,
            expires,
            refund_at: expires,
            _permit: permit,
        };
        self.reservations.insert(contents.id, outstanding);
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
    /// dropped while it waits for Redis, the call may be repeated.
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
        let contents = contents.ok_or(ReservationError::Invalid)?;
        let now = self.now();
        let reserved = contents.cost.units();
        let uncharged = if contents.shared.is_empty() {
            let outstanding = self.reservations.table().remove(&contents.id);
            let outstanding = outstanding.ok_or(UNKNOWN)?;
            if outstanding.expires <= now {
                self.refund_locally(outstanding, now);
                return Err(EXPIRED);
            }
            self.settle_locally(outstanding, cost, now)
        } else {
            self.settle_in_redis(contents, cost, now).await?
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
        let expires_in = if contents.shared.is_empty() {
            self.renew_locally(&contents.id, now, ttl)?
        } else {
            self.renew_in_redis(&mut contents, now, ttl).await?
        };
        contents.expires = now.after(expires_in);
        Ok(Reservation {
            token: self.reservations.keys.seal(&contents),
            expires_in,
        })
    }

    /// Refunds the reservations that have expired. Returns the instant at which the next one
    /// expires.
    pub async fn refund_expired_reservations(&self) -> Option<Timestamp> {
        loop {
            let now = self.now();
            let due = self.reservations.table().remove_due(now);
            let Some((id, outstanding)) = due else {
                return self.reservations.table().next_refund();
            };
            if is_in_redis(outstanding.receipt.as_ref()) {
                self.refund_in_redis(id, outstanding, now).await;
            } else {
                self.refund_locally(outstanding, now);
            }
        }
    }

    /// Refunds reservations as they expire, until the future is dropped.
    pub async fn keep_refunding_reservations(&self) {
        loop {
            let next = self.refund_expired_reservations().await;
            let now = self.now();
            let sleep = next.map(|next| Duration::from_micros(next.since(now).as_micros()));
            let sleep = sleep.unwrap_or(MAX_SLEEP).min(MAX_SLEEP);
            let _ = tokio::time::timeout(sleep, self.reservations.added.notified()).await;
        }
    }

    /// Returns the reservations of this server.
    #[must_use]
    pub fn reservations(&self) -> &Reservations {
        &self.reservations
    }

    /// Settles a reservation whose charges only this server knows. Returns the number of units of
    /// `cost` that the limits did not admit.
    fn settle_locally(&self, outstanding: Outstanding, cost: u64, now: Timestamp) -> u64 {
        let Outstanding {
            charges,
            mut receipt,
            ..
        } = outstanding;
        let final_charges = FinalCharges::new(&charges, cost);
        let list = charges.as_charges();
        // Without charges in Redis, settling never waits.
        let settled = Store::settle(self, &list, &mut receipt, &final_charges.settlements, now);
        debug_assert!(settled.is_ready(), "the charges are in memory");
        let mut uncharged = 0;
        for (at, excess) in excess_costs(&list, &final_charges.due) {
            let charge = Charge {
                cost: excess,
                ..list[at]
            };
            let charged = charge_excess(self, charge, now).ready().unwrap_or_default();
            uncharged = uncharged.max(excess.units() - charged);
        }
        uncharged
    }

    /// Refunds a reservation that has expired and whose charges only this server knows.
    fn refund_locally(&self, outstanding: Outstanding, now: Timestamp) {
        self.reservations.expired.fetch_add(1, Ordering::Relaxed);
        if self.reservations.settings.on_expiry == ReservationExpiry::Charge {
            return;
        }
        self.settle_locally(outstanding, 0, now);
    }

    fn renew_locally(
        &self,
        id: &ReservationId,
        now: Timestamp,
        ttl: Span,
    ) -> Result<Span, ReservationError> {
        let mut outstanding = self.reservations.table().remove(id).ok_or(UNKNOWN)?;
        if outstanding.expires <= now {
            self.refund_locally(outstanding, now);
            return Err(EXPIRED);
        }
        let lease = outstanding.charges.lease();
        let ttl = lease.map_or(ttl, |lease| ttl.min(lease));
        if lease.is_some()
            && let Some(receipt) = &mut outstanding.receipt
        {
            let charges = outstanding.charges.as_charges();
            let renewal = Store::renew(self, &charges, receipt, now).ready();
            if renewal == Some(Renewal::Lost) {
                tracing::debug!("a reservation was renewed too late and lost its slot");
            }
        }
        outstanding.expires = now.after(ttl);
        outstanding.refund_at = outstanding.expires;
        self.reservations.insert(*id, outstanding);
        Ok(ttl)
    }

    /// Settles a reservation whose charges are in Redis. Returns the number of units of `cost` that
    /// the limits did not admit.
    async fn settle_in_redis(
        &self,
        contents: TokenContents,
        cost: u64,
        now: Timestamp,
    ) -> Result<u64, ReservationError> {
        let Some(redis_store) = self.redis_store() else {
            return Err(UNKNOWN);
        };
        let reservation = redis_reservation(&contents);
        let (charges, receipt) = self.charges_of_token(contents.shared);
        let final_charges = FinalCharges::new(&charges, cost);
        let list = charges.as_charges();
        let status = redis_store
            .end_reservation(
                &list,
                &receipt,
                &final_charges.settlements,
                reservation,
                ReservationEnd::Settle,
                now,
            )
            .await
            .map_err(ReservationError::Unavailable)?;
        match status {
            ReservationStatus::Ended => {}
            ReservationStatus::Expired => return Err(EXPIRED),
            ReservationStatus::EndedBefore | ReservationStatus::Outstanding(_) => {
                return Err(ENDED_BEFORE);
            }
        }
        let own = self.reservations.table().remove(&reservation.id);
        if let Some(own) = own
            && let Some(LimiterReceipt::Redis(receipt)) = own.receipt
        {
            let settlements = FinalCharges::new(&own.charges, cost).settlements;
            redis_store.settle_own_share(&own.charges.as_charges(), receipt, &settlements, now);
        }
        let mut uncharged = 0;
        for (at, excess) in excess_costs(&list, &final_charges.due) {
            let charge = Charge {
                cost: excess,
                ..list[at]
            };
            let charged = charge_excess(self, charge, now).await;
            uncharged = uncharged.max(excess.units() - charged);
        }
        Ok(uncharged)
    }

    /// Refunds a reservation in Redis that has expired, unless it was settled or renewed.
    async fn refund_in_redis(
        &self,
        id: ReservationId,
        mut outstanding: Outstanding,
        now: Timestamp,
    ) {
        let (Some(redis_store), Some(LimiterReceipt::Redis(receipt))) =
            (self.redis_store(), outstanding.receipt.take())
        else {
            return;
        };
        let Some(in_redis) = receipt.redis() else {
            return;
        };
        let expires = outstanding.expires;
        if now.since(expires) > MAX_LATENESS {
            tracing::debug!("a reservation stays charged, because its refund would be too late");
            return;
        }
        let cost = match self.reservations.settings.on_expiry {
            ReservationExpiry::Refund => 0,
            // All charges stay, but the guard records that the reservation has ended.
            ReservationExpiry::Charge => u64::MAX,
        };
        let settlements = FinalCharges::new(&outstanding.charges, cost).settlements;
        let charges = outstanding.charges.as_charges();
        let status = redis_store
            .end_reservation(
                &charges,
                in_redis,
                &settlements,
                RedisReservation { id, expires },
                ReservationEnd::Expire,
                now,
            )
            .await;
        outstanding.refund_at = match status {
            Ok(ReservationStatus::Ended) => {
                self.reservations.expired.fetch_add(1, Ordering::Relaxed);
                redis_store.settle_own_share(&charges, receipt, &settlements, now);
                return;
            }
            Ok(ReservationStatus::Outstanding(until)) => {
                outstanding.expires = until;
                until
            }
            Ok(ReservationStatus::EndedBefore | ReservationStatus::Expired) => return,
            Err(error) => {
                tracing::debug!("the refund of an expired reservation is tried again: {error}");
                now.after(RETRY_DELAY)
            }
        };
        outstanding.receipt = Some(LimiterReceipt::Redis(receipt));
        self.reservations.insert(id, outstanding);
    }

    async fn renew_in_redis(
        &self,
        contents: &mut TokenContents,
        now: Timestamp,
        ttl: Span,
    ) -> Result<Span, ReservationError> {
        let Some(redis_store) = self.redis_store() else {
            return Err(UNKNOWN);
        };
        let reservation = redis_reservation(contents);
        let shared = std::mem::take(&mut contents.shared);
        let (charges, mut receipt) = self.charges_of_token(shared);
        let lease = charges.lease();
        let ttl = lease.map_or(ttl, |lease| ttl.min(lease));
        let until = now.after(ttl);
        let list = charges.as_charges();
        let status = redis_store
            .extend_reservation(&list, reservation, until, now)
            .await
            .map_err(ReservationError::Unavailable)?;
        match status {
            ReservationStatus::Outstanding(_) => {}
            ReservationStatus::Expired => return Err(EXPIRED),
            ReservationStatus::EndedBefore | ReservationStatus::Ended => return Err(ENDED_BEFORE),
        }
        if lease.is_some() {
            let renewed = redis_store.store().renew(&list, &mut receipt).await;
            renewed.map_err(ReservationError::Unavailable)?;
        }
        drop(list);
        contents.shared = shared_charges_of(&charges, &receipt);
        let mut table = self.reservations.table();
        if let Some(mut own) = table.remove(&contents.id) {
            own.expires = until;
            own.refund_at = until;
            if let Some(LimiterReceipt::Redis(own)) = &mut own.receipt {
                own.set_redis(receipt);
            }
            table.insert(contents.id, own);
        }
        Ok(ttl)
    }

    /// Returns the charges of a token under the current rules. Charges of rules that were removed
    /// are left out.
    fn charges_of_token(&self, shared: Vec<SharedCharge>) -> (OwnedCharges, RedisReceipt) {
        let rules = self.rules.load_full();
        let list = shared
            .into_iter()
            .map(|SharedCharge { charge, receipt }| (charge, receipt));
        let (charges, receipts) = OwnedCharges::of_known_rules(&rules, list);
        (charges, RedisReceipt::from_parts(receipts))
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

fn redis_reservation(contents: &TokenContents) -> RedisReservation {
    RedisReservation {
        id: contents.id,
        expires: contents.expires,
    }
}

fn is_in_redis(receipt: Option<&LimiterReceipt>) -> bool {
    redis_receipt(receipt).is_some()
}

/// Returns the receipt of charges in Redis, if the charges are in Redis.
fn redis_receipt(receipt: Option<&LimiterReceipt>) -> Option<&RedisReceipt> {
    match receipt? {
        LimiterReceipt::Memory(_) => None,
        LimiterReceipt::Redis(receipt) => receipt.redis(),
    }
}

/// Returns the charges that a token contains: none if they are not in Redis.
fn shared_charges(charges: &OwnedCharges, receipt: Option<&LimiterReceipt>) -> Vec<SharedCharge> {
    redis_receipt(receipt).map_or_else(Vec::new, |receipt| shared_charges_of(charges, receipt))
}

fn shared_charges_of(charges: &OwnedCharges, receipt: &RedisReceipt) -> Vec<SharedCharge> {
    let charges = charges.list().iter().zip(receipt.parts());
    charges
        .map(|(charge, receipt)| SharedCharge {
            charge: charge.clone(),
            receipt: receipt.clone(),
        })
        .collect()
}
