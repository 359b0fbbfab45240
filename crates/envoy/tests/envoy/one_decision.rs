//! Tests of all-or-nothing charging: which descriptors prevent other descriptors from being
//! charged.

use std::thread;

use futures_util::FutureExt as _;
use tidegate_envoy::{Code, Descriptor, LimitOverride, Unit};

use crate::promises::{ask, counted, descriptor, request, started};

const TOGETHER: (&str, &str) = ("STOP_CACHE_KEY_INCREMENT_WHEN_OVERLIMIT", "true");

const CACHED: (&str, &str) = ("LOCAL_CACHE_SIZE_IN_BYTES", "1048576");

const TEXT: &str = "
domain: two
descriptors:
  - {key: broad, rate_limit: {unit: hour, requests_per_unit: 100}}
  - {key: narrow, rate_limit: {unit: hour, requests_per_unit: 1}}
  - {key: few, quota_mode: true, rate_limit: {unit: hour, requests_per_unit: 1}}
  - {key: more, quota_mode: true, rate_limit: {unit: hour, requests_per_unit: 5}}
  - {key: logged, quota_mode: true, rate_limit: {unit: hour, requests_per_unit: 1, algorithm: sliding_window_log}}
  - {key: shadowed, quota_mode: true, shadow_mode: true, rate_limit: {unit: hour, requests_per_unit: 1}}
  - {key: shadow, shadow_mode: true, rate_limit: {unit: hour, requests_per_unit: 1}}";

/// Sends `times` requests for `descriptors`. Returns the number of allowed requests, and the number
/// of hits charged to the rule `broad`.
async fn passed(settings: &[(&str, &str)], descriptors: &[Descriptor], times: u32) -> (u32, u32) {
    let started = started(TEXT, settings);
    let (request, mut passed) = (request(descriptors.to_vec()), 0);
    for _ in 0..times {
        let answer = ask(&started.service, &request).await.unwrap();
        passed += u32::from(answer.overall_code == Code::Ok);
    }
    (passed, counted(&started.service, "broad", 100).await)
}

/// If all rules are in quota mode, a request is denied only if all rules are over their limits. No
/// rule prevents another rule from being charged.
#[tokio::test]
async fn in_quota_mode_no_rule_prevents_charging_others() {
    let both = [descriptor("narrow"), descriptor("broad")];
    let (ok, _) = passed(&[TOGETHER, ("QUOTA_MODE", "true")], &both, 150).await;
    assert_eq!(ok, 100);
    let (ok, charged) = passed(&[TOGETHER], &both, 150).await;
    assert_eq!((ok, charged), (1, 1));
}

#[tokio::test]
async fn a_cached_shadow_denial_does_not_prevent_charging_others() {
    let both = [descriptor("shadow"), descriptor("broad")];
    assert_eq!(passed(&[TOGETHER, CACHED], &both, 150).await.0, 100);
}

#[tokio::test]
async fn a_rule_and_an_override_for_one_descriptor_both_apply() {
    let lowered = Descriptor {
        limit: Some(LimitOverride {
            requests_per_unit: 5,
            unit: Unit::Hour,
        }),
        ..descriptor("broad")
    };
    let (ok, _) = passed(&[TOGETHER], &[descriptor("broad"), lowered], 20).await;
    assert!(ok <= 5, "{ok} passed");
}

/// A single quota denies like any other rule. A denied request is not charged to any rule.
#[tokio::test]
async fn a_single_denying_quota_prevents_charging_others() {
    for settings in [&[TOGETHER][..], &[TOGETHER, CACHED]] {
        for quota in ["few", "logged"] {
            let both = [descriptor(quota), descriptor("broad")];
            assert_eq!(
                passed(settings, &both, 20).await,
                (1, 1),
                "{settings:?}, {quota}"
            );
        }
    }
}

/// Several quotas deny a request once all of them are over their limits. Once the quotas deny the
/// request, the other rules are not charged.
#[tokio::test]
async fn quotas_prevent_charging_others_once_all_are_over() {
    for settings in [&[TOGETHER][..], &[TOGETHER, CACHED]] {
        for quotas in [["few", "more"], ["more", "few"], ["logged", "more"]] {
            let mut all = quotas.map(descriptor).to_vec();
            all.push(descriptor("broad"));
            assert_eq!(
                passed(settings, &all, 20).await,
                (5, 5),
                "{settings:?}, {quotas:?}"
            );
        }
    }
}

/// If a rule denies a request, quotas are not charged either. A quota in shadow mode is always
/// treated as within its limit. Therefore, if one quota is in shadow mode, quotas never deny a
/// request.
#[tokio::test]
async fn quotas_are_charged_only_together_with_others() {
    let started = started(TEXT, &[TOGETHER]);
    let all = ["narrow", "few", "more"].map(descriptor).to_vec();
    for _ in 0..4 {
        ask(&started.service, &request(all.clone())).await.unwrap();
    }
    assert_eq!(counted(&started.service, "more", 5).await, 1);
    let lenient = ["few", "shadowed", "broad"].map(descriptor);
    assert_eq!(passed(&[TOGETHER], &lenient, 20).await, (20, 20));
}

/// A quota that is only queried and not charged also counts as a quota of the request.
#[tokio::test]
async fn a_peeked_quota_counts_as_one_of_the_quotas() {
    let started = started(TEXT, &[TOGETHER]);
    let peeked = Descriptor {
        hits_addend: Some(0),
        ..descriptor("more")
    };
    let all = request(vec![descriptor("few"), peeked, descriptor("broad")]);
    let mut codes = Vec::new();
    for _ in 0..3 {
        codes.push(ask(&started.service, &all).await.unwrap().overall_code);
    }
    assert_eq!(codes, [Code::Ok; 3]);
    assert_eq!(counted(&started.service, "broad", 100).await, 3);
    let hits = Descriptor {
        hits_addend: Some(6),
        ..descriptor("more")
    };
    ask(&started.service, &request(vec![hits])).await.unwrap();
    let denied = ask(&started.service, &all).await.unwrap();
    assert_eq!(denied.overall_code, Code::OverLimit);
    assert_eq!(counted(&started.service, "broad", 100).await, 3);
}

/// A refund in the same request does not free capacity for a descriptor that is known to be over
/// its limit. All other descriptors are not charged.
#[tokio::test]
async fn a_cached_denial_holds_for_the_whole_request() {
    let started = started(TEXT, &[TOGETHER, CACHED]);
    let narrow = request(vec![descriptor("narrow")]);
    for _ in 0..2 {
        ask(&started.service, &narrow).await.unwrap();
    }
    let back = Descriptor {
        hits_addend: Some(9),
        is_negative_hits: true,
        ..descriptor("narrow")
    };
    let all = request(vec![back, descriptor("narrow"), descriptor("broad")]);
    let mut answers = Vec::new();
    for _ in 0..2 {
        let code = ask(&started.service, &all).await.unwrap().overall_code;
        answers.push((code, counted(&started.service, "broad", 100).await));
    }
    assert_eq!(answers, [(Code::OverLimit, 0), (Code::Ok, 1)]);
}

/// Even with many concurrent requests, the responses and the charges agree.
#[test]
fn a_denial_by_quotas_charges_no_concurrent_request() {
    let started = started(TEXT, &[TOGETHER]);
    let all = request(["few", "more", "broad"].map(descriptor).to_vec());
    let ask_often = || {
        let asked = (0..50).map(|_| block_on(ask(&started.service, &all)).unwrap());
        asked
            .filter(|answer| answer.overall_code == Code::Ok)
            .count()
    };
    let passed: usize = thread::scope(|scope| {
        let clients: Vec<_> = (0..4).map(|_| scope.spawn(ask_often)).collect();
        clients
            .into_iter()
            .map(|client| client.join().unwrap())
            .sum()
    });
    assert_eq!(passed, 5);
    assert_eq!(block_on(counted(&started.service, "broad", 100)), 5);
}

/// Runs a future to completion. The future never waits, because counters are in memory.
fn block_on<T>(future: impl Future<Output = T>) -> T {
    future.now_or_never().unwrap()
}
