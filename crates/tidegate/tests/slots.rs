//! Tests of requests waiting for concurrency slots, with tokio's paused time.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "a test fails by panicking"
)]

use std::{
    collections::VecDeque,
    sync::{Arc, Mutex},
    time::Duration,
};

use proptest::prelude::*;
use tidegate::{
    Algorithm, Clock, Cost, Limit, MemoryBounds, MemoryStore, RateLimiter, Reason, Request,
    RetryAfter, Rule, RuleLimiter, RuleSet, Span, Timestamp, Verdict, WaitEnd,
    rate_limiter::{OwnedCharges, Receipts, SlotTurn, TurnBuffers, TurnResult, release_slots},
};
use tidegate_core::{
    Charge, Effect, EntryBlock, EntryBlockTarget, EntryBlocks, Override, OverrideTarget, Overrides,
    Replacement, Scratch, Settlement, SlotWait,
};
use tokio::{
    task::JoinHandle,
    time::{Instant, sleep, timeout},
};

const START: Timestamp = Timestamp::from_micros(1_700_006_400_000_000);

/// The lease of all slots.
const LEASE_MS: u64 = 60_000;

fn slots(limit: u64, longest: Span, queue: u64) -> Limit {
    let lease = Span::from_millis(LEASE_MS);
    let limit = Limit::new(Algorithm::Concurrency { limit, lease }).unwrap();
    limit.with_slot_wait(SlotWait { longest, queue }).unwrap()
}

fn rule(name: &str, key: &[&str], limits: Vec<Limit>) -> Rule {
    Rule::new(name, limits).unwrap().keyed_by(key).unwrap()
}

fn limiter(rules: Vec<Rule>) -> Arc<RuleLimiter> {
    let rules = RuleSet::build(rules, Vec::new()).unwrap();
    let store = MemoryStore::new(MemoryBounds::default());
    Arc::new(RuleLimiter::new(rules, store, Clock::tokio(START)))
}

/// The slots of an admitted request.
struct Held {
    limiter: Arc<RuleLimiter>,
    charges: OwnedCharges,
    receipt: Option<tidegate_core::Receipt>,
    since: Timestamp,
}

impl Held {
    fn release(mut self) {
        let (now, charges) = (self.limiter.now(), self.charges.as_charges());
        let settlements = vec![Settlement::default(); charges.len()];
        let store = self.limiter.store();
        tidegate::Store::settle(store, &charges, &mut self.receipt, &settlements, now).into_inner();
        let held = Some(now.since(self.since));
        release_slots(self.limiter.wait_queues(), &self.charges, held);
    }
}

/// The denial of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Denial {
    reason: Option<Reason>,
    retry_after: RetryAfter,
    at_capacity: bool,
}

impl Denial {
    fn of(verdict: &Verdict<'_>) -> Self {
        Self {
            reason: verdict.reason,
            retry_after: verdict.retry_after,
            at_capacity: verdict.is_at_capacity(),
        }
    }
}

/// Requests slots, and waits at most `longest_wait` for them.
async fn acquire(
    limiter: &Arc<RuleLimiter>,
    entries: &[(&str, &str)],
    longest_wait: Span,
) -> Result<Held, Denial> {
    let rules = limiter.rules();
    let request = Request::new(entries, Cost::ONE).unwrap();
    let (mut scratch, mut outcomes) = (Scratch::default(), Vec::new());
    let turn = SlotTurn::new(Effect::Charge, longest_wait).with_receipts(Receipts::Wanted);
    let mut charges = rules
        .charges(&request, limiter.now(), &mut scratch)
        .unwrap();
    let decided = turn.decide_now(&**limiter, &mut charges, &mut outcomes, limiter.now());
    if let Some(decided) = decided {
        let verdict = decided.verdict(&charges, &outcomes);
        return held(limiter, &rules, &charges, &verdict, decided.receipt);
    }
    let buffers = TurnBuffers {
        scratch: &mut scratch,
        outcomes: &mut outcomes,
    };
    let finish = |decided: TurnResult<'_, _>| {
        let TurnResult {
            rules,
            charges,
            verdict,
            receipt,
        } = decided;
        held(limiter, rules, charges, &verdict, receipt)
    };
    turn.decide_request(&**limiter, &rules, &request, buffers, finish)
        .await
        .unwrap()
}

/// Returns the slots of a request if `verdict` admits it.
fn held(
    limiter: &Arc<RuleLimiter>,
    rules: &Arc<RuleSet>,
    charges: &[Charge<'_>],
    verdict: &Verdict<'_>,
    receipt: Option<tidegate_core::Receipt>,
) -> Result<Held, Denial> {
    if !verdict.allowed {
        return Err(Denial::of(verdict));
    }
    Ok(Held {
        limiter: Arc::clone(limiter),
        charges: OwnedCharges::new(rules, charges),
        receipt,
        since: limiter.now(),
    })
}

fn spawn(
    limiter: &Arc<RuleLimiter>,
    entries: &'static [(&'static str, &'static str)],
    longest_wait: Span,
) -> JoinHandle<Result<Held, Denial>> {
    let limiter = Arc::clone(limiter);
    tokio::spawn(async move { acquire(&limiter, entries, longest_wait).await })
}

async fn settle_tasks() {
    for _ in 0..20 {
        tokio::task::yield_now().await;
    }
}

/// Returns the remaining units of the rule at index `at`.
async fn remaining(limiter: &RuleLimiter, entries: &[(&str, &str)], at: usize) -> u64 {
    let request = Request::new(entries, Cost::ONE).unwrap();
    let (rules, mut scratch) = (limiter.rules(), Scratch::default());
    let verdict = limiter.check(&rules, &mut scratch, &request, Effect::Look);
    verdict.await.unwrap().lines[at].outcome.remaining
}

const TWO_SECONDS: Span = Span::from_secs(2);

#[test]
fn a_peek_with_receipts_charges_nothing() {
    let limiter = limiter(vec![rule("all", &[], vec!["5/min".parse().unwrap()])]);
    let (mut scratch, mut outcomes) = (Scratch::default(), Vec::new());
    let rules = limiter.rules();
    let request = Request::new(&[], Cost::ONE).unwrap();
    let turn = SlotTurn::new(Effect::Peek, Span::ZERO).with_receipts(Receipts::Wanted);
    for _ in 0..2 {
        let now = limiter.now();
        let mut charges = rules.charges(&request, now, &mut scratch).unwrap();
        let decided = turn.decide_now(&*limiter, &mut charges, &mut outcomes, now);
        assert!(decided.unwrap().receipt.is_none());
        assert_eq!(outcomes[0].remaining, 4, "what a charge would leave");
    }
}

#[tokio::test(start_paused = true)]
async fn sixty_arrivals_at_twenty_slots_are_served_in_order() {
    let limiter = limiter(vec![rule("all", &[], vec![slots(20, TWO_SECONDS, 100)])]);
    let (order, start) = (Arc::new(Mutex::new(Vec::new())), Instant::now());
    let mut tasks = Vec::new();
    for number in 0..60_u64 {
        let (limiter, order) = (Arc::clone(&limiter), Arc::clone(&order));
        tasks.push(tokio::spawn(async move {
            // Three requests arrive per millisecond.
            sleep(Duration::from_millis(number / 3)).await;
            let held = acquire(&limiter, &[], TWO_SECONDS).await;
            let held = held.unwrap_or_else(|denial| panic!("{number}: {denial:?}"));
            order.lock().unwrap().push(number);
            sleep(Duration::from_millis(500 + number * 37 % 200)).await;
            held.release();
        }));
    }
    for task in tasks {
        task.await.unwrap();
    }
    let order = order.lock().unwrap().clone();
    assert_eq!(order, (0..60).collect::<Vec<_>>());
    assert!(start.elapsed() < Duration::from_millis(2_200));
    let admitted = limiter.wait_queues().stats().buckets(WaitEnd::Admitted);
    assert_eq!(
        admitted.iter().sum::<u64>(),
        40,
        "the first 20 did not wait"
    );
    assert_eq!(limiter.wait_queues().count(), 0);
}

#[tokio::test(start_paused = true)]
async fn a_request_is_denied_when_its_longest_wait_is_over() {
    let limiter = limiter(vec![rule("all", &[], vec![slots(1, TWO_SECONDS, 100)])]);
    let (held, start) = (
        acquire(&limiter, &[], TWO_SECONDS).await.unwrap(),
        Instant::now(),
    );
    let denied = acquire(&limiter, &[], TWO_SECONDS).await.err().unwrap();
    assert_eq!(start.elapsed(), Duration::from_secs(2));
    assert_eq!(
        (denied.reason, denied.at_capacity),
        (Some(Reason::Limit), true)
    );
    // The caller's longest wait is shorter than the rule's longest wait.
    let denied = acquire(&limiter, &[], Span::from_millis(300)).await;
    assert!(denied.is_err());
    assert_eq!(start.elapsed(), Duration::from_millis(2_300));
    let denied = acquire(&limiter, &[], Span::ZERO).await;
    assert!(denied.is_err());
    assert_eq!(
        start.elapsed(),
        Duration::from_millis(2_300),
        "denied at once"
    );
    held.release();
    let stats = limiter.wait_queues().stats();
    assert_eq!(stats.total(WaitEnd::Denied), Span::from_millis(2_300));
}

#[tokio::test(start_paused = true)]
async fn a_full_queue_denies_at_once() {
    let limiter = limiter(vec![rule("each", &["c"], vec![slots(1, TWO_SECONDS, 2)])]);
    let held = acquire(&limiter, &[("c", "a")], TWO_SECONDS).await.unwrap();
    let waiting: Vec<_> = (0..2)
        .map(|_| spawn(&limiter, &[("c", "a")], TWO_SECONDS))
        .collect();
    settle_tasks().await;
    let start = Instant::now();
    let denied = acquire(&limiter, &[("c", "a")], TWO_SECONDS).await;
    let denied = denied.err().unwrap();
    assert!(!denied.at_capacity, "the limit is the client's own");
    // Other keys have their own slots and queues.
    let other = acquire(&limiter, &[("c", "b")], TWO_SECONDS).await.unwrap();
    assert_eq!(start.elapsed(), Duration::ZERO);
    other.release();
    held.release();
    for task in waiting {
        task.await.unwrap().unwrap().release();
    }
}

#[tokio::test(start_paused = true)]
async fn a_cancelled_request_gives_its_turn_to_the_next() {
    let limiter = limiter(vec![rule("all", &[], vec![slots(1, TWO_SECONDS, 100)])]);
    let held = acquire(&limiter, &[], TWO_SECONDS).await.unwrap();
    let [first, second] = [(); 2].map(|()| spawn(&limiter, &[], TWO_SECONDS));
    settle_tasks().await;
    assert_eq!(limiter.wait_queues().count(), 2);
    first.abort();
    assert!(first.await.is_err());
    assert_eq!(limiter.wait_queues().count(), 1);
    let start = Instant::now();
    held.release();
    second.await.unwrap().unwrap().release();
    assert_eq!(start.elapsed(), Duration::ZERO, "it was first at once");
    let cancelled = limiter.wait_queues().stats().buckets(WaitEnd::Cancelled);
    assert_eq!(cancelled.iter().sum::<u64>(), 1);
}

/// Returns a limiter whose only slot is never released, so that it is free when its lease of 300 ms
/// expires.
async fn crashed_holder() -> (Arc<RuleLimiter>, Held) {
    let lease = Span::from_millis(300);
    let limit = Limit::new(Algorithm::Concurrency { limit: 1, lease }).unwrap();
    let slot_wait = SlotWait {
        longest: TWO_SECONDS,
        queue: 1,
    };
    let limit = limit.with_slot_wait(slot_wait).unwrap();
    let limiter = limiter(vec![rule("all", &[], vec![limit])]);
    let crashed = acquire(&limiter, &[], TWO_SECONDS).await.unwrap();
    (limiter, crashed)
}

#[tokio::test(start_paused = true)]
async fn an_expired_lease_ends_a_wait() {
    let (limiter, crashed) = crashed_holder().await;
    let start = Instant::now();
    acquire(&limiter, &[], TWO_SECONDS).await.unwrap().release();
    assert_eq!(start.elapsed(), Duration::from_millis(300));
    drop(crashed);
}

/// Blocks the address 203.0.113.9 for a minute.
fn block_address(blocks: &EntryBlocks, now: Timestamp) {
    let target = EntryBlockTarget::new(None, &[("ip", "203.0.113.9")]).unwrap();
    let block = EntryBlock {
        until: Some(now.after(Span::from_secs(60))),
        reason: "abuse".into(),
    };
    blocks.set(&target, block, now).unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_reload_applies_to_waiting_requests() {
    let rules = |limits| vec![rule("each", &["c"], limits)];
    let limiter = limiter(rules(vec![slots(1, TWO_SECONDS, 100)]));
    let held = acquire(&limiter, &[("c", "a")], TWO_SECONDS).await.unwrap();
    let waiting = [(); 3].map(|()| spawn(&limiter, &[("c", "a")], TWO_SECONDS));
    settle_tasks().await;
    let start = Instant::now();
    let swap = |rules| limiter.swap_rules(RuleSet::build(rules, Vec::new()).unwrap());
    // One more slot admits the first waiting request without a release.
    swap(rules(vec![slots(2, TWO_SECONDS, 100)]));
    let [first, second, third] = waiting;
    let first = first.await.unwrap().unwrap();
    assert!(start.elapsed() <= Duration::from_millis(500));
    // When the second request is first in the queue, a new limit denies it.
    let quota = rule("quota", &["c"], vec!["1/h".parse().unwrap()]);
    let all = rule("each", &["c"], vec![slots(2, TWO_SECONDS, 100)]);
    swap(vec![quota, all]);
    settle_tasks().await;
    held.release();
    let second = second.await.unwrap().unwrap();
    first.release();
    let denied = third.await.unwrap().err().unwrap();
    assert!(!denied.at_capacity, "the quota has denied it");
    second.release();
    // Without a rule, nothing limits a request.
    swap(rules(vec![slots(1, TWO_SECONDS, 100)]));
    let held = acquire(&limiter, &[("c", "b")], TWO_SECONDS).await.unwrap();
    let waiting = spawn(&limiter, &[("c", "b")], TWO_SECONDS);
    settle_tasks().await;
    swap(Vec::new());
    waiting.await.unwrap().unwrap().release();
    held.release();
}

#[tokio::test(start_paused = true)]
async fn a_waiting_request_follows_its_key_to_another_queue() {
    let all = |key: &[&str]| vec![rule("all", key, vec![slots(1, TWO_SECONDS, 100)])];
    let limiter = limiter(all(&[]));
    let held = acquire(&limiter, &[("c", "a")], TWO_SECONDS).await.unwrap();
    let waiting = [[("c", "b")], [("c", "c")], [("c", "c")]];
    let order = Arc::new(Mutex::new(Vec::new()));
    let tasks: Vec<_> = (waiting.into_iter().enumerate())
        .map(|(number, entries)| {
            let (limiter, order) = (Arc::clone(&limiter), Arc::clone(&order));
            tokio::spawn(async move {
                let held = acquire(&limiter, &entries, TWO_SECONDS).await;
                order.lock().unwrap().push((number, held.is_ok()));
                sleep(Duration::from_millis(200)).await;
                held.map(Held::release)
            })
        })
        .collect();
    settle_tasks().await;
    limiter.swap_rules(RuleSet::build(all(&["c"]), Vec::new()).unwrap());
    for task in tasks {
        task.await.unwrap().unwrap();
    }
    assert_eq!(*order.lock().unwrap(), [(0, true), (1, true), (2, true)]);
    assert_eq!(limiter.wait_queues().count(), 0);
    held.release();
}

/// In its former queue, the request would delay requests whose new keys have free slots.
#[tokio::test(start_paused = true)]
async fn a_waiting_request_is_denied_if_its_new_queue_is_full() {
    let all = |key: &[&str], queue| vec![rule("all", key, vec![slots(1, TWO_SECONDS, queue)])];
    let limiter = limiter(all(&[], 100));
    let held = acquire(&limiter, &[("c", "a")], TWO_SECONDS).await.unwrap();
    let [b, c] = [&[("c", "b")], &[("c", "c")]];
    let waiting = [b, b, b, c].map(|entries| spawn(&limiter, entries, TWO_SECONDS));
    settle_tasks().await;
    limiter.swap_rules(RuleSet::build(all(&["c"], 1), Vec::new()).unwrap());
    held.release();
    settle_tasks().await;
    let [first, second, third, other] = waiting;
    let first = first.await.unwrap().unwrap();
    // The queue of `b` has room for one request.
    assert!(third.await.unwrap().is_err());
    other.await.unwrap().unwrap().release();
    first.release();
    second.await.unwrap().unwrap().release();
    assert_eq!(limiter.wait_queues().count(), 0);
}

#[tokio::test(start_paused = true)]
async fn a_reload_can_shorten_a_wait_but_not_extend_it() {
    let all = |longest| vec![rule("all", &[], vec![slots(1, longest, 100)])];
    let limiter = limiter(all(TWO_SECONDS));
    let held = acquire(&limiter, &[], TWO_SECONDS).await.unwrap();
    for (longest, denied_after) in [(Span::from_secs(1), 1), (Span::from_secs(9), 2)] {
        let start = Instant::now();
        limiter.swap_rules(RuleSet::build(all(TWO_SECONDS), Vec::new()).unwrap());
        let waiting = spawn(&limiter, &[], Span::from_secs(60));
        settle_tasks().await;
        limiter.swap_rules(RuleSet::build(all(longest), Vec::new()).unwrap());
        assert!(waiting.await.unwrap().is_err());
        assert_eq!(start.elapsed(), Duration::from_secs(denied_after));
    }
    held.release();
}

#[tokio::test(start_paused = true)]
async fn an_override_applies_to_waiting_requests() {
    let overrides = Overrides::default();
    let each = rule("each", &["c"], vec![slots(1, TWO_SECONDS, 100)]);
    let rules = RuleSet::build(vec![each], Vec::new()).unwrap();
    let store = MemoryStore::new(MemoryBounds::default());
    let rules = rules.with_overrides(&overrides);
    let limiter = Arc::new(RuleLimiter::new(rules, store, Clock::tokio(START)));
    let held = acquire(&limiter, &[("c", "a")], TWO_SECONDS).await.unwrap();
    let waiting = [(); 2].map(|()| spawn(&limiter, &[("c", "a")], TWO_SECONDS));
    settle_tasks().await;
    let start = Instant::now();
    let new = Override {
        replacement: Replacement::Factor("3x".parse().unwrap()),
        until: None,
        reason: "launch".into(),
    };
    let target = OverrideTarget::of(&["a"]);
    overrides.set("each", &target, new, limiter.now()).unwrap();
    for task in waiting {
        task.await.unwrap().unwrap().release();
    }
    assert!(start.elapsed() <= Duration::from_millis(500));
    held.release();
}

/// A block denies a waiting request immediately, even if it is not the first in its queue.
#[tokio::test(start_paused = true)]
async fn a_block_by_entries_denies_waiting_requests_at_once() {
    let blocks = EntryBlocks::default();
    let all = rule("all", &[], vec![slots(1, TWO_SECONDS, 100)]);
    let rules = RuleSet::build(vec![all], Vec::new()).unwrap();
    let store = MemoryStore::new(MemoryBounds::default());
    let rules = rules.with_entry_blocks(&blocks);
    let limiter = Arc::new(RuleLimiter::new(rules, store, Clock::tokio(START)));
    let held = acquire(&limiter, &[], TWO_SECONDS).await.unwrap();
    let first = spawn(&limiter, &[("ip", "203.0.113.1")], TWO_SECONDS);
    let blocked = spawn(&limiter, &[("ip", "203.0.113.9")], TWO_SECONDS);
    let last = spawn(&limiter, &[("ip", "203.0.113.2")], TWO_SECONDS);
    settle_tasks().await;
    let start = Instant::now();
    block_address(&blocks, limiter.now());
    limiter.wait_queues().recheck_entry_blocks();
    let denied = blocked.await.unwrap().err().unwrap();
    assert_eq!(start.elapsed(), Duration::ZERO);
    assert_eq!(denied.reason, Some(Reason::Blocked));
    assert_eq!(limiter.wait_queues().count(), 2, "the others still wait");
    held.release();
    first.await.unwrap().unwrap().release();
    last.await.unwrap().unwrap().release();
    assert_eq!(start.elapsed(), Duration::ZERO);
}

/// Changes of the blocks do not delay the attempts of a waiting request.
#[tokio::test(start_paused = true)]
async fn a_request_waits_no_longer_while_blocks_change() {
    let (limiter, crashed) = crashed_holder().await;
    let start = Instant::now();
    let waiting = spawn(&limiter, &[], TWO_SECONDS);
    while !waiting.is_finished() {
        limiter.wait_queues().recheck_entry_blocks();
        sleep(Duration::from_millis(1)).await;
    }
    waiting.await.unwrap().unwrap().release();
    assert!(start.elapsed() <= Duration::from_millis(302));
    drop(crashed);
}

#[tokio::test(start_paused = true)]
async fn a_block_of_the_key_denies_all_its_waiting_requests_at_once() {
    let limiter = limiter(vec![rule("each", &["c"], vec![slots(1, TWO_SECONDS, 100)])]);
    let held = acquire(&limiter, &[("c", "a")], TWO_SECONDS).await.unwrap();
    let waiting = [(); 3].map(|()| spawn(&limiter, &[("c", "a")], TWO_SECONDS));
    settle_tasks().await;
    let start = Instant::now();
    let key = limiter
        .rules()
        .rule("each")
        .unwrap()
        .encode_key(&["a"])
        .unwrap();
    let minute = Some(Span::from_secs(60));
    assert!(limiter.store().block(&key, minute, "abuse", limiter.now()));
    limiter.wait_queues().wake(&key);
    for task in waiting {
        let denied = task.await.unwrap().err().unwrap();
        assert_eq!(denied.reason, Some(Reason::Blocked));
    }
    assert_eq!(start.elapsed(), Duration::ZERO);
    held.release();
}

/// All limits are charged together, at the time of admission.
#[tokio::test(start_paused = true)]
async fn a_waiting_request_has_charged_no_other_limit() {
    let quota = rule("quota", &[], vec!["3/h".parse().unwrap()]);
    let all = rule("all", &[], vec![slots(1, TWO_SECONDS, 100)]);
    let limiter = limiter(vec![quota, all]);
    let held = acquire(&limiter, &[], TWO_SECONDS).await.unwrap();
    let waiting = spawn(&limiter, &[], TWO_SECONDS);
    settle_tasks().await;
    assert_eq!(remaining(&limiter, &[], 0).await, 2);
    held.release();
    let held = waiting.await.unwrap().unwrap();
    assert_eq!(remaining(&limiter, &[], 0).await, 1);
    let third = spawn(&limiter, &[], TWO_SECONDS);
    settle_tasks().await;
    held.release();
    let held = third.await.unwrap().unwrap();
    // The quota denies the next request, which therefore does not wait.
    let start = Instant::now();
    let denied = acquire(&limiter, &[], TWO_SECONDS).await.err().unwrap();
    assert_eq!(start.elapsed(), Duration::ZERO);
    let RetryAfter::After(retry_after) = denied.retry_after else {
        panic!("{denied:?}");
    };
    assert!(retry_after > Span::from_secs(3_590), "{retry_after}");
    held.release();
}

/// If another limit denies the request after its wait, the retry time is measured from that denial.
#[tokio::test(start_paused = true)]
async fn a_retry_time_after_a_wait_is_exact() {
    let window = tidegate::LimitSpec::shorthand(
        tidegate::notation::rate("1/10s").unwrap(),
        tidegate::AlgorithmName::SlidingWindowLog,
    );
    let quota = rule("quota", &[], vec![window.build().unwrap()]);
    let all = rule("all", &[], vec![slots(1, TWO_SECONDS, 100)]);
    let limiter = limiter(vec![quota.keyed_by(&["c"]).unwrap(), all]);
    let held = acquire(&limiter, &[("c", "a")], TWO_SECONDS).await.unwrap();
    // Both requests wait, and the first request exhausts the quota.
    let [first, second] = [(); 2].map(|()| spawn(&limiter, &[("c", "b")], TWO_SECONDS));
    settle_tasks().await;
    sleep(Duration::from_secs(1)).await;
    held.release();
    let held = first.await.unwrap().unwrap();
    let denied = second.await.unwrap().err().unwrap();
    assert_eq!(denied.retry_after, RetryAfter::After(Span::from_secs(10)));
    held.release();
}

/// A limit that counts denied requests counts each request once, however long it waits.
#[tokio::test(start_paused = true)]
async fn a_request_that_waits_is_counted_once() {
    let window = tidegate::LimitSpec {
        count_denied: Some(true),
        ..tidegate::LimitSpec::shorthand(
            tidegate::notation::rate("10/h").unwrap(),
            tidegate::AlgorithmName::FixedWindow,
        )
    };
    let quota = rule("quota", &[], vec![window.build().unwrap()]);
    let all = rule("all", &[], vec![slots(1, TWO_SECONDS, 100)]);
    let limiter = limiter(vec![quota, all]);
    let held = acquire(&limiter, &[], TWO_SECONDS).await.unwrap();
    assert_eq!(remaining(&limiter, &[], 0).await, 9);
    let waiting = spawn(&limiter, &[], TWO_SECONDS);
    sleep(Duration::from_secs(1)).await;
    assert_eq!(remaining(&limiter, &[], 0).await, 9);
    held.release();
    let held = waiting.await.unwrap().unwrap();
    assert_eq!(remaining(&limiter, &[], 0).await, 8);
    assert!(acquire(&limiter, &[], TWO_SECONDS).await.is_err());
    assert_eq!(
        remaining(&limiter, &[], 0).await,
        7,
        "denied after its wait"
    );
    held.release();
}

/// A request may be first in the queue of the service's key while all slots of its customer are in
/// use. The request then waits on the customer's key and does not block other customers.
#[tokio::test(start_paused = true)]
async fn a_request_can_wait_on_one_key_after_another() {
    let all = rule("all", &[], vec![slots(2, TWO_SECONDS, 100)]);
    let each = rule("each", &["c"], vec![slots(1, TWO_SECONDS, 100)]);
    let limiter = limiter(vec![all, each]);
    let alice = acquire(&limiter, &[("c", "alice")], TWO_SECONDS)
        .await
        .unwrap();
    let bob = acquire(&limiter, &[("c", "bob")], TWO_SECONDS)
        .await
        .unwrap();
    let second_alice = spawn(&limiter, &[("c", "alice")], TWO_SECONDS);
    settle_tasks().await;
    let carol = spawn(&limiter, &[("c", "carol")], TWO_SECONDS);
    settle_tasks().await;
    let start = Instant::now();
    bob.release();
    let carol = carol.await.unwrap().unwrap();
    sleep(Duration::from_millis(1_500)).await;
    alice.release();
    second_alice.await.unwrap().unwrap().release();
    assert_eq!(start.elapsed(), Duration::from_millis(1_500));
    carol.release();
}

/// A customer with many waiting requests does not get a service slot before an earlier request of
/// another customer. The order also holds if the customer's requests are first in the queue of the
/// customer's own key.
#[tokio::test(start_paused = true)]
async fn the_order_of_arrival_holds_across_keys() {
    let each = rule("each", &["c"], vec![slots(1, TWO_SECONDS, 100)]);
    let all = rule("all", &[], vec![slots(1, TWO_SECONDS, 100)]);
    let limiter = limiter(vec![each, all]);
    let alice = acquire(&limiter, &[("c", "alice")], TWO_SECONDS)
        .await
        .unwrap();
    let mut waiting = Vec::new();
    for customer in [&[("c", "alice")], &[("c", "bob")], &[("c", "alice")]] {
        waiting.push(spawn(&limiter, customer, TWO_SECONDS));
        settle_tasks().await;
    }
    let start = Instant::now();
    let mut held = alice;
    for next in waiting {
        held.release();
        settle_tasks().await;
        assert!(next.is_finished(), "it is the next one");
        held = next.await.unwrap().unwrap();
    }
    assert_eq!(start.elapsed(), Duration::ZERO);
    held.release();
    assert_eq!(limiter.wait_queues().count(), 0);
}

/// A request of `acquire` waits in the same queue as other requests. Therefore a release wakes the
/// request immediately, and the request keeps its position.
#[tokio::test(start_paused = true)]
async fn acquire_waits_in_the_same_queue() {
    let limiter = limiter(vec![rule("all", &[], vec![slots(1, TWO_SECONDS, 100)])]);
    let held = acquire(&limiter, &[], TWO_SECONDS).await.unwrap();
    let waiting = {
        let limiter = Arc::clone(&limiter);
        tokio::spawn(async move {
            let request = Request::new(&[], Cost::ONE).unwrap();
            limiter.current().acquire(&request).await.unwrap().allowed
        })
    };
    settle_tasks().await;
    let behind = spawn(&limiter, &[], TWO_SECONDS);
    settle_tasks().await;
    assert_eq!(limiter.wait_queues().count(), 2);
    // The estimated retry time is longer than the remaining wait time. Nevertheless, the request is
    // not rejected.
    sleep(Duration::from_millis(1_700)).await;
    let start = Instant::now();
    held.release();
    assert!(waiting.await.unwrap());
    assert_eq!(start.elapsed(), Duration::ZERO);
    assert!(behind.await.unwrap().is_err(), "`acquire` keeps its slot");
    assert_eq!(start.elapsed(), Duration::from_millis(300));
}

#[tokio::test(start_paused = true)]
async fn the_retry_time_is_estimated_from_holding_times() {
    let limiter = limiter(vec![rule("all", &[], vec![slots(2, TWO_SECONDS, 100)])]);
    let denied = async || {
        let denied = acquire(&limiter, &[], Span::ZERO).await;
        denied.err().unwrap().retry_after
    };
    let hold = async || {
        let held = [(); 2].map(|()| async { acquire(&limiter, &[], TWO_SECONDS).await.unwrap() });
        futures_util::future::join_all(held).await
    };
    let held = hold().await;
    sleep(Duration::from_secs(30)).await;
    // No holding time was recorded yet, so the retry time is the store's own hint, which is at most
    // the duration of the lease.
    assert_eq!(denied().await, RetryAfter::After(Span::from_secs(10)));
    held.into_iter().for_each(Held::release);
    for _ in 0..100 {
        let held = hold().await;
        sleep(Duration::from_millis(500)).await;
        held.into_iter().for_each(Held::release);
    }
    let held = hold().await;
    let RetryAfter::After(estimate) = denied().await else {
        panic!("a slot becomes free");
    };
    let expected = Span::from_millis(250)..Span::from_millis(900);
    assert!(expected.contains(&estimate), "{estimate}");
    // If requests are already waiting, a later request gets a longer retry time.
    let waiting: Vec<_> = (0..2).map(|_| spawn(&limiter, &[], TWO_SECONDS)).collect();
    settle_tasks().await;
    let RetryAfter::After(behind) = denied().await else {
        panic!("a slot becomes free");
    };
    assert!(behind >= Span::from_micros(3 * estimate.as_micros() - 10));
    held.into_iter().for_each(Held::release);
    for task in waiting {
        task.await.unwrap().unwrap().release();
    }
}

/// A request in a random plan. Times are in milliseconds.
#[derive(Clone, Debug)]
struct Planned {
    key: usize,
    at: u64,
    longest_wait: u64,
    /// How long the request holds its slot. A request that crashes never releases it.
    hold: Option<u64>,
    cancel_after: Option<u64>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Ending {
    Admitted(u64),
    Denied(u64),
    Cancelled(u64),
}

const KEYS: [&str; 2] = ["alice", "bob"];
const PLAN_LEASE_MS: u64 = 10 * 128;
const RULE_WAIT_MS: u64 = 8 * 128 + 64;

/// Generates plans. No two events in a plan have the same time, so the result does not depend on
/// the order of events within a millisecond. Each time is a multiple of 128 plus a remainder that
/// depends on the request number and the kind of event.
fn plans() -> impl Strategy<Value = (usize, usize, Vec<Planned>)> {
    let request = (
        0..KEYS.len(),
        0..12_u64,
        1..10_u64,
        proptest::option::weighted(0.8, 1..9_u64),
        proptest::option::weighted(0.3, 0..6_u64),
    );
    let requests = proptest::collection::vec(request, 1..24);
    (1..4_usize, 1..6_usize, requests).prop_map(|(slots, queue, requests)| {
        let plan = requests.into_iter().zip(0..);
        let plan = plan.map(|((key, at, wait, hold, cancel), number)| Planned {
            key,
            at: at * 128 + number,
            longest_wait: wait * 128 + 64,
            hold: hold.map(|hold| hold * 128),
            cancel_after: cancel.map(|cancel| cancel * 128 + 32),
        });
        (slots, queue, plan.collect())
    })
}

/// A simple reference model, which simulates every millisecond.
fn model(slots: usize, queue: usize, plan: &[Planned]) -> Vec<Ending> {
    let mut endings = vec![None; plan.len()];
    let mut held: [Vec<u64>; KEYS.len()] = Default::default();
    let mut waiting: [VecDeque<usize>; KEYS.len()] = Default::default();
    for now in 0..40 * 128 {
        for key in 0..KEYS.len() {
            held[key].retain(|end| *end > now);
            let release = |number: usize| now + plan[number].hold.unwrap_or(PLAN_LEASE_MS);
            while held[key].len() < slots
                && let Some(first) = waiting[key].pop_front()
            {
                endings[first] = Some(Ending::Admitted(now));
                held[key].push(release(first));
            }
            for (number, request) in plan.iter().enumerate() {
                if request.key != key || request.at != now {
                    continue;
                }
                if waiting[key].is_empty() && held[key].len() < slots {
                    endings[number] = Some(Ending::Admitted(now));
                    held[key].push(release(number));
                } else if waiting[key].len() < queue {
                    waiting[key].push_back(number);
                } else {
                    endings[number] = Some(Ending::Denied(now));
                }
            }
            waiting[key].retain(|number| {
                let request = &plan[*number];
                let waited = now - request.at;
                if request.cancel_after == Some(waited) {
                    endings[*number] = Some(Ending::Cancelled(now));
                } else if waited == request.longest_wait.min(RULE_WAIT_MS) {
                    endings[*number] = Some(Ending::Denied(now));
                }
                endings[*number].is_none()
            });
        }
    }
    endings.into_iter().map(Option::unwrap).collect()
}

async fn run(slots: usize, queue: usize, plan: &[Planned]) -> Vec<Ending> {
    let lease = Span::from_millis(PLAN_LEASE_MS);
    let limit = u64::try_from(slots).unwrap();
    let limit = Limit::new(Algorithm::Concurrency { limit, lease }).unwrap();
    let slot_wait = SlotWait {
        longest: Span::from_millis(RULE_WAIT_MS),
        queue: u64::try_from(queue).unwrap(),
    };
    let limit = limit.with_slot_wait(slot_wait).unwrap();
    let limiter = limiter(vec![rule("each", &["c"], vec![limit])]);
    let start = Instant::now();
    let elapsed = move || u64::try_from(start.elapsed().as_millis()).unwrap();
    let mut tasks = Vec::new();
    for request in plan.iter().cloned() {
        let limiter = Arc::clone(&limiter);
        tasks.push(tokio::spawn(async move {
            tokio::time::sleep_until(start + Duration::from_millis(request.at)).await;
            let entries = [("c", KEYS[request.key])];
            let longest_wait = Span::from_millis(request.longest_wait);
            let acquiring = acquire(&limiter, &entries, longest_wait);
            let cancel = Duration::from_millis(request.cancel_after.unwrap_or(1 << 32));
            let held = match timeout(cancel, acquiring).await {
                Err(_) => return Ending::Cancelled(elapsed()),
                Ok(Err(_)) => return Ending::Denied(elapsed()),
                Ok(Ok(held)) => held,
            };
            let admitted = elapsed();
            if let Some(hold) = request.hold {
                sleep(Duration::from_millis(hold)).await;
                held.release();
            }
            Ending::Admitted(admitted)
        }));
    }
    let mut endings = Vec::new();
    for task in tasks {
        endings.push(task.await.unwrap());
    }
    assert_eq!(limiter.wait_queues().count(), 0);
    endings
}

proptest! {
    /// Each key has a first-in, first-out queue, whose length and wait times are bounded. The
    /// bounds hold for any order of arrivals, completions, crashes and cancellations.
    #[test]
    fn the_queue_behaves_like_a_naive_model((slots, queue, plan) in plans()) {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_time()
            .start_paused(true)
            .build()
            .unwrap();
        let endings = runtime.block_on(run(slots, queue, &plan));
        prop_assert_eq!(endings, model(slots, queue, &plan));
    }
}
