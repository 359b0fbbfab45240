//! An HTTP/1.1 client connection to an upstream, driven by the task that handles the request.
//!
//! hyper's client runs each connection in its own task, and passes requests, responses and bodies
//! through channels, although in the proxy both sockets of a request belong to one thread. These
//! channels and tasks take much of the CPU time (ADR 0006). With this module, the task of the
//! client connection reads and writes the upstream socket directly.
//!
//! ```text
//! start      sets the request to send; the body is sent as it arrives
//! poll_head  sends, and reads the response head
//! poll_body  reads the response body, and keeps sending the request body
//! ```

mod chunks;
mod framing;
mod head;
mod request_writer;
#[cfg(any(test, fuzzing))]
mod transcript;

use std::{
    fmt, io,
    pin::{Pin, pin},
    task::{Context, Poll, Waker, ready},
};

use bytes::{Bytes, BytesMut};
use http::{Request, Response, StatusCode};
use hyper::body::Frame;
use tidegate_config::Proxy;
use tidegate_net::{TimedStream, WriteTimeout};
use tokio::{
    io::{AsyncRead, AsyncReadExt as _, AsyncWrite, ReadBuf},
    net::TcpStream,
    task::coop,
    time::Instant,
};
use tokio_rustls::client::TlsStream;

pub(crate) use self::request_writer::RequestWriter;
#[cfg(any(test, fuzzing))]
pub use self::transcript::{ParsedResponse, ScriptedConnection};
use self::{
    chunks::{ChunkDecoder, Piece},
    framing::Framing,
    request_writer::WriteError,
};
use super::interim_allowance::{InterimAllowance, TooManyInterim};
use crate::{
    headers::{forwarded::ForwardingHeaders, hop_by_hop},
    request_body::Upload,
};

/// The minimum and maximum size of a read, in bytes. The minimum is large enough for a head with a
/// small body, the maximum for a fast download.
const READ_BYTES: std::ops::RangeInclusive<usize> = 8 << 10..=64 << 10;

/// A socket to an upstream, plaintext or TLS.
pub(crate) trait Socket: AsyncRead + AsyncWrite + Unpin + Send {
    /// Returns true only if there is certainly nothing to read. Makes a system call only if the
    /// async runtime has recorded that the socket is readable.
    fn is_quiet(&self) -> bool;
}

impl Socket for TcpStream {
    fn is_quiet(&self) -> bool {
        // A read into an empty buffer consumes no bytes. Any result except `WouldBlock` means that
        // a real read is necessary.
        let read = self.try_read(&mut []);
        read.is_err_and(|error| error.kind() == io::ErrorKind::WouldBlock)
    }
}

impl Socket for TlsStream<TcpStream> {
    /// Returns false, because the TLS session may hold decrypted data.
    fn is_quiet(&self) -> bool {
        false
    }
}

/// An HTTP/1.1 connection to an upstream, with at most one request in flight.
pub(crate) struct Http1Connection {
    stream: TimedStream<Box<dyn Socket>>,
    writer: RequestWriter,
    received: BytesMut,
    /// The size of the next read, in bytes.
    read_bytes: usize,
    state: ReadState,
    /// Whether the upstream keeps the connection open after this response.
    keeps_alive: bool,
    /// Whether any response has arrived on this connection. After the first response, the upstream
    /// may close the connection at any time between requests.
    has_responded: bool,
    /// Whether no byte has arrived since the last request was started.
    is_silent: bool,
    /// The number of interim responses that the last request may still receive.
    interim_allowance: InterimAllowance,
    limits: head::HeadLimits,
    header_cache: head::HeaderLineCache,
}

/// The part of the response that is read next.
#[derive(Debug)]
enum ReadState {
    /// No part, because no request is in flight or the response is complete.
    Nothing,
    /// The head of a response. `has_no_body` is true for the response to a `HEAD` request.
    Head {
        has_no_body: bool,
    },
    /// A body of known length. The variant contains the number of remaining bytes.
    Length(u64),
    Chunked(ChunkDecoder),
    /// A body that ends when the upstream closes the connection.
    Close,
}

impl Http1Connection {
    pub(crate) fn new(stream: impl Socket + 'static, settings: &Proxy) -> Self {
        let stream: Box<dyn Socket> = Box::new(stream);
        let write_timeout = WriteTimeout::Stall(settings.timeouts.idle);
        Self {
            stream: TimedStream::without_read_timeout(stream, write_timeout),
            writer: RequestWriter::default(),
            received: BytesMut::new(),
            read_bytes: *READ_BYTES.start(),
            state: ReadState::Nothing,
            keeps_alive: true,
            has_responded: false,
            is_silent: true,
            interim_allowance: InterimAllowance::FULL,
            limits: head::HeadLimits::of(settings),
            header_cache: head::HeaderLineCache::default(),
        }
    }

    /// Applies `settings` to later requests.
    pub(crate) fn update_settings(&mut self, settings: &Proxy) {
        self.limits = head::HeadLimits::of(settings);
        let write_timeout = WriteTimeout::Stall(settings.timeouts.idle);
        self.stream.set_write_timeout(write_timeout);
    }

    /// Returns whether the connection can accept a request. The last response must be complete, the
    /// last request must be sent, and neither side may have asked to close the connection.
    pub(crate) fn is_ready(&self) -> bool {
        matches!(self.state, ReadState::Nothing)
            && self.keeps_alive
            && self.received.is_empty()
            && self.writer.is_written()
    }

    /// Returns whether the upstream has closed the connection or has sent data without a request.
    /// The check makes no system call if the connection is quiet.
    pub(crate) fn probe_closed(&mut self) -> bool {
        if self.stream.get_ref().is_quiet() {
            return false;
        }
        let mut cx = Context::from_waker(Waker::noop());
        let read = self.poll_read_more(&mut cx);
        // If the task has used up its cooperative budget, tokio returns `Pending` and does not
        // check the socket. If the check was not possible, the socket's state is unknown, so treat
        // the connection as closed.
        read.is_ready() || !coop::has_budget_remaining()
    }

    /// Sets `request` as the next request to send. The connection must be ready. `client` replaces
    /// the forwarding headers that the client sent; it is `None` for the proxy's own requests.
    pub(crate) fn start(&mut self, request: Request<Upload>, client: Option<&ForwardingHeaders>) {
        self.writer.start(request, client);
        self.await_head();
    }

    /// Sets `request`, which received no response on another connection, as the next request to
    /// send.
    pub(crate) fn resend(&mut self, request: RequestWriter) {
        self.writer = request;
        self.await_head();
    }

    fn await_head(&mut self) {
        self.is_silent = true;
        self.interim_allowance = InterimAllowance::FULL;
        self.state = ReadState::Head {
            has_no_body: self.writer.is_head(),
        };
    }

    /// Returns whether the connection was reused and has received nothing since the start of the
    /// last request. If a reused connection turns out to be closed, the upstream probably closed it
    /// before the request arrived.
    pub(crate) const fn is_stale(&self) -> bool {
        self.has_responded && self.is_silent
    }

    /// Takes the last request for a retry on another connection, if a retry is safe.
    pub(crate) fn take_for_retry(&mut self) -> Option<RequestWriter> {
        self.writer.take_for_retry()
    }

    /// Sends the request, and waits for the response head. If bytes of an upgraded protocol follow
    /// the head, they stay buffered for the [`AsyncRead`] implementation.
    pub(crate) fn poll_head(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<Response<()>>> {
        self.continue_sending(cx)?;
        loop {
            let parsed = head::parse(&mut self.received, self.limits, &mut self.header_cache);
            if let Some(response) = parsed.map_err(malformed)? {
                // Interim responses (1xx) are dropped. The proxy itself responds to `Expect:
                // 100-continue`.
                let is_interim = response.status().is_informational()
                    && response.status() != StatusCode::SWITCHING_PROTOCOLS;
                if !is_interim {
                    // A 101 response before the end of the request is an error, because the
                    // upstream would read the rest of the body as the new protocol (RFC 9110,
                    // section 7.8).
                    if response.status() == StatusCode::SWITCHING_PROTOCOLS
                        && !self.writer.is_written()
                    {
                        return Poll::Ready(Err(malformed(InvalidResponse::EarlySwitch)));
                    }
                    return Poll::Ready(self.await_body(response));
                }
                let counted = self.interim_allowance.spend(Instant::now());
                counted.map_err(|error| malformed(InvalidResponse::TooManyInterim(error)))?;
                continue;
            }
            if ready!(self.poll_read_more(cx))? == 0 {
                return Poll::Ready(Err(io::ErrorKind::UnexpectedEof.into()));
            }
        }
    }

    fn await_body(&mut self, mut response: Response<()>) -> io::Result<Response<()>> {
        let has_no_body = matches!(self.state, ReadState::Head { has_no_body: true });
        self.has_responded = true;
        let framing = Framing::of_response(&mut response, has_no_body).map_err(malformed)?;
        self.keeps_alive &= framing::is_keep_alive(&response);
        self.state = match framing {
            Framing::Nothing | Framing::Length(0) => ReadState::Nothing,
            Framing::Length(length) => ReadState::Length(length),
            Framing::Chunked => ReadState::Chunked(ChunkDecoder::default()),
            Framing::Close => {
                self.keeps_alive = false;
                ReadState::Close
            }
        };
        Ok(response)
    }

    /// Polls the next frame of the response body; `None` at its end.
    pub(crate) fn poll_body(
        &mut self,
        cx: &mut Context<'_>,
    ) -> Poll<Option<io::Result<Frame<Bytes>>>> {
        if let Err(error) = self.continue_sending(cx) {
            return Poll::Ready(Some(Err(error)));
        }
        loop {
            match self.take_piece() {
                Ok(Piece::Data(data)) => return Poll::Ready(Some(Ok(Frame::data(data)))),
                Ok(Piece::Trailers(mut trailers)) => {
                    self.state = ReadState::Nothing;
                    hop_by_hop::strip_response(&mut trailers);
                    return Poll::Ready(Some(Ok(Frame::trailers(trailers))));
                }
                Ok(Piece::End) => {
                    self.state = ReadState::Nothing;
                    return Poll::Ready(None);
                }
                Ok(Piece::Incomplete) => {}
                Err(problem) => return Poll::Ready(Some(Err(malformed(problem)))),
            }
            match ready!(self.poll_read_more(cx)) {
                Ok(0) if matches!(self.state, ReadState::Close) => {
                    self.state = ReadState::Nothing;
                }
                Ok(0) => return Poll::Ready(Some(Err(io::ErrorKind::UnexpectedEof.into()))),
                Ok(_) => {}
                Err(error) => return Poll::Ready(Some(Err(error))),
            }
        }
    }

    /// Takes the response body, if the whole body has arrived and its length is known.
    pub(crate) fn take_complete_body(&mut self) -> Option<Bytes> {
        match self.state {
            ReadState::Nothing => Some(Bytes::new()),
            ReadState::Length(length) => {
                let length = usize::try_from(length).ok()?;
                (length <= self.received.len()).then(|| {
                    self.state = ReadState::Nothing;
                    self.received.split_to(length).freeze()
                })
            }
            _ => None,
        }
    }

    /// Takes the next frame of the response body, if it has already arrived. Ignores malformed
    /// data: [`Self::poll_body`] reports it.
    pub(crate) fn take_buffered_frame(&mut self) -> Option<Frame<Bytes>> {
        match self.take_piece() {
            Ok(Piece::Data(data)) => Some(Frame::data(data)),
            Ok(Piece::Trailers(mut trailers)) => {
                self.state = ReadState::Nothing;
                hop_by_hop::strip_response(&mut trailers);
                Some(Frame::trailers(trailers))
            }
            Ok(Piece::End) => {
                self.state = ReadState::Nothing;
                None
            }
            Ok(Piece::Incomplete) | Err(_) => None,
        }
    }

    /// Takes the next piece of the body, if it has already arrived.
    fn take_piece(&mut self) -> Result<Piece, InvalidResponse> {
        match &mut self.state {
            ReadState::Nothing | ReadState::Head { .. } => Ok(Piece::End),
            ReadState::Chunked(chunks) => chunks.next(&mut self.received, self.limits.bytes),
            _ if self.received.is_empty() => Ok(Piece::Incomplete),
            ReadState::Close => Ok(Piece::Data(self.received.split().freeze())),
            ReadState::Length(left) => {
                let max = usize::try_from(*left).unwrap_or(usize::MAX);
                let data = self.received.split_to(self.received.len().min(max));
                *left = left.saturating_sub(framing::length_of(&data));
                if *left == 0 {
                    self.state = ReadState::Nothing;
                }
                Ok(Piece::Data(data.freeze()))
            }
        }
    }

    /// Returns the number of remaining bytes of the response body, if known.
    pub(crate) fn remaining(&self) -> Option<u64> {
        match self.state {
            ReadState::Nothing => Some(0),
            ReadState::Length(left) => Some(left),
            ReadState::Head { .. } | ReadState::Chunked(_) | ReadState::Close => None,
        }
    }

    /// Sends as much of the request as possible. Returns an error if the client aborts the body, or
    /// if the upstream has not accepted a single byte.
    ///
    /// An upstream that stops reading after that may still have sent a response. If the upstream
    /// stops reading, the function returns no error, and the request fails only if no response can
    /// be read.
    fn continue_sending(&mut self, cx: &mut Context<'_>) -> io::Result<()> {
        if self.writer.is_sent() {
            return Ok(());
        }
        match self.writer.poll_send(&mut self.stream, cx) {
            Poll::Ready(Err(WriteError::Body(error))) => return Err(error),
            Poll::Ready(Err(WriteError::Stream(error))) if self.writer.is_untouched() => {
                return Err(error);
            }
            Poll::Ready(Err(WriteError::Stream(error))) => {
                tracing::debug!("failed to send the whole request to the upstream: {error}");
                self.keeps_alive = false;
                self.writer.discard();
            }
            Poll::Ready(Ok(())) | Poll::Pending => {}
        }
        Ok(())
    }

    /// Reads more bytes into the buffer and returns their number, which is 0 at the end of the
    /// stream.
    fn poll_read_more(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<usize>> {
        self.received.reserve(self.read_bytes);
        let room = self.received.capacity() - self.received.len();
        let read = ready!(pin!(self.stream.read_buf(&mut self.received)).poll(cx))?;
        self.is_silent &= read == 0;
        // A read that fills the buffer indicates a fast body, so double the size of the next read.
        if read == room {
            self.read_bytes = (self.read_bytes * 2).min(*READ_BYTES.end());
        }
        Poll::Ready(Ok(read))
    }
}

/// Reads from an upgraded connection. The first bytes that the reader returns are those that
/// arrived after the response head.
impl AsyncRead for Http1Connection {
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

impl AsyncWrite for Http1Connection {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(cx, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}

impl fmt::Debug for Http1Connection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Http1Connection")
            .field("state", &self.state)
            .finish_non_exhaustive()
    }
}

/// The ways in which a response can be malformed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
enum InvalidResponse {
    #[error("the response is not HTTP/1.1: {0}")]
    Head(httparse::Error),
    #[error("the response head is too large")]
    HeadTooLarge,
    #[error("the length of the response is ambiguous")]
    Framing,
    #[error("invalid chunk")]
    Chunk,
    #[error("the upstream sent 101 before the request was fully sent")]
    EarlySwitch,
    #[error("{0}")]
    TooManyInterim(TooManyInterim),
    #[error("the trailers are invalid or too large")]
    Trailers,
}

fn malformed(problem: InvalidResponse) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, problem)
}

#[cfg(test)]
mod tests {
    use std::future::poll_fn;

    use http::Method;
    use tidegate_config::Config;
    use tokio::net::TcpListener;

    use super::*;

    fn settings() -> Proxy {
        let text = "proxy: {listen: '127.0.0.1:0', upstreams: [{name: app, urls: 'http://h'}]}";
        Config::parse(text).unwrap().proxy.unwrap()
    }

    /// A socket whose writes fail after `room` bytes. The upstream has already sent `response`.
    struct WriteErrorSocket {
        room: usize,
        response: &'static [u8],
    }

    impl Socket for WriteErrorSocket {
        fn is_quiet(&self) -> bool {
            self.response.is_empty()
        }
    }

    impl AsyncRead for WriteErrorSocket {
        fn poll_read(
            mut self: Pin<&mut Self>,
            cx: &mut Context<'_>,
            buffer: &mut ReadBuf<'_>,
        ) -> Poll<io::Result<()>> {
            Pin::new(&mut self.response).poll_read(cx, buffer)
        }
    }

    impl AsyncWrite for WriteErrorSocket {
        fn poll_write(
            mut self: Pin<&mut Self>,
            _: &mut Context<'_>,
            bytes: &[u8],
        ) -> Poll<io::Result<usize>> {
            if self.room == 0 {
                return Poll::Ready(Err(io::ErrorKind::BrokenPipe.into()));
            }
            let count = bytes.len().min(self.room);
            self.room -= count;
            Poll::Ready(Ok(count))
        }

        fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
            Poll::Ready(Ok(()))
        }

        fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
            Poll::Ready(Ok(()))
        }
    }

    #[tokio::test]
    async fn a_response_is_read_after_a_write_error() {
        let response = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok";
        for room in [0, 1, 100] {
            let socket = WriteErrorSocket { room, response };
            let mut connection = Http1Connection::new(socket, &settings());
            let mut request = Request::new(Upload::empty());
            *request.method_mut() = Method::POST;
            connection.start(request, None);
            let head = poll_fn(|cx| connection.poll_head(cx)).await;
            if room == 0 {
                // The upstream has received nothing, so the response does not belong to the
                // request, and the request can be sent again.
                assert_eq!(head.unwrap_err().kind(), io::ErrorKind::BrokenPipe);
                assert!(connection.take_for_retry().is_some());
                continue;
            }
            assert_eq!(head.unwrap().status(), StatusCode::OK);
            let body = poll_fn(|cx| connection.poll_body(cx)).await;
            assert_eq!(body.unwrap().unwrap().into_data().unwrap(), "ok");
            assert_eq!(connection.is_ready(), room == 100, "{room}");
            assert!(connection.take_for_retry().is_none());
        }
    }

    #[tokio::test]
    async fn a_connection_that_cannot_be_probed_is_not_open() {
        let settings = settings();
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let stream = TcpStream::connect(listener.local_addr().unwrap());
        let mut connection = Http1Connection::new(stream.await.unwrap(), &settings);
        let (upstream, _) = listener.accept().await.unwrap();
        assert!(!connection.probe_closed());
        drop(upstream);
        // Wait until the async runtime has recorded the end of the stream.
        assert!(connection.read_u8().await.is_err());
        let is_closed = poll_fn(|cx| {
            while coop::has_budget_remaining() {
                let _ = pin!(coop::consume_budget()).poll(cx);
            }
            Poll::Ready(connection.probe_closed())
        });
        assert!(is_closed.await);
    }
}
