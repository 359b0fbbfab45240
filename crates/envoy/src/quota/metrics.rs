//! Metrics of quotas.

use std::sync::Arc;

use tidegate_limiter::metrics::Metrics;
use tidegate_net::prometheus::Text;

use super::Quotas;

impl Quotas {
    /// Exports the metrics of these quotas with `metrics`.
    pub fn show_in(self: &Arc<Self>, metrics: &Metrics) {
        let quotas = Arc::clone(self);
        metrics.show(move |text| quotas.write(text));
    }

    fn write(&self, text: &mut Text) {
        let counts = self.counts();
        let families = [
            (
                "tidegate_quota_buckets",
                "Buckets whose quotas are assigned.",
                counts.buckets,
            ),
            (
                "tidegate_quota_streams",
                "Envoy streams that share the quotas.",
                counts.streams,
            ),
        ];
        for (name, help, count) in families {
            text.single(
                name,
                "gauge",
                help,
                u64::try_from(count).unwrap_or(u64::MAX),
            );
        }
    }
}
