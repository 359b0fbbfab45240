//! How many requests at once a service bears, learnt from how long they take.
//!
//! A limit that somebody writes down is wrong as soon as the service, its database or its traffic changes. This one is
//! measured: while answers come as fast as ever there is room for more at once, and when they take longer they are waiting for
//! each other, so that fewer at once would be served as many.
//!
//! ```text
//!   request ─▶ admits? ─▶ in flight ─▶ ended: how long, or failed ─▶ learn ─▶ at the end of each window: the next limit
//! ```
//!
//! Whoever holds one counts what is in flight, and tells it of every request that has ended. Nothing here reads a clock, and
//! all of it is in integers.
//!
//! - **[`Method::Aimd`]** adds a place with every window in which all went well and takes a tenth of all when over one request in
//!   a hundred failed or was too slow. **Promise.** It never exceeds the maximum, and after such a window it is at most nine tenths
//!   of what it was. **Weakness.** It must be told what is too slow, and learns it by making somebody wait so long. **Source.**
//!   Chiu and Jain 1989.
//! - **[`Method::Gradient`]** compares how long requests take now with how long they take when they do not wait for each other, and
//!   follows the ratio. Now and then, for a fiftieth of the time at most, it lets half as many in, or fewer, to see that. A share of
//!   requests that fails takes the same share of the limit with every window. **Weakness.** It needs traffic of one kind: where slow
//!   and fast requests are mixed, a change of the mixture looks like a change of load; and a service that always fails in one case of a
//!   hundred, whatever its load, gets no more than a hundred times `queue`. **Source.** Netflix, concurrency-limits (Gradient2),
//!   whose long average drifts upwards under a load that never ends; Envoy's adaptive concurrency filter, which probes.

mod method;
mod probe;
mod window;

use std::mem;

pub use self::method::{Aimd, Gradient, Method};
use self::{
    probe::Usual,
    window::{Sample, Window},
};
use crate::{
    limit::LimitError,
    time::{Span, Timestamp},
};

/// The most that an adaptive limit may be.
pub const MAX_ADAPTIVE: u32 = 1_000_000;

/// Between which bounds a limit adapts, and how.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AdaptiveSettings {
    /// How the limit follows what is measured.
    pub method: Method,
    /// The least, from 1; default 1.
    pub min: u32,
    /// What it begins with; default 20.
    pub initial: u32,
    /// The most, up to [`MAX_ADAPTIVE`]; default 1,000.
    pub max: u32,
    /// For how long is measured before the limit changes, 1 ms to 1 min; default 100 ms. Where requests take longer than that
    /// on average, so long.
    pub window: Span,
    /// How many requests have to end in it at least, from 1; until then the window goes on. Default 10.
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

/// How a request ended, for who learns from it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ended {
    /// It was served, and took so long.
    Served(Span),
    /// It failed in a way that says that there was too much: a timeout, a refusal.
    Dropped,
    /// Who asked has gone away, after so long.
    GivenUp(Span),
    /// It says nothing about how busy the service is: it was refused for its own sake.
    Ignored,
}

/// A limit that adapts.
///
/// # Examples
///
/// ```
/// use tidegate_core::adaptive::{Adaptive, AdaptiveSettings, Ended};
/// use tidegate_core::{Span, Timestamp};
///
/// let mut limit = Adaptive::new(AdaptiveSettings::default()).unwrap();
/// assert_eq!(limit.limit(), 20);
/// // As many at once as may be, each served in 5 ms as ever: there is room for more.
/// for request in 0..2_000 {
///     let now = Timestamp::from_micros(request * 1_000);
///     limit.learn(now, limit.limit(), Ended::Served(Span::from_millis(5)));
/// }
/// assert!(limit.limit() > 20);
/// ```
#[derive(Clone, Debug)]
pub struct Adaptive {
    settings: AdaptiveSettings,
    /// In parts of a place, of which there are [`Self::PARTS`].
    limit: u64,
    window: Window,
    usual: Usual,
    /// How long requests took on average in the last window.
    recent: Option<u64>,
}

impl Adaptive {
    /// Parts of a place, so that a limit can grow by less than one.
    const PARTS: u64 = 1 << 16;

    /// A limit that has learnt nothing yet.
    ///
    /// # Errors
    ///
    /// Names the field that is out of its range, as [`AdaptiveSettings`] and [`Method`] say.
    pub fn new(settings: AdaptiveSettings) -> Result<Self, LimitError> {
        if let Some(mistake) = settings.mistakes().into_iter().next() {
            return Err(mistake);
        }
        Ok(Self {
            settings,
            limit: u64::from(settings.initial) * Self::PARTS,
            window: Window::default(),
            usual: Usual::default(),
            recent: None,
        })
    }

    /// Goes on under other `settings` from where it is. What was learnt stays, unless the method is another one; the limit moves no
    /// further than into the new bounds, and [`AdaptiveSettings::initial`] has no say any more.
    ///
    /// # Errors
    ///
    /// What [`Adaptive::new`] refuses; then everything stays as it was.
    pub fn change(&mut self, settings: AdaptiveSettings) -> Result<(), LimitError> {
        let fresh = Self::new(settings)?;
        let (was, is) = (&self.settings.method, &settings.method);
        if mem::discriminant(was) != mem::discriminant(is) {
            (self.usual, self.recent) = (fresh.usual, fresh.recent);
        }
        self.settings = settings;
        self.limit = self.limit.clamp(self.least(), self.most());
        Ok(())
    }

    /// The most at once now, in whole places: at least the minimum.
    #[must_use]
    pub fn limit(&self) -> u32 {
        let parts = (self.limit >> self.usual.halved()).max(self.least());
        u32::try_from(parts / Self::PARTS).unwrap_or(u32::MAX)
    }

    /// How long requests took lately, in percent of how long they take when they do not wait for each other; nothing before both
    /// are known, and ever with [`Method::Aimd`], which does not learn the latter.
    #[must_use]
    pub fn slowness(&self) -> Option<u64> {
        let percent = u128::from(self.recent?) * 100 / u128::from(self.usual.micros()?);
        Some(u64::try_from(percent).unwrap_or(u64::MAX))
    }

    /// Takes note that one of `in_flight` requests, itself included, ended at `now`. An instant that lies before an earlier one
    /// counts as that.
    pub fn learn(&mut self, now: Timestamp, in_flight: u32, ended: Ended) {
        let limit = self.limit();
        self.usual.left(now, in_flight.saturating_sub(1), limit);
        let method = self.settings.method;
        let Some(sample) = method.sample(ended, self.usual.micros()) else {
            return;
        };
        let took = match sample {
            Sample::Served(took) => Some(took),
            Sample::Failed => None,
        };
        if !self.usual.counts(now, took) {
            return;
        }
        self.window.note(now, in_flight, sample);
        let Some(seen) = self.window.close(now, &self.settings) else {
            return;
        };
        self.recent = seen.average;
        let limit = method::Limit {
            parts: self.limit,
            least: self.least(),
            now,
        };
        let limit = method.next(&limit, &mut self.usual, &seen);
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
    /// Every field that is out of its range, as its documentation says it.
    #[must_use]
    pub fn mistakes(&self) -> Vec<LimitError> {
        let (min, max) = (self.min, self.max);
        let mut mistakes = Vec::new();
        let impossible = check("min", min, (1, MAX_ADAPTIVE), "");
        let is_possible = impossible.is_none();
        mistakes.extend(impossible);
        mistakes.extend(check("max", max, (1, MAX_ADAPTIVE), ""));
        if is_possible && min > max {
            let problem = format!("must be at most `max`, which is {max}, got {min}");
            mistakes.push(LimitError::new("min", problem));
        } else if min <= max {
            mistakes.extend(check("initial", self.initial, (min, max), ""));
        }
        mistakes.extend(check("samples", self.samples, (1, 1_000_000), ""));
        let (least, most) = (Span::from_millis(1), Span::from_secs(60));
        if self.window < least || self.window > most {
            let problem = format!("must be {least} to {most}, got {}", self.window);
            mistakes.push(LimitError::new("window", problem));
        }
        mistakes.extend(self.method.mistakes());
        mistakes
    }
}

/// What is wrong with `value`, which is so many of a `unit`.
fn check(
    field: &'static str,
    value: u32,
    (least, most): (u32, u32),
    unit: &str,
) -> Option<LimitError> {
    let problem = || format!("must be {least}{unit} to {most}{unit}, got {value}{unit}");
    (!(least..=most).contains(&value)).then(|| LimitError::new(field, problem()))
}

#[cfg(test)]
mod tests;
