//! Tests of passwords, and of clients that do not speak the Redis protocol.

use std::{net::TcpListener, sync::Arc};

use tidegate::Clock;
use tidegate_core::{MemoryBounds, MemoryStore, RuleSet, Timestamp};
use tidegate_limiter::ServerLimiter;
use tidegate_net::{Listener, Server};
use tidegate_server::listener::resp::{self, RespContext};

use crate::{
    listener::{Client, TestListener, encode},
    value::Value,
};

const NOAUTH: &str = "-NOAUTH Authentication required.";
const WRONGPASS: &str = "-WRONGPASS invalid username-password pair or user is disabled.";

/// A listener that requires a password.
struct Guarded {
    listener: Listener,
    limiter: Arc<ServerLimiter>,
    clock: Clock,
    _server: Server,
}

impl Guarded {
    fn open(username: Option<&str>) -> Self {
        let clock = Clock::manual(Timestamp::from_micros(1_700_000_000_000_000));
        let store = MemoryStore::new(MemoryBounds::default());
        let limiter = Arc::new(ServerLimiter::new(RuleSet::default(), store, clock.clone()));
        let server = Server::start(1).unwrap();
        let socket = TcpListener::bind("127.0.0.1:0").unwrap();
        let context = RespContext {
            limiter: Arc::clone(&limiter),
            username: username.map(str::to_owned),
            password: Some("secret".to_owned()),
            tls: None,
            top: false,
        };
        let listener =
            resp::listen_guarded(&server, socket, resp::default_bounds(), context).unwrap();
        Self {
            listener,
            limiter,
            clock,
            _server: server,
        }
    }

    fn connect(&self) -> Client {
        Client::connect(self.listener.local_addr())
    }

    #[track_caller]
    fn assert_answers(&self, asked: &[(&str, &str)]) {
        let mut client = self.connect();
        for (command, expected) in asked {
            assert_eq!(client.command(command).to_string(), *expected, "{command}");
        }
    }
}

#[test]
fn nothing_is_decided_before_the_password() {
    let guarded = Guarded::open(None);
    guarded.assert_answers(&[
        ("PING", NOAUTH),
        ("CL.THROTTLE k 1 1 60", NOAUTH),
        ("THROTTLE k 1 1 60", NOAUTH),
        ("TIDEGATE.CHECK user u", NOAUTH),
        ("INFO", NOAUTH),
        ("MULTI", NOAUTH),
        ("EXEC", NOAUTH),
        ("AUTH wrong", WRONGPASS),
        ("AUTH secret wrong", WRONGPASS),
        ("AUTH other secret", WRONGPASS),
        ("PING", NOAUTH),
        ("AUTH secret", "+OK"),
        ("PING", "+PONG"),
        ("AUTH wrong", WRONGPASS),
        ("PING", "+PONG"),
        ("RESET", "+RESET"),
        ("PING", NOAUTH),
        ("AUTH default secret", "+OK"),
        ("PING", "+PONG"),
        ("QUIT", "+OK"),
    ]);
    assert_eq!(guarded.limiter.local_store().stats().keys, 0);
}

#[test]
fn hello_authenticates_or_requires_auth() {
    let guarded = Guarded::open(Some("app"));
    let mut client = guarded.connect();
    let refused = client.command("HELLO 3").to_string();
    assert!(refused.starts_with("-NOAUTH HELLO"), "{refused}");
    for wrong in [
        "HELLO 3 AUTH default secret",
        "HELLO 3 AUTH app wrong SETNAME me",
        "AUTH wrong",
    ] {
        assert_eq!(client.command(wrong).to_string(), WRONGPASS);
    }
    assert_eq!(client.command("CLIENT GETNAME").to_string(), NOAUTH);
    let welcome = client.command("HELLO 3 AUTH app secret SETNAME me");
    assert!(matches!(welcome, Value::Map(_)), "{welcome}");
    assert_eq!(client.command("CLIENT GETNAME").to_string(), r#""me""#);
}

#[test]
fn password_guesses_are_limited_and_counted() {
    let guarded = Guarded::open(None);
    let mut client = guarded.connect();
    let mut wrong = 0;
    for _ in 0..500 {
        let answer = client.command("AUTH guess").to_string();
        wrong += usize::from(answer == WRONGPASS);
        let is_limited = answer.starts_with("-ERR too many invalid passwords");
        assert!(is_limited || answer == WRONGPASS, "{answer}");
    }
    assert_eq!(wrong, 10);
    let too_early = guarded.connect().command("AUTH secret").to_string();
    assert!(too_early.starts_with("-ERR too many"), "{too_early}");
    let metrics = guarded.limiter.exposition();
    for line in [
        r#"tidegate_authentication_failures_total{listener="resp",reason="wrong"} 10"#,
        r#"tidegate_authentication_failures_total{listener="resp",reason="limited"} 491"#,
    ] {
        assert!(metrics.contains(line), "{metrics}");
    }
    guarded
        .clock
        .set(Timestamp::from_micros(1_700_000_001_000_000));
    assert_eq!(client.command("AUTH secret").to_string(), "+OK");
}

#[test]
fn an_http_request_is_disconnected_and_decides_nothing() {
    let listener = TestListener::open();
    let commands = encode(&[b"THROTTLE", b"k", b"1", b"1", b"60"]);
    for head in [
        "POST / HTTP/1.1\r\nHost: x\r\n\r\n",
        "post / HTTP/1.1\r\n\r\n",
        "GET / HTTP/1.1\r\nhost: x\r\n\r\n",
        "host: 127.0.0.1:6380\r\n",
    ] {
        let mut client = listener.connect();
        client.send(&[head.as_bytes(), &commands].concat());
        assert_eq!(
            client.rest(),
            "-ERR Protocol error: this is the Redis protocol, not HTTP\r\n",
            "{head}"
        );
    }
    assert_eq!(listener.limiter.local_store().stats().keys, 0);
}
