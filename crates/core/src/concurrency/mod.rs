//! Adaptive concurrency limits. An adaptive limit uses measured latency to estimate how many
//! requests a service can handle at the same time.
//!
//! A fixed limit becomes wrong as soon as the service, its database or its traffic changes. An
//! adaptive limit follows the measured latency. While latency stays low, the limit grows. When
//! latency rises, requests are queueing in the service, and a lower limit gives the same
//! throughput.
//!
//! ```text
//!   request ─▶ admitted? ─▶ in flight ─▶ ended: latency or failure ─▶ learn
//!                                         at the end of each window  ─▶ the next limit
//! ```
//!
//! The caller counts the requests in flight, and reports each completed request. This module does
//! not read the clock, and uses only integer arithmetic.
//!
//! - **[`Method::Aimd`]** (additive increase, multiplicative decrease) lowers the limit to 90% (by
//!   default) after each measurement window with more than 1% of failed or slow requests. After any
//!   other window in which at least half of the limit was used, AIMD raises the limit by one.
//!   **Guarantee.** The limit never exceeds the maximum. After a window with more than 1% of failed
//!   or slow requests, the limit is at most 90% (by default) of its former value, but never below
//!   the minimum. **Weakness.** The latency threshold must be configured, and overload is detected
//!   only when latency exceeds the threshold. **Source.** Chiu and Jain 1989.
//! - **[`Method::Gradient`]** compares the current latency with the latency without queueing, and
//!   scales the limit by their ratio. The latency without queueing is measured by periodic probes.
//!   During a probe, the limit is reduced to half or less; probes take at most 2% of the time.
//!   Failed requests also reduce the limit: before headroom and smoothing are applied, the limit is
//!   reduced by at least the percentage of failed requests. **Weakness.** The gradient method needs
//!   homogeneous traffic. With a mix of slow and fast requests, a change in the mix looks like a
//!   change in load. If 1% of the requests fail independently of the load, the limit never grows
//!   above 100 times `queue`. **Source.** Netflix concurrency-limits (Gradient2), in which the
//!   long-term average drifts upwards under permanent load; Envoy's adaptive concurrency filter,
//!   which probes the minimum latency (minRTT).

mod method;
mod min_latency;
mod window;

use std::{mem, ops::RangeInclusive};

pub use self::method::{Aimd, Gradient, Method};
use self::{
    min_latency::MinLatency,
    window::{LoadSample, MeasurementWindow},
};
use crate::{
    error::LimitError,
    time::{Span, Timestamp},
};

/// The largest value that can be set as the maximum of an adaptive limit.
pub const MAX_ADAPTIVE: u32 = 1_000_000;

/// The settings of an adaptive limit: its bounds and its method.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AdaptiveSettings {
    /// The method that computes the limit from the measurements.
    pub method: Method,
    /// The minimum limit, at least 1; default 1.
    pub min: u32,
    /// The initial limit; default 20.
    pub initial: u32,
    /// The maximum limit, up to [`MAX_ADAPTIVE`]; default 1,000.
    pub max: u32,
    /// The length of a measurement window, after which the limit is updated: 1 ms to 1 min; default
    /// 100 ms. A window lasts at least as long as the average request.
    pub window: Span,
    /// The minimum number of completed requests per measurement window, at least 1; default 10. A
    /// window with fewer completed requests lasts longer.
    pub samples: u32,
}

impl Default for AdaptiveSettings {
    fn default() -> Self {
        Self {
            method: Method::default(),
            min: 1,
            initial: 20,
            max: 1_000,
            window: Span::from_millis(100),
            samples: 10,
        }
    }
}

/// The result of a completed request, from which an adaptive limit learns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Completion {
    /// The request was served with this latency.
    Served(Span),
    /// The request failed in a way that indicates overload, such as a timeout or a refused
    /// connection.
    Dropped,
    /// The client disconnected after this time, before the request was completed.
    Abandoned(Span),
    /// The result of the request does not depend on load; for example, the request was rejected as
    /// invalid.
    Ignored,
}

/// An adaptive concurrency limit.
///
/// # Examples
///
/// ```
/// use tidegate_core::concurrency::{AdaptiveLimit, AdaptiveSettings, Completion};
/// use tidegate_core::{Span, Timestamp};
///
/// let mut limit = AdaptiveLimit::new(AdaptiveSettings::default()).unwrap();
/// assert_eq!(limit.limit(), 20);
/// // All permits are in use, and each request still takes 5 ms: the limit grows.
/// for request in 0..2_000 {
///     let now = Timestamp::from_micros(request * 1_000);
///     limit.learn(now, limit.limit(), Completion::Served(Span::from_millis(5)));
/// }
/// assert!(limit.limit() > 20);
/// ```
#[derive(Clone, Debug)]
pub struct AdaptiveLimit {
    settings: AdaptiveSettings,
    /// The limit in fixed-point format, [`Self::PARTS`] per request.
    limit: u64,
    window: MeasurementWindow,
    min_latency: MinLatency,
    /// The average latency in the last measurement window, in microseconds.
    recent: Option<u64>,
}

impl AdaptiveLimit {
    /// The fixed-point scale of the limit. With fixed-point numbers, the limit can grow by less
    /// than one.
    const PARTS: u64 = 1 << 16;

    /// Creates an adaptive limit that has no measurements yet.
    ///
    /// # Errors
    ///
    /// Returns an error for the first field that is out of the range documented in
    /// [`AdaptiveSettings`] and [`Method`].
    pub fn new(settings: AdaptiveSettings) -> Result<Self, LimitError> {
        if let Some(error) = settings.errors().into_iter().next() {
            return Err(error);
        }
        Ok(Self {
            settings,
            limit: u64::from(settings.initial) * Self::PARTS,
            window: MeasurementWindow::default(),
            min_latency: MinLatency::default(),
            recent: None,
        })
    }

    /// Changes the settings. The measurements are kept, unless the method changes. The current
    /// limit is clamped to the new bounds, and [`AdaptiveSettings::initial`] has no effect.
    ///
    /// # Errors
    ///
    /// Returns the same errors as [`AdaptiveLimit::new`]. If there is an error, nothing changes.
    pub fn change(&mut self, settings: AdaptiveSettings) -> Result<(), LimitError> {
        let fresh = Self::new(settings)?;
        let (was, is) = (&self.settings.method, &settings.method);
        if mem::discriminant(was) != mem::discriminant(is) {
            (self.min_latency, self.recent) = (fresh.min_latency, fresh.recent);
        }
        self.settings = settings;
        self.limit = self.limit.clamp(self.least(), self.most());
        Ok(())
    }

    /// Returns the current limit, which is the maximum number of concurrent requests. During a
    /// probe, returns the reduced limit.
    #[must_use]
    pub fn limit(&self) -> u32 {
        let parts = (self.limit >> self.min_latency.halved()).max(self.least());
        u32::try_from(parts / Self::PARTS).unwrap_or(u32::MAX)
    }

    /// Returns the average latency of the last measurement window, in percent of the latency
    /// without queueing. Returns `None` if either latency is unknown. With [`Method::Aimd`], the
    /// result is always `None`, because AIMD does not measure the latency without queueing.
    #[must_use]
    pub fn latency_percent(&self) -> Option<u64> {
        let percent = u128::from(self.recent?) * 100 / u128::from(self.min_latency.micros()?);
        Some(u64::try_from(percent).unwrap_or(u64::MAX))
    }

    /// Records that a request was completed at `now`, and updates the limit at the end of a
    /// measurement window. `in_flight` is the number of requests in flight, including this request.
    /// If `now` is earlier than the time of a previous call, the elapsed time is treated as zero.
    pub fn learn(&mut self, now: Timestamp, in_flight: u32, ended: Completion) {
        let limit = self.limit();
        self.min_latency
            .record_in_flight(now, in_flight.saturating_sub(1), limit);
        let method = self.settings.method;
        let Some(sample) = method.sample(ended, self.min_latency.micros()) else {
            return;
        };
        let took = match sample {
            LoadSample::Served(took) => Some(took),
            LoadSample::Failed => None,
        };
        if !self.min_latency.is_measured(now, took) {
            return;
        }
        self.window.record(now, in_flight, sample);
        let Some(stats) = self.window.close(now, &self.settings) else {
            return;
        };
        self.recent = stats.average;
        let limit = method::AdaptiveState {
            parts: self.limit,
            least: self.least(),
            now,
        };
        let limit = method.next(&limit, &mut self.min_latency, &stats);
        self.limit = limit.clamp(self.least(), self.most());
    }

    fn least(&self) -> u64 {
        u64::from(self.settings.min) * Self::PARTS
    }

    fn most(&self) -> u64 {
        u64::from(self.settings.max) * Self::PARTS
    }
}

impl AdaptiveSettings {
    /// Returns an error for each field outside its documented range.
    #[must_use]
    pub fn errors(&self) -> Vec<LimitError> {
        let (min, max) = (self.min, self.max);
        let mut errors = Vec::new();
        let impossible = check("min", min, 1..=MAX_ADAPTIVE, "");
        let is_possible = impossible.is_none();
        errors.extend(impossible);
        errors.extend(check("max", max, 1..=MAX_ADAPTIVE, ""));
        if is_possible && min > max {
            let problem = format!("must be at most `max`, which is {max}, got {min}");
            errors.push(LimitError::new("min", problem));
        } else if min <= max {
            errors.extend(check("initial", self.initial, min..=max, ""));
        }
        errors.extend(check("samples", self.samples, 1..=1_000_000, ""));
        let (least, most) = (Span::from_millis(1), Span::from_secs(60));
        if self.window < least || self.window > most {
            let problem = format!("must be {least} to {most}, got {}", self.window);
            errors.push(LimitError::new("window", problem));
        }
        errors.extend(self.method.errors());
        errors
    }
}

/// Returns an error for `field` if `value` is not in `range`. The error message contains the
/// value's unit, such as `%`.
fn check(
    field: &'static str,
    value: u32,
    range: RangeInclusive<u32>,
    unit: &str,
) -> Option<LimitError> {
    let problem = || {
        let (least, most) = (range.start(), range.end());
        format!("must be {least}{unit} to {most}{unit}, got {value}{unit}")
    };
    (!range.contains(&value)).then(|| LimitError::new(field, problem()))
}

#[cfg(test)]
mod tests;
