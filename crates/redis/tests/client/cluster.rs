//! Tests the store on a cluster of three primaries and three replicas.

use tidegate_core::{Charge, Cost, Decision, Effect, former_key};
use tidegate_redis::{RedisSettings, ScanPosition, StoreError, Topology};

use crate::{
    store_fixture::{StoreFixture, address, standalone},
    support::{RedisCluster, RedisServer, eventually},
};

fn fixture(cluster: &RedisCluster) -> StoreFixture {
    StoreFixture::with(RedisSettings {
        topology: Topology::Cluster {
            seeds: vec![address(&cluster.url())],
        },
        ..standalone(&cluster.url())
    })
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn keys_of_every_slot_are_decided_while_slots_move() {
    let mut cluster = tokio::task::block_in_place(RedisCluster::start);
    let fixture = fixture(&cluster);
    fixture.until_decided("first").await;
    assert_eq!(fixture.redis.health().servers, 3);
    for key in 0..60 {
        assert_eq!(fixture.admitted(&key.to_string(), 1).await, 1, "{key}");
    }
    keys_of_every_server_are_listed(&fixture).await;
    limits_in_several_slots_are_one_decision(&fixture).await;
    a_slot_moves_while_it_is_used(&cluster, &fixture).await;
    a_primary_is_killed(&mut cluster, &fixture).await;
}

/// The owner of slot 0 is partitioned from the other nodes, but not from the store. All other nodes
/// list the partitioned owner first.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_partitioned_primary_is_replaced_by_the_promoted_replica() {
    let cluster = tokio::task::block_in_place(RedisCluster::start_with_proxied_buses);
    // The first node owns slot 0. The first node is also the seed.
    let fixture = fixture(&cluster);
    fixture.until_decided("first").await;
    for key in 0..60 {
        assert_eq!(fixture.admitted(&key.to_string(), 1).await, 1, "{key}");
    }
    assert_eq!(fixture.redis.health().unserved_slots, 0);
    let victim = (0..6).find(|number| owns_slots(&cluster, *number)).unwrap();
    assert_eq!(victim, 0);
    cluster.cut_off(victim);
    tokio::task::block_in_place(|| {
        eventually("a replica takes over", || has_been_replaced(&cluster, 1));
        eventually("the old primary notices the partition", || {
            let info = cluster.nodes()[victim].ask(&["CLUSTER", "INFO"]);
            info.contains("cluster_state:fail").then_some(())
        });
    });
    for key in 100..160 {
        let decided = fixture.until_decided(&key.to_string()).await;
        assert_eq!(decided, Decision::Admitted, "{key}");
    }
    let health = fixture
        .until("whole", |health| {
            health.unserved_slots == 0 && health.error.is_none()
        })
        .await;
    assert_eq!((health.servers, health.up), (3, 3));
}

/// If all nodes are partitioned from each other, no slot is served, and the health includes the
/// number of unserved slots.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn unserved_slots_are_reported() {
    let cluster = tokio::task::block_in_place(RedisCluster::start_with_proxied_buses);
    let fixture = fixture(&cluster);
    fixture.until_decided("first").await;
    cluster.cut_all_buses();
    let health = fixture
        .until("undecided", |health| {
            health.unserved_slots == 16_384 && health.error.is_some()
        })
        .await;
    let error = health.error.unwrap().to_string();
    assert!(error.contains("16384 of its 16384 hash slots"), "{error}");
}

/// The keys of a rule are spread over all servers, and a listing continues from one server to the
/// next.
async fn keys_of_every_server_are_listed(fixture: &StoreFixture) {
    let mut expected = Vec::new();
    for number in 0..600 {
        let key = former_key("listed", &[&number.to_string()]);
        let charge = Charge::new(&key, &fixture.limits, Cost::ONE).unwrap();
        let decision = fixture
            .store
            .check(&[charge], Effect::Charge, &mut Vec::new())
            .await;
        assert_eq!(decision.unwrap(), Decision::Admitted);
        expected.push(key);
    }
    let scope = *former_key("listed", &[]).first_chunk().unwrap();
    let (mut listed, mut from, mut servers) = (Vec::new(), ScanPosition::default(), Vec::new());
    loop {
        let page = fixture.store.scan_keys(scope, &from, 10).await.unwrap();
        listed.extend(page.keys);
        let Some(next) = page.next else { break };
        servers.push(next.server.clone());
        from = next;
    }
    listed.sort_unstable();
    listed.dedup();
    expected.sort_unstable();
    assert_eq!(listed, expected);
    servers.sort_unstable();
    servers.dedup();
    assert_eq!(servers.len(), 3);
}

/// Charges two keys at a time, usually in two slots. One of the two keys is the same in all
/// requests. At the end, the limit of the common key is exhausted.
async fn limits_in_several_slots_are_one_decision(fixture: &StoreFixture) {
    let charge =
        |key: &'static str| Charge::new(key.as_bytes(), &fixture.limits, Cost::ONE).unwrap();
    let mut outcomes = Vec::new();
    for (number, other) in ["p", "q", "r", "s", "t"]
        .into_iter()
        .cycle()
        .take(12)
        .enumerate()
    {
        let charges = [charge("common"), charge(other)];
        let decision = fixture
            .store
            .check(&charges, Effect::Charge, &mut outcomes)
            .await;
        let (expected, left) = if number < 10 {
            (Decision::Admitted, 9 - number)
        } else {
            (Decision::Limited, 0)
        };
        assert_eq!(decision, Ok(expected), "{number}");
        assert_eq!(outcomes[0].remaining, u64::try_from(left).unwrap());
        // Each of the other keys has been charged twice. A denied request charges none of its keys.
        assert_eq!(outcomes[1].remaining, if number < 5 { 9 } else { 8 });
    }
}

/// Migrates the slot of a key to another node, and charges the key at every step of the migration.
async fn a_slot_moves_while_it_is_used(cluster: &RedisCluster, fixture: &StoreFixture) {
    // `stored` is the name of the key in Redis.
    let (key, stored) = ("moving", "test:moving");
    assert_eq!(fixture.admitted(key, 3).await, 3);
    let from = cluster.owner(stored);
    let primaries: Vec<usize> = ["a", "b", "c", "d", "e", "f", "g", "h"]
        .iter()
        .map(|key| cluster.owner(key))
        .collect();
    let to = primaries.into_iter().find(|to| *to != from).unwrap();
    let [source, target] = [from, to].map(|number| &cluster.nodes()[number]);
    let id = |node: &RedisServer| node.ask(&["CLUSTER", "MYID"]);
    let slot = source.ask(&["CLUSTER", "KEYSLOT", stored]);
    let slot = slot.trim_start_matches(':');
    assert_eq!(
        target.ask(&["CLUSTER", "SETSLOT", slot, "IMPORTING", &id(source)]),
        "+OK"
    );
    assert_eq!(
        source.ask(&["CLUSTER", "SETSLOT", slot, "MIGRATING", &id(target)]),
        "+OK"
    );
    assert_eq!(
        fixture.admitted(key, 2).await,
        2,
        "while the slot migrates and the key is still there"
    );
    let port = target.port().to_string();
    assert_eq!(
        source.ask(&["MIGRATE", "127.0.0.1", &port, stored, "0", "5000"]),
        "+OK"
    );
    assert_eq!(
        fixture.admitted(key, 2).await,
        2,
        "when the key has moved and the slot has not"
    );
    for node in [target, source] {
        assert_eq!(
            node.ask(&["CLUSTER", "SETSLOT", slot, "NODE", &id(target)]),
            "+OK"
        );
    }
    assert_eq!(
        fixture.admitted(key, 5).await,
        3,
        "ten in all, wherever they were counted"
    );
}

async fn a_primary_is_killed(cluster: &mut RedisCluster, fixture: &StoreFixture) {
    // The victim is not the seed, which stays reachable so that the other nodes can be discovered.
    let victim = (1..6).find(|number| owns_slots(cluster, *number)).unwrap();
    cluster.kill(victim);
    let survivor = if victim == 1 { 2 } else { 1 };
    tokio::task::block_in_place(|| {
        eventually("a replica takes over", || {
            has_been_replaced(cluster, survivor)
        });
    });
    for key in 100..160 {
        assert_eq!(
            fixture.until_decided(&key.to_string()).await,
            Decision::Admitted,
            "{key}"
        );
    }
}

/// Returns `Some` once the node `survivor` knows that a replica has replaced the failed primary.
fn has_been_replaced(cluster: &RedisCluster, survivor: usize) -> Option<()> {
    let nodes = cluster.nodes()[survivor].ask(&["CLUSTER", "NODES"]);
    let dead = nodes.lines().find(|line| line.contains("master,fail"))?;
    // A failed node that still has slots is not replaced yet.
    (dead.split_whitespace().count() == 8).then_some(())
}

fn owns_slots(cluster: &RedisCluster, number: usize) -> bool {
    cluster.nodes()[number]
        .ask(&["CLUSTER", "NODES"])
        .lines()
        .any(|line| {
            line.contains("myself")
                && line.contains("master")
                && line.split_whitespace().count() > 8
        })
}

/// Without a slot map, a listing fails. The listing does not return an empty page, because an empty
/// page would mean that there are no keys.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_keys_of_an_unreachable_cluster_are_not_listed_as_none() {
    let nobody = "redis://127.0.0.1:1";
    let fixture = StoreFixture::with(RedisSettings {
        topology: Topology::Cluster {
            seeds: vec![address(nobody)],
        },
        ..standalone(nobody)
    });
    let scope = *former_key("listed", &[]).first_chunk().unwrap();
    let from = ScanPosition::default();
    let listed = fixture.store.scan_keys(scope, &from, 10).await;
    assert!(
        matches!(listed, Err(StoreError::NotExecuted(_))),
        "{listed:?}"
    );
}
