//! Tests HAProxy with the example configuration and a real Tidegate server.

use std::{
    fs,
    net::{SocketAddr, TcpStream},
    process::Command,
    thread,
    time::Duration,
};

use crate::{
    servers::reserve_port,
    support::{Ask, EVERY_LISTENER, Process, Scratch, Server, count_admitted, repository, tool},
};

/// The maximum number of attempts to connect to HAProxy.
const CONNECTS: u32 = 1_000;
/// The pause after each attempt.
const PAUSE: Duration = Duration::from_millis(10);

/// A HAProxy with the example's configuration, and the Tidegate server that it calls.
#[derive(Debug)]
pub(crate) struct Haproxy {
    pub(crate) server: Server,
    pub(crate) front: SocketAddr,
    _process: Process,
    _scratch: Scratch,
}

impl Haproxy {
    /// Starts HAProxy with the rules of the example.
    pub(crate) fn start() -> Self {
        let file = repository().join("examples/haproxy/tidegate.yaml");
        let text = fs::read_to_string(file).unwrap();
        let (_, rules) = text.split_once("\nrules:\n").unwrap();
        Self::with(&format!("rules:\n{rules}"), "path=path")
    }

    /// Starts HAProxy, and a Tidegate server with these rules. `path` replaces the example's SPOE
    /// message argument `path=path`.
    fn with(rules: &str, path: &str) -> Self {
        let listen = EVERY_LISTENER.replace("admin:", "spop: '127.0.0.1:0', admin:");
        let server = Server::start_in(Scratch::new(), &format!("{listen}{rules}"));
        let example = repository().join("examples/haproxy");
        let read = |name| {
            let text = fs::read_to_string(example.join(name)).unwrap();
            // The machine may be busy. After a timeout, HAProxy would admit the request.
            text.replace("examples/haproxy/", "")
                .replace("250ms", "10s")
                .replace("path=path", path)
        };
        let scratch = Scratch::new();
        for name in ["spoe.conf", "customers.map"] {
            scratch.write(name, &read(name));
        }
        let (front, application) = (reserve_port(), reserve_port());
        let config = read("haproxy.cfg")
            .replace(":8000", &format!(":{front}"))
            .replace(":8001", &format!(":{application}"))
            .replace("127.0.0.1:8084", &server.spop().to_string());
        scratch.write("haproxy.cfg", &config);
        let mut haproxy = Command::new(tool("haproxy"));
        haproxy.args(["-db", "-f", "haproxy.cfg"]);
        let process = Process::start(haproxy.current_dir(scratch.path()));
        let front = SocketAddr::from(([127, 0, 0, 1], front));
        assert!(
            accepts(front),
            "HAProxy did not start; run examples/haproxy by hand to see why"
        );
        Self {
            server,
            front,
            _process: process,
            _scratch: scratch,
        }
    }

    fn ask(&self, path: &str) -> Ask {
        Ask::get(self.front, path)
    }
}

/// Waits until a program accepts connections at `address`.
fn accepts(address: SocketAddr) -> bool {
    (0..CONNECTS).any(|_| {
        let is_open = TcpStream::connect(address).is_ok();
        if !is_open {
            thread::park_timeout(PAUSE);
        }
        is_open
    })
}

#[test]
fn haproxy_denies_with_429_and_the_fields() {
    let haproxy = Haproxy::start();
    let login =
        || Ask::new("POST", haproxy.front, "//login?x").header("x-forwarded-for", "6.6.6.6");
    for left in (0..10).rev() {
        let answer = login().send();
        assert_eq!((answer.status, &*answer.body), (200, "Here you are\n"));
        let state = answer.header("ratelimit");
        assert!(state.contains(&format!(";r={left};")), "{answer:?}");
        let policy = "\"1/h capacity 10\";q=10;w=36000";
        assert_eq!(answer.header("ratelimit-policy"), policy);
        assert_eq!(answer.header("retry-after"), "");
    }
    let denied = login().send();
    assert_eq!(denied.status, 429, "{denied:?}");
    assert!(denied.header("ratelimit").contains(";r=0;t="), "{denied:?}");
    let wait = denied.header("retry-after").parse::<u64>().unwrap();
    assert!((3_500..=3_600).contains(&wait), "{wait}");
    assert_eq!(haproxy.ask("/login").send().status, 200, "another method");
    let metrics = haproxy.server.metrics();
    for line in [
        "tidegate_decisions_total{listener=\"spop\",outcome=\"limit\"} 1\n",
        "tidegate_unknown_entries_total{listener=\"spop\"} 0\n",
    ] {
        assert!(metrics.contains(line), "{metrics}");
    }
}

#[test]
fn concurrent_requests_are_admitted_exactly() {
    let rules = "rules: [{name: all, limits: [{algorithm: fixed_window, limit: 100, window: 1d, anchor: first_request}]}]\n";
    let haproxy = Haproxy::with(rules, "path=path");
    let front = haproxy.front;
    let admitted = count_admitted(400, |_| Ask::get(front, "/"));
    assert_eq!(admitted, 100, "of 400 requests");
}

#[test]
fn a_client_cannot_evade_its_limit() {
    let haproxy = Haproxy::start();
    let server = &haproxy.server;
    let blocked = server.operate(&["block", "api-per-customer", "acme"]);
    assert!(blocked.status.success(), "{blocked:?}");
    let api = |path: &str| haproxy.ask(path).header("x-api-key", "acme-key");
    for (path, status) in [
        ("/api/orders", 429),
        ("/%61pi/orders", 429),
        ("//api//orders", 429),
        ("/x/../api/orders", 400),
    ] {
        assert_eq!(api(path).send().status, status, "{path}");
    }
    let other = haproxy
        .ask("/api/orders")
        .header("x-api-key", "umbrella-key");
    assert_eq!(other.send().status, 200);
    let twice = api("/api/orders").header("x-api-key", "umbrella-key");
    assert_eq!(twice.send().status, 400, "two keys");
}

/// With two copies of a long path, the SPOE message does not fit into a frame, so HAProxy does not
/// call Tidegate.
#[test]
fn a_request_that_is_too_long_for_a_frame_does_not_pass() {
    let haproxy = Haproxy::with("rules: []\n", "path=path copy=path");
    let path = |bytes| format!("/{}", "x".repeat(bytes));
    assert_eq!(haproxy.ask(&path(100)).send().status, 200);
    assert_eq!(haproxy.ask(&path(9_000)).send().status, 431);
}

#[test]
fn without_tidegate_requests_pass() {
    let haproxy = Haproxy::start();
    assert_eq!(haproxy.ask("/").send().status, 200);
    let Haproxy {
        server,
        front,
        _process,
        _scratch,
    } = haproxy;
    server.stop();
    let answer = Ask::get(front, "/api/orders").send();
    assert_eq!((answer.status, &*answer.body), (200, "Here you are\n"));
}
