//! How long requests take that do not wait for each other.
//!
//! While a limit is used to the full nobody can see that. So now and then it is halved for a moment, and halved again for as long as
//! that makes requests faster.
//!
//! ```text
//! resting ──▶ due ──▶ draining: fewer may come ──▶ measuring those who came since ──┬─▶ faster: halve again, drain
//!    ▲                                                                              └─▶ no faster: this is how long they take
//!    └────────────────────────────────────────────────────────────────────────────────────────────┘
//! ```

use crate::time::{Span, Timestamp};

/// What is known of how long requests take.
#[derive(Clone, Debug, Default)]
pub(super) struct Usual {
    /// In parts of a microsecond, of which there are [`Usual::PARTS`]; zero before anything is known.
    takes: u128,
    phase: Phase,
    /// When the probe began that is under way, or was the last one.
    began: Timestamp,
    /// When the next one may begin.
    not_before: Timestamp,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// The limit has been in use for so many windows.
    Resting(u32),
    /// Those who came before are still there. Requests took so long before the limit was halved so often.
    Draining { halved: u32, before: u64 },
    /// What came since then shows how long requests take.
    Measuring {
        halved: u32,
        before: u64,
        since: Timestamp,
    },
}

/// The first probe is due as soon as the limit is in use.
impl Default for Phase {
    fn default() -> Self {
        Self::Resting(Usual::EVERY)
    }
}

impl Usual {
    const PARTS: u128 = 1 << 16;

    /// After so many windows in which the limit was in use it is probed,
    const EVERY: u32 = 100;

    /// and only after so many times as long as the last probe took.
    const PAUSE: u64 = 50;

    /// How many windows it takes until what is usual has followed, more or less, where the limit is not in use.
    const FOLLOWS_OVER: u128 = 50;

    /// Requests are faster if they take less than so many percent of what they took.
    const FASTER: u64 = 90;

    /// The most that a limit is halved.
    const MOST_HALVED: u32 = 20;

    /// How long requests take, in microseconds; nothing before anything is known.
    pub(super) fn micros(&self) -> Option<u64> {
        let micros = u64::try_from(self.takes / Self::PARTS).unwrap_or(u64::MAX);
        (self.takes > 0).then_some(micros.max(1))
    }

    /// How often the limit is halved now.
    pub(super) fn halved(&self) -> u32 {
        match self.phase {
            Phase::Resting(_) => 0,
            Phase::Draining { halved, .. } | Phase::Measuring { halved, .. } => halved,
        }
    }

    pub(super) fn is_probing(&self) -> bool {
        self.halved() > 0
    }

    /// Takes note that so many are left in flight; those that come from now on may be measured once no more are there than may
    /// be.
    pub(super) fn left(&mut self, now: Timestamp, in_flight: u32, limit: u32) {
        if let Phase::Draining { halved, before } = self.phase
            && in_flight <= limit
        {
            self.phase = Phase::Measuring {
                halved,
                before,
                since: now,
            };
        }
    }

    /// Whether a request that ends at `now` says something about what is being looked at.
    pub(super) fn counts(&self, now: Timestamp, took: Option<Span>) -> bool {
        match self.phase {
            Phase::Resting(_) => true,
            Phase::Draining { .. } => false,
            Phase::Measuring { since, .. } => took.is_none_or(|took| now.since(since) >= took),
        }
    }

    /// Learns from a window in which requests took `average` microseconds, under a limit that was used or not; false if it
    /// was one of a probe, from which nothing else follows. `can_halve` says whether the limit could be halved once more.
    pub(super) fn follow(
        &mut self,
        now: Timestamp,
        average: u64,
        (is_used, can_halve): (bool, bool),
    ) -> bool {
        match self.phase {
            Phase::Resting(windows) if is_used => {
                if windows >= Self::EVERY && now >= self.not_before && can_halve {
                    self.began = now;
                    self.phase = Phase::Draining {
                        halved: 1,
                        before: average,
                    };
                    return false;
                }
                self.phase = Phase::Resting(windows.saturating_add(1));
                if self.takes == 0 {
                    self.takes = parts(average);
                }
                true
            }
            Phase::Resting(_) => {
                let before = if self.takes == 0 {
                    parts(average)
                } else {
                    self.takes
                };
                self.takes =
                    (before * (Self::FOLLOWS_OVER - 1) + parts(average)) / Self::FOLLOWS_OVER;
                true
            }
            Phase::Draining { .. } => false,
            Phase::Measuring { halved, before, .. } => {
                let is_faster =
                    average < before / 100 * Self::FASTER + before % 100 * Self::FASTER / 100;
                if is_faster && can_halve && halved < Self::MOST_HALVED {
                    self.phase = Phase::Draining {
                        halved: halved + 1,
                        before: average,
                    };
                } else {
                    self.takes = parts(average.min(before));
                    self.rest(now);
                }
                false
            }
        }
    }

    /// Ends a probe, if there is one.
    pub(super) fn rest(&mut self, now: Timestamp) {
        if self.is_probing() {
            let pause = now
                .since(self.began)
                .as_micros()
                .saturating_mul(Self::PAUSE);
            self.not_before = now.after(Span::from_micros(pause));
        }
        self.phase = Phase::Resting(0);
    }
}

fn parts(micros: u64) -> u128 {
    u128::from(micros) * Usual::PARTS
}
