//! A limit: an algorithm with parameters validated on construction.

mod algorithm;
pub mod bounds;
mod count_guess;
mod implied;
mod like;
mod quota_unit;
pub(crate) mod rate;
mod rate_guess;
mod rate_notation;
mod ratio;
mod slot_wait;
mod spec;
mod text;

use std::sync::Arc;

pub use self::{
    algorithm::{Algorithm, Counting, RefillMode, Window},
    count_guess::{integer_advice, integer_meant},
    quota_unit::QuotaUnit,
    rate::Rate,
    rate_notation::rate,
    ratio::Factor,
    slot_wait::SlotWait,
    spec::{AlgorithmName, Anchor, LimitSpec},
};

pub(crate) use self::ratio::{Ratio, gcd};

use crate::{digest::Digest, error::LimitError, time::Span};

/// A limit: an algorithm with its parameters and its options.
///
/// The constructors validate all numbers. As a result, every decision is computed exactly and
/// without overflow.
///
/// # Examples
///
/// ```
/// use tidegate_core::{Algorithm, Limit, Rate, Span};
///
/// let per_second = Rate { count: 100, period: Span::from_secs(1) };
/// let limit = Limit::new(Algorithm::Gcra { rate: per_second, burst: 5 }).unwrap();
/// assert_eq!(limit.quota(), 6);
///
/// let nothing = Rate { count: 0, period: Span::from_secs(1) };
/// let refused = Limit::new(Algorithm::Gcra { rate: nothing, burst: 5 }).unwrap_err();
/// assert_eq!(refused.field, "rate");
/// ```
#[derive(Clone, Debug)]
pub struct Limit {
    algorithm: Algorithm,
    soft_percent: u32,
    soft_allowance: u64,
    count_denied: bool,
    in_full: bool,
    slot_wait: Option<SlotWait>,
    policy: Arc<str>,
}

/// Two limits are equal if they always lead to the same decisions.
impl PartialEq for Limit {
    fn eq(&self, other: &Self) -> bool {
        self.algorithm == other.algorithm
            && self.soft_percent == other.soft_percent
            && self.count_denied == other.count_denied
            && self.in_full == other.in_full
            && self.slot_wait == other.slot_wait
    }
}

impl Eq for Limit {}

/// Rejects a soft allowance over 1,000 percent.
pub(crate) fn check_soft_percent(percent: u32) -> Result<(), LimitError> {
    if percent > 1_000 {
        let problem = format!("{percent}% exceeds the maximum of 1000%");
        return Err(LimitError::new("soft", problem));
    }
    Ok(())
}

impl Limit {
    /// Creates a limit without validating its numbers.
    pub(crate) fn unvalidated(algorithm: Algorithm) -> Self {
        let policy = policy_text(&algorithm).into();
        Self {
            algorithm,
            soft_percent: 0,
            soft_allowance: 0,
            count_denied: false,
            in_full: false,
            slot_wait: None,
            policy,
        }
    }

    /// Sets the soft allowance without validating the resulting limit.
    pub(crate) fn with_unvalidated_soft_percent(mut self, percent: u32) -> Self {
        let allowance = u128::from(self.quota()) * u128::from(percent) / 100;
        self.soft_percent = percent;
        self.soft_allowance = u64::try_from(allowance).unwrap_or(u64::MAX);
        self
    }

    /// If `count_denied` is true, the limit also counts denied requests, so that a client that does
    /// not back off stays denied. Counting denied requests has no effect on
    /// [`Algorithm::Concurrency`], because a denied request does not hold a slot.
    #[must_use]
    pub fn counting_denied(mut self, count_denied: bool) -> Self {
        let has_slots = matches!(self.algorithm, Algorithm::Concurrency { .. });
        self.count_denied = count_denied && !has_slots;
        self
    }

    /// Counts the full cost of each request that this limit denies, so that the count can exceed
    /// the limit. [`Outcome::excess`] reports by how many units the count exceeds the limit. A
    /// request denied only by other limits is not counted. Services that charge each descriptor of
    /// a request separately, such as Envoy's `ratelimit`, also count the full cost. Counting in
    /// full overrides [`Self::counting_denied`].
    ///
    /// # Errors
    ///
    /// Returns an error for every algorithm except the fixed window, because only the count of a
    /// fixed window can exceed the limit.
    ///
    /// [`Outcome::excess`]: crate::Outcome::excess
    pub fn counting_in_full(mut self) -> Result<Self, LimitError> {
        if !matches!(self.algorithm, Algorithm::FixedWindow { .. }) {
            let problem = "only a fixed window counts denied requests at their full cost";
            return Err(LimitError::new("algorithm", problem));
        }
        self.in_full = true;
        Ok(self)
    }

    /// Returns whether requests for a key can alternate between this limit and `other` without
    /// losing recorded usage. Both limits must have the same algorithm and, unless the algorithm is
    /// a bucket, the same window.
    pub(crate) fn shares_state_with(&self, other: &Self) -> bool {
        use Algorithm as A;
        match (&self.algorithm, &other.algorithm) {
            (A::Gcra { .. }, A::Gcra { .. }) => true,
            (A::TokenBucket { mode: own, .. }, A::TokenBucket { mode, .. }) => own == mode,
            (A::LeakyBucket { queue: own, .. }, A::LeakyBucket { queue, .. }) => own == queue,
            (A::FixedWindow { window: own, .. }, A::FixedWindow { window, .. }) => own == window,
            (A::SlidingWindowLog { window: own, .. }, A::SlidingWindowLog { window, .. })
            | (A::Concurrency { lease: own, .. }, A::Concurrency { lease: window, .. }) => {
                own == window
            }
            (
                A::SlidingWindowCounter {
                    window: own,
                    counting: own_counting,
                    ..
                },
                A::SlidingWindowCounter {
                    window, counting, ..
                },
            ) => own == window && own_counting == counting,
            _ => false,
        }
    }

    /// Returns the name of the algorithm in the rules file.
    pub(crate) fn algorithm_name(&self) -> &'static str {
        let name = match self.algorithm {
            Algorithm::Gcra { .. } => AlgorithmName::Gcra,
            Algorithm::TokenBucket { .. } => AlgorithmName::TokenBucket,
            Algorithm::LeakyBucket { .. } => AlgorithmName::LeakyBucket,
            Algorithm::FixedWindow { .. } => AlgorithmName::FixedWindow,
            Algorithm::SlidingWindowLog { .. } => AlgorithmName::SlidingWindowLog,
            Algorithm::SlidingWindowCounter { .. } => AlgorithmName::SlidingWindowCounter,
            Algorithm::Concurrency { .. } => AlgorithmName::Concurrency,
        };
        name.as_str()
    }

    /// Lets requests wait for a slot of this limit instead of denying them immediately.
    ///
    /// # Errors
    ///
    /// Returns an error for every algorithm except [`Algorithm::Concurrency`], and for a wait time
    /// or queue length that is zero or exceeds its maximum ([`bounds::MAX_SLOT_WAIT`],
    /// [`bounds::MAX_SLOT_QUEUE`]).
    pub fn with_slot_wait(mut self, slot_wait: SlotWait) -> Result<Self, LimitError> {
        if !matches!(self.algorithm, Algorithm::Concurrency { .. }) {
            let problem = "only a concurrency limit has slots for which requests can wait";
            return Err(LimitError::new("wait", problem));
        }
        slot_wait.check_longest()?;
        slot_wait.check_queue()?;
        self.slot_wait = Some(slot_wait);
        Ok(self)
    }

    /// Returns the maximum wait time and queue length for a slot of this limit. If the result is
    /// `None`, a request that finds no free slot is denied immediately.
    #[must_use]
    pub fn slot_wait(&self) -> Option<SlotWait> {
        self.slot_wait
    }

    /// Adds everything that affects a store's decision to `digest`. The encoding is explicit, and
    /// `Digest` includes the version of the encoding.
    pub(crate) fn digest(&self, digest: Digest) -> Digest {
        let digest = match &self.algorithm {
            Algorithm::Gcra { rate, burst } => {
                digest.numbers(&[1, rate.count, rate.period.as_micros(), *burst])
            }
            Algorithm::TokenBucket {
                capacity,
                refill,
                mode,
            } => {
                let mode = match mode {
                    RefillMode::Continuous => 0,
                    RefillMode::Interval => 1,
                };
                let period = refill.period.as_micros();
                digest.numbers(&[2, *capacity, refill.count, period, mode])
            }
            Algorithm::LeakyBucket {
                capacity,
                leak,
                queue,
            } => {
                let period = leak.period.as_micros();
                digest.numbers(&[3, *capacity, leak.count, period, u64::from(*queue)])
            }
            Algorithm::FixedWindow { limit, window } => window.digest(digest.numbers(&[4, *limit])),
            Algorithm::SlidingWindowLog { limit, window } => {
                digest.numbers(&[5, *limit, window.as_micros()])
            }
            Algorithm::Concurrency { limit, lease } => {
                digest.numbers(&[6, *limit, lease.as_micros()])
            }
            Algorithm::SlidingWindowCounter {
                limit,
                window,
                counting,
            } => {
                let digest = digest.numbers(&[7, *limit, window.as_micros()]);
                match counting {
                    Counting::Weighted => digest.number(0),
                    Counting::Buckets { buckets, strict } => {
                        digest.numbers(&[1, u64::from(*buckets), u64::from(*strict)])
                    }
                }
            }
        };
        digest.numbers(&[
            u64::from(self.soft_percent),
            u64::from(self.count_denied),
            u64::from(self.in_full),
        ])
    }

    /// Returns the algorithm with its parameters.
    #[must_use]
    pub fn algorithm(&self) -> &Algorithm {
        &self.algorithm
    }

    /// Returns the soft allowance in percent of the quota.
    #[must_use]
    pub fn soft_percent(&self) -> u32 {
        self.soft_percent
    }

    /// Returns true if denied requests are counted.
    #[must_use]
    pub fn count_denied(&self) -> bool {
        self.count_denied
    }

    /// Returns true if the full cost of each request that this limit denies is counted.
    #[must_use]
    pub fn counts_in_full(&self) -> bool {
        self.in_full
    }

    /// Returns the limit in short notation, such as `20/min` or `100/s burst 5`.
    #[must_use]
    pub fn policy(&self) -> &Arc<str> {
        &self.policy
    }

    /// Returns the quota: the maximum number of units that an idle key can spend at once, excluding
    /// the soft allowance.
    #[must_use]
    pub fn quota(&self) -> u64 {
        match self.algorithm {
            Algorithm::Gcra { burst, .. } => burst.saturating_add(1),
            Algorithm::TokenBucket { capacity, .. } => capacity,
            Algorithm::LeakyBucket {
                capacity, queue, ..
            } => capacity.saturating_add(u64::from(queue)),
            Algorithm::FixedWindow { limit, .. }
            | Algorithm::SlidingWindowLog { limit, .. }
            | Algorithm::Concurrency { limit, .. }
            | Algorithm::SlidingWindowCounter { limit, .. } => limit,
        }
    }

    /// Returns the soft allowance: the number of units over the quota that are admitted and marked
    /// as over the limit.
    #[must_use]
    pub fn soft_allowance(&self) -> u64 {
        self.soft_allowance
    }

    /// Returns the quota plus the soft allowance: the maximum number of units that an idle key can
    /// spend at once.
    pub(crate) fn hard_quota(&self) -> u64 {
        self.quota().saturating_add(self.soft_allowance)
    }

    /// Returns true if `remaining` is less than half of the quota plus the soft allowance.
    pub(crate) fn is_hot(&self, remaining: u64) -> bool {
        remaining.saturating_mul(2) < self.hard_quota()
    }

    /// Returns the length of the window. For GCRA and buckets, the window is the time to refill the
    /// whole quota; for calendar windows, the maximum length of a window; for a concurrency limit,
    /// the lease. With a sliding window counter, spent units can count for longer than the window.
    #[must_use]
    pub fn window(&self) -> Span {
        match &self.algorithm {
            Algorithm::Gcra { rate, .. } => fill_time(self.quota(), *rate),
            Algorithm::TokenBucket {
                capacity,
                refill,
                mode: RefillMode::Continuous,
            } => fill_time(*capacity, *refill),
            Algorithm::TokenBucket {
                capacity,
                refill,
                mode: RefillMode::Interval,
            } => Span::from_micros(
                capacity
                    .div_ceil(refill.count)
                    .saturating_mul(refill.period.as_micros()),
            ),
            Algorithm::LeakyBucket { leak, .. } => fill_time(self.quota(), *leak),
            Algorithm::FixedWindow {
                window: Window::Epoch(span) | Window::FirstRequest(span),
                ..
            } => *span,
            Algorithm::FixedWindow {
                window: Window::Calendar(calendar),
                ..
            } => calendar.longest(),
            Algorithm::SlidingWindowLog { window, .. }
            | Algorithm::Concurrency { lease: window, .. }
            | Algorithm::SlidingWindowCounter { window, .. } => *window,
        }
    }
}

fn fill_time(quota: u64, rate: Rate) -> Span {
    let micros = (u128::from(quota) * u128::from(rate.period.as_micros()))
        .div_ceil(u128::from(rate.count.max(1)));
    Span::from_micros(u64::try_from(micros).unwrap_or(u64::MAX))
}

fn policy_text(algorithm: &Algorithm) -> String {
    match algorithm {
        // Always write the burst, even a burst of 0: a rate without a burst means a window limit,
        // which admits the whole count at once.
        Algorithm::Gcra { rate, burst } => format!("{rate} burst {burst}"),
        Algorithm::TokenBucket {
            capacity, refill, ..
        } if *capacity == refill.count => refill.to_string(),
        Algorithm::TokenBucket {
            capacity, refill, ..
        } => format!("{refill} capacity {capacity}"),
        Algorithm::LeakyBucket { capacity, leak, .. } => format!("{leak} capacity {capacity}"),
        Algorithm::FixedWindow {
            limit,
            window: Window::Epoch(period) | Window::FirstRequest(period),
        }
        | Algorithm::SlidingWindowLog {
            limit,
            window: period,
        }
        | Algorithm::SlidingWindowCounter {
            limit,
            window: period,
            ..
        } => Rate {
            count: *limit,
            period: *period,
        }
        .to_string(),
        Algorithm::FixedWindow {
            limit,
            window: Window::Calendar(calendar),
        } => format!("{limit}/{calendar}"),
        Algorithm::Concurrency { limit, .. } => format!("{limit} at once"),
    }
}
