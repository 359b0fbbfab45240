//! Parses limits in short notation, taking the algorithm and the options from another limit.

use super::{
    Algorithm, AlgorithmName, Anchor, Counting, Limit, LimitSpec, Window,
    spec::{fields_of, most_buckets},
    text::{self, LimitText, Size, expected, parse_count, slot_count},
};
use crate::{error::LimitError, shown::shown};

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
        check_form(text, like)?;
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
                    // The sub-windows of `like` may not divide another window.
                    Counting::Buckets { buckets, strict } => LimitSpec {
                        buckets: spec.window.map(|window| most_buckets(window, buckets)),
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

/// Rejects a limit in a form that the algorithm of `like` does not have: a number of slots for a
/// rate, or a burst for a window. The caller cannot change the algorithm, so the error suggests the
/// same limit in a form of this algorithm.
fn check_form(text: &str, like: &Limit) -> Result<(), LimitError> {
    let (name, policy) = (like.algorithm_name(), like.policy());
    if matches!(like.algorithm(), Algorithm::Concurrency { .. }) {
        return Ok(());
    }
    if slot_count(text).is_some() {
        let problem = format!(
            "the limit {policy} has the algorithm {name}, and only a concurrency limit takes a number \
             of slots; write a rate such as 20/min"
        );
        return Err(LimitError::new("limit", problem));
    }
    let Ok(LimitText {
        rate,
        size: Some(size),
    }) = text::parse(text)
    else {
        return Ok(());
    };
    let (field, number) = size.field();
    let known = AlgorithmName::parse(name).map_or(&[][..], fields_of);
    if known.contains(&field) {
        return Ok(());
    }
    // A capacity counts the request that a burst follows.
    let meant = match size {
        Size::Burst(_) if known.contains(&"capacity") => {
            format!("{rate} capacity {}", number.saturating_add(1))
        }
        Size::Capacity(_) if known.contains(&"burst") => {
            format!("{rate} burst {}", number.saturating_sub(1))
        }
        Size::Burst(_) | Size::Capacity(_) => rate.to_string(),
    };
    let problem =
        format!("the limit {policy} has the algorithm {name}, which has no {field}; write {meant}");
    Err(LimitError::new(field, problem))
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
                let text = shown(text);
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
        let text = shown(text);
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

    #[test]
    fn a_form_of_another_algorithm_is_rejected_with_the_form_of_this_one() {
        use AlgorithmName::{FixedWindow, Gcra, LeakyBucket, SlidingWindowLog, TokenBucket};
        let has = |name| format!("the limit {name}, which has no");
        for (algorithm, text, field, why, advice) in [
            (
                SlidingWindowLog,
                "10/min burst 20",
                "burst",
                has("20/min has the algorithm sliding_window_log"),
                "write 10/min",
            ),
            (
                FixedWindow,
                "10/min capacity 20",
                "capacity",
                has("20/min has the algorithm fixed_window"),
                "write 10/min",
            ),
            (
                Gcra,
                "10/min capacity 20",
                "capacity",
                has("20/min burst 0 has the algorithm gcra"),
                "write 10/min burst 19",
            ),
            (
                TokenBucket,
                "10/min burst 20",
                "burst",
                has("20/min has the algorithm token_bucket"),
                "write 10/min capacity 21",
            ),
            (
                LeakyBucket,
                "10/min burst 20",
                "burst",
                has("20/min capacity 20 has the algorithm leaky_bucket"),
                "write 10/min capacity 21",
            ),
            (
                SlidingWindowLog,
                "2 at once",
                "limit",
                "only a concurrency limit takes a number of slots".to_owned(),
                "write a rate such as 20/min",
            ),
            (
                Gcra,
                "10 concurrent",
                "limit",
                "only a concurrency limit takes a number of slots".to_owned(),
                "write a rate such as 20/min",
            ),
        ] {
            let like = Limit::shorthand(algorithm, "20/min").unwrap();
            let error = Limit::parse_like(text, &like).unwrap_err();
            assert_eq!(error.field, field, "{text}: {error}");
            assert!(error.problem.contains(&why), "{error}");
            let advice = format!("; {advice}");
            assert!(error.problem.ends_with(&advice), "{error}");
            if let Some(meant) = advice.strip_prefix("; write ").filter(|_| field != "limit") {
                assert!(Limit::parse_like(meant, &like).is_ok(), "{meant}");
            }
        }
    }

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
        let like = |count| Limit::shorthand(AlgorithmName::SlidingWindowCounter, count).unwrap();
        for text in ["10/s", "7/s", "5/7ms", "2000/min"] {
            let parsed = Limit::parse_like(text, &like("100000/min")).unwrap();
            assert_eq!(parsed, like(text), "{text}");
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
