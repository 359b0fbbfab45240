//! A request on its way to an upstream: its head, and its body while it comes.

use std::{
    io,
    pin::Pin,
    task::{Context, Poll, ready},
};

use bytes::{Buf as _, BytesMut};
use http::Request;
use hyper::body::Body as _;
use tokio::io::AsyncWrite;

use super::{super::body::Upload, framing::Framing, head};

/// How much of a request waits to be written before its body is asked for more.
const WRITE_BYTES: usize = 16 << 10;

/// What has yet to be sent.
#[derive(Default)]
pub(super) struct Outgoing {
    octets: BytesMut,
    body: Option<(Upload, Framing)>,
    is_unflushed: bool,
}

/// Why a request was not sent to its end.
pub(super) enum Unsent {
    /// Its body broke off, or is not what it was said to be.
    Body(io::Error),
    /// The upstream does not take it.
    Stream(io::Error),
}

impl Outgoing {
    /// Has `request` to send, and nothing else.
    pub(super) fn begin(&mut self, request: Request<Upload>) {
        let (head, body) = request.into_parts();
        let framing = Framing::of_request(&head.headers, &body);
        head::write(&head, &framing, &mut self.octets);
        self.body = (!matches!(framing, Framing::Nothing)).then_some((body, framing));
    }

    /// Whether all of it is sent.
    pub(super) fn is_over(&self) -> bool {
        self.body.is_none() && self.octets.is_empty()
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
        if self.octets.is_empty() {
            if self.is_unflushed {
                ready!(Pin::new(stream).poll_flush(cx))?;
                self.is_unflushed = false;
            }
            return Poll::Ready(Ok(None));
        }
        let written = ready!(Pin::new(stream).poll_write(cx, &self.octets))?;
        if written == 0 {
            return Poll::Ready(Err(io::ErrorKind::WriteZero.into()));
        }
        self.octets.advance(written);
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
                Some(frame) => framing.write(frame, &mut self.octets)?,
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
        self.is_unflushed = false;
        if let Some((body, _)) = self.body.take() {
            body.give_up();
        }
    }
}
