//! What stands behind the proxy: which upstream is for a request, and which of its addresses has the least to do.

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

/// All upstreams, in the order of the configuration.
#[derive(Debug, Default)]
pub(super) struct Upstreams(Box<[Arc<Upstream>]>);

/// One upstream.
#[derive(Debug)]
pub(super) struct Upstream {
    pub(super) name: Box<str>,
    when: When,
    /// What its addresses are to go by once it is in force.
    terms: Arc<Terms>,
    pub(super) addresses: Box<[Arc<Address>]>,
    /// Where to begin looking, so that addresses with equally much to do take turns.
    next: AtomicUsize,
    pub(super) tally: Arc<Tally>,
    /// How much it bears, if that is to be found out.
    pub(super) capacity: Option<Capacity>,
    /// The scheme of its targets, if it is spoken to in HTTP/2.
    pub(super) http2: Option<Scheme>,
}

impl Upstreams {
    /// As `settings` have them, for so many workers; what stands there as in `previous` is what stood there.
    ///
    /// # Errors
    ///
    /// Authorities for TLS that cannot be had.
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

    /// Has addresses asked whether they are well that nobody asks yet, for as long as that is wanted, as `current` has it by then.
    pub(super) fn watch(&self, tasks: &Tasks, current: &Arc<ArcSwap<Current>>) {
        for address in self.addresses() {
            if address.begin_watch() {
                let (address, current) = (Arc::downgrade(address), Arc::downgrade(current));
                tasks.spawn(move || health::watch(address, current));
            }
        }
    }

    /// Lets what is said of addresses hold from now on, and how long connections are kept there at most.
    pub(super) fn put_in_force(&self, longest: Duration) {
        for upstream in &self.0 {
            for address in &upstream.addresses {
                address.go_by(&upstream.terms, longest);
            }
        }
    }

    /// Lets those addresses go that are not among the `next`.
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

    /// What those bear that are asked no more than that.
    pub(super) fn capacities(&self) -> impl Iterator<Item = &Capacity> {
        self.0
            .iter()
            .filter_map(|upstream| upstream.capacity.as_ref())
    }

    /// The first upstream whose conditions hold for the request with this head, whose `Host` there is.
    pub(super) fn choose(&self, head: &Parts) -> Result<&Arc<Upstream>, Refusal> {
        if let Some(first) = self.0.first()
            && first.when.is_always()
        {
            return Ok(first);
        }
        let path = tidegate_http::normal_path(head.uri.path());
        let path = path.map_err(|_| Refusal::DotSegments)?;
        let host = head.headers.get(HOST).map(|host| host.as_bytes());
        // Before the request is settled, the target's own host comes first.
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
            // The configuration holds no numbers that cannot work.
            capacity: capacity.and_then(Result::ok),
            http2: settings.http2.then_some(scheme),
        })
    }

    /// Whose request it was, for the access log, and which of its addresses was asked, if one was.
    pub(super) fn asked(&self, address: Option<&Arc<Address>>) -> AskedOf {
        AskedOf {
            upstream: self.name.clone(),
            address: address.map(|address| address.url.to_string().into()),
        }
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
