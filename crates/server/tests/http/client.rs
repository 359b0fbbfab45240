//! A simple HTTP/1.1 client for tests.

use std::{
    io::{Read, Write},
    net::{SocketAddr, TcpStream},
    time::Duration,
};

use serde_json::Value;

/// A timeout that is longer than any test step takes. The timeout makes a hanging test fail.
const TIMEOUT: Duration = Duration::from_secs(30);

/// A response.
#[derive(Clone, Debug)]
pub(crate) struct Answer {
    pub(crate) status: u16,
    headers: Vec<(String, String)>,
    pub(crate) body: String,
}

impl Answer {
    /// Returns the value of the header `name`, which must be in lower case.
    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        let found = self.headers.iter().find(|(known, _)| known == name);
        found.map(|(_, value)| value.as_str())
    }

    /// Returns the rule after which the first policy in `RateLimit` is named. The rules file must
    /// contain `headers: {rule_names: true}`.
    pub(crate) fn rule(&self) -> Option<&str> {
        let name = self.header("ratelimit")?.strip_prefix('"')?;
        name.split(['"', ':']).next()
    }

    pub(crate) fn json(&self) -> Value {
        serde_json::from_str(&self.body).unwrap_or_else(|error| panic!("{error}: {self:?}"))
    }

    /// Returns the `detail` field of a problem details response (RFC 9457). Panics if the response
    /// is not of this type, or if its `status` field differs from the status code.
    pub(crate) fn problem(&self) -> String {
        assert_eq!(
            self.header("content-type"),
            Some("application/problem+json"),
            "{self:?}"
        );
        let document = self.json();
        assert_eq!(document["status"], self.status);
        document["detail"].as_str().unwrap().to_owned()
    }
}

/// A persistent connection.
#[derive(Debug)]
pub(crate) struct Client {
    stream: TcpStream,
    received: Vec<u8>,
}

impl Client {
    pub(crate) fn connect(address: SocketAddr) -> Self {
        let stream = TcpStream::connect(address).unwrap();
        stream.set_read_timeout(Some(TIMEOUT)).unwrap();
        stream.set_write_timeout(Some(TIMEOUT)).unwrap();
        stream.set_nodelay(true).unwrap();
        Self {
            stream,
            received: Vec::new(),
        }
    }

    /// Sends raw bytes.
    pub(crate) fn send(&mut self, bytes: impl AsRef<[u8]>) {
        self.stream.write_all(bytes.as_ref()).unwrap();
    }

    /// Half-closes the connection. Responses can still be read.
    pub(crate) fn half_close(&self) {
        self.stream.shutdown(std::net::Shutdown::Write).unwrap();
    }

    /// Sends as much as the server accepts. If the server closes the connection, ignores the error.
    pub(crate) fn send_what_fits(&mut self, bytes: impl AsRef<[u8]>) {
        let _ = self.stream.write_all(bytes.as_ref());
    }

    /// Sends a request with the given headers and body, and reads the response.
    pub(crate) fn ask(
        &mut self,
        method: &str,
        path: &str,
        headers: &[(&str, &str)],
        body: &[u8],
    ) -> Answer {
        let mut request = format!("{method} {path} HTTP/1.1\r\n").into_bytes();
        if !headers
            .iter()
            .any(|(name, _)| name.eq_ignore_ascii_case("host"))
        {
            request.extend_from_slice(b"host: localhost\r\n");
        }
        for (name, value) in headers {
            request.extend_from_slice(format!("{name}: {value}\r\n").as_bytes());
        }
        request.extend_from_slice(format!("content-length: {}\r\n\r\n", body.len()).as_bytes());
        request.extend_from_slice(body);
        self.send(request);
        self.read_answer(method == "HEAD")
    }

    /// Reads one response.
    pub(crate) fn read_answer(&mut self, without_body: bool) -> Answer {
        let end = loop {
            if let Some(at) = find(&self.received, b"\r\n\r\n") {
                break at;
            }
            assert!(
                self.read_more(),
                "closed within a response: {:?}",
                self.text()
            );
        };
        let head = String::from_utf8(self.received[..end].to_vec()).unwrap();
        let mut lines = head.split("\r\n");
        let status = lines.next().unwrap().split(' ').nth(1).unwrap();
        let headers: Vec<(String, String)> = lines
            .map(|line| line.split_once(": ").unwrap())
            .map(|(name, value)| (name.to_ascii_lowercase(), value.to_owned()))
            .collect();
        let length = headers.iter().find(|(name, _)| name == "content-length");
        let length: usize = length.map_or(0, |(_, length)| length.parse().unwrap());
        let whole = end + 4 + if without_body { 0 } else { length };
        while self.received.len() < whole {
            assert!(self.read_more(), "closed within a body: {:?}", self.text());
        }
        let body = String::from_utf8(self.received[end + 4..whole].to_vec()).unwrap();
        self.received.drain(..whole);
        Answer {
            status: status.parse().unwrap(),
            headers,
            body,
        }
    }

    /// Waits until the server closes the connection, and returns everything that it sent.
    pub(crate) fn until_closed(mut self) -> String {
        while self.read_more() {}
        self.text()
    }

    /// Reads up to and including `end`, and returns everything that was read.
    #[allow(dead_code, reason = "used by other tests")]
    pub(crate) fn read_until(&mut self, end: &str) -> String {
        let end = loop {
            if let Some(at) = find(&self.received, end.as_bytes()) {
                break at + end.len();
            }
            assert!(self.read_more(), "closed after {:?}", self.text());
        };
        let read: Vec<u8> = self.received.drain(..end).collect();
        String::from_utf8_lossy(&read).into_owned()
    }

    /// Clones the socket, so that another thread can write to it.
    #[allow(dead_code, reason = "used by other tests")]
    pub(crate) fn clone_stream(&self) -> TcpStream {
        self.stream.try_clone().unwrap()
    }

    fn text(&self) -> String {
        String::from_utf8_lossy(&self.received).into_owned()
    }

    /// Reads more bytes. Returns false if the server has closed the connection.
    fn read_more(&mut self) -> bool {
        let mut buffer = [0; 16 << 10];
        match self.stream.read(&mut buffer) {
            Ok(read) => {
                self.received.extend_from_slice(&buffer[..read]);
                read > 0
            }
            Err(error) if error.kind() == std::io::ErrorKind::ConnectionReset => false,
            Err(error) => panic!("waited {TIMEOUT:?}: {error}"),
        }
    }
}

fn find(bytes: &[u8], wanted: &[u8]) -> Option<usize> {
    bytes
        .windows(wanted.len())
        .position(|window| window == wanted)
}
