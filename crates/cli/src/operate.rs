//! The operator's verbs, asked of the admin door of a running server.

use std::process::ExitCode;

use percent_encoding::{NON_ALPHANUMERIC, utf8_percent_encode};
use serde_json::{Value, json};
use ureq::http::Method;

use crate::{
    NO, answer,
    args::{Door, Key},
    complain,
};

pub(crate) fn block(
    door: &Door,
    key: &Key,
    span: Option<String>,
    reason: Option<String>,
) -> Result<ExitCode, String> {
    let mut body = serde_json::Map::new();
    body.extend(span.map(|span| ("for".to_owned(), json!(span))));
    body.extend(reason.map(|reason| ("reason".to_owned(), json!(reason))));
    ask(
        door,
        Method::PUT,
        &key_path("blocks", key),
        Some(Value::Object(body)),
    )
}

pub(crate) fn unblock(door: &Door, key: &Key) -> Result<ExitCode, String> {
    ask(door, Method::DELETE, &key_path("blocks", key), None)
}

pub(crate) fn blocks(door: &Door) -> Result<ExitCode, String> {
    ask(door, Method::GET, "/v1/blocks", None)
}

pub(crate) fn inspect(door: &Door, key: &Key) -> Result<ExitCode, String> {
    ask(door, Method::GET, &key_path("keys", key), None)
}

pub(crate) fn reset(door: &Door, key: &Key) -> Result<ExitCode, String> {
    ask(door, Method::DELETE, &key_path("keys", key), None)
}

fn key_path(what: &str, key: &Key) -> String {
    let encoded = |text: &str| utf8_percent_encode(text, NON_ALPHANUMERIC).to_string();
    let values: String = key
        .values
        .iter()
        .map(|value| format!("/{}", encoded(value)))
        .collect();
    format!("/v1/{what}/{}{values}", encoded(&key.rule))
}

/// Asks the admin door and prints what it answers: no for what is not there, trouble for all other refusals.
fn ask(door: &Door, method: Method, path: &str, body: Option<Value>) -> Result<ExitCode, String> {
    let address = door
        .admin
        .trim_start_matches("http://")
        .trim_end_matches('/');
    let url = format!("http://{address}{path}");
    let agent: ureq::Agent = ureq::Agent::config_builder()
        .http_status_as_error(false)
        .timeout_global(Some(std::time::Duration::from_secs(10)))
        .build()
        .into();
    let mut request = ureq::http::Request::builder().method(method).uri(&url);
    if let Some(token) = &door.token {
        request = request.header("authorization", format!("Bearer {token}"));
    }
    let text = body.map(|body| body.to_string()).unwrap_or_default();
    let request = request
        .body(text)
        .map_err(|error| format!("cannot ask {url}: {error}"))?;
    let mut response = agent.run(request).map_err(|error| {
        format!("cannot reach the admin door at {address}: {error}; is the server running?")
    })?;
    let text = response
        .body_mut()
        .read_to_string()
        .map_err(|error| format!("{url} broke off: {error}"))?;
    match response.status().as_u16() {
        200..=299 => {
            answer(&pretty(&text));
            Ok(ExitCode::SUCCESS)
        }
        404 if !is_admin_door(&text) => Err(format!(
            "{address} is no admin door; name that of the server with --admin"
        )),
        404 => {
            complain(&problem(&text));
            Ok(ExitCode::from(NO))
        }
        401 => Err(match &door.token {
            None => {
                "the admin door wants its token: name it with --token, or in TIDEGATE_ADMIN_TOKEN"
            }
            Some(_) => "the admin door has another token; see `admin` in the server's rules file",
        }
        .to_owned()),
        status => Err(format!(
            "the admin door answered {status}: {}",
            problem(&text)
        )),
    }
}

/// Whether who answered 404 knows the paths of an admin door: other doors of ours, and other programs, do not.
fn is_admin_door(text: &str) -> bool {
    let problem = problem(text);
    !problem.starts_with("there is nothing at this path")
}

fn pretty(text: &str) -> String {
    let parsed =
        serde_json::from_str::<Value>(text).and_then(|value| serde_json::to_string_pretty(&value));
    parsed.unwrap_or_else(|_| text.trim_end().to_owned())
}

/// What a problem document says, or else the text itself.
fn problem(text: &str) -> String {
    let detail = serde_json::from_str::<Value>(text)
        .ok()
        .and_then(|value| value["detail"].as_str().map(str::to_owned));
    detail.unwrap_or_else(|| text.trim_end().to_owned())
}
