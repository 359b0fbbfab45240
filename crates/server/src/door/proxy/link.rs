//! A connection to an upstream, asked and answered in time.

use std::{
    fmt::Display,
    future::{Future, poll_fn},
    io,
    pin::pin,
    sync::Arc,
    task::{Context, Poll, ready},
};

use bytes::Bytes;
use hyper::{Request, Response, body::Frame, client::conn::http2};
use tokio::time::timeout;

use super::{
    address::{Address, Admitted},
    body::{Progress, Source, Upload},
    connect,
    exchange::Exchange,
    refusal::Refusal,
};
use crate::{
    config::{Proxy, Timeouts},
    net::LazyTimer,
};

/// A connection, as a request has it.
#[derive(Debug)]
pub(super) struct Link {
    sender: Sender,
    /// For the heads of answers. One serves all requests of an HTTP/1.1 connection.
    timer: LazyTimer,
    admitted: Arc<Admitted>,
}

/// Who takes requests.
#[derive(Debug)]
pub(super) enum Sender {
    /// One at a time.
    Http1(Box<Exchange>),
    /// Many at once.
    Http2(http2::SendRequest<Upload>),
}

/// Why a request was not answered.
pub(super) enum Unanswered {
    /// Nothing of it was sent, because the connection had been closed: here it is, whole.
    Unsent(Box<Request<Upload>>),
    /// It was sent, or some of it, and this came of it.
    Refused(Refusal),
}

impl From<Refusal> for Unanswered {
    fn from(refusal: Refusal) -> Self {
        Self::Refused(refusal)
    }
}

impl Link {
    /// Connects to `address`.
    ///
    /// # Errors
    ///
    /// No room, nobody there, nobody in time.
    pub(super) async fn make(address: &Arc<Address>, settings: &Proxy) -> Result<Self, Refusal> {
        let admitted = address.admit().ok_or(Refusal::Full)?;
        let sender = timeout(
            settings.timeouts.connect,
            connect::connect(address, settings),
        )
        .await
        .map_err(|_| Refusal::ConnectTimeout)?
        .map_err(|error| {
            tracing::debug!(upstream = %address.url, "cannot connect: {error}");
            Refusal::Unreachable
        })?;
        Ok(Self {
            sender,
            timer: LazyTimer::new(settings.timeouts.head),
            admitted: Arc::new(admitted),
        })
    }

    /// Whether the upstream has closed it.
    pub(super) fn is_closed(&mut self) -> bool {
        match &mut self.sender {
            Sender::Http1(exchange) => exchange.is_closed(),
            Sender::Http2(sender) => sender.is_closed(),
        }
    }

    /// Whether it can take a request.
    pub(super) fn is_ready(&self) -> bool {
        match &self.sender {
            Sender::Http1(exchange) => exchange.is_ready(),
            Sender::Http2(sender) => sender.is_ready(),
        }
    }

    /// Whether other requests have this connection too.
    pub(super) fn is_shared(&self) -> bool {
        Arc::strong_count(&self.admitted) > 1
    }

    /// The same connection for another request, if it takes many.
    pub(super) fn share(&self, times: &Timeouts) -> Option<Self> {
        match &self.sender {
            Sender::Http1(_) => None,
            Sender::Http2(sender) => Some(Self {
                sender: Sender::Http2(sender.clone()),
                timer: LazyTimer::new(times.head),
                admitted: Arc::clone(&self.admitted),
            }),
        }
    }

    /// Begins to send `request`, and gives it back if the connection takes many at once. An answer is to be waited for next.
    pub(super) fn begin(
        &mut self,
        request: Request<Upload>,
        times: &Timeouts,
    ) -> Result<(), Box<Request<Upload>>> {
        let Sender::Http1(exchange) = &mut self.sender else {
            return Err(Box::new(request));
        };
        self.timer.set(times.head);
        exchange.begin(request);
        Ok(())
    }

    /// Waits for the head of the answer to what was begun.
    pub(super) async fn answer(
        &mut self,
        progress: &Progress,
        times: &Timeouts,
    ) -> Result<Response<Source>, Refusal> {
        let Sender::Http1(exchange) = &mut self.sender else {
            return Err(Refusal::BadAnswer);
        };
        let answering = poll_fn(|cx| exchange.poll_head(cx));
        let answer = in_time(answering, &mut self.timer, progress, times).await?;
        Ok(answer.map_err(bad_answer)?.map(|()| Source::Link))
    }

    /// Sends `request`, and waits for the head of the answer.
    pub(super) async fn ask(
        &mut self,
        request: Request<Upload>,
        progress: &Progress,
        times: &Timeouts,
    ) -> Result<Response<Source>, Unanswered> {
        let Err(request) = self.begin(request, times) else {
            return Ok(self.answer(progress, times).await?);
        };
        let Sender::Http2(sender) = &mut self.sender else {
            return Err(Unanswered::Unsent(request));
        };
        self.timer.set(times.head);
        let sending = sender.try_send_request(*request);
        let answered = in_time(sending, &mut self.timer, progress, times).await?;
        let answer = answered.map_err(|mut error| match error.take_message() {
            Some(request) => Unanswered::Unsent(Box::new(request)),
            None => bad_answer(error.into_error()).into(),
        })?;
        Ok(answer.map(Source::Stream))
    }

    /// The next of the body of an answer that comes from [`Source::Link`].
    pub(super) fn poll_body(
        &mut self,
        cx: &mut Context<'_>,
    ) -> Poll<Option<io::Result<Frame<Bytes>>>> {
        self.exchange()
            .map_or(Poll::Ready(None), |exchange| exchange.poll_body(cx))
    }

    /// Whether a request is still being sent, on a connection that takes one at a time.
    pub(super) fn is_sending(&self) -> bool {
        matches!(&self.sender, Sender::Http1(exchange) if exchange.is_sending())
    }

    /// Sends what is left of it; ready when that is done.
    pub(super) fn poll_sent(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.exchange()
            .map_or(Poll::Ready(Ok(())), |exchange| exchange.poll_sent(cx))
    }

    /// How many octets of that body are left, if that is known.
    pub(super) fn left(&self) -> Option<u64> {
        match &self.sender {
            Sender::Http1(exchange) => exchange.left(),
            Sender::Http2(_) => None,
        }
    }

    /// The connection, if it takes one request at a time.
    pub(super) fn exchange(&mut self) -> Option<&mut Exchange> {
        match &mut self.sender {
            Sender::Http1(exchange) => Some(exchange),
            Sender::Http2(_) => None,
        }
    }
}

fn bad_answer(error: impl Display) -> Refusal {
    tracing::debug!("no answer: {error}");
    Refusal::BadAnswer
}

/// What `answering` comes to, unless the head of the answer takes too long.
async fn in_time<A>(
    answering: impl Future<Output = A>,
    timer: &mut LazyTimer,
    progress: &Progress,
    times: &Timeouts,
) -> Result<A, Refusal> {
    let mut answering = pin!(answering);
    let mut is_sending = progress.is_sending();
    poll_fn(|cx| {
        if let Poll::Ready(answer) = answering.as_mut().poll(cx) {
            return Poll::Ready(Ok(answer));
        }
        // An upstream that is still being sent the body owes no answer yet. Its time begins when it has been sent all.
        if is_sending {
            is_sending = progress.is_sending();
            timer.set(times.head);
        }
        ready!(timer.poll_due(cx));
        Poll::Ready(Err(Refusal::HeadTimeout))
    })
    .await
}
