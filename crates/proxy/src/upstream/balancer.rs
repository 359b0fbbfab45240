//! Routing and load balancing: selects the upstream for a request, and the upstream's least loaded
//! endpoint.

use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use http::{header::HOST, request::Parts, uri::Scheme};
use tidegate::Clock;
use tidegate_core::{Cost, Request, When};

use super::{
    address::EndpointAddress,
    counters::UpstreamMetrics,
    endpoint::Endpoint,
    endpoint_settings::EndpointSettings,
    tls::{TrustAnchorError, connector},
};
use crate::{concurrency::UpstreamConcurrency, error::ProxyError};

/// All upstreams, in configuration order.
#[derive(Debug, Default)]
pub(crate) struct Upstreams(Box<[Arc<Upstream>]>);

/// An upstream: a group of endpoints that serve the same requests.
#[derive(Debug)]
pub(crate) struct Upstream {
    pub(crate) name: Box<str>,
    when: When,
    /// The settings for the endpoints of this upstream. The settings take effect in
    /// [`Upstreams::activate`].
    endpoint_settings: Arc<EndpointSettings>,
    pub(crate) endpoints: Box<[Arc<Endpoint>]>,
    /// The round robin position, which breaks ties between equally loaded endpoints.
    next: AtomicUsize,
    pub(crate) metrics: Arc<UpstreamMetrics>,
    /// The adaptive concurrency limit, if configured.
    pub(crate) concurrency: Option<UpstreamConcurrency>,
    /// The scheme of request targets; `None` if the upstream uses HTTP/1.1.
    pub(crate) http2: Option<Scheme>,
}

impl Upstreams {
    /// Builds the upstreams of `settings` for the given number of workers. An endpoint that already
    /// exists in `previous` keeps its connections, counters and health.
    ///
    /// # Errors
    ///
    /// Returns an error if the trust anchors for TLS cannot be loaded.
    pub(crate) fn inheriting_from(
        settings: &[tidegate_config::UpstreamConfig],
        workers: usize,
        previous: &Self,
        clock: &Clock,
    ) -> Result<Self, TrustAnchorError> {
        let upstream = |settings: &tidegate_config::UpstreamConfig| {
            let previous = previous
                .iter()
                .find(|unchanged| unchanged.name == settings.name);
            let previous = previous.map(Arc::as_ref);
            let upstream = Upstream::inheriting_from(settings, workers, previous, clock)?;
            Ok(Arc::new(upstream))
        };
        let upstreams: Result<_, TrustAnchorError> = settings.iter().map(upstream).collect();
        upstreams.map(Self)
    }

    /// Applies the new settings to all endpoints, with `idle_timeout` as the idle timeout of pooled
    /// connections.
    pub(crate) fn activate(&self, idle_timeout: Duration) {
        for upstream in &self.0 {
            for endpoint in &upstream.endpoints {
                endpoint.update_settings(&upstream.endpoint_settings, idle_timeout);
            }
        }
    }

    /// Retires the endpoints that are not part of `next`.
    pub(crate) fn retire_removed(&self, next: &Self) {
        for endpoint in self.endpoints() {
            if !next.endpoints().any(|kept| Arc::ptr_eq(kept, endpoint)) {
                endpoint.retire();
            }
        }
    }

    pub(super) fn endpoints(&self) -> impl Iterator<Item = &Arc<Endpoint>> {
        self.0.iter().flat_map(|upstream| &upstream.endpoints)
    }

    pub(crate) fn iter(&self) -> std::slice::Iter<'_, Arc<Upstream>> {
        self.0.iter()
    }

    /// Returns the adaptive concurrency limits of all upstreams with such a limit.
    pub(crate) fn concurrency_limits(&self) -> impl Iterator<Item = &UpstreamConcurrency> {
        self.0
            .iter()
            .filter_map(|upstream| upstream.concurrency.as_ref())
    }

    /// Returns the first upstream whose conditions match the request head. The head must contain a
    /// `Host` header.
    pub(crate) fn route(&self, head: &Parts) -> Result<&Arc<Upstream>, ProxyError> {
        if let Some(first) = self.0.first()
            && first.when.is_always()
        {
            return Ok(first);
        }
        let path = tidegate_identity::normalize_path(head.uri.path());
        let path = path.map_err(|_| ProxyError::DotSegments)?;
        let host = head.headers.get(HOST).map(|host| host.as_bytes());
        // Before the head is normalised, the host of an absolute-form target takes precedence over
        // `Host`.
        let host = head.uri.host().map(str::as_bytes).or(host);
        let host = tidegate_identity::bare_host(&String::from_utf8_lossy(host.unwrap_or_default()));
        let entries = [
            ("path", &*path),
            ("host", &*host),
            ("method", head.method.as_str()),
        ];
        let request = Request::new(&entries, Cost::ONE).map_err(|_| ProxyError::Unroutable)?;
        let mut upstreams = self.0.iter();
        upstreams
            .find(|upstream| upstream.when.holds_for(&request))
            .ok_or(ProxyError::NoUpstream)
    }
}

impl Upstream {
    fn inheriting_from(
        settings: &tidegate_config::UpstreamConfig,
        workers: usize,
        previous: Option<&Self>,
        clock: &Clock,
    ) -> Result<Self, TrustAnchorError> {
        let tls = connector(settings)?;
        let scheme = if tls.is_some() {
            Scheme::HTTPS
        } else {
            Scheme::HTTP
        };
        let endpoint_settings = Arc::new(EndpointSettings::of(settings));
        let endpoint = |url: tidegate_config::Url| {
            let address = EndpointAddress::new(url, settings, tls.as_ref());
            let mut unchanged = previous.iter().flat_map(|previous| &previous.endpoints);
            let unchanged = unchanged.find(|endpoint| endpoint.address == address);
            unchanged
                .cloned()
                .unwrap_or_else(|| Arc::new(Endpoint::new(address, &endpoint_settings, workers)))
        };
        let unchanged = previous.and_then(|previous| previous.concurrency.as_ref());
        let concurrency = settings.adaptive.as_ref();
        let concurrency = concurrency.map(|adaptive| {
            UpstreamConcurrency::inheriting_from(adaptive, settings, unchanged, clock)
        });
        let metrics = previous.map(|previous| Arc::clone(&previous.metrics));
        Ok(Self {
            name: settings.name.clone(),
            when: settings.when.clone(),
            endpoints: settings.urls.iter().cloned().map(endpoint).collect(),
            endpoint_settings,
            next: AtomicUsize::new(0),
            metrics: metrics.unwrap_or_else(|| Arc::new(UpstreamMetrics::new(workers))),
            // `concurrency` is never an error, because parsing has checked that the settings are in
            // range.
            concurrency: concurrency.and_then(Result::ok),
            http2: settings.http2.then_some(scheme),
        })
    }

    /// Advances the round robin position. Returns the position from which a request starts its
    /// search for an endpoint.
    pub(crate) fn next_position(&self) -> usize {
        match self.endpoints.len() {
            1 => 0,
            _ => self.next.fetch_add(1, Ordering::Relaxed),
        }
    }

    /// Returns the endpoint with the fewest requests in flight, and its index. Skips endpoints
    /// whose bit is set in `tried`. If several endpoints are equally loaded, returns the first of
    /// them at or after the index `start`, wrapping around.
    pub(crate) fn least_loaded(&self, start: usize, tried: u64) -> Option<(usize, &Arc<Endpoint>)> {
        let count = self.endpoints.len();
        let candidates = (0..count)
            .map(|step| start.wrapping_add(step) % count)
            .filter(|at| tried & (1 << at) == 0)
            .map(|at| (at, &self.endpoints[at]));
        // Sort unhealthy endpoints last, so that they are used only if no healthy endpoint is left
        // (panic mode).
        candidates.min_by_key(|(_, endpoint)| (!endpoint.health.is_healthy(), endpoint.in_flight()))
    }

    pub(crate) fn in_flight(&self) -> usize {
        self.endpoints
            .iter()
            .map(|endpoint| endpoint.in_flight())
            .sum()
    }

    pub(crate) fn connections(&self) -> usize {
        self.endpoints
            .iter()
            .map(|endpoint| endpoint.connections())
            .sum()
    }
}
