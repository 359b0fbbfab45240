//! The compared limiters behind a common trait. Each uses its own clock.

use std::{
    num::NonZeroU32,
    sync::Mutex,
    time::{Duration, SystemTime},
};

use governor::{DefaultKeyedRateLimiter, Quota, RateLimiter};
use throttlecrab::PeriodicStore;
use tidegate::Clock;
use tidegate_core::{
    Algorithm, Charge, Cost, Decision, Effect, Limit, Limits, MemoryBounds, MemoryStore, Outcome,
    Rate, Span,
};

/// The interval at which one token is refilled. It is longer than a round, so that the exact number
/// of admitted requests is known in advance.
pub const INTERVAL: Duration = Duration::from_secs(60);

/// A keyed GCRA limiter.
pub trait BenchLimiter: Sync {
    /// The name in the tables.
    const NAME: &'static str;

    /// Whether it limits requests. The bare harness does not.
    const LIMITS: bool = true;

    /// Creates an empty limiter that admits a burst of `capacity` requests, and after that one
    /// request per [`INTERVAL`].
    fn new(capacity: u32) -> Self;

    /// Returns a function that decides requests on one thread. It reuses its buffers, as a program
    /// optimised for speed would.
    fn decider(&self) -> impl FnMut(&String) -> bool;
}

/// Tidegate's memory store, with the same clock as in Tidegate's server.
pub struct Tidegate {
    store: MemoryStore,
    limits: Limits,
    clock: Clock,
}

impl Tidegate {
    /// Returns the limit that admits a burst of `capacity` requests.
    fn limit(capacity: u32) -> Limit {
        let rate = Rate {
            count: 1,
            period: Span::from_secs(INTERVAL.as_secs()),
        };
        let burst = u64::from(capacity - 1);
        let limit = Limit::new(Algorithm::Gcra { rate, burst });
        limit.expect("the benchmark's numbers are in range")
    }
}

impl BenchLimiter for Tidegate {
    const NAME: &'static str = "tidegate";

    fn new(capacity: u32) -> Self {
        Self {
            store: MemoryStore::new(MemoryBounds::default()),
            limits: Self::limit(capacity).into(),
            clock: Clock::real(),
        }
    }

    fn decider(&self) -> impl FnMut(&String) -> bool {
        let mut outcomes: Vec<Outcome> = Vec::new();
        move |key| {
            let charge =
                Charge::new(key.as_bytes(), &self.limits, Cost::ONE).expect("the keys are short");
            let decision =
                self.store
                    .check(&[charge], self.clock.now(), Effect::Charge, &mut outcomes);
            matches!(decision, Decision::Admitted)
        }
    }
}

/// Tidegate's library: a call of `check`, which uses the same store and returns a verdict.
pub struct Library(tidegate::Limiter);

impl BenchLimiter for Library {
    const NAME: &'static str = "tidegate::Limiter";

    fn new(capacity: u32) -> Self {
        Self(tidegate::Limiter::in_memory(Tidegate::limit(capacity)))
    }

    fn decider(&self) -> impl FnMut(&String) -> bool {
        |key| self.0.check(key).allowed
    }
}

/// governor's keyed limiter with DashMap, which is its default store.
pub struct Governor(DefaultKeyedRateLimiter<String>);

impl BenchLimiter for Governor {
    const NAME: &'static str = "governor";

    fn new(capacity: u32) -> Self {
        let quota = Quota::with_period(INTERVAL).expect("the interval is not zero");
        let capacity = NonZeroU32::new(capacity).expect("the capacity is not zero");
        Self(RateLimiter::dashmap(quota.allow_burst(capacity)))
    }

    fn decider(&self) -> impl FnMut(&String) -> bool {
        |key| self.0.check_key(key).is_ok()
    }
}

/// throttlecrab's library with its periodic store. The limiter needs `&mut`, so the threads share
/// it through a mutex.
pub struct Throttlecrab {
    limiter: Mutex<throttlecrab::RateLimiter<PeriodicStore>>,
    capacity: i64,
}

impl BenchLimiter for Throttlecrab {
    const NAME: &'static str = "throttlecrab";

    fn new(capacity: u32) -> Self {
        // With the default interval of 60 s, there would be a sweep during a long round, although
        // no key expires.
        let store = PeriodicStore::builder()
            .cleanup_interval(Duration::from_secs(3_600))
            .build();
        Self {
            limiter: Mutex::new(throttlecrab::RateLimiter::new(store)),
            capacity: i64::from(capacity),
        }
    }

    fn decider(&self) -> impl FnMut(&String) -> bool {
        let period = i64::try_from(INTERVAL.as_secs()).expect("a minute is short");
        move |key| {
            let mut limiter = self.limiter.lock().expect("no decision panics");
            let answer = limiter.rate_limit(key, self.capacity, 1, period, 1, SystemTime::now());
            answer.expect("the benchmark's numbers are in range").0
        }
    }
}

/// Only reads the key. This is the cost of the measurement itself.
pub struct Harness;

impl BenchLimiter for Harness {
    const NAME: &'static str = "the harness alone";
    const LIMITS: bool = false;

    fn new(_capacity: u32) -> Self {
        Self
    }

    fn decider(&self) -> impl FnMut(&String) -> bool {
        |key| key.as_bytes()[0] == b'u'
    }
}

/// Reads the key and Tidegate's clock.
pub struct HarnessAndClock(Clock);

impl BenchLimiter for HarnessAndClock {
    const NAME: &'static str = "the harness and Tidegate's clock";
    const LIMITS: bool = false;

    fn new(_capacity: u32) -> Self {
        Self(Clock::real())
    }

    fn decider(&self) -> impl FnMut(&String) -> bool {
        |key| key.as_bytes()[0] == b'u' && self.0.now().as_micros() > 0
    }
}
