//! The HTTP door: `POST /v1/check`, `/v1/peek`, `/v1/throttle`, and `ANY /v1/authorize` for forward-auth.
//!
//! `wire` moves requests and answers, `body` reads what was asked, `verdict` writes what was decided, and
//! the module of each endpoint is the story in between. A denial is a verdict; only what could not be
//! understood is a problem document.

mod authorize;
mod body;
mod check;
mod fields;
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
    net::{IpAddr, TcpListener},
    sync::Arc,
};

use hyper::{Method, Request, Response, StatusCode, body::Incoming, header::CONTENT_TYPE};
use tidegate_core::{Effect, Timestamp, Verdict};
use tidegate_http::{HeaderWriter, Legacy};

pub(crate) use self::{
    body::read as read_body,
    json::{Json, Members, object, shown},
    problem::Problem,
    wire::{Answer, json},
};
use crate::{
    config::{Headers, LegacyHeaders},
    limiter::Limiter,
    metrics::Door,
    net::{Bounds, Listener, Server},
};

/// What there is, for those who asked for something else.
const PATHS: &str = "/v1/check, /v1/peek, /v1/throttle and /v1/authorize";

/// Answers checks and forward-auth on `socket`.
///
/// # Errors
///
/// What the system says if `socket` is not a listening socket.
pub fn listen(
    server: &Server,
    socket: TcpListener,
    bounds: Bounds,
    limiter: Arc<Limiter>,
    headers: Headers,
) -> io::Result<Listener> {
    let legacy = match headers.legacy {
        LegacyHeaders::Off => Legacy::Off,
        LegacyHeaders::Delta => Legacy::Delta,
        LegacyHeaders::Epoch => Legacy::Epoch,
    };
    server.listen(socket, bounds, move |stream, connection| {
        let asked = Asked {
            limiter: Arc::clone(&limiter),
            headers: RefCell::new(HeaderWriter::new(headers.ratelimit, legacy)),
            peer: connection.peer.ip(),
        };
        async move {
            wire::serve(stream, &connection, |request| asked.answer(request)).await;
        }
    })
}

/// What the requests of one connection are answered with.
#[derive(Debug)]
struct Asked {
    limiter: Arc<Limiter>,
    headers: RefCell<HeaderWriter>,
    peer: IpAddr,
}

impl Asked {
    async fn answer(&self, request: Request<Incoming>) -> Answer {
        self.route(request).await.unwrap_or_else(|problem| {
            self.limiter.metrics().count_bad_request(Door::Http);
            problem.answer()
        })
    }

    async fn route(&self, request: Request<Incoming>) -> Result<Answer, Problem> {
        let endpoint = match request.uri().path() {
            "/v1/throttle" => throttle::throttle,
            "/v1/check" => |asked: &Self, body: &[u8]| check::check(asked, body, Effect::Charge),
            "/v1/peek" => |asked: &Self, body: &[u8]| check::check(asked, body, Effect::Peek),
            "/v1/authorize" => return authorize::authorize(self, &request),
            _ => return Err(Problem::not_found(PATHS)),
        };
        if request.method() != Method::POST {
            return Err(Problem::method("POST"));
        }
        let body = body::read(request.into_body()).await?;
        endpoint(self, &body)
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
