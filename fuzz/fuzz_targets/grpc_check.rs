//! Arbitrary messages to `Check`, in sequence. Each gets a response or an error with a reason,
//! never a panic, and a service in the same state gives the same one.

#![no_main]

#[allow(dead_code, reason = "the sender does not matter here")]
mod frames;

use std::{net::Ipv4Addr, sync::Arc};

use frames::frames;
use libfuzzer_sys::fuzz_target;
use tidegate::Clock;
use tidegate_config::Config;
use tidegate_core::{MemoryBounds, MemoryStore, Timestamp};
use tidegate_envoy::grpc::{AuthorizationContext, GrpcContext, check_transcript};
use tidegate_limiter::ServerLimiter;

/// The initial time, in microseconds: the first second of a minute.
const START: u64 = 1_700_000_040_000_000;

const RULES: &str = "
clients: {proxies: 1}
entries: {key: {of: header.authorization, split: '.'}}
rules:
  - {name: ip, key: [ip, method], limits: [2/min]}
  - {name: path, when: {path: /a/*}, key: [customer], limits: [1/s, 3/min]}
  - {name: cookie, when: {host: h}, key: [cookie.c], limits: [1/s]}
  - {name: query, when: {scheme: https}, key: [query.q], limits: [1/s]}
  - {name: full, when: {path: /b}, limits: [{algorithm: concurrency, limit: 1}]}
";

fuzz_target!(|input: &[u8]| {
    let services = [service(), service()];
    let mut now = START;
    for frame in frames(input).take(64) {
        now += frame.seconds * 1_000_000;
        let answers = services.each_ref().map(|(context, clock)| {
            clock.set(Timestamp::from_micros(now));
            check_transcript(context, Ipv4Addr::LOCALHOST.into(), frame.message)
        });
        assert_eq!(answers[0], answers[1]);
        match &answers[0] {
            Ok(answer) => assert!(!answer.is_empty(), "an answer has an outcome"),
            Err((code, text)) => {
                assert_eq!(*code, 3, "the code of the documentation");
                assert!(!text.is_empty(), "an error has a message");
            }
        }
    }
});

fn service() -> (GrpcContext, Clock) {
    let config = Config::parse(RULES).expect("the rules above are valid");
    let clock = Clock::manual(Timestamp::from_micros(START));
    let store = MemoryStore::new(MemoryBounds {
        max_keys: 100,
        ..MemoryBounds::default()
    });
    let limiter = ServerLimiter::new(config.rules, store, clock.clone());
    let context = GrpcContext {
        limiter: Arc::new(limiter),
        quotas: Arc::default(),
        rate_limits: None,
        authorization: Some(AuthorizationContext {
            identity: Arc::new(config.identity),
            headers: config.headers,
        }),
    };
    (context, clock)
}
