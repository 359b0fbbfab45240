//! Every rule, in the order of the file, and what a request is charged under them.

use std::{
    collections::{BTreeSet, HashMap},
    ops::Range,
    sync::Arc,
};

use super::{
    AllowList, Escape, Parents, Request, Rule, RuleError, RuleErrors, When, escape,
    index::{Index, Item},
    key::{self, Scope},
    postings::Finds,
    work::{self, Work},
};
use crate::{
    bounds,
    charge::{Charge, Cost, RequestError},
    limits::Limits,
    time::Timestamp,
};

/// Room for the keys of one request's charges, reused from request to request.
#[derive(Debug, Default)]
pub struct Scratch {
    room: Room,
    keys: Vec<u8>,
    due: Vec<Due>,
}

impl Scratch {
    /// How many patterns the values of the last request were held against: what it cost to find its
    /// rules. A pattern that reads through a whole value counts once more for each KiB of it.
    #[must_use]
    pub fn conditions_evaluated(&self) -> usize {
        self.room.work.done()
    }
}

/// Room for looking things up in an index, and how much was looked at.
#[derive(Debug, Default)]
pub(super) struct Room {
    pub(super) rules: Finds,
    pub(super) allowed: Finds,
    pub(super) work: Work,
}

/// A charge whose key is not yet at rest.
#[derive(Debug)]
struct Due {
    rule: usize,
    key: Range<usize>,
    cost: Cost,
    /// Whether the rule's limits stretch.
    has_room: bool,
}

/// Every rule, indexed by what it matches.
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
#[derive(Debug, Default)]
pub struct RuleSet {
    rules: Vec<Rule>,
    index: Index,
    by_scope: HashMap<Scope, usize>,
    allow: AllowList,
    entry_names: BTreeSet<Box<str>>,
    /// Whether a rule stretches by the unused share of another.
    has_parents: bool,
    wants_receipts: bool,
}

impl RuleSet {
    /// Indexes `rules`, which keep their order. What one of `allow` holds for passes them all uncharged.
    ///
    /// # Errors
    ///
    /// Every rule whose name another has already, as `rules[<n>].name`, counted from 0; every one that stretches by the
    /// unused share of no other, as `rules[<n>].elastic.unused.rule`; more than [`bounds::MAX_RULES`] rules; and rules of
    /// which a request could take over [`bounds::MAX_EVALUATIONS`] without being made for it.
    pub fn build(rules: Vec<Rule>, allow: Vec<When>) -> Result<Self, RuleErrors> {
        let most = bounds::MAX_RULES;
        if rules.len() > most {
            let problem = format!("{} rules are over the maximum of {most}", rules.len());
            return Err(RuleErrors(vec![RuleError::new("rules", problem)]));
        }
        let by_scope = by_scope(&rules)?;
        check_parents(&rules)?;
        let item = |rule| Item::new(Rule::conditions(rule), rule.weight()).needing(rule.key());
        let index = Index::new(rules.iter().map(item));
        let entry_names = entry_names(&rules, &allow);
        let allow = AllowList::new(allow);
        let heaviest = index.heaviest().with(allow.index().heaviest());
        work::check_heaviest(&heaviest).map_err(|error| RuleErrors(vec![error]))?;
        let has_parents = rules.iter().any(|rule| rule.unused().is_some());
        let wants_receipts = rules.iter().any(Rule::wants_receipt);
        Ok(Self {
            rules,
            index,
            by_scope,
            allow,
            entry_names,
            has_parents,
            wants_receipts,
        })
    }

    /// The same rules, as successors of `old`: a rule whose limits did not change keeps the very limits
    /// that it had, and one whose numbers changed takes over what its keys have spent.
    #[must_use]
    pub fn succeeding(mut self, old: &Self) -> Self {
        for rule in &mut self.rules {
            if let Some(before) = old.rule(rule.name()) {
                let limits = succeed(rule.limits(), before.limits());
                rule.replace_limits(limits);
            }
        }
        self
    }

    /// The charges that `request` is to pay at `now`, in the order of the rules: one for every rule that applies;
    /// none when it is on the allow list.
    ///
    /// # Errors
    ///
    /// Refuses a request that has an empty value, or one that makes too long a key, in an entry that an
    /// applicable rule counts by; whose cost entry is missing or no number from 1 to
    /// [`bounds::MAX_COUNT`]; to which over [`bounds::MAX_CHARGES`] rules apply; or whose values were made
    /// to match parts of so many patterns that it takes over [`bounds::MAX_EVALUATIONS`] to find its rules.
    pub fn charges<'a>(
        &'a self,
        request: &Request<'_>,
        now: Timestamp,
        scratch: &'a mut Scratch,
    ) -> Result<Vec<Charge<'a>>, RequestError> {
        let Scratch { room, keys, due } = scratch;
        room.work = Work::default();
        keys.clear();
        due.clear();
        let is_allowed = self.allow.covers(request, now, room);
        // What was found without all evaluations may be wrong: it is not used.
        room.work.check()?;
        if is_allowed {
            return Ok(Vec::new());
        }
        self.find_due(request, now, (room, keys, due))?;
        room.work.check()?;
        let charge = |due: &Due| {
            let limits = self.rules[due.rule].limits();
            let stretched = limits.stretched().filter(|_| due.has_room);
            Charge::new(
                &keys[due.key.clone()],
                stretched.unwrap_or(limits),
                due.cost,
            )
        };
        due.iter().map(charge).collect()
    }

    /// Whether `request` is on the allow list, and so is charged nothing whatever the rules say.
    #[must_use]
    pub fn is_allow_listed(
        &self,
        request: &Request<'_>,
        now: Timestamp,
        scratch: &mut Scratch,
    ) -> bool {
        self.allow.covers(request, now, &mut scratch.room)
    }

    /// What is to be looked at before `charges` are decided, because some of them stretch by the unused share of others;
    /// nearly always nothing.
    #[must_use]
    #[inline]
    pub fn parents<'a>(&'a self, charges: &[Charge<'a>]) -> Option<Parents<'a>> {
        self.has_parents
            .then(|| Parents::of(charges, |name| self.rule(name)?.unused()))
            .filter(|parents| !parents.charges.is_empty())
    }

    /// The rule of that name.
    #[must_use]
    pub fn rule(&self, name: &str) -> Option<&Rule> {
        let rule = self
            .by_scope
            .get(&key::scope(name))
            .map(|at| &self.rules[*at]);
        rule.filter(|rule| rule.name() == name)
    }

    /// The rules, in the order of the file.
    pub fn iter(&self) -> std::slice::Iter<'_, Rule> {
        self.rules.iter()
    }

    /// The name of every entry that a rule looks at: what a door has to find out about a request.
    pub fn entry_names(&self) -> impl Iterator<Item = &str> {
        self.entry_names.iter().map(|name| &**name)
    }

    /// Whether a rule looks at the entry `name`.
    #[must_use]
    pub fn looks_at(&self, name: &str) -> bool {
        self.entry_names.contains(name)
    }

    /// Whether the charges of a request, which are these, should be [settled](crate::Store::settle) when it has ended or is
    /// given up: places that are held, queues that are waited in, and what is charged by the answer.
    #[must_use]
    pub fn wants_receipt(&self, charges: &[Charge<'_>]) -> bool {
        let wants = |charge: &Charge<'_>| self.rule_of(charge.key).is_some_and(Rule::wants_receipt);
        self.wants_receipts && charges.iter().any(wants)
    }

    /// The rule to which the bytes of a charge's key belong; `None` for the key of a limit that came with a request, and of a
    /// rule that is no more.
    #[must_use]
    pub fn rule_of(&self, key: &[u8]) -> Option<&Rule> {
        let (scope, _) = key::split(key)?;
        self.by_scope.get(&scope).map(|at| &self.rules[*at])
    }

    /// The rules from which a request escapes by leaving out an entry that `is_optional`, because no other enforced rule surely applies
    /// to what is left; in their order, each with one such entry of its key. To find the next one may mean to look at many rules.
    pub fn escapes(&self, is_optional: impl Fn(&str) -> bool) -> impl Iterator<Item = Escape<'_>> {
        escape::escapes(&self.rules, is_optional)
    }

    /// How many rules there are.
    #[must_use]
    pub fn len(&self) -> usize {
        self.rules.len()
    }

    /// Whether there are no rules.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.rules.is_empty()
    }

    /// The rule to which the bytes of a charge's key belong, and the values of its key entries, in the
    /// order of [`Rule::key`]. `None` for the key of a limit that came with a request, of a rule that is
    /// no more, and of a rule that has been given another key since.
    #[must_use]
    pub fn decode_key<'k>(&self, key: &'k [u8]) -> Option<(&Rule, Vec<&'k str>)> {
        let (_, rest) = key::split(key)?;
        let rule = self.rule_of(key)?;
        Some((rule, rule.decode_values(rest)?))
    }

    fn find_due(
        &self,
        request: &Request<'_>,
        now: Timestamp,
        (room, keys, due): (&mut Room, &mut Vec<u8>, &mut Vec<Due>),
    ) -> Result<(), RequestError> {
        let mut found = std::mem::take(&mut room.rules);
        self.index.look_up(request, &mut found);
        room.work.expect(found.items.len());
        room.work.check()?;
        let applies = |at: &usize| self.rules[*at].applies(request, now, room);
        found.items.retain(applies);
        room.work.check()?;
        let found_rules = &found.items;
        if found_rules.len() > bounds::MAX_CHARGES {
            let problem = format!(
                "{} rules apply to this request, over the maximum of {}",
                found_rules.len(),
                bounds::MAX_CHARGES
            );
            return Err(RequestError::new("entries", problem));
        }
        for at in found_rules {
            let (rule, start) = (&self.rules[*at], keys.len());
            rule.append_key_of(request, keys)?;
            due.push(Due {
                rule: *at,
                key: start..keys.len(),
                cost: rule.cost_of(request)?,
                has_room: rule.has_room(request, now, room),
            });
        }
        room.rules = found;
        Ok(())
    }
}

/// Finds rules by scope; refuses two with one name, or, once in an age, with one scope.
fn by_scope(rules: &[Rule]) -> Result<HashMap<Scope, usize>, RuleErrors> {
    let mut by_scope = HashMap::with_capacity(rules.len());
    let mut errors = Vec::new();
    for (at, rule) in rules.iter().enumerate() {
        let first = *by_scope.entry(rule.scope()).or_insert(at);
        if first == at {
            continue;
        }
        let (name, other) = (rule.name(), rules[first].name());
        let problem = if name == other {
            format!("\"{name}\" is the name of rules[{first}] already; give every rule its own")
        } else {
            format!(
                "\"{name}\" and \"{other}\" of rules[{first}] have the same hash; change one of the two"
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

/// Refuses rules that stretch by the unused share of themselves, or of nobody.
fn check_parents(rules: &[Rule]) -> Result<(), RuleErrors> {
    let names: BTreeSet<&str> = rules.iter().map(Rule::name).collect();
    let errors: Vec<RuleError> = rules
        .iter()
        .enumerate()
        .filter_map(|(at, rule)| {
            let parent = rule.unused()?.rule();
            let problem = if parent == rule.name() {
                "must be another rule than this one".to_owned()
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

/// The limits to use in the place of `new`, given that `old` were in force until now.
fn succeed(new: &Arc<Limits>, old: &Arc<Limits>) -> Arc<Limits> {
    let same_manner = new.shadow() == old.shadow()
        && new.on_failure() == old.on_failure()
        && new.stretch() == old.stretch();
    match (new.iter().eq(old.iter()), same_manner) {
        (true, true) => Arc::clone(old),
        (true, false) => {
            let limits = Limits::clone(old).in_shadow(new.shadow());
            let limits = limits.failing(new.on_failure());
            // What the new limits could be stretched by, so can the old ones, which are equal.
            Arc::new(limits.clone().stretching(new.stretch()).unwrap_or(limits))
        }
        (false, _) => Arc::new(Limits::clone(new).succeeding(old)),
    }
}

fn entry_names(rules: &[Rule], allow: &[When]) -> BTreeSet<Box<str>> {
    let of_rules = rules.iter().flat_map(Rule::entry_names);
    let of_allow = allow.iter().flat_map(When::entry_names);
    of_rules.chain(of_allow).map(Box::from).collect()
}
