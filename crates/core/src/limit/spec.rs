//! A limit in the form in which a user writes it: every field is optional, and no field has been
//! validated.
//!
//! The rules file parser, the HTTP listener and the test vectors all fill in a [`LimitSpec`] and
//! build a limit from it. Only this module defines the meaning of the fields, the fields that each
//! algorithm has, and the error messages.

use std::str::FromStr;

use crate::{
    error::LimitError,
    limit::{
        Algorithm, Counting, Limit, Rate, RefillMode, SlotWait, Window,
        bounds::{check_count, check_period, least_capacity},
        check_soft_percent,
        rate::check_rate,
        text::{self, LimitText, Size},
    },
    time::{Calendar, Span},
};

impl Limit {
    /// Builds a limit with the given algorithm from a rate such as `20/min`.
    /// [`LimitSpec::shorthand`] describes the short notation.
    ///
    /// # Errors
    ///
    /// Returns an error for the field `rate` if the string is not a rate, or for a field whose
    /// value is invalid for the algorithm.
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
        let built = LimitSpec::parse_shorthand(rate, Some(algorithm))?.build();
        // If `build` fails, it returns at least one error. The first error is enough, because only
        // one number in the short notation can be invalid.
        built.map_err(|mut wrong| wrong.swap_remove(0))
    }
}

/// The names of the algorithms in a rules file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[expect(missing_docs, reason = "each variant has the name of its algorithm")]
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
    /// All algorithms with their names in the rules file, in the order of the documentation.
    pub const ALL: [(&'static str, Self); 7] = [
        Self::Gcra.named(),
        Self::TokenBucket.named(),
        Self::LeakyBucket.named(),
        Self::FixedWindow.named(),
        Self::SlidingWindowLog.named(),
        Self::SlidingWindowCounter.named(),
        Self::Concurrency.named(),
    ];

    const fn named(self) -> (&'static str, Self) {
        (self.as_str(), self)
    }

    /// Returns the algorithm with this name in the rules file, or `None` if the name is unknown.
    #[must_use]
    pub fn parse(name: &str) -> Option<Self> {
        Self::ALL
            .iter()
            .find(|(known, _)| *known == name)
            .map(|(_, algorithm)| *algorithm)
    }

    /// Returns the name of the algorithm in the rules file.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Gcra => "gcra",
            Self::TokenBucket => "token_bucket",
            Self::LeakyBucket => "leaky_bucket",
            Self::FixedWindow => "fixed_window",
            Self::SlidingWindowLog => "sliding_window_log",
            Self::SlidingWindowCounter => "sliding_window_counter",
            Self::Concurrency => "concurrency",
        }
    }
}

/// The time at which the windows of a fixed window limit start.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub enum Anchor {
    /// Windows start at multiples of the window length, counted from the Unix epoch.
    #[default]
    Epoch,
    /// A window starts with the first request of a key.
    FirstRequest,
    /// Each day, week or month of a calendar is a window. A limit with a calendar anchor must not
    /// have the field `window`.
    Calendar(Calendar),
}

/// The fields of a limit, named as in the rules file. `None` means that the field was not given.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
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
    /// The lease of a concurrency slot; defaults to [`LimitSpec::LEASE`].
    pub lease: Option<Span>,
    /// The longest wait for a concurrency slot.
    pub wait: Option<Span>,
    /// The maximum number of requests waiting for a concurrency slot per key. The rules file sets
    /// this number with the field `queue` of a concurrency limit; the default is
    /// [`SlotWait::DEFAULT_QUEUE`].
    pub slot_queue: Option<u64>,
    /// The soft allowance, in percent of the limit. Requests that exceed the limit by at most this
    /// percentage are admitted and marked as over the limit.
    pub soft: Option<u32>,
    pub count_denied: Option<bool>,
}

/// Returns whether a spec has a certain field.
type HasField = fn(&LimitSpec) -> bool;

impl LimitSpec {
    /// The default lease of a concurrency slot: one minute.
    pub const LEASE: Span = Span::from_secs(60);

    /// The names of all fields, in the order of their definition.
    pub const FIELDS: [&'static str; 17] = {
        let mut names = [""; 17];
        let mut at = 0;
        while at < names.len() {
            names[at] = Self::PRESENCE[at].0;
            at += 1;
        }
        names
    };

    /// Every field, with a function that returns whether a spec has the field.
    const PRESENCE: [(&'static str, HasField); 17] = [
        ("algorithm", |spec| spec.algorithm.is_some()),
        ("rate", |spec| spec.rate.is_some()),
        ("burst", |spec| spec.burst.is_some()),
        ("capacity", |spec| spec.capacity.is_some()),
        ("refill", |spec| spec.refill.is_some()),
        ("refill_mode", |spec| spec.refill_mode.is_some()),
        ("leak", |spec| spec.leak.is_some()),
        ("queue", |spec| {
            spec.queue.is_some() || spec.slot_queue.is_some()
        }),
        ("limit", |spec| spec.limit.is_some()),
        ("window", |spec| spec.window.is_some()),
        ("anchor", |spec| spec.anchor.is_some()),
        ("buckets", |spec| spec.buckets.is_some()),
        ("strict", |spec| spec.strict.is_some()),
        ("lease", |spec| spec.lease.is_some()),
        ("wait", |spec| spec.wait.is_some()),
        ("soft", |spec| spec.soft.is_some()),
        ("count_denied", |spec| spec.count_denied.is_some()),
    ];

    /// The fields that every algorithm takes.
    const COMMON_FIELDS: [&'static str; 3] = ["algorithm", "soft", "count_denied"];

    /// The largest count for which the short notation without an algorithm means a sliding window
    /// log. A sliding window log takes 8 bytes per admission, which is 8 kB per key at the largest
    /// count. For a larger count, the short notation means a counter with sub-windows, which takes
    /// about 550 bytes per key.
    pub const MAX_DEFAULT_LOG: u64 = 1_000;

    /// The maximum number of sub-windows if the short notation means a counter. If a client always
    /// sends more than its limit, a counter with `k` sub-windows admits `k / (k + 1)` of the limit,
    /// which is 98% with 60 sub-windows.
    pub const DEFAULT_BUCKETS: u32 = 60;

    /// Parses the short notation, such as `20/min`. [`Self::shorthand`] describes the resulting
    /// spec.
    ///
    /// The short notation can also contain the burst of a GCRA limit (`100/s burst 20`) or the
    /// capacity of a bucket (`100/s capacity 20`). If `algorithm` is `None`, a burst selects GCRA
    /// and a capacity selects a token bucket.
    ///
    /// # Errors
    ///
    /// Returns an error if the string is malformed, if the algorithm does not have the field, or if
    /// the algorithm does not support a count of 0. The error names the field `rate`, `burst` or
    /// `capacity`, or the field `limit` if the error concerns the whole string.
    ///
    /// # Examples
    ///
    /// ```
    /// use tidegate_core::{AlgorithmName, LimitSpec};
    ///
    /// let spec = LimitSpec::parse_shorthand("100/s burst 20", None)?;
    /// assert_eq!((spec.algorithm, spec.burst), (Some(AlgorithmName::Gcra), Some(20)));
    /// let window = Some(AlgorithmName::FixedWindow);
    /// let refused = LimitSpec::parse_shorthand("100/s burst 20", window);
    /// assert_eq!(refused.unwrap_err().field, "burst");
    /// # Ok::<(), tidegate_core::LimitError>(())
    /// ```
    pub fn parse_shorthand(
        text: &str,
        algorithm: Option<AlgorithmName>,
    ) -> Result<Self, LimitError> {
        let LimitText { rate, size } = text::parse(text)?;
        let algorithm = match size {
            Some(size) => Some(sized_algorithm(rate, size, algorithm)?),
            None => algorithm,
        };
        let is_rate = matches!(
            algorithm,
            Some(AlgorithmName::Gcra | AlgorithmName::TokenBucket | AlgorithmName::LeakyBucket)
        );
        if is_rate {
            check_rate("rate", rate)?;
        }
        let spec = Self::shorthand(rate, algorithm);
        Ok(match size {
            Some(Size::Burst(burst)) => Self {
                burst: Some(burst),
                ..spec
            },
            Some(Size::Capacity(capacity)) => Self {
                capacity: Some(capacity),
                ..spec
            },
            None => spec,
        })
    }

    /// Returns the spec for a rate such as `20/min` with the given algorithm.
    ///
    /// For `gcra`, the limit has this rate and no burst. For a bucket, the rate is the refill or
    /// the drain rate, and the count is the capacity. For a window, the count is the limit and the
    /// period is the length of the window. For `concurrency`, the count is the limit and the period
    /// is the lease.
    ///
    /// Without an algorithm, the limit is strict: in any interval with the length of the period, it
    /// admits at most the count. A count of up to [`Self::MAX_DEFAULT_LOG`] selects a
    /// `sliding_window_log`. A higher count selects a strict `sliding_window_counter` with up to
    /// [`Self::DEFAULT_BUCKETS`] sub-windows.
    ///
    /// # Examples
    ///
    /// ```
    /// use tidegate_core::{AlgorithmName, LimitSpec, notation};
    ///
    /// let spec = LimitSpec::shorthand(notation::rate("20/min")?, None);
    /// assert_eq!(spec.algorithm, Some(AlgorithmName::SlidingWindowLog));
    /// let spec = LimitSpec::shorthand(notation::rate("20000/min")?, None);
    /// assert_eq!(spec.algorithm, Some(AlgorithmName::SlidingWindowCounter));
    /// assert_eq!((spec.buckets, spec.strict), (Some(60), Some(true)));
    /// # Ok::<(), notation::NotationError>(())
    /// ```
    #[must_use]
    pub fn shorthand(rate: Rate, algorithm: impl Into<Option<AlgorithmName>>) -> Self {
        let Some(algorithm) = algorithm.into() else {
            return Self::sliding(rate.count, rate.period);
        };
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

    /// Returns the spec of a sliding window that never admits more than `limit` units in any
    /// window. A small limit uses a sliding window log, and a large limit uses a counter.
    fn sliding(limit: u64, window: Span) -> Self {
        let spec = Self {
            limit: Some(limit),
            window: Some(window),
            ..Self::default()
        };
        if limit <= Self::MAX_DEFAULT_LOG {
            return Self {
                algorithm: Some(AlgorithmName::SlidingWindowLog),
                ..spec
            };
        }
        Self {
            algorithm: Some(AlgorithmName::SlidingWindowCounter),
            buckets: Some(most_buckets(window, Self::DEFAULT_BUCKETS)),
            strict: Some(true),
            ..spec
        }
    }

    /// Returns a copy of this spec with an algorithm filled in. The spec itself must not name an
    /// algorithm. A spec with only `limit` and `window` is handled like the short notation. In a
    /// spec with any other fields, the fields determine the algorithm.
    fn with_default_algorithm(&self) -> Result<Self, LimitError> {
        if let (Some(limit), Some(window)) = (self.limit, self.window)
            && self.fields_written() == ["limit", "window"]
        {
            return Ok(Self {
                soft: self.soft,
                count_denied: self.count_denied,
                ..Self::sliding(limit, window)
            });
        }
        match self.only_fit() {
            Some(name) => Ok(Self {
                algorithm: Some(name),
                ..self.clone()
            }),
            None if self.fields_written() == ["limit"] => {
                let problem = "is missing; add one, such as 1min, or set `algorithm: concurrency` to \
                    limit requests in progress";
                Err(LimitError::new("window", problem))
            }
            None => match self.slot_wait_field() {
                Some(field) => {
                    let taken = fields_of(AlgorithmName::Concurrency).join(", ");
                    let problem = format!(
                        "{WAITS_FOR_SLOT}, which takes {taken}; remove `{field}`, or the fields of \
                         other algorithms"
                    );
                    Err(LimitError::new(field, problem))
                }
                None => {
                    let known = AlgorithmName::ALL.map(|(name, _)| name).join(", ");
                    let problem = format!("is missing; expected one of {known}");
                    Err(LimitError::new("algorithm", problem))
                }
            },
        }
    }

    /// Validates every field and builds the limit.
    ///
    /// If the field `algorithm` is `None`, the other fields select the algorithm. A spec with only
    /// `limit` and `window` is handled like the short notation: `{limit: 20, window: 1min}` is the
    /// same as `20/min`. For any other set of fields, the spec selects the only algorithm that has
    /// all these fields. For example, `rate` and `burst` select `gcra`.
    ///
    /// # Errors
    ///
    /// Returns all errors in the spec: missing fields, fields that the algorithm does not take, and
    /// invalid numbers.
    pub fn build(&self) -> Result<Limit, Vec<LimitError>> {
        let Some(name) = self.algorithm else {
            let spec = self.with_default_algorithm();
            return spec.map_err(|error| vec![error])?.build();
        };
        let mut problems = self.unexpected_fields(name);
        problems.extend(self.out_of_range(name));
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
        let built = match self.slot_wait() {
            Some(slot_wait) => built
                .with_slot_wait(slot_wait)
                .map_err(|problem| vec![problem])?,
            None => built,
        };
        Ok(built.counting_denied(self.count_denied.unwrap_or(false)))
    }

    /// Returns the names of the fields that were given, except the fields that every algorithm
    /// takes.
    #[must_use]
    pub fn fields_written(&self) -> Vec<&'static str> {
        let own = Self::PRESENCE
            .into_iter()
            .filter(|(field, _)| !Self::COMMON_FIELDS.contains(field));
        own.filter(|(_, is_present)| is_present(self))
            .map(|(field, _)| field)
            .collect()
    }

    /// Returns an error for each given field that the algorithm `name` does not take.
    fn unexpected_fields(&self, name: AlgorithmName) -> Vec<LimitError> {
        let (taken, mut written) = (fields_of(name), self.fields_written());
        let all = written.join(" and ");
        written.retain(|field| !taken.contains(field));
        let only_fit = self.only_fit();
        // The suggestion is about the whole limit, so only the first error contains it.
        let mut advice =
            only_fit.map(|fit| format!("; {all} are fields of `algorithm: {}`", fit.as_str()));
        let slot_wait_field = self.slot_wait_field().filter(|_| only_fit.is_none());
        let problem = |field: &'static str| {
            let mut problem = format!(
                "is not a field of {}, which takes {}{}",
                name.as_str(),
                taken.join(", "),
                advice.take().unwrap_or_default()
            );
            if slot_wait_field == Some(field) {
                problem = format!("{problem}; it {WAITS_FOR_SLOT}");
            }
            LimitError::new(field, problem)
        };
        written.into_iter().map(problem).collect()
    }

    /// Returns the first given field that only concurrency limits take because their requests can
    /// wait for a slot.
    fn slot_wait_field(&self) -> Option<&'static str> {
        let queue = self.slot_queue.map(|_| "queue");
        self.wait.map(|_| "wait").or(queue)
    }

    /// Returns the algorithm that takes all given fields, if there is exactly one.
    fn only_fit(&self) -> Option<AlgorithmName> {
        let written = self.fields_written();
        let mut fitting = AlgorithmName::ALL.into_iter().filter(|(_, name)| {
            let taken = fields_of(*name);
            let is_fit = |field: &&str| match *field {
                "queue" if self.slot_queue.is_some() => *name == AlgorithmName::Concurrency,
                "queue" => *name == AlgorithmName::LeakyBucket,
                field => taken.contains(&field),
            };
            written.iter().all(is_fit)
        });
        let (_, only) = fitting.next()?;
        fitting.next().is_none().then_some(only)
    }

    /// Returns an error for each number that is invalid for the algorithm `name`, regardless of the
    /// other numbers.
    fn out_of_range(&self, name: AlgorithmName) -> Vec<LimitError> {
        let queue = name == AlgorithmName::LeakyBucket && self.queue == Some(true);
        let count = |field, count: Option<u64>, least| {
            let check = |count| check_count(field, count, least).err();
            count.and_then(check)
        };
        let rate = |field, rate: Option<Rate>| rate.and_then(|rate| check_rate(field, rate).err());
        let span =
            |field, span: Option<Span>| span.and_then(|span| check_period(field, span).err());
        let (queue_problem, slot_wait) = (self.wrong_queue(name), self.slot_wait());
        let out_of_range = [
            rate("rate", self.rate),
            count("burst", self.burst, 0),
            count("capacity", self.capacity, least_capacity(queue)),
            rate("refill", self.refill),
            rate("leak", self.leak),
            count("limit", self.limit, 0),
            span("window", self.window),
            span("lease", self.lease),
            queue_problem.map(|problem| LimitError::new("queue", problem)),
            slot_wait.and_then(|slot_wait| slot_wait.check_longest().err()),
            slot_wait.and_then(|slot_wait| slot_wait.check_queue().err()),
        ];
        let taken = fields_of(name);
        out_of_range
            .into_iter()
            .flatten()
            .filter(|error| taken.contains(&error.field))
            .collect()
    }

    /// Returns an error message if the field `queue` is invalid for the algorithm `name`. The field
    /// is a Boolean for a leaky bucket, and a number for a concurrency limit.
    fn wrong_queue(&self, name: AlgorithmName) -> Option<&'static str> {
        match name {
            AlgorithmName::Concurrency if self.queue.is_some() => {
                Some("must be the maximum number of waiting requests, such as 100")
            }
            AlgorithmName::Concurrency if self.slot_queue.is_some() && self.wait.is_none() => {
                Some("applies only with `wait`; set `wait`, such as `wait: 2s`, or remove `queue`")
            }
            AlgorithmName::LeakyBucket if self.slot_queue.is_some() => Some(
                "must be true or false; a number is the queue of a limit with \
                 `algorithm: concurrency`",
            ),
            _ => None,
        }
    }

    fn slot_wait(&self) -> Option<SlotWait> {
        let queue = self.slot_queue.unwrap_or(SlotWait::DEFAULT_QUEUE);
        self.wait.map(|longest| SlotWait { longest, queue })
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
            let problem =
                "does not apply to concurrency, because a denied request holds no slot; remove it";
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
                    "a calendar anchor already defines the length of the window; remove the anchor or this field",
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
                    "applies only with `buckets`; set `buckets`, or remove `strict`",
                ));
                None
            }
        }
    }
}

/// Returns the algorithm for the short notation with a burst or a capacity. `algorithm` is the
/// algorithm that the rule or the request names, if any. Returns an error if this algorithm does
/// not have the field.
fn sized_algorithm(
    rate: Rate,
    size: Size,
    algorithm: Option<AlgorithmName>,
) -> Result<AlgorithmName, LimitError> {
    let usual = match size {
        Size::Burst(_) => AlgorithmName::Gcra,
        Size::Capacity(_) => AlgorithmName::TokenBucket,
    };
    let algorithm = algorithm.unwrap_or(usual);
    let (field, number) = size.field();
    if fields_of(algorithm).contains(&field) {
        return Ok(algorithm);
    }
    let (name, usual) = (algorithm.as_str(), usual.as_str());
    let rate_field = if field == "burst" { "rate" } else { "refill" };
    let problem = format!(
        "`{field}` is not a field of {name}; set `algorithm` to {usual}, `{rate_field}` to {rate} and `{field}` to \
         {number}"
    );
    let meant = format!("{{algorithm: {usual}, {rate_field}: {rate}, {field}: {number}}}");
    Err(LimitError::new(field, problem).meaning(meant))
}

/// The part of a message about a field with which requests wait for a concurrency slot.
const WAITS_FOR_SLOT: &str =
    "applies only to `algorithm: concurrency`, whose requests can wait for a slot";

/// Returns the largest number of sub-windows up to `most` that divides `window` into sub-windows
/// with an integer number of microseconds. With [`LimitSpec::DEFAULT_BUCKETS`], the result is at
/// least 50 if `window` is a whole number of milliseconds.
pub(super) fn most_buckets(window: Span, most: u32) -> u32 {
    let divides = |buckets: &u32| window.as_micros().is_multiple_of(u64::from(*buckets));
    (1..=most).rev().find(divides).unwrap_or(1)
}

pub(super) fn fields_of(name: AlgorithmName) -> &'static [&'static str] {
    match name {
        AlgorithmName::Gcra => &["rate", "burst"],
        AlgorithmName::TokenBucket => &["capacity", "refill", "refill_mode"],
        AlgorithmName::LeakyBucket => &["capacity", "leak", "queue"],
        AlgorithmName::FixedWindow => &["limit", "window", "anchor"],
        AlgorithmName::SlidingWindowLog => &["limit", "window"],
        AlgorithmName::SlidingWindowCounter => &["limit", "window", "buckets", "strict"],
        AlgorithmName::Concurrency => &["limit", "lease", "wait", "queue"],
    }
}

fn need<T>(field: &'static str, value: Option<T>, problems: &mut Vec<LimitError>) -> Option<T> {
    if value.is_none() {
        problems.push(LimitError::missing(field));
    }
    value
}

/// Parses a limit in the notation that [`Limit::policy`] returns.
///
/// | text | limit |
/// | --- | --- |
/// | `20/min` | a strict sliding window: at most 20 in any minute (see [`LimitSpec::shorthand`]) |
/// | `100/s burst 20` | [`Algorithm::Gcra`]: 21 at once, then 100/s |
/// | `100/s capacity 20` | [`Algorithm::TokenBucket`]: 20 at once |
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
        // If `build` fails, it returns at least one error.
        let built = LimitSpec::parse_shorthand(text, None)?.build();
        built.map_err(|mut wrong| wrong.swap_remove(0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        Charge, Cost, Decision, Effect, Limits, MemoryBounds, MemoryStore, notation,
        time::Timestamp,
    };

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
    fn every_mistake_in_a_concurrency_limit_is_reported_at_once() {
        let spec = LimitSpec {
            algorithm: Some(AlgorithmName::Concurrency),
            limit: Some(u64::MAX),
            lease: Some(Span::ZERO),
            wait: Some(Span::ZERO),
            slot_queue: Some(0),
            count_denied: Some(true),
            ..LimitSpec::default()
        };
        let problems = spec.build().unwrap_err().into_iter();
        let fields: Vec<_> = problems.map(|problem| problem.field).collect();
        assert_eq!(fields, ["limit", "lease", "wait", "queue", "count_denied"]);
    }

    #[test]
    fn an_out_of_range_number_is_reported_beside_other_mistakes() {
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
            // A bucket has no field `limit`, and this error must be the only error about `limit`.
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

    /// Simulates a key with 13 requests of cost 1 every 10 ms, starting at `start`. Returns the
    /// maximum number of requests admitted in any half-open interval of 3 s.
    fn most_in_three_seconds(limit: &Limit, start: Timestamp) -> usize {
        let limits = Limits::new(vec![limit.clone()]).unwrap();
        let store = MemoryStore::new(MemoryBounds::default());
        let step = Span::from_millis(10);
        let instants = std::iter::successors(Some(start), |now| Some(now.after(step)));
        let mut admitted = Vec::new();
        for now in instants.take(900) {
            // Send more requests than the limit at each instant, so that every available unit is
            // used.
            for _ in 0..13 {
                let charge = Charge::new(b"key", &limits, Cost::ONE).unwrap();
                let decision = store.check(&[charge], now, Effect::Charge, &mut Vec::new());
                if decision == Decision::Admitted {
                    admitted.push(now);
                }
            }
        }
        let window = Span::from_secs(3);
        let within = |first: &Timestamp| {
            let end = first.after(window);
            let later = admitted.iter().filter(|at| *first <= **at && **at < end);
            later.count()
        };
        admitted.iter().map(within).max().unwrap_or(0)
    }

    /// Checks the table in the section "Shorthands" of `docs/rules-file.md`.
    #[test]
    fn a_shorthand_stays_within_its_documented_bound() {
        let rate = notation::rate("6/3s").unwrap();
        let cases = [
            (None, 6),
            (Some(AlgorithmName::SlidingWindowLog), 6),
            (Some(AlgorithmName::Gcra), 6),
            (Some(AlgorithmName::TokenBucket), 11),
            (Some(AlgorithmName::LeakyBucket), 11),
            (Some(AlgorithmName::SlidingWindowCounter), 11),
            (Some(AlgorithmName::FixedWindow), 12),
        ];
        for (algorithm, most) in cases {
            let limit = LimitSpec::shorthand(rate, algorithm).build().unwrap();
            let starts =
                (0..30).map(|tenth| Timestamp::from_micros(3_000_000_000 + tenth * 100_000));
            let seen = starts
                .map(|start| most_in_three_seconds(&limit, start))
                .max();
            let seen = seen.unwrap();
            // The simulated request pattern does not reach the worst-case error bound of the
            // weighted counter.
            let is_bound = algorithm != Some(AlgorithmName::SlidingWindowCounter);
            assert!(seen <= most, "{algorithm:?} admitted {seen}");
            assert!(
                seen == most || !is_bound,
                "{algorithm:?} admitted {seen} of {most}"
            );
        }
    }

    #[test]
    fn a_shorthand_may_have_a_burst_or_a_capacity() {
        let leaky = Some(AlgorithmName::LeakyBucket);
        for (text, algorithm, policy) in [
            ("100/s burst 20", None, "100/s burst 20"),
            ("100/s burst 0", None, "100/s burst 0"),
            (
                " 100 / s  burst 20 ",
                Some(AlgorithmName::Gcra),
                "100/s burst 20",
            ),
            ("100/s capacity 20", None, "100/s capacity 20"),
            ("5/10 seconds capacity 20", leaky, "5/10s capacity 20"),
        ] {
            let limit = LimitSpec::parse_shorthand(text, algorithm).unwrap();
            assert_eq!(&**limit.build().unwrap().policy(), policy, "{text}");
        }
        let leaky = LimitSpec::parse_shorthand("1/s capacity 3", leaky).unwrap();
        assert_eq!(leaky.algorithm, Some(AlgorithmName::LeakyBucket));
        for (text, algorithm, expected) in [
            (
                "100/s burst 20",
                AlgorithmName::SlidingWindowLog,
                "burst: `burst` is not a field of sliding_window_log; set `algorithm` to gcra, `rate` to 100/s and `burst` to 20",
            ),
            (
                "100/s capacity 20",
                AlgorithmName::Gcra,
                "capacity: `capacity` is not a field of gcra; set `algorithm` to token_bucket, `refill` to 100/s and `capacity` to 20",
            ),
        ] {
            let error = LimitSpec::parse_shorthand(text, Some(algorithm)).unwrap_err();
            assert_eq!(error.to_string(), expected);
        }
    }

    /// Without `burst 0`, the policy string of a GCRA limit would be `5/min`, which is the policy
    /// string of a window limit.
    #[test]
    fn the_policy_of_a_gcra_without_burst_differs_from_that_of_a_window() {
        let policy = |algorithm| {
            let spec = LimitSpec::parse_shorthand("5/min", algorithm).unwrap();
            spec.build().unwrap().policy().to_string()
        };
        assert_eq!(policy(Some(AlgorithmName::Gcra)), "5/min burst 0");
        assert_eq!(policy(None), "5/min");
    }

    #[test]
    fn a_large_shorthand_is_a_strict_counter() {
        for (text, algorithm, buckets) in [
            ("1000/min", AlgorithmName::SlidingWindowLog, None),
            ("1001/min", AlgorithmName::SlidingWindowCounter, Some(60)),
            (
                "999999999999999/s",
                AlgorithmName::SlidingWindowCounter,
                Some(50),
            ),
            ("2000/7ms", AlgorithmName::SlidingWindowCounter, Some(56)),
            ("2000/us", AlgorithmName::SlidingWindowCounter, Some(1)),
        ] {
            let spec = LimitSpec::parse_shorthand(text, None).unwrap();
            assert_eq!(
                (spec.algorithm, spec.buckets),
                (Some(algorithm), buckets),
                "{text}"
            );
            assert_eq!(spec.strict, buckets.map(|_| true), "{text}");
            assert_eq!(&**spec.build().unwrap().policy(), text);
        }
    }

    #[test]
    fn the_fields_imply_the_algorithm() {
        let spec = LimitSpec {
            limit: Some(20),
            window: Some(Span::from_secs(60)),
            soft: Some(10),
            ..LimitSpec::default()
        };
        let limit = spec.build().unwrap();
        assert!(matches!(
            limit.algorithm(),
            Algorithm::SlidingWindowLog { .. }
        ));
        assert_eq!(limit.soft_percent(), 10);
        let bucket = LimitSpec {
            capacity: Some(10),
            refill: notation::rate("1/h").ok(),
            ..LimitSpec::default()
        };
        let limit = bucket.build().unwrap();
        assert!(matches!(limit.algorithm(), Algorithm::TokenBucket { .. }));
        let some_window = LimitSpec {
            limit: Some(10),
            ..LimitSpec::default()
        };
        let problem = some_window.build().unwrap_err()[0].to_string();
        let expected = "window: is missing; add one, such as 1min, or set `algorithm: concurrency` to \
            limit requests in progress";
        assert_eq!(problem, expected);
        let some_bucket = LimitSpec {
            capacity: Some(10),
            ..LimitSpec::default()
        };
        let problem = some_bucket.build().unwrap_err()[0].to_string();
        let expected = "algorithm: is missing; expected one of gcra, token_bucket, leaky_bucket, fixed_window, \
            sliding_window_log, sliding_window_counter, concurrency";
        assert_eq!(problem, expected);
    }

    #[test]
    fn an_unexpected_field_error_names_the_right_algorithm() {
        let spec = LimitSpec {
            algorithm: Some(AlgorithmName::TokenBucket),
            rate: notation::rate("100/s").ok(),
            burst: Some(5),
            ..LimitSpec::default()
        };
        let problems = spec.build().unwrap_err();
        let text: Vec<String> = problems.iter().map(ToString::to_string).collect();
        assert_eq!(
            text[..2],
            [
                "rate: is not a field of token_bucket, which takes capacity, refill, refill_mode; \
                 rate and burst are fields of `algorithm: gcra`",
                "burst: is not a field of token_bucket, which takes capacity, refill, refill_mode",
            ]
        );
    }

    /// Only the requests of a concurrency limit wait for a slot. A limit of another algorithm says
    /// so, whether it names its algorithm or not.
    #[test]
    fn a_wait_without_slots_is_an_error_about_concurrency() {
        let wait = Some(Span::from_secs(2));
        let window = Some(Span::from_secs(60));
        let spec = |algorithm, wait, slot_queue| LimitSpec {
            algorithm,
            limit: Some(10),
            window,
            wait,
            slot_queue,
            ..LimitSpec::default()
        };
        let log = Some(AlgorithmName::SlidingWindowLog);
        let applies =
            "applies only to `algorithm: concurrency`, whose requests can wait for a slot";
        let unexpected = "is not a field of sliding_window_log, which takes limit, window; it";
        for (spec, expected) in [
            (
                spec(log, wait, None),
                format!("wait: {unexpected} {applies}"),
            ),
            (
                spec(log, None, Some(5)),
                format!("queue: {unexpected} {applies}"),
            ),
            (
                spec(None, wait, Some(5)),
                format!(
                    "wait: {applies}, which takes limit, lease, wait, queue; remove `wait`, or the \
                     fields of other algorithms"
                ),
            ),
        ] {
            let problems = spec.build().unwrap_err();
            assert_eq!(problems[0].to_string(), expected);
        }
        let bucket = LimitSpec {
            algorithm: Some(AlgorithmName::LeakyBucket),
            capacity: Some(5),
            leak: notation::rate("5/s").ok(),
            slot_queue: Some(5),
            ..LimitSpec::default()
        };
        let expected = "queue: must be true or false; a number is the queue of a limit with \
            `algorithm: concurrency`";
        assert_eq!(bucket.build().unwrap_err()[0].to_string(), expected);
    }

    #[test]
    fn only_a_window_accepts_a_limit_of_zero() {
        for algorithm in [None, Some(AlgorithmName::FixedWindow)] {
            let limit = LimitSpec::parse_shorthand("0/min", algorithm)
                .unwrap()
                .build();
            assert_eq!(limit.unwrap().quota(), 0);
        }
        for algorithm in [AlgorithmName::Gcra, AlgorithmName::TokenBucket] {
            let error = LimitSpec::parse_shorthand("0/min", Some(algorithm)).unwrap_err();
            let expected = "rate: a rate must be at least 1, got 0; to deny everything, set \
                `algorithm` to fixed_window, `limit` to 0 and `window` to 1min";
            assert_eq!(error.to_string(), expected);
        }
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
