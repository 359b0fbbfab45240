//! Fast path for the most common decisions: one charge whose limits a small dedicated script can
//! evaluate.

use tidegate_core::{
    Charge, Decision, Effect, Outcome, Timestamp, Window,
    remote_eval::{self, ExactMicros, GroupNumbers, Numbers, RemoteState, Replay},
};

use super::ReplayedDecision;
use crate::{
    RedisStore, StoreError,
    call::{Intent, Script},
    decode::{self, FastPathReply},
    encode,
    lead::lead_of,
    scripts,
    value_format::kernel,
};

/// Length in bytes of the value header that `single_key_gcra.lua` supports.
const GCRA_HEAD_BYTES: usize = 4;

/// Result of trying a dedicated script.
pub(crate) enum FastPathResult {
    /// The script decided.
    Decided(Decision),
    /// The script did not decide, because it does not support the stored value's header.
    UnknownHeader { now: Timestamp, value: Vec<u8> },
    /// No dedicated script handles these limits.
    Unsupported,
}

impl RedisStore {
    /// Decides `charge` with a dedicated script, if there is one for its limits.
    pub(crate) async fn try_fast_path(
        &self,
        charge: &Charge<'_>,
        outcomes: &mut Vec<Outcome>,
    ) -> Result<FastPathResult, StoreError> {
        let Some((script, mut args)) = select_script(charge) else {
            return Ok(FastPathResult::Unsupported);
        };
        args.extend(self.pinned().map(|now| now.to_string().into_bytes()));
        let reply = self.call(script, vec![self.key(charge.key)], args).await?;
        match decode::fast_path_reply(reply).ok_or_else(StoreError::unexpected_reply)? {
            FastPathReply::AheadBy(whole) => {
                // The outcome depends only on how far the arrival time is ahead of `now`, so any
                // instant can serve as `now`.
                let now = Timestamp::default();
                let state = RemoteState::Gcra(ExactMicros { whole, part: 0 });
                let states = remote_eval::terms(charge.limits).map(|terms| (terms, state.clone()));
                let replay = Replay::open(charge, Some(states.collect()), now, Effect::Charge);
                let replayed = ReplayedDecision::new(vec![replay], now, Intent::Charge);
                Ok(FastPathResult::Decided(replayed.report(now, outcomes)))
            }
            FastPathReply::Decided { now, value } => {
                let charges = std::slice::from_ref(charge);
                let replayed = self.replay(charges, &[value], now, Intent::Charge)?;
                Ok(FastPathResult::Decided(replayed.report(now, outcomes)))
            }
            FastPathReply::UnknownHeader { now, value } => {
                let stored = decode::stored_value(&self.key(charge.key), &value)?;
                Ok(match stored.active_block(now) {
                    Some(until) => FastPathResult::Decided(Decision::blocked(0, until, now)),
                    None => FastPathResult::UnknownHeader { now, value },
                })
            }
        }
    }
}

/// If there is a script for `charge`, returns the script and its arguments, without the instant.
///
/// The sliding window log has a script. Each sequence of up to
/// [`MAX_MEMBERS`](scripts::MAX_MEMBERS) algorithms whose states have a fixed size also has a
/// script. The unit of a GCRA limit must be an integer number of microseconds. Calendar windows and
/// limits that count denied requests are not supported.
fn select_script(charge: &Charge<'_>) -> Option<(&'static Script, Vec<Vec<u8>>)> {
    let cost = charge.cost.units();
    if encode::counts_denials(charge) {
        return None;
    }
    let members: Vec<GroupNumbers<'_>> = remote_eval::numbers(charge.limits, charge.cost).collect();
    if let [
        GroupNumbers {
            numbers: Numbers::Log { windows },
            ..
        },
    ] = members.as_slice()
    {
        let mut args = vec![encode::head(charge), to_decimal(cost)];
        for (limit, span) in windows {
            args.extend([*limit, span.as_micros()].map(to_decimal));
        }
        return Some((&scripts::SINGLE_KEY_LOG, args));
    }
    let mut arg = encode::head(charge);
    let head_bytes = arg.len();
    let mut kernels = Vec::with_capacity(scripts::MAX_MEMBERS);
    for member in &members {
        put_numbers(&mut arg, &member.numbers, charge)?;
        kernels.push(encode::algorithm_id(&member.numbers));
    }
    let (script, expected_head_bytes) = match kernels.as_slice() {
        [kernel::GCRA] => (&*scripts::SINGLE_KEY_GCRA, GCRA_HEAD_BYTES),
        kernels => scripts::fast_path(kernels)?,
    };
    // Rare parameters need a longer header, which the fast path does not support.
    (head_bytes == expected_head_bytes).then(|| (script, vec![arg]))
}

/// Appends the parameters of a member (an algorithm with its parameters) in the format that the
/// fast-path scripts expect. Returns `None` if the fast path does not support the member.
fn put_numbers(arg: &mut Vec<u8>, numbers: &Numbers<'_>, charge: &Charge<'_>) -> Option<()> {
    let cost = charge.cost.units();
    match numbers {
        // The unit of a GCRA limit must be an integer number of microseconds.
        Numbers::Gcra {
            fraction: 1,
            duration: Some(duration),
            tau,
            queue,
        } => {
            // A request that waits at most `longest` finishes at most `longest + duration` from
            // now.
            let longest = charge.longest_wait.filter(|_| *queue);
            let latest = longest.map(|longest| longest.as_micros().saturating_add(duration.whole));
            let tau = tau.whole.min(latest.unwrap_or(u64::MAX));
            encode::put_all(arg, &[duration.whole, tau]);
            arg.push(lead_of(tau));
        }
        Numbers::Interval {
            refill,
            every,
            capacity,
        } => {
            encode::put_all(arg, &[*refill, *every, *capacity, cost]);
            let full_after = capacity.div_ceil(*refill).saturating_mul(*every);
            arg.push(lead_of(full_after));
        }
        // Calendar windows differ in length, so the fast path does not support them.
        Numbers::Window { limit, most, grid } if most >= limit => {
            let (is_epoch, span) = match grid {
                Window::Epoch(span) => (1, span),
                Window::FirstRequest(span) => (0, span),
                Window::Calendar(_) => return None,
            };
            encode::put_all(arg, &[*limit, cost]);
            arg.push(is_epoch);
            encode::put_all(arg, &[span.as_micros()]);
        }
        Numbers::Weighted { limit, window } => encode::put_all(arg, &[*limit, *window, cost]),
        _ => return None,
    }
    Some(())
}

/// Encodes a number in decimal digits, as a script argument.
fn to_decimal(number: u64) -> Vec<u8> {
    number.to_string().into_bytes()
}
