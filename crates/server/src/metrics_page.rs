//! The metrics of the whole server.

use std::sync::Arc;

use tidegate_core::Timestamp;
use tidegate_envoy::RuleSource;
use tidegate_limiter::ServerLimiter;
use tidegate_net::{
    Tls,
    prometheus::{self, Format, Page},
};
use tidegate_proxy::ProxyRuntime;

use crate::geoip::GeoIp;

/// The server components that have metrics.
#[derive(Clone, Debug)]
pub struct MetricsPage {
    pub(crate) limiter: Arc<ServerLimiter>,
    pub(crate) envoy: Option<Arc<RuleSource>>,
    pub(crate) certificates: Vec<Arc<Tls>>,
    pub(crate) geoip: Option<Arc<GeoIp>>,
    pub(crate) proxy: Option<Arc<ProxyRuntime>>,
}

impl MetricsPage {
    /// Returns all metrics in the given format.
    #[must_use]
    pub fn encode(&self, format: Format) -> String {
        let parts = self.clone();
        prometheus::encode(format, move |page| parts.collect(page))
    }

    /// Returns the current time of the server's clock.
    #[must_use]
    pub fn now(&self) -> Timestamp {
        self.limiter.now()
    }

    fn collect(&self, page: &mut Page<'_>) {
        self.limiter.collect(page);
        if let Some(envoy) = &self.envoy {
            envoy.collect(page);
        }
        if !self.certificates.is_empty() {
            Tls::collect(&self.certificates, page);
        }
        if let Some(geoip) = &self.geoip {
            geoip.collect(page);
        }
        if let Some(proxy) = &self.proxy {
            proxy.collect(page);
        }
    }
}
