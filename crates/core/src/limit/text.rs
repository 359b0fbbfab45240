//! A limit as text: `20/min`, `100/s burst 20`.

use std::str::FromStr;

use super::{AlgorithmName, Limit, LimitSpec, rate};
use crate::error::LimitError;

/// Parses a limit as [`Limit::policy`] writes it.
///
/// | text | limit |
/// | --- | --- |
/// | `20/min` | a sliding window that never admits more, as [`LimitSpec::shorthand`] defines it |
/// | `100/s burst 20` | [`Algorithm::Gcra`](crate::Algorithm::Gcra): 21 at once, then 100/s |
/// | `100/s capacity 20` | [`Algorithm::TokenBucket`](crate::Algorithm::TokenBucket): 20 at once |
///
/// For any other algorithm, use [`Limit::shorthand`] or [`LimitSpec`].
///
/// # Examples
///
/// ```
/// use tidegate_core::{Algorithm, Limit};
///
/// let limit: Limit = "100/s burst 20".parse()?;
/// assert!(matches!(limit.algorithm(), Algorithm::Gcra { burst: 20, .. }));
/// assert_eq!((limit.quota(), &**limit.policy()), (21, "100/s burst 20"));
///
/// let wrong = "100/s bursts 20".parse::<Limit>().unwrap_err();
/// assert_eq!(wrong.field, "limit");
/// # Ok::<(), tidegate_core::LimitError>(())
/// ```
impl FromStr for Limit {
    type Err = LimitError;

    fn from_str(text: &str) -> Result<Self, LimitError> {
        let words: Vec<&str> = text.split_whitespace().collect();
        let spec = match words[..] {
            [rate] => LimitSpec::parse_shorthand(rate, None)?,
            [rate, "burst", burst] => LimitSpec {
                algorithm: Some(AlgorithmName::Gcra),
                rate: Some(parse_rate(rate)?),
                burst: Some(parse_count("burst", burst)?),
                ..LimitSpec::default()
            },
            [rate, "capacity", capacity] => LimitSpec {
                algorithm: Some(AlgorithmName::TokenBucket),
                capacity: Some(parse_count("capacity", capacity)?),
                refill: Some(parse_rate(rate)?),
                ..LimitSpec::default()
            },
            _ => {
                let problem = format!(
                    "expected a limit such as 20/min, 100/s burst 20 or 100/s capacity 20, got \
                     \"{text}\""
                );
                return Err(LimitError::new("limit", problem));
            }
        };
        // `build` never returns an empty list of errors.
        spec.build().map_err(|mut wrong| wrong.swap_remove(0))
    }
}

fn parse_rate(text: &str) -> Result<super::Rate, LimitError> {
    rate(text).map_err(|error| LimitError::new("rate", error.to_string()))
}

fn parse_count(field: &'static str, text: &str) -> Result<u64, LimitError> {
    let expected = |_| LimitError::new(field, format!("expected a whole number, got \"{text}\""));
    text.parse().map_err(expected)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_policy_is_parsed_to_the_same_limit() {
        let written = [
            Limit::shorthand(AlgorithmName::SlidingWindowLog, "20/min"),
            "20000/min".parse(),
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
    fn an_error_names_the_wrong_part() {
        for (text, field) in [
            ("", "limit"),
            ("20/min burst", "limit"),
            ("20/min burst 3 4", "limit"),
            ("often", "rate"),
            ("often burst 3", "rate"),
            ("0/s burst 3", "rate"),
            ("20/min burst x", "burst"),
            ("20/min burst 9999999999999999", "burst"),
            ("20/min capacity -1", "capacity"),
            ("20/min capacity 0", "capacity"),
        ] {
            let wrong = text.parse::<Limit>().unwrap_err();
            assert_eq!(wrong.field, field, "{text}: {wrong}");
        }
    }
}
