//! Tests of Kuadrant's reservations on servers that share a Redis.

use std::sync::Arc;

use futures_util::{FutureExt as _, future::join_all};
use tidegate::rate_limiter::SlotTurn;
use tidegate_config::envoy::{DomainFiles, RlsSettings, StoreFailure};
use tidegate_core::{Cost, Request, Scratch, Span, Verdict};
use tidegate_envoy::{
    Code, CommitRequest, Descriptor, File, RateLimitRequest, RateLimitService, ReserveRequest,
    ReserveResult, RlsError, read,
};
use tidegate_limiter::{
    metrics::ListenerKind,
    reservations::{Reservation, ReservationError},
};
use tidegate_net::prometheus::{self, Format};

use crate::{
    node::Node,
    support::{RedisCluster, RedisServer, eventually},
};

const LLM: &str = "
domain: llm
descriptors:
  - {key: user, rate_limit: {unit: year, requests_per_unit: 100}}
  - {key: team, rate_limit: {unit: year, requests_per_unit: 1000}}
  - {key: trial, shadow_mode: true, rate_limit: {unit: year, requests_per_unit: 2}}
";

/// A rate limit service on a node.
struct Server<'n> {
    node: &'n Node,
    service: Arc<RateLimitService>,
    /// The keys of the descriptors in each call.
    keys: &'static [&'static str],
}

impl<'n> Server<'n> {
    fn on(node: &'n Node) -> Self {
        Self::with(node, RlsSettings::default())
    }

    fn with(node: &'n Node, settings: RlsSettings) -> Self {
        let service = Arc::new(RateLimitService::new(Arc::clone(&node.limiter), settings));
        let file = File {
            name: "llm.yaml".to_owned(),
            text: LLM.to_owned(),
        };
        service.load(read(vec![file], DomainFiles::One).unwrap());
        Self {
            node,
            service,
            keys: &["user", "team"],
        }
    }

    fn reserve(&self, amount: u64) -> ReserveResult {
        self.try_reserve(amount).unwrap()
    }

    fn try_reserve(&self, amount: u64) -> Result<ReserveResult, RlsError> {
        self.node.run(self.reserving(amount))
    }

    async fn reserving(&self, amount: u64) -> Result<ReserveResult, RlsError> {
        let request = ReserveRequest {
            domain: "llm".to_owned(),
            descriptors: descriptors(self.keys),
            amount,
            ttl: Some(Span::from_secs(30)),
        };
        self.service
            .reserve(ListenerKind::Grpc, request, None)
            .await
    }

    fn commit(&self, id: &str, actual_amount: u64) -> Result<bool, RlsError> {
        self.node.run(self.committing(id, actual_amount))
    }

    async fn committing(&self, id: &str, actual_amount: u64) -> Result<bool, RlsError> {
        let request = CommitRequest {
            domain: "llm".to_owned(),
            descriptors: descriptors(self.keys),
            reservation_id: id.to_owned(),
            actual_amount,
        };
        self.service.commit(request, None).await
    }

    /// Refunds `hits_addend` hits to each counter.
    fn refund(&self, hits_addend: u32) {
        let mut descriptors = descriptors(self.keys);
        for descriptor in &mut descriptors {
            descriptor.is_negative_hits = true;
        }
        let request = RateLimitRequest {
            domain: "llm".to_owned(),
            descriptors,
            hits_addend,
        };
        self.node.run(self.service.report(&request, None)).unwrap();
    }

    /// Returns the number of rejected commits with this reason.
    fn rejected(&self, reason: &str) -> u64 {
        let limiter = Arc::clone(&self.node.limiter);
        let page = prometheus::encode(Format::Text, move |page| limiter.collect(page));
        let sample = format!("tidegate_reservations_rejected_total{{reason=\"{reason}\"}} ");
        let value = page.lines().find_map(|line| line.strip_prefix(&sample));
        value.unwrap().parse().unwrap()
    }

    /// Returns each counter's remaining hits, without counting a hit.
    fn left(&self) -> Vec<u32> {
        let mut descriptors = descriptors(self.keys);
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

fn descriptors(keys: &[&str]) -> Vec<Descriptor> {
    let descriptor = |key: &&str| Descriptor {
        entries: vec![((*key).to_owned(), "alice".to_owned())],
        ..Descriptor::default()
    };
    keys.iter().map(descriptor).collect()
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
    // Server `b` commits all reservations, including those that server `a` made.
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
fn a_commit_counts_on_a_shadow_limit_that_held_nothing_in_redis() {
    let (_redis, a, b) = two_nodes();
    let (mut a, mut b) = (Server::on(&a), Server::on(&b));
    a.keys = &["user", "trial"];
    b.keys = a.keys;
    // A reservation holds at most half of a limit. The limit of `trial` is 2, so the first two
    // reservations hold 1 unit each, and the third reservation holds none.
    let ids = [(); 3].map(|()| a.reserve(10).reservation_id);
    assert_eq!(a.left(), [70, 0]);
    for (id, actual) in ids.iter().zip([0, 0, 10]) {
        assert!(b.commit(id, actual).unwrap());
    }
    // The commit of the third reservation counts all 10 units: after a refund of 8 units, no unit
    // remains, and after a refund of 9 units, 1 of 2 units remains.
    b.refund(8);
    assert_eq!(a.left(), [98, 0]);
    b.refund(1);
    assert_eq!(a.left(), [99, 1]);
}

#[test]
fn a_reservation_in_redis_is_settled_only_by_the_calls_of_its_own_service() {
    let (_redis, a, b) = two_nodes();
    let (a, b) = (Server::on(&a), Server::on(&b));
    let id = a.reserve(40).reservation_id;
    let settled = b.node.run(b.node.limiter.settle_reservation(&id, 0));
    assert_eq!(settled, Err(ReservationError::Invalid));
    let ttl = Span::from_secs(5);
    let renewed = b.node.run(b.node.limiter.renew_reservation(&id, ttl));
    assert_eq!(renewed, Err(ReservationError::Invalid));
    assert!(b.commit(&id, 40).unwrap());
    assert_eq!(a.left(), [60, 960], "the amount is counted once");
    // A commit with the token of a reservation that Kuadrant did not make does not settle that
    // reservation. The amount is counted as a report.
    let entries = [("path", "/local"), ("user", "alice")];
    let request = Request::new(&entries, Cost::new(4).unwrap()).unwrap();
    let (limiter, mut scratch) = (&a.node.limiter, Scratch::default());
    let rules = limiter.rules();
    let turn = SlotTurn::at_once();
    let finish = |_: &_, _: &Verdict<'_>, reservation: Option<Reservation>| reservation;
    let reserve = limiter.reserve(&rules, &mut scratch, &request, ttl, turn, finish);
    let token = a.node.run(reserve).unwrap().unwrap().token;
    assert!(!b.commit(&token, 5).unwrap());
    assert_eq!(a.left(), [55, 955]);
    let settled = a.node.run(limiter.settle_reservation(&token, 4)).unwrap();
    assert_eq!(settled.settled, 4);
}

#[test]
fn an_expired_reservation_in_redis_costs_nothing() {
    let (_redis, a, b) = two_nodes();
    let (a, b) = (Server::on(&a), Server::on(&b));
    let id = a.reserve(40).reservation_id;
    assert_eq!(b.left(), [60, 960]);
    a.node.at_millis(30_000);
    a.node.run(a.node.limiter.expire_reservations());
    assert_eq!(b.left(), [100, 1_000]);
    b.node.at_millis(30_000);
    assert!(!b.commit(&id, 5).unwrap());
    assert_eq!(b.left(), [95, 995], "a late commit is a report");
}

/// Another server ends the reservation, even a server without the domain's rules.
#[test]
fn a_reservation_of_a_killed_server_costs_nothing() {
    let (redis, a, b) = two_nodes();
    a.at_millis_with_redis(0);
    let (killed, left) = (Server::on(&a), Server::on(&b));
    let ids = [(); 2].map(|()| killed.reserve(20).reservation_id);
    drop(killed);
    assert!(a.run(a.limiter.write_expiry_queue()));
    drop(a);
    b.at_millis_with_redis(10_000);
    assert!(left.commit(&ids[0], 5).unwrap());
    assert_eq!(left.left(), [75, 975]);
    let other = Node::start(&redis.url());
    other.until_up(true);
    for (millis, remaining) in [(34_999, [75, 975]), (35_000, [95, 995])] {
        other.at_millis_with_redis(millis);
        other.run(other.limiter.end_orphaned_reservations());
        b.at_millis_with_redis(millis);
        assert_eq!(left.left(), remaining, "{millis} ms");
    }
    assert!(!left.commit(&ids[1], 5).unwrap());
    assert_eq!(left.left(), [90, 990], "a late commit is a report");
    assert_eq!(redis.ask(&["EXISTS", "test#{reservations}"]), ":0");
}

/// If the caller cancels a commit, for example because its deadline has passed, the whole amount is
/// still counted.
#[test]
fn a_commit_that_is_abandoned_counts_the_whole_amount() {
    let (redis, a, b) = two_nodes();
    let (a, b) = (Server::on(&a), Server::on(&b));
    let id = a.reserve(10).reservation_id;
    redis.pause();
    a.node.run(async {
        let commit = a.committing(&id, 40).now_or_never();
        assert!(commit.is_none(), "Redis is paused");
    });
    redis.resume();
    eventually("the amount is counted", || {
        (b.left() == [60, 960]).then_some(())
    });
    assert!(!b.commit(&id, 40).unwrap(), "it was committed");
    assert_eq!(b.left(), [60, 960]);
}

#[test]
fn commits_of_reservations_that_are_not_outstanding_are_counted() {
    let (_redis, a, b) = two_nodes();
    let (a, mut b) = (Server::on(&a), Server::on(&b));
    let ids = [(); 2].map(|()| a.reserve(10).reservation_id);
    assert!(b.commit(&ids[0], 10).unwrap());
    assert!(!b.commit(&ids[0], 10).unwrap());
    assert!(!b.commit("forged", 1).unwrap());
    assert!(!b.commit("", 1).unwrap(), "a report, not a rejected commit");
    b.keys = &["user"];
    assert!(!b.commit(&ids[1], 1).unwrap(), "it holds other counters");
    b.keys = a.keys;
    b.node.at_millis(30_000);
    assert!(!b.commit(&ids[1], 1).unwrap());
    let reasons = ["invalid", "unknown", "expired", "settled", "slot_lost"];
    let rejected = reasons.map(|reason| b.rejected(reason));
    assert_eq!(rejected, [1, 1, 1, 1, 0]);
}

#[test]
fn a_reservation_that_is_abandoned_is_released() {
    let (redis, a, b) = two_nodes();
    let (a, b) = (Server::on(&a), Server::on(&b));
    redis.pause();
    a.node.run(async {
        let reserve = a.reserving(10).now_or_never();
        assert!(reserve.is_none(), "Redis is paused");
    });
    redis.resume();
    let limiter = Arc::clone(&a.node.limiter);
    let settled = || {
        let limiter = Arc::clone(&limiter);
        let page = prometheus::encode(Format::Text, move |page| limiter.collect(page));
        page.contains("tidegate_reservations_ended_total{by=\"settle\"} 1")
    };
    eventually("the reservation is released", || settled().then_some(()));
    assert_eq!(b.left(), [100, 1_000]);
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
    // Without Redis, a server reserves units from its local share of the limits, and settles this
    // reservation itself.
    let local = lenient.reserve(30);
    assert_eq!(local.code, Code::Ok);
    assert!(lenient.commit(&local.reservation_id, 10).unwrap());
    assert!(matches!(lenient.commit(&id, 5), Err(RlsError::Store)));
}
