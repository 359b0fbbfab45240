//! Arbitrary limits and operations. All fields in the store's results must be the same as in the
//! naive reference implementations' results.

#![no_main]

#[path = "../../crates/core/tests/proofs/twin.rs"]
#[allow(dead_code, reason = "the proofs use the rest")]
mod twin;
#[path = "../../crates/core/tests/proofs/world.rs"]
mod world;

use arbitrary::Arbitrary;
use libfuzzer_sys::fuzz_target;
use tidegate_core::{
    Algorithm, Calendar, CalendarUnit, Counting, Effect, Limit, Outcome, Rate, RefillMode,
    RetryAfter, Span, Timestamp, Window, bounds,
};

use world::{Rule, World, one_shard};

#[derive(Arbitrary, Debug)]
struct Input {
    start: u64,
    rules: Vec<(Vec<Numbers>, bool)>,
    operations: Vec<Operation>,
}

#[derive(Arbitrary, Debug)]
struct Numbers {
    kind: u8,
    count: Count,
    per: Count,
    period: Count,
    buckets: u8,
    soft: u8,
    denials: Denials,
}

/// How a limit counts denied requests.
#[derive(Arbitrary, Debug)]
enum Denials {
    NotCounted,
    Counted,
    InFull,
}

/// A count in one of four ranges, which are equally likely.
#[derive(Arbitrary, Debug)]
enum Count {
    Small(u8),
    Middle(u32),
    Large(u64),
    Largest,
}

#[derive(Arbitrary, Debug)]
enum Operation {
    /// Charges several rules. The mask has one bit for each rule, which is set if the rule is
    /// charged.
    Charge(Clock, u8, Count),
    Peek(Clock, u8, Count),
    Refund(Clock, u8, Count),
    Look(u8),
    Reset(u8),
    Block(u8, u32),
    Unblock(u8),
}

#[derive(Arbitrary, Debug)]
enum Clock {
    Stay,
    Forward(u32),
    Back(u32),
    ToRetry,
    BeforeRetry,
    ToReset,
    BeforeReset,
}

/// Clocks stay below the year 2128, so that no wait time ends after the last representable time.
const LATEST: u64 = 5_000_000_000_000_000;

fuzz_target!(|input: Input| {
    let rules = rules(&input);
    if !rules.is_empty() {
        run(&rules, &input);
    }
});

fn run(rules: &[Rule], input: &Input) {
    let (store, mut world) = (one_shard(), World::default());
    let (mut now, mut last) = (input.start % LATEST, Vec::new());
    for operation in input.operations.iter().take(64) {
        let (mask, cost, effect) = match operation {
            Operation::Charge(clock, mask, cost)
            | Operation::Peek(clock, mask, cost)
            | Operation::Refund(clock, mask, cost) => {
                now = clock.from(now, &last);
                let effect = match operation {
                    Operation::Peek(..) => Effect::Peek,
                    Operation::Refund(..) => Effect::Refund,
                    _ => Effect::Charge,
                };
                (*mask, cost.number().clamp(1, bounds::MAX_COUNT), effect)
            }
            Operation::Look(mask) => (*mask, 1, Effect::Look),
            Operation::Reset(rule) => {
                let key = &rules[usize::from(*rule) % rules.len()].key;
                store.reset(key);
                world.reset(key);
                continue;
            }
            Operation::Block(rule, micros) => {
                let key = &rules[usize::from(*rule) % rules.len()].key;
                let span = Span::from_micros(u64::from(*micros));
                store.block(key, Some(span), "", Timestamp::from_micros(now));
                world.block(key, u64::from(*micros), now);
                continue;
            }
            Operation::Unblock(rule) => {
                let key = &rules[usize::from(*rule) % rules.len()].key;
                store.unblock(key, Timestamp::from_micros(now));
                world.unblock(key, now);
                continue;
            }
        };
        let charged = |index: &usize| mask >> index & 1 == 1;
        let asks: Vec<(&Rule, u64)> = (0..rules.len())
            .filter(charged)
            .map(|index| (&rules[index], cost))
            .collect();
        if asks.is_empty() {
            continue;
        }
        let charges: Vec<_> = asks.iter().map(|(rule, cost)| rule.charge(*cost)).collect();
        let mut outcomes = Vec::new();
        let decision = store.check(&charges, Timestamp::from_micros(now), effect, &mut outcomes);
        assert_eq!((decision, &outcomes), {
            let (decision, outcomes) = world.check(&asks, now, effect);
            last = outcomes;
            (decision, &last)
        });
    }
}

/// Creates the rules from the numbers in the input. Invalid rules are skipped.
fn rules(input: &Input) -> Vec<Rule> {
    let built = input.rules.iter().take(3).enumerate();
    built
        .filter_map(|(key, (limits, shadow))| {
            let limits: Vec<Limit> = limits.iter().take(6).filter_map(Numbers::limit).collect();
            let key = [u8::try_from(key).ok()?];
            (!limits.is_empty()).then(|| Rule::new(&key, limits, *shadow))
        })
        .collect()
}

impl Numbers {
    fn limit(&self) -> Option<Limit> {
        let limit = Limit::new(self.algorithm()).ok()?;
        let limit = limit.with_soft_percent(self.soft.into()).ok()?;
        match self.denials {
            Denials::NotCounted => Some(limit),
            Denials::Counted => Some(limit.counting_denied(true)),
            Denials::InFull => limit.counting_in_full().ok(),
        }
    }

    fn algorithm(&self) -> Algorithm {
        let (count, window) = (self.count.number(), Span::from_micros(self.period.number()));
        let rate = Rate {
            count: self.per.number(),
            period: window,
        };
        let buckets = u32::from(self.buckets);
        match self.kind % 13 {
            0 => Algorithm::Gcra { rate, burst: count },
            1 => Algorithm::TokenBucket {
                capacity: count,
                refill: rate,
                mode: RefillMode::Continuous,
            },
            2 => Algorithm::TokenBucket {
                capacity: count,
                refill: rate,
                mode: RefillMode::Interval,
            },
            3 => Algorithm::LeakyBucket {
                capacity: count,
                leak: rate,
                queue: false,
            },
            4 => Algorithm::LeakyBucket {
                capacity: count,
                leak: rate,
                queue: true,
            },
            5 => Algorithm::FixedWindow {
                limit: count,
                window: Window::Epoch(window),
            },
            6 => Algorithm::FixedWindow {
                limit: count,
                window: Window::FirstRequest(window),
            },
            7 => Algorithm::SlidingWindowLog {
                limit: count,
                window,
            },
            8 => Algorithm::FixedWindow {
                limit: count,
                window: Window::Calendar(self.calendar()),
            },
            9 => Algorithm::SlidingWindowCounter {
                limit: count,
                window,
                counting: Counting::Weighted,
            },
            10 => Algorithm::Concurrency {
                limit: count,
                lease: window,
            },
            kind => Algorithm::SlidingWindowCounter {
                limit: count,
                // The window must be a multiple of the number of buckets.
                window: Span::from_micros(window.as_micros().saturating_mul(self.buckets.into())),
                counting: Counting::Buckets {
                    buckets,
                    strict: kind == 11,
                },
            },
        }
    }

    /// One of three calendars: a day in a zone with daylight saving time, a week that begins on
    /// Wednesday, or a month that begins on its last day.
    fn calendar(&self) -> Calendar {
        let (unit, zone, day) = match self.buckets % 3 {
            0 => (CalendarUnit::Day, "Europe/Berlin", None),
            1 => (CalendarUnit::Week, "Pacific/Auckland", Some(3)),
            _ => (CalendarUnit::Month, "UTC", Some(31)),
        };
        Calendar::new(unit, zone, day).expect("a zone of the database, and a day of the unit")
    }
}

impl Count {
    fn number(&self) -> u64 {
        match self {
            Self::Small(number) => u64::from(*number % 16),
            Self::Middle(number) => u64::from(*number),
            Self::Large(number) => *number,
            Self::Largest => bounds::MAX_COUNT,
        }
    }
}

impl Clock {
    fn from(&self, now: u64, last: &[Outcome]) -> u64 {
        let reset = last.last().map_or(1, |last| last.reset_after.as_micros());
        let retry = last.last().and_then(|last| match last.retry_after {
            RetryAfter::After(span) => Some(span.as_micros()),
            RetryAfter::Never => None,
        });
        let then = match self {
            Self::Stay => now,
            Self::Forward(micros) => now + u64::from(*micros),
            // In 64 operations, the clock thus goes back by less than ten seconds. The store
            // tolerates a thread whose clock lags by this much.
            Self::Back(micros) => now.saturating_sub(u64::from(*micros % 150_000)),
            Self::ToRetry => now + retry.unwrap_or(1),
            Self::BeforeRetry => now + retry.unwrap_or(1).saturating_sub(1),
            Self::ToReset => now + reset,
            Self::BeforeReset => now + reset.saturating_sub(1),
        };
        if then > LATEST { now } else { then }
    }
}
