//! Guesses the integer that was probably meant by another notation, for use in error messages. For
//! example, `1e3`, `1_000`, `1,000` and `1k` mean 1000.

use std::ops::RangeInclusive;

use super::bounds;

/// The maximum length of a string for which a number is guessed, in bytes.
const MAX_GUESSED_BYTES: usize = 32;

/// Returns the integer that was probably meant by the malformed `text`, or `None` if there is no
/// good guess, or if `text` is an integer in decimal digits already. The result is at most
/// [`bounds::MAX_COUNT`].
///
/// # Examples
///
/// ```
/// use tidegate_core::notation::integer_meant;
///
/// assert_eq!(integer_meant("1e3"), Some(1_000));
/// assert_eq!(integer_meant("10k"), Some(10_000));
/// assert_eq!((integer_meant("many"), integer_meant("1000")), (None, None));
/// ```
#[must_use]
pub fn integer_meant(text: &str) -> Option<u64> {
    if text.len() > MAX_GUESSED_BYTES || is_digits(text) {
        return None;
    }
    let lower = text.trim().to_ascii_lowercase();
    let number = lower.strip_prefix('+').unwrap_or(&lower);
    // `1.000` means 1 or 1000, depending on the country, so there is no guess.
    let number = match number.split_once('.') {
        Some((whole, zeros)) if zeros != "000" && zeros.bytes().all(|zero| zero == b'0') => whole,
        _ => number,
    };
    let digits = in_digits(number).filter(|digits| is_digits(digits))?;
    let number = digits.parse().ok();
    number.filter(|number| *number <= bounds::MAX_COUNT)
}

/// Returns the advice for an error about `text`, which is not an integer in `range`: "; write 1000"
/// for `1e3`, and an empty string if there is no good guess in `range`.
#[must_use]
pub fn integer_advice(text: &str, range: &RangeInclusive<u64>) -> String {
    let meant = integer_meant(text).filter(|meant| range.contains(meant));
    meant.map_or_else(String::new, |meant| format!("; write {meant}"))
}

/// Converts a number in lower case to digits: `1k`, `1_000` and `1e3` to `1000`. Any other text is
/// returned unchanged. Returns `None` if the number is not an integer or too large.
pub(super) fn in_digits(text: &str) -> Option<String> {
    let digits = without_separators(text);
    let (mantissa, zeros) = match (digits.strip_suffix('k'), digits.split_once('e')) {
        (Some(thousands), _) => (thousands, 3),
        (None, Some((mantissa, exponent))) => (mantissa, exponent.parse::<usize>().ok()?),
        (None, None) => return Some(digits),
    };
    // Appending zeros multiplies the mantissa correctly only if the mantissa is an integer.
    (is_digits(mantissa) && zeros <= 15).then(|| format!("{mantissa}{}", "0".repeat(zeros)))
}

fn is_digits(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit())
}

/// Removes the separators between groups of three digits. The comma in `1,5` does not separate
/// groups of three digits, and is kept.
fn without_separators(number: &str) -> String {
    let separators = ['_', ',', '\''];
    let mut later_groups = number.split(separators).skip(1);
    if later_groups.all(|group| group.len() == 3) {
        return number.replace(separators, "");
    }
    number.to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_integer_in_another_notation_is_recognised() {
        for (text, meant) in [
            ("1e3", 1_000),
            ("1E3", 1_000),
            ("25e2", 2_500),
            ("1_000", 1_000),
            ("1,000", 1_000),
            ("1'000'000", 1_000_000),
            ("10k", 10_000),
            ("10K", 10_000),
            (" 5 ", 5),
            ("+5", 5),
            ("1000.0", 1_000),
            ("999_999_999_999_999", bounds::MAX_COUNT),
        ] {
            assert_eq!(integer_meant(text), Some(meant), "{text}");
        }
        for text in [
            "",
            "k",
            "e3",
            "1000",
            "many",
            "-5",
            "1.5",
            "1.000",
            "1,5",
            "1e",
            "1e-3",
            "1.5k",
            "1e16",
            "1_000_000_000_000_000",
            "1e99999999999",
            "0x10",
            "५",
        ] {
            assert_eq!(integer_meant(text), None, "{text}");
        }
        assert_eq!(integer_meant(&"1".repeat(100)), None);
        assert_eq!(integer_advice("1e3", &(1..=1_000)), "; write 1000");
        assert_eq!(integer_advice("1e3", &(1..=999)), "");
        assert_eq!(integer_advice("0.0", &(1..=9)), "");
    }
}
