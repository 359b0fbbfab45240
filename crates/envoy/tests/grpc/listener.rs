//! A gRPC listener with a manual clock, for tests.

use std::{net::TcpListener, sync::Arc};

use tidegate::Clock;
use tidegate_config::{
    Config, ReservationsConfig,
    envoy::{DomainFiles, RlsSettings},
};
use tidegate_core::{MemoryBounds, MemoryStore, Timestamp};
use tidegate_envoy::{
    File, LoadedConfig, RateLimitService,
    grpc::{self, AuthorizationContext, GrpcContext, Http2},
    quota::Quotas,
    read,
};
use tidegate_limiter::{ServerLimiter, reservations::Reservations};
use tidegate_net::{Bounds, Listener, Server, Tls, TlsListener};

use crate::client::Client;

/// The initial time of every test's clock, in microseconds: the first second of a minute.
const START_MICROS: u64 = 1_700_000_040_000_000;

pub(crate) struct TestListener {
    pub(crate) limiter: Arc<ServerLimiter>,
    quotas: Arc<Quotas>,
    pub(crate) listener: Listener,
    pub(crate) server: Server,
    pub(crate) tls: Option<Arc<Tls>>,
    pub(crate) rate_limits: Option<Arc<RateLimitService>>,
    clock: Clock,
}

impl TestListener {
    /// Opens a listener with the rules file `rules`.
    pub(crate) fn open(rules: &str) -> Self {
        Self::open_with_bounds(rules, Bounds::default())
    }

    /// Opens a listener with a rate limit service. The service uses `settings` and the
    /// configuration `file` in envoyproxy/ratelimit's format.
    pub(crate) fn for_envoy(settings: RlsSettings, file: &str) -> Self {
        let loaded = loaded(file);
        Self::start_with_rate_limits("", Bounds::default(), |limiter| {
            let service = RateLimitService::new(limiter, settings);
            service.load(loaded);
            Some(Arc::new(service))
        })
    }

    /// Opens a listener with a rate limit service. The service uses the configuration `file`, and
    /// the limiter uses `reservations`.
    pub(crate) fn with_reservations(file: &str, reservations: Reservations) -> Self {
        let loaded = loaded(file);
        Self::start_with_reservations("", Bounds::default(), reservations, |limiter| {
            let service = RateLimitService::new(limiter, RlsSettings::default());
            service.load(loaded);
            Some(Arc::new(service))
        })
    }

    /// Opens a listener whose rate limit service does not have a configuration.
    pub(crate) fn without_a_domain(settings: RlsSettings) -> Self {
        Self::start_with_rate_limits("", Bounds::default(), |limiter| {
            Some(Arc::new(RateLimitService::new(limiter, settings)))
        })
    }

    pub(crate) fn open_with_bounds(rules: &str, bounds: Bounds) -> Self {
        Self::start_with_rate_limits(rules, bounds, |_| None)
    }

    fn start_with_rate_limits(
        rules: &str,
        bounds: Bounds,
        rate_limits: impl FnOnce(Arc<ServerLimiter>) -> Option<Arc<RateLimitService>>,
    ) -> Self {
        let reservations = Reservations::new(ReservationsConfig::default(), None).unwrap();
        Self::start_with_reservations(rules, bounds, reservations, rate_limits)
    }

    fn start_with_reservations(
        rules: &str,
        bounds: Bounds,
        reservations: Reservations,
        rate_limits: impl FnOnce(Arc<ServerLimiter>) -> Option<Arc<RateLimitService>>,
    ) -> Self {
        let config = Config::parse(rules).unwrap();
        let clock = Clock::manual(Timestamp::from_micros(START_MICROS));
        let store = MemoryStore::new(MemoryBounds::default());
        let limiter = ServerLimiter::new(config.rules, store, clock.clone());
        let limiter = Arc::new(limiter.with_reservations(reservations));
        let quotas = Arc::<Quotas>::default();
        quotas.swap_rules(config.quotas, limiter.now());
        quotas.show_in(limiter.metrics());
        let server = Server::start(2).unwrap();
        let socket = TcpListener::bind("127.0.0.1:0").unwrap();
        let tls = config
            .grpc
            .tls
            .as_ref()
            .map(|files| Arc::new(Tls::load(TlsListener::Grpc, files).unwrap()));
        let authorization = config.grpc.authorization.then(|| AuthorizationContext {
            identity: Arc::new(config.identity),
            headers: config.headers,
        });
        let http2 = Http2::new(config.grpc, tls.clone());
        let rate_limits = rate_limits(Arc::clone(&limiter));
        let context = GrpcContext {
            limiter: Arc::clone(&limiter),
            quotas: Arc::clone(&quotas),
            rate_limits: rate_limits.clone(),
            authorization,
        };
        let listener = grpc::listen(&server, socket, bounds, context, http2).unwrap();
        Self {
            limiter,
            quotas,
            listener,
            server,
            tls,
            rate_limits,
            clock,
        }
    }

    /// Applies the quotas of the rules file `rules`.
    pub(crate) fn reload(&self, rules: &str) {
        let quotas = Config::parse(rules).unwrap().quotas;
        self.quotas.swap_rules(quotas, self.limiter.now());
    }

    pub(crate) async fn connect(&self) -> Client {
        Client::connect(self.listener.local_addr()).await
    }

    /// Sets the clock to its initial time plus `seconds`.
    pub(crate) fn at_seconds(&self, seconds: u64) {
        self.clock
            .set(Timestamp::from_micros(START_MICROS + seconds * 1_000_000));
    }
}

/// Loads a configuration file in the format of envoyproxy/ratelimit.
fn loaded(text: &str) -> LoadedConfig {
    let file = File {
        name: "shop.yaml".to_owned(),
        text: text.to_owned(),
    };
    read(vec![file], DomainFiles::One).unwrap()
}
