//! The limits of a rule.

use std::sync::{Arc, OnceLock};

use tidegate_core::Limits;

use crate::Unit;

/// The limits of a rule, and how they are described in responses.
#[derive(Clone, Debug)]
pub(crate) struct RuleLimits {
    pub(crate) limits: Arc<Limits>,
    /// The same limits in shadow mode, for a rule in quota mode. The shadow limits are used unless
    /// this quota is the request's leading quota, which is the only quota that can deny the
    /// request.
    pub(crate) shadow_limits: Option<Arc<Limits>>,
    /// The units of the limits, in order. The unit of a window with a different length is
    /// [`Unit::Unknown`].
    pub(crate) units: Box<[Unit]>,
    /// The window length, which is part of the counter key. Therefore, a descriptor has separate
    /// counters for different window lengths.
    pub(crate) window_seconds: u64,
    /// The limits for reports and reservations. The first use builds the limits.
    pub(crate) variants: OnceLock<LimitVariants>,
}

/// Variants of a rule's limits. The variants share the rule's counters, but treat denied hits
/// differently.
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

    /// Returns the limits of an override of these limits, in the same mode. The limits of the
    /// override share the counters of these limits.
    pub(super) fn overridden_by(&self, limits: Arc<Limits>) -> Self {
        let units = limits.iter().map(Unit::of_limit).collect();
        let mut overridden = Self {
            limits,
            shadow_limits: None,
            units,
            window_seconds: self.window_seconds,
            variants: OnceLock::new(),
        };
        if self.shadow_limits.is_some() {
            overridden.add_shadow_limits();
        }
        overridden
    }

    /// Prepares the limits for quota mode, in which another quota may be the request's leading
    /// quota.
    pub(crate) fn add_shadow_limits(&mut self) {
        let in_shadow = Limits::clone(&self.limits).in_shadow(true);
        self.shadow_limits = Some(Arc::new(in_shadow));
    }
}
