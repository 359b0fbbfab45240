//! Active hours: the times of the week at which a rule's conditions can hold.
//!
//! Active hours, also called a schedule, are in local time. When clocks go forward, the skipped
//! local times do not occur on that day. When clocks go back, the repeated local times occur twice.
//! A range that includes midnight belongs to the day on which it begins:
//!
//! ```text
//! time: 22:00-06:00, days: [fri]        Fri 22:00 ├──────────────┤ Sat 06:00
//! ```

use std::fmt;

use jiff::civil::Weekday;

use super::RuleError;
use crate::{
    limit::bounds,
    time::{Timestamp, Zone},
};

const MINUTES_A_DAY: u16 = 24 * 60;

/// A range of times of day. If the end is earlier than the start, the range ends on the next day.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Hours {
    /// The start in minutes since local midnight, less than a day.
    from: u16,
    /// The exclusive end in minutes since local midnight, at most a day.
    to: u16,
}

/// A set of weekdays, with one bit for each day. Monday is the lowest bit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Days(u8);

/// Times of the week in a time zone.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ActiveHours {
    /// The time ranges. If the list is empty, the schedule includes the whole day.
    hours: Box<[Hours]>,
    days: Days,
    zone: Zone,
}

impl Hours {
    /// Parses a range such as `01:00-06:00`, which lasts from 01:00 to the end of 05:59. The range
    /// `22:00-06:00` ends on the next day, and `24:00` is the end of a day.
    ///
    /// # Errors
    ///
    /// Rejects a string that is not a range of two 24-hour times, and a range with two equal times.
    pub fn parse(text: &str) -> Result<Self, RuleError> {
        let ends = text.split_once('-').and_then(|(from, to)| {
            let from = minute(from.trim_end()).filter(|from| *from < MINUTES_A_DAY)?;
            Some((from, minute(to.trim_start())?))
        });
        let problem = match ends {
            Some((from, to)) if from != to => return Ok(Self { from, to }),
            Some(_) => {
                "begins and ends at the same time; remove `time` for the whole day".to_owned()
            }
            None => {
                let advice = Self::nearest(text).map(|nearest| format!("; write {nearest}"));
                let advice = advice.unwrap_or_default();
                format!("expected two 24-hour times such as 22:00-06:00, got {text:?}{advice}")
            }
        };
        Err(RuleError::new("", problem))
    }

    /// Parses other spellings, such as `9:00-17:00`, `9-17` and `9am - 5pm`, so that an error
    /// message can suggest the correct spelling.
    fn nearest(text: &str) -> Option<Self> {
        let (from, to) = text.split_once(['-', '\u{2013}'])?;
        let (from, to) = (loose_minute(from)?, loose_minute(to)?);
        (from != to && from < MINUTES_A_DAY).then_some(Self { from, to })
    }

    /// Returns true if `minute` of `today` is in this range and the range began on one of `days`.
    fn holds(self, minute: u16, today: Weekday, days: Days) -> bool {
        let Self { from, to } = self;
        if from < to {
            return (from..to).contains(&minute) && days.contains(today);
        }
        (minute >= from && days.contains(today)) || (minute < to && days.contains(today.previous()))
    }
}

/// Formats the range like `22:00-06:00`.
impl fmt::Display for Hours {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { from, to } = self;
        write!(
            f,
            "{:02}:{:02}-{:02}:{:02}",
            from / 60,
            from % 60,
            to / 60,
            to % 60
        )
    }
}

impl Days {
    /// All days.
    pub const ALL: Self = Self(0b111_1111);

    const NAMES: [&'static str; 7] = ["mon", "tue", "wed", "thu", "fri", "sat", "sun"];

    /// Parses a day, such as `mon`, or a range of days, such as `fri-mon`, which has four days.
    ///
    /// # Errors
    ///
    /// Rejects every name except `mon`, `tue`, `wed`, `thu`, `fri`, `sat` and `sun`.
    pub fn parse(text: &str) -> Result<Self, RuleError> {
        let at = |name: &str| Self::NAMES.iter().position(|known| *known == name);
        let (first, last) = text.split_once('-').unwrap_or((text, text));
        let (Some(first), Some(last)) = (at(first), at(last)) else {
            let names = Self::NAMES.join(", ");
            let advice = Self::nearest(text).map(|nearest| format!("; {nearest}"));
            let advice = advice.unwrap_or_default();
            let problem = format!(
                "expected one of {names}, or a range such as mon-fri, got {text:?}{advice}"
            );
            return Err(RuleError::new("", problem));
        };
        let count = (last + 7 - first) % 7;
        let days = (first..=first + count).fold(0, |days, at| days | 1 << (at % 7));
        Ok(Self(days))
    }

    /// Returns the correct spelling of days such as `weekdays`, `Monday` and `Mon-Fri`, for an
    /// error message.
    fn nearest(text: &str) -> Option<String> {
        let text = text.to_ascii_lowercase();
        let day = |name: &str| {
            let name = name.trim().trim_end_matches('.');
            let full = ["day", "sday", "nesday", "rsday", "urday"];
            let is_day = |short: &&&str| {
                let rest = name.strip_prefix(**short);
                rest.is_some_and(|rest| {
                    rest.is_empty() || full.contains(&rest.trim_end_matches('s'))
                })
            };
            Self::NAMES.iter().find(is_day).copied()
        };
        Some(match text.trim() {
            "weekday" | "weekdays" | "workday" | "workdays" => "write mon-fri".into(),
            "weekend" | "weekends" => "write sat-sun".into(),
            "all" | "any" | "daily" | "every day" | "everyday" | "*" => {
                "remove `days` for every day".into()
            }
            name => match name.split_once('-') {
                Some((first, last)) => format!("write {}-{}", day(first)?, day(last)?),
                None => format!("write {}", day(name)?),
            },
        })
    }

    /// Returns the union of the two sets.
    #[must_use]
    pub const fn and(self, others: Self) -> Self {
        Self(self.0 | others.0)
    }

    pub(super) fn names(self) -> impl Iterator<Item = &'static str> {
        let is_one = move |at: &usize| self.0 & 1 << at != 0;
        (0..7).filter(is_one).map(|at| Self::NAMES[at])
    }

    fn contains(self, day: Weekday) -> bool {
        self.0 & 1 << day.to_monday_zero_offset() != 0
    }
}

impl ActiveHours {
    /// Creates a schedule of time ranges `hours` that begin on `days`, in the IANA time zone
    /// `zone`. If `hours` is empty, the schedule includes all of each day in `days`.
    ///
    /// # Errors
    ///
    /// Returns an error for `time` if there are more than [`bounds::MAX_HOURS`] ranges, and for
    /// `zone` if the time zone is unknown.
    ///
    /// # Examples
    ///
    /// ```
    /// use tidegate_core::{Days, Hours, ActiveHours, Timestamp};
    ///
    /// let nights = vec![Hours::parse("22:00-06:00").unwrap()];
    /// let fridays = Days::parse("fri").unwrap();
    /// let nights = ActiveHours::new(nights, fridays, "Europe/Berlin").unwrap();
    /// // 2026-06-20T05:00:00+02:00
    /// let saturday_at_5 = Timestamp::from_micros(1_781_924_400_000_000);
    /// assert!(nights.holds(saturday_at_5));
    /// ```
    pub fn new(hours: Vec<Hours>, days: Days, zone: &str) -> Result<Self, RuleError> {
        let most = bounds::MAX_HOURS;
        if hours.len() > most {
            let problem = format!("{} times exceed the maximum of {most}", hours.len());
            return Err(RuleError::new("time", problem));
        }
        let zone = Zone::named(zone).map_err(|problem| RuleError::new("zone", problem))?;
        Ok(Self {
            hours: hours.into(),
            days,
            zone,
        })
    }

    /// Returns true if the schedule includes `now`.
    #[must_use]
    pub fn holds(&self, now: Timestamp) -> bool {
        let wall = self.zone.wall(now);
        let today = wall.weekday();
        if self.hours.is_empty() {
            return self.days.contains(today);
        }
        // jiff never returns a negative hour or minute.
        let part = |part: i8| u16::from(part.unsigned_abs());
        let minute = part(wall.hour()) * 60 + part(wall.minute());
        self.hours
            .iter()
            .any(|hours| hours.holds(minute, today, self.days))
    }

    /// Returns the local weekday, hour and minute at `now`.
    pub(super) fn local_time(&self, now: Timestamp) -> (&'static str, i8, i8) {
        let wall = self.zone.wall(now);
        let day = usize::from(wall.weekday().to_monday_zero_offset().unsigned_abs());
        // The index of a weekday is 0 to 6, so the remainder does not change it.
        (Days::NAMES[day % 7], wall.hour(), wall.minute())
    }

    pub(super) fn hours(&self) -> &[Hours] {
        &self.hours
    }

    pub(super) fn days(&self) -> Days {
        self.days
    }

    pub(super) fn zone_name(&self) -> &str {
        self.zone.name()
    }
}

/// Parses other spellings of a time: `9`, `9:00`, `9am`, `5:30 pm`.
fn loose_minute(text: &str) -> Option<u16> {
    let text = text.trim().to_ascii_lowercase();
    let (time, noon) = match (text.strip_suffix("am"), text.strip_suffix("pm")) {
        (Some(time), _) => (time, Some(0)),
        (_, Some(time)) => (time, Some(12)),
        _ => (&*text, None),
    };
    let (hours, minutes) = time
        .trim()
        .split_once(':')
        .unwrap_or_else(|| (time.trim(), "0"));
    let number = |text: &str| {
        let is_sound = (1..=2).contains(&text.len()) && text.bytes().all(|b| b.is_ascii_digit());
        is_sound.then(|| text.parse::<u16>().ok()).flatten()
    };
    let (hours, minutes) = (
        number(hours)?,
        number(minutes).filter(|minutes| *minutes < 60)?,
    );
    let hours = match noon {
        Some(noon) => (1..=12).contains(&hours).then_some(hours % 12 + noon)?,
        None => hours,
    };
    let minute = hours * 60 + minutes;
    (minute <= MINUTES_A_DAY).then_some(minute)
}

/// Parses a time `HH:MM`, and returns the minutes since midnight.
fn minute(text: &str) -> Option<u16> {
    let (hours, minutes) = text.split_once(':')?;
    let number = |text: &str| {
        let is_sound = text.len() == 2 && text.bytes().all(|byte| byte.is_ascii_digit());
        is_sound.then(|| text.parse::<u16>().ok()).flatten()
    };
    let minutes = number(minutes).filter(|minutes| *minutes < 60)?;
    let minute = number(hours)? * 60 + minutes;
    (minute <= MINUTES_A_DAY).then_some(minute)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn invalid_times_and_days_are_refused_with_a_suggestion() {
        for (text, nearest) in [
            ("9:00-17:00", "; write 09:00-17:00"),
            ("9-17", "; write 09:00-17:00"),
            ("9am - 5:30pm", "; write 09:00-17:30"),
            ("12am-12pm", "; write 00:00-12:00"),
            ("22:00 to 6:00", ""),
            ("25:00-26:00", ""),
        ] {
            let problem = Hours::parse(text).unwrap_err().problem;
            assert!(
                problem.ends_with(&format!("got {text:?}{nearest}")),
                "{problem}"
            );
        }
        for (text, nearest) in [
            ("weekdays", "; write mon-fri"),
            ("Weekend", "; write sat-sun"),
            ("Monday", "; write mon"),
            ("Wednesday-Saturday", "; write wed-sat"),
            ("daily", "; remove `days` for every day"),
            ("monsoon", ""),
        ] {
            let problem = Days::parse(text).unwrap_err().problem;
            assert!(
                problem.ends_with(&format!("got {text:?}{nearest}")),
                "{problem}"
            );
        }
    }
}
