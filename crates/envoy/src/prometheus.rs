//! Prometheus metrics of the rate limit service.

use tidegate_net::prometheus::{Metric, Page};

use super::{ConfigWatcher, Counter, RateLimitService};

/// The metric of each counter. The documentation maps these metrics to the names in
/// envoyproxy/ratelimit.
const HITS: [(Counter, Metric<2>); 7] = [
    (
        Counter::TotalHits,
        Metric::counter(
            "tidegate_envoy_hits_total",
            ["domain", "descriptor"],
            "Hits requested, by domain and descriptor.",
        ),
    ),
    (
        Counter::WithinLimit,
        Metric::counter(
            "tidegate_envoy_within_limit_total",
            ["domain", "descriptor"],
            "Hits within their limit.",
        ),
    ),
    (
        Counter::NearLimit,
        Metric::counter(
            "tidegate_envoy_near_limit_total",
            ["domain", "descriptor"],
            "Hits within their limit and above the near-limit ratio.",
        ),
    ),
    (
        Counter::OverLimit,
        Metric::counter(
            "tidegate_envoy_over_limit_total",
            ["domain", "descriptor"],
            "Hits over their limit, including limits of rules in shadow mode.",
        ),
    ),
    (
        Counter::OverLimitWithLocalCache,
        Metric::counter(
            "tidegate_envoy_over_limit_cached_total",
            ["domain", "descriptor"],
            "Hits over their limit, decided from the local cache without the store.",
        ),
    ),
    (
        Counter::ShadowMode,
        Metric::counter(
            "tidegate_envoy_shadow_over_limit_total",
            ["domain", "descriptor"],
            "Hits over the limit of a rule in shadow mode.",
        ),
    ),
    (
        Counter::TotalNegativeHits,
        Metric::counter(
            "tidegate_envoy_hits_refunded_total",
            ["domain", "descriptor"],
            "Hits refunded.",
        ),
    ),
];

const DOMAIN_NOT_FOUND: Metric<1> = Metric::counter(
    "tidegate_envoy_domain_not_found_total",
    ["domain"],
    "Descriptors requested in a domain that no file configures.",
);
const SHADOW_REQUESTS: Metric = Metric::counter(
    "tidegate_envoy_shadow_requests_total",
    [],
    "Requests over their limits that passed because of shadow_mode.",
);
const ERRORS: Metric = Metric::counter(
    "tidegate_envoy_errors_total",
    [],
    "Requests that could not be decided.",
);
const DOMAINS: Metric = Metric::gauge(
    "tidegate_envoy_domains",
    [],
    "Domains in the active configuration.",
);
const CONFIG_LOADS: Metric<1> = Metric::counter(
    "tidegate_envoy_config_loads_total",
    ["result"],
    "Configuration loads of the rate limit service, by result.",
);
const LAST_CONFIG_LOAD_SUCCESS: Metric = Metric::gauge(
    "tidegate_envoy_last_config_load_success",
    [],
    "Whether the last configuration load of the rate limit service succeeded (1) or failed (0).",
);

impl ConfigWatcher {
    /// Adds the metrics to `page`.
    pub fn collect(&self, page: &mut Page<'_>) {
        self.service().collect(page);
        let (succeeded, failed) = self.loads();
        page.family(&CONFIG_LOADS, [(["ok"], succeeded), (["failed"], failed)]);
        let is_in_force = u64::from(self.last_mistakes().is_empty());
        page.single(&LAST_CONFIG_LOAD_SUCCESS, is_in_force);
    }
}

impl RateLimitService {
    fn collect(&self, page: &mut Page<'_>) {
        let hits = self.counters();
        for (counter, metric) in &HITS {
            let samples = hits.iter().map(|((domain, descriptor), counters)| {
                ([&**domain, &**descriptor], counters.read(*counter))
            });
            page.family(metric, samples);
        }
        let unknown = self.unknown_domains();
        let samples = unknown.iter().map(|(domain, count)| ([&**domain], *count));
        page.family(&DOMAIN_NOT_FOUND, samples);
        page.single(&SHADOW_REQUESTS, self.global_shadow_mode());
        page.single(&ERRORS, self.errors());
        page.single(&DOMAINS, self.domains());
    }
}
