//! What says that there is room for more than a rule's limits.

use super::{RuleError, When};
use crate::{charge::Charge, limits::Limits, outcome::Outcome};

/// What says that there is room for more than a rule's limits.
#[derive(Clone, Debug)]
pub enum Headroom {
    /// The request, in entries that the edge fills in.
    When(When),
    /// Another rule that applies to the same request, while it has enough left.
    Unused(Unused),
}

/// A share of a rule's limits that nobody has spent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unused {
    rule: Box<str>,
    percent: u32,
}

impl Unused {
    /// At least `percent` of every limit of the rule named `rule`, 1 to 100.
    ///
    /// # Errors
    ///
    /// Names `elastic.unused.share`.
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

    /// The name of the rule.
    #[must_use]
    pub fn rule(&self) -> &str {
        &self.rule
    }

    /// Whether so much is left of `limits`, given how they stand.
    fn is_left(&self, limits: &Limits, outcomes: &[Outcome]) -> bool {
        limits.iter().zip(outcomes).all(|(limit, outcome)| {
            let proper = outcome.remaining.saturating_sub(limit.soft_allowance());
            u128::from(proper) * 100 >= u128::from(limit.quota()) * u128::from(self.percent)
        })
    }
}

/// The charges by whose unused share others stretch: what is to be looked at before the others are decided.
///
/// A look is no reservation. Whether a limit stretches is decided on how its parent stood a moment before; the parent itself is
/// charged with the child, and never over its own limit.
#[derive(Debug)]
pub struct Parents<'a> {
    /// What is to be asked with [`Effect::Look`](crate::Effect::Look).
    pub charges: Vec<Charge<'a>>,
    children: Vec<Child<'a>>,
}

/// A charge that stretches, by its place, and by what.
#[derive(Debug)]
struct Child<'a> {
    place: usize,
    parent: &'a Unused,
    stretched: &'a Limits,
}

impl<'a> Parents<'a> {
    /// Those of `charges`, each with the limits' rule's [`Headroom::Unused`], if it has one.
    pub(super) fn of(charges: &[Charge<'a>], unused: impl Fn(&str) -> Option<&'a Unused>) -> Self {
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

    /// Lets those of `charges` stretch whose parents have enough left, by the `outcomes` of what is left in
    /// [`Self::charges`]. Where there is no outcome there is no room.
    pub fn stretch(&self, charges: &mut [Charge<'a>], outcomes: &[Outcome]) {
        for child in &self.children {
            if self.has_left(child.parent, outcomes) {
                charges[child.place].limits = child.stretched;
            }
        }
    }

    fn has_left(&self, unused: &Unused, mut outcomes: &[Outcome]) -> bool {
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

fn is_of(charge: &Charge<'_>, unused: &Unused) -> bool {
    charge.limits.name() == Some(unused.rule())
}
