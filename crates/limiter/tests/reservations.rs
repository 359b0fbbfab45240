//! Compares reservations in the memory store with a simple reference model.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use futures_util::FutureExt as _;
use proptest::prelude::*;
use tidegate::{Clock, rate_limiter::SlotTurn};
use tidegate_config::{Config, ReservationsConfig};
use tidegate_core::{Cost, MemoryBounds, MemoryStore, Request, Scratch, Span, Timestamp};
use tidegate_limiter::{ServerLimiter, reservations::Reservations};

const START: u64 = 1_700_000_000_000_000;

/// The limit of all tested algorithms, in units.
const LIMIT: u64 = 20;
/// The window of all tested algorithms, in microseconds.
const WINDOW: u64 = 60_000_000;

#[derive(Clone, Debug)]
enum Step {
    /// Reserves `cost` units for `ttl` milliseconds.
    Reserve { cost: u64, ttl: u64 },
    /// Settles a reservation at `cost`. The reservation may have ended before.
    Settle { which: usize, cost: u64 },
    /// Renews a reservation for `ttl` milliseconds. The reservation may have ended before.
    Renew { which: usize, ttl: u64 },
    /// Advances the clock by a number of milliseconds.
    Pass(u64),
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        4 => (1..=LIMIT, 1..30_000_u64).prop_map(|(cost, ttl)| Step::Reserve { cost, ttl }),
        3 => (0..8_usize, 0..=LIMIT + 5).prop_map(|(which, cost)| Step::Settle { which, cost }),
        1 => (0..8_usize, 1..30_000_u64).prop_map(|(which, ttl)| Step::Renew { which, ttl }),
        2 => (0..20_000_u64).prop_map(Step::Pass),
    ]
}

/// Units charged at an instant.
#[derive(Clone, Copy, Debug)]
struct Counted {
    at: u64,
    units: u64,
}

/// A reservation in the model.
#[derive(Clone, Copy, Debug)]
struct Held {
    /// The index of the reservation's units in `Model::counted`.
    counted: usize,
    cost: u64,
    expires: u64,
    is_outstanding: bool,
}

/// The reference model: a list of all charged units. Only the units in the current window count.
struct Model {
    is_fixed: bool,
    now: u64,
    counted: Vec<Counted>,
    held: Vec<Held>,
}

impl Model {
    fn count(&self) -> u64 {
        let in_window = |counted: &&Counted| {
            if self.is_fixed {
                counted.at / WINDOW == self.now / WINDOW
            } else {
                counted.at + WINDOW > self.now
            }
        };
        self.counted
            .iter()
            .filter(in_window)
            .map(|counted| counted.units)
            .sum()
    }

    fn reserve(&mut self, cost: u64, ttl: u64) -> bool {
        if self.count() + cost > LIMIT {
            return false;
        }
        self.counted.push(Counted {
            at: self.now,
            units: cost,
        });
        self.held.push(Held {
            counted: self.counted.len() - 1,
            cost,
            expires: self.now + ttl * 1_000,
            is_outstanding: true,
        });
        true
    }

    /// Refunds the expired reservations.
    fn expire(&mut self) {
        for held in &mut self.held {
            if held.is_outstanding && held.expires <= self.now {
                held.is_outstanding = false;
                self.counted[held.counted].units = 0;
            }
        }
    }

    /// Returns the units that stay charged, or `None` if the reservation has ended.
    fn settle(&mut self, which: usize, cost: u64) -> Option<u64> {
        let held = self
            .held
            .get_mut(which)
            .filter(|held| held.is_outstanding)?;
        held.is_outstanding = false;
        let Held {
            counted,
            cost: reserved,
            ..
        } = *held;
        self.counted[counted].units = cost.min(reserved);
        let excess = cost.saturating_sub(reserved).min(LIMIT - self.count());
        self.counted.push(Counted {
            at: self.now,
            units: excess,
        });
        Some(cost.min(reserved) + excess)
    }

    fn renew(&mut self, which: usize, ttl: u64) -> bool {
        let now = self.now;
        let held = self.held.get_mut(which).filter(|held| held.is_outstanding);
        held.map(|held| held.expires = now + ttl * 1_000).is_some()
    }
}

fn run(algorithm: &str, steps: &[Step]) -> Result<(), TestCaseError> {
    let rules = format!(
        "rules: [{{name: r, limits: [{{algorithm: {algorithm}, limit: {LIMIT}, window: 1min}}]}}]"
    );
    let rules = Config::parse(&rules).unwrap().rules;
    let clock = Clock::manual(Timestamp::from_micros(START));
    let store = MemoryStore::new(MemoryBounds::default());
    let reservations = Reservations::new(ReservationsConfig::default(), None).unwrap();
    let limiter = ServerLimiter::new(rules, store, clock.clone()).with_reservations(reservations);
    let mut model = Model {
        is_fixed: algorithm == "fixed_window",
        now: START,
        counted: Vec::new(),
        held: Vec::new(),
    };
    let mut tokens: Vec<String> = Vec::new();
    let millis = Span::from_millis;
    for step in steps {
        match *step {
            Step::Reserve { cost, ttl } => {
                let request = Request::new(&[], Cost::new(cost).unwrap()).unwrap();
                let (rules, mut scratch) = (limiter.rules(), Scratch::default());
                let reserved = limiter.reserve(
                    &rules,
                    &mut scratch,
                    &request,
                    millis(ttl),
                    SlotTurn::at_once(),
                    |_, verdict, reservation| {
                        let remaining = verdict.leading().unwrap().outcome.remaining;
                        (verdict.allowed, remaining, reservation)
                    },
                );
                let reserved = reserved.now_or_never().unwrap().unwrap();
                let (is_allowed, remaining, reservation) = reserved;
                prop_assert_eq!(is_allowed, model.reserve(cost, ttl), "{:?}", step);
                tokens.extend(reservation.map(|reservation| reservation.token));
                prop_assert_eq!(remaining, LIMIT - model.count(), "{:?}", step);
            }
            Step::Settle { which, cost } => {
                let Some(token) = tokens.get(which) else {
                    continue;
                };
                let settled = limiter
                    .settle_reservation(token, cost)
                    .now_or_never()
                    .unwrap();
                let settled = settled.ok().map(|settled| settled.settled);
                prop_assert_eq!(settled, model.settle(which, cost), "{:?}", step);
            }
            Step::Renew { which, ttl } => {
                let Some(token) = tokens.get(which) else {
                    continue;
                };
                let renewed = limiter.renew_reservation(token, millis(ttl)).now_or_never();
                let renewed = renewed.unwrap().map(|renewed| renewed.token);
                prop_assert_eq!(renewed.is_ok(), model.renew(which, ttl), "{:?}", step);
                if let Ok(renewed) = renewed {
                    tokens[which] = renewed;
                }
            }
            Step::Pass(time) => {
                model.now += time * 1_000;
                clock.set(Timestamp::from_micros(model.now));
                limiter.expire_reservations().now_or_never().unwrap();
                model.expire();
            }
        }
        prop_assert!(model.count() <= LIMIT);
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2_000, ..ProptestConfig::default() })]

    #[test]
    fn reservations_on_a_sliding_log_equal_the_model(
        steps in prop::collection::vec(step(), 1..40),
    ) {
        run("sliding_window_log", &steps)?;
    }

    #[test]
    fn reservations_on_a_fixed_window_equal_the_model(
        steps in prop::collection::vec(step(), 1..40),
    ) {
        run("fixed_window", &steps)?;
    }
}
