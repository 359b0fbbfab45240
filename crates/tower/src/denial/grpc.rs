//! Denials in gRPC: a trailers-only response with `google.rpc` error details.
//!
//! The messages come from `google/rpc/status.proto` and `error_details.proto`. The messages contain
//! only the fields that are sent.

use base64::{Engine, engine::general_purpose::STANDARD_NO_PAD};
use bytes::Bytes;
use http::{HeaderMap, HeaderName, HeaderValue, Method, Response, header::CONTENT_TYPE};
use percent_encoding::{AsciiSet, CONTROLS, utf8_percent_encode};
use prost::Message;
use tidegate_core::Span;

use super::{Cause, Denial};

const STATUS: HeaderName = HeaderName::from_static("grpc-status");
const MESSAGE: HeaderName = HeaderName::from_static("grpc-message");
const PUSHBACK: HeaderName = HeaderName::from_static("grpc-retry-pushback-ms");
const DETAILS: HeaderName = HeaderName::from_static("grpc-status-details-bin");

/// The gRPC status code (`google.rpc.Code`) of a malformed request.
const INVALID_ARGUMENT: u8 = 3;
/// The gRPC status code of a request that is over a limit or blocked.
const RESOURCE_EXHAUSTED: u8 = 8;
/// The gRPC status code of a request that the store or the service cannot handle now.
const UNAVAILABLE: u8 = 14;

/// The ASCII characters that are percent-encoded in a `grpc-message`. Non-ASCII bytes are always
/// encoded.
const ESCAPED: &AsciiSet = &CONTROLS.add(b'%');

/// The message `google.rpc.Status`.
#[derive(Clone, PartialEq, Message)]
struct Status {
    #[prost(int32, tag = "1")]
    code: i32,
    #[prost(string, tag = "2")]
    message: String,
    #[prost(message, repeated, tag = "3")]
    details: Vec<prost_types::Any>,
}

/// The message `google.rpc.RetryInfo`.
#[derive(Clone, PartialEq, Message)]
struct RetryInfo {
    #[prost(message, optional, tag = "1")]
    retry_delay: Option<prost_types::Duration>,
}

/// The message `google.rpc.QuotaFailure`.
#[derive(Clone, PartialEq, Message)]
struct QuotaFailure {
    #[prost(message, repeated, tag = "1")]
    violations: Vec<Violation>,
}

/// The message `google.rpc.QuotaFailure.Violation`.
#[derive(Clone, PartialEq, Message)]
struct Violation {
    #[prost(string, tag = "1")]
    subject: String,
    #[prost(string, tag = "2")]
    description: String,
    #[prost(string, tag = "5")]
    quota_id: String,
    #[prost(int64, tag = "7")]
    quota_value: i64,
}

/// Returns the content type of a gRPC call, or `None` if the request with this head is not a gRPC
/// call.
///
/// The response to a gRPC call always has HTTP status 200, so other requests must not get such a
/// response.
pub fn call<'h>(method: &Method, headers: &'h HeaderMap) -> Option<&'h HeaderValue> {
    if *method != Method::POST {
        return None;
    }
    let content_type = headers.get(CONTENT_TYPE)?;
    let rest = content_type.as_bytes().strip_prefix(b"application/grpc")?;
    let is_grpc = matches!(rest.first(), None | Some(b'+' | b';'));
    is_grpc.then_some(content_type)
}

/// Returns the response to a gRPC call, without the rate limit headers.
pub(super) fn response(denial: &Denial<'_>, content_type: &HeaderValue) -> Response<Bytes> {
    let code = match denial.cause {
        Cause::Spent | Cause::Blocked => RESOURCE_EXHAUSTED,
        Cause::Store | Cause::Busy | Cause::Capacity => UNAVAILABLE,
        Cause::Malformed => INVALID_ARGUMENT,
    };
    let status = Status {
        code: code.into(),
        message: denial.detail.clone(),
        details: details(denial),
    };
    let message = utf8_percent_encode(&denial.detail, ESCAPED).to_string();
    let binary = STANDARD_NO_PAD.encode(status.encode_to_vec());
    let mut response = Response::new(Bytes::new());
    let headers = response.headers_mut();
    headers.insert(CONTENT_TYPE, content_type.clone());
    headers.insert(STATUS, HeaderValue::from(u16::from(code)));
    if denial.is_final() {
        headers.insert(PUSHBACK, HeaderValue::from_static("-1"));
    }
    for (name, text) in [(MESSAGE, message), (DETAILS, binary)] {
        // Both values are printable ASCII, so the conversion succeeds.
        if let Ok(value) = HeaderValue::try_from(text) {
            headers.insert(name, value);
        }
    }
    response
}

fn details(denial: &Denial<'_>) -> Vec<prost_types::Any> {
    let retry = denial.retry_after.map(|span| RetryInfo {
        retry_delay: Some(duration(span)),
    });
    let violations: Vec<Violation> = denial
        .violated
        .iter()
        .map(|limit| Violation {
            subject: limit.rule.unwrap_or(&limit.name).to_owned(),
            description: format!("{} exceeded", limit.policy),
            quota_id: match limit.rule {
                Some(rule) => format!("{rule}:{}", limit.policy),
                None => limit.name.clone(),
            },
            quota_value: i64::try_from(limit.quota).unwrap_or(i64::MAX),
        })
        .collect();
    let quota = (!violations.is_empty()).then_some(QuotaFailure { violations });
    let retry = retry.map(|info| any("RetryInfo", &info));
    retry
        .into_iter()
        .chain(quota.map(|failure| any("QuotaFailure", &failure)))
        .collect()
}

fn any(name: &str, message: &impl Message) -> prost_types::Any {
    prost_types::Any {
        type_url: format!("type.googleapis.com/google.rpc.{name}"),
        value: message.encode_to_vec(),
    }
}

fn duration(span: Span) -> prost_types::Duration {
    let micros = span.as_micros();
    // The nanoseconds of a second fit in 31 bits, and the seconds of any duration fit in an i64.
    let nanos = i32::try_from(micros % 1_000_000 * 1_000).unwrap_or(0);
    let seconds = i64::try_from(micros / 1_000_000).unwrap_or(i64::MAX);
    prost_types::Duration { seconds, nanos }
}
