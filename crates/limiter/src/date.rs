//! Human-readable dates.

use tidegate_core::Timestamp;

/// Formats the instant as an RFC 3339 date in UTC, rounded up to whole seconds. Returns `None` for
/// instants after the year 9999.
#[must_use]
pub fn date(instant: Timestamp) -> Option<String> {
    let secs = i64::try_from(instant.as_micros().div_ceil(1_000_000)).ok()?;
    let date = jiff::Timestamp::from_second(secs).ok()?;
    Some(date.to_string())
}
