//! `store.redis`: the Redis servers through which several nodes share counters.

use std::{path::PathBuf, time::Duration};

use tidegate_core::{FallbackShare, OnFailure, Span, notation, remote_eval::CLOCK_JUMP};
use tidegate_redis::{Address, FallbackSettings, Login, NodeShare, Topology, Transport};

use super::{
    limits::percent,
    report::Report,
    value::{Fields, Shape, Value, at_least_one},
};

/// The maximum of `store.timeout`.
const MAX_TIMEOUT: Span = Span::from_secs(5);

/// The range of `store.timeout`. The minimum is roughly a fast network round trip, and the maximum
/// is roughly the longest time that clients are willing to wait.
const TIMEOUTS: std::ops::RangeInclusive<Span> = Span::from_millis(1)..=MAX_TIMEOUT;

// A decision that waits for Redis until the timeout is then made by the local store, with a
// timestamp from before the wait. Even with the longest timeout, the timestamp must not be so old
// that the local store concludes that the clock was set back.
const _: () = assert!(MAX_TIMEOUT.as_micros() <= CLOCK_JUMP.as_micros() / 2);

/// The maximum of `store.denial_cache_ttl`. For this time, a cached denial is used without calling
/// Redis.
const MAX_DENIALS: Span = Span::from_secs(60);

/// The maximum number of connections to one server.
const MAX_CONNECTIONS: usize = 64;

/// The maximum length of the key prefix, in bytes.
const MAX_PREFIX_BYTES: usize = 64;

const ONE_OF: &str = "a URL such as redis://127.0.0.1:6379, {cluster: [URL, …]} or {sentinel: [URL, …], primary: NAME}";

/// The Redis settings in the rules file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RedisConfig {
    /// `store.redis`: the Redis deployment, which is a standalone server, a cluster, or servers
    /// monitored by Sentinels.
    pub topology: Topology,
    /// The user and password for the Sentinels, from the Sentinels' URLs.
    pub sentinel_login: Login,
    /// `store.username`, or the user in the URL; `None` means the default user.
    pub username: Option<String>,
    /// `store.password`, `store.password_env`, or the password in the URL.
    pub password: Password,
    /// `store.tls.ca`: the trust anchors for the servers' certificates; `None` means the trust
    /// anchors of the system.
    pub ca: Option<PathBuf>,
    /// `store.tls.cert` and `store.tls.key`: the client certificate and its key.
    pub certificate: Option<(PathBuf, PathBuf)>,
    /// `store.timeout`: the maximum time that a decision waits for Redis; default 25 ms.
    pub timeout: Duration,
    /// `store.connections`: the number of connections to each server; default 2.
    pub connections: usize,
    /// `store.prefix`: the prefix of every key in Redis; default `tidegate`.
    pub prefix: String,
    /// `store.on_failure`, `store.fallback_share` and `store.denial_cache_ttl`.
    pub fallback: FallbackSettings,
}

/// A password, or the environment variable that contains it.
#[derive(Clone, Default, PartialEq, Eq)]
pub enum Password {
    /// No password.
    #[default]
    None,
    /// The password itself.
    Literal(String),
    /// The name of the environment variable that contains the password. The code that starts the
    /// server must read the variable, and must abort the start if the variable is not set.
    Env(String),
}

/// Hides the password, because `Debug` output can reach logs.
impl std::fmt::Debug for Password {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::None => f.write_str("None"),
            Self::Literal(_) => f.write_str("Literal(…)"),
            Self::Env(name) => f.debug_tuple("Env").field(name).finish(),
        }
    }
}

/// Reads `store.redis` from `value`, and the other Redis settings from the section `store`.
pub(super) fn redis(
    value: &Value<'_>,
    store: &Fields<'_>,
    report: &mut Report,
) -> Option<RedisConfig> {
    let before = report.count();
    let servers = servers(value, report);
    let timeout = store
        .get("timeout")
        .and_then(|value| timeout(value, report));
    let connections = store
        .get("connections")
        .and_then(|value| connections(value, report));
    let prefix = store.get("prefix").and_then(|value| prefix(value, report));
    let username = store
        .get("username")
        .and_then(|value| value.text(report, "a user name"));
    let password = password(store, report);
    let (ca, certificate) = tls(store, report);
    let fallback = fallback(store, report);
    let (topology, login, sentinel_login) = servers?;
    if report.count() > before {
        return None;
    }
    Some(RedisConfig {
        topology,
        sentinel_login,
        username: username.map(str::to_owned).or(login.username),
        password: match (password, login.password) {
            (Password::None, Some(password)) => Password::Literal(password),
            (password, _) => password,
        },
        ca,
        certificate,
        timeout: timeout.unwrap_or(Duration::from_millis(25)),
        connections: connections.unwrap_or(2),
        prefix: prefix.unwrap_or_else(|| "tidegate".into()),
        fallback,
    })
}

/// Reads the addresses of the Redis servers. Returns the topology, the user and password for the
/// servers, and the user and password for the Sentinels.
fn servers(value: &Value<'_>, report: &mut Report) -> Option<(Topology, Login, Login)> {
    if let Shape::Scalar = value.shape() {
        let (address, login) = address(value, report)?;
        return Some((Topology::Standalone(address), login, Login::default()));
    }
    let fields = value.fields(report, ONE_OF, &["cluster", "sentinel", "primary"])?;
    let primary = fields
        .get("primary")
        .and_then(|value| value.text(report, "the primary's name in the Sentinel configuration"));
    match (fields.get("cluster"), fields.get("sentinel")) {
        (Some(seeds), None) if fields.get("primary").is_none() => {
            let (seeds, login) = addresses(seeds, report)?;
            Some((Topology::Cluster { seeds }, login, Login::default()))
        }
        (None, Some(sentinels)) => {
            let found = addresses(sentinels, report);
            if fields.get("primary").is_none() {
                let message =
                    "is missing; set it to the primary's name in the Sentinel configuration";
                fields.wrong(report, "primary", message);
            }
            let (sentinels, login) = found?;
            let primary = primary?.to_owned();
            let topology = Topology::Sentinel { sentinels, primary };
            Some((topology, Login::default(), login))
        }
        _ => {
            value.wrong(report, format!("expected {ONE_OF}"));
            None
        }
    }
}

fn address(value: &Value<'_>, report: &mut Report) -> Option<(Address, Login)> {
    value.parsed(
        report,
        "a URL such as redis://127.0.0.1:6379",
        Address::parse,
    )
}

/// Reads network addresses. Returns the addresses, and the user and password in the first URL.
fn addresses(value: &Value<'_>, report: &mut Report) -> Option<(Vec<Address>, Login)> {
    let items = value.one_or_more(report);
    if items.is_empty() {
        value.wrong(report, "expected at least one URL");
    }
    let mut found = Vec::new();
    let mut first = None;
    for item in &items {
        let Some((address, login)) = address(item, report) else {
            continue;
        };
        if address.transport == Transport::Unix {
            let message = "a Unix socket is local to one machine; write the address of a server on the network";
            item.wrong(report, message);
        }
        found.push(address);
        first.get_or_insert(login);
    }
    Some((found, first?))
}

fn timeout(value: &Value<'_>, report: &mut Report) -> Option<Duration> {
    let span = value.parsed(report, "a duration such as 25ms", notation::span)?;
    if !TIMEOUTS.contains(&span) {
        let (least, most) = (TIMEOUTS.start(), TIMEOUTS.end());
        value.wrong(
            report,
            format!("must be from {least} to {most}, got {span}"),
        );
        return None;
    }
    Some(Duration::from_micros(span.as_micros()))
}

fn connections(value: &Value<'_>, report: &mut Report) -> Option<usize> {
    let number = value.small_number(report);
    let number = at_least_one(number, value, report)?;
    if number > MAX_CONNECTIONS {
        value.wrong(
            report,
            format!("must be at most {MAX_CONNECTIONS}, got {number}"),
        );
        return None;
    }
    Some(number)
}

fn prefix(value: &Value<'_>, report: &mut Report) -> Option<String> {
    let what = "1 to 64 letters, digits, `-`, `_`, `.` or `:`";
    let text = value.text(report, what)?;
    let sound = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.:".contains(&byte);
    if text.is_empty() || text.len() > MAX_PREFIX_BYTES || !text.bytes().all(sound) {
        value.expected(report, what);
        return None;
    }
    Some(text.to_owned())
}

fn password(store: &Fields<'_>, report: &mut Report) -> Password {
    let literal = store
        .get("password")
        .and_then(|value| value.text(report, "a password"));
    let env = store
        .get("password_env")
        .and_then(|value| value.text(report, "the name of an environment variable"));
    match (literal, env) {
        (Some(_), Some(_)) => {
            store.wrong(
                report,
                "password",
                "conflicts with `password_env`; remove one of the two",
            );
            Password::None
        }
        (Some(password), None) => Password::Literal(password.to_owned()),
        (None, Some(name)) => Password::Env(name.to_owned()),
        (None, None) => Password::None,
    }
}

type CertificatePaths = (Option<PathBuf>, Option<(PathBuf, PathBuf)>);

fn tls(store: &Fields<'_>, report: &mut Report) -> CertificatePaths {
    let Some(value) = store.get("tls") else {
        return (None, None);
    };
    let what = "a map such as {ca: ca.pem, cert: client.pem, key: client.key}";
    let Some(fields) = value.fields(report, what, &["ca", "cert", "key"]) else {
        return (None, None);
    };
    let mut path = |name: &str| {
        let text = fields.get(name)?.text(report, "the path of a PEM file")?;
        Some(PathBuf::from(text))
    };
    let (ca, cert, key) = (path("ca"), path("cert"), path("key"));
    match (fields.get("cert"), fields.get("key")) {
        (Some(_), None) => fields.wrong(report, "key", "is missing; a certificate needs its key"),
        (None, Some(_)) => fields.wrong(report, "cert", "is missing; a key needs its certificate"),
        _ => {}
    }
    (ca, cert.zip(key))
}

fn fallback(store: &Fields<'_>, report: &mut Report) -> FallbackSettings {
    let default = FallbackSettings::default();
    let share = store
        .get("fallback_share")
        .and_then(|value| fallback_share(value, report));
    let denial_ttl = store
        .get("denial_cache_ttl")
        .and_then(|value| denial_cache_ttl(value, report));
    FallbackSettings {
        on_failure: on_failure(store, report).unwrap_or(default.on_failure),
        share: share.unwrap_or(default.share),
        denial_ttl: denial_ttl.unwrap_or(default.denial_ttl),
    }
}

/// Reads the field `on_failure` of the store or of a rule.
pub(super) fn on_failure(fields: &Fields<'_>, report: &mut Report) -> Option<OnFailure> {
    let choices = [OnFailure::Open, OnFailure::Closed, OnFailure::Local]
        .map(|policy| (policy.as_str(), policy));
    fields.get("on_failure")?.choice(report, &choices)
}

fn fallback_share(value: &Value<'_>, report: &mut Report) -> Option<NodeShare> {
    if value.scalar() == Some("auto") {
        return Some(NodeShare::Auto);
    }
    let share = FallbackShare::percent(percent(value, report)?);
    if share.is_none() {
        value.wrong(
            report,
            "must be auto or from 1% to 100%; use 100% divided by the number of servers",
        );
    }
    share.map(NodeShare::Fixed)
}

fn denial_cache_ttl(value: &Value<'_>, report: &mut Report) -> Option<Span> {
    if value.scalar() == Some("off") {
        return Some(Span::ZERO);
    }
    let span = value.parsed(report, "a duration such as 1s, or off", notation::span)?;
    if span > MAX_DENIALS {
        value.wrong(report, format!("must be at most {MAX_DENIALS}, got {span}"));
        return None;
    }
    Some(span)
}
