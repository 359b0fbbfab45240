//! Tests the end of a reservation in several hash slots of a cluster: while the node of one hash
//! slot refuses all calls, during other calls, and after renewals.

use std::{pin::pin, sync::Arc, time::Duration};

use futures_util::FutureExt;
use tidegate_core::{
    Charge, Cost, Decision, Effect, Limit, Limits, MemoryBounds, MemoryStore, Rate, Refund,
    Settlement, Source, Span, Store, StoreRequest, Timestamp,
};
use tidegate_redis::{
    Address, FallbackSettings, FallbackStore, Redis, RedisReceipt, RedisReservation, RedisSettings,
    RedisStore, ReservationEnd, ReservationStatus, StoreError, Topology,
};
use tokio::runtime::Handle;

use crate::{
    START,
    differential::strategies::Kind,
    support::{RedisCluster, RedisServer},
};

/// The reserved units, of a limit of 10.
const RESERVED: u64 = 6;
const TTL: Span = Span::from_secs(30);

const ENDED: ReservationStatus = ReservationStatus::Ended(Refund::Complete);

/// A cluster, and limits for keys on several nodes.
struct Fixture {
    cluster: RedisCluster,
    redis: Arc<Redis>,
    store: RedisStore,
    limits: Limits,
}

/// A reservation of keys on different nodes, in the order of their hash slots.
struct Reserved {
    id: [u8; 16],
    keys: Vec<String>,
    receipt: RedisReceipt,
}

impl Fixture {
    async fn start() -> Self {
        let cluster = RedisCluster::start();
        let (address, _) = Address::parse(&cluster.url()).unwrap();
        let settings = RedisSettings {
            timeout: Duration::from_secs(10),
            ..RedisSettings::new(Topology::Cluster {
                seeds: vec![address],
            })
        };
        let redis = Arc::new(Redis::start(settings, &Handle::current()));
        redis.wait_for_first_attempt().await.unwrap();
        let store = RedisStore::new(Arc::clone(&redis), "tg");
        store.pin_clock(at(0));
        let rate = Rate {
            count: 10,
            period: Span::from_secs(3_600),
        };
        let limit = Limit::new(Kind::Log.algorithm(10, rate, 4)).unwrap();
        Self {
            cluster,
            redis,
            store,
            limits: Limits::new(vec![limit]).unwrap(),
        }
    }

    /// Returns new keys on this number of nodes, in the order of their hash slots.
    fn keys(&self, name: &str, nodes: usize) -> Vec<String> {
        let stored = |key: &str| format!("tg:{key}");
        let key_of = |node: usize| {
            let mut keys = (0..).map(|number| format!("{name} {number}"));
            let key = keys.find(|key| self.cluster.owner(&stored(key)) == node);
            key.unwrap()
        };
        let mut keys: Vec<String> = (0..nodes).map(key_of).collect();
        keys.sort_by_key(|key| {
            let slot = self.node(0).ask(&["CLUSTER", "KEYSLOT", &stored(key)]);
            slot.trim_start_matches(':').parse::<u32>().unwrap()
        });
        keys
    }

    fn node(&self, number: usize) -> &RedisServer {
        &self.cluster.nodes()[number]
    }

    fn owner(&self, key: &str) -> &RedisServer {
        self.node(self.cluster.owner(&format!("tg:{key}")))
    }

    fn charges<'c>(&'c self, keys: &'c [String]) -> Vec<Charge<'c>> {
        let cost = Cost::new(RESERVED).unwrap();
        let charge = |key: &'c String| Charge::new(key.as_bytes(), &self.limits, cost).unwrap();
        keys.iter().map(charge).collect()
    }

    async fn reserve(&self, number: u8) -> Reserved {
        self.reserve_on(number, 2).await
    }

    /// Reserves units of keys on this number of nodes.
    async fn reserve_on(&self, number: u8, nodes: usize) -> Reserved {
        let keys = self.keys(&format!("reservation {number}"), nodes);
        self.reserve_keys(number, keys).await
    }

    async fn reserve_keys(&self, number: u8, keys: Vec<String>) -> Reserved {
        let charges = self.charges(&keys);
        let reserved = self.store.reserve(&charges, &mut Vec::new()).await.unwrap();
        assert_eq!(reserved.0, Decision::Admitted);
        Reserved {
            id: [number; 16],
            receipt: reserved.1,
            keys,
        }
    }

    /// Ends a reservation with the token of its first expiry.
    async fn end(
        &self,
        reserved: &Reserved,
        end: ReservationEnd,
        seconds: u64,
    ) -> Result<ReservationStatus, StoreError> {
        self.end_until(reserved, at(0).after(TTL), end, at(seconds))
            .await
    }

    /// Ends a reservation with a token that expires at `expires`.
    async fn end_until(
        &self,
        reserved: &Reserved,
        expires: Timestamp,
        end: ReservationEnd,
        now: Timestamp,
    ) -> Result<ReservationStatus, StoreError> {
        let charges = self.charges(&reserved.keys);
        let reservation = RedisReservation {
            id: reserved.id,
            expires,
            charges: &charges,
            receipt: &reserved.receipt,
            former_keys: &[],
        };
        let settlements = |end| {
            let unused = match end {
                ReservationEnd::Settled(cost) => RESERVED - cost,
                ReservationEnd::Expired => RESERVED,
            };
            vec![Settlement { unused }; reserved.keys.len()]
        };
        self.store
            .end_reservation(reservation, settlements, end, now)
            .await
    }

    /// Ends a reservation while the node of one of its keys has no memory, and refuses all calls.
    async fn end_without(
        &self,
        reserved: &Reserved,
        key: usize,
        end: ReservationEnd,
        seconds: u64,
    ) {
        let node = self.owner(&reserved.keys[key]);
        let limit_memory = |bytes| node.ask(&["CONFIG", "SET", "maxmemory", bytes]);
        assert_eq!(limit_memory("1"), "+OK");
        let ended = self.end(reserved, end, seconds).await;
        assert_eq!(limit_memory("0"), "+OK");
        assert!(ended.is_err(), "{ended:?}");
    }

    /// Returns the number of units that are counted for each key.
    async fn counted(&self, reserved: &Reserved) -> Vec<u64> {
        let mut outcomes = Vec::new();
        let charges = self.charges(&reserved.keys);
        let look = self.store.check(&charges, Effect::Look, &mut outcomes);
        look.await.unwrap();
        outcomes
            .iter()
            .map(|outcome| 10 - outcome.remaining)
            .collect()
    }

    /// Renews a reservation with the token of its first expiry.
    async fn renew(&self, reserved: &Reserved, until: Timestamp, now: Timestamp) {
        let charges = self.charges(&reserved.keys);
        let reservation = RedisReservation {
            id: reserved.id,
            expires: at(0).after(TTL),
            charges: &charges,
            receipt: &reserved.receipt,
            former_keys: &[],
        };
        let renewed = self.store.renew_reservation(reservation, until, now).await;
        assert_eq!(renewed, Ok(ReservationStatus::Outstanding(until)));
    }

    /// Runs a Redis command on the guard in the hash slot of one of the keys.
    fn ask_guard(&self, reserved: &Reserved, key: usize, command: &str) -> i64 {
        let script = "local guard = redis.call('KEYS', '*#ends*' .. ARGV[1])[1]
            return guard and redis.call(ARGV[2], guard) or -2";
        let id = format!("{:02x}", reserved.id[0]).repeat(16);
        let node = self.owner(&reserved.keys[key]);
        let reply = node.ask(&["EVAL", script, "0", &id, command]);
        reply.trim_start_matches(':').parse().unwrap()
    }

    /// Writes the guard in the hash slot of one of the keys. The guard must exist.
    fn set_guard(&self, reserved: &Reserved, key: usize, value: &str) {
        let script = "local guard = redis.call('KEYS', '*#ends*' .. ARGV[1])[1]
            return redis.call('SET', guard, ARGV[2])";
        let id = format!("{:02x}", reserved.id[0]).repeat(16);
        let node = self.owner(&reserved.keys[key]);
        assert_eq!(node.ask(&["EVAL", script, "0", &id, value]), "+OK");
    }

    /// Asserts that the guards in all hash slots are kept for almost a minute longer than until
    /// `expires`.
    fn assert_guards_kept(&self, reserved: &Reserved, expires: Timestamp) {
        for key in 0..reserved.keys.len() {
            let kept = self.ask_guard(reserved, key, "PTTL");
            let wanted = expires.since(at(0)).as_millis_ceil() + 40_000;
            assert!(kept >= i64::try_from(wanted).unwrap(), "{key}: {kept} ms");
        }
    }
}

fn at(seconds: u64) -> Timestamp {
    Timestamp::from_micros(START + seconds * 1_000_000)
}

#[tokio::test]
async fn a_partial_settlement_is_completed() {
    use ReservationEnd::{Expired, Settled};
    use ReservationStatus::EndedBefore;
    let fixture = Fixture::start().await;

    // The holder repeats the call.
    let repeated = fixture.reserve(1).await;
    fixture.end_without(&repeated, 1, Settled(2), 1).await;
    assert_eq!(fixture.counted(&repeated).await, [2, RESERVED]);
    let ended = fixture.end(&repeated, Settled(2), 2).await;
    assert_eq!(ended, Ok(ENDED), "the caller charges the excess once");
    assert_eq!(fixture.counted(&repeated).await, [2, 2]);
    let ended = fixture.end(&repeated, Settled(2), 3).await;
    assert_eq!(ended, Ok(EndedBefore(Settled(2), Refund::Complete)));

    // The holder repeats the call with another cost.
    let changed = fixture.reserve(2).await;
    fixture.end_without(&changed, 1, Settled(2), 1).await;
    let ended = fixture.end(&changed, Settled(5), 2).await;
    assert_eq!(ended, Ok(EndedBefore(Settled(2), Refund::Complete)));
    assert_eq!(fixture.counted(&changed).await, [2, 2]);

    // The holder does not repeat the call, and the reservation expires.
    let abandoned = fixture.reserve(3).await;
    fixture.end_without(&abandoned, 1, Settled(2), 29).await;
    let ended = fixture.end(&abandoned, Expired, 30).await;
    assert_eq!(ended, Ok(EndedBefore(Settled(2), Refund::Complete)));
    assert_eq!(fixture.counted(&abandoned).await, [2, 2]);

    // The first hash slot decides. Without its node, nothing changes.
    let unchanged = fixture.reserve(4).await;
    fixture.end_without(&unchanged, 0, Settled(2), 1).await;
    assert_eq!(fixture.counted(&unchanged).await, [RESERVED; 2]);
    let ended = fixture.end(&unchanged, Expired, 30).await;
    assert_eq!(ended, Ok(ENDED));
    assert_eq!(fixture.counted(&unchanged).await, [0, 0]);

    // An expired reservation ends in part, and a settlement is too late.
    let expired = fixture.reserve(5).await;
    fixture.end_without(&expired, 1, Expired, 30).await;
    let ended = fixture.end(&expired, Settled(2), 29).await;
    assert_eq!(ended, Ok(EndedBefore(Expired, Refund::Complete)));
    assert_eq!(fixture.counted(&expired).await, [0, 0]);
}

/// The reservation was renewed. A further hash slot does not know the renewal, and ends with the
/// first one.
#[tokio::test]
async fn the_first_hash_slot_decides_about_a_renewed_reservation() {
    let fixture = Fixture::start().await;
    let reserved = fixture.reserve(1).await;
    let charges = fixture.charges(&reserved.keys);
    let reservation = RedisReservation {
        id: reserved.id,
        expires: at(0).after(TTL),
        charges: &charges,
        receipt: &reserved.receipt,
        former_keys: &[],
    };
    let renewed = fixture.store.renew_reservation(reservation, at(60), at(20));
    let outstanding = ReservationStatus::Outstanding(at(60));
    assert_eq!(renewed.await, Ok(outstanding));
    assert_eq!(
        fixture.store.read_guard(reservation).await,
        Ok(Some(outstanding))
    );
    let ended = fixture.end(&reserved, ReservationEnd::Expired, 40).await;
    assert_eq!(ended, Ok(outstanding));
    assert_eq!(fixture.counted(&reserved).await, [RESERVED; 2]);
    let ended = fixture.end(&reserved, ReservationEnd::Settled(1), 50).await;
    assert_eq!(ended, Ok(ENDED));
    assert_eq!(fixture.counted(&reserved).await, [1, 1]);
}

/// The scripts read every digit of an instant: a reservation is outstanding one microsecond before
/// it expires, and has expired in all hash slots at the exact microsecond.
#[tokio::test]
async fn a_reservation_expires_in_all_hash_slots_at_the_exact_microsecond() {
    let fixture = Fixture::start().await;
    let keys = fixture.keys("exact", 2);
    for number in 0..100 {
        let expires = Timestamp::from_micros(START + 30_000_000 + u64::from(number));
        let reserved = fixture.reserve_keys(number, keys.clone()).await;
        let end = async |now: u64| {
            let now = Timestamp::from_micros(now);
            let end = ReservationEnd::Expired;
            fixture.end_until(&reserved, expires, end, now).await
        };
        let outstanding = ReservationStatus::Outstanding(expires);
        assert_eq!(end(expires.as_micros() - 1).await, Ok(outstanding));
        assert_eq!(end(expires.as_micros()).await, Ok(ENDED), "{expires:?}");
        assert_eq!(fixture.counted(&reserved).await, [0, 0], "{expires:?}");
    }
}

/// The first call cannot refund a key whose state has other limits, and fails in the last hash
/// slot. The call that completes the settlement reports that units stay charged.
#[tokio::test]
async fn units_that_stay_charged_in_an_earlier_call_are_reported() {
    let fixture = Fixture::start().await;
    let rate = Rate {
        count: 100,
        period: Span::from_secs(60),
    };
    let limit = Limit::new(Kind::Gcra.algorithm(100, rate, 4)).unwrap();
    let other = Limits::new(vec![limit]).unwrap();
    for (number, changed) in [(1, None), (2, Some(0)), (3, Some(1))] {
        let reserved = fixture.reserve_on(number, 3).await;
        if let Some(key) = changed {
            let key = reserved.keys[key].as_bytes();
            let charge = Charge::new(key, &other, Cost::ONE).unwrap();
            let decided = fixture
                .store
                .check(&[charge], Effect::Charge, &mut Vec::new())
                .await;
            assert_eq!(decided, Ok(Decision::Admitted));
        }
        let end = ReservationEnd::Settled(2);
        fixture.end_without(&reserved, 2, end, 1).await;
        let refund = match changed {
            None => Refund::Complete,
            Some(_) => Refund::Incomplete,
        };
        let ended = fixture.end(&reserved, end, 2).await;
        assert_eq!(ended, Ok(ReservationStatus::Ended(refund)), "{changed:?}");
        let before = Ok(ReservationStatus::EndedBefore(end, refund));
        assert_eq!(fixture.end(&reserved, end, 3).await, before);
    }
}

/// A renewal shortens the reservation, but its first token still expires later.
#[tokio::test]
async fn a_shortened_reservation_ends_once() {
    let fixture = Fixture::start().await;
    let reserved = fixture.reserve(1).await;
    fixture.renew(&reserved, at(1), at(0)).await;
    let end = ReservationEnd::Settled(RESERVED);
    let ended = fixture.end_until(&reserved, at(1), end, at(0)).await;
    assert_eq!(ended, Ok(ENDED));
    fixture.assert_guards_kept(&reserved, at(0).after(TTL));
}

/// A former token of a renewed reservation settles it. The guards in all hash slots are kept until
/// the renewed reservation has expired.
#[tokio::test]
async fn all_guards_are_kept_as_long_as_the_first_guard() {
    let fixture = Fixture::start().await;
    let reserved = fixture.reserve(1).await;
    fixture.renew(&reserved, at(600), at(0)).await;
    let end = ReservationEnd::Settled(2);
    let ended = fixture.end(&reserved, end, 1).await;
    assert_eq!(ended, Ok(ENDED));
    fixture.assert_guards_kept(&reserved, at(600));

    // The first call fails, and a repeated call completes it.
    let repeated = fixture.reserve(2).await;
    fixture.renew(&repeated, at(600), at(0)).await;
    fixture.end_without(&repeated, 1, end, 1).await;
    let ended = fixture.end(&repeated, end, 2).await;
    assert_eq!(ended, Ok(ENDED));
    fixture.assert_guards_kept(&repeated, at(600));
}

/// The first call ends the reservation in the first hash slot. The second call ends it in the last
/// one, before the first call continues.
#[tokio::test]
async fn one_of_two_concurrent_calls_ends_a_reservation() {
    let fixture = Fixture::start().await;
    let end = ReservationEnd::Settled(2);
    // The nodes load the script during an earlier settlement, so that one poll sends the whole
    // call.
    let earlier = fixture.reserve(1).await;
    let ended = fixture.end(&earlier, end, 1).await;
    assert_eq!(ended, Ok(ENDED));
    let reserved = fixture.reserve(2).await;
    let mut first = pin!(fixture.end(&reserved, end, 1));
    assert_eq!(first.as_mut().now_or_never(), None);
    let has_ended_in_first = async {
        while fixture.ask_guard(&reserved, 0, "EXISTS") != 1 {
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(Duration::from_secs(10), has_ended_in_first)
        .await
        .unwrap();
    let second = fixture.end(&reserved, end, 1).await;
    assert_eq!(second, Ok(ENDED));
    assert_eq!(
        first.await,
        Ok(ReservationStatus::EndedBefore(end, Refund::Complete))
    );
    assert_eq!(fixture.counted(&reserved).await, [2, 2]);
}

/// The call that completes the reservation returns `Ended`, because the last hash slot ends after
/// all others.
#[tokio::test]
async fn the_last_hash_slot_ends_after_all_others() {
    let fixture = Fixture::start().await;
    let reserved = fixture.reserve_on(1, 3).await;
    let end = ReservationEnd::Settled(2);
    fixture.end_without(&reserved, 1, end, 1).await;
    assert_eq!(fixture.counted(&reserved).await, [2, RESERVED, RESERVED]);
    let ended = fixture.end(&reserved, end, 2).await;
    assert_eq!(ended, Ok(ENDED));
    assert_eq!(fixture.counted(&reserved).await, [2; 3]);
}

/// Redis has lost the first guard, so the reservation ends again in the first hash slot, but not in
/// the other one.
#[tokio::test]
async fn different_ends_in_two_hash_slots_are_not_counted_as_an_end() {
    let fixture = Fixture::start().await;
    let reserved = fixture.reserve(1).await;
    let ended = fixture.end(&reserved, ReservationEnd::Settled(2), 1).await;
    assert_eq!(ended, Ok(ENDED));
    assert_eq!(fixture.ask_guard(&reserved, 0, "DEL"), 1);
    let ended = fixture.end(&reserved, ReservationEnd::Expired, 30).await;
    let before = ReservationStatus::EndedBefore(ReservationEnd::Expired, Refund::Complete);
    assert_eq!(ended, Ok(before));
    assert_eq!(fixture.counted(&reserved).await[1], 2);
}

/// No store writes such a guard. A guard in a further hash slot that does not let the reservation
/// end must not be reported as an end, because the units there are not refunded.
#[tokio::test]
async fn a_further_hash_slot_that_does_not_end_is_an_error() {
    let fixture = Fixture::start().await;
    let (settled, later) = (ReservationEnd::Settled(2), at(100).as_micros().to_string());
    let ends = [
        (settled, 1, "0", "Expired"),
        (ReservationEnd::Expired, 30, &*later, "Outstanding"),
    ];
    for (number, (end, seconds, guard, status)) in (1..).zip(ends) {
        let reserved = fixture.reserve(number).await;
        // The guard exists in the further hash slot once the reservation has ended there.
        assert_eq!(fixture.end(&reserved, end, seconds).await, Ok(ENDED));
        let counted = fixture.counted(&reserved).await;
        fixture.set_guard(&reserved, 1, guard);
        let Err(StoreError::Unknown(problem)) = fixture.end(&reserved, end, seconds).await else {
            panic!("the further hash slot reports {status}");
        };
        assert!(problem.contains(status), "{problem}");
        assert_eq!(fixture.counted(&reserved).await, counted);
    }
}

/// A call that would end an expired reservation completes a settlement, and refunds units that the
/// expiry would not refund. Cached denials of the refunded key are invalidated.
#[tokio::test]
async fn completing_another_end_drops_the_cached_denials() {
    let fixture = Fixture::start().await;
    let local = MemoryStore::new(MemoryBounds::default());
    let redis = Arc::clone(&fixture.redis);
    let settings = FallbackSettings::default();
    let node = FallbackStore::new(redis, "tg", local, settings);
    node.store().pin_clock(at(0));
    let reserved = fixture.reserve(1).await;
    let settled = ReservationEnd::Settled(0);
    fixture.end_without(&reserved, 1, settled, 29).await;
    let charges = fixture.charges(&reserved.keys);
    for source in [Source::Redis, Source::Cache] {
        let mut denied = vec![charges[1]];
        let request = StoreRequest::new(&mut denied, at(30), Effect::Charge);
        let decided = node.decide(request, &mut Vec::new()).await;
        assert_eq!(
            (decided.decision, decided.source),
            (Decision::Limited, source)
        );
    }
    let reservation = RedisReservation {
        id: reserved.id,
        expires: at(0).after(TTL),
        charges: &charges,
        receipt: &reserved.receipt,
        former_keys: &[],
    };
    // The reservation is charged in full when it expires.
    let settlements = |end| {
        let unused = if end == settled { RESERVED } else { 0 };
        vec![Settlement { unused }; 2]
    };
    let ended = node.end_reservation(reservation, settlements, ReservationEnd::Expired, at(30));
    let before = ReservationStatus::EndedBefore(settled, Refund::Complete);
    assert_eq!(ended.await, Ok(before));
    let mut admitted = vec![charges[1]];
    let request = StoreRequest::new(&mut admitted, at(30), Effect::Charge);
    let decided = node.decide(request, &mut Vec::new()).await;
    assert_eq!(
        (decided.decision, decided.source),
        (Decision::Admitted, Source::Redis)
    );
}
