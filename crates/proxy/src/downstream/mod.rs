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
use tidegate_net::{Connection, MaybeMovable, Phase, Stage, StateFormat, Tls, verified_name};
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::TcpStream,
    time::{error::Elapsed, timeout},
};
use tower_service::Service;

use self::{detect::Version, mtls::MtlsService};
use super::{
    bad_request::BadRequests,
    client_limit::{ClientLimitExceeded, ClientRequest, ClientRequests},
    tunnel::PendingTunnel,
};

/// The format of the state of an HTTP/1 connection that moves to another process: the bytes that
/// were read and not used. A connection without a request moves as a new one, because its protocol
/// is not known.
const MOVED: StateFormat = StateFormat {
    protocol: b'P',
    version: 1,
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
        let connection = &self.connection;
        if let Some(tls) = connection.tls_to_accept(self.tls.as_ref()) {
            let timeout = self.settings.timeouts.request_head;
            if let Some(stream) = tls.accept_within(timeout, stream, connection).await {
                let version = detect::negotiated(&stream);
                let name = verified_name(stream.get_ref().1);
                let service = MtlsService::new(name, service);
                self.serve_as(version, stream, service, None).await;
            }
            return;
        }
        let relayed = connection.handover.relayed.as_ref();
        let name = relayed.and_then(|client| client.name.clone());
        let service = MtlsService::new(name, service);
        let Some(state) = &connection.handover.resumed else {
            return self.detect(stream, service).await;
        };
        let Some(unread) = MOVED.strip(state).map(<[u8]>::to_vec) else {
            return connection.log_unknown_state();
        };
        self.serve_as(Version::Http1, stream, service, Some(unread))
            .await;
    }

    /// Serves a plaintext or relayed connection, from which nothing has been read.
    async fn detect<S, B>(self, stream: TcpStream, service: S)
    where
        S: Service<Request<Incoming>, Response = Response<B>, Error = Infallible> + Clone + 'static,
        B: Body + Unpin + 'static,
        B::Data: Send,
        B::Error: std::error::Error + Send + Sync + 'static,
    {
        let shutdown = &self.connection.shutdown;
        let handover = &self.connection.handover;
        let movable = handover.movable::<TcpStream>(shutdown);
        let request_head = self.settings.timeouts.request_head;
        let must_hand_over = |stage: Stage| stage.must_hand_over(movable.as_ref());
        let must_end = |stage: Stage| must_hand_over(stage) || stage.must_close(movable.as_ref());
        let started = tokio::select! {
            biased;
            stage = shutdown.reached(must_end) => {
                if let Some(movable) = movable.filter(|_| stage.is_handing_over()) {
                    movable.hand_over(stream, Vec::new());
                }
                return;
            }
            started = timeout(request_head, detect::peek(&stream)) => started,
        };
        drop(movable);
        if let Some(version) = self.log_start(started) {
            self.serve_as(version, stream, service, None).await;
        }
    }

    /// Returns the result, and logs the reason if there is none.
    fn log_start<T>(&self, started: Result<io::Result<T>, Elapsed>) -> Option<T> {
        let peer = self.connection.peer;
        match started {
            Ok(Ok(started)) => return Some(started),
            Ok(Err(error)) => tracing::debug!(%peer, "no request received: {error}"),
            Err(_) => tracing::debug!(%peer, "no request received in time"),
        }
        None
    }

    /// Serves a connection. `unread` are the bytes that another process has read from an HTTP/1
    /// connection and not used; `None` for a new connection.
    async fn serve_as<T, S, B>(
        self,
        version: Version,
        stream: T,
        service: S,
        unread: Option<Vec<u8>>,
    ) where
        T: AsyncRead + AsyncWrite + MaybeMovable + Unpin + Send + 'static,
        S: Service<Request<Incoming>, Response = Response<B>, Error = Infallible> + Clone + 'static,
        B: Body + Unpin + 'static,
        B::Data: Send,
        B::Error: std::error::Error + Send + Sync + 'static,
    {
        let peer = self.connection.peer;
        let ended = match version {
            Version::Http1 => self.serve_http1(stream, service, unread).await,
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
            // The guard suspends the connection's phase timeouts for the duration of the tunnel.
            let _phase = phase.begin_response();
            let _in_flight = self.connection.activity.begin();
            if let Err(error) = tunnel.run(self.settings.timeouts.upgraded).await {
                tracing::debug!(peer = %self.connection.peer, "upgraded connection ended: {error}");
            }
        }
    }
}
