//! Arbitrary bytes on a SPOP connection, after a handshake or without one. They get an answer,
//! never a panic, and a server in the same state gives the same answer.
//!
//! If the first byte is odd, a HAPROXY-HELLO comes before the other bytes.
//!
//! The seeds of the corpus are the frames that a HAProxy 2.6 has sent to Tidegate.

#![no_main]

use libfuzzer_sys::fuzz_target;
use tidegate::Clock;
use tidegate_config::Config;
use tidegate_core::{MemoryBounds, MemoryStore, Timestamp};
use tidegate_limiter::ServerLimiter;
use tidegate_server::listener::spop;

const RULES: &str = "
headers: {legacy: delta}
rules:
  - {name: ip, key: [ip], limits: [2/min]}
  - {name: path, when: {path: /a/*}, key: [header.x], limits: [1/s, 3/min]}
  - {name: full, when: {path: /b}, limits: [{algorithm: concurrency, limit: 1}]}
";

/// The HAPROXY-HELLO of HAProxy, with a maximum of 512 bytes.
const HELLO: &[u8] = b"\0\0\0\x4a\x01\0\0\0\x01\0\0\x12supported-versions\x08\x032.0\x0emax-frame-size\x03\xf0\x11\x0ccapabilities\x08\x0apipelining";

fuzz_target!(|input: &[u8]| {
    let Some((first, rest)) = input.split_first() else {
        return;
    };
    let mut bytes = Vec::new();
    if first % 2 == 1 {
        bytes.extend_from_slice(HELLO);
    }
    bytes.extend_from_slice(rest);
    let answers = answer(&bytes);
    assert_eq!(answers, answer(&bytes));
    if first % 2 == 1 {
        assert_eq!(answers[4], 101, "the handshake is accepted");
    }
    // Without a negotiated length, an AGENT-HELLO or an AGENT-DISCONNECT fits into any frame.
    assert_frames(&answers, if first % 2 == 1 { 512 } else { 65_532 });
});

/// Every answer consists of complete frames of the agent, with at most `max_bytes`.
fn assert_frames(mut answers: &[u8], max_bytes: usize) {
    while let Some((length, rest)) = answers.split_first_chunk() {
        let length = u32::from_be_bytes(*length) as usize;
        assert!(length <= max_bytes && (101..=103).contains(&rest[0]));
        answers = &rest[length..];
    }
    assert!(answers.is_empty());
}

fn answer(input: &[u8]) -> Vec<u8> {
    let config = Config::parse(RULES).expect("the rules above are valid");
    let store = MemoryStore::new(MemoryBounds {
        max_keys: 100,
        ..MemoryBounds::default()
    });
    let clock = Clock::manual(Timestamp::from_micros(1));
    let limiter = ServerLimiter::new(config.rules, store, clock);
    spop::transcript(&limiter, config.headers, input)
}
