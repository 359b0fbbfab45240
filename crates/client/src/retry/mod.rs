//! Trying again: whether, when, and how often.

mod policy;
pub(crate) mod refusal;
mod run;
mod seen;

use std::sync::{Arc, Mutex, PoisonError};

pub use policy::{Attempt, BudgetFor, GiveUp, Next, NonIdempotent, RetryPolicy};
pub(crate) use run::{Answer, Sender, run};
pub use seen::{Kind, Safety, Seen};

use crate::{Clock, Rng, budget::RetryBudget, host::PerHost};

/// Tries requests again, as a [`RetryPolicy`] says: a layer for tower, and with the feature `reqwest` a middleware for reqwest.
///
/// It stops for what the policy says and within the budget of the host. An answer that is not tried again is handed on, whatever its
/// status, with a [`Retried`] among its extensions if there is something to tell.
///
/// For tower, requests have a [`ReplayBody`](crate::ReplayBody) below it, and answers a [`PeekedBody`](crate::PeekedBody) above it.
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
/// With reqwest, whose bodies can be sent again if they are not streams, and which knows itself whether anything was sent:
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

/// Whether an error says that nothing was sent.
pub(crate) type NeverSent = fn(&(dyn std::error::Error + 'static)) -> bool;

#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) policy: RetryPolicy,
    pub(crate) clock: Clock,
    /// What the application says of errors, if it does.
    pub(crate) never_sent: Option<NeverSent>,
    budget: RetryBudget,
    budgets: PerHost<Mutex<RetryBudget>>,
    rng: Mutex<Rng>,
}

/// What [`Retry`] did for an answer that was not the first, or that it would have tried again; among the answer's extensions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Retried {
    /// How often the request was sent.
    pub tries: u32,
    /// Why it was not sent once more, if the answer called for that.
    pub gave_up: Option<GiveUp>,
}

impl Retry {
    /// Retries under `policy`, with [the default budget](RetryBudget::default) for each host.
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

    /// Gives each host a budget like this one.
    #[must_use]
    pub fn with_budget(self, budget: RetryBudget) -> Self {
        self.changed(|shared| Shared {
            budgets: budgets(&budget),
            budget,
            ..shared
        })
    }

    /// Tells which errors of the service below say that nothing was sent. By default that is a refused connection, anywhere in the
    /// chain of sources; a client knows its own errors better, such as a name that was not found.
    ///
    /// Of a reqwest client it is none by default: it follows redirects by itself, and a connection that was refused may be that of
    /// a second hop, when the first has done what it was asked. Where redirects are off, or each hop may be asked again,
    /// `reqwest::Error::is_connect` tells.
    #[must_use]
    pub fn never_sent_if(self, never_sent: fn(&(dyn std::error::Error + 'static)) -> bool) -> Self {
        self.changed(|shared| Shared {
            never_sent: Some(never_sent),
            ..shared
        })
    }

    /// Takes the time from `clock`.
    #[must_use]
    pub fn with_clock(self, clock: Clock) -> Self {
        self.changed(|shared| Shared { clock, ..shared })
    }

    /// Takes chance from `rng`.
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

    /// A retry of its own, changed: what is already in use stays as it is.
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

/// A budget like this one for each host.
fn budgets(budget: &RetryBudget) -> PerHost<Mutex<RetryBudget>> {
    let budget = budget.clone();
    PerHost::new(move || Mutex::new(budget.clone()))
}

impl Shared {
    pub(crate) fn rng(&self) -> std::sync::MutexGuard<'_, Rng> {
        // What is behind the lock is whole at any moment.
        self.rng.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
