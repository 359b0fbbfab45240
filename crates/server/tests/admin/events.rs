//! Tests of events: the event stream, the audit log for changes, and token scopes.

use std::{
    io::{BufRead as _, BufReader, Write as _},
    net::{SocketAddr, TcpStream},
    sync::Arc,
    time::Duration,
};

use serde_json::{Value, json};
use tidegate::Clock;
use tidegate_config::{EventsConfig, KeyMask, TokenScope};
use tidegate_core::Timestamp;
use tidegate_limiter::events::{Events, MAX_SUBSCRIBERS};
use tidegate_server::listener::admin::AdminCredential;

use crate::listener::{KEY, RULES, TestListener};

fn open(credentials: Vec<AdminCredential>) -> TestListener {
    let clock = Clock::manual(Timestamp::from_micros(1));
    let events = Events::open(
        &EventsConfig::default(),
        Vec::new(),
        KeyMask::plain(),
        &clock,
    );
    let events = Arc::new(events.unwrap());
    TestListener::with_credentials(credentials, |limiter| limiter.with_events(Some(events)))
}

fn credential(name: &str, scope: TokenScope) -> AdminCredential {
    AdminCredential {
        name: name.to_owned(),
        scope,
        token: format!("token of {name}").replace(' ', "-"),
    }
}

/// A client of the event stream.
struct Follower(BufReader<TcpStream>);

impl Follower {
    fn connect(address: SocketAddr, headers: &str) -> Self {
        let mut stream = TcpStream::connect(address).unwrap();
        stream
            .set_read_timeout(Some(Duration::from_secs(30)))
            .unwrap();
        let head = format!("GET /v1/events HTTP/1.1\r\nhost: localhost\r\n{headers}\r\n");
        stream.write_all(head.as_bytes()).unwrap();
        Self(BufReader::new(stream))
    }

    fn line(&mut self) -> String {
        let mut line = String::new();
        assert_ne!(
            self.0.read_line(&mut line).unwrap(),
            0,
            "the stream has ended"
        );
        line.trim_end().to_owned()
    }

    fn status(&mut self) -> u16 {
        self.line().split(' ').nth(1).unwrap().parse().unwrap()
    }

    /// Returns the ID and the document of the next event.
    fn event(&mut self) -> (String, Value) {
        let mut id = None;
        loop {
            let line = self.line();
            if let Some(number) = line.strip_prefix("id: ") {
                id = Some(number.to_owned());
            } else if let Some(data) = line.strip_prefix("data: ") {
                return (id.unwrap(), serde_json::from_str(data).unwrap());
            }
        }
    }
}

#[test]
fn a_client_follows_the_events_and_continues_after_a_reconnect() {
    let listener = open(Vec::new());
    let address = listener.listener.local_addr();
    let mut follower = Follower::connect(address, "");
    assert_eq!(follower.status(), 200);
    while listener.spend() {}
    let (id, denied) = follower.event();
    assert_eq!((&*id, &denied["type"]), ("0-1", &json!("key.denied")));
    assert_eq!(denied["id"], "0-1");
    assert_eq!(denied["data"]["key"], json!(["/a b", "::"]));
    listener.ask(
        "PUT",
        &format!("/v1/blocks/{KEY}"),
        r#"{"for": "1h", "reason": "abuse"}"#,
    );
    let (id, blocked) = follower.event();
    assert_eq!((&*id, &blocked["type"]), ("0-2", &json!("block.added")));
    drop(follower);
    listener.ask("DELETE", &format!("/v1/blocks/{KEY}"), "");
    let mut again = Follower::connect(address, "last-event-id: 0-2\r\n");
    let (id, lifted) = again.event();
    assert_eq!((&*id, &lifted["type"]), ("0-3", &json!("block.lifted")));
    assert_eq!(lifted["data"]["before"]["reason"], "abuse");
    let list = listener.ask("GET", "/v1/events?n=2", "").json();
    let kinds: Vec<&Value> = list["events"].as_array().unwrap().iter().collect();
    assert_eq!(kinds.len(), 2);
    assert_eq!(kinds[1]["type"], "block.lifted");
    let count = |after: &str| {
        let path = format!("/v1/events?n=10&after={after}");
        let list = listener.ask("GET", &path, "").json();
        list["events"].as_array().unwrap().len()
    };
    assert_eq!(count("0-2"), 1);
    // With the ID of another process or an invalid ID, all events are returned.
    for unknown in ["0-4", "1795257701330-2", "2", "x"] {
        assert_eq!(count(unknown), 3, "{unknown}");
    }
    let mut restarted = Follower::connect(address, "last-event-id: 1795257701330-3\r\n");
    assert_eq!(restarted.event().0, "0-1");
}

#[test]
fn the_number_of_clients_that_follow_the_events_is_bounded() {
    let listener = open(Vec::new());
    let address = listener.listener.local_addr();
    let mut followers: Vec<Follower> = (0..MAX_SUBSCRIBERS)
        .map(|_| Follower::connect(address, ""))
        .collect();
    for follower in &mut followers {
        assert_eq!(follower.status(), 200);
    }
    assert_eq!(Follower::connect(address, "").status(), 503);
    let off = TestListener::open().ask("GET", "/v1/events", "");
    assert_eq!(off.status, 409);
}

#[test]
fn every_change_is_an_event_with_the_name_of_the_token() {
    let listener = open(vec![credential("alice", TokenScope::Operate)]);
    let headers = [("authorization", "Bearer token-of-alice")];
    let ask = |method: &str, path: &str, body: &str| {
        let answer = listener.ask_with(method, path, &headers, body);
        assert_eq!(answer.status, 200, "{method} {path}: {}", answer.body);
        answer
    };
    assert!(listener.spend());
    ask("PUT", &format!("/v1/blocks/{KEY}"), r#"{"for": "1h"}"#);
    ask("PUT", &format!("/v1/blocks/{KEY}"), r#"{"for": "2h"}"#);
    ask("DELETE", &format!("/v1/blocks/{KEY}"), "");
    ask("DELETE", &format!("/v1/keys/{KEY}"), "");
    ask("POST", "/v1/reload", "");
    std::fs::write(listener.file.path(), "rules: 5").unwrap();
    let failed = listener.ask_with("POST", "/v1/reload", &headers, "");
    assert_eq!(failed.status, 422);
    std::fs::write(listener.file.path(), RULES).unwrap();
    let list = ask("GET", "/v1/events?n=100", "").json();
    let events = list["events"].as_array().unwrap();
    let changes: Vec<&str> = events
        .iter()
        .map(|event| event["type"].as_str().unwrap())
        .collect();
    assert_eq!(
        changes,
        [
            "block.added",
            "block.added",
            "block.lifted",
            "key.reset",
            "rules.reloaded",
            "rules.reload_failed",
        ]
    );
    for event in events {
        assert_eq!(event["data"]["by"], "alice", "{event}");
    }
    assert_eq!(events[0]["data"]["before"], Value::Null);
    assert!(
        events[1]["data"]["before"]["until_ms"].is_u64(),
        "{}",
        events[1]
    );
    assert!(events[1]["data"]["after"]["until_ms"].is_u64());
    let before = &events[3]["data"]["before"]["limits"][0];
    assert_eq!(
        (&before["limit"], &before["remaining"]),
        (&json!(2), &json!(1))
    );
    let members: Vec<&String> = before.as_object().unwrap().keys().collect();
    assert_eq!(members, ["limit", "policy", "remaining", "reset_after_ms"]);
    assert_eq!(events[4]["data"]["before"]["rules"], 2);
    assert!(
        events[5]["data"]["mistakes"][0].is_string(),
        "{}",
        events[5]
    );
}

#[test]
fn the_event_of_a_reload_says_what_has_changed() {
    let listener = open(vec![credential("alice", TokenScope::Operate)]);
    let headers = [("authorization", "Bearer token-of-alice")];
    let text = "
rules:
  - {name: r, when: {path: /**}, key: [path, ip], limits: [3/min, 100/h], algorithm: token_bucket}
  - {name: new, limits: [5/s]}
";
    std::fs::write(listener.file.path(), text).unwrap();
    let reloaded = listener.ask_with("POST", "/v1/reload", &headers, "");
    assert_eq!(reloaded.status, 200, "{}", reloaded.body);
    let list = listener
        .ask_with("GET", "/v1/events?n=1", &headers, "")
        .json();
    let event = &list["events"][0];
    assert_eq!(event["type"], "rules.reloaded");
    let changes = &event["data"]["changes"];
    assert_eq!(changes["added"], json!(["new"]));
    assert_eq!(changes["removed"], json!(["all of it"]));
    let limits = json!({"before": ["2/min", "100/h"], "after": ["3/min", "100/h"]});
    assert_eq!(changes["changed"], json!([{"rule": "r", "limits": limits}]));
}

#[test]
fn a_token_of_the_scope_read_changes_nothing() {
    let listener = open(vec![
        credential("alice", TokenScope::Operate),
        credential("grafana", TokenScope::Read),
    ]);
    assert!(listener.spend());
    let headers = [("authorization", "Bearer token-of-grafana")];
    for (method, path) in [
        ("PUT", format!("/v1/blocks/{KEY}")),
        ("DELETE", format!("/v1/blocks/{KEY}")),
        ("DELETE", format!("/v1/keys/{KEY}")),
        ("DELETE", "/v1/throttles/k".to_owned()),
        ("POST", "/v1/reload".to_owned()),
        ("POST", "/v1/candidate/promote".to_owned()),
    ] {
        let refused = listener.ask_with(method, &path, &headers, "");
        assert_eq!(refused.status, 403, "{method} {path}");
        assert!(refused.problem().contains("grafana"), "{}", refused.body);
    }
    for path in ["/v1/blocks", "/v1/events?n=10", "/v1/rules", "/metrics"] {
        assert_eq!(
            listener.ask_with("GET", path, &headers, "").status,
            200,
            "{path}"
        );
    }
    let explained = listener.ask_with("POST", "/v1/explain", &headers, r#"{"entries": {}}"#);
    assert_eq!(explained.status, 200, "{}", explained.body);
    let status = listener.ask_with("GET", "/v1/status", &headers, "").json();
    assert_eq!(
        (&status["operator"], &status["may_operate"]),
        (&json!("grafana"), &json!(false))
    );
    let key = listener
        .ask_with("GET", &format!("/v1/keys/{KEY}"), &headers, "")
        .json();
    assert_eq!(key["limits"][0]["remaining"], 1, "nothing was reset");
    let headers = [("authorization", "Bearer token-of-nobody")];
    assert_eq!(
        listener.ask_with("GET", "/v1/rules", &headers, "").status,
        401
    );
}
