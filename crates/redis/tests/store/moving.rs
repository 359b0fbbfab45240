//! Tests reservations while the slot of their keys migrates to another node of a cluster.

use std::{sync::Arc, time::Duration};

use tidegate_core::{
    Charge, Cost, Decision, DecisionAndReceipt, Effect, Limit, Limits, MemoryBounds, MemoryStore,
    Rate, Renewal, Settlement, Source, Span, Store, StoreRequest, Timestamp,
};
use tidegate_redis::{
    Address, FallbackReceipt, FallbackSettings, FallbackStore, Redis, RedisSettings, Topology,
};
use tokio::runtime::Handle;

use crate::{START, differential::strategies::Kind, support::RedisCluster};

async fn node(cluster: &RedisCluster) -> FallbackStore {
    let (address, _) = Address::parse(&cluster.url()).unwrap();
    let settings = RedisSettings {
        timeout: Duration::from_secs(10),
        ..RedisSettings::new(Topology::Cluster {
            seeds: vec![address],
        })
    };
    let redis = Redis::start(settings, &Handle::current());
    redis.wait_for_first_attempt().await.unwrap();
    let settings = FallbackSettings {
        denial_ttl: Span::ZERO,
        ..FallbackSettings::default()
    };
    let local = MemoryStore::new(MemoryBounds::default());
    FallbackStore::new(Arc::new(redis), "tg", local, settings)
}

/// Returns a limit of twenty units, which refills at one unit per day.
fn limits(kind: Kind) -> Limits {
    let rate = Rate {
        count: 20,
        period: Span::from_secs(20 * 86_400),
    };
    Limits::new(vec![Limit::new(kind.algorithm(20, rate, 4)).unwrap()]).unwrap()
}

struct Rules {
    limits: Limits,
    keys: Vec<&'static [u8]>,
}

impl Rules {
    fn charges(&self) -> Vec<Charge<'_>> {
        let charge = |key: &&'static [u8]| Charge::new(key, &self.limits, Cost::ONE).unwrap();
        self.keys.iter().map(charge).collect()
    }

    async fn reserve(&self, node: &FallbackStore) -> (Decision, Option<FallbackReceipt>) {
        let (mut charges, now) = (self.charges(), Timestamp::from_micros(START));
        let request = StoreRequest::new(&mut charges, now, Effect::Charge);
        let DecisionAndReceipt {
            decision: decided,
            receipt,
        } = node.reserve(request, &mut Vec::new()).await;
        assert_eq!(decided.source, Source::Redis, "{:?}", decided.decision);
        (decided.decision, receipt)
    }

    async fn decide(&self, node: &FallbackStore) -> Decision {
        let (mut charges, now) = (self.charges(), Timestamp::from_micros(START));
        let request = StoreRequest::new(&mut charges, now, Effect::Charge);
        let decided = node.decide(request, &mut Vec::new()).await;
        assert_eq!(decided.source, Source::Redis, "{:?}", decided.decision);
        decided.decision
    }

    async fn settle(&self, node: &FallbackStore, receipt: FallbackReceipt) {
        let charges = self.charges();
        let unused = vec![Settlement { unused: 1 }; charges.len()];
        let now = Timestamp::from_micros(START);
        node.settle(&charges, &mut Some(receipt), &unused, now)
            .await;
    }
}

/// A slot that migrates to another node, one key at a time.
struct Move<'c> {
    cluster: &'c RedisCluster,
    slot: String,
    from: usize,
    to: usize,
}

impl<'c> Move<'c> {
    fn begin(cluster: &'c RedisCluster, key: &str) -> Self {
        let nodes = cluster.nodes();
        let slot = nodes[0].ask(&["CLUSTER", "KEYSLOT", key]);
        let slot = slot.trim_start_matches(':').to_owned();
        let from = cluster.owner(key);
        let is_primary = |number: &usize| nodes[*number].ask(&["ROLE"]).starts_with('*');
        let primaries = [
            "tg:a", "tg:b", "tg:c", "tg:d", "tg:e", "tg:f", "tg:g", "tg:h",
        ];
        let others = primaries.iter().map(|key| cluster.owner(key));
        let to = others.filter(is_primary).find(|number| *number != from);
        let moving = Self {
            cluster,
            slot,
            from,
            to: to.unwrap(),
        };
        moving.set(moving.to, &["IMPORTING", &moving.id(moving.from)]);
        moving.set(moving.from, &["MIGRATING", &moving.id(moving.to)]);
        moving
    }

    fn id(&self, node: usize) -> String {
        self.cluster.nodes()[node].ask(&["CLUSTER", "MYID"])
    }

    fn set(&self, node: usize, state: &[&str]) {
        let command = [&["CLUSTER", "SETSLOT", &self.slot], state].concat();
        assert_eq!(self.cluster.nodes()[node].ask(&command), "+OK");
    }

    fn carry(&self, key: &str) {
        let to = self.cluster.nodes()[self.to].port().to_string();
        let command = ["MIGRATE", "127.0.0.1", &to, "", "0", "10000", "KEYS", key];
        let answer = self.cluster.nodes()[self.from].ask(&command);
        assert!(answer == "+OK" || answer == "+NOKEY", "{answer}");
    }

    fn end(self) {
        for node in [self.to, self.from] {
            self.set(node, &["NODE", &self.id(self.to)]);
        }
    }
}

/// Reserves eight times at each of four stages: before the migration, during the migration before
/// any key has moved, after the first key has moved, and after all keys have moved. At each later
/// stage, one reservation from the previous stage is renewed and settled.
async fn reserve_through(cluster: &RedisCluster, kind: Kind, keys: &[&'static str]) {
    let node = node(cluster).await;
    let rules = Rules {
        limits: limits(kind),
        keys: keys.iter().map(|key| key.as_bytes()).collect(),
    };
    let (mut moving, mut taken) = (None, 0);
    let mut held: Option<FallbackReceipt> = None;
    for stage in 0..4 {
        tokio::task::block_in_place(|| match stage {
            0 => {}
            1 => moving = Some(Move::begin(cluster, &format!("tg:{}", keys[0]))),
            2 => moving.as_ref().unwrap().carry(&format!("tg:{}", keys[0])),
            _ => {
                let moving: Move<'_> = moving.take().unwrap();
                keys.iter()
                    .for_each(|key| moving.carry(&format!("tg:{key}")));
                moving.end();
            }
        });
        if let Some(mut receipt) = held.take() {
            let now = Timestamp::from_micros(START);
            let renewal = node.renew(&rules.charges(), &mut receipt, now).await;
            assert_eq!(renewal, Renewal::Held, "{kind:?} at {stage}");
            rules.settle(&node, receipt).await;
            taken -= 1;
        }
        for _ in 0..8 {
            let (decision, receipt) = rules.reserve(&node).await;
            if decision == Decision::Admitted {
                taken += 1;
                held = receipt;
            }
            assert!(taken <= 20, "{taken} of 20, {kind:?} at {stage}");
        }
    }
    assert_eq!(taken, 20, "{kind:?}");
}

/// Decides several rules with one hash tag while their keys are on two nodes, eight times at each
/// stage of the migration. If Redis cannot make a request's charges in one call, they are made in
/// several calls.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn decisions_are_exact_while_their_slot_moves() {
    let cluster = tokio::task::block_in_place(RedisCluster::start);
    let node = node(&cluster).await;
    let keys = ["{z}one", "{z}two", "{z}new"];
    let rules = Rules {
        limits: limits(Kind::TokenBucket),
        keys: keys.iter().map(|key| key.as_bytes()).collect(),
    };
    let (mut moving, mut admitted) = (None, 0);
    for stage in 0..4 {
        tokio::task::block_in_place(|| match stage {
            0 => {}
            1 => moving = Some(Move::begin(&cluster, &format!("tg:{}", keys[0]))),
            2 => moving.as_ref().unwrap().carry(&format!("tg:{}", keys[0])),
            _ => {
                let moving: Move<'_> = moving.take().unwrap();
                keys.iter()
                    .for_each(|key| moving.carry(&format!("tg:{key}")));
                moving.end();
            }
        });
        for _ in 0..8 {
            admitted += usize::from(rules.decide(&node).await == Decision::Admitted);
        }
    }
    assert_eq!(admitted, 20);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn reservations_are_exact_while_their_slot_moves() {
    let cluster = tokio::task::block_in_place(RedisCluster::start);
    reserve_through(&cluster, Kind::TokenBucket, &["one"]).await;
    reserve_through(&cluster, Kind::EpochWindow, &["two"]).await;
    // The keys of several rules have the same hash tag, and are on two nodes during the migration.
    reserve_through(&cluster, Kind::TokenBucket, &["{x}one", "{x}two"]).await;
    reserve_through(&cluster, Kind::Log, &["{y}one", "{y}two", "{y}new"]).await;
}
