//! `/json` and `/healthcheck`: what envoyproxy/ratelimit answers over HTTP.
//!
//! Requests and answers are protobuf's JSON: names in camel case or as they stand in the protobuf file, and nothing
//! where a field has its default. A bad request is told as the original tells it, in two words; what is wrong with it
//! stands in the header `x-tidegate-problem`.

mod answer;
mod request;

use http_body_util::Full;
use hyper::{
    Response, StatusCode,
    body::Bytes,
    header::{CONTENT_TYPE, HeaderName, HeaderValue},
};

use super::{Problem, json, wire::Answer};
use crate::{
    envoy::{Code, RateLimitError, RateLimitService},
    limiter::Limiter,
    metrics::Door,
    net::Shutdown,
};

/// Says what is wrong with a bad request.
const PROBLEM: HeaderName = HeaderName::from_static("x-tidegate-problem");

/// Decides the request in `body`.
pub(super) async fn decide(limiter: &Limiter, service: &RateLimitService, body: &[u8]) -> Answer {
    let request = json::object(body).and_then(|members| request::read(&members));
    let request = match request {
        Ok(request) => request,
        Err(problem) => return bad(limiter, problem.detail()),
    };
    match service.should_rate_limit(&request).await {
        Ok(answer) => {
            let is_over = answer.overall_code == Code::OverLimit;
            limiter.metrics().observe_answer(Door::Http, is_over);
            let status = match answer.overall_code {
                Code::Ok => StatusCode::OK,
                Code::OverLimit => StatusCode::TOO_MANY_REQUESTS,
            };
            json(status, &answer::written(&answer))
        }
        Err(error) => refused(limiter, &error),
    }
}

/// Whether the service can decide, and is going to for a while.
pub(super) fn healthcheck(service: &RateLimitService, shutdown: &Shutdown) -> Answer {
    if service.is_healthy() && !shutdown.is_announced() {
        text(StatusCode::OK, "OK")
    } else {
        text(StatusCode::INTERNAL_SERVER_ERROR, "")
    }
}

fn refused(limiter: &Limiter, error: &RateLimitError) -> Answer {
    if error.is_ours() {
        bad_request(&error.to_string())
    } else {
        bad(limiter, &error.to_string())
    }
}

/// The answer to what the caller did wrong.
fn bad(limiter: &Limiter, problem: &str) -> Answer {
    limiter.metrics().count_bad_request(Door::Http);
    bad_request(problem)
}

/// The original answers so whoever is at fault.
fn bad_request(problem: &str) -> Answer {
    let mut answer = text(StatusCode::BAD_REQUEST, "Bad Request\n");
    // What a header cannot carry is left out: the problem may quote the request.
    let visible: String = problem.chars().filter(|c| matches!(c, ' '..='~')).collect();
    if let Ok(problem) = HeaderValue::try_from(visible) {
        answer.headers_mut().insert(PROBLEM, problem);
    }
    answer
}

fn text(status: StatusCode, text: &'static str) -> Answer {
    let mut answer = Response::new(Full::new(Bytes::from_static(text.as_bytes())));
    *answer.status_mut() = status;
    let plain = HeaderValue::from_static("text/plain; charset=utf-8");
    answer.headers_mut().insert(CONTENT_TYPE, plain);
    answer
}

/// A field that is wrong.
fn wrong(field: &str, problem: &str) -> Problem {
    Problem::bad(field, problem)
}
