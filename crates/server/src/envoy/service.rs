//! The service: from a request to its answer.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use arc_swap::ArcSwapOption;
use tidegate_core::{Cost, Timestamp};
use tokio::{sync::watch, time::Instant};

use super::{
    Code, Counter, Descriptor, Loaded, RateLimitAnswer, RateLimitError, RateLimitRequest, Settings,
    counters::{Counters, Registry, UnknownDomains},
    decide::{Applied, Bench, Hits, Judged, Source},
    key,
    over_cache::{OverCache, Since},
    overrides::Overrides,
    path,
    rules::{Allowance, Charging, Detail, Domain, Domains, Found, Node, Rule},
    summary,
};
use crate::limiter::Limiter;

/// Envoy's rate limit service over one limiter.
#[derive(Debug)]
pub struct RateLimitService {
    limiter: Arc<Limiter>,
    settings: Settings,
    domains: ArcSwapOption<Domains>,
    healthy: watch::Sender<bool>,
    overrides: Overrides,
    over: Option<OverCache>,
    registry: Registry,
    unknown_domains: UnknownDomains,
    global_shadow_mode: AtomicU64,
    errors: AtomicU64,
}

/// What a descriptor came to.
#[derive(Debug)]
pub(super) enum Standing<'d> {
    /// No rule applies to it, or another one replaces that.
    NoLimit,
    /// A rule without a limit applies.
    Unlimited(&'d Rule),
    /// A limit applies: a rule's, or one that came with the descriptor.
    Limited(Applied<'d>),
}

impl Standing<'_> {
    pub(super) fn rule(&self) -> Option<&Rule> {
        match self {
            Self::NoLimit => None,
            Self::Unlimited(rule) => Some(rule),
            Self::Limited(applied) => applied.rule(),
        }
    }
}

impl RateLimitService {
    /// A service without a configuration, which answers nothing but errors until it has one.
    #[must_use]
    pub fn new(limiter: Arc<Limiter>, settings: Settings) -> Self {
        let over = OverCache::new(settings.local_cache_bytes);
        let healthy = watch::Sender::new(!settings.healthy_with_a_domain);
        Self {
            limiter,
            settings,
            domains: ArcSwapOption::empty(),
            healthy,
            overrides: Overrides::default(),
            over,
            registry: Registry::default(),
            unknown_domains: UnknownDomains::default(),
            global_shadow_mode: AtomicU64::new(0),
            errors: AtomicU64::new(0),
        }
    }

    /// Puts `loaded` in the place of the configuration of the moment. Counts are kept.
    pub fn load(&self, loaded: Loaded) {
        let Loaded { mut domains, .. } = loaded;
        if let Some(old) = self.domains.load().as_deref() {
            domains.succeed(old);
        }
        self.domains.store(Some(Arc::new(domains)));
        self.over.as_ref().inspect(|cache| cache.clear());
        let healthy = !self.settings.healthy_with_a_domain || self.domains() > 0;
        self.healthy
            .send_if_modified(|was| std::mem::replace(was, healthy) != healthy);
    }

    /// Decides `request`.
    ///
    /// Each descriptor is charged on its own and what is denied is counted too, unless the settings or the domain say
    /// otherwise. The descriptors of a request are decided at one instant, under one set of rules.
    ///
    /// # Errors
    ///
    /// [`RateLimitError`], and nothing is charged but where the store failed.
    pub async fn should_rate_limit(
        &self,
        request: &RateLimitRequest,
    ) -> Result<RateLimitAnswer, RateLimitError> {
        self.should_rate_limit_within(request, None).await
    }

    /// [`Self::should_rate_limit`] for a caller who does not wait longer than `within`: what Redis has not answered by
    /// then counts as out of reach.
    ///
    /// # Errors
    ///
    /// The same.
    pub async fn should_rate_limit_within(
        &self,
        request: &RateLimitRequest,
        within: Option<Duration>,
    ) -> Result<RateLimitAnswer, RateLimitError> {
        let answered = self.decide(request, within).await;
        if answered.is_err() {
            self.errors.fetch_add(1, Ordering::Relaxed);
        }
        answered
    }

    async fn decide(
        &self,
        request: &RateLimitRequest,
        within: Option<Duration>,
    ) -> Result<RateLimitAnswer, RateLimitError> {
        request.check()?;
        // Before the rules are taken: what is found under former ones is not to be remembered under new ones.
        let cleared = self.over.as_ref().map_or(0, OverCache::cleared);
        let domains = self.domains.load_full();
        let domains = domains.as_deref().ok_or(RateLimitError::NoConfiguration)?;
        let Some(domain) = domains.get(&request.domain) else {
            return Ok(self.unknown_domain(request));
        };
        let mut standings = Vec::with_capacity(request.descriptors.len());
        for (at, descriptor) in request.descriptors.iter().enumerate() {
            standings.push(self.standing(domain, request, (at, descriptor), cleared)?);
        }
        drop_replaced(&mut standings);
        let bench = Bench {
            limiter: &self.limiter,
            store_failure: self.settings.store_failure,
            over: self.over.as_ref(),
            now: self.limiter.now(),
            until: self.until(within),
            near_limit_ratio: self.settings.near_limit_ratio,
        };
        let is_one = self.settings.stop_increment || domain.charging == Charging::AllOrNothing;
        // With every rule in quota mode none denies by itself, and so none keeps the others from being charged.
        if is_one && !self.settings.quota_mode {
            bench.decide_together(&mut standings).await?;
        } else {
            bench.decide_each(&mut standings).await?;
        }
        Ok(self.answer(request, &standings, bench.now))
    }

    /// The end of the time that the store has; in memory nothing is waited for.
    fn until(&self, within: Option<Duration>) -> Option<Instant> {
        let within = self.limiter.fleet().and(within)?;
        Instant::now().checked_add(within)
    }

    fn answer(
        &self,
        request: &RateLimitRequest,
        standings: &[Standing<'_>],
        now: Timestamp,
    ) -> RateLimitAnswer {
        let answer = summary::answer(request, standings, &self.settings, now);
        if answer.overall_code == Code::OverLimit && self.settings.shadow_mode {
            self.global_shadow_mode.fetch_add(1, Ordering::Relaxed);
            return RateLimitAnswer {
                overall_code: Code::Ok,
                ..answer
            };
        }
        answer
    }

    fn unknown_domain(&self, request: &RateLimitRequest) -> RateLimitAnswer {
        self.unknown_domains
            .count(&request.domain, request.descriptors.len());
        let standings: Vec<Standing<'_>> = request
            .descriptors
            .iter()
            .map(|_| Standing::NoLimit)
            .collect();
        summary::answer(request, &standings, &self.settings, self.limiter.now())
    }

    /// What applies to descriptor number `at`.
    fn standing<'d>(
        &self,
        domain: &'d Domain,
        request: &RateLimitRequest,
        (at, descriptor): (usize, &Descriptor),
        cleared: u64,
    ) -> Result<Standing<'d>, RateLimitError> {
        let hits = hits(request, descriptor);
        let pairs = || {
            descriptor
                .entries
                .iter()
                .map(|(key, value)| (key.as_str(), value.as_str()))
        };
        if let Some(asked) = descriptor.limit {
            let limits = self.overrides.limits(asked, domain.denied()).ok_or_else(|| {
                let field = format!("descriptors[{at}].limit.unit");
                RateLimitError::invalid(field, "is not a unit of time; one of SECOND, MINUTE, HOUR, DAY, WEEK, MONTH, YEAR")
            })?;
            let mut key = Vec::new();
            key::write(&mut key, (&domain.name, limits.window_seconds), pairs());
            let counters = self
                .registry
                .counters(&domain.name, &path::shown_in_full(descriptor, &[]));
            let limits = Source::Request(limits);
            return Ok(self.limited(limits, key, counters, (hits, cleared)));
        }
        let Some(Found { rule, path }) = domain.find(&descriptor.entries) else {
            return Ok(Standing::NoLimit);
        };
        let Allowance::Limited(limits) = &rule.allowance else {
            return Ok(Standing::Unlimited(rule));
        };
        let mut key = Vec::new();
        let counted = pairs()
            .zip(&path)
            .map(|((key, value), node)| (key, node.counted(value)));
        key::write(&mut key, (&domain.name, limits.window_seconds), counted);
        let counters = self.counters_of(domain, rule, &path, descriptor);
        let limits = Source::Rule(rule, limits);
        Ok(self.limited(limits, key, counters, (hits, cleared)))
    }

    fn limited<'d>(
        &self,
        limits: Source<'d>,
        key: Vec<u8>,
        counters: Arc<Counters>,
        (hits, cleared): (Hits, u64),
    ) -> Standing<'d> {
        let given_back = self.over.as_ref().map_or(0, |over| over.given_back(&key));
        let since = Since {
            cleared,
            given_back,
        };
        Standing::Limited(Applied {
            limits,
            key,
            counters,
            hits,
            since,
            judged: Judged::default(),
        })
    }

    fn counters_of(
        &self,
        domain: &Domain,
        rule: &Rule,
        nodes: &[&Node],
        descriptor: &Descriptor,
    ) -> Arc<Counters> {
        let shows_values = rule.detail == Detail::Full
            || nodes
                .iter()
                .any(|node| node.value_to_metric && !node.share_threshold);
        let registered = || {
            self.registry
                .counters(&domain.name, &path::of_rule(rule, nodes, descriptor))
        };
        if shows_values {
            registered()
        } else {
            Arc::clone(rule.counters.get_or_init(registered))
        }
    }
}

fn hits(request: &RateLimitRequest, descriptor: &Descriptor) -> Hits {
    let hits = descriptor
        .hits_addend
        .unwrap_or_else(|| request.hits_addend.max(1).into());
    // What is more than any limit can hold is over every limit, and so is the most.
    let cost = Cost::new(hits.min(tidegate_core::bounds::MAX_COUNT));
    match (cost, descriptor.is_negative_hits) {
        (Err(_), _) => Hits::None,
        (Ok(cost), false) => Hits::Taken(cost),
        (Ok(cost), true) => Hits::GivenBack(cost),
    }
}

/// Lets the rules stand aside that others of the same request replace, all at once.
fn drop_replaced(standings: &mut [Standing<'_>]) {
    let replaced: Vec<Box<str>> = standings
        .iter()
        .filter_map(Standing::rule)
        .flat_map(|rule| rule.replaces.iter().cloned())
        .collect();
    if replaced.is_empty() {
        return;
    }
    for standing in standings {
        let name = standing.rule().and_then(|rule| rule.name.as_deref());
        if name.is_some_and(|name| replaced.iter().any(|replaced| **replaced == *name)) {
            *standing = Standing::NoLimit;
        }
    }
}

/// How it is, and what was counted.
impl RateLimitService {
    /// Whether it can decide; where the settings ask for a domain, only if there is one.
    #[must_use]
    pub fn is_healthy(&self) -> bool {
        *self.healthy.borrow()
    }

    /// [`Self::is_healthy`], and every change of it from now on.
    #[must_use]
    pub fn health(&self) -> watch::Receiver<bool> {
        self.healthy.subscribe()
    }

    /// How many domains the configuration in force has.
    #[must_use]
    pub fn domains(&self) -> u64 {
        let domains = self.domains.load();
        let count = domains.as_deref().map_or(0, Domains::len);
        u64::try_from(count).unwrap_or(u64::MAX)
    }

    /// How many descriptors the configuration in force has, at every depth.
    #[must_use]
    pub fn descriptors(&self) -> usize {
        let domains = self.domains.load();
        domains.as_deref().map_or(0, Domains::descriptors)
    }

    /// How many requests could not be decided.
    #[must_use]
    pub fn errors(&self) -> u64 {
        self.errors.load(Ordering::Relaxed)
    }

    /// Calls `each` with every domain, path and counter, in order.
    pub fn for_each_counter(&self, mut each: impl FnMut(&str, &str, Counter, u64)) {
        self.registry.for_each(|domain, path, counters| {
            for (_, counter) in Counter::ALL {
                each(domain, path, counter, counters.read(counter));
            }
        });
    }

    /// How many requests were over their limits and passed because of `shadow_mode`.
    #[must_use]
    pub fn global_shadow_mode(&self) -> u64 {
        self.global_shadow_mode.load(Ordering::Relaxed)
    }

    /// Calls `each` with every domain that was asked for and that no file has, and how many descriptors there were in it.
    pub fn for_each_unknown_domain(&self, each: impl FnMut(&str, u64)) {
        self.unknown_domains.for_each(each);
    }

    /// How many descriptors were asked for in `domain`, which no file has.
    #[must_use]
    pub fn domain_not_found(&self, domain: &str) -> u64 {
        self.unknown_domains.count_of(domain)
    }
}
