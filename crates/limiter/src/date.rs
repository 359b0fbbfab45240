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

/// Formats the instant as an RFC 3339 date in UTC, rounded down to milliseconds. Instants after the
/// year 9999 are formatted as the end of that year.
#[must_use]
pub fn rfc3339(instant: Timestamp) -> String {
    let millis = i64::try_from(instant.as_micros() / 1_000).unwrap_or(i64::MAX);
    let date = jiff::Timestamp::from_millisecond(millis).unwrap_or(jiff::Timestamp::MAX);
    format!("{date:.3}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates_have_a_fixed_form() {
        let instant = Timestamp::from_micros(1_700_000_000_100_999);
        assert_eq!(date(instant).as_deref(), Some("2023-11-14T22:13:21Z"));
        assert_eq!(rfc3339(instant), "2023-11-14T22:13:20.100Z");
        let last = rfc3339(Timestamp::from_micros(u64::MAX));
        assert_eq!(last.len(), "2023-11-14T22:13:20.100Z".len(), "{last}");
    }
}
