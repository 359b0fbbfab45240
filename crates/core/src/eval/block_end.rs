//! The end of the block that denies a charge.

use std::num::NonZeroU64;

use crate::time::Timestamp;

/// The end of a block: an instant, or never. A `BlockEnd` takes eight bytes, even in an option, so
/// that charges stay small.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct BlockEnd(NonZeroU64);

impl BlockEnd {
    /// The end of a block that lasts until it is removed. `NEVER` is later than any other end.
    pub const NEVER: Self = Self(NonZeroU64::MAX);

    /// Returns the end of a block that ends at `until`, or never if `until` is `None`.
    #[must_use]
    pub fn at(until: Option<Timestamp>) -> Self {
        until.map_or(Self::NEVER, |until| {
            Self(NonZeroU64::new(until.as_micros()).unwrap_or(NonZeroU64::MIN))
        })
    }

    /// Returns the instant at which the block ends; `None` if the block lasts until it is removed.
    #[must_use]
    pub fn until(self) -> Option<Timestamp> {
        (self != Self::NEVER).then(|| Timestamp::from_micros(self.0.get()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_end_survives_a_round_trip_and_never_is_the_latest() {
        for until in [None, Some(Timestamp::from_micros(7)), Some(Timestamp::MAX)] {
            assert_eq!(BlockEnd::at(until).until(), until);
            assert!(BlockEnd::at(until) <= BlockEnd::NEVER);
        }
        assert_eq!(size_of::<Option<BlockEnd>>(), 8);
    }
}
