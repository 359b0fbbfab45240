//! Reads the domain and the descriptors in a configuration file.

use std::{
    collections::HashMap,
    sync::{Arc, OnceLock},
};

use tidegate_config::{envoy::DomainFiles, report::Report, value::Value, yaml::YamlContent};
use tidegate_net::input::shown;

use super::{
    fields::{field, flag, text, wrong},
    key_joining,
    keys::{self, MapKind},
    limit, metadata,
};

use crate::{
    rules::DeniedHits,
    rules::{ChargeMode, DescriptorRule, Detail, Domains, RuleChildren, RuleNode},
};

/// The context in which one file is read.
#[derive(Debug)]
pub(super) struct DescriptorReader<'r, 'f> {
    pub(super) charging: &'r HashMap<String, ChargeMode>,
    pub(super) merging: DomainFiles,
    /// The first file that used each domain.
    pub(super) first_files: &'r mut HashMap<String, &'f str>,
    pub(super) file: &'f str,
}

impl DescriptorReader<'_, '_> {
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
        level(root, name, domain.denied_hits(), &mut domain.root, report);
    }
}

/// Reads the descriptors of `parent` into `level`. `path` is the path of the descriptors in error
/// messages.
fn level(
    parent: &Value<'_>,
    path: &str,
    denied: DeniedHits,
    level: &mut RuleChildren,
    report: &mut Report,
) {
    let Some(descriptors) = field(parent, "descriptors") else {
        return;
    };
    let items = descriptors
        .items(report, "a list of descriptors")
        .unwrap_or_default();
    let mut named = Vec::new();
    for item in items
        .iter()
        .filter(|item| matches!(item.content(), YamlContent::Map(_)))
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
            value,
            denied,
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
    value: &str,
    denied: DeniedHits,
    report: &mut Report,
) -> RuleNode {
    let share_threshold = flag(item, "share_threshold", report);
    if share_threshold && !value.contains('*') {
        let message = format!(
            "share_threshold can only be used with wildcard values (containing '*'), but found key '{}'",
            shown(name)
        );
        wrong(item, "share_threshold", report, message);
    }
    let mut node = RuleNode {
        rule: rule(item, denied, report).map(Arc::new),
        value: (!value.is_empty()).then(|| value.into()),
        share_threshold,
        value_to_metric: flag(item, "value_to_metric", report),
        ..RuleNode::default()
    };
    level(item, path, denied, &mut node.children, report);
    node
}

/// Reads the rule of a descriptor: its limits and options.
fn rule(item: &Value<'_>, denied: DeniedHits, report: &mut Report) -> Option<DescriptorRule> {
    let (shadow, quota) = (
        flag(item, "shadow_mode", report),
        flag(item, "quota_mode", report),
    );
    let detailed = flag(item, "detailed_metric", report);
    let metadata = field(item, "metadata").and_then(|value| metadata::read(&value, report));
    let limits = limit::read(item, denied, report)?;
    let limits = limits.denying(shadow, quota);
    Some(DescriptorRule {
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
        overridable: OnceLock::new(),
    })
}

/// Returns whether a file sets `all_or_nothing`. Ignores all errors in the file.
pub(super) fn is_all_or_nothing(root: &Value<'_>) -> bool {
    flag(root, "all_or_nothing", &mut Report::default())
}
