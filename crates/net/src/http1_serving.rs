//! Serves an HTTP/1.1 connection with hyper until it is closed or can be handed over.

use std::{
    pin::Pin,
    task::{Context, Poll},
};

use super::{Activity, MovableConnection, Phase, Shutdown};

/// An HTTP/1.1 connection of hyper's server.
pub trait Http1ServerConnection: Future<Output = hyper::Result<()>> + Unpin {
    /// Ends the connection after the response to the current request, or immediately if there is
    /// none.
    fn finish(&mut self);
}

impl<I, B, S> Http1ServerConnection for hyper::server::conn::http1::Connection<I, S>
where
    S: hyper::service::HttpService<hyper::body::Incoming, ResBody = B>,
    S::Error: Into<Box<dyn std::error::Error + Send + Sync>>,
    I: hyper::rt::Read + hyper::rt::Write + Unpin,
    B: hyper::body::Body + 'static,
    B::Error: Into<Box<dyn std::error::Error + Send + Sync>>,
{
    fn finish(&mut self) {
        Pin::new(self).graceful_shutdown();
    }
}

impl<I, B, S> Http1ServerConnection for hyper::server::conn::http1::UpgradeableConnection<I, S>
where
    S: hyper::service::HttpService<hyper::body::Incoming, ResBody = B>,
    S::Error: Into<Box<dyn std::error::Error + Send + Sync>>,
    I: hyper::rt::Read + hyper::rt::Write + Unpin + Send + 'static,
    B: hyper::body::Body + 'static,
    B::Error: Into<Box<dyn std::error::Error + Send + Sync>>,
{
    fn finish(&mut self) {
        Pin::new(self).graceful_shutdown();
    }
}

/// How a connection has ended without an error.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Http1End {
    /// The connection is closed.
    Closed,
    /// The connection is between two requests, and its stream is still open. The connection must
    /// now be handed over.
    Paused,
}

/// The parts of a connection that determine when it is closed or handed over.
#[derive(Debug)]
pub struct Http1State<'c> {
    /// The phase of the connection's stream.
    pub phase: &'c Phase,
    /// The activity of the connection. The protocol code must record each request in the activity
    /// until the response is complete.
    pub activity: &'c Activity,
    /// The guard of the connection, if it can be handed over.
    pub movable: Option<&'c MovableConnection>,
}

impl Shutdown {
    /// Serves `connection` until it is closed. During a shutdown, the connection closes after the
    /// response to the current request. While the server hands over its connections, a connection
    /// that can be handed over is paused between two requests instead.
    ///
    /// The returned future must run in its own task; see [`Self::watch`].
    ///
    /// # Errors
    ///
    /// Returns hyper's error.
    pub async fn serve_http1(
        &self,
        connection: &mut impl Http1ServerConnection,
        state: Http1State<'_>,
    ) -> hyper::Result<Http1End> {
        let mut has_finished = false;
        self.watch(|cx, stage| {
            if stage.must_close(state.movable) && !has_finished {
                has_finished = true;
                connection.finish();
            }
            let is_moving = stage.must_hand_over(state.movable);
            loop {
                // A new request is not read any more if the connection can be handed over now.
                if is_moving && !has_finished && state.is_idle() {
                    if let Poll::Ready(paused) = state.pause(connection, cx) {
                        return Poll::Ready(paused);
                    }
                    // Pausing is repeated after a request that hyper had already read.
                    has_finished = state.is_idle();
                }
                if let Poll::Ready(ended) = Pin::new(&mut *connection).poll(cx) {
                    return Poll::Ready(ended.map(|()| Http1End::Closed));
                }
                if !is_moving || has_finished || !state.is_idle() {
                    return Poll::Pending;
                }
            }
        })
        .await
    }
}

impl Http1State<'_> {
    fn is_idle(&self) -> bool {
        !self.activity.is_in_flight() && !self.phase.is_write_blocked()
    }

    /// Ends hyper's part of the connection, and keeps the stream open. Returns pending if the
    /// beginning of the connection's first request has arrived, because hyper then ends the
    /// connection after the response.
    ///
    /// A connection whose last request body was not read to its end is closed, as hyper does in any
    /// case. If the connection stayed open, the other process would take the rest of the body for
    /// the next request.
    fn pause(
        &self,
        connection: &mut impl Http1ServerConnection,
        cx: &mut Context<'_>,
    ) -> Poll<hyper::Result<Http1End>> {
        // hyper notices only at its next poll that a body was dropped.
        self.phase.hold_reading(true);
        let ended = Pin::new(&mut *connection).poll(cx);
        self.phase.hold_reading(false);
        if let Poll::Ready(ended) = ended {
            return Poll::Ready(ended.map(|()| Http1End::Closed));
        }
        if !self.is_idle() {
            // hyper had already read the next request, which is now in progress.
            return Poll::Pending;
        }
        self.phase.hold_open(true);
        connection.finish();
        let ended = Pin::new(connection).poll(cx);
        if ended.is_pending() {
            self.phase.hold_open(false);
        }
        ended.map(|ended| ended.map(|()| Http1End::Paused))
    }
}
