//! What a request was charged, until it is known what of it comes back.
//!
//! ```text
//! Waiting ──▶ Running ──▶ Answered ──▶ its body has ended, or is given up
//!    │           │            │                   │
//!    ▼           ▼            ▼                   ▼
//!  all of it   places      what the head        what all of the answer
//!  comes back  come back   leaves over          leaves over
//! ```
//!
//! A request may be given up at every stage, which is when its reservation is dropped: it is settled then, by what is known. A
//! store in this process is settled on the spot. A store elsewhere is settled by a task of its own on the runtime that the request
//! came on; where that is coming to its end the receipt is lost, which is safe: what was charged stays charged, and places
//! come back when their lease is over.
//!
//! Who holds places holds them for as long as it is there: they are [renewed](super::renewals) meanwhile.

use std::{fmt, sync::Arc};

use http::Response;
use http_body::Body;
use tidegate_core::Rule;

use super::{
    answer::Answer,
    held::{Hold, Kept},
    lasting::Lasting,
    renewals::{Renewals, Ticket},
};

/// What a request was charged, until it is known what of it comes back. It is settled when it is dropped; the default is
/// nothing.
#[derive(Debug, Default)]
pub(super) struct Reservation(Option<Box<Owed>>);

/// What was charged, how it is settled, and how far the request has come.
struct Owed {
    held: Arc<dyn Hold>,
    /// Where it holds places, which are renewed as long as this is there.
    _renewed: Option<Ticket>,
    stage: Stage,
    /// What the answer goes on with after its body.
    lasting: Option<Lasting>,
}

#[derive(Debug)]
enum Stage {
    /// The service does not know of it.
    Waiting,
    /// The service has it.
    Running,
    /// The service has answered.
    Answered(Answer),
}

impl Reservation {
    /// What is `held`; its places are among the `renewals` as long as this is there.
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

    /// The service has the request: it is not to be had for nothing any more.
    pub(super) fn begin(&mut self) {
        let Some(owed) = &mut self.0 else { return };
        owed.stage = Stage::Running;
        let depends = |rule: &Rule| rule.holds_places() || !rule.bill().is_settled();
        if !owed.held.charged().rules().any(depends) {
            // What only waits for its turn has had it.
            self.0 = None;
        }
    }

    /// The service has answered. What remains is to be kept until the body has ended.
    #[must_use]
    pub(super) fn answered<B: Body>(mut self, response: &Response<B>) -> Self {
        let Some(owed) = &mut self.0 else { return self };
        let names = owed.held.charged().names();
        let holds_places = owed.held.charged().rules().any(Rule::holds_places);
        let is_settled = !holds_places && names.iter().all(|name| Answer::is_of_head(name));
        let mut answer = Answer::of(response, &names);
        if response.body().is_end_stream() {
            answer.end();
        }
        owed.stage = Stage::Answered(answer);
        if holds_places {
            owed.lasting = response.extensions().get().cloned();
        }
        if is_settled { Self::default() } else { self }
    }

    /// What is known of the answer by now, once there is one.
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
    /// What of each charge is due by now.
    fn due(&self) -> Vec<u64> {
        let due = |(kept, rule): (&Kept, &Rule)| match &self.stage {
            Stage::Waiting => 0,
            Stage::Running => kept.cost.units(),
            Stage::Answered(answer) => answer.due(rule.bill(), kept.cost),
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
