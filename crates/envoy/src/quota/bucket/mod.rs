//! One quota bucket: the streams that use it, each stream's assignment, and the number of remaining
//! requests.
//!
//! A quota bucket is a group of requests that share a quota. Each Envoy reports its usage on its
//! own stream, and enforces its assignment with a token bucket. A new assignment starts with a full
//! token bucket. There are two kinds of assignment:
//!
//! *Rates* are for periods up to [`LONGEST_RATE`]. The token bucket of each stream holds the
//! stream's share of the limit, and is refilled each period. The shares of all streams add up to
//! the limit. Streams report less often than once per period, so a report reveals the stream's
//! demand, but not its remaining tokens.
//!
//! *Budgets* are for longer periods, which are fixed windows aligned to the clock. A grant is a
//! fixed number of requests for one stream, without refill:
//!
//! ```text
//! limit 1000/h  ├── used, as reported ──┼── granted to A ──┼── granted to B ──┼── unassigned ──┤
//! ```
//!
//! A grant stays reserved until its stream reports, because the server cannot know earlier how much
//! of the grant has been used. Therefore, a grant is replaced only when its stream reports, when
//! all of the grant has been reported as used, or when the next window begins. The sum of usage and
//! grants never exceeds the limit. Once the limit is exhausted, every stream is assigned DENY_ALL
//! until the window ends.

use tidegate_config::quota::QuotaLimit;
use tidegate_core::{Span, Timestamp};

use super::share::divide;

/// The longest period that is enforced as a rate. Longer periods are enforced as budgets.
pub(super) const LONGEST_RATE: Span = Span::from_secs(10);

/// The maximum time between two reports from the same stream about a bucket. A stream that sends no
/// report during this time loses its share of the bucket. Envoy reports every five seconds.
const SILENCE: Span = Span::from_secs(60);

/// The ID of a stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct StreamId(pub(super) u64);

/// A stream's usage of a bucket since the stream's last report.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// The number of allowed requests.
    pub allowed: u64,
    /// The number of denied requests.
    pub denied: u64,
    /// The time covered by the report, according to the client. The time is zero in the first
    /// report for a bucket, which Envoy sends when it receives the first request. After a
    /// reconnect, the time covered by the first report is long.
    pub elapsed: Span,
}

impl Usage {
    /// Returns the demand during `elapsed`, in requests per second times 1024. `elapsed` is rounded
    /// up to whole seconds.
    fn demand(self, elapsed: Span) -> u64 {
        let requests = self.allowed.saturating_add(self.denied);
        requests.saturating_mul(1_024) / elapsed.as_secs_ceil().max(1)
    }
}

/// An assignment, which determines how many requests the stream may allow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Assignment {
    /// Allow all requests, because no quota matches this bucket.
    AllowAll,
    /// Deny all requests.
    DenyAll,
    /// Allow the requests that a token bucket admits. The token bucket is refilled each period.
    Rate {
        /// The number of requests per period, which is never 0.
        requests: u32,
        /// The refill period.
        period: Span,
    },
    /// Allow a fixed number of requests, without refill, until the next assignment.
    Budget {
        /// The number of requests, which is never 0.
        requests: u32,
        /// The grant number. Consecutive grants of the same size have different numbers.
        number: u32,
    },
}

/// The changed assignments, at most one per stream.
pub(super) type AssignmentChanges = Vec<(StreamId, Assignment)>;

/// One quota bucket. The bucket has a [`Seat`] for each stream that uses it.
#[derive(Debug)]
pub(super) struct Bucket {
    limit: QuotaLimit,
    window_end: Timestamp,
    used: u64,
    seats: Vec<Seat>,
}

/// A stream that uses a bucket, with the stream's demand and its current assignment.
#[derive(Debug)]
struct Seat {
    stream: StreamId,
    reported_at: Timestamp,
    /// The demand in requests per second, times 1024. Each report sets this value to the mean of
    /// the reported demand and the previous value.
    demand: u64,
    /// The size of the assignment. For a budget, the size is the number of requests in the last
    /// grant that have not been reported as used. For a rate, the size is the current share.
    granted: u64,
    grants: u32,
    assignment: Assignment,
    /// Whether the assignment must be sent to the stream.
    must_send: bool,
}

impl Seat {
    fn assign(&mut self, assignment: Assignment) {
        self.must_send |= self.assignment != assignment;
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

    /// Returns the end of the current window, when the usage is reset; `None` for a rate, which has
    /// no windows.
    pub(super) fn window_end(&self) -> Option<Timestamp> {
        (!self.is_rate()).then_some(self.window_end)
    }

    pub(super) fn is_vacant(&self) -> bool {
        self.seats.is_empty()
    }

    /// Changes the limit. Reported usage counts until the end of the window in which it was
    /// reported, even if the new window length differs. If a stream's assignment changes, the next
    /// call of [`Self::take_changes`] returns it.
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
            // Grants expire with their window. Grants also expire if the limit changes from a rate
            // to a budget, or from a budget to a rate, because a rate's share is not a budget
            // grant.
            self.revoke_grants();
        }
        if !self.is_rate() && (has_ended || is_other_period) {
            self.window_end = window_end(limit, now);
        }
        self.redistribute();
    }

    /// Records a report from `stream`. The first report adds the stream to the bucket. Always
    /// returns the assignment of `stream`, and also returns the changed assignments of other
    /// streams.
    pub(super) fn report(
        &mut self,
        stream: StreamId,
        usage: Usage,
        now: Timestamp,
    ) -> AssignmentChanges {
        let mut changes = self.remove_silent_seats(stream, now);
        self.begin_window_if_due(now);
        let at = self.record_report(stream, usage, now);
        if self.is_rate() {
            self.share_rate();
        } else {
            self.used = self.used.saturating_add(usage.allowed);
            self.share_budget(at);
        }
        self.seats[at].must_send = true;
        changes.extend(self.take_changes());
        changes
    }

    /// Applies a limit that may have changed. Returns the assignments that change immediately. All
    /// other assignments change when their streams report.
    pub(super) fn apply_limit(&mut self, limit: QuotaLimit, now: Timestamp) -> AssignmentChanges {
        self.set_limit(limit, now);
        self.take_changes()
    }

    /// Removes `stream` from the bucket. The assignments of other streams do not change.
    pub(super) fn remove_seat(&mut self, stream: StreamId) {
        self.seats.retain(|seat| seat.stream != stream);
    }

    /// Removes `stream` from the bucket, and redistributes its share among the other streams.
    pub(super) fn remove_stream(&mut self, stream: StreamId, now: Timestamp) -> AssignmentChanges {
        self.remove_seat(stream);
        self.begin_window_if_due(now);
        self.redistribute();
        self.take_changes()
    }

    /// Begins the next window if the current window has ended. In a new window, every stream gets a
    /// new grant.
    pub(super) fn roll(&mut self, now: Timestamp) -> AssignmentChanges {
        self.begin_window_if_due(now);
        self.take_changes()
    }

    fn begin_window_if_due(&mut self, now: Timestamp) {
        if self.is_rate() || now < self.window_end {
            return;
        }
        self.window_end = window_end(self.limit, now);
        self.used = 0;
        self.revoke_grants();
        self.redistribute();
    }

    /// Revokes all grants.
    fn revoke_grants(&mut self) {
        self.seats.iter_mut().for_each(|seat| seat.granted = 0);
    }

    /// Returns the assignments that have changed since the last call.
    fn take_changes(&mut self) -> AssignmentChanges {
        let change = |seat: &mut Seat| {
            std::mem::take(&mut seat.must_send).then_some((seat.stream, seat.assignment))
        };
        self.seats.iter_mut().filter_map(change).collect()
    }

    fn is_rate(&self) -> bool {
        self.limit.period <= LONGEST_RATE
    }

    /// Removes all streams that have not reported for [`SILENCE`], except `stream`. Returns
    /// DENY_ALL assignments for the removed streams.
    fn remove_silent_seats(&mut self, stream: StreamId, now: Timestamp) -> AssignmentChanges {
        let is_silent =
            |seat: &mut Seat| seat.stream != stream && now.since(seat.reported_at) >= SILENCE;
        let silent = self.seats.extract_if(.., is_silent);
        silent
            .map(|seat| (seat.stream, Assignment::DenyAll))
            .collect()
    }

    /// Records the demand of `stream`, and returns the index of the stream in `seats`.
    fn record_report(&mut self, stream: StreamId, usage: Usage, now: Timestamp) -> usize {
        let Some(at) = self.seats.iter().position(|seat| seat.stream == stream) else {
            self.seats.push(Seat {
                stream,
                reported_at: now,
                // The server does not know when the time covered by a first report began, so use
                // the duration reported by the client.
                demand: usage.demand(usage.elapsed),
                granted: 0,
                grants: 0,
                assignment: Assignment::DenyAll,
                must_send: false,
            });
            return self.seats.len() - 1;
        };
        let seat = &mut self.seats[at];
        // Envoy truncates the reported duration to whole seconds, so this server measures the time
        // between two reports itself.
        let lately = usage.demand(now.since(seat.reported_at));
        seat.demand = seat.demand / 2 + lately / 2;
        seat.reported_at = now;
        if self.limit.period > LONGEST_RATE {
            seat.granted = seat.granted.saturating_sub(usage.allowed);
        }
        at
    }

    /// Recomputes the assignments that can change without a report.
    fn redistribute(&mut self) {
        if self.is_rate() {
            return self.share_rate();
        }
        for at in 0..self.seats.len() {
            // A grant must not be replaced until all of it has been reported as used. Before that
            // report, the stream may have used more requests than it has reported.
            if self.seats[at].granted == 0 {
                self.share_budget(at);
            }
        }
    }

    /// Recomputes the shares of a rate, but only if any stream's share changes by more than an
    /// eighth. Smaller changes are skipped, because each new assignment starts with a full token
    /// bucket.
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
            // A share is at most the limit, which fits in a `u32`.
            let requests = u32::try_from(share).unwrap_or(u32::MAX);
            seat.granted = share;
            seat.assign(match requests {
                0 => Assignment::DenyAll,
                requests => Assignment::Rate { requests, period },
            });
        }
    }

    /// Replaces the grant of the stream with index `at` in `seats`, if the grant should change. The
    /// new grant is the smaller of two numbers: the stream's share of the remaining requests, and
    /// the number of remaining requests that are not granted to other streams.
    fn share_budget(&mut self, at: usize) {
        let remaining = u64::from(self.limit.requests).saturating_sub(self.used);
        // Reserve one additional share for a future stream. Without this reserve, a new stream
        // would have to wait until the other streams report.
        let share = divide(remaining, &self.demands(), 1)[at];
        let others = self.shared() - self.seats[at].granted;
        let grant = share.min(remaining.saturating_sub(others));
        let seat = &mut self.seats[at];
        let is_ample = seat.granted >= grant / 2 && seat.granted <= grant + grant / 8;
        if is_ample && seat.granted > 0 {
            return;
        }
        seat.granted = grant;
        seat.grants = seat.grants.wrapping_add(1);
        // A grant is at most the limit, which fits in a `u32`.
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
