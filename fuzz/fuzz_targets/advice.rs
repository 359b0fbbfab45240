//! Arbitrary response headers as rate limit headers. Parsing must not panic and must be
//! deterministic. A retry policy must not wait longer than its own bounds permit, or for less time
//! than the headers require.
//!
//! The first line of the input is the status, and every other line is a header.

#![no_main]

use http::{HeaderMap, HeaderName, HeaderValue, StatusCode};
use libfuzzer_sys::{Corpus, fuzz_target};
use tidegate_client::{
    Advice, RetryBudget, RetryPolicy, Rng, Span, Timestamp, Wait,
    retry::{Attempt, AttemptOutcome, Idempotency, RetryDecision},
};

const NOW: Timestamp = Timestamp::from_micros(1_700_000_000_000_000);

fuzz_target!(|input: &[u8]| -> Corpus {
    let mut lines = input.split(|byte| *byte == b'\n');
    let Some(status) = lines
        .next()
        .and_then(|line| StatusCode::from_bytes(line).ok())
    else {
        return Corpus::Reject;
    };
    let Some(headers) = lines.map(header).collect::<Option<HeaderMap>>() else {
        return Corpus::Reject;
    };
    let advice = Advice::from_response(status, &headers, NOW);
    assert_eq!(advice, Advice::from_response(status, &headers, NOW));
    assert_ne!(advice.wait, Some(Wait::After(Span::ZERO)));
    assert!(
        advice
            .quota
            .is_none_or(|quota| quota.reset_after > Span::ZERO)
    );
    assert_bounded(status, &headers, advice);
    Corpus::Keep
});

fn header(line: &[u8]) -> Option<(HeaderName, HeaderValue)> {
    let colon = line.iter().position(|byte| *byte == b':')?;
    let name = HeaderName::from_bytes(&line[..colon]).ok()?;
    let value = HeaderValue::from_bytes(&line[colon + 1..]).ok()?;
    Some((name, value))
}

fn assert_bounded(status: StatusCode, headers: &HeaderMap, advice: Advice) {
    let policy = RetryPolicy::default();
    let attempt = Attempt {
        number: 1,
        call_started_at: NOW,
        idempotency: Idempotency::Idempotent,
        outcome: AttemptOutcome::Response { status, headers },
        advice,
        replayable: true,
    };
    let mut rng = Rng::with_seed(1);
    match policy.decide(&attempt, &mut RetryBudget::default(), &mut rng, NOW) {
        RetryDecision::Retry { after } => {
            let server_wait = match advice.wait {
                Some(Wait::After(wait)) => wait,
                Some(Wait::Never) => panic!("a permanently refused request is retried"),
                None => Span::ZERO,
            };
            assert!(after >= server_wait && server_wait <= policy.max_wait);
            assert!(after < policy.deadline);
        }
        RetryDecision::Done | RetryDecision::GiveUp(_) => {}
    }
}
