//! Checks that each key is used only where it is allowed.
//!
//! envoyproxy/ratelimit has a single list of keys, and accepts a key even in a map where the key
//! has no effect. Tidegate warns about a key that has no effect. Tidegate accepts its own keys,
//! which envoyproxy/ratelimit does not have, only where they have an effect.
//!
//! envoyproxy/ratelimit rejects Tidegate's own keys everywhere, so a file that is valid for
//! envoyproxy/ratelimit has the same meaning for Tidegate.

use tidegate_config::{report::Report, value::Value, yaml::YamlContent};
use tidegate_core::LimitSpec;
use tidegate_net::input::{nearest, shown};

use super::scalar::{self, TypedScalar};

/// A kind of map in a configuration file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum MapKind {
    File,
    Descriptor,
    RateLimit,
    Replaces,
    Anchor,
}

/// The keys that envoyproxy/ratelimit accepts.
const KNOWN: &[&str] = &[
    "domain",
    "key",
    "value",
    "descriptors",
    "rate_limit",
    "unit",
    "requests_per_unit",
    "unlimited",
    "shadow_mode",
    "quota_mode",
    "name",
    "replaces",
    "detailed_metric",
    "value_to_metric",
    "share_threshold",
    "metadata",
];

impl MapKind {
    /// Returns the keys that have an effect in this kind of map.
    const fn effective(self) -> &'static [&'static str] {
        match self {
            Self::File => &["domain", "descriptors", "all_or_nothing"],
            Self::Descriptor => &[
                "key",
                "value",
                "rate_limit",
                "rate_limits",
                "descriptors",
                "shadow_mode",
                "quota_mode",
                "detailed_metric",
                "value_to_metric",
                "share_threshold",
                "metadata",
            ],
            // A rate limit map may also contain all fields of a limit.
            Self::RateLimit => &["unit", "requests_per_unit", "unlimited", "name", "replaces"],
            Self::Replaces => &["name"],
            Self::Anchor => &["calendar", "zone", "day"],
        }
    }

    /// Returns the fields of a limit, if this kind of map accepts them.
    const fn fields(self) -> &'static [&'static str] {
        match self {
            Self::RateLimit => &LimitSpec::FIELDS,
            Self::File | Self::Descriptor | Self::Replaces | Self::Anchor => &[],
        }
    }

    fn has(self, key: &str) -> bool {
        self.effective().contains(&key) || self.fields().contains(&key)
    }

    /// Returns the kind of map under `key`; `None` if the content of this map is not checked.
    fn inside(self, key: &str) -> Option<Self> {
        match key {
            "metadata" => None,
            "descriptors" => Some(Self::Descriptor),
            "rate_limit" | "rate_limits" => Some(Self::RateLimit),
            "replaces" => Some(Self::Replaces),
            "anchor" if self == Self::RateLimit => Some(Self::Anchor),
            _ => Some(self),
        }
    }
}

/// Reports every invalid key and every value of the wrong type, recursively.
pub(super) fn check(value: &Value<'_>, kind: MapKind, report: &mut Report) {
    for (key, value) in value.members() {
        let Some(name) = name_of(key, &value, report) else {
            continue;
        };
        let is_effective = kind.has(name);
        if !is_effective && KNOWN.contains(&name) {
            let message = format!("`{}` has no effect here; move it {}", name, home_of(name));
            value.warn_of_key(report, message);
        } else if !is_effective {
            let known: Vec<&str> = kind
                .effective()
                .iter()
                .chain(KNOWN)
                .chain(kind.fields())
                .copied()
                .collect();
            let guess = nearest(name, &known).map(|guess| format!("; did you mean `{guess}`?"));
            let message = format!(
                "config error, unknown key '{}'{}",
                shown(name),
                guess.unwrap_or_default()
            );
            value.wrong_key(report, message);
            continue;
        }
        if let Some(inside) = kind.inside(name) {
            check_value(&value, inside, name, report);
        }
    }
}

fn check_value(value: &Value<'_>, kind: MapKind, name: &str, report: &mut Report) {
    match value.content() {
        YamlContent::Map(_) => check(value, kind, report),
        YamlContent::List(_) => {
            for item in value.items(report, "a list").unwrap_or_default() {
                match item.content() {
                    YamlContent::Map(_) => check(&item, kind, report),
                    // A limit in Tidegate's format may be in the short form, such as `5/s`.
                    YamlContent::Plain(_) | YamlContent::Quoted(_) if name == "rate_limits" => {}
                    YamlContent::Plain(text) | YamlContent::Quoted(text) => {
                        let text = shown(text);
                        item.wrong(report, format!("config error, yaml file contains list of type other than map: {text}"));
                    }
                    YamlContent::Empty | YamlContent::List(_) => {
                        item.wrong(
                            report,
                            "config error, yaml file contains list of type other than map",
                        );
                    }
                }
            }
        }
        content => {
            if let Some(TypedScalar::Fraction(_)) = scalar::of(content) {
                value.wrong(report, "error checking config: a fraction is not a valid value here; quote the value if it is a string");
            }
        }
    }
}

fn name_of<'n>(
    key: Option<&'n YamlContent<'n>>,
    value: &Value<'_>,
    report: &mut Report,
) -> Option<&'n str> {
    let Some(YamlContent::Plain(text) | YamlContent::Quoted(text)) = key else {
        value.wrong(report, "config error, key is not of type string");
        return None;
    };
    if key.and_then(scalar::of) != Some(TypedScalar::Text) {
        value.wrong(
            report,
            format!("config error, key is not of type string: {}", shown(text)),
        );
        return None;
    }
    Some(text)
}

fn home_of(name: &str) -> &'static str {
    match name {
        "domain" => "to the top of the file",
        "name" | "unit" | "requests_per_unit" | "unlimited" | "replaces" => "into `rate_limit`",
        _ => "next to `key`",
    }
}
