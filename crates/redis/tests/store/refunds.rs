//! Tests refunds in both stores, at instants that rarely occur in random traces.

use std::sync::Arc;

use tidegate_core::{
    Charge, Cost, Decision, Effect, Limit, Limits, MemoryBounds, MemoryStore, Rate, Refund,
    Renewal, Settlement, Span, Timestamp,
};
use tidegate_redis::{RedisReservation, RedisStore, ReservationEnd, ReservationStatus};

use crate::{START, differential::strategies::Kind, limits, same, server::Server};

/// The refund ledger is dropped a minute after the last refund. If a charge is made after that
/// minute, its refund must not be reduced by refunds from the dropped ledger.
#[tokio::test]
async fn a_charge_after_the_ledger_has_expired_gets_all_of_its_refund() {
    const SECOND: u64 = 1_000_000;
    let limits = limits(&["2/d"]);
    let charge = Charge::new(b"key", &limits, Cost::ONE).unwrap();
    let (charges, refund) = ([charge], [Settlement { unused: 1 }]);
    for server in Server::each() {
        let redis = RedisStore::connect(&server.url(), "tg").await.unwrap();
        let memory = MemoryStore::new(MemoryBounds::default());
        let at = |seconds: u64| Timestamp::from_micros(START + seconds * SECOND);
        let mut receipts = Vec::new();
        // The first charge is refunded long after it was made. All other charges are refunded at
        // the time of the last charge.
        for (reserved, settles) in [(0, false), (3_600, true), (4_000, false)] {
            let now = at(reserved);
            redis.pin_clock(now);
            if settles {
                let (here, there) = receipts.pop().unwrap();
                memory.settle(&charges, here, &refund, now);
                redis.settle(&charges, there, &refund).await.unwrap();
            }
            let (_, here) = memory.reserve(&charges, now, &mut Vec::new());
            let there = redis.reserve(&charges, &mut Vec::new()).await.unwrap().1;
            receipts.push((here, there));
        }
        for (here, there) in receipts {
            memory.settle(&charges, here, &refund, at(4_000));
            redis.settle(&charges, there, &refund).await.unwrap();
            same(&redis, &memory, &charges, at(4_000), Effect::Look).await;
        }
    }
}

/// A rule's algorithm or rate is changed and changed back while a request is in progress. While the
/// request is in progress, the state is converted and drains under the other limits, so the
/// request's refund must not reduce the charges of later requests.
#[tokio::test]
async fn a_charge_from_before_a_change_that_was_undone_is_not_refunded() {
    const QUOTA: u64 = 10;
    let rate = |count, secs| Rate {
        count,
        period: Span::from_secs(secs),
    };
    for server in Server::each() {
        let redis = RedisStore::connect(&server.url(), "tg").await.unwrap();
        let memory = MemoryStore::new(MemoryBounds::default());
        let mut start = START;
        for kind in Kind::ALL {
            // The other limits have the same algorithm but drain immediately, or they have a
            // different algorithm.
            let other = if kind == Kind::Gcra {
                Kind::TokenBucket
            } else {
                Kind::Gcra
            };
            let fast = rate(QUOTA * 1_000, 1);
            for (number, between) in [kind, other].into_iter().enumerate() {
                for charged_between in [0, 1] {
                    let of = |kind: Kind, rate| {
                        let limit = Limit::new(kind.algorithm(QUOTA, rate, 4)).unwrap();
                        Limits::new(vec![limit]).unwrap()
                    };
                    let first = Arc::new(of(kind, rate(QUOTA, 86_400)));
                    let second = Arc::new(of(between, fast).inheriting_from(&first));
                    let third = Arc::new(of(kind, rate(QUOTA, 86_400)).inheriting_from(&second));
                    let key = format!("{kind:?} {number} {charged_between}");
                    let charge = |limits, cost| {
                        Charge::new(key.as_bytes(), limits, Cost::new(cost).unwrap()).unwrap()
                    };
                    start += 1_000_000;
                    let at = |micros: u64| Timestamp::from_micros(start + micros);
                    let before = [charge(&first, 5)];
                    redis.pin_clock(at(0));
                    let mut outcomes = Vec::new();
                    let (_, here) = memory.reserve(&before, at(0), &mut outcomes);
                    let there = redis.reserve(&before, &mut outcomes).await.unwrap().1;
                    for _ in 0..charged_between {
                        let between = [charge(&second, 1)];
                        same(&redis, &memory, &between, at(100_000), Effect::Charge).await;
                    }
                    let after = [charge(&third, 1)];
                    let now = at(200_000);
                    while same(&redis, &memory, &after, now, Effect::Charge).await
                        == Decision::Admitted
                    {}
                    let left = remaining(&memory, &after, at(200_000));
                    let refund = [Settlement { unused: 5 }];
                    memory.settle(&before, here, &refund, at(200_000));
                    redis.settle(&before, there, &refund).await.unwrap();
                    same(&redis, &memory, &after, at(200_000), Effect::Look).await;
                    let returned = remaining(&memory, &after, at(200_000)) - left;
                    // Calendar windows do not depend on the rate, and concurrency slots are always
                    // released.
                    let is_converted = charged_between == 1
                        && kind != Kind::Concurrency
                        && (kind, between) != (Kind::CalendarWindow, Kind::CalendarWindow);
                    assert!(
                        !is_converted || returned == 0,
                        "{key}: {returned} units were returned"
                    );
                }
            }
        }
    }
}

/// A request holds a concurrency slot of a rule. While the slot is held, the rule's algorithm
/// changes to an algorithm to which no counts can be converted. A refund under the new limits
/// leaves the value unchanged, so the slot is still held and can be renewed.
#[tokio::test]
async fn a_refund_under_limits_that_keep_nothing_leaves_the_slots() {
    let of = |kind: Kind, count| {
        let rate = Rate {
            count,
            period: Span::from_secs(60),
        };
        Limits::new(vec![Limit::new(kind.algorithm(1, rate, 4)).unwrap()]).unwrap()
    };
    for server in Server::each() {
        let redis = RedisStore::connect(&server.url(), "tg").await.unwrap();
        let memory = MemoryStore::new(MemoryBounds::default());
        let slots = Arc::new(of(Kind::Concurrency, 1));
        let rates = Arc::new(of(Kind::Gcra, 1).inheriting_from(&slots));
        let slots_again = of(Kind::Concurrency, 1).inheriting_from(&rates);
        let charge = |limits| Charge::new(b"key", limits, Cost::ONE).unwrap();
        let now = Timestamp::from_micros(START);
        redis.pin_clock(now);
        let (held, mut outcomes) = ([charge(&slots)], Vec::new());
        let (_, mut here) = memory.reserve(&held, now, &mut outcomes);
        let (_, mut there) = redis.reserve(&held, &mut outcomes).await.unwrap();
        let refund = [charge(&rates)];
        same(&redis, &memory, &refund, now, Effect::Refund).await;
        let asked = [charge(&slots_again)];
        let decision = same(&redis, &memory, &asked, now, Effect::Charge).await;
        assert_eq!(decision, Decision::Limited, "the slot was lost");
        let renewed = redis.renew(&held, &mut there).await.unwrap();
        let expected = memory.renew(&held, &mut here, now);
        assert_eq!((renewed, expected), (Renewal::Held, Renewal::Held));
    }
}

/// A rule's limits get other algorithms, or another order, while a request is in progress. A later
/// request converts the state. The receipt then has other marks than the limits, so the charge
/// cannot be found in the state: nothing is refunded, and no lease is renewed. The reservation ends
/// nevertheless.
#[tokio::test]
async fn a_receipt_of_other_algorithms_refunds_and_renews_nothing() {
    let mut shapes: Vec<Vec<Kind>> = Kind::ALL.iter().map(|kind| vec![*kind]).collect();
    let slots = Kind::Concurrency;
    shapes.extend([vec![Kind::Gcra, slots], vec![slots, Kind::Gcra]]);
    for server in Server::each() {
        let redis = RedisStore::connect(&server.url(), "tg").await.unwrap();
        let memory = MemoryStore::new(MemoryBounds::default());
        let pairs = shapes.iter().flat_map(|before| {
            let others = shapes.iter().filter(move |after| *after != before);
            others.map(move |after| (before, after))
        });
        for (number, (before, after)) in (0..).zip(pairs) {
            let start = START + number * 1_000_000;
            let at = |millis: u64| Timestamp::from_micros(start + millis * 1_000);
            let case = OtherAlgorithms::new(before, after);
            redis.pin_clock(at(0));
            let (_, mut here) = memory.reserve(&[case.old_charge()], at(0), &mut Vec::new());
            let there = redis.reserve(&[case.old_charge()], &mut Vec::new()).await;
            let mut there = there.unwrap().1;
            let charges = [case.new_charge()];

            same(&redis, &memory, &charges, at(100), Effect::Charge).await;

            redis.pin_clock(at(200));
            let renewed = redis.renew(&charges, &mut there).await;
            let expected = memory.renew(&charges, &mut here, at(200));
            assert_eq!(renewed, Ok(expected), "{}", case.key);
            same(&redis, &memory, &charges, at(200), Effect::Look).await;

            let refund = Settlement { unused: 1 };
            let expected = memory.settle(&charges, here, &[refund], at(200));
            let reservation = RedisReservation {
                id: u128::from(number).to_be_bytes(),
                expires: at(900),
                charges: &charges,
                receipt: &there,
                former_keys: &[],
            };
            let (settlements, end) = (|_| vec![refund], ReservationEnd::Settled(0));
            let end_it = || redis.end_reservation(reservation, settlements, end, at(200));
            let ended = ReservationStatus::Ended(expected);
            assert_eq!(end_it().await, Ok(ended), "{}", case.key);
            let before = ReservationStatus::EndedBefore(end, expected);
            assert_eq!(end_it().await, Ok(before), "{}", case.key);
            let renewed = redis.renew_reservation(reservation, at(900), at(200));
            assert_eq!(renewed.await, Ok(before), "{}", case.key);
            let read = redis.read_guard(reservation);
            assert_eq!(read.await, Ok(Some(before)), "{}", case.key);
            same(&redis, &memory, &charges, at(200), Effect::Look).await;
            same(&redis, &memory, &charges, at(300), Effect::Charge).await;
        }
    }
}

/// The script fails after it has read the guard. The reservation must not have ended, because a
/// repeated call would then refund nothing.
#[tokio::test]
async fn a_reservation_whose_refund_fails_has_not_ended() {
    for server in Server::each() {
        let redis = RedisStore::connect(&server.url(), "tg").await.unwrap();
        let now = Timestamp::from_micros(START);
        redis.pin_clock(now);
        let limits = limits(&["2/d"]);
        let charges = [Charge::new(b"key", &limits, Cost::ONE).unwrap()];
        let (_, receipt) = redis.reserve(&charges, &mut Vec::new()).await.unwrap();
        let reservation = RedisReservation {
            id: [7; 16],
            expires: Timestamp::from_micros(START + 1_000_000),
            charges: &charges,
            receipt: &receipt,
            former_keys: &[],
        };
        let end = || {
            let (settlements, end) = (
                |_| vec![Settlement { unused: 1 }],
                ReservationEnd::Settled(0),
            );
            redis.end_reservation(reservation, settlements, end, now)
        };
        server.command(&["RENAME", "tg:key", "saved"]);
        server.command(&["LPUSH", "tg:key", "a value of another type"]);
        assert!(end().await.is_err());
        server.command(&["RENAME", "saved", "tg:key"]);
        let ended = ReservationStatus::Ended(Refund::Complete);
        assert_eq!(end().await, Ok(ended));
        let mut outcomes = Vec::new();
        let look = redis.check(&charges, Effect::Look, &mut outcomes);
        look.await.unwrap();
        assert_eq!(outcomes[0].remaining, 2);
    }
}

/// Limits of a rule before and after a change.
struct OtherAlgorithms {
    key: String,
    old: Arc<Limits>,
    new: Limits,
}

impl OtherAlgorithms {
    fn new(before: &[Kind], after: &[Kind]) -> Self {
        let rate = Rate {
            count: 10,
            period: Span::from_secs(3_600),
        };
        let limits = |kinds: &[Kind]| {
            let limit = |kind: &Kind| Limit::new(kind.algorithm(10, rate, 4)).unwrap();
            Limits::new(kinds.iter().map(limit).collect()).unwrap()
        };
        let old = Arc::new(limits(before));
        Self {
            key: format!("{before:?} {after:?}"),
            new: limits(after).inheriting_from(&old),
            old,
        }
    }

    fn old_charge(&self) -> Charge<'_> {
        Charge::new(self.key.as_bytes(), &self.old, Cost::ONE).unwrap()
    }

    fn new_charge(&self) -> Charge<'_> {
        Charge::new(self.key.as_bytes(), &self.new, Cost::ONE).unwrap()
    }
}

/// Returns the remaining units of `charges`, which contains a single charge with one limit.
fn remaining(memory: &MemoryStore, charges: &[Charge<'_>], now: Timestamp) -> u64 {
    let mut outcomes = Vec::new();
    memory.check(charges, now, Effect::Look, &mut outcomes);
    outcomes[0].remaining
}
