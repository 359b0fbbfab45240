//! HTTP responses with a complete body in memory.

use http_body_util::Full;
use hyper::{
    Response, StatusCode,
    body::Bytes,
    header::{CONTENT_TYPE, HeaderValue},
};

/// An HTTP response.
pub type Answer = Response<Full<Bytes>>;

/// The JSON content type.
pub const JSON: HeaderValue = HeaderValue::from_static("application/json");

/// Builds a JSON response.
pub fn json(status: StatusCode, value: &impl serde::Serialize) -> Answer {
    // Serialising to memory fails only for maps whose keys are not strings. No response contains a
    // map whose keys are not strings.
    json_document(status, serde_json::to_vec(value).unwrap_or_default())
}

/// Builds a response whose body is this JSON document.
pub fn json_document(status: StatusCode, document: impl Into<Bytes>) -> Answer {
    let mut answer = Response::new(Full::new(document.into()));
    *answer.status_mut() = status;
    answer.headers_mut().insert(CONTENT_TYPE, JSON);
    answer
}
