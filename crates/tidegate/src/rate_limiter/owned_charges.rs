//! Charges that own their data.

use std::sync::Arc;

use tidegate_core::{Charge, Cost, Rule, RuleSet, Span};

/// Charges that own their data, so that they outlive the decision that made them.
#[derive(Debug)]
pub struct OwnedCharges {
    rules: Arc<RuleSet>,
    list: Vec<OwnedCharge>,
}

/// One charge in [`OwnedCharges`].
#[derive(Clone, Debug)]
pub struct OwnedCharge {
    /// The key, which belongs to a rule of the rule set.
    pub key: Box<[u8]>,
    /// The cost.
    pub cost: Cost,
    /// Whether the charge was made on the raised limits of an elastic rule.
    pub is_stretched: bool,
}

impl OwnedCharges {
    /// Copies `charges`, which were made under `rules`.
    #[must_use]
    pub fn new(rules: &Arc<RuleSet>, charges: &[Charge<'_>]) -> Self {
        let own = |charge: &Charge<'_>| OwnedCharge {
            key: charge.key.into(),
            cost: charge.cost,
            is_stretched: charge.limits.is_stretched(),
        };
        Self {
            rules: Arc::clone(rules),
            list: charges.iter().map(own).collect(),
        }
    }

    /// Creates charges from `list`, in which each charge has a receipt, and returns them with their
    /// receipts. Leaves out the charges whose key belongs to no rule of `rules`.
    #[must_use]
    pub fn of_known_rules<R>(
        rules: &Arc<RuleSet>,
        list: impl IntoIterator<Item = (OwnedCharge, R)>,
    ) -> (Self, Vec<R>) {
        let known = list
            .into_iter()
            .filter(|(charge, _)| rules.rule_of(&charge.key).is_some());
        let (list, receipts) = known.unzip();
        let rules = Arc::clone(rules);
        (Self { rules, list }, receipts)
    }

    /// Returns the rule of each charge.
    #[expect(
        clippy::missing_panics_doc,
        reason = "the constructors ensure that every key belongs to a rule"
    )]
    pub fn rules(&self) -> impl Iterator<Item = &Rule> {
        const OWN: &str = "the key of a charge belongs to a rule of the same rule set";
        let rule = |charge: &OwnedCharge| self.rules.rule_of(&charge.key).expect(OWN);
        self.list.iter().map(rule)
    }

    /// Returns the charges.
    #[must_use]
    pub fn list(&self) -> &[OwnedCharge] {
        &self.list
    }

    /// Returns the duration of the shortest lease among the concurrency slots, if there are any.
    #[must_use]
    pub fn lease(&self) -> Option<Span> {
        self.rules().filter_map(|rule| rule.limits().lease()).min()
    }

    /// Returns the charges in the form that a store takes.
    #[must_use]
    pub fn as_charges(&self) -> Vec<Charge<'_>> {
        self.list
            .iter()
            .zip(self.rules())
            .map(|(charge, rule)| charge.as_charge(rule))
            .collect()
    }
}

impl OwnedCharge {
    fn as_charge<'a>(&'a self, rule: &'a Rule) -> Charge<'a> {
        let limits = rule.limits();
        let stretched = limits.stretched().filter(|_| self.is_stretched);
        Charge {
            key: &self.key,
            limits: stretched.unwrap_or(limits),
            cost: self.cost,
            longest_wait: None,
        }
    }
}
