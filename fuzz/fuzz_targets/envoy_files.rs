//! Arbitrary strings as configuration files for Envoy's rate limit service. They must be rejected
//! with printable errors, or loaded as rules that can be used to decide requests, even after a
//! reload.
//!
//! The first byte determines whether several files may define the same domain. A zero byte ends a
//! file.

#![no_main]

use std::sync::Arc;

use futures_util::FutureExt as _;
use libfuzzer_sys::fuzz_target;
use tidegate::Clock;
use tidegate_config::envoy::{DomainFiles, RlsSettings};
use tidegate_core::{MemoryBounds, MemoryStore, RuleSet, Timestamp};
use tidegate_envoy::{Descriptor, File, RateLimitRequest, RateLimitService, read};
use tidegate_limiter::ServerLimiter;

fuzz_target!(|input: (bool, &str)| {
    let (is_merged, text) = input;
    let merging = if is_merged {
        DomainFiles::Merged
    } else {
        DomainFiles::One
    };
    let files = || {
        let parts = text.split('\0').enumerate();
        parts
            .map(|(at, text)| File {
                name: format!("{at}.yaml"),
                text: text.to_owned(),
            })
            .collect()
    };
    match read(files(), merging) {
        Err(mistakes) => {
            assert!(!mistakes.is_empty(), "an error has a message");
            assert!(
                mistakes
                    .iter()
                    .all(|mistake| !mistake.to_string().is_empty())
            );
        }
        Ok(loaded) => {
            let service = service();
            let domains = loaded.domains();
            service.load(loaded);
            assert_eq!(service.domains(), u64::try_from(domains).expect("few"));
            ask(&service);
            let again = read(files(), merging).expect("valid files can be read again");
            service.load(again);
            ask(&service);
        }
    }
});

fn service() -> RateLimitService {
    let bounds = MemoryBounds {
        max_keys: 100,
        ..MemoryBounds::default()
    };
    let clock = Clock::manual(Timestamp::from_micros(1_700_000_040_000_000));
    let limiter = ServerLimiter::new(RuleSet::default(), MemoryStore::new(bounds), clock);
    RateLimitService::new(Arc::new(limiter), RlsSettings::default())
}

/// Decides requests that match the rules in the seeds. Any decision is accepted.
fn ask(service: &RateLimitService) {
    let one = |key: &str, value: &str| (key.to_owned(), value.to_owned());
    let descriptor = |entries| Descriptor {
        entries,
        ..Descriptor::default()
    };
    for domain in ["d", "shop", "api"] {
        let request = RateLimitRequest {
            domain: domain.to_owned(),
            descriptors: vec![
                descriptor(vec![one("k", "v")]),
                descriptor(vec![one("k", "")]),
                descriptor(vec![one("k", "v"), one("k", "v")]),
                descriptor(vec![one("api_key", "vip"), one("path", "/api/x")]),
            ],
            hits_addend: 1,
        };
        let answered = service.should_rate_limit(&request).now_or_never();
        let answered = answered.expect("in memory a decision never suspends");
        let answer = answered.expect("the request is valid, and there is a configuration");
        assert_eq!(answer.statuses.len(), 4);
    }
}
