//! Guesses the rate that a malformed text means: `5 per minute` is `5/min`.

use super::rate::{Rate, in_whole_units, strict};

/// The maximum length of a text for which a rate is guessed, in bytes.
const MAX_GUESSED_BYTES: usize = 64;

/// Words between the count and the period.
const SEPARATORS: [&str; 6] = ["per", "a", "an", "each", "every", "in"];

/// Words after the count. No word is the beginning of a later word in this list.
const COUNTED: [&str; 9] = [
    "requests", "request", "reqs", "req", "times", "calls", "hits", "r", "x",
];

/// Abbreviations of whole rates, and their periods.
const ABBREVIATIONS: [(&str, &str); 4] = [("rps", "s"), ("qps", "s"), ("rpm", "min"), ("rph", "h")];

/// Names of units that the notation does not have, and the periods that these names stand for.
const UNITS: [(&str, &str); 10] = [
    ("secs", "s"),
    ("mins", "min"),
    ("hrs", "h"),
    ("hr", "h"),
    ("msecs", "ms"),
    ("msec", "ms"),
    ("usec", "us"),
    ("years", "365d"),
    ("year", "365d"),
    ("y", "365d"),
];

/// Returns the rate that `text`, which is not a rate, probably means.
pub(super) fn probably_meant(text: &str) -> Option<Rate> {
    if text.len() > MAX_GUESSED_BYTES {
        return None;
    }
    let text = text.to_lowercase();
    let words = text.split_whitespace().map(|word| {
        if SEPARATORS.contains(&word) {
            "/"
        } else {
            word
        }
    });
    let joined: String = words.collect();
    let short = ABBREVIATIONS.iter().find_map(|(name, period)| {
        let count = joined.strip_suffix(name)?;
        Some((count, *period))
    });
    let (count, period) = short.or_else(|| joined.split_once('/'))?;
    let rate = guess(count, period).or_else(|| guess(period, count))?;
    (rate.count > 0).then_some(rate)
}

fn guess(count: &str, period: &str) -> Option<Rate> {
    let (count, period) = (count_text(count)?, period_text(period)?);
    strict(&count, &period).or_else(|| in_whole_units(&count, &period))
}

/// Returns a count in digits: `1000` for `1k`, `1_000` and `1e3`, and `5` for `5 requests`.
fn count_text(text: &str) -> Option<String> {
    let number = COUNTED
        .iter()
        .find_map(|word| text.strip_suffix(word))
        .unwrap_or(text);
    if number.is_empty() {
        return Some("1".to_owned());
    }
    let digits = without_separators(number);
    let (mantissa, zeros) = match (digits.strip_suffix('k'), digits.split_once('e')) {
        (Some(thousands), _) => (thousands, 3),
        (None, Some((mantissa, exponent))) => (mantissa, exponent.parse::<usize>().ok()?),
        (None, None) => return Some(digits),
    };
    // Appending zeros to a fraction would not multiply the number.
    let is_whole = mantissa.bytes().all(|byte| byte.is_ascii_digit());
    (is_whole && zeros <= 15).then(|| format!("{mantissa}{}", "0".repeat(zeros)))
}

/// Removes the separators of groups of three digits. The comma of `1,5` is not such a separator.
fn without_separators(number: &str) -> String {
    let separators = ['_', ',', '\''];
    let mut later_groups = number.split(separators).skip(1);
    if later_groups.all(|group| group.len() == 3) {
        return number.replace(separators, "");
    }
    number.to_owned()
}

/// Returns a period with a unit of the notation: `10min` for `10mins`, `1500ms` for `1.5s`.
fn period_text(text: &str) -> Option<String> {
    let end = text.find(|letter: char| !letter.is_ascii_digit() && letter != '.')?;
    let (number, name) = text.split_at(end);
    let other = UNITS.iter().find(|(known, _)| *known == name);
    let unit = match other {
        // The period of this unit already begins with a number.
        Some((_, unit)) if unit.starts_with('3') && !number.is_empty() => return None,
        Some((_, unit)) => unit,
        None => name,
    };
    let Some((whole, fraction)) = number.split_once('.') else {
        return Some(format!("{number}{unit}"));
    };
    // `1.5s` is 1500 ms.
    let unit = match unit {
        "s" => "ms",
        "ms" => "us",
        _ => return None,
    };
    let places = fraction.len();
    let zeros = 3_usize.checked_sub(places)?;
    let digits = format!("{whole}{fraction}{}", "0".repeat(zeros));
    let digits = digits.trim_start_matches('0');
    (!digits.is_empty()).then(|| format!("{digits}{unit}"))
}
