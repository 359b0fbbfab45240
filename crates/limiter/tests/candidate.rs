//! Tests that candidate rules never change a response, and are evaluated as if they were the active
//! rules.

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
use tidegate::{Clock, DecidedRequest, RateLimiter as _};
use tidegate_config::Config;
use tidegate_core::{
    Cost, Effect, MemoryBounds, MemoryStore, Request, RuleSet, Scratch, Span, Timestamp, Verdict,
};
use tidegate_limiter::{
    KeyMask, ServerLimiter,
    candidate::{CandidateReport, CandidateRules},
    metrics::ListenerKind,
};

const START: Timestamp = Timestamp::from_micros(1_700_000_000_000_000);

fn rules(text: &str) -> RuleSet {
    Config::parse(text).unwrap().rules
}

fn limiter(text: &str, clock: &Clock) -> ServerLimiter {
    let store = MemoryStore::new(MemoryBounds::default());
    ServerLimiter::new(rules(text), store, clock.clone())
}

fn with_candidate(live: &str, candidate: &str, clock: &Clock) -> ServerLimiter {
    let limiter = limiter(live, clock);
    set_candidate(&limiter, candidate, None);
    limiter
}

fn set_candidate(limiter: &ServerLimiter, text: &str, until: Option<Timestamp>) {
    let read = CandidateRules {
        file: "candidate.yaml".into(),
        rules: rules(text),
        until,
    };
    limiter.set_candidate(Some(read), MemoryBounds::default());
}

/// Decides a request as a listener does. Returns whether the request is admitted, and the verdict
/// as a string.
fn ask(limiter: &ServerLimiter, entries: &[(&str, &str)]) -> (bool, String) {
    let rules = limiter.rules();
    let mut scratch = Scratch::default();
    let request = Request::new(entries, Cost::ONE).unwrap();
    let now = limiter.now();
    let mut decision = pin!(
        limiter
            .check(&rules, &mut scratch, &request, Effect::Charge)
            .into_future()
    );
    let Poll::Ready(verdict) = decision
        .as_mut()
        .poll(&mut Context::from_waker(Waker::noop()))
    else {
        panic!("the memory store never waits");
    };
    let verdict: Verdict<'_> = verdict.unwrap();
    let decided = DecidedRequest {
        request: &request,
        rules: &rules,
        now,
    };
    limiter.observe(ListenerKind::Http, decided, &verdict);
    (verdict.allowed, format!("{verdict:?}"))
}

fn report(limiter: &ServerLimiter) -> CandidateReport {
    let candidate = limiter.candidate().unwrap();
    candidate.report(&KeyMask::plain(), 1_000)
}

fn limit() -> impl Strategy<Value = String> {
    let algorithm = prop::sample::select(vec![
        "gcra",
        "token_bucket",
        "fixed_window",
        "sliding_window_log",
        "sliding_window_counter",
    ]);
    (1..6u64, 1..5u64, algorithm).prop_map(|(count, seconds, algorithm)| {
        format!("limits: ['{count}/{seconds}s'], algorithm: {algorithm}")
    })
}

fn rule_set() -> impl Strategy<Value = String> {
    let conditions = prop::sample::select(vec!["", "when: {path: /a}, ", "when: {path: /b}, "]);
    let mode = prop::sample::select(vec!["enforce", "enforce", "shadow"]);
    let key = prop::sample::select(vec!["user", "path"]);
    let rule = (conditions, key, limit(), mode)
        .prop_map(|(when, key, limit, mode)| format!("{when}key: [{key}], {limit}, mode: {mode}"));
    prop::collection::vec(rule, 1..4).prop_map(|rules| {
        let named = rules.iter().enumerate();
        let named = named.map(|(at, rule)| format!("  - {{name: rule{at}, {rule}}}\n"));
        format!("rules:\n{}", named.collect::<String>())
    })
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 256,
        max_shrink_iters: 500,
        ..ProptestConfig::default()
    })]

    #[test]
    fn the_candidate_never_changes_an_answer_and_decides_as_if_in_force(
        live in rule_set(),
        candidate in rule_set(),
        steps in prop::collection::vec((0..3usize, 0..3usize, 0..2_000u64), 1..60),
    ) {
        let clock = Clock::manual(START);
        let compared = with_candidate(&live, &candidate, &clock);
        let alone = limiter(&live, &clock);
        let in_force = limiter(&candidate, &clock);
        let (mut newly, mut no_longer, mut denied) = (0, 0, 0);
        for (path, user, wait_ms) in &steps {
            clock.set(clock.now().after(Span::from_micros(wait_ms * 1_000)));
            let path = ["/a", "/b", "/c"][*path];
            let user = ["ada", "bob", "eve"][*user];
            let entries = [("path", path), ("user", user)];
            let answer = ask(&compared, &entries);
            prop_assert_eq!(&answer, &ask(&alone, &entries));
            let (is_allowed, _) = ask(&in_force, &entries);
            newly += u64::from(answer.0 && !is_allowed);
            no_longer += u64::from(!answer.0 && is_allowed);
            denied += u64::from(!is_allowed);
        }
        let report = report(&compared);
        prop_assert_eq!(report.compared, steps.len() as u64);
        prop_assert_eq!(report.denied, denied);
        prop_assert_eq!((report.newly_denied, report.no_longer_denied), (newly, no_longer));
        let listed: u64 = report.no_longer.keys.iter().map(|key| key.requests).sum();
        prop_assert_eq!(listed, no_longer);
        prop_assert_eq!((report.not_compared, report.lost), (0, 0));
    }
}

const LIVE: &str = "rules: [{name: api, key: [user], limits: [2/h], algorithm: fixed_window}]";

#[test]
fn a_rule_whose_decisions_depend_on_the_response_is_excluded() {
    let clock = Clock::manual(START);
    let candidate = "rules:
  - {name: api, key: [user], limits: [1/h], algorithm: fixed_window}
  - {name: slots, key: [user], limits: [{algorithm: concurrency, limit: 1, lease: 10s}]}
";
    let limiter = with_candidate(LIVE, candidate, &clock);
    for _ in 0..3 {
        ask(&limiter, &[("user", "ada")]);
    }
    let report = report(&limiter);
    let rules: Vec<_> = report
        .rules
        .iter()
        .map(|rule| (&*rule.rule, rule.is_excluded, rule.requests, rule.denied))
        .collect();
    assert_eq!(rules, [("api", false, 3, 2), ("slots", true, 0, 0)]);
    assert_eq!((report.newly_denied, report.no_longer_denied), (1, 0));
}

#[test]
fn a_blocked_key_is_not_compared() {
    let clock = Clock::manual(START);
    let limiter = with_candidate(LIVE, LIVE, &clock);
    let rules = limiter.rules();
    let key = rules.rule("api").unwrap().encode_key(&["ada"]).unwrap();
    let store = limiter.local_store();
    store.block(&key, None, "test", limiter.now());
    assert!(!ask(&limiter, &[("user", "ada")]).0);
    let report = report(&limiter);
    assert_eq!((report.compared, report.not_compared), (0, 1));
}

#[test]
fn the_comparison_ends_at_the_given_time() {
    let clock = Clock::manual(START);
    let limiter = limiter(LIVE, &clock);
    set_candidate(&limiter, LIVE, Some(START.after(Span::from_secs(10))));
    ask(&limiter, &[("user", "ada")]);
    clock.set(clock.now().after(Span::from_secs(10)));
    ask(&limiter, &[("user", "ada")]);
    assert_eq!(report(&limiter).compared, 1);
}

#[test]
fn a_changed_candidate_keeps_its_counters_and_begins_a_new_comparison() {
    let clock = Clock::manual(START);
    let limiter = with_candidate(LIVE, LIVE, &clock);
    ask(&limiter, &[("user", "ada")]);
    let tighter = "rules: [{name: api, key: [user], limits: [1/h], algorithm: fixed_window}]";
    set_candidate(&limiter, tighter, None);
    ask(&limiter, &[("user", "ada")]);
    let report = report(&limiter);
    assert_eq!((report.compared, report.newly_denied), (1, 1));
    limiter.set_candidate(None, MemoryBounds::default());
    assert!(limiter.candidate().is_none());
}
