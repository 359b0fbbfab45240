//! A rule: the limits and options of one node in the rule tree.

use std::sync::{Arc, OnceLock};

use tidegate_core::Limits;

use crate::{Metadata, Unit, counters::Counters};

/// The limits and options that apply to the descriptors that the rule matches.
#[derive(Clone, Debug)]
pub(crate) struct Rule {
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
    pub(crate) counters: OnceLock<Arc<Counters>>,
}

impl Rule {
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

/// The limits of a rule, and how they are described in responses.
#[derive(Clone, Debug)]
pub(crate) struct RuleLimits {
    pub(crate) limits: Arc<Limits>,
    /// The same limits in shadow mode, for a rule in quota mode. They are used unless this quota is
    /// the request's leading quota, which is the only quota that can deny the request.
    pub(crate) shadow_limits: Option<Arc<Limits>>,
    /// The units of the limits, in order. The unit of a window with a different length is
    /// [`Unit::Unknown`].
    pub(crate) units: Box<[Unit]>,
    /// The window length, which is part of the counter key. Therefore, a descriptor has separate
    /// counters for different window lengths.
    pub(crate) window_seconds: u64,
    /// The limits for reports and reservations. They are built at the first use.
    pub(crate) variants: OnceLock<LimitVariants>,
}

/// Variants of a rule's limits. They share the rule's counters, but treat denied hits differently.
#[derive(Clone, Debug)]
pub(crate) struct LimitVariants {
    /// For reservations: denied hits are not counted.
    pub(crate) held: Arc<Limits>,
    /// For reports: all hits are counted.
    pub(crate) reported: Arc<Limits>,
}

impl RuleLimits {
    /// Returns the limits for reports and reservations.
    pub(crate) fn variants(&self) -> &LimitVariants {
        self.variants.get_or_init(|| LimitVariants {
            held: Arc::new(self.limits.without_counting_denials()),
            reported: Arc::new(self.limits.counting_all()),
        })
    }

    /// Prepares the limits for quota mode, in which another quota may be the request's leading
    /// quota.
    pub(crate) fn add_shadow_limits(&mut self) {
        let in_shadow = Limits::clone(&self.limits).in_shadow(true);
        self.shadow_limits = Some(Arc::new(in_shadow));
    }
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
