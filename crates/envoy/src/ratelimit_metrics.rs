//! Exports the metrics with the names in envoyproxy/ratelimit's default Prometheus mapping, so that
//! dashboards for envoyproxy/ratelimit and Envoy Gateway work with Tidegate.

use std::collections::BTreeMap;

use tidegate_limiter::metrics::ListenerKind;
use tidegate_net::prometheus::{Metric, Page};

use super::{ConfigLoads, HitCounterKind, RateLimitService};

const LABELS: [&str; 3] = ["domain", "key1", "key2"];

const HITS: [(HitCounterKind, Metric<3>); 5] = [
    (
        HitCounterKind::TotalHits,
        Metric::foreign_counter(
            "ratelimit_service_rate_limit_total_hits",
            LABELS,
            "Hits requested.",
        ),
    ),
    (
        HitCounterKind::WithinLimit,
        Metric::foreign_counter(
            "ratelimit_service_rate_limit_within_limit",
            LABELS,
            "Hits within their limit.",
        ),
    ),
    (
        HitCounterKind::NearLimit,
        Metric::foreign_counter(
            "ratelimit_service_rate_limit_near_limit",
            LABELS,
            "Hits within their limit and above the near-limit ratio.",
        ),
    ),
    (
        HitCounterKind::OverLimit,
        Metric::foreign_counter(
            "ratelimit_service_rate_limit_over_limit",
            LABELS,
            "Hits over their limit.",
        ),
    ),
    (
        HitCounterKind::ShadowMode,
        Metric::foreign_counter(
            "ratelimit_service_rate_limit_shadow_mode",
            LABELS,
            "Hits over the limit of a rule in shadow mode.",
        ),
    ),
];

const ERRORS: Metric<1> = Metric::foreign_counter(
    "ratelimit_service_should_rate_limit_error",
    ["err_type"],
    "Requests that could not be decided.",
);
const REQUESTS: Metric<1> = Metric::foreign_counter(
    "ratelimit_service_total_requests",
    ["grpc_method"],
    "Requests, by gRPC method.",
);
const RESPONSE_TIME: Metric<1> = Metric::histogram(
    "ratelimit_service_response_time_seconds",
    ["grpc_method"],
    "Decision latency. Each thread measures one in 64 of its decisions.",
);
const LOADED: Metric = Metric::foreign_counter(
    "ratelimit_service_config_load_success",
    [],
    "Configurations that were activated.",
);
const NOT_LOADED: Metric = Metric::foreign_counter(
    "ratelimit_service_config_load_error",
    [],
    "Configurations that were rejected.",
);

const METHOD: &str = "ShouldRateLimit";

/// The domain, and the first two levels of a descriptor path.
type Levels = (String, String, String);

impl RateLimitService {
    /// Adds the metrics to `page`.
    pub(super) fn collect_as_ratelimit(&self, loads: ConfigLoads, page: &mut Page<'_>) {
        let mut sums: BTreeMap<Levels, [u64; HITS.len()]> = BTreeMap::new();
        for ((domain, path), counters) in self.counters() {
            let mut levels = path.split('.').map(str::to_owned);
            let mut level = || levels.next().unwrap_or_default();
            let key = (domain.to_string(), level(), level());
            // Descriptors that differ only in deeper levels have the same labels.
            let sums = sums.entry(key).or_default();
            for (sum, (counter, _)) in sums.iter_mut().zip(&HITS) {
                *sum = sum.saturating_add(counters.read(*counter));
            }
        }
        for (at, (_, metric)) in HITS.iter().enumerate() {
            let samples = sums.iter().map(|((domain, key1, key2), sums)| {
                ([domain.as_str(), key1.as_str(), key2.as_str()], sums[at])
            });
            page.family(metric, samples);
        }
        page.family(&ERRORS, [(["service_error"], self.errors())]);
        let metrics = self.metrics();
        let requests = metrics.requests(ListenerKind::Grpc);
        page.family(&REQUESTS, [([METHOD], requests)]);
        page.histograms(&RESPONSE_TIME, [([METHOD], metrics.latency())]);
        page.single(&LOADED, loads.succeeded);
        page.single(&NOT_LOADED, loads.failed);
    }
}
