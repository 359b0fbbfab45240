//! A client for rate-limited services. The client never retries earlier than the server allows.
//!
//! ```text
//! retry      RetryLayer             retries requests
//! retry      RetryPolicy::decide    whether to retry, and when
//! advice     Advice::from_response  when to retry and how much is left, from headers: every
//!                                   dialect of Retry-After and RateLimit
//! (core)     Backoff::wait          how long to wait by default: exponential, with jitter
//! budget     RetryBudget            bounds the load that retries add
//! guard      Guard, GuardLayer      admits requests and learns from their responses
//! guard      QueueLayer             delays requests: in order, bounded, at the server's pace
//! guard      ThrottleLayer          enforces limits on the client, alone or shared with others
//! adaptive   AdaptiveThrottle       rejects requests that the server would most likely refuse
//! breaker    CircuitBreaker         sends only probes to a server that mostly fails
//! ```
//!
//! The types that make decisions do no I/O. These types take the time and random numbers as
//! arguments, and calculate with integers. Thin adapters apply the decisions: tower layers (for
//! hyper-util's client and tonic's channels) and, with the feature `reqwest`, a middleware for
//! reqwest. The adapters wait with tokio's timers, and [`TokioClock`] reads the time from the same
//! timers.

/// Compiles the program in the documentation of this crate.
#[cfg(all(doctest, feature = "reqwest"))]
#[doc = include_str!("../../../docs/client.md")]
mod documentation {}

mod adaptive;
pub mod advice;
mod body;
mod breaker;
mod budget;
mod clock;
mod error;
mod give_up_reason;
pub mod guard;
mod layer;
#[cfg(feature = "reqwest")]
mod middleware;
mod pacer;
mod per_host;
mod response_head;
pub mod retry;
mod rolling_window;
mod sync;

pub use adaptive::AdaptiveThrottle;
pub use advice::{Advice, QuotaStatus, Wait};
pub use body::{PeekedBody, ReplayBody};
pub use breaker::{BreakerPermit, BreakerSettings, CircuitBreaker, HealthSignal};
pub use budget::RetryBudget;
pub use clock::TokioClock;
pub use error::{BoxError, Error, TryTimeout};
pub use fastrand::Rng;
pub use give_up_reason::GiveUpReason;
pub use guard::{
    AdaptiveLayer, BreakerLayer, Guard, GuardLayer, Pacing, QueueLayer, QueueSettings,
    ThrottleLayer, TimeoutGuard, TimeoutLayer, spaced,
};
pub use layer::{GuardService, RetryService};
pub use retry::{BudgetScope, NonIdempotentPolicy, RetryLayer, RetryPolicy, RetryReport};
pub use tidegate_core::{Backoff, Cost, Jitter, Span, Timestamp};
