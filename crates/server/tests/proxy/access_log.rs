//! Tests of the access log: its fields, and the data that it must not contain.

use std::{fs, path::Path, sync::Arc, thread::yield_now, time::Duration};

use serde_json::{Value, json};

use crate::{client::Client, listener::TestListener, upstream::Upstream};

const OK: &str = "HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok";

/// Waits until the log at `path` has `count` lines, and returns them.
fn lines(listener: &TestListener, path: &Path, count: usize) -> Vec<String> {
    for _ in 0..1_000 {
        listener.runtime.log().unwrap().finish();
        let text = fs::read_to_string(path).unwrap();
        let lines: Vec<String> = text.lines().map(str::to_owned).collect();
        if lines.len() >= count {
            assert_eq!(lines.len(), count, "{text}");
            return lines;
        }
        std::thread::park_timeout(Duration::from_millis(10));
    }
    panic!("never {count} lines in {}", path.display());
}

/// Parses a line, and removes the duration.
fn parsed(line: &str) -> Value {
    let mut value: Value = serde_json::from_str(line).unwrap();
    let took = value.as_object_mut().unwrap().remove("duration_us");
    assert!(took.unwrap().is_u64(), "{line}");
    value
}

#[test]
fn every_request_is_logged_without_secrets() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("access.log");
    let upstream = Upstream::responding_with(OK);
    let listener = TestListener::with(
        upstream.url(),
        &format!("access_log: {}\nmax_headers: 20", path.display()),
    );
    let secrets = [
        ("authorization", "Bearer secret"),
        ("cookie", "session=secret"),
        ("user-agent", "curl/8 \"x\""),
    ];
    let mut client = listener.connect();
    let answer = client.ask("GET", "/a/b?token=secret", &secrets, b"");
    assert_eq!(answer.body, "ok");
    let lines = lines(&listener, &path, 1);
    assert!(!lines[0].contains("secret"), "{lines:?}");
    let expected = json!({
        "time": "2023-11-14T22:14:00.000000Z", "client": "127.0.0.1", "method": "GET", "host": "localhost",
        "path": "/a/b", "version": "HTTP/1.1", "status": 200, "bytes": 2, "complete": true, "upstream": "app",
        "address": upstream.url(), "reason": null, "user_agent": "curl/8 \"x\"",
    });
    assert_eq!(parsed(&lines[0]), expected);
    // A response without a body is complete once its head is sent.
    client.ask("HEAD", "/a/b", &[], b"");
    let lines = self::lines(&listener, &path, 2);
    assert_eq!(parsed(&lines[1])["complete"], json!(true));
}

#[test]
fn an_aborted_response_is_logged_with_its_reason() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("access.log");
    let upstream = Upstream::responding_with("HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\no");
    let settings = format!("access_log: {}\ntimeouts: {{idle: 100ms}}", path.display());
    let listener = TestListener::with(upstream.url(), &settings);
    let mut client = listener.connect();
    client.send("GET / HTTP/1.1\r\nhost: h\r\n\r\n");
    assert!(client.until_closed().ends_with("\r\n\r\no"));
    let line = parsed(&lines(&listener, &path, 1)[0]);
    assert_eq!(
        (&line["status"], &line["complete"], &line["reason"]),
        (&json!(200), &json!(false), &json!("idle_timeout"))
    );
}

#[test]
fn the_grpc_status_is_logged_from_headers_or_trailers() {
    for (answer, expected) in [
        (
            "HTTP/1.1 200 OK\r\ngrpc-status: 12\r\ncontent-length: 0\r\n\r\n",
            json!(12),
        ),
        (
            "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nok\r\n0\r\ngrpc-status: 0\r\n\r\n",
            json!(0),
        ),
        (OK, Value::Null),
    ] {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("access.log");
        let upstream = Upstream::responding_with(answer);
        let listener =
            TestListener::with(upstream.url(), &format!("access_log: {}", path.display()));
        assert_eq!(listener.get("/").status, 200);
        let line = parsed(&lines(&listener, &path, 1)[0]);
        assert_eq!(line["grpc_status"], expected, "{answer}");
    }
}

#[test]
fn denied_and_abandoned_requests_are_logged() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("access.log");
    let upstream = Upstream::silent();
    let listener = TestListener::open(&format!(
        "
proxy:
  listen: 127.0.0.1:0
  upstreams: [{{name: app, urls: \"{}\"}}]
  access_log: {{to: \"{}\", query: true, key: true}}
rules: [{{name: all, key: [ip], limits: [1/h]}}]
",
        upstream.url(),
        path.display()
    ));
    let mut client = listener.connect();
    client.send("GET /left?q=1 HTTP/1.1\r\nhost: h\r\n\r\n");
    while upstream.heads().is_empty() {
        yield_now();
    }
    drop(client);
    let left = parsed(&lines(&listener, &path, 1)[0]);
    assert_eq!(
        (&left["status"], &left["complete"]),
        (&Value::Null, &json!(false))
    );
    assert_eq!(left["query"], "q=1");
    assert_eq!(listener.get("/").status, 429);
    let denied = parsed(&lines(&listener, &path, 2)[1]);
    assert_eq!(
        (&denied["status"], &denied["upstream"]),
        (&json!(429), &Value::Null)
    );
    assert_eq!(denied["complete"], true);
    assert_eq!(
        (&denied["reason"], &denied["rule"]),
        (&json!("limit"), &json!("all"))
    );
    assert_eq!(
        (&denied["key"], &left["key"]),
        (&json!(["127.0.0.1"]), &Value::Null)
    );
    let metrics = listener.runtime.exposition();
    assert!(
        metrics.contains("tidegate_proxy_access_log_dropped_total 0\n"),
        "{metrics}"
    );
}

#[test]
fn a_rotated_log_is_reopened() {
    let folder = tempfile::tempdir().unwrap();
    let [path, moved] = ["access.log", "access.log.1"].map(|name| folder.path().join(name));
    let upstream = Upstream::responding_with(OK);
    let listener = TestListener::with(upstream.url(), &format!("access_log: {}", path.display()));
    listener.get("/first");
    lines(&listener, &path, 1);
    fs::rename(&path, &moved).unwrap();
    listener.runtime.log().unwrap().reopen();
    listener.get("/second");
    while !path.exists() {
        yield_now();
    }
    assert_eq!(parsed(&lines(&listener, &path, 1)[0])["path"], "/second");
    assert_eq!(parsed(&lines(&listener, &moved, 1)[0])["path"], "/first");
}

#[test]
fn an_upstream_failure_is_logged_with_its_reason() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("access.log");
    let url = format!("http://{}", Upstream::closed_address());
    let listener = TestListener::open(&format!(
        "
proxy:
  listen: 127.0.0.1:0
  upstreams:
    - {{name: app, urls: \"{url}\", when: {{path: /app}}}}
  access_log: {}
",
        path.display()
    ));
    assert_eq!(listener.get("/app").status, 502);
    let line = parsed(&lines(&listener, &path, 1)[0]);
    assert_eq!(
        (&line["upstream"], &line["address"]),
        (&json!("app"), &json!(url))
    );
    assert_eq!(line["reason"], "unreachable");
    assert_eq!(listener.get("/none").status, 404);
    let line = parsed(&lines(&listener, &path, 2)[1]);
    assert_eq!(
        (&line["upstream"], &line["reason"]),
        (&Value::Null, &json!("no_upstream"))
    );
}

#[test]
fn the_upstream_is_logged_for_requests_that_never_reached_it() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("access.log");
    let upstream = Upstream::silent();
    let listener = TestListener::open(&format!(
        "
proxy:
  listen: 127.0.0.1:0
  upstreams: [{{name: app, urls: \"{}\", max_connections: 1}}]
  access_log: {}
  max_body: 4
",
        upstream.url(),
        path.display()
    ));
    let answer = listener.connect().ask("POST", "/", &[], b"12345");
    assert_eq!(answer.status, 413);
    let mut client = listener.connect();
    client.send("GET /held HTTP/1.1\r\nhost: h\r\n\r\n");
    while upstream.heads().is_empty() {
        yield_now();
    }
    assert_eq!(listener.get("/").status, 503);
    let lines = lines(&listener, &path, 2);
    for (line, reason) in lines.iter().zip(["too_large", "full"]) {
        let line = parsed(line);
        assert_eq!(
            (&line["upstream"], &line["address"], &line["reason"]),
            (&json!("app"), &Value::Null, &json!(reason))
        );
    }
}

/// Returns an upstream that upgrades the connection, sends a greeting, and echoes every line.
fn echo() -> Upstream {
    Upstream::start(|connection| {
        connection.head().unwrap();
        connection.send("HTTP/1.1 101 Switching Protocols\r\nconnection: Upgrade\r\nupgrade: echo\r\n\r\nhello\n");
        while let Some(line) = connection.line() {
            connection.send(line);
        }
        connection.close();
    })
}

/// Returns a client that has received the greeting and one echoed line.
fn chat(listener: &TestListener) -> Client {
    let mut client = listener.connect();
    client.send("GET /chat HTTP/1.1\r\nhost: h\r\nconnection: upgrade\r\nupgrade: echo\r\n\r\n");
    client.read_until("hello\n");
    client.send("once\n");
    client.read_until("once\n");
    client
}

#[test]
fn an_upgraded_connection_cut_by_the_shutdown_is_logged_as_incomplete() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("access.log");
    let upstream = echo();
    let listener = TestListener::with(upstream.url(), &format!("access_log: {}", path.display()));
    let _client = chat(&listener);
    let runtime = Arc::clone(&listener.runtime);
    drop(listener);
    runtime.log().unwrap().finish();
    let line = parsed(fs::read_to_string(&path).unwrap().trim_end());
    assert_eq!(
        (&line["complete"], &line["received"], &line["bytes"]),
        (&json!(false), &json!(5), &json!(11))
    );
}

#[test]
fn an_upgraded_connection_is_logged_when_it_ends() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("access.log");
    let upstream = echo();
    let listener = TestListener::with(upstream.url(), &format!("access_log: {}", path.display()));
    let client = chat(&listener);
    listener.runtime.log().unwrap().finish();
    assert_eq!(
        fs::read_to_string(&path).unwrap(),
        "",
        "the connection is still open"
    );
    drop(client);
    let line = parsed(&lines(&listener, &path, 1)[0]);
    assert_eq!(
        (&line["status"], &line["upstream"]),
        (&json!(101), &json!("app"))
    );
    assert_eq!((&line["received"], &line["bytes"]), (&json!(5), &json!(11)));
}

#[test]
fn a_new_log_is_not_world_readable() {
    use std::os::unix::fs::PermissionsExt as _;
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("access.log");
    let upstream = Upstream::responding_with(OK);
    let _door = TestListener::with(upstream.url(), &format!("access_log: {}", path.display()));
    let mode = fs::metadata(&path).unwrap().permissions().mode();
    // The umask of the process may clear additional bits.
    assert_eq!(mode & 0o777 & !0o640, 0, "{mode:o}");
}
