//! Upstream metrics. Each worker has its own counters of upstream events.

use tidegate_net::prometheus::{Metric, Page, count};
use tidegate_tower::Load;

use super::{
    body_error::EarlyEnd,
    concurrency::UpstreamConcurrency,
    error::ProxyError,
    upstream::{
        balancer::{Upstream, Upstreams},
        counters::{STATUS_CLASSES, UPSTREAM_ERRORS},
        outlier::{EndpointHealth, HealthCheckResult},
    },
};

const RESPONSES: Metric<2> = Metric::counter(
    "tidegate_proxy_responses_total",
    ["upstream", "status"],
    "Upstream responses by status.",
);
const FAILURES: Metric<2> = Metric::counter(
    "tidegate_proxy_failures_total",
    ["upstream", "failure"],
    "Requests that got no response from the upstream, by failure.",
);
const RETRIES: Metric<1> = Metric::counter(
    "tidegate_proxy_retries_total",
    ["upstream"],
    "Upstream retries.",
);
const ENDPOINT_UP: Metric<2> = Metric::gauge(
    "tidegate_proxy_endpoint_up",
    ["upstream", "endpoint"],
    "Endpoint health: 1 = healthy, 0 = ejected or failing health checks. An unhealthy endpoint is used only if no endpoint is healthy.",
);
const EJECTIONS: Metric<2> = Metric::counter(
    "tidegate_proxy_ejections_total",
    ["upstream", "endpoint"],
    "Ejections of an endpoint by outlier detection.",
);
const ENDPOINT_FAILURES: Metric<3> = Metric::counter(
    "tidegate_proxy_endpoint_failures_total",
    ["upstream", "endpoint", "failure"],
    "Requests that failed because of the endpoint, even if a retry on another endpoint succeeded.",
);
const INCOMPLETE_RESPONSES: Metric<3> = Metric::counter(
    "tidegate_proxy_incomplete_responses_total",
    ["upstream", "endpoint", "failure"],
    "Endpoint responses that ended early or timed out after their headers had arrived.",
);
const HEALTH_CHECKS: Metric<3> = Metric::counter(
    "tidegate_proxy_health_checks_total",
    ["upstream", "endpoint", "result"],
    "Health checks of an endpoint by result.",
);
const SHED: Metric<2> = Metric::counter(
    "tidegate_proxy_shed_total",
    ["upstream", "class"],
    "Requests shed because the upstream was at its adaptive concurrency limit.",
);

/// An upstream gauge, and the function that reads it.
type UpstreamGauge = (Metric<1>, fn(&Upstream) -> usize);

/// The upstream gauges.
const GAUGES: [UpstreamGauge; 2] = [
    (
        Metric::gauge(
            "tidegate_proxy_in_flight",
            ["upstream"],
            "Requests in flight.",
        ),
        |upstream| upstream.in_flight(),
    ),
    (
        Metric::gauge(
            "tidegate_proxy_connections",
            ["upstream"],
            "Connections to the upstream, including idle ones.",
        ),
        |upstream| upstream.connections(),
    ),
];

/// A gauge of an adaptive concurrency limit, and the function that reads it.
type ConcurrencyGauge = (Metric<1>, fn(Load) -> u32);

/// The gauges of an adaptive concurrency limit.
const CONCURRENCY_GAUGES: [ConcurrencyGauge; 2] = [
    (
        Metric::gauge(
            "tidegate_proxy_adaptive_limit",
            ["upstream"],
            "Current adaptive concurrency limit of the upstream.",
        ),
        |load| load.limit,
    ),
    (
        Metric::gauge(
            "tidegate_proxy_adaptive_in_flight",
            ["upstream"],
            "Requests that hold a concurrency slot of the upstream while they wait for the response to begin.",
        ),
        |load| load.in_flight,
    ),
];

impl Upstreams {
    /// Adds all upstream metrics to `page`.
    pub(crate) fn collect(&self, page: &mut Page<'_>) {
        self.collect_responses(page);
        for (metric, read) in &GAUGES {
            let samples = self.iter();
            page.family(
                metric,
                samples.map(|upstream| ([&*upstream.name], count(read(upstream)))),
            );
        }
        self.collect_health(page);
        self.collect_concurrency(page);
    }

    fn collect_responses(&self, page: &mut Page<'_>) {
        let responses = self.iter().flat_map(|upstream| {
            STATUS_CLASSES.iter().enumerate().map(|(at, class)| {
                let count = upstream.metrics.sum(|shard| &shard.responses[at]);
                ([&*upstream.name, *class], count)
            })
        });
        page.family(&RESPONSES, responses);
        let failures = self.iter().flat_map(|upstream| {
            UPSTREAM_ERRORS.iter().enumerate().map(|(at, failure)| {
                let count = upstream.metrics.sum(|shard| &shard.failures[at]);
                ([&*upstream.name, failure.as_str()], count)
            })
        });
        page.family(&FAILURES, failures);
        let retries = self.iter().map(|upstream| {
            let retries = upstream.metrics.sum(|shard| &shard.retries);
            ([&*upstream.name], retries)
        });
        page.family(&RETRIES, retries);
    }

    fn collect_health(&self, page: &mut Page<'_>) {
        let endpoints: Vec<(&str, String, &EndpointHealth)> = self
            .iter()
            .flat_map(|upstream| {
                let endpoints = upstream.endpoints.iter();
                endpoints.map(|endpoint| {
                    (
                        &*upstream.name,
                        endpoint.address.url.to_string(),
                        &endpoint.health,
                    )
                })
            })
            .collect();
        let single = |read: fn(&EndpointHealth) -> u64| {
            let endpoints = endpoints.iter();
            endpoints.map(move |(upstream, url, health)| ([*upstream, url.as_str()], read(health)))
        };
        page.family(
            &ENDPOINT_UP,
            single(|health| u64::from(health.is_healthy())),
        );
        page.family(&EJECTIONS, single(EndpointHealth::ejections));
        let failures = endpoints.iter().flat_map(|(upstream, url, health)| {
            let kinds = ProxyError::OF_UPSTREAM.iter().enumerate();
            kinds.map(move |(at, kind)| {
                let labels = [*upstream, url.as_str(), kind.as_str()];
                (labels, health.failures(at))
            })
        });
        page.family(&ENDPOINT_FAILURES, failures);
        let early_ends = endpoints.iter().flat_map(|(upstream, url, health)| {
            EarlyEnd::ALL.map(|end| {
                let labels = [*upstream, url.as_str(), end.as_str()];
                (labels, health.early_ends(end))
            })
        });
        page.family(&INCOMPLETE_RESPONSES, early_ends);
        let checks = endpoints.iter().flat_map(|(upstream, url, health)| {
            HealthCheckResult::ALL.map(|result| {
                let labels = [*upstream, url.as_str(), result.as_str()];
                (labels, health.checks(result))
            })
        });
        page.family(&HEALTH_CHECKS, checks);
    }

    fn collect_concurrency(&self, page: &mut Page<'_>) {
        for (metric, read) in &CONCURRENCY_GAUGES {
            let samples = self
                .with_concurrency_limit()
                .map(|(upstream, concurrency)| ([upstream], read(concurrency.load()).into()));
            page.family(metric, samples);
        }
        let shed = self
            .with_concurrency_limit()
            .flat_map(|(upstream, concurrency)| {
                concurrency
                    .shed()
                    .map(move |(class, shed)| ([upstream, class], shed))
            });
        page.family(&SHED, shed);
    }

    /// Returns the name and the limit of each upstream with an adaptive concurrency limit.
    fn with_concurrency_limit(&self) -> impl Iterator<Item = (&str, &UpstreamConcurrency)> {
        self.iter()
            .filter_map(|upstream| Some((&*upstream.name, upstream.concurrency.as_ref()?)))
    }
}
