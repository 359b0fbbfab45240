//! Tests of `denials`, `explain` and `keys` against a running server.

use std::{
    io::{BufRead as _, BufReader},
    process::{Command, Output, Stdio},
};

use serde_json::{Value, json};

use crate::{
    servers::reserve_port,
    support::{Scratch, Server, run, tidegate, tool},
};

const RULES: &str = "
denials: {log: 100%}
rules:
  - {name: login, when: {path: {route: /login}, method: POST}, key: [ip], limits: [2/h], algorithm: fixed_window}
  - {name: api, when: {path: /api/**}, key: [customer], limits: [1/h, 5/d], algorithm: fixed_window}
  - {name: trial, key: [ip], limits: [1/h], algorithm: fixed_window, mode: shadow}
";

fn printed(output: &Output) -> String {
    assert!(output.status.success(), "{output:?}");
    String::from_utf8(output.stdout.clone()).unwrap()
}

fn answer(output: &Output) -> Value {
    serde_json::from_str(&printed(output)).unwrap()
}

/// Splits each line into words.
fn words(text: &str) -> Vec<Vec<&str>> {
    text.lines()
        .map(|line| line.split_whitespace().collect())
        .collect()
}

fn login(server: &Server, ip: &str) -> u16 {
    let entries = json!({"path": "/login", "method": "POST", "ip": ip});
    server.check(&entries).status
}

#[test]
fn denials_are_listed_as_a_table() {
    let server = Server::start(RULES);
    assert_eq!(printed(&server.operate(&["denials"])), "no denials\n");
    assert_eq!(login(&server, "203.0.113.9"), 200);
    assert_eq!(login(&server, "203.0.113.9"), 200);
    assert_eq!(login(&server, "203.0.113.9"), 429);
    let key = [
        "--rule",
        "login",
        "--key",
        "203.0.113.9",
        "--since",
        "1h",
        "-n",
        "5",
    ];
    let table = printed(&server.operate(&[&["denials"], &key[..]].concat()));
    let lines = words(&table);
    assert_eq!(
        lines[0],
        [
            "AT", "RULE", "KEY", "LIMIT", "RETRY", "AFTER", "LISTENER", "MODE"
        ],
        "{table}"
    );
    let row = &lines[1];
    assert_eq!(
        (lines.len(), &row[1..4]),
        (2, &["login", "203.0.113.9", "2/h"][..]),
        "{table}"
    );
    assert!(row.ends_with(&["http", "enforce"]), "{table}");
    // The shadow rule would have denied the second and the third request.
    let all = answer(&server.operate(&["denials", "--json"]));
    let modes: Vec<&str> = all["rows"]
        .as_array()
        .unwrap()
        .iter()
        .map(|row| row["mode"].as_str().unwrap())
        .collect();
    assert_eq!(modes.len(), 3);
    assert_eq!(modes.iter().filter(|mode| **mode == "shadow").count(), 2);
    for (arguments, expected) in [
        (
            &["--rule", "logn"][..],
            "there is no rule \"logn\"; did you mean \"login\"?",
        ),
        (&["-n", "0"], "-n: must be a number from 1 to 1000, got `0`"),
        (&["--since", "soon"], "--since: "),
        (
            &["--rule", "login", "--key", "a", "--key", "b"],
            "has a key of 1 value (ip), got 2; repeat",
        ),
    ] {
        let refused = server.operate(&[&["denials"], arguments].concat());
        let message = String::from_utf8_lossy(&refused.stderr).into_owned();
        assert!(
            !refused.status.success() && message.contains(expected),
            "{message}"
        );
    }
}

/// A limit that was sent with a request belongs to no rule, so its denials are listed without a
/// rule.
#[test]
fn the_denial_of_a_limit_of_the_request_is_listed_with_its_key() {
    let server = Server::start(RULES);
    let port = server.resp.port().to_string();
    for _ in 0..3 {
        let throttle = ["-p", &port, "CL.THROTTLE", "user:1", "1", "1", "3600"];
        assert!(
            run(Command::new(tool("redis-cli")).args(throttle))
                .status
                .success()
        );
    }
    let row = answer(&server.operate(&["denials", "--json"]))["rows"][0].clone();
    assert_eq!(
        (&row["rule"], &row["key"], &row["listener"]),
        (&Value::Null, &json!(["user:1"]), &json!("resp"))
    );
    assert!(row["policy"].as_str().unwrap().starts_with("1/h"), "{row}");
    let table = printed(&server.operate(&["denials"]));
    assert!(table.contains("(sent with the request)  user:1"), "{table}");
}

#[test]
fn explain_says_what_denies_and_why_rules_do_not_apply() {
    let server = Server::start(RULES);
    let entries = ["path=/login/", "method=POST", "ip=203.0.113.9"];
    let explain =
        |more: &[&str]| printed(&server.operate(&[&["explain"], &entries[..], more].concat()));
    let table = explain(&[]);
    assert!(
        table.starts_with("allowed\n\nlogin 203.0.113.9 (enforce): allows\n"),
        "{table}"
    );
    assert!(
        table.contains("\napi   path is /login/, but the rule requires /api/**\n"),
        "{table}"
    );
    assert_eq!(login(&server, "203.0.113.9"), 200);
    assert_eq!(login(&server, "203.0.113.9"), 200);
    let table = explain(&[]);
    assert!(table.starts_with("denied (limit), passes in "), "{table}");
    assert!(
        table.contains("\nlogin 203.0.113.9 (enforce): denies (limit), passes in ")
            && table.contains("\ntrial 203.0.113.9 (shadow): would deny, passes in "),
        "{table}"
    );
    let lines = words(&table);
    let limit = lines
        .iter()
        .find(|line| line[..].starts_with(&["2/h"]))
        .unwrap();
    assert_eq!(limit[1..3], ["0", "2"], "{table}");
    let costly = explain(&["--cost", "3", "--rule", "login"]);
    assert!(costly.contains("denies (limit), never passes"), "{costly}");
    assert!(!costly.contains("trial"), "{costly}");

    let blocked = [
        "block",
        "login",
        "203.0.113.9",
        "--for",
        "1h",
        "--reason",
        "abuse",
    ];
    assert!(server.operate(&blocked).status.success());
    let table = explain(&[]);
    assert!(
        table.starts_with("denied (blocked), passes in ")
            && table.contains("\nblocked until 2")
            && table.contains(": abuse\n"),
        "{table}"
    );
    for (arguments, expected) in [
        (&["ip"][..], "expected NAME=VALUE, such as path=/login"),
        (
            &["ip=1", "ip=2"],
            "the entry ip is given twice; give it once",
        ),
        (
            &["ip=ten"],
            "cannot explain the request: entries.ip: is not an IP address",
        ),
        (&["ip=::", "--rule", "x"], "there is no rule \"x\""),
        (
            &["ip=::", "--cost", "1e3"],
            "expected an integer without an exponent or a unit, such as 1000; write 1000",
        ),
    ] {
        let refused = server.operate(&[&["explain"], arguments].concat());
        let message = String::from_utf8_lossy(&refused.stderr).into_owned();
        assert!(
            !refused.status.success() && message.contains(expected),
            "{message}"
        );
    }
}

#[test]
fn keys_are_listed_with_what_remains() {
    let server = Server::start(RULES);
    assert_eq!(printed(&server.operate(&["keys", "api"])), "no keys\n");
    for number in 0..30 {
        let entries = json!({"path": "/api/x", "customer": format!("c{number}")});
        assert_eq!(server.check(&entries).status, 200);
    }
    let table = printed(&server.operate(&["keys", "api", "-n", "1000"]));
    let lines = words(&table);
    // The table has a heading, and two lines for each of the 30 keys, because each key has two
    // limits.
    assert_eq!(lines.len(), 61, "{table}");
    assert_eq!(lines[0][..4], ["KEY", "LIMIT", "REMAINING", "OF"]);
    assert_eq!(
        (&lines[1][1..4], &lines[2][..3]),
        (&["1/h", "0", "1"][..], &["5/d", "4", "5"][..])
    );

    let (mut listed, mut after) = (Vec::new(), None::<String>);
    loop {
        let mut arguments = vec!["keys", "api", "-n", "7", "--json"];
        arguments.extend(after.iter().flat_map(|after| ["--after", after.as_str()]));
        let page = answer(&server.operate(&arguments));
        listed.extend(
            page["keys"]
                .as_array()
                .unwrap()
                .iter()
                .map(|row| row["key"].to_string()),
        );
        match page["next"].as_str() {
            Some(next) => after = Some(next.to_owned()),
            None => break,
        }
    }
    listed.sort_unstable();
    listed.dedup();
    assert_eq!(listed.len(), 30);
    let first = printed(&server.operate(&["keys", "api", "-n", "1"]));
    assert!(
        first.contains("\nnote: more keys follow; to list them, pass --after "),
        "{first}"
    );
    let refused = server.operate(&["keys", "api", "--after", "1.2.3"]);
    let message = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(
        message.contains("--after: is not a `next` value of this list"),
        "{message}"
    );
}

/// With `denials: {log: 100%}`, every denial is logged, up to the rate limit on log records.
#[test]
fn denials_are_logged_if_that_is_set() {
    let mut server = Server::start(RULES);
    for _ in 0..3 {
        login(&server, "203.0.113.9");
    }
    server.wait_for(&["request denied", "enforce"]);
    let log = server.log_text();
    let line = log
        .lines()
        .find(|line| line.contains("request denied") && line.contains("enforce"));
    let line = line.unwrap_or_else(|| panic!("{log}"));
    for part in ["rule=", "login", "203.0.113.9", "2/h", "http"] {
        assert!(line.contains(part), "{line}");
    }
}

/// Event IDs begin with the start time of the server process. Thus, events of a restarted server
/// are recognised as new.
#[test]
fn followed_events_survive_a_restart_of_the_server() {
    let port = reserve_port();
    let config = format!(
        "listen: {{http: '127.0.0.1:0', grpc: '127.0.0.1:0', resp: '127.0.0.1:0', admin: '127.0.0.1:{port}'}}\n{RULES}"
    );
    let server = Server::start_in(Scratch::new(), &config);
    let block = |server: &Server, key: &str| {
        let output = server.operate(&["block", "login", key]);
        assert!(output.status.success(), "{output:?}");
    };
    block(&server, "203.0.113.1");
    let mut follow = tidegate(&["events", "--follow"])
        .env("TIDEGATE_ADMIN", server.admin.to_string())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(follow.stdout.take().unwrap()).lines();
    let mut next = |expected: &str| {
        let line = lines.next().unwrap().unwrap();
        assert!(
            line.contains("block.added") && line.contains(expected),
            "{line}"
        );
    };
    next("203.0.113.1");
    let mut problems = BufReader::new(follow.stderr.take().unwrap()).lines();
    let scratch = server.stop();
    let problem = problems.next().unwrap().unwrap();
    assert!(
        problem.contains("trying again until the server responds"),
        "{problem}"
    );
    let server = Server::start_in(scratch, &config);
    block(&server, "203.0.113.2");
    block(&server, "203.0.113.3");
    next("203.0.113.2");
    next("203.0.113.3");
    let problem = problems.next().unwrap().unwrap();
    assert!(problem.contains("the server responds again"), "{problem}");
    follow.kill().unwrap();
    follow.wait().unwrap();
}
