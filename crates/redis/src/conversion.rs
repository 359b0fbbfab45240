//! Converts stored states that the scripts cannot use: states stored under other limit parameters,
//! and states written by a clock that was ahead.

use tidegate_core::{
    Charge, Effect, Limit, Outcome, Span, Timestamp, Window,
    remote_eval::{self, CLOCK_JUMP, DrainTimes, Numbers, RemoteState, Replay, Terms},
};

use crate::{
    decode::StoredValue,
    encode::{head, put},
    lead::is_led,
    value_format::{CLAMPED, CONVERTED},
};

/// How long a refund ledger is kept after its last entry, in microseconds.
pub(crate) const LEDGER_MICROS: u64 = 60_000_000;

/// The converted values, one per charge, with `None` for a value that needs no conversion. The list
/// is empty if no value needs a conversion.
#[derive(Clone, Debug, Default)]
pub(crate) struct Conversions(pub(crate) Vec<Option<Conversion>>);

/// A value stored under other parameters, or written by a clock that was ahead.
#[derive(Clone, Debug)]
pub(crate) struct Conversion {
    /// The value as it was stored.
    pub(crate) stored: Vec<u8>,
    /// The value converted to the charge's parameters. A value written by a clock that was ahead is
    /// also clamped.
    pub(crate) converted: Vec<u8>,
    /// The instant until which the converted state is kept if nothing is charged. `None` if the
    /// state exceeds the charge's limits. The stored state is then kept until the excess has
    /// drained, even if a denied request has to be counted, because a conversion would lose the
    /// excess.
    pub(crate) keep_until: Option<Timestamp>,
    /// The drain times of the state, if the state exceeds a limit.
    pub(crate) drain_times: DrainTimes,
}

impl Conversion {
    /// Returns the three script arguments for this conversion.
    pub(crate) fn args(conversion: Option<&Self>) -> [Vec<u8>; 3] {
        let Some(conversion) = conversion else {
            return [const { Vec::new() }; 3];
        };
        let keep_until = match conversion.keep_until {
            Some(instant) => instant.as_micros().to_string(),
            None => "-1".to_owned(),
        };
        [
            conversion.stored.clone(),
            conversion.converted.clone(),
            keep_until.into_bytes(),
        ]
    }
}

impl Conversions {
    /// Returns whether any converted state must be stored even if nothing is charged.
    pub(crate) fn is_any_kept(&self) -> bool {
        let mut conversions = self.0.iter().flatten();
        conversions.any(|conversion| conversion.keep_until.is_some())
    }

    /// If a stored state exceeds a limit, the times `reset_after` and `retry_after` of this limit
    /// in `outcomes` become the time that the stored state takes to drain.
    pub(crate) fn report_drain_times(
        &self,
        charges: &[Charge<'_>],
        values: &[Vec<u8>],
        outcomes: &mut [Outcome],
    ) {
        let mut rest = outcomes;
        for ((charge, value), conversion) in charges.iter().zip(values).zip(&self.0) {
            let (own, others) = rest.split_at_mut(charge.limits.len().min(rest.len()));
            if let Some(conversion) = conversion
                && conversion.converted == *value
            {
                conversion.drain_times.correct(own);
            }
            rest = others;
        }
    }
}

impl StoredValue {
    /// Opens a [`Replay`] of `charge` on the stored states. States written by a clock that was
    /// ahead are clamped first.
    pub(crate) fn replay<'a>(
        &self,
        charge: &Charge<'a>,
        now: Timestamp,
        effect: Effect,
    ) -> Replay<'a> {
        match self.states.clone() {
            Some(states) if self.is_from_ahead(charge, now) => {
                Replay::open_clamped(charge, states, now, effect)
            }
            states => Replay::open(charge, states, now, effect),
        }
    }

    /// Returns whether any state was written by a clock that was ahead of `now`.
    ///
    /// A GCRA state that is within the limits of `charge` at `now` is never treated as written by a
    /// clock that was ahead. The Redis scripts use the same condition. Therefore, if a script
    /// returns a state without a decision because the clock was ahead, this method also returns
    /// true.
    pub(crate) fn is_from_ahead(&self, charge: &Charge<'_>, now: Timestamp) -> bool {
        let Some(states) = &self.states else {
            return false;
        };
        let is_same = self.encoded_states.starts_with(&head(charge));
        let mut members = remote_eval::numbers(charge.limits, charge.cost);
        states
            .iter()
            .zip(&self.leads)
            .any(|((terms, state), lead)| {
                let numbers = members.next().filter(|_| is_same);
                let numbers = numbers.map(|member| member.numbers);
                is_from_ahead(terms, state, *lead, numbers.as_ref(), now)
            })
    }
}

/// Works like [`StoredValue::is_from_ahead`], for one state. `numbers` are the limit's parameters;
/// `None` if the state was stored under other parameters.
fn is_from_ahead(
    terms: &Terms,
    state: &RemoteState,
    lead: u8,
    numbers: Option<&Numbers<'_>>,
    now: Timestamp,
) -> bool {
    let latest = now.after(CLOCK_JUMP);
    match state {
        RemoteState::Gcra(arrival) => {
            let is_beyond = match numbers {
                Some(Numbers::Gcra { tau, .. }) => {
                    arrival.whole.saturating_sub(now.as_micros()) > tau.whole
                }
                _ => true,
            };
            is_beyond && is_led(arrival.whole, lead, now)
        }
        RemoteState::Interval { full_at, .. } => is_led(*full_at, lead, now),
        RemoteState::Window { end, .. } => match (terms, numbers) {
            (Terms::FirstRequest { window }, _) => {
                *end > latest.as_micros().saturating_add(*window)
            }
            (_, Some(Numbers::Window { grid, .. })) => *end > end_at(grid, latest),
            // The state was stored under other parameters. After the conversion, the state ends at
            // the end of the window that contains `now`.
            _ => false,
        },
        RemoteState::Weighted { index, window, .. } => {
            index.saturating_mul(*window) > latest.as_micros()
        }
        RemoteState::Buckets { newest, width, .. } => {
            newest.saturating_mul(*width) > latest.as_micros()
        }
        RemoteState::Log { stamps, .. } | RemoteState::Lease { stamps, .. } => stamps
            .last()
            .is_some_and(|(at, _)| *at > latest.as_micros()),
    }
}

/// Returns the end of the window that contains `at`.
fn end_at(grid: &Window, at: Timestamp) -> u64 {
    match grid {
        Window::Epoch(span) | Window::FirstRequest(span) => {
            let span = span.as_micros();
            (at.as_micros() / span + 1).saturating_mul(span)
        }
        Window::Calendar(calendar) => calendar.window(at).1.as_micros(),
    }
}

/// Returns the refund ledger of a state that was converted at `now` from the parameters of `stored`
/// to other parameters. The ledger is empty if nothing in `stored` can be refunded.
///
/// A receipt from before the conversion does not name the new ledger, so the receipt's charge is
/// not refunded. Changing the parameters back makes no difference, because the charge may have
/// drained at another rate in between. The store keeps the ledger until every earlier charge would
/// have drained without the conversion.
pub(crate) fn converted_ledger(stored: &StoredValue, now: Timestamp) -> Vec<u8> {
    let until = refundable_until(stored).max(stored.ledger_until());
    let mut ledger = Vec::new();
    if until > now {
        // Each conversion has a different start instant, which identifies the conversion.
        let start = now.as_micros().max(stored.ledger_start().saturating_add(1));
        put(&mut ledger, u64::from(CONVERTED), 1);
        put(&mut ledger, until.as_micros(), 7);
        put(&mut ledger, start, 7);
    }
    ledger
}

/// Returns the instant at which all refundable charges in `stored` have expired. Leases are
/// excluded, because a receipt identifies a lease by its start, so the lease can be released under
/// any parameters.
fn refundable_until(stored: &StoredValue) -> Timestamp {
    let states = stored.states.iter().flatten().map(|(_, state)| state);
    let refundable = states.filter(|state| !matches!(state, RemoteState::Lease { .. }));
    let refundable: Vec<RemoteState> = refundable.cloned().collect();
    remote_eval::expires(&refundable)
}

/// Returns the refund ledger of a state of `charge` that was clamped at `now`. `stored` is the
/// value before it was clamped, as written by a clock that was ahead.
///
/// Leases acquired while that clock was ahead are treated as acquired at `now`, and the ledger
/// stores `now`. The ledger is kept for at least the duration of a lease, so that the leases can
/// still be released with their receipts. If the states were also converted, the ledger is kept at
/// least until charges from before the conversion have expired.
pub(crate) fn clamped_ledger(charge: &Charge<'_>, stored: &StoredValue, now: Timestamp) -> Vec<u8> {
    let members = remote_eval::numbers(charge.limits, charge.cost);
    let count = members.len() as u64;
    let leases = members.filter_map(|member| match member.numbers {
        Numbers::Lease { lease, .. } => Some(lease.as_micros()),
        _ => None,
    });
    let lifetime = leases.fold(LEDGER_MICROS, u64::max);
    let mut until = now.after(Span::from_micros(lifetime));
    // A charge can be refunded only if the parameters have not changed since the charge.
    let is_same = stored.encoded_states.starts_with(&head(charge));
    if !is_same {
        // If the instant is later than `now` by more than the longest window, the instant was
        // written by the clock that was ahead. An instant from the wrong clock is ignored.
        let windows = charge.limits.iter().map(Limit::window);
        let latest = now.after(windows.max().unwrap_or(Span::ZERO));
        until = until.max(refundable_until(stored).min(latest));
    }
    let was_converted = stored.is_converted() && stored.ledger_until() > now;
    if was_converted {
        // The same clock wrote the start and the end of the ledger, so the difference is correct
        // even if the clock was ahead.
        let length = stored
            .ledger_until()
            .as_micros()
            .saturating_sub(stored.ledger_start());
        let latest = now.after(Span::from_micros(length));
        until = until.max(stored.ledger_until().min(latest));
    }
    let is_converted = !is_same || was_converted;
    let flags = CLAMPED | if is_converted { CONVERTED } else { 0 };
    let mut ledger = Vec::new();
    debug_assert!(
        count < u64::from(CONVERTED),
        "the number of limits must fit into the count bits"
    );
    put(&mut ledger, count | u64::from(flags), 1);
    put(&mut ledger, until.as_micros(), 7);
    put(&mut ledger, now.as_micros(), 7);
    (0..count).for_each(|_| put(&mut ledger, 0, 7));
    ledger
}
