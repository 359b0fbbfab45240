//! A time zone, with conversions between instants and local time.

use jiff::{
    SignedDuration,
    civil::{Date, DateTime},
    tz::TimeZone,
};

use crate::time::Timestamp;

/// An IANA time zone.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Zone {
    zone: TimeZone,
    name: Box<str>,
}

impl Zone {
    /// Looks up a time zone by its IANA name. Returns an error message if the name is unknown.
    pub(crate) fn named(name: &str) -> Result<Self, String> {
        let zone = TimeZone::get(name).map_err(|_| {
            format!("\"{name}\" is not an IANA time zone such as UTC or Europe/Berlin")
        })?;
        let name = name.into();
        Ok(Self { zone, name })
    }

    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    /// Returns the local date and time at `now`.
    pub(crate) fn wall(&self, now: Timestamp) -> DateTime {
        let micros = i64::try_from(now.as_micros()).unwrap_or(i64::MAX);
        let instant = jiff::Timestamp::UNIX_EPOCH
            .checked_add(SignedDuration::from_micros(micros))
            .unwrap_or(jiff::Timestamp::MAX);
        self.zone.to_datetime(instant)
    }

    /// Returns the first instant of `date` in local time.
    pub(crate) fn start_of(&self, date: Date) -> Timestamp {
        let micros = date
            .to_zoned(self.zone.clone())
            .map_or(i64::MAX, |zoned| zoned.timestamp().as_microsecond());
        Timestamp::from_micros(u64::try_from(micros).unwrap_or(0))
    }
}
