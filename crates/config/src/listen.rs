//! `listen`, `headers` and `admin`: the listeners, and the rate limit headers in responses.

use std::net::SocketAddr;

use super::{
    AdminToken, Grpc, Headers, LegacyHeaders, ListenAddresses, ListenerConfig, ListenerSettings,
    OperatorToken, Password, TokenScope, grpc,
    report::Report,
    source_span::SourceSpan,
    value::{Fields, Shape, Value},
};

/// The maximum length of a token, in bytes.
const MAX_TOKEN_BYTES: usize = 4_096;

/// The maximum of `max_connections` of a listener.
const MAX_CONNECTIONS: usize = 1_000_000;

/// The maximum number of a listener's `hosts`.
const MAX_HOSTS: usize = 100;
/// The maximum length of a host, in bytes (RFC 1035, section 2.3.4).
const MAX_HOST_BYTES: usize = 253;

/// The code of the warning about a listener without authentication.
const OPEN: &str = "open-listener";

/// The code of the warning about a file without a listener.
const NO_LISTENER: &str = "no-listener";

/// The keys of a listener without additional settings. Listeners with additional settings have the
/// keys in the constants below.
const KEYS: &[&str] = &[
    "address",
    "max_connections",
    "max_connections_per_client",
    "idle_timeout",
];
const ADMIN_KEYS: &[&str] = &[
    "address",
    "max_connections",
    "max_connections_per_client",
    "idle_timeout",
    "tls",
    "hosts",
];
const HTTP_KEYS: &[&str] = &[
    "address",
    "max_connections",
    "max_connections_per_client",
    "idle_timeout",
    "tls",
    "hosts",
    "token",
    "token_env",
];
const SPOP_KEYS: &[&str] = &[
    "address",
    "max_connections",
    "max_connections_per_client",
    "idle_timeout",
    "tls",
];
const RESP_KEYS: &[&str] = &[
    "address",
    "max_connections",
    "max_connections_per_client",
    "idle_timeout",
    "tls",
    "username",
    "password",
    "password_env",
    "top",
];

/// The section `listen`, as written in the rules file.
#[derive(Debug, Default)]
pub(crate) struct RawListen {
    /// The position of the section.
    span: Option<SourceSpan>,
    /// The listeners that the file contains.
    listeners: Vec<(&'static str, SourceSpan)>,
}

impl RawListen {
    fn read(value: &Value<'_>, fields: &Fields<'_>) -> Self {
        let listener = |name: &'static str| Some((name, fields.get(name)?.span().clone()));
        Self {
            span: Some(value.span().clone()),
            listeners: NAMES.iter().copied().filter_map(listener).collect(),
        }
    }

    /// Returns the position of a listener, if the file contains the listener.
    fn listener(&self, name: &str) -> Option<&SourceSpan> {
        let mut listeners = self.listeners.iter();
        let (_, span) = listeners.find(|(known, _)| *known == name)?;
        Some(span)
    }
}

/// The names of the listeners.
const NAMES: &[&str] = &["http", "grpc", "resp", "spop", "admin", "metrics"];

pub(super) fn listen(
    file: &Fields<'_>,
    has_token: bool,
    report: &mut Report,
) -> (RawListen, ListenAddresses, ListenerSettings) {
    let (mut listen, mut listeners) = (ListenAddresses::default(), ListenerSettings::default());
    let value = file.get("listen");
    let Some((value, fields)) = value.and_then(|value| {
        let fields = value.fields(report, "a map such as {http: 127.0.0.1:8080}", NAMES)?;
        Some((value, fields))
    }) else {
        return (RawListen::default(), listen, listeners);
    };
    for (name, keys, address, settings) in [
        ("http", HTTP_KEYS, &mut listen.http, &mut listeners.http),
        ("resp", RESP_KEYS, &mut listen.resp, &mut listeners.resp),
        ("spop", SPOP_KEYS, &mut listen.spop, &mut listeners.spop),
        ("admin", ADMIN_KEYS, &mut listen.admin, &mut listeners.admin),
        ("grpc", KEYS, &mut listen.grpc, &mut listeners.grpc),
        ("metrics", KEYS, &mut listen.metrics, &mut listeners.metrics),
    ] {
        if let Some(value) = fields.get(name) {
            *address = listener(value, keys, settings, report).unwrap_or(None);
        }
    }
    if !has_token
        && listen
            .admin
            .is_some_and(|address| !address.ip().is_loopback())
    {
        let message = "other machines can reach this address; set admin.token or admin.token_env, \
                       or listen on 127.0.0.1";
        fields.wrong(report, "admin", message);
    }
    check_distinct(&listen.listeners(), &fields, report);
    (RawListen::read(value, &fields), listen, listeners)
}

/// Reads a listener: an address, or a map with an address and other settings. Returns `Some(None)`
/// if the listener is `off`.
fn listener(
    value: &Value<'_>,
    keys: &[&'static str],
    settings: &mut ListenerConfig,
    report: &mut Report,
) -> Option<Option<SocketAddr>> {
    let Shape::Map = value.shape() else {
        return address(value, report);
    };
    let fields = value.fields(report, "an address, or a map with one", keys)?;
    let at = match fields.get("address") {
        Some(value) => address(value, report),
        None => {
            if !fields.tries("address") {
                let message = "is missing; write an address and port such as 127.0.0.1:8080";
                fields.wrong(report, "address", message);
            }
            None
        }
    };
    let mut count = |name| {
        let value = fields.get(name)?;
        let number = value.small_number::<usize>(report)?;
        if !(1..=MAX_CONNECTIONS).contains(&number) {
            value.wrong(report, format!("must be 1 to {MAX_CONNECTIONS}"));
            return None;
        }
        Some(number)
    };
    let (most, per_client) = (
        count("max_connections"),
        count("max_connections_per_client"),
    );
    settings.max_connections = most.unwrap_or(settings.max_connections);
    settings.max_connections_per_client = per_client.unwrap_or(settings.max_connections_per_client);
    let idle = fields.get("idle_timeout");
    settings.idle_timeout = idle.and_then(|value| grpc::time(value, report));
    let files = fields.get("tls");
    settings.tls = files.and_then(|value| grpc::tls(value, report));
    let names = fields.get("hosts");
    settings.hosts = names.map_or_else(Vec::new, |value| hosts(value, report));
    let username = fields.get("username");
    settings.username = username
        .and_then(|value| value.text(report, "a user name"))
        .map(str::to_owned);
    settings.credential = match secret(&fields, SecretKeys::of_listener(keys), report) {
        AdminToken::None => Password::None,
        AdminToken::Literal(secret) => Password::Literal(secret),
        AdminToken::Env(name) => Password::Env(name),
    };
    let top = fields.get("top").and_then(|value| value.flag(report));
    settings.top = top.unwrap_or(settings.top);
    let has_secret = settings.credential != Password::None
        || fields.tries("password")
        || fields.tries("password_env");
    if settings.top && !has_secret {
        let message = "needs `password` or `password_env`, because the command TIDEGATE.TOP reveals the keys of all clients; \
                       set one of the two, or remove `top`";
        fields.wrong(report, "top", message);
    }
    if settings.username.is_some() && settings.credential == Password::None {
        let message = "has no effect without `password` or `password_env`; set one of the two, or remove `username`";
        fields.wrong(report, "username", message);
    }
    at
}

/// Reads one host name or a list of host names.
fn hosts(value: &Value<'_>, report: &mut Report) -> Vec<String> {
    let names = value.one_or_more(report);
    if names.len() > MAX_HOSTS {
        value.wrong(report, format!("must be at most {MAX_HOSTS} names"));
    }
    let what = "a host name without port, such as limits.internal";
    let mut read = |name: &Value<'_>| {
        let text = name.text(report, what)?;
        let is_name = (1..=MAX_HOST_BYTES).contains(&text.len())
            && text
                .bytes()
                .all(|byte| byte.is_ascii_alphanumeric() || b"-._".contains(&byte));
        if !is_name {
            name.expected(report, what);
        }
        is_name.then(|| text.to_ascii_lowercase())
    };
    names.iter().filter_map(&mut read).collect()
}

/// The two keys that can set a secret.
#[derive(Clone, Copy)]
pub(super) struct SecretKeys {
    /// The key of the secret itself.
    pub(super) literal: &'static str,
    /// The key of the environment variable that contains the secret.
    pub(super) variable: &'static str,
}

impl SecretKeys {
    const TOKEN: Self = Self {
        literal: "token",
        variable: "token_env",
    };
    const PASSWORD: Self = Self {
        literal: "password",
        variable: "password_env",
    };
    pub(super) const SECRET: Self = Self {
        literal: "secret",
        variable: "secret_env",
    };

    /// Returns the keys that set the secret of a listener whose settings have these `keys`.
    fn of_listener(keys: &[&'static str]) -> Self {
        if keys.contains(&"password") {
            Self::PASSWORD
        } else {
            Self::TOKEN
        }
    }
}

/// Warns about each listener that other machines can reach and that requires no authentication.
pub(super) fn warn_of_open(
    raw: &RawListen,
    listen: &ListenAddresses,
    listeners: &ListenerSettings,
    grpc: &Grpc,
    report: &mut Report,
) {
    let asks = |listener: &ListenerConfig| {
        listener.credential != Password::None
            || listener
                .tls
                .as_ref()
                .is_some_and(|tls| tls.client_ca.is_some())
    };
    let grpc_asks = grpc.tls.as_ref().is_some_and(|tls| tls.client_ca.is_some());
    for (name, address, is_guarded, advice) in [
        (
            "http",
            listen.http,
            asks(&listeners.http),
            "set `token_env`, or `tls` with `client_ca`",
        ),
        (
            "resp",
            listen.resp,
            asks(&listeners.resp),
            "set `password_env`, or `tls` with `client_ca`",
        ),
        (
            "spop",
            listen.spop,
            asks(&listeners.spop),
            "set `tls` with `client_ca`",
        ),
        (
            "grpc",
            listen.grpc,
            grpc_asks,
            "set `grpc.tls` with `client_ca`",
        ),
    ] {
        let (Some(span), Some(address)) = (raw.listener(name), address) else {
            continue;
        };
        if let Some(message) = open_listener(address, is_guarded, advice) {
            span.warn(report, format!("{message}, or listen on 127.0.0.1"));
        }
    }
}

/// Returns a warning if other machines can reach the listener at `address` and it requires no
/// authentication. `advice` says how to add authentication.
#[must_use]
pub fn open_listener(address: SocketAddr, is_guarded: bool, advice: &str) -> Option<String> {
    let is_open = !address.ip().is_loopback() && !is_guarded;
    is_open.then(|| {
        format!(
            "{OPEN}: other machines can reach {address}, and any client there can read and consume the limits of every key; \
             {advice}"
        )
    })
}

/// The name and the address of a listener. The address is `None` if the listener is disabled.
type NamedAddress = (&'static str, Option<SocketAddr>);

/// Returns the name of the listener in `listeners` that already uses `address`. Addresses with port
/// 0 never conflict, because the system assigns a different port to each of them.
pub(super) fn taken_by(listeners: &[NamedAddress], address: SocketAddr) -> Option<&'static str> {
    let has_it = |(_, listener): &&NamedAddress| *listener == Some(address) && address.port() != 0;
    listeners.iter().find(has_it).map(|(name, _)| *name)
}

/// Reports two listeners with the same address.
fn check_distinct(listeners: &[NamedAddress], fields: &Fields<'_>, report: &mut Report) {
    for (at, &(name, address)) in listeners.iter().enumerate() {
        let Some(address) = address else {
            continue;
        };
        if let Some(other) = taken_by(&listeners[..at], address) {
            // One of the two addresses may be a default address. Report the error at the address
            // that the file contains.
            let (name, other) = if fields.get(name).is_some() {
                (name, other)
            } else {
                (other, name)
            };
            fields.wrong(
                report,
                name,
                format!("{address} is also the address of listen.{other}; give each listener its own address"),
            );
        }
    }
}

/// Reads an address. Returns `Some(None)` if the value is `off`.
fn address(value: &Value<'_>, report: &mut Report) -> Option<Option<SocketAddr>> {
    let what = "an address and port such as 127.0.0.1:8080, or off";
    let text = value.text(report, what)?;
    if text == "off" {
        return Some(None);
    }
    let address = text.parse().ok();
    if address.is_none() {
        let advice = match port_alone(text) {
            Some(port) => format!(
                "; write 127.0.0.1:{port} for programs on this machine, or 0.0.0.0:{port} for other machines too"
            ),
            None => String::new(),
        };
        let problem = format!("expected {what}, got {}{advice}", value.describe());
        value.wrong(report, problem);
    }
    address.map(Some)
}

/// Returns the port in a string without an IP address, such as `8080`, `:8080`, `*:8080` or
/// `localhost:8080`.
fn port_alone(text: &str) -> Option<u16> {
    let port = match text.rsplit_once(':') {
        Some(("" | "*" | "localhost", port)) => port,
        Some(_) => return None,
        None => text,
    };
    let is_number = port.bytes().all(|byte| byte.is_ascii_digit());
    port.parse().ok().filter(|port| is_number && *port > 0)
}

/// Warns if the server would run without any listener.
pub(super) fn warn_of_none(
    raw: &RawListen,
    has_proxy: bool,
    listen: &ListenAddresses,
    report: &mut Report,
) {
    let are_off = listen.listeners().iter().all(|(_, at)| at.is_none());
    if let Some(span) = raw.span.as_ref().filter(|_| are_off && !has_proxy) {
        let message = format!(
            "{NO_LISTENER}: every listener is off and there is no `proxy`, so no client can reach this server; enable \
             a listener, or add a `proxy`"
        );
        span.warn(report, message);
    }
}

pub(super) fn headers(file: &Fields<'_>, report: &mut Report) -> Headers {
    let mut headers = Headers::default();
    let value = file.get("headers");
    let known = &["ratelimit", "legacy", "rule_names"];
    let Some(fields) =
        value.and_then(|value| value.fields(report, "a map such as {legacy: delta}", known))
    else {
        return headers;
    };
    if let Some(ratelimit) = fields.get("ratelimit") {
        headers.ratelimit = ratelimit.flag(report).unwrap_or(headers.ratelimit);
    }
    if let Some(names) = fields.get("rule_names") {
        headers.rule_names = names.flag(report).unwrap_or(headers.rule_names);
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

/// The maximum number of `admin.tokens`.
const MAX_TOKENS: usize = 100;

/// The names that the audit log uses for changes made without a token: by a local request, by a
/// signal, or by a change to the rules file.
const RESERVED_NAMES: [&str; 3] = ["local", "SIGHUP", "a file change"];

/// Reads the section `admin`: the token, and the named tokens.
pub(super) fn admin_tokens(
    file: &Fields<'_>,
    report: &mut Report,
) -> (AdminToken, Vec<OperatorToken>) {
    let value = file.get("admin");
    let known = &["token", "token_env", "tokens"];
    let what = "a map such as {token_env: TIDEGATE_ADMIN_TOKEN}";
    let Some(fields) = value.and_then(|value| value.fields(report, what, known)) else {
        return (AdminToken::None, Vec::new());
    };
    let unnamed = secret(&fields, SecretKeys::TOKEN, report);
    let mut named: Vec<OperatorToken> = Vec::new();
    if let Some(value) = fields.get("tokens") {
        let items = value.one_or_more(report);
        if items.len() > MAX_TOKENS {
            let message = format!("{} tokens exceed the maximum of {MAX_TOKENS}", items.len());
            value.wrong(report, message);
        }
        for item in &items {
            let Some(token) = operator_token(item, report) else {
                continue;
            };
            let fields = item.fields_among(&["name", "token", "token_env"]);
            if RESERVED_NAMES.contains(&&*token.name)
                && let Some(fields) = &fields
            {
                let message = "is reserved: the audit log uses it for changes made without a \
                               token; choose another name";
                fields.wrong(report, "name", message);
            }
            if token.name == "admin" || named.iter().any(|other| other.name == token.name) {
                let message = "is the name of another token; choose another name";
                if let Some(fields) = &fields {
                    fields.wrong(report, "name", message);
                }
            }
            let same = |other: &AdminToken| *other == token.token && *other != AdminToken::None;
            let has_twin = same(&unnamed) || named.iter().any(|other| same(&other.token));
            if has_twin && let Some(fields) = &fields {
                let field = match token.token {
                    AdminToken::Env(_) => "token_env",
                    AdminToken::Literal(_) | AdminToken::None => "token",
                };
                let message = "is also the secret of another token; give each token its own secret";
                fields.wrong(report, field, message);
            }
            named.push(token);
        }
    }
    (unnamed, named)
}

fn operator_token(value: &Value<'_>, report: &mut Report) -> Option<OperatorToken> {
    let what = "a map such as {name: alice, scope: operate, token_env: ALICE_TOKEN}";
    let known = &["name", "scope", "token", "token_env"];
    let fields = value.fields(report, what, known)?;
    let scope = fields.get("scope").and_then(|scope| {
        let choices = [("read", TokenScope::Read), ("operate", TokenScope::Operate)];
        scope.choice(report, &choices)
    });
    let token = secret(&fields, SecretKeys::TOKEN, report);
    if token == AdminToken::None && !fields.tries("token_env") {
        let message = "is missing; name the environment variable with the token";
        fields.wrong(report, "token_env", message);
    }
    let Some(name) = fields.get("name") else {
        let message = "is missing; give the name that the audit log shows";
        fields.wrong(report, "name", message);
        return None;
    };
    Some(OperatorToken {
        name: name.text(report, "a name such as alice")?.to_owned(),
        scope: scope.unwrap_or_default(),
        token,
    })
}

/// Reads a secret that either of two keys can set. Reports an error if both keys are set.
pub(super) fn secret(fields: &Fields<'_>, keys: SecretKeys, report: &mut Report) -> AdminToken {
    match (fields.get(keys.literal), fields.get(keys.variable)) {
        (Some(token), Some(env)) => {
            let message = format!("conflicts with `{}`; remove one of the two", keys.literal);
            env.wrong(report, message);
            literal(token, report)
        }
        (Some(token), None) => literal(token, report),
        (None, Some(env)) => variable(env, report),
        (None, None) => AdminToken::None,
    }
}

/// Reads a token from the file. Messages never contain the token. An invalid token is reported and
/// also returned, so that callers do not report the token as missing as well.
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
