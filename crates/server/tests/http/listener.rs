//! An HTTP listener with a manual clock.

use std::{net::TcpListener, sync::Arc};

use serde_json::Value;
use tidegate::Clock;
use tidegate_config::{Config, Password};
use tidegate_core::{MemoryBounds, MemoryStore, Timestamp};
use tidegate_limiter::{ServerLimiter, reservations::Reservations};
use tidegate_net::{Bounds, Listener, Server, Tls, TlsListener};
use tidegate_server::{
    geoip::GeoIp,
    listener::http::{self, HttpContext},
};

use crate::client::{Answer, Client};

/// The initial time of every test's clock.
const START_MICROS: u64 = 1_700_000_000_000_000;

pub(crate) struct TestListener {
    pub(crate) limiter: Arc<ServerLimiter>,
    pub(crate) listener: Listener,
    pub(crate) server: Server,
    clock: Clock,
}

impl TestListener {
    /// Opens a listener with the given rules file.
    pub(crate) fn open(rules: &str) -> Self {
        Self::with(rules, MemoryBounds::default(), Bounds::default())
    }

    pub(crate) fn with(rules: &str, memory: MemoryBounds, bounds: Bounds) -> Self {
        let config = Config::parse(rules).unwrap();
        let clock = Clock::manual(Timestamp::from_micros(START_MICROS));
        let store = MemoryStore::new(memory);
        let reservations = Reservations::new(config.reservations, Some("a-secret-of-tests"));
        let limiter = ServerLimiter::new(config.rules, store, clock.clone())
            .with_reservations(reservations.unwrap());
        let limiter = Arc::new(limiter.with_trust(config.identity.trust.clone()));
        let mut identity = config.identity;
        if !config.geoip.is_empty() {
            identity.geoip = Some(GeoIp::open(&config.geoip).unwrap().source());
        }
        let server = Server::start(1).unwrap();
        let tls = config.listeners.http.tls;
        let context = HttpContext {
            limiter: Arc::clone(&limiter),
            headers: config.headers,
            identity: Arc::new(identity),
            rate_limits: None,
            hosts: config.listeners.http.hosts,
            token: match config.listeners.http.credential {
                Password::Literal(token) => Some(token),
                _ => None,
            },
            tls: tls.map(|files| Arc::new(Tls::load(TlsListener::Http, &files).unwrap())),
        };
        let socket = TcpListener::bind("127.0.0.1:0").unwrap();
        let listener = http::listen(&server, socket, bounds, context).unwrap();
        Self {
            limiter,
            listener,
            server,
            clock,
        }
    }

    /// Sets the clock to `millis` milliseconds after its initial time.
    pub(crate) fn at_millis(&self, millis: u64) {
        self.set_clock(Timestamp::from_micros(START_MICROS + millis * 1_000));
    }

    pub(crate) fn set_clock(&self, now: Timestamp) {
        self.clock.set(now);
    }

    pub(crate) fn connect(&self) -> Client {
        Client::connect(self.listener.local_addr())
    }

    pub(crate) fn post(&self, path: &str, body: &str) -> Answer {
        self.connect().ask("POST", path, &[], body.as_bytes())
    }

    /// Sends a body to `path`, and returns the status and the verdict.
    pub(crate) fn verdict(&self, path: &str, body: &str) -> (u16, Value) {
        let answer = self.post(path, body);
        (answer.status, answer.json())
    }

    /// Sends a forward-auth request with these headers.
    pub(crate) fn authorize(&self, query: &str, headers: &[(&str, &str)]) -> Answer {
        let path = format!("/v1/authorize{query}");
        self.connect().ask("GET", &path, headers, b"")
    }
}
