//! Rate-limited streams and iterators.

#![cfg(feature = "tokio")]
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::time::Duration;

use futures_util::{StreamExt as _, stream};
use tidegate::{
    AcquireError, Clock, IteratorRateLimit as _, Key as _, Limiter, MemoryBounds, MemoryStore,
    RateLimitError, Span, StreamRateLimit as _, Timestamp, WaitBounds,
};
use tokio::time::Instant;

const START: Timestamp = Timestamp::from_micros(1_700_000_000_000_000);

fn limiter(limit: &str, clock: Clock) -> Limiter {
    let limit: tidegate::Limit = limit.parse().expect("a limit");
    Limiter::new(limit, MemoryStore::new(MemoryBounds::default()), clock)
}

#[tokio::test(start_paused = true)]
async fn a_stream_is_as_fast_as_its_limit() {
    let limiter = limiter("1/s burst 0", Clock::tokio(START));
    let start = Instant::now();
    let items = stream::iter("abc".chars()).rate_limited(&limiter, "jobs");
    let items = items.map(|item| (item.unwrap(), start.elapsed()));
    let expected = [('a', 0), ('b', 1), ('c', 2)];
    let expected = expected.map(|(item, at)| (item, Duration::from_secs(at)));
    assert_eq!(items.collect::<Vec<_>>().await, expected);
}

/// Both streams wait for hours, although the longest wait of a request is only a minute.
#[tokio::test(start_paused = true)]
async fn streams_on_one_key_take_turns() {
    let limiter = limiter("1/h burst 0", Clock::tokio(START));
    let start = Instant::now();
    let hours = |items| {
        let items = stream::iter(items).rate_limited(&limiter, "jobs");
        items.map(|item| (item.unwrap(), start.elapsed().as_secs() / 3_600))
    };
    let both = tokio::join!(
        hours([1, 2, 3]).collect::<Vec<_>>(),
        hours([4, 5, 6]).collect::<Vec<_>>()
    );
    // When the second stream begins, item 2 is already in the queue.
    let expected = (vec![(1, 0), (2, 1), (3, 3)], vec![(4, 2), (5, 4), (6, 5)]);
    assert_eq!(both, expected);
}

#[tokio::test(start_paused = true)]
async fn a_dropped_stream_costs_nothing() {
    let limiter = limiter("1/s burst 0", Clock::tokio(START));
    let mut items = stream::iter([1, 2]).rate_limited(&limiter, ()).boxed();
    assert_eq!(items.next().await, Some(Ok(1)));
    let second = tokio::time::timeout(Duration::from_millis(500), items.next()).await;
    assert!(second.is_err() && limiter.waiters() == 1);
    drop(items);
    assert_eq!(limiter.waiters(), 0);
    tokio::time::sleep(Duration::from_millis(500)).await;
    assert!(limiter.check(()).allowed);
}

#[tokio::test(start_paused = true)]
async fn an_item_that_can_never_pass_is_returned() {
    let limiter = limiter("1/s burst 0", Clock::tokio(START));
    let items = stream::iter(["large"]).rate_limited(&limiter, ().costing(2));
    let error = AcquireError::Never;
    let refused = Err(RateLimitError {
        item: "large",
        error,
    });
    assert_eq!(items.collect::<Vec<_>>().await, [refused]);
    let limiter = limiter.with_wait_bounds(WaitBounds {
        max_waiters: 0,
        ..WaitBounds::default()
    });
    let items = stream::iter([1, 2]).rate_limited(&limiter, ());
    let error = AcquireError::TooManyWaiters { max: 0 };
    let expected = [Ok(1), Err(RateLimitError { item: 2, error })];
    assert_eq!(items.collect::<Vec<_>>().await, expected);
}

#[test]
fn an_iterator_is_no_faster_than_its_limit() {
    let limiter = limiter("1000/s burst 0", Clock::real());
    let start = limiter.clock().now();
    let items: Result<Vec<u32>, _> = (0..5).rate_limited(&limiter, "jobs").collect();
    assert_eq!(items, Ok(vec![0, 1, 2, 3, 4]));
    assert!(limiter.clock().now().since(start) >= Span::from_millis(4));
    let mut refused = [1].into_iter().rate_limited(&limiter, "jobs".costing(2));
    assert_eq!(refused.size_hint(), (1, Some(1)));
    let error = AcquireError::Never;
    assert_eq!(refused.next(), Some(Err(RateLimitError { item: 1, error })));
    assert_eq!(refused.next(), None);
}
