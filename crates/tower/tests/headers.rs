//! Tests the headers written for verdicts. A client that follows them never retries too early.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]
use http::HeaderMap;
use proptest::prelude::*;
use tidegate_core::{
    AlgorithmName, Charge, Cost, Decision, Exactness, LimitSpec, Limits, Outcome, QuotaUnit,
    RetryAfter, Span, StoreDecision, Timestamp, Verdict, notation,
};
use tidegate_tower::{HeaderWriter, Legacy, RuleNames};

const NOW: Timestamp = Timestamp::from_micros(1_770_000_000_400_000);

fn limits(rule: Option<&str>, rates: &[&str]) -> Limits {
    let build = |rate| {
        LimitSpec::shorthand(notation::rate(rate).unwrap(), AlgorithmName::TokenBucket)
            .build()
            .unwrap()
    };
    let limits = Limits::new(rates.iter().map(|rate| build(rate)).collect()).unwrap();
    match rule {
        Some(rule) => limits.named(rule),
        None => limits,
    }
}

fn admitted(limit: u64, remaining: u64, reset: Span) -> Outcome {
    let retry_after = RetryAfter::NOW;
    Outcome {
        allowed: true,
        over_limit: false,
        limit,
        remaining,
        reset_after: reset,
        retry_after,
        delay: Span::ZERO,
        excess: 0,
    }
}

fn denied(limit: u64, retry_after: RetryAfter) -> Outcome {
    let reset_after = Span::from_secs(90);
    Outcome {
        allowed: false,
        over_limit: false,
        limit,
        remaining: 0,
        reset_after,
        retry_after,
        delay: Span::ZERO,
        excess: 0,
    }
}

fn headers(
    decision: &Decision,
    limits: &[&Limits],
    outcomes: &[Outcome],
    legacy: Legacy,
) -> HeaderMap {
    let charge = |limits| Charge::new(b"k", limits, Cost::ONE).unwrap();
    let charges: Vec<_> = limits.iter().map(|limits| charge(limits)).collect();
    let verdict = Verdict::of(decision, &charges, outcomes);
    let mut headers = HeaderMap::new();
    HeaderWriter::new(true, legacy)
        .with_rule_names(RuleNames::Shown)
        .write(&verdict, NOW, &mut headers);
    headers
}

fn line<'h>(headers: &'h HeaderMap, name: &str) -> Option<&'h str> {
    headers.get(name).map(|value| value.to_str().unwrap())
}

#[test]
fn an_admitted_response_shows_the_remaining_quota() {
    let limits = limits(Some("api"), &["20/min"]);
    let outcomes = [admitted(20, 19, Span::from_millis(3_000))];
    let headers = headers(&Decision::Admitted, &[&limits], &outcomes, Legacy::Off);
    assert_eq!(
        line(&headers, "ratelimit-policy"),
        Some("\"api\";q=20;w=60")
    );
    assert_eq!(line(&headers, "ratelimit"), Some("\"api\";r=19;t=3"));
    assert_eq!(headers.len(), 2, "{headers:?}");
}

/// Half of one request per minute is one request in two minutes.
#[test]
fn a_local_share_does_not_show_the_full_reset_time() {
    let limits = limits(Some("api"), &["1/min"]);
    let charges = [Charge::new(b"k", &limits, Cost::ONE).unwrap()];
    let outcomes = [admitted(1, 0, Span::from_secs(120))];
    let decided = StoreDecision {
        exactness: Exactness::Local,
        ..StoreDecision::in_memory(Decision::Admitted)
    };
    let verdict = decided.verdict(&charges, &outcomes);
    let mut headers = HeaderMap::new();
    HeaderWriter::default().write(&verdict, NOW, &mut headers);
    assert_eq!(line(&headers, "ratelimit-policy"), Some("\"1/min\";q=1"));
}

#[test]
fn a_denied_response_has_retry_after() {
    let limits = limits(Some("api"), &["1/s", "20/min", "5/100ms"]);
    let outcomes = [
        denied(1, RetryAfter::After(Span::from_millis(400))),
        admitted(20, 7, Span::from_secs(39)),
        denied(5, RetryAfter::After(Span::from_micros(20_000))),
    ];
    let headers = headers(&Decision::Limited, &[&limits], &outcomes, Legacy::Delta);
    let policy = "\"api:1/s\";q=1;w=1, \"api:5/100ms\";q=5, \"api:20/min\";q=20;w=60";
    assert_eq!(line(&headers, "ratelimit-policy"), Some(policy));
    // The `t` of the minute limit is left out, because it would be later than `Retry-After`.
    assert_eq!(
        line(&headers, "ratelimit"),
        Some("\"api:1/s\";r=0;t=1, \"api:5/100ms\";r=0;t=1, \"api:20/min\";r=7")
    );
    assert_eq!(line(&headers, "retry-after"), Some("1"));
    assert_eq!(line(&headers, "x-ratelimit-limit"), Some("1"));
    assert_eq!(line(&headers, "x-ratelimit-remaining"), Some("0"));
    assert_eq!(line(&headers, "x-ratelimit-reset"), Some("90"));
}

#[test]
fn a_permanent_denial_has_no_retry_after() {
    let limits = limits(None, &["5/s"]);
    let headers = headers(
        &Decision::Limited,
        &[&limits],
        &[denied(5, RetryAfter::Never)],
        Legacy::Epoch,
    );
    assert_eq!(line(&headers, "ratelimit"), Some("\"default\";r=0"));
    assert_eq!(line(&headers, "retry-after"), None);
    assert_eq!(line(&headers, "x-ratelimit-reset"), Some("1770000091"));
}

#[test]
fn a_blocked_response_shows_only_the_end_of_the_block() {
    let limits = limits(Some("api"), &["1/s"]);
    let until = Some(NOW.after(Span::from_millis(59_001)));
    let blocked = Decision::Blocked {
        charge: 0,
        until,
        retry_after: RetryAfter::After(Span::from_millis(59_001)),
    };
    let headers = headers(&blocked, &[&limits], &[], Legacy::Delta);
    assert_eq!(line(&headers, "retry-after"), Some("60"));
    assert_eq!(headers.len(), 1);
}

#[test]
fn shadow_limits_are_not_in_the_headers() {
    let (enforced, shadow) = (
        limits(Some("seen"), &["5/s"]),
        limits(Some("unseen"), &["1/s"]).in_shadow(true),
    );
    let outcomes = [
        denied(1, RetryAfter::After(Span::from_secs(1))),
        admitted(5, 4, Span::from_millis(200)),
    ];
    let headers = headers(
        &Decision::Admitted,
        &[&shadow, &enforced],
        &outcomes,
        Legacy::Off,
    );
    assert_eq!(line(&headers, "ratelimit"), Some("\"seen\";r=4;t=1"));
    assert_eq!(line(&headers, "retry-after"), None);
}

#[test]
fn an_empty_bucket_shows_the_time_of_its_next_token() {
    let limits = limits(Some("login"), &["10/10h"]);
    let outcomes = [admitted(10, 0, Span::from_secs(35_000))];
    let headers = headers(&Decision::Admitted, &[&limits], &outcomes, Legacy::Off);
    assert_eq!(line(&headers, "ratelimit"), Some("\"login\";r=0;t=2600"));
}

fn concurrency() -> Limits {
    let spec = LimitSpec {
        algorithm: Some(AlgorithmName::Concurrency),
        limit: Some(2),
        lease: Some(Span::from_secs(60)),
        ..LimitSpec::default()
    };
    let limits = Limits::new(vec![spec.build().unwrap()]).unwrap();
    limits.named("in-flight")
}

/// A slot becomes free as soon as its request ends, so more units are available before the lease
/// expires.
#[test]
fn an_allowed_answer_of_a_concurrency_limit_has_no_reset() {
    let limits = concurrency();
    for remaining in [1, 0] {
        let outcomes = [admitted(2, remaining, Span::from_secs(60))];
        for legacy in [Legacy::Delta, Legacy::Epoch] {
            let headers = headers(&Decision::Admitted, &[&limits], &outcomes, legacy);
            let expected = format!("\"in-flight\";r={remaining}");
            assert_eq!(line(&headers, "ratelimit"), Some(&*expected));
            assert_eq!(line(&headers, "x-ratelimit-limit"), Some("2"));
            let remaining = remaining.to_string();
            assert_eq!(line(&headers, "x-ratelimit-remaining"), Some(&*remaining));
            assert_eq!(line(&headers, "x-ratelimit-reset"), None);
        }
    }
}

#[test]
fn a_denial_of_a_concurrency_limit_has_the_estimate_for_every_time() {
    let limits = concurrency();
    let outcomes = [denied(2, RetryAfter::After(Span::from_millis(1_500)))];
    let headers = headers(&Decision::Limited, &[&limits], &outcomes, Legacy::Delta);
    assert_eq!(
        line(&headers, "ratelimit-policy"),
        Some("\"in-flight\";q=2;qu=\"concurrent-requests\"")
    );
    assert_eq!(line(&headers, "ratelimit"), Some("\"in-flight\";r=0;t=2"));
    assert_eq!(line(&headers, "retry-after"), Some("2"));
    assert_eq!(line(&headers, "x-ratelimit-reset"), Some("2"));
}

/// The names of the units are registered by the draft.
#[test]
fn a_rule_that_counts_bytes_announces_its_unit() {
    let limits = limits(None, &["100000/min"]).counting_in(QuotaUnit::ContentBytes);
    let outcomes = [admitted(100_000, 99_000, Span::from_secs(1))];
    let headers = headers(&Decision::Admitted, &[&limits], &outcomes, Legacy::Off);
    assert_eq!(
        line(&headers, "ratelimit-policy"),
        Some("\"default\";q=100000;qu=\"content-bytes\";w=60")
    );
    assert_eq!(line(&headers, "ratelimit"), Some("\"default\";r=99000;t=1"));
}

#[test]
fn every_rule_name_makes_a_valid_header() {
    let limits = limits(Some("a\"b\\c\r\n\u{e9}"), &["1/s"]);
    let outcomes = [admitted(1, 0, Span::from_secs(1))];
    let headers = headers(&Decision::Admitted, &[&limits], &outcomes, Legacy::Off);
    assert_eq!(
        line(&headers, "ratelimit"),
        Some("\"a\\\"b\\\\c???\";r=0;t=1")
    );
}

fn any_outcome() -> impl Strategy<Value = Outcome> {
    let retry = prop_oneof![
        Just(RetryAfter::Never),
        any::<u64>().prop_map(|micros| RetryAfter::After(Span::from_micros(micros)))
    ];
    (
        any::<bool>(),
        retry,
        any::<u64>(),
        any::<u64>(),
        any::<u64>(),
    )
        .prop_map(|(allowed, retry, limit, remaining, reset)| {
            if allowed {
                admitted(limit, remaining, Span::from_micros(reset))
            } else {
                denied(limit, retry)
            }
        })
}

/// Returns the values of the parameter `name` in `field`, in order.
fn parameters(field: &str, name: &str) -> Vec<u64> {
    let parameters = field
        .split([';', ','])
        .filter_map(|part| part.strip_prefix(name)?.strip_prefix('='));
    parameters.map(|number| number.parse().unwrap()).collect()
}

proptest! {
    /// Remaining units are rounded down. Wait times are rounded up to at least a second. No `t` is
    /// later than `Retry-After`.
    #[test]
    fn a_client_that_obeys_the_headers_is_never_too_early(
        outcomes in prop::collection::vec(any_outcome(), 1..12),
    ) {
        let limits = limits(Some("r"), &vec!["3/7s"; outcomes.len()]);
        let all = outcomes.iter().all(|outcome| outcome.allowed);
        let decision = if all { Decision::Admitted } else { Decision::Limited };
        let headers = headers(&decision, &[&limits], &outcomes, Legacy::Off);
        let state = line(&headers, "ratelimit").unwrap();
        let most = 999_999_999_999_999;

        let remaining = parameters(state, "r");
        prop_assert_eq!(remaining.len(), outcomes.len().min(8));
        let is_reported = |r: u64| outcomes.iter().any(|o| o.remaining.min(most) == r);
        prop_assert!(remaining.iter().all(|r| *r <= most && is_reported(*r)));

        let denials = outcomes.iter().filter(|outcome| !outcome.allowed);
        let longest = denials.map(|outcome| outcome.retry_after).max();
        let expected = longest.and_then(RetryAfter::span).map(|span| span.as_secs_ceil().max(1));
        let retry_after = line(&headers, "retry-after").map(|secs| secs.parse::<u64>().unwrap());
        prop_assert_eq!(retry_after, expected);
        if let Some(secs) = retry_after {
            prop_assert!(parameters(state, "t").iter().all(|t| *t <= secs));
        }
    }
}

/// Regression test: equal limits of one rule had the same policy name, so a client could not find
/// the policy for each item in `RateLimit`.
#[test]
fn shown_policies_of_one_response_have_different_names() {
    let equal = limits(Some("r"), &["20/min", "1/s", "20/min"]);
    let with_colon = limits(Some("r:20/min"), &["5/h"]);
    let outcomes = [1, 2, 3, 4].map(|left| admitted(20, left, Span::from_secs(60)));
    let charge = |limits| Charge::new(b"k", limits, Cost::ONE).unwrap();
    let charges = [charge(&equal), charge(&with_colon)];
    let verdict = Verdict::of(&Decision::Admitted, &charges, &outcomes);
    let mut headers = HeaderMap::new();
    HeaderWriter::default()
        .with_rule_names(RuleNames::Shown)
        .write(&verdict, NOW, &mut headers);
    let states = "\"r:20/min\";r=1;t=60, \"r:1/s\";r=2;t=60, \"r:20/min:2\";r=3;t=60, \"r:20/min:3\";r=4;t=60";
    assert_eq!(line(&headers, "ratelimit"), Some(states));
}

#[test]
fn rule_names_are_hidden_unless_configured() {
    let secret = limits(Some("secret-fraud-rule"), &["1/s", "20/min"]);
    let other = limits(Some("other-secret"), &["20/min"]);
    let bare = limits(None, &["20/min"]);
    let outcomes = [
        admitted(1, 0, Span::from_secs(1)),
        admitted(20, 1, Span::from_secs(60)),
        admitted(20, 2, Span::from_secs(60)),
        admitted(20, 3, Span::from_secs(60)),
    ];
    let charge = |limits| Charge::new(b"k", limits, Cost::ONE).unwrap();
    let charges = [charge(&secret), charge(&other), charge(&bare)];
    let verdict = Verdict::of(&Decision::Admitted, &charges, &outcomes);
    let mut headers = HeaderMap::new();
    HeaderWriter::default().write(&verdict, NOW, &mut headers);
    // The names differ, so that a client can find the policy for each item in `RateLimit`.
    let policies =
        "\"1/s\";q=1;w=1, \"20/min\";q=20;w=60, \"20/min:2\";q=20;w=60, \"20/min:3\";q=20;w=60";
    assert_eq!(line(&headers, "ratelimit-policy"), Some(policies));
    let states =
        "\"1/s\";r=0;t=1, \"20/min\";r=1;t=60, \"20/min:2\";r=2;t=60, \"20/min:3\";r=3;t=60";
    assert_eq!(line(&headers, "ratelimit"), Some(states));
}
