//! Adds explanations to hyper's own replies to invalid HTTP/1.1 requests.

use std::{
    io,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
};

use bytes::{Buf as _, Bytes};
use tidegate_net::TimedStream;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use crate::bad_request::BadRequests;

/// The stream to an HTTP/1.1 client. If hyper rejects a request head, this stream adds an
/// explanation to hyper's reply.
#[derive(Debug)]
pub(super) struct RejectionStream<S> {
    stream: TimedStream<S>,
    bad_requests: Arc<BadRequests>,
    /// The unwritten part of hyper's reply with the explanation added. The proxy sends these bytes
    /// instead of hyper's reply.
    rejection: Option<Bytes>,
}

impl<S> RejectionStream<S> {
    /// Wraps `stream`. The caller must begin a response phase on the stream for each response.
    pub(super) const fn new(stream: TimedStream<S>, bad_requests: Arc<BadRequests>) -> Self {
        Self {
            stream,
            bad_requests,
            rejection: None,
        }
    }

    pub(super) fn into_stream(self) -> TimedStream<S> {
        self.stream
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for RejectionStream<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(cx, buffer)
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for RejectionStream<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let this = &mut *self;
        // If the proxy is not sending a response, the bytes must be hyper's own reply to an invalid
        // head.
        if this.rejection.is_none() && !this.stream.phase().is_response_due() {
            this.rejection = this.bad_requests.explain(bytes);
        }
        let Some(rejection) = &mut this.rejection else {
            return Pin::new(&mut this.stream).poll_write(cx, bytes);
        };
        while rejection.has_remaining() {
            let written = ready!(Pin::new(&mut this.stream).poll_write(cx, rejection))?;
            if written == 0 {
                return Poll::Ready(Ok(0));
            }
            rejection.advance(written);
        }
        this.rejection = None;
        Poll::Ready(Ok(bytes.len()))
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        pieces: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write_vectored(cx, pieces)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}
