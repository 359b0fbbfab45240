//! Serves one HTTP/2 connection, with limits, keepalive, a maximum connection age and graceful
//! shutdown.

use std::{sync::Arc, time::Duration};

use hyper::{body::Incoming, server::conn::http2, service::service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use tidegate_config::Grpc;
use tidegate_net::{
    Connection, GuardedBody, Http2Stream, LocalExecutor, StreamTimeouts, Tls, WriteTimeout,
};
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::TcpStream,
    time::timeout,
};

use super::routes::GrpcRoutes;

/// The maximum total size of the headers of a call, in bytes.
const MAX_HEADER_BYTES: u32 = 16 << 10;

/// The maximum number of bytes that a connection buffers for sending.
const MAX_SEND_BYTES: usize = 64 << 10;

/// The size of the HTTP/2 flow-control window of a call (stream), in bytes.
const STREAM_WINDOW: u32 = 64 << 10;
/// The size of the HTTP/2 flow-control window of a connection, in bytes.
const CONNECTION_WINDOW: u32 = 1 << 20;

/// The HTTP/2 and TLS settings of the gRPC listener.
#[derive(Debug)]
pub struct Http2 {
    settings: Grpc,
    tls: Option<Arc<Tls>>,
}

impl Http2 {
    /// Creates the settings. Without `tls`, connections are plaintext.
    #[must_use]
    pub const fn new(settings: Grpc, tls: Option<Arc<Tls>>) -> Self {
        Self { settings, tls }
    }

    /// Serves a connection until either side closes the connection or it reaches its maximum age.
    /// During a shutdown, the connection is served until the calls in flight have completed.
    pub(super) async fn serve(
        &self,
        stream: TcpStream,
        connection: &Connection,
        routes: Arc<GrpcRoutes>,
    ) {
        let Some(tls) = connection.tls_to_accept(self.tls.as_ref()) else {
            return self.serve_on(stream, connection, routes).await;
        };
        if let Some(stream) = tls.accept_in_time(stream, connection).await {
            self.serve_on(stream, connection, routes).await;
        }
    }

    async fn serve_on<S>(&self, stream: S, connection: &Connection, routes: Arc<GrpcRoutes>)
    where
        S: AsyncRead + AsyncWrite + Unpin + 'static,
    {
        let (bounds, peer) = (connection.bounds, connection.peer.ip());
        let service = service_fn(|request: hyper::Request<Incoming>| {
            let routes = Arc::clone(&routes);
            let in_flight = connection.activity.begin();
            async move {
                let answer = routes.answer(request, peer, bounds.request).await;
                // A streaming call counts as in flight until its last message is sent.
                answer.map(|answer| answer.map(|body| GuardedBody::new(body, in_flight)))
            }
        });
        let timeouts = StreamTimeouts {
            idle: bounds.idle,
            request: bounds.request,
            write: WriteTimeout::Stall(bounds.write),
        };
        let stream = Http2Stream::new(stream, timeouts, connection.activity.clone());
        let serving = self
            .builder()
            .serve_connection(TokioIo::new(stream), service);
        let mut serving = std::pin::pin!(serving);
        let ended = tokio::select! {
            biased;
            ended = serving.as_mut() => Ok(ended),
            () = connection.shutdown_begun() => {
                serving.as_mut().graceful_shutdown();
                tokio::select! {
                    biased;
                    ended = serving => Ok(ended),
                    // The client may never react to the GOAWAY, so the connection also closes once
                    // no call is in flight.
                    () = connection.activity.drained() => Ok(Ok(())),
                }
            }
            () = tokio::time::sleep(self.age(connection)) => {
                serving.as_mut().graceful_shutdown();
                timeout(self.settings.max_connection_age_grace, serving).await
            }
        };
        match ended {
            Ok(Ok(())) => {}
            // Log at debug level only, because clients routinely abort connections.
            Ok(Err(error)) => tracing::debug!(peer = %connection.peer, "connection ended: {error}"),
            Err(_) => {
                tracing::debug!(peer = %connection.peer, "connection closed: it reached its maximum age")
            }
        }
    }

    fn builder(&self) -> http2::Builder<LocalExecutor> {
        let mut builder = http2::Builder::new(LocalExecutor);
        builder
            .timer(TokioTimer::new())
            .max_concurrent_streams(self.settings.max_streams)
            .max_header_list_size(MAX_HEADER_BYTES)
            .max_send_buf_size(MAX_SEND_BYTES)
            .initial_stream_window_size(STREAM_WINDOW)
            .initial_connection_window_size(CONNECTION_WINDOW)
            .keep_alive_interval(self.settings.keep_alive)
            .keep_alive_timeout(self.settings.keep_alive_timeout)
            .auto_date_header(false);
        builder
    }

    /// Returns the maximum age of this connection, which is the configured age ±10 %. The variation
    /// prevents clients that connected at the same time from reconnecting at the same time.
    fn age(&self, connection: &Connection) -> Duration {
        let tenth = self.settings.max_connection_age / 10;
        // `spread` is from 0 to 20, which means -10 % to +10 %. A client usually uses consecutive
        // port numbers, so the port number distributes the ages of its connections evenly.
        let spread = u32::from(connection.peer.port()) % 21;
        self.settings.max_connection_age - tenth + tenth / 10 * spread
    }
}
