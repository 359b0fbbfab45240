//! Calendar windows: days, weeks and months in a time zone, daylight saving included.
//!
//! A day is from midnight to midnight on the wall, so it has 23 or 25 hours when the clocks change. Where
//! midnight does not exist, the day begins at the first instant after the gap. A month anchored on a day
//! that it does not have begins on its last day: 31 is the last of January, and of April the 30th.

use std::fmt;

use jiff::{
    ToSpan,
    civil::{Date, Weekday},
};

use crate::{
    digest::Digest,
    limit::LimitError,
    time::{Span, Timestamp},
    zone::Zone,
};

/// The length of a calendar window.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum CalendarUnit {
    /// From midnight to midnight.
    Day,
    /// Seven days from the anchor weekday.
    Week,
    /// From the anchor day of one month to that of the next.
    Month,
}

impl CalendarUnit {
    /// Every unit by its name in a rules file.
    pub const ALL: [(&'static str, Self); 3] = [
        ("day", Self::Day),
        ("week", Self::Week),
        ("month", Self::Month),
    ];
}

/// A grid of calendar windows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Calendar {
    unit: CalendarUnit,
    zone: Zone,
    day: i8,
}

impl Calendar {
    /// Windows of one `unit` in the IANA time zone `zone`, beginning on day `day`: of the month (1 to 31,
    /// default 1), or of the week (1 is Monday, 7 Sunday, default 1); a day takes none.
    ///
    /// # Errors
    ///
    /// Names `zone` or `day` when the zone is unknown or the day out of range.
    ///
    /// # Examples
    ///
    /// ```
    /// use tidegate_core::{Calendar, CalendarUnit, Timestamp};
    /// let billing = Calendar::new(CalendarUnit::Month, "Europe/Berlin", Some(31)).unwrap();
    /// // 2026-02-15T00:00:00Z lies between the 31st of January and the 28th of February, Berlin time.
    /// let (start, end) = billing.window(Timestamp::from_micros(1_771_113_600_000_000));
    /// assert_eq!(start.as_micros(), 1_769_814_000_000_000); // 2026-01-30T23:00:00Z
    /// assert_eq!(end.as_micros(), 1_772_233_200_000_000);   // 2026-02-27T23:00:00Z
    /// ```
    pub fn new(unit: CalendarUnit, zone: &str, day: Option<i8>) -> Result<Self, LimitError> {
        let zone = Zone::named(zone).map_err(|problem| LimitError::new("zone", problem))?;
        let day = day.unwrap_or(1);
        match Self::wrong_day(unit, day) {
            Some(mistake) => Err(mistake),
            None => Ok(Self { unit, zone, day }),
        }
    }

    pub(crate) fn digest(&self, digest: Digest) -> Digest {
        let unit = match self.unit {
            CalendarUnit::Day => 1,
            CalendarUnit::Week => 2,
            CalendarUnit::Month => 3,
        };
        // A day is from 1 to 31.
        let day = u64::from(self.day.unsigned_abs());
        digest.numbers(&[unit, day]).text(self.zone.name())
    }

    /// Everything that [`Self::new`] would refuse.
    #[must_use]
    pub fn mistakes(unit: CalendarUnit, zone: &str, day: Option<i8>) -> Vec<LimitError> {
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

    /// The unit of the windows.
    #[must_use]
    pub fn unit(&self) -> CalendarUnit {
        self.unit
    }

    /// The window `[start, end)` that contains `now`.
    #[must_use]
    pub fn window(&self, now: Timestamp) -> (Timestamp, Timestamp) {
        let start = self.start_on_or_before(self.zone.wall(now).date());
        let (mut start, mut end) = (start, self.next(start));
        // A gap at midnight can put the instant a day's worth to either side of its civil date.
        // At the end of time every window begins and ends at the last instant, and none is the last.
        while self.zone.start_of(end) <= now && now < Timestamp::MAX {
            (start, end) = (end, self.next(end));
        }
        (self.zone.start_of(start), self.zone.start_of(end))
    }

    /// The longest that one window can be.
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

/// `day Europe/Berlin`, `month UTC from 15`.
impl fmt::Display for Calendar {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let unit = match self.unit {
            CalendarUnit::Day => "day",
            CalendarUnit::Week => "week",
            CalendarUnit::Month => "month",
        };
        write!(f, "{unit} {}", self.zone.name())?;
        if self.day != 1 {
            write!(f, " from {}", self.day)?;
        }
        Ok(())
    }
}
