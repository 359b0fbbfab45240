//! Permits for work that lasts longer than the body of its response.

use std::sync::{Arc, Mutex, PoisonError};

use super::reservation::Reservation;

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
pub struct LongLivedPermit(Arc<Mutex<Vec<Reservation>>>);

impl LongLivedPermit {
    /// Keeps `reservation` until the last clone of this extension is dropped.
    pub(super) fn keep(&self, reservation: Reservation) {
        let mut kept = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        kept.push(reservation);
    }
}
