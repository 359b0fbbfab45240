//! A measurement window, which collects the latencies and failures of requests.

use super::AdaptiveSettings;
use crate::time::{Span, Timestamp};

#[derive(Clone, Debug, Default)]
pub(super) struct MeasurementWindow {
    /// When the first request of this window was completed; `None` if no request has been completed
    /// since the previous window.
    began: Option<Timestamp>,
    served: u64,
    failed: u64,
    /// The sum of the latencies of served requests, in microseconds.
    total: u64,
    most_in_flight: u32,
}

/// The result of a request, as a sample of the service's load.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum LoadSample {
    Served(Span),
    Failed,
}

/// The result of a closed measurement window.
#[derive(Clone, Copy, Debug)]
pub(super) struct WindowStats {
    /// The average latency of served requests in microseconds, at least 1; `None` if no requests
    /// were served.
    pub(super) average: Option<u64>,
    /// The number of completed requests, at least 1.
    pub(super) ended: u64,
    /// The number of completed requests that failed.
    pub(super) failed: u64,
    pub(super) most_in_flight: u32,
}

impl MeasurementWindow {
    pub(super) fn record(&mut self, now: Timestamp, in_flight: u32, sample: LoadSample) {
        self.began.get_or_insert(now);
        match sample {
            LoadSample::Served(took) => {
                self.served += 1;
                self.total = self.total.saturating_add(took.as_micros());
            }
            LoadSample::Failed => self.failed += 1,
        }
        self.most_in_flight = self.most_in_flight.max(in_flight);
    }

    /// Closes the window and returns its result, or returns `None` if the window is too short or
    /// has too few samples. The next window begins when the next request is completed. A window
    /// lasts at least as long as the average request, because a change to the limit has no visible
    /// effect earlier.
    pub(super) fn close(
        &mut self,
        now: Timestamp,
        settings: &AdaptiveSettings,
    ) -> Option<WindowStats> {
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
        Some(WindowStats {
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

impl WindowStats {
    /// Returns whether more than 1% of the requests failed. A lower failure rate can have causes
    /// other than overload.
    pub(super) fn has_failed(&self) -> bool {
        self.failed * 100 > self.ended
    }
}
