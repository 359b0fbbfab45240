//! Problem details (RFC 9457). Problem details say what is wrong with a request, where the error
//! is, and what to send instead.

use std::borrow::Cow;

use hyper::{
    StatusCode,
    header::{ALLOW, CONTENT_TYPE, HeaderValue, RETRY_AFTER, WWW_AUTHENTICATE},
};
use serde::Serialize;
use tidegate_core::{RequestError, Span};

use crate::response::{Answer, json};

/// An error response. A request denied by a limit gets a verdict instead.
#[derive(Debug, Serialize)]
pub struct Problem {
    title: &'static str,
    #[serde(serialize_with = "as_number")]
    status: StatusCode,
    detail: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    field: Option<String>,
    /// The list of all errors, if there are several.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    mistakes: Vec<String>,
    #[serde(skip)]
    allow: Option<Cow<'static, str>>,
    #[serde(skip)]
    retry_after_secs: Option<u16>,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde passes references")]
fn as_number<S: serde::Serializer>(status: &StatusCode, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_u16(status.as_u16())
}

impl Problem {
    /// Creates a problem with this status.
    pub fn new(status: StatusCode, detail: impl Into<String>) -> Self {
        let title = status.canonical_reason().unwrap_or("Problem");
        Self {
            title,
            status,
            detail: detail.into(),
            field: None,
            mistakes: Vec::new(),
            allow: None,
            retry_after_secs: None,
        }
    }

    /// Reports that too many invalid secrets came from the client's address.
    pub fn too_many_guesses(retry_after: Span) -> Self {
        let detail = "too many invalid secrets from this address; retry after the number of seconds in `Retry-After`";
        Self {
            retry_after_secs: u16::try_from(retry_after.as_micros().div_ceil(1_000_000)).ok(),
            ..Self::new(StatusCode::TOO_MANY_REQUESTS, detail)
        }
    }

    /// Replaces the problem's status.
    #[must_use]
    pub fn with_status(self, status: StatusCode) -> Self {
        let title = status.canonical_reason().unwrap_or("Problem");
        Self {
            title,
            status,
            ..self
        }
    }

    /// Returns whether the problem is caused by a malformed request.
    pub fn is_bad_request(&self) -> bool {
        self.status == StatusCode::BAD_REQUEST
    }

    /// Reports a malformed request, in which `field` is invalid.
    pub fn bad(field: impl Into<String>, problem: impl AsRef<str>) -> Self {
        let field = field.into();
        let detail = format!("{field}: {}", problem.as_ref());
        Self {
            field: Some(field),
            ..Self::new(StatusCode::BAD_REQUEST, detail)
        }
    }

    /// Combines several problems into one. The first problem becomes the detail, and at most 50
    /// problems are listed in total.
    pub fn several(mut problems: Vec<Self>) -> Self {
        const LISTED: usize = 50;
        let mistakes: Vec<String> = problems
            .iter()
            .take(LISTED)
            .map(|problem| problem.detail.clone())
            .collect();
        if problems.is_empty() {
            return Self::new(StatusCode::BAD_REQUEST, "the request is invalid");
        }
        let first = problems.swap_remove(0);
        if mistakes.len() > 1 {
            Self { mistakes, ..first }
        } else {
            first
        }
    }

    /// Adds the list of all errors.
    #[must_use]
    pub fn with_mistakes(self, mistakes: Vec<String>) -> Self {
        Self { mistakes, ..self }
    }

    /// Reports an unknown path; `known` lists the known paths.
    pub fn not_found(known: &str) -> Self {
        Self::new(
            StatusCode::NOT_FOUND,
            format!("there is nothing at this path; the paths are {known}"),
        )
    }

    /// Reports a method that is not in the list `allow`.
    pub fn method(allow: impl Into<Cow<'static, str>>) -> Self {
        let allow = allow.into();
        let detail = format!("this path accepts only {allow}");
        Self {
            allow: Some(allow),
            ..Self::new(StatusCode::METHOD_NOT_ALLOWED, detail)
        }
    }

    /// Reports a body of more than `most` bytes.
    pub fn too_large(most: usize) -> Self {
        Self::new(
            StatusCode::PAYLOAD_TOO_LARGE,
            format!("the body exceeds the maximum of {most} bytes"),
        )
    }

    /// Reports a JSON syntax error with its line and column.
    pub fn json(error: &serde_json::Error) -> Self {
        Self::bad("body", format!("is not JSON: {error}"))
    }

    /// Returns the description of the problem in one line.
    pub fn detail(&self) -> &str {
        &self.detail
    }

    /// Serialises the document without HTTP headers, for callers that write the headers themselves.
    pub fn document(&self) -> Vec<u8> {
        // Serialising numbers and strings never fails.
        serde_json::to_vec(self).unwrap_or_default()
    }

    /// Returns the response.
    pub fn answer(self) -> Answer {
        let mut answer = json(self.status, &self);
        let headers = answer.headers_mut();
        headers.insert(
            CONTENT_TYPE,
            HeaderValue::from_static("application/problem+json"),
        );
        // Method names are valid in a header.
        if let Some(allow) = self
            .allow
            .and_then(|allow| HeaderValue::from_str(&allow).ok())
        {
            headers.insert(ALLOW, allow);
        }
        if let Some(secs) = self.retry_after_secs {
            headers.insert(RETRY_AFTER, HeaderValue::from(secs));
        }
        if self.status == StatusCode::UNAUTHORIZED {
            headers.insert(WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        answer
    }
}

impl From<RequestError> for Problem {
    fn from(error: RequestError) -> Self {
        let problem = error.explained();
        Self::bad(error.field, problem)
    }
}
