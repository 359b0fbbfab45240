//! Limitador's HTTP API: `/check`, `/report`, `/check_and_report`, `/limits/{namespace}`,
//! `/counters/{namespace}` and `/status`.
//!
//! Bodies and status codes are the same as in Limitador, with one exception: the response to a bad
//! request contains problem details (RFC 9457), because Limitador's own response to it has no fixed
//! format.

use hyper::{HeaderMap, Method, StatusCode, header::HeaderValue};
use percent_encoding::percent_decode_str;
use serde_json::{Map, Value, json};
use tidegate_limiter::{ServerLimiter, date::rfc3339, metrics::ListenerKind};
use tidegate_net::{
    Problem,
    json::{Json, Members, object},
    response::{self, Answer},
};

use super::{text, wrong};
use crate::{
    Code, MAX_DESCRIPTOR_ENTRIES, RateLimitService, RlsError,
    limitador::{ApplicableLimit, HttpAnswer, HttpRequest, ListedCounter},
    rules::limitador::LimitadorLimit,
};

/// An endpoint of the API.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LimitadorEndpoint {
    /// `POST /check`
    Check,
    /// `POST /report`
    Report,
    /// `POST /check_and_report`
    CheckAndReport,
    /// `GET /limits/{namespace}`
    Limits,
    /// `GET /counters/{namespace}`
    Counters,
    /// `GET /status`
    Status,
}

impl LimitadorEndpoint {
    /// Returns the endpoint with this path, if there is one.
    #[must_use]
    pub fn of(path: &str) -> Option<Self> {
        Some(match path {
            "/check" => Self::Check,
            "/report" => Self::Report,
            "/check_and_report" => Self::CheckAndReport,
            "/status" => Self::Status,
            _ if namespace_in(path, "/limits/").is_some() => Self::Limits,
            _ if namespace_in(path, "/counters/").is_some() => Self::Counters,
            _ => return None,
        })
    }

    /// Returns the method of the endpoint.
    #[must_use]
    pub fn method(self) -> Method {
        match self {
            Self::Check | Self::Report | Self::CheckAndReport => Method::POST,
            Self::Limits | Self::Counters | Self::Status => Method::GET,
        }
    }
}

/// Responds to a request to `endpoint`. The caller must have checked the request's method.
///
/// # Errors
///
/// Returns a [`Problem`] if the request is invalid.
pub async fn answer_limitador(
    limiter: &ServerLimiter,
    service: &RateLimitService,
    endpoint: LimitadorEndpoint,
    path: &str,
    body: &[u8],
) -> Result<Answer, Problem> {
    let answered = match endpoint {
        LimitadorEndpoint::Check => {
            let (request, _) = read(body)?;
            let checked = service.limitador_check(request).await;
            checked.map(|code| count_and_set_status(limiter, code, checked_body(code)))
        }
        LimitadorEndpoint::Report => {
            let (request, _) = read(body)?;
            let reported = service.limitador_report(request).await;
            reported.map(|()| response::json(StatusCode::OK, &Value::Null))
        }
        LimitadorEndpoint::CheckAndReport => {
            let (request, headers) = read(body)?;
            let answer = service.limitador_check_and_report(request).await;
            answer.map(|answer| checked_and_reported(limiter, &answer, headers))
        }
        LimitadorEndpoint::Limits => {
            let namespace = decoded(namespace_in(path, "/limits/").unwrap_or_default())?;
            let limits = service.limitador_limits(&namespace);
            limits.map(|limits| listed(limits.iter().map(|limit| limit_body(&namespace, limit))))
        }
        LimitadorEndpoint::Counters => {
            let namespace = decoded(namespace_in(path, "/counters/").unwrap_or_default())?;
            match service.limitador_counters(&namespace).await {
                Ok(Some(counters)) => {
                    let bodies = counters
                        .iter()
                        .map(|counter| counter_body(&namespace, counter));
                    Ok(listed(bodies))
                }
                Ok(None) => return Err(not_listed()),
                Err(error) => Err(error),
            }
        }
        LimitadorEndpoint::Status => Ok(status(limiter)),
    };
    answered.or_else(|error| failed(&error))
}

/// The rate limit headers that the client has requested.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum RequestedHeaders {
    None,
    Draft03,
}

/// Parses the body of a request.
fn read(body: &[u8]) -> Result<(HttpRequest, RequestedHeaders), Problem> {
    let members = object(body)?;
    let mut request = HttpRequest::default();
    let (mut delta, mut headers) = (None, RequestedHeaders::None);
    for (name, value) in &members {
        match (&**name, value) {
            ("namespace", Json::Text(text)) => request.namespace = text.to_string(),
            ("namespace", other) => return Err(expected("namespace", "a string", other)),
            ("values", Json::Object(values)) => request.values = entries(values)?,
            ("values", other) => return Err(expected("values", "an object of strings", other)),
            ("delta", Json::Whole(number)) => delta = Some(*number),
            ("delta", other) => return Err(expected("delta", "a whole number", other)),
            ("response_headers", Json::Null) => {}
            ("response_headers", Json::Text(text)) => headers = headers_of(text),
            ("response_headers", other) => {
                return Err(expected("response_headers", "a string", other));
            }
            // Limitador ignores unknown fields.
            _ => {}
        }
    }
    request.delta = delta.ok_or_else(|| wrong("delta", "is missing; set it to a whole number"))?;
    if request.namespace.is_empty() {
        return Err(wrong(
            "namespace",
            "is missing; name a namespace of the limits file",
        ));
    }
    if !members.iter().any(|(name, _)| &**name == "values") {
        return Err(wrong(
            "values",
            "is missing; set it to an object of strings",
        ));
    }
    Ok((request, headers))
}

/// Returns the headers that `name` selects. Like Limitador, selects no headers for an unknown name.
fn headers_of(name: &str) -> RequestedHeaders {
    match name {
        "DraftVersion03" | "DRAFT_VERSION_03" => RequestedHeaders::Draft03,
        _ => RequestedHeaders::None,
    }
}

fn entries(values: &Members<'_>) -> Result<Vec<(String, String)>, Problem> {
    if values.len() > MAX_DESCRIPTOR_ENTRIES {
        let count = values.len();
        let problem = format!("{count} values exceed the maximum of {MAX_DESCRIPTOR_ENTRIES}");
        return Err(wrong("values", &problem));
    }
    let entry = |(name, value): &(_, Json<'_>)| match value {
        Json::Text(text) => Ok((format!("{name}"), text.to_string())),
        other => Err(expected("values", "strings", other)),
    };
    values.iter().map(entry).collect()
}

fn expected(field: &str, what: &str, got: &Json<'_>) -> Problem {
    wrong(field, &format!("expected {what}, got {got}"))
}

fn namespace_in<'p>(path: &'p str, prefix: &str) -> Option<&'p str> {
    let namespace = path.strip_prefix(prefix)?;
    (!namespace.is_empty() && !namespace.contains('/')).then_some(namespace)
}

fn decoded(namespace: &str) -> Result<String, Problem> {
    let decoded = percent_decode_str(namespace).decode_utf8();
    let decoded = decoded.map_err(|_| wrong("namespace", "is not UTF-8"))?;
    Ok(decoded.into_owned())
}

/// Counts a decision in the metrics, and sets the status of its response.
fn count_and_set_status(limiter: &ServerLimiter, code: Code, mut answer: Answer) -> Answer {
    let is_over = code == Code::OverLimit;
    limiter
        .metrics()
        .observe_response(ListenerKind::Http, is_over);
    if is_over {
        *answer.status_mut() = StatusCode::TOO_MANY_REQUESTS;
    }
    answer
}

fn checked_body(code: Code) -> Answer {
    match code {
        Code::Ok => response::json(StatusCode::OK, &Value::Null),
        Code::OverLimit => text(StatusCode::TOO_MANY_REQUESTS, "Too many requests"),
    }
}

fn checked_and_reported(
    limiter: &ServerLimiter,
    answer: &HttpAnswer,
    headers: RequestedHeaders,
) -> Answer {
    let body = response::json(StatusCode::OK, &Value::Null);
    let mut response = count_and_set_status(limiter, answer.code, body);
    if headers == RequestedHeaders::Draft03 {
        add_headers(response.headers_mut(), &answer.limits);
    }
    response
}

/// Adds the headers from `draft-polli-ratelimit-headers-03`, as Limitador does.
fn add_headers(headers: &mut HeaderMap, limits: &[ApplicableLimit]) {
    let Some(first) = limits.first() else { return };
    let mut policies = first.max_value.to_string();
    for limit in limits {
        policies.push_str(&format!(", {};w={}", limit.max_value, limit.seconds));
        if let Some(name) = &limit.name {
            let visible: String = name.chars().filter(|c| matches!(c, ' '..='~')).collect();
            policies.push_str(&format!(";name=\"{}\"", visible.replace('"', "'")));
        }
    }
    let reset = first.reset_after.as_secs_ceil().to_string();
    for (name, value) in [
        ("x-ratelimit-limit", policies),
        ("x-ratelimit-remaining", first.remaining.to_string()),
        ("x-ratelimit-reset", reset),
    ] {
        // The conversion never fails, because only printable ASCII characters of the limit names
        // are used.
        if let Ok(value) = HeaderValue::try_from(value) {
            headers.insert(name, value);
        }
    }
}

fn listed(bodies: impl Iterator<Item = Value>) -> Answer {
    response::json(StatusCode::OK, &Value::Array(bodies.collect()))
}

fn limit_body(namespace: &str, limit: &LimitadorLimit) -> Value {
    let conditions = limit.conditions.iter().map(|condition| &*condition.source);
    let variables = limit.variables.iter().map(|variable| &*variable.source);
    json!({
        "id": limit.id,
        "namespace": namespace,
        "max_value": limit.max_value,
        "seconds": limit.seconds,
        "name": limit.name,
        "conditions": conditions.collect::<Vec<_>>(),
        "variables": variables.collect::<Vec<_>>(),
    })
}

fn counter_body(namespace: &str, counter: &ListedCounter) -> Value {
    let variables = counter.variables.iter();
    let variables: Map<String, Value> = variables
        .map(|(name, value)| (name.to_string(), json!(value)))
        .collect();
    json!({
        "limit": limit_body(namespace, &counter.limit),
        "set_variables": variables,
        "remaining": counter.remaining,
        "expires_in_seconds": counter.expires_in.as_secs_ceil(),
    })
}

fn status(limiter: &ServerLimiter) -> Answer {
    let started = rfc3339(limiter.metrics().started());
    response::json(StatusCode::OK, &json!({"started_at": started}))
}

fn not_listed() -> Problem {
    let detail = "with Redis, counters are not listed; this endpoint needs the memory store";
    Problem::new(StatusCode::NOT_IMPLEMENTED, detail)
}

fn failed(error: &RlsError) -> Result<Answer, Problem> {
    if error.is_ours() {
        let problem = Problem::new(StatusCode::INTERNAL_SERVER_ERROR, error.to_string());
        return Ok(problem.answer());
    }
    Err(Problem::new(StatusCode::BAD_REQUEST, error.to_string()))
}
