//! HTTP/1.1 with an upstream, moved by whoever has the request.
//!
//! hyper's client gives a connection a task of its own, and hands requests, answers and bodies to it and back through
//! channels. Between two sockets of one thread that is half of the work; here the task of the client's connection writes
//! and reads the upstream's as well.
//!
//! ```text
//! begin      the head of the request, and its body while it comes
//! poll_head  the head of the answer; the body of the request goes on meanwhile
//! poll_body  the body of the answer; likewise
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
use crate::{config::Proxy, net::Stalling};

/// What is read at once, at least and at most: a head and a small body, and a body that comes fast.
const READ_BYTES: std::ops::RangeInclusive<usize> = 8 << 10..=64 << 10;

/// A socket to an upstream, in the clear or behind TLS.
pub(super) trait Socket: AsyncRead + AsyncWrite + Unpin + Send {
    /// Whether there is certainly nothing to read. That costs a system call only where the runtime has heard of something.
    fn is_quiet(&self) -> bool;
}

impl Socket for TcpStream {
    fn is_quiet(&self) -> bool {
        // Room for nothing takes nothing. Whatever comes of it but that, somebody has to look.
        let heard = self.try_read(&mut []);
        heard.is_err_and(|error| error.kind() == io::ErrorKind::WouldBlock)
    }
}

impl Socket for TlsStream<TcpStream> {
    /// What came with something else waits in it decrypted.
    fn is_quiet(&self) -> bool {
        false
    }
}

/// A connection that takes one request at a time.
pub(super) struct Exchange {
    stream: Stalling<Box<dyn Socket>>,
    outgoing: Outgoing,
    received: BytesMut,
    /// How much is read at once.
    read_bytes: usize,
    awaited: Awaited,
    /// Whether the upstream takes another request after this.
    keeps: bool,
    /// Whether it has answered before: who has may close whenever nobody is served.
    has_answered: bool,
    /// Whether nothing has come since the last request began.
    is_silent: bool,
    bounds: head::Bounds,
    known: head::Known,
}

/// What of a body is here already.
#[derive(Debug)]
pub(super) enum Received {
    Frame(Frame<Bytes>),
    /// Nothing more: the body is over, or more has to come.
    Nothing,
}

/// What the upstream is to say next.
#[derive(Debug)]
enum Awaited {
    /// Nothing: nobody has asked, or the answer is over.
    Nothing,
    /// An answer to a request of this kind.
    Head {
        has_no_body: bool,
    },
    /// So many octets of a body.
    Length(u64),
    Chunks(Chunks),
    /// Whatever comes until it closes.
    Close,
}

impl Exchange {
    pub(super) fn new(stream: impl Socket + 'static, settings: &Proxy) -> Self {
        Self {
            stream: Stalling::new(Box::new(stream), settings.timeouts.idle),
            outgoing: Outgoing::default(),
            received: BytesMut::new(),
            read_bytes: *READ_BYTES.start(),
            awaited: Awaited::Nothing,
            keeps: true,
            has_answered: false,
            is_silent: true,
            bounds: head::Bounds::of(settings),
            known: head::Known::default(),
        }
    }

    /// Goes by these `settings` from the next request on.
    pub(super) fn go_by(&mut self, settings: &Proxy) {
        self.bounds = head::Bounds::of(settings);
        self.stream.wait_for(settings.timeouts.idle);
    }

    /// Whether it can take a request: the last answer is over, the last request sent, and neither side wants to close.
    pub(super) fn is_ready(&self) -> bool {
        matches!(self.awaited, Awaited::Nothing)
            && self.keeps
            && self.received.is_empty()
            && self.outgoing.is_over()
    }

    /// Whether the upstream has closed it, or has said something that nobody had asked for. That is known as soon as the
    /// runtime has heard of it, and costs no system call where there is nothing to hear.
    pub(super) fn is_closed(&mut self) -> bool {
        if self.stream.get_ref().is_quiet() {
            return false;
        }
        let mut cx = Context::from_waker(Waker::noop());
        let read = self.poll_read_more(&mut cx);
        // Who has had his share of a turn is not let look, and knows nothing.
        read.is_ready() || !coop::has_budget_remaining()
    }

    /// Has `request` to send, on a connection that is ready. `client` takes out of it what the client claims to be, and tells who he is; without
    /// it the request is our own.
    pub(super) fn begin(&mut self, request: Request<Upload>, client: Option<&Forwarding>) {
        self.outgoing.begin(request, client);
        self.await_head();
    }

    /// The same for a request that another connection has not answered.
    pub(super) fn begin_again(&mut self, request: Outgoing) {
        self.outgoing = request;
        self.await_head();
    }

    fn await_head(&mut self) {
        self.is_silent = true;
        self.awaited = Awaited::Head {
            has_no_body: self.outgoing.is_head(),
        };
    }

    /// Whether it has been kept, and has said nothing since the last request began. If it ends like this, it was about to
    /// end in any case.
    pub(super) const fn is_stale(&self) -> bool {
        self.has_answered && self.is_silent
    }

    /// The last request for another connection, if it may be sent on one.
    pub(super) fn take_again(&mut self) -> Option<Outgoing> {
        self.outgoing.take_again()
    }

    /// Sends, and waits for the head of the answer. What comes with another protocol stays where it is: see
    /// [`AsyncRead`].
    pub(super) fn poll_head(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<Response<()>>> {
        self.send_on(cx)?;
        loop {
            let parsed = head::parse(&mut self.received, self.bounds, &mut self.known);
            if let Some(answer) = parsed.map_err(malformed)? {
                let is_interim = answer.status().is_informational()
                    && answer.status() != StatusCode::SWITCHING_PROTOCOLS;
                if !is_interim {
                    // The rest of the body would be taken for the other protocol: RFC 9110, section 7.8.
                    if answer.status() == StatusCode::SWITCHING_PROTOCOLS
                        && !self.outgoing.is_over()
                    {
                        return Poll::Ready(Err(malformed(Malformed::EarlySwitch)));
                    }
                    return Poll::Ready(self.await_body(answer));
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

    /// The next of the answer's body; `None` when it is over.
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

    /// The body of the answer, if all of it is here and its length was said.
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

    /// The next of the answer's body that is here already. What is malformed is found once more by [`Self::poll_body`].
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

    /// What of the body is here already.
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

    /// How many octets of the answer's body are left, if that is known.
    pub(super) fn left(&self) -> Option<u64> {
        match self.awaited {
            Awaited::Nothing => Some(0),
            Awaited::Length(left) => Some(left),
            Awaited::Head { .. } | Awaited::Chunks(_) | Awaited::Close => None,
        }
    }

    /// Sends as far as it goes. A body that its client has not sent whole is the end; but an upstream that takes no more of
    /// a request may have answered all the same, so what comes of it is seen when the answer is read.
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
                tracing::debug!("an upstream was not sent all of a request: {error}");
                self.keeps = false;
                self.outgoing.give_up();
            }
            Poll::Ready(Ok(())) | Poll::Pending => {}
        }
        Ok(())
    }

    /// Reads what has come behind what was read; how much that is.
    fn poll_read_more(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<usize>> {
        self.received.reserve(self.read_bytes);
        let room = self.received.capacity() - self.received.len();
        let read = ready!(pin!(self.stream.read_buf(&mut self.received)).poll(cx))?;
        self.is_silent &= read == 0;
        // Who sends as much as can be read at once is read from more at once.
        if read == room {
            self.read_bytes = (self.read_bytes * 2).min(*READ_BYTES.end());
        }
        Poll::Ready(Ok(read))
    }
}

/// The connection after it was upgraded: what came behind the answer is read first.
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

/// What is wrong with what an upstream says.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
enum Malformed {
    #[error("the answer is no HTTP/1.1: {0}")]
    Head(httparse::Error),
    #[error("the head of the answer is too large")]
    HeadTooLarge,
    #[error("it is not clear where the answer ends")]
    Framing,
    #[error("invalid chunk")]
    Chunk,
    #[error("101 before the request was sent whole")]
    EarlySwitch,
    #[error("the trailers make no sense, or are too large")]
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
    async fn a_connection_that_cannot_be_looked_at_is_not_taken_for_open() {
        let text = "proxy: {listen: '127.0.0.1:0', upstreams: [{name: app, urls: 'http://h'}]}";
        let settings = Config::parse(text).unwrap().proxy.unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let stream = TcpStream::connect(listener.local_addr().unwrap());
        let mut exchange = Exchange::new(stream.await.unwrap(), &settings);
        let (upstream, _) = listener.accept().await.unwrap();
        assert!(!exchange.is_closed());
        drop(upstream);
        // The runtime has heard of the end.
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
