//! HTTP/1.1: one request after the other, and perhaps a tunnel at the end.

use std::{cell::RefCell, convert::Infallible, pin::pin, sync::Arc};

use futures_util::TryFutureExt as _;
use http::{HeaderValue, StatusCode, header::CONNECTION};
use hyper::{
    Request, Response,
    body::{Body, Incoming},
    server::conn::http1,
    service::service_fn,
};
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncWrite};
use tower_service::Service;

use super::{
    super::{
        client_stream::{ClientStream, Turn},
        forward::WholeRequest,
    },
    Client,
};
use crate::net::{Held, MAX_HEADERS};

impl Client {
    pub(super) async fn serve_http1<T, S, B>(self, stream: T, service: S) -> hyper::Result<()>
    where
        T: AsyncRead + AsyncWrite + Unpin + Send + 'static,
        S: Service<Request<Incoming>, Response = Response<B>, Error = Infallible> + Clone + 'static,
        B: Body + Unpin + 'static,
        B::Error: std::error::Error + Send + Sync + 'static,
    {
        let turn = Turn::default();
        let rejected = Arc::clone(&self.rejected);
        let stream = ClientStream::new(stream, self.settings.timeouts, turn.clone(), rejected);
        // There is one request at a time, so that one service does for them all.
        let service = RefCell::new(service);
        let answering = service_fn(|mut request: Request<Incoming>| {
            let taken = (
                turn.take(),
                self.count(&mut request),
                self.connection.activity.begin(),
            );
            let is_chunked = request.body().size_hint().exact().is_none();
            let answering = service.borrow_mut().call(request);
            // When it has been sent, or cannot be, it is the client's turn again.
            answering.map_ok(move |mut answer| {
                if is_chunked {
                    close_unless_whole(&mut answer);
                }
                answer.map(|body| Held::new(body, taken))
            })
        });
        let mut builder = http1::Builder::new();
        if self.settings.max_headers != MAX_HEADERS {
            builder.max_headers(self.settings.max_headers);
        }
        let serving = builder
            // The stream keeps the time.
            .header_read_timeout(None)
            .max_buf_size(self.settings.max_head)
            // To copy a body's piece behind its head costs less than to tell the system of both.
            .writev(false)
            .serve_connection(TokioIo::new(stream), answering)
            .with_upgrades();
        let serving = pin!(serving);
        let shutdown = &self.connection.shutdown;
        let ended = shutdown
            .serve(serving, |serving| serving.graceful_shutdown())
            .await;
        self.carry_on(&turn).await;
        ended
    }
}

/// Ends the connection with this answer to a chunked request, unless all of the request was read and it had no trailers.
///
/// hyper 1.12 takes trailers that end in LF LF to go on to the next CR LF CR LF, and drops the request that stands between. A
/// client is told by `Connection: close` that such a request was not read: RFC 9112, section 9.6.
fn close_unless_whole<B>(answer: &mut Response<B>) {
    let is_switch = answer.status() == StatusCode::SWITCHING_PROTOCOLS;
    if !is_switch && answer.extensions().get::<WholeRequest>().is_none() {
        answer
            .headers_mut()
            .insert(CONNECTION, HeaderValue::from_static("close"));
    }
}
