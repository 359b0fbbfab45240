//! From what a window has shown to the next limit.

use super::{Adaptive, check, window::Seen};
use crate::{limit::LimitError, time::Span};

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
    /// What is left of the limit after a window in which a request failed or was too slow, in percent, 50 to 99; default 90.
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
    /// How many more than are served at the same time may wait, up to 1,000: by so many the limit grows at most, and below it
    /// the service is not kept busy. Default 4.
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

/// What is remembered from one window to the next.
#[derive(Clone, Debug, Default)]
pub(super) struct Learnt {
    /// How long requests take while they do not wait for each other, in parts of a microsecond, of which there are
    /// [`Adaptive::PARTS`]; zero before anything is known.
    usual: u128,
    probe: Probe,
}

/// While a limit is used to the full nobody can see how long requests take that do not wait for each other. So now and then it is
/// halved for a moment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Probe {
    /// The limit has been in use for so many windows.
    After(u32),
    /// The first is due at once.
    #[default]
    Due,
    /// Those who came before are still there.
    Draining,
    /// What is seen now is how long requests take.
    Measuring,
}

/// After so many windows in which the limit was in use it is probed.
const PROBE_EVERY: u32 = 100;

/// How many windows it takes until what is usual has followed, more or less, where the limit is not in use.
const USUAL_OVER: u128 = 50;

impl Method {
    pub(super) fn check(&self) -> Result<(), LimitError> {
        match self {
            Self::Aimd(aimd) => {
                check("backoff", aimd.backoff.into(), 50, 99)?;
                if aimd.too_slow == Span::ZERO {
                    return Err(LimitError::new("too_slow", "must be longer than zero"));
                }
                Ok(())
            }
            Self::Gradient(gradient) => {
                check("tolerance", gradient.tolerance.into(), 100, 1_000)?;
                check("queue", gradient.queue.into(), 0, 1_000)?;
                check("smoothing", gradient.smoothing.into(), 1, 100)
            }
        }
    }

    /// The limit after a window, in parts. It grows only if half of it was used: who needs little learns nothing about how
    /// much there could be.
    pub(super) fn next(&self, limit: u64, learnt: &mut Learnt, seen: &Seen) -> u64 {
        let is_used = u64::from(seen.most_in_flight) * 2 * Adaptive::PARTS >= limit;
        match self {
            Self::Aimd(aimd) if seen.dropped || seen.slowest >= aimd.too_slow => {
                limit * u64::from(aimd.backoff) / 100
            }
            Self::Aimd(_) if is_used => limit + Adaptive::PARTS,
            Self::Aimd(_) => limit,
            Self::Gradient(gradient) => gradient.next((limit, is_used), learnt, seen),
        }
    }
}

impl Gradient {
    /// As if requests took so much longer than they should, in a window in which one failed.
    const FAILED: u128 = 2;

    fn next(&self, (limit, is_used): (u64, bool), learnt: &mut Learnt, seen: &Seen) -> u64 {
        let average = seen
            .average
            .map(|average| u128::from(average) * u128::from(Adaptive::PARTS));
        if seen.dropped {
            learnt.probe = Probe::After(0);
        } else if !learnt.moves_on(average, is_used) {
            return limit;
        }
        let (limit, was) = (u128::from(limit), limit);
        let ratio = match average {
            Some(short) if learnt.usual > 0 => {
                let long = learnt.usual * u128::from(self.tolerance) / 100;
                // Not less than a half and not more than all.
                (long * limit / short).clamp(limit / 2, limit)
            }
            _ => limit,
        };
        let ratio = if seen.dropped {
            ratio.min(limit / Self::FAILED)
        } else {
            ratio
        };
        let target = ratio + u128::from(self.queue) * u128::from(Adaptive::PARTS);
        let smoothing = u128::from(self.smoothing);
        let next = (limit * (100 - smoothing) + target * smoothing) / 100;
        let next = u64::try_from(next).unwrap_or(u64::MAX);
        if is_used { next } else { next.min(was) }
    }
}

impl Learnt {
    /// Whether half the limit is all that may be used.
    pub(super) fn is_probing(&self) -> bool {
        matches!(self.probe, Probe::Draining | Probe::Measuring)
    }

    /// Learns from a window in which requests took `short` on average; false if it was one of a probe, from which nothing else
    /// follows.
    fn moves_on(&mut self, short: Option<u128>, is_used: bool) -> bool {
        match (self.probe, short) {
            (Probe::Draining, _) => self.probe = Probe::Measuring,
            (Probe::Measuring, Some(short)) => {
                self.usual = short;
                self.probe = Probe::After(0);
            }
            (Probe::Measuring, None) => {}
            (Probe::Due, _) if is_used => self.probe = Probe::Draining,
            (Probe::After(windows), _) if is_used => {
                let is_due = windows + 1 >= PROBE_EVERY;
                self.probe = if is_due {
                    Probe::Due
                } else {
                    Probe::After(windows + 1)
                };
                return true;
            }
            (Probe::Due | Probe::After(_), Some(short)) => {
                let before = if self.usual == 0 { short } else { self.usual };
                self.usual = (before * (USUAL_OVER - 1) + short) / USUAL_OVER;
                return true;
            }
            (Probe::Due | Probe::After(_), None) => return true,
        }
        false
    }
}
