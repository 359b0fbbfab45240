//! The charges of a request until they are settled.
//!
//! ```text
//! Waiting ──▶ Running ──▶ Answered ──▶ the body has ended or was cancelled
//!    │           │            │                   │
//!    ▼           ▼            ▼                   ▼
//! everything  slots are    settled by the      settled by the
//! refunded    released     response head       whole response
//! ```
//!
//! A request may be cancelled at every stage. Its reservation is then dropped and settled by what
//! is known so far. A store in this process is settled immediately. A remote store is settled by a
//! task on the runtime of the request. If that runtime is shutting down, the receipt is lost. That
//! is safe: the charges remain, and concurrency slots become free when their leases expire.
//!
//! The leases of concurrency slots are [renewed](super::keepalive) as long as the reservation
//! exists.

use std::{fmt, sync::Arc};

use http::Response;
use http_body::Body;
use tidegate_core::Rule;

use super::{
    keepalive::{Renewals, Ticket},
    permit::Lasting,
    receipt_guard::{Hold, Kept},
    response::Answer,
};

/// The charges of a request until they are settled. Dropping it settles them. The default has no
/// charges.
#[derive(Debug, Default)]
pub(super) struct Reservation(Option<Box<Owed>>);

/// The charges, and the stage of the request.
struct Owed {
    held: Arc<dyn Hold>,
    /// Present if there are concurrency slots; their leases are renewed until it is dropped.
    _renewed: Option<Ticket>,
    stage: Stage,
    /// Work that continues after the body of the response.
    lasting: Option<Lasting>,
}

#[derive(Debug)]
enum Stage {
    /// The service has not received the request.
    Waiting,
    /// The service is processing the request.
    Running,
    /// The service has responded.
    Answered(Answer),
}

impl Reservation {
    /// Creates a reservation of the charges in `held`. Leases of concurrency slots are renewed by
    /// `renewals` until it is dropped.
    pub(super) fn new(held: Arc<dyn Hold>, renewals: &Arc<Renewals>) -> Self {
        let lease = held.charged().lease();
        let renewed = lease.and_then(|lease| renewals.enter(Arc::clone(&held), lease));
        Self(Some(Box::new(Owed {
            held,
            _renewed: renewed,
            stage: Stage::Waiting,
            lasting: None,
        })))
    }

    /// Records that the service receives the request. From now on, cancelling does not refund
    /// everything.
    pub(super) fn begin(&mut self) {
        let Some(owed) = &mut self.0 else { return };
        owed.stage = Stage::Running;
        let depends = |rule: &Rule| rule.has_slots() || !rule.response_cost().is_settled();
        if !owed.held.charged().rules().any(depends) {
            // A charge of a queue alone is complete when the wait is over.
            self.0 = None;
        }
    }

    /// Records the response. The returned reservation must be kept until the body has ended.
    #[must_use]
    pub(super) fn answered<B: Body>(mut self, response: &Response<B>) -> Self {
        let Some(owed) = &mut self.0 else { return self };
        let names = owed.held.charged().names();
        let has_slots = owed.held.charged().rules().any(Rule::has_slots);
        let is_settled = !has_slots && names.iter().all(|name| Answer::is_of_head(name));
        let mut answer = Answer::of(response, &names);
        if response.body().is_end_stream() {
            answer.end();
        }
        owed.stage = Stage::Answered(answer);
        if has_slots {
            owed.lasting = response.extensions().get().cloned();
        }
        if is_settled { Self::default() } else { self }
    }

    /// Returns what is known about the response, once the service has responded.
    pub(super) fn answer(&mut self) -> Option<&mut Answer> {
        match &mut self.0.as_mut()?.stage {
            Stage::Answered(answer) => Some(answer),
            Stage::Waiting | Stage::Running => None,
        }
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        let Some(mut owed) = self.0.take() else {
            return;
        };
        if let Some(lasting) = owed.lasting.take() {
            return lasting.keep(Self(Some(owed)));
        }
        let due = owed.due();
        owed.held.end(due);
    }
}

impl Owed {
    /// Returns the final charge of each rule, given the current stage.
    fn due(&self) -> Vec<u64> {
        let due = |(kept, rule): (&Kept, &Rule)| match &self.stage {
            Stage::Waiting => 0,
            Stage::Running => kept.cost.units(),
            Stage::Answered(answer) => answer.due(rule.response_cost(), kept.cost),
        };
        let charged = self.held.charged();
        let charges = charged.kept().iter().zip(charged.rules());
        charges.map(due).collect()
    }
}

impl fmt::Debug for Owed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Owed").field(&self.stage).finish()
    }
}
