//! Concurrency limits: a sliding window log of the held concurrency slots. The log has a single
//! window, which is as long as a slot's lease.

use super::{Log, LogState};
use crate::{
    algorithm::{ChargePosition, Counter, LimitStatus, Mark, Numbers, RetryAfter, Terms, narrow},
    error::LimitError,
    time::{Span, Timestamp},
};

/// The shortest retry hint for a concurrency slot.
const MIN_RETRY_HINT: Span = Span::from_millis(100);

/// The longest retry hint for a concurrency slot. Retries every 10 seconds cause little load, even
/// if requests hold their slots for longer than that.
const MAX_RETRY_HINT: Span = Span::from_secs(10);

/// A limit on the number of concurrency slots in use.
#[derive(Clone, Debug)]
pub(crate) struct Lease(Log);

impl Lease {
    /// Creates a concurrency limit of `limit` slots. A slot is held for at most `lease` without a
    /// renewal.
    pub(crate) fn new(limit: u64, lease: Span) -> Result<Self, LimitError> {
        Log::of_field(limit, "lease", lease).map(Self)
    }
}

impl Counter for Lease {
    type State = LogState;

    fn numbers(&self, _cost: u64) -> Numbers<'_> {
        Numbers::Lease {
            limit: self.0.largest,
            lease: self.0.longest,
        }
    }

    fn terms(&self) -> Terms {
        self.0.terms()
    }

    fn new_entry_bytes(&self, cost: u64) -> usize {
        self.0.new_entry_bytes(cost)
    }

    fn growth_bytes(&self, state: &LogState, cost: u64) -> usize {
        self.0.growth_bytes(state, cost)
    }

    fn fresh(&self) -> LogState {
        self.0.fresh()
    }

    fn is_compatible(&self, state: &LogState) -> bool {
        self.0.is_compatible(state)
    }

    fn adopt(&self, _old: Option<&Self>, state: &mut LogState, now: Timestamp) {
        self.0.adopt(None, state, now);
    }

    fn admits(&self, state: &mut LogState, now: Timestamp, cost: u64) -> bool {
        self.0.admits(state, now, cost)
    }

    fn charge(&self, state: &mut LogState, now: Timestamp, cost: u64) {
        self.0.charge(state, now, cost);
    }

    fn clamp(&self, state: &mut LogState, at: Timestamp) {
        self.0.clamp(state, at);
    }

    fn refund(&self, state: &mut LogState, now: Timestamp, units: u64) {
        self.0.refund(state, now, units);
    }

    fn mark(state: &LogState) -> Mark {
        Mark::HeldSince(state.newest())
    }

    /// Releases all slots of the charge at `position`.
    fn refund_charge(
        &self,
        state: &mut LogState,
        now: Timestamp,
        position: &ChargePosition,
        _units: u64,
    ) -> u64 {
        if let Mark::HeldSince(since) = position.mark {
            self.0.expire(state, now);
            state.refund_at(since, position.cost);
        }
        0
    }

    fn renew(&self, state: &mut LogState, now: Timestamp, since: Timestamp, units: u64) -> bool {
        state.renew(now, since, units, self.0.largest)
    }

    fn status(&self, state: &LogState, now: Timestamp, window: usize) -> LimitStatus {
        self.0.status(state, now, window)
    }

    /// Returns the retry hint for a request that needs `cost` concurrency slots when too few are
    /// free.
    ///
    /// A slot becomes free when its request finishes or its lease expires. The end of a request
    /// cannot be predicted, so the hint is an estimate. The estimate assumes that requests start at
    /// regular intervals and take as long as the oldest slot has been held so far, `age`. Under
    /// this assumption, one of the `n` held slots becomes free every `age / n`, so the hint is `age
    /// / n` multiplied by the number of missing slots. For short requests, the hint is short. If no
    /// request finishes, the hint grows, so clients that follow it retry less and less often.
    ///
    /// The hint is at least [`MIN_RETRY_HINT`] and at most [`MAX_RETRY_HINT`]. The hint never
    /// exceeds the time until enough leases have expired.
    fn retry(&self, state: &LogState, now: Timestamp, window: usize, cost: u64) -> RetryAfter {
        let RetryAfter::After(leases) = self.0.retry(state, now, window, cost) else {
            return RetryAfter::Never;
        };
        let (held, age) = match state.stamps.front() {
            Some(oldest) => (state.cursors[0].sum, now.since(oldest.at())),
            None => (0, Span::ZERO),
        };
        let short = (held + cost).saturating_sub(self.0.largest);
        let spread = u128::from(age.as_micros()) * u128::from(short);
        let next = Span::from_micros(narrow(spread.div_ceil(u128::from(held.max(1)))));
        RetryAfter::After(next.clamp(MIN_RETRY_HINT, MAX_RETRY_HINT).min(leases))
    }
}
