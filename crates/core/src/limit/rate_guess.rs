//! Guesses the intended rate for a malformed string, for use in error messages. For example, `5 per
//! minute` means `5/min`.

use super::{
    count_guess::in_digits,
    rate::{Rate, in_whole_units, strict},
};

/// The maximum length of a string for which a rate is guessed, in bytes.
const MAX_GUESSED_BYTES: usize = 64;

/// Words that can appear between the count and the period, such as `per` in `5 per minute`.
const SEPARATORS: [&str; 6] = ["per", "a", "an", "each", "every", "in"];

/// Words that can follow the count, such as `requests` in `5 requests`. No word in this list ends
/// with another word of the list.
const COUNTED: [&str; 9] = [
    "requests", "request", "reqs", "req", "times", "calls", "hits", "r", "x",
];

/// Abbreviations that follow the count, such as `rps` in `5rps`, with their periods.
const ABBREVIATIONS: [(&str, &str); 4] = [("rps", "s"), ("qps", "s"), ("rpm", "min"), ("rph", "h")];

/// Unit names that the notation does not accept, with the equivalent periods.
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

/// Returns the rate that was probably meant by the malformed `text`, or `None` if there is no good
/// guess.
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

/// Converts a count to digits, for example `1k`, `1_000` and `1e3` to `1000`, and `5 requests` to
/// `5`.
fn count_text(text: &str) -> Option<String> {
    let number = COUNTED
        .iter()
        .find_map(|word| text.strip_suffix(word))
        .unwrap_or(text);
    if number.is_empty() {
        return Some("1".to_owned());
    }
    in_digits(number)
}

/// Converts a period to a valid period, for example `10mins` to `10min`, and `1.5s` to `1500ms`.
fn period_text(text: &str) -> Option<String> {
    let end = text.find(|letter: char| !letter.is_ascii_digit() && letter != '.')?;
    let (number, name) = text.split_at(end);
    let other = UNITS.iter().find(|(known, _)| *known == name);
    let unit = match other {
        // The replacement, such as `365d`, already begins with a number, so the input must not have
        // one.
        Some((_, unit)) if unit.starts_with('3') && !number.is_empty() => return None,
        Some((_, unit)) => unit,
        None => name,
    };
    let Some((whole, fraction)) = number.split_once('.') else {
        return Some(format!("{number}{unit}"));
    };
    // Convert a fraction to the next smaller unit: `1.5s` becomes `1500ms`.
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
