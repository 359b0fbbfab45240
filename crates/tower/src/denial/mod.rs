//! Denials. An HTTP denial is a status code with problem details (RFC 9457). A gRPC denial is a
//! status with details.

mod error_format;
mod grpc;

use std::fmt;

use bytes::Bytes;
use http::{HeaderValue, Response, StatusCode, header::CONTENT_TYPE, request::Parts};
use serde::Serialize;
use tidegate_core::{Reason, RetryAfter, Span, Verdict};

pub use self::{error_format::ErrorFormat, grpc::call as grpc_content_type};
use crate::headers::{self, MAX_SHOWN, RuleNames, policy_text};

// The problem types registered by draft-ietf-httpapi-ratelimit-headers.
const QUOTA_EXCEEDED: &str = "https://iana.org/assignments/http-problem-types#quota-exceeded";
const REDUCED_CAPACITY: &str =
    "https://iana.org/assignments/http-problem-types#temporary-reduced-capacity";
const ABNORMAL_USAGE: &str =
    "https://iana.org/assignments/http-problem-types#abnormal-usage-detected";

const PROBLEM: HeaderValue = HeaderValue::from_static("application/problem+json");

/// A denial, independent of the protocol.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Denial<'v> {
    pub(crate) cause: Cause,
    /// A description of the problem, and when to retry. The description does not contain the key or
    /// parts of it, because the key may be secret.
    pub(crate) detail: String,
    /// The limits that deny the request.
    pub(crate) violated: Vec<ViolatedLimit<'v>>,
    /// The time after which the same request would be admitted; `None` if waiting does not help.
    pub(crate) retry_after: Option<Span>,
}

/// The cause of a denial.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Cause {
    /// A limit is exhausted.
    Spent,
    /// The service is at its capacity: no slot of a concurrency limit without a key is free.
    Capacity,
    /// The key is blocked manually.
    Blocked,
    /// The store could not decide.
    Store,
    /// The service is overloaded.
    Busy,
    /// The request is malformed or ambiguous.
    Malformed,
}

/// A limit that denies the request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ViolatedLimit<'v> {
    /// The limit's policy name in the `RateLimit` headers.
    pub(crate) name: String,
    /// The name of the limit's rule; `None` if clients must not see the name.
    pub(crate) rule: Option<&'v str>,
    pub(crate) policy: &'v str,
    pub(crate) quota: u64,
}

impl<'v> Denial<'v> {
    /// Creates the denial for `verdict`. The denial contains rule names only if `names` is
    /// [`RuleNames::Shown`].
    pub(crate) fn of(verdict: &'v Verdict<'_>, names: RuleNames) -> Self {
        let lines = verdict.lines.iter().enumerate();
        let enforced = lines.filter(|(_, line)| !line.shadow);
        let denying = enforced.filter(|(_, line)| !line.outcome.allowed);
        let violated: Vec<ViolatedLimit<'v>> = denying
            .take(MAX_SHOWN)
            .map(|(at, line)| ViolatedLimit {
                name: policy_text(&verdict.lines, at, names),
                rule: line.rule.filter(|_| names == RuleNames::Shown),
                policy: line.limit.policy(),
                quota: line.outcome.limit,
            })
            .collect();
        let retry_after = verdict.retry_after.span();
        let cause = match verdict.reason {
            Some(Reason::Store) => Cause::Store,
            Some(Reason::Blocked) => Cause::Blocked,
            _ if verdict.is_at_capacity() => Cause::Capacity,
            _ => Cause::Spent,
        };
        Self {
            cause,
            detail: detail(verdict, names),
            violated,
            retry_after,
        }
    }

    /// Creates the denial for a request to an overloaded service, which may have capacity again
    /// soon.
    pub(crate) fn busy() -> Self {
        let again = Span::from_secs(1);
        Self {
            cause: Cause::Busy,
            detail: format!("the service is overloaded; retry in {again}"),
            violated: Vec::new(),
            retry_after: Some(again),
        }
    }

    /// Creates the denial for a malformed or ambiguous request, to which no rule can be applied.
    pub(crate) fn malformed(error: &dyn fmt::Display) -> Self {
        Self {
            cause: Cause::Malformed,
            detail: error.to_string(),
            violated: Vec::new(),
            retry_after: None,
        }
    }

    /// Returns true if a retry can never succeed. For such a denial, the response says explicitly
    /// that a retry cannot succeed. Without this information, a client would assume that the retry
    /// time was only omitted.
    pub(crate) fn is_final(&self) -> bool {
        matches!(self.cause, Cause::Spent | Cause::Blocked) && self.retry_after.is_none()
    }

    /// Returns the response without the rate limit headers.
    pub(crate) fn response(&self, target: &ResponseTarget) -> Response<Bytes> {
        if let Some(content_type) = &target.call {
            return grpc::response(self, content_type);
        }
        error_format::response(self, target.format).unwrap_or_else(|| self.problem_response())
    }

    /// Returns the HTTP status.
    fn status(&self) -> StatusCode {
        match self.cause {
            Cause::Spent | Cause::Blocked => StatusCode::TOO_MANY_REQUESTS,
            Cause::Store | Cause::Busy | Cause::Capacity => StatusCode::SERVICE_UNAVAILABLE,
            Cause::Malformed => StatusCode::BAD_REQUEST,
        }
    }

    fn problem_response(&self) -> Response<Bytes> {
        let status = self.status();
        let problem_type = match self.cause {
            Cause::Spent => Some(QUOTA_EXCEEDED),
            Cause::Blocked => Some(ABNORMAL_USAGE),
            Cause::Store | Cause::Busy | Cause::Capacity => Some(REDUCED_CAPACITY),
            Cause::Malformed => None,
        };
        let names: Vec<&str> = self.violated.iter().map(|limit| &*limit.name).collect();
        let document = ProblemDocument {
            problem_type,
            title: status.canonical_reason().unwrap_or_default(),
            status: status.as_u16(),
            detail: &self.detail,
            violated_policies: &names,
            retry_after_ms: (self.is_final() || self.retry_after.is_some())
                .then(|| self.retry_after.map(Span::as_millis_ceil)),
        };
        // Serialising to memory fails only for maps whose keys are not strings.
        let body = serde_json::to_vec(&document).unwrap_or_default();
        let mut response = Response::new(Bytes::from(body));
        *response.status_mut() = status;
        response.headers_mut().insert(CONTENT_TYPE, PROBLEM);
        response
    }
}

/// The kind of response that the client of a request understands.
#[derive(Clone, Debug, Default)]
pub(crate) struct ResponseTarget {
    /// The content type if the request is a gRPC call.
    call: Option<HeaderValue>,
    /// The format of the body if the request is not a gRPC call. The format is never `Auto`.
    format: ErrorFormat,
}

impl ResponseTarget {
    /// Returns the kind of response for a request with this head.
    pub(crate) fn of(head: &Parts, format: ErrorFormat) -> Self {
        Self {
            call: grpc_content_type(&head.method, &head.headers).cloned(),
            format: format.resolve(head),
        }
    }
}

/// Returns the response to a request that cannot be counted.
pub(crate) fn malformed(error: &dyn fmt::Display, target: &ResponseTarget) -> Response<Bytes> {
    Denial::malformed(error).response(target)
}

/// Returns the response to a request with this head if the service is overloaded. The response is a
/// 503 with `Retry-After` and problem details, or gRPC's `UNAVAILABLE`.
#[must_use]
pub fn overload_response(head: &Parts) -> Response<Bytes> {
    let denial = Denial::busy();
    let mut response = denial.response(&ResponseTarget::of(head, ErrorFormat::Problem));
    headers::put_retry_after(denial.retry_after, response.headers_mut());
    response
}

/// Returns the response to a request that `verdict` denies: the status and problem details (RFC
/// 9457), without the rate limit headers. The problem details contain the names of rules only if
/// `names` is [`RuleNames::Shown`].
#[must_use]
pub fn denial_response(verdict: &Verdict<'_>, names: RuleNames) -> Response<Bytes> {
    Denial::of(verdict, names).problem_response()
}

/// Returns the response to a request that cannot be counted because of `error`: a 400 with problem
/// details (RFC 9457).
#[must_use]
pub fn malformed_response(error: &dyn fmt::Display) -> Response<Bytes> {
    Denial::malformed(error).problem_response()
}

#[derive(Serialize)]
struct ProblemDocument<'d> {
    #[serde(rename = "type", skip_serializing_if = "Option::is_none")]
    problem_type: Option<&'d str>,
    title: &'d str,
    status: u16,
    detail: &'d str,
    #[serde(rename = "violated-policies", skip_serializing_if = "<[_]>::is_empty")]
    violated_policies: &'d [&'d str],
    #[serde(skip_serializing_if = "Option::is_none")]
    retry_after_ms: Option<Option<u64>>,
}

fn detail(verdict: &Verdict<'_>, names: RuleNames) -> String {
    let again = match verdict.retry_after {
        RetryAfter::After(span) => format!("retry in {}", readable(span)),
        RetryAfter::Never => "retrying will not succeed".to_owned(),
    };
    let rule = verdict.rule.filter(|_| names == RuleNames::Shown);
    let of_rule = rule.map_or_else(String::new, |rule| format!(" of \"{rule}\""));
    match (verdict.reason, verdict.leading()) {
        (Some(Reason::Store), _) => format!("the limiter could not decide; {again}"),
        (Some(Reason::Blocked), _) => match rule {
            Some(rule) => format!("blocked under \"{rule}\"; {again}"),
            None => format!("blocked; {again}"),
        },
        (_, Some(line)) if verdict.retry_after == RetryAfter::Never => format!(
            "the cost of the request is more than {}{of_rule} can admit at once; {again}",
            line.limit.policy()
        ),
        (_, Some(line)) => format!("{}{of_rule} exceeded; {again}", line.limit.policy()),
        (_, None) => format!("limit exceeded; {again}"),
    }
}

/// Rounds a wait time up to whole seconds, or to whole milliseconds if it is under one second.
fn readable(wait: Span) -> Span {
    let second = Span::from_secs(1);
    if wait < second {
        Span::from_millis(wait.as_millis_ceil())
    } else {
        Span::from_secs(wait.as_secs_ceil())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wait_is_readable_and_never_too_short() {
        for (micros, expected) in [
            (59_700_861, "1min"),
            (2_000_001, "3s"),
            (2_000_000, "2s"),
            (999_001, "1s"),
            (500_001, "501ms"),
            (1, "1ms"),
        ] {
            assert_eq!(readable(Span::from_micros(micros)).to_string(), expected);
        }
    }
}
