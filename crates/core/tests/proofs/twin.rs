//! The twin: a reference model for every kind of limit, as simple as possible.
//!
//! The model's state is a water level, a number of tokens, or a list of all charges. The model
//! computes with wide integers, without rounding. The model finds each wait time by searching for
//! the first instant at which its own decision changes. The model shares no arithmetic with the
//! algorithms.

use tidegate_core::{
    Algorithm, Counting, Limit, Outcome, RefillMode, RetryAfter, Span, Timestamp, Window, bounds,
};

/// A duration in microseconds. Every limit becomes fully available again in less than this time.
const HORIZON: u64 = 3_200_000_000_000_000;

/// The model of one limit on one key.
#[derive(Clone, Debug)]
pub(crate) struct Twin {
    quota: u64,
    soft: u64,
    pub(crate) count_denied: bool,
    pub(crate) in_full: bool,
    /// Whether the limit is a concurrency limit, for which wait times are estimates.
    has_slots: bool,
    model: Model,
}

#[derive(Clone, Debug)]
enum Model {
    Water(Water),
    Tokens(Tokens),
    Past(Past),
}

/// A leaky bucket that leaks `leak` units per `period`. `level` is the number of units multiplied
/// by `period`.
#[derive(Clone, Debug)]
struct Water {
    capacity: i128,
    leak: i128,
    period: i128,
    level: i128,
    at: u64,
    queue: bool,
}

/// A token bucket that receives `refill` tokens in each `interval`. The first interval starts when
/// the bucket was last full.
#[derive(Clone, Debug)]
struct Tokens {
    capacity: i128,
    refill: i128,
    interval: u64,
    tokens: i128,
    last_full: u64,
    refills_seen: u64,
}

/// A limit over all past charges. The list `spent` contains the instant and the units of each
/// charge, oldest first.
#[derive(Clone, Debug)]
struct Past {
    limit: u64,
    counted: Counted,
    spent: Vec<(u64, u64)>,
}

#[derive(Clone, Debug)]
enum Counted {
    Grid(Window),
    Sliding(u64),
    Buckets { width: u64, summed: u64 },
    Weighted(u64),
}

impl Twin {
    pub(crate) fn new(limit: &Limit) -> Self {
        let hard = limit.quota() + limit.soft_allowance();
        Self {
            quota: limit.quota(),
            soft: limit.soft_allowance(),
            count_denied: limit.count_denied(),
            in_full: limit.counts_in_full(),
            has_slots: matches!(limit.algorithm(), Algorithm::Concurrency { .. }),
            model: Model::new(limit.algorithm(), hard),
        }
    }

    /// Returns whether the limit admits `cost` now. A cost of 0 is always admitted.
    pub(crate) fn admits(&self, now: u64, cost: u64) -> bool {
        cost == 0 || self.fits(now, cost)
    }

    fn fits(&self, now: u64, cost: u64) -> bool {
        match &self.model {
            Model::Water(water) => {
                water.level_at(now) + i128::from(cost) * water.period
                    <= water.capacity * water.period
            }
            Model::Tokens(tokens) => i128::from(cost) <= tokens.tokens_at(now),
            Model::Past(past) => {
                let (weight, unit) = past.weight(now);
                weight + i128::from(cost) * unit <= i128::from(past.limit) * unit
            }
        }
    }

    /// Charges an admitted cost, or counts a denied cost. The count does not exceed the limit
    /// unless `in_full` is true.
    pub(crate) fn spend(&mut self, now: u64, cost: u64) {
        match &mut self.model {
            Model::Water(water) => {
                let full = water.capacity * water.period;
                water.level = full.min(water.level_at(now) + i128::from(cost) * water.period);
                water.at = now;
            }
            Model::Tokens(tokens) => tokens.take(now, cost),
            Model::Past(past) => past.spend(now, cost, self.in_full),
        }
    }

    /// Refunds `units` units, beginning with the most recently spent units.
    pub(crate) fn refund(&mut self, now: u64, units: u64) {
        match &mut self.model {
            Model::Water(water) => {
                water.level = (water.level_at(now) - i128::from(units) * water.period).max(0);
                water.at = now;
            }
            Model::Tokens(tokens) => {
                let left = tokens.tokens_at(now) + i128::from(units);
                tokens.refills_seen = tokens.refills_by(now);
                tokens.tokens = left.min(tokens.capacity);
            }
            Model::Past(past) => past.refund(now, units),
        }
    }

    /// Returns the delay of a request that is charged now.
    pub(crate) fn delay(&self, now: u64) -> u64 {
        match &self.model {
            Model::Water(water) if water.queue => self.reset_after(now),
            _ => 0,
        }
    }

    pub(crate) fn remaining(&self, now: u64) -> u64 {
        let (mut fits, mut too_much) = (0, self.quota + self.soft + 1);
        while too_much - fits > 1 {
            let middle = fits + (too_much - fits) / 2;
            if self.admits(now, middle) {
                fits = middle;
            } else {
                too_much = middle;
            }
        }
        fits
    }

    pub(crate) fn reset_after(&self, now: u64) -> u64 {
        first(now, |at| self.is_as_new(at)).expect("everything comes back within the horizon")
    }

    pub(crate) fn retry(&self, now: u64, cost: u64) -> RetryAfter {
        if cost > self.quota + self.soft {
            return RetryAfter::Never;
        }
        let wait = first(now, |at| self.admits(at, cost));
        let wait = wait.expect("a cost that fits is admitted eventually");
        RetryAfter::After(Span::from_micros(wait.min(self.hint(now, cost))))
    }

    /// Returns the estimated wait time for a concurrency slot, from 0.1 to 10 seconds; `u64::MAX`
    /// for all other kinds of limits.
    fn hint(&self, now: u64, cost: u64) -> u64 {
        let Model::Past(past) = &self.model else {
            return u64::MAX;
        };
        if !self.has_slots {
            return u64::MAX;
        }
        let live = (0..past.spent.len()).filter(|at| past.counts(*at, now));
        let live: Vec<(u64, u64)> = live.map(|at| past.spent[at]).collect();
        let held: u128 = live.iter().map(|(_, units)| u128::from(*units)).sum();
        let oldest = live.iter().map(|(since, _)| *since).min();
        let age = u128::from(now - oldest.unwrap_or(now));
        let missing = (held + u128::from(cost)).saturating_sub(past.limit.into());
        let spread = (age * missing).div_ceil(held.max(1));
        u64::try_from(spread.clamp(100_000, 10_000_000)).unwrap_or(u64::MAX)
    }

    /// Returns the outcome of an operation. `before` is the model before the operation, `self`
    /// after it.
    pub(crate) fn outcome(&self, before: &Self, now: u64, cost: u64, charged: bool) -> Outcome {
        let allowed = before.admits(now, cost);
        Outcome {
            allowed,
            over_limit: charged && cost > 0 && !before.fits(now, cost + self.soft),
            limit: self.quota,
            remaining: self.remaining(now),
            reset_after: Span::from_micros(self.reset_after(now)),
            retry_after: if allowed {
                RetryAfter::NOW
            } else {
                self.retry(now, cost)
            },
            delay: Span::from_micros(if charged { before.delay(now) } else { 0 }),
            excess: self.excess(now),
        }
    }

    fn excess(&self, now: u64) -> u64 {
        match &self.model {
            Model::Past(past) if let Counted::Grid(_) = past.counted => {
                let beyond = past.weight(now).0 - i128::from(past.limit);
                u64::try_from(beyond).unwrap_or(0)
            }
            _ => 0,
        }
    }

    fn is_as_new(&self, now: u64) -> bool {
        match &self.model {
            Model::Water(water) => water.level_at(now) == 0,
            Model::Tokens(tokens) => tokens.tokens_at(now) == tokens.capacity,
            Model::Past(past) => past.weight(now).0 == 0,
        }
    }
}

/// Returns the time from `now` until `holds` becomes true. Once `holds` is true, it must stay true.
pub(crate) fn first(now: u64, holds: impl Fn(u64) -> bool) -> Option<u64> {
    if holds(now) {
        return Some(0);
    }
    if !holds(now + HORIZON) {
        return None;
    }
    let (mut too_soon, mut enough) = (0, HORIZON);
    while enough - too_soon > 1 {
        let middle = too_soon + (enough - too_soon) / 2;
        if holds(now + middle) {
            enough = middle;
        } else {
            too_soon = middle;
        }
    }
    Some(enough)
}

impl Model {
    fn new(algorithm: &Algorithm, hard: u64) -> Self {
        let past = |counted| {
            Self::Past(Past {
                limit: hard,
                counted,
                spent: Vec::new(),
            })
        };
        match algorithm {
            Algorithm::Gcra { rate, .. } => Self::Water(Water::new(hard, *rate, false)),
            Algorithm::LeakyBucket { leak, queue, .. } => {
                Self::Water(Water::new(hard, *leak, *queue))
            }
            Algorithm::TokenBucket { refill, mode, .. } => match mode {
                RefillMode::Continuous => Self::Water(Water::new(hard, *refill, false)),
                RefillMode::Interval => Self::Tokens(Tokens {
                    capacity: hard.into(),
                    refill: refill.count.into(),
                    interval: refill.period.as_micros(),
                    tokens: hard.into(),
                    last_full: 0,
                    refills_seen: 0,
                }),
            },
            Algorithm::FixedWindow { window, .. } => past(Counted::Grid(window.clone())),
            Algorithm::SlidingWindowLog { window, .. }
            | Algorithm::Concurrency { lease: window, .. } => {
                past(Counted::Sliding(window.as_micros()))
            }
            Algorithm::SlidingWindowCounter {
                window, counting, ..
            } => past(match counting {
                Counting::Weighted => Counted::Weighted(window.as_micros()),
                Counting::Buckets { buckets, strict } => Counted::Buckets {
                    width: window.as_micros() / u64::from(*buckets),
                    summed: u64::from(*buckets) + u64::from(*strict),
                },
            }),
        }
    }
}

impl Water {
    fn new(capacity: u64, rate: tidegate_core::Rate, queue: bool) -> Self {
        Self {
            capacity: capacity.into(),
            leak: rate.count.into(),
            period: rate.period.as_micros().into(),
            level: 0,
            at: 0,
            queue,
        }
    }

    fn level_at(&self, now: u64) -> i128 {
        let leaked = i128::from(now - self.at) * self.leak;
        (self.level - leaked).max(0)
    }
}

impl Tokens {
    fn refills_by(&self, now: u64) -> u64 {
        (now - self.last_full) / self.interval
    }

    fn tokens_at(&self, now: u64) -> i128 {
        if self.tokens == self.capacity {
            return self.capacity;
        }
        let refills = i128::from(self.refills_by(now) - self.refills_seen);
        self.capacity.min(self.tokens + refills * self.refill)
    }

    fn take(&mut self, now: u64, cost: u64) {
        let tokens = self.tokens_at(now);
        if tokens == self.capacity {
            self.last_full = now;
        }
        self.refills_seen = self.refills_by(now);
        self.tokens = (tokens - i128::from(cost)).max(0);
    }
}

impl Past {
    /// Returns the units that count at `now` as the numerator and the denominator of a fraction.
    fn weight(&self, now: u64) -> (i128, i128) {
        let sum = |counts: &dyn Fn(u64) -> bool| -> i128 {
            let counted = self.spent.iter().filter(|(at, _)| counts(*at));
            counted.map(|(_, cost)| i128::from(*cost)).sum()
        };
        match &self.counted {
            Counted::Grid(Window::Epoch(span)) => {
                let window = |at: u64| at / span.as_micros();
                (sum(&|at| window(at) == window(now)), 1)
            }
            Counted::Grid(Window::Calendar(calendar)) => {
                let window = |at: u64| calendar.window(Timestamp::from_micros(at));
                (sum(&|at| window(at) == window(now)), 1)
            }
            Counted::Grid(Window::FirstRequest(span)) => {
                let first = self.first_of_window(span.as_micros());
                let ended = first.is_none_or(|first| first + span.as_micros() <= now);
                let counts = |at: u64| !ended && first.is_some_and(|first| at >= first);
                (sum(&counts), 1)
            }
            Counted::Sliding(window) => (sum(&|at| at + window > now), 1),
            Counted::Buckets { width, summed } => (sum(&|at| at / width + summed > now / width), 1),
            Counted::Weighted(window) => {
                let (current, left) = (now / window, window - now % window);
                let before = sum(&|at| at / window + 1 == current);
                let unit = i128::from(*window);
                let weight = before * i128::from(left) + sum(&|at| at / window == current) * unit;
                (weight, unit)
            }
        }
    }

    /// Returns the instant of the request that started the last window.
    fn first_of_window(&self, window: u64) -> Option<u64> {
        let instants = self.spent.iter().map(|(at, _)| *at);
        instants.fold(None, |first, at| match first {
            Some(first) if at < first + window => Some(first),
            _ => Some(at),
        })
    }

    /// Records spent units. Fixed and weighted windows stop counting at their limit. Sliding
    /// windows keep the newest units, up to their limit.
    fn spend(&mut self, now: u64, cost: u64, in_full: bool) {
        let cost = match &self.counted {
            Counted::Grid(_) => {
                let (count, _) = self.weight(now);
                let most = if in_full {
                    bounds::MAX_COUNT
                } else {
                    self.limit
                };
                cost.min(most - u64::try_from(count).expect("a count is at most the maximum"))
            }
            Counted::Weighted(window) => {
                let current = self
                    .spent
                    .iter()
                    .filter(|(at, _)| at / window == now / window);
                cost.min(self.limit - current.map(|(_, cost)| cost).sum::<u64>())
            }
            Counted::Sliding(_) | Counted::Buckets { .. } => cost.min(self.limit),
        };
        if cost > 0 {
            self.spent.push((now, cost));
        }
        if let Counted::Sliding(_) | Counted::Buckets { .. } = self.counted {
            self.forget_all_but(self.limit);
        }
    }

    /// Removes up to `units` of the units that still count, newest first.
    fn refund(&mut self, now: u64, units: u64) {
        let mut left = units;
        let mut newest_first: Vec<usize> = (0..self.spent.len()).rev().collect();
        newest_first.retain(|at| self.counts(*at, now));
        for at in newest_first {
            let given_back = left.min(self.spent[at].1);
            self.spent[at].1 -= given_back;
            left -= given_back;
        }
        self.spent.retain(|(_, cost)| *cost > 0);
    }

    /// Returns whether the charge at index `at` counts at `now`, in full or in part.
    fn counts(&self, at: usize, now: u64) -> bool {
        let alone = Self {
            spent: self.spent[..=at].to_vec(),
            ..self.clone()
        };
        let before = Self {
            spent: self.spent[..at].to_vec(),
            ..self.clone()
        };
        alone.weight(now) != before.weight(now)
    }

    fn forget_all_but(&mut self, newest: u64) {
        let mut left = newest;
        for (_, cost) in self.spent.iter_mut().rev() {
            *cost = left.min(*cost);
            left -= *cost;
        }
        self.spent.retain(|(_, cost)| *cost > 0);
    }
}
