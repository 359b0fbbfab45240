//! The limiter that every door asks: the rules of the moment, one store, one clock.
//!
//! Doors await decisions, because Redis may have to be asked. With the memory store a decision never suspends; neither
//! does one that Redis need not be asked for. A door that is no `async` code asks with the functions that end in
//! `_now`, and awaits only what they leave open.

mod store;

use std::{pin::Pin, sync::Arc, time::Duration};

use arc_swap::ArcSwap;
use tidegate_core::{
    Charge, Decided, Effect, Limits, MAX_KEY_SPACE, MemoryStore, Outcome, Question, RequestError,
    Rule, RuleSet, Store, Timestamp, Verdict, free_key_in,
};
use tidegate_http::{Clock, Trust};
use tidegate_redis::{Fleet, StoreError};

pub use self::store::{Backend, LimiterReceipt};
use crate::{
    entries::{Audited, EntryAudit},
    metrics::{Door, Metrics},
    quota::Quotas,
    snapshot::SnapshotHealth,
};

/// What is asked of a limiter, whoever decides it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Asked<'a> {
    pub(crate) charges: &'a [Charge<'a>],
    /// The time, which the caller read.
    pub(crate) now: Timestamp,
    pub(crate) effect: Effect,
    /// How long Redis may take, if less than a decision may.
    pub(crate) within: Option<Duration>,
}

/// What every door asks. One lives in a process, behind an [`Arc`].
#[derive(Debug)]
pub struct Limiter {
    rules: ArcSwap<RuleSet>,
    backend: Backend,
    clock: Clock,
    metrics: Metrics,
    quotas: Quotas,
    trust: Trust,
    snapshots: SnapshotHealth,
    audit: ArcSwap<EntryAudit>,
}

impl Limiter {
    /// A limiter under `rules`, for which `backend` decides.
    #[must_use]
    pub fn new(rules: RuleSet, backend: impl Into<Backend>, clock: Clock) -> Self {
        let metrics = Metrics::new(clock.now());
        metrics.name_rules(rules.iter().map(Rule::name));
        Self {
            audit: ArcSwap::from_pointee(EntryAudit::new(&rules, &metrics)),
            rules: ArcSwap::from_pointee(rules),
            backend: backend.into(),
            clock,
            metrics,
            quotas: Quotas::default(),
            trust: Trust::default(),
            snapshots: SnapshotHealth::default(),
        }
    }

    /// The same limiter, which normalises the addresses of `/v1/check` and `TIDEGATE.CHECK` as `trust` counts them.
    #[must_use]
    pub fn with_trust(self, trust: Trust) -> Self {
        Self { trust, ..self }
    }

    /// How the addresses of clients are counted.
    #[must_use]
    pub fn trust(&self) -> &Trust {
        &self.trust
    }

    /// The time; a door reads it once a request.
    #[must_use]
    pub fn now(&self) -> Timestamp {
        self.clock.now()
    }

    /// The clock by which requests are decided.
    #[must_use]
    pub fn clock(&self) -> &Clock {
        &self.clock
    }

    /// The rules of the moment. A request is decided under one set from beginning to end.
    #[must_use]
    pub fn rules(&self) -> Arc<RuleSet> {
        self.rules.load_full()
    }

    /// Puts `rules` in the place of those of the moment.
    pub fn swap_rules(&self, rules: RuleSet) {
        self.metrics.name_rules(rules.iter().map(Rule::name));
        let audit = EntryAudit::new(&rules, &self.metrics);
        self.audit.store(Arc::new(audit));
        self.rules.store(Arc::new(rules));
        if let Some(fleet) = self.fleet() {
            fleet.forget_denials();
        }
    }

    /// The store in this process: the one that decides, or, with a fleet, the one that answers while Redis is out of
    /// reach. What decides is the limiter itself, as a [`Store`].
    #[must_use]
    pub fn local_store(&self) -> &MemoryStore {
        match &self.backend {
            Backend::Memory(store) => store,
            Backend::Fleet(fleet) => fleet.local(),
        }
    }

    /// The fleet, if decisions are made in Redis.
    #[must_use]
    pub fn fleet(&self) -> Option<&Fleet> {
        match &self.backend {
            Backend::Memory(_) => None,
            Backend::Fleet(fleet) => Some(fleet),
        }
    }

    /// The limits that are divided among those who enforce them; none until there are rules for them.
    #[must_use]
    pub fn quotas(&self) -> &Quotas {
        &self.quotas
    }

    /// How the snapshots of the store in this process do.
    #[must_use]
    pub fn snapshots(&self) -> &SnapshotHealth {
        &self.snapshots
    }

    /// Whether a block that is put now stands after a restart of this process: it is in Redis, or in a snapshot.
    #[must_use]
    pub fn keeps_blocks(&self) -> bool {
        self.fleet().is_some() || self.snapshots.is_kept()
    }

    /// What was counted.
    #[must_use]
    pub fn metrics(&self) -> &Metrics {
        &self.metrics
    }

    /// Everything that was counted, in the Prometheus text format.
    #[must_use]
    pub fn exposition(&self) -> String {
        let fleet = self.fleet().map(Fleet::stats);
        let (store, quotas) = (self.local_store().stats(), self.quotas.counts());
        let missing = self.audit.load().missing_key_entries();
        let mut text = self
            .metrics
            .exposition(&store, quotas, fleet.as_ref(), self.now());
        text.push_str(&Metrics::key_entries(missing));
        text
    }

    /// Counts the verdict that `door` is about to give.
    pub fn observe(&self, door: Door, verdict: &Verdict<'_>) {
        self.metrics.observe(door, verdict);
    }

    /// Takes note of the entries of a request that was answered with `verdict`: those that no rule looks at are reported.
    pub(crate) fn audit(&self, audited: Audited<'_>, verdict: &Verdict<'_>) {
        self.audit.load().observe(audited, verdict, &self.metrics);
    }

    /// Counts the decision on a limit that came with the request, which `door` is about to give.
    pub fn observe_throttle(&self, door: Door, decided: &Decided) {
        self.metrics.observe_throttle(door, decided);
    }

    /// Says which keys are about to be decided, one after the other: see [`MemoryStore::prefetch`]. With a fleet there is nothing
    /// to fetch.
    pub(crate) fn prefetch<'k>(&self, keys: impl IntoIterator<Item = &'k [u8]>) {
        if let Backend::Memory(store) = &self.backend {
            store.prefetch(keys);
        }
    }

    /// Decides what is `asked`. `outcomes` is the caller's to reuse; there are none where a policy answers for the store.
    pub(crate) async fn decide(&self, asked: Asked<'_>, outcomes: &mut Vec<Outcome>) -> Decided {
        let Asked {
            charges,
            now,
            effect,
            within,
        } = asked;
        if let Backend::Memory(store) = &self.backend {
            return self.in_memory(store, charges, (now, effect), outcomes);
        }
        let question = Question {
            charges: &mut charges.to_vec(),
            now,
            effect,
            within,
        };
        self.answer(question, outcomes).await
    }

    /// [`Self::decide`], which fails where a policy would answer for Redis.
    pub(crate) async fn decide_or_fail(
        &self,
        asked: Asked<'_>,
        outcomes: &mut Vec<Outcome>,
    ) -> Result<Decided, StoreError> {
        let Asked {
            charges,
            now,
            effect,
            within,
        } = asked;
        let fleet = match &self.backend {
            Backend::Memory(store) => {
                return Ok(self.in_memory(store, charges, (now, effect), outcomes));
            }
            Backend::Fleet(fleet) => fleet,
        };
        let question = Question {
            charges: &mut charges.to_vec(),
            now,
            effect,
            within,
        };
        match fleet.recall(&question, outcomes) {
            Some(decided) => Ok(decided),
            None => {
                let asked = Box::pin(fleet.ask(&question, outcomes));
                self.timed(asked).await
            }
        }
    }

    /// Decides a limit that came with the request at `now`, which the caller read. `outcomes` is the caller's to reuse.
    pub async fn throttle(
        &self,
        charge: Charge<'_>,
        now: Timestamp,
        effect: Effect,
        outcomes: &mut Vec<Outcome>,
    ) -> Decided {
        let asked = Asked {
            charges: &[charge],
            now,
            effect,
            within: None,
        };
        self.decide(asked, outcomes).await
    }

    /// [`Self::throttle`], if nothing has to be waited for; `None` leaves everything as it was.
    pub fn throttle_now(
        &self,
        charge: Charge<'_>,
        now: Timestamp,
        effect: Effect,
        outcomes: &mut Vec<Outcome>,
    ) -> Option<Decided> {
        if let Backend::Memory(store) = &self.backend {
            return Some(self.in_memory(store, &[charge], (now, effect), outcomes));
        }
        let mut question = Question {
            charges: &mut vec![charge],
            now,
            effect,
            within: None,
        };
        self.answer_now(&mut question, outcomes)
    }

    /// Decides in memory, or what Redis need not be asked for.
    fn answer_now(
        &self,
        question: &mut Question<'_, '_>,
        outcomes: &mut Vec<Outcome>,
    ) -> Option<Decided> {
        match &self.backend {
            Backend::Memory(store) => {
                let at = (question.now, question.effect);
                Some(self.in_memory(store, question.charges, at, outcomes))
            }
            Backend::Fleet(fleet) => fleet.decide_now(question, outcomes),
        }
    }

    /// Decides, and asks Redis if need be.
    async fn answer(&self, mut question: Question<'_, '_>, outcomes: &mut Vec<Outcome>) -> Decided {
        match self.answer_now(&mut question, outcomes) {
            Some(decided) => decided,
            None => self.answer_later(question, outcomes).await,
        }
    }

    /// Decides what [`Self::answer_now`] left open. The future is in a box, so that a decision in memory does not carry it.
    fn answer_later<'f, 'c: 'f>(
        &'f self,
        question: Question<'f, 'c>,
        outcomes: &'f mut Vec<Outcome>,
    ) -> Pin<Box<dyn Future<Output = Decided> + Send + 'f>> {
        Box::pin(async move {
            match &self.backend {
                Backend::Memory(store) => store.decide_later(question, outcomes).await,
                Backend::Fleet(fleet) => self.timed(fleet.decide_later(question, outcomes)).await,
            }
        })
    }

    /// Waits for `decided`, and now and then notes how long that took.
    async fn timed<T>(&self, decided: impl Future<Output = T>) -> T {
        let began = self.time();
        let decided = decided.await;
        self.took(began);
        decided
    }

    /// Asks the memory store, and times it now and then.
    fn in_memory(
        &self,
        store: &MemoryStore,
        charges: &[Charge<'_>],
        (now, effect): (Timestamp, Effect),
        outcomes: &mut Vec<Outcome>,
    ) -> Decided {
        let began = self.time();
        let decision = store.check(charges, now, effect, outcomes);
        self.took(began);
        Decided::in_memory(decision)
    }

    /// When a decision begins, if it is one of those that are timed.
    fn time(&self) -> Option<u64> {
        Metrics::is_sampled().then(|| self.clock.nanos())
    }

    fn took(&self, began: Option<u64>) {
        if let Some(began) = began {
            let took = self.clock.nanos().saturating_sub(began);
            self.metrics.observe_latency(took);
        }
    }

    /// [`Self::throttle_key_in`] database 0, where `/v1/throttle` counts too.
    ///
    /// # Errors
    ///
    /// Refuses an empty key and one over [`MAX_THROTTLE_KEY_BYTES`].
    pub fn throttle_key<'b>(
        key: &'b [u8],
        buffer: &'b mut Vec<u8>,
    ) -> Result<&'b [u8], RequestError> {
        Self::throttle_key_in(Database::default(), key, buffer)
    }

    /// The key under which a limit that came with the request counts for `key` in a database of the Redis protocol: a free key,
    /// which no caller can make that of a rule. `buffer` is the caller's to reuse.
    ///
    /// # Errors
    ///
    /// Refuses an empty key and one over [`MAX_THROTTLE_KEY_BYTES`]; in another database than 0, over one byte less.
    pub fn throttle_key_in<'b>(
        database: Database,
        key: &'b [u8],
        buffer: &'b mut Vec<u8>,
    ) -> Result<&'b [u8], RequestError> {
        if key.is_empty() {
            return Err(RequestError::new("key", "must not be empty"));
        }
        let most = MAX_THROTTLE_KEY_BYTES - usize::from(database.0 > 0);
        if key.len() > most {
            let problem = format!("{} bytes is over the maximum of {most}", key.len());
            return Err(RequestError::new("key", problem));
        }
        Ok(free_key_in(database.0, key, buffer))
    }
}

/// A database of the Redis protocol: a key of a limit that comes with the request has a count in each. Rules are the same in all.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Database(u8);

impl Database {
    /// The database `number`, from 0 to 15, as in Redis.
    #[must_use]
    pub fn new(number: i64) -> Option<Self> {
        let number = u8::try_from(number).ok()?;
        (number <= MAX_KEY_SPACE).then_some(Self(number))
    }

    /// Its number.
    #[must_use]
    pub fn number(self) -> u8 {
        self.0
    }
}

/// The longest key of a limit that comes with the request: a byte may be added to it.
pub const MAX_THROTTLE_KEY_BYTES: usize = tidegate_core::bounds::MAX_KEY_BYTES - 1;

/// The limits of a throttle request: one, without a rule.
///
/// # Errors
///
/// None that a valid limit could cause.
pub fn single(limit: tidegate_core::Limit) -> Result<Limits, tidegate_core::LimitError> {
    Limits::new(vec![limit])
}
