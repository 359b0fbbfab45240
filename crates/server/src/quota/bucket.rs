//! One bucket: who uses it, what each of them was assigned, and what is left.
//!
//! Envoy enforces assignments as token buckets, and a new assignment starts full. So there are two kinds:
//!
//! *Rates*, for periods up to [`LONGEST_RATE`]. Each stream's token bucket holds its share of the limit and
//! refills it each period. Streams report less often than that, so what they report tells demand, not what is
//! left. The shares of all streams add up to the limit.
//!
//! *Budgets*, for longer periods, which are windows on the clock. A stream is granted so many requests, once:
//!
//! ```text
//! limit 1000/h  ├── used, as reported ──┼── granted to A ──┼── granted to B ──┼── for a newcomer ──┤
//! ```
//!
//! What is granted is kept for its stream until it reports, because until then nobody knows how much of it is
//! gone. So a grant is replaced only when its stream reports, when nothing of it is left, or when the next window
//! begins; and what is used and granted is never more than the limit. Once it is used up everybody is denied
//! until the window ends.

use tidegate_core::{Span, Timestamp};

use super::{rule::QuotaLimit, share::divide};

/// Up to this period a limit is enforced as a rate, beyond it as budgets.
pub(super) const LONGEST_RATE: Span = Span::from_secs(10);

/// A stream that is silent about a bucket for so long loses its seat: Envoy reports every five seconds.
const SILENCE: Span = Span::from_secs(60);

/// A stream, by the number that it was given.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct StreamId(pub(super) u64);

/// What a stream reports of a bucket since its last report.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// Requests that passed.
    pub allowed: u64,
    /// Requests that were denied.
    pub denied: u64,
}

/// What a stream may do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Assignment {
    /// Let everything pass: no quota is about this bucket.
    AllowAll,
    /// Let nothing pass.
    DenyAll,
    /// So many requests each period.
    Rate {
        /// How many; never 0.
        requests: u32,
        /// In what time.
        period: Span,
    },
    /// So many requests, and no more until the next assignment.
    Budget {
        /// How many; never 0.
        requests: u32,
        /// Tells one grant from the next of the same size.
        number: u32,
    },
}

/// What changes: at most one assignment a stream.
pub(super) type Changes = Vec<(StreamId, Assignment)>;

#[derive(Debug)]
pub(super) struct Bucket {
    limit: QuotaLimit,
    window_end: Timestamp,
    used: u64,
    seats: Vec<Seat>,
}

#[derive(Debug)]
struct Seat {
    stream: StreamId,
    heard: Timestamp,
    /// Requests per second, times 1024: the mean of this report and of what was before.
    demand: u64,
    /// What it may still use of its last grant, or its share of the rate.
    granted: u64,
    grants: u32,
    assignment: Assignment,
    /// Whether its stream is to be told.
    is_news: bool,
}

impl Seat {
    fn assign(&mut self, assignment: Assignment) {
        self.is_news |= self.assignment != assignment;
        self.assignment = assignment;
    }
}

impl Bucket {
    pub(super) fn new(limit: QuotaLimit, now: Timestamp) -> Self {
        Self {
            limit,
            window_end: window_end(limit, now),
            used: 0,
            seats: Vec::new(),
        }
    }

    /// When what was used no longer counts; `None` for a rate, which has no windows.
    pub(super) fn window_end(&self) -> Option<Timestamp> {
        (!self.is_rate()).then_some(self.window_end)
    }

    pub(super) fn is_vacant(&self) -> bool {
        self.seats.is_empty()
    }

    /// The limit as it is now; what was used stays used until the window ends in which it was. Whoever's share changes by
    /// it is told with the next changes.
    pub(super) fn set_limit(&mut self, limit: QuotaLimit, now: Timestamp) {
        if limit == self.limit {
            return;
        }
        let has_ended = now >= self.window_end;
        let is_other_period = limit.period != self.limit.period;
        let was_rate = self.is_rate();
        self.limit = limit;
        if has_ended {
            self.used = 0;
        }
        if has_ended || self.is_rate() != was_rate {
            // A share of a rate is no grant of a budget, nor the other way round.
            self.take_back();
        }
        if !self.is_rate() && (has_ended || is_other_period) {
            self.window_end = window_end(limit, now);
        }
        self.reshare();
    }

    /// Hears what `stream` used; a first report takes a seat. The stream gets an assignment in any case,
    /// others if theirs changes.
    pub(super) fn report(&mut self, stream: StreamId, usage: Usage, now: Timestamp) -> Changes {
        let mut changes = self.unseat_silent(stream, now);
        self.begin_window_if_due(now);
        let at = self.hear(stream, usage, now);
        if self.is_rate() {
            self.share_rate();
        } else {
            self.used = self.used.saturating_add(usage.allowed);
            self.share_budget(at);
        }
        self.seats[at].is_news = true;
        changes.extend(self.news());
        changes
    }

    /// Follows a limit that may have changed: at once, where that needs no report.
    pub(super) fn follow(&mut self, limit: QuotaLimit, now: Timestamp) -> Changes {
        self.set_limit(limit, now);
        self.news()
    }

    /// Takes the seat of `stream`, of which the others are told nothing.
    pub(super) fn unseat(&mut self, stream: StreamId) {
        self.seats.retain(|seat| seat.stream != stream);
    }

    /// Gives up the seat of `stream`, to the good of those who stay.
    pub(super) fn leave(&mut self, stream: StreamId, now: Timestamp) -> Changes {
        self.unseat(stream);
        self.begin_window_if_due(now);
        self.reshare();
        self.news()
    }

    /// Begins the next window if it is time: everybody gets a new grant.
    pub(super) fn roll(&mut self, now: Timestamp) -> Changes {
        self.begin_window_if_due(now);
        self.news()
    }

    fn begin_window_if_due(&mut self, now: Timestamp) {
        if self.is_rate() || now < self.window_end {
            return;
        }
        self.window_end = window_end(self.limit, now);
        self.used = 0;
        self.take_back();
        self.reshare();
    }

    /// Nothing is granted to anybody any more.
    fn take_back(&mut self) {
        self.seats.iter_mut().for_each(|seat| seat.granted = 0);
    }

    /// The assignments that have changed since this was last asked.
    fn news(&mut self) -> Changes {
        let news = |seat: &mut Seat| {
            std::mem::take(&mut seat.is_news).then_some((seat.stream, seat.assignment))
        };
        self.seats.iter_mut().filter_map(news).collect()
    }

    fn is_rate(&self) -> bool {
        self.limit.period <= LONGEST_RATE
    }

    /// Takes their seats from those of whom nothing was heard for long, but for `stream`, and tells them so.
    fn unseat_silent(&mut self, stream: StreamId, now: Timestamp) -> Changes {
        let is_silent = |seat: &mut Seat| seat.stream != stream && now.since(seat.heard) >= SILENCE;
        let silent = self.seats.extract_if(.., is_silent);
        silent
            .map(|seat| (seat.stream, Assignment::DenyAll))
            .collect()
    }

    /// Notes the demand of `stream`, and answers where it sits.
    fn hear(&mut self, stream: StreamId, usage: Usage, now: Timestamp) -> usize {
        let requests = usage.allowed.saturating_add(usage.denied);
        let Some(at) = self.seats.iter().position(|seat| seat.stream == stream) else {
            self.seats.push(Seat {
                stream,
                heard: now,
                demand: requests.saturating_mul(1_024),
                granted: 0,
                grants: 0,
                assignment: Assignment::DenyAll,
                is_news: false,
            });
            return self.seats.len() - 1;
        };
        let seat = &mut self.seats[at];
        let seconds = now.since(seat.heard).as_micros().div_ceil(1_000_000).max(1);
        let lately = requests.saturating_mul(1_024) / seconds;
        seat.demand = seat.demand / 2 + lately / 2;
        seat.heard = now;
        if self.limit.period > LONGEST_RATE {
            seat.granted = seat.granted.saturating_sub(usage.allowed);
        }
        at
    }

    /// Shares again what may be shared without a report.
    fn reshare(&mut self) {
        if self.is_rate() {
            return self.share_rate();
        }
        for at in 0..self.seats.len() {
            // Of a grant that is not spent nobody knows how much is gone.
            if self.seats[at].granted == 0 {
                self.share_budget(at);
            }
        }
    }

    /// Everybody's share of the rate, if that of anybody is off by more than an eighth.
    fn share_rate(&mut self) {
        let shares = divide(u64::from(self.limit.requests), &self.demands(), 0);
        let period = self.limit.period;
        let is_off = self.seats.iter().zip(&shares).any(|(seat, share)| {
            let is_other_period =
                !matches!(seat.assignment, Assignment::Rate { period: is, .. } if is == period);
            seat.granted.abs_diff(*share) > seat.granted / 8 || (is_other_period && *share > 0)
        }) || self.shared() != u64::from(self.limit.requests);
        if !is_off {
            return;
        }
        for (seat, share) in self.seats.iter_mut().zip(shares) {
            // A share is no more than the limit, which fits.
            let requests = u32::try_from(share).unwrap_or(u32::MAX);
            seat.granted = share;
            seat.assign(match requests {
                0 => Assignment::DenyAll,
                requests => Assignment::Rate { requests, period },
            });
        }
    }

    /// The grant of the seat `at`, if it is to change: at most its share of what is left, and at most what is
    /// granted to nobody else.
    fn share_budget(&mut self, at: usize) {
        let left = u64::from(self.limit.requests).saturating_sub(self.used);
        // One seat stays free for a newcomer, who would else have to wait for the reports of the others.
        let share = divide(left, &self.demands(), 1)[at];
        let others = self.shared() - self.seats[at].granted;
        let grant = share.min(left.saturating_sub(others));
        let seat = &mut self.seats[at];
        let is_ample = seat.granted >= grant / 2 && seat.granted <= grant + grant / 8;
        if is_ample && seat.granted > 0 {
            return;
        }
        seat.granted = grant;
        seat.grants = seat.grants.wrapping_add(1);
        // A grant is no more than the limit, which fits.
        let requests = u32::try_from(grant).unwrap_or(u32::MAX);
        let number = seat.grants;
        seat.assign(match requests {
            0 => Assignment::DenyAll,
            requests => Assignment::Budget { requests, number },
        });
    }

    fn demands(&self) -> Vec<u64> {
        self.seats.iter().map(|seat| seat.demand).collect()
    }

    fn shared(&self) -> u64 {
        self.seats.iter().map(|seat| seat.granted).sum()
    }
}

fn window_end(limit: QuotaLimit, now: Timestamp) -> Timestamp {
    let period = limit.period.as_micros();
    let into = now.as_micros() % period;
    now.after(Span::from_micros(period - into))
}

#[cfg(test)]
mod tests;
