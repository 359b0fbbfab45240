//! A connection to an upstream: made, asked, and answered in time.

use std::{
    future::poll_fn,
    io,
    pin::pin,
    sync::Arc,
    task::{Poll, ready},
};

use hyper::{Request, Response, body::Incoming, client::conn::http1};
use hyper_util::rt::TokioIo;
use tokio::{net::TcpStream, time::timeout};

use super::{
    address::{Address, Admitted},
    body::{Progress, Upload},
    refusal::Refusal,
    stall::Stalling,
};
use crate::{
    config::{Proxy, Timeouts},
    net::LazyTimer,
};

/// A connection that takes one request at a time.
#[derive(Debug)]
pub(super) struct Link {
    sender: http1::SendRequest<Upload>,
    /// For the heads of answers. One serves all requests of the connection.
    timer: LazyTimer,
    _admitted: Admitted,
}

/// Why a request was not answered.
pub(super) enum Unanswered {
    /// Nothing of it was sent, because the connection had been closed: here it is, whole.
    Unsent(Box<Request<Upload>>),
    /// It was sent, or some of it, and this came of it.
    Refused(Refusal),
}

impl Link {
    /// Connects to `address`.
    ///
    /// # Errors
    ///
    /// No room, nobody there, nobody in time.
    pub(super) async fn make(address: &Arc<Address>, settings: &Proxy) -> Result<Self, Refusal> {
        let admitted = address.admit().ok_or(Refusal::Full)?;
        let connecting = connect(address, settings);
        let sender = timeout(settings.timeouts.connect, connecting)
            .await
            .map_err(|_| Refusal::ConnectTimeout)?
            .map_err(|error| {
                tracing::debug!(upstream = %address.url, "cannot connect: {error}");
                Refusal::Unreachable
            })?;
        Ok(Self {
            sender,
            timer: LazyTimer::new(settings.timeouts.head),
            _admitted: admitted,
        })
    }

    /// Whether the upstream has closed it.
    pub(super) fn is_closed(&self) -> bool {
        self.sender.is_closed()
    }

    /// Whether it can take a request.
    pub(super) fn is_ready(&self) -> bool {
        self.sender.is_ready()
    }

    /// Sends `request`, and waits for the head of the answer.
    pub(super) async fn ask(
        &mut self,
        request: Request<Upload>,
        progress: &Progress,
        times: &Timeouts,
    ) -> Result<Response<Incoming>, Unanswered> {
        self.timer.set(times.head);
        let Self { sender, timer, .. } = self;
        let mut sending = pin!(sender.try_send_request(request));
        poll_fn(|cx| {
            if let Poll::Ready(answer) = sending.as_mut().poll(cx) {
                return Poll::Ready(answer.map_err(|mut error| match error.take_message() {
                    Some(request) => Unanswered::Unsent(Box::new(request)),
                    None => {
                        tracing::debug!("no answer: {}", error.into_error());
                        Unanswered::Refused(Refusal::BadAnswer)
                    }
                }));
            }
            loop {
                ready!(timer.poll_due(cx));
                // An upstream that is still being sent the body owes no answer yet.
                if !progress.is_sending() {
                    return Poll::Ready(Err(Unanswered::Refused(Refusal::HeadTimeout)));
                }
                timer.set(times.head);
            }
        })
        .await
    }
}

async fn connect(address: &Address, settings: &Proxy) -> io::Result<http1::SendRequest<Upload>> {
    let stream = TcpStream::connect((&*address.url.host, address.url.port)).await?;
    stream.set_nodelay(true)?;
    let stream = TokioIo::new(Stalling::new(stream, settings.timeouts.idle));
    let (sender, connection) = http1::Builder::new()
        .max_buf_size(settings.max_head)
        .max_headers(settings.max_headers)
        .handshake(stream)
        .await
        .map_err(io::Error::other)?;
    tokio::task::spawn_local(async move {
        if let Err(error) = connection.with_upgrades().await {
            tracing::debug!("a connection to an upstream ended: {error}");
        }
    });
    Ok(sender)
}
