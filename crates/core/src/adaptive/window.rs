//! What happened in one window: how long requests took on average, and how many failed.

use super::AdaptiveSettings;
use crate::time::{Span, Timestamp};

#[derive(Clone, Debug, Default)]
pub(super) struct Window {
    /// With the first request after the last window.
    began: Option<Timestamp>,
    served: u64,
    failed: u64,
    /// How long all that were served took.
    total: u64,
    most_in_flight: u32,
}

/// What a request says about a service.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Sample {
    Served(Span),
    Failed,
}

/// A window that has ended.
#[derive(Clone, Copy, Debug)]
pub(super) struct Seen {
    /// How long the requests that were served took on average, in microseconds, at least 1; nothing if there were none.
    pub(super) average: Option<u64>,
    /// How many ended, at least 1, and how many of them failed.
    pub(super) ended: u64,
    pub(super) failed: u64,
    pub(super) most_in_flight: u32,
}

impl Window {
    pub(super) fn note(&mut self, now: Timestamp, in_flight: u32, sample: Sample) {
        self.began.get_or_insert(now);
        match sample {
            Sample::Served(took) => {
                self.served += 1;
                self.total = self.total.saturating_add(took.as_micros());
            }
            Sample::Failed => self.failed += 1,
        }
        self.most_in_flight = self.most_in_flight.max(in_flight);
    }

    /// The window, if it has lasted long enough and enough has happened in it; the next one begins then. It lasts at least as
    /// long as requests take: until then nobody feels what the last one has changed.
    pub(super) fn close(&mut self, now: Timestamp, settings: &AdaptiveSettings) -> Option<Seen> {
        let lasted = now.since(self.began?);
        let average = self.average();
        let ended = self.served + self.failed;
        if lasted < settings.window
            || lasted.as_micros() < average.unwrap_or(0)
            || ended < u64::from(settings.samples)
        {
            return None;
        }
        let Self {
            failed,
            most_in_flight,
            ..
        } = std::mem::take(self);
        Some(Seen {
            average,
            ended,
            failed,
            most_in_flight,
        })
    }

    fn average(&self) -> Option<u64> {
        let average = self.total.checked_div(self.served)?;
        Some(average.max(1))
    }
}

impl Seen {
    /// Whether more than one request in a hundred failed: so few may have reasons of their own.
    pub(super) fn has_failed(&self) -> bool {
        self.failed * 100 > self.ended
    }
}
