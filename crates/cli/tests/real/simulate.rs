//! Tests `tidegate simulate`: its reports, every error, and logs written by real servers.

use std::{
    fs,
    io::Write as _,
    net::SocketAddr,
    process::{Command, Output, Stdio},
};

use serde_json::Value;

use crate::{
    servers::reserve_port,
    support::{Ask, Process, Scratch, Server, repository, run, tidegate, tool},
};

const RULES: &str = "
rules:
  - {name: api, when: {path: /api/**}, key: [ip], limits: [2/min]}
  - {name: watched, mode: shadow, key: [ip], limits: [3/min]}
  - {name: flights, key: [ip], limits: [{algorithm: concurrency, limit: 1, lease: 30s}]}
";

/// Returns the log line for a request in nginx's combined format.
fn line(second: u32, ip: &str, path: &str) -> String {
    format!(
        "{ip} - - [22/Nov/2026:06:25:{second:02} +0000] \"GET {path} HTTP/1.1\" 200 12 \"-\" \"curl/8\""
    )
}

/// Five requests from one client and one request from another client.
fn log() -> String {
    let mut lines: Vec<String> = (1..=5)
        .map(|second| line(second, "203.0.113.9", "/api/x"))
        .collect();
    lines.push(line(9, "203.0.113.7", "/other"));
    lines.join("\n") + "\n"
}

fn simulate(scratch: &Scratch, arguments: &[&str]) -> Output {
    let rules = scratch.join("rules.yaml");
    if !rules.exists() {
        scratch.write("rules.yaml", RULES);
    }
    run(tidegate(&["simulate", "rules.yaml"])
        .args(arguments)
        .current_dir(scratch.path()))
}

fn out(output: &Output) -> &str {
    assert_eq!(output.status.code(), Some(0), "{output:?}");
    std::str::from_utf8(&output.stdout).unwrap()
}

fn json(scratch: &Scratch, arguments: &[&str]) -> Value {
    let output = simulate(scratch, &[arguments, &["--json"]].concat());
    serde_json::from_str(out(&output)).unwrap()
}

/// Returns the error message of a simulation that fails.
fn error(scratch: &Scratch, arguments: &[&str]) -> String {
    let output = simulate(scratch, arguments);
    assert_eq!(
        (output.status.code(), &*output.stdout),
        (Some(2), &b""[..]),
        "{output:?}"
    );
    String::from_utf8(output.stderr).unwrap()
}

#[test]
fn the_report_counts_denials_by_rule_and_key() {
    let scratch = Scratch::new();
    scratch.write("access.log", &log());
    let report = json(&scratch, &["--log", "access.log"]);
    assert_eq!(report["lines"]["read"], 6);
    assert_eq!(report["lines"]["from_ms"], 1_795_328_701_000_u64);
    assert_eq!(report["lines"]["to_ms"], 1_795_328_709_000_u64);
    assert_eq!(report["lines"]["precision"], "second");
    assert_eq!(report["lines"]["formats"][0], "combined");
    let requests = &report["requests"];
    assert_eq!(
        (&requests["decided"], &requests["denied"]),
        (&6.into(), &3.into())
    );
    let api = &report["rules"][0];
    assert_eq!(
        (&api["rule"], &api["mode"]),
        (&"api".into(), &"enforce".into())
    );
    assert_eq!((&api["requests"], &api["denied"]), (&5.into(), &3.into()));
    assert_eq!((&api["keys"], &api["keys_denied"]), (&1.into(), &1.into()));
    let worst = &api["worst"][0];
    assert_eq!(worst["key"][0], "203.0.113.9");
    assert_eq!(worst["first_ms"], 1_795_328_703_000_u64);
    assert_eq!(worst["last_ms"], 1_795_328_705_000_u64);
    assert_eq!(api["limits"][0]["denied"], 3);
    // A request that another rule denies is not charged to any rule, so the limit of the shadow
    // rule is not exhausted.
    let watched = &report["rules"][1];
    assert_eq!(
        (&watched["mode"], &watched["requests"]),
        (&"shadow".into(), &6.into())
    );
    assert_eq!(watched["denied"], 0);
    let flights = &report["rules"][2];
    assert_eq!(flights["simulated"], false);
    assert!(
        flights["notes"][0]
            .as_str()
            .unwrap()
            .contains("concurrency"),
        "{flights}"
    );
}

#[test]
fn the_table_has_the_same_numbers() {
    let scratch = Scratch::new();
    scratch.write("access.log", &log());
    let output = simulate(&scratch, &["--log", "access.log"]);
    let printed = out(&output);
    for expected in [
        "6 lines (combined), 2026-11-22T06:25:01Z to 2026-11-22T06:25:09Z; 0 damaged",
        "6 requests decided, 3 denied (50%)",
        "RULE     MODE     REQUESTS       DENIED  SHARE  KEYS  KEYS DENIED  SHARE",
        "api      enforce  5              3       60%    1     1            100%",
        "watched  shadow   6              0       0%     2     0            0%",
        "flights  enforce  not simulated",
        "api   203.0.113.9  3       2026-11-22T06:25:03Z  2026-11-22T06:25:05Z",
        "- the log's timestamps have a resolution of one second",
        "- flights: not simulated",
    ] {
        assert!(printed.contains(expected), "no {expected:?} in:\n{printed}");
    }
    assert!(output.stderr.is_empty(), "{output:?}");
}

#[test]
fn several_files_are_merged_in_the_order_of_time() {
    let scratch = Scratch::new();
    scratch.write(
        "late.log",
        &[
            line(40, "203.0.113.9", "/api/c"),
            line(50, "203.0.113.9", "/api/d"),
        ]
        .join("\n"),
    );
    scratch.write(
        "early.log",
        &[
            line(10, "203.0.113.9", "/api/a"),
            line(20, "203.0.113.9", "/api/b"),
        ]
        .join("\n"),
    );
    scratch.write("empty.log", "");
    let report = json(
        &scratch,
        &["--log", "late.log", "empty.log", "--log", "early.log"],
    );
    let worst = &report["rules"][0]["worst"][0];
    assert_eq!(
        (&worst["first_ms"], &worst["last_ms"]),
        (&1_795_328_740_000_u64.into(), &1_795_328_750_000_u64.into())
    );
    assert_eq!(report["lines"]["backwards"], 0);
    assert_eq!(report["warnings"][0], "empty.log is empty");
}

#[test]
fn compressed_files_and_standard_input_are_read() {
    let scratch = Scratch::new();
    scratch.write("access.log", &log());
    let plain = json(&scratch, &["--log", "access.log"]);
    let gzip = run(Command::new("gzip")
        .arg("-k")
        .arg(scratch.join("access.log")));
    assert!(gzip.status.success(), "{gzip:?}");
    let compressed = json(&scratch, &["--log", "access.log.gz"]);
    assert_eq!(compressed["rules"], plain["rules"]);
    let mut child = tidegate(&["simulate", "rules.yaml", "--log", "-", "--json"])
        .current_dir(scratch.path())
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    child
        .stdin
        .take()
        .unwrap()
        .write_all(log().as_bytes())
        .unwrap();
    let output = child.wait_with_output().unwrap();
    let piped: Value = serde_json::from_str(out(&output)).unwrap();
    assert_eq!(piped["rules"], plain["rules"]);
}

#[test]
fn damaged_lines_are_counted_and_shown() {
    let scratch = Scratch::new();
    let mut text = log();
    text.push_str("203.0.113.9 - - [22/Nov/2026:06:25:60\n\u{1b}[31mgarbage\n");
    text.push_str(&"x".repeat(2 << 20));
    text.push('\n');
    scratch.write("access.log", &text);
    let report = json(&scratch, &["--log", "access.log"]);
    assert_eq!(
        (&report["lines"]["read"], &report["lines"]["damaged"]),
        (&9.into(), &3.into())
    );
    let damaged = &report["lines"]["damaged_lines"];
    assert_eq!(
        (&damaged[0]["line"], &damaged[0]["file"]),
        (&7.into(), &"access.log".into())
    );
    assert_eq!(damaged[2]["problem"], "is longer than 1024 KiB");
    let output = simulate(&scratch, &["--log", "access.log"]);
    let printed = out(&output);
    assert!(
        printed.starts_with("warning: 3 of 9 lines (33.3%) do not match"),
        "{printed}"
    );
    assert!(
        printed.contains("access.log, line 7: column 18: expected `] \"` after `time_local`"),
        "{printed}"
    );
    assert!(!printed.contains('\u{1b}'), "{printed}");
}

/// The log has a precision of one second. With a limit of one request per second, a second request
/// with the same timestamp is denied, but its wait is at most one second.
#[test]
fn denials_within_the_precision_of_the_log_are_counted() {
    let scratch = Scratch::new();
    let rules = "rules: [{name: api, key: [ip], algorithm: gcra, limits: [1/s]}]";
    scratch.write("rules.yaml", rules);
    let at = |second| line(second, "203.0.113.9", "/api/x");
    scratch.write(
        "access.log",
        &[at(1), at(1), at(5), at(9), at(9)].join("\n"),
    );
    let report = json(&scratch, &["--log", "access.log"]);
    let rule = &report["rules"][0];
    assert_eq!(
        (&rule["denied"], &rule["denied_within_precision"]),
        (&2.into(), &2.into())
    );
    scratch.write("rules.yaml", &rules.replace("1/s", "6/min"));
    let report = json(&scratch, &["--log", "access.log"]);
    let rule = &report["rules"][0];
    // The limit admits one request every ten seconds. The request at second 9 is two seconds too
    // early.
    assert_eq!(
        (&rule["denied"], &rule["denied_within_precision"]),
        (&4.into(), &0.into())
    );
}

#[test]
fn lines_that_go_backwards_are_sorted_and_those_too_late_are_counted() {
    let scratch = Scratch::new();
    let minute = |minute: u32, second: u32| {
        line(second, "203.0.113.9", "/api/x").replace("06:25:", &format!("06:{minute}:"))
    };
    let lines = [
        minute(25, 3),
        minute(25, 1),
        minute(25, 2),
        minute(40, 0),
        minute(41, 30),
        minute(26, 0),
    ];
    scratch.write("access.log", &lines.join("\n"));
    let report = json(&scratch, &["--log", "access.log"]);
    assert_eq!(
        (&report["lines"]["backwards"], &report["lines"]["late"]),
        (&3.into(), &1.into())
    );
    assert_eq!(
        report["rules"][0]["worst"][0]["first_ms"],
        1_795_328_703_000_u64
    );
    assert!(
        report["warnings"][0]
            .as_str()
            .unwrap()
            .contains("and were decided late: 1;"),
        "{report}"
    );
}

#[test]
fn requests_that_the_proxy_refuses_are_counted() {
    let scratch = Scratch::new();
    let lines = [
        line(1, "203.0.113.9", "/api/../x"),
        line(2, "203.0.113.9", "/api/%6F"),
        line(3, "203.0.113.9", "/x").replace("GET /x HTTP/1.1", r"\x16\x03\x01"),
    ];
    scratch.write("access.log", &lines.join("\n"));
    let report = json(&scratch, &["--log", "access.log"]);
    assert_eq!(
        (
            &report["requests"]["decided"],
            &report["requests"]["refused"]
        ),
        (&1.into(), &1.into())
    );
    let reason = report["requests"]["refusals"][0].as_str().unwrap();
    assert!(
        reason.starts_with("path: has segments `.` or `..`"),
        "{reason}"
    );
    assert_eq!(report["lines"]["without_request"], 1);
}

/// The settings for determining the client's address apply to logs in the same way as to live
/// requests.
#[test]
fn trusted_proxies_and_derived_entries_apply() {
    let scratch = Scratch::new();
    let rules = "
clients: {proxies: [10.0.0.0/8]}
entries: {key_id: {of: header.x-api-key, split: \".\"}}
rules: [{name: each, key: [ip, key_id], limits: [1/min]}]
";
    scratch.write("rules.yaml", rules);
    let format = r#"$remote_addr [$msec] "$request" "$http_x_forwarded_for" "$http_x_api_key""#;
    scratch.write(
        "access.log",
        "10.0.0.8 [1795328701.5] \"GET / HTTP/1.1\" \"6.6.6.6, 203.0.113.9\" \"acme.s3cret\"\n\
         10.0.0.8 [1795328702.5] \"GET / HTTP/1.1\" \"203.0.113.9\" \"acme.other\"\n\
         198.51.100.7 [1795328703.5] \"GET / HTTP/1.1\" \"203.0.113.9\" \"acme.other\"\n",
    );
    let report = json(&scratch, &["--log", "access.log", "--format", format]);
    let each = &report["rules"][0];
    assert_eq!(
        (&each["requests"], &each["denied"], &each["keys"]),
        (&3.into(), &1.into(), &2.into())
    );
    assert_eq!(
        each["worst"][0]["key"],
        serde_json::json!(["203.0.113.9", "acme"])
    );
    assert_eq!(report["lines"]["precision"], "millisecond");
}

/// The report must say which data is missing in the log. If the report did not say so, the rule
/// would seem to deny nothing.
#[test]
fn entries_that_the_log_lacks_are_reported() {
    let scratch = Scratch::new();
    let rules = "
listen: {http: off, resp: off}
proxy: {listen: 127.0.0.1:0, upstreams: [{name: app, urls: \"http://127.0.0.1:1\"}]}
rules:
  - {name: keyed, key: [header.x-api-key], limits: [1/s]}
  - {name: tokens, key: [ip], limits: [100/h], cost: 5, settle: header.x-tokens}
  - {name: failures, key: [ip], limits: [3/h], count: {status: 401}}
";
    scratch.write("rules.yaml", rules);
    scratch.write("access.log", &log());
    let report = json(&scratch, &["--log", "access.log"]);
    let note = |at: usize| report["rules"][at]["notes"][0].as_str().unwrap();
    assert!(
        note(0).contains("no request has the key entry `header.x-api-key`"),
        "{}",
        note(0)
    );
    assert!(note(1).contains("`header.x-tokens`"), "{}", note(1));
    assert!(
        note(2).starts_with("charged by the response"),
        "{}",
        note(2)
    );
    // No response was 401, so all charges were refunded.
    assert_eq!(report["rules"][2]["denied"], 0);
    let lacks = report["notes"].as_array().unwrap().iter();
    let lacks: Vec<&str> = lacks
        .filter_map(Value::as_str)
        .filter(|note| note.contains("--entry"))
        .collect();
    assert!(lacks[0].contains("header.x-api-key"), "{lacks:?}");
    scratch.write("access.log", &log().replace(" 200 12 ", " 401 12 "));
    let report = json(&scratch, &["--log", "access.log"]);
    assert_eq!(report["rules"][2]["denied"], 2);
}

#[test]
fn an_unusable_log_is_an_error_that_says_what_to_do() {
    let scratch = Scratch::new();
    scratch.write("odd.log", "Nov 22 06:25:01 host app: hello \u{1b}[2J\n");
    scratch.write("empty.log", "");
    fs::write(scratch.join("binary"), b"\x7fELF\0\0\0").unwrap();
    fs::write(scratch.join("log.xz"), b"\xfd7zXZ\0\0\x04").unwrap();
    scratch.write("blank.log", "\n\n\n");
    scratch.write("access.log", &log());
    for (arguments, expected) in [
        (
            &["--log", "odd.log"][..],
            &[
                "tidegate: odd.log: the log format is unknown; the nearest is `",
                "and the first line differs at column ",
                "\n  Nov 22 06:25:01 host app: hello \\u{1b}[2J\n",
                "with --format",
            ][..],
        ),
        (&["--log", "empty.log"], &["empty.log: the log is empty"]),
        (
            &["--log", "blank.log"],
            &["blank.log: the first lines are empty"],
        ),
        (
            &["--log", "binary"],
            &["binary: is not a text file: it contains NUL bytes"],
        ),
        (
            &["--log", "log.xz"],
            &["log.xz: is compressed with xz; decompress it: xz -dc"],
        ),
        (&["--log", "nowhere.log"], &["nowhere.log: No such file"]),
        (&["--log", "."], &[".: is a directory"]),
        (
            &["--log", "-", "-"],
            &["`-` (standard input) is given more than once"],
        ),
        (
            &["--log", "access.log", "--format", "cady"],
            &["did you mean `caddy`?"],
        ),
        (
            &[
                "--log",
                "access.log",
                "--format",
                "$remote_addr $msec$status",
            ],
            &["`msec` and `status` have no text between them"],
        ),
        (
            &["--log", "access.log", "--format", "$remote_addr $status"],
            &["the format has no time"],
        ),
        (
            &["--log", "access.log", "--format", "caddy"],
            &["the nearest is `caddy`"],
        ),
        (
            &["--log", "access.log", "--entry", "customer"],
            &["expected ENTRY=FIELD"],
        ),
        (
            &["--log", "access.log", "--entry", "customer=tenant"],
            &["`tenant` is not a field of the log format; its fields are remote_addr,"],
        ),
        (&[], &["--log <FILE>..."]),
    ] {
        let problem = error(&scratch, arguments);
        for expected in expected {
            assert!(problem.contains(expected), "no {expected:?} in:\n{problem}");
        }
    }
    scratch.write("rules.yaml", "rules: []\n");
    let problem = error(&scratch, &["--log", "access.log"]);
    assert!(
        problem.contains("rules.yaml has no rules to simulate"),
        "{problem}"
    );
    scratch.write("rules.yaml", "rules: [{name: a}]\n");
    let problem = error(&scratch, &["--log", "access.log"]);
    assert!(problem.contains("rules.yaml has 1 error"), "{problem}");
}

/// If a log file is cut off, the first warning says that the rest of the file is missing.
#[test]
fn a_truncated_compressed_file_is_reported() {
    let scratch = Scratch::new();
    let lines: Vec<String> = (0..20_000)
        .map(|at| line(at % 60, "203.0.113.9", &format!("/{at}")))
        .collect();
    scratch.write("access.log", &lines.join("\n"));
    run(Command::new("gzip").arg(scratch.join("access.log")));
    let bytes = fs::read(scratch.join("access.log.gz")).unwrap();
    fs::write(scratch.join("access.log.gz"), &bytes[..bytes.len() / 2]).unwrap();
    let report = json(&scratch, &["--log", "access.log.gz"]);
    let warnings = report["warnings"].as_array().unwrap();
    let problem = warnings
        .iter()
        .filter_map(Value::as_str)
        .find(|problem| problem.contains("cannot be read after line"));
    assert!(problem.is_some(), "{warnings:?}");
    assert!(report["requests"]["decided"].as_u64().unwrap() > 1_000);
}

#[test]
fn an_interruption_prints_the_results_so_far() {
    let scratch = Scratch::new();
    scratch.write("rules.yaml", RULES);
    let mut child = tidegate(&["simulate", "rules.yaml", "--log", "-"])
        .current_dir(scratch.path())
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut stdin = child.stdin.take().unwrap();
    // The log does not fit in the pipe and the buffers. Therefore, when all lines have been
    // written, the program must have started to read.
    for _ in 0..100_000 {
        writeln!(stdin, "{}", line(1, "203.0.113.9", "/api/x")).unwrap();
    }
    let kill = format!("kill -INT {}", child.id());
    assert!(run(Command::new("sh").args(["-c", &kill])).status.success());
    // Standard input is still open.
    let output = child.wait_with_output().unwrap();
    drop(stdin);
    assert_eq!(output.status.code(), Some(130), "{output:?}");
    let printed = String::from_utf8(output.stdout).unwrap();
    assert!(
        printed.starts_with("interrupted: these are the results so far\n"),
        "{printed}"
    );
    assert!(printed.contains(" denied ("), "{printed}");
}

#[test]
fn two_rules_files_are_compared() {
    let scratch = Scratch::new();
    scratch.write("access.log", &log());
    let stricter = RULES
        .replace("2/min", "1/min")
        .replace("name: api", "name: strict");
    scratch.write("stricter.yaml", &stricter);
    let report = json(
        &scratch,
        &["--log", "access.log", "--against", "stricter.yaml"],
    );
    let comparison = &report["comparison"];
    assert_eq!(comparison["against"], "stricter.yaml");
    assert_eq!(
        (&comparison["compared"], &comparison["newly_denied"]),
        (&6.into(), &0.into())
    );
    assert_eq!(comparison["no_longer_denied"], 1);
    let key = &comparison["no_longer"][0];
    assert_eq!(
        (&key["rule"], &key["key"][0]),
        (&"strict".into(), &"203.0.113.9".into())
    );
    assert_eq!(
        (&key["requests"], &key["first_ms"]),
        (&1.into(), &1_795_328_702_000_u64.into())
    );
    let output = run(tidegate(&[
        "simulate",
        "stricter.yaml",
        "--against",
        "rules.yaml",
        "--log",
        "access.log",
    ])
    .current_dir(scratch.path()));
    let printed = out(&output);
    assert!(
        printed.contains("Compared with rules.yaml: 1 newly denied (16.6%), 0 no longer denied"),
        "{printed}"
    );
    assert!(
        printed.contains("newly denied  strict  203.0.113.9  1         2026-11-22T06:25:02Z"),
        "{printed}"
    );
    let problem = error(
        &scratch,
        &["--log", "access.log", "--against", "nowhere.yaml"],
    );
    assert!(problem.contains("cannot read nowhere.yaml"), "{problem}");
}

#[test]
fn a_limit_can_be_replaced_for_a_try() {
    let scratch = Scratch::new();
    scratch.write("access.log", &log());
    let report = json(
        &scratch,
        &["--log", "access.log", "--what-if", "api.limit=4/min"],
    );
    assert_eq!(report["rules"][0]["limits"][0]["limit"], "4/min");
    assert_eq!(report["rules"][0]["denied"], 1);
    assert_eq!(report["comparison"]["no_longer_denied"], 2);
    assert_eq!(report["rules_file"], "rules.yaml with api.limit=4/min");
    for (what_if, expected) in [
        (
            "other.limit=1/s",
            "rules.yaml has no rule `other`; its rules are api, watched, flights",
        ),
        (
            "api.limit=often",
            "--what-if api.limit=often: expected a rate",
        ),
        ("flights.limit=1/s", "a concurrency limit is not simulated"),
        ("api=1/s", "expected RULE.limit=LIMIT"),
    ] {
        let problem = error(&scratch, &["--log", "access.log", "--what-if", what_if]);
        assert!(problem.contains(expected), "no {expected:?} in:\n{problem}");
    }
}

#[test]
fn a_sweep_counts_the_denials_under_several_limits() {
    let scratch = Scratch::new();
    scratch.write("access.log", &log());
    let sweep = |sweep: &'static str| ["--log", "access.log", "--sweep", sweep];
    let report = json(&scratch, &sweep("api.limit=1/min,3/min,5/min"));
    assert_eq!(
        report["sweep"],
        serde_json::json!({
            "rule": "api", "mode": "enforce", "requests": 5, "keys": 1, "decided": 6, "all_keys": 1,
            "values": [
                {"limit": "1/min", "denied": 4, "keys_denied": 1, "all_denied": 4, "all_keys_denied": 1},
                {"limit": "3/min", "denied": 2, "keys_denied": 1, "all_denied": 2, "all_keys_denied": 1},
                {"limit": "5/min", "denied": 0, "keys_denied": 0, "all_denied": 0, "all_keys_denied": 0},
            ],
        })
    );
    assert_eq!(report["rules"][0]["denied"], 3);
    let output = simulate(
        &scratch,
        &[
            "--log",
            "access.log",
            "--sweep",
            "watched.limit=1..5/min step 2",
            "--report",
            "report.html",
        ],
    );
    let printed = out(&output);
    for expected in [
        "Denials by rule watched, which is in shadow mode, and by all enforced rules, for each limit of the sweep:\n",
        "LIMIT  DENIED  SHARE  KEYS DENIED  SHARE  ALL DENIED  SHARE  ALL KEYS DENIED  SHARE\n",
        "1/min  4       66.6%  1            50%    3           50%    1                100%\n",
        "5/min  0       0%     0            0%     3           50%    1                100%\n",
    ] {
        assert!(printed.contains(expected), "no {expected:?} in:\n{printed}");
    }
    let html = fs::read_to_string(scratch.join("report.html")).unwrap();
    for expected in [
        "<h2>Denials of rule watched by its limit</h2>",
        "share denied (percent)",
        "limit (units per min)",
        ">requests of the rule</text>",
        ">all requests</text>",
        "<title>1/min: keys of the rule, 1 of 2 denied (50%)</title>",
        "<td>3/min</td>",
    ] {
        assert!(html.contains(expected), "no {expected:?} in:\n{html}");
    }
    for (value, expected) in [
        (
            "api=1/s",
            "'--sweep <RULE.limit=LIMITS>': expected RULE.limit=LIMITS",
        ),
        (
            "api.limit=1..9/s",
            "'--sweep <RULE.limit=LIMITS>': expected a range",
        ),
        (
            "api.limit=1..40/s step 1",
            "'--sweep <RULE.limit=LIMITS>': has more than the maximum of 32 limits",
        ),
        (
            "other.limit=1/s",
            "--sweep: rules.yaml has no rule `other`; its rules are api,",
        ),
        (
            "api.limit=often",
            "--sweep api.limit=often: expected a rate",
        ),
        ("api.limit=1/s,1/s", "--sweep api.limit=1/s: is given twice"),
        ("flights.limit=1/s", "a concurrency limit is not simulated"),
    ] {
        let problem = error(&scratch, &sweep(value));
        assert!(problem.contains(expected), "no {expected:?} in:\n{problem}");
    }
}

#[test]
fn a_larger_share_than_allowed_exits_with_3() {
    let scratch = Scratch::new();
    scratch.write("access.log", &log());
    let run_with = |arguments: &[&str]| {
        simulate(
            &scratch,
            &[&["--log", "access.log", "--fail-over"], arguments].concat(),
        )
    };
    assert_eq!(run_with(&["50%"]).status.code(), Some(0));
    let output = run_with(&["49.9%"]);
    assert_eq!(output.status.code(), Some(3));
    let problem = String::from_utf8_lossy(&output.stderr);
    assert_eq!(
        problem,
        "tidegate: 3 of 6 requests (50%) are denied, more than --fail-over 49.9% allows\n"
    );
    // In a comparison, `--fail-over` applies only to newly denied requests.
    assert_eq!(
        run_with(&["0%", "--what-if", "api.limit=3/min"])
            .status
            .code(),
        Some(0)
    );
    let output = run_with(&["0%", "--what-if", "api.limit=1/min"]);
    assert_eq!(output.status.code(), Some(3));
    let problem = String::from_utf8_lossy(&output.stderr);
    assert!(
        problem.contains("1 of 6 requests (16.6%) are newly denied"),
        "{problem}"
    );
    let problem = error(&scratch, &["--log", "access.log", "--fail-over", "0.1"]);
    assert!(
        problem.contains("expected a share such as 0.1%"),
        "{problem}"
    );
}

#[test]
fn suggested_limits_deny_at_most_the_share_of_keys() {
    let scratch = Scratch::new();
    scratch.write(
        "rules.yaml",
        "rules: [{name: api, key: [ip], limits: [1/min]}]\n",
    );
    // The n-th client sends n requests within one minute, and one more request an hour later.
    let mut lines = Vec::new();
    for client in 1..=10_u32 {
        for request in 0..client {
            lines.push(line(20 + request, &format!("203.0.113.{client}"), "/x"));
        }
        lines.push(line(1, &format!("203.0.113.{client}"), "/x").replace("06:25", "07:25"));
    }
    scratch.write("access.log", &lines.join("\n"));
    let report = json(&scratch, &["--log", "access.log", "--suggest=10%"]);
    let suggestion = &report["suggestions"][0];
    let number = |name: &str| suggestion[name].as_u64().unwrap();
    assert_eq!(
        (number("keys"), number("p50"), number("p90"), number("max")),
        (10, 5, 9, 10)
    );
    assert_eq!(
        (number("p99"), number("p99_9"), number("keys_denied")),
        (10, 10, 1)
    );
    assert_eq!(suggestion["limit"], "9/min");
    // In a simulation with the suggested limit, as many keys must be denied as the suggestion
    // predicts.
    let tried = json(
        &scratch,
        &["--log", "access.log", "--what-if", "api.limit=9/min"],
    );
    assert_eq!(tried["rules"][0]["keys_denied"], 1);
    let output = simulate(&scratch, &["--log", "access.log", "--suggest"]);
    let printed = out(&output);
    assert!(
        printed.contains("\nrules:\n  - name: api\n    limits: [10/min]\n"),
        "{printed}"
    );
}

/// Key values must be hashed wherever they can occur: in the table, the JSON report, the HTML
/// report, damaged lines and errors.
#[test]
fn hashed_keys_occur_nowhere_in_the_reports() {
    let scratch = Scratch::new();
    scratch.write(
        "access.log",
        &(log() + "203.0.113.9 - - [22/Nov/2026:06:25:60\n"),
    );
    let simulated = |extra: &[&str]| {
        let arguments = [
            "--log",
            "access.log",
            "--what-if",
            "api.limit=1/min",
            "--report",
            "report.html",
        ];
        let arguments = [&arguments[..], extra].concat();
        let printed = out(&simulate(&scratch, &arguments)).to_owned();
        let html = fs::read_to_string(scratch.join("report.html")).unwrap();
        (json(&scratch, &arguments), printed + &html)
    };
    let keys = |report: &Value| -> Vec<String> {
        let keys = [
            &report["rules"][0]["worst"][0],
            &report["comparison"]["newly"][0],
        ];
        keys.map(|key| key["key"][0].as_str().unwrap().to_owned())
            .into()
    };
    let (plain, printed) = simulated(&[]);
    assert_eq!(
        (keys(&plain)[0].as_str(), &plain["keys_hashed"]),
        ("203.0.113.9", &false.into())
    );
    assert!(printed.contains("203.0.113.9"), "{printed}");

    // The hash secret is random, but within a report, equal values have equal hashes.
    let (hashed, printed) = simulated(&["--hash-keys"]);
    let of_run = keys(&hashed);
    assert!(
        of_run[0].starts_with("hash:") && of_run[0].len() == 21,
        "{of_run:?}"
    );
    assert_eq!(
        (&of_run[0], &hashed["keys_hashed"]),
        (&of_run[1], &true.into())
    );
    assert_eq!(hashed["rules"][0]["denied"], plain["rules"][0]["denied"]);
    assert_ne!(keys(&simulated(&["--hash-keys"]).0), of_run);
    for text in [&hashed.to_string(), &printed] {
        assert!(
            !text.contains("203.0.113.9") && !text.contains("06:25:60"),
            "{text}"
        );
        assert!(
            text.contains("keys are hashed with a random secret"),
            "{text}"
        );
    }

    // The expected hash is the output of this command: printf %s 203.0.113.9 | openssl dgst -sha256
    // -hmac the-secret-of-the-hash
    let privacy = "privacy: {keys: hashed, secret: the-secret-of-the-hash}";
    scratch.write("rules.yaml", &format!("{privacy}{RULES}"));
    let (hashed, printed) = simulated(&[]);
    assert_eq!(
        keys(&hashed),
        ["hash:b2d6e737a8b9bd98", "hash:b2d6e737a8b9bd98"]
    );
    assert!(printed.contains("as in the server's lists"), "{printed}");
    assert!(!printed.contains("203.0.113.9"), "{printed}");

    let privacy = "privacy: {keys: hashed, secret_env: TIDEGATE_NO_SUCH_VARIABLE}";
    scratch.write("rules.yaml", &format!("{privacy}{RULES}"));
    let (hashed, printed) = simulated(&[]);
    assert!(keys(&hashed)[0].starts_with("hash:"), "{hashed}");
    assert!(
        printed.contains("TIDEGATE_NO_SUCH_VARIABLE is not set"),
        "{printed}"
    );

    scratch.write("odd.log", "203.0.113.9 hello\n");
    let problem = error(&scratch, &["--log", "odd.log"]);
    assert!(!problem.contains("203.0.113.9"), "{problem}");
    assert!(
        problem.contains("(not shown, because keys are hashed)"),
        "{problem}"
    );
}

#[test]
fn a_burst_is_suggested_for_several_rates() {
    let scratch = Scratch::new();
    scratch.write(
        "rules.yaml",
        "
listen: {http: off, resp: off}
proxy: {listen: 127.0.0.1:0, upstreams: [{name: app, urls: \"http://127.0.0.1:1\"}]}
rules:
  - {name: api, key: [ip], limits: [20/min burst 3]}
  - {name: failures, key: [ip], algorithm: token_bucket, count: {status: 401}, limits: [5/min]}
  - {name: window, key: [ip], limits: [5/min]}
",
    );
    // The n-th client sends n requests at the same time, and n more requests a minute later.
    let mut lines = Vec::new();
    for client in 1..=10_u32 {
        let ip = format!("203.0.113.{client}");
        for minute in ["06:25", "06:26"] {
            let line = line(20, &ip, "/x").replace("06:25", minute);
            lines.extend((0..client).map(|_| line.clone()));
        }
    }
    scratch.write("access.log", &lines.join("\n"));
    let arguments = [
        "--log",
        "access.log",
        "--suggest=10%",
        "--report",
        "report.html",
    ];
    let report = json(&scratch, &arguments);
    let frontiers = report["frontier"].as_array().unwrap();
    assert_eq!(frontiers.len(), 1, "{frontiers:?}");
    let frontier = &frontiers[0];
    assert_eq!(
        (
            &frontier["rule"],
            &frontier["limit"],
            &frontier["share"],
            &frontier["keys"]
        ),
        (
            &"api".into(),
            &"20/min burst 3".into(),
            &"10%".into(),
            &10.into()
        )
    );
    // One of the ten keys may be denied: the key that sends 10 requests at a time. The key that
    // sends 9 requests at a time must be admitted. At 5/min, its backlog after a minute is 9 - 5 +
    // 9 = 13 units, so it needs a burst of 12.
    let points = frontier["points"].as_array().unwrap();
    let limits: Vec<&str> = points
        .iter()
        .filter_map(|point| point["limit"].as_str())
        .collect();
    assert_eq!(
        limits,
        [
            "5/min burst 12",
            "10/min burst 8",
            "15/min burst 8",
            "20/min burst 8",
            "30/min burst 8",
            "40/min burst 8",
            "80/min burst 8",
        ]
    );
    assert!(points.iter().all(|point| point["keys_denied"] == 1));
    assert!(
        report["rules"][1]["notes"]
            .to_string()
            .contains("no burst is suggested"),
        "{report}"
    );
    let output = simulate(&scratch, &arguments);
    let printed = out(&output);
    for expected in [
        "For several rates, the smallest burst that denies at most 10% of the keys:\n",
        "RULE  IN THE FILE     RATE    BURST  LIMIT           KEYS DENIED\n",
        "api   20/min burst 3  5/min   12     5/min burst 12  1\n",
    ] {
        assert!(printed.contains(expected), "no {expected:?} in:\n{printed}");
    }
    let html = fs::read_to_string(scratch.join("report.html")).unwrap();
    for expected in [
        "<h3>Rule api, 20/min burst 3: the smallest burst for each rate</h3>",
        "burst (units)",
        "rate (units per time)",
        ">smallest burst</text>",
        "<td>5/min burst 12</td>",
    ] {
        assert!(html.contains(expected), "no {expected:?} in:\n{html}");
    }
}

#[test]
fn the_html_report_is_one_file() {
    let scratch = Scratch::new();
    scratch.write("access.log", &log().replace("curl", "<script>"));
    let odd = RULES.replace("name: watched", "name: \"<b>\"");
    scratch.write("rules.yaml", &odd);
    let arguments = [
        "--log",
        "access.log",
        "--report",
        "report.html",
        "--what-if",
        "api.limit=1/min",
        "--suggest",
    ];
    out(&simulate(&scratch, &arguments));
    let html = fs::read_to_string(scratch.join("report.html")).unwrap();
    for expected in [
        "<!doctype html>",
        "prefers-color-scheme: dark",
        "<svg viewBox=",
        "requests per 1 s",
        "time (UTC)",
        ">admitted</text>",
        ">denied</text>",
        "<td>&lt;b&gt;</td>",
        "<h2>Compared with rules.yaml</h2>",
        "<h2>Suggested limits</h2>",
        "<code>203.0.113.9</code>",
    ] {
        assert!(html.contains(expected), "no {expected:?} in:\n{html}");
    }
    for reference in [
        "http:", "https:", "src=", "href=", "<script", "<b>", "@import", "url(",
    ] {
        assert!(!html.contains(reference), "{reference:?} in:\n{html}");
    }
    let problem = error(
        &scratch,
        &["--log", "access.log", "--report", "nowhere/report.html"],
    );
    assert!(
        problem.contains("cannot write the report to nowhere/report.html: No such file"),
        "{problem}"
    );
}

/// Tests with the logs of real servers: the report counts every request that was sent.
#[test]
fn real_nginx_and_caddy_logs_are_read() {
    let nginx = "daemon off; pid nginx.pid; error_log stderr notice; events {}
http {
  client_body_temp_path body; proxy_temp_path proxy; fastcgi_temp_path fastcgi;
  uwsgi_temp_path uwsgi; scgi_temp_path scgi;
  log_format json escape=json '{\"msec\":\"$msec\",\"remote_addr\":\"$remote_addr\",\"request\":\"$request\",\"http_user_agent\":\"$http_user_agent\"}';
  access_log combined.log combined; access_log json.log json;
  server { listen 127.0.0.1:PORT; return 200 ok; }
}";
    let caddy = "{\n admin off\n}\nhttp://127.0.0.1:PORT {\n log {\n  output file caddy.log\n }\n respond ok\n}\n";
    for (config, ready, logs) in [
        (
            nginx,
            "start worker process",
            &["combined.log", "json.log"][..],
        ),
        (caddy, "serving initial configuration", &["caddy.log"]),
    ] {
        let scratch = Scratch::new();
        let (mut process, front) = start(&scratch, config, ready);
        for path in ["/api/a", "/api/b?x=%22", "/api/c", "/other"] {
            let answer = Ask::get(front, path)
                .header("user-agent", "te\"st\\")
                .send();
            assert_eq!(answer.status, 200);
        }
        process.signal("TERM");
        process.wait();
        for log in logs {
            let report = json(&scratch, &["--log", log]);
            assert_eq!(
                (&report["lines"]["read"], &report["lines"]["damaged"]),
                (&4.into(), &0.into()),
                "{log}: {report}"
            );
            let api = &report["rules"][0];
            assert_eq!(
                (&api["requests"], &api["denied"]),
                (&3.into(), &1.into()),
                "{log}"
            );
            assert_eq!(api["worst"][0]["key"][0], "127.0.0.1");
        }
    }
}

/// Starts nginx or Caddy with `config`.
fn start(scratch: &Scratch, config: &str, ready: &str) -> (Process, SocketAddr) {
    let is_caddy = config.contains("admin off");
    let port = reserve_port();
    let file = scratch.write("config", &config.replace("PORT", &port.to_string()));
    let mut command = Command::new(tool(if is_caddy { "caddy" } else { "nginx" }));
    if is_caddy {
        command
            .args(["run", "--adapter", "caddyfile", "--config"])
            .arg(file);
        command
            .env("HOME", scratch.path())
            .env("XDG_DATA_HOME", scratch.path());
        command.env("XDG_CONFIG_HOME", scratch.path());
    } else {
        command.arg("-p").arg(scratch.path()).arg("-c").arg(file);
    }
    let mut process = Process::start(command.current_dir(scratch.path()));
    process.wait_for(&[ready]);
    (process, SocketAddr::from(([127, 0, 0, 1], port)))
}

/// A simulation with the proxy's rules and access log must make the same decisions as the proxy.
#[test]
fn the_access_log_of_the_proxy_gets_the_same_decisions() {
    let rules = "
proxy: {listen: 127.0.0.1:0, upstreams: [{name: app, urls: \"http://127.0.0.1:1\"}], access_log: access.log}
rules: [{name: api, when: {path: /api/**}, key: [ip], limits: [3/h]}]
";
    let server = Server::start(rules);
    let get = |_| Ask::get(server.proxy(), "/api/x").send().status;
    let statuses: Vec<u16> = (0..6).map(get).collect();
    let denied = statuses.iter().filter(|status| **status == 429).count();
    assert_eq!(denied, 3, "{statuses:?}");
    let scratch = server.stop();
    let report = json(&scratch, &["--log", "access.log"]);
    assert_eq!(report["lines"]["formats"][0], "tidegate");
    assert_eq!(report["rules"][0]["denied"], 3);
}

#[test]
fn the_help_names_the_formats_and_exit_codes() {
    let output = run(&mut tidegate(&["simulate", "--help"]));
    let help = out(&output);
    for expected in [
        "caddy",
        "--entry",
        "LogFormat",
        "--sweep",
        "--hash-keys",
        "130 after Ctrl-C",
    ] {
        assert!(help.contains(expected), "{help}");
    }
    assert!(repository().join("docs/simulate.md").exists());
}
