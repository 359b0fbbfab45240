//! `proxy`: the reverse proxy's listener, upstreams and resource limits.

mod access_log;
mod adaptive;
mod heads;
mod health;
mod name;
mod slow;
mod upstream;
mod url;

use std::{net::SocketAddr, time::Duration};

use tidegate_core::{Span, notation};
use tidegate_net::{MAX_HEADERS, TlsFiles};
use tidegate_tower::ErrorFormat;

use super::{
    ListenAddresses,
    grpc::tls,
    listen,
    report::Report,
    store::size,
    value::{Fields, Value},
};

pub use access_log::AccessLogConfig;
pub use adaptive::{Adaptive, Class};
pub use heads::{Heads, Underscores, Via};
pub use health::{Ejection, HealthCheck};
pub use slow::Slow;
pub(crate) use upstream::RawUpstream;
pub use upstream::UpstreamConfig;
pub use url::{Scheme, Url};

/// The maximum of every timeout.
const LONGEST: Span = Span::from_secs(86_400);

/// The range of `proxy.max_head`, in bytes. The minimum is the size of one read, and the maximum is
/// more than any real request needs.
const HEAD_BYTES: std::ops::RangeInclusive<usize> = 8_192..=1 << 20;

/// The range of `proxy.max_inspected_body`, in bytes.
const INSPECTED_BYTES: std::ops::RangeInclusive<usize> = 1 << 10..=64 << 20;

/// The maximum of `proxy.max_headers`.
const MOST_HEADERS: usize = 1_000;

/// The maximum of `max_connections` and of `max_connections_per_client`.
const MAX_CONNECTIONS: usize = 1_000_000;

const FIELDS: &[&str] = &[
    "listen",
    "tls",
    "upstreams",
    "timeouts",
    "max_body",
    "max_inspected_body",
    "error_format",
    "max_head",
    "max_headers",
    "max_connections",
    "max_connections_per_client",
    "forwarded",
    "access_log",
    heads::FIELDS[0],
    heads::FIELDS[1],
    slow::FIELDS[0],
    slow::FIELDS[1],
    slow::FIELDS[2],
];

/// The configuration of the reverse proxy.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Proxy {
    /// `proxy.listen`: the address of the listener.
    pub listen: SocketAddr,
    /// `proxy.tls`: the certificate of the listener; `None` means plaintext.
    pub tls: Option<TlsFiles>,
    /// `proxy.upstreams`: the services behind the proxy. A request is forwarded to the first
    /// upstream whose conditions match.
    pub upstreams: Vec<UpstreamConfig>,
    /// `proxy.timeouts`: the timeouts of client and upstream connections.
    pub timeouts: Timeouts,
    /// `proxy.max_body`: the maximum size of a request body, in bytes; the default is no maximum
    /// (`None`).
    pub max_body: Option<u64>,
    /// `proxy.max_inspected_body`: the maximum size of a request body from which a rule's cost is
    /// read, 1 KiB to 64 MiB; default 1 MiB.
    pub max_inspected_body: u64,
    /// `proxy.error_format`: the body format of denials; default `auto`.
    pub error_format: ErrorFormat,
    /// `proxy.max_head`: the maximum size of a request or response head, 8 KiB to 1 MiB; default 64
    /// KiB.
    pub max_head: usize,
    /// `proxy.max_headers`: the maximum number of header lines in a head, 1 to 1,000; default 100.
    pub max_headers: usize,
    /// `proxy.max_connections`: the maximum number of client connections, 1 to 1,000,000; default
    /// 10,000.
    pub max_connections: usize,
    /// The value to use instead of `max_connections`, if the limit on open files is too low; `None`
    /// if the limit is high enough. Parsing leaves this field `None`.
    pub fitted_connections: Option<usize>,
    /// `proxy.max_connections_per_client`: the maximum number of connections per client address
    /// (IPv6: per /64), 1 to 1,000,000; default 1,000.
    pub max_connections_per_client: usize,
    /// `proxy.forwarded`: the headers that carry the client's address to upstreams; default
    /// `x-forwarded`.
    pub forwarded: ForwardedHeaders,
    /// `proxy.underscores` and `proxy.via`: the settings for request headers.
    pub heads: Heads,
    /// `proxy.max_requests_per_client`, `proxy.min_rate` and `proxy.response_buffer`: resource
    /// limits for one client and for slow clients.
    pub slow: Slow,
    /// `proxy.access_log`: the settings of the access log; `None`, the default, disables the access
    /// log.
    pub access_log: Option<AccessLogConfig>,
}

/// The timeouts of the reverse proxy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Timeouts {
    /// `connect`: the timeout for connecting to an upstream, including the TLS handshake; default 1
    /// s.
    pub connect: Duration,
    /// `head`: the timeout for receiving a response head from an upstream, measured from the end of
    /// the request; default 30 s.
    pub head: Duration,
    /// `idle`: how long the transfer of a request or response body may stall; default 60 s.
    pub idle: Duration,
    /// `request_head`: the timeout for receiving a complete request head, measured from its first
    /// byte; default 10 s.
    pub request_head: Duration,
    /// `keep_alive`: how long a client connection may be idle between two requests; default 75 s.
    pub keep_alive: Duration,
    /// `pool`: how long an upstream connection may be idle in the connection pool; default 30 s.
    pub pool: Duration,
    /// `upgraded`: how long an upgraded connection (such as a WebSocket) may have no traffic in
    /// either direction; default 10 min.
    pub upgraded: Duration,
}

impl Default for Timeouts {
    fn default() -> Self {
        Self {
            connect: Duration::from_secs(1),
            head: Duration::from_secs(30),
            idle: Duration::from_secs(60),
            request_head: Duration::from_secs(10),
            keep_alive: Duration::from_secs(75),
            pool: Duration::from_secs(30),
            upgraded: Duration::from_secs(600),
        }
    }
}

/// The headers that carry the client's address to an upstream.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ForwardedHeaders {
    /// The proxy sends `X-Forwarded-For`, `X-Forwarded-Proto` and `X-Forwarded-Host`.
    #[default]
    XForwarded,
    /// The proxy sends `Forwarded` (RFC 7239).
    Forwarded,
    /// The proxy sends `Forwarded` and the `X-Forwarded-*` headers.
    Both,
}

/// The section `proxy` as written in the rules file. Parts that could not be read are omitted.
#[derive(Debug, Default)]
pub(crate) struct RawProxy<'n> {
    /// Whether the file has a section `proxy`.
    pub(crate) is_written: bool,
    pub(crate) upstreams: Vec<RawUpstream<'n>>,
}

/// Reads the section `proxy`. Returns the section as written, and its settings. The settings are
/// `None` if the file has no section `proxy`, or if the section is invalid.
pub(super) fn proxy<'n>(
    file: &Fields<'n>,
    listen: &ListenAddresses,
    report: &mut Report,
) -> (RawProxy<'n>, Option<Proxy>) {
    let mut raw = RawProxy::default();
    let Some(value) = file.get("proxy") else {
        return (raw, None);
    };
    raw.is_written = true;
    let what = "a map such as {listen: 127.0.0.1:8000, upstreams: […]}";
    let Some(fields) = value.fields(report, what, FIELDS) else {
        return (raw, None);
    };
    let address = address(&fields, listen, report);
    let tls = fields.get("tls").and_then(|value| tls(value, report));
    let (raw_upstreams, upstreams) = upstream::upstreams(&fields, report);
    raw.upstreams = raw_upstreams;
    let proxy = settings(&fields, address, tls, upstreams, report);
    (raw, proxy)
}

/// Reads the remaining settings of a proxy, after its address, certificate and upstreams have been
/// read. Returns `None` if the address or an upstream is invalid.
fn settings(
    fields: &Fields<'_>,
    address: Option<SocketAddr>,
    tls: Option<TlsFiles>,
    upstreams: Option<Vec<UpstreamConfig>>,
    report: &mut Report,
) -> Option<Proxy> {
    let timeouts = fields
        .get("timeouts")
        .and_then(|value| timeouts(value, report));
    let max_body = fields.get("max_body").and_then(|value| size(value, report));
    let max_inspected_body = fields
        .get("max_inspected_body")
        .and_then(|value| within(size(value, report)?, INSPECTED_BYTES, value, report));
    let error_formats = [
        ("auto", ErrorFormat::Auto),
        ("problem", ErrorFormat::Problem),
        ("openai", ErrorFormat::OpenAi),
        ("anthropic", ErrorFormat::Anthropic),
        ("gemini", ErrorFormat::Gemini),
    ];
    let error_format = fields
        .get("error_format")
        .and_then(|value| value.choice(report, &error_formats));
    let head = fields
        .get("max_head")
        .and_then(|value| within(size(value, report)?, HEAD_BYTES, value, report));
    let mut count = |name, most| {
        let value = fields.get(name)?;
        within(value.small_number(report)?, 1..=most, value, report)
    };
    let max_headers = count("max_headers", MOST_HEADERS);
    let max_connections = count("max_connections", MAX_CONNECTIONS);
    let per_client = count("max_connections_per_client", MAX_CONNECTIONS);
    let choices = [
        ("x-forwarded", ForwardedHeaders::XForwarded),
        ("forwarded", ForwardedHeaders::Forwarded),
        ("both", ForwardedHeaders::Both),
    ];
    let forwarded = fields
        .get("forwarded")
        .and_then(|value| value.choice(report, &choices));
    let log = fields.get("access_log");
    let log = log.and_then(|value| access_log::access_log(value, report));
    Some(Proxy {
        listen: address?,
        tls,
        upstreams: upstreams?,
        timeouts: timeouts.unwrap_or_default(),
        max_body: max_body.and_then(|bytes| u64::try_from(bytes).ok()),
        max_inspected_body: max_inspected_body
            .and_then(|bytes| u64::try_from(bytes).ok())
            .unwrap_or(1 << 20),
        error_format: error_format.unwrap_or(ErrorFormat::Auto),
        max_head: head.unwrap_or(64 << 10),
        max_headers: max_headers.unwrap_or(MAX_HEADERS),
        max_connections: max_connections.unwrap_or(10_000),
        fitted_connections: None,
        max_connections_per_client: per_client.unwrap_or(1_000),
        forwarded: forwarded.unwrap_or_default(),
        access_log: log,
        heads: heads::heads(fields, report),
        slow: slow::slow(fields, report),
    })
}

fn address(
    fields: &Fields<'_>,
    listen: &ListenAddresses,
    report: &mut Report,
) -> Option<SocketAddr> {
    let what = "an address and port such as 127.0.0.1:8000";
    let Some(value) = fields.get("listen") else {
        if !fields.tries("listen") {
            fields.wrong(report, "listen", format!("is missing; name {what}"));
        }
        return None;
    };
    let address: Option<SocketAddr> = value.text(report, what)?.parse().ok();
    let Some(address) = address else {
        value.expected(report, what);
        return None;
    };
    if let Some(listener) = listen::taken_by(&listen.listeners(), address) {
        value.wrong(
            report,
            format!(
                "{address} is also the address of listen.{listener}; give each listener its own address"
            ),
        );
    }
    Some(address)
}

fn timeouts(value: &Value<'_>, report: &mut Report) -> Option<Timeouts> {
    let known = &[
        "connect",
        "head",
        "idle",
        "request_head",
        "keep_alive",
        "pool",
        "upgraded",
    ];
    let fields = value.fields(report, "a map such as {connect: 5s}", known)?;
    let mut timeouts = Timeouts::default();
    for (name, setting) in [
        ("connect", &mut timeouts.connect),
        ("head", &mut timeouts.head),
        ("idle", &mut timeouts.idle),
        ("request_head", &mut timeouts.request_head),
        ("keep_alive", &mut timeouts.keep_alive),
        ("pool", &mut timeouts.pool),
        ("upgraded", &mut timeouts.upgraded),
    ] {
        if let Some(value) = fields.get(name) {
            *setting = time(value, report).unwrap_or(*setting);
        }
    }
    Some(timeouts)
}

fn time(value: &Value<'_>, report: &mut Report) -> Option<Duration> {
    let span = value.parsed(report, "a duration such as 30s", notation::span)?;
    if span < Span::from_millis(1) || span > LONGEST {
        value.wrong(report, "must be 1ms to 1d");
        return None;
    }
    Some(Duration::from_micros(span.as_micros()))
}

pub(super) fn within<T: PartialOrd + Copy + std::fmt::Display>(
    number: T,
    range: std::ops::RangeInclusive<T>,
    value: &Value<'_>,
    report: &mut Report,
) -> Option<T> {
    if !range.contains(&number) {
        let (least, most) = (range.start(), range.end());
        value.wrong(
            report,
            format!("must be from {least} to {most}, got {number}"),
        );
        return None;
    }
    Some(number)
}
