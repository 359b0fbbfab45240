//! `events`: which events are detected, and where they are sent.

use std::path::PathBuf;

use super::{
    AdminToken, Password,
    limits::percent,
    report::Report,
    secrets::{self, SecretKeys},
    store::size,
    value::{Fields, Shape, Value},
};

/// The minimum of `near_limit`, in percent.
const MIN_NEAR: u32 = 50;
/// The maximum of `near_limit`, in percent.
const MAX_NEAR: u32 = 99;

/// The minimum of a file's `max_bytes`.
const MIN_BYTES: usize = 1 << 20;
/// The maximum of a file's `max_bytes`.
const MAX_BYTES: usize = 1 << 40;

/// The maximum of `max_per_second`.
const MAX_PER_SECOND: u32 = 10_000;

/// The maximum number of webhooks. Each webhook has its own thread.
const MAX_WEBHOOKS: usize = 16;

/// A type of event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EventType {
    /// A rule has started to deny a key.
    KeyDenied,
    /// A rule in shadow mode has started to report that it would deny a key.
    KeyWouldBeDenied,
    /// A key has used most of a limit.
    KeyNearLimit,
    /// The rate of requests or denials is far above its usual level, either for one rule or for all
    /// rules together.
    TrafficSurge,
    /// A traffic surge has ended.
    TrafficSurgeEnded,
    /// Redis has become unavailable, so decisions are made by the fallback policy.
    StoreLost,
    /// Redis is available again and makes the decisions.
    StoreRecovered,
    /// New rules have become active.
    RulesReloaded,
    /// The rules file could not be loaded.
    RulesReloadFailed,
    /// An operator has promoted the candidate rules.
    CandidatePromoted,
    /// An operator has blocked a key.
    BlockAdded,
    /// An operator has lifted a block.
    BlockLifted,
    /// An operator has reset the counters of a key.
    KeyReset,
    /// An operator has set an override.
    OverrideSet,
    /// An operator has removed an override.
    OverrideRemoved,
}

impl EventType {
    /// All types.
    pub const ALL: [Self; 15] = [
        Self::KeyDenied,
        Self::KeyWouldBeDenied,
        Self::KeyNearLimit,
        Self::TrafficSurge,
        Self::TrafficSurgeEnded,
        Self::StoreLost,
        Self::StoreRecovered,
        Self::RulesReloaded,
        Self::RulesReloadFailed,
        Self::CandidatePromoted,
        Self::BlockAdded,
        Self::BlockLifted,
        Self::KeyReset,
        Self::OverrideSet,
        Self::OverrideRemoved,
    ];

    /// Returns the name of the type.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::KeyDenied => "key.denied",
            Self::KeyWouldBeDenied => "key.would_be_denied",
            Self::KeyNearLimit => "key.near_limit",
            Self::TrafficSurge => "traffic.surge",
            Self::TrafficSurgeEnded => "traffic.surge_ended",
            Self::StoreLost => "store.lost",
            Self::StoreRecovered => "store.recovered",
            Self::RulesReloaded => "rules.reloaded",
            Self::RulesReloadFailed => "rules.reload_failed",
            Self::CandidatePromoted => "candidate.promoted",
            Self::BlockAdded => "block.added",
            Self::BlockLifted => "block.lifted",
            Self::KeyReset => "key.reset",
            Self::OverrideSet => "override.set",
            Self::OverrideRemoved => "override.removed",
        }
    }

    /// Returns whether events of this type report a change to the rules, blocks, overrides or
    /// counters, or a failed reload. The audit log contains only events of these types.
    #[must_use]
    pub const fn is_change(self) -> bool {
        matches!(
            self,
            Self::RulesReloaded
                | Self::RulesReloadFailed
                | Self::CandidatePromoted
                | Self::BlockAdded
                | Self::BlockLifted
                | Self::KeyReset
                | Self::OverrideSet
                | Self::OverrideRemoved
        )
    }
}

/// Which events are detected, and where they are sent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EventsConfig {
    /// `near_limit`: an event is sent when a key has used this percentage of a limit, 50 to 99;
    /// default 80. `None` turns these events off (`near_limit: off`).
    pub near_limit_percent: Option<u32>,
    /// `surges`: whether surges are detected; default true.
    pub surges: bool,
    /// `max_per_second`: the maximum number of events about keys per second, 1 to 10,000 (default
    /// 20). Further events about keys are dropped, and counted as lost in metrics.
    pub max_per_second: u32,
    /// `log`: whether events are written to the server's log; default true.
    pub log: bool,
    /// `file`: the file to which all types of events are written.
    pub file: Option<EventFile>,
    /// `audit`: the audit log, a file that contains only changes made by operators and by reloads.
    pub audit: Option<EventFile>,
    /// `webhooks`: the HTTP endpoints to which events are sent, at most 16.
    pub webhooks: Vec<WebhookConfig>,
}

impl Default for EventsConfig {
    fn default() -> Self {
        Self {
            near_limit_percent: Some(80),
            surges: true,
            max_per_second: 20,
            log: true,
            file: None,
            audit: None,
            webhooks: Vec::new(),
        }
    }
}

/// The section `events`; `None` if events are off (`events: off`).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EventsSection(pub Option<EventsConfig>);

impl Default for EventsSection {
    fn default() -> Self {
        Self(Some(EventsConfig::default()))
    }
}

/// An event file, with one JSON document per line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EventFile {
    /// `to`: the file. The path is relative to the server's working directory.
    pub to: PathBuf,
    /// `max_bytes`: the maximum total size of the current file and the previous file; default 256
    /// MiB.
    pub max_bytes: usize,
}

/// An HTTP endpoint to which events are sent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WebhookConfig {
    /// `url`: the URL of the endpoint. The URL can contain credentials, so it is not logged in
    /// full.
    pub url: String,
    /// `secret` or `secret_env`: the signing secret. Never [`Password::None`].
    pub secret: Password,
    /// `types`: the event types to send; default all.
    pub types: Vec<EventType>,
}

pub(super) fn events(file: &Fields<'_>, report: &mut Report) -> EventsSection {
    match file.get("events") {
        Some(value) => EventsSection(section(value, report)),
        None => EventsSection::default(),
    }
}

/// Reads the section; `None` if events are off.
fn section(value: &Value<'_>, report: &mut Report) -> Option<EventsConfig> {
    let mut events = EventsConfig::default();
    let what = "off, or a map such as {near_limit: 80%, file: events.jsonl}";
    if let Shape::Scalar = value.shape() {
        if value.scalar() != Some("off") {
            value.expected(report, what);
        }
        return None;
    }
    let known = &[
        "near_limit",
        "surges",
        "max_per_second",
        "log",
        "file",
        "audit",
        "webhooks",
    ];
    let fields = value.fields(report, what, known)?;
    if let Some(value) = fields.get("near_limit") {
        events.near_limit_percent = near_limit(value, report);
    }
    if let Some(surges) = fields.get("surges").and_then(|value| value.flag(report)) {
        events.surges = surges;
    }
    if let Some(log) = fields.get("log").and_then(|value| value.flag(report)) {
        events.log = log;
    }
    if let Some(value) = fields.get("max_per_second")
        && let Some(number) = value.small_number::<u32>(report)
    {
        if !(1..=MAX_PER_SECOND).contains(&number) {
            value.wrong(report, format!("must be 1 to {MAX_PER_SECOND}"));
        }
        events.max_per_second = number;
    }
    events.file = fields
        .get("file")
        .and_then(|value| event_file(value, report));
    events.audit = fields
        .get("audit")
        .and_then(|value| event_file(value, report));
    if let (Some(events), Some(audit)) = (&events.file, &events.audit)
        && events.to == audit.to
    {
        let message = "is also the path of `file`; name another file";
        fields.wrong(report, "audit", message);
    }
    if let Some(value) = fields.get("webhooks") {
        let items = value.one_or_more(report);
        if items.len() > MAX_WEBHOOKS {
            let message = format!(
                "{} webhooks exceed the maximum of {MAX_WEBHOOKS}",
                items.len()
            );
            value.wrong(report, message);
        }
        let hooks = items.iter().filter_map(|item| webhook(item, report));
        events.webhooks = hooks.collect();
    }
    Some(events)
}

fn near_limit(value: &Value<'_>, report: &mut Report) -> Option<u32> {
    if value.scalar() == Some("off") {
        return None;
    }
    let percent = percent(value, report)?;
    if !(MIN_NEAR..=MAX_NEAR).contains(&percent) {
        value.wrong(
            report,
            format!("must be {MIN_NEAR}% to {MAX_NEAR}%, or off"),
        );
    }
    Some(percent)
}

/// Reads the path of an event file, or a map with the path and the maximum size.
fn event_file(value: &Value<'_>, report: &mut Report) -> Option<EventFile> {
    let mut max_bytes = 256 << 20;
    if let Shape::Scalar = value.shape() {
        let to = value.text(report, "the path of a file")?.into();
        return Some(EventFile { to, max_bytes });
    }
    let what = "the path of a file, or a map such as {to: events.jsonl, max_bytes: 64MiB}";
    let fields = value.fields(report, what, &["to", "max_bytes"])?;
    if let Some(value) = fields.get("max_bytes")
        && let Some(bytes) = size(value, report)
    {
        if !(MIN_BYTES..=MAX_BYTES).contains(&bytes) {
            value.wrong(report, "must be 1MiB to 1024GiB");
        }
        max_bytes = bytes;
    }
    let Some(to) = fields.get("to") else {
        fields.wrong(report, "to", "is missing; name the file for the events");
        return None;
    };
    let to = to.text(report, "the path of a file")?.into();
    Some(EventFile { to, max_bytes })
}

fn webhook(value: &Value<'_>, report: &mut Report) -> Option<WebhookConfig> {
    let what = "a map such as {url: https://example.com/hook, secret_env: HOOK_SECRET}";
    let known = &["url", "secret", "secret_env", "types"];
    let fields = value.fields(report, what, known)?;
    let url = match fields.get("url") {
        Some(url) => webhook_url(url, report),
        None => {
            fields.wrong(report, "url", "is missing; give the URL of the endpoint");
            None
        }
    };
    let secret = match secrets::secret(&fields, SecretKeys::SECRET, report) {
        AdminToken::None => {
            let message = "is missing; name the environment variable with the signing secret, \
                           which is whsec_ followed by 24 to 64 bytes in base64";
            if !fields.tries("secret_env") {
                fields.wrong(report, "secret_env", message);
            }
            Password::None
        }
        AdminToken::Literal(secret) => Password::Literal(secret),
        AdminToken::Env(name) => Password::Env(name),
    };
    let types = match fields.get("types") {
        Some(types) => {
            let patterns = types.one_or_more(report);
            let types = patterns.iter().flat_map(|item| event_types(item, report));
            types.collect()
        }
        None => EventType::ALL.to_vec(),
    };
    Some(WebhookConfig {
        url: url?,
        secret,
        types,
    })
}

/// Reads the URL of a webhook. The error never contains the URL, which can contain credentials.
fn webhook_url(value: &Value<'_>, report: &mut Report) -> Option<String> {
    let text = value.text(report, "a URL")?;
    let uri: Result<http::Uri, _> = text.parse();
    let is_sound = uri.is_ok_and(|uri| {
        matches!(uri.scheme_str(), Some("http" | "https"))
            && uri
                .authority()
                .is_some_and(|authority| !authority.as_str().contains('@'))
    });
    if !is_sound {
        let message = "is not a URL with http or https; give a URL such as https://example.com/hook, without a user name";
        value.wrong(report, message);
        return None;
    }
    Some(text.to_owned())
}

/// Reads event types. Each item is the name of an event type, or a prefix followed by `*`, which
/// means all event types with this prefix.
fn event_types(value: &Value<'_>, report: &mut Report) -> Vec<EventType> {
    let text = value.scalar().unwrap_or_default();
    if let Some(prefix) = text.strip_suffix('*') {
        let matching = EventType::ALL.into_iter();
        let matching = matching.filter(|kind| kind.as_str().starts_with(prefix));
        let matching: Vec<EventType> = matching.collect();
        if matching.is_empty() {
            let message =
                format!("no event type begins with `{prefix}`; write a pattern such as key.*");
            value.wrong(report, message);
        }
        return matching;
    }
    let choices = EventType::ALL.map(|kind| (kind.as_str(), kind));
    value.choice(report, &choices).into_iter().collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Config;

    fn mistakes(text: &str) -> Vec<String> {
        let mistakes = Config::parse(text).unwrap_err();
        mistakes.iter().map(ToString::to_string).collect()
    }

    #[test]
    fn settings_have_defaults() {
        let config = |text: &str| Config::parse(text).unwrap().events.0;
        assert_eq!(config("rules: []"), Some(EventsConfig::default()));
        assert_eq!(config("events: off"), None);
        let written = "events: {near_limit: off, surges: false, max_per_second: 5, log: false, \
                       file: e.jsonl, audit: {to: a.jsonl, max_bytes: 1MiB}, \
                       webhooks: [{url: 'https://example.com/a?b', secret_env: S, types: [block.*, key.denied]}]}";
        let expected = EventsConfig {
            near_limit_percent: None,
            surges: false,
            max_per_second: 5,
            log: false,
            file: Some(EventFile {
                to: "e.jsonl".into(),
                max_bytes: 256 << 20,
            }),
            audit: Some(EventFile {
                to: "a.jsonl".into(),
                max_bytes: 1 << 20,
            }),
            webhooks: vec![WebhookConfig {
                url: "https://example.com/a?b".to_owned(),
                secret: Password::Env("S".to_owned()),
                types: vec![
                    EventType::BlockAdded,
                    EventType::BlockLifted,
                    EventType::KeyDenied,
                ],
            }],
        };
        assert_eq!(config(written), Some(expected));
    }

    #[test]
    fn every_mistake_is_reported_with_its_line() {
        let wrong = "events:
  near_limit: 20%
  max_per_second: 0
  file: same.jsonl
  audit: same.jsonl
  webhooks:
    - {url: 'ftp://token@example.com', secret_env: S}
    - {url: 'http://example.com'}
    - {url: 'http://example.com', secret_env: S, types: [key.denies, cat.*]}";
        assert_eq!(
            mistakes(wrong),
            [
                "events.near_limit (line 2): must be 50% to 99%, or off",
                "events.max_per_second (line 3): must be 1 to 10000",
                "events.audit (line 5): is also the path of `file`; name another file",
                "events.webhooks[0].url (line 7): is not a URL with http or https; give a URL such as https://example.com/hook, without a user name",
                "events.webhooks[1].secret_env (line 8): is missing; name the environment variable with the signing secret, which is whsec_ followed by 24 to 64 bytes in base64",
                "events.webhooks[2].types[0] (line 9): expected one of key.denied, key.would_be_denied, key.near_limit, traffic.surge, traffic.surge_ended, store.lost, store.recovered, rules.reloaded, rules.reload_failed, candidate.promoted, block.added, block.lifted, key.reset, override.set, override.removed, got \"key.denies\"; did you mean `key.denied`?",
                "events.webhooks[2].types[1] (line 9): no event type begins with `cat.`; write a pattern such as key.*",
            ]
        );
        assert_eq!(mistakes("events: on").len(), 1);
    }
}
