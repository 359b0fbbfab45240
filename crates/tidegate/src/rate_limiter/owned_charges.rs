//! Charges that own their data.

use std::sync::Arc;

use tidegate_core::{Charge, Cost, Limits, Rule, RuleSet, Span, Timestamp};

/// Charges that own their data, so that they can outlive the decision.
#[derive(Debug)]
pub struct OwnedCharges {
    /// The rules of the charges; `None` if the caller provided limits instead of rules.
    rules: Option<Arc<RuleSet>>,
    list: Vec<OwnedCharge>,
}

/// One charge in [`OwnedCharges`].
#[derive(Clone, Debug)]
pub struct OwnedCharge {
    /// The key.
    pub key: Box<[u8]>,
    /// The cost.
    pub cost: Cost,
    /// The limits, before they are raised.
    limits: Arc<Limits>,
    /// Whether the charge was made under the raised limits of an elastic rule.
    pub is_stretched: bool,
}

/// A charge without its limits. A server that reads the charge takes the limits from its own rules.
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
            rules: Some(Arc::clone(rules)),
            list: charges.iter().map(own).collect(),
        }
    }

    /// Creates charges from `list`, which contains charges, the limits under which they were made,
    /// and their receipts. Returns the charges and the receipts. Omits charges whose key does not
    /// belong to a rule in `rules`. A charge without limits has the limits that apply to its key at
    /// `now`.
    #[must_use]
    pub fn of_known_rules<R>(
        rules: &Arc<RuleSet>,
        list: impl IntoIterator<Item = (StoredCharge, Option<Arc<Limits>>, R)>,
        now: Timestamp,
    ) -> (Self, Vec<R>) {
        let known = list
            .into_iter()
            .filter_map(|(charge, made_under, receipt)| {
                let rule = rules.rule_of(&charge.key)?;
                let plan = charge.plan.and_then(|plan| rule.plan(&plan).ok());
                let of_key = rules.limits_of_key(rule, &charge.key, now);
                let current = match plan {
                    // An override takes precedence over the plan.
                    Some(limits) if Arc::ptr_eq(&of_key, rule.limits()) => Arc::clone(limits),
                    _ => of_key,
                };
                // Only the current limits have the raised limits of an elastic rule.
                let limits = made_under.filter(|limits| !limits.iter().eq(current.iter()));
                let limits = limits.unwrap_or(current);
                let charge = OwnedCharge {
                    key: charge.key,
                    cost: charge.cost,
                    limits,
                    is_stretched: charge.is_stretched,
                };
                Some((charge, receipt))
            });
        let (list, receipts) = known.unzip();
        let rules = Some(Arc::clone(rules));
        (Self { rules, list }, receipts)
    }

    /// Returns the charges with the limits that apply to their keys at `now`. Charges from
    /// [`Self::of_limits`] keep their limits.
    #[must_use]
    pub fn under_current_limits(&self, now: Timestamp) -> Self {
        let Some(rules) = &self.rules else {
            return Self {
                rules: None,
                list: self.list.clone(),
            };
        };
        let stored = self.to_stored().into_iter();
        Self::of_known_rules(rules, stored.map(|charge| (charge, None, ())), now).0
    }

    /// Creates charges with the given keys, limits and costs, such as those of Envoy's descriptors.
    /// The created charges belong to no rules.
    #[must_use]
    pub fn of_limits(list: impl IntoIterator<Item = (Box<[u8]>, Arc<Limits>, Cost)>) -> Self {
        let own = |(key, limits, cost)| OwnedCharge {
            key,
            cost,
            limits,
            is_stretched: false,
        };
        Self {
            rules: None,
            list: list.into_iter().map(own).collect(),
        }
    }

    /// Returns the charges in a form that another server can read.
    #[must_use]
    pub fn to_stored(&self) -> Vec<StoredCharge> {
        let stored = |(charge, plan): (&OwnedCharge, Option<&str>)| StoredCharge {
            key: charge.key.clone(),
            cost: charge.cost,
            is_stretched: charge.is_stretched,
            plan: plan.map(Box::from),
        };
        self.with_plans().map(stored).collect()
    }

    /// Returns each charge with its plan; `None` for a key that had no plan.
    pub fn with_plans(&self) -> impl Iterator<Item = (&OwnedCharge, Option<&str>)> {
        self.with_rules().map(|(charge, rule)| {
            let mut plans = rule.into_iter().flat_map(Rule::plans);
            let plan = plans.find(|(_, limits)| Arc::ptr_eq(limits, &charge.limits));
            (charge, plan.map(|(name, _)| name))
        })
    }

    /// Returns whether the charges belong to rules. Charges from [`Self::of_limits`] do not belong
    /// to rules.
    #[must_use]
    pub fn has_rules(&self) -> bool {
        self.rules.is_some()
    }

    /// Returns the rules of the charges. Charges from [`Self::of_limits`] have no rule.
    pub fn rules(&self) -> impl Iterator<Item = &Rule> {
        self.with_rules().filter_map(|(_, rule)| rule)
    }

    /// Returns each charge with its rule; `None` for a charge from [`Self::of_limits`].
    pub fn with_rules(&self) -> impl Iterator<Item = (&OwnedCharge, Option<&Rule>)> {
        let rule_of = |charge: &OwnedCharge| self.rules.as_ref()?.rule_of(&charge.key);
        self.list
            .iter()
            .map(move |charge| (charge, rule_of(charge)))
    }

    /// Returns the charges.
    #[must_use]
    pub fn list(&self) -> &[OwnedCharge] {
        &self.list
    }

    /// Returns the shortest lease duration of the concurrency slots; `None` if there are no slots.
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
    /// Returns the limits, before they are raised.
    #[must_use]
    pub fn limits(&self) -> &Arc<Limits> {
        &self.limits
    }

    fn as_charge(&self) -> Charge<'_> {
        let stretched = self.limits.stretched().filter(|_| self.is_stretched);
        Charge {
            key: &self.key,
            limits: stretched.unwrap_or(&self.limits),
            cost: self.cost,
            longest_wait: None,
            blocked: None,
        }
    }
}
