//! The other side of a limit: a client that comes back when it may, and not before.
//!
//! ```text
//! retry      Retry               sends again, when and as often as makes sense
//! retry      RetryPolicy::next       whether, and when
//! advice     Advice::of              headers -> when to come back, how much is left   every dialect of Retry-After and RateLimit
//! backoff    Backoff::wait           how long to wait when the server does not say   exponential, with jitter
//! budget     RetryBudget             how much load retries may add
//! guard      Guard, Guarded      stands before a request and learns from its answer
//! guard      QueueLayer              sends later what must not be sent now: in order, bounded, at the server's pace
//! guard      ThrottleLayer           keeps to limits by itself, counted here or with others
//! adaptive   AdaptiveThrottle        keeps back what the server would most likely refuse
//! breaker    CircuitBreaker          sends nothing to a server that mostly fails, but for probes
//! ```
//!
//! What decides does not act: time and chance are arguments, arithmetic is in integers. What acts is thin: layers for tower
//! (hyper-util's client, tonic's channels), and with the feature `reqwest` middleware for reqwest. Both wait with tokio's timers, and
//! [`Clock`] reads the time from them.

/// The program in the documentation of this crate is compiled.
#[cfg(all(doctest, feature = "reqwest"))]
#[doc = include_str!("../../../docs/client.md")]
mod documentation {}

mod adaptive;
pub mod advice;
mod backoff;
mod body;
mod breaker;
mod budget;
mod clock;
mod error;
pub mod guard;
mod head;
mod host;
mod layer;
#[cfg(feature = "reqwest")]
mod middleware;
mod pace;
mod recent;
pub mod retry;

pub use adaptive::AdaptiveThrottle;
pub use advice::{Advice, Standing, Wait};
pub use backoff::{Backoff, Jitter};
pub use body::{PeekedBody, ReplayBody};
pub use breaker::{BreakerSettings, CircuitBreaker, Health, Permit};
pub use budget::RetryBudget;
pub use clock::Clock;
pub use error::{BoxError, Error, TryTimeout};
pub use fastrand::Rng;
pub use guard::{
    AdaptiveLayer, BreakerLayer, Guard, Guarded, LaneSettings, Pacing, QueueLayer, ThrottleLayer,
    TimeoutGuard, TimeoutLayer, spaced,
};
pub use layer::{GuardedService, RetryService};
pub use retry::{BudgetFor, GiveUp, NonIdempotent, Retried, Retry, RetryPolicy};
pub use tidegate_core::{Cost, Span, Timestamp};
