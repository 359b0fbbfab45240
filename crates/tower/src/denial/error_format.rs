//! Denials in the error formats of language model APIs. The SDKs for language model APIs show an
//! error message only if the error has the format of their API.

use bytes::Bytes;
use http::{HeaderMap, HeaderName, HeaderValue, Response, header::CONTENT_TYPE, request::Parts};
use serde_json::{Value, json};
use tidegate_core::Span;

use super::{Cause, Denial};

const ANTHROPIC_VERSION: HeaderName = HeaderName::from_static("anthropic-version");
const GOOGLE_API_KEY: HeaderName = HeaderName::from_static("x-goog-api-key");
/// A request header sent by OpenAI's SDKs, and by other SDKs generated with the same tool.
const SDK_LANGUAGE: HeaderName = HeaderName::from_static("x-stainless-lang");

/// A response header that the OpenAI and Anthropic SDKs obey.
const SHOULD_RETRY: HeaderName = HeaderName::from_static("x-should-retry");

/// The longest `Retry-After` that the OpenAI and Anthropic SDKs obey. If `Retry-After` is longer,
/// the SDKs retry after a few seconds, and their requests are denied again.
const LONGEST_SDK_WAIT: Span = Span::from_secs(60);

/// The path suffixes of the OpenAI API.
const OPENAI_PATHS: [&str; 5] = [
    "/chat/completions",
    "/v1/completions",
    "/v1/embeddings",
    "/v1/responses",
    "/openai/responses",
];

/// The path suffixes of the Gemini API.
const GEMINI_PATHS: [&str; 4] = [
    ":generateContent",
    ":streamGenerateContent",
    ":embedContent",
    ":batchEmbedContents",
];

/// The body format of a denial.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum ErrorFormat {
    /// Problem details (RFC 9457).
    #[default]
    Problem,
    /// The format of the request's API, detected from its headers and path. If the request uses no
    /// known API, the denial contains problem details.
    Auto,
    /// The format of the OpenAI API, which many other services use too.
    OpenAi,
    /// The format of the Anthropic API.
    Anthropic,
    /// The format of the Gemini API and other Google APIs.
    Gemini,
}

impl ErrorFormat {
    /// Replaces `Auto` with the format for a request with this head.
    pub(crate) fn resolve(self, head: &Parts) -> Self {
        if self != Self::Auto {
            return self;
        }
        let (path, headers) = (head.uri.path(), &head.headers);
        let ends_with = |ends: &[&str]| ends.iter().any(|end| path.ends_with(end));
        if headers.contains_key(ANTHROPIC_VERSION) {
            Self::Anthropic
        } else if headers.contains_key(GOOGLE_API_KEY) || ends_with(&GEMINI_PATHS) {
            Self::Gemini
        } else if headers.contains_key(SDK_LANGUAGE) || ends_with(&OPENAI_PATHS) {
            Self::OpenAi
        } else {
            Self::Problem
        }
    }
}

/// Returns the response for `denial`, or `None` if the format is [`ErrorFormat::Problem`].
pub(super) fn response(denial: &Denial<'_>, format: ErrorFormat) -> Option<Response<Bytes>> {
    let body = match format {
        ErrorFormat::Problem | ErrorFormat::Auto => return None,
        ErrorFormat::OpenAi => openai(denial),
        ErrorFormat::Anthropic => anthropic(denial),
        ErrorFormat::Gemini => gemini(denial),
    };
    let mut response = Response::new(Bytes::from(body.to_string()));
    *response.status_mut() = denial.status();
    let headers = response.headers_mut();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    put_should_retry(denial, headers);
    Some(response)
}

/// Tells SDKs whether to retry. An SDK should retry only if the wait time is short enough that the
/// SDK obeys `Retry-After`.
fn put_should_retry(denial: &Denial<'_>, headers: &mut HeaderMap) {
    if denial.cause == Cause::Malformed {
        return;
    }
    let is_short = denial
        .retry_after
        .is_some_and(|wait| wait <= LONGEST_SDK_WAIT);
    let value = if is_short { "true" } else { "false" };
    headers.insert(SHOULD_RETRY, HeaderValue::from_static(value));
}

fn openai(denial: &Denial<'_>) -> Value {
    let (kind, code) = match denial.cause {
        Cause::Spent | Cause::Blocked => ("rate_limit_exceeded", Some("rate_limit_exceeded")),
        Cause::Store | Cause::Busy | Cause::Capacity => {
            ("server_error", Some("service_unavailable"))
        }
        Cause::Malformed => ("invalid_request_error", None),
    };
    json!({"error": {"message": denial.detail, "type": kind, "param": null, "code": code}})
}

fn anthropic(denial: &Denial<'_>) -> Value {
    let kind = match denial.cause {
        Cause::Spent | Cause::Blocked => "rate_limit_error",
        Cause::Store => "api_error",
        Cause::Busy | Cause::Capacity => "overloaded_error",
        Cause::Malformed => "invalid_request_error",
    };
    json!({"type": "error", "error": {"type": kind, "message": denial.detail}})
}

fn gemini(denial: &Denial<'_>) -> Value {
    let status = match denial.cause {
        Cause::Spent | Cause::Blocked => "RESOURCE_EXHAUSTED",
        Cause::Store | Cause::Busy | Cause::Capacity => "UNAVAILABLE",
        Cause::Malformed => "INVALID_ARGUMENT",
    };
    let mut error = json!({
        "code": denial.status().as_u16(),
        "message": denial.detail,
        "status": status,
    });
    if let Some(wait) = denial.retry_after {
        error["details"] = json!([{
            "@type": "type.googleapis.com/google.rpc.RetryInfo",
            "retryDelay": format!("{}s", wait.as_secs_ceil()),
        }]);
    }
    json!({ "error": error })
}

#[cfg(test)]
mod tests {
    use http::Request;

    use super::*;

    fn format(path: &str, headers: &[&str]) -> ErrorFormat {
        let mut request = Request::post(path);
        for name in headers {
            request = request.header(*name, "x");
        }
        let (head, ()) = request.body(()).unwrap().into_parts();
        ErrorFormat::Auto.resolve(&head)
    }

    #[test]
    fn the_request_shows_its_api() {
        for (path, headers, expected) in [
            ("/v1/chat/completions", &[][..], ErrorFormat::OpenAi),
            (
                "/openai/deployments/x/chat/completions?v=1",
                &[],
                ErrorFormat::OpenAi,
            ),
            ("/v1/responses", &[], ErrorFormat::OpenAi),
            ("/anything", &["x-stainless-lang"], ErrorFormat::OpenAi),
            (
                "/v1/messages",
                &["anthropic-version", "x-stainless-lang"],
                ErrorFormat::Anthropic,
            ),
            ("/v1/messages", &[], ErrorFormat::Problem),
            ("/v1beta/models/m:generateContent", &[], ErrorFormat::Gemini),
            ("/v1beta/models", &["x-goog-api-key"], ErrorFormat::Gemini),
            ("/api/responses", &["accept"], ErrorFormat::Problem),
        ] {
            assert_eq!(format(path, headers), expected, "{path} {headers:?}");
        }
        let (head, ()) = Request::new(()).into_parts();
        assert_eq!(ErrorFormat::Gemini.resolve(&head), ErrorFormat::Gemini);
    }

    fn denial(cause: Cause, wait: Option<u64>) -> Denial<'static> {
        Denial {
            cause,
            detail: "100/min exceeded".to_owned(),
            violated: Vec::new(),
            retry_after: wait.map(Span::from_secs),
        }
    }

    fn body(denial: &Denial<'_>, format: ErrorFormat) -> (u16, Option<String>, Value) {
        let response = response(denial, format).unwrap();
        let retry = response.headers().get(SHOULD_RETRY);
        let retry = retry.map(|value| value.to_str().unwrap().to_owned());
        let body = serde_json::from_slice(response.body()).unwrap();
        (response.status().as_u16(), retry, body)
    }

    #[test]
    fn a_denial_has_the_format_of_the_api() {
        let spent = denial(Cause::Spent, Some(34));
        let rendered = |format| body(&spent, format);
        assert_eq!(
            rendered(ErrorFormat::OpenAi),
            (
                429,
                Some("true".to_owned()),
                json!({"error": {
                    "message": "100/min exceeded", "type": "rate_limit_exceeded", "param": null,
                    "code": "rate_limit_exceeded",
                }})
            )
        );
        assert_eq!(
            rendered(ErrorFormat::Anthropic).2,
            json!({"type": "error", "error": {
                "type": "rate_limit_error", "message": "100/min exceeded",
            }})
        );
        assert_eq!(
            rendered(ErrorFormat::Gemini).2,
            json!({"error": {
                "code": 429, "message": "100/min exceeded", "status": "RESOURCE_EXHAUSTED",
                "details": [{
                    "@type": "type.googleapis.com/google.rpc.RetryInfo", "retryDelay": "34s",
                }],
            }})
        );
        assert!(response(&spent, ErrorFormat::Problem).is_none());
    }

    #[test]
    fn other_causes_have_their_own_status_and_type() {
        for (cause, status, openai, anthropic, gemini) in [
            (
                Cause::Blocked,
                429,
                "rate_limit_exceeded",
                "rate_limit_error",
                "RESOURCE_EXHAUSTED",
            ),
            (
                Cause::Store,
                503,
                "server_error",
                "api_error",
                "UNAVAILABLE",
            ),
            (
                Cause::Busy,
                503,
                "server_error",
                "overloaded_error",
                "UNAVAILABLE",
            ),
            (
                Cause::Malformed,
                400,
                "invalid_request_error",
                "invalid_request_error",
                "INVALID_ARGUMENT",
            ),
        ] {
            let denial = denial(cause, None);
            let rendered = |format| body(&denial, format);
            assert_eq!(rendered(ErrorFormat::OpenAi).0, status);
            assert_eq!(rendered(ErrorFormat::OpenAi).2["error"]["type"], openai);
            assert_eq!(
                rendered(ErrorFormat::Anthropic).2["error"]["type"],
                anthropic
            );
            assert_eq!(rendered(ErrorFormat::Gemini).2["error"]["status"], gemini);
            assert_eq!(
                rendered(ErrorFormat::Gemini).2["error"].get("details"),
                None
            );
        }
    }

    #[test]
    fn an_sdk_retries_only_if_it_waits_long_enough() {
        for (wait, expected) in [
            (Some(1), "true"),
            (Some(60), "true"),
            (Some(61), "false"),
            (None, "false"),
        ] {
            let (_, retry, _) = body(&denial(Cause::Spent, wait), ErrorFormat::OpenAi);
            assert_eq!(retry.as_deref(), Some(expected), "{wait:?}");
        }
        let malformed = denial(Cause::Malformed, None);
        assert_eq!(body(&malformed, ErrorFormat::OpenAi).1, None);
    }
}
