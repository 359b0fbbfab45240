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

mod denials;
mod link;
mod refusals;
mod stats;

use std::{sync::Arc, time::Duration};

use tidegate_core::{
    Charge, Decision, Effect, Exactness, Limits, MemoryStore, OnFailure, Outcome, Retry, Share,
    Source, Span, Timestamp, Verdict,
};
use tidegate_redis::{Redis, RedisStore, StoreError};

pub use self::stats::FleetStats;
use self::{denials::Denials, refusals::Refusals, stats::Counters};
pub(crate) use self::{
    link::Link,
    stats::{FAILURES, SOURCES},
};

/// When to ask again after a denial for want of a store.
const ASK_AGAIN: Span = Span::from_secs(1);

/// What a node of a fleet does by itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FleetSettings {
    /// What answers while Redis is out of reach, for rules that do not say; default [`OnFailure::Local`].
    pub on_failure: OnFailure,
    /// This node's share of every limit; default 50 %.
    pub share: Share,
    /// How long a denial may be repeated without asking, at most; zero asks every time. Default 1 s. It is how long a
    /// reset or a lifted block on another node may take to be noticed here.
    pub denials: Span,
}

impl Default for FleetSettings {
    fn default() -> Self {
        Self {
            on_failure: OnFailure::default(),
            share: Share::default(),
            denials: Span::from_secs(1),
        }
    }
}

/// Decisions in Redis, as one node of a fleet makes them.
#[derive(Debug)]
pub struct Fleet {
    store: RedisStore,
    redis: Arc<Redis>,
    settings: FleetSettings,
    denials: Denials,
    counters: Counters,
    refusals: Refusals,
}

/// What is asked.
#[derive(Debug)]
pub struct Question<'q, 'c> {
    /// What is to be charged. Charges for which a policy answers are taken out.
    pub charges: &'q mut Vec<Charge<'c>>,
    /// The time on this node's clock; Redis decides on its own.
    pub now: Timestamp,
    /// What is done to the state.
    pub effect: Effect,
    /// How long Redis may take, if less than a decision may; the policies answer after that.
    pub within: Option<Duration>,
}

/// A decision, by whom it was made, and how exact it is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Decided {
    /// The decision.
    pub decision: Decision,
    /// How exact it is.
    pub exactness: Exactness,
    /// Who made it.
    pub source: Source,
}

impl Decided {
    pub(crate) fn in_memory(decision: Decision) -> Self {
        Self {
            decision,
            exactness: Exactness::Exact,
            source: Source::Memory,
        }
    }

    /// The verdict on `charges`, given their `outcomes`.
    #[must_use]
    pub fn verdict<'r>(&self, charges: &[Charge<'r>], outcomes: &[Outcome]) -> Verdict<'r> {
        let mut verdict = Verdict::of(&self.decision, charges, outcomes);
        verdict.exactness = self.exactness;
        verdict.source = self.source;
        verdict
    }
}

impl Fleet {
    /// Decides in `redis`, under keys that begin with `prefix`.
    #[must_use]
    pub fn new(redis: Arc<Redis>, prefix: &str, settings: FleetSettings) -> Self {
        Self {
            store: RedisStore::on(Arc::clone(&redis), prefix),
            redis,
            settings,
            denials: Denials::default(),
            counters: Counters::default(),
            refusals: Refusals::default(),
        }
    }

    /// What can be said without asking Redis: that a denial of a moment ago still stands, or, where nobody can be
    /// asked, what the rules' policies say. `None` leaves everything as it was.
    pub fn decide_now(
        &self,
        local: &MemoryStore,
        question: Question<'_, '_>,
        outcomes: &mut Vec<Outcome>,
    ) -> Option<Decided> {
        self.recall(&question, outcomes).or_else(|| {
            self.redis
                .is_down()
                .then(|| self.fall_back(local, question, outcomes))
        })
    }

    /// A denial of a moment ago, if it still stands.
    pub(crate) fn recall(
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

    /// Asks Redis, or lets the rules' policies answer.
    pub async fn decide(
        &self,
        local: &MemoryStore,
        question: Question<'_, '_>,
        outcomes: &mut Vec<Outcome>,
    ) -> Decided {
        match self.ask(local, &question, outcomes).await {
            Ok(decided) => decided,
            Err(_) => self.fall_back(local, question, outcomes),
        }
    }

    /// Asks Redis. An `Err` is counted, and nothing answers in its place.
    pub(crate) async fn ask(
        &self,
        local: &MemoryStore,
        question: &Question<'_, '_>,
        outcomes: &mut Vec<Outcome>,
    ) -> Result<Decided, StoreError> {
        let asked = self
            .store
            .check(question.charges, question.effect, outcomes);
        // A decision may take several questions, and all of them together so long.
        let longest = self.redis.timeout();
        let within = question
            .within
            .map_or(longest, |within| within.min(longest));
        let asked = tokio::time::timeout(within, asked).await;
        let too_late = || "it takes longer than a decision may".to_owned();
        let asked = asked.unwrap_or_else(|_| Err(StoreError::Unknown(too_late())));
        match asked {
            Ok(decision) => {
                match question.effect {
                    Effect::Charge => self.learn(local, question, &decision, outcomes),
                    Effect::Refund => self.forget_denials(),
                    Effect::Peek | Effect::Look => {}
                }
                self.counters.count(Source::Redis);
                Ok(Decided {
                    decision,
                    exactness: Exactness::Exact,
                    source: Source::Redis,
                })
            }
            Err(error) => {
                self.counters.count_failure(&error);
                self.refusals.note(&error, question.now);
                Err(error)
            }
        }
    }

    /// Forgets what was denied, because something may have been given back.
    pub fn forget_denials(&self) {
        self.denials.forget();
    }

    /// The store, for what operators do.
    #[must_use]
    pub fn store(&self) -> &RedisStore {
        &self.store
    }

    /// What was done, and how Redis is.
    #[must_use]
    pub fn stats(&self) -> FleetStats {
        self.counters.stats(self.redis.health())
    }

    /// What Redis has refused within the last minute, in words that say what to do.
    #[must_use]
    pub fn refusal(&self, now: Timestamp) -> Option<String> {
        self.refusals.latest(now)
    }

    /// Keeps this node's own state close to that in Redis: what was spent, what is blocked, what was denied.
    fn learn(
        &self,
        local: &MemoryStore,
        question: &Question<'_, '_>,
        decision: &Decision,
        outcomes: &[Outcome],
    ) {
        let Question { charges, now, .. } = question;
        match decision {
            Decision::Admitted => self.keep_warm(local, charges, *now),
            Decision::Limited => {
                let longest = self.settings.denials;
                self.denials.remember(charges, *now, longest, outcomes);
            }
            Decision::Blocked {
                charge,
                retry_after,
                ..
            } => {
                if let Some(charge) = charges.get(*charge) {
                    local.block(charge.key, retry_after.span(), "", *now);
                }
            }
            Decision::Full { .. } => {}
        }
    }

    /// Charges what Redis admitted to this node's share, as far as it goes.
    fn keep_warm(&self, local: &MemoryStore, charges: &[Charge<'_>], now: Timestamp) {
        let mut outcomes = Vec::new();
        for charge in charges {
            if self.policy(charge) != OnFailure::Local {
                continue;
            }
            let limits = charge.limits.share(self.settings.share);
            let shared = Charge {
                limits: &limits,
                ..*charge
            };
            let kept = local.check(&[shared], now, Effect::Charge, &mut outcomes);
            if let Decision::Blocked { .. } = kept {
                // Redis knows better: the block was lifted.
                local.unblock(charge.key, now);
            }
        }
    }

    fn fall_back(
        &self,
        local: &MemoryStore,
        question: Question<'_, '_>,
        outcomes: &mut Vec<Outcome>,
    ) -> Decided {
        outcomes.clear();
        let Question {
            charges,
            now,
            effect,
            ..
        } = question;
        let by_policy = |decision| Decided {
            decision,
            exactness: Exactness::None,
            source: Source::Policy,
        };
        let closed = effect.asks()
            && charges
                .iter()
                .any(|charge| self.policy(charge) == OnFailure::Closed);
        if closed {
            self.counters.count(Source::Policy);
            return by_policy(Decision::Full {
                retry_after: Retry::After(ASK_AGAIN),
            });
        }
        charges.retain(|charge| self.policy(charge) == OnFailure::Local);
        if charges.is_empty() {
            self.counters.count(Source::Policy);
            return by_policy(Decision::Admitted);
        }
        let shares: Vec<Arc<Limits>> = charges
            .iter()
            .map(|charge| charge.limits.share(self.settings.share))
            .collect();
        let shared: Vec<Charge<'_>> = charges
            .iter()
            .zip(&shares)
            .map(|(charge, limits)| Charge { limits, ..*charge })
            .collect();
        self.counters.count(Source::Local);
        Decided {
            decision: local.check(&shared, now, effect, outcomes),
            exactness: Exactness::Local,
            source: Source::Local,
        }
    }

    /// What answers for `charge` while Redis is out of reach. What only counts never denies.
    fn policy(&self, charge: &Charge<'_>) -> OnFailure {
        let policy = charge
            .limits
            .on_failure()
            .unwrap_or(self.settings.on_failure);
        match (policy, charge.limits.shadow()) {
            (OnFailure::Closed, true) => OnFailure::Open,
            (policy, _) => policy,
        }
    }
}
