//! The operator commands, which send requests to the admin endpoint of a running server.

use std::process::ExitCode;

use percent_encoding::{NON_ALPHANUMERIC, utf8_percent_encode};
use serde_json::{Value, json};
use ureq::http::Method;

use crate::{
    NO, answer,
    args::{Admin, Key, KeyOrThrottle},
    complain, print, tls,
};

/// The timeout of a request.
const TIMEOUT: std::time::Duration = std::time::Duration::from_secs(10);

/// The response of the server.
enum AdminResponse {
    /// Success, with the document.
    Document(Value),
    /// Not found, or a file has mistakes; one message per line.
    Problems(Vec<String>),
}

pub(crate) fn status(admin: &Admin) -> Result<ExitCode, String> {
    let status = send(admin, Method::GET, "/v1/status", None)?;
    let is_ready = match &status {
        AdminResponse::Document(status) => status["ready"] == true,
        AdminResponse::Problems(_) => false,
    };
    let shown = show(admin, status, print::status);
    Ok(if is_ready { shown } else { ExitCode::from(NO) })
}

pub(crate) fn rules(admin: &Admin) -> Result<ExitCode, String> {
    let rules = send(admin, Method::GET, "/v1/rules", None)?;
    Ok(show(admin, rules, print::rules))
}

pub(crate) fn reload(admin: &Admin) -> Result<ExitCode, String> {
    let reloaded = send(admin, Method::POST, "/v1/reload", None)?;
    Ok(show(admin, reloaded, print::reloaded))
}

pub(crate) fn block(
    admin: &Admin,
    key: &Key,
    span: Option<String>,
    reason: Option<String>,
) -> Result<ExitCode, String> {
    let mut body = serde_json::Map::new();
    body.extend(span.map(|span| ("for".to_owned(), json!(span))));
    body.extend(reason.map(|reason| ("reason".to_owned(), json!(reason))));
    let path = key_path("blocks", &key.rule, &key.values);
    let blocked = send(admin, Method::PUT, &path, Some(Value::Object(body)))?;
    Ok(show(admin, blocked, print::blocked))
}

pub(crate) fn unblock(admin: &Admin, key: &Key) -> Result<ExitCode, String> {
    let path = key_path("blocks", &key.rule, &key.values);
    let lifted = send(admin, Method::DELETE, &path, None)?;
    Ok(show(admin, lifted, |done| print::done("unblocked", done)))
}

pub(crate) fn blocks(admin: &Admin) -> Result<ExitCode, String> {
    let blocks = send(admin, Method::GET, "/v1/blocks", None)?;
    Ok(show(admin, blocks, print::blocks))
}

pub(crate) fn inspect(admin: &Admin, key: &Key) -> Result<ExitCode, String> {
    let path = key_path("keys", &key.rule, &key.values);
    let inspected = send(admin, Method::GET, &path, None)?;
    Ok(show(admin, inspected, print::inspected))
}

pub(crate) fn reset(admin: &Admin, key: &KeyOrThrottle) -> Result<ExitCode, String> {
    let path = match (&key.throttle, &key.rule) {
        (Some(throttle), _) => format!("/v1/throttles/{}", encoded(throttle)),
        (None, rule) => key_path("keys", rule.as_deref().unwrap_or_default(), &key.values),
    };
    let reset = send(admin, Method::DELETE, &path, None)?;
    Ok(show(admin, reset, |done| print::done("reset", done)))
}

fn encoded(text: &str) -> String {
    utf8_percent_encode(text, NON_ALPHANUMERIC).to_string()
}

fn key_path(what: &str, rule: &str, values: &[String]) -> String {
    let values: String = values
        .iter()
        .map(|value| format!("/{}", encoded(value)))
        .collect();
    format!("/v1/{what}/{}{values}", encoded(rule))
}

/// Prints the response: as JSON with `--json`, else in the form that `print` returns.
fn show(admin: &Admin, response: AdminResponse, print: impl FnOnce(&Value) -> String) -> ExitCode {
    match response {
        AdminResponse::Document(document) if admin.json => {
            // Serialization to memory fails only for maps with keys that are not strings.
            answer(&serde_json::to_string_pretty(&document).unwrap_or_default());
            ExitCode::SUCCESS
        }
        AdminResponse::Document(document) => {
            answer(print(&document).trim_end());
            ExitCode::SUCCESS
        }
        AdminResponse::Problems(problems) => {
            problems.iter().for_each(|problem| complain(problem));
            ExitCode::from(NO)
        }
    }
}

/// Sends a request to the admin endpoint.
fn send(
    admin: &Admin,
    method: Method,
    path: &str,
    body: Option<Value>,
) -> Result<AdminResponse, String> {
    let given = admin.address.trim_end_matches('/');
    let (address, is_https) = match given.strip_prefix("https://") {
        Some(address) => (address, true),
        None => (given.trim_start_matches("http://"), false),
    };
    let tls = tls::config(admin)?;
    if is_https && tls.is_none() {
        return Err(format!(
            "{given}: name the authority of its certificate with --admin-ca"
        ));
    }
    let scheme = if tls.is_some() { "https" } else { "http" };
    let url = format!("{scheme}://{address}{path}");
    let agent: ureq::Agent = ureq::Agent::config_builder()
        .http_status_as_error(false)
        .timeout_global(Some(TIMEOUT))
        .tls_config(tls.unwrap_or_default())
        .build()
        .into();
    let mut request = ureq::http::Request::builder().method(method).uri(&url);
    if let Some(token) = &admin.token {
        request = request.header("authorization", format!("Bearer {token}"));
    }
    let text = body.map(|body| body.to_string()).unwrap_or_default();
    let request = request
        .body(text)
        .map_err(|error| format!("cannot send a request to {url}: {error}"))?;
    let mut response = agent.run(request).map_err(|error| {
        format!("cannot reach the admin endpoint at {address}: {error}; is the server running?")
    })?;
    let text = response
        .body_mut()
        .read_to_string()
        .map_err(|error| format!("cannot read the response from {url}: {error}"))?;
    let document: Value = serde_json::from_str(&text).unwrap_or(Value::Null);
    let detail = document["detail"].as_str().map(str::to_owned);
    let detail = detail.unwrap_or_else(|| text.trim_end().to_owned());
    match response.status().as_u16() {
        200..=299 if document.is_object() => Ok(AdminResponse::Document(document)),
        200..=299 => Err(not_admin(address)),
        404 if detail.starts_with("there is nothing at this path") || document.is_null() => {
            Err(not_admin(address))
        }
        404 => Ok(AdminResponse::Problems(vec![detail])),
        // A file with mistakes. Print each on its own line.
        422 => {
            let mistakes = document["mistakes"].as_array().into_iter().flatten();
            let mistakes = mistakes.filter_map(Value::as_str).map(str::to_owned);
            Ok(AdminResponse::Problems(std::iter::once(detail).chain(mistakes).collect()))
        }
        401 => Err(match &admin.token {
            None => "the server requires its admin token; pass it with --token, or in TIDEGATE_ADMIN_TOKEN",
            Some(_) => "the server has a different admin token; see `admin` in its rules file",
        }
        .to_owned()),
        status => Err(format!("the admin endpoint returned status {status}: {detail}")),
    }
}

fn not_admin(address: &str) -> String {
    format!("{address} is not a Tidegate admin endpoint; pass its address with --admin")
}
