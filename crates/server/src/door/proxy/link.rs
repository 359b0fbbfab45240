//! A connection to an upstream, asked and answered in time.

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

/// A connection, as a request has it.
#[derive(Debug)]
pub(super) struct Link {
    sender: Sender,
    /// What a request has of a connection that takes many. One that waits in a pool has none.
    stream: Option<Arc<Stream>>,
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
    Http2(Shared),
}

/// A request for whoever takes it.
pub(super) enum Errand {
    /// Nobody has begun to send it.
    Whole(Box<Request<Upload>>),
    /// A connection that takes many ended under it, and to send it twice comes to the same as to send it once. Not to be repeated again.
    Repeated(Box<Request<Upload>>),
    /// It was written for a connection that turned out to be closed.
    Written(Box<Outgoing>),
}

/// Why a request was not answered.
pub(super) enum Unanswered {
    /// The connection had been closed, or was about to be, and the request may be sent on another.
    Unsent(Errand),
    /// A connection that had been kept was closed under it, and nobody knows what became of it.
    Lost,
    /// This came of it.
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
    /// No room, nobody there, nobody before `until`.
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
                tracing::debug!(address = %address.url, "cannot connect: {error}");
                if connect::is_local(&error) {
                    tracing::warn!(upstream = %address.terms().name, %error, "cannot connect to an upstream for want of local resources");
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

    /// Whether it takes no request more, because the upstream has closed it or is silent.
    pub(super) fn is_over(&mut self) -> bool {
        match &mut self.sender {
            Sender::Http1(exchange) => exchange.is_closed(),
            Sender::Http2(shared) => shared.is_over(),
        }
    }

    /// Whether it can take a request.
    pub(super) fn is_ready(&self) -> bool {
        match &self.sender {
            Sender::Http1(exchange) => exchange.is_ready(),
            Sender::Http2(shared) => !shared.is_over(),
        }
    }

    /// Whether there are requests on it, as on one that waits in a pool while it takes many.
    pub(super) fn is_busy(&self) -> bool {
        matches!(&self.sender, Sender::Http2(shared) if shared.is_busy())
    }

    /// The same connection for another request, if it takes many, and one more.
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

    /// Goes by `settings` from the next request on. One that takes many at once keeps those of its beginning.
    pub(super) fn go_by(&mut self, settings: &Proxy) {
        if let Some(exchange) = self.exchange() {
            exchange.go_by(settings);
        }
    }

    /// Begins to send `request` at `now` for `client`, and gives it back if the connection takes many at once. An answer is to be waited for
    /// next.
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

    /// Waits for the head of the answer to what was begun.
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

    /// Sends a request for `client`, and waits for the head of the answer. Over a connection that takes many at once the request tells of him
    /// itself.
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
            // It is another upstream's.
            (_, errand) => return Err(Unanswered::Unsent(errand)),
        }
        self.timer.set(times.head);
        self.answer(progress, times).await
    }

    /// Sends `request` as one of many.
    async fn stream(
        &mut self,
        mut request: Request<Upload>,
        progress: &Progress,
        times: &Timeouts,
    ) -> Result<Response<Source>, Unanswered> {
        let Sender::Http2(shared) = &mut self.sender else {
            return Err(Unanswered::Unsent(Errand::Whole(Box::new(request))));
        };
        // Whoever has answered may close whenever he likes.
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
            return Err(bad_answer("it has too many header lines, or several lengths").into());
        }
        Ok(answer.map(Source::Stream))
    }

    /// Something more of an answer has come as [`Source::Stream`].
    pub(super) fn heard(&self) {
        if let Sender::Http2(shared) = &self.sender {
            shared.heard();
        }
    }

    /// The next of the body of an answer that comes from [`Source::Link`].
    pub(super) fn poll_body(
        &mut self,
        cx: &mut Context<'_>,
    ) -> Poll<Option<io::Result<Frame<Bytes>>>> {
        self.exchange()
            .map_or(Poll::Ready(None), |exchange| exchange.poll_body(cx))
    }

    /// The body of an answer from [`Source::Link`], if all of it is here, and nothing but bytes.
    pub(super) fn take_whole(&mut self) -> Option<Bytes> {
        self.exchange()?.take_whole()
    }

    /// The next of that body that is here already.
    pub(super) fn take_received(&mut self) -> Received {
        self.exchange()
            .map_or(Received::Nothing, Exchange::take_received)
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

/// Whether that is how the end of a connection is told.
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

/// Whether `error` is the end of a connection, and not of one request on it.
fn has_ended(error: &hyper::Error) -> bool {
    let cause = error
        .source()
        .and_then(<dyn Error>::downcast_ref::<io::Error>);
    cause.is_some_and(|cause| is_end(cause.kind()))
}

/// `request` once more, if it makes no difference how often it is sent.
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
    tracing::debug!("no answer: {error}");
    Refusal::BadAnswer
}

/// Who sends the body of a request.
#[derive(Clone, Copy, Debug)]
enum Sent {
    /// Whoever waits for the answer, and knows how far it is.
    Here,
    /// Another task, by which who waits has to be woken.
    Elsewhere,
}

/// What `answering` comes to, unless the head of the answer takes too long.
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
        // An upstream that is still being sent the body owes no answer yet. Its time begins when it has been sent all.
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
    async fn an_answer_is_waited_for_from_the_end_of_the_request_on() {
        let text = "proxy: {listen: '127.0.0.1:0', timeouts: {head: 3s}, upstreams: [{name: app, urls: 'http://h'}]}";
        let times = Config::parse(text).unwrap().proxy.unwrap().timeouts;
        for sends_for in [0, 1, 2, 7] {
            let progress = Progress::begun();
            let sent = progress.clone();
            // Another task sends it, as with an upstream that speaks HTTP/2.
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
