//! Descriptors that are decided together: which of them keeps the others from being charged.

use tidegate_server::envoy::{Code, Descriptor, LimitOverride, Unit};

use crate::promises::{ask, counted, descriptor, request, started};

const TOGETHER: (&str, &str) = ("STOP_CACHE_KEY_INCREMENT_WHEN_OVERLIMIT", "true");

const TEXT: &str = "
domain: two
descriptors:
  - {key: broad, rate_limit: {unit: hour, requests_per_unit: 100}}
  - {key: narrow, rate_limit: {unit: hour, requests_per_unit: 1}}
  - {key: shadow, shadow_mode: true, rate_limit: {unit: hour, requests_per_unit: 1}}";

/// How many of `times` requests about `descriptors` are OK.
async fn passed(settings: &[(&str, &str)], descriptors: &[Descriptor], times: u32) -> (u32, u32) {
    let started = started(TEXT, settings);
    let (request, mut passed) = (request(descriptors.to_vec()), 0);
    for _ in 0..times {
        let answer = ask(&started.service, &request).await.unwrap();
        passed += u32::from(answer.overall_code == Code::Ok);
    }
    (passed, counted(&started.service, "broad", 100).await)
}

/// All rules in quota mode: the request is denied once all are over, so none may keep another from counting.
#[tokio::test]
async fn in_quota_mode_no_rule_keeps_others_from_being_charged() {
    let both = [descriptor("narrow"), descriptor("broad")];
    let (ok, _) = passed(&[TOGETHER, ("QUOTA_MODE", "true")], &both, 150).await;
    assert_eq!(ok, 100);
    let (ok, charged) = passed(&[TOGETHER], &both, 150).await;
    assert_eq!((ok, charged), (1, 1));
}

#[tokio::test]
async fn a_shadow_rule_that_is_known_to_be_over_keeps_none_from_being_charged() {
    let cached = ("LOCAL_CACHE_SIZE_IN_BYTES", "1048576");
    let both = [descriptor("shadow"), descriptor("broad")];
    assert_eq!(passed(&[TOGETHER, cached], &both, 150).await.0, 100);
}

#[tokio::test]
async fn one_descriptor_under_its_rule_and_under_an_override_is_held_to_both() {
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
