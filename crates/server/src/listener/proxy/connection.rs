//! A client connection: protocol detection, and its requests until either side closes.

mod http1;
mod http2;
mod introduced;
mod version;

use std::{convert::Infallible, io, sync::Arc};

use hyper::{
    Request, Response,
    body::{Body, Incoming},
};
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::TcpStream,
    time::timeout,
};
use tower_service::Service;

use self::{introduced::Introduced, version::Version};
use super::{
    client_stream::Turn,
    clients::{Begun, Excess, InFlight},
    rejected::Rejected,
    tunnel::Planned,
};
use crate::{
    config::Proxy,
    net::{Connection, Tls},
};

/// The context of a client connection.
pub(super) struct Client {
    pub(super) connection: Connection,
    pub(super) settings: Arc<Proxy>,
    pub(super) tls: Option<Arc<Tls>>,
    pub(super) planned: Planned,
    pub(super) rejected: Arc<Rejected>,
    /// Counts the client's requests in flight, if they are limited.
    pub(super) in_flight: Option<Arc<InFlight>>,
}

impl Client {
    /// Serves `stream` with `service`, which must always be ready.
    pub(super) async fn serve<S, B>(self, stream: TcpStream, service: S)
    where
        S: Service<Request<Incoming>, Response = Response<B>, Error = Infallible> + Clone + 'static,
        B: Body + Unpin + 'static,
        B::Data: Send,
        B::Error: std::error::Error + Send + Sync + 'static,
    {
        if let Some(tls) = &self.tls {
            if let Some(stream) = self.begun(tls.accept(stream)).await {
                let version = version::agreed(&stream);
                let service = Introduced::new(&stream, service);
                self.serve_as(version, stream, service).await;
            }
        } else if let Some(version) = self.begun(version::of(&stream)).await {
            self.serve_as(version, stream, service).await;
        }
    }

    /// Waits for the first bytes or the TLS handshake. Returns `None` on an error, a timeout or a
    /// shutdown.
    async fn begun<T>(&self, beginning: impl Future<Output = io::Result<T>>) -> Option<T> {
        let peer = self.connection.peer;
        let beginning = timeout(self.settings.timeouts.request_head, beginning);
        tokio::select! {
            biased;
            begun = beginning => match begun {
                Ok(Ok(begun)) => return Some(begun),
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
            // Debug level only: connections that clients break off are routine.
            tracing::debug!(%peer, "connection ended: {error}");
        }
    }

    /// Counts `request` as in flight until the result is dropped. Marks it with [`Excess`] if the
    /// client is at its limit.
    fn count(&self, request: &mut Request<Incoming>) -> Option<Begun> {
        let in_flight = self.in_flight.as_ref()?;
        let most = self.settings.slow.max_requests;
        let begun = in_flight.begin(most);
        if begun.is_none() {
            request.extensions_mut().insert(Excess(most));
        }
        begun
    }

    /// Runs the tunnel, if the last request was upgraded.
    async fn carry_on(&self, turn: &Turn) {
        if let Some(tunnel) = self.planned.take() {
            // Suspends the phase timeouts for the duration of the tunnel.
            let _taken = turn.take();
            let _in_flight = self.connection.activity.begin();
            if let Err(error) = tunnel.carry(self.settings.timeouts.upgraded).await {
                tracing::debug!(peer = %self.connection.peer, "upgraded connection ended: {error}");
            }
        }
    }
}
