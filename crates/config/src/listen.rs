//! `listen`: the listeners.

use std::{
    net::{Ipv4Addr, SocketAddr},
    time::Duration,
};

use tidegate_net::TlsFiles;

use super::{
    Grpc, Password, grpc,
    report::Report,
    secrets::{AdminToken, SecretKeys, secret},
    source_span::SourceSpan,
    value::{Fields, Shape, Value},
};

/// The listener addresses. `None` means that a listener is disabled (`off`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct ListenAddresses {
    /// `listen.http`: the listener for rate limit checks and forward-auth; default
    /// `127.0.0.1:8080`.
    pub http: Option<SocketAddr>,
    /// `listen.grpc`: the listener for Envoy's rate limit services; default `127.0.0.1:8081`.
    pub grpc: Option<SocketAddr>,
    /// `listen.resp`: the listener for the Redis protocol (RESP); default `127.0.0.1:6380`.
    pub resp: Option<SocketAddr>,
    /// `listen.spop`: the listener for HAProxy's Stream Processing Offload Protocol; default off.
    pub spop: Option<SocketAddr>,
    /// `listen.admin`: the listener for health, metrics and manual blocks; default
    /// `127.0.0.1:8082`. Parsing rejects an address that other machines can reach, unless an admin
    /// token is set.
    pub admin: Option<SocketAddr>,
    /// `listen.metrics`: a listener for health, readiness and metrics only, which needs no token;
    /// default off.
    pub metrics: Option<SocketAddr>,
}

impl ListenAddresses {
    /// Returns the listeners with their names.
    pub(super) fn listeners(&self) -> [(&'static str, Option<SocketAddr>); 6] {
        [
            ("http", self.http),
            ("grpc", self.grpc),
            ("resp", self.resp),
            ("spop", self.spop),
            ("admin", self.admin),
            ("metrics", self.metrics),
        ]
    }
}

/// The settings of a listener, except for its address. A map as the listener's value in the file,
/// instead of an address, can contain these settings.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct ListenerConfig {
    /// `max_connections`: the maximum number of open connections, 1 to 1,000,000. The default is
    /// 10,000; for the admin and metrics listeners, the default is 128.
    pub max_connections: usize,
    /// `max_connections_per_client`: the maximum number of open connections per client address
    /// (IPv6: per /64), at least 1. The default is 1,000; for the admin listener, the default is
    /// 128.
    pub max_connections_per_client: usize,
    /// `idle_timeout`: how long a connection may be idle between two requests; `None` means the
    /// default of the listener.
    pub idle_timeout: Option<Duration>,
    /// `tls`: the certificate of the listener; `None` means plaintext.
    pub tls: Option<TlsFiles>,
    /// `username`, for the RESP listener: the user name that clients must send with `AUTH`; `None`
    /// means `default`.
    pub username: Option<String>,
    /// `hosts`, for the HTTP and admin listeners: the host names, in lower case, that browsers may
    /// use to reach the listener. The name `localhost` is always allowed.
    pub hosts: Vec<String>,
    /// `top`, for the RESP listener: whether clients are allowed to list the keys of all clients;
    /// default false.
    pub top: bool,
    /// The secret that clients must send: `token` or `token_env` of the HTTP listener, `password`
    /// or `password_env` of the RESP listener.
    pub credential: Password,
}

impl Default for ListenerConfig {
    fn default() -> Self {
        Self {
            max_connections: 10_000,
            max_connections_per_client: 1_000,
            idle_timeout: None,
            tls: None,
            username: None,
            hosts: Vec::new(),
            top: false,
            credential: Password::None,
        }
    }
}

/// The settings of all listeners.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ListenerSettings {
    /// `listen.http`.
    pub http: ListenerConfig,
    /// `listen.grpc`. The TLS settings of the gRPC listener are in [`Grpc`](crate::Grpc).
    pub grpc: ListenerConfig,
    /// `listen.resp`.
    pub resp: ListenerConfig,
    /// `listen.spop`.
    pub spop: ListenerConfig,
    /// `listen.admin`. The token of the admin listener is in
    /// [`Config::admin_token`](crate::Config::admin_token).
    pub admin: ListenerConfig,
    /// `listen.metrics`.
    pub metrics: ListenerConfig,
}

impl Default for ListenerSettings {
    fn default() -> Self {
        let small = ListenerConfig {
            max_connections: 128,
            max_connections_per_client: 128,
            ..ListenerConfig::default()
        };
        Self {
            http: ListenerConfig::default(),
            grpc: ListenerConfig::default(),
            resp: ListenerConfig::default(),
            spop: ListenerConfig::default(),
            admin: small.clone(),
            metrics: small,
        }
    }
}

impl Default for ListenAddresses {
    fn default() -> Self {
        let loopback = |port| Some(SocketAddr::from((Ipv4Addr::LOCALHOST, port)));
        Self {
            http: loopback(8080),
            grpc: loopback(8081),
            resp: loopback(6380),
            spop: None,
            admin: loopback(8082),
            metrics: None,
        }
    }
}

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
