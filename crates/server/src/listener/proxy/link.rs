//! An upstream connection: sends a request and waits for the response head, with a timeout.

use std::{
    error::Error,
    fmt::Display,
    future::{Future, poll_fn},
    io,
    pin::pin,
    sync::Arc,
    task::{Context, Poll, ready},
};

use bytes::Bytes;
use hyper::{
    Request, Response,
    body::{Body as _, Frame},
};
use tokio::time::{Instant, timeout_at};

use super::{
    address::{Address, Admitted},
    body::{Progress, Source, Upload},
    connect,
    exchange::{Exchange, Outgoing, Received},
    forwarded::Forwarding,
    refusal::Refusal,
    shared::{Shared, Stream},
    taken::Taken,
};
use crate::{
    config::{Proxy, Timeouts},
    net::LazyTimer,
};

/// An upstream connection in the hands of one request.
#[derive(Debug)]
pub(super) struct Link {
    sender: Sender,
    /// The request's stream on an HTTP/2 connection. A pooled connection has none.
    stream: Option<Arc<Stream>>,
    /// The timeout for response heads. An HTTP/1.1 connection uses one timer for all of its
    /// requests.
    timer: LazyTimer,
    admitted: Arc<Admitted>,
}

/// The HTTP client on a connection.
#[derive(Debug)]
pub(super) enum Sender {
    /// Takes one request at a time.
    Http1(Box<Exchange>),
    /// Takes many requests at once.
    Http2(Shared),
}

/// A request to send, and how far an earlier attempt got.
pub(super) enum Errand {
    /// Not sent at all yet.
    Whole(Box<Request<Upload>>),
    /// Sent once on an HTTP/2 connection that ended before the response. The request is idempotent,
    /// so it is sent once more, but not a third time.
    Repeated(Box<Request<Upload>>),
    /// Serialised for an HTTP/1.1 connection that turned out to be closed.
    Written(Box<Outgoing>),
}

/// Why a request has no response.
pub(super) enum Unanswered {
    /// The connection was closed or about to close; the request may be sent on another.
    Unsent(Errand),
    /// A reused connection was closed under the request. The upstream may have processed it.
    Lost,
    /// The request has failed with this error.
    Refused(Refusal),
}

impl From<Refusal> for Unanswered {
    fn from(refusal: Refusal) -> Self {
        Self::Refused(refusal)
    }
}

impl Link {
    /// Opens a connection to `address`.
    ///
    /// # Errors
    ///
    /// [`Refusal::Full`] at the connection limit, [`Refusal::Local`] if this machine is out of
    /// resources, [`Refusal::Unreachable`], or [`Refusal::ConnectTimeout`] at `until`.
    pub(super) async fn make(
        address: &Arc<Address>,
        settings: &Proxy,
        until: Instant,
    ) -> Result<Self, Refusal> {
        let admitted = address.admit().ok_or(Refusal::Full)?;
        let sender = timeout_at(until, connect::connect(address, settings))
            .await
            .map_err(|_| Refusal::ConnectTimeout)?
            .map_err(|error| {
                tracing::debug!(endpoint = %address.url, "cannot connect: {error}");
                if connect::is_local(&error) {
                    tracing::warn!(upstream = %address.terms().name, %error, "cannot connect to the upstream: out of local resources");
                    return Refusal::Local;
                }
                address.health.blame(&error);
                Refusal::Unreachable
            })?;
        Ok(Self {
            sender,
            stream: None,
            timer: LazyTimer::new(settings.timeouts.head),
            admitted: Arc::new(admitted),
        })
    }

    /// Returns whether the connection takes no more requests: the upstream has closed it, or no
    /// longer responds.
    pub(super) fn is_over(&mut self) -> bool {
        match &mut self.sender {
            Sender::Http1(exchange) => exchange.is_closed(),
            Sender::Http2(shared) => shared.is_over(),
        }
    }

    /// Returns whether the connection can take a request.
    pub(super) fn is_ready(&self) -> bool {
        match &self.sender {
            Sender::Http1(exchange) => exchange.is_ready(),
            Sender::Http2(shared) => !shared.is_over(),
        }
    }

    /// Returns whether requests are in flight on it, as may be the case for a pooled HTTP/2
    /// connection.
    pub(super) fn is_busy(&self) -> bool {
        matches!(&self.sender, Sender::Http2(shared) if shared.is_busy())
    }

    /// Opens a stream for another request on an HTTP/2 connection, if it has one free.
    pub(super) fn share(&self, times: &Timeouts) -> Option<Self> {
        let Sender::Http2(shared) = &self.sender else {
            return None;
        };
        Some(Self {
            stream: Some(shared.enter()?),
            sender: Sender::Http2(shared.clone()),
            timer: LazyTimer::new(times.head),
            admitted: Arc::clone(&self.admitted),
        })
    }

    /// Applies `settings` from the next request on. An HTTP/2 connection keeps those it was opened
    /// with.
    pub(super) fn go_by(&mut self, settings: &Proxy) {
        if let Some(exchange) = self.exchange() {
            exchange.go_by(settings);
        }
    }

    /// Starts to send `request` for `client` at `now` on an HTTP/1.1 connection; [`Self::answer`]
    /// then waits for the response. Returns the request if the connection is HTTP/2.
    pub(super) fn begin(
        &mut self,
        request: Request<Upload>,
        client: &Forwarding,
        times: &Timeouts,
        now: Instant,
    ) -> Result<(), Box<Request<Upload>>> {
        let Sender::Http1(exchange) = &mut self.sender else {
            return Err(Box::new(request));
        };
        self.timer.set_from(now, times.head);
        exchange.begin(request, Some(client));
        Ok(())
    }

    /// Waits for the response head of the request that was started.
    pub(super) async fn answer(
        &mut self,
        progress: &Progress,
        times: &Timeouts,
    ) -> Result<Response<Source>, Unanswered> {
        let Sender::Http1(exchange) = &mut self.sender else {
            return Err(Refusal::BadAnswer.into());
        };
        let answering = poll_fn(|cx| exchange.poll_head(cx));
        let sending = (progress, Sent::Here);
        let answer = in_time(answering, &mut self.timer, sending, times).await?;
        match answer {
            Ok(answer) => Ok(answer.map(|()| Source::Link)),
            Err(error) if exchange.is_stale() && is_end(error.kind()) => {
                Err(match exchange.take_again() {
                    Some(again) => Unanswered::Unsent(Errand::Written(Box::new(again))),
                    None => Unanswered::Lost,
                })
            }
            Err(error) => Err(bad_answer(error).into()),
        }
    }

    /// Sends a request for `client` and waits for the response head. Over HTTP/2 the request
    /// carries the forwarding headers already, so `client` is not used.
    pub(super) async fn ask(
        &mut self,
        errand: Errand,
        client: &Forwarding,
        progress: &Progress,
        times: &Timeouts,
    ) -> Result<Response<Source>, Unanswered> {
        match (&mut self.sender, errand) {
            (Sender::Http1(exchange), Errand::Whole(request)) => {
                exchange.begin(*request, Some(client));
            }
            (Sender::Http1(exchange), Errand::Written(request)) => exchange.begin_again(*request),
            (Sender::Http2(shared), Errand::Whole(request)) => {
                let again = shared.has_answered().then(|| again(&request)).flatten();
                let asked = self.stream(*request, progress, times).await;
                return asked.map_err(|unanswered| match (unanswered, again) {
                    (Unanswered::Lost, Some(again)) => Unanswered::Unsent(Errand::Repeated(again)),
                    (unanswered, _) => unanswered,
                });
            }
            (Sender::Http2(_), Errand::Repeated(request)) => {
                return self.stream(*request, progress, times).await;
            }
            // The request was prepared for the other protocol. All endpoints of an upstream speak
            // the same one, so this does not happen.
            (_, errand) => return Err(Unanswered::Unsent(errand)),
        }
        self.timer.set(times.head);
        self.answer(progress, times).await
    }

    /// Sends `request` on a stream of an HTTP/2 connection.
    async fn stream(
        &mut self,
        mut request: Request<Upload>,
        progress: &Progress,
        times: &Timeouts,
    ) -> Result<Response<Source>, Unanswered> {
        let Sender::Http2(shared) = &mut self.sender else {
            return Err(Unanswered::Unsent(Errand::Whole(Box::new(request))));
        };
        // An upstream that has answered before may close the connection at any time.
        let is_kept = shared.has_answered();
        request.body_mut().enter(self.stream.clone());
        self.timer.set(times.head);
        let sending = (progress, Sent::Elsewhere);
        let answered = in_time(shared.send(request), &mut self.timer, sending, times).await;
        let answered = answered.inspect_err(|_| shared.doubt())?;
        let answer = answered.map_err(|mut error| match error.take_message() {
            Some(request) => {
                Unanswered::Unsent(Errand::Whole(Box::new(request.map(Taken::into_inner))))
            }
            None if is_kept && has_ended(error.error()) => Unanswered::Lost,
            None => bad_answer(error.into_error()).into(),
        })?;
        shared.heard();
        if !shared.takes(&answer) {
            return Err(bad_answer("too many header lines, or several content lengths").into());
        }
        Ok(answer.map(Source::Stream))
    }

    /// Records that more of a response has arrived on [`Source::Stream`], so the connection is
    /// alive.
    pub(super) fn heard(&self) {
        if let Sender::Http2(shared) = &self.sender {
            shared.heard();
        }
    }

    /// Polls the next frame of a response body from [`Source::Link`].
    pub(super) fn poll_body(
        &mut self,
        cx: &mut Context<'_>,
    ) -> Poll<Option<io::Result<Frame<Bytes>>>> {
        self.exchange()
            .map_or(Poll::Ready(None), |exchange| exchange.poll_body(cx))
    }

    /// Takes the response body from [`Source::Link`], if it has arrived completely and is plain
    /// bytes.
    pub(super) fn take_whole(&mut self) -> Option<Bytes> {
        self.exchange()?.take_whole()
    }

    /// Takes the next part of that body that has already arrived.
    pub(super) fn take_received(&mut self) -> Received {
        self.exchange()
            .map_or(Received::Nothing, Exchange::take_received)
    }

    /// Returns how many bytes of that body are left, if known.
    pub(super) fn left(&self) -> Option<u64> {
        match &self.sender {
            Sender::Http1(exchange) => exchange.left(),
            Sender::Http2(_) => None,
        }
    }

    /// Returns the HTTP/1.1 client of the connection; `None` for HTTP/2.
    pub(super) fn exchange(&mut self) -> Option<&mut Exchange> {
        match &mut self.sender {
            Sender::Http1(exchange) => Some(exchange),
            Sender::Http2(_) => None,
        }
    }
}

/// Returns whether an I/O error of this kind means that the connection has ended.
const fn is_end(kind: io::ErrorKind) -> bool {
    matches!(
        kind,
        io::ErrorKind::UnexpectedEof
            | io::ErrorKind::ConnectionReset
            | io::ErrorKind::ConnectionAborted
            | io::ErrorKind::BrokenPipe
            | io::ErrorKind::NotConnected
    )
}

/// Returns whether `error` is the end of the connection, rather than of one stream.
fn has_ended(error: &hyper::Error) -> bool {
    let cause = error
        .source()
        .and_then(<dyn Error>::downcast_ref::<io::Error>);
    cause.is_some_and(|cause| is_end(cause.kind()))
}

/// Copies `request` for a retry, if it is idempotent and has no body.
fn again(request: &Request<Upload>) -> Option<Box<Request<Upload>>> {
    if !request.method().is_idempotent() || !request.body().is_end_stream() {
        return None;
    }
    let mut again = Request::new(Upload::nothing());
    again.method_mut().clone_from(request.method());
    again.uri_mut().clone_from(request.uri());
    *again.version_mut() = request.version();
    again.headers_mut().clone_from(request.headers());
    Some(Box::new(again))
}

fn bad_answer(error: impl Display) -> Refusal {
    tracing::debug!("no valid response: {error}");
    Refusal::BadAnswer
}

/// Which task sends the request body.
#[derive(Clone, Copy, Debug)]
enum Sent {
    /// The task that waits for the response.
    Here,
    /// Another task, which has to wake the waiting one.
    Elsewhere,
}

/// Waits for `answering`, or fails with [`Refusal::HeadTimeout`]. The timeout runs from the end of
/// the request body.
async fn in_time<A>(
    answering: impl Future<Output = A>,
    timer: &mut LazyTimer,
    (progress, sent): (&Progress, Sent),
    times: &Timeouts,
) -> Result<A, Refusal> {
    let mut answering = pin!(answering);
    let mut is_sending = progress.is_sending();
    poll_fn(|cx| {
        if let Poll::Ready(answer) = answering.as_mut().poll(cx) {
            return Poll::Ready(Ok(answer));
        }
        // An upstream that is still receiving the body does not owe a response yet.
        if is_sending {
            is_sending = match sent {
                Sent::Here => progress.is_sending(),
                Sent::Elsewhere => progress.poll_is_sending(cx),
            };
            timer.set(times.head);
        }
        ready!(timer.poll_due(cx));
        Poll::Ready(Err(Refusal::HeadTimeout))
    })
    .await
}

#[cfg(test)]
mod tests {
    use std::{future::pending, time::Duration};

    use super::*;
    use crate::config::Config;

    #[tokio::test(start_paused = true)]
    async fn the_response_timeout_starts_at_the_end_of_the_request() {
        let text = "proxy: {listen: '127.0.0.1:0', timeouts: {head: 3s}, upstreams: [{name: app, urls: 'http://h'}]}";
        let times = Config::parse(text).unwrap().proxy.unwrap().timeouts;
        for sends_for in [0, 1, 2, 7] {
            let progress = Progress::begun();
            let sent = progress.clone();
            // With HTTP/2, another task sends the body.
            tokio::spawn(async move {
                tokio::time::sleep(Duration::from_secs(sends_for)).await;
                sent.end();
            });
            let start = Instant::now();
            let mut timer = LazyTimer::new(times.head);
            let sending = (&progress, Sent::Elsewhere);
            let answered = in_time(pending::<()>(), &mut timer, sending, &times).await;
            assert!(matches!(answered, Err(Refusal::HeadTimeout)));
            assert_eq!(start.elapsed().as_secs(), sends_for + 3);
        }
    }
}
