//! Parses times in the notations that servers use.

use jiff::{civil::DateTime, tz::Offset};
use tidegate_core::Timestamp;

/// The names of the months in the Common Log Format.
const MONTHS: [&str; 12] = [
    "Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec",
];

/// The notation of a time.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum TimeForm {
    /// A form that is recognised automatically: `10/Oct/2026:13:55:36 +0200`, RFC 3339, or a Unix
    /// timestamp in seconds, milliseconds, microseconds or nanoseconds.
    Any,
    /// The form that a `strftime` pattern describes.
    Pattern(Box<str>),
}

impl TimeForm {
    /// Parses a time. A time without a zone is interpreted as UTC.
    pub(crate) fn parse(&self, text: &str) -> Option<Timestamp> {
        let text = text.trim();
        let parsed = match self {
            Self::Pattern(pattern) => by_pattern(pattern, text)?,
            Self::Any if text.as_bytes().get(2) == Some(&b'/') => common(text)?,
            Self::Any
                if text
                    .bytes()
                    .all(|byte| byte.is_ascii_digit() || byte == b'.') =>
            {
                return since_1970(text);
            }
            Self::Any => rfc3339(text)?,
        };
        let micros = u64::try_from(parsed.as_microsecond()).ok()?;
        Some(Timestamp::from_micros(micros))
    }
}

/// Parses `10/Oct/2026:13:55:36 +0200`. The zone may be missing, and the seconds may have a
/// fraction.
fn common(text: &str) -> Option<jiff::Timestamp> {
    let (clock, zone) = match text.split_once(' ') {
        Some((clock, zone)) => (clock, zone.trim()),
        None => (text, "+0000"),
    };
    let month = MONTHS
        .iter()
        .position(|month| Some(*month) == clock.get(3..6))?;
    let separators = [(6, '/'), (11, ':'), (14, ':'), (17, ':')];
    let has = |(at, separator): &(usize, char)| clock[*at..].starts_with(*separator);
    if !clock.is_ascii() || clock.len() < 20 || !separators.iter().all(has) {
        return None;
    }
    let nanos = match clock.get(20..) {
        Some("") | None => 0,
        Some(fraction) => i32::try_from(fraction_of(fraction.strip_prefix('.')?, 9)?).ok()?,
    };
    let clock = DateTime::new(
        number(clock.get(7..11)?)?,
        i8::try_from(month).ok()? + 1,
        number(clock.get(..2)?)?,
        number(clock.get(12..14)?)?,
        number(clock.get(15..17)?)?,
        // A leap second is treated as the last second of its minute, as in jiff.
        number::<i8>(clock.get(18..20)?)?.min(59),
        nanos,
    );
    offset(zone)?.to_timestamp(clock.ok()?).ok()
}

/// Parses digits without a sign.
fn number<T: std::str::FromStr>(digits: &str) -> Option<T> {
    let is_number = digits.bytes().all(|byte| byte.is_ascii_digit());
    is_number.then(|| digits.parse().ok())?
}

/// Parses `+0200`, `+02:00` or `Z`.
fn offset(zone: &str) -> Option<Offset> {
    if matches!(zone, "Z" | "UTC" | "GMT") {
        return Some(Offset::UTC);
    }
    let (sign, digits) = match zone.as_bytes().first()? {
        b'+' => (1, zone.get(1..)?),
        b'-' => (-1, zone.get(1..)?),
        _ => return None,
    };
    let digits = digits.replace(':', "");
    if digits.len() != 4 {
        return None;
    }
    let (hours, minutes): (i32, i32) = (number(digits.get(..2)?)?, number(digits.get(2..)?)?);
    Offset::from_seconds(sign * (hours * 3_600 + minutes * 60)).ok()
}

fn rfc3339(text: &str) -> Option<jiff::Timestamp> {
    if let Ok(instant) = text.parse() {
        return Some(instant);
    }
    let clock: DateTime = text.parse().ok()?;
    Offset::UTC.to_timestamp(clock).ok()
}

fn by_pattern(pattern: &str, text: &str) -> Option<jiff::Timestamp> {
    if let Ok(instant) = jiff::Timestamp::strptime(pattern, text) {
        return Some(instant);
    }
    Offset::UTC
        .to_timestamp(DateTime::strptime(pattern, text).ok()?)
        .ok()
}

/// Parses a Unix timestamp. The unit depends on the magnitude of the number: numbers up to the year
/// 5138 are seconds; larger numbers are milliseconds, microseconds or nanoseconds.
fn since_1970(text: &str) -> Option<Timestamp> {
    let (whole, fraction) = text.split_once('.').unwrap_or((text, ""));
    let whole: u64 = number(whole)?;
    let micros = match whole {
        0..100_000_000_000 => whole * 1_000_000 + fraction_of(fraction, 6)?,
        100_000_000_000..100_000_000_000_000 => whole * 1_000 + fraction_of(fraction, 3)?,
        100_000_000_000_000..100_000_000_000_000_000 => whole,
        _ => whole / 1_000,
    };
    Some(Timestamp::from_micros(micros))
}

/// Returns the digits after a decimal point in units of 10^-`places`, rounded down.
fn fraction_of(digits: &str, places: usize) -> Option<u64> {
    let used = digits.get(..places).unwrap_or(digits);
    if !digits.bytes().all(|byte| byte.is_ascii_digit()) {
        return None;
    }
    let missing = u32::try_from(places - used.len()).ok()?;
    let value = if used.is_empty() {
        0
    } else {
        used.parse().ok()?
    };
    Some(value * 10_u64.pow(missing))
}

/// Parses a duration such as `0.012`, in units of `unit` microseconds. The result is in
/// microseconds, rounded down.
pub(crate) fn duration_micros(text: &str, unit: u64) -> Option<u64> {
    let (whole, fraction) = text.split_once('.').unwrap_or((text, ""));
    let whole: u64 = number(whole)?;
    let millionths = fraction_of(fraction, 6)?;
    let rest = u64::try_from(u128::from(millionths) * u128::from(unit) / 1_000_000).ok()?;
    whole.checked_mul(unit)?.checked_add(rest)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_parsed_in_every_form() {
        for (text, micros) in [
            ("10/Oct/2000:13:55:36 -0700", 971_211_336_000_000),
            ("10/Oct/2000:20:55:36 +0000", 971_211_336_000_000),
            ("06/Feb/2009:12:14:14.655", 1_233_922_454_655_000),
            ("2000-10-10T20:55:36Z", 971_211_336_000_000),
            ("2000-10-10T22:55:36.25+02:00", 971_211_336_250_000),
            ("2000-10-10 20:55:36", 971_211_336_000_000),
            ("971211336", 971_211_336_000_000),
            ("971211336.001", 971_211_336_001_000),
            ("971211336.0000019", 971_211_336_000_001),
            ("971211336001", 971_211_336_001_000),
            ("971211336001002", 971_211_336_001_002),
            ("971211336001002003", 971_211_336_001_002),
            ("01/Jan/1970:00:00:60 +0000", 59_000_000),
        ] {
            let parsed = TimeForm::Any.parse(text);
            assert_eq!(parsed, Some(Timestamp::from_micros(micros)), "{text}");
        }
        let pattern = TimeForm::Pattern("%d.%m.%Y %H:%M:%S".into());
        let parsed = pattern.parse("10.10.2000 20:55:36").unwrap();
        assert_eq!(parsed.as_micros(), 971_211_336_000_000);
    }

    #[test]
    fn text_that_is_no_time_is_refused() {
        for text in [
            "",
            "-",
            ".",
            "1.2.3",
            "10/Oct/2000",
            "10/Okt/2000:13:55:36 -0700",
            "32/Oct/2000:13:55:36 -0700",
            "10/Oct/2000:13:55:36 0700",
            "10/Oct/2000:13:55:36 -07",
            "10/Oct/2000:+1:55:36 -0700",
            "10/Oct/\u{e9}00:13:55:36",
            "+5/Oct/2000:13:55:36",
            "99999999999999999999999",
            "yesterday",
        ] {
            assert_eq!(TimeForm::Any.parse(text), None, "{text}");
        }
    }

    #[test]
    fn durations_are_in_their_unit() {
        assert_eq!(duration_micros("0.012", 1_000_000), Some(12_000));
        assert_eq!(duration_micros("12", 1_000), Some(12_000));
        assert_eq!(duration_micros("1.5", 1_000), Some(1_500));
        assert_eq!(duration_micros("12", 1), Some(12));
        for text in ["", "-", "-1", "1e3", "99999999999999999999"] {
            assert_eq!(duration_micros(text, 1_000_000), None, "{text}");
        }
    }
}
