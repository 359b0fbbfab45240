//! Tests of `tidegate top` against a running server.

use std::{
    io::{BufRead as _, BufReader},
    process::{Output, Stdio},
};

use serde_json::{Value, json};

use crate::support::{Server, tidegate};

const RULES: &str = "
rules:
  - {name: api, key: [user], limits: [2/h], algorithm: fixed_window}
  - {name: all, limits: [100/h], algorithm: fixed_window}
";

fn printed(output: &Output) -> String {
    assert!(output.status.success(), "{output:?}");
    String::from_utf8(output.stdout.clone()).unwrap()
}

fn loaded() -> Server {
    let server = Server::start(RULES);
    for user in ["acme", "acme", "acme", "acme", "gl\u{1b}obex"] {
        server.check(&json!({"user": user}));
    }
    server
}

#[test]
fn keys_are_listed_as_a_table_or_json() {
    let server = loaded();
    assert_eq!(
        printed(&server.operate(&["top", "api"])),
        "api, last 5min, 1 server: 5 requests, 2 denied, cost 5\n\
         AT MOST  AT LEAST  SHARE  KEY\n\
         4        4         80.0%  acme\n\
         1        1         20.0%  gl\\u{1b}obex\n"
    );
    assert_eq!(
        printed(&server.operate(&["top", "--by", "denied", "--over", "1h", "-n", "5"])),
        "all rules, last 1h, 1 server: 5 requests, 2 denied, cost 5\n\
         AT MOST  AT LEAST  SHARE   RULE  KEY\n\
         2        2         100.0%  api   acme\n"
    );
    let answer = printed(&server.operate(&["top", "api", "--json", "--count", "1"]));
    let list: Value = serde_json::from_str(&answer).unwrap();
    assert_eq!(
        list["rows"],
        json!([{"key": ["acme"], "estimate": 4, "error": 0}])
    );
    assert_eq!(
        list["total"],
        json!({"requests": 5, "denied": 2, "cost": 5})
    );
}

#[test]
fn one_command_shows_every_period_and_the_blocks() {
    let server = loaded();
    let blocked = server.operate(&["block", "api", "acme", "--for", "1h", "--reason", "flood"]);
    assert!(blocked.status.success(), "{blocked:?}");
    let shown = printed(&server.operate(&["top", "api", "--over", "all", "-n", "1"]));
    let parts: Vec<&str> = shown.split("\n\n").collect();
    for (part, period) in parts.iter().zip(["5min", "15min", "1h", "1d"]) {
        let expected = format!(
            "api, last {period}, 1 server: 5 requests, 2 denied, cost 5\n\
             AT MOST  AT LEAST  SHARE  KEY\n\
             4        4         80.0%  acme"
        );
        assert_eq!(part.trim_end(), expected);
    }
    let [.., blocks] = parts[..] else {
        panic!("{shown}");
    };
    assert_eq!(parts.len(), 5, "{shown}");
    assert!(blocks.starts_with("RULE  KEY   LEFT"), "{blocks}");
    assert!(blocks.contains("api   acme  "), "{blocks}");
    let blocked = server.operate(&["block", "api", "initech", "--for", "1h"]);
    assert!(blocked.status.success(), "{blocked:?}");
    let shown = printed(&server.operate(&["top", "--over", "all", "-n", "1"]));
    assert!(
        shown.contains("acme") && !shown.contains("initech"),
        "{shown}"
    );
    assert!(shown.contains("note: there are more blocks;"), "{shown}");
    for user in ["umbrella", "initech"] {
        let entry = format!("user={user}");
        let blocked = server.operate(&["block", "--entry", &entry, "--for", "1h"]);
        assert!(blocked.status.success(), "{blocked:?}");
    }
    let shown = printed(&server.operate(&["top", "--over", "all", "-n", "1"]));
    assert!(
        shown.contains("user=initech") && !shown.contains("user=umbrella"),
        "{shown}"
    );
    assert!(shown.contains("note: there are more blocks;"), "{shown}");
    let json = printed(&server.operate(&["top", "--over", "all", "--json"]));
    let document: Value = serde_json::from_str(&json).unwrap();
    assert_eq!(document["periods"][3]["over_ms"], 86_400_000);
    assert_eq!(document["blocks"][0]["key"], json!(["acme"]));
    assert_eq!(document["entry_blocks"].as_array().unwrap().len(), 2);
}

#[test]
fn mistakes_are_explained() {
    let server = Server::start(RULES);
    assert_eq!(
        printed(&server.operate(&["top"])),
        "all rules, last 5min, 1 server: 0 requests, 0 denied, cost 0\nno keys\n"
    );
    for (arguments, code, expected) in [
        (
            ["--by", "asked"],
            2,
            "must be requests, denied or cost, got `asked`",
        ),
        (
            ["--over", "2h"],
            2,
            "--over: must be 5m, 15m, 1h, 1d or all, got `2h`",
        ),
        (["-n", "0"], 2, "must be a number from 1 to 1000, got `0`"),
        (
            ["apu", "--json"],
            1,
            "there is no rule \"apu\"; did you mean \"api\"?",
        ),
    ] {
        let output = server.operate(&[&["top"], &arguments[..]].concat());
        assert_eq!(output.status.code(), Some(code), "{output:?}");
        let message = String::from_utf8_lossy(&output.stderr);
        assert!(message.contains(expected), "{message}");
    }
}

/// If the output is not a terminal, the lists are printed one after the other without control
/// sequences. The command ends when the program that reads the output closes the pipe.
#[test]
fn a_watched_list_is_repeated_until_it_is_not_read() {
    let server = loaded();
    let mut watch = tidegate(&["top", "api", "--watch"])
        .env("TIDEGATE_ADMIN", server.admin.to_string())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(watch.stdout.take().unwrap()).lines();
    let mut heads = 0;
    while heads < 2 {
        let line = lines.next().unwrap().unwrap();
        assert!(!line.contains('\u{1b}'), "{line}");
        heads += usize::from(line.starts_with("api, last 5min, 1 server: 5 requests"));
    }
    drop(lines);
    assert!(watch.wait().unwrap().success());
}
