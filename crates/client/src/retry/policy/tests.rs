use http::{HeaderMap, StatusCode};
use proptest::prelude::*;

use super::*;

const NOW: Timestamp = Timestamp::from_micros(1_700_000_000_000_000);

fn after(secs: u64) -> Advice {
    Advice {
        wait: Some(Wait::After(Span::from_secs(secs))),
        quota: None,
    }
}

fn answer(status: u16, advice: Advice, headers: &HeaderMap) -> Attempt<'_> {
    Attempt {
        number: 1,
        call_started_at: NOW,
        idempotency: Idempotency::Idempotent,
        outcome: AttemptOutcome::Response {
            status: StatusCode::from_u16(status).unwrap(),
            headers,
        },
        advice,
        replayable: true,
    }
}

fn decide(policy: &RetryPolicy, attempt: &Attempt<'_>) -> RetryDecision {
    let mut rng = fastrand::Rng::with_seed(7);
    policy.decide(attempt, &mut RetryBudget::default(), &mut rng, NOW)
}

#[test]
fn each_reason_to_give_up() {
    let none = HeaderMap::new();
    let policy = RetryPolicy::default();
    let refused = answer(429, after(1), &none);
    let never = Advice {
        wait: Some(Wait::Never),
        quota: None,
    };
    let server_wait = Span::from_secs(61);
    let short = RetryPolicy {
        deadline: Span::from_secs(1),
        ..policy
    };
    let cases = [
        (policy, answer(429, never, &none), GiveUpReason::Permanent),
        (
            policy,
            Attempt {
                number: 4,
                ..refused
            },
            GiveUpReason::Tries,
        ),
        (
            policy,
            Attempt {
                replayable: false,
                ..refused
            },
            GiveUpReason::Body,
        ),
        (
            policy,
            answer(503, after(61), &none),
            GiveUpReason::MaxWait { server_wait },
        ),
        (short, refused, GiveUpReason::Deadline),
        (
            policy,
            Attempt {
                idempotency: Idempotency::NotIdempotent,
                ..refused
            },
            GiveUpReason::NotIdempotent,
        ),
    ];
    for (policy, attempt, reason) in cases {
        assert_eq!(
            decide(&policy, &attempt),
            RetryDecision::GiveUp(reason),
            "{attempt:?}"
        );
    }
    assert_eq!(
        decide(&policy, &answer(404, Advice::default(), &none)),
        RetryDecision::Done
    );
    let mut none_left = RetryBudget::new(Span::from_secs(1), 0, 0);
    let spent = policy.decide(
        &refused,
        &mut none_left,
        &mut fastrand::Rng::with_seed(1),
        NOW,
    );
    assert_eq!(spent, RetryDecision::GiveUp(GiveUpReason::Budget));
}

#[test]
fn requests_that_may_be_retried() {
    use NonIdempotentPolicy::{Always, NeverSent, Refused};
    let none = HeaderMap::new();
    let failed = |idempotency| Attempt {
        idempotency,
        ..answer(500, Advice::default(), &none)
    };
    let refused = |idempotency| Attempt {
        idempotency,
        ..answer(429, after(1), &none)
    };
    let untimed = |idempotency| Attempt {
        idempotency,
        ..answer(503, Advice::default(), &none)
    };
    let unsent = |idempotency| Attempt {
        outcome: AttemptOutcome::NeverSent,
        ..failed(idempotency)
    };
    let cases = [
        (NeverSent, unsent(Idempotency::NotIdempotent), true),
        (NeverSent, refused(Idempotency::NotIdempotent), false),
        (NeverSent, refused(Idempotency::Grpc), true),
        (NeverSent, failed(Idempotency::Grpc), false),
        (NeverSent, failed(Idempotency::Idempotent), true),
        (Refused, refused(Idempotency::NotIdempotent), true),
        (Refused, untimed(Idempotency::NotIdempotent), false),
        (Refused, failed(Idempotency::NotIdempotent), false),
        (Always, failed(Idempotency::NotIdempotent), true),
        (
            Always,
            Attempt {
                outcome: AttemptOutcome::NoResponse,
                ..failed(Idempotency::NotIdempotent)
            },
            true,
        ),
    ];
    for (non_idempotent, attempt, expected) in cases {
        let policy = RetryPolicy {
            non_idempotent,
            ..RetryPolicy::default()
        };
        let retried = matches!(decide(&policy, &attempt), RetryDecision::Retry { .. });
        assert_eq!(retried, expected, "{non_idempotent:?} {attempt:?}");
    }
}

#[test]
fn the_budget_is_charged_as_configured() {
    let none = HeaderMap::new();
    let policy = RetryPolicy {
        budget_scope: BudgetScope::AllButScheduled,
        ..RetryPolicy::default()
    };
    let decide = |attempt: Attempt<'_>| {
        let mut empty = RetryBudget::new(Span::from_secs(1), 0, 0);
        policy.decide(&attempt, &mut empty, &mut fastrand::Rng::with_seed(1), NOW)
    };
    assert!(matches!(
        decide(answer(429, after(1), &none)),
        RetryDecision::Retry { .. }
    ));
    let spent = RetryDecision::GiveUp(GiveUpReason::Budget);
    assert_eq!(decide(answer(429, Advice::default(), &none)), spent);
    assert_eq!(decide(answer(503, after(1), &none)), spent);
    assert_eq!(
        decide(Attempt {
            outcome: AttemptOutcome::NeverSent,
            ..answer(500, after(1), &none)
        }),
        spent
    );
}

proptest! {
    /// The client waits at least as long as the server asks for. The client's wait exceeds the
    /// server's wait by at most the longest backoff or half of the server's wait, whichever is
    /// larger. The wait never ends after the deadline.
    #[test]
    fn waits_stay_within_their_bounds(
        number in 1..100_u32,
        base in 0..10_000_000_u64,
        server_wait in proptest::option::of(1..100_000_000_u64),
        elapsed in 0..200_000_000_u64,
        seed: u64,
    ) {
        let none = HeaderMap::new();
        let policy = RetryPolicy {
            backoff: Backoff::new(
                Span::from_micros(base),
                Span::from_secs(20),
                crate::Jitter::Full,
            ),
            max_tries: u32::MAX,
            ..RetryPolicy::default()
        };
        let wait = server_wait.map(|micros| Wait::After(Span::from_micros(micros)));
        let advice = Advice { wait, quota: None };
        let attempt = Attempt { number, ..answer(503, advice, &none) };
        let now = NOW.after(Span::from_micros(elapsed));
        let mut rng = fastrand::Rng::with_seed(seed);
        let server_wait = server_wait.unwrap_or(0);
        match policy.decide(&attempt, &mut RetryBudget::default(), &mut rng, now) {
            RetryDecision::Retry { after } => {
                let extra = policy.backoff.longest(number - 1).as_micros().max(server_wait / 2);
                prop_assert!((server_wait..=server_wait + extra).contains(&after.as_micros()));
                prop_assert!(now.after(after) < NOW.after(policy.deadline));
            }
            RetryDecision::GiveUp(GiveUpReason::MaxWait { .. }) => {
                prop_assert!(server_wait > policy.max_wait.as_micros());
            }
            RetryDecision::GiveUp(GiveUpReason::Deadline) => {}
            other => prop_assert!(false, "{other:?}"),
        }
    }
}
