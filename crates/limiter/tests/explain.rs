//! Tests that an explanation agrees with the check that follows it, and charges nothing.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "a test fails by panicking"
)]

use std::{
    pin::pin,
    task::{Context, Poll, Waker},
};

use proptest::prelude::*;
use tidegate::{Clock, RateLimiter as _};
use tidegate_core::{
    AlgorithmName, Condition, Cost, Effect, LimitSpec, MemoryBounds, MemoryStore, Mode, Override,
    OverrideTarget, Pattern, Reason, Replacement, Request, RetryAfter, Rule, RuleSet, Scratch,
    Span, Timestamp, When, notation,
};
use tidegate_limiter::{ExplainError, Explanation, ServerLimiter};

const START: Timestamp = Timestamp::from_micros(1_700_000_000_000_000);

/// The number of generated rule sets.
const CASES: u32 = 10_000;

#[derive(Clone, Debug)]
struct DrawnRule {
    conditions: Vec<(&'static str, Pattern)>,
    key: Vec<&'static str>,
    limits: Vec<(&'static str, AlgorithmName)>,
    mode: Mode,
    allow: Option<(&'static str, Pattern)>,
}

/// A step of a trace: a request, or a block on the key of a rule.
#[derive(Clone, Debug)]
enum Step {
    Request {
        entries: Vec<(&'static str, &'static str)>,
        cost: u64,
        wait_ms: u64,
    },
    Block {
        rule: prop::sample::Index,
        values: Vec<&'static str>,
    },
}

const VALUES: [&str; 5] = ["a", "b", "/a/b", "10.0.0.1", "x"];

fn value() -> impl Strategy<Value = &'static str> {
    prop::sample::select(VALUES.to_vec())
}

fn entry() -> impl Strategy<Value = &'static str> {
    prop::sample::select(vec!["path", "ip", "user"])
}

fn pattern() -> impl Strategy<Value = Pattern> {
    let leaf = prop_oneof![
        4 => value().prop_map(|text| Pattern::exact(text).unwrap()),
        2 => prop::sample::select(vec!["/a/**", "*", "1*", "*b"])
            .prop_map(|text| Pattern::text(text).unwrap()),
        1 => Just(Pattern::networks(&["10.0.0.0/8"]).unwrap()),
        1 => Just(Pattern::present()),
        1 => Just(Pattern::absent()),
    ];
    leaf.prop_recursive(2, 6, 3, |inner| {
        let several = prop::collection::vec(inner.clone(), 1..4);
        prop_oneof![
            several
                .clone()
                .prop_map(|patterns| Pattern::any_of(patterns).unwrap()),
            several.prop_map(|patterns| Pattern::all_of(patterns).unwrap()),
            inner.prop_map(Pattern::negated),
        ]
    })
}

fn rule() -> impl Strategy<Value = DrawnRule> {
    use AlgorithmName::{FixedWindow, Gcra, SlidingWindowLog, TokenBucket};
    let limit = (
        prop::sample::select(vec!["1/s", "2/s", "3/min", "5/h"]),
        prop::sample::select(vec![FixedWindow, Gcra, SlidingWindowLog, TokenBucket]),
    );
    let mode = prop_oneof![3 => Just(Mode::Enforce), 1 => Just(Mode::Shadow)];
    (
        prop::collection::vec((entry(), pattern()), 0..3),
        prop::sample::subsequence(vec!["path", "ip", "user"], 0..3),
        prop::collection::vec(limit, 1..3),
        mode,
        prop::option::weighted(0.2, (entry(), pattern())),
    )
        .prop_map(|(conditions, key, limits, mode, allow)| DrawnRule {
            conditions,
            key,
            limits,
            mode,
            allow,
        })
}

fn step() -> impl Strategy<Value = Step> {
    let names = prop::sample::subsequence(vec!["path", "ip", "user"], 0..=3);
    let request = (names, [value(), value(), value()], 1..4_u64, 0..2_000_u64);
    let request = request.prop_map(|(names, values, cost, wait_ms)| Step::Request {
        entries: names.into_iter().zip(values).collect(),
        cost,
        wait_ms,
    });
    let block = (any::<prop::sample::Index>(), [value(), value()]);
    let block = block.prop_map(|(rule, values)| Step::Block {
        rule,
        values: values.into(),
    });
    prop_oneof![9 => request, 1 => block]
}

fn when(conditions: &[(&str, Pattern)]) -> When {
    let condition = |(entry, pattern): &(&str, Pattern)| Condition::new(entry, pattern.clone());
    When::all(
        conditions
            .iter()
            .map(|one| condition(one).unwrap())
            .collect(),
    )
}

fn build(drawn: &[DrawnRule], allow: Option<&(&str, Pattern)>) -> RuleSet {
    let limit = |(text, name): &(&str, AlgorithmName)| {
        let rate = notation::rate(text).unwrap();
        LimitSpec::shorthand(rate, *name).build().unwrap()
    };
    let rules = drawn.iter().enumerate().map(|(at, drawn)| {
        let limits = drawn.limits.iter().map(limit).collect();
        let rule = Rule::new(&format!("r{at}"), limits).unwrap();
        let rule = rule.when(when(&drawn.conditions)).keyed_by(&drawn.key);
        let rule = rule.unwrap().in_mode(drawn.mode);
        match &drawn.allow {
            Some(allow) => rule.allowing(vec![when(std::slice::from_ref(allow))]),
            None => rule,
        }
    });
    let allow = allow.map(|allow| when(std::slice::from_ref(allow)));
    RuleSet::build(rules.collect(), allow.into_iter().collect()).unwrap()
}

/// Returns the result of a future that completes without waiting, as with the memory store.
fn now<T>(future: impl Future<Output = T>) -> T {
    let mut future = pin!(future);
    match future
        .as_mut()
        .poll(&mut Context::from_waker(Waker::noop()))
    {
        Poll::Ready(done) => done,
        Poll::Pending => panic!("the memory store never waits"),
    }
}

fn explain<'r>(
    limiter: &ServerLimiter,
    rules: &'r RuleSet,
    request: &Request<'_>,
) -> Result<Explanation<'r>, ExplainError> {
    now(limiter.explain(rules, request))
}

/// Returns the parts of an explanation that a check also returns.
fn summary(explained: &Explanation<'_>) -> (bool, Option<Reason>, RetryAfter) {
    (explained.allowed, explained.reason, explained.retry_after)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(CASES))]
    #[test]
    fn an_explanation_agrees_with_the_check_that_follows(
        drawn in prop::collection::vec(rule(), 0..8),
        allow in prop::option::weighted(0.1, (entry(), pattern())),
        steps in prop::collection::vec(step(), 1..6),
    ) {
        let clock = Clock::manual(START);
        let store = MemoryStore::new(MemoryBounds { max_keys: 1_000, ..MemoryBounds::default() });
        let limiter = ServerLimiter::new(build(&drawn, allow.as_ref()), store, clock.clone());
        let rules = limiter.rules();
        for step in steps {
            let (entries, cost, wait_ms) = match step {
                Step::Request { entries, cost, wait_ms } => (entries, cost, wait_ms),
                Step::Block { rule, values } => {
                    if !drawn.is_empty() {
                        let rule = rules.iter().nth(rule.index(drawn.len())).unwrap();
                        if let Some(values) = values.get(..rule.key().len()) {
                            let key = rule.encode_key(values).unwrap();
                            let span = Some(Span::from_secs(3));
                            limiter.local_store().block(&key, span, "", limiter.now());
                        }
                    }
                    continue;
                }
            };
            clock.set(limiter.now().after(Span::from_millis(wait_ms)));
            let request = Request::new(&entries, Cost::new(cost).unwrap()).unwrap();
            let explained = explain(&limiter, &rules, &request).unwrap();
            let again = explain(&limiter, &rules, &request).unwrap();
            prop_assert_eq!(summary(&again), summary(&explained), "nothing was charged");

            let mut scratch = Scratch::default();
            let decided = limiter.check(&rules, &mut scratch, &request, Effect::Charge);
            let verdict = now(decided.into_future());
            let verdict = verdict.unwrap();
            prop_assert_eq!(
                summary(&explained),
                (verdict.allowed, verdict.reason, verdict.retry_after)
            );

            // A rule must apply if and only if it charges the request.
            let mut scratch = Scratch::default();
            let charged = rules.charges(&request, limiter.now(), &mut scratch).unwrap();
            let charged: Vec<&str> =
                charged.iter().filter_map(|charge| charge.limits.name()).collect();
            let applied: Vec<&str> =
                explained.charges.iter().map(|charge| charge.rule.name()).collect();
            prop_assert_eq!(&applied, &charged);
            for rule in rules.iter() {
                let failed = rule.failed_condition(&request, limiter.now());
                let is_applied = failed.is_none() && explained.allowed_by.is_none();
                prop_assert_eq!(is_applied, charged.contains(&rule.name()), "{:?}", failed);
            }
            // The request must be allowed if and only if no block and no enforced limit denies it.
            let denies = explained.charges.iter().any(|charge| {
                charge.reason == Some(Reason::Blocked)
                    || charge.reason.is_some() && charge.rule.mode() == Mode::Enforce
            });
            prop_assert_eq!(explained.allowed, !denies);
            for charge in &explained.charges {
                prop_assert_eq!(charge.allowed, charge.reason.is_none());
                prop_assert_eq!(charge.block.is_some(), charge.reason == Some(Reason::Blocked));
                prop_assert_eq!(charge.current.len(), charge.policies.len());
                // The check must have the same outcomes as the explanation.
                let name = Some(charge.rule.name());
                let lines = verdict.lines.iter().filter(|line| line.rule == name);
                let outcomes: Vec<_> = lines.map(|line| line.outcome).collect();
                if !outcomes.is_empty() {
                    prop_assert_eq!(&charge.next, &outcomes);
                }
            }
            // A request denied by a limit must pass at the time stated in the explanation.
            let denied = (explained.reason, explained.retry_after);
            if let (Some(Reason::Limit), RetryAfter::After(wait)) = denied {
                clock.set(limiter.now().after(wait));
                let later = explain(&limiter, &rules, &request).unwrap();
                prop_assert!(later.allowed || later.reason != Some(Reason::Limit), "{:?}", later);
            }
        }
    }
}

/// A check evaluates no limits for a blocked key. The explanation therefore evaluates the limits as
/// if there were no block.
#[test]
fn a_block_is_explained_with_the_limits_of_all_rules() {
    let rule = |name: &str, key: &str| {
        let rate = notation::rate("1/h").unwrap();
        let limit = LimitSpec::shorthand(rate, AlgorithmName::FixedWindow).build();
        let rule = Rule::new(name, vec![limit.unwrap()]).unwrap();
        rule.keyed_by(&[key]).unwrap()
    };
    let rules = RuleSet::build(
        vec![rule("by-ip", "ip"), rule("by-user", "user")],
        Vec::new(),
    );
    let clock = Clock::manual(START);
    let store = MemoryStore::new(MemoryBounds::default());
    let limiter = ServerLimiter::new(rules.unwrap(), store, clock);
    let rules = limiter.rules();
    let entries = [("ip", "10.0.0.1"), ("user", "ada")];
    let request = Request::new(&entries, Cost::ONE).unwrap();
    let mut scratch = Scratch::default();
    let checked = limiter.check(&rules, &mut scratch, &request, Effect::Charge);
    assert!(now(checked.into_future()).unwrap().allowed);
    let key = rules.rule("by-user").unwrap().encode_key(&["ada"]).unwrap();
    limiter.local_store().block(&key, None, "why", START);

    let explained = explain(&limiter, &rules, &request).unwrap();
    assert_eq!(
        summary(&explained),
        (false, Some(Reason::Blocked), RetryAfter::Never)
    );
    let [by_ip, by_user] = &explained.charges[..] else {
        panic!("{explained:?}");
    };
    assert_eq!(
        (by_ip.reason, by_user.reason),
        (Some(Reason::Limit), Some(Reason::Blocked))
    );
    assert_eq!(by_user.block.as_ref().unwrap().reason, "why");
    assert_eq!(
        (by_ip.current[0].remaining, by_user.current[0].remaining),
        (0, 0)
    );
}

/// An explanation names the plan whose limits apply, and the plan whose limits a factor multiplies.
#[test]
fn a_factor_is_explained_with_the_plan_that_it_multiplies() {
    let rule = Rule::new("api", vec!["10/min".parse().unwrap()]).unwrap();
    let rule = rule.keyed_by(&["user"]).unwrap();
    let plans = vec![("pro", vec!["100/min".parse().unwrap()])];
    let rule = rule.with_plans(Some("tier"), plans).unwrap();
    let rules = RuleSet::build(vec![rule], Vec::new()).unwrap();
    let store = MemoryStore::new(MemoryBounds::default());
    let limiter = ServerLimiter::new(rules, store, Clock::manual(START));
    let set = |replacement| {
        let new = Override {
            replacement,
            until: None,
            reason: "a test".into(),
        };
        let target = OverrideTarget::of(&["ada"]);
        let set = limiter.overrides().set("api", &target, new, START);
        set.unwrap();
    };
    let explained = |tier: &str| {
        let entries = [("user", "ada"), ("tier", tier)];
        let request = Request::new(&entries, Cost::ONE).unwrap();
        let rules = limiter.rules();
        let explained = explain(&limiter, &rules, &request).unwrap();
        let charge = &explained.charges[0];
        (
            charge.plan.map(str::to_owned),
            charge.policies[0].to_string(),
        )
    };
    let plan = |plan: &str, policy: &str| (Some(plan.to_owned()), policy.to_owned());
    assert_eq!(explained("pro"), plan("pro", "100/min"));
    set(Replacement::Factor("2x".parse().unwrap()));
    assert_eq!(explained("pro"), plan("pro", "200/min"));
    assert_eq!(explained("free"), (None, "20/min".to_owned()));
    set(Replacement::Limits(Box::new(["7/min".into()])));
    assert_eq!(explained("pro"), (None, "7/min".to_owned()));
    set(Replacement::Plan("pro".into()));
    assert_eq!(explained("free"), plan("pro", "100/min"));
}
