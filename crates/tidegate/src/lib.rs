//! Rate limits inside an application, exact and in order.
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
//! A [`Limiter`] has the same limits for every [`Key`]. A [`RuleLimiter`] chooses the limits by
//! rules, and is also the [`Gate`] of a tower layer.

mod clock;
mod error;
pub mod gate;
mod key;
mod limiter;
mod rules;
mod timer;
mod waiters;

pub use tidegate_core::{
    AlgorithmName, Limit, LimitError, LimitSpec, Limits, MemoryBounds, MemoryStore, Reason, Retry,
    Span, Store, Timestamp, Verdict, bounds, notation,
};

pub use self::{
    clock::Clock,
    error::AcquireError,
    gate::Gate,
    key::{Costing, Key},
    limiter::Limiter,
    rules::Limiter as RuleLimiter,
    waiters::WaitBounds,
};
