//! Tests of overrides that operators set for descriptors while the server runs.

use tidegate_config::envoy::{DomainFiles, RlsSettings};
use tidegate_core::{Override, OverrideTarget, Replacement};
use tidegate_envoy::{File, read};

use crate::{
    client::Client,
    listener::TestListener,
    proto::envoy::{
        extensions::common::ratelimit::v3::{
            RateLimitDescriptor,
            rate_limit_descriptor::{Entry, RateLimitOverride},
        },
        service::ratelimit::v3::{
            RateLimitRequest, RateLimitResponse,
            rate_limit_response::{Code, DescriptorStatus, rate_limit::Unit},
        },
    },
};

const PATH: &str = "/envoy.service.ratelimit.v3.RateLimitService/ShouldRateLimit";

const SHOP: &str = "\
domain: shop
descriptors:
  - {key: api_key, rate_limit: {unit: minute, requests_per_unit: 3}}
  - key: plan
    value: gold
    descriptors:
      - {key: user, rate_limit: {unit: minute, requests_per_unit: 3}}
  - key: path
    value: /api/*
    share_threshold: true
    rate_limit: {unit: minute, requests_per_unit: 3}
  - {key: trial, shadow_mode: true, rate_limit: {unit: minute, requests_per_unit: 3}}
  - {key: free, rate_limit: {unlimited: true}}
";

fn descriptor(entries: &[(&str, &str)]) -> RateLimitDescriptor {
    let entry = |(key, value): &(&str, &str)| Entry {
        key: (*key).to_owned(),
        value: (*value).to_owned(),
    };
    RateLimitDescriptor {
        entries: entries.iter().map(entry).collect(),
        ..RateLimitDescriptor::default()
    }
}

async fn ask(client: &mut Client, descriptor: RateLimitDescriptor) -> DescriptorStatus {
    let request = RateLimitRequest {
        domain: "shop".to_owned(),
        descriptors: vec![descriptor],
        hits_addend: 0,
    };
    let answer: RateLimitResponse = client.call(PATH, request).await.unwrap();
    answer.statuses.into_iter().next().unwrap()
}

/// Sends 20 requests, and returns the number of admitted requests.
async fn admitted(client: &mut Client, entries: &[(&str, &str)]) -> usize {
    let mut admitted = 0;
    for _ in 0..20 {
        let status = ask(client, descriptor(entries)).await;
        admitted += usize::from(status.code() == Code::Ok);
    }
    admitted
}

async fn try_set(
    listener: &TestListener,
    rule: &str,
    key: &[&str],
    limit: &str,
) -> Result<(), String> {
    let limiter = &listener.limiter;
    let rules = limiter.rules();
    let rule = limiter.overridable_rule(&rules, rule).ok_or("no rule")?;
    let replacement = match limit.parse() {
        Ok(factor) if limit.ends_with('x') => Replacement::Factor(factor),
        _ => Replacement::Limits(Box::new([limit.into()])),
    };
    let new = Override {
        replacement,
        until: None,
        reason: "a test".into(),
    };
    let target = OverrideTarget::of(key);
    let set = limiter.set_override(&rule, &target, new);
    set.await.map(drop).map_err(|error| error.to_string())
}

async fn set(listener: &TestListener, rule: &str, key: &[&str], limit: &str) {
    try_set(listener, rule, key, limit).await.unwrap();
}

async fn remove(listener: &TestListener, rule: &str, key: &[&str]) {
    let target = OverrideTarget::of(key);
    let removed = listener.limiter.remove_override(rule, &target).await;
    assert!(removed.unwrap().is_some());
}

#[tokio::test]
async fn an_override_of_a_key_or_of_a_pattern_replaces_the_limits_of_the_rule() {
    let listener = TestListener::for_envoy(RlsSettings::default(), SHOP);
    let mut client = listener.connect().await;
    assert_eq!(admitted(&mut client, &[("api_key", "other")]).await, 3);
    set(&listener, "envoy:shop/api_key", &["acme-*"], "5/min").await;
    set(&listener, "envoy:shop/api_key", &["acme-1"], "2x").await;
    assert_eq!(admitted(&mut client, &[("api_key", "acme-1")]).await, 6);
    assert_eq!(admitted(&mut client, &[("api_key", "acme-2")]).await, 5);
    assert_eq!(admitted(&mut client, &[("api_key", "initech")]).await, 3);
    let status = ask(&mut client, descriptor(&[("api_key", "acme-3")])).await;
    let limit = status.current_limit.unwrap();
    assert_eq!((limit.requests_per_unit, limit.unit()), (5, Unit::Minute));
    assert_eq!(status.limit_remaining, 4);
    remove(&listener, "envoy:shop/api_key", &["acme-*"]).await;
    let status = ask(&mut client, descriptor(&[("api_key", "acme-3")])).await;
    assert_eq!(status.current_limit.unwrap().requests_per_unit, 3);
    assert_eq!(status.limit_remaining, 1, "the first hit still counts");
}

#[tokio::test]
async fn the_name_and_the_key_contain_all_levels() {
    let listener = TestListener::for_envoy(RlsSettings::default(), SHOP);
    let mut client = listener.connect().await;
    let rule = "envoy:shop/plan_gold.user";
    set(&listener, rule, &["gold", "alice"], "7/min").await;
    set(&listener, rule, &["*", "bob"], "8/min").await;
    for (user, expected) in [("alice", 7), ("bob", 8), ("carol", 3)] {
        let entries = [("plan", "gold"), ("user", user)];
        assert_eq!(admitted(&mut client, &entries).await, expected, "{user}");
    }
    // All values that a wildcard with a shared count matches have the same key, the wildcard.
    set(&listener, "envoy:shop/path_/api/*", &["/api/*"], "9/min").await;
    assert_eq!(admitted(&mut client, &[("path", "/api/a")]).await, 9);
    assert_eq!(admitted(&mut client, &[("path", "/api/b")]).await, 0);

    for unknown in [
        "envoy:shop/nobody",
        "envoy:shop/plan_gold",
        "envoy:shop/plan.user",
        "envoy:nobody/api_key",
        "envoy:shop/free",
        "shop/api_key",
        "envoy:",
    ] {
        let problem = try_set(&listener, unknown, &["x"], "7/min").await;
        assert_eq!(problem.unwrap_err(), "no rule", "{unknown}");
    }
    let problem = try_set(&listener, rule, &["alice"], "7/min").await;
    let expected =
        "key: rule \"envoy:shop/plan_gold.user\" has a key of 2 values (plan, user), got 1";
    assert_eq!(problem.unwrap_err(), expected);
}

#[tokio::test]
async fn an_override_survives_a_reload_and_a_change_keeps_the_used_units() {
    let listener = TestListener::for_envoy(RlsSettings::default(), SHOP);
    let mut client = listener.connect().await;
    let entries = [("api_key", "acme")];
    for _ in 0..2 {
        ask(&mut client, descriptor(&entries)).await;
    }
    set(&listener, "envoy:shop/api_key", &["acme"], "10/min").await;
    let left = async |client: &mut Client| ask(client, descriptor(&entries)).await.limit_remaining;
    assert_eq!(left(&mut client).await, 7);
    let reload = |text: String| {
        let name = "shop.yaml".to_owned();
        let loaded = read(vec![File { name, text }], DomainFiles::One).unwrap();
        listener.rate_limits.as_ref().unwrap().load(loaded);
    };
    reload(SHOP.replace("requests_per_unit: 3", "requests_per_unit: 4"));
    assert_eq!(left(&mut client).await, 6);
    assert_eq!(admitted(&mut client, &[("api_key", "other")]).await, 4);
    // A reload without the rule makes the override inactive, and restoring the rule activates it.
    reload("domain: shop\ndescriptors: []".to_owned());
    assert_eq!(listener.limiter.inactive_overrides().0.len(), 1);
    assert_eq!(left(&mut client).await, 0, "no limit applies");
    reload(SHOP.to_owned());
    assert_eq!(listener.limiter.inactive_overrides().0.len(), 0);
    assert_eq!(left(&mut client).await, 5);
}

#[tokio::test]
async fn a_shadow_rule_stays_in_shadow_mode_and_a_limit_in_the_request_takes_precedence() {
    let listener = TestListener::for_envoy(RlsSettings::default(), SHOP);
    let mut client = listener.connect().await;
    set(&listener, "envoy:shop/trial", &["x"], "1/min").await;
    assert_eq!(admitted(&mut client, &[("trial", "x")]).await, 20);
    set(&listener, "envoy:shop/api_key", &["acme"], "9/min").await;
    let asked = RateLimitDescriptor {
        limit: Some(RateLimitOverride {
            requests_per_unit: 7,
            unit: Unit::Hour.into(),
        }),
        ..descriptor(&[("api_key", "acme")])
    };
    let limit = ask(&mut client, asked).await.current_limit.unwrap();
    assert_eq!((limit.requests_per_unit, limit.unit()), (7, Unit::Hour));
}

#[tokio::test]
async fn a_raised_limit_takes_effect_despite_the_local_cache() {
    let mut settings = RlsSettings::default();
    settings.local_cache_bytes = 1 << 20;
    let listener = TestListener::for_envoy(settings, SHOP);
    let mut client = listener.connect().await;
    let entries = [("api_key", "acme")];
    assert_eq!(admitted(&mut client, &entries).await, 3);
    // 4 of 20 denied hits were counted: those that reached the store instead of the cache.
    set(&listener, "envoy:shop/api_key", &["acme"], "10/min").await;
    assert_eq!(admitted(&mut client, &entries).await, 6);
    remove(&listener, "envoy:shop/api_key", &["acme"]).await;
    assert_eq!(admitted(&mut client, &entries).await, 0);
}

#[tokio::test]
async fn several_descriptors_are_decided_together_with_overrides() {
    let text = format!("{SHOP}all_or_nothing: true\n");
    let listener = TestListener::for_envoy(RlsSettings::default(), &text);
    let mut client = listener.connect().await;
    set(&listener, "envoy:shop/api_key", &["acme"], "2/min").await;
    set(
        &listener,
        "envoy:shop/plan_gold.user",
        &["gold", "alice"],
        "9/min",
    )
    .await;
    let request = || RateLimitRequest {
        domain: "shop".to_owned(),
        descriptors: vec![
            descriptor(&[("api_key", "acme")]),
            descriptor(&[("plan", "gold"), ("user", "alice")]),
        ],
        hits_addend: 0,
    };
    let mut codes = Vec::new();
    for _ in 0..3 {
        let answer: RateLimitResponse = client.call(PATH, request()).await.unwrap();
        codes.push(answer.overall_code());
    }
    assert_eq!(codes, [Code::Ok, Code::Ok, Code::OverLimit]);
    let status = ask(
        &mut client,
        descriptor(&[("plan", "gold"), ("user", "alice")]),
    )
    .await;
    assert_eq!(
        status.limit_remaining, 6,
        "the denied request was not charged"
    );
}
