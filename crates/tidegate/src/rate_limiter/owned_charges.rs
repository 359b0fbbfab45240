//! Charges that own their data.

use std::sync::Arc;

use tidegate_core::{Charge, Cost, Limits, Rule, RuleSet, Span, Timestamp};

/// Charges that own their data, so that they can outlive the decision.
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
    /// The limits, before they are raised.
    limits: Arc<Limits>,
    /// Whether the charge was made under the raised limits of an elastic rule.
    is_stretched: bool,
}

/// A charge without its limits. A server that reads it takes the limits from its own rules.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoredCharge {
    /// The key.
    pub key: Box<[u8]>,
    /// The cost.
    pub cost: Cost,
    /// Whether the charge was made under the raised limits of an elastic rule.
    pub is_stretched: bool,
    /// The plan of the key, if the key had a plan.
    pub plan: Option<Box<str>>,
}

impl OwnedCharges {
    /// Copies `charges`, which were made under `rules`.
    #[must_use]
    pub fn new(rules: &Arc<RuleSet>, charges: &[Charge<'_>]) -> Self {
        let own = |charge: &Charge<'_>| OwnedCharge {
            key: charge.key.into(),
            cost: charge.cost,
            limits: rules.limits_of(charge),
            is_stretched: charge.limits.is_stretched(),
        };
        Self {
            rules: Arc::clone(rules),
            list: charges.iter().map(own).collect(),
        }
    }

    /// Creates charges from `list`, a list of pairs of a charge and its receipt, and returns the
    /// charges with their receipts. Leaves out charges whose key does not belong to a rule in
    /// `rules`. `now` determines which overrides apply.
    #[must_use]
    pub fn of_known_rules<R>(
        rules: &Arc<RuleSet>,
        list: impl IntoIterator<Item = (StoredCharge, R)>,
        now: Timestamp,
    ) -> (Self, Vec<R>) {
        let known = list.into_iter().filter_map(|(charge, receipt)| {
            let rule = rules.rule_of(&charge.key)?;
            let plan = charge.plan.and_then(|plan| rule.plan(&plan).ok());
            let limits = match plan {
                Some(limits) => Arc::clone(limits),
                None => rules.limits_of_key(rule, &charge.key, now),
            };
            let charge = OwnedCharge {
                key: charge.key,
                cost: charge.cost,
                limits,
                is_stretched: charge.is_stretched,
            };
            Some((charge, receipt))
        });
        let (list, receipts) = known.unzip();
        let rules = Arc::clone(rules);
        (Self { rules, list }, receipts)
    }

    /// Returns the charges in a form that another server can read.
    #[must_use]
    pub fn to_stored(&self) -> Vec<StoredCharge> {
        let stored = |(charge, rule): (&OwnedCharge, &Rule)| {
            let mut plans = rule.plans();
            let plan = plans.find(|(_, limits)| Arc::ptr_eq(limits, &charge.limits));
            StoredCharge {
                key: charge.key.clone(),
                cost: charge.cost,
                is_stretched: charge.is_stretched,
                plan: plan.map(|(name, _)| name.into()),
            }
        };
        self.list.iter().zip(self.rules()).map(stored).collect()
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
        let leases = self.list.iter().filter_map(|charge| charge.limits.lease());
        leases.min()
    }

    /// Returns the charges in the form that a store accepts.
    #[must_use]
    pub fn as_charges(&self) -> Vec<Charge<'_>> {
        self.list.iter().map(OwnedCharge::as_charge).collect()
    }
}

impl OwnedCharge {
    fn as_charge(&self) -> Charge<'_> {
        let stretched = self.limits.stretched().filter(|_| self.is_stretched);
        Charge {
            key: &self.key,
            limits: stretched.unwrap_or(&self.limits),
            cost: self.cost,
            longest_wait: None,
        }
    }
}
