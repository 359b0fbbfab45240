//! A door to knock at.

use std::{net::TcpListener, sync::Arc};

use tidegate_core::{MemoryBounds, MemoryStore, Timestamp};
use tidegate_server::{
    clock::Clock,
    config::Config,
    door::http,
    limiter::Limiter,
    net::{Bounds, Listener, Server},
};

use crate::wire::{Client, Reply};

/// When the clock of every test starts: a whole minute.
pub(crate) const START_MICROS: u64 = 1_699_999_980_000_000;

/// A server with one worker and this door alone.
#[derive(Debug)]
pub(crate) struct Door {
    pub(crate) limiter: Arc<Limiter>,
    pub(crate) clock: Clock,
    listener: Listener,
    _server: Server,
}

impl Door {
    /// A door under the rules of a rules file.
    pub(crate) fn open(rules: &str) -> Self {
        Self::with(rules, Bounds::default())
    }

    pub(crate) fn with(rules: &str, bounds: Bounds) -> Self {
        let config = Config::parse(rules).unwrap();
        let clock = Clock::manual(Timestamp::from_micros(START_MICROS));
        let store = MemoryStore::new(MemoryBounds::default());
        let limiter = Arc::new(Limiter::new(config.rules, store, clock.clone()));
        let server = Server::start(1).unwrap();
        let socket = TcpListener::bind("127.0.0.1:0").unwrap();
        let shared = Arc::clone(&limiter);
        let listener = http::listen(&server, socket, bounds, shared, config.headers).unwrap();
        Self {
            limiter,
            clock,
            listener,
            _server: server,
        }
    }

    pub(crate) fn connect(&self) -> Client {
        Client::connect(self.listener.local_addr())
    }

    pub(crate) fn post(&self, path: &str, body: &str) -> Reply {
        let line = format!("POST {path}");
        self.connect().ask(&line, "", body.as_bytes())
    }

    pub(crate) fn at_millis(&self, millis: u64) {
        let micros = START_MICROS + millis * 1_000;
        self.clock.set(Timestamp::from_micros(micros));
    }
}
