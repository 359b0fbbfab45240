//! The connection to a control plane: TCP, TLS and HTTP/2.
//!
//! tonic's client, `Channel`, is not used. `Channel` has its own reconnection logic and depends on
//! several additional crates. This client has only one stream, for which a single hyper HTTP/2
//! connection is sufficient.

use std::{
    future::Future,
    io,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use http::{Request, Response, Uri, uri::Scheme};
use hyper::{body::Incoming, client::conn::http2};
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use rustls::pki_types::ServerName;
use tidegate_config::envoy::XdsConfig;
use tidegate_net::{ClientTlsError, client_config};
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::TcpStream,
    task::JoinHandle,
    time::timeout,
};
use tokio_rustls::TlsConnector;
use tonic::body::Body;
use tower_service::Service;

/// The maximum size of the headers and trailers of a response, in bytes.
const MAX_HEADER_BYTES: u32 = 64 << 10;

/// The interval at which the client checks whether the peer's `SETTINGS` frame has arrived.
const SETTINGS_CHECK: Duration = Duration::from_millis(5);

const NO_HTTP2_ADVICE: &str =
    "check that the port is that of a gRPC service, and whether it expects TLS";

/// The reason why no connection was established.
#[derive(Debug, thiserror::Error)]
pub(super) enum ConnectError {
    /// No connection was established in time.
    #[error("no connection within {0:?}")]
    Timeout(Duration),
    /// The address could not be resolved or connected to.
    #[error("{0}")]
    Unreachable(#[source] io::Error),
    /// The TLS files cannot be used.
    #[error("tls: {0}")]
    Files(#[from] ClientTlsError),
    /// The name of the control plane is not a host name.
    #[error("tls: {0:?} is not a host name; set `name` to the name in its certificate")]
    Name(String),
    /// The TLS handshake failed.
    #[error("TLS handshake failed: {0}")]
    Handshake(#[source] io::Error),
    /// The peer does not speak HTTP/2.
    #[error("no HTTP/2 connection: {0}; {NO_HTTP2_ADVICE}")]
    Http2(#[from] hyper::Error),
    /// The peer closed the connection before it sent any HTTP/2 frame.
    #[error("no HTTP/2 connection: the peer has closed it; {NO_HTTP2_ADVICE}")]
    Closed,
}

/// An HTTP/2 connection. Dropping this value closes the connection.
#[derive(Debug)]
pub(super) struct XdsConnection {
    sender: http2::SendRequest<Body>,
    driver: JoinHandle<()>,
}

impl Drop for XdsConnection {
    fn drop(&mut self) {
        self.driver.abort();
    }
}

impl XdsConnection {
    /// Connects to the control plane in `config`, within its timeout. The TLS files are read for
    /// each connection, so that renewed certificates are used.
    pub(super) async fn open(config: &XdsConfig) -> Result<Self, ConnectError> {
        let within = config.connect_timeout;
        let connected = timeout(within, Self::connect(config)).await;
        connected.unwrap_or(Err(ConnectError::Timeout(within)))
    }

    async fn connect(config: &XdsConfig) -> Result<Self, ConnectError> {
        let connector = connector(config)?;
        let server = &config.server;
        let stream = TcpStream::connect((server.host.as_str(), server.port)).await;
        let stream = stream.map_err(ConnectError::Unreachable)?;
        // Ignore an error: without `nodelay`, messages are only delayed.
        let _ = stream.set_nodelay(true);
        let Some((connector, name)) = connector else {
            return Self::handshake(stream, config).await;
        };
        let stream = connector.connect(name, stream).await;
        Self::handshake(stream.map_err(ConnectError::Handshake)?, config).await
    }

    async fn handshake<S>(stream: S, config: &XdsConfig) -> Result<Self, ConnectError>
    where
        S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    {
        let (sender, connection) = http2::Builder::new(TokioExecutor::new())
            .timer(TokioTimer::new())
            .max_header_list_size(MAX_HEADER_BYTES)
            .keep_alive_interval(config.keep_alive.interval)
            .keep_alive_timeout(config.keep_alive.timeout)
            // Do not send requests before the peer's `SETTINGS` frame has arrived.
            .initial_max_send_streams(0)
            .handshake(TokioIo::new(stream))
            .await?;
        let mut connection = Box::pin(connection);
        // The `SETTINGS` frame proves that the peer speaks HTTP/2. hyper does not wait for it, so
        // wait here.
        while connection.current_max_send_streams() == 0 {
            if let Ok(end) = timeout(SETTINGS_CHECK, &mut connection).await {
                end?;
                return Err(ConnectError::Closed);
            }
        }
        let driver = tokio::spawn(async move {
            // The stream on this connection reports the same error.
            drop(connection.await);
        });
        Ok(Self { sender, driver })
    }

    /// Returns a service that sends requests on this connection.
    pub(super) fn service(&self) -> Http2Service {
        Http2Service(self.sender.clone())
    }
}

/// Returns the origin for requests to the control plane. The configuration accepts only hosts that
/// are valid in a URL.
pub(super) fn origin(config: &XdsConfig) -> Uri {
    let scheme = match config.tls {
        Some(_) => Scheme::HTTPS,
        None => Scheme::HTTP,
    };
    let origin = Uri::builder()
        .scheme(scheme)
        .authority(config.server.to_string())
        .path_and_query("/");
    origin.build().unwrap_or_default()
}

fn connector(
    config: &XdsConfig,
) -> Result<Option<(TlsConnector, ServerName<'static>)>, ConnectError> {
    let Some(tls) = &config.tls else {
        return Ok(None);
    };
    let name = tls.name.as_ref().unwrap_or(&config.server.host);
    let server = ServerName::try_from(name.clone());
    let server = server.map_err(|_| ConnectError::Name(name.clone()))?;
    let settings = client_config(&tls.files, b"h2")?;
    Ok(Some((TlsConnector::from(Arc::new(settings)), server)))
}

/// Sends requests on one HTTP/2 connection.
#[derive(Clone, Debug)]
pub(super) struct Http2Service(http2::SendRequest<Body>);

impl Service<Request<Body>> for Http2Service {
    type Response = Response<Incoming>;
    type Error = hyper::Error;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, Self::Error>> + Send>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        self.0.poll_ready(context)
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        Box::pin(self.0.send_request(request))
    }
}
