//! A rule set: all rules, in the order of the file. A rule set determines the charges for a
//! request.

use std::{
    collections::{BTreeSet, HashMap},
    ops::Range,
    sync::{Arc, LazyLock},
};

use smallvec::SmallVec;

use super::{
    AllowList, Bypass, Condition, EntryBlock, EntryBlockTarget, EntryBlocks, Overrides, Parents,
    Request, Rule, RuleError, RuleErrors, RuleOverrides, When, bypass,
    key::{self, BLOCK_KEY, Scope},
    overrides::KeyHash,
    pattern::{
        Work,
        index::{Index, Item, Matches},
    },
};
use crate::{
    eval::{Charge, Cost, Limits, RequestError},
    hash_table::RandomState,
    limit::{Algorithm, Limit, Rate, bounds},
    time::{Span, Timestamp},
};

/// The limits of the charge of a request that is blocked and to which no rule applies. No store
/// ever evaluates these limits to decide a request, because the charge is blocked.
static BLOCKED_LIMITS: LazyLock<Limits> = LazyLock::new(|| {
    let period = Span::from_secs(1);
    let rate = Rate { count: 1, period };
    let limit = Limit::unvalidated(Algorithm::Gcra { rate, burst: 0 });
    Limits::new(vec![limit]).expect("the rate is within the bounds of a limit")
});

/// Buffers in which [`RuleSet::charges`] returns a request's charges. The caller reuses the buffers
/// for all requests.
#[derive(Debug, Default)]
pub struct Scratch {
    buffers: LookupBuffers,
    keys: Vec<u8>,
    due: Vec<DueCharge>,
}

impl Scratch {
    /// Returns the number of pattern evaluations for the last request. A pattern that scans the
    /// whole value counts as one additional evaluation for each KiB of the value.
    #[must_use]
    pub fn conditions_evaluated(&self) -> usize {
        self.buffers.work.done()
    }
}

/// The maximum number of overrides that are prefetched together. More would evict each other from
/// the CPU caches.
const MAX_PREFETCHED: usize = 32;

/// The maximum number of rules whose overrides are prefetched.
const MAX_PREFETCHED_RULES: usize = 4;

/// Buffers for lookups in an index, and the counter of pattern evaluations.
#[derive(Debug, Default)]
pub(super) struct LookupBuffers {
    pub(super) rules: Matches,
    pub(super) allowed: Matches,
    pub(super) work: Work,
    /// Whether the last key that was looked up probably had an override of its own.
    pub(super) expects_override: bool,
}

/// The limits to which a request is charged.
#[derive(Debug)]
enum ChosenLimits {
    /// The limits of the rule.
    Own,
    /// The limits of an override or of a plan.
    Other(Arc<Limits>),
}

/// A charge that the request must make. The charge's key is stored as a range of the key buffer,
/// because the buffer can still be reallocated.
#[derive(Debug)]
struct DueCharge {
    rule: usize,
    key: Range<usize>,
    /// The hash of the key for the lookup of its override; `None` if the rule has no overrides.
    key_hash: Option<KeyHash>,
    limits: ChosenLimits,
    cost: Cost,
    /// Whether the rule is elastic and its headroom condition holds, so that it may exceed its
    /// limits.
    has_headroom: bool,
}

/// All rules, indexed by their conditions.
///
/// # Examples
///
/// ```
/// use tidegate_core::{AlgorithmName, LimitSpec, notation};
/// use tidegate_core::{Condition, Cost, Pattern, Request, Rule, RuleSet, Scratch, Timestamp, When};
///
/// let rate = notation::rate("20/min").unwrap();
/// let limit = LimitSpec::shorthand(rate, AlgorithmName::SlidingWindowLog).build().unwrap();
/// let api = Condition::new("path", Pattern::text("/api/**").unwrap()).unwrap();
/// let rule = Rule::new("api-per-customer", vec![limit]).unwrap();
/// let rule = rule.when(When::all(vec![api])).keyed_by(&["customer"]).unwrap();
/// let rules = RuleSet::build(vec![rule], Vec::new()).unwrap();
///
/// let entries = [("path", "/api/orders"), ("customer", "c1")];
/// let request = Request::new(&entries, Cost::ONE).unwrap();
/// let mut scratch = Scratch::default();
/// let now = Timestamp::from_micros(1_700_000_000_000_000);
/// let charges = rules.charges(&request, now, &mut scratch).unwrap();
/// assert_eq!(charges.len(), 1);
/// let (rule, values) = rules.decode_key(charges[0].key).unwrap();
/// assert_eq!((rule.name(), values), ("api-per-customer", vec!["c1"]));
/// ```
#[derive(Clone, Debug, Default)]
pub struct RuleSet {
    rules: Vec<Rule>,
    /// The overrides of each rule, in the order of the rules.
    overrides: Vec<Arc<RuleOverrides>>,
    /// The first rules whose key has a single entry, for [`Self::prefetch_overrides`].
    prefetched_rules: Vec<usize>,
    entry_blocks: EntryBlocks,
    index: Index,
    /// The index of each rule. Every receipt looks up its rules, so the map uses a fast hash
    /// function. Clients do not choose the scopes.
    by_scope: HashMap<Scope, usize, RandomState>,
    allow: AllowList,
    entry_names: BTreeSet<Box<str>>,
    extra_entry_names: BTreeSet<Box<str>>,
    /// Whether any elastic rule depends on the unused percentage of another rule's limits.
    has_parents: bool,
    wants_receipts: bool,
    has_body_costs: bool,
}

impl RuleSet {
    /// Indexes `rules`, keeping their order. A request that matches one of `allow` passes all rules
    /// without a charge.
    ///
    /// # Errors
    ///
    /// Returns an error in these cases, where `<n>` is the index of the rule, counted from 0:
    ///
    /// - A rule has the same name as an earlier rule. The error's field is `rules[<n>].name`.
    /// - An elastic rule refers to itself or to a missing rule. The error's field is
    ///   `rules[<n>].elastic.unused.rule`.
    /// - There are more than [`bounds::MAX_RULES`] rules.
    /// - An ordinary request could take more than [`bounds::MAX_EVALUATIONS`] pattern evaluations.
    pub fn build(rules: Vec<Rule>, allow: Vec<When>) -> Result<Self, RuleErrors> {
        let most = bounds::MAX_RULES;
        if rules.len() > most {
            let problem = format!("{} rules exceed the maximum of {most}", rules.len());
            return Err(RuleErrors(vec![RuleError::new("rules", problem)]));
        }
        let by_scope = by_scope(&rules)?;
        check_parents(&rules)?;
        let index = Index::new(rules.iter().map(|rule| {
            let conditions = rule.conditions().map(Condition::parts);
            Item::new(conditions, rule.weight()).needing(rule.key())
        }));
        let entry_names = entry_names(&rules, &allow);
        let allow = AllowList::new(allow);
        let costliest = index.costliest().with(allow.index().costliest());
        costliest.check().map_err(|error| RuleErrors(vec![error]))?;
        let has_parents = rules.iter().any(|rule| rule.unused_share().is_some());
        let wants_receipts = rules.iter().any(Rule::wants_receipt);
        let has_body_costs = rules.iter().any(|rule| rule.body_cost().is_some());
        Ok(Self {
            overrides: rules.iter().map(|_| Arc::default()).collect(),
            prefetched_rules: Vec::new(),
            entry_blocks: EntryBlocks::default(),
            rules,
            index,
            by_scope,
            allow,
            entry_names,
            extra_entry_names: BTreeSet::new(),
            has_parents,
            wants_receipts,
            has_body_costs,
        })
    }

    /// Takes over the limits of `old` after a reload. A rule with unchanged limits uses the same
    /// object as in `old`. If a rule's limits have changed, units spent under the old limits still
    /// count.
    #[must_use]
    pub fn inheriting_from(mut self, old: &Self) -> Self {
        for rule in &mut self.rules {
            if let Some(before) = old.rule(rule.name()) {
                rule.inherit_limits(before);
            }
        }
        self
    }

    /// Applies `overrides` to the rules. Later changes to `overrides` take effect immediately.
    #[must_use]
    pub fn with_overrides(mut self, overrides: &Overrides) -> Self {
        let names = self.rules.iter().map(Rule::name);
        self.overrides = names.map(|name| overrides.of_rule(name)).collect();
        let single = self.rules.iter().enumerate();
        let single = single.filter(|(_, rule)| rule.key().len() == 1);
        self.prefetched_rules = single
            .map(|(at, _)| at)
            .take(MAX_PREFETCHED_RULES)
            .collect();
        self
    }

    /// Applies `blocks` to the requests. Later changes to `blocks` take effect immediately.
    #[must_use]
    pub fn with_entry_blocks(mut self, blocks: &EntryBlocks) -> Self {
        self.entry_blocks = blocks.clone();
        self
    }

    /// Returns the block by entries that denies `request` at `now` and ends last. `rule` must apply
    /// to the request.
    #[must_use]
    pub fn entry_block(
        &self,
        request: &Request<'_>,
        rule: Option<&Rule>,
        now: Timestamp,
    ) -> Option<(EntryBlockTarget, EntryBlock)> {
        self.entry_blocks.find(request, rule.map(Rule::name), now)
    }

    /// Starts to load the overrides of about the first 32 keys into the CPU caches. `pairs`
    /// contains the names and the values of the entries of several requests, as they were sent.
    /// Only the first rules whose key has a single entry are considered.
    ///
    /// Prefetching does not affect any decision. A caller that decides several requests in sequence
    /// can prefetch all of them first, so that their cache misses overlap.
    pub fn prefetch_overrides<'p>(&self, pairs: impl IntoIterator<Item = (&'p [u8], &'p [u8])>) {
        let rules = self.prefetched_rules.iter();
        let rules = rules.map(|at| (&self.rules[*at], &*self.overrides[*at]));
        let rules = rules.filter(|(_, overrides)| !overrides.is_empty());
        let rules: SmallVec<[(&Rule, &RuleOverrides); MAX_PREFETCHED_RULES]> = rules.collect();
        if rules.is_empty() {
            return;
        }
        let mut hashes = SmallVec::<[(&RuleOverrides, KeyHash); MAX_PREFETCHED]>::new();
        for (name, value) in pairs {
            let is_keyed = |rule: &Rule| rule.key().any(|entry| entry.as_bytes() == name);
            for (_, overrides) in rules.iter().filter(|(rule, _)| is_keyed(rule)) {
                hashes.push((overrides, overrides.prefetch_filter(value)));
            }
            if hashes.len() + rules.len() > MAX_PREFETCHED {
                break;
            }
        }
        for (overrides, hash) in hashes {
            overrides.prefetch_entry(hash);
        }
    }

    /// Returns the overrides of `rule`, a rule of this set.
    #[must_use]
    pub fn overrides(&self, rule: &Rule) -> Option<&RuleOverrides> {
        let at = self.by_scope.get(&rule.scope())?;
        Some(&self.overrides[*at])
    }

    /// Returns the limits that apply at `now` to `key`, an encoded key of `rule`, for a request
    /// that names `plan`: the limits of the key's override, if any, otherwise the limits of the
    /// plan or the rule's own limits.
    #[must_use]
    pub fn limits_of_key(
        &self,
        rule: &Rule,
        key: &[u8],
        plan: Option<&str>,
        now: Timestamp,
    ) -> Arc<Limits> {
        let base = rule.limits_without_override(plan);
        let mut buffers = LookupBuffers::default();
        let overridden = self.overrides(rule).and_then(|overrides| {
            let hash = overrides.prefetch(key, &buffers)?;
            overrides.limits(rule, base, key, hash, now, &mut buffers)
        });
        overridden.unwrap_or_else(|| Arc::clone(base))
    }

    /// Returns the original limits of `charge`, before any elastic increase. The charge must have
    /// been made under this rule set.
    #[must_use]
    pub fn limits_of(&self, charge: &Charge<'_>) -> Arc<Limits> {
        if let Some(rule) = self.rule_of(charge.key) {
            if let Some(own) = rule.unstretched_limits(charge) {
                return Arc::clone(own);
            }
            let overrides = self.overrides(rule);
            if let Some(overridden) = overrides.and_then(|all| all.limits_of(rule, charge)) {
                return overridden;
            }
        }
        // The override was changed after the decision.
        Arc::new(charge.limits.unstretched().clone())
    }

    /// Returns the limits of `charge`, which must be a charge of this rule set. Unlike
    /// `charge.limits`, the returned limits do not borrow from the buffers of the request. Returns
    /// `None` if the limits come from an override.
    #[must_use]
    pub fn own_limits(&self, charge: &Charge<'_>) -> Option<&Limits> {
        if charge.key == BLOCK_KEY {
            return Some(&BLOCKED_LIMITS);
        }
        self.rule_of(charge.key)?.own_limits(charge)
    }

    /// Replaces the limits of the rule `name`, so that other limits can be tried out.
    ///
    /// # Errors
    ///
    /// Returns an error if the rule does not exist, or if [`Rule::with_limits`] rejects the limits.
    pub fn with_limits(mut self, name: &str, limits: Vec<Limit>) -> Result<Self, RuleError> {
        let rule = self.rules.iter_mut().find(|rule| rule.name() == name);
        let rule = rule.ok_or_else(|| RuleError::new("name", "no rule has this name"))?;
        *rule = rule.clone().with_limits(limits)?;
        self.wants_receipts = self.rules.iter().any(Rule::wants_receipt);
        Ok(self)
    }

    /// Returns the charges for `request` at `now`, one for every rule that applies, in the order of
    /// the rules. Returns no charges if the request is on the allow list.
    ///
    /// If a [block by entries](EntryBlocks) denies the request, its charges are
    /// [marked](Charge::blocked). If no rule applies to a blocked request, the only charge has the
    /// key [`BLOCK_KEY`] and belongs to no rule.
    ///
    /// # Errors
    ///
    /// Rejects a request in these cases:
    ///
    /// - In a rule that applies, the value of a key entry is empty or makes the key too long.
    /// - The entry that sets the cost is missing or is not a number from 1 to
    ///   [`bounds::MAX_COUNT`].
    /// - More than [`bounds::MAX_CHARGES`] rules apply to the request.
    /// - Finding the rules takes more than [`bounds::MAX_EVALUATIONS`] pattern evaluations. Only a
    ///   request whose values were crafted to match parts of many patterns takes so much work.
    pub fn charges<'a>(
        &'a self,
        request: &Request<'_>,
        now: Timestamp,
        scratch: &'a mut Scratch,
    ) -> Result<Vec<Charge<'a>>, RequestError> {
        let Scratch { buffers, keys, due } = scratch;
        buffers.work = Work::default();
        keys.clear();
        due.clear();
        let is_allowed = self.allow.matches(request, now, buffers);
        // If evaluations were skipped, the list of rules may be wrong, so check the work before
        // using the list.
        buffers.work.check()?;
        if is_allowed {
            return Ok(Vec::new());
        }
        self.find_due_charges(request, now, scratch)?;
        let Scratch { buffers, keys, due } = scratch;
        buffers.work.check()?;
        let charge = |due: &'a DueCharge| {
            let limits = match &due.limits {
                ChosenLimits::Own => self.rules[due.rule].limits(),
                ChosenLimits::Other(limits) => limits,
            };
            let stretched = limits.stretched().filter(|_| due.has_headroom);
            Charge::new(
                &keys[due.key.clone()],
                stretched.unwrap_or(limits),
                due.cost,
            )
        };
        let mut charges = due.iter().map(charge).collect::<Result<Vec<_>, _>>()?;
        if !self.entry_blocks.is_empty() {
            self.mark_blocked(request, now, due, &mut charges)?;
        }
        Ok(charges)
    }

    /// Marks the charges of a request that blocks by entries deny.
    #[cold]
    fn mark_blocked(
        &self,
        request: &Request<'_>,
        now: Timestamp,
        due: &[DueCharge],
        charges: &mut Vec<Charge<'_>>,
    ) -> Result<(), RequestError> {
        let blocks = self.entry_blocks.look_up();
        let end = blocks.end(request, now);
        for (due, charge) in due.iter().zip(&mut *charges) {
            // `due.rule` is the index of a rule of this rule set.
            let rule = self.rules[due.rule].name();
            charge.blocked = end.max(blocks.end_of_rule(rule, request, now));
        }
        if end.is_some() && charges.is_empty() {
            let charge = Charge::new(&BLOCK_KEY, &BLOCKED_LIMITS, Cost::ONE)?;
            charges.push(Charge {
                blocked: end,
                ..charge
            });
        }
        Ok(())
    }

    /// Returns true if `request` is on the allow list, so that no rule charges it.
    ///
    /// Returns false if the check takes more than [`bounds::MAX_EVALUATIONS`] pattern evaluations.
    /// [`Self::charges`] rejects a request that takes more evaluations.
    #[must_use]
    pub fn is_allow_listed(
        &self,
        request: &Request<'_>,
        now: Timestamp,
        scratch: &mut Scratch,
    ) -> bool {
        let buffers = &mut scratch.buffers;
        buffers.work = Work::default();
        let is_allowed = self.allow.matches(request, now, buffers);
        // If evaluations were skipped, `is_allowed` may be wrong, so treat the request as not
        // listed.
        is_allowed && buffers.work.check().is_ok()
    }

    /// Returns true if the cost of any rule depends on the request body.
    #[must_use]
    pub fn has_body_costs(&self) -> bool {
        self.has_body_costs
    }

    /// Returns the rules that apply to `request` at `now` and whose cost depends on the request
    /// body. A listener needs to read the body only if this method returns a rule.
    ///
    /// Returns no rules for a request that [`Self::charges`] rejects.
    pub fn rules_with_body_cost<'a>(
        &'a self,
        request: &Request<'_>,
        now: Timestamp,
        scratch: &mut Scratch,
    ) -> Vec<&'a Rule> {
        if !self.has_body_costs {
            return Vec::new();
        }
        let buffers = &mut scratch.buffers;
        buffers.work = Work::default();
        if self.allow.matches(request, now, buffers) {
            return Vec::new();
        }
        let mut found = std::mem::take(&mut buffers.rules);
        self.index.look_up(request.entries(), &mut found);
        buffers.work.expect(found.items.len());
        let candidates = found.items.iter().map(|at| &self.rules[*at]);
        let rules: Vec<&Rule> = candidates
            .filter(|rule| rule.body_cost().is_some() && rule.applies(request, now, buffers))
            .collect();
        // If evaluations were skipped, the list may be wrong, but then `charges` rejects the
        // request.
        let is_complete = buffers.work.check().is_ok() && rules.len() <= bounds::MAX_CHARGES;
        buffers.rules = found;
        if is_complete { rules } else { Vec::new() }
    }

    /// Returns the parent charges of the elastic rules in `charges`. An elastic rule may exceed its
    /// own limits if a large enough percentage of its parent's limits is unused, so the caller must
    /// read the parents before it decides `charges`. Returns `None` if no rule has a parent, which
    /// is the common case, or if a block by entries denies the request regardless of its limits.
    #[must_use]
    #[inline]
    pub fn parents<'a>(&'a self, charges: &[Charge<'a>]) -> Option<Parents<'a>> {
        if !self.has_parents || charges.iter().any(|charge| charge.blocked.is_some()) {
            return None;
        }
        let parents = Parents::of(charges, |name| self.rule(name)?.unused_share());
        (!parents.charges.is_empty()).then_some(parents)
    }

    /// Returns the rule with this name.
    #[must_use]
    pub fn rule(&self, name: &str) -> Option<&Rule> {
        let rule = self
            .by_scope
            .get(&key::scope(name))
            .map(|at| &self.rules[*at]);
        rule.filter(|rule| rule.name() == name)
    }

    /// Iterates over the rules, in the order of the file.
    pub fn iter(&self) -> std::slice::Iter<'_, Rule> {
        self.rules.iter()
    }

    /// Returns the names of all entries that a rule uses, so that a listener knows what to extract
    /// from a request.
    pub fn entry_names(&self) -> impl Iterator<Item = &str> {
        self.entry_names.iter().map(|name| &**name)
    }

    /// Adds to [`Self::extra_entry_names`] the names of the entries that only the rules of `other`
    /// use, so that a listener extracts these entries too.
    #[must_use]
    pub fn with_extra_entries_of(mut self, other: &Self) -> Self {
        let names = other.entry_names.difference(&self.entry_names);
        self.extra_entry_names = names.cloned().collect();
        self
    }

    /// Returns the names of entries that a listener extracts for other purposes and that no rule of
    /// this set uses. A request must not be rejected because an entry for another purpose is
    /// invalid.
    pub fn extra_entry_names(&self) -> impl Iterator<Item = &str> {
        self.extra_entry_names.iter().map(|name| &**name)
    }

    /// Returns true if a rule uses the entry `name`.
    #[must_use]
    pub fn uses_entry(&self, name: &str) -> bool {
        self.entry_names.contains(name)
    }

    /// Returns true if these `charges` of a request should be [settled](crate::Store::settle) when
    /// the request is completed or cancelled. A receipt is needed if one of the rules has
    /// concurrency slots, a queue, or a response-based cost.
    #[must_use]
    pub fn wants_receipt(&self, charges: &[Charge<'_>]) -> bool {
        let wants = |charge: &Charge<'_>| self.rule_of(charge.key).is_some_and(Rule::wants_receipt);
        self.wants_receipts && charges.iter().any(wants)
    }

    /// Returns the rule that a charge's key belongs to. Returns `None` if the rule no longer
    /// exists, or if the key belongs to a limit that was sent with a request.
    #[must_use]
    pub fn rule_of(&self, key: &[u8]) -> Option<&Rule> {
        let (scope, _) = key::split(key)?;
        self.by_scope.get(&scope).map(|at| &self.rules[*at])
    }

    /// Finds the rules that a request can bypass by leaving out an entry for which `is_optional`
    /// returns true. If another rule in enforce mode is known to apply to every such request, the
    /// bypassed rule is skipped. The rules are returned in the order of the file, each with one
    /// entry that a request can leave out to bypass the rule. The iterator is lazy, and each step
    /// can examine many rules.
    pub fn bypasses(&self, is_optional: impl Fn(&str) -> bool) -> impl Iterator<Item = Bypass<'_>> {
        bypass::bypasses(&self.rules, is_optional)
    }

    /// Returns the number of rules.
    #[must_use]
    pub fn len(&self) -> usize {
        self.rules.len()
    }

    /// Returns true if there are no rules.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.rules.is_empty()
    }

    /// Returns the rule that a charge's key belongs to, with the values of the key entries in the
    /// order of [`Rule::key`]. Returns `None` if the rule no longer exists, if its key entries have
    /// changed, or if the key belongs to a limit that was sent with a request.
    #[must_use]
    pub fn decode_key<'k>(&self, key: &'k [u8]) -> Option<(&Rule, Vec<&'k str>)> {
        let (_, rest) = key::split(key)?;
        let rule = self.rule_of(key)?;
        Some((rule, rule.decode_values(rest)?))
    }

    pub(super) fn allow_list(&self) -> &AllowList {
        &self.allow
    }

    fn find_due_charges(
        &self,
        request: &Request<'_>,
        now: Timestamp,
        scratch: &mut Scratch,
    ) -> Result<(), RequestError> {
        let Scratch { buffers, keys, due } = scratch;
        let mut found = std::mem::take(&mut buffers.rules);
        self.index.look_up(request.entries(), &mut found);
        buffers.work.expect(found.items.len());
        buffers.work.check()?;
        let applies = |at: &usize| self.rules[*at].applies(request, now, buffers);
        found.items.retain(applies);
        buffers.work.check()?;
        let found_rules = &found.items;
        if found_rules.len() > bounds::MAX_CHARGES {
            let problem = format!(
                "{} rules apply to this request, which exceeds the maximum of {}",
                found_rules.len(),
                bounds::MAX_CHARGES
            );
            return Err(RequestError::new("entries", problem));
        }
        for at in found_rules {
            let (rule, start) = (&self.rules[*at], keys.len());
            rule.append_key_of(request, keys)?;
            due.push(DueCharge {
                rule: *at,
                // Prefetch for all keys, so that the lookups below wait for memory only once.
                key_hash: self.overrides[*at].prefetch(&keys[start..], buffers),
                limits: ChosenLimits::Own,
                key: start..keys.len(),
                cost: rule.cost_of(request)?,
                has_headroom: rule.has_headroom(request, now, buffers),
            });
        }
        for due in due {
            let key = &keys[due.key.clone()];
            due.limits = self.choose_limits(due, request, key, now, buffers);
        }
        buffers.rules = found;
        Ok(())
    }
}

impl RuleSet {
    /// Returns the limits to which `request` is charged at `now` under the rule of `due`. `key` is
    /// its encoded key.
    #[inline]
    fn choose_limits(
        &self,
        due: &DueCharge,
        request: &Request<'_>,
        key: &[u8],
        now: Timestamp,
        buffers: &mut LookupBuffers,
    ) -> ChosenLimits {
        // The index of a due charge is the index of its rule.
        let (rule, overrides) = (&self.rules[due.rule], &self.overrides[due.rule]);
        let plan = rule.plan_of(request);
        let overridden = due.key_hash.and_then(|hash| {
            let base = plan.unwrap_or_else(|| rule.limits());
            overrides.limits(rule, base, key, hash, now, buffers)
        });
        let other = overridden.or_else(|| plan.map(Arc::clone));
        other.map_or(ChosenLimits::Own, ChosenLimits::Other)
    }
}

/// Maps the [scope](Rule::key_scope) of each rule to the rule's index. Rejects two rules with the
/// same name. Also rejects two rules whose names have the same hash, which is extremely rare.
fn by_scope(rules: &[Rule]) -> Result<HashMap<Scope, usize, RandomState>, RuleErrors> {
    let mut by_scope = HashMap::with_capacity_and_hasher(rules.len(), RandomState::default());
    let mut errors = Vec::new();
    for (at, rule) in rules.iter().enumerate() {
        let first = *by_scope.entry(rule.scope()).or_insert(at);
        if first == at {
            continue;
        }
        let (name, other) = (rule.name(), rules[first].name());
        let problem = if name == other {
            format!(
                "\"{name}\" is already the name of rules[{first}]; give every rule its own name"
            )
        } else {
            format!(
                "\"{name}\" and \"{other}\" of rules[{first}] have the same hash; rename one of the two rules"
            )
        };
        errors.push(RuleError::new(format!("rules[{at}].name"), problem));
    }
    if errors.is_empty() {
        Ok(by_scope)
    } else {
        Err(RuleErrors(errors))
    }
}

/// Rejects elastic rules that refer to themselves or to a missing rule.
fn check_parents(rules: &[Rule]) -> Result<(), RuleErrors> {
    let names: BTreeSet<&str> = rules.iter().map(Rule::name).collect();
    let errors: Vec<RuleError> = rules
        .iter()
        .enumerate()
        .filter_map(|(at, rule)| {
            let parent = rule.unused_share()?.rule();
            let problem = if parent == rule.name() {
                "must name a different rule".to_owned()
            } else if names.contains(parent) {
                return None;
            } else {
                format!("there is no rule \"{parent}\"")
            };
            let field = format!("rules[{at}].elastic.unused.rule");
            Some(RuleError::new(field, problem))
        })
        .collect();
    if errors.is_empty() {
        Ok(())
    } else {
        Err(RuleErrors(errors))
    }
}

fn entry_names(rules: &[Rule], allow: &[When]) -> BTreeSet<Box<str>> {
    let of_rules = rules.iter().flat_map(Rule::entry_names);
    let of_allow = allow.iter().flat_map(When::entry_names);
    of_rules.chain(of_allow).map(Box::from).collect()
}
