//! The compiled limits of a rule. They share one key, and so one state.

mod derived;
mod shares;
mod state;

pub(crate) use self::state::{Before, LeftCell, Loaded};

use std::sync::{Arc, OnceLock};

use self::shares::Shares;
use crate::{
    bounds,
    digest::Digest,
    failure::OnFailure,
    kernel::{Kernel, Schedule},
    limit::{Algorithm, Limit, LimitError},
    member::{Denials, Member},
    time::Span,
};

/// The limits of a rule on one key, compiled into kernels: one per limit, except that sliding logs
/// share one.
///
/// # Examples
///
/// ```
/// use tidegate_core::{AlgorithmName, LimitSpec, Limits, notation};
///
/// let limit = |text| LimitSpec::shorthand(notation::rate(text).unwrap(), AlgorithmName::SlidingWindowLog).build().unwrap();
/// let limits = Limits::new(vec![limit("1/s"), limit("20/min")]).unwrap().named("api");
/// assert_eq!((limits.name(), limits.len()), (Some("api"), 2));
/// ```
#[derive(Clone, Debug)]
pub struct Limits {
    name: Option<Arc<str>>,
    shadow: bool,
    limits: Vec<Limit>,
    members: Vec<Member>,
    fingerprint: u32,
    sole_schedule: Option<Schedule>,
    formerly: Option<Arc<Self>>,
    on_failure: Option<OnFailure>,
    /// One node's shares of the limits, built when first needed.
    shares: Shares,
    /// By how many percent elastic limits stretch while there is headroom.
    stretch: u32,
    /// The stretched limits, built when first needed.
    stretched: OnceLock<Arc<Self>>,
    /// For stretched limits, the original ones.
    unstretched: Option<Arc<Self>>,
}

/// A set of limits as bits, in the order of the rule's list.
pub(crate) type Mask = u16;

const _: () = assert!(
    bounds::MAX_LIMITS_PER_RULE <= Mask::BITS as usize,
    "each limit has one bit of the mask"
);

impl Limits {
    /// Compiles `limits`.
    ///
    /// # Errors
    ///
    /// Refuses an empty list, a list of more than [`bounds::MAX_LIMITS_PER_RULE`], and invalid
    /// numbers.
    pub fn new(limits: Vec<Limit>) -> Result<Self, LimitError> {
        if limits.is_empty() {
            return Err(LimitError::new("limits", "must name at least one limit"));
        }
        if limits.len() > bounds::MAX_LIMITS_PER_RULE {
            let problem = format!(
                "{} limits are over the maximum of {} per rule",
                limits.len(),
                bounds::MAX_LIMITS_PER_RULE
            );
            return Err(LimitError::new("limits", problem));
        }
        let mut members: Vec<Member> = Vec::with_capacity(limits.len());
        for (index, limit) in limits.iter().enumerate() {
            let kernel = Kernel::compile(limit)?;
            let denials = Denials::of(limit);
            match members
                .iter_mut()
                .find(|member| member.shares_log(&kernel, denials))
            {
                Some(member) => member.join(&kernel, index),
                None => members.push(Member {
                    kernel,
                    parts: vec![index],
                    denials,
                }),
            }
        }
        let fingerprint = terms_digest(&members);
        let sole_schedule = sole_schedule(&limits, &members);
        Ok(Self {
            name: None,
            shadow: false,
            limits,
            members,
            fingerprint,
            sole_schedule,
            formerly: None,
            on_failure: None,
            shares: Shares::default(),
            stretch: 0,
            stretched: OnceLock::new(),
            unstretched: None,
        })
    }

    /// Sets the name of the rule.
    #[must_use]
    pub fn named(mut self, rule: &str) -> Self {
        self.name = Some(rule.into());
        self.stretched = OnceLock::new();
        self
    }

    /// Sets shadow mode: the limits count and report, but never deny.
    #[must_use]
    pub fn in_shadow(mut self, shadow: bool) -> Self {
        self.shadow = shadow;
        self.shares = Shares::default();
        self.stretched = OnceLock::new();
        self
    }

    /// Sets the policy while the store is unreachable. With `None`, the store's own policy applies.
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

    /// Returns whether the limits are in shadow mode: they count and report, but never deny.
    #[must_use]
    pub fn shadow(&self) -> bool {
        self.shadow
    }

    /// Returns the policy while the store is unreachable. With `None`, the store's own policy
    /// applies.
    #[must_use]
    pub fn on_failure(&self) -> Option<OnFailure> {
        self.on_failure
    }

    /// Iterates over the limits, in the order in which they were given.
    pub fn iter(&self) -> std::slice::Iter<'_, Limit> {
        self.limits.iter()
    }

    /// Returns the number of limits, at least one.
    #[must_use]
    #[expect(
        clippy::len_without_is_empty,
        reason = "there is always at least one limit"
    )]
    pub fn len(&self) -> usize {
        self.limits.len()
    }

    /// Returns whether a charge holds a concurrency slot until its receipt is settled.
    #[must_use]
    pub fn holds_places(&self) -> bool {
        let mut members = self.members.iter();
        members.any(|member| matches!(member.kernel, Kernel::Lease(_)))
    }

    /// Returns how long a concurrency slot is held without renewal: the shortest lease of the
    /// limits.
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

    /// Returns a digest of the units in which the states are counted. It differs, almost certainly,
    /// if the units do. A state with the same fingerprint needs no conversion.
    pub(crate) fn fingerprint(&self) -> u32 {
        self.fingerprint
    }

    /// Returns a digest of all numbers. It differs, almost certainly, between limits that decide
    /// differently.
    pub(crate) fn numbers_fingerprint(&self) -> u32 {
        fingerprint(&self.limits)
    }

    /// Returns the kernels, each with the limits that it evaluates.
    pub(crate) fn members(&self) -> &[Member] {
        &self.members
    }

    /// Returns the GCRA schedule if the rule consists of only one, with no soft allowance and not
    /// in shadow mode. This is the most common case, and has a fast path.
    #[inline]
    pub(crate) fn sole_schedule(&self) -> Option<&Schedule> {
        self.sole_schedule.as_ref().filter(|_| !self.shadow)
    }
}

/// Returns the schedule if it is the rule's only limit, and its state always fits inline in an
/// entry.
fn sole_schedule(limits: &[Limit], members: &[Member]) -> Option<Schedule> {
    let ([limit], [member]) = (limits, members) else {
        return None;
    };
    let Kernel::Schedule(schedule) = &member.kernel else {
        return None;
    };
    let is_plain = limit.soft_allowance() == 0
        && member.denials == Denials::Forgotten
        && member.kernel.is_small();
    is_plain.then_some(*schedule)
}

/// Returns a digest of the units in which the states of these kernels are counted.
fn terms_digest(members: &[Member]) -> u32 {
    let digest = members.iter().fold(Digest::new(), |digest, member| {
        member.kernel.terms().digest(digest)
    });
    digest.bits_28()
}

/// Returns a digest of all numbers of these limits.
fn fingerprint(limits: &[Limit]) -> u32 {
    let digest = limits
        .iter()
        .fold(Digest::new(), |digest, limit| limit.digest(digest));
    digest.bits_28()
}
