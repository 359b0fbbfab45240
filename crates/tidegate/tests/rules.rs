//! Limiters with rules: decisions, waiting, and rule changes.

#![cfg(feature = "tokio")]
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::{sync::Arc, time::Duration};

use tidegate::{
    AcquireError, Clock, Cost, LimitError, MemoryBounds, MemoryStore, Request, Rule, RuleLimiter,
    RuleSet, Span, Timestamp,
};
use tokio::{task::yield_now, time::Instant};

const START: Timestamp = Timestamp::from_micros(1_700_000_000_000_000);

/// One rule with a limit for each customer, and one with a limit for all customers together.
fn rules(each: &str, all: &str) -> RuleSet {
    let limits = |text: &str| Ok::<_, LimitError>(vec![text.parse()?]);
    let each = Rule::new("each", limits(each).unwrap()).unwrap();
    let each = each.keyed_by(&["customer"]).unwrap();
    let all = Rule::new("all", limits(all).unwrap()).unwrap();
    RuleSet::build(vec![each, all], Vec::new()).unwrap()
}

fn limiter(rules: RuleSet, clock: Clock) -> RuleLimiter {
    RuleLimiter::new(rules, MemoryStore::new(MemoryBounds::default()), clock)
}

fn request<'a>(entries: &'a [(&'a str, &'a str)], cost: u64) -> Request<'a> {
    Request::new(entries, Cost::new(cost).unwrap()).unwrap()
}

#[test]
fn a_check_charges_every_rule_and_a_peek_none() {
    let limiter = limiter(rules("3/min", "4/min"), Clock::manual(START));
    let current = limiter.current();
    let (alice, bob) = ([("customer", "alice")], [("customer", "bob")]);
    for _ in 0..2 {
        let verdict = current.peek(&request(&alice, 3)).unwrap();
        assert_eq!((verdict.allowed, verdict.remaining()), (true, Some(0)));
    }
    assert!(current.check(&request(&alice, 3)).unwrap().allowed);
    let verdict = current.check(&request(&bob, 2)).unwrap();
    assert_eq!((verdict.allowed, verdict.rule), (false, Some("all")));
    assert!(current.check_blocking(&request(&bob, 1)).unwrap().allowed);
    let unmatched = limiter.current();
    assert!(!unmatched.check(&request(&[], 1)).unwrap().allowed);
    let long = "x".repeat(2_000);
    let entries = [("customer", long.as_str())];
    let wrong = current.check(&request(&entries, 1)).unwrap_err();
    assert_eq!(wrong.field, "entries.customer");
}

/// An old rule set stays valid while it is in use.
#[test]
fn current_rules_do_not_change_while_they_are_in_use() {
    let limiter = limiter(rules("1/min", "9/min"), Clock::manual(START));
    let alice = [("customer", "alice")];
    let before = limiter.current();
    assert!(before.check(&request(&alice, 1)).unwrap().allowed);
    limiter.swap_rules(rules("2/min", "9/min"));
    assert_eq!(
        before
            .rules()
            .rule("each")
            .unwrap()
            .limits()
            .iter()
            .next()
            .unwrap()
            .quota(),
        1
    );
    assert!(!before.check(&request(&alice, 1)).unwrap().allowed);
    assert!(
        limiter
            .current()
            .check(&request(&alice, 1))
            .unwrap()
            .allowed,
        "the count was kept"
    );
    assert!(
        !limiter
            .current()
            .check(&request(&alice, 1))
            .unwrap()
            .allowed
    );
}

#[tokio::test(start_paused = true)]
async fn requests_with_the_same_charges_are_admitted_in_order() {
    let rules = rules("1/s burst 0", "100/s burst 99");
    let limiter = Arc::new(limiter(rules, Clock::tokio(START)));
    let start = Instant::now();
    let mut tasks = Vec::new();
    for customer in ["alice", "alice", "alice", "bob", "alice"] {
        let limiter = Arc::clone(&limiter);
        tasks.push(tokio::spawn(async move {
            let entries = [("customer", customer)];
            let current = limiter.current();
            let admitted = current.acquire(&request(&entries, 1)).await;
            (
                admitted.map(|verdict| verdict.allowed),
                start.elapsed().as_millis(),
            )
        }));
        yield_now().await;
    }
    tasks.remove(1).abort();
    for (task, at) in tasks.into_iter().zip([0, 1_000, 0, 2_000]) {
        assert_eq!(task.await.unwrap(), (Ok(true), at));
    }
    assert_eq!(limiter.waiters(), 0);
    let current = limiter.current();
    let alice = [("customer", "alice")];
    let request = request(&alice, 1);
    let late = current.acquire_within(&request, Duration::from_millis(999));
    let retry_after = Some(Span::from_secs(1));
    assert_eq!(
        late.await.unwrap_err(),
        AcquireError::Timeout { retry_after }
    );
    let long = "x".repeat(2_000);
    let wrong = [("customer", long.as_str())];
    let wrong = Request::new(&wrong, Cost::ONE).unwrap();
    let wrong = current.acquire(&wrong).await.unwrap_err();
    assert!(matches!(wrong, AcquireError::Request(_)), "{wrong}");
}
