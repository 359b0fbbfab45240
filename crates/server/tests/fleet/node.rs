//! A node with a Redis backend: a limiter with a manual clock, and listeners that are opened on
//! request.

use std::{
    net::{SocketAddr, TcpListener},
    sync::Arc,
};

use tidegate::{Clock, DecidedRequest, RateLimiter as _};
use tidegate_config::{Config, EventsConfig, Headers, ReservationsConfig};
use tidegate_core::{
    Cost, Effect, FallbackShare, MemoryBounds, MemoryStore, Request, Scratch, Source, Timestamp,
    top::TopBounds,
};
use tidegate_limiter::{
    Backend, KeyMask, ServerLimiter, events::Events, metrics::ListenerKind,
    reservations::Reservations,
};
use tidegate_net::{Bounds, Server};
use tidegate_redis::{
    Address, FallbackSettings, FallbackStore, NodeShare, Redis, RedisSettings, Topology,
};
use tidegate_server::listener::{admin, http, resp};
use tokio::runtime::Runtime;

use crate::support::{TIMEOUT, eventually};

/// The initial time of every node's clock. Redis uses its own clock.
const START_MICROS: u64 = 1_700_000_000_000_000;

/// One rule for each fallback policy, all with the same limit, and two shadow rules.
pub(crate) const RULES: &str = "
defaults: {algorithm: token_bucket}
rules:
  - {name: local, when: {path: /local}, key: [user], limits: [10/h], on_failure: local}
  - {name: open, when: {path: /open}, key: [user], limits: [10/h], on_failure: open}
  - {name: closed, when: {path: /closed}, key: [user], limits: [10/h], on_failure: closed}
  - {name: shadow, when: {path: /shadow}, key: [user], limits: [10/h], on_failure: closed, mode: shadow}
  - {name: local_shadow, when: {path: /local_shadow}, key: [user], limits: [{algorithm: gcra, rate: 10/h, burst: 9}], mode: shadow, on_failure: local}
";

pub(crate) struct Node {
    pub(crate) limiter: Arc<ServerLimiter>,
    clock: Clock,
    runtime: Runtime,
    server: Server,
}

/// The result of a request.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Answer {
    pub(crate) allowed: bool,
    pub(crate) reason: Option<&'static str>,
    pub(crate) exactness: &'static str,
    pub(crate) source: Source,
    pub(crate) remaining: Option<u64>,
}

impl Node {
    pub(crate) fn start(url: &str) -> Self {
        let settings = FallbackSettings {
            share: NodeShare::Fixed(FallbackShare::default()),
            ..FallbackSettings::default()
        };
        Self::with(url, settings)
    }

    pub(crate) fn with(url: &str, settings: FallbackSettings) -> Self {
        Self::with_mask(url, settings, KeyMask::plain())
    }

    pub(crate) fn with_mask(url: &str, settings: FallbackSettings, mask: KeyMask) -> Self {
        let server = Address::parse(url).unwrap().0;
        Self::on(Topology::Standalone(server), settings, mask)
    }

    /// Starts a node that uses a Redis cluster. The node discovers the cluster through the cluster
    /// node at `url`.
    pub(crate) fn on_cluster(url: &str) -> Self {
        let seeds = vec![Address::parse(url).unwrap().0];
        let settings = FallbackSettings::default();
        Self::on(Topology::Cluster { seeds }, settings, KeyMask::plain())
    }

    /// Starts a node with the memory store, to compare it with the others.
    pub(crate) fn in_memory() -> Self {
        let store = MemoryStore::new(MemoryBounds::default());
        Self::with_backend(runtime(), store, KeyMask::plain())
    }

    fn on(topology: Topology, settings: FallbackSettings, mask: KeyMask) -> Self {
        let runtime = runtime();
        let connection = RedisSettings {
            // The timeout is longer than the default, because tests may be slow on a busy machine.
            timeout: std::time::Duration::from_millis(500),
            ..RedisSettings::new(topology)
        };
        let redis = Arc::new(Redis::start(connection, runtime.handle()));
        let store = MemoryStore::new(MemoryBounds::default());
        let fallback = FallbackStore::new(redis, "test", store, settings);
        Self::with_backend(runtime, fallback, mask)
    }

    fn with_backend(runtime: Runtime, backend: impl Into<Backend>, mask: KeyMask) -> Self {
        let clock = Clock::manual(Timestamp::from_micros(START_MICROS));
        let rules = Config::parse(RULES).unwrap().rules;
        let events =
            Events::open(&EventsConfig::default(), Vec::new(), mask.clone(), &clock).unwrap();
        let reservations = Reservations::new(
            ReservationsConfig::default(),
            Some("the-secret-of-the-fleet"),
        );
        let limiter = ServerLimiter::new(rules, backend, clock.clone())
            .with_top(Some(TopBounds::default()))
            .with_reservations(reservations.unwrap())
            .with_events(Some(Arc::new(events)))
            .with_key_mask(mask);
        Self {
            limiter: Arc::new(limiter),
            clock,
            runtime,
            server: Server::start(1).unwrap(),
        }
    }

    /// Sets the node's clock to `millis` milliseconds after its initial time.
    pub(crate) fn at_millis(&self, millis: u64) {
        self.clock
            .set(Timestamp::from_micros(START_MICROS + millis * 1_000));
    }

    /// Sets the node's clock like [`Self::at_millis`]. In calls of this node, the clock of Redis
    /// has the same time.
    pub(crate) fn at_millis_with_redis(&self, millis: u64) {
        self.at_millis(millis);
        let store = self.limiter.redis_store().unwrap().store();
        store.pin_clock(self.limiter.now());
    }

    /// Returns the key of `user` under this rule.
    pub(crate) fn key(&self, rule: &str, user: &str) -> Vec<u8> {
        let rules = self.limiter.rules();
        rules.rule(rule).unwrap().encode_key(&[user]).unwrap()
    }

    /// Charges one request by `user` under this rule.
    pub(crate) fn spend(&self, rule: &str, user: &str) -> Answer {
        self.ask(rule, user, Effect::Charge)
    }

    /// Refunds one request by `user` under this rule.
    pub(crate) fn refund(&self, rule: &str, user: &str) -> Answer {
        self.ask(rule, user, Effect::Refund)
    }

    fn ask(&self, rule: &str, user: &str, effect: Effect) -> Answer {
        let path = format!("/{rule}");
        let entries = [("path", path.as_str()), ("user", user)];
        let request = Request::new(&entries, Cost::ONE).unwrap();
        let (rules, mut scratch) = (self.limiter.rules(), Scratch::default());
        let asked = self.limiter.check(&rules, &mut scratch, &request, effect);
        let verdict = self.run(asked).unwrap();
        let decided = DecidedRequest {
            request: &request,
            rules: &rules,
            now: self.limiter.now(),
        };
        self.limiter.observe(ListenerKind::Http, decided, &verdict);
        Answer {
            allowed: verdict.allowed,
            reason: verdict.reason.map(|reason| reason.as_str()),
            exactness: verdict.exactness.as_str(),
            source: verdict.source,
            remaining: verdict.leading().map(|line| line.outcome.remaining),
        }
    }

    /// Sends `tries` requests, and returns the number of admitted requests.
    pub(crate) fn admitted(&self, rule: &str, user: &str, tries: usize) -> usize {
        (0..tries)
            .filter(|_| self.spend(rule, user).allowed)
            .count()
    }

    /// Waits until Redis is reachable if `up` is true, and until it is unreachable otherwise.
    pub(crate) fn until_up(&self, up: bool) {
        eventually("Redis is in the expected state", || {
            let health = self.limiter.redis_store().unwrap().stats().health;
            ((health.up == 1) == up && (up || health.error.is_some())).then_some(())
        });
    }

    /// Runs a future on the runtime of the node's Redis connections.
    pub(crate) fn run<T>(&self, future: impl IntoFuture<Output = T>) -> T {
        self.runtime
            .block_on(async { tokio::time::timeout(TIMEOUT, future).await.unwrap() })
    }

    /// Runs a future on the runtime of the node's Redis connections until the node is dropped.
    pub(crate) fn spawn(&self, future: impl Future<Output = ()> + Send + 'static) {
        self.runtime.spawn(future);
    }

    pub(crate) fn open_resp(&self) -> SocketAddr {
        let (socket, limiter) = (socket(), Arc::clone(&self.limiter));
        let listener = resp::listen(&self.server, socket, resp::default_bounds(), limiter);
        listener.unwrap().local_addr()
    }

    pub(crate) fn open_http(&self) -> SocketAddr {
        let context = http::HttpContext {
            limiter: Arc::clone(&self.limiter),
            headers: Headers::default(),
            identity: Arc::default(),
            rate_limits: None,
            token: None,
            hosts: Vec::new(),
            tls: None,
        };
        let listener = http::listen(&self.server, socket(), Bounds::default(), context);
        listener.unwrap().local_addr()
    }

    pub(crate) fn open_admin(&self) -> SocketAddr {
        let context = admin::AdminContext {
            limiter: Arc::clone(&self.limiter),
            reloader: None,
            envoy: None,
            certificates: Vec::new(),
            geoip: None,
            proxy: None,
            identity: Arc::default(),
            credentials: Vec::new(),
            hosts: Vec::new(),
            tls: None,
        };
        let listener = admin::listen(&self.server, socket(), Bounds::default(), context);
        listener.unwrap().local_addr()
    }
}

fn runtime() -> Runtime {
    tokio::runtime::Builder::new_multi_thread()
        .worker_threads(1)
        .enable_all()
        .build()
        .unwrap()
}

fn socket() -> TcpListener {
    TcpListener::bind("127.0.0.1:0").unwrap()
}
