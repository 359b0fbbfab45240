//! Tests of a node's listeners with a Redis backend.

use std::{
    io::{Read, Write},
    net::{Shutdown, SocketAddr, TcpStream},
};

use serde_json::Value;
use tidegate_core::Timestamp;

use crate::{
    client::Client,
    node::Node,
    support::{RedisServer, TIMEOUT, reserve_port},
};

pub(crate) fn converse(address: SocketAddr, input: &str) -> String {
    let mut stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(TIMEOUT)).unwrap();
    stream.write_all(input.as_bytes()).unwrap();
    stream.shutdown(Shutdown::Write).unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    answer
}

pub(crate) fn json(address: SocketAddr, method: &str, path: &str, body: &str) -> (u16, Value) {
    let answer = Client::connect(address).ask(method, path, &[], body.as_bytes());
    (answer.status, answer.json())
}

#[test]
fn a_pipeline_is_answered_in_order_for_every_source_of_decisions() {
    let redis = RedisServer::start();
    let node = Node::start(&redis.url());
    node.until_up(true);
    let listener = node.open_resp();
    let asked = "PING one\r\nCL.THROTTLE k 1 1 3600\r\nPING two\r\nCL.THROTTLE k 1 1 3600\r\nCL.THROTTLE k 1 1 3600\r\n\
                 THROTTLE other 5 1 3600 2\r\nTIDEGATE.CHECK path /local user u\r\nTIDEGATE.CHECK path /none\r\nPING three\r\n";
    let expected = "$3\r\none\r\n*5\r\n:0\r\n:2\r\n:1\r\n:-1\r\n:3600\r\n$3\r\ntwo\r\n*5\r\n:0\r\n:2\r\n:0\r\n:-1\r\n:7200\r\n\
                    *5\r\n:1\r\n:2\r\n:0\r\n:3600\r\n:7200\r\n*5\r\n:1\r\n:5\r\n:3\r\n:7200\r\n:0\r\n\
                    *6\r\n:1\r\n$5\r\nlocal\r\n:10\r\n:9\r\n:360000\r\n:0\r\n*6\r\n:1\r\n$-1\r\n:-1\r\n:-1\r\n:0\r\n:0\r\n$5\r\nthree\r\n";
    assert_eq!(converse(listener, asked), expected);
}

/// The keys are in Redis, so the number of keys in the local fallback must not be reported.
#[test]
fn dbsize_does_not_report_the_local_store() {
    let redis = RedisServer::start();
    let node = Node::start(&redis.url());
    node.until_up(true);
    assert_eq!(node.admitted("local", "u", 3), 3);
    let answer = converse(node.open_resp(), "DBSIZE\r\nINFO\r\n");
    assert!(
        answer.starts_with("-ERR this server stores its keys in Redis"),
        "{answer}"
    );
    assert!(
        answer.contains("tidegate_store:redis\r\ntidegate_fallback_keys:1\r\n"),
        "{answer}"
    );
    assert!(!answer.contains("db0"), "{answer}");
}

#[test]
fn a_client_without_replies_is_charged() {
    let redis = RedisServer::start();
    let node = Node::start(&redis.url());
    node.until_up(true);
    let listener = node.open_resp();
    let asked = "CLIENT REPLY SKIP\r\nCL.THROTTLE k 1 1 3600\r\nCL.THROTTLE k 1 1 3600\r\n";
    assert_eq!(
        converse(listener, asked),
        "*5\r\n:0\r\n:2\r\n:0\r\n:-1\r\n:7200\r\n"
    );
}

#[test]
fn a_batch_over_the_pending_limit_is_answered_completely() {
    let redis = RedisServer::start();
    let node = Node::start(&redis.url());
    node.until_up(true);
    let line = |key: u32| format!("CL.THROTTLE a{key:04} 1 1 3600\r\n");
    let array = |key: u32| {
        format!(
            "*5\r\n$11\r\nCL.THROTTLE\r\n$5\r\nb{key:04}\r\n$1\r\n1\r\n$1\r\n1\r\n$4\r\n3600\r\n"
        )
    };
    let answers = "*5\r\n:0\r\n:2\r\n:1\r\n:-1\r\n:3600\r\n".repeat(3_000);
    // Because of the leading PING, the maximum number of pending decisions is reached between two
    // commands that are parsed together.
    let asked = [
        (0..3_000).map(line).collect(),
        (0..3_000).map(array).collect::<String>(),
    ];
    for asked in asked {
        let answer = converse(node.open_resp(), &format!("*1\r\n$4\r\nPING\r\n{asked}"));
        assert_eq!(answer, format!("+PONG\r\n{answers}"));
    }
}

#[test]
fn a_transaction_over_the_redis_batch_size_is_decided_completely() {
    let redis = RedisServer::start();
    let node = Node::start(&redis.url());
    node.until_up(true);
    // The client sends more commands than fit into the queue to Redis. If all commands were queued
    // at the same time, the fallback would decide the commands that do not fit.
    let throttle = "CL.THROTTLE k 9999 1 3600\r\n".repeat(10_000);
    let answer = converse(node.open_resp(), &format!("MULTI\r\n{throttle}EXEC\r\n"));
    let (_, answers) = answer.split_once("*10000\r\n").unwrap();
    let last = answers.rsplit_once("*5\r\n").unwrap().1;
    assert!(last.starts_with(":0\r\n:10000\r\n:0\r\n:-1\r\n"), "{last}");
    assert_eq!(answers.matches("*5\r\n:0\r\n").count(), 10_000);
}

#[test]
fn http_verdicts_name_their_source_and_exactness() {
    let redis = RedisServer::start();
    let node = Node::start(&redis.url());
    node.until_up(true);
    let listener = node.open_http();
    let body = r#"{"entries": {"path": "/local", "user": "u"}}"#;
    let (status, verdict) = json(listener, "POST", "/v1/check", body);
    assert_eq!(
        (status, &verdict["source"], &verdict["exactness"]),
        (200, &"redis".into(), &"exact".into())
    );
    assert_eq!(verdict["remaining"], 9);
    let body = r#"{"key": "k", "capacity": 1, "refill": "1/h"}"#;
    assert_eq!(json(listener, "POST", "/v1/throttle", body).0, 200);
    let (status, verdict) = json(listener, "POST", "/v1/throttle", body);
    assert_eq!((status, &verdict["source"]), (429, &"redis".into()));
    let (_, verdict) = json(listener, "POST", "/v1/throttle", body);
    assert_eq!(verdict["source"], "cache");
}

#[test]
fn the_admin_listener_shows_keys_and_readiness_of_the_whole_fleet() {
    let mut redis = RedisServer::start();
    let (a, b) = (Node::start(&redis.url()), Node::start(&redis.url()));
    a.until_up(true);
    b.until_up(true);
    assert_eq!(a.admitted("local", "u", 3), 3);
    let listener = b.open_admin();
    let (status, key) = json(listener, "GET", "/v1/keys/local/u", "");
    assert_eq!((status, &key["limits"][0]["remaining"]), (200, &7.into()));
    let (_, ready) = json(listener, "GET", "/readyz", "");
    assert_eq!(
        (&ready["redis"]["state"], &ready["redis"]["up"]),
        (&"ok".into(), &1.into())
    );
    let metrics = b.limiter.exposition();
    assert!(
        metrics.contains("tidegate_redis_servers_up 1\n"),
        "{metrics}"
    );

    redis.kill();
    b.until_up(false);
    let (status, ready) = json(listener, "GET", "/readyz", "");
    assert_eq!((status, &ready["ready"]), (200, &true.into()));
    assert_eq!(
        ready["redis"]["state"],
        "unreachable; the rules' `on_failure` policies apply"
    );
    assert!(
        ready["redis"]["problem"]
            .as_str()
            .unwrap()
            .contains("Redis at")
    );
    let (status, problem) = json(listener, "DELETE", "/v1/keys/local/u", "");
    assert_eq!(status, 503);
    assert!(
        problem["detail"]
            .as_str()
            .unwrap()
            .ends_with("nothing was done"),
        "{problem}"
    );
    // Keys and blocks are in Redis, but the server still knows how it decides a request.
    let advice = "; meanwhile, `tidegate explain` (/v1/explain) shows how this server decides a request, and \
                  `tidegate status` (/v1/status) shows the state of Redis";
    for path in [
        "/v1/keys/local/u",
        "/v1/keys/local",
        "/v1/blocks",
        "/v1/blocks/local/u",
    ] {
        let (status, problem) = json(listener, "GET", path, "");
        assert_eq!(status, 503, "{problem}");
        assert!(
            problem["detail"].as_str().unwrap().ends_with(advice),
            "{problem}"
        );
    }
    let (status, explained) = json(
        listener,
        "POST",
        "/v1/explain",
        r#"{"entries": {"user": "u"}}"#,
    );
    assert_eq!(status, 200, "{explained}");
}

#[test]
fn listeners_apply_the_failure_policy_without_redis() {
    let node = Node::start(&format!("redis://127.0.0.1:{}", reserve_port()));
    node.until_up(false);
    let body = r#"{"entries": {"path": "/closed", "user": "u"}}"#;
    let (status, verdict) = json(node.open_http(), "POST", "/v1/check", body);
    assert_eq!(
        (status, &verdict["reason"], &verdict["exactness"]),
        (503, &"store".into(), &"none".into())
    );
    for (query, expected) in [("", "503"), ("?deny=403", "403")] {
        let head = "X-Original-URI: /closed\r\nX-Original-Method: GET\r\nX-User: u\r\n";
        let request = format!("GET /v1/authorize{query} HTTP/1.1\r\nHost: a\r\n{head}\r\n");
        let answer = converse(node.open_http(), &request);
        let (status, rest) = answer.split_once("\r\n").unwrap();
        assert!(
            status.starts_with(&format!("HTTP/1.1 {expected} ")),
            "{answer}"
        );
        let rest = rest.to_ascii_lowercase();
        assert!(rest.contains("retry-after: 1\r\n"), "{answer}");
    }
    let answer = converse(
        node.open_resp(),
        "TIDEGATE.CHECK path /open user u\r\nCL.THROTTLE k 9 1 3600\r\n",
    );
    // The limit is ten, and the local fallback admits half of it.
    assert_eq!(
        answer,
        "*6\r\n:1\r\n$-1\r\n:-1\r\n:-1\r\n:0\r\n:0\r\n*5\r\n:0\r\n:5\r\n:4\r\n:-1\r\n:7200\r\n"
    );
}

/// An explanation reads the counters in Redis and charges nothing. Each node lists its own denials.
#[test]
fn explain_and_denials_work_in_a_fleet() {
    let redis = RedisServer::start();
    let (node, other) = (Node::start(&redis.url()), Node::start(&redis.url()));
    node.until_up(true);
    other.until_up(true);
    let (http, admin) = (node.open_http(), node.open_admin());
    let body = r#"{"entries": {"path": "/local", "user": "u"}}"#;
    let explain = || {
        let (status, explained) = json(admin, "POST", "/v1/explain", body);
        assert_eq!(status, 200, "{explained}");
        explained
    };
    for spent in 0..10 {
        for _ in 0..2 {
            let explained = explain();
            assert_eq!(
                (&explained["allowed"], &explained["source"]),
                (&true.into(), &"redis".into())
            );
            assert_eq!(explained["rules"][0]["limits"][0]["remaining"], 10 - spent);
        }
        // The explanation includes the charges of all nodes.
        assert!(other.spend("local", "u").allowed);
    }
    let explained = explain();
    assert_eq!(
        (&explained["allowed"], &explained["reason"]),
        (&false.into(), &"limit".into())
    );
    assert_eq!(
        explained["rules"][1]["because"],
        "path is /local, but the rule requires /open"
    );
    assert_eq!(
        redis.ask(&["DBSIZE"]).trim(),
        ":1",
        "the explanations created no key"
    );

    assert_eq!(json(http, "POST", "/v1/check", body).0, 429);
    let (_, list) = json(admin, "GET", "/v1/denials", "");
    assert_eq!(list["rows"][0]["rule"], "local");
    assert_eq!(list["rows"][0]["key"], serde_json::json!(["u"]));
    assert_eq!(list["rows"][0]["entries"]["path"], "/local");
    let (_, list) = json(other.open_admin(), "GET", "/v1/denials", "");
    assert_eq!(list, serde_json::json!({"rows": [], "lost": 0}));

    // Another node blocks the key.
    other
        .run(other.limiter.block(&other.key("local", "u"), None, "why"))
        .unwrap();
    let explained = explain();
    let rule = &explained["rules"][0];
    assert_eq!(
        (&explained["reason"], &rule["block"]["reason"]),
        (&"blocked".into(), &"why".into())
    );
}

/// While Redis is unreachable, the fallback policies apply, and an explanation says which policy
/// applies.
#[test]
fn an_explanation_without_redis_names_the_fallback_policy() {
    let node = Node::start(&format!("redis://127.0.0.1:{}", reserve_port()));
    node.until_up(false);
    let admin = node.open_admin();
    let explain = |path: &str| {
        let body = format!(r#"{{"entries": {{"path": "{path}", "user": "u"}}}}"#);
        let (status, explained) = json(admin, "POST", "/v1/explain", &body);
        assert_eq!(status, 200, "{explained}");
        let applied = explained["rules"].as_array().unwrap().iter();
        let applied = applied.filter(|rule| rule["applies"] == true);
        let rule: Vec<Value> = applied.cloned().collect();
        assert_eq!(rule.len(), 1);
        (
            explained["allowed"].clone(),
            explained["source"].clone(),
            rule[0].clone(),
        )
    };
    let because = "Redis is unreachable, so the `on_failure` policy decides instead of the limits";
    let (allowed, source, rule) = explain("/closed");
    assert_eq!((&allowed, &source), (&false.into(), &"policy".into()));
    assert_eq!(
        (&rule["reason"], &rule["because"]),
        (&"store".into(), &because.into())
    );
    let (allowed, _, rule) = explain("/open");
    assert_eq!(
        (&allowed, &rule["because"]),
        (&true.into(), &because.into())
    );
    let (allowed, source, rule) = explain("/local");
    assert_eq!((&allowed, &source), (&true.into(), &"local".into()));
    // By default, the local share is half of the limit of 10.
    assert_eq!(rule["limits"][0]["remaining"], 5);
    let (status, problem) = json(admin, "GET", "/v1/keys/local", "");
    assert_eq!(status, 503, "{problem}");

    // Redis does not confirm the changes, so the local counters and blocks are not changed either.
    assert!(node.spend("local", "u").allowed);
    let key = node.key("local", "u");
    assert!(node.run(async { node.limiter.reset(&key).await }).is_err());
    assert_eq!(explain("/local").2["limits"][0]["remaining"], 4);
    let here = node.limiter.local_store();
    assert!(here.block(&key, None, "why", Timestamp::default()));
    assert!(node.run(node.limiter.unblock(&key)).is_err());
    let (allowed, source, rule) = explain("/local");
    assert_eq!((&allowed, &source), (&false.into(), &"local".into()));
    assert_eq!(rule["block"]["reason"], "why");
}

#[test]
fn keys_in_redis_are_listed_with_their_state() {
    let redis = RedisServer::start();
    let node = Node::start(&redis.url());
    node.until_up(true);
    for number in 0..300 {
        assert!(node.spend("local", &format!("u{number}")).allowed);
        assert!(node.spend("open", &format!("u{number}")).allowed);
    }
    let (admin, mut listed, mut after) = (node.open_admin(), Vec::new(), String::new());
    loop {
        let (status, page) = json(admin, "GET", &format!("/v1/keys/local?n=50{after}"), "");
        assert_eq!(status, 200, "{page}");
        for row in page["keys"].as_array().unwrap() {
            assert_eq!(row["limits"][0]["remaining"], 9, "{row}");
            listed.push(row["key"][0].as_str().unwrap().to_owned());
        }
        match page["next"].as_str() {
            Some(next) => after = format!("&after={next}"),
            None => break,
        }
    }
    listed.sort_unstable();
    listed.dedup();
    assert_eq!(listed.len(), 300);
    let (status, problem) = json(admin, "GET", "/v1/keys/local?after=x", "");
    assert_eq!((status, &problem["field"]), (400, &"after".into()));
}
