//! Limiters with rules, whose limits depend on the entries of a request.

use std::{cell::RefCell, sync::Arc, time::Duration};

use arc_swap::ArcSwap;
use tidegate_core::{
    Charge, Effect, Limits, MemoryStore, Outcome, Request, RequestError, RuleSet, Scratch, Store,
    StoreDecision, Timestamp, Verdict,
};

#[cfg(feature = "tokio")]
use crate::timer::TokioTimer;
use crate::{
    AcquireError, BlockingStore, IntoPolicy, Limiter, RateLimiter, Waiters,
    limiter::Waits,
    override_limits::OverrideLimits,
    rate_limiter::stretch,
    timer::{Timer, block_on},
    waiters::QueuedRequest,
};

/// A limiter that chooses the limits by rules.
pub type RuleLimiter<S = MemoryStore> = Limiter<S, Rules>;

/// The rules of a limiter, which can be replaced at any time.
#[derive(Debug)]
pub struct Rules(ArcSwap<RuleSet>);

impl Rules {
    pub(crate) fn new(rules: RuleSet) -> Self {
        Self(ArcSwap::from_pointee(rules))
    }
}

impl IntoPolicy for RuleSet {
    type Policy = Rules;

    fn into_policy(self) -> Rules {
        Rules::new(self)
    }
}

impl<S: Store> Limiter<S, Rules> {
    /// Returns the active rules. Decide requests with the returned rules.
    ///
    /// # Examples
    ///
    /// ```
    /// use tidegate::{Cost, Limiter, Request, Rule, RuleSet};
    ///
    /// let rule = Rule::new("per-customer", vec!["2/min".parse()?])?.keyed_by(&["customer"])?;
    /// let limiter = Limiter::in_memory(RuleSet::build(vec![rule], Vec::new())?);
    ///
    /// let entries = [("customer", "acme")];
    /// let request = Request::new(&entries, Cost::new(2)?)?;
    /// let rules = limiter.current();
    /// assert!(rules.check(&request)?.allowed);
    /// let verdict = rules.check(&request)?;
    /// assert_eq!((verdict.allowed, verdict.rule), (false, Some("per-customer")));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn current(&self) -> CurrentRules<'_, S> {
        CurrentRules {
            limiter: self,
            rules: self.policy.0.load_full(),
            override_limits: OverrideLimits::default(),
        }
    }

    /// Replaces the active rules. If a new rule has the same name and key as an old rule, the
    /// counts of the old rule are kept. Requests in progress are still decided under the old rules,
    /// except for requests that wait for a concurrency slot in a [`RateLimiter`]'s queue. A request
    /// that waits for a slot is decided under the rules that are active when it is first in its
    /// queue.
    pub fn swap_rules(&self, rules: RuleSet) {
        let rules = rules.inheriting_from(&self.policy.0.load());
        self.waiters.retain_rules(|rule| rules.rule(rule).is_some());
        self.policy.0.store(Arc::new(rules));
        self.store.clear_denial_cache();
    }
}

impl<S: Store> RateLimiter for Limiter<S, Rules> {
    type Store = S;

    fn now(&self) -> Timestamp {
        self.clock.now()
    }

    fn rules(&self) -> Arc<RuleSet> {
        self.policy.0.load_full()
    }

    fn store(&self) -> &S {
        &self.store
    }

    fn wait_queues(&self) -> &Waiters {
        &self.waiters
    }
}

/// The rules of a limiter at one point in time. Verdicts borrow from a value of this type.
///
/// Changes of [overrides](tidegate_core::Overrides) apply immediately. The value keeps the limits
/// of all overrides that requests have used until it is dropped, so do not keep the value longer
/// than needed.
#[derive(Clone, Debug)]
pub struct CurrentRules<'a, S> {
    limiter: &'a Limiter<S, Rules>,
    rules: Arc<RuleSet>,
    override_limits: OverrideLimits,
}

impl CurrentRules<'_, MemoryStore> {
    /// Decides whether `request` is admitted now, and charges the request if it is.
    ///
    /// # Errors
    ///
    /// Returns an error if [`RuleSet::charges`] rejects the request.
    pub fn check(&self, request: &Request<'_>) -> Result<Verdict<'_>, RequestError> {
        self.decide_in_memory(request, Effect::Charge)
    }

    /// Returns the same verdict as [`check`](Self::check), without charging the request.
    ///
    /// # Errors
    ///
    /// Returns an error if [`RuleSet::charges`] rejects the request.
    pub fn peek(&self, request: &Request<'_>) -> Result<Verdict<'_>, RequestError> {
        self.decide_in_memory(request, Effect::Peek)
    }

    /// Decides like [`decide`](CurrentRules::decide), but works only with a memory store, and never
    /// waits.
    fn decide_in_memory(
        &self,
        request: &Request<'_>,
        effect: Effect,
    ) -> Result<Verdict<'_>, RequestError> {
        thread_local! {
            static SCRATCH: RefCell<Scratch> = RefCell::default();
        }
        let Limiter { store, clock, .. } = self.limiter;
        SCRATCH.with_borrow_mut(|scratch| {
            let now = clock.now();
            let mut charges = self.rules.charges(request, now, scratch)?;
            if charges.is_empty() {
                return Ok(Verdict::unlimited());
            }
            let mut outcomes = Vec::new();
            if let Some(parents) = self.rules.parents(&charges) {
                store.check(&parents.charges, now, Effect::Look, &mut outcomes);
                parents.stretch(&mut charges, &outcomes);
            }
            let decision = store.check(&charges, now, effect, &mut outcomes);
            let decided = StoreDecision::in_memory(decision);
            Ok(self.verdict(&decided, &charges, &outcomes))
        })
    }
}

impl<S: Store> CurrentRules<'_, S> {
    /// Returns the rules.
    #[must_use]
    pub fn rules(&self) -> &RuleSet {
        &self.rules
    }

    /// Decides like [`check`](CurrentRules::check), but works with any store. Waits for a remote
    /// store to reply, but does not wait for the limits to admit the request.
    ///
    /// If the future is dropped, the request may or may not have been charged.
    ///
    /// # Errors
    ///
    /// Returns an error if [`RuleSet::charges`] rejects the request.
    pub async fn check_async(&self, request: &Request<'_>) -> Result<Verdict<'_>, RequestError> {
        let mut scratch = Scratch::default();
        let decided = self.decide(request, &mut scratch, Effect::Charge, Waits::No);
        Ok(decided.await?.0)
    }

    /// Returns the same verdict as [`check_async`](Self::check_async), without charging the
    /// request.
    ///
    /// # Errors
    ///
    /// Returns an error if [`RuleSet::charges`] rejects the request.
    pub async fn peek_async(&self, request: &Request<'_>) -> Result<Verdict<'_>, RequestError> {
        let mut scratch = Scratch::default();
        let decided = self.decide(request, &mut scratch, Effect::Peek, Waits::No);
        Ok(decided.await?.0)
    }

    /// Waits until `request` is admitted, as [`Limiter::acquire`] does for a key. Requests charged
    /// by the same rules on the same keys are admitted in the order in which they began to wait.
    ///
    /// The request is decided under these rules even if [`Limiter::swap_rules`] replaces the rules
    /// while the request waits. Changes of overrides and blocks take effect when the request is
    /// first in its queue.
    ///
    /// # Errors
    ///
    /// [`AcquireError`] if the request was not admitted.
    #[cfg(feature = "tokio")]
    pub async fn acquire(&self, request: &Request<'_>) -> Result<Verdict<'_>, AcquireError> {
        self.acquire_within(request, Duration::MAX).await
    }

    /// Waits like [`acquire`](Self::acquire), but at most for `longest_wait`.
    ///
    /// # Errors
    ///
    /// [`AcquireError`] if the request was not admitted.
    #[cfg(feature = "tokio")]
    pub async fn acquire_within(
        &self,
        request: &Request<'_>,
        longest_wait: Duration,
    ) -> Result<Verdict<'_>, AcquireError> {
        let deadline = self.limiter.deadline(longest_wait.into());
        self.acquire_by(request, deadline, &TokioTimer).await
    }

    async fn acquire_by(
        &self,
        request: &Request<'_>,
        deadline: Timestamp,
        timer: &impl Timer,
    ) -> Result<Verdict<'_>, AcquireError> {
        let Limiter { waiters, clock, .. } = self.limiter;
        let mut scratch = Scratch::default();
        let key = queue_key(&self.rules.charges(request, clock.now(), &mut scratch)?);
        let mut turn = QueuedRequest::new(waiters, clock, &key, deadline);
        loop {
            let effect = turn.effect();
            let decided = self.decide(request, &mut scratch, effect, Waits::InLine);
            let (verdict, now) = decided.await?;
            if turn.has_passed(&verdict, now)? {
                return Ok(verdict);
            }
            turn.wait(timer).await?;
        }
    }

    async fn decide(
        &self,
        request: &Request<'_>,
        scratch: &mut Scratch,
        effect: Effect,
        waits: Waits,
    ) -> Result<(Verdict<'_>, Timestamp), RequestError> {
        let (rules, Limiter { store, clock, .. }) = (&*self.rules, self.limiter);
        let now = clock.now();
        let mut charges = rules.charges(request, now, scratch)?;
        if charges.is_empty() {
            return Ok((Verdict::unlimited(), now));
        }
        if let Some(pending) = stretch(store, rules, &mut charges, now) {
            pending.finish(store, &mut charges).await;
        }
        let mut outcomes = Vec::new();
        let decided = self
            .limiter
            .decide(&mut charges, &mut outcomes, effect, waits);
        let (decided, now) = decided.await;
        Ok((self.verdict(&decided, &charges, &outcomes), now))
    }

    /// Returns the verdict on `charges`. The verdict borrows from the rules, but not from the keys.
    fn verdict(
        &self,
        decided: &StoreDecision,
        charges: &[Charge<'_>],
        outcomes: &[Outcome],
    ) -> Verdict<'_> {
        let own = charges
            .iter()
            .map_while(|charge| self.rules.own_limits(charge));
        if own.clone().count() == charges.len() {
            return decided.verdict_on(own, outcomes);
        }
        let limits: Vec<&Limits> = charges
            .iter()
            .map(|charge| self.limits_of(charge))
            .collect();
        decided.verdict_on(limits.into_iter(), outcomes)
    }

    /// Returns the limits of `charge`, borrowed from `self`.
    fn limits_of(&self, charge: &Charge<'_>) -> &Limits {
        if let Some(own) = self.rules.own_limits(charge) {
            return own;
        }
        let limits = self.override_limits.keep(&self.rules.limits_of(charge));
        let stretched = limits.stretched().filter(|_| charge.limits.is_stretched());
        stretched.unwrap_or(limits)
    }
}

/// The methods in this block block the thread. Do not call these methods in an async task, because
/// they would block the runtime's worker thread.
impl<S: BlockingStore> CurrentRules<'_, S> {
    /// Decides like [`check_async`](CurrentRules::check_async).
    ///
    /// # Errors
    ///
    /// Returns an error if [`RuleSet::charges`] rejects the request.
    pub fn check_blocking(&self, request: &Request<'_>) -> Result<Verdict<'_>, RequestError> {
        let _entered = self.limiter.store.enter();
        block_on(&self.limiter.clock, async |_| {
            self.check_async(request).await
        })
    }

    /// Waits until `request` is admitted, at most for the shorter of `longest_wait` and
    /// [`WaitBounds::longest_wait`](crate::WaitBounds::longest_wait).
    ///
    /// # Errors
    ///
    /// [`AcquireError`] if the request was not admitted.
    pub fn acquire_blocking_within(
        &self,
        request: &Request<'_>,
        longest_wait: Duration,
    ) -> Result<Verdict<'_>, AcquireError> {
        let _entered = self.limiter.store.enter();
        let deadline = self.limiter.deadline(longest_wait.into());
        block_on(&self.limiter.clock, async |timer| {
            self.acquire_by(request, deadline, timer).await
        })
    }
}

/// Returns the key of the queue for requests with these charges.
fn queue_key(charges: &[Charge<'_>]) -> Vec<u8> {
    // Requests with a single charge wait in the queue of the rule's key. Requests of a tower layer
    // wait for slots in the same queue. A rule's key never begins with bytes that look like a
    // length.
    if let [charge] = charges {
        return charge.key.to_vec();
    }
    let mut key = Vec::new();
    for charge in charges {
        // The length prefix ensures that different key lists have different queue keys.
        key.extend_from_slice(&charge.key.len().to_be_bytes());
        key.extend_from_slice(charge.key);
    }
    key
}

#[cfg(test)]
mod tests {
    use tidegate_core::{
        AlgorithmName, Condition, Cost, Effect, EntryBlock, EntryBlockTarget, EntryBlocks,
        Headroom, LimitSpec, MemoryBounds, MemoryStore, Override, OverrideTarget, Overrides,
        Pattern, Reason, Replacement, Request, RetryAfter, Rule, Scratch, Span, UnusedShare, When,
        notation,
    };

    use super::*;
    use crate::Clock;

    fn rules(rate: &str) -> RuleSet {
        let rate = notation::rate(rate).unwrap();
        let spec = LimitSpec::shorthand(rate, AlgorithmName::FixedWindow);
        let rule = Rule::new("all", vec![spec.build().unwrap()]).unwrap();
        RuleSet::build(vec![rule], Vec::new()).unwrap()
    }

    fn passes(limiter: &RuleLimiter, effect: Effect) -> bool {
        let request = Request::new(&[], Cost::ONE).unwrap();
        let (rules, mut scratch) = (limiter.rules(), Scratch::default());
        let verdict = limiter.check(&rules, &mut scratch, &request, effect);
        verdict.ready().unwrap().unwrap().allowed
    }

    #[test]
    fn an_elastic_rule_stretches_while_another_share_is_unused() {
        let limit = |text| {
            let rate = notation::rate(text).unwrap();
            let spec = LimitSpec::shorthand(rate, AlgorithmName::FixedWindow);
            vec![spec.build().unwrap()]
        };
        let unused = Headroom::Unused(UnusedShare::new("all", 50).unwrap());
        let each = Rule::new("each", limit("1/h")).unwrap();
        let each = each.elastic(200, unused).unwrap();
        let all = Rule::new("all", limit("4/h")).unwrap();
        let rules = RuleSet::build(vec![each, all], Vec::new()).unwrap();
        let clock = Clock::manual(Timestamp::from_micros(1));
        let limiter = Limiter::new(rules, MemoryStore::new(MemoryBounds::default()), clock);
        for expected in [true, true, true, false] {
            assert_eq!(passes(&limiter, Effect::Peek), expected);
            assert_eq!(passes(&limiter, Effect::Charge), expected);
        }
    }

    #[test]
    fn a_block_by_entries_denies_requests_with_and_without_rules() {
        let path = |pattern| {
            let pattern = Pattern::text(pattern).unwrap();
            Condition::new("path", pattern).unwrap()
        };
        let api = Rule::new("api", vec!["9/h".parse().unwrap()]).unwrap();
        let api = api.when(When::all(vec![path("/api/**")]));
        let blocks = EntryBlocks::default();
        let (clock, store) = (
            Clock::manual(Timestamp::from_micros(1)),
            MemoryStore::new(MemoryBounds::default()),
        );
        let rules = RuleSet::build(vec![api], Vec::new()).unwrap();
        let limiter = Limiter::new(rules.with_entry_blocks(&blocks), store, clock);
        let target = EntryBlockTarget::new(None, &[("ip", "203.0.113.0/24")]).unwrap();
        let block = EntryBlock {
            until: Some(limiter.now().after(Span::from_secs(60))),
            reason: "attack".into(),
        };
        blocks.set(&target, block, limiter.now()).unwrap();

        let rules = limiter.current();
        for (path, rule) in [("/api/orders", Some("api")), ("/", None)] {
            let entries = [("path", path), ("ip", "203.0.113.9")];
            let request = Request::new(&entries, Cost::ONE).unwrap();
            for verdict in [rules.check(&request), rules.peek(&request)] {
                let verdict = verdict.unwrap();
                assert!(!verdict.allowed);
                assert_eq!(
                    (verdict.reason, verdict.rule),
                    (Some(Reason::Blocked), rule)
                );
                assert_eq!(verdict.retry_after, RetryAfter::After(Span::from_secs(60)));
            }
        }
    }

    /// The verdict of a request with an override has the limits of the override, even if the
    /// override changes while the verdict is in use.
    #[test]
    fn a_verdict_borrows_the_limits_of_an_override() {
        let clock = Clock::manual(Timestamp::from_micros(1));
        let overrides = Overrides::default();
        let limits = vec!["9/h".parse().unwrap()];
        let api = Rule::new("api", limits).unwrap();
        let api = api.keyed_by(&["user"]).unwrap();
        let unused = Headroom::Unused(UnusedShare::new("all", 50).unwrap());
        let api = api.elastic(200, unused).unwrap();
        let all = Rule::new("all", vec!["100/h".parse().unwrap()]).unwrap();
        let rules = RuleSet::build(vec![api, all], Vec::new()).unwrap();
        let store = MemoryStore::new(MemoryBounds::default());
        let limiter = Limiter::new(rules.with_overrides(&overrides), store, clock);
        let set = |texts: &[&str]| {
            let new = Override {
                replacement: Replacement::Limits(
                    texts.iter().map(|text| Box::from(*text)).collect(),
                ),
                until: None,
                reason: "launch".into(),
            };
            let target = OverrideTarget::of(&["alice"]);
            overrides.set("api", &target, new, limiter.now()).unwrap();
        };
        let rules = limiter.current();
        let request = Request::new(&[("user", "alice")], Cost::ONE).unwrap();
        let most = |verdict: &Verdict<'_>| {
            let lines = verdict.lines.iter();
            let most = lines.map(|line| line.limit.quota() + line.limit.soft_allowance());
            most.collect::<Vec<_>>()
        };
        set(&["20/h", "3/s"]);
        let verdict = rules.check(&request).unwrap();
        set(&["50/h"]);
        assert_eq!(most(&verdict), [60, 9, 100], "the limits are stretched");
        assert_eq!(verdict.lines[0].rule, Some("api"));
        assert_eq!(most(&rules.peek(&request).unwrap()), [150, 100]);
        overrides.clear();
        assert_eq!(most(&rules.check(&request).unwrap()), [27, 100]);
        let other = Request::new(&[("user", "bob")], Cost::ONE).unwrap();
        assert_eq!(most(&rules.check(&other).unwrap()), [27, 100]);
    }

    #[test]
    fn swapping_rules_keeps_counts() {
        let clock = Clock::manual(Timestamp::from_micros(7_200_000_000));
        let store = MemoryStore::new(MemoryBounds::default());
        let limiter = Limiter::new(rules("2/h"), store, clock);
        let passed = |effect, expected: &[bool]| {
            for expected in expected {
                assert_eq!(passes(&limiter, effect), *expected);
            }
        };
        passed(Effect::Charge, &[true, true, false]);
        limiter.swap_rules(rules("3/h"));
        passed(Effect::Peek, &[true, true]);
        passed(Effect::Charge, &[true, false]);
        let later = limiter.now().after(Span::from_secs(3_600));
        limiter.clock().set(later);
        passed(Effect::Charge, &[true]);
    }
}
