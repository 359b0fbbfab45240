use http::{HeaderMap, StatusCode};
use proptest::prelude::*;

use super::*;

const NOW: Timestamp = Timestamp::from_micros(1_700_000_000_000_000);

fn after(secs: u64) -> Advice {
    Advice {
        wait: Some(Wait::After(Span::from_secs(secs))),
        standing: None,
    }
}

fn answer(status: u16, advice: Advice, headers: &HeaderMap) -> Attempt<'_> {
    Attempt {
        number: 1,
        began: NOW,
        safety: Safety::Idempotent,
        seen: Seen::Answer {
            status: StatusCode::from_u16(status).unwrap(),
            headers,
        },
        advice,
        replayable: true,
    }
}

fn next(policy: &RetryPolicy, attempt: &Attempt<'_>) -> Next {
    let mut rng = fastrand::Rng::with_seed(7);
    policy.next(attempt, &mut RetryBudget::default(), &mut rng, NOW)
}

#[test]
fn each_reason_to_give_up() {
    let none = HeaderMap::new();
    let policy = RetryPolicy::default();
    let refused = answer(429, after(1), &none);
    let never = Advice {
        wait: Some(Wait::Never),
        standing: None,
    };
    let asked = Span::from_secs(61);
    let short = RetryPolicy {
        deadline: Span::from_secs(1),
        ..policy
    };
    let cases = [
        (policy, answer(429, never, &none), GiveUp::Permanent),
        (
            policy,
            Attempt {
                number: 4,
                ..refused
            },
            GiveUp::Tries,
        ),
        (
            policy,
            Attempt {
                replayable: false,
                ..refused
            },
            GiveUp::Body,
        ),
        (
            policy,
            answer(503, after(61), &none),
            GiveUp::MaxWait { asked },
        ),
        (short, refused, GiveUp::Deadline),
        (
            policy,
            Attempt {
                safety: Safety::Once,
                ..refused
            },
            GiveUp::NotIdempotent,
        ),
    ];
    for (policy, attempt, reason) in cases {
        assert_eq!(next(&policy, &attempt), Next::GiveUp(reason), "{attempt:?}");
    }
    assert_eq!(
        next(&policy, &answer(404, Advice::default(), &none)),
        Next::Done
    );
    let mut none_left = RetryBudget::new(Span::from_secs(1), 0, 0);
    let spent = policy.next(
        &refused,
        &mut none_left,
        &mut fastrand::Rng::with_seed(1),
        NOW,
    );
    assert_eq!(spent, Next::GiveUp(GiveUp::Budget));
}

#[test]
fn requests_that_may_be_retried() {
    use NonIdempotent::{Always, NeverSent, Refused};
    let none = HeaderMap::new();
    let failed = |safety| Attempt {
        safety,
        ..answer(500, Advice::default(), &none)
    };
    let refused = |safety| Attempt {
        safety,
        ..answer(429, after(1), &none)
    };
    let untimed = |safety| Attempt {
        safety,
        ..answer(503, Advice::default(), &none)
    };
    let unsent = |safety| Attempt {
        seen: Seen::NeverSent,
        ..failed(safety)
    };
    let cases = [
        (NeverSent, unsent(Safety::Once), true),
        (NeverSent, refused(Safety::Once), false),
        (NeverSent, refused(Safety::Grpc), true),
        (NeverSent, failed(Safety::Grpc), false),
        (NeverSent, failed(Safety::Idempotent), true),
        (Refused, refused(Safety::Once), true),
        (Refused, untimed(Safety::Once), false),
        (Refused, failed(Safety::Once), false),
        (Always, failed(Safety::Once), true),
        (
            Always,
            Attempt {
                seen: Seen::NoAnswer,
                ..failed(Safety::Once)
            },
            true,
        ),
    ];
    for (non_idempotent, attempt, expected) in cases {
        let policy = RetryPolicy {
            non_idempotent,
            ..RetryPolicy::default()
        };
        let retried = matches!(next(&policy, &attempt), Next::Retry { .. });
        assert_eq!(retried, expected, "{non_idempotent:?} {attempt:?}");
    }
}

#[test]
fn the_budget_is_charged_as_configured() {
    let none = HeaderMap::new();
    let policy = RetryPolicy {
        budget_for: BudgetFor::AllButScheduled,
        ..RetryPolicy::default()
    };
    let next = |attempt: Attempt<'_>| {
        let mut empty = RetryBudget::new(Span::from_secs(1), 0, 0);
        policy.next(&attempt, &mut empty, &mut fastrand::Rng::with_seed(1), NOW)
    };
    assert!(matches!(
        next(answer(429, after(1), &none)),
        Next::Retry { .. }
    ));
    let spent = Next::GiveUp(GiveUp::Budget);
    assert_eq!(next(answer(429, Advice::default(), &none)), spent);
    assert_eq!(next(answer(503, after(1), &none)), spent);
    assert_eq!(
        next(Attempt {
            seen: Seen::NeverSent,
            ..answer(500, after(1), &none)
        }),
        spent
    );
}

proptest! {
    /// A wait is at least what the server asked for. It exceeds that by at most the longest backoff
    /// or half of that wait, whichever is larger, and it never ends past the deadline.
    #[test]
    fn waits_stay_within_their_bounds(
        number in 1..100_u32,
        base in 0..10_000_000_u64,
        asked in proptest::option::of(1..100_000_000_u64),
        elapsed in 0..200_000_000_u64,
        seed: u64,
    ) {
        let none = HeaderMap::new();
        let policy = RetryPolicy {
            backoff: Backoff::new(Span::from_micros(base), Span::from_secs(20), crate::Jitter::Full),
            max_tries: u32::MAX,
            ..RetryPolicy::default()
        };
        let wait = asked.map(|micros| Wait::After(Span::from_micros(micros)));
        let advice = Advice { wait, standing: None };
        let attempt = Attempt { number, ..answer(503, advice, &none) };
        let now = NOW.after(Span::from_micros(elapsed));
        let mut rng = fastrand::Rng::with_seed(seed);
        let asked = asked.unwrap_or(0);
        match policy.next(&attempt, &mut RetryBudget::default(), &mut rng, now) {
            Next::Retry { after } => {
                let longest = asked + policy.backoff.longest(number - 1).as_micros().max(asked / 2);
                prop_assert!((asked..=longest).contains(&after.as_micros()));
                prop_assert!(now.after(after) < NOW.after(policy.deadline));
            }
            Next::GiveUp(GiveUp::MaxWait { .. }) => prop_assert!(asked > policy.max_wait.as_micros()),
            Next::GiveUp(GiveUp::Deadline) => {}
            other => prop_assert!(false, "{other:?}"),
        }
    }
}
