//! Decides a log's requests with one rule set, and counts the denials.

use std::collections::HashMap;

use tidegate::rate_limiter::charge_excess;
use tidegate::rate_limiter::stretch;
use tidegate_config::{Config, KeyPrivacy};
use tidegate_core::{
    Charge, Cost, Decision, Effect, MemoryStore, Outcome, Receipt, Request, RequestError,
    RetryAfter, Rule, RuleSet, Scratch, Settlement, Span, Timestamp,
};

use crate::{
    backlog::{Backlog, TriedRate, tried_rates},
    busiest_window::{BusiestWindow, windows},
    request::EntryExtractor,
    stream::LogRequest,
    timeline::Timeline,
};

/// The longest time that a queue may delay a request, as in the reverse proxy.
const LONGEST_WAIT: Span = Span::from_secs(30);

/// The maximum number of rejected requests that are reported with the reason.
const SHOWN_REFUSALS: usize = 5;

/// A rules file to be simulated.
#[derive(Debug)]
pub struct RulesUnderTest {
    pub(crate) name: String,
    pub(crate) config: Config,
    pub(crate) extractor: EntryExtractor,
}

impl RulesUnderTest {
    /// Creates the rules under test from a parsed rules file. `name` is the file's name.
    #[must_use]
    pub fn new(name: impl Into<String>, config: Config) -> Self {
        Self {
            name: name.into(),
            extractor: EntryExtractor::new(&config.rules, &config.identity),
            config,
        }
    }

    /// Returns the file's name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns how keys must be displayed according to the rules file.
    #[must_use]
    pub fn key_privacy(&self) -> &KeyPrivacy {
        &self.config.key_privacy
    }

    pub(crate) fn rules(&self) -> &RuleSet {
        &self.config.rules
    }

    /// Returns the names of the response entries that the rules use.
    pub(crate) fn response_names(&self) -> impl Iterator<Item = &str> {
        self.rules()
            .iter()
            .flat_map(|rule| rule.response_cost().entry_names())
    }
}

/// Returns the values of the key entries in a rule's encoded key.
pub(crate) fn key_values(rules: &RuleSet, key: &[u8]) -> Vec<String> {
    let decoded = rules.decode_key(key);
    let values = decoded.map(|(_, values)| values).unwrap_or_default();
    values.into_iter().map(str::to_owned).collect()
}

/// The counts of one key of a rule.
#[derive(Clone, Debug, Default)]
pub(crate) struct KeyCounts {
    pub(crate) denied: u64,
    pub(crate) first_denied: Timestamp,
    pub(crate) last_denied: Timestamp,
    /// The busiest window for each window length.
    pub(crate) windows: Vec<BusiestWindow>,
    /// The time of the last request.
    pub(crate) last_asked: Timestamp,
    /// The backlog after the last request, at each tried rate.
    pub(crate) backlogs: Vec<Backlog>,
}

/// The possible precisions of log times that are coarser than the server's clock: seconds and
/// milliseconds.
pub(crate) const PRECISIONS: [Span; 2] = [Span::from_secs(1), Span::from_millis(1)];

/// The counts of one rule.
#[derive(Debug, Default)]
pub(crate) struct RuleCounts {
    /// The number of requests to which the rule applies.
    pub(crate) requests: u64,
    /// The number of requests that the rule's limits deny (in shadow mode, would deny).
    pub(crate) denied: u64,
    /// For each of [`PRECISIONS`], the number of these requests that would have been admitted if
    /// they had arrived later, by at most the precision.
    pub(crate) denied_within: [u64; PRECISIONS.len()],
    /// The number of requests that a queue delays.
    pub(crate) delayed: u64,
    /// The longest delay of a request in a queue.
    pub(crate) longest_delay: Span,
    /// The number of requests that each limit denies.
    pub(crate) denied_by: Vec<u64>,
    pub(crate) keys: HashMap<Box<[u8]>, KeyCounts>,
    pub(crate) timeline: Timeline,
    /// The window lengths. For each length, each key's busiest window is recorded.
    pub(crate) windows: Vec<Span>,
    /// The rates for which a burst is suggested. For each rate, each key's largest backlog is
    /// recorded.
    pub(crate) tried_rates: Vec<TriedRate>,
}

/// One rule set and its state.
#[derive(Debug)]
pub(crate) struct RuleSetReplay<'p> {
    pub(crate) plan: &'p RulesUnderTest,
    /// The rules in the rules file, or the same rules with other limits.
    pub(crate) rule_set: &'p RuleSet,
    pub(crate) store: MemoryStore,
    scratch: Scratch,
    outcomes: Vec<Outcome>,
    by_name: HashMap<&'p str, usize>,
    pub(crate) rules: Vec<RuleCounts>,
    /// For each rule, whether it is excluded from the simulation.
    pub(crate) is_excluded: Vec<bool>,
    /// For each entry that the rules use, whether any request had it.
    pub(crate) has_seen: Vec<bool>,
    pub(crate) seen_response: Vec<Box<str>>,
    pub(crate) decided: u64,
    pub(crate) denied: u64,
    pub(crate) timeline: Timeline,
    /// The number of requests that were denied because the store was full.
    pub(crate) full: u64,
    /// The number of requests that the proxy would reject with status 400.
    pub(crate) refused: u64,
    /// The reasons for the first of these rejections.
    pub(crate) refusals: Vec<String>,
    /// Whether limits are suggested.
    pub(crate) is_suggesting: bool,
}

/// The decision for one request.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct ReplayDecision {
    pub(crate) is_denied: bool,
    /// The enforced rules that deny the request, and their keys.
    pub(crate) denied_by: Vec<(usize, Box<[u8]>)>,
}

impl<'p> RuleSetReplay<'p> {
    pub(crate) fn new(plan: &'p RulesUnderTest) -> Self {
        Self::with_rules(plan, plan.rules())
    }

    /// Creates a replay that uses `rules`. `rules` are the rules in `plan` with other limits.
    pub(crate) fn with_rules(plan: &'p RulesUnderTest, rules: &'p RuleSet) -> Self {
        let counts = |rule: &Rule| RuleCounts {
            denied_by: vec![0; rule.limits().len()],
            ..RuleCounts::default()
        };
        let names = rules.iter().enumerate();
        Self {
            plan,
            rule_set: rules,
            store: MemoryStore::new(plan.config.memory),
            scratch: Scratch::default(),
            outcomes: Vec::new(),
            by_name: names.map(|(at, rule)| (rule.name(), at)).collect(),
            rules: rules.iter().map(counts).collect(),
            // Rules with concurrency limits are excluded, because a log does not contain enough
            // information about which requests were in flight at the same time.
            is_excluded: rules.iter().map(Rule::has_slots).collect(),
            has_seen: vec![false; plan.extractor.names().len()],
            seen_response: Vec::new(),
            decided: 0,
            denied: 0,
            timeline: Timeline::default(),
            full: 0,
            refused: 0,
            refusals: Vec::new(),
            is_suggesting: false,
        }
    }

    /// Starts recording the keys' busiest windows and backlogs, for suggestions.
    pub(crate) fn record_suggestions(&mut self) {
        self.is_suggesting = true;
        for (rule, counts) in self.plan.rules().iter().zip(&mut self.rules) {
            if !rule.has_slots() {
                counts.windows = windows(rule.limits());
                // A cost that depends on the response is partly refunded later, so the computed
                // backlog would be too high.
                if rule.response_cost().is_independent_of_response() {
                    counts.tried_rates = tried_rates(rule.limits());
                }
            }
        }
    }

    /// Decides `request` at `now`. `plan` is the index of the rule set, and selects the entries
    /// that were extracted for it. Returns `None` if the proxy would reject the request.
    pub(crate) fn decide(
        &mut self,
        request: &LogRequest,
        plan: usize,
        now: Timestamp,
    ) -> Option<ReplayDecision> {
        let values = match &request.entries[plan] {
            Ok(values) => values,
            Err(reason) => {
                self.refuse(reason.clone());
                return None;
            }
        };
        let names = self.plan.extractor.names();
        let mut entries = Vec::with_capacity(values.len());
        for (at, value) in values {
            self.has_seen[*at] = true;
            entries.push((&*names[*at], &**value));
        }
        for (name, _) in &request.response {
            if !self.seen_response.contains(name) {
                self.seen_response.push(name.clone());
            }
        }
        if self.decided == 0 {
            let of_rules = self.rules.iter_mut().map(|rule| &mut rule.timeline);
            of_rules
                .chain([&mut self.timeline])
                .for_each(|timeline| timeline.start(now));
        }
        let decided = Request::new(&entries, request.cost)
            .and_then(|described| self.charge(&described, request, now));
        match decided {
            Ok(decided) => {
                self.decided += 1;
                self.denied += u64::from(decided.is_denied);
                self.timeline.count(now, decided.is_denied);
                Some(decided)
            }
            Err(error) => {
                self.refuse(error.to_string());
                None
            }
        }
    }

    fn refuse(&mut self, reason: String) {
        self.refused += 1;
        if self.refusals.len() < SHOWN_REFUSALS && !self.refusals.contains(&reason) {
            self.refusals.push(reason);
        }
    }

    /// Charges a request in the same way as the reverse proxy.
    fn charge(
        &mut self,
        described: &Request<'_>,
        request: &LogRequest,
        now: Timestamp,
    ) -> Result<ReplayDecision, RequestError> {
        let rules = self.rule_set;
        let mut charges = rules.charges(described, now, &mut self.scratch)?;
        let index_of = |charge: &Charge<'_>| {
            let name = charge.limits.name().unwrap_or_default();
            self.by_name.get(name).copied()
        };
        charges.retain(|charge| index_of(charge).is_some_and(|at| !self.is_excluded[at]));
        if charges.is_empty() {
            return Ok(ReplayDecision::default());
        }
        for charge in &mut charges {
            charge.longest_wait = Some(LONGEST_WAIT);
        }
        // The memory store never waits.
        let pending = stretch(&self.store, rules, &mut charges, now);
        debug_assert!(pending.is_none(), "the memory store never waits");
        let decision = if rules.wants_receipt(&charges) {
            let (decision, receipt) = self.store.reserve(&charges, now, &mut self.outcomes);
            settle(&self.store, rules, &charges, receipt, request, now);
            decision
        } else {
            self.store
                .check(&charges, now, Effect::Charge, &mut self.outcomes)
        };
        let mut decided = ReplayDecision {
            is_denied: decision != Decision::Admitted,
            denied_by: Vec::new(),
        };
        if matches!(decision, Decision::Full { .. }) {
            self.full += 1;
        }
        let mut outcomes = self.outcomes.as_slice();
        for charge in &charges {
            let Some(at) = index_of(charge) else { continue };
            let length = charge.limits.len().min(outcomes.len());
            let (own, others) = outcomes.split_at(length);
            outcomes = others;
            let denies = self.rules[at].count(charge, own, now);
            if denies && !charge.limits.is_shadow() {
                decided.denied_by.push((at, charge.key.into()));
            }
        }
        Ok(decided)
    }
}

/// Refunds or charges the difference between the charged cost and the final cost, which depends on
/// the response. The response is assumed to arrive immediately.
fn settle(
    store: &MemoryStore,
    rules: &RuleSet,
    charges: &[Charge<'_>],
    receipt: Receipt,
    request: &LogRequest,
    now: Timestamp,
) {
    let is_final = |charge: &Charge<'_>| {
        rules
            .rule_of(charge.key)
            .is_none_or(|rule| rule.response_cost().is_independent_of_response())
    };
    if receipt.is_empty() || charges.iter().all(is_final) {
        return;
    }
    let response = request.response.iter();
    let entries: Vec<(&str, &str)> = response.map(|(name, value)| (&**name, &**value)).collect();
    let Ok(response) = Request::new(&entries, Cost::ONE) else {
        return;
    };
    let is_known = |name: &str| response.entry(name).is_some();
    let final_charge = |charge: &Charge<'_>| {
        let Some(rule) = rules.rule_of(charge.key) else {
            return charge.cost.units();
        };
        rule.response_cost()
            .final_charge_if_aborted(charge.cost, &response, is_known)
    };
    let final_charges: Vec<u64> = charges.iter().map(final_charge).collect();
    let settlement = |(charge, final_charge): (&Charge<'_>, &u64)| Settlement {
        unused: charge.cost.units().saturating_sub(*final_charge),
    };
    let settlements: Vec<Settlement> = charges.iter().zip(&final_charges).map(settlement).collect();
    store.settle(charges, receipt, &settlements, now);
    for (charge, final_charge) in charges.iter().zip(&final_charges) {
        if let Ok(cost) = Cost::new(final_charge.saturating_sub(charge.cost.units())) {
            let is_ready = charge_excess(store, Charge { cost, ..*charge }, now).is_ready();
            debug_assert!(is_ready, "the memory store never waits");
        }
    }
}

impl RuleCounts {
    /// Counts a charge, given its limits' outcomes. Returns whether a limit denies the charge.
    fn count(&mut self, charge: &Charge<'_>, outcomes: &[Outcome], now: Timestamp) -> bool {
        self.requests += 1;
        let is_denied = outcomes.iter().any(|outcome| !outcome.allowed);
        for (denied, outcome) in self.denied_by.iter_mut().zip(outcomes) {
            *denied += u64::from(!outcome.allowed);
        }
        let delay = outcomes
            .iter()
            .map(|outcome| outcome.delay)
            .max()
            .unwrap_or(Span::ZERO);
        if delay > Span::ZERO {
            self.delayed += 1;
            self.longest_delay = self.longest_delay.max(delay);
        }
        // `HashMap::entry` would copy the key of every request.
        let key = match self.keys.get_mut(charge.key) {
            Some(key) => key,
            None => self.keys.entry(charge.key.into()).or_default(),
        };
        if key.windows.is_empty() {
            key.windows = self
                .windows
                .iter()
                .map(|_| BusiestWindow::default())
                .collect();
        }
        for (busiest, window) in key.windows.iter_mut().zip(&self.windows) {
            busiest.count(now, *window, charge.cost.units());
        }
        if !self.tried_rates.is_empty() {
            let elapsed = now.since(key.last_asked);
            key.last_asked = now;
            key.backlogs
                .resize_with(self.tried_rates.len(), Backlog::default);
            for (backlog, rate) in key.backlogs.iter_mut().zip(&self.tried_rates) {
                backlog.count(rate, elapsed, charge.cost.units());
            }
        }
        self.timeline.count(now, is_denied);
        if is_denied {
            self.denied += 1;
            let waits = outcomes.iter().map(|outcome| outcome.retry_after);
            let wait = waits.max().and_then(RetryAfter::span);
            for (within, precision) in self.denied_within.iter_mut().zip(PRECISIONS) {
                *within += u64::from(wait.is_some_and(|wait| wait <= precision));
            }
            if key.denied == 0 {
                key.first_denied = now;
            }
            key.denied += 1;
            key.last_denied = now;
        }
        is_denied
    }
}
