//! A client connection: detects the protocol, then serves requests until either side closes.

mod detect;
mod http1;
mod http2;
mod mtls;
mod rejection;

use std::{convert::Infallible, io, sync::Arc};

use hyper::{
    Request, Response,
    body::{Body, Incoming},
};
use tidegate_config::Proxy;
use tidegate_net::{Connection, Phase, Tls};
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::TcpStream,
    time::timeout,
};
use tower_service::Service;

use self::{detect::Version, mtls::MtlsService};
use super::{
    bad_request::BadRequests,
    client_limit::{ClientLimitExceeded, ClientRequest, ClientRequests},
    tunnel::PendingTunnel,
};

/// The context of a client connection.
pub(crate) struct ClientConnection {
    pub(crate) connection: Connection,
    pub(crate) settings: Arc<Proxy>,
    pub(crate) tls: Option<Arc<Tls>>,
    pub(crate) pending_tunnel: PendingTunnel,
    pub(crate) bad_requests: Arc<BadRequests>,
    /// Counts the client's requests in flight, if they are limited.
    pub(crate) in_flight: Option<Arc<ClientRequests>>,
}

impl ClientConnection {
    /// Serves `stream` with `service`. The service must always be ready.
    pub(crate) async fn serve<S, B>(self, stream: TcpStream, service: S)
    where
        S: Service<Request<Incoming>, Response = Response<B>, Error = Infallible> + Clone + 'static,
        B: Body + Unpin + 'static,
        B::Data: Send,
        B::Error: std::error::Error + Send + Sync + 'static,
    {
        if let Some(tls) = &self.tls {
            if let Some(stream) = self.await_start(tls.accept(stream)).await {
                let version = detect::negotiated(&stream);
                let service = MtlsService::new(&stream, service);
                self.serve_as(version, stream, service).await;
            }
        } else if let Some(version) = self.await_start(detect::peek(&stream)).await {
            self.serve_as(version, stream, service).await;
        }
    }

    /// Waits for the first bytes or the TLS handshake. Returns `None` on an error, a timeout or a
    /// shutdown.
    async fn await_start<T>(&self, beginning: impl Future<Output = io::Result<T>>) -> Option<T> {
        let peer = self.connection.peer;
        let beginning = timeout(self.settings.timeouts.request_head, beginning);
        tokio::select! {
            biased;
            started = beginning => match started {
                Ok(Ok(started)) => return Some(started),
                Ok(Err(error)) => tracing::debug!(%peer, "no request received: {error}"),
                Err(_) => tracing::debug!(%peer, "no request received in time"),
            },
            () = self.connection.shutdown.begun() => {}
        }
        None
    }

    async fn serve_as<T, S, B>(self, version: Version, stream: T, service: S)
    where
        T: AsyncRead + AsyncWrite + Unpin + Send + 'static,
        S: Service<Request<Incoming>, Response = Response<B>, Error = Infallible> + Clone + 'static,
        B: Body + Unpin + 'static,
        B::Data: Send,
        B::Error: std::error::Error + Send + Sync + 'static,
    {
        let peer = self.connection.peer;
        let ended = match version {
            Version::Http1 => self.serve_http1(stream, service).await,
            Version::Http2 => self.serve_http2(stream, service).await,
        };
        if let Err(error) = ended {
            // Log only at debug level, because clients abort connections routinely.
            tracing::debug!(%peer, "connection ended: {error}");
        }
    }

    /// Counts `request` as in flight until the returned value is dropped. If the client is at its
    /// limit, marks the request with [`ClientLimitExceeded`] instead.
    fn count_request(&self, request: &mut Request<Incoming>) -> Option<ClientRequest> {
        let in_flight = self.in_flight.as_ref()?;
        let max = self.settings.slow.max_requests;
        let counted = in_flight.try_begin(max);
        if counted.is_none() {
            request.extensions_mut().insert(ClientLimitExceeded(max));
        }
        counted
    }

    /// Runs the tunnel, if the last request was an upgrade.
    async fn run_tunnel(&self, phase: &Phase) {
        if let Some(tunnel) = self.pending_tunnel.take() {
            // This guard suspends the connection's phase timeouts for the duration of the tunnel.
            let _phase = phase.begin_response();
            let _in_flight = self.connection.activity.begin();
            if let Err(error) = tunnel.run(self.settings.timeouts.upgraded).await {
                tracing::debug!(peer = %self.connection.peer, "upgraded connection ended: {error}");
            }
        }
    }
}
