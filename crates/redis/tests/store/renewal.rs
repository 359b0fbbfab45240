//! Tests leases that are renewed after the limits have changed. The renewal happens just before or
//! just after the stored state expires.

use std::sync::Arc;

use tidegate_core::{
    Algorithm, Charge, Cost, Effect, Limit, Limits, MemoryBounds, MemoryStore, Outcome, Rate,
    Refund, Renewal, Settlement, Span, Timestamp,
};
use tidegate_redis::{
    RedisReceipt, RedisReservation, RedisStore, ReservationEnd, ReservationStatus,
};

use crate::{START, differential::strategies::Kind, server::Server};

/// The change to a key before its lease is renewed.
#[derive(Clone, Copy, Debug)]
enum Meanwhile {
    Nothing,
    /// A charge is denied. One of the limits counts the denied charge. The other limits do not
    /// count the denied charge, so their stored windows and buckets contain no units.
    Denied,
    Blocked,
    /// The new limits have other kinds.
    OtherKinds,
}

#[derive(Clone, Copy, Debug)]
struct Case {
    /// In microseconds: the instant at which the lease is acquired (`base`), and the time from then
    /// until the charge under the new limits (`charged`).
    base: u64,
    charged: u64,
    kind: Kind,
    /// Period and lease duration of the new limits, in microseconds.
    period: u64,
    lease: u64,
    meanwhile: Meanwhile,
    /// The lease is renewed when the limit with this index has reset. If there is no limit with
    /// this index, the index is the number of half lease durations after which the lease is
    /// renewed.
    which: usize,
    /// Whether the lease is renewed one microsecond before the instant that `which` selects (0),
    /// exactly at the instant (1), or one microsecond after it (2).
    nudge: u64,
}

impl Case {
    fn limits(self, kind: Kind, period: Span, lease: Span) -> Limits {
        let rate = Rate { count: 3, period };
        let brief = Rate {
            count: 3,
            period: Span::from_micros(300),
        };
        let limit = |algorithm| Limit::new(algorithm).unwrap();
        let mut limits = vec![
            limit(kind.algorithm(4, rate, 4)),
            limit(Algorithm::Concurrency { limit: 9, lease }),
        ];
        if let Meanwhile::Denied = self.meanwhile {
            let counting = limit(Kind::Gcra.algorithm(3, brief, 4)).counting_denied(true);
            limits.push(counting);
        }
        Limits::new(limits).unwrap()
    }

    /// Acquires a lease for an hour, changes to limits that expire soon, and renews the lease.
    async fn run(self, redis: &RedisStore) {
        let hour = Span::from_secs(3_600);
        let old_kind = match (self.meanwhile, self.kind) {
            (Meanwhile::OtherKinds, Kind::Log) => Kind::Gcra,
            (Meanwhile::OtherKinds, _) => Kind::Log,
            _ => self.kind,
        };
        let old = Arc::new(self.limits(old_kind, hour, hour));
        let [period, lease] = [self.period, self.lease].map(Span::from_micros);
        let new = Arc::new(self.limits(self.kind, period, lease).inheriting_from(&old));
        // The rule gets its old limits again. The memory store reads the parameters of the stored
        // state from the former limits, and Redis reads them from the state itself.
        let back = self.limits(old_kind, hour, hour).inheriting_from(&new);
        let key = format!("{self:?}");
        let charge =
            |limits, units| Charge::new(key.as_bytes(), limits, Cost::new(units).unwrap()).unwrap();
        let (old, back) = (charge(&*old, 1), charge(&back, 1));
        let new = |units| charge(&*new, units);

        let both = Both::new(redis, self);
        let (mut receipt, mut remote) = both.reserve(old).await;
        both.ask(new(1), self.charged, Effect::Charge).await;
        let mut last = self.charged;
        match self.meanwhile {
            Meanwhile::Nothing | Meanwhile::OtherKinds => {}
            Meanwhile::Denied => {
                last += self.period;
                both.ask(new(4), last, Effect::Charge).await;
            }
            Meanwhile::Blocked => both.block(key.as_bytes(), last).await,
        }
        let standing = both.ask(new(1), last, Effect::Look).await;
        let reset = standing.get(self.which);
        let after = reset.map_or(self.which as u64 * self.lease / 2, |outcome| {
            outcome.reset_after.as_micros()
        });
        let now = last + after + self.nudge - 1;
        let now = now.max(last);

        both.redis.pin_clock(both.at(now));
        let renewed = both.redis.renew(&[old], &mut remote).await.unwrap();
        let expected = both.memory.renew(&[old], &mut receipt, both.at(now));
        assert_eq!(renewed, expected, "{self:?} at {now}");
        for later in [0, 1_000, 20_000, 70_000, 3_600_000_000] {
            both.ask(back, now + later, Effect::Look).await;
        }
    }
}

/// The two stores at the start of a case. Every case has its own stores, because the clock of a
/// store never goes back.
struct Both {
    redis: RedisStore,
    memory: MemoryStore,
    case: Case,
}

impl Both {
    fn new(redis: &RedisStore, case: Case) -> Self {
        let bounds = MemoryBounds {
            max_keys: 1_000,
            ..MemoryBounds::default()
        };
        Self {
            redis: redis.unpinned(),
            memory: MemoryStore::new(bounds),
            case,
        }
    }

    fn at(&self, micros: u64) -> Timestamp {
        Timestamp::from_micros(self.case.base + micros)
    }

    async fn reserve(&self, charge: Charge<'_>) -> (tidegate_core::Receipt, RedisReceipt) {
        self.redis.pin_clock(self.at(0));
        let (_, here) = self.memory.reserve(&[charge], self.at(0), &mut Vec::new());
        let there = self.redis.reserve(&[charge], &mut Vec::new()).await;
        (here, there.unwrap().1)
    }

    async fn block(&self, key: &[u8], micros: u64) {
        assert!(self.memory.block(key, None, "by hand", self.at(micros)));
        self.redis.block(key, None, "by hand").await.unwrap();
    }

    /// Sends the same request to both stores, checks that the replies are equal, and returns the
    /// outcomes.
    async fn ask(&self, charge: Charge<'_>, micros: u64, effect: Effect) -> Vec<Outcome> {
        let (mut expected, mut got) = (Vec::new(), Vec::new());
        let here = self
            .memory
            .check(&[charge], self.at(micros), effect, &mut expected);
        self.redis.pin_clock(self.at(micros));
        let there = self.redis.check(&[charge], effect, &mut got).await.unwrap();
        let case = self.case;
        assert_eq!(
            (there, &got),
            (here, &expected),
            "{case:?} {effect:?} at {micros}"
        );
        got
    }
}

#[tokio::test]
async fn a_lease_is_renewed_in_an_expired_state_as_in_memory() {
    let mut cases = Vec::new();
    for kind in Kind::ALL {
        for meanwhile in [
            Meanwhile::Nothing,
            Meanwhile::Denied,
            Meanwhile::Blocked,
            Meanwhile::OtherKinds,
        ] {
            // With three units in seven milliseconds, a unit does not take an integer number of
            // microseconds.
            for (period, lease) in [(7_000, 12_000), (48_000, 12_000)] {
                let spots = (0..9).flat_map(|which| [(which, 0), (which, 1), (which, 2)]);
                cases.extend(spots.map(|(which, nudge)| Case {
                    base: START,
                    charged: 999,
                    kind,
                    period,
                    lease,
                    meanwhile,
                    which,
                    nudge,
                }));
            }
        }
    }
    for server in Server::each() {
        let redis = RedisStore::connect(&server.url(), "tg").await.unwrap();
        for case in &cases {
            case.run(&redis).await;
        }
    }
}

/// Near the epoch, instants are numbers as small as the offsets of states in a value.
#[tokio::test]
async fn a_lease_is_renewed_near_the_epoch_as_in_memory() {
    let server = Server::redis();
    let redis = RedisStore::connect(&server.url(), "tg").await.unwrap();
    for kind in [Kind::EpochWindow, Kind::Interval, Kind::Gcra] {
        for which in 0..2 {
            for nudge in 0..40 {
                let case = Case {
                    base: 0,
                    charged: 2,
                    kind,
                    period: 3,
                    lease: 3,
                    meanwhile: Meanwhile::Nothing,
                    which,
                    nudge,
                };
                case.run(&redis).await;
            }
        }
    }
}

/// If the store did not write a value, the value contains no leases, and a renewal leaves it
/// unchanged.
#[tokio::test]
async fn a_lease_under_a_foreign_value_is_lost() {
    let algorithm = Algorithm::Concurrency {
        limit: 3,
        lease: Span::from_secs(60),
    };
    let limits = Limits::new(vec![Limit::new(algorithm).unwrap()]).unwrap();
    let charge = Charge::new(b"user:1", &limits, Cost::ONE).unwrap();
    for server in Server::each() {
        let redis = RedisStore::connect(&server.url(), "tg").await.unwrap();
        let (_, mut receipt) = redis.reserve(&[charge], &mut Vec::new()).await.unwrap();
        for foreign in ["hello", "pretty long, and no value of ours"] {
            server.command(&["SET", "tg:user:1", foreign]);
            let renewal = redis.renew(&[charge], &mut receipt).await;
            assert_eq!(renewal, Ok(Renewal::Lost), "{foreign}");
            assert_eq!(server.command(&["GET", "tg:user:1"]).trim(), foreign);
        }
    }
}

/// A settlement ends the reservation between the two steps of a renewal. The second step must not
/// acquire the slot again, because no later call would release it.
#[tokio::test]
async fn a_renewal_that_a_settlement_overtakes_acquires_no_slot() {
    for server in Server::each() {
        let store = RedisStore::connect(&server.url(), "tg").await.unwrap();
        let at = |seconds: u64| Timestamp::from_micros(START + seconds * 1_000_000);
        let lease = Span::from_secs(60);
        let slots = Limit::new(Algorithm::Concurrency { limit: 1, lease }).unwrap();
        let limits = Limits::new(vec![slots]).unwrap();
        let charges = [Charge::new(b"key", &limits, Cost::ONE).unwrap()];
        store.pin_clock(at(0));
        let (_, mut receipt) = store.reserve(&charges, &mut Vec::new()).await.unwrap();
        let former = receipt.clone();
        let reservation = reservation_of(&charges, &former, at(30));
        let renewed = store.renew_reservation(reservation, at(40), at(1)).await;
        assert_eq!(renewed, Ok(ReservationStatus::Outstanding(at(40))));
        let settlements = |_| vec![Settlement { unused: 1 }];
        let end = ReservationEnd::Settled(0);
        let ended = store.end_reservation(reservation, settlements, end, at(1));
        assert_eq!(ended.await, Ok(ReservationStatus::Ended(Refund::Complete)));
        store.pin_clock(at(1));
        let renewed = store.renew_leases_of_reservation(reservation, at(40), at(1), &mut receipt);
        assert_eq!(renewed.await, Ok(Renewal::Lost));
        let mut outcomes = Vec::new();
        let look = store.check(&charges, Effect::Look, &mut outcomes);
        look.await.unwrap();
        assert_eq!(outcomes[0].remaining, 1, "the slot is free");
    }
}

/// While a hash slot is migrating, leases are renewed without the guard. Then the token knows the
/// lease, and the guard does not. A later renewal and the end must find this lease.
#[tokio::test]
async fn a_lease_that_was_renewed_without_the_guard_is_found() {
    for server in Server::each() {
        let store = RedisStore::connect(&server.url(), "tg").await.unwrap();
        let at = |seconds: u64| Timestamp::from_micros(START + seconds * 1_000_000);
        let lease = Span::from_secs(60);
        let slots = Limit::new(Algorithm::Concurrency { limit: 2, lease }).unwrap();
        let limits = Limits::new(vec![slots]).unwrap();
        let charges = [Charge::new(b"key", &limits, Cost::ONE).unwrap()];
        for renewals in 0..3 {
            store.pin_clock(at(10 * renewals));
            let (_, mut receipt) = store.reserve(&charges, &mut Vec::new()).await.unwrap();
            let reserved = receipt.clone();
            let reservation = |receipt| RedisReservation {
                id: u128::from(renewals).to_be_bytes(),
                expires: at(100),
                charges: &charges,
                receipt,
                former_keys: &[],
            };
            let free = async || {
                let mut outcomes = Vec::new();
                let look = store.check(&charges, Effect::Look, &mut outcomes);
                look.await.unwrap();
                outcomes[0].remaining
            };
            for renewal in 0..=renewals {
                let now = at(10 * renewals + 1 + 2 * renewal);
                store.pin_clock(now);
                let renewed = store
                    .renew_leases_of_reservation(reservation(&reserved), at(100), now, &mut receipt)
                    .await;
                assert_eq!(renewed, Ok(Renewal::Held));
                assert_eq!(free().await, 1, "one slot is held");
                store.pin_clock(at(10 * renewals + 2 + 2 * renewal));
                let renewed = store.renew(&charges, &mut receipt).await;
                assert_eq!(renewed, Ok(Renewal::Held));
            }
            let end = ReservationEnd::Settled(0);
            let settlements = |_| vec![Settlement { unused: 1 }];
            let now = at(10 * renewals + 9);
            let ended = store.end_reservation(reservation(&receipt), settlements, end, now);
            assert_eq!(ended.await, Ok(ReservationStatus::Ended(Refund::Complete)));
            assert_eq!(free().await, 2, "all slots are free");
        }
    }
}

/// A renewal under limits of another number renews no lease. It must not replace the receipt of an
/// earlier renewal in the guard, because the former token needs that receipt to release the slot.
#[tokio::test]
async fn a_renewal_that_finds_no_lease_forgets_no_earlier_renewal() {
    for server in Server::each() {
        let store = RedisStore::connect(&server.url(), "tg").await.unwrap();
        let at = |seconds: u64| Timestamp::from_micros(START + seconds * 1_000_000);
        let lease = Span::from_secs(60);
        let slots = Limit::new(Algorithm::Concurrency { limit: 1, lease }).unwrap();
        let rate = "100/s".parse::<Limit>().unwrap();
        let lists = [vec![slots.clone()], vec![slots, rate]];
        let [limits, others] = lists.map(|list| Limits::new(list).unwrap());
        let [charge, other] =
            [&limits, &others].map(|limits| [Charge::new(b"key", limits, Cost::ONE).unwrap()]);
        store.pin_clock(at(0));
        let (_, reserved) = store.reserve(&charge, &mut Vec::new()).await.unwrap();
        for (seconds, charges, renewal) in [(1, &charge, Renewal::Held), (2, &other, Renewal::Lost)]
        {
            store.pin_clock(at(seconds));
            let reservation = reservation_of(charges, &reserved, at(100));
            let mut receipt = reserved.clone();
            let renewed = store
                .renew_leases_of_reservation(reservation, at(100), at(seconds), &mut receipt)
                .await;
            assert_eq!(renewed, Ok(renewal));
        }
        let settlements = |_| vec![Settlement { unused: 1 }];
        let reservation = reservation_of(&charge, &reserved, at(100));
        let end = ReservationEnd::Settled(0);
        let ended = store.end_reservation(reservation, settlements, end, at(3));
        assert_eq!(ended.await, Ok(ReservationStatus::Ended(Refund::Complete)));
        let mut outcomes = Vec::new();
        store
            .check(&charge, Effect::Look, &mut outcomes)
            .await
            .unwrap();
        assert_eq!(outcomes[0].remaining, 1, "the slot is free");
    }
}

/// The script fails at the second of two keys. The first lease must not have been renewed, because
/// neither the receipt nor the guard contains its new start.
#[tokio::test]
async fn a_renewal_that_fails_renews_no_lease() {
    for server in Server::each() {
        let store = RedisStore::connect(&server.url(), "tg").await.unwrap();
        let at = |seconds: u64| Timestamp::from_micros(START + seconds * 1_000_000);
        let lease = Span::from_secs(60);
        let slots = Limit::new(Algorithm::Concurrency { limit: 1, lease }).unwrap();
        let limits = Limits::new(vec![slots]).unwrap();
        let charges = [&b"a"[..], b"b"].map(|key| Charge::new(key, &limits, Cost::ONE).unwrap());
        store.pin_clock(at(0));
        let (_, reserved) = store.reserve(&charges, &mut Vec::new()).await.unwrap();
        let reservation = reservation_of(&charges, &reserved, at(100));

        server.command(&["RENAME", "tg:b", "saved"]);
        server.command(&["LPUSH", "tg:b", "a value of another type"]);
        store.pin_clock(at(1));
        let mut receipt = reserved.clone();
        let renewed = store.renew_leases_of_reservation(reservation, at(100), at(1), &mut receipt);
        assert!(renewed.await.is_err());
        assert_eq!(receipt.parts(), reserved.parts());
        server.command(&["RENAME", "saved", "tg:b"]);

        let settlements = |_| vec![Settlement { unused: 1 }; 2];
        let end = ReservationEnd::Settled(0);
        let ended = store.end_reservation(reservation, settlements, end, at(2));
        assert_eq!(ended.await, Ok(ReservationStatus::Ended(Refund::Complete)));
        let mut outcomes = Vec::new();
        let look = store.check(&charges, Effect::Look, &mut outcomes);
        look.await.unwrap();
        let free: Vec<u64> = outcomes.iter().map(|outcome| outcome.remaining).collect();
        assert_eq!(free, [1, 1], "both slots are free");
    }
}

fn reservation_of<'r>(
    charges: &'r [Charge<'r>],
    receipt: &'r RedisReceipt,
    expires: Timestamp,
) -> RedisReservation<'r> {
    RedisReservation {
        id: [7; 16],
        expires,
        charges,
        receipt,
        former_keys: &[],
    }
}

/// Servers of earlier versions read the instant of a guard with `tonumber`. The receipts with the
/// renewed leases follow after a zero byte.
#[test]
fn earlier_versions_read_the_number_in_a_guard() {
    for server in Server::each() {
        let script = "return tonumber('1700006400000000\\0' .. cmsgpack.pack({k = 7}))";
        let instant = server.command(&["EVAL", script, "0"]);
        assert!(instant.contains("1700006400000000"), "{instant}");
        // The final cost in a guard is followed by a zero byte if units stay charged.
        let script = "return {tonumber('3\\0'), tonumber('\\0') or 0}";
        let costs = server.command(&["EVAL", script, "0"]);
        assert_eq!(costs, "3\n0");
    }
}
