//! Quota metrics.

use std::sync::Arc;

use tidegate_limiter::metrics::Metrics;
use tidegate_net::prometheus::{Metric, Page, count};

use super::Quotas;

const BUCKETS: Metric = Metric::gauge(
    "tidegate_quota_buckets",
    [],
    "Quota buckets, including unused buckets whose usage still counts.",
);
const STREAMS: Metric = Metric::gauge(
    "tidegate_quota_streams",
    [],
    "Open RLQS streams from Envoy that share the quotas.",
);

impl Quotas {
    /// Registers these quotas' metrics in `metrics`.
    pub fn show_in(self: &Arc<Self>, metrics: &Metrics) {
        let quotas = Arc::clone(self);
        metrics.show(move |page| quotas.collect(page));
    }

    fn collect(&self, page: &mut Page<'_>) {
        let counts = self.counts();
        page.single(&BUCKETS, count(counts.buckets));
        page.single(&STREAMS, count(counts.streams));
    }
}
