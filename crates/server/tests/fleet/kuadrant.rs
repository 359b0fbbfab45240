//! Kuadrant's reservations on servers that share a Redis.

use std::sync::Arc;

use futures_util::future::join_all;
use tidegate_config::envoy::{DomainFiles, RlsSettings, StoreFailure};
use tidegate_core::Span;
use tidegate_envoy::{
    Code, CommitRequest, Descriptor, File, RateLimitRequest, RateLimitService, ReserveRequest,
    Reserved, RlsError, read,
};
use tidegate_limiter::metrics::ListenerKind;

use crate::{
    node::Node,
    support::{RedisCluster, RedisServer, eventually},
};

const LLM: &str = "
domain: llm
descriptors:
  - {key: user, rate_limit: {unit: year, requests_per_unit: 100}}
  - {key: team, rate_limit: {unit: year, requests_per_unit: 1000}}
";

/// A service on a node.
struct Server<'n> {
    node: &'n Node,
    service: RateLimitService,
}

impl<'n> Server<'n> {
    fn on(node: &'n Node) -> Self {
        Self::with(node, RlsSettings::default())
    }

    fn with(node: &'n Node, settings: RlsSettings) -> Self {
        let service = RateLimitService::new(Arc::clone(&node.limiter), settings);
        let file = File {
            name: "llm.yaml".to_owned(),
            text: LLM.to_owned(),
        };
        service.load(read(vec![file], DomainFiles::One).unwrap());
        Self { node, service }
    }

    fn reserve(&self, amount: u64) -> Reserved {
        self.try_reserve(amount).unwrap()
    }

    fn try_reserve(&self, amount: u64) -> Result<Reserved, RlsError> {
        self.node.run(self.reserving(amount))
    }

    async fn reserving(&self, amount: u64) -> Result<Reserved, RlsError> {
        let request = ReserveRequest {
            domain: "llm".to_owned(),
            descriptors: descriptors(),
            amount,
            ttl: Some(Span::from_secs(30)),
        };
        self.service
            .reserve(ListenerKind::Grpc, request, None)
            .await
    }

    fn commit(&self, id: &str, actual_amount: u64) -> Result<bool, RlsError> {
        let request = CommitRequest {
            domain: "llm".to_owned(),
            descriptors: descriptors(),
            reservation_id: id.to_owned(),
            actual_amount,
        };
        self.node.run(self.service.commit(request, None))
    }

    /// Returns how many hits the counters have left, without counting.
    fn left(&self) -> Vec<u32> {
        let mut descriptors = descriptors();
        for descriptor in &mut descriptors {
            descriptor.hits_addend = Some(0);
        }
        let request = RateLimitRequest {
            domain: "llm".to_owned(),
            descriptors,
            hits_addend: 0,
        };
        let answer = self.node.run(self.service.should_rate_limit(&request));
        let statuses = answer.unwrap().statuses;
        statuses
            .iter()
            .map(|status| status.limit_remaining)
            .collect()
    }
}

fn descriptors() -> Vec<Descriptor> {
    let descriptor = |key: &str| Descriptor {
        entries: vec![(key.to_owned(), "alice".to_owned())],
        ..Descriptor::default()
    };
    vec![descriptor("user"), descriptor("team")]
}

fn two_nodes() -> (RedisServer, Node, Node) {
    let redis = RedisServer::start();
    let [a, b] = [Node::start(&redis.url()), Node::start(&redis.url())];
    a.until_up(true);
    b.until_up(true);
    (redis, a, b)
}

#[test]
fn two_servers_never_hold_more_than_the_limit() {
    let (_redis, a, b) = two_nodes();
    let (a, b) = (Server::on(&a), Server::on(&b));
    let each = (0..50).map(|number| if number % 2 == 0 { &a } else { &b }.reserving(10));
    let reserved = a.node.run(join_all(each));
    let admitted: Vec<String> = reserved
        .into_iter()
        .map(Result::unwrap)
        .filter(|reserved| reserved.code == Code::Ok)
        .map(|reserved| reserved.reservation_id)
        .collect();
    assert_eq!(admitted.len(), 10);
    assert_eq!(b.left(), [0, 900]);
    // The other server commits.
    for id in &admitted {
        assert!(b.commit(id, 4).unwrap());
        assert!(!a.commit(id, 4).unwrap(), "a second commit counts nothing");
        assert!(!b.commit(id, 7).unwrap());
    }
    assert_eq!(a.left(), [60, 960]);
}

#[test]
fn a_commit_counts_beyond_the_limit_in_redis() {
    let (_redis, a, b) = two_nodes();
    let (a, b) = (Server::on(&a), Server::on(&b));
    let id = a.reserve(50).reservation_id;
    assert!(b.commit(&id, 130).unwrap());
    assert_eq!(a.left(), [0, 870]);
    assert_eq!(a.reserve(1).code, Code::OverLimit);
    assert!(!a.commit("unknown", 20).unwrap());
    assert_eq!(a.left(), [0, 850]);
}

#[test]
fn an_expired_reservation_in_redis_costs_nothing() {
    let (_redis, a, b) = two_nodes();
    let (a, b) = (Server::on(&a), Server::on(&b));
    let id = a.reserve(40).reservation_id;
    assert_eq!(b.left(), [60, 960]);
    a.node.at_millis(30_000);
    a.node.run(a.node.limiter.end_expired_reservations());
    assert_eq!(b.left(), [100, 1_000]);
    b.node.at_millis(30_000);
    assert!(!b.commit(&id, 5).unwrap());
    assert_eq!(b.left(), [95, 995], "a late commit is a report");
}

#[test]
fn a_reservation_spans_the_slots_of_a_cluster() {
    let cluster = RedisCluster::start();
    let [a, b] = [(); 2].map(|()| {
        let node = Node::on_cluster(&cluster.url());
        eventually("the nodes of the cluster are connected", || {
            let health = node.limiter.redis_store().unwrap().stats().health;
            (health.up >= 3 && health.unserved_slots == 0).then_some(())
        });
        node
    });
    let (a, b) = (Server::on(&a), Server::on(&b));
    let id = a.reserve(30).reservation_id;
    assert_eq!(b.left(), [70, 970]);
    assert!(b.commit(&id, 10).unwrap());
    assert!(!a.commit(&id, 10).unwrap());
    assert_eq!(a.left(), [90, 990]);
}

#[test]
fn an_outage_is_an_error_or_is_decided_on_the_share() {
    let (redis, a, b) = two_nodes();
    let mut settings = RlsSettings::default();
    settings.store_failure = StoreFailure::Error;
    let (strict, lenient) = (Server::with(&a, settings), Server::on(&b));
    let id = strict.reserve(20).reservation_id;
    drop(redis);
    a.until_up(false);
    b.until_up(false);
    assert!(matches!(strict.try_reserve(1), Err(RlsError::Store)));
    assert!(matches!(strict.commit(&id, 5), Err(RlsError::Store)));
    // Without Redis, a server decides on its share, and settles it.
    let local = lenient.reserve(30);
    assert_eq!(local.code, Code::Ok);
    assert!(lenient.commit(&local.reservation_id, 10).unwrap());
    assert!(matches!(lenient.commit(&id, 5), Err(RlsError::Store)));
}
