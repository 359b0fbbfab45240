//! What stands behind the proxy: which upstream is for a request, and which of its addresses has the least to do.

use std::sync::{
    Arc,
    atomic::{AtomicUsize, Ordering},
};

use http::{header::HOST, request::Parts, uri::Scheme};
use tidegate_core::{Cost, Request, When};

use super::{
    address::Address,
    authorities::{AuthoritiesError, connector},
    health,
    refusal::Refusal,
    tally::Tally,
};
use crate::{config, net::Server};

/// All upstreams, in the order of the configuration.
#[derive(Debug)]
pub struct Upstreams(Box<[Arc<Upstream>]>);

/// One upstream.
#[derive(Debug)]
pub(super) struct Upstream {
    pub(super) name: Box<str>,
    when: When,
    pub(super) addresses: Box<[Arc<Address>]>,
    /// Where to begin looking, so that addresses with equally much to do take turns.
    next: AtomicUsize,
    pub(super) tally: Tally,
    check: Option<config::HealthCheck>,
    /// The scheme of its targets, if it is spoken to in HTTP/2.
    pub(super) http2: Option<Scheme>,
}

impl Upstreams {
    /// As `settings` have them, for so many workers.
    ///
    /// # Errors
    ///
    /// Authorities for TLS that cannot be had.
    pub fn new(settings: &[config::Upstream], workers: usize) -> Result<Self, AuthoritiesError> {
        let upstream = |settings| Ok(Arc::new(Upstream::new(settings, workers)?));
        let upstreams: Result<_, AuthoritiesError> = settings.iter().map(upstream).collect();
        upstreams.map(Self)
    }

    /// Has their addresses asked whether they are well, on the first worker of `server`, for as long as they are there.
    pub fn watch(&self, server: &Server, settings: &Arc<config::Proxy>) {
        for upstream in &self.0 {
            let Some(check) = &upstream.check else {
                continue;
            };
            for address in &upstream.addresses {
                let (address, check) = (Arc::downgrade(address), check.clone());
                let settings = Arc::clone(settings);
                server.spawn(move || health::watch(address, check, settings));
            }
        }
    }

    pub(super) fn iter(&self) -> std::slice::Iter<'_, Arc<Upstream>> {
        self.0.iter()
    }

    /// The first upstream whose conditions hold for the request with this head, whose `Host` there is.
    pub(super) fn choose(&self, head: &Parts) -> Result<&Arc<Upstream>, Refusal> {
        if let Some(first) = self.0.first()
            && first.when.is_always()
        {
            return Ok(first);
        }
        let path = tidegate_http::normal_path(head.uri.path());
        let host = head.headers.get(HOST).map(|host| host.as_bytes());
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
    fn new(settings: &config::Upstream, workers: usize) -> Result<Self, AuthoritiesError> {
        let tls = connector(settings)?;
        let scheme = if tls.is_some() {
            Scheme::HTTPS
        } else {
            Scheme::HTTP
        };
        let address = |url| Arc::new(Address::new(url, settings, tls.as_ref(), workers));
        Ok(Self {
            name: settings.name.clone(),
            when: settings.when.clone(),
            addresses: settings.urls.iter().cloned().map(address).collect(),
            next: AtomicUsize::new(0),
            tally: Tally::new(workers),
            check: settings.health.clone(),
            http2: settings.http2.then_some(scheme),
        })
    }

    /// A new turn: where a request begins to look.
    pub(super) fn turn(&self) -> usize {
        match self.addresses.len() {
            1 => 0,
            _ => self.next.fetch_add(1, Ordering::Relaxed),
        }
    }

    /// The address with the least to do among those that were not `tried`, a bit for each; the first of `turn` where
    /// several have equally little.
    pub(super) fn least_loaded(&self, turn: usize, tried: u64) -> Option<(usize, &Arc<Address>)> {
        let count = self.addresses.len();
        let left = (0..count)
            .map(|step| turn.wrapping_add(step) % count)
            .filter(|at| tried & (1 << at) == 0)
            .map(|at| (at, &self.addresses[at]));
        // Where nobody is well, who is not is asked before nobody is.
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
