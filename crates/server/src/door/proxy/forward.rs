//! A request passed on, and its answer passed back.
//!
//! ```text
//! target::settle      the target is a path, and there is one Host
//! Upstreams::choose   whose request it is
//! hop                 headers of the connection off
//! forwarded           who the client is, told: over HTTP/2 now, over HTTP/1.1 as the head is written
//! Passing             a connection that was kept, or a new one; the request goes out, and the head of an answer comes in time
//! Download            the answer's body, as it comes; at its end the connection is kept
//! ```
//!
//! A request is sent once. It is sent again only if nothing of it was taken, or if a connection that had been kept ended
//! before anything of an answer came, and the request has no body and may be sent twice.

use std::{
    convert::Infallible,
    future::Future,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use http::{
    HeaderValue, Version,
    header::{CONTENT_LENGTH, EXPECT},
    request::Parts,
};
use http_body_util::Full;
use hyper::{Request, Response, StatusCode, body::Incoming, upgrade::OnUpgrade};
use tidegate_http::Lasting;
use tower_service::Service;

use super::{
    access_log::Session,
    body::{Body, Download, Progress, Source, Upload},
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

/// Passes the requests of one connection on.
#[derive(Clone, Debug)]
pub(super) struct Forwarder(Arc<Way>);

/// What all requests of a connection have in common.
#[derive(Debug)]
pub(super) struct Way {
    pub(super) live: Arc<Live>,
    pub(super) forwarding: Forwarding,
    pub(super) worker: usize,
    /// Where to leave a tunnel for when the answer is out.
    pub(super) planned: Planned,
    /// Whether answers say whose they are, for the access log.
    pub(super) names_upstream: bool,
}

impl Forwarder {
    pub(super) fn new(way: Way) -> Self {
        Self(Arc::new(way))
    }
}

/// Always ready, and never fails: what goes wrong is an answer too.
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
        // What can be done at once is done here, so that what waits for the answer is small.
        let begun = way.begin(request);
        Box::pin(async move {
            Ok(match begun {
                Ok(begun) => way.finish(begun, call.as_ref()).await,
                Err(unbegun) => way.refuse(unbegun, call.as_ref()),
            })
        })
    }
}

/// A request that is going to be answered, or refused, by an upstream.
struct Begun {
    passing: Passing,
    upstream: Arc<Upstream>,
    /// There if the client wants to go on with another protocol.
    client: Option<OnUpgrade>,
    /// How far its body has come.
    progress: Progress,
    /// Its place among those that the upstream bears.
    place: Option<Place>,
    asked: Asked,
}

/// A request that is refused before any upstream has it.
struct Unbegun {
    refusal: Refusal,
    /// Whose it was, if that was known by then.
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
        // Over HTTP/1.0 it says nothing: RFC 9110, section 7.8.
        let is_new = request.version() == Version::HTTP_11;
        let protocol = is_new.then(|| hop::upgrade(request.headers())).flatten();
        let client = protocol.is_some().then(|| hyper::upgrade::on(&mut request));
        let (mut head, body) = request.into_parts();
        let passing = Passing::new(self.live.now(), self.worker);
        let settings = &passing.current.settings;
        target::check(&head.headers, settings.max_headers)?;
        target::settle(&mut head)?;
        let upstream = Arc::clone(passing.current.upstreams.choose(&head)?);
        let unbegun = |refusal| Unbegun {
            refusal,
            upstream: Some(Arc::clone(&upstream)),
        };
        let most = settings.max_body.unwrap_or(u64::MAX);
        let place = enter(&upstream, &mut head, most).map_err(unbegun)?;
        // HTTP/2 goes on with no other protocol.
        let protocol = protocol.filter(|_| upstream.http2.is_none());
        rewrite(&mut head, protocol);
        if let Some(scheme) = &upstream.http2 {
            self.forwarding.write(&mut head.headers);
            target::as_http2(&mut head, scheme).map_err(unbegun)?;
        }
        let turn = place.as_ref().map(Place::turn).unwrap_or_default();
        let upload = Upload::new(body, most, settings.timeouts.idle, turn);
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
        } = begun;
        let asked = passing
            .answer(&upstream, asked, &self.forwarding, &progress)
            .await;
        let idle = passing.current.settings.timeouts.idle;
        let answered = asked.and_then(|(answer, lease)| {
            let upgrade = client.map(|client| (client, &self.planned));
            pass_back((answer, lease), idle, upgrade)
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

/// Makes of the head of a request that of one to an upstream. Of the client it says what he says himself, until it is sent.
fn rewrite(head: &mut Parts, protocol: Option<HeaderValue>) {
    head.version = Version::HTTP_11;
    // Whoever expects `100 Continue` is told by us when the body is asked for.
    lines::remove(&mut head.headers, &EXPECT);
    hop::strip_request(&mut head.headers);
    if let Some(protocol) = protocol {
        hop::set_upgrade(&mut head.headers, protocol);
    }
}

/// The answer as the client gets it, unless nothing of it comes for `idle`. `upgrade` is there if it wants to go on with
/// another protocol, and says where to leave the tunnel.
fn pass_back(
    (answer, lease): (Response<Source>, Lease),
    idle: Duration,
    upgrade: Option<(OnUpgrade, &Planned)>,
) -> Result<Response<Body>, Refusal> {
    if answer.status() == StatusCode::SWITCHING_PROTOCOLS {
        // Who speaks another protocol without being asked to makes no sense.
        let (client, planned) = upgrade.ok_or(Refusal::BadAnswer)?;
        let protocol = hop::upgrade(answer.headers()).ok_or(Refusal::BadAnswer)?;
        let (mut head, _) = answer.into_parts();
        hop::strip_answer(&mut head.headers);
        hop::set_upgrade(&mut head.headers, protocol);
        let lasting = Lasting::default();
        head.extensions.insert(lasting.clone());
        let session = Session::default();
        head.extensions.insert(session.clone());
        planned.plan(Tunnel {
            lasting,
            session,
            client,
            lease,
        });
        return Ok(Response::from_parts(head, Body::Whole(Full::default())));
    }
    let (mut head, body) = answer.into_parts();
    head.version = Version::HTTP_11;
    hop::strip_answer(&mut head.headers);
    let download = Download::new(body, lease, idle);
    Ok(Response::from_parts(head, Body::Passed(download)))
}

/// The place of the request with this head at `upstream`, where it needs one; its body may have `most` bytes.
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

/// What a request says of the length of its body.
fn body_length(head: &Parts) -> Option<u64> {
    let length = lines::first(&head.headers, &CONTENT_LENGTH)?;
    length.to_str().ok()?.parse().ok()
}
