//! A fleet: one truth in Redis, and what this node does while it is out of reach.
//!
//! ```text
//! question ─▶ denied a moment ago? ─▶ Redis ─▶ answered: exact, and this node's own count is kept warm
//!                    │                  └───▶ out of reach: the rules' `on_failure` answers
//!                    └─▶ denied, without asking
//! ```
//!
//! What Redis admits is charged to this node's share of the limits too. So when Redis goes away, a client that had
//! spent its limit is not given a fresh one.

mod census;
mod denials;
mod outage;
mod receipt;
mod refusals;
mod share;
mod stats;

use std::{sync::Arc, time::Duration};

use tidegate_core::{
    Charge, Decided, Decision, Effect, Exactness, MemoryStore, OnFailure, Outcome, Question,
    Renewal, Settlement, Share, Source, Span, Store, Timestamp,
};
use tokio::time::Instant;

use self::{
    census::Census,
    denials::{Denials, Epoch},
    outage::Outage,
    refusals::Refusals,
    stats::Counters,
};
pub use self::{receipt::FleetReceipt, stats::FleetStats};
use crate::{Redis, RedisStore, StoreError};

/// When to ask again after a denial for want of a store.
const ASK_AGAIN: Span = Span::from_secs(1);

/// What a node of a fleet does by itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FleetSettings {
    /// What answers while Redis is out of reach, for rules that do not say; default [`OnFailure::Local`].
    pub on_failure: OnFailure,
    /// This node's share of every limit while Redis is out of reach; default [`NodeShare::Auto`].
    pub share: NodeShare,
    /// How long a denial may be repeated without asking, at most; zero asks every time. Default 1 s. It is how long a
    /// reset or a lifted block on another node may take to be noticed here.
    pub denials: Span,
}

impl Default for FleetSettings {
    fn default() -> Self {
        Self {
            on_failure: OnFailure::default(),
            share: NodeShare::default(),
            denials: Span::from_secs(1),
        }
    }
}

/// A node's share of every limit while Redis is out of reach.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum NodeShare {
    /// One part of as many as servers have last been counted on the same Redis, under the same prefix; a half where
    /// they never were, because Redis has been out of reach since the start.
    #[default]
    Auto,
    /// This one.
    Fixed(Share),
}

/// Decisions in Redis, as one node of a fleet makes them.
#[derive(Debug)]
pub struct Fleet {
    store: RedisStore,
    redis: Arc<Redis>,
    local: MemoryStore,
    settings: FleetSettings,
    denials: Denials,
    counters: Counters,
    refusals: Refusals,
    outage: Outage,
    /// Where the share depends on it.
    census: Option<Census>,
}

impl Fleet {
    /// Decides in `redis`, under keys that begin with `prefix`; `local` keeps this node's own count, which answers while
    /// Redis is out of reach.
    #[must_use]
    pub fn new(
        redis: Arc<Redis>,
        prefix: &str,
        local: MemoryStore,
        settings: FleetSettings,
    ) -> Self {
        let store = RedisStore::on(Arc::clone(&redis), prefix);
        let counts = settings.share == NodeShare::Auto;
        let census = counts.then(|| Census::start(store.clone(), redis.runtime()));
        Self {
            store,
            redis,
            local,
            settings,
            denials: Denials::default(),
            counters: Counters::default(),
            refusals: Refusals::default(),
            outage: Outage::default(),
            census,
        }
    }

    /// A denial of a moment ago, if it still stands.
    pub fn recall(
        &self,
        question: &Question<'_, '_>,
        outcomes: &mut Vec<Outcome>,
    ) -> Option<Decided> {
        let is_denied = question.effect.asks()
            && self
                .denials
                .recall(question.charges, question.now, outcomes);
        is_denied.then(|| {
            self.counters.count(Source::Cache);
            Decided {
                decision: Decision::Limited,
                exactness: Exactness::Exact,
                source: Source::Cache,
            }
        })
    }

    /// Asks Redis, and lets nothing answer in its place.
    ///
    /// # Errors
    ///
    /// [`StoreError`] when nothing was decided, or nobody knows; it is counted.
    pub async fn ask(
        &self,
        question: &Question<'_, '_>,
        outcomes: &mut Vec<Outcome>,
    ) -> Result<Decided, StoreError> {
        let epoch = self.denials.epoch(question.charges);
        let began = Instant::now();
        // Also where nobody waits for the answer any more, or knows it.
        let _forgotten = (question.effect == Effect::Refund)
            .then(|| self.denials.forgetting(question.charges.iter()));
        let asked = self
            .store
            .check(question.charges, question.effect, outcomes);
        let decision = self.in_time(asked, question.within, question.now).await?;
        match question.effect {
            Effect::Charge => {
                self.learn(question, &decision, (outcomes, epoch, began));
                if decision == Decision::Admitted {
                    self.keep_warm(question, Effect::Charge);
                }
            }
            Effect::Refund => self.keep_warm(question, Effect::Refund),
            Effect::Peek | Effect::Look => {}
        }
        Ok(self.decided(decision, question.now))
    }

    /// Waits for Redis as long as a decision may take, which may be several questions, or as long as it is `within`. Where no
    /// time is left Redis is not asked: nobody would hear what it has charged.
    async fn in_time<T>(
        &self,
        asked: impl Future<Output = Result<T, StoreError>>,
        within: Option<Duration>,
        now: Timestamp,
    ) -> Result<T, StoreError> {
        let longest = self.redis.timeout();
        let within = within.map_or(longest, |within| within.min(longest));
        let too_late = "it takes longer than a decision may";
        let answered = if within.is_zero() {
            Err(StoreError::NotExecuted(too_late.to_owned()))
        } else {
            let asked = tokio::time::timeout(within, asked).await;
            asked.unwrap_or_else(|_| Err(StoreError::Unknown(too_late.to_owned())))
        };
        answered.inspect_err(|error| {
            self.counters.count_failure(error);
            self.refusals.note(error, now);
        })
    }

    /// Whether Redis need not be asked, because no server can be; that counts as a failure.
    fn is_unavailable(&self) -> bool {
        let is_down = self.redis.is_down();
        if is_down {
            self.counters.count_unavailable();
        }
        is_down
    }

    /// What Redis has decided.
    fn decided(&self, decision: Decision, now: Timestamp) -> Decided {
        self.counters.count(Source::Redis);
        if let Some(over) = self.outage.note_exact(now) {
            let outage_ms = over.lasted.as_millis_ceil();
            let (local, policy) = (over.local, over.policy);
            tracing::info!(
                outage_ms,
                local,
                policy,
                "Redis decides again and decisions are exact; meanwhile so many were made on the local share and by policy"
            );
        }
        Decided {
            decision,
            exactness: Exactness::Exact,
            source: Source::Redis,
        }
    }

    /// The store, for what operators do.
    #[must_use]
    pub fn store(&self) -> &RedisStore {
        &self.store
    }

    /// This node's own count.
    #[must_use]
    pub fn local(&self) -> &MemoryStore {
        &self.local
    }

    /// What was done, and how Redis is.
    #[must_use]
    pub fn stats(&self) -> FleetStats {
        let servers = self.census.as_ref().and_then(Census::servers);
        self.counters.stats(self.redis.health(), servers)
    }

    /// This node's share of every limit while Redis is out of reach.
    #[must_use]
    pub fn share(&self) -> Share {
        match (self.settings.share, &self.census) {
            (NodeShare::Fixed(share), _) => share,
            (NodeShare::Auto, Some(census)) => census.share(),
            (NodeShare::Auto, None) => Share::default(),
        }
    }

    /// What Redis has refused within the last minute, in words that say what to do.
    #[must_use]
    pub fn refusal(&self, now: Timestamp) -> Option<String> {
        self.refusals.latest(now)
    }

    /// Keeps this node's own state close to that in Redis: what is blocked, what was denied.
    /// The decision began then, in `epoch`.
    fn learn(
        &self,
        question: &Question<'_, '_>,
        decision: &Decision,
        (outcomes, epoch, began): (&[Outcome], Epoch, Instant),
    ) {
        let Question { charges, now, .. } = question;
        match decision {
            Decision::Limited => {
                let longest = self.settings.denials;
                let found = (outcomes, epoch);
                let after = u64::try_from(began.elapsed().as_micros()).unwrap_or(u64::MAX);
                let asked = (*now, Span::from_micros(after));
                self.denials.remember(charges, asked, longest, found);
            }
            Decision::Blocked {
                charge,
                retry_after,
                ..
            } => {
                if let Some(charge) = charges.get(*charge) {
                    self.local.block(charge.key, retry_after.span(), "", *now);
                }
            }
            Decision::Admitted | Decision::Full { .. } => {}
        }
    }
}

/// What is answered now is what need not be asked: that a denial of a moment ago still stands, or, where nobody can be
/// asked, what the rules' policies say.
impl Store for Fleet {
    type Receipt = FleetReceipt;

    fn decide_now(
        &self,
        question: &mut Question<'_, '_>,
        outcomes: &mut Vec<Outcome>,
    ) -> Option<Decided> {
        self.recall(question, outcomes).or_else(|| {
            let is_down = self.is_unavailable();
            is_down.then(|| self.fall_back(question, outcomes, None))
        })
    }

    async fn decide_later(
        &self,
        mut question: Question<'_, '_>,
        outcomes: &mut Vec<Outcome>,
    ) -> Decided {
        match self.ask(&question, outcomes).await {
            Ok(decided) => decided,
            Err(_) => self.fall_back(&mut question, outcomes, None),
        }
    }

    async fn reserve(
        &self,
        question: &mut Question<'_, '_>,
        outcomes: &mut Vec<Outcome>,
    ) -> (Decided, Option<FleetReceipt>) {
        self.reserve_anywhere(question, outcomes).await
    }

    async fn settle(
        &self,
        charges: &[Charge<'_>],
        receipt: FleetReceipt,
        settlements: &[Settlement],
        now: Timestamp,
    ) {
        self.settle_everywhere(charges, receipt, settlements, now)
            .await;
    }

    async fn renew(
        &self,
        charges: &[Charge<'_>],
        receipt: &mut FleetReceipt,
        now: Timestamp,
    ) -> Renewal {
        self.renew_anywhere(charges, receipt, now).await
    }

    fn reserve_now(
        &self,
        question: &mut Question<'_, '_>,
        outcomes: &mut Vec<Outcome>,
    ) -> Option<(Decided, Option<FleetReceipt>)> {
        self.reserve_here(question, outcomes)
    }

    fn settle_now(
        &self,
        charges: &[Charge<'_>],
        receipt: FleetReceipt,
        settlements: &[Settlement],
        now: Timestamp,
    ) -> Result<(), FleetReceipt> {
        self.settle_here(charges, receipt, settlements, now)
    }

    fn forget_denials(&self) {
        self.denials.forget();
    }
}
