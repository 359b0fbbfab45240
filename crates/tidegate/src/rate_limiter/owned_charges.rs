//! Charges that own their data.

use std::sync::Arc;

use tidegate_core::{Charge, Cost, Limits, Request, Rule, RuleSet, Span, Timestamp};

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
    /// The plan that the request named, even if an override replaced or multiplied its limits.
    plan: Option<Box<str>>,
    /// Whether the charge was made under the raised limits of an elastic rule.
    is_stretched: bool,
}

/// A charge without its limits, in a form that another server can read. The limits are stored
/// beside the charge.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoredCharge {
    /// The key.
    pub key: Box<[u8]>,
    /// The cost.
    pub cost: Cost,
    /// Whether the charge was made under the raised limits of an elastic rule.
    pub is_stretched: bool,
    /// The plan that the request named, if the request named a plan of the rule.
    pub plan: Option<Box<str>>,
}

/// The charges of a reservation that is renewed, from [`OwnedCharges::for_renewal`].
#[derive(Debug)]
pub struct ChargesToRenew {
    /// The charges under the limits with which their leases are renewed.
    pub charges: OwnedCharges,
    /// How long the renewed leases are certainly held; `None` without leases. This is the shortest
    /// lease of these charges and of the limits in force, because each request converts the state
    /// of a key to the limits in force.
    pub lease: Option<Span>,
}

impl OwnedCharges {
    /// Copies `charges`, which were made under `rules`.
    #[must_use]
    pub fn new(rules: &Arc<RuleSet>, charges: &[Charge<'_>]) -> Self {
        let own = |charge: &Charge<'_>| OwnedCharge {
            key: charge.key.into(),
            cost: charge.cost,
            limits: rules.limits_of(charge),
            plan: None,
            is_stretched: charge.limits.is_stretched(),
        };
        Self {
            rules: Some(Arc::clone(rules)),
            list: charges.iter().map(own).collect(),
        }
    }

    /// Stores the plans that `request`, the request of the charges, names. Without the plans,
    /// [`Self::under_current_limits`] returns the limits of keys without a plan.
    #[must_use]
    pub fn with_plans_of(mut self, request: &Request<'_>) -> Self {
        if let Some(rules) = &self.rules {
            for charge in &mut self.list {
                let rule = rules.rule_of(&charge.key);
                let plan = rule.and_then(|rule| rule.plan_name_of(request));
                charge.plan = plan.map(Box::from);
            }
        }
        self
    }

    /// Creates charges from `list`, which contains charges, the limits under which they were made,
    /// and their receipts. Returns the charges and the receipts. A charge without limits has the
    /// limits that apply to its key at `now`; it is omitted if its key does not belong to a rule in
    /// `rules`.
    #[must_use]
    pub fn with_limits<R>(
        rules: &Arc<RuleSet>,
        list: impl IntoIterator<Item = (StoredCharge, Option<Arc<Limits>>, R)>,
        now: Timestamp,
    ) -> (Self, Vec<R>) {
        let known = list
            .into_iter()
            .filter_map(|(charge, made_under, receipt)| {
                let current = current_limits(rules, &charge.key, charge.plan.as_deref(), now);
                let limits = match (made_under, current) {
                    // Decoded limits have no elastic variant.
                    (Some(limits), Some(current)) if limits.iter().eq(current.iter()) => current,
                    (Some(limits), _) => limits,
                    (None, current) => current?,
                };
                let charge = OwnedCharge {
                    key: charge.key,
                    cost: charge.cost,
                    limits,
                    plan: charge.plan,
                    is_stretched: charge.is_stretched,
                };
                Some((charge, receipt))
            });
        let (list, receipts) = known.unzip();
        let rules = Some(Arc::clone(rules));
        (Self { rules, list }, receipts)
    }

    /// Returns the charges, in the same order, under the limits that apply to their keys at `now`
    /// if `rules` are active. A charge whose rule is not in `rules` keeps its limits, and so do
    /// charges from [`Self::of_limits`].
    #[must_use]
    pub fn under_current_limits(&self, rules: &Arc<RuleSet>, now: Timestamp) -> Self {
        if self.rules.is_none() {
            return Self {
                rules: None,
                list: self.list.clone(),
            };
        }
        let current = |charge: &OwnedCharge| {
            let limits = current_limits(rules, &charge.key, charge.plan(), now);
            OwnedCharge {
                limits: limits.unwrap_or_else(|| Arc::clone(&charge.limits)),
                ..charge.clone()
            }
        };
        Self {
            rules: Some(Arc::clone(rules)),
            list: self.list.iter().map(current).collect(),
        }
    }

    /// Returns the charges, in the same order, under the limits with which their leases are
    /// renewed. These are the limits that apply at `now`, which also decide whether a lost slot can
    /// be acquired again. Under other rates, windows or leases, the store could not find the slots,
    /// so such a charge keeps its limits.
    #[must_use]
    pub fn for_renewal(&self, rules: &Arc<RuleSet>, now: Timestamp) -> ChargesToRenew {
        let mut charges = self.under_current_limits(rules, now);
        let current_lease = charges.lease();
        for (charge, own) in charges.list.iter_mut().zip(&self.list) {
            if !charge.limits.has_terms_of(&own.limits) {
                charge.limits = Arc::clone(&own.limits);
            }
        }
        let lease = charges.lease();
        let lease = lease.map(|lease| current_lease.map_or(lease, |current| lease.min(current)));
        ChargesToRenew { charges, lease }
    }

    /// Creates charges with the given keys, limits and costs, such as those of Envoy's descriptors.
    /// The created charges belong to no rules.
    #[must_use]
    pub fn of_limits(list: impl IntoIterator<Item = (Box<[u8]>, Arc<Limits>, Cost)>) -> Self {
        let own = |(key, limits, cost)| OwnedCharge {
            key,
            cost,
            limits,
            plan: None,
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
        let stored = |charge: &OwnedCharge| StoredCharge {
            key: charge.key.clone(),
            cost: charge.cost,
            is_stretched: charge.is_stretched,
            plan: charge.plan.clone(),
        };
        self.list.iter().map(stored).collect()
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

    /// Returns the plan that the request named, if the request named a plan of the rule.
    #[must_use]
    pub fn plan(&self) -> Option<&str> {
        self.plan.as_deref()
    }

    /// Returns whether the charge was made under the raised limits of an elastic rule.
    #[must_use]
    pub fn is_stretched(&self) -> bool {
        self.is_stretched
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

/// Returns the limits that apply to `key` at `now`, if the request named `plan`. Returns `None` if
/// `key` does not belong to a rule in `rules`.
fn current_limits(
    rules: &RuleSet,
    key: &[u8],
    plan: Option<&str>,
    now: Timestamp,
) -> Option<Arc<Limits>> {
    let rule = rules.rule_of(key)?;
    Some(rules.limits_of_key(rule, key, plan, now))
}
