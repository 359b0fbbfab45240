//! The kinds of limits that the twin knows, and how a reload changes the limits of a rule.

/// The limit of every kind, in units, except for slots.
pub(crate) const LIMIT: u64 = 20;
/// The window of every kind, and the time in which a full bucket drains, in microseconds.
pub(crate) const WINDOW: u64 = 60_000_000;
/// The number of concurrency slots.
const SLOTS: u64 = 3;
/// The lease of a concurrency slot, in microseconds.
pub(crate) const LEASE: u64 = 30_000_000;
/// The time in which a bucket drains by one unit, in microseconds.
pub(crate) const UNIT: u64 = WINDOW / LIMIT;
pub(crate) const DAY: u64 = 86_400_000_000;

/// A kind of limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    FixedWindow,
    FirstRequest,
    Budget,
    Log,
    Buckets,
    Weighted,
    TokenBucket,
    Gcra,
    Meter,
    Slots,
}

/// How the limits of a rule differ from those at the start.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Change {
    None,
    /// The limit is doubled. The window, the rate or the lease stays the same.
    Doubled,
    /// The window or the lease is shorter. A bucket drains twice as fast.
    Shorter,
    /// The window or the lease is longer. A bucket drains half as fast.
    Longer,
    /// The rule has a second limit, which never denies, before its limit.
    AddedBefore,
    /// The rule has a second limit, which never denies, after its limit.
    AddedAfter,
    /// A log has become slots whose lease is as long as the window, or slots have become a log.
    Swapped,
}

impl Change {
    pub(crate) const ALL: [Self; 7] = [
        Self::None,
        Self::Doubled,
        Self::Shorter,
        Self::Longer,
        Self::AddedBefore,
        Self::AddedAfter,
        Self::Swapped,
    ];

    /// Returns the change without a higher limit. Limits with the same terms use the state of a key
    /// without converting it.
    pub(crate) fn terms(self) -> Self {
        match self {
            Self::Doubled => Self::None,
            other => other,
        }
    }

    /// Returns the change without other windows, rates and leases. If two limits have the same
    /// shape, their states differ only in parameters.
    pub(crate) fn shape(self) -> Self {
        match self {
            Self::Shorter | Self::Longer => Self::None,
            other => other.terms(),
        }
    }

    /// Returns how fast a bucket drains, in half microseconds of [`UNIT`] per microsecond.
    pub(crate) fn drain_rate(self) -> u64 {
        match self {
            Self::Shorter => 4,
            Self::Longer => 1,
            _ => 2,
        }
    }

    /// Returns the index of the limit in its rule.
    pub(crate) fn index_of_limit(self) -> usize {
        usize::from(self == Self::AddedBefore)
    }
}

impl Kind {
    pub(crate) const ALL: [Self; 10] = [
        Self::FixedWindow,
        Self::FirstRequest,
        Self::Budget,
        Self::Log,
        Self::Buckets,
        Self::Weighted,
        Self::TokenBucket,
        Self::Gcra,
        Self::Meter,
        Self::Slots,
    ];

    /// Returns the limit in the notation of the rules file.
    fn limit(self) -> &'static str {
        match self {
            Self::FixedWindow => "{algorithm: fixed_window, limit: 20, window: 1min}",
            Self::FirstRequest => {
                "{algorithm: fixed_window, limit: 20, window: 1min, anchor: first_request}"
            }
            Self::Budget => {
                "{algorithm: fixed_window, limit: 20, anchor: {calendar: day, zone: UTC}}"
            }
            Self::Log => "{algorithm: sliding_window_log, limit: 20, window: 1min}",
            Self::Buckets => {
                "{algorithm: sliding_window_counter, limit: 20, window: 1min, buckets: 6}"
            }
            Self::Weighted => "{algorithm: sliding_window_counter, limit: 20, window: 1min}",
            Self::TokenBucket => "{algorithm: token_bucket, capacity: 20, refill: 20/min}",
            Self::Gcra => "{algorithm: gcra, rate: 20/min, burst: 19}",
            Self::Meter => "{algorithm: leaky_bucket, capacity: 20, leak: 20/min}",
            Self::Slots => "{algorithm: concurrency, limit: 3, lease: 30s}",
        }
    }

    /// Returns whether a reload can change the limit in this way. The limit of a bucket is not
    /// doubled, because its rate would change as well.
    pub(crate) fn can_change(self, change: Change) -> bool {
        match change {
            Change::Doubled => !self.is_bucket(),
            Change::Shorter => self != Self::Budget,
            Change::Swapped => matches!(self, Self::Log | Self::Slots),
            Change::None | Change::Longer | Change::AddedBefore | Change::AddedAfter => true,
        }
    }

    /// Returns the limits of a rule in the notation of the rules file.
    pub(crate) fn limits(self, change: Change) -> String {
        let limit = self.limit();
        let replaced = |pairs: &[(&str, &str)]| {
            let replace = |text: String, (from, to): &(&str, &str)| text.replace(from, to);
            let changed = pairs.iter().fold(limit.to_owned(), replace);
            assert_ne!(changed, limit, "the limit has not changed");
            changed
        };
        match change {
            Change::None => limit.to_owned(),
            Change::Doubled => replaced(&[("limit: 20", "limit: 40"), ("limit: 3,", "limit: 6,")]),
            Change::Shorter => replaced(&[("1min", "24s"), ("30s", "12s"), ("20/min", "40/min")]),
            Change::Longer => replaced(&[
                ("1min", "90s"),
                ("30s", "45s"),
                ("20/min", "10/min"),
                ("calendar: day", "calendar: week"),
            ]),
            Change::AddedBefore => format!("{}, {limit}", self.added_limit()),
            Change::AddedAfter => format!("{limit}, {}", self.added_limit()),
            Change::Swapped if self == Self::Log => replaced(&[
                ("sliding_window_log", "concurrency"),
                ("window: 1min", "lease: 1min"),
            ]),
            Change::Swapped => {
                replaced(&[("concurrency", "sliding_window_log"), ("lease", "window")])
            }
        }
    }

    /// Returns a limit that never denies. A conversion finds a state by its algorithm, so the limit
    /// has another algorithm.
    fn added_limit(self) -> &'static str {
        match self {
            Self::FixedWindow | Self::FirstRequest | Self::Budget => {
                "{algorithm: gcra, rate: 100000/min, burst: 100000}"
            }
            _ => "{algorithm: fixed_window, limit: 100000, window: 1h}",
        }
    }

    pub(crate) fn most(self, change: Change) -> u64 {
        let most = if self == Self::Slots { SLOTS } else { LIMIT };
        if change == Change::Doubled {
            most * 2
        } else {
            most
        }
    }

    pub(crate) fn is_bucket(self) -> bool {
        matches!(self, Self::TokenBucket | Self::Gcra | Self::Meter)
    }

    /// Returns whether the limit counts slots, whose leases can be renewed.
    pub(crate) fn has_slots(self, change: Change) -> bool {
        (self == Self::Slots) != (change == Change::Swapped)
            && matches!(self, Self::Slots | Self::Log)
    }

    /// Returns the length of the window or of the lease, in microseconds.
    pub(crate) fn window(self, change: Change) -> u64 {
        match (self, change) {
            (Self::Slots, Change::Shorter) => 12_000_000,
            (Self::Slots, Change::Longer) => 45_000_000,
            (Self::Slots, _) => LEASE,
            (Self::Budget, Change::Longer) => 7 * DAY,
            (Self::Budget, _) => DAY,
            (_, Change::Shorter) => 24_000_000,
            (_, Change::Longer) => 90_000_000,
            _ => WINDOW,
        }
    }

    /// Returns until when a unit counts that is charged at `at`: at least, and at most. For a
    /// window that begins with a request, the window may have begun before.
    pub(crate) fn counted_until(self, change: Change, at: u64) -> (u64, u64) {
        let window = self.window(change);
        let end = |window: u64, windows: u64| (at / window + windows) * window;
        match self {
            Self::FixedWindow => (end(window, 1), end(window, 1)),
            Self::Budget if change == Change::Longer => {
                // The first day of 1970 was a Thursday, and a week begins on Monday.
                let day = at / DAY;
                let until = (day + 7 - (day + 3) % 7) * DAY;
                (until, until)
            }
            Self::Budget => (end(DAY, 1), end(DAY, 1)),
            Self::FirstRequest => (at + 1, at + window),
            Self::Log | Self::Slots => (at + window, at + window),
            // A strict counter also sums the sub-window in which the window begins.
            Self::Buckets => (end(window / 6, 7), end(window / 6, 7)),
            Self::Weighted => (end(window, 1), end(window, 2)),
            Self::TokenBucket | Self::Gcra | Self::Meter => {
                unreachable!("the units of a bucket drain")
            }
        }
    }
}
