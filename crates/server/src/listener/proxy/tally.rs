//! The metrics of upstreams. Each worker has its own counters.

use std::sync::atomic::{AtomicU64, Ordering};

use http::StatusCode;
use tidegate_http::Load;

use super::{
    Upstreams,
    body::BREAKS,
    capacity::Capacity,
    health::{Health, ITS_DOING, RESULTS},
    refusal::Refusal,
};
use crate::metrics::Text;

/// The status classes of responses, as metric labels.
const CLASSES: [&str; 5] = ["1xx", "2xx", "3xx", "4xx", "5xx"];

/// The failures that are counted per upstream.
const FAILURES: [Refusal; 6] = [
    Refusal::Full,
    Refusal::Local,
    Refusal::Unreachable,
    Refusal::ConnectTimeout,
    Refusal::HeadTimeout,
    Refusal::BadAnswer,
];

/// The counters of one upstream, one shard per worker.
#[derive(Debug)]
pub(super) struct Tally(Box<[Shard]>);

// 128 bytes are two cache lines: adjacent-line prefetch makes processors fetch them in pairs.
#[derive(Debug, Default)]
#[repr(align(128))]
struct Shard {
    answers: [AtomicU64; CLASSES.len()],
    failures: [AtomicU64; FAILURES.len()],
    retries: AtomicU64,
}

impl Tally {
    pub(super) fn new(workers: usize) -> Self {
        Self((0..workers).map(|_| Shard::default()).collect())
    }

    /// Counts a response of the upstream.
    pub(super) fn count_answer(&self, worker: usize, status: StatusCode) {
        let class = usize::from(status.as_u16() / 100).wrapping_sub(1);
        let counter = self
            .0
            .get(worker)
            .and_then(|shard| shard.answers.get(class));
        if let Some(counter) = counter {
            counter.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Counts a failed request, if the failure is one of [`FAILURES`].
    pub(super) fn count_failure(&self, worker: usize, refusal: Refusal) {
        let at = FAILURES.iter().position(|failure| *failure == refusal);
        if let Some((shard, at)) = self.0.get(worker).zip(at) {
            shard.failures[at].fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Counts a retry.
    pub(super) fn count_retry(&self, worker: usize) {
        if let Some(shard) = self.0.get(worker) {
            shard.retries.fetch_add(1, Ordering::Relaxed);
        }
    }

    fn sum(&self, counter: impl Fn(&Shard) -> &AtomicU64) -> u64 {
        self.0
            .iter()
            .map(|shard| counter(shard).load(Ordering::Relaxed))
            .sum()
    }
}

impl Upstreams {
    /// Returns all metrics of the upstreams, in the Prometheus text format.
    pub(super) fn exposition(&self) -> String {
        let mut text = Text::default();
        self.write_answers(&mut text);
        self.write_gauges(&mut text);
        self.write_health(&mut text);
        self.write_capacity(&mut text);
        text.finish()
    }

    fn write_answers(&self, text: &mut Text) {
        let name = "tidegate_proxy_responses_total";
        text.family(name, "counter", "Responses of upstreams by status.");
        for upstream in self.iter() {
            for (at, class) in CLASSES.iter().enumerate() {
                let labels = [("upstream", &*upstream.name), ("status", class)];
                text.sample(
                    name,
                    &labels,
                    upstream.tally.sum(|shard| &shard.answers[at]),
                );
            }
        }
        let name = "tidegate_proxy_failures_total";
        let help = "Requests without a response from the upstream, by failure.";
        text.family(name, "counter", help);
        for upstream in self.iter() {
            for (at, failure) in FAILURES.iter().enumerate() {
                let labels = [("upstream", &*upstream.name), ("failure", failure.as_str())];
                text.sample(
                    name,
                    &labels,
                    upstream.tally.sum(|shard| &shard.failures[at]),
                );
            }
        }
        let name = "tidegate_proxy_retries_total";
        let help = "Upstream retries.";
        text.family(name, "counter", help);
        for upstream in self.iter() {
            let retries = upstream.tally.sum(|shard| &shard.retries);
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
        self.each_address(|labels, health| text.sample(up, &labels, u64::from(health.is_well())));
        let name = "tidegate_proxy_ejections_total";
        let help = "Ejections of an endpoint by outlier detection.";
        text.family(name, "counter", help);
        self.each_address(|labels, health| text.sample(name, &labels, health.ejections()));
        let name = "tidegate_proxy_endpoint_failures_total";
        let help = "Requests that failed because of the endpoint, even if a retry on another endpoint succeeded.";
        text.family(name, "counter", help);
        self.each_address(|[upstream, address], health| {
            for (at, failure) in ITS_DOING.iter().enumerate() {
                let labels = [upstream, address, ("failure", failure.as_str())];
                text.sample(name, &labels, health.failures(at));
            }
        });
        let name = "tidegate_proxy_incomplete_responses_total";
        let help = "Responses of an endpoint that ended early or timed out after their head.";
        text.family(name, "counter", help);
        self.each_address(|[upstream, address], health| {
            for (at, failure) in BREAKS.iter().enumerate() {
                let labels = [upstream, address, ("failure", *failure)];
                text.sample(name, &labels, health.breaks(at));
            }
        });
        let name = "tidegate_proxy_health_checks_total";
        text.family(name, "counter", "Health checks of an endpoint by result.");
        self.each_address(|[upstream, address], health| {
            for (at, result) in RESULTS.iter().enumerate() {
                let labels = [upstream, address, ("result", *result)];
                text.sample(name, &labels, health.checks(at));
            }
        });
    }

    fn write_capacity(&self, text: &mut Text) {
        let gauges: [Reading; 2] = [
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
            for (upstream, capacity) in self.bearing() {
                text.sample(
                    name,
                    &[("upstream", upstream)],
                    read(capacity.load()).into(),
                );
            }
        }
        let name = "tidegate_proxy_shed_total";
        let help = "Requests shed because the upstream was at its adaptive concurrency limit.";
        text.family(name, "counter", help);
        for (upstream, capacity) in self.bearing() {
            for (class, shed) in capacity.shed() {
                text.sample(name, &[("upstream", upstream), ("class", class)], shed);
            }
        }
    }

    /// Returns the upstreams that have an adaptive concurrency limit, by name.
    fn bearing(&self) -> impl Iterator<Item = (&str, &Capacity)> {
        self.iter()
            .filter_map(|upstream| Some((&*upstream.name, upstream.capacity.as_ref()?)))
    }

    fn each_address(&self, mut write: impl FnMut([(&str, &str); 2], &Health)) {
        for upstream in self.iter() {
            for address in &upstream.addresses {
                let url = address.url.to_string();
                write(
                    [("upstream", &upstream.name), ("endpoint", &url)],
                    &address.health,
                );
            }
        }
    }

    fn write_gauges(&self, text: &mut Text) {
        let families: [Family; 2] = [
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
type Family = (
    &'static str,
    &'static str,
    fn(&super::upstreams::Upstream) -> usize,
);

/// A gauge of the adaptive concurrency limit, likewise.
type Reading = (&'static str, &'static str, fn(Load) -> u32);
