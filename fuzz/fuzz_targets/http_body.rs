//! Arbitrary bytes as a request body. The response must be a verdict, a settlement or problem
//! details (RFC 9457), without a panic. Another server in the same state must give the same
//! response, on a thread that has not parsed a body before.
//!
//! The first byte selects the endpoint: `c`heck, `p`eek, `t`hrottle, `r`eserve, `s`ettle or
//! re`n`ew. Settling or renewing a reservation never succeeds, because no input contains a validly
//! sealed token.

#![no_main]

use std::{sync::Arc, thread};

use libfuzzer_sys::{Corpus, fuzz_target};
use serde_json::Value;
use tidegate::Clock;
use tidegate_config::{Config, ReservationsConfig};
use tidegate_core::{MemoryBounds, MemoryStore, Timestamp};
use tidegate_limiter::{ServerLimiter, reservations::Reservations};
use tidegate_server::listener::http::{HttpEndpoint, transcript};

/// The rules for check and peek.
const RULES: &str = "
rules:
  - {name: paths, when: {path: /api/**}, key: [customer], limits: [2/s, 20/min]}
  - {name: methods, when: {method: [GET, POST]}, key: [ip, user], limits: [{algorithm: gcra, rate: 1/s, burst: 3}]}
  - {name: costly, when: {weight: {present: true}}, cost: weight, limits: [{algorithm: leaky_bucket, capacity: 9, leak: 1/s, queue: true}]}
";

fuzz_target!(|input: &[u8]| -> Corpus {
    let Some((first, body)) = input.split_first() else {
        return Corpus::Reject;
    };
    let endpoint = match first {
        b'c' => HttpEndpoint::Check,
        b'p' => HttpEndpoint::Peek,
        b't' => HttpEndpoint::Throttle,
        b'r' => HttpEndpoint::Reserve,
        b's' => HttpEndpoint::Settle,
        b'n' => HttpEndpoint::Renew,
        _ => return Corpus::Reject,
    };
    let (server, same) = (limiter(), limiter());
    let answer = transcript(&server, endpoint, body);
    // Each thread has its own cache of request templates, so a new thread starts with an empty
    // cache.
    let anew = thread::scope(|scope| {
        let reading = scope.spawn(|| transcript(&same, endpoint, body));
        reading.join().expect("a transcript, or a printed finding")
    });
    if endpoint == HttpEndpoint::Reserve {
        // The reservation tokens differ, so only the statuses are compared.
        assert_eq!(answer.0, anew.0);
    } else {
        assert_eq!(answer, anew);
    }
    if matches!(endpoint, HttpEndpoint::Settle | HttpEndpoint::Renew) {
        assert_eq!(answer.0, 400, "a forged token is accepted");
    }
    assert_sound(answer.0, &answer.1);
    if endpoint == HttpEndpoint::Peek {
        assert_eq!(
            server.local_store().stats().keys,
            0,
            "a peek leaves a key behind"
        );
        let check = transcript(&server, HttpEndpoint::Check, body);
        assert_eq!(answer, check, "a peek answers what the check answers");
    }
    Corpus::Keep
});

fn limiter() -> Arc<ServerLimiter> {
    let rules = Config::parse(RULES)
        .expect("the rules above are valid")
        .rules;
    let store = MemoryStore::new(MemoryBounds {
        max_keys: 100,
        ..MemoryBounds::default()
    });
    let clock = Clock::manual(Timestamp::from_micros(1));
    let reservations = Reservations::new(ReservationsConfig::default(), Some("secret"))
        .expect("a key that is given needs no random bytes");
    Arc::new(ServerLimiter::new(rules, store, clock).with_reservations(reservations))
}

/// Checks that a verdict is consistent with its status, and that a problem has a `detail` field.
fn assert_sound(status: u16, body: &[u8]) {
    let document: Value = serde_json::from_slice(body).expect("every answer is JSON");
    match status {
        200 => assert_eq!(document["allowed"], true),
        429 => assert_eq!(document["allowed"], false),
        400 => assert!(!document["detail"].as_str().unwrap_or_default().is_empty()),
        other => panic!("status {other}"),
    }
}
