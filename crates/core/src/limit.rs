//! A limit: an algorithm with its numbers, valid by construction.

use std::{fmt, sync::Arc};

use crate::{calendar::Calendar, digest::Digest, kernel::Kernel, time::Span};

/// So many units per period.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Rate {
    /// How many units.
    pub count: u64,
    /// In how long.
    pub period: Span,
}

/// `20/min` where the period is one unit, `5/10s` where it is not.
impl fmt::Display for Rate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let period = self.period.to_string();
        write!(f, "{}/{}", self.count, bare_unit(&period))
    }
}

/// `1min` is written `min` after the slash, but `11min` stays.
fn bare_unit(period: &str) -> &str {
    match period.strip_prefix('1') {
        Some(unit) if !unit.starts_with(|c: char| c.is_ascii_digit()) => unit,
        _ => period,
    }
}

/// How a token bucket gets its tokens back.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum RefillMode {
    /// Tokens accrue with elapsed time, each as soon as it is due.
    #[default]
    Continuous,
    /// All the tokens of an interval arrive together at its end.
    Interval,
}

impl RefillMode {
    /// Every mode by its name in a rules file.
    pub const ALL: [(&'static str, Self); 2] = [
        ("continuous", Self::Continuous),
        ("interval", Self::Interval),
    ];
}

/// Where the windows of a fixed window begin, and how long they are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Window {
    /// Whole multiples of the span since the Unix epoch.
    Epoch(Span),
    /// Begins with a key's first request, and again with the first one after it ended.
    FirstRequest(Span),
    /// Days, weeks or months of a calendar.
    Calendar(Calendar),
}

impl Window {
    pub(crate) fn digest(&self, digest: Digest) -> Digest {
        match self {
            Self::Epoch(span) => digest.numbers(&[1, span.as_micros()]),
            Self::FirstRequest(span) => digest.numbers(&[2, span.as_micros()]),
            Self::Calendar(calendar) => calendar.digest(digest.number(3)),
        }
    }
}

/// The algorithms by the names that people ask for, each a face of one of the kernels (`src/kernel/`),
/// where its promise, its weakness and its source are written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Algorithm {
    /// One request each `rate.period / rate.count`, and `burst` more at once.
    Gcra {
        /// The steady rate.
        rate: Rate,
        /// How many may come at once beyond the usual one; 0 is strict spacing.
        burst: u64,
    },
    /// A bucket of `capacity` tokens, refilled by `refill.count` each `refill.period`.
    TokenBucket {
        /// The most tokens that the bucket holds; it starts full.
        capacity: u64,
        /// What comes back.
        refill: Rate,
        /// Whether tokens come back one by one or an interval's worth at once.
        mode: RefillMode,
    },
    /// A bucket of `capacity` that leaks `leak.count` each `leak.period`.
    LeakyBucket {
        /// How much fits. As a queue: how many may wait behind the one being served.
        capacity: u64,
        /// How fast it empties.
        leak: Rate,
        /// False: a meter that refuses what would overflow. True: a shaper that admits with a delay.
        queue: bool,
    },
    /// At most `limit` in each window of a fixed grid.
    FixedWindow {
        /// The most in one window; 0 refuses everything.
        limit: u64,
        /// The grid.
        window: Window,
    },
    /// At most `limit` in any `window`, strictly.
    SlidingWindowLog {
        /// The most in any window; 0 refuses everything.
        limit: u64,
        /// The length of the window.
        window: Span,
    },
    /// At most `limit` at once: who is admitted holds his place until it is [settled](crate::MemoryStore::settle), or for
    /// `lease` if it never is.
    Concurrency {
        /// The most at once; 0 refuses everything.
        limit: u64,
        /// How long a place is held at most: longer than any request should take, for what takes longer is not counted
        /// any more. A holder that crashed gives its place back when this is over.
        lease: Span,
    },
    /// At most `limit` in a sliding `window`, kept as counts.
    SlidingWindowCounter {
        /// The most in a window; 0 refuses everything.
        limit: u64,
        /// The length of the window.
        window: Span,
        /// How the window is cut.
        counting: Counting,
    },
}

/// How a sliding window counter approximates its window.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Counting {
    /// This window and the one before it, weighted by overlap.
    Weighted,
    /// Sub-windows.
    Buckets {
        /// How many sub-windows make a window; the window must be a whole multiple of it.
        buckets: u32,
        /// True sums one more bucket, so that no window ever exceeds the limit.
        strict: bool,
    },
}

/// An algorithm with its numbers and its options.
///
/// Valid by construction: whatever this type holds, every decision computes exactly and without overflow.
///
/// # Examples
///
/// ```
/// use tidegate_core::{Algorithm, Limit, Rate, Span};
///
/// let per_second = Rate { count: 100, period: Span::from_secs(1) };
/// let limit = Limit::new(Algorithm::Gcra { rate: per_second, burst: 5 }).unwrap();
/// assert_eq!(limit.quota(), 6);
///
/// let nothing = Rate { count: 0, period: Span::from_secs(1) };
/// let refused = Limit::new(Algorithm::Gcra { rate: nothing, burst: 5 }).unwrap_err();
/// assert_eq!(refused.field, "rate");
/// ```
#[derive(Clone, Debug)]
pub struct Limit {
    algorithm: Algorithm,
    soft_percent: u32,
    soft_allowance: u64,
    count_denied: bool,
    in_full: bool,
    policy: Arc<str>,
}

/// Two limits are equal if they decide alike.
impl PartialEq for Limit {
    fn eq(&self, other: &Self) -> bool {
        self.algorithm == other.algorithm
            && self.soft_percent == other.soft_percent
            && self.count_denied == other.count_denied
            && self.in_full == other.in_full
    }
}

impl Eq for Limit {}

/// A number that a limit cannot have: which field it is, and what would be right.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LimitError {
    /// The field, by its name in the rules file.
    pub field: &'static str,
    /// What is wrong and what to write instead.
    pub problem: String,
}

impl fmt::Display for LimitError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.field, self.problem)
    }
}

impl std::error::Error for LimitError {}

impl LimitError {
    /// A complaint about `field`.
    #[must_use]
    pub fn new(field: &'static str, problem: impl Into<String>) -> Self {
        Self {
            field,
            problem: problem.into(),
        }
    }
}

/// Refuses a percentage that no limit can have as its soft allowance.
pub(crate) fn check_soft_percent(percent: u32) -> Result<(), LimitError> {
    if percent > 1_000 {
        let problem = format!("{percent}% is over the maximum of 1000%");
        return Err(LimitError::new("soft", problem));
    }
    Ok(())
}

impl Limit {
    /// A limit that is hard and does not count denied requests.
    ///
    /// # Errors
    ///
    /// Names the first field whose number is zero where it must not be, over its maximum in
    /// [`bounds`](crate::bounds), or at odds with another.
    pub fn new(algorithm: Algorithm) -> Result<Self, LimitError> {
        let policy = policy_text(&algorithm).into();
        let limit = Self {
            algorithm,
            soft_percent: 0,
            soft_allowance: 0,
            count_denied: false,
            in_full: false,
            policy,
        };
        Kernel::compile(&limit)?;
        Ok(limit)
    }

    /// Admits `percent` over the limit, marked as [`over_limit`](crate::Outcome::over_limit).
    ///
    /// # Errors
    ///
    /// Refuses a percentage over 1,000, or one that takes the limit over its maximum.
    pub fn with_soft_percent(mut self, percent: u32) -> Result<Self, LimitError> {
        check_soft_percent(percent)?;
        let allowance = u128::from(self.quota()) * u128::from(percent) / 100;
        self.soft_percent = percent;
        self.soft_allowance = u64::try_from(allowance).unwrap_or(u64::MAX);
        Kernel::compile(&self)?;
        Ok(self)
    }

    /// Counts denied requests too, so that a client that never backs off stays denied. It changes nothing in
    /// [`Algorithm::Concurrency`]: who is denied holds no place.
    #[must_use]
    pub fn counting_denied(mut self, count_denied: bool) -> Self {
        let holds_places = matches!(self.algorithm, Algorithm::Concurrency { .. });
        self.count_denied = count_denied && !holds_places;
        self
    }

    /// Counts in full what it denies, so that the count may lie beyond the limit, which [`Outcome::excess`] tells. What only
    /// other limits deny is not counted: so counts a service that charges each of several descriptors on its own. It takes
    /// the place of [`Self::counting_denied`].
    ///
    /// # Errors
    ///
    /// Refuses every algorithm but the fixed window: only its count can lie beyond the limit.
    ///
    /// [`Outcome::excess`]: crate::Outcome::excess
    pub fn counting_in_full(mut self) -> Result<Self, LimitError> {
        if !matches!(self.algorithm, Algorithm::FixedWindow { .. }) {
            let problem = "only a fixed window counts in full what it denies";
            return Err(LimitError::new("algorithm", problem));
        }
        self.in_full = true;
        Ok(self)
    }

    /// Adds everything that decides: an explicit encoding, which `Digest` versions.
    pub(crate) fn digest(&self, digest: Digest) -> Digest {
        let digest = match &self.algorithm {
            Algorithm::Gcra { rate, burst } => {
                digest.numbers(&[1, rate.count, rate.period.as_micros(), *burst])
            }
            Algorithm::TokenBucket {
                capacity,
                refill,
                mode,
            } => {
                let mode = match mode {
                    RefillMode::Continuous => 0,
                    RefillMode::Interval => 1,
                };
                let period = refill.period.as_micros();
                digest.numbers(&[2, *capacity, refill.count, period, mode])
            }
            Algorithm::LeakyBucket {
                capacity,
                leak,
                queue,
            } => {
                let period = leak.period.as_micros();
                digest.numbers(&[3, *capacity, leak.count, period, u64::from(*queue)])
            }
            Algorithm::FixedWindow { limit, window } => window.digest(digest.numbers(&[4, *limit])),
            Algorithm::SlidingWindowLog { limit, window } => {
                digest.numbers(&[5, *limit, window.as_micros()])
            }
            Algorithm::Concurrency { limit, lease } => {
                digest.numbers(&[6, *limit, lease.as_micros()])
            }
            Algorithm::SlidingWindowCounter {
                limit,
                window,
                counting,
            } => {
                let digest = digest.numbers(&[7, *limit, window.as_micros()]);
                match counting {
                    Counting::Weighted => digest.number(0),
                    Counting::Buckets { buckets, strict } => {
                        digest.numbers(&[1, u64::from(*buckets), u64::from(*strict)])
                    }
                }
            }
        };
        digest.numbers(&[
            u64::from(self.soft_percent),
            u64::from(self.count_denied),
            u64::from(self.in_full),
        ])
    }

    /// The algorithm and its numbers.
    #[must_use]
    pub fn algorithm(&self) -> &Algorithm {
        &self.algorithm
    }

    /// How much over the limit is admitted, in percent.
    #[must_use]
    pub fn soft_percent(&self) -> u32 {
        self.soft_percent
    }

    /// Whether denied requests are charged.
    #[must_use]
    pub fn count_denied(&self) -> bool {
        self.count_denied
    }

    /// Whether what is denied is counted in full.
    #[must_use]
    pub fn counts_in_full(&self) -> bool {
        self.in_full
    }

    /// The limit in short notation: `20/min`, `100/s burst 5`.
    #[must_use]
    pub fn policy(&self) -> &Arc<str> {
        &self.policy
    }

    /// The most units that an idle key can spend at once, without the soft allowance.
    #[must_use]
    pub fn quota(&self) -> u64 {
        match self.algorithm {
            Algorithm::Gcra { burst, .. } => burst.saturating_add(1),
            Algorithm::TokenBucket { capacity, .. } => capacity,
            Algorithm::LeakyBucket {
                capacity, queue, ..
            } => capacity.saturating_add(u64::from(queue)),
            Algorithm::FixedWindow { limit, .. }
            | Algorithm::SlidingWindowLog { limit, .. }
            | Algorithm::Concurrency { limit, .. }
            | Algorithm::SlidingWindowCounter { limit, .. } => limit,
        }
    }

    /// How many units over the quota are admitted, marked.
    #[must_use]
    pub fn soft_allowance(&self) -> u64 {
        self.soft_allowance
    }

    /// The quota with the soft allowance on top: nothing above it is ever admitted.
    pub(crate) fn hard_quota(&self) -> u64 {
        self.quota().saturating_add(self.soft_allowance)
    }

    /// Whether less than half of the hard quota remains.
    pub(crate) fn is_pressed(&self, remaining: u64) -> bool {
        remaining.saturating_mul(2) < self.hard_quota()
    }

    /// A window's length, or the time in which a bucket's whole quota comes back; of a calendar, the longest that its
    /// unit usually is. A key of a sliding counter can take longer to be as good as new.
    #[must_use]
    pub fn window(&self) -> Span {
        match &self.algorithm {
            Algorithm::Gcra { rate, .. } => fill_time(self.quota(), *rate),
            Algorithm::TokenBucket {
                capacity,
                refill,
                mode: RefillMode::Continuous,
            } => fill_time(*capacity, *refill),
            Algorithm::TokenBucket {
                capacity,
                refill,
                mode: RefillMode::Interval,
            } => Span::from_micros(
                capacity
                    .div_ceil(refill.count)
                    .saturating_mul(refill.period.as_micros()),
            ),
            Algorithm::LeakyBucket { leak, .. } => fill_time(self.quota(), *leak),
            Algorithm::FixedWindow {
                window: Window::Epoch(span) | Window::FirstRequest(span),
                ..
            } => *span,
            Algorithm::FixedWindow {
                window: Window::Calendar(calendar),
                ..
            } => calendar.longest(),
            Algorithm::SlidingWindowLog { window, .. }
            | Algorithm::Concurrency { lease: window, .. }
            | Algorithm::SlidingWindowCounter { window, .. } => *window,
        }
    }
}

fn fill_time(quota: u64, rate: Rate) -> Span {
    let micros = (u128::from(quota) * u128::from(rate.period.as_micros()))
        .div_ceil(u128::from(rate.count.max(1)));
    Span::from_micros(u64::try_from(micros).unwrap_or(u64::MAX))
}

fn policy_text(algorithm: &Algorithm) -> String {
    match algorithm {
        Algorithm::Gcra { rate, burst: 0 } => rate.to_string(),
        Algorithm::Gcra { rate, burst } => format!("{rate} burst {burst}"),
        Algorithm::TokenBucket {
            capacity, refill, ..
        } if *capacity == refill.count => refill.to_string(),
        Algorithm::TokenBucket {
            capacity, refill, ..
        } => format!("{refill} capacity {capacity}"),
        Algorithm::LeakyBucket { capacity, leak, .. } => format!("{leak} capacity {capacity}"),
        Algorithm::FixedWindow {
            limit,
            window: Window::Epoch(period) | Window::FirstRequest(period),
        }
        | Algorithm::SlidingWindowLog {
            limit,
            window: period,
        }
        | Algorithm::SlidingWindowCounter {
            limit,
            window: period,
            ..
        } => Rate {
            count: *limit,
            period: *period,
        }
        .to_string(),
        Algorithm::FixedWindow {
            limit,
            window: Window::Calendar(calendar),
        } => format!("{limit}/{calendar}"),
        Algorithm::Concurrency { limit, .. } => format!("{limit} at once"),
    }
}
