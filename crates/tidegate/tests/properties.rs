//! Property tests of waiting, with random traces in virtual time.

#![cfg(feature = "tokio")]
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::{
    collections::HashMap,
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use proptest::{prelude::*, sample::select};
use tidegate::{
    AcquireError, Clock, Key as _, Limit, Limiter, Limits, MemoryBounds, MemoryStore, Span,
    Timestamp, WaitBounds,
};
use tokio::{
    task::yield_now,
    time::{Instant, sleep_until, timeout},
};

const START: Timestamp = Timestamp::from_micros(1_700_000_000_000_000);

/// Limits whose wait times are whole milliseconds, which is the timer's resolution. With other
/// limits, the instants of two runs could not be compared.
const LIMITS: [&[&str]; 7] = [
    &["10/s burst 0"],
    &["5/s burst 3"],
    &["4/s capacity 4"],
    &["3/s"],
    &["3/s", "7/4s"],
    &["10/s burst 0", "5/2s"],
    &["2/s burst 1", "6/5s"],
];

const BOUNDS: WaitBounds = WaitBounds {
    max_waiters: 8,
    max_waiters_per_key: 6,
    longest_wait: Span::from_secs(4),
};

#[derive(Clone, Copy, Debug)]
struct Call {
    /// The time since the previous call.
    pause_ms: u64,
    key: u8,
    cost: u64,
    kind: Kind,
}

#[derive(Clone, Copy, Debug)]
enum Kind {
    Check,
    Acquire {
        longest_wait_ms: u64,
        /// The time after which the call is cancelled, independent of the longest wait.
        cancelled_after_ms: Option<u64>,
    },
}

#[derive(Clone, Debug, PartialEq)]
enum Ending {
    Admitted,
    Denied,
    Cancelled,
    Refused(AcquireError),
}

/// A completed call. Calls are listed in the order of completion.
#[derive(Clone, Debug)]
struct Ended {
    number: usize,
    at_ms: u64,
    ending: Ending,
    /// The number of waiting requests after the call.
    waiters: usize,
}

fn call(max_cost: u64, checks: bool) -> impl Strategy<Value = Call> {
    let acquire = (0..5_000_u64, prop::option::weighted(0.3, 0..1_500_u64)).prop_map(
        |(longest_wait_ms, cancelled_after_ms)| Kind::Acquire {
            longest_wait_ms,
            cancelled_after_ms,
        },
    );
    let kind = if checks {
        prop_oneof![4 => acquire, 1 => Just(Kind::Check)].boxed()
    } else {
        acquire.boxed()
    };
    let pause_ms = prop_oneof![Just(0), 0..400_u64];
    (pause_ms, 0..2_u8, 1..=max_cost, kind).prop_map(|(pause_ms, key, cost, kind)| Call {
        pause_ms,
        key,
        cost,
        kind,
    })
}

fn limits(texts: &[&str]) -> Limits {
    let limits = texts.iter().map(|text| text.parse::<Limit>());
    Limits::new(limits.collect::<Result<_, _>>().expect("limits")).expect("a few limits")
}

fn limiter(texts: &[&str], clock: Clock) -> Limiter {
    let store = MemoryStore::new(MemoryBounds::default());
    Limiter::new(limits(texts), store, clock).with_wait_bounds(BOUNDS)
}

/// The result of a trace.
struct Run {
    ended: Vec<Ended>,
    now: Timestamp,
    /// The results of peeks on the keys 0 and 1 at the end.
    peeks: [String; 2],
    waiters: usize,
    /// The maximum number of calls in progress at the same time on one key.
    most_per_key: usize,
}

fn peeks(limiter: &Limiter) -> [String; 2] {
    [0_u8, 1].map(|key| format!("{:?}", limiter.peek(key)))
}

/// Makes the calls in virtual time.
fn run(texts: &[&str], calls: &[Option<Call>]) -> Run {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_time()
        .start_paused(true)
        .build()
        .expect("a runtime");
    runtime.block_on(async {
        let limiter = Arc::new(limiter(texts, Clock::tokio(START)));
        let (start, ended) = (Instant::now(), Arc::new(Mutex::new(Vec::new())));
        let (mut tasks, mut most_per_key) = (Vec::new(), 0);
        let in_progress = Arc::new([AtomicUsize::new(0), AtomicUsize::new(0)]);
        for (number, call) in calls.iter().enumerate() {
            let Some(call) = *call else { continue };
            let (limiter, ended) = (Arc::clone(&limiter), Arc::clone(&ended));
            let (on_key, counts) = (usize::from(call.key), Arc::clone(&in_progress));
            let at = start + Duration::from_millis(at_ms(calls, number));
            sleep_until(at).await;
            in_progress[on_key].fetch_add(1, Ordering::Relaxed);
            tasks.push(tokio::spawn(async move {
                let ending = make(&limiter, call).await;
                counts[on_key].fetch_sub(1, Ordering::Relaxed);
                let at_ms = u64::try_from(start.elapsed().as_millis()).unwrap();
                let waiters = limiter.waiters();
                ended.lock().unwrap().push(Ended {
                    number,
                    at_ms,
                    ending,
                    waiters,
                });
            }));
            yield_now().await;
            most_per_key = most_per_key.max(in_progress[on_key].load(Ordering::Relaxed));
        }
        for task in tasks {
            task.await.expect("no task panics");
        }
        let ended = std::mem::take(&mut *ended.lock().unwrap());
        Run {
            ended,
            now: limiter.clock().now(),
            peeks: peeks(&limiter),
            waiters: limiter.waiters(),
            most_per_key,
        }
    })
}

/// Returns the time of call `number`. A caller that leaves out a call must add the call's
/// `pause_ms` to that of the following call.
fn at_ms(calls: &[Option<Call>], number: usize) -> u64 {
    let pauses = calls[..=number].iter().flatten().map(|call| call.pause_ms);
    pauses.sum()
}

async fn make(limiter: &Limiter, call: Call) -> Ending {
    let key = call.key.costing(call.cost);
    match call.kind {
        Kind::Check if limiter.check(key).allowed => Ending::Admitted,
        Kind::Check => Ending::Denied,
        Kind::Acquire {
            longest_wait_ms,
            cancelled_after_ms,
        } => {
            let acquired = limiter.acquire_within(key, Duration::from_millis(longest_wait_ms));
            let cancelled_after = cancelled_after_ms.map_or(Duration::MAX, Duration::from_millis);
            match timeout(cancelled_after, acquired).await {
                Err(_) => Ending::Cancelled,
                Ok(Err(error)) => Ending::Refused(error),
                Ok(Ok(verdict)) => {
                    assert!(verdict.allowed);
                    Ending::Admitted
                }
            }
        }
    }
}

fn admitted(ended: &[Ended]) -> impl Iterator<Item = &Ended> {
    ended.iter().filter(|end| end.ending == Ending::Admitted)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    /// If the admitted requests are sent to a second limiter at the instants of their admission,
    /// that limiter also admits them, without a queue. At the end, both limiters have the same
    /// remaining units.
    #[test]
    fn no_more_is_admitted_than_the_limits_allow(
        texts in select(&LIMITS[..]),
        calls in prop::collection::vec(call(3, true), 1..40),
    ) {
        let calls: Vec<Option<Call>> = calls.into_iter().map(Some).collect();
        let Run { ended, now, peeks: expected, .. } = run(texts, &calls);
        let clock = Clock::manual(START);
        let twin = limiter(texts, clock.clone());
        let mut units = HashMap::<u8, Vec<(u64, u64)>>::new();
        for end in admitted(&ended) {
            let call = calls[end.number].unwrap();
            clock.set(START.after(Span::from_millis(end.at_ms)));
            prop_assert!(twin.check(call.key.costing(call.cost)).allowed, "{:?}", end);
            units.entry(call.key).or_default().push((end.at_ms, call.cost));
        }
        clock.set(now);
        prop_assert_eq!(peeks(&twin), expected);
        // Also check directly that no window of the sliding window log contains more admitted units
        // than the limit.
        if texts == ["3/s"] {
            for admitted in units.values() {
                for (end, _) in admitted {
                    let window = admitted.iter().filter(|(at, _)| at <= end && at + 1_000 > *end);
                    prop_assert!(window.map(|(_, cost)| cost).sum::<u64>() <= 3);
                }
            }
        }
    }

    #[test]
    fn requests_on_a_key_are_admitted_in_the_order_in_which_they_came(
        texts in select(&LIMITS[..]),
        calls in prop::collection::vec(call(3, true), 1..40),
    ) {
        let calls: Vec<Option<Call>> = calls.into_iter().map(Some).collect();
        let ended = run(texts, &calls).ended;
        for key in [0, 1] {
            let waited = admitted(&ended).filter(|end| {
                let call = calls[end.number].unwrap();
                call.key == key && matches!(call.kind, Kind::Acquire { .. })
            });
            let numbers: Vec<usize> = waited.map(|end| end.number).collect();
            prop_assert!(numbers.is_sorted(), "{numbers:?}");
        }
    }

    #[test]
    fn waits_and_waiters_are_bounded(
        texts in select(&LIMITS[..]),
        calls in prop::collection::vec(call(2, true), 1..60),
    ) {
        let calls: Vec<Option<Call>> = calls.into_iter().map(Some).collect();
        let Run { ended, waiters, most_per_key, .. } = run(texts, &calls);
        prop_assert!(most_per_key <= BOUNDS.max_waiters_per_key);
        prop_assert_eq!(ended.len(), calls.len());
        prop_assert_eq!(waiters, 0);
        for end in &ended {
            prop_assert!(end.waiters <= BOUNDS.max_waiters);
            let Kind::Acquire { longest_wait_ms, .. } = calls[end.number].unwrap().kind else {
                continue;
            };
            let longest_wait_ms = longest_wait_ms.min(BOUNDS.longest_wait.as_millis_ceil());
            prop_assert!(end.at_ms <= at_ms(&calls, end.number) + longest_wait_ms, "{:?}", end);
            if let Ending::Refused(AcquireError::TooManyWaiters { max }) = end.ending {
                prop_assert!([BOUNDS.max_waiters, BOUNDS.max_waiters_per_key].contains(&max));
                prop_assert!(end.waiters >= BOUNDS.max_waiters_per_key);
            }
        }
    }

    /// If the cancelled requests are left out, no other request is admitted earlier. All requests
    /// have the same cost. If the costs differed, a request behind a more expensive request would
    /// have to wait until that request is admitted or leaves the queue.
    #[test]
    fn a_cancelled_wait_costs_nothing(
        texts in select(&LIMITS[..]),
        calls in prop::collection::vec(call(1, false), 1..14),
    ) {
        let with: Vec<Option<Call>> = calls.into_iter().map(Some).collect();
        let ended = run(texts, &with).ended;
        let is_cancelled = |number| {
            let same = |end: &&Ended| end.number == number;
            ended.iter().find(same).is_some_and(|end| end.ending == Ending::Cancelled)
        };
        let mut without = with;
        let mut pause_ms = 0;
        for (number, call) in without.iter_mut().enumerate() {
            // The pause before an omitted call is added to the next call, so that the next call is
            // made at the same instant as in the first run.
            let Some(kept) = call else { continue };
            kept.pause_ms += std::mem::take(&mut pause_ms);
            if is_cancelled(number) {
                pause_ms = kept.pause_ms;
                *call = None;
            }
        }
        let ended_without = run(texts, &without).ended;
        for end in admitted(&ended_without) {
            let same = ended.iter().find(|other| other.number == end.number).unwrap();
            match &same.ending {
                Ending::Admitted => prop_assert!(same.at_ms <= end.at_ms, "{same:?} {end:?}"),
                // In the first run, the queue was full, because it still contained a request that
                // was cancelled later.
                Ending::Refused(AcquireError::TooManyWaiters { .. }) => {}
                _ => prop_assert!(false, "{same:?} {end:?}"),
            }
        }
    }
}
