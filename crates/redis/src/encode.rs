//! Encodes the limits of a charge as a *program*, which is a binary argument of the scripts. Also
//! encodes states as the values that Redis stores.
//!
//! The scripts support seven algorithms ([`kernel`]), each of which implements one or more variants
//! of [`tidegate_core::Algorithm`]. For example, `GCRA` also implements continuous token buckets
//! and leaky buckets, because their state is also a theoretical arrival time. A *member* is an
//! algorithm with its parameters. Each limit of a rule is a separate member, except that all
//! sliding window logs of a rule share one member.

use tidegate_core::{
    Charge, Span, Timestamp, Window,
    remote_eval::{self, DenialCounting, GroupNumbers, Numbers, RemoteState, Terms},
};

use crate::{
    lead::lead_of,
    value_format::{
        BLOCKED, HAS_LEDGER, KERNEL_BITS, RATE_COUNT_BITS, RATE_PERIODS, SEVERAL, SUMS,
        bytes_below, kernel,
    },
};

/// The header of a value without a block or a ledger: the algorithms and their parameters.
pub(crate) type Head = Vec<u8>;

/// Number of calendar windows in a program (the limits of a charge, encoded for the scripts). The
/// first window contains the latest known instant. The program also contains later windows, because
/// the first window may have ended by the server's clock.
const CALENDAR_WINDOWS: usize = 3;

/// Returns the header of values stored under the limits of `charge`.
pub(crate) fn head(charge: &Charge<'_>) -> Head {
    let members = remote_eval::numbers(charge.limits, charge.cost);
    let mut head = Vec::with_capacity(2 + 5 * members.len());
    if let (true, Ok(count)) = (members.len() > 1, u8::try_from(members.len())) {
        head.extend([SEVERAL, count]);
    }
    for (member, terms) in members.zip(remote_eval::terms(charge.limits)) {
        put_terms(&mut head, algorithm_id(&member.numbers), &terms);
    }
    head
}

/// Appends an algorithm and its parameters.
fn put_terms(head: &mut Head, kernel: u8, terms: &Terms) {
    let mut put_all = |form: u8, numbers: &[(u64, usize)]| {
        head.push(form << KERNEL_BITS | kernel);
        numbers
            .iter()
            .for_each(|(number, bytes)| put(head, *number, *bytes));
    };
    match *terms {
        Terms::Gcra {
            numerator,
            denominator: 1,
        } if let Some(unit) = scaled(numerator, 20) => put_all(0, &[(unit, 3)]),
        Terms::Gcra {
            numerator,
            denominator,
        } => match as_rate(numerator, denominator) {
            Some(rate) if (2..=255).contains(&denominator) => put_all(1, &[(rate, 2)]),
            _ => {
                let bytes = u64::from(bytes_below(denominator));
                put_all(2, &[(numerator, 7), (denominator, 7), (bytes, 1)]);
            }
        },
        Terms::Interval { refill, every } => match (scaled(refill, 28), scaled(every, 28)) {
            (Some(refill), Some(every)) => put_all(0, &[(refill, 4), (every, 4)]),
            _ => put_all(2, &[(refill, 7), (every, 7)]),
        },
        Terms::FirstRequest { window } => match scaled(window, 28) {
            Some(window) => put_all(1, &[(window, 4)]),
            None => put_all(2, &[(window, 7)]),
        },
        Terms::Digest(digest) => put_all(0, &[(digest.into(), 4)]),
    }
}

/// Encodes the duration of one GCRA unit, `numerator / denominator` microseconds, as a rate: a
/// number of units per period, where the period is one of the [`RATE_PERIODS`]. Returns `None` if
/// the number does not fit for any of these periods.
fn as_rate(numerator: u64, denominator: u64) -> Option<u64> {
    let mut periods = (0..).zip(RATE_PERIODS);
    periods.find_map(|(number, period)| {
        let count = (period / numerator).checked_mul(denominator)?;
        let fits = period.is_multiple_of(numerator) && count < 1 << RATE_COUNT_BITS;
        fits.then_some(number << RATE_COUNT_BITS | count)
    })
}

/// Encodes a number as a mantissa in `bits` bits and a decimal exponent in four bits; returns
/// `None` if the number does not fit. Always uses the largest possible exponent.
fn scaled(mut number: u64, bits: u32) -> Option<u64> {
    let mut power = 0;
    while power < 15 && number > 0 && number.is_multiple_of(10) {
        number /= 10;
        power += 1;
    }
    (number < 1 << bits).then_some(number << 4 | power)
}

/// Returns the program of `charge`: its limits, encoded for the scripts. `program.lua` documents
/// the format. `around` is the latest known instant of the server's clock.
pub(crate) fn program(charge: &Charge<'_>, around: Timestamp) -> Vec<u8> {
    let (head, mut program) = (head(charge), Vec::with_capacity(128));
    put(&mut program, charge.limits.is_shadow().into(), 1);
    put(&mut program, counts_denials(charge).into(), 1);
    put(&mut program, head.len() as u64, 2);
    program.extend(head);
    for member in remote_eval::numbers(charge.limits, charge.cost) {
        put_member(&mut program, &member, charge, around);
    }
    program
}

/// Returns whether any limit of `charge` counts denied requests.
pub(crate) fn counts_denials(charge: &Charge<'_>) -> bool {
    remote_eval::numbers(charge.limits, charge.cost)
        .any(|member| member.denials != DenialCounting::NotCounted)
}

/// Encodes `states` as the value of a key without a block or a ledger. There is one state for each
/// member of `charge`, which is a group of limits that share a state. The leads are computed for a
/// value written at `now`.
pub(crate) fn value(charge: &Charge<'_>, states: &[RemoteState], now: Timestamp) -> Vec<u8> {
    let mut value = head(charge);
    for (member, state) in remote_eval::numbers(charge.limits, charge.cost).zip(states) {
        put_state(&mut value, &member.numbers, state, now);
    }
    value
}

/// Builds a value from the block and the ledger, if there are any, and from `state`, which is the
/// rest of the value. `state` is empty if no units are charged.
pub(crate) fn assemble(block: Option<Option<Timestamp>>, ledger: &[u8], state: &[u8]) -> Vec<u8> {
    let (first, rest) = state.split_first().unwrap_or((&0, &[]));
    let mut value = vec![*first];
    if let Some(until) = block {
        value[0] |= BLOCKED;
        put(&mut value, until.map_or(0, Timestamp::as_micros), 7);
    }
    if !ledger.is_empty() {
        value[0] |= HAS_LEDGER;
        value.extend_from_slice(ledger);
    }
    value.extend_from_slice(rest);
    value
}

/// Appends a state in the format that its algorithm's script reads.
fn put_state(value: &mut Vec<u8>, numbers: &Numbers<'_>, state: &RemoteState, now: Timestamp) {
    let lead = |end: u64| u64::from(lead_of(end.saturating_sub(now.as_micros())));
    let mut wide = |numbers: &[u64]| put_all(value, numbers);
    match state {
        RemoteState::Gcra(arrival) => {
            wide(&[arrival.whole]);
            put(value, arrival.part, usize::from(fraction_bytes(numbers)));
            put(value, lead(arrival.whole), 1);
        }
        RemoteState::Interval { full_at, last } => {
            wide(&[*full_at, *last]);
            put(value, lead(*full_at), 1);
        }
        RemoteState::Window { count, end } => wide(&[*count, *end]),
        RemoteState::Weighted {
            index,
            previous,
            current,
            window,
        } => wide(&[*index, *previous, *current, *window]),
        RemoteState::Buckets {
            newest,
            width,
            counts,
        } => {
            wide(&[*newest, *width, counts.iter().sum()]);
            put(value, counts.len() as u64, 2);
            counts.iter().for_each(|count| put(value, *count, 7));
        }
        RemoteState::Log { longest, stamps } | RemoteState::Lease { longest, stamps } => {
            let windows = match numbers {
                Numbers::Log { windows } => windows.len(),
                Numbers::Lease { .. } => 1,
                _ => 0,
            };
            wide(&[*longest]);
            put(value, stamps.len() as u64, 4);
            put(value, windows as u64, 1);
            put(value, 0, 3);
            // Each window is stored as if it began at the first entry. The next script call
            // advances each window to the current time.
            let first = stamps.first().map_or(0, |(at, _)| *at);
            for _ in 0..windows {
                put(value, 0, 4 + 3);
                put(value, first, 7);
            }
            let mut sum = 0;
            for (at, cost) in stamps {
                sum += cost;
                put(value, *at, 7);
                // The scripts use only differences between sums, so the sums may wrap around.
                put(value, sum & SUMS, 3);
            }
        }
    }
}

/// Appends a number in `bytes` bytes, at most 8. A number that is too large is stored as the
/// largest number that fits. The low bytes alone would be decoded as a small count or as an instant
/// in the past.
pub(crate) fn put(value: &mut Vec<u8>, number: u64, bytes: usize) {
    let bytes = bytes.min(8);
    let unused = u32::try_from(8 * (8 - bytes)).unwrap_or(u32::MAX);
    let largest = u64::MAX.checked_shr(unused).unwrap_or(0);
    value.extend_from_slice(&number.min(largest).to_be_bytes()[8 - bytes..]);
}

/// Appends instants, durations or counts.
pub(crate) fn put_all(bytes: &mut Vec<u8>, numbers: &[u64]) {
    numbers.iter().for_each(|number| put(bytes, *number, 7));
}

/// Returns the algorithms that `charge` needs as a bit mask. The bit positions are the constants of
/// [`kernel`].
pub(crate) fn kernels(charge: &Charge<'_>) -> u8 {
    let members = remote_eval::numbers(charge.limits, charge.cost);
    members.fold(0, |bits, member| match algorithm_id(&member.numbers) {
        kernel::LEASE => bits | 1 << kernel::LEASE | 1 << kernel::LOG,
        number => bits | 1 << number,
    })
}

/// Returns the algorithm's ID in the scripts.
pub(crate) fn algorithm_id(numbers: &Numbers<'_>) -> u8 {
    match numbers {
        Numbers::Gcra { .. } => kernel::GCRA,
        Numbers::Interval { .. } => kernel::INTERVAL,
        Numbers::Window { .. } => kernel::WINDOW,
        Numbers::Log { .. } => kernel::LOG,
        Numbers::Buckets { .. } => kernel::BUCKETS,
        Numbers::Weighted { .. } => kernel::WEIGHTED,
        Numbers::Lease { .. } => kernel::LEASE,
    }
}

/// Appends a member, an algorithm with its parameters, in the format of `program.lua`.
fn put_member(
    program: &mut Vec<u8>,
    member: &GroupNumbers<'_>,
    charge: &Charge<'_>,
    around: Timestamp,
) {
    put(program, algorithm_id(&member.numbers).into(), 1);
    let denials = match member.denials {
        DenialCounting::NotCounted => 0,
        DenialCounting::Counted => 1,
        DenialCounting::InFull => 2,
    };
    put(program, denials, 1);
    let cost = charge.cost.units();
    match &member.numbers {
        Numbers::Gcra {
            fraction,
            duration,
            tau,
            queue,
        } => {
            // If the limit counts denied requests, a denied request whose cost exceeds the bucket
            // fills the bucket completely.
            let cost = duration.unwrap_or(*tau);
            put_all(program, &[cost.whole, tau.whole, *fraction]);
            put(program, duration.is_some().into(), 1);
            put(program, (*queue).into(), 1);
            put(program, longest_wait(charge, *queue), 7);
            if *fraction > 1 {
                put_all(program, &[cost.part, tau.part]);
                put(program, fraction_bytes(&member.numbers).into(), 1);
            }
        }
        Numbers::Interval {
            refill,
            every,
            capacity,
        } => put_all(program, &[*refill, *every, *capacity, cost]),
        Numbers::Window { limit, most, grid } => {
            put_all(program, &[*limit, cost, *most]);
            put_grid(program, grid, around);
        }
        Numbers::Weighted { limit, window } => put_all(program, &[*limit, *window, cost]),
        Numbers::Buckets {
            limit,
            width,
            summed,
        } => put_all(program, &[*limit, *width, *summed as u64, cost]),
        Numbers::Log { windows } => put_windows(program, windows, cost),
        Numbers::Lease { limit, lease } => put_windows(program, &[(*limit, *lease)], cost),
    }
}

/// Returns the longest queue wait that the request accepts, in microseconds. If the request sets no
/// bound, returns the value of the latest possible instant, because no wait exceeds this value.
fn longest_wait(charge: &Charge<'_>, queue: bool) -> u64 {
    let longest = charge.longest_wait.filter(|_| queue).map(Span::as_micros);
    let latest = Timestamp::MAX.as_micros();
    longest.map_or(latest, |longest| longest.min(latest))
}

/// Appends the windows of a sliding window log.
fn put_windows(program: &mut Vec<u8>, windows: &[(u64, Span)], cost: u64) {
    put(program, windows.len() as u64, 1);
    put_all(program, &[cost]);
    for (limit, span) in windows {
        put_all(program, &[*limit, span.as_micros()]);
    }
}

/// Appends the ID and the parameters of the window grid. The grid determines when windows begin: at
/// multiples of the window length since the epoch, at the first request, or at calendar boundaries.
fn put_grid(program: &mut Vec<u8>, grid: &Window, around: Timestamp) {
    let (number, span) = match grid {
        Window::Epoch(span) => (0, span.as_micros()),
        Window::FirstRequest(span) => (1, span.as_micros()),
        Window::Calendar(calendar) => (2, calendar.window(around).0.as_micros()),
    };
    put(program, number, 1);
    put_all(program, &[span]);
    if let Window::Calendar(calendar) = grid {
        let mut end = around;
        for _ in 0..CALENDAR_WINDOWS {
            end = calendar.window(end).1;
            put_all(program, &[end.as_micros()]);
        }
    }
}

/// Returns the number of bytes that hold the fraction of a GCRA state.
fn fraction_bytes(numbers: &Numbers<'_>) -> u8 {
    let Numbers::Gcra { fraction, .. } = numbers else {
        return 0;
    };
    bytes_below(*fraction)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use tidegate_core::{Algorithm, Cost, Limit, Limits, Rate, remote_eval::ExactMicros};

    use super::*;
    use crate::decode;

    const START: u64 = 1_767_225_600_000_000;

    fn limits(count: u64, period: Span) -> Limits {
        let rate = Rate { count, period };
        let limit = Limit::new(Algorithm::Gcra { rate, burst: 5 });
        Limits::new(vec![limit.unwrap()]).unwrap()
    }

    proptest! {
        /// Decoding returns the parameters and the state that were encoded, for every encoding form
        /// of a rate.
        #[test]
        fn a_decoded_rate_equals_the_encoded_rate(
            count in prop_oneof![1..300_u64, 1..20_000_u64],
            period in prop_oneof![
                prop::sample::select(RATE_PERIODS.to_vec()),
                1..100_000_000_u64,
                (1..1_000_u64).prop_map(|seconds| seconds * 1_000_000),
            ],
            ahead in 0..1_000_000_000_u64,
        ) {
            let limits = limits(count, Span::from_micros(period));
            let charge = Charge::new(b"key", &limits, Cost::ONE).unwrap();
            let state = RemoteState::Gcra(ExactMicros { whole: START + ahead, part: 0 });
            let value = value(&charge, std::slice::from_ref(&state), Timestamp::from_micros(START));
            let found = decode::stored_value(b"key", &value).unwrap();
            let terms = remote_eval::terms(&limits).next().unwrap();
            prop_assert_eq!(found.leads, [lead_of(ahead)]);
            prop_assert_eq!(found.states, Some(vec![(terms, state)]));
            prop_assert_eq!(found.encoded_states, value);
        }
    }

    #[test]
    fn a_number_that_does_not_fit_is_stored_as_the_largest() {
        for (number, bytes, expected) in [
            ((1 << 56) - 1, 7, vec![0xFF; 7]),
            (1 << 56, 7, vec![0xFF; 7]),
            (u64::MAX, 7, vec![0xFF; 7]),
            (u64::MAX, 8, vec![0xFF; 8]),
            (256, 1, vec![0xFF]),
            (1, 3, vec![0, 0, 1]),
            (0, 0, vec![]),
            (7, 0, vec![]),
        ] {
            let mut value = Vec::new();
            put(&mut value, number, bytes);
            assert_eq!(value, expected, "{number} in {bytes} bytes");
        }
    }

    /// Redis stores a string of up to 12 bytes in its smallest string allocation.
    #[test]
    fn a_schedule_of_an_ordinary_rate_takes_12_bytes() {
        for (count, seconds) in [
            (100, 1),
            (600, 1),
            (128, 1),
            (1, 1),
            (7, 60),
            (90, 60),
            (1_000, 3_600),
            (11, 86_400),
        ] {
            let limits = limits(count, Span::from_secs(seconds));
            let charge = Charge::new(b"key", &limits, Cost::ONE).unwrap();
            let state = RemoteState::Gcra(ExactMicros {
                whole: START,
                part: 0,
            });
            let value = value(&charge, &[state], Timestamp::from_micros(START));
            assert_eq!(value.len(), 12, "{count} in {seconds} s");
        }
    }
}
