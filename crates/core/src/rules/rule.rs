//! A rule: its conditions, its key and its limits.

use std::sync::Arc;

use super::{
    AllowList, BodyCost, BodyNumbers, Condition, Headroom, Request, ResponseCost, RuleError,
    TokenFormula, TokenUsage, UnusedShare, When,
    blocked_rule::BlockedRule,
    condition::check_name,
    key::{self, Scope},
    plans::Plans,
    request, response_cost,
};
use crate::{
    error::LimitError,
    eval::{Charge, Cost, Limits, OnFailure, RequestError},
    limit::{Algorithm, Limit, QuotaUnit, bounds, integer_advice},
    time::{Span, Timestamp},
};

/// The source of the cost that a rule charges.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum CostSource {
    /// The cost of the request.
    #[default]
    Request,
    /// A fixed cost, regardless of the request's own cost.
    Fixed(Cost),
    /// The value of the entry with this name, an integer in decimal digits.
    Entry(Box<str>),
    /// Numbers in the request body. A listener that does not see the body charges the cost of the
    /// request.
    Body(Arc<BodyCost>),
}

/// Whether a rule denies requests.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Mode {
    /// The rule denies requests over its limits.
    #[default]
    Enforce,
    /// The rule counts requests and reports its decisions, but never denies requests.
    Shadow,
}

impl Mode {
    /// Returns the name of the mode in the rules file.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Enforce => "enforce",
            Self::Shadow => "shadow",
        }
    }
}

/// A rule: conditions, limits that apply if the conditions hold, and a key by which requests are
/// counted.
///
/// A rule applies to a request if all its conditions hold **and the request has every entry of its
/// key**. To limit requests without an entry, use a rule with the condition `present: false`. A
/// rule with neither conditions nor a key applies to every request. A rule without a key has one
/// count for all requests.
#[derive(Clone, Debug)]
pub struct Rule {
    name: Arc<str>,
    scope: Scope,
    when: When,
    key: Box<[Box<str>]>,
    limits: Arc<Limits>,
    plans: Plans,
    cost: CostSource,
    allow: AllowList,
    /// If the rule is elastic, the condition under which its limits are raised.
    headroom: Option<Headroom>,
    pub(super) response_cost: ResponseCost,
}

impl Rule {
    /// Creates a rule that applies `limits` to every request, with a single count to which the cost
    /// of each request is added.
    ///
    /// The name appears in headers, metrics and paths, so it must be printable ASCII of at most
    /// [`bounds::MAX_RULE_NAME_BYTES`].
    ///
    /// # Errors
    ///
    /// Returns an error for `name` or `limits`.
    pub fn new(name: &str, limits: Vec<Limit>) -> Result<Self, RuleError> {
        check_rule_name(name)?;
        let limits =
            Limits::new(limits).map_err(|error| RuleError::new(error.field, error.problem))?;
        Ok(Self {
            name: name.into(),
            scope: key::scope(name),
            when: When::default(),
            key: Box::default(),
            limits: Arc::new(limits.named(name).service_wide(true)),
            plans: Plans::default(),
            cost: CostSource::default(),
            allow: AllowList::default(),
            headroom: None,
            response_cost: ResponseCost::default(),
        })
    }

    /// Creates a rule for `limits` that another component enforces, such as the limits of a
    /// descriptor of Envoy's rate limit service. The rule gives the limits a name and a key, so
    /// that [overrides](super::Overrides) can be set for them. `key` are the names of the key
    /// entries. The names are not checked, because a rule from this function is not a part of a
    /// rule set.
    #[must_use]
    pub fn of_limits(name: &str, key: &[&str], limits: Arc<Limits>) -> Self {
        Self {
            name: name.into(),
            scope: key::scope(name),
            when: When::default(),
            key: key.iter().map(|entry| Box::from(*entry)).collect(),
            limits,
            plans: Plans::default(),
            cost: CostSource::default(),
            allow: AllowList::default(),
            headroom: None,
            response_cost: ResponseCost::default(),
        }
    }

    /// Restricts the rule to requests for which `when` holds.
    #[must_use]
    pub fn when(mut self, when: When) -> Self {
        self.when = when;
        self
    }

    /// Keeps a separate count for each combination of the values of `entries`.
    ///
    /// # Errors
    ///
    /// Returns an error for `key` if there are more than [`bounds::MAX_KEY_ENTRIES`] entries, if an
    /// entry occurs twice, or if an entry is not a valid name.
    pub fn keyed_by(mut self, entries: &[&str]) -> Result<Self, RuleError> {
        let most = bounds::MAX_KEY_ENTRIES;
        if entries.len() > most {
            let problem = format!("{} entries exceed the maximum of {most}", entries.len());
            return Err(RuleError::new("key", problem));
        }
        for (at, entry) in entries.iter().enumerate() {
            check_name(entry).map_err(|error| RuleError::new("key", error.problem))?;
            if entries[..at].contains(entry) {
                return Err(RuleError::new(
                    "key",
                    format!("\"{entry}\" is listed twice; remove one of the two"),
                ));
            }
        }
        self.key = entries.iter().map(|entry| Box::from(*entry)).collect();
        let service_wide = self.key.is_empty();
        for limits in self.all_limits_mut() {
            *limits = Arc::new(Limits::clone(limits).service_wide(service_wide));
        }
        Ok(self)
    }

    /// Sets the source of the cost.
    ///
    /// # Errors
    ///
    /// Returns an error for `cost` if the entry name or the numbers of a [`BodyCost`] are invalid.
    /// Also returns an error for a [`BodyCost`] with a concurrency limit, because tokens are not
    /// slots.
    pub fn costing(mut self, cost: CostSource) -> Result<Self, RuleError> {
        match &cost {
            CostSource::Entry(entry) => {
                check_name(entry).map_err(|error| RuleError::new("cost", error.problem))?;
            }
            CostSource::Body(body) => {
                body.check()?;
                if self.has_slots() {
                    let problem = "cannot be read from the body for a concurrency limit; put the concurrency limit into another rule";
                    return Err(RuleError::new("cost", problem));
                }
            }
            CostSource::Request | CostSource::Fixed(_) => {}
        }
        self.cost = cost;
        Ok(self)
    }

    /// Adds an allow list: requests that match one of `allow` pass without a charge.
    #[must_use]
    pub fn allowing(mut self, allow: Vec<When>) -> Self {
        self.allow = AllowList::new(allow);
        self
    }

    /// Makes the limits elastic: as long as the condition `headroom` holds, the rule admits up to
    /// `percent` more than its limits, and marks the additional requests as over the limit.
    ///
    /// # Errors
    ///
    /// Returns an error for `elastic` if [`Limits::stretching`] rejects it.
    pub fn elastic(mut self, percent: u32, headroom: Headroom) -> Result<Self, RuleError> {
        let stretch = |limits: Limits| {
            let stretched = limits.stretching(percent);
            stretched.map_err(|error| RuleError::new(error.field, error.problem))
        };
        for limits in self.all_limits_mut() {
            *limits = Arc::new(stretch(Limits::clone(limits))?);
        }
        self.headroom = Some(headroom);
        Ok(self)
    }

    /// Sets whether the rule denies requests, or only counts and reports them.
    #[must_use]
    pub fn in_mode(mut self, mode: Mode) -> Self {
        for limits in self.all_limits_mut() {
            *limits = Arc::new(Limits::clone(limits).in_shadow(mode == Mode::Shadow));
        }
        self
    }

    /// Sets the unit in which the rule counts, as announced to clients in `RateLimit-Policy`.
    #[must_use]
    pub fn counting_in(mut self, unit: QuotaUnit) -> Self {
        for limits in self.all_limits_mut() {
            *limits = Arc::new(Limits::clone(limits).counting_in(unit));
        }
        self
    }

    /// Replaces the limits, and keeps all other settings: the mode, the unit, the fallback policy,
    /// and the elastic percentage.
    ///
    /// # Errors
    ///
    /// Returns an error for `limits` or `elastic`.
    pub fn with_limits(mut self, limits: Vec<Limit>) -> Result<Self, RuleError> {
        self.limits = Arc::new(self.with_own_settings(limits)?);
        Ok(self)
    }

    /// Adds plans: named limits that apply instead of the rule's own limits. The entry `entry` of a
    /// request names its plan. If the request lacks the entry, or if the plan does not exist, the
    /// rule's own limits apply. If `entry` is `None`, only overrides select plans.
    ///
    /// All plans share a key's state, so spent units are kept when the plan changes. Therefore,
    /// each plan must have the same algorithms and windows as the rule, in the same order.
    ///
    /// # Errors
    ///
    /// Returns an error for `plan` if `entry` is not a valid name, or if there are more than
    /// [`bounds::MAX_PLANS`] plans. Returns an error for `plans.<name>` if the limits of this plan
    /// are invalid for the rule.
    pub fn with_plans(
        mut self,
        entry: Option<&str>,
        plans: Vec<(&str, Vec<Limit>)>,
    ) -> Result<Self, RuleError> {
        if let Some(entry) = entry {
            check_name(entry).map_err(|error| RuleError::new("plan", error.problem))?;
        }
        let (count, most) = (plans.len(), bounds::MAX_PLANS);
        if count > most {
            let problem = format!("{count} plans exceed the maximum of {most} for one rule");
            return Err(RuleError::new("plan", problem));
        }
        let compile = |(name, limits): (&str, Vec<Limit>)| {
            let compiled = self
                .check_alike(&limits)
                .and_then(|()| self.other_limits(limits))
                .map_err(|error| RuleError::new(format!("plans.{name}"), error.problem))?;
            Ok((Box::from(name), Arc::new(compiled)))
        };
        let plans = plans.into_iter().map(compile).collect::<Result<_, _>>()?;
        self.plans = Plans::new(entry.map(Box::from), plans);
        Ok(self)
    }

    /// Returns an error if spent units would be lost when requests alternate between `limits` and
    /// the rule's own limits.
    fn check_alike(&self, limits: &[Limit]) -> Result<(), RuleError> {
        let own = self.limits.len();
        if limits.len() != own {
            let problem = format!(
                "has {} limits, but rule \"{}\" has {own}; give every plan the same windows as the rule, so \
                 that usage carries over when the plan changes",
                limits.len(),
                self.name
            );
            return Err(RuleError::new("limits", problem));
        }
        let mut pairs = self.limits.iter().zip(limits);
        match pairs.find(|(own, other)| !own.shares_state_with(other)) {
            None => Ok(()),
            Some((own, other)) => {
                if let (
                    Algorithm::Concurrency { lease: own, .. },
                    Algorithm::Concurrency { lease: other, .. },
                ) = (own.algorithm(), other.algorithm())
                {
                    let problem = format!(
                        "the lease {other} must be equal to the lease {own} of rule \"{}\", because \
                         a key's slots are held for the same time whichever plan applies; set \
                         `lease: {own}` in the plan",
                        self.name
                    );
                    return Err(RuleError::new("limits", problem));
                }
                let problem = format!(
                    "{} ({}) must have the algorithm and the window of the limit {} ({}) of rule \"{}\", so \
                     that usage carries over when the plan changes; set the `algorithm` of the rule, and \
                     give every plan the same windows",
                    other.policy(),
                    other.algorithm_name(),
                    own.policy(),
                    own.algorithm_name(),
                    self.name
                );
                Err(RuleError::new("limits", problem))
            }
        }
    }

    /// Compiles limits that apply to some requests instead of the rule's own limits, with the
    /// rule's settings. The compiled limits share their states with the rule's own limits.
    fn other_limits(&self, limits: Vec<Limit>) -> Result<Limits, RuleError> {
        let other = self.compile_other(limits)?;
        Ok(other.inheriting_from(&self.limits))
    }

    /// Compiles limits like [`Self::other_limits`], but without sharing their history with the
    /// rule's own limits.
    pub(super) fn compile_other(&self, limits: Vec<Limit>) -> Result<Limits, RuleError> {
        self.check_refundable(&limits)?;
        let other = self.with_own_settings(limits)?;
        if other.has_slots() != self.limits.has_slots() {
            let problem = if other.has_slots() {
                "cannot be concurrency limits, because the rule has none; put the concurrency limit \
                 into a rule of its own"
            } else {
                "must include a concurrency limit, because the rule has one: a request holds a slot \
                 until it finishes"
            };
            return Err(RuleError::new("limits", problem));
        }
        Ok(other)
    }

    /// Compiles `limits` with the rule's settings: its name, mode, unit, fallback policy and
    /// elastic percentage.
    fn with_own_settings(&self, limits: Vec<Limit>) -> Result<Limits, RuleError> {
        let refused = |error: LimitError| RuleError::new(error.field, error.problem);
        let limits = Limits::new(limits)
            .map_err(refused)?
            .named(&self.name)
            .in_shadow(self.limits.is_shadow())
            .service_wide(self.limits.is_service_wide())
            .counting_in(self.limits.unit())
            .failing(self.limits.on_failure());
        match self.limits.stretch() {
            0 => Ok(limits),
            percent => limits.stretching(percent).map_err(refused),
        }
    }

    /// Returns the limits of the rule and of its plans.
    fn all_limits_mut(&mut self) -> impl Iterator<Item = &mut Arc<Limits>> {
        let plans = self.plans.limits_mut().map(|(_, limits)| limits);
        std::iter::once(&mut self.limits).chain(plans)
    }

    /// Takes over the limits of `before`, the rule with the same name before the reload.
    pub(super) fn inherit_limits(&mut self, before: &Self) {
        self.limits = inherit(&self.limits, &before.limits);
        let own = Arc::clone(&self.limits);
        for (name, limits) in self.plans.limits_mut() {
            *limits = match before.plans.get(name) {
                Some(before) => inherit(limits, before),
                None => Arc::new(Limits::clone(limits).inheriting_from(&own)),
            };
        }
    }

    /// Sets the fallback policy, which applies if the store is unreachable.
    #[must_use]
    pub fn failing(mut self, policy: OnFailure) -> Self {
        for limits in self.all_limits_mut() {
            *limits = Arc::new(Limits::clone(limits).failing(Some(policy)));
        }
        self
    }

    /// Returns the name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the information about this rule that is stored with a manual block on one of its
    /// keys.
    #[must_use]
    pub fn blocked_rule(&self) -> BlockedRule {
        BlockedRule {
            name: self.name().into(),
            key: self.key.clone(),
        }
    }

    /// Returns the conditions under which the rule applies.
    #[must_use]
    pub fn applies_when(&self) -> &When {
        &self.when
    }

    /// Returns the limits.
    #[must_use]
    pub fn limits(&self) -> &Arc<Limits> {
        &self.limits
    }

    /// Returns the limits of the plan named `name`.
    ///
    /// # Errors
    ///
    /// Returns an error for `plan`, with the names of the rule's plans, if the plan does not exist.
    pub fn plan(&self, name: &str) -> Result<&Arc<Limits>, RuleError> {
        self.plans.get(name).ok_or_else(|| {
            let names: Vec<&str> = self.plans.iter().map(|(name, _)| name).take(20).collect();
            let problem = match names.as_slice() {
                [] => format!("rule \"{}\" has no plans", self.name),
                names => format!(
                    "rule \"{}\" has no such plan; it has {}",
                    self.name,
                    names.join(", ")
                ),
            };
            RuleError::new("plan", problem)
        })
    }

    /// Returns the limits of the plan named `plan`, or the rule's own limits if there is no such
    /// plan.
    pub(super) fn limits_without_override(&self, plan: Option<&str>) -> &Arc<Limits> {
        let of_plan = plan.and_then(|plan| self.plans.get(plan));
        of_plan.unwrap_or(&self.limits)
    }

    /// Returns the names and the limits of the plans, sorted by name.
    pub fn plans(&self) -> impl ExactSizeIterator<Item = (&str, &Arc<Limits>)> {
        self.plans.iter()
    }

    /// Returns the name of the entry that selects a request's plan, if there is one.
    #[must_use]
    pub fn plan_entry(&self) -> Option<&str> {
        self.plans.entry.as_deref()
    }

    /// Returns the name of the plan that `request` names. Returns `None` if the request does not
    /// name a plan of this rule. An override takes precedence over the plan, or multiplies its
    /// limits.
    #[must_use]
    pub fn plan_name_of(&self, request: &Request<'_>) -> Option<&str> {
        self.plans.name_of_request(request)
    }

    /// Returns the limits of `charge`, which was made under this rule. Returns `None` if the limits
    /// come from an override.
    pub(super) fn own_limits(&self, charge: &Charge<'_>) -> Option<&Limits> {
        let limits = self.unstretched_limits(charge)?;
        let stretched = limits.stretched().filter(|_| charge.limits.is_stretched());
        Some(stretched.unwrap_or(limits))
    }

    /// Returns the original limits of `charge`, before any elastic increase. Returns `None` if the
    /// limits come from an override.
    pub(super) fn unstretched_limits(&self, charge: &Charge<'_>) -> Option<&Arc<Limits>> {
        let mut own = self.own_and_plans();
        own.find(|limits| is_charged(limits, charge))
    }

    /// Returns the limits of the plan named by `request`. Returns `None` if the request does not
    /// name a plan of this rule.
    pub(super) fn plan_of(&self, request: &Request<'_>) -> Option<&Arc<Limits>> {
        self.plans.of_request(request)
    }

    /// Returns the limits of the rule and of its plans.
    fn own_and_plans(&self) -> impl Iterator<Item = &Arc<Limits>> {
        let plans = self.plans.iter().map(|(_, limits)| limits);
        std::iter::once(&self.limits).chain(plans)
    }

    /// Returns the maximum number of limits to which this rule can charge a request.
    #[must_use]
    pub fn max_limits(&self) -> usize {
        let counts = self.own_and_plans().map(|limits| limits.len());
        counts.max().unwrap_or_default()
    }

    /// Returns the names of the key entries. A rule without key entries has one count for all
    /// requests.
    pub fn key(&self) -> impl ExactSizeIterator<Item = &str> {
        self.key.iter().map(|entry| &**entry)
    }

    /// Returns the source of the cost.
    #[must_use]
    pub fn cost(&self) -> &CostSource {
        &self.cost
    }

    /// Returns whether the rule denies requests.
    #[must_use]
    pub fn mode(&self) -> Mode {
        if self.limits.is_shadow() {
            Mode::Shadow
        } else {
            Mode::Enforce
        }
    }

    /// Returns the names of all entries that the rule uses.
    pub(super) fn entry_names(&self) -> impl Iterator<Item = &str> {
        let cost = match &self.cost {
            CostSource::Entry(entry) => Some(&**entry),
            CostSource::Request | CostSource::Fixed(_) | CostSource::Body(_) => None,
        };
        let allowed = self.allow.entry_names();
        let plan = self.plan_entry();
        let headroom = self.headroom.iter().filter_map(|headroom| match headroom {
            Headroom::When(when) => Some(when.entry_names()),
            Headroom::Unused(_) => None,
        });
        self.when
            .entry_names()
            .chain(self.key())
            .chain(cost)
            .chain(plan)
            .chain(allowed)
            .chain(headroom.flatten())
    }

    /// Returns the longest window of the rule's limits, which is the default duration of a manual
    /// block.
    #[must_use]
    pub fn longest_window(&self) -> Span {
        let windows = self.limits.iter().map(Limit::window);
        windows.max().unwrap_or(Span::ZERO)
    }

    /// Returns the prefix of this rule's encoded keys. Only the keys of this rule begin with this
    /// prefix.
    #[must_use]
    pub fn key_prefix(&self) -> [u8; 8] {
        self.scope
    }

    /// Returns the encoded key for `values`, which must be in the order of [`Self::key`].
    ///
    /// # Errors
    ///
    /// Rejects a number of values that differs from the number of key entries, an empty value, and
    /// a key longer than [`bounds::MAX_KEY_BYTES`].
    pub fn encode_key(&self, values: &[&str]) -> Result<Vec<u8>, RequestError> {
        if values.len() != self.key.len() {
            let problem = format!("{}, got {}", self.key_description(), values.len());
            return Err(RequestError::new("key", problem));
        }
        let mut bytes = Vec::new();
        self.append_key(values.iter().copied(), &mut bytes)?;
        Ok(bytes)
    }

    /// Describes the values of a key of this rule, for an error about another number of values.
    #[must_use]
    pub fn key_description(&self) -> String {
        let names = self.key.join(", ");
        match self.key.len() {
            0 => format!(
                "rule \"{}\" has no key (one count for all requests), so it takes no values",
                self.name
            ),
            1 => format!("rule \"{}\" has a key of 1 value ({names})", self.name),
            several => format!(
                "rule \"{}\" has a key of {several} values ({names})",
                self.name
            ),
        }
    }

    /// Returns the first key entry whose value contradicts this rule's conditions, so that the rule
    /// never applies to requests with these values. `values` must be in the order of [`Self::key`].
    #[must_use]
    pub fn contradicted_key(&self, values: &[&str]) -> Option<&str> {
        let mut pairs = self.key().zip(values);
        let is_contradicted = |entry: &str, value: &str| {
            let mut conditions = self.conditions();
            conditions.any(|condition| {
                condition.entry() == entry && !condition.pattern().matches(Some(value))
            })
        };
        pairs.find_map(|(entry, value)| is_contradicted(entry, value).then_some(entry))
    }

    /// Returns the scope of the rule: the first eight bytes of all its keys, as a number.
    #[must_use]
    pub fn key_scope(&self) -> u64 {
        u64::from_be_bytes(self.scope)
    }

    /// Decodes the values of a key from `rest`, the bytes of the key after the scope. Returns
    /// `None` if the bytes do not contain one value for each entry of the rule's key.
    #[must_use]
    pub fn decode_values<'k>(&self, rest: &'k [u8]) -> Option<Vec<&'k str>> {
        key::values(rest, self.key.len())
    }

    pub(super) fn scope(&self) -> Scope {
        self.scope
    }

    pub(super) fn allow_list(&self) -> &AllowList {
        &self.allow
    }

    pub(super) fn conditions(&self) -> std::slice::Iter<'_, Condition> {
        self.when.iter()
    }

    /// Returns the maximum number of pattern evaluations for checking whether the rule applies and
    /// whether it may exceed its limits. A rule without conditions counts as one evaluation.
    pub(super) fn weight(&self) -> usize {
        let headroom = self.headroom.iter().map(|headroom| match headroom {
            Headroom::When(when) => when.weight(),
            Headroom::Unused(_) => 0,
        });
        let allow = self.allow.index().costliest().weight;
        let parts = [self.when.weight(), allow].into_iter().chain(headroom);
        parts.fold(0, usize::saturating_add).max(1)
    }

    /// Returns true if `request` must be charged by this rule at `now`.
    pub(super) fn applies(
        &self,
        request: &Request<'_>,
        now: Timestamp,
        buffers: &mut super::LookupBuffers,
    ) -> bool {
        self.key.iter().all(|entry| request.entry(entry).is_some())
            && self.when.holds(request, now, &mut buffers.work)
            && !self.allow.matches(request, now, buffers)
    }

    /// Returns true if an elastic rule may exceed its limits for this request at `now`. Only
    /// conditions on the request are evaluated, not the unused share of another rule.
    pub(super) fn has_headroom(
        &self,
        request: &Request<'_>,
        now: Timestamp,
        buffers: &mut super::LookupBuffers,
    ) -> bool {
        match &self.headroom {
            Some(Headroom::When(when)) => when.holds(request, now, &mut buffers.work),
            Some(Headroom::Unused(_)) | None => false,
        }
    }

    /// Returns the requirement on the unused share of another rule's limits, if this elastic rule
    /// has one.
    pub(super) fn unused_share(&self) -> Option<&UnusedShare> {
        match &self.headroom {
            Some(Headroom::Unused(unused)) => Some(unused),
            Some(Headroom::When(_)) | None => None,
        }
    }

    /// Appends the key for `request` to `bytes`. The rule must apply to the request.
    pub(super) fn append_key_of(
        &self,
        request: &Request<'_>,
        bytes: &mut Vec<u8>,
    ) -> Result<(), RequestError> {
        let values = self
            .key
            .iter()
            .map(|entry| request.entry(entry).unwrap_or_default());
        self.append_key(values, bytes)
    }

    /// Returns whether the options of both rules are equal: the cost, the response-based cost, the
    /// allow list, the percentage and the condition of elastic limits, the fallback policy, and the
    /// plans.
    #[must_use]
    pub fn has_same_options(&self, other: &Self) -> bool {
        let (limits, other_limits) = (self.limits(), other.limits());
        self.cost == other.cost
            && self.allow == other.allow
            && self.headroom == other.headroom
            && self.response_cost == other.response_cost
            && limits.unit() == other_limits.unit()
            && limits.on_failure() == other_limits.on_failure()
            && limits.stretch() == other_limits.stretch()
            && self.plans.are_equal(&other.plans)
    }

    /// Returns the cost that the rule charges for `request`.
    ///
    /// # Errors
    ///
    /// Rejects a request in which the entry that sets the cost is missing or is not a number from 1
    /// to [`bounds::MAX_COUNT`].
    pub fn cost_of(&self, request: &Request<'_>) -> Result<Cost, RequestError> {
        match &self.cost {
            CostSource::Request => Ok(request.cost()),
            CostSource::Fixed(cost) => Ok(*cost),
            CostSource::Entry(entry) => {
                let cause = || format!("rule \"{}\" takes its cost from this entry", self.name);
                let wrong = |problem: String| {
                    RequestError::new(request::field(entry), problem).because(cause())
                };
                let Some(value) = request.entry(entry) else {
                    return Err(wrong("is missing".to_owned()));
                };
                let most = bounds::MAX_COUNT;
                let number = decimal(value).ok_or_else(|| {
                    let advice = integer_advice(value, &(1..=most));
                    wrong(format!("must be an integer from 1 to {most}{advice}"))
                })?;
                Cost::new(number)
                    .map_err(|error| RequestError::new(request::field(entry), error.problem))
            }
            CostSource::Body(body) => {
                let Some(costs) = request.body_costs() else {
                    return Ok(request.cost());
                };
                let read = costs.iter().find(|(scope, _)| *scope == self.key_scope());
                let default = || self.expected_cost(body.expected(BodyNumbers::default()));
                Ok(read.map_or_else(default, |(_, cost)| *cost))
            }
        }
    }

    /// Returns the [`BodyCost`] if the cost is computed from the request body.
    #[must_use]
    pub fn body_cost(&self) -> Option<&BodyCost> {
        match &self.cost {
            CostSource::Body(body) => Some(body),
            CostSource::Request | CostSource::Fixed(_) | CostSource::Entry(_) => None,
        }
    }

    /// Returns the cost that the rule charges before the response of a language model is known. The
    /// cost is computed with the rule's token formula, or with [`TokenFormula::SUM`] if the rule
    /// has no formula.
    #[must_use]
    pub fn expected_cost(&self, expected: TokenUsage) -> Cost {
        let formula = self.response_cost.formula().unwrap_or(&TokenFormula::SUM);
        // A formula never returns more than the largest cost, and a request costs at least 1.
        Cost::new(formula.cost(expected)).unwrap_or(Cost::ONE)
    }

    fn append_key<'v>(
        &self,
        values: impl Iterator<Item = &'v str>,
        bytes: &mut Vec<u8>,
    ) -> Result<(), RequestError> {
        let start = bytes.len();
        key::begin(bytes, self.scope);
        for (at, (entry, value)) in self.key.iter().zip(values).enumerate() {
            if value.is_empty() {
                let error = RequestError::new(request::field(entry), "must not be empty");
                return Err(error.because(self.counts_by_it()));
            }
            key::push(bytes, value, at + 1 == self.key.len());
            let (length, most) = (bytes.len() - start, bounds::MAX_KEY_BYTES);
            if length > most {
                let problem =
                    format!("makes a key of {length} bytes, which exceeds the maximum of {most}");
                let error = RequestError::new(request::field(entry), problem);
                return Err(error.because(self.counts_by_it()));
            }
        }
        Ok(())
    }

    fn counts_by_it(&self) -> String {
        format!("this entry is part of the key of rule \"{}\"", self.name)
    }
}

/// Returns the limits of a rule after a reload: `new` are the limits in the new rule set, and `old`
/// are the limits in the former rule set.
fn inherit(new: &Arc<Limits>, old: &Arc<Limits>) -> Arc<Limits> {
    let same_manner = new.is_shadow() == old.is_shadow()
        && new.unit() == old.unit()
        && new.on_failure() == old.on_failure()
        && new.stretch() == old.stretch();
    match (new.iter().eq(old.iter()), same_manner) {
        (true, true) => Arc::clone(old),
        (true, false) => {
            let limits = Limits::clone(old).in_shadow(new.is_shadow());
            let limits = limits.counting_in(new.unit());
            let limits = limits.failing(new.on_failure());
            // The parameters of the old and the new limits are equal, so the new elastic percentage
            // is valid for the old limits.
            Arc::new(limits.clone().stretching(new.stretch()).unwrap_or(limits))
        }
        (false, _) => Arc::new(Limits::clone(new).inheriting_from(old)),
    }
}

/// Returns whether `charge` was made on `limits`, in their original or stretched form.
pub(super) fn is_charged(limits: &Limits, charge: &Charge<'_>) -> bool {
    let is_stretched = charge.limits.is_stretched();
    let stretched = limits.stretched().filter(|_| is_stretched);
    std::ptr::eq(stretched.unwrap_or(limits), charge.limits)
}

fn check_rule_name(name: &str) -> Result<(), RuleError> {
    let most = bounds::MAX_RULE_NAME_BYTES;
    if name.is_empty() {
        return Err(RuleError::new("name", "must not be empty"));
    }
    if name.len() > most {
        let problem = format!("{} bytes exceed the maximum of {most}", name.len());
        return Err(RuleError::new("name", problem));
    }
    if !name.bytes().all(|byte| (b' '..=b'~').contains(&byte)) {
        let problem = "must be printable ASCII, because it appears in headers and metrics";
        return Err(RuleError::new("name", problem));
    }
    Ok(())
}

fn decimal(text: &str) -> Option<u64> {
    if response_cost::is_number(text) {
        text.parse().ok()
    } else {
        None
    }
}

/// Functions for charges that can change after the request was admitted.
impl Rule {
    /// Computes the final charge of each request from its response, according to `response_cost`.
    /// The setting takes effect only in the tower layer and the reverse proxy, which see responses.
    ///
    /// # Errors
    ///
    /// Returns an error for `count` or `settle` if a limit counts denied requests, because such
    /// limits do not support refunds. Returns an error for `count` if `response_cost` has a
    /// schedule. Returns an error for `settle` if a limit is a concurrency limit, because its slots
    /// must be acquired before the request is forwarded.
    pub fn with_response_cost(mut self, response_cost: ResponseCost) -> Result<Self, RuleError> {
        if response_cost.schedule().is_some() {
            let problem = "cannot have a schedule; put the schedule into the rule's `when`";
            return Err(RuleError::new("count", problem));
        }
        if response_cost.has_cost() && self.has_slots() {
            let problem = "cannot be combined with a concurrency limit, which takes its slots before the response is known; put the concurrency limit into another rule";
            return Err(RuleError::new("settle", problem));
        }
        self.response_cost = response_cost;
        for limits in self.own_and_plans() {
            let limits: Vec<Limit> = limits.iter().cloned().collect();
            self.check_refundable(&limits)?;
        }
        Ok(self)
    }

    /// Returns an error if the rule has a response-based cost and one of `limits` counts denied
    /// requests.
    fn check_refundable(&self, limits: &[Limit]) -> Result<(), RuleError> {
        if self.response_cost.is_independent_of_response()
            || !limits.iter().any(Limit::count_denied)
        {
            return Ok(());
        }
        let field = if self.response_cost.has_cost() {
            "settle"
        } else {
            "count"
        };
        let problem =
            "cannot be combined with count_denied, which is never refunded; remove one of the two";
        Err(RuleError::new(field, problem))
    }

    /// Returns the response-based cost of the rule.
    #[must_use]
    pub fn response_cost(&self) -> &ResponseCost {
        &self.response_cost
    }

    /// Returns true if the rule has a concurrency limit. A request holds a slot until its response
    /// is finished.
    #[must_use]
    pub fn has_slots(&self) -> bool {
        let holds = |limit: &Limit| matches!(limit.algorithm(), Algorithm::Concurrency { .. });
        self.limits().iter().any(holds)
    }

    /// Returns true if the rule has a limit that counts units, that is, is not a concurrency limit.
    #[must_use]
    pub fn has_units(&self) -> bool {
        let counts = |limit: &Limit| !matches!(limit.algorithm(), Algorithm::Concurrency { .. });
        self.limits().iter().any(counts)
    }

    /// Returns true if the rule has a leaky bucket limit that queues requests.
    #[must_use]
    pub fn has_queue(&self) -> bool {
        let has_queue = |limit: &Limit| {
            matches!(
                limit.algorithm(),
                Algorithm::LeakyBucket { queue: true, .. }
            )
        };
        self.limits().iter().any(has_queue)
    }

    /// Returns true if a request's charge can be refunded or released later, which requires a
    /// receipt.
    #[must_use]
    pub fn wants_receipt(&self) -> bool {
        self.has_slots() || self.has_queue() || !self.response_cost.is_independent_of_response()
    }
}
