//! Retries: whether, when, and how often.

mod policy;
pub(crate) mod refusal;
mod run;
mod seen;

use std::sync::{Arc, Mutex, PoisonError};

pub use policy::{Attempt, BudgetFor, GiveUp, Next, NonIdempotent, RetryPolicy};
pub(crate) use run::{Answer, Sender, run};
pub use seen::{Kind, Safety, Seen};

use crate::{Clock, Rng, budget::RetryBudget, host::PerHost};

/// Retries requests under a [`RetryPolicy`]: a layer for tower, and with the feature `reqwest` a
/// middleware for reqwest.
///
/// The policy and the budget of the host limit the retries. A response that is not retried is
/// returned, whatever its status. If it was retried, or would have been, it has a [`Retried`] among
/// its extensions.
///
/// With tower, the inner service receives requests with a [`ReplayBody`](crate::ReplayBody), and
/// the caller receives responses with a [`PeekedBody`](crate::PeekedBody).
///
/// # Examples
///
/// ```
/// use bytes::Bytes;
/// use http_body_util::Full;
/// use hyper_util::{client::legacy::Client, rt::TokioExecutor};
/// use tidegate_client::{Retry, RetryPolicy, Span};
/// use tower::{Service, ServiceBuilder};
///
/// let policy = RetryPolicy { deadline: Span::from_secs(10), ..RetryPolicy::default() };
/// let client = Client::builder(TokioExecutor::new()).build_http();
/// let mut client = ServiceBuilder::new().layer(Retry::new(policy)).service(client);
/// let call = client.call(http::Request::get("http://127.0.0.1:8080/").body(Full::<Bytes>::default())?);
/// # drop(call);
/// # Ok::<(), http::Error>(())
/// ```
///
/// With reqwest, bodies can be sent again if they are not streams. The application must say which
/// errors mean that nothing was sent: see [`Retry::never_sent_if`].
///
/// ```
/// # #[cfg(feature = "reqwest")] {
/// use reqwest_middleware::ClientBuilder;
/// use tidegate_client::{Retry, RetryPolicy, ThrottleLayer, spaced};
///
/// let client = ClientBuilder::new(reqwest::Client::new())
///     .with(Retry::new(RetryPolicy::default()))
///     .with(ThrottleLayer::new(spaced("100/s")?))
///     .build();
/// # drop(client);
/// # }
/// # Ok::<(), tidegate_core::LimitError>(())
/// ```
#[derive(Clone, Debug)]
pub struct Retry(Arc<Shared>);

/// Returns whether an error means that nothing was sent.
pub(crate) type NeverSent = fn(&(dyn std::error::Error + 'static)) -> bool;

#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) policy: RetryPolicy,
    pub(crate) clock: Clock,
    /// The application's own classification of errors, if it has set one.
    pub(crate) never_sent: Option<NeverSent>,
    budget: RetryBudget,
    budgets: PerHost<Mutex<RetryBudget>>,
    rng: Mutex<Rng>,
}

/// A report of [`Retry`], in the extensions of a response that is not the first, or that would have
/// been retried.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Retried {
    /// How often the request was sent.
    pub tries: u32,
    /// Why it was not sent again, if the response called for a retry.
    pub gave_up: Option<GiveUp>,
}

impl Retry {
    /// Creates a layer with `policy`, and [the default budget](RetryBudget::default) for each host.
    #[must_use]
    pub fn new(policy: RetryPolicy) -> Self {
        let budget = RetryBudget::default();
        Self(Arc::new(Shared {
            policy,
            clock: Clock::system(),
            never_sent: None,
            budgets: budgets(&budget),
            budget,
            rng: Mutex::new(Rng::new()),
        }))
    }

    /// Gives each host a copy of this budget.
    #[must_use]
    pub fn with_budget(self, budget: RetryBudget) -> Self {
        self.changed(|shared| Shared {
            budgets: budgets(&budget),
            budget,
            ..shared
        })
    }

    /// Sets which errors of the inner service mean that nothing was sent. By default that is a
    /// refused connection, anywhere in the chain of sources. An application may know of more
    /// errors, such as a failed name lookup.
    ///
    /// With reqwest no error counts by default. It follows redirects by itself, so the refused
    /// connection may be that of a second hop, after the first has processed the request. If
    /// redirects are off, or every hop may be repeated, use `reqwest::Error::is_connect`.
    #[must_use]
    pub fn never_sent_if(self, never_sent: fn(&(dyn std::error::Error + 'static)) -> bool) -> Self {
        self.changed(|shared| Shared {
            never_sent: Some(never_sent),
            ..shared
        })
    }

    /// Reads the time from `clock`.
    #[must_use]
    pub fn with_clock(self, clock: Clock) -> Self {
        self.changed(|shared| Shared { clock, ..shared })
    }

    /// Takes random numbers from `rng`.
    #[must_use]
    pub fn with_rng(self, rng: Rng) -> Self {
        self.changed(|shared| Shared {
            rng: Mutex::new(rng),
            ..shared
        })
    }

    pub(crate) fn shared(&self) -> &Arc<Shared> {
        &self.0
    }

    /// Applies a change to a copy of its own; clones that are in use keep their settings.
    fn changed(self, change: impl FnOnce(Shared) -> Shared) -> Self {
        let shared = Arc::try_unwrap(self.0).unwrap_or_else(|shared| Shared {
            policy: shared.policy,
            clock: shared.clock,
            never_sent: shared.never_sent,
            budgets: budgets(&shared.budget),
            budget: shared.budget.clone(),
            rng: Mutex::new(shared.rng().fork()),
        });
        Self(Arc::new(change(shared)))
    }
}

/// Returns a map that gives each host a copy of this budget.
fn budgets(budget: &RetryBudget) -> PerHost<Mutex<RetryBudget>> {
    let budget = budget.clone();
    PerHost::new(move || Mutex::new(budget.clone()))
}

impl Shared {
    pub(crate) fn rng(&self) -> std::sync::MutexGuard<'_, Rng> {
        // No panic leaves the generator inconsistent, so a poisoned lock is safe to use.
        self.rng.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
