//! Applies the limits of a Limitador limits file to requests, and implements the endpoints of
//! Limitador's HTTP API.
//!
//! A request is charged either to all limits in its namespace that apply to the request, or to none
//! of them. A denied request is not counted.

use tidegate_core::{Charge, Cost, DESCRIPTOR_KEY, Effect, KeyCursor, Span, bounds::MAX_COUNT};
use tidegate_limiter::metrics::ListenerKind;

use super::{
    Code, Descriptor, RateLimitAnswer, RateLimitRequest, RateLimitService, RlsError,
    applied_limit::{AppliedLimit, DescriptorMatch, Hits, LimitSource},
    evaluate::applied_limits,
    key,
    rules::{Allowance, Domain, Domains, RuleLimits, limitador::LimitadorLimit},
    service::trace_outcome,
};

/// The maximum number of counters in a response of `/counters/{namespace}`.
pub(crate) const MAX_COUNTERS: usize = 1_000;

/// A list of counters reads at most this number of key pages for each window length. To read a
/// page, the store visits about 16,384 of its slots.
const MAX_PAGES: usize = 4_096;

/// A request to Limitador's HTTP API.
#[derive(Clone, Debug, Default)]
pub(crate) struct HttpRequest {
    pub(crate) namespace: String,
    /// The entries of the request's only descriptor.
    pub(crate) values: Vec<(String, String)>,
    pub(crate) delta: u64,
}

/// The response to `/check_and_report`.
#[derive(Clone, Debug)]
pub(crate) struct HttpAnswer {
    pub(crate) code: Code,
    /// The limits that apply, in ascending order of their remaining hits.
    pub(crate) limits: Vec<ApplicableLimit>,
}

/// The state of a limit that applies to a request.
#[derive(Clone, Debug)]
pub(crate) struct ApplicableLimit {
    pub(crate) max_value: u64,
    pub(crate) seconds: u64,
    pub(crate) name: Option<Box<str>>,
    pub(crate) remaining: u64,
    pub(crate) reset_after: Span,
}

/// A counter of a limit.
#[derive(Clone, Debug)]
pub(crate) struct ListedCounter {
    pub(crate) limit: LimitadorLimit,
    /// The limit's variables and their values.
    pub(crate) variables: Vec<(Box<str>, String)>,
    pub(crate) remaining: u64,
    pub(crate) expires_in: Span,
}

impl HttpRequest {
    fn into_rate_limit_request(self) -> (RateLimitRequest, Hits) {
        let hits = Cost::new(self.delta.min(MAX_COUNT)).map_or(Hits::None, Hits::Charge);
        let descriptor = Descriptor {
            entries: self.values,
            ..Descriptor::default()
        };
        let request = RateLimitRequest {
            domain: self.namespace,
            descriptors: vec![descriptor],
            hits_addend: 0,
        };
        (request, hits)
    }
}

impl RateLimitService {
    /// Returns whether the limits come from a Limitador limits file.
    #[must_use]
    pub fn has_limitador_api(&self) -> bool {
        self.settings.limitador_api
    }

    /// Returns the limits of `domain` that apply to `request`.
    pub(super) fn match_limits<'d>(
        &self,
        domains: &Domains,
        domain: &'d Domain,
        request: &RateLimitRequest,
        hits: Hits,
        cleared: u64,
    ) -> Vec<DescriptorMatch<'d>> {
        let mut matches = Vec::new();
        for limit in &domain.limitador {
            let (Some(values), Some(limits)) =
                (limit.values(&request.descriptors), limits_of(limit))
            else {
                continue;
            };
            let mut key = Vec::new();
            let parts = limit.key_parts(&values);
            key::write(&mut key, &domain.name, limit.seconds, parts);
            let registered = || self.registry.counters(&domain.name, &limit.path());
            let counters = limit.rule.counters.get_or_init(registered).clone();
            let overridable = domains.overridable_limit(domain, limit);
            let overridden = overridable.and_then(|overridable| {
                overridable.limits(limits, values.iter().copied(), self.limiter.now())
            });
            let source = match overridden {
                Some(overridden) => LimitSource::Override(&limit.rule, overridden),
                None => LimitSource::Rule(&limit.rule, limits),
            };
            matches.push(self.match_limit(source, key, counters, hits, cleared));
        }
        matches
    }

    /// Decides `request` by the limits in `matches`.
    pub(super) async fn decide_by_limits(
        &self,
        listener: ListenerKind,
        request: &RateLimitRequest,
        matches: &mut [DescriptorMatch<'_>],
        within: Option<std::time::Duration>,
    ) -> Result<RateLimitAnswer, RlsError> {
        let evaluator = self.evaluator(within);
        evaluator.evaluate_all_or_nothing(matches).await?;
        let mut answer = self.answer(request, matches, evaluator.now);
        self.observe_denials(listener, request, matches, &answer, evaluator.now);
        // Remove the statuses: each status is for a limit, but Envoy expects one status for each
        // descriptor. Limitador sends no statuses.
        answer.statuses.clear();
        Ok(answer)
    }

    /// Returns whether `request` would be denied, without counting it.
    pub(crate) async fn limitador_check(&self, request: HttpRequest) -> Result<Code, RlsError> {
        let (request, hits) = request.into_rate_limit_request();
        let checked = self.check_hits(ListenerKind::Http, &request, hits, None);
        let checked = checked.await.map(|answer| answer.overall_code);
        self.note_error(checked)
    }

    /// Counts `request`, and does not check whether it is within its limits.
    pub(crate) async fn limitador_report(&self, request: HttpRequest) -> Result<(), RlsError> {
        let (request, hits) = request.into_rate_limit_request();
        let reported = self.report_hits(&request, Some(hits), None).await;
        self.note_error(reported)
    }

    /// Decides `request`, and counts it if it is admitted.
    pub(crate) async fn limitador_check_and_report(
        &self,
        request: HttpRequest,
    ) -> Result<HttpAnswer, RlsError> {
        let decided = self.decide_and_report(request).await;
        self.note_error(decided)
    }

    async fn decide_and_report(&self, request: HttpRequest) -> Result<HttpAnswer, RlsError> {
        let (request, hits) = request.into_rate_limit_request();
        let domains = self.loaded_domains()?;
        let mut matches = self.counters_in(&domains, &request, Some(hits))?;
        let listener = ListenerKind::Http;
        let answer = self.decide_by_limits(listener, &request, &mut matches, None);
        let code = answer.await?.overall_code;
        trace_outcome(listener, code, matches.len());
        let applied = applied_limits(&mut matches);
        let mut limits: Vec<ApplicableLimit> = applied.map(|applied| status(applied)).collect();
        limits.sort_by_key(|limit| limit.remaining);
        Ok(HttpAnswer { code, limits })
    }

    /// Returns the limits of `namespace`, in the order of the file.
    pub(crate) fn limitador_limits(
        &self,
        namespace: &str,
    ) -> Result<Vec<LimitadorLimit>, RlsError> {
        let domains = self.loaded_domains()?;
        let domain = domains.get(namespace);
        Ok(domain
            .map(|domain| domain.limitador.clone())
            .unwrap_or_default())
    }

    /// Returns at most [`MAX_COUNTERS`] counters of `namespace`, in the order of their limits.
    /// Counters without hits are not listed. Returns `None` with Redis, because the keys in Redis
    /// cannot be listed.
    ///
    /// The work is bounded. After each page of keys, this function yields, so that other tasks can
    /// run.
    pub(crate) async fn limitador_counters(
        &self,
        namespace: &str,
    ) -> Result<Option<Vec<ListedCounter>>, RlsError> {
        let domains = self.loaded_domains()?;
        if self.limiter.redis_store().is_some() {
            return Ok(None);
        }
        let limits = domains
            .get(namespace)
            .map(|domain| domain.limitador.as_slice());
        let limits = limits.unwrap_or_default();
        let prefixes: Vec<Vec<u8>> = limits
            .iter()
            .map(|limit| key::prefix(namespace, limit.seconds, limit.condition_parts()))
            .collect();
        let mut windows: Vec<u64> = limits.iter().map(|limit| limit.seconds).collect();
        windows.sort_unstable();
        windows.dedup();
        let mut counters = Vec::new();
        for seconds in windows {
            let all = key::prefix(namespace, seconds, std::iter::empty());
            let with_prefix = limits.iter().zip(&prefixes);
            let own: Vec<_> = with_prefix
                .filter(|(limit, _)| limit.seconds == seconds)
                .collect();
            let mut from = KeyCursor::default();
            for _ in 0..MAX_PAGES {
                let page =
                    self.limiter
                        .local_store()
                        .keys(&all, from, MAX_COUNTERS, self.limiter.now());
                for key in &page.keys {
                    let found = own
                        .iter()
                        .find_map(|(limit, prefix)| self.counter_of(limit, prefix, key));
                    counters.extend(found);
                }
                let Some(next) = page.next.filter(|_| counters.len() < MAX_COUNTERS) else {
                    break;
                };
                from = next;
                tokio::task::yield_now().await;
            }
        }
        counters.truncate(MAX_COUNTERS);
        counters.sort_by_cached_key(|counter: &ListedCounter| {
            limits
                .iter()
                .position(|limit| std::sync::Arc::ptr_eq(&limit.rule, &counter.limit.rule))
        });
        Ok(Some(counters))
    }

    /// Returns the counter of `limit` with this key; `None` if the key belongs to another limit, or
    /// if the counter has no hits.
    fn counter_of(
        &self,
        limit: &LimitadorLimit,
        prefix: &[u8],
        key: &[u8],
    ) -> Option<ListedCounter> {
        let variables = limit.variables_of(key::parts_after(key, prefix)?)?;
        let (remaining, expires_in) = self.state_of(limit, key)?;
        Some(ListedCounter {
            limit: limit.clone(),
            variables,
            remaining,
            expires_in,
        })
    }

    /// Returns the remaining hits of a counter, and the time until its window ends; `None` if the
    /// counter has no hits.
    fn state_of(&self, limit: &LimitadorLimit, key: &[u8]) -> Option<(u64, Span)> {
        debug_assert!(key.starts_with(&DESCRIPTOR_KEY), "the key has the prefix");
        let charge = Charge::new(key, &limits_of(limit)?.limits, Cost::ONE).ok()?;
        let mut outcomes = Vec::new();
        let (store, now) = (self.limiter.local_store(), self.limiter.now());
        store.check(&[charge], now, Effect::Look, &mut outcomes);
        let outcome = outcomes.first()?;
        let has_counted = outcome.reset_after > Span::ZERO;
        has_counted.then_some((outcome.remaining, outcome.reset_after))
    }
}

fn limits_of(limit: &LimitadorLimit) -> Option<&RuleLimits> {
    match &limit.rule.allowance {
        Allowance::Limited(limits) => Some(limits),
        Allowance::Unlimited => None,
    }
}

fn status(applied: &AppliedLimit<'_>) -> ApplicableLimit {
    let limit = applied.limits().iter().next();
    let outcome = applied.result.outcome.filter(|_| !applied.result.over);
    let reset = applied.result.outcome.map(|outcome| outcome.reset_after);
    ApplicableLimit {
        max_value: limit.map_or(0, tidegate_core::Limit::quota),
        seconds: applied.limits.window_seconds,
        name: applied
            .rule()
            .and_then(|rule| rule.name.as_deref())
            .map(Into::into),
        remaining: outcome.map_or(0, |outcome| outcome.remaining),
        reset_after: reset.unwrap_or_default(),
    }
}
