//! The settings of an endpoint, which a reload can change.

use tidegate_config::{Ejection, HealthCheck, UpstreamConfig};

/// The settings that an endpoint takes from its upstream. A reload may change these settings.
#[derive(Debug)]
pub(crate) struct EndpointSettings {
    /// The upstream's name.
    pub(crate) name: Box<str>,
    /// The maximum number of connections to the endpoint.
    pub(super) max_connections: usize,
    pub(crate) eject: Option<Ejection>,
    pub(crate) health: Option<HealthCheck>,
}

impl EndpointSettings {
    pub(crate) fn of(upstream: &UpstreamConfig) -> Self {
        Self {
            name: upstream.name.clone(),
            max_connections: upstream.max_connections,
            // With a single endpoint, ejection would leave no endpoint for requests.
            eject: upstream.eject.filter(|_| upstream.urls.len() > 1),
            health: upstream.health.clone(),
        }
    }
}
