//! An instant in whole microseconds.

use super::Span;

/// An instant, as the number of microseconds since the Unix epoch.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Timestamp(u64);

impl Timestamp {
    /// The latest supported instant: 2^53 - 1 µs after the Unix epoch, in the year 2255. A `u64` in
    /// Rust and a double in Lua can both represent this instant exactly.
    pub const MAX: Self = Self((1 << 53) - 1);

    /// Returns the instant that is `micros` microseconds after the Unix epoch, but at most
    /// [`Self::MAX`].
    #[must_use]
    pub const fn from_micros(micros: u64) -> Self {
        if micros < Self::MAX.0 {
            Self(micros)
        } else {
            Self::MAX
        }
    }

    /// Returns the number of microseconds since the Unix epoch.
    #[must_use]
    pub const fn as_micros(self) -> u64 {
        self.0
    }

    /// Returns the number of milliseconds since the Unix epoch, rounded down.
    #[must_use]
    pub const fn as_millis(self) -> u64 {
        self.0 / 1_000
    }

    /// Returns the duration from `earlier` to `self`, or zero if `earlier` is after `self`.
    #[must_use]
    pub const fn since(self, earlier: Self) -> Span {
        Span::from_micros(self.0.saturating_sub(earlier.0))
    }

    /// Returns the instant that is `span` earlier than `self`, but not before the epoch.
    #[must_use]
    pub const fn before(self, span: Span) -> Self {
        Self(self.0.saturating_sub(span.as_micros()))
    }

    /// Returns the instant that is `span` later than `self`, but at most [`Self::MAX`].
    #[must_use]
    pub const fn after(self, span: Span) -> Self {
        Self::from_micros(self.0.saturating_add(span.as_micros()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A sliding window log stores an instant in 53 bits, so every instant must fit in 53 bits.
    #[test]
    fn time_arithmetic_saturates_at_the_maximum() {
        let late = Timestamp::from_micros(u64::MAX);
        assert_eq!(late, Timestamp::MAX);
        assert_eq!(late.after(Span::from_micros(1)), Timestamp::MAX);
        assert_eq!(
            Timestamp::default().after(Span::from_micros(u64::MAX)),
            Timestamp::MAX
        );
        assert_eq!(Timestamp::default().since(late), Span::ZERO);
    }
}
