//! An HTTP/1.1 client connection to an upstream, driven by the task that handles the request.
//!
//! hyper's client runs each connection in its own task, and passes requests, responses and bodies
//! through channels. Between two sockets of one thread, that is half of the work. Here the task of
//! the client connection reads and writes the upstream's socket directly.
//!
//! ```text
//! begin      sets the request to send; its body follows as it arrives
//! poll_head  sends, and reads the response head
//! poll_body  reads the response body, and keeps sending the request body
//! ```

mod chunks;
mod framing;
mod head;
mod outgoing;
mod transcript;

use std::{
    fmt, io,
    pin::{Pin, pin},
    task::{Context, Poll, Waker, ready},
};

use bytes::{Bytes, BytesMut};
use http::{Request, Response, StatusCode};
use hyper::body::Frame;
use tokio::{
    io::{AsyncRead, AsyncReadExt as _, AsyncWrite, ReadBuf},
    net::TcpStream,
    task::coop,
};
use tokio_rustls::client::TlsStream;

pub(super) use self::outgoing::Outgoing;
pub use self::transcript::{Heard, UpstreamTalk};
use self::{
    chunks::{Chunks, Piece},
    framing::Framing,
    outgoing::Unsent,
};
use super::{body::Upload, forwarded::Forwarding, hop};
use crate::{config::Proxy, net::WriteTimeoutStream};

/// The minimum and maximum size of a read, in bytes: a head with a small body, and a fast download.
const READ_BYTES: std::ops::RangeInclusive<usize> = 8 << 10..=64 << 10;

/// The maximum number of interim responses (1xx) before the response itself. Some services send a
/// `102 Processing` every few seconds while they work, or a handful of `103 Early Hints`. They are
/// read and dropped, so an upstream that sends nothing else would keep this thread busy until
/// `timeouts.head`.
const MAX_INTERIM_ANSWERS: u32 = 100;

/// A socket to an upstream, plaintext or TLS.
pub(super) trait Socket: AsyncRead + AsyncWrite + Unpin + Send {
    /// Returns true only if there is certainly nothing to read. Makes a system call only if the
    /// runtime has seen the socket become readable.
    fn is_quiet(&self) -> bool;
}

impl Socket for TcpStream {
    fn is_quiet(&self) -> bool {
        // A read into an empty buffer consumes nothing. Any result but `WouldBlock` needs a real
        // read.
        let heard = self.try_read(&mut []);
        heard.is_err_and(|error| error.kind() == io::ErrorKind::WouldBlock)
    }
}

impl Socket for TlsStream<TcpStream> {
    /// Always false: decrypted data may wait inside the TLS session.
    fn is_quiet(&self) -> bool {
        false
    }
}

/// An HTTP/1.1 connection to an upstream, with at most one request in flight.
pub(super) struct Exchange {
    stream: WriteTimeoutStream<Box<dyn Socket>>,
    outgoing: Outgoing,
    received: BytesMut,
    /// The size of the next read, in bytes.
    read_bytes: usize,
    awaited: Awaited,
    /// Whether the upstream keeps the connection open after this response.
    keeps: bool,
    /// Whether a response has arrived before. Such a connection may be closed at any time between
    /// requests.
    has_answered: bool,
    /// Whether nothing has arrived since the last request began.
    is_silent: bool,
    /// The number of interim responses to the last request.
    interim_answers: u32,
    bounds: head::Bounds,
    known: head::Known,
}

/// The part of a body that has already arrived.
#[derive(Debug)]
pub(super) enum Received {
    Frame(Frame<Bytes>),
    /// There is nothing more: the body has ended, or the rest has not arrived.
    Nothing,
}

/// What the upstream has to send next.
#[derive(Debug)]
enum Awaited {
    /// Nothing: no request is in flight, or its response is complete.
    Nothing,
    /// The head of a response. `has_no_body` is set if the request was a `HEAD`.
    Head {
        has_no_body: bool,
    },
    /// This many more bytes of a body.
    Length(u64),
    Chunks(Chunks),
    /// A body that ends when the upstream closes the connection.
    Close,
}

impl Exchange {
    pub(super) fn new(stream: impl Socket + 'static, settings: &Proxy) -> Self {
        Self {
            stream: WriteTimeoutStream::new(Box::new(stream), settings.timeouts.idle),
            outgoing: Outgoing::default(),
            received: BytesMut::new(),
            read_bytes: *READ_BYTES.start(),
            awaited: Awaited::Nothing,
            keeps: true,
            has_answered: false,
            is_silent: true,
            interim_answers: 0,
            bounds: head::Bounds::of(settings),
            known: head::Known::default(),
        }
    }

    /// Applies `settings` from the next request on.
    pub(super) fn go_by(&mut self, settings: &Proxy) {
        self.bounds = head::Bounds::of(settings);
        self.stream.wait_for(settings.timeouts.idle);
    }

    /// Returns whether the connection can take a request: the last response is complete, the last
    /// request was sent, and neither side wants to close.
    pub(super) fn is_ready(&self) -> bool {
        matches!(self.awaited, Awaited::Nothing)
            && self.keeps
            && self.received.is_empty()
            && self.outgoing.is_over()
    }

    /// Returns whether the upstream has closed the connection, or has sent data without a request.
    /// A quiet connection costs no system call.
    pub(super) fn is_closed(&mut self) -> bool {
        if self.stream.get_ref().is_quiet() {
            return false;
        }
        let mut cx = Context::from_waker(Waker::noop());
        let read = self.poll_read_more(&mut cx);
        // Once the task's cooperative budget is used up, tokio returns `Pending` without looking at
        // the socket. Then the state is unknown, so the connection counts as closed.
        read.is_ready() || !coop::has_budget_remaining()
    }

    /// Sets `request` as the next one to send; the connection must be ready. `client` replaces the
    /// forwarding headers that the client sent. It is `None` for the proxy's own requests.
    pub(super) fn begin(&mut self, request: Request<Upload>, client: Option<&Forwarding>) {
        self.outgoing.begin(request, client);
        self.await_head();
    }

    /// Sets a request to send that got no response on another connection.
    pub(super) fn begin_again(&mut self, request: Outgoing) {
        self.outgoing = request;
        self.await_head();
    }

    fn await_head(&mut self) {
        self.is_silent = true;
        self.interim_answers = 0;
        self.awaited = Awaited::Head {
            has_no_body: self.outgoing.is_head(),
        };
    }

    /// Returns whether the connection was reused and has received nothing since the last request
    /// began. If it ends now, the upstream had probably closed it before.
    pub(super) const fn is_stale(&self) -> bool {
        self.has_answered && self.is_silent
    }

    /// Takes the last request for a retry on another connection, if that is safe.
    pub(super) fn take_again(&mut self) -> Option<Outgoing> {
        self.outgoing.take_again()
    }

    /// Sends, and waits for the response head. Bytes of an upgraded protocol behind the head stay
    /// buffered: see the [`AsyncRead`] implementation.
    pub(super) fn poll_head(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<Response<()>>> {
        self.send_on(cx)?;
        loop {
            let parsed = head::parse(&mut self.received, self.bounds, &mut self.known);
            if let Some(answer) = parsed.map_err(malformed)? {
                // Interim responses (1xx) are dropped. The proxy itself answers `Expect:
                // 100-continue`.
                let is_interim = answer.status().is_informational()
                    && answer.status() != StatusCode::SWITCHING_PROTOCOLS;
                if !is_interim {
                    // The upstream would read the rest of the request body as the new protocol (RFC
                    // 9110, section 7.8).
                    if answer.status() == StatusCode::SWITCHING_PROTOCOLS
                        && !self.outgoing.is_over()
                    {
                        return Poll::Ready(Err(malformed(Malformed::EarlySwitch)));
                    }
                    return Poll::Ready(self.await_body(answer));
                }
                self.interim_answers += 1;
                if self.interim_answers > MAX_INTERIM_ANSWERS {
                    return Poll::Ready(Err(malformed(Malformed::TooManyInterim)));
                }
                continue;
            }
            if ready!(self.poll_read_more(cx))? == 0 {
                return Poll::Ready(Err(io::ErrorKind::UnexpectedEof.into()));
            }
        }
    }

    fn await_body(&mut self, mut answer: Response<()>) -> io::Result<Response<()>> {
        let has_no_body = matches!(self.awaited, Awaited::Head { has_no_body: true });
        self.has_answered = true;
        let framing = Framing::of_answer(&mut answer, has_no_body).map_err(malformed)?;
        self.keeps &= framing::keeps(&answer);
        self.awaited = match framing {
            Framing::Nothing | Framing::Length(0) => Awaited::Nothing,
            Framing::Length(length) => Awaited::Length(length),
            Framing::Chunked => Awaited::Chunks(Chunks::default()),
            Framing::Close => {
                self.keeps = false;
                Awaited::Close
            }
        };
        Ok(answer)
    }

    /// Polls the next frame of the response body; `None` at its end.
    pub(super) fn poll_body(
        &mut self,
        cx: &mut Context<'_>,
    ) -> Poll<Option<io::Result<Frame<Bytes>>>> {
        if let Err(error) = self.send_on(cx) {
            return Poll::Ready(Some(Err(error)));
        }
        loop {
            match self.take_piece() {
                Ok(Piece::Data(data)) => return Poll::Ready(Some(Ok(Frame::data(data)))),
                Ok(Piece::Trailers(mut trailers)) => {
                    self.awaited = Awaited::Nothing;
                    hop::strip_answer(&mut trailers);
                    return Poll::Ready(Some(Ok(Frame::trailers(trailers))));
                }
                Ok(Piece::Over) => {
                    self.awaited = Awaited::Nothing;
                    return Poll::Ready(None);
                }
                Ok(Piece::More) => {}
                Err(problem) => return Poll::Ready(Some(Err(malformed(problem)))),
            }
            match ready!(self.poll_read_more(cx)) {
                Ok(0) if matches!(self.awaited, Awaited::Close) => {
                    self.awaited = Awaited::Nothing;
                }
                Ok(0) => return Poll::Ready(Some(Err(io::ErrorKind::UnexpectedEof.into()))),
                Ok(_) => {}
                Err(error) => return Poll::Ready(Some(Err(error))),
            }
        }
    }

    /// Takes the response body, if all of it has arrived and its length is known.
    pub(super) fn take_whole(&mut self) -> Option<Bytes> {
        match self.awaited {
            Awaited::Nothing => Some(Bytes::new()),
            Awaited::Length(left) => {
                let left = usize::try_from(left).ok()?;
                (left <= self.received.len()).then(|| {
                    self.awaited = Awaited::Nothing;
                    self.received.split_to(left).freeze()
                })
            }
            _ => None,
        }
    }

    /// Takes the next frame of the response body that has already arrived. Ignores malformed data,
    /// which [`Self::poll_body`] then reports.
    pub(super) fn take_received(&mut self) -> Received {
        match self.take_piece() {
            Ok(Piece::Data(data)) => Received::Frame(Frame::data(data)),
            Ok(Piece::Trailers(mut trailers)) => {
                self.awaited = Awaited::Nothing;
                hop::strip_answer(&mut trailers);
                Received::Frame(Frame::trailers(trailers))
            }
            Ok(Piece::Over) => {
                self.awaited = Awaited::Nothing;
                Received::Nothing
            }
            Ok(Piece::More) | Err(_) => Received::Nothing,
        }
    }

    /// Takes the next part of the body that has already arrived.
    fn take_piece(&mut self) -> Result<Piece, Malformed> {
        match &mut self.awaited {
            Awaited::Nothing | Awaited::Head { .. } => Ok(Piece::Over),
            Awaited::Chunks(chunks) => chunks.next(&mut self.received, self.bounds.bytes),
            _ if self.received.is_empty() => Ok(Piece::More),
            Awaited::Close => Ok(Piece::Data(self.received.split().freeze())),
            Awaited::Length(left) => {
                let most = usize::try_from(*left).unwrap_or(usize::MAX);
                let data = self.received.split_to(self.received.len().min(most));
                *left = left.saturating_sub(framing::length_of(&data));
                if *left == 0 {
                    self.awaited = Awaited::Nothing;
                }
                Ok(Piece::Data(data.freeze()))
            }
        }
    }

    /// Returns how many bytes of the response body are left, if known.
    pub(super) fn left(&self) -> Option<u64> {
        match self.awaited {
            Awaited::Nothing => Some(0),
            Awaited::Length(left) => Some(left),
            Awaited::Head { .. } | Awaited::Chunks(_) | Awaited::Close => None,
        }
    }

    /// Sends as much as possible. Fails if the client's body breaks off, or if the upstream takes
    /// nothing at all. If the upstream stops reading later, it may still have sent a response, so
    /// this is not an error: reading the response decides.
    fn send_on(&mut self, cx: &mut Context<'_>) -> io::Result<()> {
        if self.outgoing.is_sent() {
            return Ok(());
        }
        match self.outgoing.poll_send(&mut self.stream, cx) {
            Poll::Ready(Err(Unsent::Body(error))) => return Err(error),
            Poll::Ready(Err(Unsent::Stream(error))) if self.outgoing.is_untouched() => {
                return Err(error);
            }
            Poll::Ready(Err(Unsent::Stream(error))) => {
                tracing::debug!("request not fully sent to the upstream: {error}");
                self.keeps = false;
                self.outgoing.give_up();
            }
            Poll::Ready(Ok(())) | Poll::Pending => {}
        }
        Ok(())
    }

    /// Reads more bytes into the buffer and returns their number; 0 at the end of the stream.
    fn poll_read_more(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<usize>> {
        self.received.reserve(self.read_bytes);
        let room = self.received.capacity() - self.received.len();
        let read = ready!(pin!(self.stream.read_buf(&mut self.received)).poll(cx))?;
        self.is_silent &= read == 0;
        // A read that fills the buffer suggests a fast body: double the size of the next one.
        if read == room {
            self.read_bytes = (self.read_bytes * 2).min(*READ_BYTES.end());
        }
        Poll::Ready(Ok(read))
    }
}

/// Reads from an upgraded connection: first the bytes that arrived behind the response head.
impl AsyncRead for Exchange {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if self.received.is_empty() {
            return Pin::new(&mut self.stream).poll_read(cx, buffer);
        }
        let count = self.received.len().min(buffer.remaining());
        buffer.put_slice(&self.received.split_to(count));
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for Exchange {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        octets: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(cx, octets)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}

impl fmt::Debug for Exchange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Exchange")
            .field("awaited", &self.awaited)
            .finish_non_exhaustive()
    }
}

/// What is wrong with a response.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
enum Malformed {
    #[error("the response is not HTTP/1.1: {0}")]
    Head(httparse::Error),
    #[error("the head of the response is too large")]
    HeadTooLarge,
    #[error("the length of the response is ambiguous")]
    Framing,
    #[error("invalid chunk")]
    Chunk,
    #[error("101 before the request was fully sent")]
    EarlySwitch,
    #[error("over {MAX_INTERIM_ANSWERS} interim responses (1xx) before the response")]
    TooManyInterim,
    #[error("the trailers are invalid or too large")]
    Trailers,
}

fn malformed(problem: Malformed) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, problem)
}

#[cfg(test)]
mod tests {
    use std::future::poll_fn;

    use tokio::net::TcpListener;

    use super::*;
    use crate::config::Config;

    #[tokio::test]
    async fn a_connection_that_cannot_be_probed_is_not_open() {
        let text = "proxy: {listen: '127.0.0.1:0', upstreams: [{name: app, urls: 'http://h'}]}";
        let settings = Config::parse(text).unwrap().proxy.unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let stream = TcpStream::connect(listener.local_addr().unwrap());
        let mut exchange = Exchange::new(stream.await.unwrap(), &settings);
        let (upstream, _) = listener.accept().await.unwrap();
        assert!(!exchange.is_closed());
        drop(upstream);
        // Waits until the runtime has seen the end of the stream.
        assert!(exchange.read_u8().await.is_err());
        let is_closed = poll_fn(|cx| {
            while coop::has_budget_remaining() {
                let _ = pin!(coop::consume_budget()).poll(cx);
            }
            Poll::Ready(exchange.is_closed())
        });
        assert!(is_closed.await);
    }
}
