//! A scripted upstream for tests.

use std::{
    convert::Infallible,
    io::{Read, Write},
    net::{Shutdown, SocketAddr, TcpListener, TcpStream},
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    thread::spawn,
    time::Duration,
};

use bytes::Bytes;
use futures_util::FutureExt;
use http_body_util::Full;
use hyper::{Request, Response, body::Incoming, server::conn::http2, service::service_fn};
use hyper_util::rt::{TokioExecutor, TokioIo};
use tokio::runtime;

/// A timeout that is longer than any test step takes. The timeout makes a hanging test fail.
const TIMEOUT: Duration = Duration::from_secs(30);

/// A server that handles each connection with a function.
pub(crate) struct Upstream {
    pub(crate) address: SocketAddr,
    connections: Arc<AtomicUsize>,
    heads: Arc<Mutex<Vec<String>>>,
}

impl Upstream {
    /// Starts a server that calls `handler` for each connection, on a separate thread.
    pub(crate) fn start(handler: impl Fn(&mut ServerConnection) + Send + Sync + 'static) -> Self {
        let socket = TcpListener::bind("127.0.0.1:0").unwrap();
        let upstream = Self {
            address: socket.local_addr().unwrap(),
            connections: Arc::default(),
            heads: Arc::default(),
        };
        let (connections, heads) = (
            Arc::clone(&upstream.connections),
            Arc::clone(&upstream.heads),
        );
        let handler = Arc::new(handler);
        spawn(move || {
            for stream in socket.incoming().map_while(Result::ok) {
                connections.fetch_add(1, Ordering::SeqCst);
                let (handler, heads) = (Arc::clone(&handler), Arc::clone(&heads));
                stream.set_read_timeout(Some(TIMEOUT)).unwrap();
                stream.set_write_timeout(Some(TIMEOUT)).unwrap();
                let received = Vec::new();
                spawn(move || {
                    handler(&mut ServerConnection {
                        stream,
                        received,
                        heads,
                    });
                });
            }
        });
        upstream
    }

    /// Responds to every request with exactly the bytes of `answer`, and keeps the connection open.
    pub(crate) fn responding_with(answer: &'static str) -> Self {
        Self::start(move |connection| {
            while let Some(head) = connection.head() {
                connection.skip_body(&head);
                connection.send(answer);
            }
        })
    }

    /// Reads the head of one request, and never responds.
    pub(crate) fn silent() -> Self {
        Self::start(|connection| {
            connection.head();
            connection.until_closed();
        })
    }

    /// Answers with an empty 200.
    pub(crate) fn ok() -> Self {
        Self::responding_with("HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
    }

    /// Answers each request with an empty 200. If the request has a chunked body, reads the body
    /// first. The body must not contain `0\r\n\r\n` before its end.
    pub(crate) fn ok_after_chunks() -> Self {
        Self::start(|connection| {
            while let Some(head) = connection.head() {
                if head.contains("transfer-encoding: chunked") {
                    connection.until("0\r\n\r\n");
                }
                connection.skip_body(&head);
                connection.send("HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n");
            }
        })
    }

    /// Starts an HTTP/2 upstream that answers each request with `answer`. Request heads are
    /// recorded in HTTP/1.1 format, with `:authority` as `host`.
    pub(crate) fn over_http2<F, A>(answer: F) -> Self
    where
        F: Fn(Request<Incoming>) -> A + Clone + Send + 'static,
        A: Future<Output = Response<Full<Bytes>>> + Send + 'static,
    {
        let socket = TcpListener::bind("127.0.0.1:0").unwrap();
        socket.set_nonblocking(true).unwrap();
        let upstream = Self {
            address: socket.local_addr().unwrap(),
            connections: Arc::default(),
            heads: Arc::default(),
        };
        let (connections, heads) = (
            Arc::clone(&upstream.connections),
            Arc::clone(&upstream.heads),
        );
        spawn(move || {
            let runtime = runtime::Builder::new_current_thread().enable_all().build();
            runtime.unwrap().block_on(async {
                let socket = tokio::net::TcpListener::from_std(socket).unwrap();
                while let Ok((stream, _)) = socket.accept().await {
                    connections.fetch_add(1, Ordering::SeqCst);
                    let (heads, answer) = (Arc::clone(&heads), answer.clone());
                    let handler = service_fn(move |request| {
                        heads.lock().unwrap().push(written(&request));
                        answer(request).map(Ok::<_, Infallible>)
                    });
                    let serving = http2::Builder::new(TokioExecutor::new());
                    tokio::spawn(serving.serve_connection(TokioIo::new(stream), handler));
                }
            });
        });
        upstream
    }

    /// Returns an address without a listening socket.
    pub(crate) fn closed_address() -> SocketAddr {
        SocketAddr::from(([127, 0, 0, 1], crate::ports::reserve_port()))
    }

    pub(crate) fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    /// Returns the number of connections so far.
    pub(crate) fn connections(&self) -> usize {
        self.connections.load(Ordering::SeqCst)
    }

    /// Returns all request heads so far, each without the final empty line.
    pub(crate) fn heads(&self) -> Vec<String> {
        self.heads.lock().unwrap().clone()
    }
}

/// Returns the head of `request` in HTTP/1.1 format, without the final empty line.
fn written(request: &Request<Incoming>) -> String {
    let target = request.uri().path_and_query().unwrap();
    let mut head = format!("{} {target} HTTP/2", request.method());
    if let Some(authority) = request.uri().authority() {
        head.push_str(&format!("\r\nhost: {authority}"));
    }
    for (name, value) in request.headers() {
        head.push_str(&format!("\r\n{name}: {}", value.to_str().unwrap()));
    }
    head
}

/// The upstream's side of one connection.
pub(crate) struct ServerConnection {
    pub(crate) stream: TcpStream,
    received: Vec<u8>,
    heads: Arc<Mutex<Vec<String>>>,
}

impl ServerConnection {
    /// Reads the next request head, without the final empty line; `None` at the end of the stream.
    pub(crate) fn head(&mut self) -> Option<String> {
        let end = loop {
            let mut windows = self.received.windows(4);
            if let Some(at) = windows.position(|four| four == b"\r\n\r\n") {
                break at;
            }
            if !self.read_more() {
                return None;
            }
        };
        let head = String::from_utf8(self.received[..end].to_vec()).unwrap();
        self.received.drain(..end + 4);
        self.heads.lock().unwrap().push(head.clone());
        Some(head)
    }

    /// Reads `count` bytes of a body.
    pub(crate) fn read_bytes(&mut self, count: usize) -> Vec<u8> {
        while self.received.len() < count {
            assert!(self.read_more(), "closed within a body");
        }
        self.received.drain(..count).collect()
    }

    /// Reads up to and including `end`.
    pub(crate) fn until(&mut self, end: &str) -> String {
        loop {
            let text = String::from_utf8_lossy(&self.received).into_owned();
            if let Some(at) = text.find(end) {
                self.received.drain(..at + end.len());
                return text[..at + end.len()].to_owned();
            }
            assert!(self.read_more(), "closed after {text:?}");
        }
    }

    /// Reads the next line, including its line terminator; `None` at the end of the stream.
    pub(crate) fn line(&mut self) -> Option<String> {
        loop {
            if let Some(at) = self.received.iter().position(|byte| *byte == b'\n') {
                let line: Vec<u8> = self.received.drain(..=at).collect();
                return Some(String::from_utf8(line).unwrap());
            }
            if !self.read_more() {
                return None;
            }
        }
    }

    /// Reads an HTTP/2 frame. Returns the frame's type and stream ID; `None` at the end of the
    /// stream.
    pub(crate) fn frame(&mut self) -> Option<(u8, u32)> {
        while self.received.len() < 9 {
            if !self.read_more() {
                return None;
            }
        }
        let head = self.read_bytes(9);
        let length = u32::from_be_bytes([0, head[0], head[1], head[2]]);
        self.read_bytes(usize::try_from(length).unwrap());
        let stream = u32::from_be_bytes([head[5], head[6], head[7], head[8]]);
        Some((head[3], stream))
    }

    /// Reads the body of the request with this head, which has a `Content-Length` or is chunked. If
    /// the body is chunked, the result includes the chunk framing.
    pub(crate) fn body(&mut self, head: &str) -> Vec<u8> {
        if head.contains("transfer-encoding: chunked") {
            return self.until("0\r\n\r\n").into_bytes();
        }
        let length = head
            .lines()
            .find_map(|line| line.strip_prefix("content-length: "));
        length.map_or_else(Vec::new, |length| self.read_bytes(length.parse().unwrap()))
    }

    fn skip_body(&mut self, head: &str) {
        let length = head
            .lines()
            .find_map(|line| line.strip_prefix("content-length: "));
        if let Some(length) = length {
            self.read_bytes(length.parse().unwrap());
        }
    }

    pub(crate) fn send(&mut self, bytes: impl AsRef<[u8]>) {
        // In some tests, the proxy has already closed the connection.
        let _ = self.stream.write_all(bytes.as_ref());
    }

    /// Closes the connection.
    pub(crate) fn close(&mut self) {
        let _ = self.stream.shutdown(Shutdown::Both);
    }

    /// Waits until the proxy closes the connection.
    pub(crate) fn until_closed(&mut self) {
        while self.read_more() {}
    }

    /// Reads more bytes. Returns false if the proxy has closed the connection.
    fn read_more(&mut self) -> bool {
        let mut buffer = [0; 16 << 10];
        match self.stream.read(&mut buffer) {
            Ok(read) => {
                self.received.extend_from_slice(&buffer[..read]);
                read > 0
            }
            Err(_) => false,
        }
    }
}
