//! The admin door over real sockets: who may ask, and the operator's hand on blocks, keys and rules.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

#[path = "../http/wire.rs"]
#[allow(dead_code, reason = "shared with the tests of the HTTP door")]
mod wire;

use std::{net::TcpListener, sync::Arc};

use serde_json::json;
use tidegate_core::{Effect, MemoryBounds, MemoryStore, Request, Scratch, Timestamp};
use tidegate_server::{
    clock::Clock,
    config::Config,
    door::admin::{self, Operated},
    limiter::Limiter,
    net::{Bounds, Listener, Server},
    reload::Reloader,
};

use self::wire::{Client, Reply, assert_problem};

const RULES: &str = "rules: [{name: r, key: [path, ip], limits: [2/min]}]";

struct Door {
    limiter: Arc<Limiter>,
    file: tempfile::NamedTempFile,
    listener: Listener,
    _server: Server,
}

impl Door {
    fn open(token: Option<&str>) -> Self {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), RULES).unwrap();
        let clock = Clock::manual(Timestamp::from_micros(1_699_999_980_000_000));
        let store = MemoryStore::new(MemoryBounds::default());
        let rules = Config::parse(RULES).unwrap().rules;
        let limiter = Arc::new(Limiter::new(rules, store, clock));
        let reloader = Reloader::new(file.path().to_owned(), Arc::clone(&limiter));
        let operated = Operated {
            limiter: Arc::clone(&limiter),
            reloader: Some(Arc::new(reloader)),
            token: token.map(str::to_owned),
        };
        let server = Server::start(1).unwrap();
        let socket = TcpListener::bind("127.0.0.1:0").unwrap();
        let listener = admin::listen(&server, socket, Bounds::default(), operated).unwrap();
        Self {
            limiter,
            file,
            listener,
            _server: server,
        }
    }

    fn ask(&self, line: &str, headers: &str, body: &str) -> Reply {
        Client::connect(self.listener.local_addr()).ask(line, headers, body.as_bytes())
    }

    /// Spends one of the key that the tests look at; says whether it was allowed.
    fn spend(&self) -> bool {
        let entries = [("path", "/a b"), ("ip", "::1")];
        let request = Request::new(&entries, tidegate_core::Cost::ONE).unwrap();
        let rules = self.limiter.rules();
        let mut scratch = Scratch::default();
        let verdict = self
            .limiter
            .check(&rules, &mut scratch, &request, Effect::Charge);
        verdict.unwrap().allowed
    }
}

/// The key of [`Door::spend`], percent-encoded: a slash in a key stays in the key.
const KEY: &str = "r/%2Fa%20b/%3A%3A1";

#[test]
fn a_block_is_put_listed_shown_and_lifted() {
    let door = Door::open(None);
    let path = format!("/v1/blocks/{KEY}");
    let put = door.ask(
        &format!("PUT {path}"),
        "",
        r#"{"for": "10m", "reason": "abuse"}"#,
    );
    assert_eq!(put.status, 200, "{put:?}");
    let block = put.json();
    assert_eq!(
        (&block["rule"], &block["key"]),
        (&json!("r"), &json!(["/a b", "::1"]))
    );
    assert_eq!(
        (&block["reason"], &block["left_ms"]),
        (&json!("abuse"), &json!(600_000))
    );
    assert!(!door.spend(), "a block denies");
    assert_eq!(door.ask(&format!("GET {path}"), "", "").json(), block);
    assert_eq!(
        door.ask("GET /v1/blocks", "", "").json(),
        json!({"blocks": [block]})
    );
    assert_eq!(door.ask(&format!("DELETE {path}"), "", "").status, 200);
    assert!(door.spend());
    for method in ["GET", "DELETE"] {
        assert_problem(
            &door.ask(&format!("{method} {path}"), "", ""),
            404,
            &["block"],
        );
    }
    let put = door.ask(&format!("PUT {path}"), "", "").json();
    assert_eq!(put["left_ms"], 60_000, "the rule's longest window");
    for (body, word) in [
        (r#"{"for": "soon"}"#, "for"),
        (r#"{"four": "1m"}"#, "four"),
        ("{", "body"),
    ] {
        assert_problem(&door.ask(&format!("PUT {path}"), "", body), 400, &[word]);
    }
}

#[test]
fn a_key_is_inspected_and_reset() {
    let door = Door::open(None);
    let path = format!("/v1/keys/{KEY}");
    assert!(door.spend() && door.spend() && !door.spend());
    let key = door.ask(&format!("GET {path}"), "", "").json();
    assert_eq!(key["limits"][0]["remaining"], 0, "{key}");
    assert_eq!(key["limits"][0]["retry_after_ms"], 30_000, "{key}");
    assert_eq!(door.ask(&format!("DELETE {path}"), "", "").status, 200);
    assert!(door.spend());
    assert_problem(&door.ask("GET /v1/keys/what/a", "", ""), 404, &["what"]);
    assert_problem(&door.ask("GET /v1/keys/r/a", "", ""), 400, &["key"]);
    assert_problem(&door.ask("GET /v1/keys/r/%ff/b", "", ""), 400, &["path"]);
}

#[test]
fn rules_are_listed_and_reloaded_or_kept() {
    let door = Door::open(None);
    let rules = door.ask("GET /v1/rules", "", "").json();
    assert_eq!(rules["rules"][0]["name"], "r");
    assert_eq!(rules["rules"][0]["key"], json!(["path", "ip"]));
    std::fs::write(door.file.path(), "rules: [{name: s, limits: [1/s]}]").unwrap();
    assert_eq!(
        door.ask("POST /v1/reload", "", "").json(),
        json!({"rules": 1})
    );
    assert!(door.limiter.rules().rule("s").is_some());
    std::fs::write(door.file.path(), "rules: [{nam: s}]").unwrap();
    assert_problem(
        &door.ask("POST /v1/reload", "", ""),
        422,
        &["nam", "mistakes"],
    );
    assert!(
        door.limiter.rules().rule("s").is_some(),
        "the old rules stay"
    );
    let ready = door.ask("GET /readyz", "", "");
    assert_eq!(ready.status, 200);
    assert!(ready.body.contains("failed"), "{ready:?}");
}

#[test]
fn health_metrics_and_what_there_is_not() {
    let door = Door::open(None);
    assert_eq!(door.ask("GET /healthz", "", "").status, 200);
    let metrics = door.ask("GET /metrics", "", "");
    assert!(
        metrics
            .header("content-type")
            .unwrap()
            .starts_with("text/plain; version=0.0.4")
    );
    assert!(
        metrics.body.contains("# TYPE tidegate_keys gauge"),
        "{metrics:?}"
    );
    let reply = door.ask("GET /v1/reload", "", "");
    assert_problem(&reply, 405, &["POST"]);
    assert_eq!(reply.header("allow"), Some("POST"));
    assert_problem(&door.ask("GET /nowhere", "", ""), 404, &["/healthz"]);
}

#[test]
fn with_a_token_only_who_shows_it_may_ask() {
    let door = Door::open(Some("secret"));
    for (headers, status) in [
        ("", 401),
        ("authorization: Bearer wrong!\r\n", 401),
        ("authorization: Bearer secre\r\n", 401),
        ("authorization: Bearer secret2\r\n", 401),
        ("authorization: Basic secret\r\n", 401),
        ("authorization: Bearer secret\r\n", 200),
    ] {
        assert_eq!(
            door.ask("GET /v1/rules", headers, "").status,
            status,
            "{headers}"
        );
        // On loopback, whoever watches the process needs no token.
        for path in ["/healthz", "/readyz", "/metrics"] {
            assert_eq!(door.ask(&format!("GET {path}"), headers, "").status, 200);
        }
    }
}

#[test]
fn without_a_token_no_web_page_may_ask() {
    let door = Door::open(None);
    for (headers, status) in [
        ("host: localhost:9090\r\n", 200),
        ("host: 127.0.0.1:9090\r\n", 200),
        ("host: [::1]:9090\r\n", 200),
        ("host: localhost\r\norigin: http://localhost:3000\r\n", 200),
        ("host: evil.example\r\n", 403),
        ("host: localhost.evil.example\r\n", 403),
        ("host: localhost\r\norigin: https://evil.example\r\n", 403),
        ("host: localhost\r\norigin: null\r\n", 403),
    ] {
        assert_eq!(
            door.ask("GET /v1/rules", headers, "").status,
            status,
            "{headers}"
        );
    }
}
