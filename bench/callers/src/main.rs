//! Load generator for the Redis store: concurrent callers on one thread. Each caller waits for the
//! reply to a request before it sends the next request. See METHOD.md.
//!
//! ```text
//! callers URL LIMITS CALLERS MILLIS
//! ```
//!
//! LIMITS are the limits of one rule, such as `gcra`, `gcra,gcra,gcra,gcra` or
//! `gcra,interval,fixed,weighted`. Every request is for a random key out of 100,000. No key comes
//! near its limit, so every request must be admitted. The program prints the number of decisions
//! and the time in seconds.

use std::{
    cell::Cell,
    env,
    process::ExitCode,
    sync::Arc,
    time::{Duration, Instant},
};

use futures_util::future::join_all;
use tidegate_core::{
    Algorithm, Charge, Cost, Counting, Decision, Effect, Limit, Limits, Rate, RefillMode, Span,
    Window,
};
use tidegate_redis::{Address, Redis, RedisSettings, RedisStore, Topology};

const KEYS: u64 = 100_000;

/// A capacity that no benchmark exhausts. With a refill rate of 1,000 per day, almost nothing is
/// refilled during a run.
const ROOM: u64 = 1_000_000;
const DAY: Span = Span::from_secs(86_400);

fn main() -> ExitCode {
    let arguments: Vec<String> = env::args().skip(1).collect();
    let [url, names, callers, millis] = &arguments[..] else {
        eprintln!("usage: callers URL LIMITS CALLERS MILLIS");
        return ExitCode::from(2);
    };
    let load = Load {
        limits: limits(names),
        // Each rule has its own keys.
        prefix: names,
        callers: callers.parse().expect("a number of callers"),
        lasting: Duration::from_millis(millis.parse().expect("a number of milliseconds")),
    };
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .expect("a runtime");
    let (decided, took) = runtime.block_on(load.run(url));
    println!("{decided} {:.6}", took.as_secs_f64());
    ExitCode::SUCCESS
}

struct Load<'a> {
    limits: Limits,
    prefix: &'a str,
    callers: u64,
    lasting: Duration,
}

impl Load<'_> {
    async fn run(&self, url: &str) -> (u64, Duration) {
        let (address, _) = Address::parse(url).expect("a URL");
        let settings = RedisSettings {
            // The timeout is long, so that a pause of the machine is not counted as a failure.
            timeout: Duration::from_secs(5),
            ..RedisSettings::new(Topology::Standalone(address))
        };
        let redis = Arc::new(Redis::start(settings, &tokio::runtime::Handle::current()));
        redis
            .wait_for_first_attempt()
            .await
            .expect("a reachable server");
        let store = RedisStore::new(redis, self.prefix);
        let (began, is_over) = (Instant::now(), Cell::new(false));
        let callers = (0..self.callers).map(|caller| self.call(&store, caller, &is_over));
        let end = async {
            tokio::time::sleep(self.lasting).await;
            is_over.set(true);
        };
        let (counts, ()) = futures_util::future::join(join_all(callers), end).await;
        (counts.into_iter().sum(), began.elapsed())
    }

    /// Runs one caller, which waits for each reply before it sends the next request.
    async fn call(&self, store: &RedisStore, caller: u64, is_over: &Cell<bool>) -> u64 {
        let (mut random, mut decided, mut outcomes) = (caller + 1, 0, Vec::new());
        while !is_over.get() {
            let key = format!("user:{:08}", next(&mut random) % KEYS);
            let charge = Charge::new(key.as_bytes(), &self.limits, Cost::ONE).expect("a charge");
            let decision = store.check(&[charge], Effect::Charge, &mut outcomes).await;
            assert_eq!(decision, Ok(Decision::Admitted), "decision {decided}");
            decided += 1;
        }
        decided
    }
}

/// Vigna's random number generator SplitMix64.
fn next(state: &mut u64) -> u64 {
    *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let mut mixed = *state;
    mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    mixed ^ (mixed >> 31)
}

fn limits(names: &str) -> Limits {
    let limits = names.split(',').enumerate();
    let limits = limits.map(|(number, name)| {
        // Each limit has a different capacity, so that no two limits are equal.
        let room = ROOM + u64::try_from(number).expect("a few limits");
        Limit::new(algorithm(name, room)).expect("a limit")
    });
    Limits::new(limits.collect()).expect("the limits of a rule")
}

fn algorithm(name: &str, room: u64) -> Algorithm {
    let rate = Rate {
        count: 1_000,
        period: DAY,
    };
    match name {
        "gcra" => Algorithm::Gcra { rate, burst: room },
        "interval" => Algorithm::TokenBucket {
            capacity: room,
            refill: rate,
            mode: RefillMode::Interval,
        },
        "fixed" => Algorithm::FixedWindow {
            limit: room,
            window: Window::Epoch(DAY),
        },
        "weighted" => Algorithm::SlidingWindowCounter {
            limit: room,
            window: DAY,
            counting: Counting::Weighted,
        },
        "buckets" => Algorithm::SlidingWindowCounter {
            limit: room,
            window: DAY,
            counting: Counting::Buckets {
                buckets: 10,
                strict: true,
            },
        },
        _ => panic!("unknown limit {name}; expected gcra, interval, fixed, weighted or buckets"),
    }
}
