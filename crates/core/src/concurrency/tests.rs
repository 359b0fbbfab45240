//! Tests that simulate a service with several workers in virtual time. The simulations check the
//! resulting limit and the latency seen by clients.

use std::{cmp::Reverse, collections::BinaryHeap};

use proptest::prelude::*;

use super::*;

/// A simulated service. Each of the service's `workers` serves one request at a time, in `latency`
/// microseconds. Other requests wait in a queue.
struct Service {
    workers: usize,
    latency: u64,
    /// The time at which each worker becomes free, in microseconds.
    free: BinaryHeap<Reverse<u64>>,
}

impl Service {
    fn new(workers: usize, latency: u64) -> Self {
        let free = (0..workers).map(|_| Reverse(0)).collect();
        Self {
            workers,
            latency,
            free,
        }
    }

    /// Returns the completion time of a request that arrives at `now`.
    fn serve(&mut self, now: u64) -> u64 {
        let Reverse(free) = self.free.pop().expect("there is a worker");
        let done = free.max(now) + self.latency;
        self.free.push(Reverse(done));
        done
    }

    fn set_workers(&mut self, workers: usize, now: u64) {
        while self.free.len() > workers {
            self.free.pop();
        }
        while self.free.len() < workers {
            self.free.push(Reverse(now));
        }
        self.workers = workers;
    }
}

/// The result of a simulation: the limit at the end of each second, the number of served requests,
/// and the highest latency during the last second, in microseconds.
struct Run {
    limits: Vec<u32>,
    served: u64,
    slowest: u64,
}

/// Simulates a service that receives a request every `every` microseconds. Requests over the limit
/// are rejected.
fn run(
    limit: &mut AdaptiveLimit,
    service: &mut Service,
    every: u64,
    seconds: u64,
    changes: &[(u64, usize)],
) -> Run {
    let mut ended: BinaryHeap<Reverse<(u64, u64)>> = BinaryHeap::new();
    let mut run = Run {
        limits: Vec::new(),
        served: 0,
        slowest: 0,
    };
    let mut changes = changes.iter().peekable();
    for second in 0..seconds {
        run.slowest = 0;
        for now in (second * 1_000_000..(second + 1) * 1_000_000)
            .step_by(usize::try_from(every).expect("a few"))
        {
            if let Some((_, workers)) = changes.next_if(|(at, _)| *at <= now) {
                service.set_workers(*workers, now);
            }
            while let Some(Reverse((at, began))) =
                ended.peek().copied().filter(|Reverse((at, _))| *at <= now)
            {
                let in_flight = u32::try_from(ended.len()).expect("a few");
                ended.pop();
                run.served += 1;
                run.slowest = run.slowest.max(at - began);
                let took = Span::from_micros(at - began);
                limit.learn(
                    Timestamp::from_micros(at),
                    in_flight,
                    Completion::Served(took),
                );
            }
            if ended.len() < limit.limit() as usize {
                ended.push(Reverse((service.serve(now), now)));
            }
        }
        run.limits
            .push(u32::try_from(limit.limit / AdaptiveLimit::PARTS).expect("a few"));
    }
    run
}

fn gradient() -> AdaptiveLimit {
    AdaptiveLimit::new(AdaptiveSettings::default()).unwrap()
}

fn aimd(too_slow: u64) -> AdaptiveLimit {
    let method = Method::Aimd(Aimd {
        too_slow: Span::from_millis(too_slow),
        ..Aimd::default()
    });
    AdaptiveLimit::new(AdaptiveSettings {
        method,
        ..AdaptiveSettings::default()
    })
    .unwrap()
}

#[test]
fn double_load_does_not_slow_the_service_down() {
    // Ten workers at 10 ms per request serve 1,000 requests per second; 2,000 requests per second
    // arrive.
    for (name, mut limit) in [("gradient", gradient()), ("aimd", aimd(20))] {
        let mut service = Service::new(10, 10_000);
        let run = run(&mut limit, &mut service, 500, 60, &[]);
        let last = *run.limits.last().unwrap();
        assert!((10..=30).contains(&last), "{name}: {:?}", run.limits);
        assert!(run.slowest <= 30_000, "{name}: {} us", run.slowest);
        assert!(run.served >= 59_000, "{name}: {} served", run.served);
    }
}

/// Tests several latencies and numbers of workers.
#[test]
fn queueing_time_stays_close_to_the_service_time() {
    for (workers, latency) in [
        (10, 10_000),
        (10, 25_000),
        (10, 100_000),
        (10, 500_000),
        (50, 2_000_000),
        (1, 10_000),
        (2, 10_000),
        (4, 10_000),
        (200, 20_000),
    ] {
        let mut service = Service::new(workers, latency);
        let mut limit = gradient();
        // The request rate is twice the capacity of the service.
        let every = latency / workers as u64 / 2;
        let seconds = (latency / 1_000).max(120);
        let run = run(&mut limit, &mut service, every, seconds, &[]);
        let name = format!("{workers} workers, {latency} us: {:?}", run.limits);
        let last = *run.limits.last().unwrap();
        assert!(
            last as usize >= workers && last as usize <= workers * 3 + 2,
            "{name}"
        );
        assert!(
            run.slowest <= latency * 4,
            "{} us at worst, {name}",
            run.slowest
        );
        let could = seconds * 1_000_000 / latency * workers as u64;
        assert!(
            run.served * 100 >= could * 80,
            "{} of {could} served, {name}",
            run.served
        );
    }
}

#[test]
fn the_limit_follows_lost_and_returned_workers() {
    for mut limit in [aimd(20), gradient()] {
        let mut service = Service::new(20, 10_000);
        let changes = [(60_000_000, 10), (120_000_000, 20)];
        let run = run(&mut limit, &mut service, 250, 180, &changes);
        let (before, during, after) = (run.limits[59], run.limits[119], run.limits[179]);
        assert!(during < before && during <= 30, "{:?}", run.limits);
        assert!(after > during && after >= 20, "{:?}", run.limits);
    }
}

#[test]
fn low_load_does_not_raise_the_limit() {
    for mut limit in [gradient(), aimd(1_000)] {
        let mut service = Service::new(10, 1_000);
        // At one request every 2 ms, at most one request is in flight.
        let run = run(&mut limit, &mut service, 2_000, 30, &[]);
        assert!(
            run.limits.iter().all(|limit| *limit <= 20),
            "{:?}",
            run.limits
        );
    }
}

#[test]
fn failures_shrink_the_limit_to_its_minimum() {
    for mut limit in [gradient(), aimd(1_000)] {
        let mut before = limit.limit();
        for window in 1..=1_000_u64 {
            limit.learn(
                Timestamp::from_micros(window * 200_000),
                20,
                Completion::Dropped,
            );
            limit.learn(
                Timestamp::from_micros(window * 200_000 + 100_000),
                20,
                Completion::Dropped,
            );
            assert!(limit.limit() <= before);
            before = limit.limit();
        }
        assert_eq!(before, 1);
    }
}

#[test]
fn a_few_failures_shrink_the_limit_a_little() {
    for mut limit in [gradient(), aimd(1_000)] {
        let took = Completion::Served(Span::from_millis(10));
        for request in 0..2_000_000_u64 {
            let ended = if request % 1_000 == 0 {
                Completion::Dropped
            } else {
                took
            };
            let now = Timestamp::from_micros(request * 100);
            let in_flight = limit.limit();
            limit.learn(now, in_flight, ended);
        }
        assert!(limit.limit() > 300, "{}", limit.limit());
    }
}

#[test]
fn abandoned_requests_shrink_the_limit_of_a_hanging_service() {
    for mut limit in [gradient(), aimd(500)] {
        let mut now = 0;
        let mut after = |ended, limit: &mut AdaptiveLimit| {
            now += 1_000;
            let in_flight = limit.limit();
            limit.learn(Timestamp::from_micros(now), in_flight, ended);
        };
        for _ in 0..5_000 {
            after(Completion::Served(Span::from_millis(10)), &mut limit);
        }
        let before = limit.limit();
        // A request whose client disconnects early gives no information about load.
        for _ in 0..1_000 {
            after(Completion::Abandoned(Span::from_millis(1)), &mut limit);
        }
        assert_eq!(limit.limit(), before);
        for _ in 0..20_000 {
            after(Completion::Abandoned(Span::from_secs(1)), &mut limit);
        }
        assert!(limit.limit() < before / 4, "{} of {before}", limit.limit());
    }
}

#[test]
fn ignored_outcomes_do_not_change_the_limit() {
    let mut limit = gradient();
    for at in 0..10_000 {
        limit.learn(Timestamp::from_micros(at * 1_000), 20, Completion::Ignored);
    }
    assert_eq!(limit.limit(), 20);
}

#[test]
fn new_settings_keep_the_learned_limit_within_their_bounds() {
    let mut limit = gradient();
    let mut service = Service::new(20, 10_000);
    let learnt = run(&mut limit, &mut service, 250, 20, &[]).limits[19];
    assert_ne!(learnt, 20);
    let latency_percent = limit.latency_percent();
    assert!(latency_percent.is_some());
    let same = AdaptiveSettings {
        initial: 7,
        window: Span::from_millis(50),
        ..AdaptiveSettings::default()
    };
    limit.change(same).unwrap();
    assert_eq!(
        (limit.limit(), limit.latency_percent()),
        (learnt, latency_percent)
    );
    let fewer = AdaptiveSettings {
        initial: 3,
        max: 3,
        ..same
    };
    limit.change(fewer).unwrap();
    assert_eq!(
        (limit.limit(), limit.latency_percent()),
        (3, latency_percent)
    );
    let more = AdaptiveSettings {
        method: Method::Aimd(Aimd::default()),
        min: 40,
        initial: 40,
        ..same
    };
    limit.change(more).unwrap();
    assert_eq!((limit.limit(), limit.latency_percent()), (40, None));
    let refused = AdaptiveSettings { min: 0, ..same };
    assert_eq!(limit.change(refused).unwrap_err().field, "min");
    assert_eq!(limit.limit(), 40);
}

#[test]
fn invalid_settings_are_refused_by_field() {
    let refused = |change: fn(&mut AdaptiveSettings)| {
        let mut settings = AdaptiveSettings::default();
        change(&mut settings);
        AdaptiveLimit::new(settings).unwrap_err().field
    };
    assert_eq!(refused(|settings| settings.min = 0), "min");
    assert_eq!(refused(|settings| settings.min = 2_000), "min");
    assert_eq!(refused(|settings| settings.max = 2_000_000), "max");
    assert_eq!(refused(|settings| settings.initial = 1_001), "initial");
    assert_eq!(refused(|settings| settings.samples = 0), "samples");
    assert_eq!(refused(|settings| settings.window = Span::ZERO), "window");
    let all = AdaptiveSettings {
        min: 10,
        max: 5,
        samples: 0,
        window: Span::from_secs(120),
        method: Method::Aimd(Aimd {
            backoff: 100,
            too_slow: Span::ZERO,
        }),
        ..AdaptiveSettings::default()
    };
    let fields: Vec<_> = all.errors().iter().map(|error| error.field).collect();
    assert_eq!(fields, ["min", "samples", "window", "backoff", "too_slow"]);
    let once = AdaptiveSettings {
        min: 2_000_000,
        ..AdaptiveSettings::default()
    };
    assert_eq!(once.errors().len(), 1, "and not of `max` again");
    let gradient = |change: fn(&mut Gradient)| {
        let mut gradient = Gradient::default();
        change(&mut gradient);
        let method = Method::Gradient(gradient);
        let settings = AdaptiveSettings {
            method,
            ..AdaptiveSettings::default()
        };
        AdaptiveLimit::new(settings).unwrap_err().field
    };
    assert_eq!(gradient(|gradient| gradient.tolerance = 99), "tolerance");
    assert_eq!(gradient(|gradient| gradient.queue = 1_001), "queue");
    assert_eq!(gradient(|gradient| gradient.smoothing = 0), "smoothing");
}

proptest! {
    /// Tests that the limit stays within its bounds for arbitrary sequences of results.
    #[test]
    fn the_limit_stays_within_its_bounds(
        is_gradient in any::<bool>(),
        (min, more) in (1..=50_u32, 0..=1_000_000_u32),
        learnt in prop::collection::vec(
            (any::<u64>(), any::<u32>(), 0..4_u8, any::<u64>()),
            0..200,
        ),
    ) {
        let max = min.saturating_add(more).min(MAX_ADAPTIVE);
        let method = if is_gradient { Method::default() } else { Method::Aimd(Aimd::default()) };
        let settings = AdaptiveSettings {
            method,
            min,
            max,
            initial: min,
            samples: 1,
            ..AdaptiveSettings::default()
        };
        let mut limit = AdaptiveLimit::new(settings).unwrap();
        for (at, in_flight, ended, took) in learnt {
            let ended = match ended {
                0 => Completion::Served(Span::from_micros(took)),
                1 => Completion::Dropped,
                2 => Completion::Abandoned(Span::from_micros(took)),
                _ => Completion::Ignored,
            };
            limit.learn(Timestamp::from_micros(at), in_flight, ended);
            prop_assert!((min..=max).contains(&limit.limit()));
        }
    }
}
