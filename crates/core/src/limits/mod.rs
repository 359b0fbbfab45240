//! A rule's limits, compiled: all of them share one key and so one state.

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

/// A rule's limits over one key, compiled into kernels.
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
    /// This node's shares, once they were needed.
    shares: Shares,
    /// By how many percent the limits stretch where there is room, and the limits then, once they were needed.
    stretch: u32,
    stretched: OnceLock<Arc<Self>>,
    /// Of stretched limits, what they were.
    unstretched: Option<Arc<Self>>,
}

/// Limits as bits, in the order of the rule's list.
pub(crate) type Mask = u16;

const _: () = assert!(
    bounds::MAX_LIMITS_PER_RULE <= Mask::BITS as usize,
    "every limit has its bit"
);

impl Limits {
    /// Compiles `limits`.
    ///
    /// # Errors
    ///
    /// Refuses no limit at all and more than [`bounds::MAX_LIMITS_PER_RULE`].
    pub fn new(limits: Vec<Limit>) -> Result<Self, LimitError> {
        if limits.is_empty() {
            return Err(LimitError::new("limits", "must name at least one limit"));
        }
        if limits.len() > bounds::MAX_LIMITS_PER_RULE {
            let problem = format!(
                "{} limits are over the maximum of {} a rule",
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

    /// Gives the limits their rule's name.
    #[must_use]
    pub fn named(mut self, rule: &str) -> Self {
        self.name = Some(rule.into());
        self.stretched = OnceLock::new();
        self
    }

    /// Lets the limits count and report but never deny.
    #[must_use]
    pub fn in_shadow(mut self, shadow: bool) -> Self {
        self.shadow = shadow;
        self.shares = Shares::default();
        self.stretched = OnceLock::new();
        self
    }

    /// Lets `policy` answer while the store is out of reach; `None` leaves that to the store.
    #[must_use]
    pub fn failing(mut self, policy: Option<OnFailure>) -> Self {
        self.on_failure = policy;
        self.stretched = OnceLock::new();
        self
    }

    /// The rule's name.
    #[must_use]
    pub fn name(&self) -> Option<&str> {
        self.name.as_deref()
    }

    /// Whether the limits only count and report.
    #[must_use]
    pub fn shadow(&self) -> bool {
        self.shadow
    }

    /// What answers while the store is out of reach; `None` leaves that to the store.
    #[must_use]
    pub fn on_failure(&self) -> Option<OnFailure> {
        self.on_failure
    }

    /// The limits, in the order in which they were given.
    pub fn iter(&self) -> std::slice::Iter<'_, Limit> {
        self.limits.iter()
    }

    /// How many limits there are: at least one.
    #[must_use]
    #[expect(clippy::len_without_is_empty, reason = "there is always at least one")]
    pub fn len(&self) -> usize {
        self.limits.len()
    }

    /// Whether something is held until a receipt is settled, needed or not.
    #[must_use]
    pub fn holds_places(&self) -> bool {
        let mut members = self.members.iter();
        members.any(|member| matches!(member.kernel, Kernel::Lease(_)))
    }

    /// For how long a place is held that is not renewed: the shortest lease, where there is one.
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

    /// A number that differs, almost surely, between limits whose states are counted in other terms: a state left under the
    /// same fingerprint is read as it is.
    pub(crate) fn fingerprint(&self) -> u32 {
        self.fingerprint
    }

    /// A number that differs, almost surely, between limits that decide differently.
    pub(crate) fn numbers_fingerprint(&self) -> u32 {
        fingerprint(&self.limits)
    }

    /// The kernels, each with the limits that it answers for.
    pub(crate) fn members(&self) -> &[Member] {
        &self.members
    }

    /// The schedule, where the rule is nothing but one, hard and enforced: the commonest case.
    #[inline]
    pub(crate) fn sole_schedule(&self) -> Option<&Schedule> {
        self.sole_schedule.as_ref().filter(|_| !self.shadow)
    }
}

/// The schedule that is all there is to decide, if its state always fits an entry.
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

/// A digest of what the states of these kernels are counted in.
fn terms_digest(members: &[Member]) -> u32 {
    let digest = members.iter().fold(Digest::new(), |digest, member| {
        member.kernel.terms().digest(digest)
    });
    digest.bits_28()
}

/// A digest of all the numbers of these limits.
fn fingerprint(limits: &[Limit]) -> u32 {
    let digest = limits
        .iter()
        .fold(Digest::new(), |digest, limit| limit.digest(digest));
    digest.bits_28()
}
