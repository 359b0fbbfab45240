//! Tests how Envoy applies the responses of the rate limit service.

use super::{LIMITS, Pair};
use crate::support::{Answer, Ask, count_admitted};

/// The limits of both descriptors, in the format of Envoy's header `x-ratelimit-limit`.
const BOTH: &str = ", 1000;w=31536000, 3;w=31536000;name=\"per-key\"";

fn remaining(answer: &Answer) -> (u16, &str, &str) {
    let limit = answer.header("x-ratelimit-limit");
    (answer.status, limit, answer.header("x-ratelimit-remaining"))
}

#[test]
fn over_the_limit_is_429_and_every_response_has_the_remaining_hits() {
    let pair = Pair::start(LIMITS);
    let ask = || pair.ask("/").header("x-api-key", "alice").send();
    for left in ["2", "1", "0"] {
        let answer = ask();
        assert_eq!(remaining(&answer), (200, format!("3{BOTH}").as_str(), left));
        assert_eq!(answer.header("x-envoy-ratelimited"), "");
        let reset = answer.header("x-ratelimit-reset").parse::<u32>().unwrap();
        assert!((1..=31_536_000).contains(&reset), "{reset}");
    }
    let denied = ask();
    assert_eq!(remaining(&denied), (429, format!("3{BOTH}").as_str(), "0"));
    assert_eq!(denied.header("x-envoy-ratelimited"), "true");

    let bob = pair.ask("/").header("x-api-key", "bob").send();
    assert_eq!(bob.status, 200, "another key has its own count");
    let address = pair
        .ask("/")
        .header("x-forwarded-for", "203.0.113.9")
        .send();
    assert_eq!(remaining(&address), (200, "1000, 1000;w=31536000", "999"));
}

#[test]
fn concurrent_requests_are_admitted_exactly() {
    let limits = LIMITS.replace(
        "unit: year, requests_per_unit: 3}",
        "unit: year, requests_per_unit: 40}",
    );
    assert_ne!(limits, LIMITS);
    let pair = Pair::start(&limits);
    let fronts = ["open", "closed"].map(|name| pair.envoy.listener(name));
    let ask = |client: usize| Ask::get(fronts[client % 2], "/").header("x-api-key", "alice");
    assert_eq!(
        count_admitted(160, ask),
        40,
        "160 requests to both listeners"
    );
}

#[test]
fn a_limit_in_the_request_overrides_the_rules() {
    let pair = Pair::start(LIMITS);
    let statuses = [(); 4].map(|()| {
        let answer = pair.ask("/override").send();
        assert_eq!(answer.header("x-ratelimit-limit"), "3, 3;w=3600");
        answer.status
    });
    assert_eq!(statuses, [200, 200, 200, 429]);
}

#[test]
fn the_cost_is_in_a_header_and_can_be_refunded() {
    let pair = Pair::start(LIMITS);
    let ask = |path: &str, cost: &str| {
        let answer = pair.ask(path).header("x-cost", cost).send();
        (
            answer.status,
            answer.header("x-ratelimit-remaining").to_owned(),
        )
    };
    let left = |left: &str| (200, left.to_owned());
    assert_eq!(ask("/cost", "4"), left("6"));
    assert_eq!(ask("/cost", "0"), left("6"), "0 hits query the status");
    assert_eq!(ask("/cost", "6"), left("0"));
    assert_eq!(ask("/cost", "1").0, 429);
    assert_eq!(ask("/refund", "6").0, 200);
    assert_eq!(
        ask("/cost", "5"),
        left("0"),
        "11 were charged and 6 refunded"
    );
    assert_eq!(ask("/refund", "1000").0, 200);
    assert_eq!(
        ask("/cost", "1"),
        left("9"),
        "a refund is at most what was charged"
    );
}
