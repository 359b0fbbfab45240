//! Explains how a request would be decided now, without charging it.

use std::sync::Arc;

use tidegate::rate_limiter::stretch;
use tidegate_core::{
    Accounting, BLOCK_KEY, Block, CacheSearch, Charge, Cost, Effect, EntryBlock, EntryBlockTarget,
    Exactness, Outcome, Override, OverrideTarget, Overrides, Reason, Replacement, Request,
    RequestError, RetryAfter, Rule, RuleSet, Scratch, Source, Store, StoreRequest, Timestamp,
    Verdict, When,
};
use tidegate_redis::StoreError;

use crate::ServerLimiter;

/// An explanation of the decision on a request.
#[derive(Debug)]
pub struct Explanation<'r> {
    /// Whether the request would be admitted.
    pub allowed: bool,
    /// The reason why the request would be denied.
    pub reason: Option<Reason>,
    /// The time until the request would be admitted.
    pub retry_after: RetryAfter,
    /// How exact the decision would be.
    pub exactness: Exactness,
    /// The component that would decide.
    pub source: Source,
    /// The item of the allow list that the request matches. No rule charges a request on the allow
    /// list.
    pub allowed_by: Option<&'r When>,
    /// The block by entries that denies the request and does not depend on a rule, with its target.
    /// A block for all rules also denies a request to which no rule applies.
    pub entry_block: Option<(EntryBlockTarget, EntryBlock)>,
    /// The charges that the rules would make, in rule order.
    pub charges: Vec<ExplainedCharge<'r>>,
    /// The time of the decision.
    pub now: Timestamp,
    /// The current time according to the clock that determines when blocks expire: the clock of
    /// Redis or of this server.
    pub block_now: Timestamp,
}

/// An explanation of how one rule would decide the request.
#[derive(Debug)]
pub struct ExplainedCharge<'r> {
    /// The rule.
    pub rule: &'r Rule,
    /// The values of the rule's key.
    pub key: Vec<String>,
    /// The cost that this rule charges.
    pub cost: Cost,
    /// Whether the rule is elastic and has headroom, so that its limits are raised.
    pub is_stretched: bool,
    /// The plan whose limits apply, or are multiplied by an override's factor. `None` without a
    /// plan, or if the limits of an override apply.
    pub plan: Option<&'r str>,
    /// The override of the key, and its target.
    pub overridden: Option<(OverrideTarget, Override)>,
    /// Why the limits of the plan or of the rule apply instead of those of the override. `None` if
    /// the override applies, or if there is none.
    pub inactive_override: Option<String>,
    /// The limits in short notation, such as `20/min`.
    pub policies: Vec<Arc<str>>,
    /// The current state of each limit. The list is empty if the store cannot report the states.
    pub current: Vec<Outcome>,
    /// The outcome of each limit if the request were decided now. The list is empty if no limit
    /// would be evaluated.
    pub next: Vec<Outcome>,
    /// The block on the key.
    pub block: Option<Block>,
    /// The block by entries that denies the request under this rule, with its target. If a block by
    /// entries denies the request, a block on the key is not looked up.
    pub entry_block: Option<(EntryBlockTarget, EntryBlock)>,
    /// Whether the rule would admit the request. The value is false for a shadow rule that would
    /// deny the request, although such a rule denies nothing.
    pub allowed: bool,
    /// The reason why the rule would deny the request.
    pub reason: Option<Reason>,
    /// The time until the rule would admit the request.
    pub retry_after: RetryAfter,
    /// The component that decides.
    pub source: Source,
}

/// The reason why a request cannot be explained.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ExplainError {
    /// The request is invalid; a check would reject it, too.
    Request(RequestError),
    /// Redis cannot be queried for blocks.
    Store(StoreError),
}

impl From<RequestError> for ExplainError {
    fn from(error: RequestError) -> Self {
        Self::Request(error)
    }
}

impl From<StoreError> for ExplainError {
    fn from(error: StoreError) -> Self {
        Self::Store(error)
    }
}

/// The result of a decision that charges nothing.
struct ChargeEvaluation<'c> {
    verdict: Verdict<'c>,
    /// The outcomes of each charge, in the order of the charges; `None` if its limits were not
    /// evaluated.
    outcomes: Vec<Option<Vec<Outcome>>>,
}

impl ServerLimiter {
    /// Returns how `request` would be decided now under `rules`, and why, without charging any
    /// limit. The decision uses the same charges, store and fallback policy as a check. Unlike a
    /// check, the decision does not use cached denials.
    ///
    /// # Errors
    ///
    /// Returns an error if a check would reject the request, or if Redis reports a key as blocked
    /// but cannot be queried for the block.
    pub async fn explain<'r>(
        &self,
        rules: &'r RuleSet,
        request: &Request<'_>,
    ) -> Result<Explanation<'r>, ExplainError> {
        let (now, mut scratch) = (self.now(), Scratch::default());
        let mut charges = rules.charges(request, now, &mut scratch)?;
        if let Some(pending) = stretch(self, rules, &mut charges, now) {
            pending.finish(self, &mut charges).await;
        }
        let ChargeEvaluation { verdict, outcomes } =
            self.evaluate(&charges, now, Effect::Peek).await;
        let allowed_by = match charges.is_empty() {
            true => rules.allow_listed_by(request, now),
            false => None,
        };
        let mut explanation = Explanation {
            allowed: verdict.allowed,
            reason: verdict.reason,
            retry_after: verdict.retry_after,
            exactness: verdict.exactness,
            source: verdict.source,
            entry_block: match allowed_by {
                Some(_) => None,
                None => rules.entry_block(request, None, now),
            },
            allowed_by,
            charges: Vec::with_capacity(charges.len()),
            now,
            block_now: now,
        };
        // A blocked request to which no rule applies has a charge without a rule, whose limits are
        // never evaluated, so do not explain this charge.
        charges.retain(|charge| charge.key != BLOCK_KEY);
        let current = self.current_states(&charges, now).await;
        for ((charge, next), current) in charges.iter().zip(outcomes).zip(current) {
            let Some((rule, values)) = rules.decode_key(charge.key) else {
                continue;
            };
            let answer = match next {
                Some(next) => ChargeAnswer::of_limits(next, verdict.source),
                // A block, the store or a fallback policy decided the whole request, so this charge
                // was not evaluated. Evaluate the charge alone.
                None => self.evaluate_alone(charge, now).await,
            };
            let overrides = rules.overrides(rule);
            let overridden = overrides.and_then(|all| all.find(rule, charge.key, now));
            let replacement = overridden.as_ref().map(|(_, found)| &found.replacement);
            let plan = rule.plan_name_of(request);
            let mut explained = ExplainedCharge {
                key: values.into_iter().map(str::to_owned).collect(),
                plan: match replacement {
                    Some(Replacement::Factor(_)) => plan,
                    _ => plan_of(rule, charge),
                },
                inactive_override: replacement.and_then(|found| {
                    let checked = Overrides::check_active(rule, plan, found);
                    checked.err().map(|error| error.to_string())
                }),
                overridden,
                current: current.unwrap_or_default(),
                ..ExplainedCharge::new(rule, charge, answer)
            };
            if charge.blocked.is_some() {
                explained.entry_block = rules.entry_block(request, Some(rule), now);
            } else if explained.reason == Some(Reason::Blocked) {
                explanation.block_now = self.block_clock_of(explained.source, now).await?;
                explained.block = self.block_of(charge.key, explained.source, now).await?;
            }
            explanation.charges.push(explained);
        }
        Ok(explanation)
    }

    /// Returns the current states of the limits of each charge; `None` if the store cannot report
    /// them.
    async fn current_states(
        &self,
        charges: &[Charge<'_>],
        now: Timestamp,
    ) -> Vec<Option<Vec<Outcome>>> {
        match charges {
            [] => Vec::new(),
            charges => self.evaluate(charges, now, Effect::Look).await.outcomes,
        }
    }

    /// Returns the current time according to the clock of the component that reported a key as
    /// blocked.
    async fn block_clock_of(
        &self,
        source: Source,
        now: Timestamp,
    ) -> Result<Timestamp, StoreError> {
        match source {
            Source::Local => Ok(now),
            _ => self.block_clock().await,
        }
    }

    /// Returns the block on `key`, which `source` reported as blocked.
    async fn block_of(
        &self,
        key: &[u8],
        source: Source,
        now: Timestamp,
    ) -> Result<Option<Block>, StoreError> {
        match source {
            // While Redis is unreachable, the memory store's copies of the blocks are used.
            Source::Local => Ok(self.local_store().block_on(key, now)),
            _ => self.block_on(key).await,
        }
    }

    /// Evaluates `charge` without the other charges of its request.
    async fn evaluate_alone(&self, charge: &Charge<'_>, now: Timestamp) -> ChargeAnswer {
        let ChargeEvaluation { verdict, outcomes } =
            self.evaluate(&[*charge], now, Effect::Peek).await;
        match outcomes.into_iter().next().flatten() {
            Some(next) => ChargeAnswer::of_limits(next, verdict.source),
            None => ChargeAnswer {
                reason: verdict.reason,
                retry_after: verdict.retry_after,
                source: verdict.source,
                next: Vec::new(),
            },
        }
    }

    /// Evaluates `charges` together. `effect` must not charge anything.
    async fn evaluate<'c>(
        &self,
        charges: &[Charge<'c>],
        now: Timestamp,
        effect: Effect,
    ) -> ChargeEvaluation<'c> {
        let (mut decided, mut outcomes) = (charges.to_vec(), Vec::new());
        let request = StoreRequest {
            // Skip cached denials: a cached denial may be older than a block, and does not describe
            // the block.
            cache_search: CacheSearch::Skip,
            accounting: Accounting::Inspection,
            ..StoreRequest::new(&mut decided, now, effect)
        };
        let decision = Store::decide(self, request, &mut outcomes).await;
        let verdict = decision.verdict(&decided, &outcomes);
        // The store has removed from `decided` the charges that a fallback policy decided. The
        // removed charges have no outcomes.
        let mut rest = outcomes.as_slice();
        let of_charge = |charge: &Charge<'_>| {
            decided.iter().find(|decided| decided.key == charge.key)?;
            let (own, others) = rest.split_at_checked(charge.limits.len())?;
            rest = others;
            Some(own.to_vec())
        };
        ChargeEvaluation {
            outcomes: charges.iter().map(of_charge).collect(),
            verdict,
        }
    }
}

impl<'r> ExplainedCharge<'r> {
    /// Explains `charge`, a charge of `rule`. The caller must set the fields for the key, the plan,
    /// the override, the current state and the block.
    fn new(rule: &'r Rule, charge: &Charge<'_>, answer: ChargeAnswer) -> Self {
        let policies = charge.limits.iter();
        Self {
            rule,
            key: Vec::new(),
            cost: charge.cost,
            is_stretched: charge.limits.is_stretched(),
            plan: None,
            overridden: None,
            inactive_override: None,
            policies: policies.map(|limit| Arc::clone(limit.policy())).collect(),
            current: Vec::new(),
            next: answer.next,
            block: None,
            entry_block: None,
            allowed: answer.reason.is_none(),
            reason: answer.reason,
            retry_after: answer.retry_after,
            source: answer.source,
        }
    }
}

/// Returns the plan of `rule` that sets the limits of `charge`.
fn plan_of<'r>(rule: &'r Rule, charge: &Charge<'_>) -> Option<&'r str> {
    let limits = charge.limits.unstretched();
    let mut plans = rule.plans();
    let plan = plans.find(|(_, plan)| std::ptr::eq(&***plan, limits));
    plan.map(|(name, _)| name)
}

/// The decision on one charge, if it were decided now.
struct ChargeAnswer {
    /// Why the charge would be denied; `None` if it would be admitted.
    reason: Option<Reason>,
    retry_after: RetryAfter,
    source: Source,
    /// The outcomes of the charge's limits; empty if they were not evaluated.
    next: Vec<Outcome>,
}

impl ChargeAnswer {
    /// Derives the answer from the outcomes of all limits of the charge.
    fn of_limits(next: Vec<Outcome>, source: Source) -> Self {
        let is_denied = next.iter().any(|outcome| !outcome.allowed);
        let waits = next.iter().map(|outcome| outcome.retry_after);
        Self {
            reason: is_denied.then_some(Reason::Limit),
            retry_after: waits.max().unwrap_or(RetryAfter::NOW),
            source,
            next,
        }
    }
}
