//! The settings of the proxy and its upstreams, which a reload replaces as a whole.

use std::sync::Arc;

use tidegate::Clock;
use tidegate_config::Proxy;

use super::{balancer::Upstreams, tls::TrustAnchorError};

/// One consistent version of the settings and the upstreams.
#[derive(Debug)]
pub struct RuntimeConfig {
    pub(crate) settings: Arc<Proxy>,
    pub(crate) upstreams: Upstreams,
}

impl RuntimeConfig {
    pub(crate) fn new(
        settings: Proxy,
        workers: usize,
        previous: &Upstreams,
        clock: &Clock,
    ) -> Result<Self, TrustAnchorError> {
        Ok(Self {
            upstreams: Upstreams::inheriting_from(&settings.upstreams, workers, previous, clock)?,
            settings: Arc::new(settings),
        })
    }
}
