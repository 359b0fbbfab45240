//! Counts the calls for reservations that are not outstanding.

use std::sync::atomic::{AtomicU64, Ordering};

use tidegate_net::prometheus::{Metric, Page};

use super::error::{NotOutstanding, ReservationError};

const REJECTED: Metric<1> = Metric::counter(
    "tidegate_reservations_rejected_total",
    ["reason"],
    "Settle, renew and commit calls whose reservation was not outstanding, by reason.",
);

/// The number of rejected calls by reason.
#[derive(Debug, Default)]
pub(crate) struct Rejections {
    invalid: AtomicU64,
    unknown: AtomicU64,
    expired: AtomicU64,
    settled: AtomicU64,
    slot_lost: AtomicU64,
}

impl Rejections {
    /// Counts a failed call whose reservation is not outstanding.
    pub(crate) fn count(&self, error: &ReservationError) {
        let counter = match error {
            ReservationError::Invalid => &self.invalid,
            ReservationError::NotOutstanding(why) => match why {
                NotOutstanding::Unknown | NotOutstanding::ExpiredOrSettled => &self.unknown,
                NotOutstanding::Expired => &self.expired,
                NotOutstanding::Settled => &self.settled,
                NotOutstanding::SlotLost => &self.slot_lost,
            },
            ReservationError::Off | ReservationError::Unavailable(_) | ReservationError::Moved => {
                return;
            }
        };
        counter.fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn collect(&self, page: &mut Page<'_>) {
        let counters = [
            ("invalid", &self.invalid),
            ("unknown", &self.unknown),
            ("expired", &self.expired),
            ("settled", &self.settled),
            ("slot_lost", &self.slot_lost),
        ];
        let counts = counters.map(|(reason, count)| ([reason], count.load(Ordering::Relaxed)));
        page.family(&REJECTED, counts);
    }
}
