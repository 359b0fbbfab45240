//! Elastic limits: conditions under which a rule may exceed its limits.

use super::{RuleError, When};
use crate::{
    algorithm::Outcome,
    eval::{Charge, Limits},
};

/// The condition under which an elastic rule may exceed its limits.
#[derive(Clone, Debug, PartialEq)]
pub enum Headroom {
    /// The rule may exceed its limits if these conditions on the request's entries hold. A trusted
    /// component must set the entries.
    When(When),
    /// The rule may exceed its limits if a large enough percentage of another rule's limits is
    /// unused. The other rule must apply to the same request.
    Unused(UnusedShare),
}

/// A requirement that a minimum percentage of another rule's limits is unused.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnusedShare {
    rule: Box<str>,
    percent: u32,
}

impl UnusedShare {
    /// Requires that at least `percent` (1 to 100) of every limit of the rule `rule` is unused.
    ///
    /// # Errors
    ///
    /// Returns an error for the field `elastic.unused.share` if `percent` is out of range.
    pub fn new(rule: &str, percent: u32) -> Result<Self, RuleError> {
        if !(1..=100).contains(&percent) {
            let problem = format!("must be 1% to 100%, not {percent}%");
            return Err(RuleError::new("elastic.unused.share", problem));
        }
        Ok(Self {
            rule: rule.into(),
            percent,
        })
    }

    /// Returns the name of the rule whose limits must be partly unused.
    #[must_use]
    pub fn rule(&self) -> &str {
        &self.rule
    }

    /// Returns true if the required percentage of each of `limits` is unused. `outcomes` contains
    /// the outcome of each limit.
    fn is_left(&self, limits: &Limits, outcomes: &[Outcome]) -> bool {
        limits.iter().zip(outcomes).all(|(limit, outcome)| {
            let proper = outcome.remaining.saturating_sub(limit.soft_allowance());
            u128::from(proper) * 100 >= u128::from(limit.quota()) * u128::from(self.percent)
        })
    }
}

/// The parent charges of elastic rules; the charges of the elastic rules are their children. A
/// child may exceed its own limits if a large enough percentage of its parent's limits is unused,
/// so the caller must read the parents before it decides the children.
///
/// Reading a parent does not reserve anything. Whether a child may exceed its limits depends on the
/// parent's state right before the decision. The parent is charged together with the child, and
/// never exceeds its own limits.
#[derive(Debug)]
pub struct Parents<'a> {
    /// The parents, to be evaluated with [`Effect::Look`](crate::Effect::Look).
    pub charges: Vec<Charge<'a>>,
    children: Vec<Child<'a>>,
}

/// A charge of an elastic rule: the rule's index, the percentage of the parent's limits that must
/// be unused, and the limits that apply while this percentage is unused.
#[derive(Debug)]
struct Child<'a> {
    place: usize,
    parent: &'a UnusedShare,
    stretched: &'a Limits,
}

impl<'a> Parents<'a> {
    /// Finds the parents of `charges`. For a rule name, `unused` returns the rule's
    /// [`Headroom::Unused`], if it has one.
    pub(super) fn of(
        charges: &[Charge<'a>],
        unused: impl Fn(&str) -> Option<&'a UnusedShare>,
    ) -> Self {
        let mut parents = Self {
            charges: Vec::new(),
            children: Vec::new(),
        };
        for (place, charge) in charges.iter().enumerate() {
            let unused = charge.limits.name().and_then(&unused);
            let is_parent = |other: &&Charge<'_>| unused.is_some_and(|unused| is_of(other, unused));
            if let Some((unused, stretched)) = unused.zip(charge.limits.stretched())
                && let Some(parent) = charges.iter().find(is_parent)
            {
                parents.children.push(Child {
                    place,
                    parent: unused,
                    stretched,
                });
                if !parents.charges.iter().any(|known| known.key == parent.key) {
                    parents.charges.push(*parent);
                }
            }
        }
        parents
    }

    /// Raises the limits of each child in `charges` if a large enough percentage of its parent's
    /// limits is unused. `outcomes` contains the outcomes of [`Self::charges`]. If the outcome of a
    /// parent is missing, the limits of its children are not raised.
    pub fn stretch(&self, charges: &mut [Charge<'a>], outcomes: &[Outcome]) {
        for child in &self.children {
            if self.has_left(child.parent, outcomes) {
                charges[child.place].limits = child.stretched;
            }
        }
    }

    fn has_left(&self, unused: &UnusedShare, mut outcomes: &[Outcome]) -> bool {
        for parent in &self.charges {
            let Some((own, others)) = outcomes.split_at_checked(parent.limits.len()) else {
                return false;
            };
            if is_of(parent, unused) {
                return unused.is_left(parent.limits, own);
            }
            outcomes = others;
        }
        false
    }
}

fn is_of(charge: &Charge<'_>, unused: &UnusedShare) -> bool {
    charge.limits.name() == Some(unused.rule())
}
