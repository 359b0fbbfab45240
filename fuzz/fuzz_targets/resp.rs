//! Arbitrary bytes on a Redis protocol connection. They must get a reply, without a panic. Another
//! server in the same state must give the same reply.

#![no_main]

use libfuzzer_sys::fuzz_target;
use tidegate::Clock;
use tidegate_core::{MemoryBounds, MemoryStore, RuleSet, Timestamp};
use tidegate_limiter::ServerLimiter;
use tidegate_server::listener::resp;

fuzz_target!(|input: &[u8]| {
    assert_eq!(answer(input), answer(input));
});

fn answer(input: &[u8]) -> Vec<u8> {
    let store = MemoryStore::new(MemoryBounds {
        max_keys: 100,
        ..MemoryBounds::default()
    });
    let limiter = ServerLimiter::new(
        RuleSet::default(),
        store,
        Clock::manual(Timestamp::from_micros(1)),
    );
    resp::transcript(&limiter, input)
}
