//! Answers that last longer than their bodies.

use std::sync::{Arc, Mutex, PoisonError};

use super::reservation::Reservation;

/// What goes on after the body of an answer has ended, as an extension of the response: a connection that was upgraded, a job
/// that was begun. Where places are counted (`concurrency`), the answer has not ended before every clone of it is dropped.
///
/// # Examples
///
/// ```
/// use tidegate_http::Lasting;
///
/// let lasting = Lasting::default();
/// let mut response = http::Response::new(());
/// response.extensions_mut().insert(lasting.clone());
/// std::thread::spawn(move || {
///     // The job is done here.
///     drop(lasting);
/// });
/// ```
#[derive(Clone, Debug, Default)]
pub struct Lasting(Arc<Mutex<Vec<Reservation>>>);

impl Lasting {
    /// Keeps `reservation` until the end.
    pub(super) fn keep(&self, reservation: Reservation) {
        let mut kept = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        kept.push(reservation);
    }
}
