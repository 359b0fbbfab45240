//! Tests of `RateLimitQuotaService`: usage reports and assignments.

use std::collections::HashMap;

use tokio::sync::mpsc;
use tonic::{Code, Streaming};

use crate::{
    client::Client,
    listener::TestListener,
    proto::envoy::{
        service::rate_limit_quota::v3::{
            BucketId, RateLimitQuotaResponse, RateLimitQuotaUsageReports,
            rate_limit_quota_response::bucket_action::BucketAction,
            rate_limit_quota_usage_reports::BucketQuotaUsage,
        },
        r#type::v3::{TokenBucket, rate_limit_strategy::Strategy},
    },
};

const STREAM: &str =
    "/envoy.service.rate_limit_quota.v3.RateLimitQuotaService/StreamRateLimitQuotas";

/// A rules file with a per-API-key rate, and a budget that all exports share.
const QUOTAS: &str = r#"
quotas:
  - {name: per-key, domain: shop, bucket: {service: shop, api_key: "*"}, limit: 100/s}
  - {name: exports, domain: shop, bucket: {service: exports}, limit: 1000/h}
"#;

/// The quota stream of one Envoy.
struct Envoy {
    reports: mpsc::Sender<RateLimitQuotaUsageReports>,
    answers: Streaming<RateLimitQuotaResponse>,
}

impl Envoy {
    async fn join(listener: &TestListener) -> Self {
        let (reports, mut outbox) = mpsc::channel(16);
        let outgoing = futures_util::stream::poll_fn(move |cx| outbox.poll_recv(cx));
        let mut client: Client = listener.connect().await;
        let answers = client.stream(STREAM, outgoing).await.unwrap();
        Self { reports, answers }
    }

    async fn report(&self, bucket: &[(&str, &str)], allowed: u64, denied: u64) {
        self.report_to("shop", bucket, allowed, denied).await;
    }

    async fn report_to(&self, domain: &str, bucket: &[(&str, &str)], allowed: u64, denied: u64) {
        self.report_of(None, domain, bucket, [allowed, denied])
            .await;
    }

    async fn report_of(
        &self,
        time_elapsed: Option<prost_types::Duration>,
        domain: &str,
        bucket: &[(&str, &str)],
        [allowed, denied]: [u64; 2],
    ) {
        let owned = |(name, value): &(&str, &str)| ((*name).to_owned(), (*value).to_owned());
        let usage = BucketQuotaUsage {
            bucket_id: Some(BucketId {
                bucket: bucket.iter().map(owned).collect(),
            }),
            time_elapsed,
            num_requests_allowed: allowed,
            num_requests_denied: denied,
        };
        let report = RateLimitQuotaUsageReports {
            domain: domain.to_owned(),
            bucket_quota_usages: vec![usage],
        };
        self.reports.send(report).await.unwrap();
    }

    /// Returns the bucket ID of the next assignment, and the assignment.
    async fn assigned(&mut self) -> (HashMap<String, String>, Option<Strategy>) {
        let mut answer = self.answers.message().await.unwrap().unwrap();
        assert_eq!(answer.bucket_action.len(), 1);
        let action = answer.bucket_action.remove(0);
        let strategy = match action.bucket_action.unwrap() {
            BucketAction::QuotaAssignmentAction(assigned) => {
                assert!(assigned.assignment_time_to_live.unwrap().seconds >= 15);
                assigned.rate_limit_strategy.unwrap().strategy
            }
            BucketAction::AbandonAction(_) => None,
        };
        (action.bucket_id.unwrap().bucket, strategy)
    }

    /// Returns the next assignment, which must be a token bucket.
    async fn bucket(&mut self) -> TokenBucket {
        match self.assigned().await.1 {
            Some(Strategy::TokenBucket(bucket)) => bucket,
            other => panic!("{other:?} is not a token bucket"),
        }
    }
}

const ALLOW_ALL: Option<Strategy> = Some(Strategy::BlanketRule(0));

const ALICE: &[(&str, &str)] = &[("service", "shop"), ("api_key", "alice")];
const EXPORTS: &[(&str, &str)] = &[("service", "exports")];

/// After a reconnect, an Envoy reports all requests since its last report in a single report.
#[tokio::test]
async fn the_first_report_is_divided_by_its_time() {
    let listener = TestListener::open(QUOTAS);
    let (mut one, mut two) = (Envoy::join(&listener).await, Envoy::join(&listener).await);
    one.report(ALICE, 100, 0).await;
    assert_eq!(one.bucket().await.max_tokens, 100);
    let elapsed = prost_types::Duration {
        seconds: 9,
        nanos: 500_000_000,
    };
    two.report_of(Some(elapsed), "shop", ALICE, [900, 100])
        .await;
    let shares = (one.bucket().await.max_tokens, two.bucket().await.max_tokens);
    assert_eq!(shares, (50, 50));
}

#[tokio::test]
async fn rate_shares_sum_to_the_limit_and_follow_demand() {
    let listener = TestListener::open(QUOTAS);
    let (mut one, mut two) = (Envoy::join(&listener).await, Envoy::join(&listener).await);
    one.report(ALICE, 1, 0).await;
    let alone = one.bucket().await;
    assert_eq!((alone.max_tokens, alone.tokens_per_fill), (100, Some(100)));
    assert_eq!(alone.fill_interval.unwrap().seconds, 1);

    two.report(ALICE, 1, 0).await;
    assert_eq!(
        (one.bucket().await.max_tokens, two.bucket().await.max_tokens),
        (50, 50)
    );

    listener.at_seconds(5);
    two.report(ALICE, 250, 750).await;
    let (one_share, two_share) = (one.bucket().await.max_tokens, two.bucket().await.max_tokens);
    assert_eq!(one_share + two_share, 100);
    assert!(two_share > 90, "{one_share} and {two_share}");

    drop(two);
    assert_eq!(
        one.bucket().await.max_tokens,
        100,
        "the share of the other stream is free"
    );
}

#[tokio::test]
async fn each_bucket_has_its_own_counter() {
    let listener = TestListener::open(QUOTAS);
    let mut envoy = Envoy::join(&listener).await;
    let has = |line| listener.limiter.exposition().contains(line);
    assert!(has("tidegate_quota_buckets 0\n") && has("tidegate_quota_streams 1\n"));
    for name in ["alice", "bob"] {
        envoy
            .report(&[("api_key", name), ("service", "shop")], 1, 0)
            .await;
        let (id, strategy) = envoy.assigned().await;
        assert_eq!(id["api_key"], name);
        assert!(
            matches!(strategy, Some(Strategy::TokenBucket(bucket)) if bucket.max_tokens == 100)
        );
    }
    assert!(has("tidegate_quota_buckets 2\n"));
}

#[tokio::test]
async fn an_exhausted_budget_is_denied_until_the_next_window() {
    const DENY_ALL: Option<Strategy> = Some(Strategy::BlanketRule(1));
    let listener = TestListener::open(QUOTAS);
    let mut envoy = Envoy::join(&listener).await;
    envoy.report(EXPORTS, 0, 0).await;
    let mut total = 0;
    loop {
        match envoy.assigned().await.1 {
            Some(Strategy::TokenBucket(bucket)) => {
                total += bucket.max_tokens;
                envoy.report(EXPORTS, bucket.max_tokens.into(), 1).await;
            }
            denied => break assert_eq!(denied, DENY_ALL),
        }
    }
    assert_eq!(total, 1_000);
    listener.at_seconds(3_600);
    envoy.report(EXPORTS, 0, 1).await;
    assert!(envoy.bucket().await.max_tokens >= 900);
}

#[tokio::test]
async fn a_bucket_without_a_quota_is_allowed() {
    let listener = TestListener::open(QUOTAS);
    let mut envoy = Envoy::join(&listener).await;
    envoy.report(&[("service", "blog")], 1, 0).await;
    assert_eq!(envoy.assigned().await.1, ALLOW_ALL);
}

#[tokio::test]
async fn a_reload_takes_effect_at_once() {
    let listener = TestListener::open(QUOTAS);
    let mut envoy = Envoy::join(&listener).await;
    envoy.report(ALICE, 1, 0).await;
    assert_eq!(envoy.bucket().await.max_tokens, 100);
    listener.reload(&QUOTAS.replace("100/s", "300/s"));
    assert_eq!(envoy.bucket().await.max_tokens, 300);
    listener.reload("");
    assert_eq!(envoy.assigned().await.1, ALLOW_ALL);
    assert!(
        listener
            .limiter
            .exposition()
            .contains("tidegate_quota_buckets 0\n")
    );
    // The Envoy keeps reporting. The assignment of the Envoy stays the same until a quota matches
    // the bucket again.
    envoy.report(ALICE, 1, 0).await;
    assert_eq!(envoy.assigned().await.1, ALLOW_ALL);
    listener.reload(QUOTAS);
    envoy.report(ALICE, 1, 0).await;
    assert_eq!(envoy.bucket().await.max_tokens, 100);
}

#[tokio::test]
async fn an_invalid_message_ends_the_stream_with_an_error() {
    let listener = TestListener::open(QUOTAS);
    let long = "x".repeat(5_000);
    for (domain, bucket) in [
        ("", ALICE),
        ("shop", [].as_slice()),
        ("shop", &[("service", long.as_str())]),
    ] {
        let mut envoy = Envoy::join(&listener).await;
        envoy.report_to(domain, bucket, 1, 0).await;
        let ended = envoy.answers.message().await.unwrap_err();
        assert_eq!(ended.code(), Code::InvalidArgument, "{ended:?}");
    }
    let mut envoy = Envoy::join(&listener).await;
    envoy.report(ALICE, 1, 0).await;
    envoy.bucket().await;
    envoy.report_to("other", ALICE, 1, 0).await;
    let ended = envoy.answers.message().await.unwrap_err();
    assert_eq!(ended.code(), Code::InvalidArgument, "{ended:?}");
}

#[tokio::test]
async fn streams_end_with_the_server() {
    let listener = TestListener::open(QUOTAS);
    let mut envoy = Envoy::join(&listener).await;
    envoy.report(ALICE, 1, 0).await;
    envoy.bucket().await;
    assert_eq!(
        listener
            .server
            .shutdown(std::time::Duration::from_secs(30))
            .await,
        0
    );
    assert!(envoy.answers.message().await.unwrap().is_none());
}
