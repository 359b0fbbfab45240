//! Compares the estimated and the actual time until a concurrency slot is free, in a simulation of
//! a service under steady load. The seed is fixed.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "a test fails by panicking"
)]

use std::collections::VecDeque;

use tidegate_core::{HoldingTime, SlotEstimate, Span};

const SLOTS: usize = 20;

/// An xorshift64* generator, to avoid a dependency.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_F491_4F6C_DD1D) >> 16
    }

    fn below(&mut self, bound: u64) -> u64 {
        self.next() % bound
    }
}

/// A waiting request: the time at which it gives up, and how long it would hold its slot. The unit
/// of both values is milliseconds.
type Waiting = (u64, u64);

/// The state of the service. Times are in milliseconds.
#[derive(Clone, Default)]
struct Service {
    now: u64,
    /// The start and the end of each held slot.
    held: Vec<(u64, u64)>,
    queue: VecDeque<Waiting>,
}

impl Service {
    /// Advances to the next millisecond. Returns the holding times of the released slots, and the
    /// number of requests that gave up.
    fn step(&mut self) -> (Vec<u64>, usize) {
        self.now += 1;
        let now = self.now;
        let released = self.held.extract_if(.., |(_, end)| *end <= now);
        let released = released.map(|(start, end)| end - start).collect();
        let before = self.queue.len();
        self.queue.retain(|(gives_up, _)| *gives_up > now);
        let gave_up = before - self.queue.len();
        while self.held.len() < SLOTS
            && let Some((_, hold)) = self.queue.pop_front()
        {
            self.held.push((now, now + hold));
        }
        (released, gave_up)
    }

    fn has_free_slot(&self) -> bool {
        self.queue.is_empty() && self.held.len() < SLOTS
    }

    /// Returns the actual time until a request at the end of the queue gets a slot.
    fn truth(&self) -> u64 {
        let mut later = self.clone();
        while !later.has_free_slot() {
            later.step();
        }
        later.now - self.now
    }
}

#[derive(Clone, Copy)]
struct Load {
    /// The number of requests that arrive in 10 seconds. The service can serve 400 requests in 10
    /// seconds.
    arrivals: u64,
    longest_wait: u64,
    queue: usize,
    /// Generates how long a request holds its slot: 500 ms on average.
    hold: fn(&mut Random) -> u64,
}

/// Returns two numbers: the percentage of denials whose estimate is within a factor of two of the
/// actual time, and the number of denials.
fn share_within_factor_of_two(load: Load) -> (usize, usize) {
    const WARM_UP: u64 = 10_000;
    const UNTIL: u64 = 100_000;
    let mut random = Random(0x5EED);
    let (mut service, mut holding_time) = (Service::default(), HoldingTime::default());
    let (mut close, mut refusals) = (0, 0);
    while service.now < UNTIL {
        let (released, mut refused) = service.step();
        for held in released {
            holding_time.observe(Span::from_millis(held));
        }
        if random.below(10_000) < load.arrivals {
            let hold = (load.hold)(&mut random);
            if service.has_free_slot() {
                service.held.push((service.now, service.now + hold));
            } else if service.queue.len() < load.queue {
                let gives_up = service.now + load.longest_wait;
                service.queue.push_back((gives_up, hold));
            } else {
                refused += 1;
            }
        }
        if refused == 0 || service.now < WARM_UP {
            continue;
        }
        let input = SlotEstimate {
            slots: 20,
            missing: 1,
            ahead: u64::try_from(service.queue.len()).unwrap(),
            longest_wait: Span::from_millis(load.longest_wait),
            lease: Span::from_secs(60),
        };
        let announced = holding_time.estimate(&input).unwrap().as_millis_ceil();
        let truth = service.truth();
        refusals += refused;
        if announced <= 2 * truth && truth <= 2 * announced {
            close += refused;
        }
    }
    (close * 100 / refusals, refusals)
}

fn uniform(random: &mut Random) -> u64 {
    250 + random.below(501)
}

/// A geometric distribution, in which most requests are short and a few are very long.
fn geometric(random: &mut Random) -> u64 {
    1 + (0..).find(|_| random.below(500) == 0).unwrap_or(0)
}

const FULL_QUEUE: Load = Load {
    arrivals: 600,
    longest_wait: 2_000,
    queue: 30,
    hold: uniform,
};

#[test]
fn nine_of_ten_refusals_announce_a_time_within_a_factor_of_two() {
    let loads = [
        ("full queue, similar requests", FULL_QUEUE),
        (
            "full queue, very different requests",
            Load {
                hold: geometric,
                ..FULL_QUEUE
            },
        ),
        (
            "full queue, light overload",
            Load {
                arrivals: 430,
                ..FULL_QUEUE
            },
        ),
        (
            "longest wait over, similar requests",
            Load {
                queue: 1_000,
                ..FULL_QUEUE
            },
        ),
        (
            "longest wait over, very different requests",
            Load {
                queue: 1_000,
                hold: geometric,
                ..FULL_QUEUE
            },
        ),
    ];
    for (name, load) in loads {
        let (percent, refusals) = share_within_factor_of_two(load);
        println!("{name}: {percent}% of {refusals} refusals");
        assert!(refusals > 100, "{name}: {refusals}");
        assert!(percent >= 90, "{name}: {percent}%");
    }
}

/// Without a queue, a slot becomes free when the next of 20 requests ends. Requests end at random
/// times, so most estimates cannot be accurate, but they are correct on average.
#[test]
fn without_a_queue_the_estimate_is_right_on_average() {
    let load = Load {
        queue: 0,
        ..FULL_QUEUE
    };
    let (percent, refusals) = share_within_factor_of_two(load);
    println!("no queue: {percent}% of {refusals} refusals");
    assert!(percent >= 40, "{percent}%");
}
