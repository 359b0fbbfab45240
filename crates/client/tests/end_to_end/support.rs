//! A server that is reachable without a network, and its client.

use std::{
    convert::Infallible,
    io,
    pin::Pin,
    sync::{Arc, Mutex},
    task::{Context, Poll},
};

use bytes::Bytes;
use http::{Request, Response, Uri};
use http_body_util::{BodyExt as _, Full};
use hyper::{
    body::Incoming,
    rt::{Read, ReadBufCursor, Write},
    server::conn::http1,
    service::service_fn,
};
use hyper_util::{
    client::legacy::{
        Client,
        connect::{Connected, Connection},
    },
    rt::{TokioExecutor, TokioIo},
};
use tidegate_client::{Timestamp, TokioClock};
use tokio::io::DuplexStream;

/// The start time of every test: 2023-11-14T22:13:20Z.
pub(crate) const BEGIN: Timestamp = Timestamp::from_micros(1_700_000_000_000_000);

pub(crate) type Reply = Response<Full<Bytes>>;
type Handler = dyn Fn(Request<Bytes>, Timestamp) -> Reply + Send + Sync;

/// A server in the test process. Clones share the server's state.
#[derive(Clone)]
pub(crate) struct Server {
    handler: Arc<Handler>,
    clock: TokioClock,
    /// The arrival times of the requests.
    pub(crate) arrivals: Arc<Mutex<Vec<Timestamp>>>,
    /// How many of the next connections the server will refuse.
    pub(crate) refusals: Arc<Mutex<u32>>,
}

impl Server {
    pub(crate) fn new(
        handler: impl Fn(Request<Bytes>, Timestamp) -> Reply + Send + Sync + 'static,
    ) -> Self {
        Self {
            handler: Arc::new(handler),
            clock: clock(),
            arrivals: Arc::default(),
            refusals: Arc::default(),
        }
    }

    /// Returns a server that responds to the n-th request with the n-th reply in `replies`. Later
    /// requests get the last reply.
    pub(crate) fn scripted(replies: Vec<Reply>) -> Self {
        let next = Mutex::new(0);
        Self::new(move |_, _| {
            let mut next = next.lock().unwrap();
            let reply = replies
                .get(*next)
                .or_else(|| replies.last())
                .unwrap()
                .clone();
            *next += 1;
            reply
        })
    }

    pub(crate) fn request_count(&self) -> usize {
        self.arrivals.lock().unwrap().len()
    }

    /// Returns the times between successive requests, in milliseconds.
    pub(crate) fn gaps_ms(&self) -> Vec<u64> {
        let arrivals = self.arrivals.lock().unwrap();
        let gap = |pair: &[Timestamp]| pair[1].since(pair[0]).as_micros() / 1_000;
        arrivals.windows(2).map(gap).collect()
    }

    pub(crate) fn client<B>(&self) -> Client<Self, B>
    where
        B: http_body::Body + Send + 'static,
        B::Data: Send,
    {
        Client::builder(TokioExecutor::new()).build(self.clone())
    }

    async fn answer(self, request: Request<Incoming>) -> Result<Reply, Infallible> {
        let now = self.clock.now();
        self.arrivals.lock().unwrap().push(now);
        let (head, body) = request.into_parts();
        let Ok(body) = body.collect().await else {
            return Ok(reply(400, &[]));
        };
        let request = Request::from_parts(head, body.to_bytes());
        Ok((self.handler)(request, now))
    }
}

/// Returns a clock that starts at [`BEGIN`].
pub(crate) fn clock() -> TokioClock {
    TokioClock::starting_at(BEGIN)
}

pub(crate) fn reply(status: u16, headers: &[(&str, &str)]) -> Reply {
    let mut reply = Response::builder().status(status);
    for (name, value) in headers {
        reply = reply.header(*name, *value);
    }
    reply.body(Full::default()).unwrap()
}

pub(crate) fn get() -> Request<Full<Bytes>> {
    request("GET", "")
}

pub(crate) fn request(method: &str, body: &'static str) -> Request<Full<Bytes>> {
    let request = Request::builder().method(method).uri("http://server.test/");
    request
        .body(Full::new(Bytes::from_static(body.as_bytes())))
        .unwrap()
}

/// Connects to this server, regardless of the address.
impl tower::Service<Uri> for Server {
    type Response = Pipe;
    type Error = io::Error;
    type Future = std::future::Ready<io::Result<Pipe>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, _: Uri) -> Self::Future {
        let mut refusals = self.refusals.lock().unwrap();
        if *refusals > 0 {
            *refusals -= 1;
            return std::future::ready(Err(io::ErrorKind::ConnectionRefused.into()));
        }
        let (near, far) = tokio::io::duplex(64 * 1024);
        let server = self.clone();
        let service = service_fn(move |request| server.clone().answer(request));
        let mut http1 = http1::Builder::new();
        http1.auto_date_header(false);
        tokio::spawn(http1.serve_connection(TokioIo::new(far), service));
        std::future::ready(Ok(Pipe(TokioIo::new(near))))
    }
}

/// The client's end of a connection.
#[derive(Debug)]
pub(crate) struct Pipe(TokioIo<DuplexStream>);

impl Connection for Pipe {
    fn connected(&self) -> Connected {
        Connected::new()
    }
}

impl Read for Pipe {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: ReadBufCursor<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_read(cx, buffer)
    }
}

impl Write for Pipe {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.0).poll_write(cx, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_shutdown(cx)
    }
}
