//! The compared limiters behind a common trait. Each uses its own clock.

use std::{
    hash::{BuildHasher as _, Hasher as _},
    num::NonZeroU32,
    sync::Mutex,
    time::{Duration, SystemTime},
};

use foldhash::fast::RandomState;
use governor::{DefaultKeyedRateLimiter, Quota, RateLimiter};
use hashbrown::HashTable;
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

/// A minimal GCRA limiter on `hashbrown`, with the same lock, hash function, clock and key as
/// Tidegate's memory store. It has no other algorithm, no expiry and no maximum size.
pub struct Hashbrown {
    shards: Box<[AlignedShard]>,
    hasher: RandomState,
    burst_micros: u64,
    clock: Clock,
}

/// Aligned to two cache lines, as Tidegate's shards are.
#[derive(Default)]
#[repr(align(128))]
struct AlignedShard(spin::Mutex<HashTable<(InlineKey, u64)>>);

/// A key of up to 22 bytes, which Tidegate also stores without an allocation.
#[derive(Clone, Copy)]
struct InlineKey {
    len: u8,
    bytes: [u8; 22],
}

impl InlineKey {
    fn new(key: &[u8]) -> Self {
        let mut bytes = [0; 22];
        bytes[..key.len()].copy_from_slice(key);
        let len = u8::try_from(key.len()).expect("the keys are short");
        Self { len, bytes }
    }

    fn bytes(&self) -> &[u8] {
        &self.bytes[..usize::from(self.len)]
    }
}

/// The number of shards of [`Hashbrown`], as a power of two.
const SHARD_BITS: u32 = 8;

impl Hashbrown {
    fn hash(&self, key: &[u8]) -> u64 {
        let mut hasher = self.hasher.build_hasher();
        hasher.write(key);
        hasher.finish()
    }
}

impl BenchLimiter for Hashbrown {
    const NAME: &'static str = "hashbrown alone";

    fn new(capacity: u32) -> Self {
        Self {
            shards: (0..1 << SHARD_BITS)
                .map(|_| AlignedShard::default())
                .collect(),
            hasher: RandomState::default(),
            burst_micros: u64::from(capacity - 1) * INTERVAL.as_secs() * 1_000_000,
            clock: Clock::real(),
        }
    }

    fn decider(&self) -> impl FnMut(&String) -> bool {
        let interval = INTERVAL.as_secs() * 1_000_000;
        move |key| {
            let key = key.as_bytes();
            let now = self.clock.now().as_micros();
            let hash = self.hash(key);
            // `hashbrown` uses the first 7 bits and the last bits.
            let shard = (hash >> 32) as usize & ((1 << SHARD_BITS) - 1);
            let mut table = self.shards[shard].0.lock();
            let Some((_, time)) = table.find_mut(hash, |(known, _)| known.bytes() == key) else {
                let entry = (InlineKey::new(key), now + interval);
                table.insert_unique(hash, entry, |(key, _)| self.hash(key.bytes()));
                return true;
            };
            let theoretical = now.max(*time);
            let is_admitted = theoretical - now <= self.burst_micros;
            if is_admitted {
                *time = theoretical + interval;
            }
            is_admitted
        }
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
