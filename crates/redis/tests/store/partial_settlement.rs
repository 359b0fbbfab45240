//! Tests the end of a reservation in several slots of a cluster while the node of one slot refuses
//! all calls.

use std::{sync::Arc, time::Duration};

use tidegate_core::{
    Charge, Cost, Decision, Effect, Limit, Limits, Rate, Settlement, Span, Timestamp,
};
use tidegate_redis::{
    Address, Redis, RedisReceipt, RedisReservation, RedisSettings, RedisStore, ReservationEnd,
    ReservationStatus, StoreError, Topology,
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

/// A cluster, and one key on each of two nodes.
struct Fixture {
    cluster: RedisCluster,
    store: RedisStore,
    limits: Limits,
}

/// A reservation of both keys. The first key is in the slot with the lower number.
struct Reserved {
    id: [u8; 16],
    keys: [String; 2],
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
        let store = RedisStore::new(redis, "tg");
        store.pin_clock(at(0));
        let rate = Rate {
            count: 10,
            period: Span::from_secs(3_600),
        };
        let limit = Limit::new(Kind::Log.algorithm(10, rate, 4)).unwrap();
        Self {
            cluster,
            store,
            limits: Limits::new(vec![limit]).unwrap(),
        }
    }

    /// Returns two new keys on different nodes, in the order of their slots.
    fn keys(&self, name: &str) -> [String; 2] {
        let stored = |key: &str| format!("tg:{key}");
        let first = format!("{name} 0");
        let owner = self.cluster.owner(&stored(&first));
        let mut others = (1..).map(|number| format!("{name} {number}"));
        let second = others.find(|key| self.cluster.owner(&stored(key)) != owner);
        let mut keys = [first, second.unwrap()];
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

    fn charges<'c>(&'c self, keys: &'c [String; 2]) -> [Charge<'c>; 2] {
        let cost = Cost::new(RESERVED).unwrap();
        [0, 1].map(|key: usize| Charge::new(keys[key].as_bytes(), &self.limits, cost).unwrap())
    }

    async fn reserve(&self, number: u8) -> Reserved {
        let keys = self.keys(&format!("reservation {number}"));
        let charges = self.charges(&keys);
        let reserved = self.store.reserve(&charges, &mut Vec::new()).await.unwrap();
        assert_eq!(reserved.0, Decision::Admitted);
        Reserved {
            id: [number; 16],
            receipt: reserved.1,
            keys,
        }
    }

    async fn end(
        &self,
        reserved: &Reserved,
        end: ReservationEnd,
        seconds: u64,
    ) -> Result<ReservationStatus, StoreError> {
        let charges = self.charges(&reserved.keys);
        let reservation = RedisReservation {
            id: reserved.id,
            expires: at(0).after(TTL),
            charges: &charges,
            receipt: &reserved.receipt,
            former_keys: &[],
        };
        let settlements = |end| {
            let unused = match end {
                ReservationEnd::Settled(cost) => RESERVED - cost,
                ReservationEnd::Expired => RESERVED,
            };
            vec![Settlement { unused }; 2]
        };
        let now = at(seconds);
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
    async fn counted(&self, reserved: &Reserved) -> [u64; 2] {
        let mut outcomes = Vec::new();
        let charges = self.charges(&reserved.keys);
        let look = self.store.check(&charges, Effect::Look, &mut outcomes);
        look.await.unwrap();
        [0, 1].map(|key: usize| 10 - outcomes[key].remaining)
    }
}

fn at(seconds: u64) -> Timestamp {
    Timestamp::from_micros(START + seconds * 1_000_000)
}

#[tokio::test]
async fn a_partial_settlement_is_completed() {
    use ReservationEnd::{Expired, Settled};
    use ReservationStatus::{Ended, EndedBefore};
    let fixture = Fixture::start().await;

    // The holder repeats the call.
    let repeated = fixture.reserve(1).await;
    fixture.end_without(&repeated, 1, Settled(2), 1).await;
    assert_eq!(fixture.counted(&repeated).await, [2, RESERVED]);
    let ended = fixture.end(&repeated, Settled(2), 2).await;
    assert_eq!(ended, Ok(Ended), "the caller charges the excess once");
    assert_eq!(fixture.counted(&repeated).await, [2, 2]);
    let ended = fixture.end(&repeated, Settled(2), 3).await;
    assert_eq!(ended, Ok(EndedBefore(Settled(2))));

    // The holder repeats the call with another cost.
    let changed = fixture.reserve(2).await;
    fixture.end_without(&changed, 1, Settled(2), 1).await;
    let ended = fixture.end(&changed, Settled(5), 2).await;
    assert_eq!(ended, Ok(EndedBefore(Settled(2))));
    assert_eq!(fixture.counted(&changed).await, [2, 2]);

    // The holder does not repeat the call, and the reservation expires.
    let abandoned = fixture.reserve(3).await;
    fixture.end_without(&abandoned, 1, Settled(2), 29).await;
    let ended = fixture.end(&abandoned, Expired, 30).await;
    assert_eq!(ended, Ok(EndedBefore(Settled(2))));
    assert_eq!(fixture.counted(&abandoned).await, [2, 2]);

    // The first slot decides. Without its node, nothing changes.
    let unchanged = fixture.reserve(4).await;
    fixture.end_without(&unchanged, 0, Settled(2), 1).await;
    assert_eq!(fixture.counted(&unchanged).await, [RESERVED; 2]);
    let ended = fixture.end(&unchanged, Expired, 30).await;
    assert_eq!(ended, Ok(Ended));
    assert_eq!(fixture.counted(&unchanged).await, [0, 0]);

    // An expired reservation ends in part, and a settlement is too late.
    let expired = fixture.reserve(5).await;
    fixture.end_without(&expired, 1, Expired, 30).await;
    let ended = fixture.end(&expired, Settled(2), 29).await;
    assert_eq!(ended, Ok(EndedBefore(Expired)));
    assert_eq!(fixture.counted(&expired).await, [0, 0]);
}

/// The reservation was renewed. A further slot does not know the renewal, and ends with the first
/// slot.
#[tokio::test]
async fn the_first_slot_decides_about_a_renewed_reservation() {
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
    assert_eq!(ended, Ok(ReservationStatus::Ended));
    assert_eq!(fixture.counted(&reserved).await, [1, 1]);
}
