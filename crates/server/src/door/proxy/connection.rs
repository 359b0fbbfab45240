//! A client's connection: its requests, one after the other, until either side has had enough.

use std::{
    convert::Infallible,
    pin::{Pin, pin},
    sync::Arc,
    task::{Context, Poll},
};

use hyper::{
    Request, Response,
    body::{Body, Frame, Incoming, SizeHint},
    server::conn::http1,
    service::service_fn,
};
use hyper_util::rt::TokioIo;
use tokio::net::TcpStream;
use tower_service::Service;

use super::{
    client_stream::{ClientStream, Taken, Turn},
    tunnel::Planned,
};
use crate::{config::Proxy, net::Connection};

/// What is known of a client before its first request.
pub(super) struct Client {
    pub(super) connection: Connection,
    pub(super) settings: Arc<Proxy>,
    pub(super) planned: Planned,
}

impl Client {
    /// Serves `stream` with `service`.
    pub(super) async fn serve<S, B>(self, stream: TcpStream, service: S)
    where
        S: Service<Request<Incoming>, Response = Response<B>, Error = Infallible> + Clone,
        B: Body + Unpin + 'static,
        B::Error: std::error::Error + Send + Sync + 'static,
    {
        let Self {
            connection,
            settings,
            planned,
        } = self;
        let turn = Turn::default();
        let stream = ClientStream::new(stream, settings.timeouts, turn.clone());
        let answering = service_fn(|request| {
            let taken = turn.take();
            // The service is always ready.
            let answering = service.clone().call(request);
            async move {
                let answer = answering.await?;
                Ok::<_, Infallible>(answer.map(|body| Answered {
                    body,
                    _taken: taken,
                }))
            }
        });
        let serving = http1::Builder::new()
            // The stream keeps the time.
            .header_read_timeout(None)
            .max_buf_size(settings.max_head)
            .max_headers(settings.max_headers)
            .serve_connection(TokioIo::new(stream), answering)
            .with_upgrades();
        let serving = pin!(serving);
        let ended = connection
            .shutdown
            .serve(serving, |serving| serving.graceful_shutdown())
            .await;
        if let Err(error) = ended {
            // Whoever broke the connection off knows; for the operator it is no news.
            tracing::debug!(peer = %connection.peer, "connection ended: {error}");
        }
        if let Some(tunnel) = planned.take() {
            // As long as it lasts, it is nobody's turn.
            let _taken = turn.take();
            if let Err(error) = tunnel.carry(settings.timeouts.upgraded).await {
                tracing::debug!(peer = %connection.peer, "upgraded connection ended: {error}");
            }
        }
    }
}

/// The body of an answer. When it has been sent, or cannot be, it is the client's turn again.
struct Answered<B> {
    body: B,
    _taken: Taken,
}

impl<B: Body + Unpin> Body for Answered<B> {
    type Data = B::Data;
    type Error = B::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<B::Data>, B::Error>>> {
        Pin::new(&mut self.body).poll_frame(cx)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}
