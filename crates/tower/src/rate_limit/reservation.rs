//! The charges of a request until they are settled. Settling refunds unused charges and releases
//! concurrency slots.
//!
//! ```text
//! Waiting ──▶ Running ──▶ Responded ──▶ the body has ended or was cancelled
//!    │           │            │                   │
//!    ▼           ▼            ▼                   ▼
//! everything  slots are    settled by the      settled by the
//! refunded    released     response head       whole response
//! ```
//!
//! A request may be cancelled at any stage. When a request is cancelled, its reservation is
//! dropped, and the charges are settled with the information available at that time. With a store
//! in this process, the charges are settled immediately. With a remote store, a task on the
//! request's runtime settles them.
//!
//! If this runtime is shutting down, the receipt of the charges is lost. The loss is safe: the
//! charges remain, and concurrency slots become free when their leases expire.
//!
//! The leases of concurrency slots are [renewed](super::keepalive) while the reservation exists.

use std::{
    fmt,
    sync::{Arc, Mutex, PoisonError},
};

use http::Response;
use http_body::Body;
use tidegate::rate_limiter::{OwnedCharge, OwnedCharges};
use tidegate_core::Rule;

use super::{
    keepalive::{KeepaliveTicket, LeaseKeepalive},
    receipt_guard::ChargeGuard,
    response::ResponseState,
};

/// The charges of a request until they are settled. Dropping the reservation settles its charges.
/// The default has no charges.
#[derive(Debug, Default)]
pub(super) struct RequestReservation(Option<Box<ReservedCharges>>);

/// The charges of a request, and the stage that the request has reached.
struct ReservedCharges {
    guard: Arc<dyn ChargeGuard>,
    /// The guard that keeps the leases of concurrency slots renewed; `None` if there are no slots.
    _renewed: Option<KeepaliveTicket>,
    stage: ReservationStage,
    /// The permit for work that continues after the response body, if there is any.
    long_lived_permit: Option<LongLivedPermit>,
}

#[derive(Debug)]
enum ReservationStage {
    /// The service has not received the request.
    Waiting,
    /// The service is processing the request.
    Running,
    /// The service has responded.
    Responded(ResponseState),
}

impl RequestReservation {
    /// Creates a reservation of the charges in `guard`. `keepalive` renews the leases of
    /// concurrency slots until the reservation is dropped.
    pub(super) fn new(guard: Arc<dyn ChargeGuard>, keepalive: &Arc<LeaseKeepalive>) -> Self {
        let lease = guard.charges().lease();
        let renewed = lease.and_then(|lease| keepalive.enter(Arc::clone(&guard), lease));
        Self(Some(Box::new(ReservedCharges {
            guard,
            _renewed: renewed,
            stage: ReservationStage::Waiting,
            long_lived_permit: None,
        })))
    }

    /// Returns true if the final charges depend on the token usage in the response body. If so, the
    /// response must not be compressed.
    pub(super) fn reads_usage(&self) -> bool {
        let reads = |rule: &Rule| rule.response_cost().formula().is_some();
        let reserved = self.0.as_ref();
        reserved.is_some_and(|reserved| reserved.guard.charges().rules().any(reads))
    }

    /// Records that the service receives the request. If the request is cancelled after this call,
    /// its slots are released, but its other charges are not refunded.
    pub(super) fn begin(&mut self) {
        let Some(reserved) = &mut self.0 else { return };
        reserved.stage = ReservationStage::Running;
        let depends =
            |rule: &Rule| rule.has_slots() || !rule.response_cost().is_independent_of_response();
        if !reserved.guard.charges().rules().any(depends) {
            // The charges are final: the request no longer waits in a queue, and the charges do not
            // depend on slots or on the response.
            self.0 = None;
        }
    }

    /// Records the response. The caller must keep the returned reservation until the body has
    /// ended.
    #[must_use]
    pub(super) fn responded<B: Body>(mut self, response: &Response<B>) -> Self {
        let Some(reserved) = &mut self.0 else {
            return self;
        };
        let names = response_entries(reserved.guard.charges());
        let has_slots = reserved.guard.charges().rules().any(Rule::has_slots);
        let is_settled = !has_slots && names.iter().all(|name| ResponseState::is_of_head(name));
        let mut state = ResponseState::of(response, &names);
        if response.body().is_end_stream() {
            state.end();
        }
        reserved.stage = ReservationStage::Responded(state);
        if has_slots {
            reserved.long_lived_permit = response.extensions().get().cloned();
        }
        if is_settled { Self::default() } else { self }
    }

    /// Returns the state of the response; `None` if the service has not responded yet.
    pub(super) fn response(&mut self) -> Option<&mut ResponseState> {
        match &mut self.0.as_mut()?.stage {
            ReservationStage::Responded(state) => Some(state),
            ReservationStage::Waiting | ReservationStage::Running => None,
        }
    }
}

impl Drop for RequestReservation {
    fn drop(&mut self) {
        let Some(mut reserved) = self.0.take() else {
            return;
        };
        if let Some(permit) = reserved.long_lived_permit.take() {
            return permit.keep(Self(Some(reserved)));
        }
        let final_charges = reserved.final_charges();
        reserved.guard.release(final_charges);
    }
}

/// Returns the names of the response entries that determine the final amounts of `charges`.
fn response_entries(charges: &OwnedCharges) -> Vec<&str> {
    charges
        .rules()
        .flat_map(|rule| rule.response_cost().entry_names())
        .collect()
}

impl ReservedCharges {
    /// Returns the final amount of each charge, given the current stage of the request.
    fn final_charges(&self) -> Vec<u64> {
        let final_charge = |(charge, rule): (&OwnedCharge, &Rule)| match &self.stage {
            ReservationStage::Waiting => 0,
            ReservationStage::Running => charge.cost.units(),
            ReservationStage::Responded(state) => {
                state.final_charge(rule.response_cost(), charge.cost)
            }
        };
        let owned = self.guard.charges();
        let charges = owned.list().iter().zip(owned.rules());
        charges.map(final_charge).collect()
    }
}

/// A response extension for work that continues after the body has ended, such as an upgraded
/// connection or a background job. The `concurrency` slots of the request are held until every
/// clone of the extension is dropped.
///
/// # Examples
///
/// ```
/// use tidegate_tower::LongLivedPermit;
///
/// let permit = LongLivedPermit::default();
/// let mut response = http::Response::new(());
/// response.extensions_mut().insert(permit.clone());
/// std::thread::spawn(move || {
///     // The job is done here.
///     drop(permit);
/// });
/// ```
#[derive(Clone, Debug, Default)]
pub struct LongLivedPermit(Arc<Mutex<Vec<RequestReservation>>>);

impl LongLivedPermit {
    /// Keeps `reservation` until the last clone of this extension is dropped.
    pub(super) fn keep(&self, reservation: RequestReservation) {
        let mut kept = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        kept.push(reservation);
    }
}

impl fmt::Debug for ReservedCharges {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("ReservedCharges").field(&self.stage).finish()
    }
}
