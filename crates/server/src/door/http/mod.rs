//! The HTTP door: `POST /v1/check`, `/v1/peek`, `/v1/throttle`, and `ANY /v1/authorize` for forward-auth.
//!
//! `wire` moves requests and answers, `body` reads what was asked, `verdict` writes what was decided, and
//! the module of each endpoint is the story in between. A denial is a verdict; only what could not be
//! understood is a problem document.

mod authorize;
mod body;
mod check;
mod entries;
mod limits_cache;
mod problem;
mod throttle;
mod verdict;
pub(super) mod wire;

use std::{io, net::TcpListener, sync::Arc};

use hyper::{Method, Response, body::Incoming};
use tidegate_core::Effect;
use tidegate_http::{HeaderWriter, Legacy};

pub(crate) use self::{
    body::read as read_body,
    problem::Problem,
    wire::{Answer, json},
};
use crate::{
    config::{Headers, LegacyHeaders},
    limiter::Limiter,
    metrics::Door,
    net::{Bounds, Connection, Listener, Server},
};

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
    server.listen(socket, bounds, move |stream, connection| {
        let asked = Arc::new(Asked {
            limiter: Arc::clone(&limiter),
            headers,
            connection: connection.clone(),
        });
        wire::serve(stream, connection, move |request| {
            let asked = Arc::clone(&asked);
            async move { asked.answer(request).await }
        })
    })
}

/// What every request of a connection is answered with.
#[derive(Debug)]
struct Asked {
    limiter: Arc<Limiter>,
    headers: Headers,
    connection: Connection,
}

impl Asked {
    async fn answer(&self, request: hyper::Request<Incoming>) -> Answer {
        let path = request.uri().path();
        let answered = match path {
            "/v1/check" | "/v1/peek" | "/v1/throttle" => {
                let path = path.to_owned();
                self.post(&path, request).await
            }
            "/v1/authorize" => authorize::authorize(self, &request),
            _ => Err(Problem::not_found(
                "/v1/check, /v1/peek, /v1/throttle and /v1/authorize",
            )),
        };
        answered.unwrap_or_else(|problem| {
            self.limiter.metrics().count_bad_request(Door::Http);
            problem.answer()
        })
    }

    async fn post(&self, path: &str, request: hyper::Request<Incoming>) -> Result<Answer, Problem> {
        if request.method() != Method::POST {
            return Err(Problem::method("POST"));
        }
        let body = body::read(request.into_body(), self.connection.bounds.request).await?;
        match path {
            "/v1/check" => check::check(self, &body, Effect::Charge),
            "/v1/peek" => check::check(self, &body, Effect::Peek),
            _ => throttle::throttle(self, &body),
        }
    }

    /// An answer that carries `verdict` with `status`.
    fn verdict(&self, status: hyper::StatusCode, verdict: &tidegate_core::Verdict<'_>) -> Answer {
        let mut answer: Answer = Response::new(verdict::body(verdict).into());
        *answer.status_mut() = status;
        let headers = answer.headers_mut();
        headers.insert(hyper::header::CONTENT_TYPE, wire::JSON);
        let legacy = match self.headers.legacy {
            LegacyHeaders::Off => Legacy::Off,
            LegacyHeaders::Delta => Legacy::Delta,
            LegacyHeaders::Epoch => Legacy::Epoch,
        };
        HeaderWriter::new(self.headers.ratelimit, legacy).write(
            verdict,
            self.limiter.now(),
            headers,
        );
        answer
    }
}

fn status(allowed: bool) -> hyper::StatusCode {
    if allowed {
        hyper::StatusCode::OK
    } else {
        hyper::StatusCode::TOO_MANY_REQUESTS
    }
}
