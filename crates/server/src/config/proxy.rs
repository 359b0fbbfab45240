//! `proxy`: where the reverse proxy listens, what stands behind it, and how much of everything it takes.

mod access_log;
mod adaptive;
mod gaps;
mod heads;
mod health;
mod slow;
mod upstream;
mod url;

use std::{net::SocketAddr, time::Duration};

use tidegate_core::{RuleSet, Span, notation};

use super::{
    Listen, TlsFiles, doors,
    grpc::tls,
    report::Report,
    store::size,
    value::{Fields, Value},
};

use crate::net::MAX_HEADERS;

pub use access_log::AccessLog;
pub use adaptive::{Adaptive, Class};
pub use heads::{Heads, Underscores, Via};
pub use health::{Ejection, HealthCheck};
pub use slow::{MinRate, Slow};
pub use upstream::Upstream;
pub use url::{Scheme, Url};

/// The longest time that a setting may name.
const LONGEST: Span = Span::from_secs(86_400);

/// The bounds of `proxy.max_head`, in bytes: what one read brings at least, and what nobody needs.
const HEAD_BYTES: std::ops::RangeInclusive<usize> = 8_192..=1 << 20;

/// The most header lines that may be allowed: as many as a request or an answer can have at all.
const MOST_HEADERS: usize = 1_000;

/// The most connections that clients may be allowed.
const MOST_CONNECTIONS: usize = 1_000_000;

const FIELDS: &[&str] = &[
    "listen",
    "tls",
    "upstreams",
    "timeouts",
    "max_body",
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

/// What the reverse proxy does.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Proxy {
    /// `proxy.listen`: where clients come to.
    pub listen: SocketAddr,
    /// `proxy.tls`: its certificate; `None` is in the clear.
    pub tls: Option<TlsFiles>,
    /// `proxy.upstreams`: what stands behind it; the first whose conditions hold is asked.
    pub upstreams: Vec<Upstream>,
    /// `proxy.timeouts`.
    pub timeouts: Timeouts,
    /// `proxy.max_body`: the most bytes of a request's body; `None`, the default, is no bound.
    pub max_body: Option<u64>,
    /// `proxy.max_head`: the most bytes of the head of a request or of an answer, 8 KiB to 1 MiB; default 64 KiB.
    pub max_head: usize,
    /// `proxy.max_headers`: the most header lines of either, 1 to 1,000; default 100.
    pub max_headers: usize,
    /// `proxy.max_connections`: the most clients at once, 1 to 1,000,000; default 10,000.
    pub max_connections: usize,
    /// The same, where the process may not open so many files.
    pub fitted_connections: Option<usize>,
    /// `proxy.max_connections_per_client`: the most of one address (IPv6: of one /64), 1 to 1,000,000; default 1,000.
    pub max_connections_per_client: usize,
    /// `proxy.forwarded`: by which headers upstreams learn who the client is; default `x-forwarded`.
    pub forwarded: ForwardedHeaders,
    /// `proxy.underscores` and `proxy.via`.
    pub heads: Heads,
    /// `proxy.max_requests_per_client`, `proxy.min_rate` and `proxy.response_buffer`.
    pub slow: Slow,
    /// `proxy.access_log`: where each request is written down; `None`, the default, is nowhere.
    pub access_log: Option<AccessLog>,
}

/// How long the proxy waits for whom.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Timeouts {
    /// `connect`: for a connection to an upstream, TLS included; default 1 s.
    pub connect: Duration,
    /// `head`: for the head of an upstream's answer, from the end of the request on; default 30 s.
    pub head: Duration,
    /// `idle`: for the next octets of a body, from either side, and for either side to take some; default 60 s.
    pub idle: Duration,
    /// `request_head`: for the whole head of a request, from its first octet on; default 10 s.
    pub request_head: Duration,
    /// `keep_alive`: for the next request on a client's connection; default 75 s.
    pub keep_alive: Duration,
    /// `pool`: for how long a connection to an upstream is kept for the next request; default 30 s.
    pub pool: Duration,
    /// `upgraded`: for the next octets in either direction of a connection that was upgraded; default 10 min.
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

/// By which headers an upstream learns who the client is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ForwardedHeaders {
    /// `X-Forwarded-For`, `-Proto` and `-Host`.
    #[default]
    XForwarded,
    /// `Forwarded`, RFC 7239.
    Forwarded,
    /// All of them.
    Both,
}

/// `None` without the section, and if there is a mistake in it.
pub(super) fn proxy(
    file: &Fields<'_>,
    listen: &Listen,
    rules: &RuleSet,
    report: &mut Report,
) -> Option<Proxy> {
    let value = file.get("proxy")?;
    let what = "a map such as {listen: 127.0.0.1:8000, upstreams: […]}";
    let fields = value.fields(report, what, FIELDS)?;
    let address = address(&fields, listen, report);
    let tls = fields.get("tls").and_then(|value| tls(value, report));
    let upstreams = upstream::upstreams(&fields, address, rules, report);
    let timeouts = fields
        .get("timeouts")
        .and_then(|value| timeouts(value, report));
    let max_body = fields.get("max_body").and_then(|value| size(value, report));
    let head = fields
        .get("max_head")
        .and_then(|value| within(size(value, report)?, HEAD_BYTES, value, report));
    let mut count = |name, most| {
        let value = fields.get(name)?;
        within(value.small_number(report)?, 1..=most, value, report)
    };
    let max_headers = count("max_headers", MOST_HEADERS);
    let max_connections = count("max_connections", MOST_CONNECTIONS);
    let per_client = count("max_connections_per_client", MOST_CONNECTIONS);
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
        max_head: head.unwrap_or(64 << 10),
        max_headers: max_headers.unwrap_or(MAX_HEADERS),
        max_connections: max_connections.unwrap_or(10_000),
        fitted_connections: None,
        max_connections_per_client: per_client.unwrap_or(1_000),
        forwarded: forwarded.unwrap_or_default(),
        access_log: log,
        heads: heads::heads(&fields, report),
        slow: slow::slow(&fields, report),
    })
}

fn address(fields: &Fields<'_>, listen: &Listen, report: &mut Report) -> Option<SocketAddr> {
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
    if let Some(door) = doors::taken_by(&listen.doors(), address) {
        value.wrong(
            report,
            format!("{address} is the address of listen.{door} too"),
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
    let fields = value.fields(report, "a map of durations", known)?;
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

fn within<T: PartialOrd + Copy + std::fmt::Display>(
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
