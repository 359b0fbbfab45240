//! Tests of decisions with Redis. The store calls for a request's descriptors are pipelined, but
//! each descriptor gets the same result as if it were alone in a request.

use std::{sync::Arc, time::Duration};

use futures_util::FutureExt as _;
use tidegate_core::Timestamp;
use tidegate_envoy::{Code, Descriptor, RateLimitAnswer, RateLimitRequest, Variables};
use tidegate_redis::{Address, Redis, RedisSettings, Topology};
use tokio::runtime::Handle;

use crate::{
    format::ConfigFile,
    subject::{Started, StoreKind},
    support::RedisServer,
};

const SHOP: &str = "
domain: shop
descriptors:
  - {key: k, rate_limit: {unit: hour, requests_per_unit: 2}}
  - {key: sliding, rate_limit: {unit: hour, requests_per_unit: 2, algorithm: sliding_window_log}}
  - {key: few, quota_mode: true, rate_limit: {unit: hour, requests_per_unit: 1}}
  - {key: more, quota_mode: true, rate_limit: {unit: hour, requests_per_unit: 3}}
  - {key: all, rate_limit: {unit: hour, requests_per_unit: 100}}";

const ONE: &str = "
domain: one
all_or_nothing: true
descriptors:
  - {key: few, quota_mode: true, rate_limit: {unit: hour, requests_per_unit: 1}}
  - {key: more, quota_mode: true, rate_limit: {window: 1s, requests_per_unit: 5}}
  - {key: all, rate_limit: {unit: hour, requests_per_unit: 100}}
  - {key: counted, rate_limit: {unit: hour, requests_per_unit: 100, count_denied: true}}";

struct Shop {
    server: RedisServer,
    redis: Arc<Redis>,
    started: Started,
}

impl Shop {
    async fn open(settings: &[(&str, &str)]) -> Self {
        Self::open_with(CONNECTIONS, settings).await
    }

    async fn open_with(connections: usize, settings: &[(&str, &str)]) -> Self {
        let server = RedisServer::start();
        let (address, ..) = Address::parse(&server.url()).unwrap();
        let connection = RedisSettings {
            timeout: Duration::from_secs(5),
            connections,
            ..RedisSettings::new(Topology::Standalone(address))
        };
        let redis = Arc::new(Redis::start(connection, &Handle::current()));
        redis.wait_for_first_attempt().await.unwrap();
        Self {
            server,
            started: node(&redis, settings),
            redis,
        }
    }

    async fn ask(&self, descriptors: Vec<Descriptor>) -> RateLimitAnswer {
        self.ask_in("shop", descriptors).await
    }

    async fn ask_in(&self, domain: &str, descriptors: Vec<Descriptor>) -> RateLimitAnswer {
        ask(&self.started, domain, descriptors).await
    }

    /// Returns the number of socket reads, according to the Redis server's statistics.
    fn readings(&self) -> u64 {
        let stats = self.server.ask(&["INFO", "stats"]);
        let line = stats
            .lines()
            .find_map(|line| line.strip_prefix("total_reads_processed:"));
        line.unwrap().parse().unwrap()
    }
}

/// Starts a Tidegate node that keeps its counters in `redis`.
fn node(redis: &Arc<Redis>, settings: &[(&str, &str)]) -> Started {
    let own = |(name, value): &(&str, &str)| ((*name).to_owned(), (*value).to_owned());
    let variables: Variables = settings.iter().map(own).collect();
    let started = Started::on(StoreKind::Redis(redis, "t"), &variables, 1_700_000_040).unwrap();
    let files = [("shop.yaml", SHOP), ("one.yaml", ONE)].map(|(name, yaml)| ConfigFile {
        name: name.into(),
        yaml: yaml.into(),
    });
    started.load(&files).unwrap();
    started
}

async fn ask(node: &Started, domain: &str, descriptors: Vec<Descriptor>) -> RateLimitAnswer {
    let request = RateLimitRequest {
        domain: domain.into(),
        descriptors,
        hits_addend: 0,
    };
    let answered = node.service.should_rate_limit(&request).await;
    answered.unwrap()
}

fn hits(key: &str, value: &str, hits: u64) -> Descriptor {
    Descriptor {
        entries: vec![(key.into(), value.into())],
        hits_addend: Some(hits),
        ..Descriptor::default()
    }
}

fn hit(key: &str, value: usize) -> Descriptor {
    hits(key, &value.to_string(), 1)
}

/// The number of connections to Redis. Commands on one connection are pipelined.
const CONNECTIONS: usize = 2;

#[tokio::test]
async fn all_descriptors_of_a_request_take_one_round_trip_to_redis() {
    for settings in [
        &[][..],
        &[("STOP_CACHE_KEY_INCREMENT_WHEN_OVERLIMIT", "true")],
    ] {
        let shop = Shop::open(settings).await;
        let request = || {
            let plain = (0..20).map(|value| hit("k", value));
            let questions = (0..10).map(|value| hits("k", &format!("q{value}"), 0));
            let sliding = (0..10).map(|value| hit("sliding", value));
            plain.chain(questions).chain(sliding).collect::<Vec<_>>()
        };
        // The first request loads the Lua scripts.
        shop.ask(request()).await;
        let (batches, readings) = (shop.redis.health().batches, shop.readings());
        let answer = shop.ask(request()).await;
        // Two reads are caused by the INFO queries that read the statistics: one at the end of the
        // first query, and one for the second query.
        let readings = shop.readings() - readings - 2;
        let batches = shop.redis.health().batches - batches;
        assert_eq!(answer.statuses.len(), 40);
        assert!(
            (1..=CONNECTIONS as u64).contains(&batches) && readings <= CONNECTIONS as u64,
            "{settings:?}: {batches} batches in {readings} readings"
        );
        for (at, status) in answer.statuses.iter().enumerate() {
            let left = if (20..30).contains(&at) { 2 } else { 0 };
            assert_eq!((status.code, status.limit_remaining), (Code::Ok, left));
        }
    }
}

#[tokio::test]
async fn descriptors_with_one_key_keep_their_order_in_redis() {
    let shop = Shop::open(&[]).await;
    let taken = |hits_of_it| hits("k", "same", hits_of_it);
    let back = Descriptor {
        is_negative_hits: true,
        ..taken(1)
    };
    let descriptors = vec![
        taken(1),
        hit("k", 7),
        taken(0),
        taken(1),
        taken(1),
        back,
        taken(0),
        taken(1),
    ];
    let answer = shop.ask(descriptors).await;
    let left: Vec<_> = answer
        .statuses
        .iter()
        .map(|status| (status.code, status.limit_remaining))
        .collect();
    let (ok, over) = (Code::Ok, Code::OverLimit);
    assert_eq!(
        left,
        [
            (ok, 1),
            (ok, 1),
            (ok, 1),
            (ok, 0),
            (over, 0),
            (ok, 0),
            (ok, 0),
            (over, 0)
        ]
    );
}

/// Every denied hit is counted in Redis, even if the same key was denied immediately before. If a
/// denied hit were not counted, a refund would free capacity too early.
#[tokio::test]
async fn every_denied_hit_is_counted_in_redis() {
    let shop = Shop::open(&[]).await;
    for _ in 0..5 {
        shop.ask(vec![hit("k", 0)]).await;
    }
    let back = |hits_of_it| Descriptor {
        is_negative_hits: true,
        ..hits("k", "0", hits_of_it)
    };
    let mut codes = Vec::new();
    for given_back in [2, 1] {
        shop.ask(vec![back(given_back)]).await;
        let answer = shop.ask(vec![hits("k", "0", 0)]).await;
        codes.push((answer.overall_code, answer.statuses[0].limit_remaining));
    }
    assert_eq!(codes, [(Code::OverLimit, 0), (Code::Ok, 0)]);
}

/// Quotas deny a request once all of them are over their limits. A denied request is not charged to
/// any quota.
#[tokio::test]
async fn envoy_quotas_deny_together_in_redis() {
    let shop = Shop::open(&[("STOP_CACHE_KEY_INCREMENT_WHEN_OVERLIMIT", "true")]).await;
    let mut passed = 0;
    for _ in 0..6 {
        let answer = shop
            .ask(vec![hit("few", 0), hit("more", 0), hit("all", 0)])
            .await;
        passed += u32::from(answer.overall_code == Code::Ok);
    }
    let counted = shop.ask(vec![hits("all", "0", 0)]).await;
    assert_eq!((passed, counted.statuses[0].limit_remaining), (3, 97));
}

/// The leading quota, which is the only quota that can deny a request, may change when a window
/// ends. A cached denial under one leading quota must not apply to a request under another leading
/// quota.
#[tokio::test]
async fn quotas_allow_again_as_soon_as_one_has_room() {
    let shop = Shop::open(&[]).await;
    let millis = |millis| Timestamp::from_micros(1_700_000_040_000_000 + millis * 1_000);
    for (value, keys) in [&["few", "more", "all"][..], &["few", "more"]]
        .into_iter()
        .enumerate()
    {
        let mut passed = Vec::new();
        for now in [500, 1_000] {
            shop.started.set_at(millis(2_000 * value as u64 + now));
            for _ in 0..7 {
                let descriptors = keys.iter().map(|key| hit(key, value)).collect();
                let answer = shop.ask_in("one", descriptors).await;
                passed.push(answer.overall_code == Code::Ok);
            }
        }
        let window = [true, true, true, true, true, false, false];
        assert_eq!(passed, [window, window].concat(), "{keys:?}");
    }
    let counted = shop.ask_in("one", vec![hits("all", "0", 0)]).await;
    assert_eq!(counted.statuses[0].limit_remaining, 90);
}

/// As in envoyproxy/ratelimit, the local cache is invalidated only by refunds on the same node.
#[tokio::test]
async fn a_cached_denial_holds_despite_a_refund_on_another_server() {
    let shop = Shop::open(&[("LOCAL_CACHE_SIZE_IN_BYTES", "1048576")]).await;
    let other = node(&shop.redis, &[]);
    let code = async || shop.ask(vec![hit("k", 0)]).await.overall_code;
    let codes = [code().await, code().await, code().await];
    assert_eq!(codes, [Code::Ok, Code::Ok, Code::OverLimit]);
    let back = || Descriptor {
        is_negative_hits: true,
        ..hits("k", "0", 2)
    };
    ask(&other, "shop", vec![back()]).await;
    shop.started.set(1_700_000_050);
    assert_eq!(code().await, Code::OverLimit);
    shop.ask(vec![back()]).await;
    assert_eq!(code().await, Code::Ok);
}

/// Returns the result of a request for `descriptors`. For each quota in `taken`, another request
/// exhausts the quota immediately before it becomes the leading quota.
async fn overtaken(descriptors: Vec<Descriptor>, taken: &[Descriptor]) -> (Code, [u32; 2]) {
    // With one connection, Redis executes the commands in order.
    let shop = Shop::open_with(1, &[]).await;
    // The first request loads the Lua scripts.
    shop.ask_in("one", vec![hit("few", 99), hit("few", 98), hit("all", 99)])
        .await;
    let mut asked = Box::pin(shop.ask_in("one", descriptors));
    let mut asked_of_all = || asked.as_mut().now_or_never();
    for quota in taken {
        // At this point, the request has sent the query that chooses a leading quota, or is just
        // sending the query.
        assert_eq!(asked_of_all(), None);
        shop.ask_in("one", vec![quota.clone()]).await;
        // The next store call charges the request.
        assert_eq!(asked_of_all(), None);
        shop.ask_in("one", vec![hits("all", "98", 0)]).await;
    }
    let answer = asked.await;
    let left = async |key| {
        let answer = shop.ask_in("one", vec![hits(key, "0", 0)]).await;
        answer.statuses[0].limit_remaining
    };
    (
        answer.overall_code,
        [left("all").await, left("counted").await],
    )
}

#[tokio::test]
async fn an_overtaken_request_is_counted_once() {
    let keys = ["few", "more", "all", "counted"];
    let result = overtaken(keys.map(|key| hit(key, 0)).into(), &[hit("few", 0)]).await;
    assert_eq!(result, (Code::Ok, [99, 99]));
}

#[tokio::test]
async fn a_repeatedly_overtaken_request_is_finally_denied() {
    let quotas: Vec<Descriptor> = (0..6).map(|value| hit("few", value)).collect();
    let all = || [quotas.clone(), vec![hit("all", 0)]].concat();
    for (times, expected) in [
        (3, (Code::Ok, [99, 100])),
        (4, (Code::OverLimit, [100, 100])),
    ] {
        assert_eq!(
            overtaken(all(), &quotas[..times]).await,
            expected,
            "{times}"
        );
    }
}
