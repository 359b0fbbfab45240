//! Kuadrant's rate limit service: checks without counting, reports without checking, and
//! reservations.
//!
//! ```text
//! CheckRateLimit   peek      would one more hit be admitted?
//! Report           charge    on limits that count everything, one counter at a time
//! Reserve          reserve   on limits that count no denied hits, all counters or none
//! Commit           settle    the reserved units, then report the rest of the actual amount
//! ```
//!
//! A request uses the same counters as in `ShouldRateLimit`. If two descriptors share a counter, it
//! is charged once. The limiter's module `reservations` determines when a reservation ends.

use std::{
    collections::{HashMap, HashSet},
    sync::Arc,
    time::Duration,
};

use futures_util::future::join_all;
use tidegate_config::envoy::StoreFailure;
use tidegate_core::{
    Charge, Cost, Decision, Effect, Limits, Source as DecidedBy, Span,
    bounds::{MAX_CHARGES, MAX_COUNT},
};
use tidegate_limiter::{
    metrics::ListenerKind,
    reservations::{
        CounterCharge, CounterSettlement, ReservationError, ReserveError, ReservedCounters,
        SettledCounter,
    },
};
use tokio::sync::oneshot;
use tracing::Instrument as _;

use super::{
    Code, Descriptor, HitCounterKind, RateLimitAnswer, RateLimitRequest, RateLimitService,
    RlsError,
    all_or_nothing::split_by_charge,
    applied_limit::{AppliedLimit, DescriptorMatch, Hits, LimitResult},
    evaluate::{Evaluator, applied_limits},
    over_limit_cache::OverLimitCache,
    rules::Domains,
    service::{drop_replaced, hits as hits_of, trace_outcome},
};

/// The maximum time for which `Reserve` holds an amount.
const MAX_TTL: Span = Span::from_secs(60);

/// A request to reserve an amount.
#[derive(Clone, Debug, Default)]
pub struct ReserveRequest {
    /// The domain whose rules apply.
    pub domain: String,
    /// The descriptors, which select the counters.
    pub descriptors: Vec<Descriptor>,
    /// The amount. An amount of 0 holds nothing.
    pub amount: u64,
    /// The time until the reservation expires; the maximum if it is `None` or zero.
    pub ttl: Option<Span>,
}

/// A request to settle a reservation.
#[derive(Clone, Debug, Default)]
pub struct CommitRequest {
    /// The domain whose rules apply.
    pub domain: String,
    /// The descriptors, which select the counters.
    pub descriptors: Vec<Descriptor>,
    /// The reservation ID. With an empty or unknown ID, the actual amount is counted as by
    /// `Report`.
    pub reservation_id: String,
    /// The amount that was used.
    pub actual_amount: u64,
}

/// The result of `Reserve`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReserveResult {
    /// Whether the amount was admitted.
    pub code: Code,
    /// The reservation ID; empty if nothing is held.
    pub reservation_id: String,
}

/// The requested amount, and how long to hold it.
#[derive(Clone, Copy, Debug)]
struct HeldAmount {
    amount: u64,
    ttl: Span,
}

impl ReserveRequest {
    fn split(self) -> (RateLimitRequest, HeldAmount) {
        let request = RateLimitRequest {
            domain: self.domain,
            descriptors: self.descriptors,
            hits_addend: 0,
        };
        let ttl = self.ttl.filter(|ttl| *ttl > Span::ZERO);
        let amount = HeldAmount {
            amount: self.amount,
            ttl: ttl.map_or(MAX_TTL, |ttl| ttl.min(MAX_TTL)),
        };
        (request, amount)
    }
}

impl RateLimitService {
    /// Returns whether one more hit would be admitted, and does not count the hit.
    ///
    /// # Errors
    ///
    /// Returns an [`RlsError`] if the request cannot be decided.
    pub async fn check_rate_limit(
        &self,
        listener: ListenerKind,
        request: &RateLimitRequest,
        within: Option<Duration>,
    ) -> Result<RateLimitAnswer, RlsError> {
        let one = Hits::Charge(Cost::ONE);
        let checked = self.check_hits(listener, request, one, within).await;
        self.note_error(checked)
    }

    /// Returns whether every counter of `request` would admit `hits`.
    pub(super) async fn check_hits(
        &self,
        listener: ListenerKind,
        request: &RateLimitRequest,
        hits: Hits,
        within: Option<Duration>,
    ) -> Result<RateLimitAnswer, RlsError> {
        let domains = self.loaded_domains()?;
        let mut matches = self.counters_in(&domains, request, Some(hits))?;
        let evaluator = self.evaluator(within);
        let each = applied_limits(&mut matches).map(|applied| evaluator.peek_one(applied));
        join_all(each)
            .await
            .into_iter()
            .collect::<Result<(), _>>()?;
        let mut answer = self.answer(request, &matches, evaluator.now);
        self.observe_denials(listener, request, &matches, &answer, evaluator.now);
        let domain = domains.get(&request.domain);
        if domain.is_some_and(|domain| !domain.limitador.is_empty()) {
            // Remove the statuses, as in `decide_by_limits`: each status is for a limit and not for
            // a descriptor.
            answer.statuses.clear();
        }
        trace_outcome(listener, answer.overall_code, answer.statuses.len());
        Ok(answer)
    }

    /// Counts the hits of `request`, even if they exceed a limit.
    ///
    /// # Errors
    ///
    /// Returns an [`RlsError`] if the request cannot be counted.
    pub async fn report(
        &self,
        request: &RateLimitRequest,
        within: Option<Duration>,
    ) -> Result<(), RlsError> {
        let reported = self.report_hits(request, None, within).await;
        self.note_error(reported)
    }

    /// Charges `hits` to each counter of `request`. If `hits` is `None`, charges the hits in
    /// `request`.
    pub(super) async fn report_hits(
        &self,
        request: &RateLimitRequest,
        hits: Option<Hits>,
        within: Option<Duration>,
    ) -> Result<(), RlsError> {
        let domains = self.loaded_domains()?;
        let mut matches = self.counters_in(&domains, request, hits)?;
        self.evaluator(within).report_each(&mut matches).await
    }

    /// Reserves an amount on all counters of `request`, or on none of them. On each counter, at
    /// most half of the limit is held, rounded up. The reservation lasts at most a minute, and ends
    /// at the latest when the first of the counters' fixed windows ends.
    ///
    /// # Errors
    ///
    /// Returns an [`RlsError`] if the request cannot be decided.
    pub async fn reserve(
        self: &Arc<Self>,
        listener: ListenerKind,
        request: ReserveRequest,
        within: Option<Duration>,
    ) -> Result<ReserveResult, RlsError> {
        let reserved = if self.limiter.redis_store().is_some() {
            self.reserve_in_task(listener, request, within).await
        } else {
            // The memory store never waits, so the call cannot be cancelled before it has finished.
            let (request, amount) = request.split();
            self.reserve_matches(listener, &request, amount, within)
                .await
        };
        self.note_error(reserved)
    }

    /// Makes the reservation in a task that keeps running if the call is cancelled. If the caller
    /// no longer waits for the result, the task releases the amount.
    async fn reserve_in_task(
        self: &Arc<Self>,
        listener: ListenerKind,
        request: ReserveRequest,
        within: Option<Duration>,
    ) -> Result<ReserveResult, RlsError> {
        let (caller, result) = oneshot::channel();
        let service = Arc::clone(self);
        let task = async move {
            let (request, amount) = request.split();
            let reserved = service.reserve_matches(listener, &request, amount, within);
            if let Err(Ok(abandoned)) = caller.send(reserved.await) {
                // If Redis does not reply, ignore the error, because the reservation expires.
                let id = &abandoned.reservation_id;
                let _ = service.commit_matches(&request, id, 0, within).await;
            }
        };
        tokio::spawn(task.in_current_span());
        // The task always sends a result, unless the server shuts down.
        result.await.unwrap_or(Err(RlsError::Store))
    }

    async fn reserve_matches(
        &self,
        listener: ListenerKind,
        request: &RateLimitRequest,
        HeldAmount { amount, ttl }: HeldAmount,
        within: Option<Duration>,
    ) -> Result<ReserveResult, RlsError> {
        if self.limiter.reservations().are_off() {
            return Err(RlsError::ReservationsOff);
        }
        let domains = self.loaded_domains()?;
        let mut matches = self.counters_in(&domains, request, None)?;
        let evaluator = self.evaluator(within);
        let (is_admitted, reservation_id) = match Cost::new(amount.min(MAX_COUNT)) {
            Ok(amount) => self.hold(&evaluator, &mut matches, amount, ttl).await?,
            // Nothing is held for an amount of 0.
            Err(_) => {
                let each = applied_limits(&mut matches).map(|applied| evaluator.look_at(applied));
                join_all(each)
                    .await
                    .into_iter()
                    .collect::<Result<(), _>>()?;
                let denies = |applied: &mut AppliedLimit<'_>| {
                    applied.result.over && !applied.limits().is_shadow()
                };
                (!applied_limits(&mut matches).any(denies), String::new())
            }
        };
        let answer = self.answer(request, &matches, evaluator.now);
        self.observe_denials(listener, request, &matches, &answer, evaluator.now);
        let code = if is_admitted || self.settings.shadow_mode {
            Code::Ok
        } else {
            Code::OverLimit
        };
        trace_outcome(listener, code, matches.len());
        Ok(ReserveResult {
            code,
            reservation_id,
        })
    }

    /// Reserves `amount` on all counters in `matches`, or on none of them. Returns whether the
    /// amount was admitted, and the reservation ID.
    async fn hold(
        &self,
        evaluator: &Evaluator<'_>,
        matches: &mut [DescriptorMatch<'_>],
        amount: Cost,
        ttl: Span,
    ) -> Result<(bool, String), RlsError> {
        let mut charges = Vec::new();
        for applied in applied_limits(matches) {
            let cost = held_cost(applied.limits(), amount);
            applied.hits = Hits::Charge(cost);
            charges.push(CounterCharge {
                key: applied.key.as_slice().into(),
                limits: Arc::clone(&applied.limits.variants().held),
                cost,
            });
        }
        if charges.is_empty() {
            return Ok((true, String::new()));
        }
        if charges.len() > MAX_CHARGES {
            let problem = format!(
                "{} counters exceed the maximum of {MAX_CHARGES} per reservation",
                charges.len()
            );
            return Err(RlsError::invalid("descriptors", problem));
        }
        let reserved = self
            .limiter
            .reserve_counters(&charges, ttl, evaluator.within());
        let ReservedCounters {
            decided,
            outcomes,
            reservation,
        } = reserved.await.map_err(not_reserved)?;
        let token = reservation.map(|reservation| reservation.token);
        let is_fallback = matches!(decided.source, DecidedBy::Local | DecidedBy::Policy);
        if is_fallback && self.settings.store_failure == StoreFailure::Error {
            if let Some(token) = token {
                self.release(&token, &charges).await;
            }
            return Err(RlsError::Store);
        }
        let list: Vec<Charge<'_>> = charges.iter().map(CounterCharge::as_charge).collect();
        for (applied, own) in applied_limits(matches).zip(split_by_charge(&list, &outcomes)) {
            applied.result = LimitResult::of_charge(&decided.decision, own);
        }
        let is_admitted = decided.decision == Decision::Admitted;
        if !is_admitted {
            // For an admitted reservation, the metrics are updated at the commit.
            evaluator.count(matches, &Ok(()));
        }
        Ok((is_admitted, token.unwrap_or_default()))
    }

    /// Releases a reservation that this server has made on its own share of the limits.
    async fn release(&self, token: &str, charges: &[CounterCharge]) {
        let limits_of = |key: &[u8]| {
            let charge = charges.iter().find(|charge| *charge.key == *key)?;
            Some(Arc::clone(&charge.limits))
        };
        // If Redis does not reply, ignore the error, because the reservation expires.
        let _ = self.limiter.settle_counters(token, limits_of, 0).await;
    }

    /// Counts the actual amount, and releases the reservation. The actual amount is counted even if
    /// it exceeds a limit, and even if the reservation has expired or is unknown. If the
    /// reservation has already been committed, the amount is not counted again. Returns whether the
    /// reservation was released.
    ///
    /// # Errors
    ///
    /// Returns an [`RlsError`] if the request cannot be counted. After [`RlsError::Store`] and
    /// [`RlsError::Moved`], the caller may repeat the call. If the reservation was released before
    /// the error, and the actual amount exceeds the reserved amount, the excess is never counted,
    /// not even by the repeated call.
    pub async fn commit(
        self: &Arc<Self>,
        request: CommitRequest,
        within: Option<Duration>,
    ) -> Result<bool, RlsError> {
        let CommitRequest {
            domain,
            descriptors,
            reservation_id: id,
            actual_amount: actual,
        } = request;
        let request = RateLimitRequest {
            domain,
            descriptors,
            hits_addend: 0,
        };
        if self.limiter.redis_store().is_none() {
            let committed = self.commit_matches(&request, &id, actual, within).await;
            return self.note_error(committed);
        }
        // The task keeps running if the call is cancelled. If the task ended with the call, a
        // cancellation between the settlement and the report would lose part of the amount.
        let service = Arc::clone(self);
        let task = async move { service.commit_matches(&request, &id, actual, within).await };
        let committed = tokio::spawn(task.in_current_span()).await;
        self.note_error(committed.unwrap_or(Err(RlsError::Store)))
    }

    async fn commit_matches(
        &self,
        request: &RateLimitRequest,
        reservation_id: &str,
        actual: u64,
        within: Option<Duration>,
    ) -> Result<bool, RlsError> {
        if self.limiter.reservations().are_off() {
            return Err(RlsError::ReservationsOff);
        }
        let actual = actual.min(MAX_COUNT);
        let domains = self.loaded_domains()?;
        let mut matches = self.counters_in(&domains, request, None)?;
        let settled = match self.settle(&mut matches, reservation_id, actual).await? {
            CounterSettlement::Settled(settled) => Some(settled),
            CounterSettlement::SettledBefore => return Ok(false),
            CounterSettlement::NotOutstanding => None,
        };
        let is_released = settled.is_some();
        let charged: HashMap<Box<[u8]>, u64> = settled
            .into_iter()
            .flatten()
            .map(|SettledCounter { key, charged }| (key, charged))
            .collect();
        for applied in applied_limits(&mut matches) {
            let charged = charged.get(applied.key.as_slice()).copied().unwrap_or(0);
            applied.counters.add(HitCounterKind::TotalHits, charged);
            applied.counters.add(HitCounterKind::WithinLimit, charged);
            let rest = Cost::new(actual.saturating_sub(charged));
            applied.hits = rest.map_or(Hits::None, Hits::Charge);
        }
        self.evaluator(within).report_each(&mut matches).await?;
        Ok(is_released)
    }

    /// Settles the reservation on the counters in `matches` with the `actual` amount.
    async fn settle(
        &self,
        matches: &mut [DescriptorMatch<'_>],
        reservation_id: &str,
        actual: u64,
    ) -> Result<CounterSettlement, RlsError> {
        if reservation_id.is_empty() {
            return Ok(CounterSettlement::NotOutstanding);
        }
        let held: HashMap<&[u8], &Arc<Limits>> = applied_limits(matches)
            .map(|applied| (applied.key.as_slice(), &applied.limits.variants().held))
            .collect();
        // As with a refund, guards remove the keys from the over-limit cache, even if the call is
        // cancelled.
        let mut invalidated = Vec::new();
        if let Some(cache) = &self.over {
            invalidated.extend(held.keys().map(|key| cache.invalidate_on_drop(key)));
        }
        let limits_of = |key: &[u8]| held.get(key).map(|limits| Arc::clone(limits));
        let settled = self
            .limiter
            .settle_counters(reservation_id, limits_of, actual);
        let settled = settled.await.map_err(|error| match error {
            ReservationError::Moved => RlsError::Moved,
            _ => RlsError::Store,
        });
        drop(invalidated);
        settled
    }

    pub(super) fn loaded_domains(&self) -> Result<Arc<Domains>, RlsError> {
        self.domains.load_full().ok_or(RlsError::NoConfiguration)
    }

    /// Returns the counter of each descriptor of `request`. If the domain's limits come from a
    /// Limitador limits file, returns the counter of each limit that applies instead. If two
    /// descriptors have the same counter, the second descriptor gets no counter. The hits for each
    /// counter are `hits` or, if `hits` is `None`, the hits in the request.
    pub(super) fn counters_in<'d>(
        &self,
        domains: &'d Domains,
        request: &RateLimitRequest,
        hits: Option<Hits>,
    ) -> Result<Vec<DescriptorMatch<'d>>, RlsError> {
        request.check_bounds()?;
        let cleared = self.over.as_ref().map_or(0, OverLimitCache::cleared);
        let Some(domain) = domains.get(&request.domain) else {
            self.count_unknown_domain(request);
            let none = request.descriptors.iter().map(|_| DescriptorMatch::NoLimit);
            return Ok(none.collect());
        };
        if !domain.limitador.is_empty() {
            let hits = hits.unwrap_or_else(|| hits_of(request, &Descriptor::default()));
            return Ok(self.match_limits(domains, domain, request, hits, cleared));
        }
        let mut matches = Vec::with_capacity(request.descriptors.len());
        for (at, descriptor) in request.descriptors.iter().enumerate() {
            matches.push(self.match_descriptor(domains, domain, request, at, descriptor, cleared)?);
        }
        drop_replaced(&mut matches);
        let mut keys = HashSet::new();
        for matched in &mut matches {
            if let DescriptorMatch::Limited(applied) = matched
                && !keys.insert(applied.key.clone())
            {
                *matched = DescriptorMatch::NoLimit;
            }
        }
        if let Some(hits) = hits {
            applied_limits(&mut matches).for_each(|applied| applied.hits = hits);
        }
        Ok(matches)
    }

    pub(super) fn note_error<T>(&self, result: Result<T, RlsError>) -> Result<T, RlsError> {
        if result.is_err() {
            self.count_error();
        }
        result
    }
}

impl Evaluator<'_> {
    /// Queries whether a counter would admit its hits, and stores the result in `applied`.
    async fn peek_one(&self, applied: &mut AppliedLimit<'_>) -> Result<(), RlsError> {
        let Hits::Charge(cost) = applied.hits else {
            return self.look_at(applied).await;
        };
        if let Some(until) = self.cached_over_until(applied) {
            applied.result = LimitResult::cached(until);
            return Ok(());
        }
        let charge = applied.charge(cost);
        let (decided, outcomes) = self.query_store(&[charge], Effect::Peek).await?;
        applied.result = LimitResult::of_charge(&decided.decision, &outcomes);
        Ok(())
    }

    /// Queries whether a counter's count exceeds its limit, and stores the result in `applied`.
    async fn look_at(&self, applied: &mut AppliedLimit<'_>) -> Result<(), RlsError> {
        applied.hits = Hits::None;
        let charge = applied.charge(Cost::ONE);
        let (_, outcomes) = self.query_store(&[charge], Effect::Look).await?;
        applied.result = LimitResult::of_query(&outcomes);
        Ok(())
    }

    /// Charges each counter with its hits, even beyond its limit.
    async fn report_each(&self, matches: &mut [DescriptorMatch<'_>]) -> Result<(), RlsError> {
        let each = applied_limits(matches).map(|applied| self.report_one(applied));
        let reported = join_all(each).await.into_iter().collect();
        self.count(matches, &reported);
        reported
    }

    async fn report_one(&self, applied: &mut AppliedLimit<'_>) -> Result<(), RlsError> {
        let (cost, effect) = match applied.hits {
            Hits::None => return Ok(()),
            Hits::Charge(cost) => (cost, Effect::Charge),
            Hits::Refund(cost) => (cost, Effect::Refund),
        };
        let _invalidated = match (self.over, effect) {
            (Some(cache), Effect::Refund) => Some(cache.invalidate_on_drop(&applied.key)),
            _ => None,
        };
        let charge = applied.charge_on(&applied.limits.variants().reported, cost);
        let (decided, outcomes) = self.query_store(&[charge], effect).await?;
        applied.result = match effect {
            Effect::Refund => LimitResult {
                over: false,
                ..LimitResult::of_query(&outcomes)
            },
            _ => LimitResult::of_charge(&decided.decision, &outcomes),
        };
        Ok(())
    }
}

/// Returns the number of units to hold on a counter for `amount`. The result is at most half of the
/// counter's smallest limit, rounded up, and at least one unit.
fn held_cost(limits: &Limits, amount: Cost) -> Cost {
    let smallest = limits.iter().map(tidegate_core::Limit::quota).min();
    let half = smallest.unwrap_or(0).div_ceil(2);
    Cost::new(amount.units().min(half)).unwrap_or(Cost::ONE)
}

fn not_reserved(error: ReserveError) -> RlsError {
    match error {
        ReserveError::TooMany(0) => RlsError::ReservationsOff,
        ReserveError::TooMany(max) => RlsError::TooManyReservations(max),
        ReserveError::Request(error) => RlsError::invalid("descriptors", error.to_string()),
    }
}
