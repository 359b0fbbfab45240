//! A limit as somebody wrote it down: every field optional, nothing checked yet.
//!
//! The rules file, the HTTP door and the test vectors all fill in a [`LimitSpec`] and build it, so that
//! what a field means, which ones an algorithm takes and what a wrong one is told stand here once.

use crate::{
    bounds::{check_count, check_period, check_rate, least_capacity},
    calendar::Calendar,
    limit::{Algorithm, Counting, Limit, LimitError, Rate, RefillMode, Window, check_soft_percent},
    notation,
    time::Span,
};

impl Limit {
    /// The limit of a shorthand such as `20/min` under `algorithm`, as [`LimitSpec::shorthand`] reads it.
    ///
    /// # Errors
    ///
    /// What is no rate, as the field `rate`, and a number that the algorithm cannot have.
    ///
    /// # Examples
    ///
    /// ```
    /// use tidegate_core::{AlgorithmName, Limit};
    ///
    /// let limit = Limit::shorthand(AlgorithmName::SlidingWindowLog, "20/min")?;
    /// assert_eq!(&**limit.policy(), "20/min");
    /// assert_eq!(Limit::shorthand(AlgorithmName::Gcra, "often").unwrap_err().field, "rate");
    /// # Ok::<(), tidegate_core::LimitError>(())
    /// ```
    pub fn shorthand(algorithm: AlgorithmName, rate: &str) -> Result<Self, LimitError> {
        let read = notation::rate(rate);
        let rate = read.map_err(|wrong| LimitError::new("rate", wrong.to_string()))?;
        let built = LimitSpec::shorthand(rate, algorithm).build();
        // Whoever refuses says why, and a shorthand has one number that can be wrong.
        built.map_err(|mut wrong| wrong.swap_remove(0))
    }
}

/// The names of the algorithms in a rules file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[expect(missing_docs, reason = "each is the algorithm of its name")]
pub enum AlgorithmName {
    Gcra,
    TokenBucket,
    LeakyBucket,
    FixedWindow,
    SlidingWindowLog,
    SlidingWindowCounter,
    Concurrency,
}

impl AlgorithmName {
    /// Every name as it is written, in the order of the documentation.
    pub const ALL: [(&'static str, Self); 7] = [
        ("gcra", Self::Gcra),
        ("token_bucket", Self::TokenBucket),
        ("leaky_bucket", Self::LeakyBucket),
        ("fixed_window", Self::FixedWindow),
        ("sliding_window_log", Self::SlidingWindowLog),
        ("sliding_window_counter", Self::SlidingWindowCounter),
        ("concurrency", Self::Concurrency),
    ];

    /// The algorithm of that name.
    #[must_use]
    pub fn parse(name: &str) -> Option<Self> {
        Self::ALL
            .iter()
            .find(|(known, _)| *known == name)
            .map(|(_, algorithm)| *algorithm)
    }

    /// The name as it is written in a rules file.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        // Every variant stands in ALL, which a test checks.
        Self::ALL
            .iter()
            .find(|(_, algorithm)| *algorithm == self)
            .map_or("", |(name, _)| *name)
    }
}

/// Where a fixed window begins.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Anchor {
    /// At whole multiples of the window since the Unix epoch.
    #[default]
    Epoch,
    /// With a key's first request.
    FirstRequest,
    /// With a day, week or month; takes the place of `window`.
    Calendar(Calendar),
}

/// The fields of a limit, by their names in the rules file. `None` is a field that was not written.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[expect(
    missing_docs,
    reason = "the fields are those of the variants of `Algorithm`, documented there"
)]
pub struct LimitSpec {
    pub algorithm: Option<AlgorithmName>,
    pub rate: Option<Rate>,
    pub burst: Option<u64>,
    pub capacity: Option<u64>,
    pub refill: Option<Rate>,
    pub refill_mode: Option<RefillMode>,
    pub leak: Option<Rate>,
    pub queue: Option<bool>,
    pub limit: Option<u64>,
    pub window: Option<Span>,
    pub anchor: Option<Anchor>,
    pub buckets: Option<u32>,
    pub strict: Option<bool>,
    /// Default [`LimitSpec::LEASE`].
    pub lease: Option<Span>,
    /// Percent over the limit that are admitted, marked.
    pub soft: Option<u32>,
    pub count_denied: Option<bool>,
}

impl LimitSpec {
    /// How long a place is held that is never given back, unless it is said: a minute.
    pub const LEASE: Span = Span::from_secs(60);

    /// The names of the fields, in their order.
    pub const FIELDS: [&'static str; 16] = [
        "algorithm",
        "rate",
        "burst",
        "capacity",
        "refill",
        "refill_mode",
        "leak",
        "queue",
        "limit",
        "window",
        "anchor",
        "buckets",
        "strict",
        "lease",
        "soft",
        "count_denied",
    ];

    /// The spec of a shorthand such as `20/min` under `algorithm`.
    ///
    /// The count is a bucket's capacity and its refill, a window's limit, a GCRA's rate without burst, or how many may be
    /// in flight, each for as long as the period.
    #[must_use]
    pub fn shorthand(rate: Rate, algorithm: AlgorithmName) -> Self {
        let spec = Self {
            algorithm: Some(algorithm),
            ..Self::default()
        };
        match algorithm {
            AlgorithmName::Gcra => Self {
                rate: Some(rate),
                ..spec
            },
            AlgorithmName::TokenBucket => Self {
                capacity: Some(rate.count),
                refill: Some(rate),
                ..spec
            },
            AlgorithmName::LeakyBucket => Self {
                capacity: Some(rate.count),
                leak: Some(rate),
                ..spec
            },
            AlgorithmName::FixedWindow
            | AlgorithmName::SlidingWindowLog
            | AlgorithmName::SlidingWindowCounter => Self {
                limit: Some(rate.count),
                window: Some(rate.period),
                ..spec
            },
            AlgorithmName::Concurrency => Self {
                limit: Some(rate.count),
                lease: Some(rate.period),
                ..spec
            },
        }
    }

    /// Checks every field and builds the limit.
    ///
    /// # Errors
    ///
    /// All mistakes at once: a field that is missing, one that the algorithm does not take, a number
    /// that it cannot have.
    pub fn build(&self) -> Result<Limit, Vec<LimitError>> {
        let Some(name) = self.algorithm else {
            let known = AlgorithmName::ALL.map(|(name, _)| name).join(", ");
            return Err(vec![LimitError::new(
                "algorithm",
                format!("is missing; one of {known}"),
            )]);
        };
        let mut problems = self.strangers(name);
        problems.extend(self.impossible(name));
        let algorithm = self.algorithm(name, &mut problems);
        let soft = self.soft.unwrap_or(0);
        let limit = algorithm.filter(|_| problems.is_empty()).map(Limit::new);
        let built = match limit {
            Some(Ok(limit)) => limit.with_soft_percent(soft),
            unbuilt => {
                problems.extend(unbuilt.and_then(Result::err));
                problems.extend(check_soft_percent(soft).err());
                return Err(problems);
            }
        };
        let built = built.map_err(|problem| vec![problem])?;
        Ok(built.counting_denied(self.count_denied.unwrap_or(false)))
    }

    /// The fields that were written although the algorithm has no use for them.
    fn strangers(&self, name: AlgorithmName) -> Vec<LimitError> {
        let written = [
            ("rate", self.rate.is_some()),
            ("burst", self.burst.is_some()),
            ("capacity", self.capacity.is_some()),
            ("refill", self.refill.is_some()),
            ("refill_mode", self.refill_mode.is_some()),
            ("leak", self.leak.is_some()),
            ("queue", self.queue.is_some()),
            ("limit", self.limit.is_some()),
            ("window", self.window.is_some()),
            ("anchor", self.anchor.is_some()),
            ("buckets", self.buckets.is_some()),
            ("strict", self.strict.is_some()),
            ("lease", self.lease.is_some()),
        ];
        let taken = fields_of(name);
        let problem = || {
            format!(
                "is not a field of {}, which takes {}",
                name.as_str(),
                taken.join(", ")
            )
        };
        written
            .iter()
            .filter(|(field, is_written)| *is_written && !taken.contains(field))
            .map(|(field, _)| LimitError::new(field, problem()))
            .collect()
    }

    /// The numbers that the algorithm cannot have, whatever the others are.
    fn impossible(&self, name: AlgorithmName) -> Vec<LimitError> {
        let queue = name == AlgorithmName::LeakyBucket && self.queue == Some(true);
        let count = |field, count: Option<u64>, least| {
            let check = |count| check_count(field, count, least).err();
            count.and_then(check)
        };
        let rate = |field, rate: Option<Rate>| rate.and_then(|rate| check_rate(field, rate).err());
        let span =
            |field, span: Option<Span>| span.and_then(|span| check_period(field, span).err());
        let impossible = [
            rate("rate", self.rate),
            count("burst", self.burst, 0),
            count("capacity", self.capacity, least_capacity(queue)),
            rate("refill", self.refill),
            rate("leak", self.leak),
            count("limit", self.limit, 0),
            span("window", self.window),
            span("lease", self.lease),
        ];
        let taken = fields_of(name);
        impossible
            .into_iter()
            .flatten()
            .filter(|error| taken.contains(&error.field))
            .collect()
    }

    fn algorithm(&self, name: AlgorithmName, problems: &mut Vec<LimitError>) -> Option<Algorithm> {
        Some(match name {
            AlgorithmName::Gcra => Algorithm::Gcra {
                rate: need("rate", self.rate, problems)?,
                burst: self.burst.unwrap_or(0),
            },
            AlgorithmName::TokenBucket => {
                let (capacity, refill) = (
                    need("capacity", self.capacity, problems),
                    need("refill", self.refill, problems),
                );
                Algorithm::TokenBucket {
                    capacity: capacity?,
                    refill: refill?,
                    mode: self.refill_mode.unwrap_or_default(),
                }
            }
            AlgorithmName::LeakyBucket => {
                let (capacity, leak) = (
                    need("capacity", self.capacity, problems),
                    need("leak", self.leak, problems),
                );
                Algorithm::LeakyBucket {
                    capacity: capacity?,
                    leak: leak?,
                    queue: self.queue.unwrap_or(false),
                }
            }
            AlgorithmName::FixedWindow => {
                let (limit, window) = (
                    need("limit", self.limit, problems),
                    self.fixed_window(problems),
                );
                Algorithm::FixedWindow {
                    limit: limit?,
                    window: window?,
                }
            }
            AlgorithmName::SlidingWindowLog => {
                let (limit, window) = (
                    need("limit", self.limit, problems),
                    need("window", self.window, problems),
                );
                Algorithm::SlidingWindowLog {
                    limit: limit?,
                    window: window?,
                }
            }
            AlgorithmName::SlidingWindowCounter => {
                let (limit, window) = (
                    need("limit", self.limit, problems),
                    need("window", self.window, problems),
                );
                Algorithm::SlidingWindowCounter {
                    limit: limit?,
                    window: window?,
                    counting: self.counting(problems)?,
                }
            }
            AlgorithmName::Concurrency => self.concurrency(problems)?,
        })
    }

    fn concurrency(&self, problems: &mut Vec<LimitError>) -> Option<Algorithm> {
        if self.count_denied == Some(true) {
            let problem = "goes with what is counted over time; who is denied holds no place";
            problems.push(LimitError::new("count_denied", problem));
        }
        Some(Algorithm::Concurrency {
            limit: need("limit", self.limit, problems)?,
            lease: self.lease.unwrap_or(Self::LEASE),
        })
    }

    fn fixed_window(&self, problems: &mut Vec<LimitError>) -> Option<Window> {
        match self.anchor.clone().unwrap_or_default() {
            Anchor::Epoch => need("window", self.window, problems).map(Window::Epoch),
            Anchor::FirstRequest => need("window", self.window, problems).map(Window::FirstRequest),
            Anchor::Calendar(_) if self.window.is_some() => {
                problems.push(LimitError::new(
                    "window",
                    "a calendar anchor says how long a window is; remove one of the two",
                ));
                None
            }
            Anchor::Calendar(calendar) => Some(Window::Calendar(calendar)),
        }
    }

    fn counting(&self, problems: &mut Vec<LimitError>) -> Option<Counting> {
        match (self.buckets, self.strict) {
            (Some(buckets), strict) => Some(Counting::Buckets {
                buckets,
                strict: strict.unwrap_or(true),
            }),
            (None, None) => Some(Counting::Weighted),
            (None, Some(_)) => {
                problems.push(LimitError::new(
                    "strict",
                    "belongs to a counter with buckets; add buckets, or remove it",
                ));
                None
            }
        }
    }
}

fn fields_of(name: AlgorithmName) -> &'static [&'static str] {
    match name {
        AlgorithmName::Gcra => &["rate", "burst"],
        AlgorithmName::TokenBucket => &["capacity", "refill", "refill_mode"],
        AlgorithmName::LeakyBucket => &["capacity", "leak", "queue"],
        AlgorithmName::FixedWindow => &["limit", "window", "anchor"],
        AlgorithmName::SlidingWindowLog => &["limit", "window"],
        AlgorithmName::SlidingWindowCounter => &["limit", "window", "buckets", "strict"],
        AlgorithmName::Concurrency => &["limit", "lease"],
    }
}

fn need<T>(field: &'static str, value: Option<T>, problems: &mut Vec<LimitError>) -> Option<T> {
    if value.is_none() {
        problems.push(LimitError::new(field, "is missing"));
    }
    value
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::notation;

    #[test]
    fn every_algorithm_has_its_name() {
        for (name, algorithm) in AlgorithmName::ALL {
            assert_eq!(AlgorithmName::parse(name), Some(algorithm));
            assert_eq!(algorithm.as_str(), name);
        }
    }

    #[test]
    fn every_mistake_is_reported_at_once() {
        let spec = LimitSpec {
            algorithm: Some(AlgorithmName::TokenBucket),
            burst: Some(5),
            window: Some(Span::from_secs(1)),
            soft: Some(2_000),
            ..LimitSpec::default()
        };
        let fields: Vec<_> = spec
            .build()
            .unwrap_err()
            .into_iter()
            .map(|problem| problem.field)
            .collect();
        assert_eq!(fields, ["burst", "window", "capacity", "refill", "soft"]);
    }

    #[test]
    fn a_number_that_cannot_be_is_told_whatever_else_is_wrong() {
        let nothing = Rate {
            count: 0,
            period: Span::from_secs(1),
        };
        let fields = |spec: LimitSpec| -> Vec<_> {
            let problems = spec.build().unwrap_err().into_iter();
            problems.map(|problem| problem.field).collect()
        };
        let bucket = LimitSpec {
            algorithm: Some(AlgorithmName::TokenBucket),
            capacity: Some(0),
            refill: Some(nothing),
            // Not a bucket's, and that is told of it alone.
            limit: Some(u64::MAX),
            soft: Some(2_000),
            ..LimitSpec::default()
        };
        assert_eq!(fields(bucket), ["limit", "capacity", "refill", "soft"]);
        let log = LimitSpec {
            algorithm: Some(AlgorithmName::SlidingWindowLog),
            window: Some(Span::ZERO),
            ..LimitSpec::default()
        };
        assert_eq!(fields(log), ["window", "limit"]);
        let queue = LimitSpec {
            algorithm: Some(AlgorithmName::LeakyBucket),
            capacity: Some(0),
            queue: Some(true),
            ..LimitSpec::default()
        };
        assert_eq!(fields(queue), ["leak"]);
    }

    #[test]
    fn a_shorthand_works_under_every_algorithm() {
        for (_, algorithm) in AlgorithmName::ALL {
            let limit = LimitSpec::shorthand(notation::rate("5/10s").unwrap(), algorithm)
                .build()
                .unwrap();
            let policy = limit.policy();
            let is_short = policy.starts_with("5/10s") || &**policy == "5 at once";
            assert!(is_short, "{policy}");
        }
    }
}
