//! A request on its way to an upstream: its head, and its body while it comes.

use std::{
    io,
    pin::Pin,
    task::{Context, Poll, ready},
};

use bytes::{Buf as _, BytesMut};
use http::{Method, Request};
use hyper::body::Body as _;
use tokio::io::AsyncWrite;

use super::{
    super::{body::Upload, forwarded::Forwarding},
    framing::Framing,
    head,
};

/// How much of a request waits to be written before its body is asked for more.
const WRITE_BYTES: usize = 16 << 10;

/// The most of a request that is written before anything of it has been taken: what TLS makes one record of. It is taken whole or not at all,
/// while of several the first may have been when the next cannot be written.
const RECORD_BYTES: usize = 16 << 10;

/// What has yet to be sent.
#[derive(Default)]
pub(in super::super) struct Outgoing {
    octets: BytesMut,
    /// How many of these have been written. They are kept where all might be sent again.
    written: usize,
    body: Option<(Upload, Framing)>,
    is_unflushed: bool,
    /// Whether nothing of it has been taken yet.
    is_untouched: bool,
    /// Whether to send it twice comes to the same as to send it once, and all of it is here.
    is_repeatable: bool,
    /// Whether its answer has no body.
    is_head: bool,
}

/// Why a request was not sent to its end.
pub(super) enum Unsent {
    /// Its body broke off, or is not what it was said to be.
    Body(io::Error),
    /// The upstream does not take it.
    Stream(io::Error),
}

impl Outgoing {
    /// Has `request` to send, of whose client `client` tells, and nothing else.
    pub(super) fn begin(&mut self, request: Request<Upload>, client: Option<&Forwarding>) {
        let (mut head, body) = request.into_parts();
        let framing = Framing::of_request(&head.headers, &body);
        self.octets.clear();
        self.written = 0;
        head::write(&mut head, client, &framing, &mut self.octets);
        self.body = (!matches!(framing, Framing::Nothing)).then_some((body, framing));
        self.is_untouched = true;
        self.is_repeatable = self.body.is_none() && head.method.is_idempotent();
        self.is_head = head.method == Method::HEAD;
    }

    /// Whether all of it is sent.
    pub(super) fn is_over(&self) -> bool {
        self.body.is_none() && self.left().is_empty()
    }

    /// Whether all of it is on its way.
    pub(super) fn is_sent(&self) -> bool {
        self.is_over() && !self.is_unflushed
    }

    /// Whether nothing of it has been taken.
    pub(super) const fn is_untouched(&self) -> bool {
        self.is_untouched
    }

    /// Whether its answer has no body.
    pub(super) const fn is_head(&self) -> bool {
        self.is_head
    }

    /// The request for another connection, if this one has not taken it, or it makes no difference if it has.
    pub(super) fn take_again(&mut self) -> Option<Self> {
        (self.is_untouched || self.is_repeatable).then(|| Self {
            written: 0,
            is_unflushed: false,
            is_untouched: true,
            ..std::mem::take(self)
        })
    }

    fn left(&self) -> &[u8] {
        self.octets.get(self.written..).unwrap_or_default()
    }

    /// Ready when the request is sent, or cannot be.
    pub(super) fn poll_send(
        &mut self,
        stream: &mut (impl AsyncWrite + Unpin),
        cx: &mut Context<'_>,
    ) -> Poll<Result<(), Unsent>> {
        loop {
            let is_all_here = self.poll_gather(cx).map_err(Unsent::Body)?.is_ready();
            let Some(()) = ready!(self.poll_write(stream, cx).map_err(Unsent::Stream))? else {
                return if is_all_here {
                    Poll::Ready(Ok(()))
                } else {
                    Poll::Pending
                };
            };
        }
    }

    /// Writes some of what is here; `None` if there is nothing left to write.
    fn poll_write(
        &mut self,
        stream: &mut (impl AsyncWrite + Unpin),
        cx: &mut Context<'_>,
    ) -> Poll<io::Result<Option<()>>> {
        if self.left().is_empty() {
            if self.is_unflushed {
                ready!(Pin::new(stream).poll_flush(cx))?;
                self.is_unflushed = false;
            }
            return Poll::Ready(Ok(None));
        }
        let first = if self.is_untouched {
            RECORD_BYTES
        } else {
            usize::MAX
        };
        let left = self.left();
        let octets = left.get(..first).unwrap_or(left);
        let written = ready!(Pin::new(stream).poll_write(cx, octets))?;
        if written == 0 {
            return Poll::Ready(Err(io::ErrorKind::WriteZero.into()));
        }
        self.is_untouched = false;
        if self.is_repeatable {
            self.written += written;
        } else {
            self.octets.advance(written);
        }
        self.is_unflushed = true;
        Poll::Ready(Ok(Some(())))
    }

    /// Takes what has come of the body, but not too much; ready when that is all.
    fn poll_gather(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        while let Some((body, framing)) = &mut self.body {
            if self.octets.len() >= WRITE_BYTES {
                return Poll::Pending;
            }
            let frame = ready!(Pin::new(&mut *body).poll_frame(cx));
            match frame.transpose().map_err(io::Error::other)? {
                Some(frame) => {
                    framing.write(frame, &mut self.octets)?;
                    // The end of a body of a known length is told later than its last byte, and perhaps than the answer.
                    if matches!(framing, Framing::Length(0)) {
                        self.body = None;
                    }
                }
                None => {
                    framing.finish(&mut self.octets)?;
                    self.body = None;
                }
            }
        }
        Poll::Ready(Ok(()))
    }

    /// Forgets what has not been sent.
    pub(super) fn give_up(&mut self) {
        self.octets.clear();
        self.written = 0;
        self.is_unflushed = false;
        self.is_repeatable = false;
        self.body = None;
    }
}

#[cfg(test)]
mod tests {
    use std::task::Waker;

    use http::request::Builder;

    use super::*;

    /// Takes so many octets, and has been closed then.
    struct Closing {
        room: usize,
        taken: Vec<u8>,
    }

    impl AsyncWrite for Closing {
        fn poll_write(
            mut self: Pin<&mut Self>,
            _: &mut Context<'_>,
            octets: &[u8],
        ) -> Poll<io::Result<usize>> {
            let count = octets.len().min(self.room);
            if count == 0 {
                return Poll::Ready(Err(io::ErrorKind::BrokenPipe.into()));
            }
            self.room -= count;
            self.taken.extend_from_slice(&octets[..count]);
            Poll::Ready(Ok(count))
        }

        fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
            Poll::Ready(Ok(()))
        }

        fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
            Poll::Ready(Ok(()))
        }
    }

    /// Takes one record, and tells of it only if there is no other, as TLS does.
    struct Recording(Vec<u8>);

    impl AsyncWrite for Recording {
        fn poll_write(
            mut self: Pin<&mut Self>,
            _: &mut Context<'_>,
            octets: &[u8],
        ) -> Poll<io::Result<usize>> {
            if self.0.is_empty() {
                self.0.extend(octets.iter().take(16 << 10));
                if self.0.len() == octets.len() {
                    return Poll::Ready(Ok(octets.len()));
                }
            }
            Poll::Ready(Err(io::ErrorKind::ConnectionReset.into()))
        }

        fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
            Poll::Ready(Ok(()))
        }

        fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
            Poll::Ready(Ok(()))
        }
    }

    fn begun(method: Method) -> Outgoing {
        begun_with(Request::builder().method(method))
    }

    fn begun_with(request: Builder) -> Outgoing {
        let mut outgoing = Outgoing::default();
        outgoing.begin(request.uri("/p").body(Upload::nothing()).unwrap(), None);
        outgoing
    }

    /// What a stream with this much room takes of `outgoing`.
    fn sent(outgoing: &mut Outgoing, room: usize) -> String {
        let mut stream = Closing {
            room,
            taken: Vec::new(),
        };
        let _ = outgoing.poll_send(&mut stream, &mut Context::from_waker(Waker::noop()));
        String::from_utf8(stream.taken).unwrap()
    }

    #[test]
    fn what_nobody_took_is_sent_again() {
        let mut outgoing = begun(Method::POST);
        assert_eq!(sent(&mut outgoing, 0), "");
        let mut again = outgoing.take_again().unwrap();
        assert_eq!(sent(&mut again, 100), "POST /p HTTP/1.1\r\n\r\n");
        assert!(again.take_again().is_none());
    }

    #[test]
    fn of_what_tls_has_sent_a_part_nothing_is_sent_again() {
        let long = "x".repeat(20 << 10);
        let request = Request::builder().method(Method::POST).header("x", long);
        let mut outgoing = begun_with(request);
        let mut stream = Recording(Vec::new());
        let sent = outgoing.poll_send(&mut stream, &mut Context::from_waker(Waker::noop()));
        assert!(matches!(sent, Poll::Ready(Err(Unsent::Stream(_)))));
        assert!(stream.0.starts_with(b"POST /p "));
        assert!(outgoing.take_again().is_none());
    }

    #[test]
    fn what_may_be_repeated_is_sent_again_whole() {
        for room in [1, 100] {
            let mut outgoing = begun(Method::GET);
            assert_eq!(sent(&mut outgoing, room).len(), room.min(19));
            let mut again = outgoing.take_again().unwrap();
            assert_eq!(sent(&mut again, 100), "GET /p HTTP/1.1\r\n\r\n");
            assert!(again.is_over());
        }
        let mut outgoing = begun(Method::POST);
        sent(&mut outgoing, 1);
        assert!(outgoing.take_again().is_none());
    }
}
