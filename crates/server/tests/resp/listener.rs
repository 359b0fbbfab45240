//! A Redis protocol listener with a manual clock, and a client.

use std::{
    io::{Read, Write},
    net::{Shutdown, SocketAddr, TcpListener, TcpStream},
    sync::Arc,
    time::Duration,
};

use tidegate::Clock;
use tidegate_config::ReservationsConfig;
use tidegate_core::{MemoryBounds, MemoryStore, RuleSet, Timestamp};
use tidegate_limiter::{ServerLimiter, reservations::Reservations};
use tidegate_net::{Bounds, Listener, Server};
use tidegate_server::listener::resp;

use crate::value::{Value, read_value};

/// A timeout that is longer than any test step takes. The timeout makes a hanging test fail.
const TIMEOUT: Duration = Duration::from_secs(30);

/// The initial time of every test's clock.
const START_MICROS: u64 = 1_700_000_000_000_000;

/// A server with one worker, whose only listener speaks the Redis protocol.
pub(crate) struct TestListener {
    pub(crate) limiter: Arc<ServerLimiter>,
    pub(crate) listener: Listener,
    pub(crate) server: Server,
    clock: Clock,
}

impl TestListener {
    pub(crate) fn open() -> Self {
        Self::with(RuleSet::default(), resp::default_bounds())
    }

    pub(crate) fn with(rules: RuleSet, bounds: Bounds) -> Self {
        let clock = Clock::manual(Timestamp::from_micros(START_MICROS));
        let store = MemoryStore::new(MemoryBounds::default());
        let reservations = Reservations::new(ReservationsConfig::default(), None).unwrap();
        let limiter = ServerLimiter::new(rules, store, clock.clone());
        let limiter = Arc::new(limiter.with_reservations(reservations));
        let server = Server::start(1).unwrap();
        let socket = TcpListener::bind("127.0.0.1:0").unwrap();
        let listener = resp::listen(&server, socket, bounds, Arc::clone(&limiter)).unwrap();
        Self {
            limiter,
            listener,
            server,
            clock,
        }
    }

    pub(crate) fn address(&self) -> SocketAddr {
        self.listener.local_addr()
    }

    /// Sets the clock to `millis` milliseconds after its initial time.
    pub(crate) fn at_millis(&self, millis: u64) {
        self.clock
            .set(Timestamp::from_micros(START_MICROS + millis * 1_000));
    }

    pub(crate) fn connect(&self) -> Client {
        Client::connect(self.address())
    }

    /// Sends `input`, half-closes the connection, and returns everything that the server sends.
    pub(crate) fn converse(&self, input: &[u8]) -> String {
        let mut client = self.connect();
        client.send(input);
        client.stream.shutdown(Shutdown::Write).unwrap();
        client.rest()
    }
}

/// A minimal Redis protocol client.
pub(crate) struct Client {
    stream: TcpStream,
    read: Vec<u8>,
}

impl Client {
    pub(crate) fn connect(address: SocketAddr) -> Self {
        let stream = TcpStream::connect(address).unwrap();
        stream.set_read_timeout(Some(TIMEOUT)).unwrap();
        stream.set_write_timeout(Some(TIMEOUT)).unwrap();
        stream.set_nodelay(true).unwrap();
        Self {
            stream,
            read: Vec::new(),
        }
    }

    pub(crate) fn send(&mut self, bytes: &[u8]) {
        self.stream.write_all(bytes).unwrap();
    }

    /// Sends a command, given as words without spaces, and reads its reply.
    pub(crate) fn command(&mut self, words: &str) -> Value {
        let words: Vec<&[u8]> = words.split(' ').map(str::as_bytes).collect();
        self.command_of(&words)
    }

    pub(crate) fn command_of(&mut self, words: &[&[u8]]) -> Value {
        self.send(&encode(words));
        self.value()
    }

    /// Reads one reply.
    pub(crate) fn value(&mut self) -> Value {
        loop {
            if let Some((value, used)) = read_value(&self.read) {
                self.read.drain(..used);
                return value;
            }
            let mut buffer = [0; 4_096];
            let bytes = self.stream.read(&mut buffer).unwrap();
            assert_ne!(
                bytes,
                0,
                "closed before a complete reply: {}",
                self.read.escape_ascii()
            );
            self.read.extend_from_slice(&buffer[..bytes]);
        }
    }

    /// Reads until the server closes the connection, and returns everything that was read.
    pub(crate) fn rest(&mut self) -> String {
        self.stream.read_to_end(&mut self.read).unwrap();
        String::from_utf8_lossy(&self.read).into_owned()
    }
}

pub(crate) fn encode(words: &[&[u8]]) -> Vec<u8> {
    let mut bytes = format!("*{}\r\n", words.len()).into_bytes();
    for word in words {
        bytes.extend(format!("${}\r\n", word.len()).bytes());
        bytes.extend_from_slice(word);
        bytes.extend_from_slice(b"\r\n");
    }
    bytes
}
