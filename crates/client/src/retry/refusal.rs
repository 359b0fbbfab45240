//! The body of a refusal. The body may say that a retry can never succeed.

use bytes::Bytes;
use http::{HeaderMap, header::CONTENT_TYPE};
use serde_json::Value;

/// The maximum number of bytes that are read from the body of a refusal.
pub(crate) const MAX_BYTES: usize = 16 * 1024;

/// Returns whether the body is a JSON document, such as problem details (RFC 9457).
pub(crate) fn has_document(headers: &HeaderMap) -> bool {
    let is_json = |value: &http::HeaderValue| {
        let media = value.as_bytes().split(|byte| *byte == b';').next();
        media.is_some_and(|media| media.trim_ascii().ends_with(b"json"))
    };
    headers.get(CONTENT_TYPE).is_some_and(is_json)
}

/// Returns whether the document says that the request will never succeed. Tidegate's servers send
/// `"retry_after_ms": null` if a retry can never succeed. `"retryable": false` has the same
/// meaning.
pub(crate) fn is_permanent(body: &Bytes) -> bool {
    let Ok(Value::Object(problem)) = serde_json::from_slice(body) else {
        return false;
    };
    problem.get("retry_after_ms") == Some(&Value::Null)
        || problem.get("retryable") == Some(&Value::Bool(false))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_an_explicit_refusal_document_is_permanent() {
        let is_permanent = |text: &'static str| is_permanent(&Bytes::from_static(text.as_bytes()));
        assert!(is_permanent(r#"{"status":429,"retry_after_ms":null}"#));
        assert!(is_permanent(r#"{"retryable":false}"#));
        for other in [
            "",
            "{",
            "null",
            "[]",
            "{}",
            r#"{"retry_after_ms":5}"#,
            r#"{"retryable":null}"#,
        ] {
            assert!(!is_permanent(other), "{other}");
        }
        let has_document = |value| {
            has_document(&HeaderMap::from_iter([(
                CONTENT_TYPE,
                http::HeaderValue::from_static(value),
            )]))
        };
        assert!(has_document("application/problem+json; charset=utf-8"));
        assert!(has_document("application/json"));
        assert!(!has_document("text/html"));
    }
}
