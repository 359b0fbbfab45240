//! The request handler: forwards a request to an upstream and returns the response.
//!
//! ```text
//! Upstreams::choose   picks the upstream; the head was normalised by `normalise`
//! forwarded           adds forwarding headers: here for HTTP/2, in `exchange` for HTTP/1.1
//! Passing             gets a connection, sends the request, awaits the response head
//! Download            streams the response body; at its end the connection returns to the pool
//! ```
//!
//! A request is sent once. It is retried in two cases only: the upstream took nothing of it; or a
//! reused connection ended before any byte of the response, and the request is idempotent and has
//! no body.

use std::{
    convert::Infallible,
    future::Future,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
};

use http::{
    HeaderValue, Method, Version,
    header::{CONTENT_LENGTH, UPGRADE, VIA},
    request::Parts,
};
use hyper::{
    Request, Response, StatusCode,
    body::{Bytes, Incoming},
    upgrade::OnUpgrade,
};
use tidegate_http::Lasting;
use tower_service::Service;

use super::{
    access_log::Session,
    body::{Body, Progress, Source, Upload, UploadBounds},
    clients::InFlight,
    download::{self, Passage},
    forwarded::Forwarding,
    hop,
    lease::Lease,
    lines,
    live::Live,
    passing::{Asked, Passing},
    place::Place,
    refusal::Refusal,
    target,
    tunnel::{Planned, Tunnel},
    upstreams::Upstream,
};

/// Forwards the requests of one client connection.
#[derive(Clone, Debug)]
pub(super) struct Forwarder(Arc<Way>);

/// The context that all requests of a client connection share.
#[derive(Debug)]
pub(super) struct Way {
    pub(super) live: Arc<Live>,
    pub(super) forwarding: Arc<Forwarding>,
    /// Counts the client's requests in flight, if they are limited.
    pub(super) in_flight: Option<Arc<InFlight>>,
    pub(super) worker: usize,
    /// Where to leave a tunnel, to be started once the `101` response is sent.
    pub(super) planned: Planned,
    /// Whether responses name their upstream, for the access log.
    pub(super) names_upstream: bool,
}

impl Forwarder {
    pub(super) fn new(way: Way) -> Self {
        Self(Arc::new(way))
    }
}

/// Always ready, and never fails: every error becomes a response.
impl Service<Request<Incoming>> for Forwarder {
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Response<Body>, Infallible>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<Incoming>) -> Self::Future {
        let way = Arc::clone(&self.0);
        let call = tidegate_http::grpc_call(request.method(), request.headers()).cloned();
        // The synchronous part runs here, which keeps the future that waits for the response small.
        let begun = way.begin(request);
        Box::pin(async move {
            Ok(match begun {
                Ok(begun) => way.finish(begun, call.as_ref()).await,
                Err(unbegun) => way.refuse(unbegun, call.as_ref()),
            })
        })
    }
}

/// A request that has been routed, and sent if a pooled connection was available.
struct Begun {
    passing: Passing,
    upstream: Arc<Upstream>,
    /// Present if the client asks for a protocol upgrade.
    client: Option<OnUpgrade>,
    /// How much of the request body has been sent.
    progress: Progress,
    /// Its permit under the upstream's adaptive concurrency limit.
    place: Option<Place>,
    asked: Asked,
    is_head: bool,
}

/// A request that is refused before it reaches an upstream.
struct Unbegun {
    refusal: Refusal,
    /// The upstream it was routed to, if it got that far.
    upstream: Option<Arc<Upstream>>,
}

impl From<Refusal> for Unbegun {
    fn from(refusal: Refusal) -> Self {
        Self {
            refusal,
            upstream: None,
        }
    }
}

impl Way {
    fn begin(&self, mut request: Request<Incoming>) -> Result<Begun, Unbegun> {
        // The head is normalised, so an `Upgrade` header here is a valid upgrade request.
        let is_switch = lines::has_some(request.headers(), &[UPGRADE]);
        let client = is_switch.then(|| hyper::upgrade::on(&mut request));
        let is_head = *request.method() == Method::HEAD;
        let (mut head, body) = request.into_parts();
        let passing = Passing::new(self.live.now(), self.worker);
        let settings = &passing.current.settings;
        let upstream = Arc::clone(passing.current.upstreams.choose(&head)?);
        let unbegun = |refusal| Unbegun {
            refusal,
            upstream: Some(Arc::clone(&upstream)),
        };
        let most = settings.max_body.unwrap_or(u64::MAX);
        let place = enter(&upstream, &mut head, most).map_err(unbegun)?;
        if let Some(scheme) = &upstream.http2 {
            self.forwarding.write(head.version, &mut head.headers);
            target::as_http2(&mut head, scheme).map_err(unbegun)?;
        } else {
            hop::name_in_connection(&mut head.headers);
        }
        let bounds = UploadBounds {
            most,
            idle: settings.timeouts.idle,
            // An HTTP/2 upstream gets no minimum rate: a body holds only a stream there, not a
            // connection, and gRPC streams may be quiet.
            min_rate: settings.slow.min_rate.filter(|_| upstream.http2.is_none()),
        };
        let turn = place.as_ref().map(Place::turn).unwrap_or_default();
        let upload = Upload::new(body, bounds, turn);
        let progress = upload.progress();
        let request = Request::from_parts(head, upload);
        let asked = passing.ask_at_once(&upstream, request, &self.forwarding);
        Ok(Begun {
            passing,
            upstream,
            client,
            progress,
            place,
            asked,
            is_head,
        })
    }

    async fn finish(&self, begun: Begun, call: Option<&HeaderValue>) -> Response<Body> {
        let Begun {
            passing,
            upstream,
            client,
            progress,
            place,
            asked,
            is_head,
        } = begun;
        let asked = passing
            .answer(&upstream, asked, &self.forwarding, &progress)
            .await;
        let settings = &passing.current.settings;
        let answered = asked.and_then(|(answer, lease)| {
            let passage = Passage {
                idle: settings.timeouts.idle,
                slow: settings.slow,
                progress: progress.clone(),
            };
            let passed = Passed {
                answer,
                lease,
                passage,
                is_head,
            };
            pass_back(passed, client.map(|client| (client, self)))
        });
        let answered = answered.map(|mut answer| {
            if let Some(via) = &settings.heads.via {
                let received = answer.version();
                let element = via.element(received).clone();
                answer.headers_mut().append(VIA, element);
            }
            *answer.version_mut() = Version::HTTP_11;
            if progress.is_plainly_over() {
                answer.extensions_mut().insert(WholeRequest);
            }
            answer
        });
        if let Some(place) = place.and_then(Place::take) {
            match &answered {
                Ok(answer) => place.answered(answer),
                Err(refusal) if refusal.is_upstreams() => place.failed(),
                Err(_) => place.refused(),
            }
        }
        match &answered {
            Ok(answer) => upstream.tally.count_answer(self.worker, answer.status()),
            Err(refusal) => upstream.tally.count_failure(self.worker, *refusal),
        }
        let mut answer = answered.unwrap_or_else(|refusal| refusal.answer(call));
        if self.names_upstream {
            let asked = upstream.asked(passing.asked_last(&upstream));
            answer.extensions_mut().insert(asked);
        }
        answer
    }

    fn refuse(&self, unbegun: Unbegun, call: Option<&HeaderValue>) -> Response<Body> {
        let mut answer = unbegun.refusal.answer(call);
        if let Some(upstream) = unbegun.upstream
            && self.names_upstream
        {
            answer.extensions_mut().insert(upstream.asked(None));
        }
        answer
    }
}

/// A response extension: the request had a body, which has arrived completely and without trailers.
/// The next bytes on the client connection are the next request.
#[derive(Clone, Copy, Debug)]
pub(super) struct WholeRequest;

/// A response to return to the client, and how to stream its body.
struct Passed {
    answer: Response<Source>,
    lease: Lease,
    passage: Passage,
    /// Whether the request was a `HEAD`.
    is_head: bool,
}

/// Builds the response for the client. `client` is present if the client asked for an upgrade; its
/// [`Way`] says where to leave the tunnel.
fn pass_back(passed: Passed, client: Option<(OnUpgrade, &Way)>) -> Result<Response<Body>, Refusal> {
    let Passed {
        answer,
        lease,
        passage,
        is_head,
    } = passed;
    if answer.status() == StatusCode::SWITCHING_PROTOCOLS {
        // An upstream may switch protocols only if the client asked for it.
        let (client, way) = client.ok_or(Refusal::BadAnswer)?;
        let protocol = hop::switched(answer.headers()).ok_or(Refusal::BadAnswer)?;
        let (mut head, _) = answer.into_parts();
        hop::strip_answer(&mut head.headers);
        hop::set_switched(&mut head.headers, protocol);
        let lasting = Lasting::default();
        head.extensions.insert(lasting.clone());
        let session = Session::default();
        head.extensions.insert(session.clone());
        way.planned.plan(Tunnel {
            lasting,
            session,
            client,
            lease,
            in_flight: way.in_flight.as_ref().map(InFlight::begin_anyway),
        });
        return Ok(Response::from_parts(head, Body::whole(Bytes::new())));
    }
    let (mut head, body) = answer.into_parts();
    hop::strip_answer(&mut head.headers);
    let body = if is_head {
        // HTTP/1.1 has no body here. Dropping an HTTP/2 body resets its stream.
        drop(body);
        download::end(lease, &passage.progress);
        Body::whole(Bytes::new())
    } else {
        Body::passed(body, lease, passage)
    };
    Ok(Response::from_parts(head, body))
}

/// Acquires the permit of a request at `upstream`, if it has an adaptive limit. Checks first that
/// the declared body length does not exceed `most` bytes.
fn enter(upstream: &Upstream, head: &mut Parts, most: u64) -> Result<Option<Place>, Refusal> {
    if body_length(head).is_some_and(|length| length > most) {
        return Err(Refusal::TooLarge(most));
    }
    let Some(capacity) = &upstream.capacity else {
        return Ok(None);
    };
    let held = capacity.enter(&mut head.extensions);
    Ok(Some(Place::new(held.ok_or(Refusal::Overloaded)?)))
}

/// Returns the value of `Content-Length`, if there is one.
fn body_length(head: &Parts) -> Option<u64> {
    let length = lines::first(&head.headers, &CONTENT_LENGTH)?;
    length.to_str().ok()?.parse().ok()
}
