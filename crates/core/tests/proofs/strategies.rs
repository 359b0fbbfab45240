//! Generators for limits and traces (sequences of requests), with ordinary numbers, extreme
//! numbers, and clock steps to instants at which outcomes change.

use proptest::{prelude::*, sample::Index};
use tidegate_core::{
    Algorithm, Calendar, CalendarUnit, Counting, Effect, Limit, Outcome, Rate, RefillMode,
    RetryAfter, Span, Window, bounds,
};

/// The latest instant of a trace, in the year 2128. No wait from this instant extends beyond the
/// maximum timestamp.
const LATEST: u64 = 5_000_000_000_000_000;

/// Returns a configuration for `cases` test cases. If the environment variable `PROPTEST_CASES` is
/// set, the number of cases is multiplied by its value and divided by its default of 256.
pub(crate) fn cases(cases: u32) -> ProptestConfig {
    let config = ProptestConfig::default();
    let cases = u64::from(cases) * u64::from(config.cases) / 256;
    ProptestConfig {
        cases: u32::try_from(cases).unwrap_or(u32::MAX),
        ..config
    }
}

/// A kind of limit, used by tests to select an algorithm.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Gcra,
    TokenBucket,
    Interval,
    Meter,
    Queue,
    EpochWindow,
    FirstRequestWindow,
    CalendarWindow,
    Log,
    Concurrency,
    Weighted,
    StrictBuckets,
    LooseBuckets,
}

impl Kind {
    pub(crate) const ALL: [Self; 13] = [
        Self::Gcra,
        Self::TokenBucket,
        Self::Interval,
        Self::Meter,
        Self::Queue,
        Self::EpochWindow,
        Self::FirstRequestWindow,
        Self::CalendarWindow,
        Self::Log,
        Self::Concurrency,
        Self::Weighted,
        Self::StrictBuckets,
        Self::LooseBuckets,
    ];

    pub(crate) fn algorithm(self, count: u64, rate: Rate, buckets: u32) -> Algorithm {
        let window = rate.period;
        match self {
            Self::Gcra => Algorithm::Gcra {
                rate,
                burst: count.saturating_sub(1),
            },
            Self::TokenBucket => Algorithm::TokenBucket {
                capacity: count,
                refill: rate,
                mode: RefillMode::Continuous,
            },
            Self::Interval => Algorithm::TokenBucket {
                capacity: count,
                refill: rate,
                mode: RefillMode::Interval,
            },
            Self::Meter | Self::Queue => Algorithm::LeakyBucket {
                capacity: count,
                leak: rate,
                queue: self == Self::Queue,
            },
            Self::EpochWindow => fixed(count, Window::Epoch(window)),
            Self::FirstRequestWindow => fixed(count, Window::FirstRequest(window)),
            Self::CalendarWindow => fixed(count, Window::Calendar(calendar(buckets))),
            Self::Log => Algorithm::SlidingWindowLog {
                limit: count.min(bounds::MAX_LOG_LIMIT),
                window,
            },
            Self::Concurrency => Algorithm::Concurrency {
                limit: count.min(bounds::MAX_LOG_LIMIT),
                lease: window,
            },
            Self::Weighted => counter(count, window, Counting::Weighted),
            Self::StrictBuckets | Self::LooseBuckets => {
                let width = window.as_micros().div_ceil(u64::from(buckets));
                let counting = Counting::Buckets {
                    buckets,
                    strict: self == Self::StrictBuckets,
                };
                counter(
                    count,
                    Span::from_micros(width * u64::from(buckets)),
                    counting,
                )
            }
        }
    }
}

fn fixed(limit: u64, window: Window) -> Algorithm {
    Algorithm::FixedWindow { limit, window }
}

fn counter(limit: u64, window: Span, counting: Counting) -> Algorithm {
    Algorithm::SlidingWindowCounter {
        limit,
        window,
        counting,
    }
}

/// Returns one of four calendars.
fn calendar(choice: u32) -> Calendar {
    let (unit, zone, day) = match choice % 4 {
        0 => (CalendarUnit::Day, "Europe/Berlin", None),
        1 => (CalendarUnit::Week, "America/Sao_Paulo", Some(7)),
        2 => (CalendarUnit::Month, "Asia/Beirut", Some(31)),
        _ => (CalendarUnit::Month, "UTC", None),
    };
    Calendar::new(unit, zone, day).expect("zones that exist")
}

pub(crate) fn any_kind() -> impl Strategy<Value = Kind> {
    prop::sample::select(Kind::ALL.to_vec())
}

/// Generates limits of `kind` without a soft allowance and without options.
pub(crate) fn plain_limit(kind: Kind) -> impl Strategy<Value = Limit> {
    let numbers = prop_oneof![3 => ordinary_numbers(), 2 => extreme_numbers()];
    numbers.prop_filter_map(
        "numbers that a limit can have",
        move |(count, rate, buckets)| Limit::new(kind.algorithm(count, rate, buckets)).ok(),
    )
}

/// Generates limits of `kind`, with and without a soft allowance, and with and without counting of
/// denied requests.
pub(crate) fn limit(kind: Kind) -> impl Strategy<Value = Limit> {
    let soft = prop_oneof![2 => Just(0_u32), 1 => 1..=300_u32];
    let extras = (plain_limit(kind), soft, prop::bool::weighted(0.3));
    extras
        .prop_filter_map("a valid allowance", |(limit, soft, count_denied)| {
            let limit = limit.with_soft_percent(soft).ok()?;
            Some(limit.counting_denied(count_denied))
        })
        .prop_flat_map(|limit| {
            let in_full = limit
                .clone()
                .counting_in_full()
                .unwrap_or_else(|_| limit.clone());
            prop_oneof![3 => Just(limit), 1 => Just(in_full)]
        })
}

type Numbers = (u64, Rate, u32);

fn ordinary_numbers() -> impl Strategy<Value = Numbers> {
    let period = prop_oneof![
        1..=60_u64,
        (1..=20_u64).prop_map(|millis| millis * 1_000),
        Just(1_000_000),
        Just(60_000_000),
        Just(86_400_000_000),
    ];
    (0..=12_u64, 1..=12_u64, period, 1..=6_u32)
        .prop_map(|(count, per, period, buckets)| (count, rate(per, period), buckets))
}

/// Generates extreme parameters: maxima, primes, and numbers that need more than 32 bits. In half
/// of the cases, the count is reduced so that all units become available again within
/// [`bounds::MAX_DRAIN`].
fn extreme_numbers() -> impl Strategy<Value = Numbers> {
    let count = prop_oneof![
        Just(bounds::MAX_COUNT),
        Just(999_999_999_999_989_u64),
        Just(4_294_967_311),
        Just(bounds::MAX_LOG_LIMIT),
        1..=bounds::MAX_COUNT,
        1..=100_000_u64,
    ];
    let longest = bounds::MAX_PERIOD.as_micros();
    let period = prop_oneof![
        Just(longest),
        Just(315_575_999_999_993_u64),
        Just(1),
        Just(999_983),
        1..=longest,
        1..=10_000_000_u64,
    ];
    let buckets = prop_oneof![Just(bounds::MAX_BUCKETS), Just(997), 1..=60_u32];
    (count.clone(), count, period, buckets, any::<bool>()).prop_map(
        |(count, per, period, buckets, fit)| {
            let in_time =
                u128::from(bounds::MAX_DRAIN.as_micros()) * u128::from(per) / u128::from(period);
            let in_time = u64::try_from(in_time).unwrap_or(u64::MAX);
            let count = if fit { count.min(in_time) } else { count };
            (count, rate(per, period), buckets)
        },
    )
}

fn rate(count: u64, period: u64) -> Rate {
    Rate {
        count,
        period: Span::from_micros(period),
    }
}

/// Generates the start of a trace.
pub(crate) fn start() -> impl Strategy<Value = u64> {
    prop_oneof![
        1 => Just(0_u64),
        1 => 0..=100_u64,
        4 => 1_700_000_000_000_000..=1_800_000_000_000_000_u64,
        1 => 0..=4_000_000_000_000_000_u64,
    ]
}

/// The clock step before an operation, which can depend on a previous outcome.
#[derive(Clone, Debug)]
pub(crate) enum Step {
    Stay,
    Forward(u64),
    Back(u64),
    ToRetry { early: bool },
    ToReset { early: bool },
    PartOfReset(u8),
}

/// The cost of an operation, which can depend on a previous outcome.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Price {
    Units(u64),
    Remaining { over: bool },
    Quota { over: bool },
    Maximum,
}

#[derive(Clone, Debug)]
pub(crate) struct Ask {
    pub(crate) step: Step,
    /// The index of the previous outcome from which the step and the price are computed.
    pub(crate) of: Index,
    pub(crate) price: Price,
    pub(crate) effect: Effect,
}

pub(crate) fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        4 => Just(Step::Stay),
        3 => (0..=100_u64).prop_map(Step::Forward),
        2 => (0..=40_u32, any::<u64>())
            .prop_map(|(bits, random)| Step::Forward(random % (1 << bits))),
        // Even 60 backward steps in sum are too small to count as a clock jump. The module
        // `clock_jumps` tests clock jumps.
        2 => prop_oneof![1..=100_u64, 1..=150_000_u64].prop_map(Step::Back),
        4 => any::<bool>().prop_map(|early| Step::ToRetry { early }),
        1 => any::<bool>().prop_map(|early| Step::ToReset { early }),
        2 => any::<u8>().prop_map(Step::PartOfReset),
    ]
}

pub(crate) fn price() -> impl Strategy<Value = Price> {
    prop_oneof![
        6 => Just(Price::Units(1)),
        3 => (2..=6_u64).prop_map(Price::Units),
        1 => (1..=bounds::MAX_COUNT).prop_map(Price::Units),
        2 => any::<bool>().prop_map(|over| Price::Remaining { over }),
        1 => any::<bool>().prop_map(|over| Price::Quota { over }),
        1 => Just(Price::Maximum),
    ]
}

/// Generates any effect, mostly charges.
pub(crate) fn effect() -> impl Strategy<Value = Effect> {
    prop_oneof![
        16 => Just(Effect::Charge),
        2 => Just(Effect::Peek),
        2 => Just(Effect::Look),
        3 => Just(Effect::Refund),
    ]
}

pub(crate) fn ask() -> impl Strategy<Value = Ask> {
    (step(), any::<Index>(), price(), effect()).prop_map(|(step, of, price, effect)| Ask {
        step,
        of,
        price,
        effect,
    })
}

pub(crate) fn asks(length: usize) -> impl Strategy<Value = Vec<Ask>> {
    prop::collection::vec(ask(), 1..=length)
}

impl Step {
    /// Returns the next instant of the clock.
    pub(crate) fn from(&self, now: u64, last: Option<&Outcome>) -> u64 {
        let reset = last.map_or(1, |last| last.reset_after.as_micros());
        let retry = last.and_then(|last| match last.retry_after {
            RetryAfter::After(span) => Some(span.as_micros()),
            RetryAfter::Never => None,
        });
        let forward = match self {
            Self::Stay => 0,
            Self::Forward(micros) => *micros,
            Self::Back(micros) => return now.saturating_sub(*micros),
            Self::ToRetry { early } => retry.unwrap_or(1).saturating_sub(u64::from(*early)),
            Self::ToReset { early } => reset.saturating_sub(u64::from(*early)),
            Self::PartOfReset(part) => reset / 256 * u64::from(*part),
        };
        if now + forward > LATEST {
            now + 1
        } else {
            now + forward
        }
    }
}

impl Price {
    pub(crate) fn units(self, last: Option<&Outcome>) -> u64 {
        let units = match self {
            Self::Units(units) => units,
            Self::Remaining { over } => last.map_or(1, |last| last.remaining) + u64::from(over),
            Self::Quota { over } => last.map_or(1, |last| last.limit) + u64::from(over),
            Self::Maximum => bounds::MAX_COUNT,
        };
        units.clamp(1, bounds::MAX_COUNT)
    }
}
