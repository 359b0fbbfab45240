//! Routing and load balancing: picks the upstream for a request, and its least loaded endpoint.

use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use arc_swap::ArcSwap;
use http::{header::HOST, request::Parts, uri::Scheme};
use tidegate_core::{Cost, Request, When};
use tidegate_http::Clock;

use super::{
    access_log::AskedOf,
    address::{Address, Terms},
    authorities::{AuthoritiesError, connector},
    capacity::Capacity,
    health,
    live::Current,
    refusal::Refusal,
    tally::Tally,
};
use crate::{config, net::Tasks};

/// All upstreams, in configuration order.
#[derive(Debug, Default)]
pub(super) struct Upstreams(Box<[Arc<Upstream>]>);

/// An upstream: a group of endpoints that serve the same requests.
#[derive(Debug)]
pub(super) struct Upstream {
    pub(super) name: Box<str>,
    when: When,
    /// The settings that its endpoints take over once the configuration is activated.
    terms: Arc<Terms>,
    pub(super) addresses: Box<[Arc<Address>]>,
    /// The round robin position, for ties between equally loaded endpoints.
    next: AtomicUsize,
    pub(super) tally: Arc<Tally>,
    /// The adaptive concurrency limit, if configured.
    pub(super) capacity: Option<Capacity>,
    /// The scheme of its request targets, if it speaks HTTP/2.
    pub(super) http2: Option<Scheme>,
}

impl Upstreams {
    /// Builds the upstreams of `settings` for this number of workers. Endpoints that are unchanged
    /// since `previous` keep their connections, counters and health.
    ///
    /// # Errors
    ///
    /// The trust anchors for TLS cannot be loaded.
    pub(super) fn succeeding(
        settings: &[config::Upstream],
        workers: usize,
        previous: &Self,
        clock: &Clock,
    ) -> Result<Self, AuthoritiesError> {
        let upstream = |settings: &config::Upstream| {
            let previous = previous.iter().find(|known| known.name == settings.name);
            let previous = previous.map(Arc::as_ref);
            let upstream = Upstream::succeeding(settings, workers, previous, clock)?;
            Ok(Arc::new(upstream))
        };
        let upstreams: Result<_, AuthoritiesError> = settings.iter().map(upstream).collect();
        upstreams.map(Self)
    }

    /// Starts active health checks for endpoints that should have them and do not. They run until
    /// `current` no longer configures them.
    pub(super) fn watch(&self, tasks: &Tasks, current: &Arc<ArcSwap<Current>>) {
        for address in self.addresses() {
            if address.begin_watch() {
                let (address, current) = (Arc::downgrade(address), Arc::downgrade(current));
                tasks.spawn(move || health::watch(address, current));
            }
        }
    }

    /// Applies the new settings to all endpoints, with `longest` as the idle timeout of pooled
    /// connections.
    pub(super) fn put_in_force(&self, longest: Duration) {
        for upstream in &self.0 {
            for address in &upstream.addresses {
                address.go_by(&upstream.terms, longest);
            }
        }
    }

    /// Retires the endpoints that are not among those of `next`.
    pub(super) fn leave(&self, next: &Self) {
        for address in self.addresses() {
            if !next.addresses().any(|kept| Arc::ptr_eq(kept, address)) {
                address.leave();
            }
        }
    }

    fn addresses(&self) -> impl Iterator<Item = &Arc<Address>> {
        self.0.iter().flat_map(|upstream| &upstream.addresses)
    }

    pub(super) fn iter(&self) -> std::slice::Iter<'_, Arc<Upstream>> {
        self.0.iter()
    }

    /// Returns the adaptive concurrency limits of the upstreams that have one.
    pub(super) fn capacities(&self) -> impl Iterator<Item = &Capacity> {
        self.0
            .iter()
            .filter_map(|upstream| upstream.capacity.as_ref())
    }

    /// Returns the first upstream whose conditions match the request with this head, which has a
    /// `Host`.
    pub(super) fn choose(&self, head: &Parts) -> Result<&Arc<Upstream>, Refusal> {
        if let Some(first) = self.0.first()
            && first.when.is_always()
        {
            return Ok(first);
        }
        let path = tidegate_http::normal_path(head.uri.path());
        let path = path.map_err(|_| Refusal::DotSegments)?;
        let host = head.headers.get(HOST).map(|host| host.as_bytes());
        // Before the head is normalised, the host of an absolute-form target takes precedence over
        // `Host`.
        let host = head.uri.host().map(str::as_bytes).or(host);
        let host = tidegate_http::bare_host(&String::from_utf8_lossy(host.unwrap_or_default()));
        let entries = [
            ("path", &*path),
            ("host", &*host),
            ("method", head.method.as_str()),
        ];
        let request = Request::new(&entries, Cost::ONE).map_err(|_| Refusal::Unroutable)?;
        let mut upstreams = self.0.iter();
        upstreams
            .find(|upstream| upstream.when.holds_for(&request))
            .ok_or(Refusal::NoUpstream)
    }
}

impl Upstream {
    fn succeeding(
        settings: &config::Upstream,
        workers: usize,
        previous: Option<&Self>,
        clock: &Clock,
    ) -> Result<Self, AuthoritiesError> {
        let tls = connector(settings)?;
        let scheme = if tls.is_some() {
            Scheme::HTTPS
        } else {
            Scheme::HTTP
        };
        let terms = Arc::new(Terms::of(settings));
        let address = |url: config::Url| {
            let mut known = previous.iter().flat_map(|previous| &previous.addresses);
            let known = known.find(|address| address.is_as(&url, settings, tls.as_ref()));
            known.cloned().unwrap_or_else(|| {
                let address = Address::new(url, (settings, &terms), tls.as_ref(), workers);
                Arc::new(address)
            })
        };
        let known = previous.and_then(|previous| previous.capacity.as_ref());
        let capacity = settings.adaptive.as_ref();
        let capacity =
            capacity.map(|adaptive| Capacity::succeeding(adaptive, settings, known, clock));
        let tally = previous.map(|previous| Arc::clone(&previous.tally));
        Ok(Self {
            name: settings.name.clone(),
            when: settings.when.clone(),
            addresses: settings.urls.iter().cloned().map(address).collect(),
            terms,
            next: AtomicUsize::new(0),
            tally: tally.unwrap_or_else(|| Arc::new(Tally::new(workers))),
            // A parsed configuration contains no settings that are out of range.
            capacity: capacity.and_then(Result::ok),
            http2: settings.http2.then_some(scheme),
        })
    }

    /// Returns the names of the upstream and of the endpoint that was asked, if any, for the access
    /// log.
    pub(super) fn asked(&self, address: Option<&Arc<Address>>) -> AskedOf {
        AskedOf {
            upstream: self.name.clone(),
            address: address.map(|address| address.url.to_string().into()),
        }
    }

    /// Advances the round robin position, from which a request starts to look for an endpoint.
    pub(super) fn turn(&self) -> usize {
        match self.addresses.len() {
            1 => 0,
            _ => self.next.fetch_add(1, Ordering::Relaxed),
        }
    }

    /// Returns the endpoint with the fewest requests in flight, and its index. Skips those whose
    /// bit is set in `tried`. Among equally loaded ones it takes the first, counting from `turn`.
    pub(super) fn least_loaded(&self, turn: usize, tried: u64) -> Option<(usize, &Arc<Address>)> {
        let count = self.addresses.len();
        let left = (0..count)
            .map(|step| turn.wrapping_add(step) % count)
            .filter(|at| tried & (1 << at) == 0)
            .map(|at| (at, &self.addresses[at]));
        // Unhealthy endpoints sort last: they are used only if no healthy one is left (panic mode).
        left.min_by_key(|(_, address)| (!address.health.is_well(), address.in_flight()))
    }

    pub(super) fn in_flight(&self) -> usize {
        self.addresses
            .iter()
            .map(|address| address.in_flight())
            .sum()
    }

    pub(super) fn connections(&self) -> usize {
        self.addresses
            .iter()
            .map(|address| address.connections())
            .sum()
    }
}
