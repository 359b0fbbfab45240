//! Parses limits in short notation, such as `20/min` or `100/s burst 20`.

use super::{Rate, rate};
use crate::{error::LimitError, shown::shown};

/// A limit in short notation: a rate, and an optional burst or capacity.
pub(super) struct LimitText {
    pub(super) rate: Rate,
    pub(super) size: Option<Size>,
}

/// The number of requests that a limit admits at once, written as a burst or as a capacity.
#[derive(Clone, Copy)]
pub(super) enum Size {
    /// A burst, such as `burst 20`, which admits 21 requests at once.
    Burst(u64),
    /// A capacity, such as `capacity 20`, which admits 20 requests at once.
    Capacity(u64),
}

impl Size {
    /// Returns the name and the value of the field.
    pub(super) fn field(self) -> (&'static str, u64) {
        match self {
            Self::Burst(burst) => ("burst", burst),
            Self::Capacity(capacity) => ("capacity", capacity),
        }
    }
}

/// Parses a limit in the notation `RATE`, `RATE burst N` or `RATE capacity N`.
pub(super) fn parse(text: &str) -> Result<LimitText, LimitError> {
    let words: Vec<&str> = text.split_whitespace().collect();
    let (rate_words, size) = match &words[..] {
        [rate @ .., "burst", burst] => (rate, Some(Size::Burst(parse_count("burst", burst)?))),
        [rate @ .., "capacity", capacity] => {
            let capacity = parse_count("capacity", capacity)?;
            (rate, Some(Size::Capacity(capacity)))
        }
        words => (words, None),
    };
    let rate_text = match size {
        Some(_) => rate_words.join(" "),
        None => text.to_owned(),
    };
    if let Some(count) = slot_count(text) {
        return Err(expected_concurrency(text, count));
    }
    rate(&rate_text)
        .map(|rate| LimitText { rate, size })
        .map_err(|error| match rate_words {
            [_] => LimitError::new("rate", error.to_string()),
            [] => LimitError::new("limit", expected(text)),
            // The first word is a valid rate, but the words after the rate are invalid.
            [first, ..] if rate(first).is_ok() => LimitError::new("limit", expected(text)),
            _ => LimitError::new("limit", error.to_string()),
        })
}

pub(super) fn expected(text: &str) -> String {
    let text = shown(text);
    format!("expected a limit such as 20/min, 100/s burst 20 or 100/s capacity 20, got \"{text}\"")
}

/// Returns the number of slots if `text` means a concurrency limit, such as `10 concurrent` or `10
/// at once`.
pub(super) fn slot_count(text: &str) -> Option<&str> {
    let mut parts = text.split_whitespace();
    let (count, word, next) = (parts.next()?, parts.next()?, parts.next());
    let is_number = !count.is_empty() && count.bytes().all(|byte| byte.is_ascii_digit());
    let words = [
        "concurren",
        "parallel",
        "simultaneous",
        "in-flight",
        "inflight",
    ];
    let word = word.to_ascii_lowercase();
    let is_concurrency =
        words.iter().any(|known| word.starts_with(known)) || (word == "at" && next == Some("once"));
    (is_number && is_concurrency).then_some(count)
}

fn expected_concurrency(text: &str, count: &str) -> LimitError {
    let (text, count) = (shown(text), shown(count));
    let problem = format!(
        "expected a rate such as 20/min or 5/10s, got \"{text}\"; to limit concurrent requests, set \
         `algorithm` to concurrency and `limit` to {count}"
    );
    let meant = format!("{{algorithm: concurrency, limit: {count}}}");
    LimitError::new("limit", problem).meaning(meant)
}

pub(super) fn parse_count(field: &'static str, text: &str) -> Result<u64, LimitError> {
    let is_number = text.bytes().all(|byte| byte.is_ascii_digit());
    let number = text.parse().ok().filter(|_| is_number);
    number.ok_or_else(|| {
        let problem = format!(
            "expected an integer after `{field}`, got \"{}\"",
            shown(text)
        );
        LimitError::new(field, problem)
    })
}

#[cfg(test)]
mod tests {
    use super::super::{AlgorithmName, Limit};

    #[test]
    fn a_policy_is_parsed_to_the_same_limit() {
        let written = [
            Limit::shorthand(AlgorithmName::SlidingWindowLog, "20/min"),
            "20000/min".parse::<Limit>(),
            "100/s burst 20".parse(),
            "5/10s burst 0".parse(),
            "100/s capacity 20".parse(),
        ];
        for (limit, text) in written.into_iter().zip([
            "20/min",
            "20000/min",
            "100/s burst 20",
            "5/10s burst 0",
            "100/s capacity 20",
        ]) {
            let limit = limit.unwrap();
            assert_eq!(text.parse(), Ok(limit.clone()), "{text}");
            assert_eq!(limit.policy().parse(), Ok(limit), "{text}");
        }
    }

    #[test]
    fn a_number_of_slots_is_refused_with_the_full_form() {
        for text in ["10 at once", "10 concurrent", "10 parallel requests"] {
            let error = text.parse::<Limit>().unwrap_err();
            let advice =
                "; to limit concurrent requests, set `algorithm` to concurrency and `limit` to 10";
            assert!(error.problem.ends_with(advice), "{error}");
            assert_eq!(error.meant(), Some("{algorithm: concurrency, limit: 10}"));
        }
    }

    #[test]
    fn an_error_names_the_wrong_part() {
        for (text, field) in [
            ("", "limit"),
            ("20/min burst", "limit"),
            ("20/min burst 3 4", "limit"),
            ("often", "rate"),
            ("often burst 3", "rate"),
            ("0/s burst 3", "rate"),
            ("20/min burst x", "burst"),
            ("20/min burst +3", "burst"),
            ("20/min burst 9999999999999999", "burst"),
            ("20/min capacity -1", "capacity"),
            ("20/min capacity 0", "capacity"),
        ] {
            let wrong = text.parse::<Limit>().unwrap_err();
            assert_eq!(wrong.field, field, "{text}: {wrong}");
        }
    }
}
