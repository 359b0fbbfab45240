//! Prometheus metrics of the rate limit service.

use tidegate_net::prometheus::Text;

use super::{ConfigWatcher, Counter, RateLimitService};

/// The metric name and help of each counter. The documentation maps them to envoyproxy/ratelimit's
/// names.
const FAMILIES: [(Counter, &str, &str); 7] = [
    (
        Counter::TotalHits,
        "tidegate_envoy_hits_total",
        "Hits requested, by domain and descriptor.",
    ),
    (
        Counter::WithinLimit,
        "tidegate_envoy_within_limit_total",
        "Hits within their limit.",
    ),
    (
        Counter::NearLimit,
        "tidegate_envoy_near_limit_total",
        "Hits within their limit and above the near-limit ratio.",
    ),
    (
        Counter::OverLimit,
        "tidegate_envoy_over_limit_total",
        "Hits over their limit, including shadow rules.",
    ),
    (
        Counter::OverLimitWithLocalCache,
        "tidegate_envoy_over_limit_cached_total",
        "Hits over their limit, decided from the local cache without the store.",
    ),
    (
        Counter::ShadowMode,
        "tidegate_envoy_shadow_over_limit_total",
        "Hits over the limit of a rule in shadow mode.",
    ),
    (
        Counter::TotalNegativeHits,
        "tidegate_envoy_hits_refunded_total",
        "Hits refunded.",
    ),
];

impl ConfigWatcher {
    /// Appends the metrics to `text`.
    pub fn write(&self, text: &mut Text) {
        let service = self.service();
        service.write(text);
        let name = "tidegate_envoy_config_loads_total";
        text.family(
            name,
            "counter",
            "Configuration loads of the rate limit service, by result.",
        );
        let (succeeded, failed) = self.loads();
        text.sample(name, &[("result", "ok")], succeeded);
        text.sample(name, &[("result", "failed")], failed);
        let is_in_force = u64::from(self.last_mistakes().is_empty());
        let help = "Whether the last configuration load of the rate limit service succeeded (1) or failed (0).";
        text.single(
            "tidegate_envoy_last_config_load_success",
            "gauge",
            help,
            is_in_force,
        );
    }
}

impl RateLimitService {
    fn write(&self, text: &mut Text) {
        for (counter, name, help) in FAMILIES {
            text.family(name, "counter", help);
            self.for_each_counter(|domain, descriptor, each, hits| {
                if each == counter {
                    text.sample(
                        name,
                        &[("domain", domain), ("descriptor", descriptor)],
                        hits,
                    );
                }
            });
        }
        let name = "tidegate_envoy_domain_not_found_total";
        text.family(
            name,
            "counter",
            "Descriptors requested in a domain that no file configures.",
        );
        self.for_each_unknown_domain(|domain, descriptors| {
            text.sample(name, &[("domain", domain)], descriptors)
        });
        let help = "Requests over their limits that passed because of shadow_mode.";
        text.single(
            "tidegate_envoy_shadow_requests_total",
            "counter",
            help,
            self.global_shadow_mode(),
        );
        let help = "Requests that could not be decided.";
        text.single(
            "tidegate_envoy_errors_total",
            "counter",
            help,
            self.errors(),
        );
        let help = "Domains in the active configuration.";
        text.single("tidegate_envoy_domains", "gauge", help, self.domains());
    }
}
