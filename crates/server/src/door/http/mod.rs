//! The HTTP door: `POST /v1/check`, `/v1/peek`, `/v1/throttle`, `ANY /v1/authorize` for forward-auth, and what
//! envoyproxy/ratelimit answers at `/json` and `/healthcheck`.
//!
//! `wire` moves requests and answers, `body` reads what was asked, `verdict` writes what was decided, and
//! the module of each endpoint is the story in between. A denial is a verdict; only what could not be
//! understood is a problem document.

mod authorize;
mod body;
mod check;
mod envoy;
mod fields;
mod forms;
mod json;
mod limit_fields;
mod limits_cache;
mod problem;
mod stream;
mod throttle;
mod verdict;
pub(super) mod wire;

use std::{
    cell::RefCell,
    io,
    net::{IpAddr, Ipv4Addr, TcpListener},
    sync::Arc,
};

use futures_util::FutureExt;
use hyper::{Method, Request, Response, StatusCode, body::Incoming, header::CONTENT_TYPE};
use tidegate_core::{Effect, Timestamp, Verdict};
use tidegate_http::{HeaderWriter, Legacy};

pub(crate) use self::{
    body::read as read_body,
    json::{Json, Members, object},
    problem::Problem,
    verdict::millis,
    wire::{Answer, json},
};
use crate::{
    config::{Headers, Identity, LegacyHeaders},
    envoy::RateLimitService,
    limiter::Limiter,
    metrics::Door,
    net::{Bounds, Listener, Server, Shutdown},
};

/// What there is, for those who asked for something else.
const PATHS: &str = "/v1/check, /v1/peek, /v1/throttle and /v1/authorize";

/// What the HTTP door needs.
#[derive(Clone, Debug)]
pub struct Served {
    /// Who decides.
    pub limiter: Arc<Limiter>,
    /// Which headers answers carry.
    pub headers: Headers,
    /// How forward-auth finds out who is asking.
    pub identity: Arc<Identity>,
    /// What `/json` and `/healthcheck` ask; without it there is nothing at these paths.
    pub rate_limits: Option<Arc<RateLimitService>>,
}

/// Answers checks and forward-auth on `socket`.
///
/// # Errors
///
/// What the system says if `socket` is not a listening socket.
pub fn listen(
    server: &Server,
    socket: TcpListener,
    bounds: Bounds,
    served: Served,
) -> io::Result<Listener> {
    let headers = header_writer(served.headers);
    server.listen(socket, bounds, move |stream, connection| {
        let asked = Asked {
            limiter: Arc::clone(&served.limiter),
            rate_limits: served.rate_limits.clone(),
            headers: RefCell::new(headers.clone()),
            identity: Arc::clone(&served.identity),
            peer: connection.peer.ip(),
            shutdown: connection.shutdown.clone(),
        };
        async move {
            wire::serve(stream, &connection, |request| asked.answer(request)).await;
        }
    })
}

/// A writer of the headers that `headers` name.
pub(super) fn header_writer(headers: Headers) -> HeaderWriter {
    let legacy = match headers.legacy {
        LegacyHeaders::Off => Legacy::Off,
        LegacyHeaders::Delta => Legacy::Delta,
        LegacyHeaders::Epoch => Legacy::Epoch,
    };
    HeaderWriter::new(headers.ratelimit, legacy)
}

/// An endpoint that is asked by a body.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Endpoint {
    /// `/v1/check`
    Check,
    /// `/v1/peek`
    Peek,
    /// `/v1/throttle`
    Throttle,
}

/// The status and the body with which `endpoint` answers `body`: the door without a socket, for fuzzing, and without a
/// fleet.
#[must_use]
pub fn transcript(limiter: &Arc<Limiter>, endpoint: Endpoint, body: &[u8]) -> (u16, Vec<u8>) {
    let asked = Asked {
        limiter: Arc::clone(limiter),
        rate_limits: None,
        headers: RefCell::new(HeaderWriter::new(true, Legacy::Delta)),
        identity: Arc::default(),
        peer: IpAddr::V4(Ipv4Addr::LOCALHOST),
        shutdown: Shutdown::default(),
    };
    let alone = "a decision of a fleet has to be waited for";
    let refused = || Err(Problem::new(StatusCode::SERVICE_UNAVAILABLE, alone));
    // In memory a decision never suspends.
    let answer = asked.answer_body(endpoint, body).now_or_never();
    let answer = answer.unwrap_or_else(refused);
    let answer = answer.unwrap_or_else(|problem| asked.refuse(problem));
    (answer.status().as_u16(), wire::body(answer))
}

/// What the requests of one connection are answered with.
#[derive(Debug)]
struct Asked {
    limiter: Arc<Limiter>,
    rate_limits: Option<Arc<RateLimitService>>,
    headers: RefCell<HeaderWriter>,
    identity: Arc<Identity>,
    peer: IpAddr,
    shutdown: Shutdown,
}

impl Asked {
    fn answer(&self, request: Request<Incoming>) -> impl Future<Output = Answer> {
        let answer = self.route(request);
        answer.map(|answer| answer.unwrap_or_else(|problem| self.refuse(problem)))
    }

    async fn route(&self, request: Request<Incoming>) -> Result<Answer, Problem> {
        wire::check_host(&request)?;
        let endpoint = match request.uri().path() {
            "/v1/throttle" => Endpoint::Throttle,
            "/v1/check" => Endpoint::Check,
            "/v1/peek" => Endpoint::Peek,
            "/v1/authorize" => return authorize::authorize(self, &request).await,
            path => match (path, &self.rate_limits) {
                ("/json", Some(service)) => {
                    let body = body::read(request.into_body()).await?;
                    // It waits for much more than the others do, and hyper moves what all of them wait for with each request.
                    return Ok(Box::pin(envoy::decide(&self.limiter, service, &body)).await);
                }
                ("/healthcheck", Some(service)) => {
                    return Ok(envoy::healthcheck(service, &self.shutdown));
                }
                _ => return Err(Problem::not_found(PATHS)),
            },
        };
        if request.method() != Method::POST {
            return Err(Problem::method("POST"));
        }
        let body = body::read(request.into_body()).await?;
        self.answer_body(endpoint, &body).await
    }

    async fn answer_body(&self, endpoint: Endpoint, body: &[u8]) -> Result<Answer, Problem> {
        match endpoint {
            Endpoint::Check => check::check(self, body, Effect::Charge).await,
            Endpoint::Peek => check::check(self, body, Effect::Peek).await,
            Endpoint::Throttle => throttle::throttle(self, body).await,
        }
    }

    fn refuse(&self, problem: Problem) -> Answer {
        self.limiter.metrics().count_bad_request(Door::Http);
        problem.answer()
    }

    /// An answer that carries `verdict`, which was decided at `now`, with `status`.
    fn verdict(&self, status: StatusCode, verdict: &Verdict<'_>, now: Timestamp) -> Answer {
        let mut answer: Answer = Response::new(verdict::body(verdict).into());
        *answer.status_mut() = status;
        let headers = answer.headers_mut();
        headers.insert(CONTENT_TYPE, wire::JSON);
        self.headers.borrow_mut().write(verdict, now, headers);
        answer
    }
}

fn status(allowed: bool) -> StatusCode {
    if allowed {
        StatusCode::OK
    } else {
        StatusCode::TOO_MANY_REQUESTS
    }
}
