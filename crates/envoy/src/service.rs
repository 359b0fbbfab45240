//! The rate limit service, which decides a request and returns the response.

use std::{
    collections::BTreeMap,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use arc_swap::ArcSwapOption;
use tidegate_config::envoy::RlsSettings;
use tidegate_core::{Cost, Mode, Reason, Timestamp};
use tidegate_limiter::{
    DescriptorRules, ServerLimiter,
    denials::DescriptorDenial,
    metrics::{ListenerKind, Metrics},
    trace::{self, TracedOutcome},
};
use tokio::{sync::watch, time::Instant};

use super::{
    Code, Descriptor, HitCounterKind, LoadedConfig, RateLimitAnswer, RateLimitRequest, RlsError,
    applied_limit::{AppliedLimit, DescriptorMatch, Hits, LimitResult, LimitSource},
    counters::{CounterRegistry, DescriptorCounters, DomainAndPath, UnknownDomains},
    evaluate::Evaluator,
    key,
    over_limit_cache::{CacheEpoch, OverLimitCache},
    overrides::OverrideCache,
    response,
    rules::{
        Allowance, ChargeMode, DescriptorRule, Detail, Domain, Domains, MatchedRule, RuleNode,
    },
    stat_names,
};

/// Envoy's rate limit service, which uses the server's limiter to make decisions.
#[derive(Debug)]
pub struct RateLimitService {
    pub(super) limiter: Arc<ServerLimiter>,
    pub(super) settings: RlsSettings,
    pub(super) domains: ArcSwapOption<Domains>,
    healthy: watch::Sender<bool>,
    overrides: OverrideCache,
    pub(super) over: Option<OverLimitCache>,
    pub(super) registry: CounterRegistry,
    unknown_domains: UnknownDomains,
    global_shadow_mode: AtomicU64,
    errors: AtomicU64,
}

impl RateLimitService {
    /// Creates a service without a configuration. Every request fails until [`Self::load`] is
    /// called.
    #[must_use]
    pub fn new(limiter: Arc<ServerLimiter>, settings: RlsSettings) -> Self {
        let over = OverLimitCache::new(settings.local_cache_bytes);
        let healthy = watch::Sender::new(!settings.healthy_with_a_domain);
        Self {
            limiter,
            settings,
            domains: ArcSwapOption::empty(),
            healthy,
            overrides: OverrideCache::default(),
            over,
            registry: CounterRegistry::default(),
            unknown_domains: UnknownDomains::default(),
            global_shadow_mode: AtomicU64::new(0),
            errors: AtomicU64::new(0),
        }
    }

    /// Replaces the configuration with `loaded`. The counters keep their values.
    pub fn load(&self, loaded: LoadedConfig) {
        let LoadedConfig { mut domains, .. } = loaded;
        if let Some(old) = self.domains.load().as_deref() {
            domains.inherit_counts(old);
        }
        domains.set_overrides(self.limiter.overrides());
        let domains = Arc::new(domains);
        let rules = Arc::clone(&domains);
        let find = move |name: &str| rules.find_overridable(name);
        self.limiter
            .set_descriptor_rules(DescriptorRules::new(find));
        self.domains.store(Some(domains));
        self.over.as_ref().inspect(|cache| cache.clear());
        let healthy = !self.settings.healthy_with_a_domain || self.domains() > 0;
        self.healthy
            .send_if_modified(|was| std::mem::replace(was, healthy) != healthy);
    }

    /// Decides `request` as if it came from the gRPC listener.
    ///
    /// Each descriptor is charged separately, and denied hits are counted, unless the settings or
    /// the domain specify otherwise. All descriptors in a request are decided with the same
    /// timestamp and the same rules.
    ///
    /// # Errors
    ///
    /// Returns an [`RlsError`] if the request cannot be decided. Nothing is charged if there is an
    /// error, unless the store has failed.
    pub async fn should_rate_limit(
        &self,
        request: &RateLimitRequest,
    ) -> Result<RateLimitAnswer, RlsError> {
        self.should_rate_limit_on(ListenerKind::Grpc, request, None)
            .await
    }

    /// Decides `request`, which came from `listener`, like [`Self::should_rate_limit`]. If Redis
    /// does not reply within the time `within`, it is treated as unavailable.
    ///
    /// # Errors
    ///
    /// Returns the same errors as [`Self::should_rate_limit`].
    pub async fn should_rate_limit_on(
        &self,
        listener: ListenerKind,
        request: &RateLimitRequest,
        within: Option<Duration>,
    ) -> Result<RateLimitAnswer, RlsError> {
        let answered = self.decide(listener, request, within).await;
        match &answered {
            Ok(answer) => trace_outcome(listener, answer.overall_code, answer.statuses.len()),
            Err(_) => self.count_error(),
        }
        answered
    }

    pub(super) fn count_error(&self) {
        self.errors.fetch_add(1, Ordering::Relaxed);
    }

    async fn decide(
        &self,
        listener: ListenerKind,
        request: &RateLimitRequest,
        within: Option<Duration>,
    ) -> Result<RateLimitAnswer, RlsError> {
        request.check()?;
        // Read this number before loading the rules. With the opposite order, a decision made with
        // the old rules could be cached after the new rules are active.
        let cleared = self.over.as_ref().map_or(0, OverLimitCache::cleared);
        let domains = self.domains.load_full();
        let domains = domains.as_deref().ok_or(RlsError::NoConfiguration)?;
        let Some(domain) = domains.get(&request.domain) else {
            return Ok(self.unknown_domain(request));
        };
        if !domain.limitador.is_empty() {
            let hits = hits(request, &Descriptor::default());
            let mut matches = self.match_limits(domains, domain, request, hits, cleared);
            let decided = self.decide_by_limits(listener, request, &mut matches, within);
            return decided.await;
        }
        let mut matches = Vec::with_capacity(request.descriptors.len());
        for (at, descriptor) in request.descriptors.iter().enumerate() {
            matches.push(self.match_descriptor(domains, domain, request, at, descriptor, cleared)?);
        }
        drop_replaced(&mut matches);
        let evaluator = self.evaluator(within);
        let is_one = self.settings.stop_increment || domain.charging == ChargeMode::AllOrNothing;
        // If all rules are in quota mode, no rule alone can deny the request, so there is no reason
        // to decide the descriptors together.
        if is_one && !self.settings.quota_mode {
            evaluator.evaluate_all_or_nothing(&mut matches).await?;
        } else {
            evaluator.evaluate_each(&mut matches).await?;
        }
        let answer = self.answer(request, &matches, evaluator.now);
        self.observe_denials(listener, request, &matches, &answer, evaluator.now);
        Ok(answer)
    }

    /// Creates an evaluator for a request that arrives now.
    pub(super) fn evaluator(&self, within: Option<Duration>) -> Evaluator<'_> {
        Evaluator {
            limiter: &self.limiter,
            store_failure: self.settings.store_failure,
            over: self.over.as_ref(),
            now: self.limiter.now(),
            until: self.until(within),
            near_limit_ratio: self.settings.near_limit_ratio,
        }
    }

    /// Returns the deadline for store queries; `None` for the memory store, which never waits.
    fn until(&self, within: Option<Duration>) -> Option<Instant> {
        let within = self.limiter.redis_store().and(within)?;
        Instant::now().checked_add(within)
    }

    pub(super) fn answer(
        &self,
        request: &RateLimitRequest,
        matches: &[DescriptorMatch<'_>],
        now: Timestamp,
    ) -> RateLimitAnswer {
        let answer = response::build(request, matches, &self.settings, now);
        if answer.overall_code == Code::OverLimit && self.settings.shadow_mode {
            self.global_shadow_mode.fetch_add(1, Ordering::Relaxed);
            return RateLimitAnswer {
                overall_code: Code::Ok,
                ..answer
            };
        }
        answer
    }

    /// Records the descriptors that denied the request, or would have denied it in shadow mode.
    pub(super) fn observe_denials(
        &self,
        listener: ListenerKind,
        request: &RateLimitRequest,
        matches: &[DescriptorMatch<'_>],
        answer: &RateLimitAnswer,
        now: Timestamp,
    ) {
        let is_over = |matched: &DescriptorMatch<'_>| matches!(matched, DescriptorMatch::Limited(applied) if applied.result.over);
        // Most requests are within all limits.
        if !matches.iter().any(is_over) {
            return;
        }
        let denying = response::denying(matches, &answer.statuses, &self.settings);
        for (matched, is_denying) in matches.iter().zip(denying) {
            let DescriptorMatch::Limited(applied) = matched else {
                continue;
            };
            let Some(descriptor) = request.descriptors.get(applied.descriptor) else {
                continue;
            };
            let is_shadow = applied.rule().is_some_and(|rule| rule.shadow);
            let Some(denied) = applied.denied_limit(now) else {
                continue;
            };
            // A quota that is over its limit does not deny the request if another quota has
            // remaining capacity.
            if !is_denying && !is_shadow {
                continue;
            }
            self.limiter.observe_descriptor_denial(&DescriptorDenial {
                listener,
                domain: &request.domain,
                descriptor: &descriptor.entries,
                policy: denied.limit.policy(),
                reason: denied.reason,
                retry_after: denied.retry_after,
                mode: if is_shadow || self.settings.shadow_mode {
                    Mode::Shadow
                } else {
                    Mode::Enforce
                },
                now,
            });
        }
    }

    pub(super) fn count_unknown_domain(&self, request: &RateLimitRequest) {
        self.unknown_domains
            .count(&request.domain, request.descriptors.len());
    }

    fn unknown_domain(&self, request: &RateLimitRequest) -> RateLimitAnswer {
        self.count_unknown_domain(request);
        let matches: Vec<DescriptorMatch<'_>> = request
            .descriptors
            .iter()
            .map(|_| DescriptorMatch::NoLimit)
            .collect();
        response::build(request, &matches, &self.settings, self.limiter.now())
    }

    /// Looks up the limit of the descriptor at index `at`.
    pub(super) fn match_descriptor<'d>(
        &self,
        domains: &Domains,
        domain: &'d Domain,
        request: &RateLimitRequest,
        at: usize,
        descriptor: &Descriptor,
        cleared: u64,
    ) -> Result<DescriptorMatch<'d>, RlsError> {
        let hits = hits(request, descriptor);
        let pairs = || {
            descriptor
                .entries
                .iter()
                .map(|(key, value)| (key.as_str(), value.as_str()))
        };
        if let Some(limit) = descriptor.limit {
            let limits = self.overrides.limits(limit, domain.denied_hits()).ok_or_else(|| {
                let field = format!("descriptors[{at}].limit.unit");
                RlsError::invalid(field, "is not a unit of time; use one of SECOND, MINUTE, HOUR, DAY, WEEK, MONTH, YEAR")
            })?;
            let mut key = Vec::new();
            key::write(&mut key, &domain.name, limits.window_seconds, pairs());
            let counters = self
                .registry
                .counters(&domain.name, &stat_names::full_path(descriptor, &[]));
            let limits = LimitSource::Request(limits);
            let matched = self.match_limit(limits, key, counters, hits, cleared);
            return Ok(matched.of_descriptor(at));
        }
        let Some(MatchedRule { rule, path }) = domain.find(&descriptor.entries) else {
            return Ok(DescriptorMatch::NoLimit);
        };
        let Allowance::Limited(limits) = &rule.allowance else {
            return Ok(DescriptorMatch::Unlimited(rule));
        };
        let mut key = Vec::new();
        let counted = pairs()
            .zip(&path)
            .map(|((key, value), node)| (key, node.counted(value)));
        key::write(&mut key, &domain.name, limits.window_seconds, counted);
        let counters = self.counters_of(domain, rule, &path, descriptor);
        let overridable = domains.overridable(domain, rule, &descriptor.entries);
        let overridden = overridable.and_then(|overridable| {
            let entries = descriptor.entries.iter().zip(&path);
            let values = entries.map(|((_, value), node)| node.counted(value));
            overridable.limits(limits, values, self.limiter.now())
        });
        let limits = match overridden {
            Some(overridden) => LimitSource::Override(rule, overridden),
            None => LimitSource::Rule(rule, limits),
        };
        let matched = self.match_limit(limits, key, counters, hits, cleared);
        Ok(matched.of_descriptor(at))
    }

    /// Creates a match of a limit with the descriptor at index 0.
    pub(super) fn match_limit<'d>(
        &self,
        limits: LimitSource<'d>,
        key: Vec<u8>,
        counters: Arc<DescriptorCounters>,
        hits: Hits,
        cleared: u64,
    ) -> DescriptorMatch<'d> {
        let refunds = self.over.as_ref().map_or(0, |over| over.refunds(&key));
        let epoch = CacheEpoch { cleared, refunds };
        DescriptorMatch::Limited(AppliedLimit {
            limits,
            descriptor: 0,
            key,
            counters,
            hits,
            epoch,
            result: LimitResult::default(),
        })
    }

    fn counters_of(
        &self,
        domain: &Domain,
        rule: &DescriptorRule,
        nodes: &[&RuleNode],
        descriptor: &Descriptor,
    ) -> Arc<DescriptorCounters> {
        let shows_values = rule.detail == Detail::Full
            || nodes
                .iter()
                .any(|node| node.value_to_metric && !node.share_threshold);
        let registered = || {
            self.registry.counters(
                &domain.name,
                &stat_names::rule_path(rule, nodes, descriptor),
            )
        };
        if shows_values {
            registered()
        } else {
            Arc::clone(rule.counters.get_or_init(registered))
        }
    }
}

/// Returns the operation that a descriptor of `request` performs on its limit.
pub(super) fn hits(request: &RateLimitRequest, descriptor: &Descriptor) -> Hits {
    let hits = descriptor
        .hits_addend
        .unwrap_or_else(|| request.hits_addend.max(1).into());
    // A larger number is capped at the maximum cost.
    let cost = Cost::new(hits.min(tidegate_core::bounds::MAX_COUNT));
    match (cost, descriptor.is_negative_hits) {
        (Err(_), _) => Hits::None,
        (Ok(cost), false) => Hits::Charge(cost),
        (Ok(cost), true) => Hits::Refund(cost),
    }
}

/// Drops the rules that are replaced by other rules matched by the same request. All replacements
/// are collected first, so even a replaced rule replaces other rules.
pub(super) fn drop_replaced(matches: &mut [DescriptorMatch<'_>]) {
    let replaced: Vec<Box<str>> = matches
        .iter()
        .filter_map(DescriptorMatch::rule)
        .flat_map(|rule| rule.replaces.iter().cloned())
        .collect();
    if replaced.is_empty() {
        return;
    }
    for matched in matches {
        let name = matched.rule().and_then(|rule| rule.name.as_deref());
        if name.is_some_and(|name| replaced.iter().any(|replaced| **replaced == *name)) {
            *matched = DescriptorMatch::NoLimit;
        }
    }
}

/// Methods for health and metrics.
impl RateLimitService {
    /// Reports the service as unhealthy until [`Self::load`] is called.
    pub(crate) fn require_config(&self) {
        if self.domains.load().is_none() {
            self.healthy.send_replace(false);
        }
    }

    /// Returns the metrics of the limiter.
    pub(crate) fn metrics(&self) -> &Metrics {
        self.limiter.metrics()
    }

    /// Returns whether the metrics are also exported with envoyproxy/ratelimit's names.
    pub(crate) fn has_ratelimit_metrics(&self) -> bool {
        self.settings.ratelimit_metrics
    }

    /// Returns the current time of the limiter's clock.
    pub(crate) fn now(&self) -> Timestamp {
        self.limiter.now()
    }

    /// Returns whether the service is healthy. If the settings require a domain, the service is
    /// healthy only if at least one domain is loaded.
    #[must_use]
    pub fn is_healthy(&self) -> bool {
        *self.healthy.borrow()
    }

    /// Returns a receiver with the current value of [`Self::is_healthy`] and its changes.
    #[must_use]
    pub fn health(&self) -> watch::Receiver<bool> {
        self.healthy.subscribe()
    }

    /// Returns the number of domains in the active configuration.
    #[must_use]
    pub fn domains(&self) -> u64 {
        let domains = self.domains.load();
        let count = domains.as_deref().map_or(0, Domains::len);
        u64::try_from(count).unwrap_or(u64::MAX)
    }

    /// Returns the number of descriptors in the active configuration, at all depths.
    #[must_use]
    pub fn descriptors(&self) -> usize {
        let domains = self.domains.load();
        domains.as_deref().map_or(0, Domains::descriptors)
    }

    /// Returns the number of requests that could not be decided.
    #[must_use]
    pub fn errors(&self) -> u64 {
        self.errors.load(Ordering::Relaxed)
    }

    /// Calls `each` with every domain, path and counter, in sorted order.
    pub fn for_each_counter(&self, mut each: impl FnMut(&str, &str, HitCounterKind, u64)) {
        for ((domain, path), counters) in self.counters() {
            for (_, counter) in HitCounterKind::ALL {
                each(&domain, &path, counter, counters.read(counter));
            }
        }
    }

    /// Returns every domain and path with its counters, in sorted order.
    pub(crate) fn counters(&self) -> Vec<(DomainAndPath, Arc<DescriptorCounters>)> {
        self.registry.all()
    }

    /// Returns the number of requests that exceeded their limits and were allowed because of the
    /// setting `shadow_mode`.
    #[must_use]
    pub fn global_shadow_mode(&self) -> u64 {
        self.global_shadow_mode.load(Ordering::Relaxed)
    }

    /// Calls `each` with every unknown domain that requests have used, and the number of
    /// descriptors in these requests.
    pub fn for_each_unknown_domain(&self, mut each: impl FnMut(&str, u64)) {
        for (domain, count) in self.unknown_domains() {
            each(&domain, count);
        }
    }

    /// Returns every unknown domain that requests have used, with the number of descriptors in
    /// these requests.
    pub(crate) fn unknown_domains(&self) -> BTreeMap<Box<str>, u64> {
        self.unknown_domains.all()
    }

    /// Returns the number of descriptors in requests for the unknown domain `domain`.
    #[must_use]
    pub fn domain_not_found(&self, domain: &str) -> u64 {
        self.unknown_domains.count_of(domain)
    }
}

/// Records the outcome of a request in the request's tracing span. `limits` is the number of limits
/// that applied to the request.
pub(super) fn trace_outcome(listener: ListenerKind, code: Code, limits: usize) {
    let is_over = code == Code::OverLimit;
    let outcome = TracedOutcome {
        outcome: trace::outcome(is_over.then_some(Reason::Limit)),
        rule: None,
        exactness: None,
        source: None,
        limits,
    };
    trace::record(listener, &outcome);
}
