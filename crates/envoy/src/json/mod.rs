//! `/json` and `/healthcheck`, compatible with envoyproxy/ratelimit over HTTP.
//!
//! Requests and responses are protobuf JSON. Field names are in camel case or as in the `.proto`
//! file, and fields with their default value are omitted. The response to a bad request has the
//! same body as in envoyproxy/ratelimit (`Bad Request`). The header `x-tidegate-problem` describes
//! the problem. If the server causes the problem, a second line of the body describes it too.

mod answer;
mod limitador;
mod request;

pub use self::limitador::{LimitadorEndpoint, answer_limitador};

use http_body_util::Full;
use hyper::{
    Response, StatusCode,
    body::Bytes,
    header::{CONTENT_TYPE, HeaderName, HeaderValue},
};
use tidegate_limiter::{ServerLimiter, metrics::ListenerKind};
use tidegate_net::{
    Problem, Shutdown,
    json::object,
    response::{Answer, json},
};

use crate::{Code, RateLimitService, RlsError};

/// The header that describes what is wrong with a bad request.
const PROBLEM: HeaderName = HeaderName::from_static("x-tidegate-problem");

/// The body of a 400 response, as in envoyproxy/ratelimit.
const BAD_REQUEST: &str = "Bad Request\n";

/// The advice to the operator if no configuration is loaded. Over gRPC, the error does not contain
/// this advice, but only the message of envoyproxy/ratelimit.
const MISSING_CONFIGURATION: &str = "correct the files of `envoy.config`, or start its control \
     plane; the log names the problem";

/// Decides the request in `body`, which must be JSON.
pub async fn decide(limiter: &ServerLimiter, service: &RateLimitService, body: &[u8]) -> Answer {
    let request = object(body).and_then(|members| request::read(&members));
    let request = match request {
        Ok(request) => request,
        Err(problem) => return bad(limiter, problem.detail()),
    };
    match service
        .should_rate_limit_on(ListenerKind::Http, &request, None)
        .await
    {
        Ok(answer) => {
            let is_over = answer.overall_code == Code::OverLimit;
            limiter
                .metrics()
                .observe_response(ListenerKind::Http, is_over);
            let status = match answer.overall_code {
                Code::Ok => StatusCode::OK,
                Code::OverLimit => StatusCode::TOO_MANY_REQUESTS,
            };
            json(status, &answer::written(&answer))
        }
        Err(error) => refused(limiter, &error),
    }
}

/// Returns the status 200 if the service is healthy and no shutdown has been announced. Otherwise,
/// returns 500.
#[must_use]
pub fn healthcheck(service: &RateLimitService, shutdown: &Shutdown) -> Answer {
    if service.is_healthy() && !shutdown.is_announced() {
        text(StatusCode::OK, "OK")
    } else {
        text(StatusCode::INTERNAL_SERVER_ERROR, "")
    }
}

fn refused(limiter: &ServerLimiter, error: &RlsError) -> Answer {
    match error {
        RlsError::NoConfiguration => server_problem(&format!("{error}; {MISSING_CONFIGURATION}")),
        error if error.is_ours() => server_problem(&error.to_string()),
        error => bad(limiter, &error.to_string()),
    }
}

/// Builds the response to a request that the server cannot decide. The client sent a correct
/// request, so the body also tells the operator what is wrong.
fn server_problem(problem: &str) -> Answer {
    let mut answer = bad_request(problem);
    *answer.body_mut() = Full::from(format!("{BAD_REQUEST}{problem}\n"));
    answer
}

/// Counts a malformed request and builds its response.
fn bad(limiter: &ServerLimiter, problem: &str) -> Answer {
    limiter.metrics().count_bad_request(ListenerKind::Http);
    bad_request(problem)
}

/// Builds a 400 response. envoyproxy/ratelimit also sends this status for server errors.
fn bad_request(problem: &str) -> Answer {
    let mut answer = text(StatusCode::BAD_REQUEST, BAD_REQUEST);
    // `problem` may quote the request, so remove the characters that a header must not contain.
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

/// Creates an error about a field.
fn wrong(field: &str, problem: &str) -> Problem {
    Problem::bad(field, problem)
}
