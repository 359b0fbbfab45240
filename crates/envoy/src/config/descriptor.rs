//! Reads the domain and the descriptors of a configuration file.

use std::{
    collections::HashMap,
    sync::{Arc, OnceLock},
};

use tidegate_config::{envoy::DomainFiles, report::Report, value::Value, yaml::Content};
use tidegate_net::input::shown;

use super::{
    key_joining,
    keys::{self, MapKind},
    limit, metadata,
    scalar::{self, Scalar},
};

use crate::{
    overrides::Denied,
    rules::{ChargeMode, Detail, Domains, Level, Node, Rule},
};

/// The context in which one file is read.
#[derive(Debug)]
pub(super) struct Reader<'r, 'f> {
    pub(super) charging: &'r HashMap<String, ChargeMode>,
    pub(super) merging: DomainFiles,
    /// The file that was the first to use each domain.
    pub(super) first_files: &'r mut HashMap<String, &'f str>,
    pub(super) file: &'f str,
}

impl Reader<'_, '_> {
    pub(super) fn read(self, root: &Value<'_>, domains: &mut Domains, report: &mut Report) {
        keys::check(root, MapKind::File, report);
        let name = text(root, "domain", report).unwrap_or_default();
        if name.is_empty() {
            root.wrong(report, "config file cannot have empty domain");
        } else if let Some(first) = self.first_files.get(name)
            && self.merging == DomainFiles::One
        {
            let message = format!(
                "duplicate domain '{}' in config file; {first} already defines it",
                shown(name)
            );
            wrong(root, "domain", report, message);
        }
        self.first_files.entry(name.to_owned()).or_insert(self.file);
        flag(root, "all_or_nothing", report);
        let charging = self.charging.get(name).copied().unwrap_or_default();
        let domain = domains.entry(name);
        domain.charging = charging;
        level(root, name, domain.denied(), &mut domain.root, report);
    }
}

/// Reads the descriptors of `parent` into `level`. Messages refer to the descriptors by `path`.
fn level(parent: &Value<'_>, path: &str, denied: Denied, level: &mut Level, report: &mut Report) {
    let Some(descriptors) = field(parent, "descriptors") else {
        return;
    };
    let items = descriptors
        .items(report, "a list of descriptors")
        .unwrap_or_default();
    let mut named = Vec::new();
    for item in items
        .iter()
        .filter(|item| matches!(item.content(), Content::Map(_)))
    {
        let key = text(item, "key", report).unwrap_or_default();
        let value = text(item, "value", report).unwrap_or_default();
        if key.is_empty() {
            item.wrong(report, "descriptor has empty key");
        }
        let name = if value.is_empty() {
            key.to_owned()
        } else {
            format!("{key}_{value}")
        };
        let node = node(
            item,
            &name,
            &format!("{path}.{name}"),
            (value, denied),
            report,
        );
        if !key.is_empty() && !level.add(name.clone(), node) {
            item.wrong(
                report,
                format!(
                    "duplicate descriptor composite key '{}'",
                    shown(&format!("{path}.{name}"))
                ),
            );
        }
        named.push((key, name, item.clone()));
    }
    key_joining::warn(&named, report);
}

fn node(
    item: &Value<'_>,
    name: &str,
    path: &str,
    (value, denied): (&str, Denied),
    report: &mut Report,
) -> Node {
    let share_threshold = flag(item, "share_threshold", report);
    if share_threshold && !value.contains('*') {
        let message = format!(
            "share_threshold can only be used with wildcard values (containing '*'), but found key '{}'",
            shown(name)
        );
        wrong(item, "share_threshold", report, message);
    }
    let mut node = Node {
        rule: rule(item, denied, report).map(Arc::new),
        value: (!value.is_empty()).then(|| value.into()),
        share_threshold,
        value_to_metric: flag(item, "value_to_metric", report),
        ..Node::default()
    };
    level(item, path, denied, &mut node.children, report);
    node
}

/// Reads the rule of a descriptor: its limits and options.
fn rule(item: &Value<'_>, denied: Denied, report: &mut Report) -> Option<Rule> {
    let (shadow, quota) = (
        flag(item, "shadow_mode", report),
        flag(item, "quota_mode", report),
    );
    let detailed = flag(item, "detailed_metric", report);
    let metadata = field(item, "metadata").and_then(|value| metadata::read(&value, report));
    let limits = limit::read(item, denied, report)?;
    let limits = limits.denying(shadow, quota);
    Some(Rule {
        allowance: limits.allowance,
        name: limits.name,
        replaces: limits.replaces,
        shadow,
        quota,
        metadata,
        detail: if detailed {
            Detail::Full
        } else {
            Detail::ByLevel
        },
        counters: OnceLock::new(),
    })
}

/// Returns whether a file sets `all_or_nothing`. Ignores all mistakes in the file.
pub(super) fn is_all_or_nothing(root: &Value<'_>) -> bool {
    flag(root, "all_or_nothing", &mut Report::default())
}

/// Returns the text of a field, if it is a scalar.
pub(super) fn text_of<'n>(value: &Value<'n>, name: &str) -> Option<&'n str> {
    field(value, name)?.scalar()
}

/// Returns the value of a field, if it exists. If a key occurs more than once, the last value wins.
pub(super) fn field<'n>(value: &Value<'n>, name: &str) -> Option<Value<'n>> {
    let has_name = |key: &Content<'_>| matches!(key, Content::Plain(text) | Content::Quoted(text) if text == name);
    let fields = value.members().into_iter();
    fields
        .filter(|(key, _)| key.is_some_and(has_name))
        .map(|(_, value)| value)
        .next_back()
}

/// Returns the text of a scalar field, quoted or not; `None` if the text is empty.
pub(super) fn text<'n>(value: &Value<'n>, name: &str, report: &mut Report) -> Option<&'n str> {
    let value = field(value, name)?;
    match value.content() {
        Content::Plain(text) | Content::Quoted(text) => Some(text),
        Content::Empty => None,
        Content::List(_) | Content::Map(_) => {
            unreadable(&value, "a text", report);
            None
        }
    }
}

/// Reads a boolean in any notation of YAML 1.1. A missing value counts as false.
pub(super) fn flag(value: &Value<'_>, name: &str, report: &mut Report) -> bool {
    let Some(value) = field(value, name) else {
        return false;
    };
    match scalar::of(value.content()) {
        Some(Scalar::Truth(truth)) => truth,
        Some(Scalar::Null) => false,
        // A fraction is accepted here, because the check of the keys reports it as a mistake.
        Some(Scalar::Fraction(_)) => false,
        Some(Scalar::Whole(_) | Scalar::Text) | None => {
            unreadable(&value, "true or false", report);
            false
        }
    }
}

/// Reports that a value has the wrong type.
pub(super) fn unreadable(value: &Value<'_>, what: &str, report: &mut Report) {
    let found = value.describe();
    value.wrong(
        report,
        format!("error loading config file: expected {what}, got {found}"),
    );
}

/// Reports a mistake in the field `name`, or in `value` if the field does not exist.
pub(super) fn wrong(
    value: &Value<'_>,
    name: &str,
    report: &mut Report,
    message: impl Into<String>,
) {
    field(value, name)
        .as_ref()
        .unwrap_or(value)
        .wrong(report, message);
}
