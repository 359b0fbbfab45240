//! A rule: the limits and options of one node in the rule tree.

use std::sync::{Arc, OnceLock};

use super::{limits::RuleLimits, overridable::Overridable};
use crate::{Metadata, counters::DescriptorCounters};

/// The limits and options that apply to the descriptors that the rule matches.
#[derive(Debug)]
pub(crate) struct DescriptorRule {
    pub(crate) allowance: Allowance,
    /// The name of the rule in responses and in the `replaces` settings of other rules.
    pub(crate) name: Option<Arc<str>>,
    /// The names of the rules that do not apply if this rule applies.
    pub(crate) replaces: Box<[Box<str>]>,
    /// Whether the rule is in shadow mode: it counts and reports, but never denies.
    pub(crate) shadow: bool,
    /// Whether the rule is in quota mode: it denies only if all of the request's quotas are over
    /// their limits.
    pub(crate) quota: bool,
    /// The metadata that is sent to Envoy if the rule allows a request.
    pub(crate) metadata: Option<Metadata>,
    /// The request values that appear in the rule's metrics.
    pub(crate) detail: Detail,
    /// The cached counters of the rule, if its metrics do not contain values from requests.
    pub(crate) counters: OnceLock<Arc<DescriptorCounters>>,
    /// The core rule with whose name and key operators set overrides of this rule, built when it is
    /// first needed; `None` if no overrides can be set for the rule.
    pub(crate) overridable: OnceLock<Option<Box<Overridable>>>,
}

impl DescriptorRule {
    /// Carries over the usage that was counted under the limits of `old`.
    pub(super) fn inherit_counts(&mut self, old: &Self) {
        if let (Allowance::Limited(new), Allowance::Limited(old)) =
            (&mut self.allowance, &old.allowance)
        {
            let limits = Arc::unwrap_or_clone(Arc::clone(&new.limits));
            new.limits = Arc::new(limits.inheriting_from(&old.limits));
            new.variants = OnceLock::new();
            if new.shadow_limits.is_some() {
                new.add_shadow_limits();
            }
        }
    }
}

/// The limits of a rule.
#[derive(Clone, Debug)]
pub(crate) enum Allowance {
    /// The rule has no limit, and nothing is counted.
    Unlimited,
    /// The rule has one or more limits.
    Limited(RuleLimits),
}

/// The request values that appear in the metrics of a rule.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Detail {
    /// Only the values of the levels that set `value_to_metric`.
    #[default]
    ByLevel,
    /// All values from the request.
    Full,
}
