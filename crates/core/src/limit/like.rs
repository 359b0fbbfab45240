//! Parses limits in short notation, taking the algorithm and the options from another limit.

use super::{
    Algorithm, AlgorithmName, Anchor, Counting, Limit, LimitSpec, Window,
    text::{expected, parse_count},
};
use crate::error::LimitError;

impl Limit {
    /// Parses a limit in short notation, with the algorithm and the options of `like`: `20/min`,
    /// `100/s burst 20`, `100/s capacity 20`, or `40 at once` for a concurrency limit.
    ///
    /// # Errors
    ///
    /// Returns an error if the string is malformed, or does not fit the algorithm of `like`.
    ///
    /// # Examples
    ///
    /// ```
    /// use tidegate_core::{AlgorithmName, Limit};
    ///
    /// let like = Limit::shorthand(AlgorithmName::FixedWindow, "20/min")?;
    /// let limit = Limit::parse_like("40/min", &like)?;
    /// assert_eq!(limit, Limit::shorthand(AlgorithmName::FixedWindow, "40/min")?);
    /// # Ok::<(), tidegate_core::LimitError>(())
    /// ```
    pub fn parse_like(text: &str, like: &Self) -> Result<Self, LimitError> {
        let spec = match like.algorithm() {
            Algorithm::Concurrency { lease, .. } => LimitSpec {
                algorithm: Some(AlgorithmName::Concurrency),
                limit: Some(parse_slots(text)?),
                lease: Some(*lease),
                wait: like.slot_wait().map(|slot_wait| slot_wait.longest),
                slot_queue: like.slot_wait().map(|slot_wait| slot_wait.queue),
                ..LimitSpec::default()
            },
            Algorithm::Gcra { .. } => LimitSpec::parse_shorthand(text, Some(AlgorithmName::Gcra))?,
            Algorithm::TokenBucket { mode, .. } => LimitSpec {
                refill_mode: Some(*mode),
                ..LimitSpec::parse_shorthand(text, Some(AlgorithmName::TokenBucket))?
            },
            Algorithm::LeakyBucket { queue, .. } => LimitSpec {
                queue: Some(*queue),
                ..LimitSpec::parse_shorthand(text, Some(AlgorithmName::LeakyBucket))?
            },
            Algorithm::FixedWindow { window, .. } => in_window(text, window)?,
            Algorithm::SlidingWindowLog { .. } => {
                LimitSpec::parse_shorthand(text, Some(AlgorithmName::SlidingWindowLog))?
            }
            Algorithm::SlidingWindowCounter { counting, .. } => {
                let name = AlgorithmName::SlidingWindowCounter;
                let spec = LimitSpec::parse_shorthand(text, Some(name))?;
                match *counting {
                    Counting::Weighted => spec,
                    Counting::Buckets { buckets, strict } => LimitSpec {
                        buckets: Some(buckets),
                        strict: Some(strict),
                        ..spec
                    },
                }
            }
        };
        let spec = LimitSpec {
            soft: Some(like.soft_percent()),
            // A concurrency limit cannot count denied requests.
            count_denied: Some(like.count_denied()).filter(|_| spec.lease.is_none()),
            ..spec
        };
        let limit = spec.build().map_err(|errors| {
            let first = errors.into_iter().next();
            first.unwrap_or_else(|| LimitError::new("limit", expected(text)))
        })?;
        match like.counts_in_full() {
            true => limit.counting_in_full(),
            false => Ok(limit),
        }
    }
}

/// Parses a fixed window limit that has the same anchor as `window`.
fn in_window(text: &str, window: &Window) -> Result<LimitSpec, LimitError> {
    let spec = |text| LimitSpec::parse_shorthand(text, Some(AlgorithmName::FixedWindow));
    match window {
        Window::Epoch(_) => spec(text),
        Window::FirstRequest(_) => Ok(LimitSpec {
            anchor: Some(Anchor::FirstRequest),
            ..spec(text)?
        }),
        Window::Calendar(calendar) => {
            let unit = calendar.unit().as_str();
            let count = text.strip_suffix(&format!("/{calendar}"));
            let count = count.or_else(|| text.strip_suffix(&format!("/{unit}")));
            let count = count.ok_or_else(|| {
                let problem = format!("expected a limit such as 100/{unit}, got \"{text}\"");
                LimitError::new("limit", problem)
            })?;
            Ok(LimitSpec {
                algorithm: Some(AlgorithmName::FixedWindow),
                limit: Some(parse_count("limit", count)?),
                anchor: Some(Anchor::Calendar(calendar.clone())),
                ..LimitSpec::default()
            })
        }
    }
}

/// Parses the number of slots of a concurrency limit, such as `40 at once` or `40`.
fn parse_slots(text: &str) -> Result<u64, LimitError> {
    let count = text.strip_suffix("at once").unwrap_or(text).trim_end();
    parse_count("limit", count).map_err(|_| {
        let problem = format!("expected a number of slots such as 40 at once, got \"{text}\"");
        LimitError::new("limit", problem)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        limit::{RefillMode, rate},
        time::Span,
    };

    /// If a limit's own short notation is parsed with the options of that limit, the result is the
    /// same limit.
    #[test]
    fn a_policy_is_parsed_like_its_own_limit() {
        let (span, rate) = (Span::from_secs(60), rate("20/min").unwrap());
        let calendar = |text: crate::CalendarUnit| {
            Window::Calendar(crate::Calendar::new(text, "UTC", None).unwrap())
        };
        let windows = [
            Window::Epoch(span),
            Window::FirstRequest(span),
            calendar(crate::CalendarUnit::Month),
        ];
        let mut algorithms: Vec<Algorithm> = windows
            .map(|window| Algorithm::FixedWindow { limit: 20, window })
            .into();
        let modes = [RefillMode::Continuous, RefillMode::Interval];
        algorithms.extend(modes.map(|mode| Algorithm::TokenBucket {
            capacity: 7,
            refill: rate,
            mode,
        }));
        algorithms.extend([false, true].map(|queue| Algorithm::LeakyBucket {
            capacity: 7,
            leak: rate,
            queue,
        }));
        let counting = Counting::Buckets {
            buckets: 60,
            strict: true,
        };
        algorithms.extend([
            Algorithm::Gcra { rate, burst: 3 },
            Algorithm::SlidingWindowLog {
                limit: 20,
                window: span,
            },
            Algorithm::SlidingWindowCounter {
                limit: 20_000,
                window: span,
                counting,
            },
            Algorithm::Concurrency {
                limit: 20,
                lease: span,
            },
        ]);
        for algorithm in algorithms {
            for count_denied in [false, true] {
                let limit = Limit::new(algorithm.clone()).unwrap();
                let limit = limit
                    .with_soft_percent(10)
                    .unwrap()
                    .counting_denied(count_denied);
                let parsed = Limit::parse_like(limit.policy(), &limit);
                assert_eq!(parsed, Ok(limit));
            }
        }
        for (text, like) in [
            ("20/min", "slots"),
            ("x at once", "slots"),
            ("20/h", "month"),
        ] {
            let like = match like {
                "slots" => Algorithm::Concurrency {
                    limit: 1,
                    lease: span,
                },
                _ => Algorithm::FixedWindow {
                    limit: 1,
                    window: calendar(crate::CalendarUnit::Month),
                },
            };
            let error = Limit::parse_like(text, &Limit::new(like).unwrap()).unwrap_err();
            assert!(error.problem.contains("expected a"), "{error}");
        }
    }
}
