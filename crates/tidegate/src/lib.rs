//! Rate limits inside an application. Limits are exact, and waiting requests are admitted in order.
//!
//! ```
//! use tidegate::{Limit, Limiter};
//!
//! # #[tokio::main(flavor = "current_thread", start_paused = true)]
//! # async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let limiter = Limiter::in_memory("100/s burst 20".parse::<Limit>()?);
//! let verdict = limiter.check("alice"); // allowed, remaining, retry_after: a denial is a value
//! limiter.acquire("alice").await?; // waits for its turn
//! # Ok(())
//! # }
//! ```
//!
//! - A [`Limiter`] has the same limits for every [`Key`], or chooses the limits by [`Rules`]. The
//!   counts are in memory, or in Redis with the feature `redis`.
//! - [`StreamRateLimit`] and [`IteratorRateLimit`] rate limit a stream or an iterator.
//! - A limiter with rules also implements [`RateLimiter`], which the tower layer in
//!   `tidegate-tower` uses.
//!
//! # Features
//!
//! - `tokio` (default): tasks can wait.
//! - `redis`: counts in Redis or Valkey, shared by many processes.

mod adapters;
mod blocking;
mod clock;
mod error;
mod holding_times;
mod key;
mod keyed;
mod limiter;
mod override_limits;
pub mod rate_limiter;
#[cfg(feature = "redis")]
mod remote;
mod rules;
mod timer;
mod wait_stats;
mod waiters;

pub use tidegate_core::{
    ActiveHours, Algorithm, AlgorithmName, Condition, Cost, Exactness, Limit, LimitError,
    LimitSpec, Limits, Line, Lines, MemoryBounds, MemoryStore, OnFailure, Outcome, Pattern,
    QuotaUnit, Rate, Reason, Request, RequestError, RetryAfter, Rule, RuleErrors, RuleSet, Source,
    Span, Store, Timestamp, Verdict, When, WhenFull, bounds, notation,
};
#[cfg(feature = "redis")]
pub use tidegate_redis as redis;

#[cfg(feature = "tokio")]
pub use self::adapters::StreamRateLimit;
pub use self::{
    adapters::{IteratorRateLimit, RateLimitError, RateLimited},
    blocking::BlockingStore,
    clock::Clock,
    error::AcquireError,
    key::{Key, KeyWithCost},
    limiter::{IntoPolicy, Limiter},
    rate_limiter::{DecidedRequest, RateLimiter},
    rules::{CurrentRules, RuleLimiter, Rules},
    wait_stats::{WaitEnd, WaitStats},
    waiters::{WaitBounds, Waiters},
};
