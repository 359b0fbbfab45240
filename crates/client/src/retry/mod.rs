//! Retries: the retry policy, the retry layer and the classification of outcomes.

mod outcome;
mod policy;
pub(crate) mod refusal;
mod retry_loop;

use std::sync::{Arc, Mutex};

pub use outcome::{AttemptOutcome, Idempotency, OutcomeKind};
pub use policy::{Attempt, BudgetScope, NonIdempotentPolicy, RetryDecision, RetryPolicy};
pub(crate) use retry_loop::{AttemptResponse, RequestSender, run};

use crate::{GiveUpReason, Rng, TokioClock, budget::RetryBudget, per_host::PerHost, sync::lock};

/// A layer that retries requests according to a [`RetryPolicy`]. The layer is a tower layer. With
/// the feature `reqwest`, the layer is also a middleware for reqwest.
///
/// Retries are limited by the policy and by the host's retry budget. If the request is not retried,
/// its response is returned, regardless of its status. The response's extensions contain a
/// [`RetryReport`] in two cases: the request was retried, or a retry was needed but not made.
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
/// use tidegate_client::{RetryLayer, RetryPolicy, Span};
/// use tower::{Service, ServiceBuilder};
///
/// let policy = RetryPolicy { deadline: Span::from_secs(10), ..RetryPolicy::default() };
/// let client = Client::builder(TokioExecutor::new()).build_http();
/// let mut client = ServiceBuilder::new().layer(RetryLayer::new(policy)).service(client);
/// let request = http::Request::get("http://127.0.0.1:8080/").body(Full::<Bytes>::default())?;
/// let call = client.call(request);
/// # drop(call);
/// # Ok::<(), http::Error>(())
/// ```
///
/// With reqwest, a body can be sent again unless it is a stream. In addition, the application must
/// specify which errors mean that nothing was sent: see [`RetryLayer::never_sent_if`].
///
/// ```
/// # #[cfg(feature = "reqwest")] {
/// use reqwest_middleware::ClientBuilder;
/// use tidegate_client::{RetryLayer, RetryPolicy, ThrottleLayer, spaced};
///
/// let client = ClientBuilder::new(reqwest::Client::new())
///     .with(RetryLayer::new(RetryPolicy::default()))
///     .with(ThrottleLayer::new(spaced("100/s")?))
///     .build();
/// # drop(client);
/// # }
/// # Ok::<(), tidegate_core::LimitError>(())
/// ```
#[derive(Clone, Debug)]
pub struct RetryLayer(Arc<RetryState>);

/// A function that returns whether an error means that nothing was sent.
pub(crate) type NeverSentTest = fn(&(dyn std::error::Error + 'static)) -> bool;

#[derive(Debug)]
pub(crate) struct RetryState {
    pub(crate) policy: RetryPolicy,
    pub(crate) clock: TokioClock,
    /// The application's function that returns whether an error means that nothing was sent; `None`
    /// if the application has not set it.
    pub(crate) never_sent: Option<NeverSentTest>,
    budget: RetryBudget,
    budgets: PerHost<Mutex<RetryBudget>>,
    rng: Mutex<Rng>,
}

/// A report of [`RetryLayer`], in the extensions of a response. A response has a report in two
/// cases: the request was retried, or a retry was needed but not made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RetryReport {
    /// The number of times that the request was sent.
    pub tries: u32,
    /// The reason why the request was not sent again; `None` if no further retry was needed.
    pub gave_up: Option<GiveUpReason>,
}

impl RetryLayer {
    /// Creates a layer with `policy`. Each host gets [the default budget](RetryBudget::default).
    #[must_use]
    pub fn new(policy: RetryPolicy) -> Self {
        let budget = RetryBudget::default();
        Self(Arc::new(RetryState {
            policy,
            clock: TokioClock::system(),
            never_sent: None,
            budgets: budget_per_host(&budget),
            budget,
            rng: Mutex::new(Rng::new()),
        }))
    }

    /// Sets the budget. Each host gets a copy of the budget.
    #[must_use]
    pub fn with_budget(self, budget: RetryBudget) -> Self {
        self.with_change(|state| RetryState {
            budgets: budget_per_host(&budget),
            budget,
            ..state
        })
    }

    /// Sets the function that returns whether an error of the inner service means that nothing was
    /// sent. By default, only a refused connection, anywhere in the chain of sources, means that
    /// nothing was sent. An application may include further errors, such as a failed name lookup.
    ///
    /// By default, no error of reqwest means that nothing was sent, because reqwest follows
    /// redirects itself. Therefore, the connection may have been refused by the target of a
    /// redirect, after the first server has processed the request. If redirects are disabled, or if
    /// the requests to all servers may be repeated, use `reqwest::Error::is_connect`.
    #[must_use]
    pub fn never_sent_if(
        self,
        is_never_sent: fn(&(dyn std::error::Error + 'static)) -> bool,
    ) -> Self {
        self.with_change(|state| RetryState {
            never_sent: Some(is_never_sent),
            ..state
        })
    }

    /// Sets the clock from which the layer reads the time.
    #[must_use]
    pub fn with_clock(self, clock: TokioClock) -> Self {
        self.with_change(|state| RetryState { clock, ..state })
    }

    /// Sets the generator from which the layer takes random numbers.
    #[must_use]
    pub fn with_rng(self, rng: Rng) -> Self {
        self.with_change(|state| RetryState {
            rng: Mutex::new(rng),
            ..state
        })
    }

    pub(crate) fn state(&self) -> &Arc<RetryState> {
        &self.0
    }

    /// Applies a change to the state. If clones of this layer share the state, changes a copy of
    /// the state, so that the clones keep their settings.
    fn with_change(self, change: impl FnOnce(RetryState) -> RetryState) -> Self {
        let state = Arc::try_unwrap(self.0).unwrap_or_else(|shared| RetryState {
            policy: shared.policy,
            clock: shared.clock,
            never_sent: shared.never_sent,
            budgets: budget_per_host(&shared.budget),
            budget: shared.budget.clone(),
            rng: Mutex::new(shared.rng().fork()),
        });
        Self(Arc::new(change(state)))
    }
}

/// Returns a table with a copy of `budget` for each host.
fn budget_per_host(budget: &RetryBudget) -> PerHost<Mutex<RetryBudget>> {
    let budget = budget.clone();
    PerHost::new(move || Mutex::new(budget.clone()))
}

impl RetryState {
    pub(crate) fn rng(&self) -> std::sync::MutexGuard<'_, Rng> {
        lock(&self.rng)
    }
}
