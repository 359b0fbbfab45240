//! A client that knows nothing but HTTP/1.1, so that what is tested is what goes over the wire.

use std::{
    io::{Read, Write},
    net::{SocketAddr, TcpStream},
    time::Duration,
};

use serde_json::Value;

/// Longer than anything takes: a test that would hang fails instead.
const PATIENCE: Duration = Duration::from_secs(30);

#[derive(Debug)]
pub(crate) struct Reply {
    pub(crate) status: u16,
    head: String,
    pub(crate) body: String,
}

impl Reply {
    pub(crate) fn json(&self) -> Value {
        serde_json::from_str(&self.body).unwrap_or_else(|error| panic!("{error}: {self:?}"))
    }

    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        let mut lines = self.head.lines().filter_map(|line| line.split_once(": "));
        lines
            .find(|(found, _)| found.eq_ignore_ascii_case(name))
            .map(|(_, value)| value)
    }
}

#[derive(Debug)]
pub(crate) struct Client(TcpStream);

impl Client {
    pub(crate) fn connect(address: SocketAddr) -> Self {
        let stream = TcpStream::connect(address).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        stream.set_write_timeout(Some(PATIENCE)).unwrap();
        stream.set_nodelay(true).unwrap();
        Self(stream)
    }

    /// Asks with `headers`, each line ended by CR LF, and reads the answer.
    pub(crate) fn ask(&mut self, line: &str, headers: &str, body: &[u8]) -> Reply {
        let length = body.len();
        let host = if headers.to_ascii_lowercase().contains("host: ") {
            ""
        } else {
            "host: localhost\r\n"
        };
        let head = format!("{line} HTTP/1.1\r\n{host}{headers}content-length: {length}\r\n\r\n");
        self.send(&[head.as_bytes(), body].concat());
        self.reply()
    }

    pub(crate) fn send(&mut self, bytes: &[u8]) {
        self.0.write_all(bytes).unwrap();
    }

    pub(crate) fn reply(&mut self) -> Reply {
        let mut head = Vec::new();
        let mut byte = [0; 1];
        while !head.ends_with(b"\r\n\r\n") {
            let read = self.0.read(&mut byte).unwrap();
            assert_eq!(read, 1, "closed after {}", head.escape_ascii());
            head.push(byte[0]);
        }
        let head = String::from_utf8(head).unwrap();
        let status = head.split(' ').nth(1).unwrap().parse().unwrap();
        let mut reply = Reply {
            status,
            head,
            body: String::new(),
        };
        let length = reply.header("content-length").unwrap_or("0");
        let mut body = vec![0; length.parse().unwrap()];
        self.0.read_exact(&mut body).unwrap();
        reply.body = String::from_utf8(body).unwrap();
        reply
    }

    /// Everything until the other side closes.
    pub(crate) fn rest(mut self) -> String {
        let mut rest = Vec::new();
        self.0.read_to_end(&mut rest).unwrap();
        String::from_utf8_lossy(&rest).into_owned()
    }
}

/// That `reply` is a problem document of `status`, and mentions each of `words`.
pub(crate) fn assert_problem(reply: &Reply, status: u16, words: &[&str]) {
    assert_eq!(reply.status, status, "{reply:?}");
    assert_eq!(
        reply.header("content-type"),
        Some("application/problem+json"),
        "{reply:?}"
    );
    assert_eq!(reply.json()["status"], status, "{reply:?}");
    for word in words {
        assert!(reply.body.contains(word), "no {word} in {reply:?}");
    }
}
