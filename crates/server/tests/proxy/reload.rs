//! Tests of hot reload: the rules file changes while the proxy serves requests.

use std::{
    fs,
    path::Path,
    sync::{Arc, Mutex, mpsc::channel},
    thread::yield_now,
    time::Duration,
};

use tempfile::NamedTempFile;
use tidegate_config::{Config, ReadError};
use tidegate_server::reload::{LoadError, Reloader, RestartOnlySettings};

use crate::{
    health::until,
    listener::TestListener,
    upstream::Upstream,
    upstream_tls::{issue, secured},
};

const OLD: &str = "HTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\nold";
const NEW: &str = "HTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\nnew";

/// A proxy and its rules file.
pub(crate) struct ReloadableListener {
    pub(crate) listener: TestListener,
    file: NamedTempFile,
    reloader: Reloader,
}

impl ReloadableListener {
    pub(crate) fn open(text: &str) -> Self {
        let (listener, file) = (TestListener::open(text), NamedTempFile::new().unwrap());
        let (limiter, runtime) = (Arc::clone(&listener.limiter), Arc::clone(&listener.runtime));
        let started = RestartOnlySettings::with(&Config::parse(text).unwrap());
        let reloader = Reloader::new(
            file.path().to_owned(),
            limiter,
            Arc::default(),
            Some(runtime),
            started,
            None,
        );
        Self {
            listener,
            file,
            reloader,
        }
    }

    pub(crate) fn reload(&self, text: &str) -> Result<usize, LoadError> {
        fs::write(self.file.path(), text).unwrap();
        self.reloader
            .reload("a test")
            .map(|reloaded| reloaded.rules)
    }
}

fn file(upstream: &Upstream, settings: &str) -> String {
    let url = upstream.url();
    format!(
        "proxy:\n  listen: 127.0.0.1:0\n  upstreams: [{{name: app, urls: \"{url}\"}}]\n{settings}"
    )
}

#[test]
fn a_reload_names_the_settings_that_need_a_restart() {
    let upstream = Upstream::responding_with(OLD);
    let old = file(&upstream, "");
    let reloaded = ReloadableListener::open(&old);
    let listen = old.replace("127.0.0.1:0\n", "127.0.0.1:1\n  max_connections: 7\n");
    // The second reload reads the same file. The server has not been restarted, so both reloads
    // have the same result.
    for _ in 0..2 {
        reloaded.reload(&listen).unwrap();
        let expected = ["proxy.listen", "proxy.max_connections"];
        assert_eq!(reloaded.reloader.restart_required(), expected);
    }
    reloaded.reload("rules: []\n").unwrap();
    assert_eq!(reloaded.reloader.restart_required(), ["proxy"]);
    // A rejected file changes nothing.
    reloaded.reload("rules: [{nam: x}]\n").unwrap_err();
    assert_eq!(reloaded.reloader.restart_required(), ["proxy"]);
    reloaded.reload(&old).unwrap();
    assert_eq!(reloaded.reloader.restart_required(), [""; 0]);
}

/// If a rule's key contained an entry that the server does not extract, the rule would never apply.
#[test]
fn a_change_of_the_client_identity_requires_a_restart() {
    let upstream = Upstream::responding_with(OLD);
    let entries = "entries: {t: {of: header.x-a, split: '.'}}\n";
    let limited = |key: &str| format!("rules: [{{name: r, key: [{key}], limits: [1/h]}}]\n");
    let reloaded = ReloadableListener::open(&file(&upstream, &limited("ip")));
    let mut client = reloaded.listener.connect();
    assert_eq!(client.ask("GET", "/", &[("host", "h")], b"").status, 200);
    for (settings, section) in [
        (format!("{entries}{}", limited("t")), "entries"),
        (
            format!("clients: {{proxies: 1}}\n{}", limited("ip")),
            "clients",
        ),
    ] {
        let refused = reloaded.reload(&file(&upstream, &settings)).unwrap_err();
        let expected = format!("{section}: has changed, but takes effect only at startup");
        assert!(refused.to_string().starts_with(&expected), "{refused}");
        let denied = client.ask("GET", "/", &[("host", "h"), ("x-a", "acme.x")], b"");
        assert_eq!(denied.status, 429, "{section}");
    }
    assert_eq!(
        reloaded.reload(&file(&upstream, &limited("ip"))).unwrap(),
        1
    );
}

#[test]
fn requests_in_flight_finish_and_later_ones_use_the_new_upstream() {
    let (release, released) = channel();
    let released = Mutex::new(released);
    let old = Upstream::start(move |connection| {
        while let Some(head) = connection.head() {
            if head.starts_with("GET /slow ") {
                released.lock().unwrap().recv().unwrap();
            }
            connection.send(OLD);
        }
    });
    let new = Upstream::responding_with(NEW);
    let reloaded = ReloadableListener::open(&file(&old, ""));
    let mut other = reloaded.listener.connect();
    assert_eq!(other.ask("GET", "/", &[], b"").body, "old");
    let mut slow = reloaded.listener.connect();
    slow.send("GET /slow HTTP/1.1\r\nhost: h\r\n\r\n");
    while old.heads().len() < 2 {
        yield_now();
    }
    reloaded.reload(&file(&new, "")).unwrap();
    assert_eq!(other.ask("GET", "/", &[], b"").body, "new");
    release.send(()).unwrap();
    assert_eq!(slow.read_answer(false).body, "old");
    assert_eq!(slow.ask("GET", "/", &[], b"").body, "new");
    assert_eq!((old.connections(), new.connections()), (1, 1));
}

#[test]
fn a_kept_endpoint_keeps_its_connections_and_counters() {
    let upstream = Upstream::responding_with(OLD);
    let reloaded = ReloadableListener::open(&file(&upstream, ""));
    assert_eq!(reloaded.listener.get("/").status, 200);
    reloaded
        .reload(&file(
            &upstream,
            "  max_body: 1KiB\n  timeouts: {connect: 5s}\n",
        ))
        .unwrap();
    assert_eq!(reloaded.listener.get("/").status, 200);
    assert_eq!(upstream.connections(), 1);
    let answers = "tidegate_proxy_responses_total{upstream=\"app\",status=\"2xx\"} 2\n";
    let metrics = reloaded.listener.runtime.exposition();
    assert!(metrics.contains(answers), "{metrics}");
    let body = [b'x'; 1_025];
    let answer = reloaded.listener.connect().ask("POST", "/", &[], &body);
    assert_eq!(answer.status, 413);
}

/// Returns a rules file with these endpoints, and additional settings for their upstream.
fn several(upstreams: &[&Upstream], settings: &str) -> String {
    let urls: Vec<String> = upstreams.iter().map(|upstream| upstream.url()).collect();
    let urls = urls.join("', '");
    format!(
        "proxy:\n  listen: 127.0.0.1:0\n  upstreams: [{{name: app, urls: ['{urls}']{settings}}}]\n"
    )
}

#[test]
fn an_endpoint_keeps_its_connections_with_new_neighbours_and_settings() {
    let (old, new) = (
        Upstream::responding_with(OLD),
        Upstream::responding_with(NEW),
    );
    let reloaded = ReloadableListener::open(&several(&[&old], ""));
    assert_eq!(reloaded.listener.get("/").body, "old");
    for settings in [
        "",
        ", max_connections: 7",
        ", eject: {failures: 2}",
        ", eject: off",
    ] {
        reloaded.reload(&several(&[&old, &new], settings)).unwrap();
        let mut bodies = [0; 2].map(|_| reloaded.listener.get("/").body);
        bodies.sort();
        assert_eq!(bodies, ["new", "old"], "{settings}");
    }
    reloaded.reload(&several(&[&old], "")).unwrap();
    assert_eq!(reloaded.listener.get("/").body, "old");
    assert_eq!(old.connections(), 1);
}

#[test]
fn a_reload_starts_and_stops_health_checks() {
    let sick = Upstream::start(|connection| {
        while let Some(head) = connection.head() {
            let is_check = head.starts_with("GET /healthz ");
            connection.send(if is_check {
                "HTTP/1.1 503 Service Unavailable\r\ncontent-length: 0\r\n\r\n"
            } else {
                OLD
            });
        }
    });
    let well = Upstream::responding_with(NEW);
    let plain = several(&[&sick, &well], "");
    let check = ", health: {path: /healthz, interval: 1ms, timeout: 20s, unhealthy_after: 1}";
    let asked = several(&[&sick, &well], check);
    let reloaded = ReloadableListener::open(&plain);
    let up = format!(
        "tidegate_proxy_endpoint_up{{upstream=\"app\",endpoint=\"{}\"}} 1\n",
        sick.url()
    );
    let is_up = || reloaded.listener.runtime.exposition().contains(&up);
    for _ in 0..3 {
        reloaded.reload(&asked).unwrap();
        until(|| !is_up());
        assert!((0..4).all(|_| reloaded.listener.get("/").body == "new"));
        reloaded.reload(&plain).unwrap();
        until(is_up);
    }
}

#[test]
fn an_invalid_file_changes_nothing() {
    let (old, new) = (
        Upstream::responding_with(OLD),
        Upstream::responding_with(NEW),
    );
    let reloaded = ReloadableListener::open(&file(&old, ""));
    let rule = "rules: [{name: all, limits: [1/h]}]\n";
    let invalid = file(&new, &format!("  max_boddy: 1\n{rule}"));
    assert!(matches!(
        reloaded.reload(&invalid),
        Err(LoadError::File(ReadError::Invalid { .. }))
    ));
    let stranger = format!(
        "proxy:\n  listen: 127.0.0.1:0\n  upstreams: [{{name: app, urls: 'https://localhost:1', ca: /nowhere.pem}}]\n{rule}"
    );
    assert!(matches!(
        reloaded.reload(&stranger),
        Err(LoadError::Proxy(_))
    ));
    assert!(!reloaded.reloader.last_mistakes().is_empty());
    assert!((0..3).all(|_| reloaded.listener.get("/").body == "old"));
    assert_eq!(reloaded.reload(&file(&new, rule)).unwrap(), 1);
    assert_eq!(reloaded.listener.get("/").body, "new");
    assert_eq!(reloaded.listener.get("/").status, 429);
}

/// A timeout that is longer than any test step takes.
const TIMEOUT: Duration = Duration::from_secs(30);

#[test]
fn idle_connections_of_a_removed_endpoint_are_closed_at_once() {
    let (closed, is_closed) = channel();
    let closed = Mutex::new(closed);
    let old = Upstream::start(move |connection| {
        connection.head().unwrap();
        connection.send(OLD);
        connection.until_closed();
        let _ = closed.lock().unwrap().send(());
    });
    let new = Upstream::responding_with(NEW);
    let long = "  timeouts: {pool: 1d}\n";
    let reloaded = ReloadableListener::open(&file(&old, long));
    assert_eq!(reloaded.listener.get("/").body, "old");
    reloaded.reload(&file(&new, long)).unwrap();
    is_closed.recv_timeout(TIMEOUT).unwrap();
}

#[test]
fn connections_returned_to_a_removed_endpoint_are_closed() {
    let (release, released) = channel();
    let (closed, is_closed) = channel();
    let ways = Mutex::new((released, closed));
    let old = Upstream::start(move |connection| {
        connection.head().unwrap();
        let ways = ways.lock().unwrap();
        ways.0.recv().unwrap();
        connection.send(OLD);
        connection.until_closed();
        let _ = ways.1.send(());
    });
    let new = Upstream::responding_with(NEW);
    let long = "  timeouts: {pool: 1d}\n";
    let reloaded = ReloadableListener::open(&file(&old, long));
    let mut slow = reloaded.listener.connect();
    slow.send("GET / HTTP/1.1\r\nhost: h\r\n\r\n");
    while old.heads().is_empty() {
        yield_now();
    }
    reloaded.reload(&file(&new, long)).unwrap();
    release.send(()).unwrap();
    assert_eq!(slow.read_answer(false).body, "old");
    is_closed.recv_timeout(TIMEOUT).unwrap();
}

#[test]
fn a_reload_changes_the_timeout_of_idle_connections() {
    let (closed, is_closed) = channel();
    let closed = Mutex::new(closed);
    let upstream = Upstream::start(move |connection| {
        connection.head().unwrap();
        connection.send(OLD);
        connection.until_closed();
        let _ = closed.lock().unwrap().send(());
    });
    let reloaded = ReloadableListener::open(&file(&upstream, "  timeouts: {pool: 1d}\n"));
    assert_eq!(reloaded.listener.get("/").body, "old");
    reloaded
        .reload(&file(&upstream, "  timeouts: {pool: 1ms}\n"))
        .unwrap();
    is_closed.recv_timeout(TIMEOUT).unwrap();
}

#[test]
fn a_pooled_connection_uses_the_current_settings() {
    let upstream = Upstream::start(|connection| {
        while connection.head().is_some() {
            connection.send(format!(
                "HTTP/1.1 200 OK\r\nx-long: {}\r\ncontent-length: 0\r\n\r\n",
                "x".repeat(12_000)
            ));
        }
    });
    let reloaded = ReloadableListener::open(&file(&upstream, ""));
    assert_eq!(reloaded.listener.get("/").status, 200);
    reloaded
        .reload(&file(&upstream, "  max_head: 8KiB\n"))
        .unwrap();
    assert_eq!(reloaded.listener.get("/").status, 502);
    assert_eq!(upstream.connections(), 1);
    reloaded.reload(&file(&upstream, "")).unwrap();
    assert_eq!(reloaded.listener.get("/").status, 200);
}

#[test]
fn a_stalled_body_uses_the_current_timeout() {
    let upstream = Upstream::start(|connection| {
        while connection
            .head()
            .is_some_and(|head| head.starts_with("GET / "))
        {
            connection.send(OLD);
        }
        connection.send("HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nhalf");
        connection.until_closed();
    });
    let reloaded = ReloadableListener::open(&file(&upstream, "  timeouts: {idle: 1d}\n"));
    let mut client = reloaded.listener.connect();
    assert_eq!(client.ask("GET", "/", &[], b"").body, "old");
    reloaded
        .reload(&file(&upstream, "  timeouts: {idle: 20ms}\n"))
        .unwrap();
    client.send("GET /half HTTP/1.1\r\nhost: h\r\n\r\n");
    assert!(client.until_closed().ends_with("half"));
    assert_eq!(upstream.connections(), 1);
}

#[test]
fn new_trust_anchors_in_the_same_file_are_used() {
    let (known, other) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let upstream = Upstream::responding_with(OLD);
    let behind = secured(other.path(), "localhost", &upstream);
    issue(known.path(), "localhost");
    let pem = |folder: &Path| folder.join("server.pem");
    let port = behind.listener.local_addr().port();
    let text = format!(
        "proxy: {{listen: '127.0.0.1:0', upstreams: [{{name: app, urls: 'https://localhost:{port}', ca: '{}'}}]}}\n",
        pem(known.path()).display()
    );
    let reloaded = ReloadableListener::open(&text);
    assert_eq!(reloaded.listener.get("/").status, 502);
    fs::copy(pem(other.path()), pem(known.path())).unwrap();
    assert_eq!(
        reloaded.listener.get("/").status,
        502,
        "the new file is not loaded yet"
    );
    reloaded.reload(&text).unwrap();
    assert_eq!(reloaded.listener.get("/").body, "old");
    reloaded.reload(&text).unwrap();
    assert_eq!(reloaded.listener.get("/").body, "old");
    assert_eq!(
        behind.listener.accepted(),
        3,
        "with the same trust anchors the connection is kept"
    );
}

#[test]
fn a_missing_file_is_reported_once_and_read_when_it_returns() {
    let (old, new) = (
        Upstream::responding_with(OLD),
        Upstream::responding_with(NEW),
    );
    let reloaded = ReloadableListener::open(&file(&old, ""));
    reloaded.reload(&file(&old, "")).unwrap();
    let failed = || {
        let metrics = reloaded.listener.limiter.exposition();
        let line = metrics
            .lines()
            .find_map(|line| line.strip_prefix("tidegate_reloads_total{result=\"failed\"} "));
        line.unwrap_or_else(|| panic!("{metrics}")).to_owned()
    };
    let path = reloaded.file.path();
    fs::remove_file(path).unwrap();
    assert!(
        reloaded.reloader.reload_if_changed().is_none(),
        "the file may be in the middle of a replacement"
    );
    let error = reloaded.reloader.reload_if_changed().unwrap().unwrap_err();
    assert!(
        matches!(error, LoadError::File(ReadError::Unreadable { .. })),
        "{error}"
    );
    assert!((0..3).all(|_| reloaded.reloader.reload_if_changed().is_none()));
    assert_eq!(failed(), "1");
    assert!(!reloaded.reloader.last_mistakes().is_empty());
    assert_eq!(reloaded.listener.get("/").body, "old");
    fs::write(path, file(&new, "")).unwrap();
    assert!(reloaded.reloader.reload_if_changed().unwrap().is_ok());
    assert!(reloaded.reloader.last_mistakes().is_empty());
    assert_eq!(reloaded.listener.get("/").body, "new");
    // The file is missing at one check, and exists again at the next check.
    fs::remove_file(path).unwrap();
    assert!(reloaded.reloader.reload_if_changed().is_none());
    fs::write(path, file(&old, "")).unwrap();
    assert!(reloaded.reloader.reload_if_changed().unwrap().is_ok());
    assert_eq!(failed(), "1");
}
