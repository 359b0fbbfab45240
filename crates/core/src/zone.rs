//! A time zone, and what the clocks on its walls show.

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
    /// The zone of that name, or what to say of a name that is none.
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

    /// What the clock on the wall shows at `now`.
    pub(crate) fn wall(&self, now: Timestamp) -> DateTime {
        let micros = i64::try_from(now.as_micros()).unwrap_or(i64::MAX);
        let instant = jiff::Timestamp::UNIX_EPOCH
            .checked_add(SignedDuration::from_micros(micros))
            .unwrap_or(jiff::Timestamp::MAX);
        self.zone.to_datetime(instant)
    }

    /// The first instant of `date` on the wall.
    pub(crate) fn start_of(&self, date: Date) -> Timestamp {
        let micros = date
            .to_zoned(self.zone.clone())
            .map_or(i64::MAX, |zoned| zoned.timestamp().as_microsecond());
        Timestamp::from_micros(u64::try_from(micros).unwrap_or(0))
    }
}
