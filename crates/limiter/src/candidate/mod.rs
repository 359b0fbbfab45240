//! Candidate rules: a second rule set, which is evaluated on the same requests as the active rules.
//! The candidate rules never deny a request.
//!
//! ```text
//! request ─▶ active rules ─▶ response
//!                 └─▶ candidate rules ─▶ comparison, counters
//! ```
//!
//! The candidate rules have separate counters: a second memory store or, with Redis, keys with a
//! different prefix. With the memory store, the candidate decision is made before the response is
//! sent, and takes as long as any other decision in memory. With Redis, the response does not wait
//! for the candidate decision. A background task makes the candidate decision over the store's
//! connections, and the number of concurrent tasks is bounded.

mod changes;

use std::{
    cell::RefCell,
    collections::HashMap,
    path::{Path, PathBuf},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering},
    },
};

use tidegate::DecidedRequest;
use tidegate_core::{
    Charge, Cost, Decision, Effect, Limits, MemoryBounds, MemoryStore, Mode, Outcome, Reason,
    Request, RequestError, Rule, RuleSet, Scratch, Timestamp, Verdict,
};
use tidegate_net::prometheus::{Metric, Page};
use tidegate_redis::RedisStore;
use tokio::runtime::Handle;

use self::changes::ChangedKeys;
pub use self::changes::{ChangedKey, ChangedKeyList};
use crate::{KeyMask, backend::Backend, metrics::MAX_RULE_LABELS};

/// The maximum number of candidate decisions waiting for Redis at the same time.
const MAX_IN_FLIGHT: usize = 1_000;

/// The prefix of the candidate's keys in Redis, after the store's own prefix. The prefix begins
/// with `#`, like all keys in Redis that do not belong to an active rule.
const KEY_PREFIX: &str = "#candidate:";

const REQUESTS: Metric<1> = Metric::counter(
    "tidegate_candidate_requests_total",
    ["change"],
    "Requests by how the candidate rules would change their decision. Requests counted as not_compared or lost were not compared.",
);
const DENIED: Metric<1> = Metric::counter(
    "tidegate_candidate_denied_total",
    ["rule"],
    "Requests that the limits of a candidate rule would have denied.",
);

/// The candidate rules, as read from their file.
#[derive(Debug)]
pub struct CandidateRules {
    /// The file.
    pub file: PathBuf,
    /// The rules.
    pub rules: RuleSet,
    /// The time until which the rules are evaluated; `None` means without an end.
    pub until: Option<Timestamp>,
}

/// The candidate rules, and the comparison of their decisions with the actual decisions.
#[derive(Debug)]
pub struct Candidate {
    file: PathBuf,
    rules: RuleSet,
    until: Option<Timestamp>,
    began: Timestamp,
    has_ended: AtomicBool,
    store: CandidateStore,
    /// The index of each rule in `counts`.
    by_name: HashMap<Box<str>, usize>,
    counts: Box<[CandidateRuleCounts]>,
    compared: AtomicU64,
    denied: AtomicU64,
    not_compared: AtomicU64,
    rejected: AtomicU64,
    lost: AtomicU64,
    /// The requests that get a different decision under the candidate rules.
    changes: Mutex<Changes>,
}

/// The counters of the candidate rules.
#[derive(Debug)]
enum CandidateStore {
    Memory(Arc<MemoryStore>),
    Redis {
        store: RedisStore,
        /// The runtime of the Redis connections, on which the candidate decisions are made.
        runtime: Handle,
        in_flight: Arc<AtomicUsize>,
    },
}

/// Counts a candidate decision waiting for Redis, until this guard is dropped.
#[derive(Debug)]
struct InFlightPermit(Arc<AtomicUsize>);

impl Drop for InFlightPermit {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

#[derive(Debug, Default)]
struct CandidateRuleCounts {
    requests: AtomicU64,
    denied: AtomicU64,
    /// Whether the rule is not evaluated, because its decisions depend on responses.
    is_excluded: bool,
}

#[derive(Debug, Default)]
struct Changes {
    newly_denied: ChangedKeys,
    no_longer_denied: ChangedKeys,
}

/// A rule and the values of one of its keys.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct CandidateKey {
    rule: Box<str>,
    key: Vec<String>,
}

/// The decision on a request under the active rules.
#[derive(Debug)]
enum ActiveDecision {
    Admitted,
    /// The rule that denied the request, and its key.
    Denied(CandidateKey),
}

/// The decision of the candidate rules on a request.
#[derive(Debug, Default)]
struct CandidateDecision {
    is_denied: bool,
    /// The rules that deny the request, and their keys.
    denied_by: Vec<CandidateKey>,
}

/// The results of the comparison.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CandidateReport {
    /// The file with the candidate rules.
    pub file: PathBuf,
    /// The time at which the comparison started.
    pub began: Timestamp,
    /// The time until which the rules are evaluated; `None` means without an end.
    pub until: Option<Timestamp>,
    /// The number of requests for which the decisions of both rule sets were compared.
    pub compared: u64,
    /// The number of these requests that the candidate rules would have denied.
    pub denied: u64,
    /// The number of admitted requests that the candidate rules would have denied.
    pub newly_denied: u64,
    /// The number of denied requests that the candidate rules would have admitted.
    pub no_longer_denied: u64,
    /// The number of denied requests that were not compared, because a block, the fallback policy,
    /// or a rule of a kind that is not evaluated (see [`CandidateRule::is_excluded`]) denied them.
    pub not_compared: u64,
    /// The number of requests that the candidate rules reject as invalid, for example because their
    /// cost entry is missing.
    pub rejected: u64,
    /// The number of requests without a candidate decision, because Redis failed or too many
    /// candidate decisions were waiting for Redis.
    pub lost: u64,
    /// The rules, in the order of the file.
    pub rules: Vec<CandidateRule>,
    /// The keys with the most newly denied requests.
    pub newly: ChangedKeyList,
    /// The keys with the most requests that an active rule denied and the candidate rules would
    /// have admitted.
    pub no_longer: ChangedKeyList,
}

/// A candidate rule.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CandidateRule {
    /// The name.
    pub rule: String,
    /// The mode of the rule in the file.
    pub mode: Mode,
    /// Whether the rule is not evaluated, because it has concurrency slots, a queue, or a cost that
    /// depends on the response.
    pub is_excluded: bool,
    /// The number of requests to which the rule applies.
    pub requests: u64,
    /// The number of requests that the rule's limits deny (in shadow mode, would deny).
    pub denied: u64,
}

impl Candidate {
    /// Creates the candidate of a limiter whose backend is `backend`. If there is an `old`
    /// candidate, its counters are kept, but the comparison restarts.
    pub(crate) fn new(
        read: CandidateRules,
        backend: &Backend,
        bounds: MemoryBounds,
        old: Option<&Self>,
        now: Timestamp,
    ) -> Self {
        let CandidateRules { file, rules, until } = read;
        let rules = match old {
            Some(old) => rules.inheriting_from(&old.rules),
            None => rules,
        };
        let store = match (backend, old.map(|old| &old.store)) {
            (Backend::Redis(redis), _) => CandidateStore::Redis {
                store: redis.separate_store(KEY_PREFIX),
                runtime: redis.runtime().clone(),
                in_flight: Arc::default(),
            },
            (Backend::Memory(_), Some(CandidateStore::Memory(store))) => {
                CandidateStore::Memory(Arc::clone(store))
            }
            (Backend::Memory(_), _) => CandidateStore::Memory(Arc::new(MemoryStore::new(bounds))),
        };
        let counts = |rule: &Rule| CandidateRuleCounts {
            is_excluded: rule.wants_receipt(),
            ..CandidateRuleCounts::default()
        };
        let names = rules.iter().map(|rule| Box::from(rule.name()));
        let candidate = Self {
            file,
            until,
            began: now,
            has_ended: AtomicBool::new(false),
            store,
            by_name: names.enumerate().map(|(at, name)| (name, at)).collect(),
            counts: rules.iter().map(counts).collect(),
            rules,
            compared: AtomicU64::new(0),
            denied: AtomicU64::new(0),
            not_compared: AtomicU64::new(0),
            rejected: AtomicU64::new(0),
            lost: AtomicU64::new(0),
            changes: Mutex::default(),
        };
        // If the time is already over, the log says so immediately.
        candidate.has_ended(now);
        candidate
    }

    /// Returns the file with the candidate rules.
    #[must_use]
    pub fn file(&self) -> &Path {
        &self.file
    }

    /// Returns the candidate rules.
    #[must_use]
    pub fn rules(&self) -> &RuleSet {
        &self.rules
    }

    /// Evaluates the candidate rules on a request that received `verdict`, and compares the two
    /// decisions.
    #[cold]
    pub(crate) fn observe(self: &Arc<Self>, decided: DecidedRequest<'_>, verdict: &Verdict<'_>) {
        if self.has_ended(decided.now) {
            return;
        }
        let Some(active) = ActiveDecision::new(decided, verdict) else {
            count(&self.not_compared);
            return;
        };
        match &self.store {
            CandidateStore::Memory(store) => {
                let decision = self.decide_in_memory(store, decided);
                self.compare(active, decision, decided.now);
            }
            CandidateStore::Redis {
                in_flight, runtime, ..
            } => {
                if in_flight.fetch_add(1, Ordering::Relaxed) >= MAX_IN_FLIGHT {
                    in_flight.fetch_sub(1, Ordering::Relaxed);
                    count(&self.lost);
                    return;
                }
                let request = CandidateRequest::new(decided, &self.rules);
                let permit = InFlightPermit(Arc::clone(in_flight));
                let candidate = Arc::clone(self);
                runtime.spawn(async move {
                    candidate.decide_in_redis(active, request).await;
                    drop(permit);
                });
            }
        }
    }

    /// Returns whether the candidate rules are no longer evaluated. Logs once that the evaluation
    /// has ended.
    fn has_ended(&self, now: Timestamp) -> bool {
        let has_ended = self.until.is_some_and(|until| now >= until);
        if has_ended && !self.has_ended.swap(true, Ordering::Relaxed) {
            tracing::info!(
                file = %self.file.display(),
                "the candidate rules are not evaluated, because the time in `candidate.until` has passed"
            );
        }
        has_ended
    }

    fn decide_in_memory(
        &self,
        store: &MemoryStore,
        decided: DecidedRequest<'_>,
    ) -> Result<CandidateDecision, RequestError> {
        thread_local! {
            static BUFFERS: RefCell<(Scratch, Vec<Outcome>)> = RefCell::default();
        }
        BUFFERS.with_borrow_mut(|(scratch, outcomes)| {
            let now = decided.now;
            let mut charges = self.charges(decided.request, now, scratch)?;
            if charges.is_empty() {
                return Ok(CandidateDecision::default());
            }
            if let Some(parents) = self.rules.parents(&charges) {
                store.check(&parents.charges, now, Effect::Look, outcomes);
                parents.stretch(&mut charges, outcomes);
            }
            let decision = store.check(&charges, now, Effect::Charge, outcomes);
            Ok(self.count_charges(&charges, &decision, outcomes))
        })
    }

    async fn decide_in_redis(&self, active: ActiveDecision, request: CandidateRequest) {
        let CandidateStore::Redis { store, .. } = &self.store else {
            return;
        };
        let now = request.now;
        let decision = self.charge_in_redis(store, &request).await;
        match decision {
            Some(decision) => self.compare(active, decision, now),
            None => count(&self.lost),
        }
    }

    /// Charges `request` in Redis under the candidate rules. Returns `None` if Redis failed.
    async fn charge_in_redis(
        &self,
        store: &RedisStore,
        request: &CandidateRequest,
    ) -> Option<Result<CandidateDecision, RequestError>> {
        let (mut scratch, mut outcomes) = (Scratch::default(), Vec::new());
        let entries: Vec<(&str, &str)> = request.entries();
        let charges = Request::new(&entries, request.cost)
            .and_then(|described| self.charges(&described, request.now, &mut scratch));
        let mut charges = match charges {
            Ok(charges) if charges.is_empty() => return Some(Ok(CandidateDecision::default())),
            Ok(charges) => charges,
            Err(error) => return Some(Err(error)),
        };
        if let Some(parents) = self.rules.parents(&charges) {
            let look = store.check(&parents.charges, Effect::Look, &mut outcomes);
            look.await.ok()?;
            parents.stretch(&mut charges, &outcomes);
        }
        let decision = store.check(&charges, Effect::Charge, &mut outcomes);
        let decision = decision.await.ok()?;
        Some(Ok(self.count_charges(&charges, &decision, &outcomes)))
    }

    /// Returns the charges of the rules that are evaluated. A rule with `is_excluded` is not
    /// evaluated.
    fn charges<'a>(
        &'a self,
        request: &Request<'_>,
        now: Timestamp,
        scratch: &'a mut Scratch,
    ) -> Result<Vec<Charge<'a>>, RequestError> {
        let mut charges = self.rules.charges(request, now, scratch)?;
        charges.retain(|charge| {
            self.counts_of(charge.limits)
                .is_some_and(|counts| !counts.is_excluded)
        });
        Ok(charges)
    }

    fn counts_of(&self, limits: &Limits) -> Option<&CandidateRuleCounts> {
        let at = self.by_name.get(limits.name()?)?;
        self.counts.get(*at)
    }

    /// Counts a decision on `charges` by rule.
    fn count_charges(
        &self,
        charges: &[Charge<'_>],
        decision: &Decision,
        outcomes: &[Outcome],
    ) -> CandidateDecision {
        let mut decided = CandidateDecision {
            is_denied: *decision != Decision::Admitted,
            denied_by: Vec::new(),
        };
        let mut rest = outcomes;
        for charge in charges {
            let (own, others) = rest.split_at(charge.limits.len().min(rest.len()));
            rest = others;
            let Some(counts) = self.counts_of(charge.limits) else {
                continue;
            };
            count(&counts.requests);
            if own.iter().all(|outcome| outcome.allowed) {
                continue;
            }
            count(&counts.denied);
            if decided.is_denied
                && !charge.limits.is_shadow()
                && let Some((rule, values)) = self.rules.decode_key(charge.key)
            {
                decided.denied_by.push(CandidateKey {
                    rule: rule.name().into(),
                    key: values.into_iter().map(str::to_owned).collect(),
                });
            }
        }
        decided
    }

    fn compare(
        &self,
        active: ActiveDecision,
        decision: Result<CandidateDecision, RequestError>,
        now: Timestamp,
    ) {
        let Ok(decision) = decision else {
            count(&self.rejected);
            return;
        };
        count(&self.compared);
        if decision.is_denied {
            count(&self.denied);
        }
        match active {
            ActiveDecision::Admitted if decision.is_denied => {
                self.changes().newly_denied.count(decision.denied_by, now);
            }
            ActiveDecision::Denied(key) if !decision.is_denied => {
                self.changes().no_longer_denied.count([key], now);
            }
            ActiveDecision::Admitted | ActiveDecision::Denied(_) => {}
        }
    }

    /// Returns the results of the comparison so far. `mask` determines how keys are shown, and
    /// `most` is the maximum number of keys in each list.
    #[must_use]
    pub fn report(&self, mask: &KeyMask, most: usize) -> CandidateReport {
        let rules = self.rules.iter().zip(&self.counts);
        let rule = |(rule, counts): (&Rule, &CandidateRuleCounts)| CandidateRule {
            rule: rule.name().to_owned(),
            mode: rule.mode(),
            is_excluded: counts.is_excluded,
            requests: counts.requests.load(Ordering::Relaxed),
            denied: counts.denied.load(Ordering::Relaxed),
        };
        let changes = self.changes();
        let newly_denied = changes.newly_denied.requests();
        let no_longer_denied = changes.no_longer_denied.requests();
        let newly = changes.newly_denied.top(most);
        let no_longer = changes.no_longer_denied.top(most);
        // Requests wait for this lock, so release the lock before sorting and hashing the keys.
        drop(changes);
        CandidateReport {
            file: self.file.clone(),
            began: self.began,
            until: self.until,
            compared: self.compared.load(Ordering::Relaxed),
            denied: self.denied.load(Ordering::Relaxed),
            newly_denied,
            no_longer_denied,
            not_compared: self.not_compared.load(Ordering::Relaxed),
            rejected: self.rejected.load(Ordering::Relaxed),
            lost: self.lost.load(Ordering::Relaxed),
            rules: rules.map(rule).collect(),
            newly: newly.into_list(mask),
            no_longer: no_longer.into_list(mask),
        }
    }

    pub(crate) fn collect(&self, page: &mut Page<'_>) {
        let report = self.report(&KeyMask::plain(), 0);
        let CandidateReport {
            compared,
            newly_denied,
            no_longer_denied,
            not_compared,
            rejected,
            lost,
            ..
        } = report;
        let changed = newly_denied.saturating_add(no_longer_denied);
        let changes = [
            (["none"], compared.saturating_sub(changed)),
            (["newly_denied"], newly_denied),
            (["no_longer_denied"], no_longer_denied),
            (["not_compared"], not_compared),
            (["rejected"], rejected),
            (["lost"], lost),
        ];
        page.family(&REQUESTS, changes);
        let (named, others) = report
            .rules
            .split_at(report.rules.len().min(MAX_RULE_LABELS));
        let named = named.iter().map(|rule| ([&*rule.rule], rule.denied));
        let others = (!others.is_empty()).then(|| others.iter().map(|rule| rule.denied).sum());
        page.family(&DENIED, named.chain(others.map(|sum| (["other"], sum))));
    }

    fn changes(&self) -> MutexGuard<'_, Changes> {
        self.changes.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl ActiveDecision {
    /// Returns the active rules' decision, for the comparison. Returns `None` if the verdict cannot
    /// be compared.
    fn new(decided: DecidedRequest<'_>, verdict: &Verdict<'_>) -> Option<Self> {
        if verdict.allowed {
            return Some(Self::Admitted);
        }
        let rule = decided.rules.rule(verdict.rule?)?;
        if verdict.reason != Some(Reason::Limit) || rule.wants_receipt() {
            return None;
        }
        let value = |name| decided.request.entry(name).unwrap_or_default().to_owned();
        Some(Self::Denied(CandidateKey {
            rule: rule.name().into(),
            key: rule.key().map(value).collect(),
        }))
    }
}

/// A copy of a request, for a task that evaluates the candidate rules after the response was sent.
#[derive(Debug)]
struct CandidateRequest {
    /// The entries that the candidate rules use.
    entries: Vec<(Box<str>, Box<str>)>,
    cost: Cost,
    now: Timestamp,
}

impl CandidateRequest {
    fn new(decided: DecidedRequest<'_>, rules: &RuleSet) -> Self {
        let entries = decided.request.entries().iter();
        let used = entries.filter(|(name, _)| rules.uses_entry(name));
        Self {
            entries: used
                .map(|(name, value)| (Box::from(*name), Box::from(*value)))
                .collect(),
            cost: decided.request.cost(),
            now: decided.now,
        }
    }

    fn entries(&self) -> Vec<(&str, &str)> {
        let entries = self.entries.iter();
        entries.map(|(name, value)| (&**name, &**value)).collect()
    }
}

fn count(counter: &AtomicU64) {
    counter.fetch_add(1, Ordering::Relaxed);
}
