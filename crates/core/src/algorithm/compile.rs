//! Compiles limits into [`Kernel`]s, the implementations of the algorithms. A limit is valid if it
//! can be compiled, so the validating constructors of [`Limit`] are in this module.

use super::{
    Buckets, FixedWindow, Gcra, GcraParameters, Interval, Kernel, Lease, Log, WeightedWindow,
};
use crate::{
    error::LimitError,
    limit::{
        Algorithm, Counting, Limit, RefillMode,
        bounds::{check_count, least_capacity},
        check_soft_percent,
    },
};

impl Limit {
    /// Creates a limit without a soft allowance that does not count denied requests.
    ///
    /// # Errors
    ///
    /// Returns an error for the first field with an invalid value. A value is invalid if it is zero
    /// where zero is not allowed, exceeds its maximum in [`bounds`](crate::bounds), or contradicts
    /// another field.
    pub fn new(algorithm: Algorithm) -> Result<Self, LimitError> {
        let limit = Self::unvalidated(algorithm);
        Kernel::compile(&limit)?;
        Ok(limit)
    }

    /// Adds a soft allowance: the limit admits `percent` more units, and marks the additional
    /// requests as [`over_limit`](crate::Outcome::over_limit).
    ///
    /// # Errors
    ///
    /// Returns an error if `percent` exceeds 1,000 or raises the limit above its maximum.
    pub fn with_soft_percent(self, percent: u32) -> Result<Self, LimitError> {
        check_soft_percent(percent)?;
        let limit = self.with_unvalidated_soft_percent(percent);
        Kernel::compile(&limit)?;
        Ok(limit)
    }
}

impl Kernel {
    /// Validates the parameters of a limit and compiles it.
    pub(crate) fn compile(limit: &Limit) -> Result<Self, LimitError> {
        let hard = limit.hard_quota();
        Ok(match limit.algorithm() {
            Algorithm::Gcra { rate, burst } => {
                check_count("burst", *burst, 0)?;
                let parameters = GcraParameters {
                    rate_field: "rate",
                    rate: *rate,
                    capacity_field: "burst",
                    capacity: hard,
                    queue: false,
                };
                Self::Gcra(Gcra::new(parameters)?)
            }
            Algorithm::TokenBucket {
                capacity,
                refill,
                mode,
            } => {
                check_count("capacity", *capacity, least_capacity(false))?;
                match mode {
                    RefillMode::Continuous => {
                        let parameters = GcraParameters {
                            rate_field: "refill",
                            rate: *refill,
                            capacity_field: "capacity",
                            capacity: hard,
                            queue: false,
                        };
                        Self::Gcra(Gcra::new(parameters)?)
                    }
                    RefillMode::Interval => Self::Interval(Interval::new(*refill, hard)?),
                }
            }
            Algorithm::LeakyBucket {
                capacity,
                leak,
                queue,
            } => {
                check_count("capacity", *capacity, least_capacity(*queue))?;
                let parameters = GcraParameters {
                    rate_field: "leak",
                    rate: *leak,
                    capacity_field: "capacity",
                    capacity: hard,
                    queue: *queue,
                };
                Self::Gcra(Gcra::new(parameters)?)
            }
            Algorithm::FixedWindow { window, .. } => {
                Self::Window(FixedWindow::new(hard, window, limit.counts_in_full())?)
            }
            Algorithm::SlidingWindowLog { window, .. } => Self::Log(Log::new(hard, *window)?),
            Algorithm::Concurrency { lease, .. } => Self::Lease(Lease::new(hard, *lease)?),
            Algorithm::SlidingWindowCounter {
                window,
                counting: Counting::Weighted,
                ..
            } => Self::Weighted(WeightedWindow::new(hard, *window)?),
            Algorithm::SlidingWindowCounter {
                window,
                counting: Counting::Buckets { buckets, strict },
                ..
            } => Self::Buckets(Buckets::new(hard, *window, *buckets, *strict)?),
        })
    }
}
