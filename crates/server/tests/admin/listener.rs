//! An admin listener with a manual clock, and a method to charge a key.

use std::{
    net::{SocketAddr, TcpListener},
    sync::Arc,
};

use tempfile::NamedTempFile;
use tidegate::{Clock, DecidedRequest, RateLimiter as _};
use tidegate_config::{Config, TokenScope};
use tidegate_core::{
    Cost, Effect, MemoryBounds, MemoryStore, Request, Scratch, Timestamp, Verdict, top::TopBounds,
};
use tidegate_limiter::{ServerLimiter, metrics};
use tidegate_net::{Bounds, Listener, Server};
use tidegate_server::{
    listener::admin::{self, AdminContext, AdminCredential},
    reload::{Reloader, RestartOnlySettings},
};

use crate::client::{Answer, Client};

/// The initial time of every test's clock: the start of a minute.
const START_MICROS: u64 = 1_699_999_980_000_000;

pub(crate) const START_MILLIS: u64 = START_MICROS / 1_000;

pub(crate) const RULES: &str = "
rules:
  - name: r
    when: {path: /**}
    key: [path, ip]
    limits: [2/min, 100/h]
    algorithm: token_bucket
  - name: 'all of it'
    limits: [{algorithm: gcra, rate: 1/s, burst: 1000, soft: 10%}]
    mode: shadow
";

/// The key of [`TestListener::spend`], percent-encoded, because a slash is part of the key.
pub(crate) const KEY: &str = "r/%2Fa%20b/%3A%3A";

pub(crate) struct TestListener {
    pub(crate) limiter: Arc<ServerLimiter>,
    pub(crate) file: NamedTempFile,
    pub(crate) listener: Listener,
    clock: Clock,
    server: Server,
}

impl TestListener {
    pub(crate) fn open() -> Self {
        Self::with_token(None)
    }

    pub(crate) fn with_token(token: Option<&str>) -> Self {
        Self::with_limiter(token, |limiter| {
            limiter.with_top(Some(TopBounds::default()))
        })
    }

    pub(crate) fn with_limiter(
        token: Option<&str>,
        adjust: impl FnOnce(ServerLimiter) -> ServerLimiter,
    ) -> Self {
        let credential = token.map(|token| AdminCredential {
            name: "admin".to_owned(),
            scope: TokenScope::Operate,
            token: token.to_owned(),
        });
        Self::with_credentials(credential.into_iter().collect(), adjust)
    }

    pub(crate) fn with_credentials(
        credentials: Vec<AdminCredential>,
        adjust: impl FnOnce(ServerLimiter) -> ServerLimiter,
    ) -> Self {
        let file = NamedTempFile::new().unwrap();
        std::fs::write(file.path(), RULES).unwrap();
        let clock = Clock::manual(Timestamp::from_micros(START_MICROS));
        let store = MemoryStore::new(MemoryBounds::default());
        let rules = Config::parse(RULES).unwrap().rules;
        let limiter = Arc::new(adjust(ServerLimiter::new(rules, store, clock.clone())));
        let reloader = Reloader::new(
            file.path().to_owned(),
            Arc::clone(&limiter),
            Arc::default(),
            None,
            RestartOnlySettings::default(),
            None,
        );
        let context = AdminContext {
            limiter: Arc::clone(&limiter),
            reloader: Some(Arc::new(reloader)),
            envoy: None,
            certificates: Vec::new(),
            geoip: None,
            proxy: None,
            identity: Arc::default(),
            credentials,
            hosts: vec!["limits.internal".to_owned()],
            tls: None,
        };
        let server = Server::start(1).unwrap();
        let socket = TcpListener::bind("127.0.0.1:0").unwrap();
        let listener = admin::listen(&server, socket, Bounds::default(), context).unwrap();
        limiter.metrics().show_listener("admin", listener.clone());
        Self {
            limiter,
            file,
            listener,
            clock,
            server,
        }
    }

    /// Opens a metrics listener in addition to the admin listener, and returns its address.
    pub(crate) fn open_metrics(&self) -> SocketAddr {
        let context = AdminContext {
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
        let socket = TcpListener::bind("127.0.0.1:0").unwrap();
        let listener = admin::listen_metrics(&self.server, socket, Bounds::default(), context);
        listener.unwrap().local_addr()
    }

    /// Sets the clock to `secs` seconds after its initial time.
    pub(crate) fn at_secs(&self, secs: u64) {
        self.clock
            .set(Timestamp::from_micros(START_MICROS + secs * 1_000_000));
    }

    pub(crate) fn ask(&self, method: &str, path: &str, body: &str) -> Answer {
        self.ask_with(method, path, &[], body)
    }

    pub(crate) fn ask_with(
        &self,
        method: &str,
        path: &str,
        headers: &[(&str, &str)],
        body: &str,
    ) -> Answer {
        let mut client = Client::connect(self.listener.local_addr());
        client.ask(method, path, headers, body.as_bytes())
    }

    /// Charges the key [`KEY`] for one request and counts the verdict. Returns whether the request
    /// was admitted.
    pub(crate) fn spend(&self) -> bool {
        self.charge(&[("path", "/a b"), ("ip", "::")], 1)
    }

    /// Charges a request with this cost and these entries, and counts the verdict. Returns whether
    /// the request was admitted.
    pub(crate) fn charge(&self, entries: &[(&str, &str)], cost: u64) -> bool {
        let request = Request::new(entries, Cost::new(cost).unwrap()).unwrap();
        let (rules, mut scratch) = (self.limiter.rules(), Scratch::default());
        let verdict: Verdict<'_> = self
            .limiter
            .check(&rules, &mut scratch, &request, Effect::Charge)
            .ready()
            .unwrap()
            .unwrap();
        let decided = DecidedRequest {
            request: &request,
            rules: &rules,
            now: self.limiter.now(),
        };
        self.limiter
            .observe(metrics::ListenerKind::Http, decided, &verdict);
        verdict.allowed
    }
}
