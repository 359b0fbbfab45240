//! From what a window has shown to the next limit.

use super::{
    Adaptive, Ended, check,
    probe::Usual,
    window::{Sample, Seen},
};
use crate::{
    limit::LimitError,
    time::{Span, Timestamp},
};

/// How a limit follows what is measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Method {
    /// By failures, and by a time that is too long.
    Aimd(Aimd),
    /// By how long requests take, compared with how long they took.
    Gradient(Gradient),
}

impl Default for Method {
    fn default() -> Self {
        Self::Gradient(Gradient::default())
    }
}

/// One place more while all goes well, a part of all less when it does not.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Aimd {
    /// What is left of the limit after a window in which over one request in a hundred failed or was too slow, in percent, 50 to
    /// 99; default 90.
    pub backoff: u32,
    /// How long is too slow, more than zero; default 5 s.
    pub too_slow: Span,
}

impl Default for Aimd {
    fn default() -> Self {
        Self {
            backoff: 90,
            too_slow: Span::from_secs(5),
        }
    }
}

/// The limit times how much faster requests were on average, and some room to try more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Gradient {
    /// How much longer than on average requests may take before the limit shrinks, in percent of the average, 100 to 1,000;
    /// default 150.
    pub tolerance: u32,
    /// How many more than are served at the same time may wait, up to 1,000, but no more than a quarter of the limit: by so
    /// many it grows. Default 4.
    pub queue: u32,
    /// How much of the way to the next limit is gone with every window, in percent, 1 to 100; default 20.
    pub smoothing: u32,
}

impl Default for Gradient {
    fn default() -> Self {
        Self {
            tolerance: 150,
            queue: 4,
            smoothing: 20,
        }
    }
}

impl Method {
    pub(super) fn mistakes(&self) -> impl Iterator<Item = LimitError> {
        let mistakes = match self {
            Self::Aimd(aimd) => {
                let problem = "must be longer than zero";
                let at_once = aimd.too_slow == Span::ZERO;
                [
                    check("backoff", aimd.backoff, (50, 99), "%"),
                    at_once.then(|| LimitError::new("too_slow", problem)),
                    None,
                ]
            }
            Self::Gradient(gradient) => [
                check("tolerance", gradient.tolerance, (100, 1_000), "%"),
                check("queue", gradient.queue, (0, 1_000), ""),
                check("smoothing", gradient.smoothing, (1, 100), "%"),
            ],
        };
        mistakes.into_iter().flatten()
    }

    /// What a request that has ended says, given how long they usually take; nothing if it says nothing.
    pub(super) fn sample(&self, ended: Ended, usual: Option<u64>) -> Option<Sample> {
        match (self, ended) {
            (_, Ended::Ignored) => None,
            (_, Ended::Dropped) => Some(Sample::Failed),
            (Self::Aimd(aimd), Ended::Served(took) | Ended::GivenUp(took))
                if took >= aimd.too_slow =>
            {
                Some(Sample::Failed)
            }
            (_, Ended::Served(took)) => Some(Sample::Served(took)),
            // It would have taken longer, and is not to be missing where all are slow.
            (Self::Gradient(_), Ended::GivenUp(took)) if usual? < took.as_micros() => {
                Some(Sample::Served(took))
            }
            (_, Ended::GivenUp(_)) => None,
        }
    }

    /// The limit after a window that ended at `now`, in parts. It grows only if half of it was used: who needs little learns
    /// nothing about how much there could be.
    pub(super) fn next(&self, limit: &Limit, usual: &mut Usual, seen: &Seen) -> u64 {
        let Limit { parts, least, now } = *limit;
        let is_used = u64::from(seen.most_in_flight) * 2 * Adaptive::PARTS >= parts;
        match self {
            Self::Aimd(aimd) if seen.has_failed() => parts * u64::from(aimd.backoff) / 100,
            Self::Aimd(_) if is_used => parts + Adaptive::PARTS,
            Self::Aimd(_) => parts,
            Self::Gradient(gradient) => {
                if seen.has_failed() {
                    usual.rest(now);
                } else if let Some(average) = seen.average {
                    let can_halve = parts >> (usual.halved() + 1) >= least;
                    if !usual.follow(now, average, (is_used, can_halve)) {
                        return parts;
                    }
                }
                gradient.next(parts, is_used, usual, seen)
            }
        }
    }
}

/// A limit at the end of a window.
#[derive(Clone, Copy, Debug)]
pub(super) struct Limit {
    /// In parts of a place.
    pub(super) parts: u64,
    /// The least that it may be, in parts.
    pub(super) least: u64,
    pub(super) now: Timestamp,
}

impl Gradient {
    fn next(&self, was: u64, is_used: bool, usual: &Usual, seen: &Seen) -> u64 {
        let limit = u128::from(was);
        let kept = match usual.micros().zip(seen.average) {
            Some((long, short)) => {
                let long = u128::from(long) * u128::from(self.tolerance) / 100;
                // Not less than a half and not more than all.
                (long * limit / u128::from(short)).clamp(limit / 2, limit)
            }
            None => limit,
        };
        // Those who failed are too many.
        let kept = kept.min(limit * u128::from(seen.ended - seen.failed) / u128::from(seen.ended));
        let waiting = (u128::from(self.queue) * u128::from(Adaptive::PARTS)).min(limit / 4);
        let smoothing = u128::from(self.smoothing);
        let next = (limit * (100 - smoothing) + (kept + waiting) * smoothing) / 100;
        let next = u64::try_from(next).unwrap_or(u64::MAX);
        if is_used { next } else { next.min(was) }
    }
}
