//! `proxy.upstreams`: the services behind the proxy, each with one or more endpoints.

use std::{collections::HashSet, path::PathBuf};

use tidegate_core::When;
use tidegate_net::input::advice;

use super::{Adaptive, Ejection, HealthCheck, Scheme, Url, adaptive, health, name::name, within};
use crate::{
    conditions::{RawCondition, RawWhen},
    report::Report,
    source_span::SourceSpan,
    value::{Fields, Value},
};

/// The maximum number of upstreams. The maximum also bounds the number of label values in metrics.
const MAX_UPSTREAMS: usize = 100;

/// The maximum number of endpoints of one upstream.
const MAX_URLS: usize = 64;

/// The maximum of `max_connections` of an upstream.
const MAX_CONNECTIONS: usize = 65_536;

/// The entries that the conditions of an upstream can use.
const ENTRIES: &[&str] = &["path", "host", "method"];

const FIELDS: &[&str] = &[
    "name",
    "urls",
    "when",
    "max_connections",
    "http2",
    "ca",
    "eject",
    "health",
    "adaptive",
];

/// A service behind the proxy.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct UpstreamConfig {
    /// `name`: the name of the upstream in logs and metrics, 1 to 64 letters, digits, `-`, `_` and
    /// `.`.
    pub name: Box<str>,
    /// `urls`: the endpoints of the upstream, 1 to 64, among which requests are load-balanced.
    pub urls: Vec<Url>,
    /// `when`: the conditions under which a request is forwarded to this upstream. The conditions
    /// can use the entries `path`, `host` and `method`. If `when` is missing, all requests match.
    pub when: When,
    /// `max_connections`: the maximum number of connections to one endpoint, 1 to 65,536; default
    /// 1,024.
    pub max_connections: usize,
    /// `http2`: whether the proxy sends requests to the upstream over HTTP/2, with or without TLS;
    /// default false.
    pub http2: bool,
    /// `ca`: the path of a PEM file with the trust anchors for the upstream's certificates; `None`,
    /// the default, means the trust anchors of the system.
    pub ca: Option<PathBuf>,
    /// `eject`: the settings of outlier detection; `None` means `off`. Outlier detection has no
    /// effect on an upstream with a single endpoint.
    pub eject: Option<Ejection>,
    /// `health`: the active health checks of the endpoints; `None`, the default, means no checks.
    pub health: Option<HealthCheck>,
    /// `adaptive`: the adaptive concurrency limit; `None`, the default, means no concurrency limit.
    pub adaptive: Option<Adaptive>,
}

impl UpstreamConfig {
    /// Returns the name of the entry that tells rules whether the upstream has spare capacity. The
    /// proxy provides the entry only if `adaptive` is set.
    #[must_use]
    pub fn headroom_entry(&self) -> String {
        format!("headroom.{}", self.name)
    }
}

/// An upstream as written in the rules file. Parts that could not be read are omitted.
#[derive(Debug)]
pub(crate) struct RawUpstream<'n> {
    pub(crate) span: SourceSpan,
    pub(crate) when: RawWhen<'n>,
    /// The conditions of each priority class of the upstream.
    pub(crate) classes: Vec<RawWhen<'n>>,
}

/// Reads the upstreams. Returns the upstreams as written, and the parsed upstreams. The parsed
/// upstreams are `None` if any upstream is invalid.
pub(super) fn upstreams<'n>(
    proxy: &Fields<'n>,
    report: &mut Report,
) -> (Vec<RawUpstream<'n>>, Option<Vec<UpstreamConfig>>) {
    let what = "a list of upstreams such as [{name: app, urls: [\"http://127.0.0.1:3000\"]}]";
    let Some(value) = proxy.get("upstreams") else {
        if !proxy.tries("upstreams") {
            proxy.wrong(report, "upstreams", format!("is missing; give {what}"));
        }
        return (Vec::new(), None);
    };
    let before = report.count();
    let Some(items) = value.items(report, what) else {
        return (Vec::new(), None);
    };
    if !(1..=MAX_UPSTREAMS).contains(&items.len()) {
        let problem = format!(
            "must be 1 to {MAX_UPSTREAMS} upstreams, got {}",
            items.len()
        );
        value.wrong(report, problem);
    }
    let (mut raw, mut upstreams) = (Vec::new(), Vec::new());
    for item in items.iter().take(MAX_UPSTREAMS) {
        if let Some((written, upstream)) = upstream(item, report) {
            upstreams.extend(upstream.map(|upstream| (item, upstream)));
            raw.push(written);
        }
    }
    let mut names = HashSet::new();
    for (item, upstream) in &upstreams {
        if !names.insert(&upstream.name) {
            item.wrong(
                report,
                format!(
                    "another upstream has the name `{}`; give each upstream its own name",
                    upstream.name
                ),
            );
        }
    }
    if report.count() > before {
        return (raw, None);
    }
    let upstreams: Vec<UpstreamConfig> = upstreams
        .into_iter()
        .map(|(_, upstream)| upstream)
        .collect();
    (raw, Some(upstreams))
}

/// Reads an upstream. Returns the upstream as written, and the parsed upstream, which is `None` if
/// the upstream is invalid. If the value is not a map, returns `None` in place of both.
fn upstream<'n>(
    value: &Value<'n>,
    report: &mut Report,
) -> Option<(RawUpstream<'n>, Option<UpstreamConfig>)> {
    let what = "a map such as {name: app, urls: [\"http://127.0.0.1:3000\"]}";
    let fields = value.fields(report, what, FIELDS)?;
    for name in ["name", "urls"] {
        if !fields.tries(name) {
            let message = "is missing; every upstream has a name and at least one URL";
            fields.wrong(report, name, message);
        }
    }
    let name = fields.get("name").and_then(|value| name(value, report));
    let urls = fields.get("urls").and_then(|value| urls(value, report));
    let (raw_when, when) = match fields.get("when") {
        Some(value) => conditions(value, report),
        None => (RawWhen::default(), Some(When::default())),
    };
    let most = fields.get("max_connections").and_then(|value| {
        within(
            value.small_number(report)?,
            1..=MAX_CONNECTIONS,
            value,
            report,
        )
    });
    let http2 = fields.get("http2").and_then(|value| value.flag(report));
    let ca = fields
        .get("ca")
        .and_then(|value| ca(value, urls.as_deref(), report));
    let eject = health::eject(&fields, report);
    let (classes, adaptive) = fields
        .get("adaptive")
        .map_or_else(Default::default, |value| adaptive::adaptive(value, report));
    let check = fields
        .get("health")
        .map(|value| health::health(value, report));
    let raw = RawUpstream {
        span: value.span().clone(),
        when: raw_when,
        classes,
    };
    let required = || Some((name?, urls?, when?));
    let upstream = required().map(|(name, urls, when)| UpstreamConfig {
        name,
        urls,
        when,
        max_connections: most.unwrap_or(1_024),
        http2: http2.unwrap_or(false),
        ca,
        eject,
        health: check.flatten(),
        adaptive,
    });
    Some((raw, upstream))
}

fn urls(value: &Value<'_>, report: &mut Report) -> Option<Vec<Url>> {
    let items = value.one_or_more(report);
    let before = report.count();
    if !(1..=MAX_URLS).contains(&items.len()) {
        let problem = format!("must be 1 to {MAX_URLS} URLs, got {}", items.len());
        value.wrong(report, problem);
    }
    let what = "a URL such as http://127.0.0.1:3000";
    let read: Vec<(&Value<'_>, Url)> = items
        .iter()
        .take(MAX_URLS)
        .filter_map(|item| Some((item, item.parsed(report, what, Url::parse)?)))
        .collect();
    for (at, (item, url)) in read.iter().enumerate() {
        if read[..at].iter().any(|(_, earlier)| earlier == url) {
            item.wrong(report, "is listed twice; remove one of the two");
        }
    }
    (report.count() == before).then(|| read.into_iter().map(|(_, url)| url).collect())
}

fn ca(value: &Value<'_>, urls: Option<&[Url]>, report: &mut Report) -> Option<PathBuf> {
    let path = value.text(report, "the path of a PEM file")?;
    if urls.is_some_and(|urls| urls.iter().all(|url| url.scheme == Scheme::Http)) {
        value.wrong(
            report,
            "applies only to https:// URLs, and this upstream has none; remove it, or use https://",
        );
    }
    Some(path.into())
}

/// Reads the conditions of an upstream. Returns the conditions as written, and the parsed
/// conditions, which are `None` if they are invalid.
fn conditions<'n>(value: &Value<'n>, report: &mut Report) -> (RawWhen<'n>, Option<When>) {
    let what = "a map of conditions such as {path: /api/**}";
    let before = report.count();
    let (mut raw, mut conditions) = (RawWhen::default(), Vec::new());
    for (entry, value) in value.pairs(report, what).unwrap_or_default() {
        if !ENTRIES.contains(&entry) {
            let advice = advice(entry, ENTRIES);
            value.wrong_key(
                report,
                format!("upstreams are selected by path, host and method; {advice}"),
            );
            continue;
        }
        let condition = RawCondition::read(entry, &value, report);
        conditions.extend(condition.build(report));
        raw.conditions.push(condition);
    }
    let when = (report.count() == before).then(|| When::all(conditions));
    (raw, when)
}
