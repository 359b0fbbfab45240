//! Fast path for the most common decisions: one charge whose limits a small dedicated script can
//! decide.

use tidegate_core::{
    Charge, Decision, Effect, Outcome, Timestamp,
    remote_eval::{self, Exact, GroupNumbers, Numbers, RemoteState, Replay},
};

use crate::{
    RedisStore, StoreError,
    call::{Intent, Script},
    decode::{self, Alone},
    encode,
    lead::lead_of,
    scripts,
    store::Settled,
};

/// Length in bytes of the value header that `schedule_alone.lua` understands.
const SCHEDULE_HEAD_BYTES: usize = 4;

/// Result of trying a dedicated script.
pub(crate) enum Attempt {
    /// The script decided.
    Decided(Decision),
    /// The script did not decide, because it does not understand the stored value: the instant, and
    /// the value.
    Other(Timestamp, Vec<u8>),
    /// No dedicated script handles these limits.
    Unsuited,
}

impl RedisStore {
    /// Decides `charge` with a dedicated script, if there is one for its limits.
    pub(crate) async fn check_alone(
        &self,
        charge: &Charge<'_>,
        outcomes: &mut Vec<Outcome>,
    ) -> Result<Attempt, StoreError> {
        let Some((script, mut args)) = script_of(charge) else {
            return Ok(Attempt::Unsuited);
        };
        args.extend(self.pinned().map(|now| now.to_string().into_bytes()));
        let reply = self.call(script, vec![self.key(charge.key)], args).await?;
        match decode::alone(reply).ok_or_else(StoreError::unreadable)? {
            Alone::Ahead(whole) => {
                // The outcome depends only on how far the arrival time is ahead of `now`, so any
                // instant will do.
                let now = Timestamp::default();
                let held = RemoteState::Gcra(Exact { whole, part: 0 });
                let held = remote_eval::terms(charge.limits).map(|terms| (terms, held.clone()));
                let replay = Replay::open(charge, Some(held.collect()), now, Effect::Charge);
                let settled = Settled::of(vec![replay], now, Intent::Charge);
                Ok(Attempt::Decided(settled.report(now, outcomes)))
            }
            Alone::Decided { now, value } => {
                let alone = std::slice::from_ref(charge);
                let settled = self.replay(alone, &[value], now, Intent::Charge)?;
                Ok(Attempt::Decided(settled.report(now, outcomes)))
            }
            Alone::Other { now, value } => {
                let found = decode::found(&self.key(charge.key), &value)?;
                Ok(match found.standing_block(now) {
                    Some(until) => Attempt::Decided(Decision::blocked(0, until, now)),
                    None => Attempt::Other(now, value),
                })
            }
        }
    }
}

/// Returns the dedicated script for `charge` and its arguments without the instant, if there is one.
///
/// There is one for a single schedule, one for several schedules, and one for a log. The unit of a
/// schedule must be a whole number of microseconds, and no limit may count denied requests.
fn script_of(charge: &Charge<'_>) -> Option<(&'static Script, Vec<Vec<u8>>)> {
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
        let mut args = vec![encode::head(charge), in_digits(charge.cost.units())];
        for (limit, span) in windows {
            args.extend([*limit, span.as_micros()].map(in_digits));
        }
        return Some((&scripts::LOG_ALONE, args));
    }
    let mut numbers = Vec::with_capacity(SCHEDULE_HEAD_BYTES + 15 * members.len());
    for member in &members {
        let Numbers::Gcra {
            fraction: 1,
            duration: Some(duration),
            tau,
            queue,
        } = &member.numbers
        else {
            return None;
        };
        // A request that waits at most `longest` finishes at most `longest + duration` from now.
        let longest = charge.longest_wait.filter(|_| *queue);
        let latest = longest.map(|longest| longest.as_micros().saturating_add(duration.whole));
        let tau = tau.whole.min(latest.unwrap_or(u64::MAX));
        encode::put_all(&mut numbers, &[duration.whole, tau]);
        numbers.push(lead_of(tau));
    }
    let head = encode::head(charge);
    if members.len() > 1 {
        return Some((&scripts::SCHEDULES_ALONE, vec![head, numbers]));
    }
    let is_suited = head.len() == SCHEDULE_HEAD_BYTES;
    is_suited.then(|| (&*scripts::SCHEDULE_ALONE, vec![[head, numbers].concat()]))
}

/// Encodes a number as an argument of a script: in decimal digits.
fn in_digits(number: u64) -> Vec<u8> {
    number.to_string().into_bytes()
}
