//! Tests of overrides of descriptors on servers that share a Redis.

use std::{sync::Arc, time::Duration};

use tidegate_config::envoy::{DomainFiles, RlsSettings};
use tidegate_core::{Override, OverrideTarget, Replacement};
use tidegate_envoy::{Code, Descriptor, RateLimitRequest};

use crate::{
    format::ConfigFile,
    store::at,
    subject::{Started, StoreKind},
    support::RedisServer,
};

const SHOP: &str = "
domain: shop
descriptors:
  - {key: api_key, rate_limit: {unit: hour, requests_per_unit: 3}}";

const RULE: &str = "envoy:shop/api_key";

pub(crate) async fn set(started: &Started, key: &str, limit: &str) {
    let rules = started.limiter.rules();
    let rule = started.limiter.overridable_rule(&rules, RULE).unwrap();
    let new = Override {
        replacement: Replacement::Limits(Box::new([limit.into()])),
        until: None,
        reason: "a test".into(),
    };
    let target = OverrideTarget::of(&[key]);
    let set = started.limiter.set_override(&rule, &target, new).await;
    set.unwrap();
}

/// Sends 20 requests of `api_key`, and returns the number of admitted requests.
pub(crate) async fn admitted(started: &Started, api_key: &str) -> usize {
    let descriptor = Descriptor {
        entries: vec![("api_key".into(), api_key.into())],
        ..Descriptor::default()
    };
    let request = RateLimitRequest {
        domain: "shop".into(),
        descriptors: vec![descriptor],
        hits_addend: 0,
    };
    let mut admitted = 0;
    for _ in 0..20 {
        let answer = started.service.should_rate_limit(&request).await.unwrap();
        admitted += usize::from(answer.overall_code == Code::Ok);
    }
    admitted
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_override_of_a_descriptor_applies_on_all_servers() {
    let redis = RedisServer::start();
    let clients = [at(&redis.url()), at(&redis.url())].map(Arc::new);
    let [one, other] = [0, 1].map(|number| {
        let store = StoreKind::Redis(&clients[number], "overrides");
        let started = Started::with(
            store,
            RlsSettings::default(),
            DomainFiles::One,
            1_700_000_040,
        );
        let (name, yaml) = ("shop.yaml".into(), SHOP.into());
        started.load(&[ConfigFile { name, yaml }]).unwrap();
        started
    });
    for client in &clients {
        client.wait_for_first_attempt().await.unwrap();
    }
    assert_eq!(admitted(&one, "other").await, 3);
    set(&one, "acme", "7/h").await;
    set(&one, "initech-*", "5/h").await;
    assert_eq!(admitted(&one, "acme").await, 7);
    other
        .limiter
        .read_overrides_at_start(Duration::from_secs(10))
        .await;
    assert_eq!(admitted(&other, "acme").await, 0, "the hits are shared");
    assert_eq!(admitted(&other, "initech-1").await, 5);
    let target = OverrideTarget::of(&["initech-*"]);
    let removed = other.limiter.remove_override(RULE, &target).await;
    assert!(removed.unwrap().is_some());
    assert_eq!(admitted(&other, "initech-2").await, 3);
}
