//! A sequence of arbitrary messages to `ShouldRateLimit`. Each message must get a response or an
//! error with a reason, without a panic. Another service in the same state must give the same
//! result.
//!
//! The first byte sets the settings of the service, one per bit. The rest are frames.

#![no_main]

#[allow(dead_code, reason = "the sender does not matter here")]
mod frames;

use std::sync::Arc;

use frames::frames;
use libfuzzer_sys::fuzz_target;
use tidegate::Clock;
use tidegate_config::envoy::{DomainFiles, HeaderNames, RlsSettings};
use tidegate_core::{MemoryBounds, MemoryStore, RuleSet, Timestamp};
use tidegate_envoy::{File, RateLimitService, grpc::rate_limit_transcript, read};
use tidegate_limiter::ServerLimiter;

/// The initial time, in microseconds: the first second of a minute.
const START: u64 = 1_700_000_040_000_000;

/// A rule of each kind.
const SHOP: &str = "
domain: shop
descriptors:
  - {key: k, rate_limit: {unit: minute, requests_per_unit: 3, name: k}}
  - {key: k, value: 'a*', share_threshold: true, rate_limit: {unit: second, requests_per_unit: 2}}
  - {key: k, value: free, rate_limit: {unlimited: true, name: free, replaces: [{name: k}]}}
  - {key: q, quota_mode: true, metadata: {from: q, list: [1, 2.5]}, rate_limit: {unit: week, requests_per_unit: 1}}
  - {key: s, shadow_mode: true, value_to_metric: true, rate_limit: {unit: month, requests_per_unit: 0}}
  - {key: l, rate_limits: [2/s, 5/d]}
  - {key: d, detailed_metric: true, descriptors: [{key: e, rate_limit: {unit: hour, requests_per_unit: 1}}]}
";

/// Two rules, of which either both or neither is charged.
const TOGETHER: &str = "
domain: together
all_or_nothing: true
descriptors:
  - {key: k, rate_limit: {unit: minute, requests_per_unit: 3}}
  - {key: q, rate_limit: {unit: hour, requests_per_unit: 1}}
";

fuzz_target!(|input: &[u8]| {
    let Some((settings, rest)) = input.split_first() else {
        return;
    };
    let services = [service(*settings), service(*settings)];
    let mut now = START;
    for frame in frames(rest).take(64) {
        now += frame.seconds * 1_000_000;
        let answers = services.each_ref().map(|(service, clock)| {
            clock.set(Timestamp::from_micros(now));
            rate_limit_transcript(service, frame.message)
        });
        assert_eq!(answers[0], answers[1]);
        match &answers[0] {
            Ok(answer) => assert!(!answer.is_empty(), "an answer has a code"),
            Err((code, text)) => {
                assert!(
                    matches!(code, 2 | 3),
                    "a code of the documentation, not {code}"
                );
                assert!(!text.is_empty(), "an error has a message");
            }
        }
    }
});

fn service(bits: u8) -> (RateLimitService, Clock) {
    let mut settings = RlsSettings::default();
    settings.shadow_mode = bits & 1 != 0;
    settings.quota_mode = bits & 2 != 0;
    settings.stop_increment = bits & 4 != 0;
    settings.dynamic_metadata = bits & 8 != 0;
    settings.response_headers = (bits & 16 != 0).then(HeaderNames::default);
    settings.local_cache_bytes = if bits & 32 != 0 { 1_000 } else { 0 };
    let bounds = MemoryBounds {
        max_keys: if bits & 64 != 0 { 3 } else { 100 },
        ..MemoryBounds::default()
    };
    let clock = Clock::manual(Timestamp::from_micros(START));
    let limiter = ServerLimiter::new(RuleSet::default(), MemoryStore::new(bounds), clock.clone());
    let service = RateLimitService::new(Arc::new(limiter), settings);
    let file = |name: &str, text: &str| File {
        name: name.to_owned(),
        text: text.to_owned(),
    };
    let files = vec![file("shop.yaml", SHOP), file("together.yaml", TOGETHER)];
    service.load(read(files, DomainFiles::One).expect("the files above are valid"));
    (service, clock)
}
