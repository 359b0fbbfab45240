//! A cache of limits that are sent with requests.
//!
//! Compiling a limit takes one or two divisions and some memory, and applications use the same few
//! limits again and again.

use std::sync::Arc;

use tidegate_core::{Algorithm, Limit, LimitError, Limits, Rate, RefillMode, Span};

/// The parameters of a limit that is sent with a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Numbers {
    pub(super) face: Face,
    /// The burst of GCRA or the capacity of a bucket.
    pub(super) burst: u64,
    pub(super) count: u64,
    pub(super) period_secs: u64,
}

/// The command that uses the limit, which determines its algorithm.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Face {
    /// `CL.THROTTLE`: `burst` simultaneous requests in addition to the regular one.
    Gcra,
    /// `THROTTLE`: `burst` simultaneous requests.
    Bucket,
}

impl Numbers {
    fn compile(self) -> Result<Limits, LimitError> {
        let rate = Rate {
            count: self.count,
            period: Span::from_secs(self.period_secs),
        };
        let algorithm = match self.face {
            Face::Gcra => Algorithm::Gcra {
                rate,
                burst: self.burst,
            },
            Face::Bucket => Algorithm::TokenBucket {
                capacity: self.burst,
                refill: rate,
                mode: RefillMode::Continuous,
            },
        };
        Limits::new(vec![Limit::new(algorithm)?])
    }

    /// Returns the hash slot of the parameters. A collision costs time but gives no wrong result.
    fn slot(self) -> usize {
        const MIX: u64 = 0x9e37_79b9_7f4a_7c15;
        let mixed = [
            self.count,
            self.period_secs,
            u64::from(self.face == Face::Bucket),
        ]
        .iter()
        .fold(self.burst.wrapping_mul(MIX), |mix, number| {
            (mix.rotate_left(23) ^ number).wrapping_mul(MIX)
        });
        // The highest bits are mixed best, so the highest log2(SLOTS) bits are used.
        usize::try_from(mixed >> (u64::BITS - LimitsCache::SLOTS.trailing_zeros())).unwrap_or(0)
    }
}

/// A direct-mapped cache of compiled limits: each limit has exactly one possible slot.
#[derive(Debug, Default)]
pub(super) struct LimitsCache {
    slots: Vec<Option<(Numbers, Arc<Limits>)>>,
}

impl LimitsCache {
    const SLOTS: usize = 64;

    /// Returns the limits with these parameters, compiling them if they are not cached.
    pub(super) fn get(&mut self, numbers: Numbers) -> Result<&Arc<Limits>, LimitError> {
        if self.slots.is_empty() {
            self.slots.resize_with(Self::SLOTS, || None);
        }
        let slot = &mut self.slots[numbers.slot()];
        if slot.as_ref().is_none_or(|(kept, _)| *kept != numbers) {
            *slot = None;
        }
        match slot {
            Some((_, limits)) => Ok(limits),
            empty => Ok(&empty.insert((numbers, Arc::new(numbers.compile()?))).1),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cached_limits_are_correct_if_keys_share_a_slot() {
        let mut cache = LimitsCache::default();
        for round in 0..2 {
            for burst in 0..1_000 {
                let numbers = Numbers {
                    face: Face::Gcra,
                    burst,
                    count: 3,
                    period_secs: 60,
                };
                let limits = cache.get(numbers).unwrap();
                let quotas: Vec<u64> = limits.iter().map(Limit::quota).collect();
                assert_eq!(quotas, [burst + 1], "round {round}");
            }
        }
        let same = Numbers {
            face: Face::Bucket,
            burst: 7,
            count: 3,
            period_secs: 60,
        };
        assert_eq!(
            cache.get(same).unwrap().iter().next().map(Limit::quota),
            Some(7)
        );
    }

    #[test]
    fn rejected_numbers_are_not_cached() {
        let mut cache = LimitsCache::default();
        let refused = Numbers {
            face: Face::Gcra,
            burst: 1,
            count: 0,
            period_secs: 60,
        };
        assert!(cache.get(refused).is_err());
        assert!(cache.get(refused).is_err());
        assert!(
            cache
                .get(Numbers {
                    count: 1,
                    ..refused
                })
                .is_ok()
        );
    }
}
