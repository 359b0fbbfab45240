//! HTTP/1.1 connections from clients. A connection carries one request at a time, and becomes a
//! tunnel after an upgrade.

use std::{cell::RefCell, convert::Infallible, sync::Arc};

use futures_util::TryFutureExt as _;
use http::{HeaderValue, StatusCode, header::CONNECTION};
use hyper::{
    Request, Response,
    body::{Body, Incoming},
    server::conn::http1,
    service::service_fn,
};
use hyper_util::rt::TokioIo;
use tidegate_net::{
    GuardedBody, Http1End, Http1State, MAX_HEADERS, MaybeMovable, StreamTimeouts, TimedStream,
    WriteTimeout,
};
use tokio::io::{AsyncRead, AsyncWrite};
use tower_service::Service;

use super::{ClientConnection, MOVED, rejection::RejectionStream};
use crate::handler::CompleteRequest;

impl ClientConnection {
    pub(super) async fn serve_http1<T, S, B>(
        self,
        stream: T,
        service: S,
        unread: Option<Vec<u8>>,
    ) -> hyper::Result<()>
    where
        T: AsyncRead + AsyncWrite + MaybeMovable + Unpin + Send + 'static,
        S: Service<Request<Incoming>, Response = Response<B>, Error = Infallible> + Clone + 'static,
        B: Body + Unpin + 'static,
        B::Error: std::error::Error + Send + Sync + 'static,
    {
        let timeouts = self.settings.timeouts;
        // The whole head of a request must arrive within one timeout, so that a client cannot hold
        // a connection by sending one header per minute (slowloris). The request body has its own
        // timeout, in `request_body`.
        let timeouts = StreamTimeouts {
            idle: timeouts.keep_alive,
            request: timeouts.request_head,
            write: WriteTimeout::Stall(timeouts.idle),
        };
        let stream = match unread {
            None => TimedStream::new(stream, timeouts),
            Some(unread) => TimedStream::resumed(stream, timeouts, unread),
        };
        let handover = &self.connection.handover;
        let movable = handover.movable::<T>(&self.connection.shutdown);
        let phase = stream.phase().clone();
        let stream = RejectionStream::new(stream, Arc::clone(&self.bad_requests));
        // The requests of a connection arrive one at a time, so all of them can share one service.
        let service = RefCell::new(service);
        let handler = service_fn(|mut request: Request<Incoming>| {
            let guards = (
                phase.begin_response(),
                self.count_request(&mut request),
                self.connection.activity.begin(),
            );
            let is_chunked = request.body().size_hint().exact().is_none();
            let response = service.borrow_mut().call(request);
            // The response phase ends when the response body is sent or dropped.
            response.map_ok(move |mut response| {
                if is_chunked {
                    close_unless_complete(&mut response);
                }
                response.map(|body| GuardedBody::new(body, guards))
            })
        });
        let mut builder = http1::Builder::new();
        if self.settings.max_headers != MAX_HEADERS {
            builder.max_headers(self.settings.max_headers);
        }
        let shutdown = &self.connection.shutdown;
        let mut serving = builder
            // A relayed connection ends after its next response.
            .keep_alive(handover.relayed.is_none())
            // `TimedStream` enforces the head timeout.
            .header_read_timeout(None)
            .max_buf_size(self.settings.max_head)
            // Copying the first bytes of a body after the head is cheaper than a vectored write.
            .writev(false)
            .serve_connection(TokioIo::new(stream), handler)
            .with_upgrades();
        let state = Http1State {
            phase: &phase,
            activity: &self.connection.activity,
            movable: movable.as_ref(),
        };
        let ended = shutdown.serve_http1(&mut serving, state).await?;
        if let (Http1End::Paused, Some(movable)) = (ended, movable) {
            if let Some(parts) = serving.into_parts() {
                let (stream, rest) = parts.io.into_inner().into_stream().into_parts();
                let unread = [&parts.read_buf[..], &rest].concat();
                movable.hand_over(stream, [&MOVED.header()[..], &unread].concat());
            }
            return Ok(());
        }
        self.run_tunnel(&phase).await;
        Ok(())
    }
}

/// Adds `Connection: close` to the response to a chunked request, unless the request body was read
/// completely and had no trailers.
///
/// If trailers end in LF LF, hyper 1.12 continues to read until the next CR LF CR LF. If another
/// request follows, hyper drops it as part of the trailers. `Connection: close` tells the client
/// that the dropped request was not processed (RFC 9112, section 9.6).
fn close_unless_complete<B>(response: &mut Response<B>) {
    let is_switch = response.status() == StatusCode::SWITCHING_PROTOCOLS;
    if !is_switch && response.extensions().get::<CompleteRequest>().is_none() {
        response
            .headers_mut()
            .insert(CONNECTION, HeaderValue::from_static("close"));
    }
}
