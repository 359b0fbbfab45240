//! Tests of candidate rules on a running server: comparison, changes and promotion.

use std::{
    io::{Read as _, Write as _},
    net::{SocketAddr, TcpListener},
    process::Output,
};

use serde_json::{Value, json};

use crate::support::{Ask, EVERY_LISTENER, Scratch, Server, run, tidegate};

const CANDIDATE: &str = "
rules:
  - {name: api, when: {path: /api/**}, key: [customer], limits: [1/h], algorithm: fixed_window}
";

/// Starts a server. The active rules admit two requests an hour, and the candidate rules would
/// admit one request an hour.
fn start() -> Server {
    start_until("2100-01-01")
}

/// Works like [`start`], with another end of the comparison.
fn start_until(until: &str) -> Server {
    let scratch = Scratch::new();
    let candidate = scratch.write("candidate.yaml", CANDIDATE);
    let rules = format!(
        "{EVERY_LISTENER}candidate: {{rules: {}, until: {until}}}
rules:
  - {{name: api, when: {{path: /api/**}}, key: [customer], limits: [2/h], algorithm: fixed_window}}
",
        candidate.display()
    );
    Server::start_in(scratch, &rules)
}

fn ask(server: &Server, customer: &str) -> u16 {
    let entries = json!({"path": "/api/orders", "customer": customer});
    server.check(&entries).status
}

fn printed(output: &Output) -> String {
    assert!(output.status.success(), "{output:?}");
    String::from_utf8(output.stdout.clone()).unwrap()
}

fn report(server: &Server) -> Value {
    serde_json::from_str(&printed(&server.operate(&["candidate", "--json"]))).unwrap()
}

/// The log says so before the first request.
#[test]
fn a_candidate_whose_time_has_passed_is_logged_at_the_start() {
    let server = start_until("2020-01-01");
    let log = server.log_text();
    assert!(
        log.contains("the candidate rules are not evaluated, because the time in `candidate.until` has passed"),
        "{log}"
    );
}

#[test]
fn the_candidate_is_compared_and_never_denies() {
    let server = start();
    assert_eq!(
        ["a", "a", "a", "b"].map(|customer| ask(&server, customer)),
        [200, 200, 429, 200]
    );
    let table = printed(&server.operate(&["candidate"]));
    let lines: Vec<Vec<&str>> = table
        .lines()
        .map(|line| line.split_whitespace().collect())
        .collect();
    assert!(
        lines[0].ends_with(&["4", "requests", "compared"]),
        "{table}"
    );
    assert_eq!(
        lines[1].join(" "),
        "newly denied: 1 (25.0%), no longer denied: 0 (0.0%), not compared: 0, lost: 0"
    );
    assert_eq!(lines[2], ["ends", "at", "2100-01-01T00:00:00Z"], "{table}");
    assert_eq!(lines[5], ["api", "enforce", "4", "2", "50.0%"], "{table}");
    assert_eq!(
        lines[8][..5],
        ["newly", "denied", "api", "a", "1"],
        "{table}"
    );
    let metrics = server.metrics();
    for sample in [
        "tidegate_candidate_requests_total{change=\"none\"} 3\n",
        "tidegate_candidate_requests_total{change=\"newly_denied\"} 1\n",
        "tidegate_candidate_denied_total{rule=\"api\"} 2\n",
    ] {
        assert!(metrics.contains(sample), "{sample} in {metrics}");
    }
}

#[test]
fn a_changed_candidate_is_read_and_an_invalid_one_is_not() {
    let mut server = start();
    assert_eq!(ask(&server, "a"), 200);
    let file = server.directory().join("candidate.yaml");
    std::fs::write(&file, CANDIDATE.replace("1/h", "3/h")).unwrap();
    server.wait_for(&["reloaded the rules"]);
    // The counters of the candidate rules keep their values: one of the three units is used.
    assert_eq!(report(&server)["compared"], 0);
    assert_eq!([(); 3].map(|()| ask(&server, "a")), [200, 429, 429]);
    let compared = report(&server);
    assert_eq!(
        (&compared["denied"], &compared["no_longer_denied"]),
        (&json!(1), &json!(1))
    );
    assert_eq!(compared["no_longer"][0]["key"], json!(["a"]));
    std::fs::write(&file, CANDIDATE.replace("1/h", "1/fortnight")).unwrap();
    server.wait_for(&["kept the old rules", "candidate.yaml"]);
    assert_eq!(report(&server)["compared"], 3);
    let checked = run(&mut tidegate(&[
        "check",
        server.rules_file().to_str().unwrap(),
    ]));
    assert_eq!(checked.status.code(), Some(1), "{checked:?}");
    let message = String::from_utf8(checked.stderr).unwrap();
    assert!(message.contains("candidate.yaml has 1 error"), "{message}");
}

#[test]
fn a_promoted_candidate_is_in_force_until_the_next_reload() {
    let mut server = start();
    assert_eq!(ask(&server, "a"), 200);
    let message = printed(&server.operate(&["candidate", "promote"]));
    assert!(message.starts_with("promoted: 1 rules of "), "{message}");
    assert!(message.contains("replace the sections"), "{message}");
    // The unit that was used before the promotion also counts against the promoted limit of 1.
    assert_eq!([ask(&server, "a"), ask(&server, "b")], [429, 200]);
    let status = printed(&server.operate(&["status"]));
    assert!(status.contains("1 active, promoted from "), "{status}");
    let none = server.operate(&["candidate"]);
    assert_eq!(none.status.code(), Some(1));
    let message = String::from_utf8(none.stderr).unwrap();
    assert!(
        message.contains("there are no candidate rules; name their file"),
        "{message}"
    );
    assert!(server.operate(&["reload"]).status.success());
    server.wait_for(&["reloaded the rules"]);
    assert_eq!([ask(&server, "b"), ask(&server, "b")], [200, 429]);
    assert_eq!(report(&server)["compared"], 2);
}

/// Starts a server that answers every request with 200 and closes the connection.
fn upstream() -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let mut stream = stream.unwrap();
            let mut head = Vec::new();
            let mut buffer = [0; 4_096];
            while !head.ends_with(b"\r\n\r\n") {
                match stream.read(&mut buffer) {
                    Ok(read @ 1..) => head.extend_from_slice(&buffer[..read]),
                    _ => break,
                }
            }
            let answer = b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\nconnection: close\r\n\r\n";
            let _ = stream.write_all(answer);
        }
    });
    address
}

/// The proxy also extracts entries that are used only by the candidate rules. A request must not be
/// rejected because an entry of the candidate rules is invalid.
#[test]
fn the_proxy_extracts_the_entries_of_the_candidate() {
    let scratch = Scratch::new();
    let candidate = scratch.write(
        "candidate.yaml",
        "rules: [{name: api, key: [header.x-customer], limits: [1/h], algorithm: fixed_window}]\n",
    );
    let rules = format!(
        "{EVERY_LISTENER}candidate: {{rules: {}}}
rules: [{{name: all, key: [ip], limits: [1000/h]}}]
proxy: {{listen: '127.0.0.1:0', upstreams: [{{name: app, urls: 'http://{}'}}]}}
",
        candidate.display(),
        upstream()
    );
    let server = Server::start_in(scratch, &rules);
    let get = |value: &str| {
        let ask = Ask::get(server.proxy(), "/").header("x-customer", value);
        ask.send().status
    };
    assert_eq!([get("acme"), get("acme"), get("globex")], [200; 3]);
    assert_eq!(get(&"x".repeat(8_193)), 200);
    let compared = report(&server);
    assert_eq!(compared["newly"][0]["key"], json!(["acme"]));
    assert_eq!(
        (&compared["compared"], &compared["newly_denied"]),
        (&json!(4), &json!(1))
    );
}

/// A missing file is reported once, and is read again when it reappears.
#[test]
fn a_missing_candidate_is_reported_once() {
    let mut server = start();
    let file = server.directory().join("candidate.yaml");
    std::fs::remove_file(&file).unwrap();
    server.wait_for(&["kept the old rules: candidate.rules: cannot read"]);
    // The server checks the file once per second. After several checks, there is still only one
    // report.
    let uptime = |server: &Server| -> u64 {
        let metrics = server.metrics();
        let mut lines = metrics.lines();
        let line = lines.find_map(|line| line.strip_prefix("tidegate_uptime_seconds "));
        line.unwrap().parse().unwrap()
    };
    let missing_since = uptime(&server);
    while uptime(&server) < missing_since + 4 {
        #[expect(
            clippy::disallowed_methods,
            reason = "the server's own clock is waited for"
        )]
        std::thread::sleep(std::time::Duration::from_millis(100));
    }
    assert!(
        server
            .metrics()
            .contains("tidegate_reloads_total{result=\"failed\"} 1\n"),
        "{}",
        server.metrics()
    );
    std::fs::write(&file, CANDIDATE).unwrap();
    server.wait_for(&["reloaded the rules"]);
}

/// A promotion activates exactly the rules that have been compared. A candidate file that was
/// rejected must not be promoted.
#[test]
fn a_candidate_with_other_entries_is_rejected() {
    let mut server = start();
    let file = server.directory().join("candidate.yaml");
    let other = format!("entries: {{tenant: {{of: header.x-tenant, split: \".\"}}}}\n{CANDIDATE}");
    std::fs::write(&file, other).unwrap();
    server.wait_for(&[
        "kept the old rules",
        "entries: differs from the section of the rules file",
    ]);
    let refused = server.operate(&["candidate", "promote"]);
    assert!(!refused.status.success());
    let message = String::from_utf8(refused.stderr).unwrap();
    assert!(message.contains("run `tidegate check"), "{message}");
}
