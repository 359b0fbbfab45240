//! Tests of reservations: `/v1/reserve`, `/v1/settle` and `/v1/renew`.

use std::{sync::Barrier, thread};

use futures_util::FutureExt as _;
use serde_json::{Value, json};

use crate::listener::TestListener;

const RULES: &str = r"
rules:
  - name: tokens
    key: customer
    limits: 10000/min
  - name: requests
    key: customer
    cost: 1
    limits: 100/min
  - name: slots
    when: {path: /slow}
    key: customer
    cost: 1
    limits: {algorithm: concurrency, limit: 1, lease: 20s}
";

fn reserve(listener: &TestListener, cost: u64, ttl: &str) -> (u16, Value) {
    let body = format!(r#"{{"entries": {{"customer": "acme"}}, "cost": {cost}, "ttl": "{ttl}"}}"#);
    listener.verdict("/v1/reserve", &body)
}

fn token_of(verdict: &Value) -> &str {
    verdict["reservation"].as_str().unwrap()
}

fn settle(listener: &TestListener, token: &str, cost: u64) -> (u16, Value) {
    let body = json!({"reservation": token, "cost": cost}).to_string();
    listener.verdict("/v1/settle", &body)
}

/// Returns the remaining units under the rules `tokens` and `requests`.
fn remaining(listener: &TestListener) -> [u64; 2] {
    let body = r#"{"entries": {"customer": "acme"}, "cost": 1}"#;
    let (_, verdict) = listener.verdict("/v1/peek", body);
    let left = |rule: &str| {
        let limits = verdict["limits"].as_array().unwrap();
        let line = limits.iter().find(|line| line["rule"] == rule).unwrap();
        // A peek reports the units that would remain after the request.
        line["remaining"].as_u64().unwrap() + 1
    };
    [left("tokens"), left("requests")]
}

fn expire_reservations(listener: &TestListener) {
    // With the memory store, the future is ready at the first poll.
    let expiry = listener.limiter.expire_reservations();
    expiry.now_or_never().unwrap();
}

#[test]
fn a_settled_reservation_releases_what_was_not_used() {
    let listener = TestListener::open(RULES);
    let (status, verdict) = reserve(&listener, 2_000, "30s");
    assert_eq!((status, &verdict["allowed"]), (200, &json!(true)));
    assert_eq!(verdict["expires_in_ms"], 30_000);
    assert_eq!(remaining(&listener), [8_000, 99]);
    let settled = settle(&listener, token_of(&verdict), 1_234);
    let expected = json!({"settled": 1_234, "released": 766, "over": 0});
    assert_eq!(settled, (200, expected));
    assert_eq!(remaining(&listener), [8_766, 99]);
    let (status, again) = settle(&listener, token_of(&verdict), 0);
    assert_eq!(status, 404);
    assert_eq!(
        again["detail"],
        "reservation: was already settled, or was made by another server or before a restart of this server"
    );
    assert_eq!(remaining(&listener), [8_766, 99], "a token settles once");
    listener.at_millis(30_000);
    let (status, again) = settle(&listener, token_of(&verdict), 0);
    let ended = "reservation: has expired, or was already settled";
    assert_eq!((status, &again["detail"]), (404, &json!(ended)));
}

#[test]
fn a_cost_of_zero_cancels_every_charge() {
    let listener = TestListener::open(RULES);
    let (_, verdict) = reserve(&listener, 2_000, "30s");
    let expected = json!({"settled": 0, "released": 2_000, "over": 0});
    assert_eq!(settle(&listener, token_of(&verdict), 0), (200, expected));
    assert_eq!(remaining(&listener), [10_000, 100]);
}

/// The excess cost is charged only up to the limit, so the limit is never exceeded.
#[test]
fn a_higher_cost_is_charged_as_far_as_the_limit_admits() {
    let listener = TestListener::open(RULES);
    let (_, verdict) = reserve(&listener, 2_000, "30s");
    let expected = json!({"settled": 2_500, "released": 0, "over": 500});
    assert_eq!(
        settle(&listener, token_of(&verdict), 2_500),
        (200, expected)
    );
    assert_eq!(remaining(&listener), [7_500, 99]);
    let (_, verdict) = reserve(&listener, 7_000, "30s");
    let expected = json!({"settled": 7_500, "released": 0, "over": 1_000});
    assert_eq!(
        settle(&listener, token_of(&verdict), 8_000),
        (200, expected)
    );
    let (status, _) = reserve(&listener, 1, "30s");
    assert_eq!(status, 429);
}

#[test]
fn a_denied_request_has_no_reservation() {
    let listener = TestListener::open(RULES);
    let (status, verdict) = reserve(&listener, 10_001, "30s");
    assert_eq!((status, &verdict["reservation"]), (429, &Value::Null));
    assert_eq!(remaining(&listener), [10_000, 100]);
}

#[test]
fn an_expired_reservation_costs_nothing() {
    let listener = TestListener::open(RULES);
    let (_, verdict) = reserve(&listener, 2_000, "10s");
    listener.at_millis(9_999);
    expire_reservations(&listener);
    assert_eq!(remaining(&listener)[1], 99);
    listener.at_millis(10_000);
    expire_reservations(&listener);
    assert_eq!(remaining(&listener), [10_000, 100]);
    assert_eq!(settle(&listener, token_of(&verdict), 1).0, 404);
}

/// The task that refunds expired reservations may run late, but a token must not be accepted after
/// it has expired.
#[test]
fn a_reservation_cannot_be_settled_after_its_time() {
    let listener = TestListener::open(RULES);
    let (_, verdict) = reserve(&listener, 2_000, "10s");
    listener.at_millis(10_000);
    let (status, problem) = settle(&listener, token_of(&verdict), 2_000);
    assert_eq!(
        (status, &problem["detail"]),
        (404, &json!("reservation: has expired"))
    );
    assert_eq!(remaining(&listener), [10_000, 100]);
}

#[test]
fn an_expired_reservation_stays_charged_on_request() {
    let rules = format!("reservations: {{on_expiry: charge}}{RULES}");
    let listener = TestListener::open(&rules);
    reserve(&listener, 2_000, "1s");
    let slow = r#"{"entries": {"customer": "acme", "path": "/slow"}, "ttl": "1s"}"#;
    assert_eq!(listener.verdict("/v1/reserve", slow).0, 200);
    assert_eq!(listener.verdict("/v1/reserve", slow).0, 429);
    listener.at_millis(1_000);
    expire_reservations(&listener);
    assert_eq!(remaining(&listener)[1], 98);
    assert_eq!(
        listener.verdict("/v1/reserve", slow).0,
        200,
        "the slot is free"
    );
}

#[test]
fn a_renewed_reservation_expires_later() {
    let listener = TestListener::open(RULES);
    let (_, verdict) = reserve(&listener, 2_000, "10s");
    listener.at_millis(9_000);
    let body = json!({"reservation": token_of(&verdict), "ttl": "10s"}).to_string();
    let (status, renewed) = listener.verdict("/v1/renew", &body);
    assert_eq!((status, &renewed["expires_in_ms"]), (200, &json!(10_000)));
    listener.at_millis(18_999);
    expire_reservations(&listener);
    assert_eq!(settle(&listener, token_of(&renewed), 2_000).0, 200);
    assert_eq!(listener.verdict("/v1/renew", &body).0, 404);
}

/// A slot is free again when the reservation is settled or expires.
#[test]
fn a_reservation_holds_a_concurrency_slot() {
    let listener = TestListener::open(RULES);
    let body = r#"{"entries": {"customer": "acme", "path": "/slow"}, "ttl": "1h"}"#;
    let ask = || listener.verdict("/v1/reserve", body);
    let (_, first) = ask();
    assert_eq!(
        first["expires_in_ms"], 20_000,
        "the lease bounds the time to live"
    );
    assert_eq!(ask().0, 429);
    assert_eq!(settle(&listener, token_of(&first), 1).0, 200);
    let (status, second) = ask();
    assert_eq!(status, 200);
    listener.at_millis(15_000);
    let renewal = json!({"reservation": token_of(&second), "ttl": "20s"}).to_string();
    let (status, renewed) = listener.verdict("/v1/renew", &renewal);
    assert_eq!((status, &renewed["expires_in_ms"]), (200, &json!(20_000)));
    listener.at_millis(34_000);
    assert_eq!(ask().0, 429, "the lease was renewed with the reservation");
    listener.at_millis(35_000);
    expire_reservations(&listener);
    assert_eq!(ask().0, 200);
}

/// The limit counts only failures: each request makes a reservation before it runs, and cancels it
/// if the request succeeds.
#[test]
fn parallel_failures_never_exceed_their_limit() {
    const RULES: &str = "rules: [{name: login, key: account, limits: 5/h}]";
    let listener = TestListener::open(RULES);
    let body = r#"{"entries": {"account": "mallory"}}"#;
    let barrier = Barrier::new(60);
    let admitted: usize = thread::scope(|scope| {
        let guesses: Vec<_> = (0..60)
            .map(|_| {
                scope.spawn(|| {
                    barrier.wait();
                    let (status, verdict) = listener.verdict("/v1/reserve", body);
                    if status != 200 {
                        return 0;
                    }
                    // The password guess fails, so the reservation is charged.
                    assert_eq!(settle(&listener, token_of(&verdict), 1).0, 200);
                    1
                })
            })
            .collect();
        guesses.into_iter().map(|guess| guess.join().unwrap()).sum()
    });
    assert_eq!(admitted, 5);
    let other = r#"{"entries": {"account": "alice"}}"#;
    for _ in 0..50 {
        let (status, verdict) = listener.verdict("/v1/reserve", other);
        assert_eq!(status, 200, "a success costs nothing");
        settle(&listener, token_of(&verdict), 0);
    }
}

#[test]
fn outstanding_reservations_are_bounded() {
    let listener = TestListener::open(&format!("reservations: {{max: 2}}{RULES}"));
    let (_, first) = reserve(&listener, 1, "30s");
    assert_eq!(reserve(&listener, 1, "30s").0, 200);
    let (status, problem) = reserve(&listener, 1, "30s");
    assert_eq!(status, 503);
    assert!(
        problem["detail"]
            .as_str()
            .unwrap()
            .contains("reservations.max")
    );
    assert_eq!(
        remaining(&listener)[1],
        98,
        "a rejected request is not charged"
    );
    assert_eq!(settle(&listener, token_of(&first), 1).0, 200);
    assert_eq!(reserve(&listener, 1, "30s").0, 200);
    let off = TestListener::open(&format!("reservations: off{RULES}"));
    assert_eq!(reserve(&off, 1, "30s").0, 404);
    // A token from before the restart is not malformed: the server does not make reservations.
    for path in ["/v1/settle", "/v1/renew"] {
        let body = match path {
            "/v1/settle" => json!({"reservation": token_of(&first), "cost": 1}),
            _ => json!({"reservation": token_of(&first)}),
        };
        let answer = off.post(path, &body.to_string());
        assert_eq!(answer.status, 404, "{path}: {answer:?}");
        assert_eq!(
            answer.problem(),
            "reservations are off; remove `reservations: off` from the rules file, and restart the \
             server"
        );
    }
}

#[test]
fn mistakes_name_their_field() {
    let listener = TestListener::open(RULES);
    let (_, verdict) = reserve(&listener, 5, "30s");
    let token = token_of(&verdict);
    let mut forged = token.to_owned();
    let last = if forged.ends_with('A') { "B" } else { "A" };
    forged.replace_range(forged.len() - 1.., last);
    let other = TestListener::open(RULES);
    let too_much = format!(r#"{{"reservation": "{token}", "cost": 1000000000000000}}"#);
    for (path, body, status, expected) in [
        ("/v1/settle", "{}", 400, "reservation: is missing"),
        (
            "/v1/settle",
            "",
            400,
            "body: is empty; expected an object with `reservation` and `cost`, or no body and the \
             headers Tidegate-Reservation and Tidegate-Cost",
        ),
        (
            "/v1/settle",
            r#"{"reservation": "x", "cost": 0.0}"#,
            400,
            "cost: must be an integer from 0 to 999999999999999 without a decimal point or an \
             exponent; write 0",
        ),
        (
            "/v1/settle",
            r#"{"reservation": "x", "cost": 1}"#,
            400,
            "reservation: is not a token of this server",
        ),
        (
            "/v1/settle",
            &json!({"reservation": forged, "cost": 1}).to_string(),
            400,
            "reservation: is not a token of this server",
        ),
        (
            "/v1/settle",
            &json!({"reservation": token}).to_string(),
            400,
            "cost: is missing",
        ),
        (
            "/v1/settle",
            &json!({"reservation": token, "cost": -1}).to_string(),
            400,
            "cost: must be an integer from 0 to 999999999999999, got -1",
        ),
        (
            "/v1/settle",
            &too_much,
            400,
            "cost: must be an integer from 0 to 999999999999999, got 1000000000000000",
        ),
        (
            "/v1/settle",
            r#"{"reservaton": "x", "cost": 1}"#,
            400,
            "reservaton: unknown field; did you mean",
        ),
        (
            "/v1/renew",
            &json!({"reservation": token, "ttl": "0s"}).to_string(),
            400,
            "ttl: ",
        ),
        (
            "/v1/reserve",
            r#"{"entries": {"customer": "acme"}, "ttl": 5}"#,
            400,
            "ttl: expected a duration",
        ),
        (
            "/v1/reserve",
            r#"{"entries": {"customer": "acme"}, "cost": 0}"#,
            400,
            "cost: ",
        ),
    ] {
        let answer = listener.post(path, body);
        assert_eq!(answer.status, status, "{body}: {answer:?}");
        let detail = answer.problem();
        assert!(detail.starts_with(expected), "{body}: {detail}");
    }
    assert_eq!(
        settle(&other, token, 5).0,
        404,
        "the token belongs to another server"
    );
    assert_eq!(
        settle(&listener, token, 5).0,
        200,
        "no mistake has ended the reservation"
    );
}

/// A proxy settles with headers, because it cannot write a request body.
#[test]
fn a_proxy_reserves_and_settles_with_headers() {
    let listener =
        TestListener::open("rules: [{name: login, when: {path: /login}, key: ip, limits: 1/h}]");
    let forwarded = [("X-Original-URI", "/login"), ("X-Real-IP", "192.0.2.7")];
    let authorize = || {
        let path = "/v1/authorize?proxy=nginx&reserve=30s";
        listener.connect().ask("GET", path, &forwarded, b"")
    };
    let settle = |token: &str, cost: &str| {
        let headers = [("Tidegate-Reservation", token), ("Tidegate-Cost", cost)];
        listener.connect().ask("POST", "/v1/settle", &headers, b"")
    };
    let admitted = authorize();
    assert_eq!(admitted.status, 200, "{admitted:?}");
    let token = admitted.header("tidegate-reservation").unwrap();
    let denied = authorize();
    assert_eq!(
        (denied.status, denied.header("tidegate-reservation")),
        (429, None)
    );
    assert_eq!(
        settle(token, "-1").problem(),
        "Tidegate-Cost: must be an integer from 0 to 999999999999999, got \"-1\""
    );
    let cost = [("Tidegate-Cost", "0")];
    let incomplete = listener.connect().ask("POST", "/v1/settle", &cost, b"");
    assert_eq!(
        incomplete.problem(),
        "Tidegate-Reservation: is missing; set it to the value of this header in the response of /v1/authorize"
    );
    assert_eq!(
        settle("", "0").problem(),
        "Tidegate-Reservation: is empty; a request without a reservation must not be settled"
    );
    assert_eq!(settle(token, "0").status, 200);
    assert_eq!(authorize().status, 200, "the first login has succeeded");
    for (duration, problem) in [
        ("soon", "expected a duration with its unit, such as 500ms"),
        ("30", "expected a duration with its unit, such as 500ms"),
        ("0s", "a duration must be longer than zero, got \"0s\""),
        ("999us", "must be at least 1ms"),
    ] {
        let target = format!("/v1/authorize?reserve={duration}");
        let wrong = listener.connect().ask("GET", &target, &forwarded, b"");
        let expected = format!("reserve: {problem}");
        assert!(wrong.problem().starts_with(&expected), "{wrong:?}");
    }
}
