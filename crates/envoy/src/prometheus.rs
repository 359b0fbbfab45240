//! Prometheus metrics of the rate limit service.

use tidegate_net::prometheus::{Metric, Page, count};

use super::{ConfigLoads, ConfigWatcher, HitCounterKind, RateLimitService, XdsClient};

/// The metric of each counter. The documentation maps the metrics to the names in
/// envoyproxy/ratelimit.
const HITS: [(HitCounterKind, Metric<2>); 7] = [
    (
        HitCounterKind::TotalHits,
        Metric::counter(
            "tidegate_envoy_hits_total",
            ["domain", "descriptor"],
            "Hits requested, by domain and descriptor.",
        ),
    ),
    (
        HitCounterKind::WithinLimit,
        Metric::counter(
            "tidegate_envoy_within_limit_total",
            ["domain", "descriptor"],
            "Hits within their limit.",
        ),
    ),
    (
        HitCounterKind::NearLimit,
        Metric::counter(
            "tidegate_envoy_near_limit_total",
            ["domain", "descriptor"],
            "Hits within their limit and above the near-limit ratio.",
        ),
    ),
    (
        HitCounterKind::OverLimit,
        Metric::counter(
            "tidegate_envoy_over_limit_total",
            ["domain", "descriptor"],
            "Hits over their limit, including limits of rules in shadow mode.",
        ),
    ),
    (
        HitCounterKind::OverLimitWithLocalCache,
        Metric::counter(
            "tidegate_envoy_over_limit_cached_total",
            ["domain", "descriptor"],
            "Hits over their limit, decided from the local cache without the store.",
        ),
    ),
    (
        HitCounterKind::ShadowMode,
        Metric::counter(
            "tidegate_envoy_shadow_over_limit_total",
            ["domain", "descriptor"],
            "Hits over the limit of a rule in shadow mode.",
        ),
    ),
    (
        HitCounterKind::TotalNegativeHits,
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
    "Descriptors requested in domains that no file defines.",
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

const XDS_CONNECTED: Metric = Metric::gauge(
    "tidegate_envoy_xds_connected",
    [],
    "Whether a stream to the control plane is open (1) or not (0).",
);
const XDS_CONNECTIONS: Metric<1> = Metric::counter(
    "tidegate_envoy_xds_connections_total",
    ["result"],
    "Attempts to connect to the control plane, by result.",
);
const XDS_ENDED_STREAMS: Metric = Metric::counter(
    "tidegate_envoy_xds_streams_ended_total",
    [],
    "Streams to the control plane that have ended.",
);
const XDS_RESPONSES: Metric<1> = Metric::counter(
    "tidegate_envoy_xds_responses_total",
    ["result"],
    "Responses of the control plane, by result: acked, rejected (NACK), or ignored because of their type.",
);
const XDS_RESOURCES: Metric = Metric::gauge(
    "tidegate_envoy_xds_resources",
    [],
    "Resources in the active configuration.",
);
const XDS_LAST_RESPONSE: Metric = Metric::gauge(
    "tidegate_envoy_xds_last_response_timestamp_seconds",
    [],
    "Unix time of the last response of the control plane; 0 before the first.",
);

impl ConfigWatcher {
    /// Adds the metrics to `page`.
    pub fn collect(&self, page: &mut Page<'_>) {
        self.service().collect(page);
        let is_active = self.last_mistakes().is_empty();
        collect_loads(self.service(), self.loads(), is_active, page);
    }
}

impl XdsClient {
    /// Adds the metrics to `page`.
    pub fn collect(&self, page: &mut Page<'_>) {
        self.service().collect(page);
        let (counts, state) = (&self.status().counts, self.status().lock());
        let (acked, rejected) = (counts.accepted.get(), counts.rejected.get());
        let loads = ConfigLoads {
            succeeded: acked,
            failed: rejected,
        };
        let is_active = state.mistakes.is_empty();
        let is_connected = u64::from(state.is_connected);
        let (resources, last) = (count(state.resources), state.last_response);
        drop(state);
        collect_loads(self.service(), loads, is_active, page);
        page.single(&XDS_CONNECTED, is_connected);
        let failed = counts.failed_connections.get();
        let connections = [(["ok"], counts.connections.get()), (["failed"], failed)];
        page.family(&XDS_CONNECTIONS, connections);
        page.single(&XDS_ENDED_STREAMS, counts.ended_streams.get());
        let responses = [
            (["acked"], acked),
            (["rejected"], rejected),
            (["ignored"], counts.ignored.get()),
        ];
        page.family(&XDS_RESPONSES, responses);
        page.single(&XDS_RESOURCES, resources);
        let last = last.map_or(0, |last| last.as_micros() / 1_000_000);
        page.single(&XDS_LAST_RESPONSE, last);
    }
}

fn collect_loads(
    service: &RateLimitService,
    loads: ConfigLoads,
    is_active: bool,
    page: &mut Page<'_>,
) {
    let ConfigLoads { succeeded, failed } = loads;
    page.family(&CONFIG_LOADS, [(["ok"], succeeded), (["failed"], failed)]);
    page.single(&LAST_CONFIG_LOAD_SUCCESS, u64::from(is_active));
    if service.has_ratelimit_metrics() {
        service.collect_as_ratelimit(loads, page);
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
