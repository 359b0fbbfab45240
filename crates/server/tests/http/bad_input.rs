//! Bad input is a problem document that names the field, whatever it is, and never a failure of the server.

use std::time::Duration;

use proptest::prelude::*;
use tidegate_server::net::Bounds;

use crate::{
    door::Door,
    wire::{Client, assert_problem},
};

const RULES: &str = "rules: [{name: r, key: [ip], limits: [1/s]}]";

#[test]
fn a_body_that_is_wrong_is_refused_by_the_field() {
    let door = Door::open(RULES);
    for (body, words) in [
        ("", &["body"][..]),
        ("{", &["body"]),
        ("[]", &["body"]),
        ("{}", &["entries"]),
        (r#"{"entries": []}"#, &["entries"]),
        (r#"{"entries": {"ip": 1}}"#, &["ip"]),
        (r#"{"entires": {}}"#, &["entires", "entries"]),
        (r#"{"entries": {}, "cost": 0}"#, &["cost"]),
        (r#"{"entries": {}, "cost": -1}"#, &["cost"]),
        (r#"{"entries": {"ip": "a", "ip": "b"}}"#, &["ip"]),
        (r#"{"entries": {"": "a"}}"#, &["entries"]),
    ] {
        for path in ["/v1/check", "/v1/peek"] {
            assert_problem(&door.post(path, body), 400, words);
        }
    }
}

#[test]
fn what_is_too_long_or_too_many_is_refused() {
    let door = Door::open(RULES);
    let long = format!(r#"{{"entries": {{"ip": "{}"}}}}"#, "x".repeat(9_000));
    assert_problem(&door.post("/v1/check", &long), 400, &["ip"]);
    let many: Vec<String> = (0..5_000).map(|n| format!(r#""e{n}": "v""#)).collect();
    let many = format!(r#"{{"entries": {{{}}}}}"#, many.join(","));
    assert_problem(&door.post("/v1/check", &many), 400, &["entries", "64"]);
}

#[test]
fn wrong_methods_and_paths_say_what_there_is() {
    let door = Door::open(RULES);
    for path in ["/v1/check", "/v1/peek", "/v1/throttle"] {
        let reply = door.connect().ask(&format!("GET {path}"), "", b"");
        assert_problem(&reply, 405, &["POST"]);
        assert_eq!(reply.header("allow"), Some("POST"));
    }
    assert_problem(&door.post("/v1/chekc", "{}"), 404, &["/v1/check"]);
}

#[test]
fn a_body_over_the_bound_is_not_read() {
    let door = Door::open(RULES);
    let mut announced = door.connect();
    announced.send(b"POST /v1/check HTTP/1.1\r\nhost: a\r\ncontent-length: 99999999\r\n\r\n");
    assert_problem(&announced.reply(), 413, &["body"]);
    let mut chunked = door.connect();
    chunked
        .send(b"POST /v1/check HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n40001\r\n");
    chunked.send(&vec![b' '; 0x4_0001]);
    assert_problem(&chunked.reply(), 413, &["body"]);
}

#[test]
fn a_body_that_does_not_arrive_ends_the_connection() {
    let bounds = Bounds {
        request: Duration::from_millis(50),
        ..Bounds::default()
    };
    let door = Door::with(RULES, bounds);
    let mut slow = door.connect();
    slow.send(b"POST /v1/check HTTP/1.1\r\nhost: a\r\ncontent-length: 10\r\n\r\n{");
    let rest = slow.rest();
    assert!(
        !rest.starts_with("HTTP/1.1 2") && !rest.starts_with("HTTP/1.1 5"),
        "{rest}"
    );
}

fn ask(client: &mut Client, path: &str, body: &[u8]) -> u16 {
    client.ask(&format!("POST {path}"), "", body).status
}

#[test]
fn no_body_is_answered_with_a_failure() {
    let door = Door::open(RULES);
    let text = prop_oneof![
        prop::collection::vec(any::<u8>(), 0..400),
        "[{}\\[\\]\":, a-z0-9]{0,200}".prop_map(String::into_bytes),
        r#"\{"(key|entries|limits|rate|cost|anchor)": ("[ -~]{0,20}"|-?[0-9]{1,25}|\{"ip": "a"\}|\[[0-9],"1/s"\])\}"#
            .prop_map(String::into_bytes),
    ];
    proptest!(ProptestConfig::with_cases(128), |(body in text)| {
        let mut client = door.connect();
        for path in ["/v1/check", "/v1/peek", "/v1/throttle"] {
            let status = ask(&mut client, path, &body);
            prop_assert!(status < 500, "{} to {}", status, path);
        }
    });
}
