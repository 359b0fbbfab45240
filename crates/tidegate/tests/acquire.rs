//! Waiting for a limit: order, cancellation and bounds, in virtual time.

#![cfg(feature = "tokio")]
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::{
    sync::{Arc, mpsc},
    thread,
    time::Duration,
};

use tidegate::{
    AcquireError, AlgorithmName, Clock, Key as _, Limit, LimitSpec, Limiter, MemoryBounds,
    MemoryStore, Reason, RetryAfter, Span, Timestamp, WaitBounds,
};
use tokio::{
    task::{JoinHandle, yield_now},
    time::{Instant, sleep},
};

const START: Timestamp = Timestamp::from_micros(1_700_000_000_000_000);

fn limit(text: &str) -> Limit {
    text.parse().expect("a limit")
}

/// A limiter that uses the runtime's clock.
fn limiter(limit: Limit) -> Limiter {
    let store = MemoryStore::new(MemoryBounds::default());
    Limiter::new(limit, store, Clock::tokio(START))
}

fn bounds(max_waiters: usize, max_waiters_per_key: usize) -> WaitBounds {
    WaitBounds {
        max_waiters,
        max_waiters_per_key,
        ..WaitBounds::default()
    }
}

/// Spawns a task that waits for the limit. The task returns the result and the time of the result,
/// in milliseconds since `start`.
async fn spawn(
    limiter: &Arc<Limiter>,
    key: &'static str,
    start: Instant,
) -> JoinHandle<(Result<bool, AcquireError>, u128)> {
    let limiter = Arc::clone(limiter);
    let task = tokio::spawn(async move {
        let admitted = limiter.acquire(key).await.map(|verdict| verdict.allowed);
        (admitted, start.elapsed().as_millis())
    });
    yield_now().await;
    task
}

#[tokio::test(start_paused = true)]
async fn requests_on_a_key_are_admitted_in_order_and_as_early_as_the_limit_allows() {
    let (limiter, start) = (Arc::new(limiter(limit("1/s burst 1"))), Instant::now());
    let mut tasks = Vec::new();
    for _ in 0..5 {
        tasks.push(spawn(&limiter, "alice", start).await);
    }
    let other = spawn(&limiter, "bob", start).await;
    assert_eq!(limiter.waiters(), 3);
    for (task, at) in tasks.into_iter().zip([0, 0, 1_000, 2_000, 3_000]) {
        assert_eq!(task.await.unwrap(), (Ok(true), at));
    }
    assert_eq!(other.await.unwrap(), (Ok(true), 0));
    assert_eq!(limiter.waiters(), 0);
}

#[tokio::test(start_paused = true)]
async fn a_cancelled_wait_gives_its_turn_to_the_next() {
    let (limiter, start) = (Arc::new(limiter(limit("1/s burst 0"))), Instant::now());
    let mut tasks = Vec::new();
    for _ in 0..4 {
        tasks.push(spawn(&limiter, "alice", start).await);
    }
    sleep(Duration::from_millis(300)).await;
    // Abort the first request in the queue, which sleeps, and the last request, which does not
    // sleep.
    tasks.remove(3).abort();
    tasks.remove(1).abort();
    yield_now().await;
    assert_eq!(limiter.waiters(), 1);
    for (task, at) in tasks.into_iter().zip([0, 1_000]) {
        assert_eq!(task.await.unwrap(), (Ok(true), at));
    }
}

#[tokio::test(start_paused = true)]
async fn a_small_request_does_not_overtake_a_large_one() {
    let (limiter, start) = (limiter(limit("1/s burst 3")), Instant::now());
    limiter.acquire("alice".costing(4)).await.unwrap();
    let large = async {
        limiter.acquire("alice".costing(3)).await.unwrap();
        start.elapsed().as_millis()
    };
    let small = async {
        limiter.acquire("alice").await.unwrap();
        start.elapsed().as_millis()
    };
    assert_eq!(tokio::join!(large, small), (3_000, 4_000));
}

#[tokio::test(start_paused = true)]
async fn a_wait_ends_at_its_bound() {
    let (limiter, start) = (limiter(limit("1/min burst 0")), Instant::now());
    let limiter = limiter.with_wait_bounds(WaitBounds {
        longest_wait: Span::from_secs(90),
        ..WaitBounds::default()
    });
    let elapsed = || start.elapsed().as_millis();
    limiter.acquire("alice").await.unwrap();
    // The request is rejected immediately, because it would be admitted too late.
    let within = limiter
        .acquire_within("alice", Duration::from_secs(59))
        .await;
    let retry_after = Some(Span::from_secs(60));
    assert_eq!(within.unwrap_err(), AcquireError::Timeout { retry_after });
    assert_eq!(elapsed(), 0);
    // The second request is not rejected immediately, because another request is ahead of it in the
    // queue.
    let (first, second) = tokio::join!(
        limiter.acquire_within("alice", Duration::from_secs(3_600)),
        limiter.acquire_within("alice", Duration::from_secs(3_600)),
    );
    assert!(first.unwrap().allowed);
    let retry_after = Some(Span::from_secs(60));
    assert_eq!(second.unwrap_err(), AcquireError::Timeout { retry_after });
    assert_eq!(elapsed(), 60_000);
    // The first request is admitted only after the deadline of the second request.
    let (first, second) = tokio::join!(limiter.acquire("alice"), async {
        let limiter = &limiter;
        let second = limiter
            .acquire_within("alice", Duration::from_secs(60))
            .await;
        (second.map(|verdict| verdict.allowed), elapsed())
    });
    assert!(first.unwrap().allowed);
    let (second, at) = second;
    assert!(
        matches!(second, Err(AcquireError::Timeout { .. })),
        "{second:?}"
    );
    assert_eq!(at, 120_000);
    assert_eq!(limiter.waiters(), 0);
}

#[tokio::test(start_paused = true)]
async fn a_request_that_waits_behind_others_leaves_at_its_deadline() {
    let (limiter, start) = (limiter(limit("4/min burst 3")), Instant::now());
    limiter.acquire("alice".costing(4)).await.unwrap();
    let (large, small) = tokio::join!(limiter.acquire("alice".costing(4)), async {
        let limiter = &limiter;
        let small = limiter
            .acquire_within("alice", Duration::from_secs(20))
            .await;
        (
            small.map(|verdict| verdict.allowed),
            start.elapsed().as_millis(),
        )
    });
    assert!(large.unwrap().allowed);
    // Without the request ahead, the small request would have been admitted after 15 s.
    let timeout = AcquireError::Timeout { retry_after: None };
    assert_eq!(small, (Err(timeout), 20_000));
}

#[tokio::test(start_paused = true)]
async fn a_request_that_can_never_be_admitted_does_not_wait() {
    let (limiter, start) = (limiter(limit("1/s burst 3")), Instant::now());
    let never = limiter.acquire("alice".costing(5)).await;
    assert_eq!(never.unwrap_err(), AcquireError::Never);
    limiter.check("alice".costing(4));
    let (ahead, never) = tokio::join!(limiter.acquire("alice"), async {
        let limiter = &limiter;
        let never = limiter.acquire("alice".costing(5)).await;
        (never.unwrap_err(), start.elapsed().as_millis())
    });
    assert!(ahead.unwrap().allowed);
    assert_eq!(never, (AcquireError::Never, 0));
    let long = "k".repeat(1_025);
    let refused = limiter.acquire(&long).await.unwrap_err();
    assert!(refused.to_string().contains("1025 bytes"), "{refused}");
    let denied = limiter.check(&long);
    assert_eq!(
        (denied.allowed, denied.reason),
        (false, Some(Reason::Store))
    );
    assert_eq!(denied.retry_after, RetryAfter::Never);
}

#[tokio::test(start_paused = true)]
async fn no_more_requests_wait_than_may() {
    let (limiter, start) = (limiter(limit("1/s burst 0")), Instant::now());
    let limiter = Arc::new(limiter.with_wait_bounds(bounds(3, 2)));
    let mut tasks = Vec::new();
    for key in ["alice", "alice", "alice", "alice", "bob", "bob", "bob"] {
        tasks.push(spawn(&limiter, key, start).await);
    }
    assert_eq!(limiter.waiters(), 3);
    let mut results = Vec::new();
    for task in tasks {
        results.push(task.await.unwrap());
    }
    let too_many = |max| (Err(AcquireError::TooManyWaiters { max }), 0);
    let admitted = |at| (Ok(true), at);
    let expected = [
        admitted(0),
        admitted(1_000),
        admitted(2_000),
        too_many(2),
        admitted(0),
        admitted(1_000),
        too_many(3),
    ];
    assert_eq!(results, expected);
    // All requests have left the queue, so there is room again.
    assert_eq!(
        spawn(&limiter, "alice", start).await.await.unwrap(),
        admitted(3_000)
    );
}

#[tokio::test(start_paused = true)]
async fn a_queue_limit_delays_a_request_only_once() {
    let spec = LimitSpec {
        algorithm: Some(AlgorithmName::LeakyBucket),
        capacity: Some(5),
        queue: Some(true),
        leak: Some(tidegate::notation::rate("1/s").unwrap()),
        ..LimitSpec::default()
    };
    let (limiter, start) = (Arc::new(limiter(spec.build().unwrap())), Instant::now());
    let mut tasks = Vec::new();
    for _ in 0..3 {
        tasks.push(spawn(&limiter, "alice", start).await);
    }
    tasks.remove(1).abort();
    for (task, at) in tasks.into_iter().zip([0, 1_000]) {
        assert_eq!(task.await.unwrap(), (Ok(true), at));
    }
}

#[tokio::test(start_paused = true)]
async fn a_request_without_a_cost_does_not_wait() {
    let (limiter, start) = (limiter(limit("1/s burst 0")), Instant::now());
    limiter.acquire(()).await.unwrap();
    let (first, look) = tokio::join!(limiter.acquire(()), limiter.acquire(().costing(0)));
    assert_eq!(look.unwrap().remaining(), Some(0));
    assert!(first.unwrap().allowed);
    assert_eq!(start.elapsed(), Duration::from_secs(1));
}

/// The clock is moved by another thread, so the test does not depend on the speed of the machine.
#[test]
fn threads_wait_in_line() {
    let clock = Clock::manual(START);
    let store = MemoryStore::new(MemoryBounds::default());
    let limiter = Limiter::new(limit("1000/s burst 0"), store, clock.clone());
    assert!(limiter.acquire_blocking("alice").unwrap().allowed);
    let refused = limiter
        .acquire_blocking_within("alice", Duration::ZERO)
        .unwrap_err();
    let retry_after = Some(Span::from_millis(1));
    assert_eq!(refused, AcquireError::Timeout { retry_after });
    let (sender, admissions) = mpsc::channel();
    thread::scope(|scope| {
        for number in 0..4 {
            let (limiter, sender) = (&limiter, sender.clone());
            scope.spawn(move || {
                limiter.acquire_blocking("alice").unwrap();
                sender.send(number).unwrap();
            });
            while limiter.waiters() <= number {
                thread::yield_now();
            }
        }
        for number in 0..4 {
            assert!(
                admissions.try_recv().is_err(),
                "nobody is admitted ahead of time"
            );
            clock.set(clock.now().after(Span::from_millis(1)));
            assert_eq!(admissions.recv(), Ok(number));
        }
    });
    assert_eq!(limiter.waiters(), 0);
}
