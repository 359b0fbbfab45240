//! A request being sent to an upstream: its head, and its body as it arrives.

use std::{
    io,
    pin::Pin,
    task::{Context, Poll, ready},
};

use bytes::{Buf as _, BytesMut};
use http::{Method, Request};
use hyper::body::Body as _;
use tokio::io::AsyncWrite;

use super::{framing::Framing, head};
use crate::{
    headers::forwarded::ForwardingHeaders, request_body::Upload,
    upstream::repeatable::is_repeatable,
};

/// The number of buffered bytes at which the writer stops polling the body.
const WRITE_BYTES: usize = 16 << 10;

/// The maximum size in bytes of the first write: one TLS record, which reaches the upstream
/// completely or not at all. If a write of several records failed, the first record might already
/// have been delivered.
const RECORD_BYTES: usize = 16 << 10;

/// The unsent part of a request.
#[derive(Default)]
pub(crate) struct RequestWriter {
    buffer: BytesMut,
    /// The number of sent bytes at the start of `buffer`. A repeatable request keeps its sent bytes
    /// for a retry.
    written: usize,
    body: Option<(Upload, Framing)>,
    is_unflushed: bool,
    /// Whether nothing has been written yet.
    is_untouched: bool,
    /// Whether the request may be sent twice, because it is idempotent and has no body.
    is_repeatable: bool,
    /// Whether the request is a `HEAD`, whose response has no body.
    is_head: bool,
}

/// The reason why only part of a request was sent.
pub(super) enum WriteError {
    /// The client aborted the body, or the body contradicts its declared length.
    Body(io::Error),
    /// The upstream does not accept the bytes.
    Stream(io::Error),
}

impl RequestWriter {
    /// Sets `request` as the request to send, and drops any previous request. `client` provides the
    /// forwarding headers.
    pub(super) fn start(&mut self, request: Request<Upload>, client: Option<&ForwardingHeaders>) {
        let (mut head, body) = request.into_parts();
        let framing = Framing::of_request(&head.headers, &body);
        self.buffer.clear();
        self.written = 0;
        head::write(&mut head, client, &framing, &mut self.buffer);
        self.body = (!matches!(framing, Framing::Nothing)).then_some((body, framing));
        self.is_untouched = true;
        self.is_repeatable = is_repeatable(&head.method, self.body.is_some());
        self.is_head = head.method == Method::HEAD;
    }

    /// Returns whether the whole request has been written.
    pub(super) fn is_written(&self) -> bool {
        self.body.is_none() && self.unwritten().is_empty()
    }

    /// Returns whether the whole request has been written and flushed.
    pub(super) fn is_sent(&self) -> bool {
        self.is_written() && !self.is_unflushed
    }

    /// Returns whether nothing has been written yet.
    pub(super) const fn is_untouched(&self) -> bool {
        self.is_untouched
    }

    /// Returns whether the request is a `HEAD`, whose response has no body.
    pub(super) const fn is_head(&self) -> bool {
        self.is_head
    }

    /// Takes the request for another connection, if no part of it has been written or if it may be
    /// sent twice.
    pub(super) fn take_for_retry(&mut self) -> Option<Self> {
        (self.is_untouched || self.is_repeatable).then(|| Self {
            written: 0,
            is_unflushed: false,
            is_untouched: true,
            ..std::mem::take(self)
        })
    }

    fn unwritten(&self) -> &[u8] {
        self.buffer.get(self.written..).unwrap_or_default()
    }

    /// Sends the request. Becomes ready when the request is sent or the attempt has failed.
    pub(super) fn poll_send(
        &mut self,
        stream: &mut (impl AsyncWrite + Unpin),
        cx: &mut Context<'_>,
    ) -> Poll<Result<(), WriteError>> {
        loop {
            let is_complete = self.poll_fill(cx).map_err(WriteError::Body)?.is_ready();
            let Some(()) = ready!(self.poll_write(stream, cx).map_err(WriteError::Stream))? else {
                return if is_complete {
                    Poll::Ready(Ok(()))
                } else {
                    Poll::Pending
                };
            };
        }
    }

    /// Writes some of the buffered bytes. Returns `None` if all bytes are written and flushed.
    fn poll_write(
        &mut self,
        stream: &mut (impl AsyncWrite + Unpin),
        cx: &mut Context<'_>,
    ) -> Poll<io::Result<Option<()>>> {
        if self.unwritten().is_empty() {
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
        let unwritten = self.unwritten();
        let buffer = unwritten.get(..first).unwrap_or(unwritten);
        let written = ready!(Pin::new(stream).poll_write(cx, buffer))?;
        if written == 0 {
            return Poll::Ready(Err(io::ErrorKind::WriteZero.into()));
        }
        self.is_untouched = false;
        if self.is_repeatable {
            self.written += written;
        } else {
            self.buffer.advance(written);
        }
        self.is_unflushed = true;
        Poll::Ready(Ok(Some(())))
    }

    /// Buffers available frames of the body, up to [`WRITE_BYTES`]. Becomes ready at the end of the
    /// body.
    fn poll_fill(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        while let Some((body, framing)) = &mut self.body {
            if self.buffer.len() >= WRITE_BYTES {
                return Poll::Pending;
            }
            let frame = ready!(Pin::new(&mut *body).poll_frame(cx));
            match frame.transpose().map_err(io::Error::other)? {
                Some(frame) => {
                    framing.write(frame, &mut self.buffer)?;
                    // Do not wait for the end of a body of known length. The end may be reported
                    // long after the last byte, perhaps only after the response.
                    if matches!(framing, Framing::Length(0)) {
                        self.body = None;
                    }
                }
                None => {
                    framing.finish(&mut self.buffer)?;
                    self.body = None;
                }
            }
        }
        Poll::Ready(Ok(()))
    }

    /// Discards the unsent part of the request.
    pub(super) fn discard(&mut self) {
        self.buffer.clear();
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

    /// A stream that accepts `room` bytes and then fails like a closed stream.
    struct ClosingStream {
        room: usize,
        received: Vec<u8>,
    }

    impl AsyncWrite for ClosingStream {
        fn poll_write(
            mut self: Pin<&mut Self>,
            _: &mut Context<'_>,
            buffer: &[u8],
        ) -> Poll<io::Result<usize>> {
            let count = buffer.len().min(self.room);
            if count == 0 {
                return Poll::Ready(Err(io::ErrorKind::BrokenPipe.into()));
            }
            self.room -= count;
            self.received.extend_from_slice(&buffer[..count]);
            Poll::Ready(Ok(count))
        }

        fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
            Poll::Ready(Ok(()))
        }

        fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
            Poll::Ready(Ok(()))
        }
    }

    /// A stream that accepts one TLS record of 16 KiB. If there is more to write, the stream
    /// reports an error after the record, as a TLS stream does.
    struct OneRecordStream(Vec<u8>);

    impl AsyncWrite for OneRecordStream {
        fn poll_write(
            mut self: Pin<&mut Self>,
            _: &mut Context<'_>,
            buffer: &[u8],
        ) -> Poll<io::Result<usize>> {
            if self.0.is_empty() {
                self.0.extend(buffer.iter().take(16 << 10));
                if self.0.len() == buffer.len() {
                    return Poll::Ready(Ok(buffer.len()));
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

    fn writer_for(method: Method) -> RequestWriter {
        writer_with(Request::builder().method(method))
    }

    fn writer_with(request: Builder) -> RequestWriter {
        let mut writer = RequestWriter::default();
        writer.start(request.uri("/p").body(Upload::empty()).unwrap(), None);
        writer
    }

    /// Sends the request of `writer` on a stream that accepts `room` bytes, and returns the bytes
    /// that the stream received.
    fn sent(writer: &mut RequestWriter, room: usize) -> String {
        let mut stream = ClosingStream {
            room,
            received: Vec::new(),
        };
        let _ = writer.poll_send(&mut stream, &mut Context::from_waker(Waker::noop()));
        String::from_utf8(stream.received).unwrap()
    }

    #[test]
    fn an_unsent_request_is_resent() {
        let mut writer = writer_for(Method::POST);
        assert_eq!(sent(&mut writer, 0), "");
        let mut again = writer.take_for_retry().unwrap();
        assert_eq!(sent(&mut again, 100), "POST /p HTTP/1.1\r\n\r\n");
        assert!(again.take_for_retry().is_none());
    }

    #[test]
    fn a_request_partly_sent_over_tls_is_not_resent() {
        let long = "x".repeat(20 << 10);
        let request = Request::builder().method(Method::POST).header("x", long);
        let mut writer = writer_with(request);
        let mut stream = OneRecordStream(Vec::new());
        let sent = writer.poll_send(&mut stream, &mut Context::from_waker(Waker::noop()));
        assert!(matches!(sent, Poll::Ready(Err(WriteError::Stream(_)))));
        assert!(stream.0.starts_with(b"POST /p "));
        assert!(writer.take_for_retry().is_none());
    }

    #[test]
    fn a_repeatable_request_is_resent_completely() {
        for room in [1, 100] {
            let mut writer = writer_for(Method::GET);
            assert_eq!(sent(&mut writer, room).len(), room.min(19));
            let mut again = writer.take_for_retry().unwrap();
            assert_eq!(sent(&mut again, 100), "GET /p HTTP/1.1\r\n\r\n");
            assert!(again.is_written());
        }
        let mut writer = writer_for(Method::POST);
        sent(&mut writer, 1);
        assert!(writer.take_for_retry().is_none());
    }
}
