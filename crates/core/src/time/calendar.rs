//! Calendar windows: days, weeks and months in a time zone, including daylight saving time.
//!
//! A day lasts from midnight to midnight in local time, so a day with a clock change has 23 or 25
//! hours. If a clock change skips midnight, the day begins at the first instant after the gap. If a
//! month does not have the anchor day, the window begins on the last day of the month. For example,
//! with the anchor day 31, windows begin on January 31 and on April 30.

use std::{
    fmt,
    hash::{Hash, Hasher},
};

use jiff::{
    ToSpan,
    civil::{Date, Weekday},
};

use crate::{
    digest::Digest,
    error::LimitError,
    time::{Span, Timestamp, Zone},
};

/// The length of a calendar window.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum CalendarUnit {
    /// A day, from midnight to midnight in local time.
    Day,
    /// Seven days, starting on the anchor weekday.
    Week,
    /// A month, from the anchor day of one month to the anchor day of the next month.
    Month,
}

impl CalendarUnit {
    /// All units, each with its name in the rules file.
    pub const ALL: [(&'static str, Self); 3] = [
        ("day", Self::Day),
        ("week", Self::Week),
        ("month", Self::Month),
    ];

    /// Returns the name of the unit in the rules file.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Day => "day",
            Self::Week => "week",
            Self::Month => "month",
        }
    }
}

/// The calendar windows of a limit: the unit, the time zone, and the day on which a window begins.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Calendar {
    unit: CalendarUnit,
    zone: Zone,
    day: i8,
}

/// The hash uses the name of the time zone, because a time zone's rules cannot be hashed.
impl Hash for Calendar {
    fn hash<H: Hasher>(&self, state: &mut H) {
        (self.unit, self.zone.name(), self.day).hash(state);
    }
}

impl Calendar {
    /// Creates a calendar with windows of one `unit` each, in the IANA time zone `zone`. `day` is
    /// the day on which a window begins. For a month, `day` is the day of the month (1 to 31,
    /// default 1). For a week, `day` is the weekday (1 is Monday, 7 is Sunday, default 1). For a
    /// day, `day` must be 1 or `None`.
    ///
    /// # Errors
    ///
    /// Returns an error for the field `zone` if the time zone is unknown, or for the field `day` if
    /// the day is out of range.
    ///
    /// # Examples
    ///
    /// ```
    /// use tidegate_core::{Calendar, CalendarUnit, Timestamp};
    /// let billing = Calendar::new(CalendarUnit::Month, "Europe/Berlin", Some(31)).unwrap();
    /// // 2026-02-15T00:00:00Z is between January 31 and February 28, Berlin time.
    /// let (start, end) = billing.window(Timestamp::from_micros(1_771_113_600_000_000));
    /// assert_eq!(start.as_micros(), 1_769_814_000_000_000); // 2026-01-30T23:00:00Z
    /// assert_eq!(end.as_micros(), 1_772_233_200_000_000);   // 2026-02-27T23:00:00Z
    /// ```
    pub fn new(unit: CalendarUnit, zone: &str, day: Option<i8>) -> Result<Self, LimitError> {
        let zone = Zone::named(zone).map_err(|problem| LimitError::new("zone", problem))?;
        let day = day.unwrap_or(1);
        match Self::wrong_day(unit, day) {
            Some(error) => Err(error),
            None => Ok(Self { unit, zone, day }),
        }
    }

    pub(crate) fn digest(&self, digest: Digest) -> Digest {
        let unit = match self.unit {
            CalendarUnit::Day => 1,
            CalendarUnit::Week => 2,
            CalendarUnit::Month => 3,
        };
        // `day` is between 1 and 31.
        let day = u64::from(self.day.unsigned_abs());
        digest.numbers(&[unit, day]).text(self.zone.name())
    }

    /// Returns all errors in the arguments `zone` and `day`. [`Self::new`] returns only the first
    /// error.
    #[must_use]
    pub fn errors(unit: CalendarUnit, zone: &str, day: Option<i8>) -> Vec<LimitError> {
        let of_zone = Zone::named(zone).err();
        let of_zone = of_zone.map(|problem| LimitError::new("zone", problem));
        let of_day = Self::wrong_day(unit, day.unwrap_or(1));
        of_zone.into_iter().chain(of_day).collect()
    }

    fn wrong_day(unit: CalendarUnit, day: i8) -> Option<LimitError> {
        let most = match unit {
            CalendarUnit::Day => 1,
            CalendarUnit::Week => 7,
            CalendarUnit::Month => 31,
        };
        let problem = || format!("must be from 1 to {most} for this calendar, got {day}");
        (!(1..=most).contains(&day)).then(|| LimitError::new("day", problem()))
    }

    /// Returns the name of the time zone.
    #[must_use]
    pub fn zone(&self) -> &str {
        self.zone.name()
    }

    /// Returns the day on which a window begins, as in [`Self::new`].
    #[must_use]
    pub fn day(&self) -> i8 {
        self.day
    }

    /// Returns the unit of the windows.
    #[must_use]
    pub fn unit(&self) -> CalendarUnit {
        self.unit
    }

    /// Returns the window `[start, end)` that contains `now`.
    #[must_use]
    pub fn window(&self, now: Timestamp) -> (Timestamp, Timestamp) {
        let start = self.start_on_or_before(self.zone.wall(now).date());
        let (mut start, mut end) = (start, self.next(start));
        // If the clocks of the time zone are set back across midnight, midnight occurs twice, and a
        // new window begins at the first midnight. After the change, the local date is again the
        // last day of the previous window, although `now` is in the new window. Therefore, advance
        // until the end of the window is after `now`. The check against `Timestamp::MAX` ends the
        // loop at the last representable instant, because all further windows start and end at this
        // instant.
        while self.zone.start_of(end) <= now && now < Timestamp::MAX {
            (start, end) = (end, self.next(end));
        }
        (self.zone.start_of(start), self.zone.start_of(end))
    }

    /// Returns the maximum length of a window, including one additional hour for a clock change.
    pub(crate) fn longest(&self) -> Span {
        let hours = match self.unit {
            CalendarUnit::Day => 25,
            CalendarUnit::Week => 7 * 24 + 1,
            CalendarUnit::Month => 31 * 24 + 1,
        };
        Span::from_secs(hours * 3_600)
    }

    fn start_on_or_before(&self, date: Date) -> Date {
        match self.unit {
            CalendarUnit::Day => date,
            CalendarUnit::Week => {
                let anchor = Weekday::from_monday_one_offset(self.day).unwrap_or(Weekday::Monday);
                let back = date.weekday().since(anchor);
                date.saturating_sub(i64::from(back).days())
            }
            CalendarUnit::Month => {
                let start = self.anchor_in_month(date);
                if start <= date {
                    start
                } else {
                    self.anchor_in_month(date.first_of_month().saturating_sub(1.day()))
                }
            }
        }
    }

    fn next(&self, start: Date) -> Date {
        match self.unit {
            CalendarUnit::Day => start.saturating_add(1.day()),
            CalendarUnit::Week => start.saturating_add(7.days()),
            CalendarUnit::Month => {
                self.anchor_in_month(start.first_of_month().saturating_add(1.month()))
            }
        }
    }

    fn anchor_in_month(&self, date: Date) -> Date {
        let last = date.days_in_month();
        let first = date.first_of_month();
        first.saturating_add(i64::from(self.day.min(last) - 1).days())
    }
}

/// Formats the calendar as `day Europe/Berlin` or `month UTC from 15`.
impl fmt::Display for Calendar {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.unit.as_str(), self.zone.name())?;
        if self.day != 1 {
            write!(f, " from {}", self.day)?;
        }
        Ok(())
    }
}
