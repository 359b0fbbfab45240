//! Tests which descriptors appear in the list of recent denials.

use tidegate_core::{Mode, RetryAfter, Span};
use tidegate_envoy::{Descriptor, RateLimitRequest};
use tidegate_limiter::{
    denials::{DenialFilter, DenialReason, DenialRecord},
    metrics::ListenerKind,
};

use crate::{
    promises::{ask, descriptor, request, started},
    subject::Started,
};

const TEXT: &str = "
domain: two
descriptors:
  - {key: wide, rate_limit: {unit: hour, requests_per_unit: 100}}
  - {key: narrow, rate_limit: {unit: hour, requests_per_unit: 1}}
  - {key: shadow, shadow_mode: true, rate_limit: {unit: hour, requests_per_unit: 1}}
  - {key: few, quota_mode: true, rate_limit: {unit: hour, requests_per_unit: 1}}
  - {key: more, quota_mode: true, rate_limit: {unit: hour, requests_per_unit: 2}}";

/// The time from the start of a test (see `promises::started`) to the end of the hour.
const REST_OF_HOUR: Span = Span::from_secs(3_600 - 1_700_000_040 % 3_600);

async fn send(started: &Started, descriptors: &[Descriptor], times: u32) {
    for _ in 0..times {
        ask(&started.service, &request(descriptors.to_vec()))
            .await
            .unwrap();
    }
}

fn denials(started: &Started) -> Vec<DenialRecord> {
    let log = started.limiter.denials();
    log.list(&DenialFilter::default(), 100).denials
}

#[tokio::test]
async fn a_denied_descriptor_is_listed_with_its_limit_and_its_wait() {
    for cache in ["0", "1048576"] {
        let started = started(TEXT, &[("LOCAL_CACHE_SIZE_IN_BYTES", cache)]);
        let both = [descriptor("wide"), descriptor("narrow")];
        send(&started, &both, 1).await;
        assert_eq!(denials(&started), [], "the first request is admitted");
        send(&started, &both, 2).await;
        let denials = denials(&started);
        assert_eq!(denials.len(), 2, "one for each denied request: {denials:?}");
        for denial in denials {
            assert_eq!(denial.listener, ListenerKind::Grpc);
            assert_eq!(
                (denial.mode, denial.reason),
                (Mode::Enforce, DenialReason::Limit)
            );
            assert_eq!(denial.rule, None);
            let policy = denial.policy.unwrap();
            assert!(policy.starts_with("1/h"), "{policy}");
            assert_eq!(denial.key, ["x"]);
            let entries = [("domain", "two"), ("narrow", "x")];
            let entries = entries.map(|(name, value)| (name.to_owned(), value.to_owned()));
            assert_eq!(denial.entries, entries);
            assert_eq!(denial.retry_after, RetryAfter::After(REST_OF_HOUR));
        }
    }
}

#[tokio::test]
async fn a_shadow_rule_is_marked_and_an_allowed_quota_is_left_out() {
    let started = started(TEXT, &[]);
    send(&started, &[descriptor("shadow")], 2).await;
    let listed: Vec<Mode> = denials(&started).iter().map(|denial| denial.mode).collect();
    assert_eq!(listed, [Mode::Shadow]);
    let quotas = [descriptor("few"), descriptor("more")];
    send(&started, &quotas, 2).await;
    assert_eq!(denials(&started).len(), 1, "`more` still has capacity");
    send(&started, &quotas, 1).await;
    let denials = denials(&started);
    let quotas = denials.iter().filter(|denial| denial.mode == Mode::Enforce);
    assert_eq!(quotas.count(), 2, "{denials:?}");
}

#[tokio::test]
async fn in_global_shadow_mode_every_denial_is_a_shadow_denial() {
    let started = started(TEXT, &[("SHADOW_MODE", "true")]);
    send(&started, &[descriptor("narrow")], 2).await;
    let listed: Vec<Mode> = denials(&started).iter().map(|denial| denial.mode).collect();
    assert_eq!(listed, [Mode::Shadow]);
}

#[tokio::test]
async fn queries_are_not_listed_and_long_keys_are_left_out() {
    let started = started(TEXT, &[]);
    send(&started, &[descriptor("narrow")], 2).await;
    let query = Descriptor {
        hits_addend: Some(0),
        ..descriptor("narrow")
    };
    send(&started, &[query], 2).await;
    assert_eq!(denials(&started).len(), 1);
    let long = "x".repeat(2_000);
    let descriptor = Descriptor {
        entries: vec![("narrow".into(), long)],
        ..Descriptor::default()
    };
    let request = RateLimitRequest {
        domain: "two".into(),
        descriptors: vec![descriptor],
        hits_addend: 2,
    };
    ask(&started.service, &request).await.unwrap();
    let denials = denials(&started);
    assert_eq!(denials.len(), 2);
    assert!(denials[0].key.is_empty(), "newest first: {denials:?}");
    assert!(denials[0].entries[1].1.len() <= 256);
}
