//! Tests a primary whose clock is behind the clock of the previous primary. States written by the
//! previous primary are clamped, as in the memory store.

use std::sync::Arc;

use tidegate_core::{
    Charge, Cost, Decision, Effect, Limit, Limits, MemoryBounds, MemoryStore, Outcome, Rate,
    Receipt, Renewal, Settlement, Span, Timestamp,
};
use tidegate_redis::{RedisReceipt, RedisStore};

use crate::{
    START, cross_slot, differential::strategies::Kind, same, server::Server, support::RedisServer,
};

const SECOND: u64 = 1_000_000;
const MINUTE: Span = Span::from_secs(60);
const DAY: u64 = 86_400 * SECOND;

/// The durations by which the clock is set back. The second duration is long enough that the time
/// always falls into another calendar month.
const JUMPS: [u64; 2] = [600 * SECOND, 40 * DAY];

fn limit(kind: Kind, count: u64) -> Limit {
    let rate = Rate {
        count,
        period: MINUTE,
    };
    Limit::new(kind.algorithm(5, rate, 2)).unwrap()
}

/// Returns rules with a limit of this kind: the limit alone, the limit with counted denials, the
/// limit together with another limit, and the limit twice.
fn rules(kind: Kind) -> Vec<Limits> {
    let own = || limit(kind, 5);
    let all = [
        vec![own()],
        vec![limit(kind, 7)],
        vec![own().counting_denied(true)],
        vec![own(), limit(Kind::Gcra, 5)],
        vec![own(), limit(Kind::Log, 6)],
        vec![own(), limit(kind, 6)],
    ];
    // A concurrency limit cannot count denied requests, so the second rule is invalid and is
    // omitted.
    let all = all
        .into_iter()
        .filter_map(|limits| Limits::new(limits).ok());
    all.collect()
}

fn charge<'c>(limits: &'c Limits, key: &'c [u8], units: u64) -> Charge<'c> {
    Charge::new(key, limits, Cost::new(units).unwrap()).unwrap()
}

fn at(micros: u64) -> Timestamp {
    Timestamp::from_micros(micros)
}

async fn store(server: &Server) -> RedisStore {
    RedisStore::connect(&server.url(), "tg").await.unwrap()
}

/// A Redis store and a memory store whose clock has been set back.
struct Pair {
    redis: RedisStore,
    memory: MemoryStore,
}

impl Pair {
    /// With a clock that is ahead by `jump`, charges `limits` until they deny a request. Then sets
    /// the clock back.
    async fn after_a_jump(server: &Server, limits: &Limits, key: &[u8], jump: u64) -> Self {
        let (ahead, memory) = (
            store(server).await,
            MemoryStore::new(MemoryBounds::default()),
        );
        let one = [charge(limits, key, 1)];
        for step in 0..10 {
            let now = at(START + jump + step * 1_000);
            same(&ahead, &memory, &one, now, Effect::Charge).await;
        }
        Self {
            redis: store(server).await,
            memory,
        }
    }

    async fn ask(&self, charge: Charge<'_>, now: u64, effect: Effect) -> Decision {
        same(&self.redis, &self.memory, &[charge], at(now), effect).await
    }
}

/// After the clock has been set back, the limits of a key deny requests at first. Within a minute,
/// or at the end of the month, the limits then refill like the limits of an exhausted key.
#[tokio::test]
async fn a_key_is_as_full_as_an_exhausted_key_after_the_clock_is_set_back() {
    for server in Server::each() {
        for (kind, jump) in Kind::ALL
            .into_iter()
            .flat_map(|kind| JUMPS.map(|jump| (kind, jump)))
        {
            for (number, limits) in rules(kind).into_iter().enumerate() {
                let key = format!("{kind:?} {jump} {number}");
                let one = charge(&limits, key.as_bytes(), 1);
                let pair = Pair::after_a_jump(&server, &limits, key.as_bytes(), jump).await;
                pair.ask(one, START, Effect::Look).await;
                for effect in [Effect::Peek, Effect::Charge, Effect::Charge] {
                    let decision = pair.ask(one, START, effect).await;
                    assert_eq!(decision, Decision::Limited, "{key}: {effect:?}");
                }
                let mut admitted = 0;
                for step in 1..=26 {
                    let now = START + step * 5 * SECOND;
                    let decision = pair.ask(one, now, Effect::Charge).await;
                    admitted += u32::from(decision == Decision::Admitted);
                }
                let comes_back = kind != Kind::CalendarWindow && number != 2;
                assert!(admitted > 0 || !comes_back, "{key}");
            }
        }
    }
}

/// If the limits of a request are in several slots, the decision in each slot uses the clock of the
/// node that owns the slot.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn limits_in_several_slots_are_clamped() {
    for program in ["redis-server", "valkey-server"] {
        let server = tokio::task::block_in_place(|| RedisServer::slotted(program));
        for kind in Kind::ALL {
            let limits = Limits::new(vec![limit(kind, 5)]).unwrap();
            let keys = [format!("{kind:?} one"), format!("{kind:?} two")];
            let both = [0, 1].map(|at| charge(&limits, keys[at].as_bytes(), 1));
            let (ahead, mut outcomes) = (cross_slot::store(&server.url()).await, Vec::new());
            ahead.pin_clock(at(START + 40 * DAY));
            for _ in 0..6 {
                let decided = ahead.check(&both, Effect::Charge, &mut outcomes);
                decided.await.unwrap();
            }
            let right = cross_slot::store(&server.url()).await;
            right.pin_clock(at(START));
            for _ in 0..2 {
                let decided = right.check(&both, Effect::Charge, &mut outcomes);
                assert_eq!(decided.await, Ok(Decision::Limited), "{kind:?}");
            }
            if kind != Kind::CalendarWindow {
                right.pin_clock(at(START + 120 * SECOND));
                let decided = right.check(&both, Effect::Charge, &mut outcomes);
                assert_eq!(decided.await, Ok(Decision::Admitted), "{kind:?}");
            }
        }
    }
}

/// A state stored under other parameters is converted and clamped.
#[tokio::test]
async fn a_state_under_other_parameters_is_clamped() {
    for server in Server::each() {
        for (kind, jump) in Kind::ALL
            .into_iter()
            .flat_map(|kind| JUMPS.map(|jump| (kind, jump)))
        {
            let key = format!("{kind:?} {jump}");
            let old = Arc::new(Limits::new(vec![limit(kind, 5)]).unwrap());
            let other = Kind::algorithm(
                kind,
                4,
                Rate {
                    count: 3,
                    period: Span::from_secs(50),
                },
                5,
            );
            let new = Limits::new(vec![Limit::new(other).unwrap()]).unwrap();
            let new = new.inheriting_from(&old);
            let pair = Pair::after_a_jump(&server, &old, key.as_bytes(), jump).await;
            for step in 0..30 {
                let now = START + step * 5 * SECOND;
                let effect = [Effect::Charge, Effect::Peek][usize::from(step % 4 == 1)];
                let decision = pair.ask(charge(&new, key.as_bytes(), 1), now, effect).await;
                assert!(step > 0 || decision == Decision::Limited, "{key}");
            }
        }
    }
}

/// A larger limit has admitted requests whose units take hours to drain. The state was not written
/// by a clock that was ahead, so a request with the smaller limit leaves the state unchanged.
#[tokio::test]
async fn a_debt_of_a_larger_limit_is_not_clamped() {
    for server in Server::each() {
        let memory = MemoryStore::new(MemoryBounds::default());
        let redis = store(&server).await;
        let (hour, mut now) = (Span::from_secs(3_600), START);
        for kind in [Kind::Gcra, Kind::TokenBucket, Kind::Interval, Kind::Meter] {
            for (count, counts) in [(1, false), (7, false), (1, true)] {
                let of = |most| {
                    let rate = Rate {
                        count,
                        period: hour,
                    };
                    let limit = Limit::new(kind.algorithm(most, rate, 2)).unwrap();
                    limit.counting_denied(counts && most < 100)
                };
                let [large, small] =
                    [1_000, 2].map(|most| Arc::new(Limits::new(vec![of(most)]).unwrap()));
                let (small, large) = (
                    Arc::new(small.as_ref().clone().inheriting_from(&large)),
                    large.as_ref().clone().inheriting_from(&small),
                );
                let key = format!("{kind:?} {count} {counts}");
                let key = key.as_bytes();
                for (limits, units) in [(&large, 1_000), (&*small, 1), (&large, 1), (&*small, 2)] {
                    now += SECOND;
                    let asked = [charge(limits, key, units)];
                    let decision = same(&redis, &memory, &asked, at(now), Effect::Charge).await;
                    assert_eq!(decision == Decision::Admitted, units == 1_000);
                }
            }
        }
    }
}

/// The receipts of one charge in Redis and in memory.
struct Receipts(RedisReceipt, Receipt);

async fn reserve(redis: &RedisStore, memory: &MemoryStore, one: Charge<'_>, now: u64) -> Receipts {
    redis.pin_clock(at(now));
    let mut outcomes = Vec::new();
    let (decision, there) = redis.reserve(&[one], &mut outcomes).await.unwrap();
    assert_eq!(decision, Decision::Admitted);
    let (_, here) = memory.reserve(&[one], at(now), &mut outcomes);
    Receipts(there, here)
}

/// A receipt from a clock that was ahead cannot be used to refund units, but it can still be used
/// to release and renew leases.
#[tokio::test]
async fn a_receipt_of_a_clock_that_was_ahead_releases_only_leases() {
    for server in Server::each() {
        for kind in Kind::ALL {
            let limits = Limits::new(vec![limit(kind, 5)]).unwrap();
            let key = format!("{kind:?}");
            let one = charge(&limits, key.as_bytes(), 1);
            let memory = MemoryStore::new(MemoryBounds::default());
            let ahead = store(&server).await;
            let mut receipts = Vec::new();
            for step in 0..3 {
                let now = START + 600 * SECOND + step * SECOND;
                receipts.push(reserve(&ahead, &memory, one, now).await);
            }
            let pair = Pair {
                redis: store(&server).await,
                memory,
            };
            // The clock has been set back. A denied charge clamps the state.
            let five = charge(&limits, key.as_bytes(), 5);
            assert_eq!(
                pair.ask(five, START, Effect::Charge).await,
                Decision::Limited
            );
            let Receipts(there, here) = receipts.pop().unwrap();
            let all = [Settlement { unused: u64::MAX }];
            pair.redis.pin_clock(at(START + SECOND));
            pair.redis.settle(&[one], there, &all).await.unwrap();
            pair.memory.settle(&[one], here, &all, at(START + SECOND));
            pair.ask(one, START + SECOND, Effect::Look).await;
            if kind == Kind::Concurrency {
                for Receipts(there, here) in &mut receipts {
                    pair.redis.pin_clock(at(START + 20 * SECOND));
                    let renewed = pair.redis.renew(&[one], there).await.unwrap();
                    let expected = pair.memory.renew(&[one], here, at(START + 20 * SECOND));
                    assert_eq!((renewed, expected), (Renewal::Held, Renewal::Held));
                }
                let mut outcomes: Vec<Outcome> = Vec::new();
                let looked = pair.redis.check(&[one], Effect::Look, &mut outcomes).await;
                assert_eq!((looked, outcomes[0].remaining), (Ok(Decision::Admitted), 3));
            }
            for step in 21..90 {
                pair.ask(one, START + step * SECOND, Effect::Look).await;
            }
        }
    }
}

/// A manual refund is applied to the clamped state.
#[tokio::test]
async fn a_manual_refund_is_applied_after_the_clamp() {
    for server in Server::each() {
        for kind in Kind::ALL {
            let (limits, key) = (
                Limits::new(vec![limit(kind, 5)]).unwrap(),
                format!("{kind:?}"),
            );
            let one = charge(&limits, key.as_bytes(), 1);
            let pair = Pair::after_a_jump(&server, &limits, key.as_bytes(), JUMPS[1]).await;
            pair.ask(one, START, Effect::Refund).await;
            assert_eq!(
                pair.ask(one, START, Effect::Charge).await,
                Decision::Admitted,
                "{key}"
            );
            assert_eq!(
                pair.ask(one, START, Effect::Charge).await,
                Decision::Limited,
                "{key}"
            );
        }
    }
}

/// The limits of a key were changed and changed back while a request was in progress. Even if the
/// clock is also set back, and no matter how late the request is refunded, the refund does not
/// reduce later charges.
#[tokio::test]
async fn a_conversion_is_remembered_after_the_clock_is_set_back() {
    let daily = |kind: Kind, count| {
        let period = Span::from_secs(86_400);
        let limit = Limit::new(kind.algorithm(10, Rate { count, period }, 4)).unwrap();
        Limits::new(vec![limit]).unwrap()
    };
    for server in Server::each() {
        for kind in [
            Kind::Gcra,
            Kind::Interval,
            Kind::Log,
            Kind::CalendarWindow,
            Kind::Weighted,
        ] {
            let between = if kind == Kind::Gcra {
                Kind::Log
            } else {
                Kind::Gcra
            };
            let (first, second) = (daily(kind, 10), daily(between, 10));
            let key = format!("{kind:?}");
            let (right, ahead) = (store(&server).await, store(&server).await);
            right.pin_clock(at(START));
            let mut outcomes = Vec::new();
            let five = [charge(&first, key.as_bytes(), 5)];
            let receipt = right.reserve(&five, &mut outcomes).await.unwrap().1;
            let other = [charge(&second, key.as_bytes(), 1)];
            for charges in [&other, &[charge(&first, key.as_bytes(), 1)]] {
                let asked = right.check(charges, Effect::Charge, &mut outcomes);
                asked.await.unwrap();
            }
            // Requests exhaust the limit while the clock is ahead. The clock is set back after
            // these requests. Even by the clock that is ahead, the ledger of the conversion is kept
            // for 12 hours, the time in which five units drain.
            let one = [charge(&first, key.as_bytes(), 1)];
            ahead.pin_clock(at(START + 6 * 3_600 * SECOND));
            for _ in 0..16 {
                let asked = ahead.check(&one, Effect::Charge, &mut outcomes);
                asked.await.unwrap();
            }
            let mut left = Vec::new();
            for second in [1, 90, 100] {
                right.pin_clock(at(START + second * SECOND));
                let denied = right.check(&one, Effect::Charge, &mut outcomes).await;
                assert_eq!(denied, Ok(Decision::Limited), "{key} {second}");
                left.push(outcomes[0].remaining);
            }
            let all = [Settlement { unused: u64::MAX }];
            right.settle(&five, receipt, &all).await.unwrap();
            right
                .check(&one, Effect::Look, &mut outcomes)
                .await
                .unwrap();
            assert_eq!(outcomes[0].remaining, left[2], "{key}");
        }
    }
}

/// If the clock steps back by less than ten seconds, no state is changed.
#[tokio::test]
async fn a_short_step_back_does_not_clamp() {
    for server in Server::each() {
        for kind in Kind::ALL {
            let (limits, key) = (
                Limits::new(vec![limit(kind, 5)]).unwrap(),
                format!("{kind:?}"),
            );
            let one = charge(&limits, key.as_bytes(), 1);
            Pair::after_a_jump(&server, &limits, key.as_bytes(), 9 * SECOND).await;
            let before = server.command(&["GET", &format!("tg:{key}")]);
            let right = store(&server).await;
            right.pin_clock(at(START));
            let decided = right.check(&[one], Effect::Charge, &mut Vec::new()).await;
            assert_eq!(decided, Ok(Decision::Limited), "{key}");
            assert_eq!(
                server.command(&["GET", &format!("tg:{key}")]),
                before,
                "{key}"
            );
        }
    }
}
