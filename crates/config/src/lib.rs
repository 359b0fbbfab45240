//! Parses and validates the rules file.
//!
//! [`Config::parse`] reads the whole file and reports all errors at once, each with its path in the
//! file and its line. The result needs no further validation: addresses and limits are parsed, and
//! rules are indexed. Parsing does not read environment variables, and does not open files or
//! sockets. The code that starts the server reads environment variables and opens files and
//! sockets. [`Config::read`] reads the rules file from disk.

mod body_cost;
mod candidate;
mod conditions;
mod denials;
pub mod envoy;
mod events;
mod file;
mod geoip;
mod grpc;
mod identity;
mod key_mask;
pub mod limits;
mod lint;
mod listen;
mod plans;
mod privacy;
mod proxy;
pub mod quota;
mod quotas;
mod record;
mod redis;
pub mod report;
mod reservations;
mod response_cost;
mod response_listener;
mod rules;
mod shutdown;
mod source_span;
mod store;
mod top;
pub mod value;
pub mod yaml;

use std::{
    fmt,
    net::{Ipv4Addr, SocketAddr},
    path::PathBuf,
    sync::Arc,
    time::Duration,
};

use quota::QuotaRule;
use report::Report;
use tidegate_core::{MemoryBounds, RuleSet, Span, top::TopBounds};
use tidegate_identity::{DerivedEntry, GeoIpField, GeoIpSource, Trust};
use tidegate_net::{Exempt, TlsFiles};
use tidegate_tower::{HeaderWriter, Legacy, RuleNames};
use value::{Fields, Value};
use yaml::YamlDialect;

pub use candidate::CandidateConfig;
pub use conditions::entry_name;
pub use denials::DenialsConfig;
pub use envoy::Envoy;
pub use events::{EventFile, EventType, EventsConfig, EventsSection, WebhookConfig};
pub use file::ReadError;
pub use key_mask::{KeyMask, NoRandomBytes};
pub use listen::open_listener;
pub use privacy::KeyPrivacy;
pub use proxy::{
    AccessLogConfig, Adaptive, Class, Ejection, ForwardedHeaders, Heads, HealthCheck, Proxy,
    Scheme, Slow, Timeouts, Underscores, UpstreamConfig, Url, Via,
};
pub use record::RecordConfig;
pub use redis::{Password, RedisConfig};
pub use reservations::{ReservationExpiry, ReservationsConfig, check_secrets};
pub use shutdown::ShutdownConfig;
pub use tidegate_net::MinRate;

/// The maximum size of a rules file, in bytes.
pub const MAX_FILE_BYTES: usize = 16 << 20;

/// The top-level keys of the file.
const SECTIONS: &[&str] = &[
    "listen",
    "store",
    "defaults",
    "headers",
    "clients",
    "entries",
    "geoip",
    "admin",
    "grpc",
    "envoy",
    "allow",
    "plans",
    "rules",
    "candidate",
    "quotas",
    "proxy",
    "shutdown",
    "privacy",
    "top",
    "denials",
    "events",
    "record",
    "reservations",
];

/// The parsed rules file. The default value corresponds to an empty file: every listener on its
/// default port, the memory store, and no rules.
#[derive(Debug, Default)]
#[non_exhaustive]
pub struct Config {
    /// `listen`: the addresses of the listeners.
    pub listen: ListenAddresses,
    /// `listen`: connection limits, TLS and authentication of the listeners.
    pub listeners: ListenerSettings,
    /// `store.memory`: the maximum number of keys in the memory store, and its maximum size in
    /// bytes.
    pub memory: MemoryBounds,
    /// `store.memory.snapshot`: the file that keeps the counters across restarts; `None` means that
    /// counters are not saved.
    pub snapshot: Option<Snapshot>,
    /// `store.redis`: the Redis servers through which several nodes share counters; `None` means
    /// that the counters are kept in this process's memory.
    pub redis: Option<RedisConfig>,
    /// `headers`: the rate limit headers in responses.
    pub headers: Headers,
    /// `grpc`: the connection settings of the gRPC listener.
    pub grpc: Grpc,
    /// `shutdown`: the timing of the graceful shutdown.
    pub shutdown: ShutdownConfig,
    /// `clients` and `entries`: the settings for identifying clients.
    pub identity: Identity,
    /// `geoip`: the GeoIP databases, each with the entry that it provides. Paths are relative to
    /// the server's working directory.
    pub geoip: Vec<(GeoIpField, PathBuf)>,
    /// `admin`: the token that the admin listener requires.
    pub admin_token: AdminToken,
    /// `admin.tokens`: additional tokens for the admin listener, with names and scopes.
    pub operator_tokens: Vec<OperatorToken>,
    /// `privacy`: how keys appear in lists of keys.
    pub key_privacy: KeyPrivacy,
    /// `top`: the maximum number of keys in the top talkers, and the maximum memory that they use.
    pub top: Top,
    /// `denials`: how many recent denials are kept in memory, and how many are logged.
    pub denials: DenialsConfig,
    /// `events`: which events are detected, and where they are sent.
    pub events: EventsSection,
    /// `record`: where requests are recorded; `None` if the file has no section `record`.
    pub record: Option<RecordConfig>,
    /// `reservations`: the maximum number of reservations, and how they expire.
    pub reservations: ReservationsConfig,
    /// `envoy`: Envoy's rate limit service; `None` if the file has no section `envoy`.
    pub envoy: Option<Envoy>,
    /// `rules` and `allow`, indexed for fast evaluation.
    pub rules: RuleSet,
    /// `candidate`: the rules that are evaluated alongside `rules` but never enforced; `None` if
    /// the file has no section `candidate`. [`Config::parse`] does not read the file with the
    /// candidate rules.
    pub candidate: Option<CandidateConfig>,
    /// `quotas`: limits that are divided among the Envoy instances that enforce them (RLQS).
    pub quotas: Vec<QuotaRule>,
    /// `proxy`: the reverse proxy; `None` if the file has no section `proxy`.
    pub proxy: Option<Proxy>,
    /// Warnings about settings that are valid, but probably do not have the effect that their
    /// author expects.
    pub warnings: Vec<Mistake>,
}

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
    fn listeners(&self) -> [(&'static str, Option<SocketAddr>); 6] {
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
    /// `listen.grpc`. The TLS settings of the gRPC listener are in [`Grpc`].
    pub grpc: ListenerConfig,
    /// `listen.resp`.
    pub resp: ListenerConfig,
    /// `listen.spop`.
    pub spop: ListenerConfig,
    /// `listen.admin`. The token of the admin listener is in [`Config::admin_token`].
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

/// The settings of the gRPC listener.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Grpc {
    /// `grpc.authorization`: whether the listener offers Envoy's service `Authorization`, which
    /// applies the rules to the requests that Envoy describes; default false.
    pub authorization: bool,
    /// `grpc.tls`: the certificate of the listener; `None` means HTTP/2 over plaintext (h2c).
    pub tls: Option<TlsFiles>,
    /// `grpc.keep_alive`: the interval of keep-alive pings; default 30 s.
    pub keep_alive: Duration,
    /// `grpc.keep_alive_timeout`: how long a client may take to respond to a ping; default 10 s.
    pub keep_alive_timeout: Duration,
    /// `grpc.max_connection_age`: the age (±10 % jitter) at which the server asks the client to
    /// replace a connection; default one day.
    pub max_connection_age: Duration,
    /// `grpc.max_connection_age_grace`: how long calls in progress may continue after a connection
    /// has reached the maximum age; default one hour.
    pub max_connection_age_grace: Duration,
    /// `grpc.max_streams`: the maximum number of concurrent calls on one connection; default 1,000.
    pub max_streams: u32,
}

impl Default for Grpc {
    fn default() -> Self {
        Self {
            authorization: false,
            tls: None,
            keep_alive: Duration::from_secs(30),
            keep_alive_timeout: Duration::from_secs(10),
            max_connection_age: Duration::from_secs(86_400),
            max_connection_age_grace: Duration::from_secs(3_600),
            max_streams: 1_000,
        }
    }
}

/// The maximum number of keys in the top talkers, and the maximum memory that they use; `None` if
/// top talkers are disabled (`top: off`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Top(pub Option<TopBounds>);

impl Default for Top {
    fn default() -> Self {
        Self(Some(TopBounds::default()))
    }
}

/// The file to which the memory store is saved, and how often it is saved.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Snapshot {
    /// The path of the file, relative to the server's working directory.
    pub path: PathBuf,
    /// The interval between two snapshots; default 30 s. A snapshot is also written at shutdown.
    pub every: Span,
}

/// The rate limit headers in responses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Headers {
    /// `headers.ratelimit`: whether to send the headers `RateLimit` and `RateLimit-Policy`; default
    /// true.
    pub ratelimit: bool,
    /// `headers.legacy`: whether to send the three `X-RateLimit-*` headers, and in which form;
    /// default off.
    pub legacy: LegacyHeaders,
    /// `headers.rule_names`: whether headers and denials reveal rule names to clients; default
    /// false.
    pub rule_names: bool,
}

impl Default for Headers {
    fn default() -> Self {
        Self {
            ratelimit: true,
            legacy: LegacyHeaders::Off,
            rule_names: false,
        }
    }
}

impl Headers {
    /// Creates a writer for the enabled headers.
    #[must_use]
    pub fn writer(self) -> HeaderWriter {
        let legacy = match self.legacy {
            LegacyHeaders::Off => Legacy::Off,
            LegacyHeaders::Delta => Legacy::Delta,
            LegacyHeaders::Epoch => Legacy::Epoch,
        };
        let names = if self.rule_names {
            RuleNames::Shown
        } else {
            RuleNames::Hidden
        };
        HeaderWriter::new(self.ratelimit, legacy).with_rule_names(names)
    }
}

/// The settings for identifying clients.
#[derive(Clone, Debug, Default)]
pub struct Identity {
    /// `clients`: the proxies trusted to report the client's address. By default, only the proxy
    /// that sends the forward-auth request is trusted.
    pub trust: Trust,
    /// `entries`: the derived entries. Each derived entry has a name, and is derived from a part of
    /// another entry.
    pub derived: Vec<(Box<str>, DerivedEntry)>,
    /// The GeoIP lookup. [`Config::parse`] leaves this field `None`. The code that starts the
    /// server opens the `geoip` databases and sets this field.
    pub geoip: Option<Arc<dyn GeoIpSource>>,
}

impl Identity {
    /// Returns a function that returns whether a peer is exempt from the connection limit per
    /// client. Trusted proxies are exempt, because they forward requests from many clients.
    #[must_use]
    pub fn exempt(self: &Arc<Self>) -> Exempt {
        let identity = Arc::clone(self);
        Arc::new(move |peer| identity.trust.is_trusted(peer))
    }
}

/// Whether the `X-RateLimit-*` headers are sent, and the form of `X-RateLimit-Reset`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LegacyHeaders {
    /// The headers are not sent.
    #[default]
    Off,
    /// The value is the number of seconds from now, rounded up.
    Delta,
    /// The value is a Unix timestamp in seconds, rounded up.
    Epoch,
}

/// The token that clients of the admin listener must send.
#[derive(Clone, Default, PartialEq, Eq)]
pub enum AdminToken {
    /// No token is required, because the listener is on loopback.
    #[default]
    None,
    /// `admin.token`: the token itself.
    Literal(String),
    /// `admin.token_env`: the name of the environment variable that contains the token. The code
    /// that starts the server must read the variable, and must abort the start if the variable is
    /// not set.
    Env(String),
}

/// A named token of the admin listener.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OperatorToken {
    /// `name`: the operator's name in the audit log.
    pub name: String,
    /// `scope`: the permissions of the token; default `read`.
    pub scope: TokenScope,
    /// `token` or `token_env`. Never [`AdminToken::None`].
    pub token: AdminToken,
}

/// The permissions of an admin listener token.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum TokenScope {
    /// The token permits only reading.
    #[default]
    Read,
    /// The token permits reading and every change.
    Operate,
}

impl TokenScope {
    /// Returns `read` or `operate`.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Read => "read",
            Self::Operate => "operate",
        }
    }
}

/// Hides the token, because `Debug` output can reach logs.
impl fmt::Debug for AdminToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::None => f.write_str("None"),
            Self::Literal(_) => f.write_str("Literal(…)"),
            Self::Env(name) => f.debug_tuple("Env").field(name).finish(),
        }
    }
}

/// An error or a warning about the rules file, with its position and advice.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mistake {
    /// The path of the value, such as `rules[2].limits[0].refill`; empty for the file as a whole.
    pub path: String,
    /// The line, counted from 1; `None` if the problem has no line.
    pub line: Option<usize>,
    /// The description of the problem: usually the expected and the actual value, and advice.
    pub message: String,
}

impl Mistake {
    /// Returns the code at the start of a warning, such as `no-match`. Returns `None` for errors,
    /// and for warnings without a code.
    #[must_use]
    pub fn code(&self) -> Option<&str> {
        let (code, _) = self.message.split_once(": ")?;
        let is_part = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-';
        (code.contains('-') && code.bytes().all(is_part)).then_some(code)
    }

    /// Returns the problem, without the code and the advice.
    #[must_use]
    pub fn problem(&self) -> &str {
        let text = self.text();
        text.split_once("; ").map_or(text, |(problem, _)| problem)
    }

    /// Returns the advice: the part of the message that says how to fix the problem. Returns `None`
    /// if the message has no advice.
    #[must_use]
    pub fn advice(&self) -> Option<&str> {
        self.text().split_once("; ").map(|(_, advice)| advice)
    }

    fn text(&self) -> &str {
        let code = self.code().and_then(|code| self.message.strip_prefix(code));
        code.and_then(|rest| rest.strip_prefix(": "))
            .unwrap_or(&self.message)
    }
}

/// Formats the error like this:
/// `rules[2].limits[0].refill (line 31): expected a rate such as 20/min`.
impl fmt::Display for Mistake {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.path.as_str(), self.line) {
            ("", None) => f.write_str(&self.message),
            ("", Some(line)) => write!(f, "line {line}: {}", self.message),
            (path, None) => write!(f, "{path}: {}", self.message),
            (path, Some(line)) => write!(f, "{path} (line {line}): {}", self.message),
        }
    }
}

impl Config {
    /// Parses the contents of a rules file.
    ///
    /// # Errors
    ///
    /// Returns every error in the file, sorted by line. Examples of errors are invalid YAML, an
    /// unknown or repeated key, a missing value, a value of the wrong type, or an invalid limit.
    /// The list of errors is never empty.
    ///
    /// # Examples
    ///
    /// ```
    /// use tidegate_config::Config;
    ///
    /// let config = Config::parse("listen: {http: 127.0.0.1:8000, resp: off}").unwrap();
    /// assert_eq!(config.listen.http, Some(([127, 0, 0, 1], 8000).into()));
    /// assert_eq!(config.listen.resp, None);
    ///
    /// let mistakes = Config::parse("lisen: {}\nrules: 5\n").unwrap_err();
    /// assert_eq!(
    ///     mistakes[0].to_string(),
    ///     "lisen (line 1): unknown key `lisen`; did you mean `listen`?"
    /// );
    /// assert_eq!(
    ///     mistakes[1].to_string(),
    ///     "rules (line 2): expected a list of rules, got the number 5"
    /// );
    /// ```
    pub fn parse(text: &str) -> Result<Self, Vec<Mistake>> {
        if text.len() > MAX_FILE_BYTES {
            let message = format!(
                "the file has {} bytes, which exceeds the maximum of {MAX_FILE_BYTES}",
                text.len()
            );
            return Err(vec![Mistake {
                path: String::new(),
                line: None,
                message,
            }]);
        }
        let document = yaml::parse(text, YamlDialect::Strict).map_err(|mistake| vec![mistake])?;
        let mut report = Report::default();
        let mut config = Self::default();
        let root = Value::root(&document.root);
        if let Some(file) = root.fields(&mut report, "a map of settings", SECTIONS) {
            config.fill(&file, &mut report);
        }
        config.warnings = report.finish()?;
        Ok(config)
    }
    /// Reads all sections of `file`. Some sections are also kept as written, because the lints or
    /// the code that reads other sections need this form.
    fn fill(&mut self, file: &Fields<'_>, report: &mut Report) {
        (self.admin_token, self.operator_tokens) = listen::admin_tokens(file, report);
        let raw_listen;
        let has_token = self.admin_token != AdminToken::None || !self.operator_tokens.is_empty();
        (raw_listen, self.listen, self.listeners) = listen::listen(file, has_token, report);
        let store = store::store(file, report);
        (self.memory, self.snapshot, self.redis) = (store.memory, store.snapshot, store.redis);
        self.headers = listen::headers(file, report);
        self.grpc = grpc::grpc(file, report);
        listen::warn_of_open(&raw_listen, self, report);
        self.key_privacy = privacy::privacy(file, self.redis.is_some(), report);
        self.record = record::record(file, &self.key_privacy, report);
        self.top = Top(top::top(file, report));
        self.reservations = reservations::reservations(file, self.redis.is_some(), report);
        self.envoy = envoy::envoy(file, report);
        self.shutdown = shutdown::shutdown(file, report);
        self.denials = denials::denials(file, report);
        self.events = events::events(file, report);
        self.identity = identity::identity(file, report);
        self.geoip = geoip::geoip(file, report);
        let raw_rules;
        (raw_rules, self.rules) = rules::rule_set(file, report);
        self.candidate = candidate::candidate(file, report);
        self.quotas = quotas::quotas(file, &self.listen, report);
        let raw_proxy;
        (raw_proxy, self.proxy) = proxy::proxy(file, &self.listen, report);
        let has_proxy = raw_proxy.is_written;
        listen::warn_of_none(&raw_listen, has_proxy, &self.listen, report);
        response_listener::check(
            &raw_rules.rules,
            has_proxy,
            &self.listen,
            &self.grpc,
            report,
        );
        lint::bypass::warn(
            &self.rules,
            &raw_rules.rules,
            &self.identity.derived,
            report,
        );
        lint::plan_choice::warn(
            &raw_rules.rules,
            &self.identity.derived,
            &self.identity.trust,
            report,
        );
        if let Some(proxy) = &self.proxy {
            lint::proxy::warn(proxy, &raw_proxy.upstreams, &self.rules, report);
        }
        lint::exact_path::warn(&raw_rules.rules, report);
        lint::no_burst::warn(&raw_rules, report);
        lint::dead_conditions::warn(&raw_rules, &raw_proxy.upstreams, self, report);
    }
}
