//! The compiled limits of a rule. All limits of a rule have the same key, so their states are
//! stored together.

mod derived;
mod history;
mod shares;
mod state;

pub use self::state::DrainTimes;
pub(crate) use self::state::{FormerState, LoadedState, UndoRecord};

use std::{
    mem::discriminant,
    sync::{Arc, OnceLock},
};

use self::{history::TermsHistory, shares::ShareCache};
use crate::{
    algorithm::{Gcra, Kernel},
    digest::Digest,
    error::LimitError,
    eval::{DenialCounting, LimitGroup, OnFailure},
    limit::{Algorithm, Limit, QuotaUnit, bounds},
    time::Span,
};

/// The compiled limits of a rule. For each key, every limit has its own state, except that sliding
/// window logs share one state.
///
/// # Examples
///
/// ```
/// use tidegate_core::{AlgorithmName, LimitSpec, Limits, notation};
///
/// let limit = |text| {
///     let rate = notation::rate(text).unwrap();
///     LimitSpec::shorthand(rate, AlgorithmName::SlidingWindowLog).build().unwrap()
/// };
/// let limits = Limits::new(vec![limit("1/s"), limit("20/min")]).unwrap().named("api");
/// assert_eq!((limits.name(), limits.len()), (Some("api"), 2));
/// ```
#[derive(Clone, Debug)]
pub struct Limits {
    name: Option<Arc<str>>,
    shadow: bool,
    /// Whether all clients share one count, as in a rule without a key.
    service_wide: bool,
    /// The quota unit that the `RateLimit-Policy` header shows to clients.
    unit: QuotaUnit,
    limits: Vec<Limit>,
    groups: Vec<LimitGroup>,
    fingerprint: u32,
    sole_gcra: Option<Gcra>,
    /// The terms of all current and former limits of the rule.
    history: Arc<TermsHistory>,
    /// Whether requests can wait for a slot of one of the limits.
    has_slot_wait: bool,
    on_failure: Option<OnFailure>,
    /// One node's shares of the limits, compiled on first use.
    shares: ShareCache,
    /// The percentage by which elastic limits are raised if there is headroom; 0 if the limits are
    /// not elastic.
    stretch: u32,
    /// The stretched limits, compiled on first use.
    stretched: OnceLock<Arc<Self>>,
    /// The original limits, if these limits are stretched limits.
    unstretched: Option<Arc<Self>>,
    /// Whether denied requests are not counted, even if the options of a limit say that they are.
    skips_denials: bool,
}

impl Limits {
    /// Compiles `limits`.
    ///
    /// # Errors
    ///
    /// Returns an error if the list is empty, has more than [`bounds::MAX_LIMITS_PER_RULE`] limits,
    /// or contains a limit with invalid numbers.
    pub fn new(limits: Vec<Limit>) -> Result<Self, LimitError> {
        if limits.is_empty() {
            return Err(LimitError::new("limits", "must name at least one limit"));
        }
        if limits.len() > bounds::MAX_LIMITS_PER_RULE {
            let problem = format!(
                "{} limits exceed the maximum of {} per rule",
                limits.len(),
                bounds::MAX_LIMITS_PER_RULE
            );
            return Err(LimitError::new("limits", problem));
        }
        let mut groups: Vec<LimitGroup> = Vec::with_capacity(limits.len());
        for (index, limit) in limits.iter().enumerate() {
            let kernel = Kernel::compile(limit)?;
            let denials = DenialCounting::of(limit);
            match groups
                .iter_mut()
                .find(|group| group.shares_log(&kernel, denials))
            {
                Some(group) => group.join(&kernel, index),
                None => groups.push(LimitGroup {
                    kernel,
                    limit_indices: vec![index],
                    denials,
                }),
            }
        }
        let fingerprint = terms_digest(&groups);
        let sole_gcra = sole_gcra(&limits, &groups);
        let has_slot_wait = limits.iter().any(|limit| limit.slot_wait().is_some());
        Ok(Self {
            name: None,
            shadow: false,
            service_wide: false,
            unit: QuotaUnit::default(),
            limits,
            groups,
            fingerprint,
            sole_gcra,
            history: Arc::default(),
            has_slot_wait,
            on_failure: None,
            shares: ShareCache::default(),
            stretch: 0,
            stretched: OnceLock::new(),
            unstretched: None,
            skips_denials: false,
        })
    }

    /// Sets the name of the rule.
    #[must_use]
    pub fn named(mut self, rule: &str) -> Self {
        self.name = Some(rule.into());
        self.stretched = OnceLock::new();
        self
    }

    /// Turns shadow mode on or off. In shadow mode, the limits count and report requests, but never
    /// deny them.
    #[must_use]
    pub fn in_shadow(mut self, shadow: bool) -> Self {
        self.shadow = shadow;
        self.shares = ShareCache::default();
        self.stretched = OnceLock::new();
        self
    }

    /// Sets whether all clients share one count, as in a rule without a key.
    #[must_use]
    pub fn service_wide(mut self, service_wide: bool) -> Self {
        self.service_wide = service_wide;
        self.shares = ShareCache::default();
        self.stretched = OnceLock::new();
        self
    }

    /// Sets the unit that is announced to clients.
    #[must_use]
    pub fn counting_in(mut self, unit: QuotaUnit) -> Self {
        self.unit = unit;
        self.shares = ShareCache::default();
        self.stretched = OnceLock::new();
        self
    }

    /// Sets the fallback policy, which applies while the store is unreachable. If `None`, the
    /// store's own policy applies.
    #[must_use]
    pub fn failing(mut self, policy: Option<OnFailure>) -> Self {
        self.on_failure = policy;
        self.stretched = OnceLock::new();
        self
    }

    /// Returns the name of the rule.
    #[must_use]
    pub fn name(&self) -> Option<&str> {
        self.name.as_deref()
    }

    /// Returns whether the limits are in shadow mode.
    #[must_use]
    pub fn is_shadow(&self) -> bool {
        self.shadow
    }

    /// Returns whether all clients share one count, as in a rule without a key.
    #[must_use]
    pub fn is_service_wide(&self) -> bool {
        self.service_wide
    }

    /// Returns the unit that is announced to clients.
    #[must_use]
    pub fn unit(&self) -> QuotaUnit {
        self.unit
    }

    /// Returns whether requests can wait for a slot of one of the limits. In shadow mode, requests
    /// are never denied, so they never wait.
    #[must_use]
    pub fn has_slot_wait(&self) -> bool {
        self.has_slot_wait && !self.shadow
    }

    /// Returns the fallback policy, which applies while the store is unreachable. If `None`, the
    /// store's own policy applies.
    #[must_use]
    pub fn on_failure(&self) -> Option<OnFailure> {
        self.on_failure
    }

    /// Iterates over the limits, in the order in which they were given.
    pub fn iter(&self) -> std::slice::Iter<'_, Limit> {
        self.limits.iter()
    }

    /// Returns the first limit.
    pub(crate) fn first(&self) -> &Limit {
        // The list always has at least one limit.
        &self.limits[0]
    }

    /// Returns the number of limits, which is at least 1.
    #[must_use]
    #[expect(
        clippy::len_without_is_empty,
        reason = "there is always at least one limit"
    )]
    pub fn len(&self) -> usize {
        self.limits.len()
    }

    /// Returns whether one of the limits is a concurrency limit. A charge to a concurrency limit
    /// holds a slot until its receipt is settled.
    #[must_use]
    pub fn has_slots(&self) -> bool {
        let mut groups = self.groups.iter();
        groups.any(|group| matches!(group.kernel, Kernel::Lease(_)))
    }

    /// Returns whether one of the limits counts units, that is, is not a concurrency limit.
    #[must_use]
    pub fn has_units(&self) -> bool {
        let mut groups = self.groups.iter();
        groups.any(|group| !matches!(group.kernel, Kernel::Lease(_)))
    }

    /// Returns the shortest lease of the concurrency limits: how long a slot stays held without a
    /// renewal. Returns `None` if there is no concurrency limit.
    #[must_use]
    pub fn lease(&self) -> Option<Span> {
        let leases = self
            .limits
            .iter()
            .filter_map(|limit| match limit.algorithm() {
                Algorithm::Concurrency { lease, .. } => Some(*lease),
                _ => None,
            });
        leases.min()
    }

    /// Returns a digest of the [terms](crate::algorithm::Terms) of these limits. Different terms
    /// have different digests, except for rare collisions. If a state was written under limits with
    /// the same fingerprint, the state does not have to be converted.
    pub(crate) fn fingerprint(&self) -> u32 {
        self.fingerprint
    }

    /// Returns whether a state of `other` does not have to be converted for these limits, because
    /// both have the same algorithms, rates, windows and leases. `has_terms_of_charge` is the same
    /// question about a charge.
    #[must_use]
    pub fn has_terms_of(&self, other: &Self) -> bool {
        let [own, others] = [self, other].map(|limits| limits.groups.iter());
        let mut kernels = own
            .zip(others)
            .map(|(own, other)| (&own.kernel, &other.kernel));
        // A log and a lease of the same length have the same fingerprint.
        self.fingerprint == other.fingerprint
            && kernels.all(|(own, other)| discriminant(own) == discriminant(other))
    }

    /// Returns a digest of all parameters. Limits that can lead to different decisions have
    /// different digests, except for rare collisions.
    pub(crate) fn parameters_digest(&self) -> u32 {
        parameters_digest(&self.limits)
    }

    /// Returns the groups of limits that share a state.
    pub(crate) fn groups(&self) -> &[LimitGroup] {
        &self.groups
    }

    /// Returns the only limit of the rule if it is a plain GCRA limit (no soft allowance, no
    /// counting of denied requests) and the rule is not in shadow mode. Most rules have only a
    /// plain GCRA limit, so the store has a fast path for this case.
    #[inline]
    pub(crate) fn sole_gcra(&self) -> Option<&Gcra> {
        self.sole_gcra.as_ref().filter(|_| !self.shadow)
    }
}

impl From<Limit> for Limits {
    fn from(limit: Limit) -> Self {
        Self::new(vec![limit]).expect("a limit was compiled when it was created")
    }
}

/// Returns the only limit of a rule if it is a plain GCRA limit (no soft allowance, no counting of
/// denied requests) whose state always fits inline in an entry of the memory store.
fn sole_gcra(limits: &[Limit], groups: &[LimitGroup]) -> Option<Gcra> {
    let ([limit], [group]) = (limits, groups) else {
        return None;
    };
    let Kernel::Gcra(gcra) = &group.kernel else {
        return None;
    };
    let is_plain = limit.soft_allowance() == 0
        && group.denials == DenialCounting::NotCounted
        && group.kernel.is_small();
    is_plain.then_some(*gcra)
}

/// Returns a digest of the [terms](crate::algorithm::Terms) of these limit groups.
fn terms_digest(groups: &[LimitGroup]) -> u32 {
    let digest = groups.iter().fold(Digest::new(), |digest, group| {
        group.kernel.terms().digest(digest)
    });
    digest.bits_28()
}

/// Returns a digest of all parameters of these limits.
fn parameters_digest(limits: &[Limit]) -> u32 {
    let digest = limits
        .iter()
        .fold(Digest::new(), |digest, limit| limit.digest(digest));
    digest.bits_28()
}
