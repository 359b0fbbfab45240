//! A rule: what applies to the descriptors that come to its place in the tree.

use std::sync::{Arc, OnceLock};

use tidegate_core::Limits;

use crate::envoy::{Metadata, Unit, counters::Counters};

/// What a rule says of the descriptors that it matches.
#[derive(Clone, Debug)]
pub(crate) struct Rule {
    pub(crate) allowance: Allowance,
    /// What the rule is called in answers, and in the `replaces` of others.
    pub(crate) name: Option<Arc<str>>,
    /// The names of the rules that do not apply where this one does.
    pub(crate) replaces: Box<[Box<str>]>,
    /// Counts and reports, but is never over.
    pub(crate) shadow: bool,
    /// Is over only together with every other such rule of the request.
    pub(crate) quota: bool,
    /// Passed on to the proxy when the rule lets a request pass.
    pub(crate) metadata: Option<Metadata>,
    /// Which values of the request its metrics show.
    pub(crate) detail: Detail,
    /// Its counters, once they were needed: for a rule whose metrics show no value of the request.
    pub(crate) counters: OnceLock<Arc<Counters>>,
}

impl Rule {
    /// Lets the limits take over what was spent under those of `old`.
    pub(super) fn succeed(&mut self, old: &Self) {
        if let (Allowance::Limited(new), Allowance::Limited(old)) =
            (&mut self.allowance, &old.allowance)
        {
            let limits = Arc::unwrap_or_clone(Arc::clone(&new.limits));
            new.limits = Arc::new(limits.succeeding(&old.limits));
            if new.yielding.is_some() {
                new.yield_to_others();
            }
        }
    }
}

/// How much passes.
#[derive(Clone, Debug)]
pub(crate) enum Allowance {
    /// All of it, and nothing is counted.
    Unlimited,
    /// So much.
    Limited(RuleLimits),
}

/// The limits of a rule, and how they are called in answers.
#[derive(Clone, Debug)]
pub(crate) struct RuleLimits {
    pub(crate) limits: Arc<Limits>,
    /// The same limits in shadow, for a rule in quota mode: where another quota of the request denies for it.
    pub(crate) yielding: Option<Arc<Limits>>,
    /// The units of the limits, in their order; [`Unit::Unknown`] for a window of another length.
    pub(crate) units: Box<[Unit]>,
    /// Sets counters of the same descriptor apart whose windows have different lengths.
    pub(crate) window_seconds: u64,
}

impl RuleLimits {
    /// Lets the limits leave it to another quota of the request to deny.
    pub(crate) fn yield_to_others(&mut self) {
        let in_shadow = Limits::clone(&self.limits).in_shadow(true);
        self.yielding = Some(Arc::new(in_shadow));
    }
}

/// Which values of the request the metrics of a rule show.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Detail {
    /// Those that levels ask for with `value_to_metric`.
    #[default]
    ByLevel,
    /// All of them.
    Full,
}
