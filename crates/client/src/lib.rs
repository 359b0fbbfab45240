//! The other side of a limit: a client that comes back when it may, and not before.
//!
//! ```text
//! advice     Advice::of      headers -> when to come back, how much is left   every dialect of Retry-After and RateLimit
//! backoff    Backoff::wait   how long to wait when the server does not say   exponential, with jitter
//! budget     RetryBudget     how much load retries may add
//! adaptive   AdaptiveThrottle    keeps back what the server would most likely refuse
//! breaker    CircuitBreaker      sends nothing to a server that mostly fails, but for probes
//! ```
//!
//! Each piece decides and does not act: time and chance are arguments, arithmetic is in integers.

mod adaptive;
pub mod advice;
mod backoff;
mod breaker;
mod budget;
mod recent;

pub use adaptive::AdaptiveThrottle;
pub use advice::{Advice, Standing, Wait};
pub use backoff::{Backoff, Jitter};
pub use breaker::{BreakerSettings, CircuitBreaker, Health, Permit};
pub use budget::RetryBudget;
pub use fastrand::Rng;
pub use tidegate_core::{Span, Timestamp};
