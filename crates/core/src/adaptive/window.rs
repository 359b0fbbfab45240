//! What happened in one window: how long requests took on average, and whether one failed.

use super::{AdaptiveSettings, Ended};
use crate::time::{Span, Timestamp};

#[derive(Clone, Debug, Default)]
pub(super) struct Window {
    /// With the first request after the last window.
    began: Option<Timestamp>,
    served: u32,
    slowest: Span,
    /// How long all of them took.
    total: u64,
    dropped: bool,
    most_in_flight: u32,
}

/// A window that has ended.
#[derive(Clone, Copy, Debug)]
pub(super) struct Seen {
    /// How long the requests that were served took on average, in microseconds, at least 1; nothing if there were none.
    pub(super) average: Option<u64>,
    pub(super) slowest: Span,
    pub(super) dropped: bool,
    pub(super) most_in_flight: u32,
}

impl Window {
    pub(super) fn note(&mut self, now: Timestamp, in_flight: u32, ended: Ended) {
        self.began.get_or_insert(now);
        match ended {
            Ended::Served(took) => {
                self.served = self.served.saturating_add(1);
                self.total = self.total.saturating_add(took.as_micros());
                self.slowest = self.slowest.max(took);
            }
            Ended::Dropped => self.dropped = true,
            Ended::Ignored => return,
        }
        self.most_in_flight = self.most_in_flight.max(in_flight);
    }

    /// The window, if it has lasted long enough and enough has happened in it; the next one begins then. What fails is not
    /// waited for.
    pub(super) fn close(&mut self, now: Timestamp, settings: &AdaptiveSettings) -> Option<Seen> {
        let began = self.began?;
        let has_lasted = now.since(began) >= settings.window;
        if !has_lasted || (self.served < settings.samples && !self.dropped) {
            return None;
        }
        let Self {
            served,
            slowest,
            total,
            dropped,
            most_in_flight,
            ..
        } = std::mem::take(self);
        Some(Seen {
            average: total
                .checked_div(served.into())
                .map(|average| average.max(1)),
            slowest,
            dropped,
            most_in_flight,
        })
    }
}
