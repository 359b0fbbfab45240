//! `listen`, `headers` and `admin`: where the server is asked, and how it answers.

use std::net::SocketAddr;

use super::{
    AdminToken, Headers, LegacyHeaders, Listen,
    report::Report,
    value::{Fields, Value},
};

/// The longest token, in bytes.
const MAX_TOKEN_BYTES: usize = 4_096;

pub(super) fn listen(file: &Fields<'_>, token: &AdminToken, report: &mut Report) -> Listen {
    let mut listen = Listen::default();
    let value = file.get("listen");
    let known = &["http", "grpc", "resp", "admin"];
    let Some(fields) = value.and_then(|value| value.fields(report, "a map of addresses", known))
    else {
        return listen;
    };
    let mut read = |name, default| match fields.get(name) {
        Some(value) => address(value, report).unwrap_or(None),
        None => default,
    };
    listen.http = read("http", listen.http);
    listen.resp = read("resp", listen.resp);
    listen.admin = read("admin", listen.admin);
    listen.grpc = read("grpc", listen.grpc);
    if *token == AdminToken::None
        && listen
            .admin
            .is_some_and(|address| !address.ip().is_loopback())
    {
        let message = "other machines can reach this address; set admin.token or admin.token_env, \
                       or listen on 127.0.0.1";
        fields.wrong(report, "admin", message);
    }
    check_distinct(&listen.doors(), &fields, report);
    listen
}

/// A door by its name, and where it is; `None` is one that stays shut.
type Door = (&'static str, Option<SocketAddr>);

/// The one of `doors` that has taken `address`; port 0 is a new port each time.
pub(super) fn taken_by(doors: &[Door], address: SocketAddr) -> Option<&'static str> {
    let has_it = |(_, door): &&Door| *door == Some(address) && address.port() != 0;
    doors.iter().find(has_it).map(|(name, _)| *name)
}

/// Two doors cannot share an address.
fn check_distinct(doors: &[Door], fields: &Fields<'_>, report: &mut Report) {
    for (at, &(name, address)) in doors.iter().enumerate() {
        let Some(address) = address else {
            continue;
        };
        if let Some(other) = taken_by(&doors[..at], address) {
            // The default of the one may be what was written for the other.
            let (name, other) = if fields.get(name).is_some() {
                (name, other)
            } else {
                (other, name)
            };
            fields.wrong(
                report,
                name,
                format!("{address} is the address of listen.{other} too"),
            );
        }
    }
}

/// An address, or `Some(None)` for a door that stays shut.
fn address(value: &Value<'_>, report: &mut Report) -> Option<Option<SocketAddr>> {
    let what = "an address and port such as 127.0.0.1:8080, or off";
    let text = value.text(report, what)?;
    if text == "off" {
        return Some(None);
    }
    let address = text.parse().ok();
    if address.is_none() {
        value.expected(report, what);
    }
    address.map(Some)
}

pub(super) fn headers(file: &Fields<'_>, report: &mut Report) -> Headers {
    let mut headers = Headers::default();
    let value = file.get("headers");
    let known = &["ratelimit", "legacy"];
    let Some(fields) = value.and_then(|value| value.fields(report, "a map of headers", known))
    else {
        return headers;
    };
    if let Some(ratelimit) = fields.get("ratelimit") {
        headers.ratelimit = ratelimit.flag(report).unwrap_or(headers.ratelimit);
    }
    if let Some(legacy) = fields.get("legacy") {
        let choices = [
            ("off", LegacyHeaders::Off),
            ("delta", LegacyHeaders::Delta),
            ("epoch", LegacyHeaders::Epoch),
        ];
        headers.legacy = legacy.choice(report, &choices).unwrap_or_default();
    }
    headers
}

pub(super) fn admin_token(file: &Fields<'_>, report: &mut Report) -> AdminToken {
    let value = file.get("admin");
    let known = &["token", "token_env"];
    let Some(fields) = value.and_then(|value| value.fields(report, "a map with a token", known))
    else {
        return AdminToken::None;
    };
    match (fields.get("token"), fields.get("token_env")) {
        (Some(token), Some(env)) => {
            env.wrong(
                report,
                "the token stands in the file already; remove one of the two",
            );
            literal(token, report)
        }
        (Some(token), None) => literal(token, report),
        (None, Some(env)) => variable(env, report),
        (None, None) => AdminToken::None,
    }
}

/// A mistake never shows the token. What is wrong with it stands for a token, so that only that is reported.
fn literal(value: &Value<'_>, report: &mut Report) -> AdminToken {
    let text = value.scalar().unwrap_or_default();
    let is_sound = (1..=MAX_TOKEN_BYTES).contains(&text.len())
        && text.bytes().all(|byte| byte.is_ascii_graphic());
    if !is_sound {
        let message =
            format!("must be 1 to {MAX_TOKEN_BYTES} printable ASCII characters without spaces");
        value.wrong(report, message);
    }
    AdminToken::Literal(text.to_owned())
}

fn variable(value: &Value<'_>, report: &mut Report) -> AdminToken {
    let what = "the name of an environment variable";
    let name = value.text(report, what).unwrap_or("?");
    let is_sound = !name.is_empty() && !name.contains(['=', '\0']);
    if !is_sound {
        value.expected(report, what);
    }
    AdminToken::Env(name.to_owned())
}
