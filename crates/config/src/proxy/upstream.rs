//! `proxy.upstreams`: the services behind the proxy, each with one or more endpoints.

use std::{collections::HashSet, net::SocketAddr, path::PathBuf};

use tidegate_core::{Condition, RuleSet, When};
use tidegate_net::input::advice;

use super::{Adaptive, Ejection, HealthCheck, Scheme, Url, adaptive, health, within};
use crate::{
    conditions, lint,
    report::Report,
    value::{Fields, Value},
};

/// The maximum number of upstreams. It bounds the label values of metrics.
const MAX_UPSTREAMS: usize = 100;

/// The maximum number of endpoints of one upstream.
const MAX_URLS: usize = 64;

/// The maximum length of an upstream's name, in bytes.
const MAX_NAME_BYTES: usize = 64;

/// The upper bound of `max_connections` to one endpoint.
const MOST_CONNECTIONS: usize = 65_536;

/// The entries that conditions of an upstream may use.
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
pub struct Upstream {
    /// `name`: the name in logs and metrics, 1 to 64 letters, digits, `-`, `_` and `.`.
    pub name: Box<str>,
    /// `urls`: its endpoints, 1 to 64, among which requests are load-balanced.
    pub urls: Vec<Url>,
    /// `when`: the conditions on `path`, `host` and `method` of its requests; without `when`, all
    /// requests match.
    pub when: When,
    /// `max_connections`: the maximum number of connections to one endpoint, 1 to 65,536; default
    /// 1,024.
    pub max_connections: usize,
    /// `http2`: whether to use HTTP/2, over plaintext or TLS; default false.
    pub http2: bool,
    /// `ca`: a PEM file with the trust anchors for its certificates; by default those of the
    /// system.
    pub ca: Option<PathBuf>,
    /// `eject`: outlier detection if there are several endpoints; `None` disables it (`off`).
    pub eject: Option<Ejection>,
    /// `health`: active health checks of its endpoints; off by default.
    pub health: Option<HealthCheck>,
    /// `adaptive`: the adaptive concurrency limit; `None`, the default, does not limit concurrency.
    pub adaptive: Option<Adaptive>,
}

impl Upstream {
    /// Returns the name of the entry that reports spare capacity to rules, if the upstream has
    /// `adaptive`.
    #[must_use]
    pub fn room_entry(&self) -> String {
        format!("room.{}", self.name)
    }
}

pub(super) fn upstreams(
    proxy: &Fields<'_>,
    listen: Option<SocketAddr>,
    rules: &RuleSet,
    report: &mut Report,
) -> Option<Vec<Upstream>> {
    let what = "a list of upstreams such as [{name: app, urls: [\"http://127.0.0.1:3000\"]}]";
    let Some(value) = proxy.get("upstreams") else {
        if !proxy.tries("upstreams") {
            proxy.wrong(report, "upstreams", format!("is missing; give {what}"));
        }
        return None;
    };
    let before = report.count();
    let items = value.items(report, what)?;
    if !(1..=MAX_UPSTREAMS).contains(&items.len()) {
        let problem = format!(
            "must be 1 to {MAX_UPSTREAMS} upstreams, got {}",
            items.len()
        );
        value.wrong(report, problem);
    }
    let read: Vec<(&Value<'_>, Upstream)> = items
        .iter()
        .take(MAX_UPSTREAMS)
        .filter_map(|item| Some((item, upstream(item, report)?)))
        .collect();
    let mut names = HashSet::new();
    for (item, upstream) in &read {
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
        return None;
    }
    let upstreams: Vec<Upstream> = read.into_iter().map(|(_, upstream)| upstream).collect();
    lint::proxy::warn(&upstreams, &items, listen, rules, report);
    Some(upstreams)
}

fn upstream(value: &Value<'_>, report: &mut Report) -> Option<Upstream> {
    let what = "a map such as {name: app, urls: [\"http://127.0.0.1:3000\"]}";
    let fields = value.fields(report, what, FIELDS)?;
    for name in ["name", "urls"] {
        if !fields.tries(name) {
            fields.wrong(report, name, "is missing");
        }
    }
    let name = fields.get("name").and_then(|value| name(value, report));
    let urls = fields.get("urls").and_then(|value| urls(value, report));
    let when = match fields.get("when") {
        Some(value) => conditions(value, report),
        None => Some(When::default()),
    };
    let most = fields.get("max_connections").and_then(|value| {
        within(
            value.small_number(report)?,
            1..=MOST_CONNECTIONS,
            value,
            report,
        )
    });
    let http2 = fields.get("http2").and_then(|value| value.flag(report));
    let ca = fields
        .get("ca")
        .and_then(|value| ca(value, urls.as_deref(), report));
    let eject = health::eject(&fields, report);
    let adaptive = fields
        .get("adaptive")
        .map(|value| adaptive::adaptive(value, report));
    let check = fields
        .get("health")
        .map(|value| health::health(value, report));
    Some(Upstream {
        name: name?,
        urls: urls?,
        when: when?,
        max_connections: most.unwrap_or(1_024),
        http2: http2.unwrap_or(false),
        ca,
        eject,
        health: check.flatten(),
        adaptive: adaptive.flatten(),
    })
}

/// Reads a name that is used as a label value in metrics.
pub(super) fn name(value: &Value<'_>, report: &mut Report) -> Option<Box<str>> {
    let what = "a name of 1 to 64 letters, digits, `-`, `_` and `.`";
    let name = value.text(report, what)?;
    let is_sound = (1..=MAX_NAME_BYTES).contains(&name.len())
        && name
            .bytes()
            .all(|byte| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte));
    if !is_sound {
        value.expected(report, what);
    }
    is_sound.then(|| name.into())
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
            "applies only to https://, and no URL of this upstream uses it",
        );
    }
    Some(path.into())
}

fn conditions(value: &Value<'_>, report: &mut Report) -> Option<When> {
    let what = "a map of conditions such as {path: /api/**}";
    let before = report.count();
    let mut read: Vec<Condition> = Vec::new();
    for (entry, value) in value.pairs(report, what)? {
        if !ENTRIES.contains(&entry) {
            let advice = advice(entry, ENTRIES);
            value.wrong_key(
                report,
                format!("upstreams are selected by path, host and method; {advice}"),
            );
            continue;
        }
        let pattern = conditions::pattern(&value, report);
        // `Condition::new` only rejects invalid entry names; the names in `ENTRIES` are valid.
        read.extend(pattern.and_then(|pattern| Condition::new(entry, pattern).ok()));
    }
    (report.count() == before).then(|| When::all(read))
}
