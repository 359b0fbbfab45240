//! A rules file that changes while the proxy is at work.

use std::{
    sync::{Arc, Mutex, mpsc::channel},
    thread::yield_now,
};

use tempfile::NamedTempFile;
use tidegate_server::reload::{LoadError, Reloader};

use crate::{door::Door, upstream::Upstream};

const OLD: &str = "HTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\nold";
const NEW: &str = "HTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\nnew";

/// A proxy, and its file.
pub(crate) struct Reloaded {
    pub(crate) door: Door,
    file: NamedTempFile,
    reloader: Reloader,
}

impl Reloaded {
    pub(crate) fn open(text: &str) -> Self {
        let (door, file) = (Door::open(text), NamedTempFile::new().unwrap());
        let (limiter, live) = (Arc::clone(&door.limiter), Arc::clone(&door.live));
        let reloader = Reloader::new(file.path().to_owned(), limiter, Some(live));
        Self {
            door,
            file,
            reloader,
        }
    }

    pub(crate) fn reload(&self, text: &str) -> Result<usize, LoadError> {
        std::fs::write(self.file.path(), text).unwrap();
        self.reloader.reload()
    }
}

fn file(upstream: &Upstream, settings: &str) -> String {
    let url = upstream.url();
    format!(
        "proxy:\n  listen: 127.0.0.1:0\n  upstreams: [{{name: app, urls: \"{url}\"}}]\n{settings}"
    )
}

#[test]
fn what_is_underway_arrives_and_what_comes_next_goes_elsewhere() {
    let (release, released) = channel();
    let released = Mutex::new(released);
    let old = Upstream::start(move |talk| {
        while let Some(head) = talk.head() {
            if head.starts_with("GET /slow ") {
                released.lock().unwrap().recv().unwrap();
            }
            talk.send(OLD);
        }
    });
    let new = Upstream::answering(NEW);
    let reloaded = Reloaded::open(&file(&old, ""));
    let mut other = reloaded.door.connect();
    assert_eq!(other.ask("GET", "/", &[], b"").body, "old");
    let mut slow = reloaded.door.connect();
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
fn an_address_that_stays_keeps_its_connections_and_counts() {
    let upstream = Upstream::answering(OLD);
    let reloaded = Reloaded::open(&file(&upstream, ""));
    assert_eq!(reloaded.door.get("/").status, 200);
    reloaded
        .reload(&file(
            &upstream,
            "  max_body: 1KiB\n  timeouts: {connect: 5s}\n",
        ))
        .unwrap();
    assert_eq!(reloaded.door.get("/").status, 200);
    assert_eq!(upstream.connections(), 1);
    let answers = "tidegate_proxy_answers_total{upstream=\"app\",status=\"2xx\"} 2\n";
    let metrics = reloaded.door.live.exposition();
    assert!(metrics.contains(answers), "{metrics}");
    let body = [b'x'; 1_025];
    let answer = reloaded.door.connect().ask("POST", "/", &[], &body);
    assert_eq!(answer.status, 413);
}

#[test]
fn a_bad_file_changes_nothing() {
    let (old, new) = (Upstream::answering(OLD), Upstream::answering(NEW));
    let reloaded = Reloaded::open(&file(&old, ""));
    let rule = "rules: [{name: all, limits: [1/h]}]\n";
    let mistaken = file(&new, &format!("  max_boddy: 1\n{rule}"));
    assert!(matches!(
        reloaded.reload(&mistaken),
        Err(LoadError::Mistaken { .. })
    ));
    let stranger = format!(
        "proxy:\n  listen: 127.0.0.1:0\n  upstreams: [{{name: app, urls: 'https://localhost:1', ca: /nowhere.pem}}]\n{rule}"
    );
    assert!(matches!(
        reloaded.reload(&stranger),
        Err(LoadError::Proxy(_))
    ));
    assert!(!reloaded.reloader.last_mistakes().is_empty());
    assert!((0..3).all(|_| reloaded.door.get("/").body == "old"));
    assert_eq!(reloaded.reload(&file(&new, rule)).unwrap(), 1);
    assert_eq!(reloaded.door.get("/").body, "new");
    assert_eq!(reloaded.door.get("/").status, 429);
}
