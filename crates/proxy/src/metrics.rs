//! The metrics of upstreams. Each worker has its own counters.

use std::sync::atomic::{AtomicU64, Ordering};

use http::StatusCode;
use tidegate_net::prometheus::Text;
use tidegate_tower::Load;

use super::{
    concurrency::UpstreamConcurrency,
    error::ProxyError,
    request_body::EARLY_ENDS,
    upstream::{
        balancer::Upstreams,
        outlier::{CHECK_RESULTS, EndpointHealth},
    },
};

/// The status classes of responses, as metric labels.
const STATUS_CLASSES: [&str; 5] = ["1xx", "2xx", "3xx", "4xx", "5xx"];

/// The failures that are counted per upstream.
const UPSTREAM_ERRORS: [ProxyError; 6] = [
    ProxyError::Full,
    ProxyError::Local,
    ProxyError::Unreachable,
    ProxyError::ConnectTimeout,
    ProxyError::HeadTimeout,
    ProxyError::BadResponse,
];

/// The counters of one upstream, one shard per worker.
#[derive(Debug)]
pub(crate) struct UpstreamMetrics(Box<[MetricsShard]>);

// 128 bytes are two cache lines: adjacent-line prefetch makes processors fetch them in pairs.
#[derive(Debug, Default)]
#[repr(align(128))]
struct MetricsShard {
    responses: [AtomicU64; STATUS_CLASSES.len()],
    failures: [AtomicU64; UPSTREAM_ERRORS.len()],
    retries: AtomicU64,
}

impl UpstreamMetrics {
    pub(crate) fn new(workers: usize) -> Self {
        Self((0..workers).map(|_| MetricsShard::default()).collect())
    }

    /// Counts a response of the upstream.
    pub(crate) fn count_response(&self, worker: usize, status: StatusCode) {
        let class = usize::from(status.as_u16() / 100).wrapping_sub(1);
        let counter = self
            .0
            .get(worker)
            .and_then(|shard| shard.responses.get(class));
        if let Some(counter) = counter {
            counter.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Counts a failed request, if the failure is one of [`UPSTREAM_ERRORS`].
    pub(crate) fn count_failure(&self, worker: usize, error: ProxyError) {
        let at = UPSTREAM_ERRORS.iter().position(|failure| *failure == error);
        if let Some((shard, at)) = self.0.get(worker).zip(at) {
            shard.failures[at].fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Counts a retry.
    pub(crate) fn count_retry(&self, worker: usize) {
        if let Some(shard) = self.0.get(worker) {
            shard.retries.fetch_add(1, Ordering::Relaxed);
        }
    }

    fn sum(&self, counter: impl Fn(&MetricsShard) -> &AtomicU64) -> u64 {
        self.0
            .iter()
            .map(|shard| counter(shard).load(Ordering::Relaxed))
            .sum()
    }
}

impl Upstreams {
    /// Returns all metrics of the upstreams, in the Prometheus text format.
    pub(crate) fn exposition(&self) -> String {
        let mut text = Text::default();
        self.write_responses(&mut text);
        self.write_gauges(&mut text);
        self.write_health(&mut text);
        self.write_concurrency(&mut text);
        text.finish()
    }

    fn write_responses(&self, text: &mut Text) {
        let name = "tidegate_proxy_responses_total";
        text.family(name, "counter", "Responses of upstreams by status.");
        for upstream in self.iter() {
            for (at, class) in STATUS_CLASSES.iter().enumerate() {
                let labels = [("upstream", &*upstream.name), ("status", class)];
                text.sample(
                    name,
                    &labels,
                    upstream.metrics.sum(|shard| &shard.responses[at]),
                );
            }
        }
        let name = "tidegate_proxy_failures_total";
        let help = "Requests without a response from the upstream, by failure.";
        text.family(name, "counter", help);
        for upstream in self.iter() {
            for (at, failure) in UPSTREAM_ERRORS.iter().enumerate() {
                let labels = [("upstream", &*upstream.name), ("failure", failure.as_str())];
                text.sample(
                    name,
                    &labels,
                    upstream.metrics.sum(|shard| &shard.failures[at]),
                );
            }
        }
        let name = "tidegate_proxy_retries_total";
        let help = "Upstream retries.";
        text.family(name, "counter", help);
        for upstream in self.iter() {
            let retries = upstream.metrics.sum(|shard| &shard.retries);
            text.sample(name, &[("upstream", &upstream.name)], retries);
        }
    }

    fn write_health(&self, text: &mut Text) {
        let up = "tidegate_proxy_endpoint_up";
        text.family(
            up,
            "gauge",
            "Endpoint health: 1 = healthy, 0 = ejected or failing health checks, and used only if no other endpoint is healthy.",
        );
        self.for_each_endpoint(|labels, health| {
            text.sample(up, &labels, u64::from(health.is_healthy()))
        });
        let name = "tidegate_proxy_ejections_total";
        let help = "Ejections of an endpoint by outlier detection.";
        text.family(name, "counter", help);
        self.for_each_endpoint(|labels, health| text.sample(name, &labels, health.ejections()));
        let name = "tidegate_proxy_endpoint_failures_total";
        let help = "Requests that failed because of the endpoint, even if a retry on another endpoint succeeded.";
        text.family(name, "counter", help);
        self.for_each_endpoint(|[upstream, endpoint], health| {
            for (at, failure) in ProxyError::OF_UPSTREAM.iter().enumerate() {
                let labels = [upstream, endpoint, ("failure", failure.as_str())];
                text.sample(name, &labels, health.failures(at));
            }
        });
        let name = "tidegate_proxy_incomplete_responses_total";
        let help = "Responses that an endpoint cut off, or that timed out, after their headers had been received.";
        text.family(name, "counter", help);
        self.for_each_endpoint(|[upstream, endpoint], health| {
            for (at, failure) in EARLY_ENDS.iter().enumerate() {
                let labels = [upstream, endpoint, ("failure", *failure)];
                text.sample(name, &labels, health.early_ends(at));
            }
        });
        let name = "tidegate_proxy_health_checks_total";
        text.family(name, "counter", "Health checks of an endpoint by result.");
        self.for_each_endpoint(|[upstream, endpoint], health| {
            for (at, result) in CHECK_RESULTS.iter().enumerate() {
                let labels = [upstream, endpoint, ("result", *result)];
                text.sample(name, &labels, health.checks(at));
            }
        });
    }

    fn write_concurrency(&self, text: &mut Text) {
        let gauges: [ConcurrencyGauge; 2] = [
            (
                "tidegate_proxy_adaptive_limit",
                "Current adaptive concurrency limit of the upstream.",
                |load| load.limit,
            ),
            (
                "tidegate_proxy_adaptive_in_flight",
                "Requests that hold a concurrency slot of the upstream, until their responses begin.",
                |load| load.in_flight,
            ),
        ];
        for (name, help, read) in gauges {
            text.family(name, "gauge", help);
            for (upstream, concurrency) in self.with_concurrency_limit() {
                text.sample(
                    name,
                    &[("upstream", upstream)],
                    read(concurrency.load()).into(),
                );
            }
        }
        let name = "tidegate_proxy_shed_total";
        let help = "Requests shed because the upstream was at its adaptive concurrency limit.";
        text.family(name, "counter", help);
        for (upstream, concurrency) in self.with_concurrency_limit() {
            for (class, shed) in concurrency.shed() {
                text.sample(name, &[("upstream", upstream), ("class", class)], shed);
            }
        }
    }

    /// Returns the upstreams that have an adaptive concurrency limit, by name.
    fn with_concurrency_limit(&self) -> impl Iterator<Item = (&str, &UpstreamConcurrency)> {
        self.iter()
            .filter_map(|upstream| Some((&*upstream.name, upstream.concurrency.as_ref()?)))
    }

    fn for_each_endpoint(&self, mut write: impl FnMut([(&str, &str); 2], &EndpointHealth)) {
        for upstream in self.iter() {
            for endpoint in &upstream.endpoints {
                let url = endpoint.url.to_string();
                write(
                    [("upstream", &upstream.name), ("endpoint", &url)],
                    &endpoint.health,
                );
            }
        }
    }

    fn write_gauges(&self, text: &mut Text) {
        let families: [GaugeFamily; 2] = [
            (
                "tidegate_proxy_in_flight",
                "Requests in flight.",
                |upstream| upstream.in_flight(),
            ),
            (
                "tidegate_proxy_connections",
                "Connections to the upstream, including idle ones.",
                |upstream| upstream.connections(),
            ),
        ];
        for (name, help, read) in families {
            text.family(name, "gauge", help);
            for upstream in self.iter() {
                let value = u64::try_from(read(upstream)).unwrap_or(u64::MAX);
                text.sample(name, &[("upstream", &upstream.name)], value);
            }
        }
    }
}

/// A gauge per upstream: its name, its help text, and the function that reads it.
type GaugeFamily = (
    &'static str,
    &'static str,
    fn(&super::upstream::balancer::Upstream) -> usize,
);

/// A gauge of the adaptive concurrency limit: its name, its help text, and the function that reads
/// it.
type ConcurrencyGauge = (&'static str, &'static str, fn(Load) -> u32);
