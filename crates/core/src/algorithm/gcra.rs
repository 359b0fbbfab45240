//! GCRA (generic cell rate algorithm). The state of a key is a single instant, the theoretical
//! arrival time (TAT).
//!
//! This module implements `gcra`, `token_bucket` with continuous refill, and `leaky_bucket` as a
//! meter and as a queue. GCRA, the token bucket and the leaky bucket are the same algorithm. The
//! difference between the TAT and the current time corresponds to the tokens that are missing from
//! a token bucket, or to the water in a leaky bucket. `B` is the capacity of the bucket.
//!
//! ```text
//!           now                TAT         now + tau
//! ──────────┼───── spent ───────┼─── remaining ──┼────────▶ time
//!
//! tau = B * T, one unit is T = period / rate
//! ```
//!
//! - **Guarantee.** With a rate of `L` per period `P` and a capacity of `B`, at most
//!   `B + floor(t * L / P)` units are admitted in any closed interval of length `t`. If `t * L / P`
//!   is an integer, the maximum for a half-open interval is one unit less.
//! - **Queue.** Admitted requests are served in the order of admission. A request of cost `n`
//!   delays later requests by `n * T`. In a queue that never becomes empty, a request of cost `n`
//!   and the next request start `n * T` apart, except that each start time is rounded up to a whole
//!   microsecond. A request of cost `n` waits for at most `tau - n * T`.
//! - **Exact arithmetic.** The emission interval `T` is `p / l` microseconds, a reduced fraction.
//!   The TAT consists of whole microseconds and a fraction with the denominator `l`. Nothing is
//!   rounded, so with a rate of 7 per second, exactly 7 units are refilled each second.
//! - **Memory.** The state takes 16 bytes. A key expires when its TAT has passed.
//! - **Weakness.** In a window of length `W`, up to `B + floor(W * L / P)` units can be admitted,
//!   which is `2 * L` if `B = L` and `W = P`. If `2 * L` is too much, choose a smaller `B` or a
//!   sliding window.
//! - **Source.** ITU-T I.371 (GCRA, virtual scheduling); Turner 1986 (leaky bucket).

use crate::{
    algorithm::{
        ChargePosition, Counter, CounterState, Drain, ExactMicros, LimitStatus, Mark, Numbers,
        Outcome, RetryAfter, Terms,
    },
    error::LimitError,
    limit::{
        Rate,
        bounds::{self, check_count},
        gcd,
        rate::check_rate,
    },
    time::{Span, Timestamp},
};

impl CounterState for ExactMicros {
    fn expires(&self) -> Timestamp {
        self.ceil()
    }

    fn move_back(&mut self, span: Span) {
        self.whole = self.whole.saturating_sub(span.as_micros());
    }

    fn write(&self, put: &mut dyn FnMut(u64)) {
        [self.whole, self.part].into_iter().for_each(put);
    }

    fn read(next: &mut dyn FnMut() -> Option<u64>) -> Option<Self> {
        Some(Self {
            whole: next()?,
            part: next()?,
        })
    }
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct Gcra {
    /// The numerator of the emission interval `T`, which is the reduced fraction `p / l`, in
    /// microseconds.
    p: u64,
    /// The denominator of the emission interval.
    l: u64,
    /// The emission interval `T`: the time that refills one unit.
    unit: ExactMicros,
    /// The capacity as a duration: the maximum difference between the TAT and the current time.
    tau: ExactMicros,
    /// Half of the capacity as a duration. If less than half of the capacity remains for a key, the
    /// key is hot (`is_hot`) and is not evicted.
    half: ExactMicros,
    capacity: u64,
    queue: bool,
}

/// The parameters of a GCRA limit, with the names of their fields for error messages.
#[derive(Clone, Copy, Debug)]
pub(crate) struct GcraParameters {
    pub(crate) rate_field: &'static str,
    pub(crate) rate: Rate,
    pub(crate) capacity_field: &'static str,
    pub(crate) capacity: u64,
    /// Whether admitted requests are delayed, so that they are evenly spaced.
    pub(crate) queue: bool,
}

/// The result of a decision: the outcome, the new TAT, and whether the key is hot. A key is hot if
/// the request was denied, or if less than half of the capacity remains.
#[derive(Clone, Copy, Debug)]
pub(crate) struct GcraStep {
    pub(crate) outcome: Outcome,
    pub(crate) tat: ExactMicros,
    pub(crate) is_hot: bool,
}

impl Gcra {
    /// Validates the parameters, and creates the limit.
    pub(crate) fn new(parameters: GcraParameters) -> Result<Self, LimitError> {
        let GcraParameters {
            rate_field,
            rate,
            capacity_field,
            capacity,
            queue,
        } = parameters;
        check_rate(rate_field, rate)?;
        check_count(capacity_field, capacity, 1)?;
        let divisor = gcd(rate.count, rate.period.as_micros());
        let (l, p) = (rate.count / divisor, rate.period.as_micros() / divisor);
        let tau_micros = (u128::from(capacity) * u128::from(p)).div_ceil(u128::from(l));
        if tau_micros > u128::from(bounds::MAX_DRAIN.as_micros()) {
            let problem = format!(
                "refilling {capacity} at {rate} takes longer than the maximum of 100 years; lower `{capacity_field}` or \
                 raise `{rate_field}`"
            );
            return Err(LimitError::new(capacity_field, problem));
        }
        Ok(Self::of_units(p, l, capacity, queue))
    }

    /// Creates a GCRA limit whose emission interval `T` is `p / l` microseconds, a reduced
    /// fraction.
    fn of_units(p: u64, l: u64, capacity: u64, queue: bool) -> Self {
        let mut gcra = Self {
            p,
            l,
            unit: ExactMicros::default(),
            tau: ExactMicros::default(),
            half: ExactMicros::default(),
            capacity,
            queue,
        };
        gcra.unit = gcra.duration_of(1);
        gcra.tau = gcra.duration_of(capacity);
        gcra.half = gcra.duration_of(capacity.div_ceil(2));
        gcra
    }

    /// Decides a request in one pass, for a rule with a single limit. The result is the same as
    /// with the separate methods of [`Counter`].
    #[inline]
    pub(crate) fn decide(&self, tat: ExactMicros, now: Timestamp, cost: u64) -> GcraStep {
        if let Some(whole) = self.without_fractions() {
            return whole.decide_exactly(tat, now, cost);
        }
        self.decide_exactly(tat, now, cost)
    }

    /// Returns a copy of this limit for which the compiler knows that `l` is 1 and that there are
    /// no fractions. For this copy, the compiler removes the arithmetic on fractions. Returns
    /// `None` if the time per unit is not an integer number of microseconds.
    #[inline]
    fn without_fractions(&self) -> Option<Self> {
        let whole = |exact: ExactMicros| ExactMicros { part: 0, ..exact };
        (self.l == 1).then(|| Self {
            l: 1,
            unit: whole(self.unit),
            tau: whole(self.tau),
            half: whole(self.half),
            ..*self
        })
    }

    // This function is always inlined, so that the compiler can use `l = 1` inside it.
    #[inline(always)]
    fn decide_exactly(&self, tat: ExactMicros, now: Timestamp, cost: u64) -> GcraStep {
        let (base, latest_tat) = (self.base(tat, now), self.latest_tat(now));
        let end = if cost <= self.capacity {
            self.plus(base, self.span_of(cost))
        } else {
            ExactMicros::NEVER
        };
        let allowed = end <= latest_tat;
        let spent = if allowed { end } else { base };
        let room = self.minus(latest_tat, spent);
        let outcome = Outcome {
            allowed,
            over_limit: false,
            limit: self.capacity,
            remaining: if room < self.unit {
                0
            } else {
                self.units_in(room)
            },
            reset_after: spent.ceil().since(now),
            retry_after: if allowed {
                RetryAfter::NOW
            } else if end == ExactMicros::NEVER {
                RetryAfter::Never
            } else {
                RetryAfter::After(self.minus(end, latest_tat).as_span())
            },
            delay: if self.queue && allowed {
                base.ceil().since(now)
            } else {
                Span::ZERO
            },
            excess: 0,
        };
        GcraStep {
            outcome,
            tat: spent,
            is_hot: !allowed || room < self.half,
        }
    }

    /// Returns a lower bound for the part of a charge that has not drained yet, as a duration.
    /// `ends` is a lower bound for the instant at which the charge has drained completely; `None`
    /// if there is no known bound. Refunds of other charges can make that instant earlier.
    fn undrained(
        &self,
        tat: ExactMicros,
        now: Timestamp,
        position: &ChargePosition,
        ends: Option<ExactMicros>,
        duration: ExactMicros,
    ) -> ExactMicros {
        let passed = ExactMicros {
            whole: now.since(position.at).as_micros(),
            part: 0,
        };
        // The part that has drained cannot be longer than the time since the charge.
        let by_time = self.minus(duration, passed);
        match ends {
            None => by_time,
            // If the TAT is before `ends`, the key has been reset since the charge.
            Some(ends) if ends > tat => ExactMicros::default(),
            Some(ends) => by_time.max(self.minus(ends, ExactMicros::at(now))),
        }
    }

    /// Returns whether this limit is a queue, which delays admitted requests.
    pub(crate) fn is_queue(&self) -> bool {
        self.queue
    }

    /// Converts a TAT from the limit `old`. Returns two instants: the TAT for the same number of
    /// used units under this limit, and the latest TAT that [`Self::adopt`] may set.
    fn converted(
        &self,
        old: &Self,
        tat: ExactMicros,
        now: Timestamp,
    ) -> (ExactMicros, ExactMicros) {
        let ends = old.base(tat, now);
        let debt = old.minus(ends, ExactMicros::at(now));
        let scaled = u128::from(debt.whole) * u128::from(old.l) + u128::from(debt.part);
        let (units, rest) = (scaled / u128::from(old.p), scaled % u128::from(old.p));
        let rest = (rest * u128::from(self.p)).div_ceil(u128::from(old.p));
        // If an earlier conversion did not know the old limit, it preserved the drain time of the
        // used units instead of their number. At the rate of `old`, that time can be worth a huge
        // number of units, so the product can overflow.
        let scaled = units.saturating_mul(self.p.into()).saturating_add(rest);
        let latest = self.latest_tat(now).max(ExactMicros::at(ends.ceil()));
        (self.plus(ExactMicros::at(now), self.exact(scaled)), latest)
    }

    /// Returns the instant to which a charge is added: the TAT or `now`, whichever is later.
    ///
    /// A numerator (`part`) of `l` or more is invalid for this limit. If the numerator is invalid,
    /// the TAT is rounded up to a whole microsecond. An invalid numerator can only come from a
    /// damaged snapshot. All other methods require a numerator below `l`.
    fn base(&self, tat: ExactMicros, now: Timestamp) -> ExactMicros {
        let tat = if tat.part < self.l {
            tat
        } else {
            ExactMicros::at(tat.ceil())
        };
        tat.max(ExactMicros::at(now))
    }

    /// Returns the latest TAT that is allowed at `now`.
    fn latest_tat(&self, now: Timestamp) -> ExactMicros {
        self.plus(ExactMicros::at(now), self.tau)
    }

    fn span_of(&self, cost: u64) -> ExactMicros {
        if cost == 1 {
            self.unit
        } else {
            self.duration_of(cost)
        }
    }

    /// Returns the time that `cost` units take to drain. The calculation cannot overflow, because
    /// `cost` is at most the capacity.
    fn duration_of(&self, cost: u64) -> ExactMicros {
        self.exact(u128::from(cost) * u128::from(self.p))
    }

    /// Converts a multiple of `1 / l` microseconds to whole microseconds and a fraction.
    fn exact(&self, scaled: u128) -> ExactMicros {
        let l = u128::from(self.l);
        ExactMicros {
            whole: narrow(scaled / l),
            part: narrow(scaled % l),
        }
    }

    /// Returns the number of whole units that drain within `span`.
    fn units_in(&self, span: ExactMicros) -> u64 {
        if self.l == 1 {
            return span.whole / self.p;
        }
        narrow(
            (u128::from(span.whole) * u128::from(self.l) + u128::from(span.part))
                / u128::from(self.p),
        )
    }

    fn plus(&self, a: ExactMicros, b: ExactMicros) -> ExactMicros {
        let (whole, part) = (
            a.whole.saturating_add(b.whole),
            a.part.saturating_add(b.part),
        );
        if part < self.l {
            ExactMicros { whole, part }
        } else {
            ExactMicros {
                whole: whole.saturating_add(1),
                part: part - self.l,
            }
        }
    }

    /// Returns `a - b`, or zero if `b` is larger.
    fn minus(&self, a: ExactMicros, b: ExactMicros) -> ExactMicros {
        if a <= b {
            ExactMicros::default()
        } else if a.part >= b.part {
            ExactMicros {
                whole: a.whole - b.whole,
                part: a.part - b.part,
            }
        } else {
            ExactMicros {
                whole: a.whole - b.whole - 1,
                part: a.part + self.l - b.part,
            }
        }
    }
}

impl Counter for Gcra {
    type State = ExactMicros;

    fn numbers(&self, cost: u64) -> Numbers<'_> {
        Numbers::Gcra {
            fraction: self.l,
            duration: (cost <= self.capacity).then(|| self.duration_of(cost)),
            tau: self.tau,
            queue: self.queue,
        }
    }

    fn terms(&self) -> Terms {
        Terms::Gcra {
            numerator: self.p,
            denominator: self.l,
        }
    }

    fn in_terms(&self, terms: &Terms) -> Option<Self> {
        let Terms::Gcra {
            numerator,
            denominator,
        } = *terms
        else {
            return None;
        };
        let (p, l) = (numerator.max(1), denominator.max(1));
        Some(Self::of_units(p, l, self.capacity, self.queue))
    }

    fn drain(
        &self,
        old: Option<&Self>,
        tat: &ExactMicros,
        now: Timestamp,
        cost: u64,
    ) -> Option<Drain> {
        let old = old?;
        let (converted, latest) = self.converted(old, *tat, now);
        (converted > latest).then(|| Drain {
            retry_after: old.retry(tat, now, 0, cost),
            reset_after: old.status(tat, now, 0).reset_after,
        })
    }

    /// Returns the largest numerator that the fraction of a TAT can have.
    fn largest_number(&self) -> u64 {
        self.l - 1
    }

    fn fresh(&self) -> ExactMicros {
        ExactMicros::default()
    }

    /// Converts a TAT from the limit `old`. The number of used units stays the same, but these
    /// units now drain at the rate of this limit.
    ///
    /// The number of used units can exceed this limit's capacity, because servers with the old
    /// limit may still charge the key. The new TAT is not later than both the old TAT and the TAT
    /// of an empty token bucket.
    fn adopt(&self, old: Option<&Self>, tat: &mut ExactMicros, now: Timestamp) {
        let Some(old) = old else {
            // If the old limit is unknown, the used units keep their drain time. Because the
            // denominator of the old fraction is also unknown, the TAT is rounded up to a whole
            // microsecond.
            let latest = ExactMicros::at(now.after(bounds::MAX_DRAIN));
            *tat = ExactMicros::at(tat.ceil()).min(latest);
            return;
        };
        let (converted, latest) = self.converted(old, *tat, now);
        *tat = converted.min(latest);
    }

    fn admits(&self, tat: &mut ExactMicros, now: Timestamp, cost: u64) -> bool {
        cost <= self.capacity
            && self.plus(self.base(*tat, now), self.span_of(cost)) <= self.latest_tat(now)
    }

    fn charge(&self, tat: &mut ExactMicros, now: Timestamp, cost: u64) {
        let cost = cost.min(self.capacity);
        let base = self.base(*tat, now);
        let latest_tat = self.latest_tat(now).max(base);
        *tat = self.plus(base, self.span_of(cost)).min(latest_tat);
    }

    /// Sets `TAT = min(TAT, at + tau)`. `at + tau` is the TAT of a token bucket that becomes empty
    /// at `at`.
    fn clamp(&self, tat: &mut ExactMicros, at: Timestamp) {
        *tat = (*tat).min(self.latest_tat(at));
    }

    fn refund(&self, tat: &mut ExactMicros, now: Timestamp, units: u64) {
        let refunded = self.span_of(units.min(self.capacity));
        *tat = self
            .minus(self.base(*tat, now), refunded)
            .max(ExactMicros::at(now));
    }

    /// Refunds the part of a charge that has not drained yet, but at most `units` units.
    ///
    /// Charges are assumed to drain one after another, in the order in which they were made. `end`
    /// is the TAT right after the charge. Returns the number of microseconds by which later charges
    /// drain earlier because of the refund, rounded up; 0 if there are no later charges. The
    /// documentation of `eval::receipt` explains why this method never refunds too much.
    fn refund_charge(
        &self,
        tat: &mut ExactMicros,
        now: Timestamp,
        position: &ChargePosition,
        units: u64,
    ) -> u64 {
        let Mark::TatAfter(end) = position.mark else {
            return 0;
        };
        let duration = self.duration_of(position.cost.min(self.capacity));
        let ends = position
            .shift
            .map(|whole| self.minus(end, ExactMicros { whole, part: 0 }));
        let is_last = ends == Some(*tat);
        // In a queue, the start times of all admitted requests are already fixed, so only the last
        // charge can be refunded.
        let undrained = if self.queue {
            if end == *tat {
                self.minus(end, ExactMicros::at(now))
            } else {
                ExactMicros::default()
            }
        } else {
            self.undrained(*tat, now, position, ends, duration)
        };
        let given = undrained
            .min(duration)
            .min(self.duration_of(units.min(self.capacity)));
        *tat = self.minus(*tat, given).max(ExactMicros::at(now));
        if is_last {
            0
        } else {
            given.as_span().as_micros()
        }
    }

    fn mark(tat: &ExactMicros) -> Mark {
        Mark::TatAfter(*tat)
    }

    fn status(&self, tat: &ExactMicros, now: Timestamp, _window: usize) -> LimitStatus {
        let base = self.base(*tat, now);
        let room = self.minus(self.latest_tat(now), base);
        let remaining = if room < self.unit {
            0
        } else {
            self.units_in(room)
        };
        LimitStatus {
            remaining,
            reset_after: base.ceil().since(now),
        }
    }

    fn retry(&self, tat: &ExactMicros, now: Timestamp, _window: usize, cost: u64) -> RetryAfter {
        if cost > self.capacity {
            return RetryAfter::Never;
        }
        let end = self.plus(self.base(*tat, now), self.span_of(cost));
        let wait = self.minus(end, self.latest_tat(now));
        RetryAfter::After(wait.as_span())
    }

    /// Returns how much the current wait in the queue exceeds `longest`. Returns zero if the wait
    /// is at most `longest`, or if this limit is not a queue.
    fn excess_delay(&self, tat: &ExactMicros, now: Timestamp, longest: Span) -> Span {
        if !self.queue {
            return Span::ZERO;
        }
        self.base(*tat, now).ceil().since(now.after(longest))
    }

    /// Returns the delay of the request that was just charged: the time until all earlier requests
    /// are done. Returns zero for a limit without a queue.
    fn delay(&self, tat: &ExactMicros, now: Timestamp, cost: u64) -> Span {
        if !self.queue {
            return Span::ZERO;
        }
        self.minus(*tat, self.span_of(cost)).ceil().since(now)
    }
}

/// Converts `wide` to 64 bits; saturates.
pub(crate) fn narrow(wide: u128) -> u64 {
    u64::try_from(wide).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// Compares `decide` with the separate methods of [`Counter`] for arbitrary states,
        /// including invalid states.
        #[test]
        fn the_combined_decision_equals_the_separate_methods(
            (count, period) in prop::sample::select(vec![
                (1, 60_000_000),
                (1_000, 1_000_000),
                (7, 1_000_000),
                (u64::from(u32::MAX), 999_983),
            ]),
            capacity in 1..50_u64,
            queue in any::<bool>(),
            ahead in -1_000_000..2_000_000_000_i64,
            part in prop::sample::select(vec![0, 1, u64::from(u32::MAX)]),
            over in prop::option::of(0..2_u64),
            cost in 1..50_u64,
        ) {
            let rate = Rate { count, period: Span::from_micros(period) };
            let gcra = Gcra::new(GcraParameters {
                rate_field: "rate",
                rate,
                capacity_field: "capacity",
                capacity,
                queue,
            })
            .unwrap();
            let now = Timestamp::from_micros(1_700_000_000_000_000);
            // The range includes the largest valid numerator of the fraction and the smallest
            // invalid one.
            let part = over.map_or(part, |over| gcra.largest_number() + over);
            let tat = ExactMicros { whole: now.as_micros().saturating_add_signed(ahead), part };
            let cost = cost.min(capacity + 1);
            let GcraStep { outcome, tat: after, is_hot } = gcra.decide(tat, now, cost);

            let mut before = tat;
            prop_assert_eq!(outcome.allowed, gcra.admits(&mut before, now, cost));
            let mut expected = gcra.base(tat, now);
            if outcome.allowed {
                gcra.charge(&mut expected, now, cost);
            }
            prop_assert_eq!(after, expected);
            let status = gcra.status(&after, now, 0);
            prop_assert_eq!(
                (outcome.remaining, outcome.reset_after),
                (status.remaining, status.reset_after)
            );
            let (retry, delay) = match outcome.allowed {
                true => (RetryAfter::NOW, gcra.delay(&after, now, cost)),
                false => (gcra.retry(&tat, now, 0, cost), Span::ZERO),
            };
            prop_assert_eq!((outcome.retry_after, outcome.delay), (retry, delay));
            prop_assert_eq!(is_hot, !outcome.allowed || outcome.remaining < capacity.div_ceil(2));
            prop_assert_eq!(
                (outcome.limit, outcome.over_limit, outcome.excess),
                (capacity, false, 0)
            );
        }
    }
}
