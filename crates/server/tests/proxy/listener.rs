//! A proxy that runs in the test process.

use std::{fmt::Display, net::TcpListener, sync::Arc, time::Duration};

use tidegate::Clock;
use tidegate_config::Config;
use tidegate_core::{MemoryBounds, MemoryStore, Timestamp};
use tidegate_limiter::ServerLimiter;
use tidegate_net::{Listener, Server, Tls, TlsListener};
use tidegate_proxy::{self as proxy, AccessLog, Dependencies, ProxyRuntime};
use tidegate_server::geoip::GeoIp;

use crate::client::{Answer, Client};

/// The initial time of every test's clock: the first second of a minute.
const START_MICROS: u64 = 1_700_000_040_000_000;

pub(crate) struct TestListener {
    pub(crate) listener: Listener,
    pub(crate) server: Server,
    pub(crate) runtime: Arc<ProxyRuntime>,
    pub(crate) limiter: Arc<ServerLimiter>,
    pub(crate) tls: Option<Arc<Tls>>,
}

impl TestListener {
    /// Opens a proxy in front of one upstream.
    pub(crate) fn in_front_of(url: impl Display) -> Self {
        Self::with(url, "")
    }

    /// Opens a proxy in front of one upstream, with additional settings under `proxy:`, one per
    /// line.
    pub(crate) fn with(url: impl Display, settings: &str) -> Self {
        let mut text = format!(
            "proxy:\n  listen: 127.0.0.1:0\n  upstreams: [{{name: app, urls: [\"{url}\"]}}]\n"
        );
        for line in settings.lines() {
            text.push_str("  ");
            text.push_str(line);
            text.push('\n');
        }
        Self::open(&text)
    }

    /// Opens a proxy with this rules file.
    pub(crate) fn open(text: &str) -> Self {
        let config = Config::parse(text).unwrap_or_else(|mistakes| panic!("{mistakes:?}"));
        let server = Server::start(1).unwrap();
        let mut identity = config.identity;
        if !config.geoip.is_empty() {
            identity.geoip = Some(GeoIp::open(&config.geoip).unwrap().source());
        }
        let settings = config.proxy.unwrap();
        let tls = settings.tls.as_ref();
        let tls = tls.map(|files| Arc::new(Tls::load(TlsListener::Proxy, files).unwrap()));
        let log = settings.access_log.as_ref();
        let log = log.map(|log| AccessLog::open(log).unwrap());
        let clock = Clock::manual(Timestamp::from_micros(START_MICROS));
        let runtime = ProxyRuntime::new(settings, &server, log, clock.clone()).unwrap();
        let runtime = Arc::new(runtime);
        let store = MemoryStore::new(MemoryBounds::default());
        let limiter = Arc::new(ServerLimiter::new(config.rules, store, clock));
        let dependencies = Dependencies {
            limiter: Arc::clone(&limiter),
            headers: config.headers,
            runtime: Arc::clone(&runtime),
            identity: Arc::new(identity),
            tls: tls.clone(),
        };
        let socket = TcpListener::bind("127.0.0.1:0").unwrap();
        let listener = proxy::listen(&server, socket, dependencies).unwrap();
        Self {
            listener,
            server,
            runtime,
            limiter,
            tls,
        }
    }

    pub(crate) fn connect(&self) -> Client {
        Client::connect(self.listener.local_addr())
    }

    pub(crate) fn get(&self, path: &str) -> Answer {
        self.connect().ask("GET", path, &[], b"")
    }

    pub(crate) fn shut_down(self) -> usize {
        tokio::runtime::Builder::new_current_thread()
            .enable_time()
            .build()
            .unwrap()
            .block_on(self.server.shutdown(Duration::from_secs(20)))
    }
}
