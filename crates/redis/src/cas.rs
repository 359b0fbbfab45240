//! Compare-and-set, for rare changes that have no dedicated script. The client computes the new
//! value, and the server stores it only if the stored value has not changed since it was read.

use tidegate_core::{
    Charge, Decision, Effect, Outcome, Timestamp,
    remote_eval::{Replay, expires},
};

use crate::{
    call::Intent,
    conversion,
    decode::{self, StoredValue},
    encode,
    error::StoreError,
    scripts,
    store::{MAX_TRIES, RedisStore, ReplayedDecision},
};

/// A change to the value of a key.
pub(crate) enum ValueChange {
    /// Leave the value unchanged.
    Keep,
    /// Write these bytes. If there are no bytes, delete the key. The value expires at the given
    /// instant; without an instant, it never expires.
    Write(Vec<u8>, Option<Timestamp>),
}

impl RedisStore {
    /// Reads the values of `keys`, passes them to `compute`, and writes the new values that
    /// `compute` returns. All keys must be in one hash slot. If another client changes a value
    /// after the function has read it, the function starts over, up to `MAX_TRIES` times.
    pub(crate) async fn compare_and_set<T>(
        &self,
        keys: Vec<Vec<u8>>,
        mut compute: impl FnMut(Timestamp, Vec<StoredValue>) -> (Vec<ValueChange>, T) + Send,
    ) -> Result<T, StoreError> {
        for _ in 0..MAX_TRIES {
            let (now, values) = self.read_values(&keys).await?;
            let stored: Result<Vec<StoredValue>, StoreError> = keys
                .iter()
                .zip(&values)
                .map(|(key, value)| decode::stored_value(key, value))
                .collect();
            let (changes, result) = compute(now, stored?);
            let mut args = Vec::with_capacity(3 * keys.len());
            for (value, change) in values.into_iter().zip(changes) {
                args.push(value);
                let (bytes, millis) = match change {
                    ValueChange::Keep => (Vec::new(), "-1".to_owned()),
                    ValueChange::Write(bytes, None) => (bytes, "0".to_owned()),
                    ValueChange::Write(bytes, Some(until)) => {
                        let millis = until.since(now).as_millis_ceil() + self.slack_ms();
                        (bytes, millis.to_string())
                    }
                };
                args.push(bytes);
                args.push(millis.into_bytes());
            }
            let reply = self.call(&scripts::REPLACE, keys.clone(), args).await?;
            if decode::integer(&reply) == Some(1) {
                return Ok(result);
            }
        }
        Err(StoreError::contended())
    }

    /// Returns the server's time and the value stored under `key`.
    pub(crate) async fn read_value(
        &self,
        key: &[u8],
    ) -> Result<(Timestamp, StoredValue), StoreError> {
        let key = self.key(key);
        let (now, values) = self.read_values(std::slice::from_ref(&key)).await?;
        Ok((now, decode::stored_value(&key, &values.concat())?))
    }

    async fn read_values(&self, keys: &[Vec<u8>]) -> Result<(Timestamp, Vec<Vec<u8>>), StoreError> {
        let now = self.instant();
        let reply = self.call(&scripts::READ, keys.to_vec(), vec![now]).await?;
        decode::values(reply, keys.len()).ok_or_else(StoreError::unexpected_reply)
    }

    /// Applies [`Effect::Refund`] to the keys of `charges`.
    pub(crate) async fn refund(
        &self,
        charges: &[Charge<'_>],
        outcomes: &mut Vec<Outcome>,
    ) -> Result<Decision, StoreError> {
        let compute = |now: Timestamp, stored: Vec<StoredValue>| {
            outcomes.clear();
            let mut changes = Vec::with_capacity(charges.len());
            let mut replays = Vec::with_capacity(charges.len());
            for (charge, stored) in charges.iter().zip(stored) {
                let is_refundable =
                    stored.states.is_some() && !loses_everything(charge, &stored, now);
                let replay = stored.replay(charge, now, Effect::Refund);
                changes.push(if is_refundable {
                    updated_value(charge, &replay, &stored, now)
                } else {
                    ValueChange::Keep
                });
                replays.push(replay);
            }
            let decision = ReplayedDecision::new(replays, now, Intent::Look).report(now, outcomes);
            (changes, decision)
        };
        self.compare_and_set(self.keys(charges), compute).await
    }

    /// Resets the counts of `key`. Returns true if any limit still counted earlier charges. A
    /// manual block on the key stays active. A value that was not written by this store is deleted.
    ///
    /// # Errors
    ///
    /// [`StoreError`] if the counts were not reset, or if the outcome is unknown.
    pub async fn reset(&self, key: &[u8]) -> Result<bool, StoreError> {
        let compute = |now: Timestamp, mut stored: Vec<StoredValue>| {
            let stored = stored.pop().unwrap_or_default();
            let had_counts = stored
                .remote_states()
                .is_some_and(|states| expires(&states) > now);
            let change = match stored.active_block(now) {
                Some(until) => ValueChange::Write(encode::assemble(Some(until), &[], &[]), until),
                None => ValueChange::Write(Vec::new(), Some(now)),
            };
            (vec![change], had_counts)
        };
        let keys = vec![self.key(key)];
        match self.compare_and_set(keys.clone(), compute).await {
            Err(StoreError::Foreign { .. }) => {
                self.call(&scripts::DELETE, keys, Vec::new()).await?;
                Ok(true)
            }
            reset => reset,
        }
    }

    /// Blocks a key until the instant in `block`, or without an end if `block` is `Some(None)`. If
    /// `block` is `None`, lifts the key's block. Returns whether the key was blocked before.
    pub(crate) async fn set_block(
        &self,
        key: &[u8],
        block: Option<Option<Timestamp>>,
    ) -> Result<bool, StoreError> {
        let compute = |now: Timestamp, mut stored: Vec<StoredValue>| {
            let stored = stored.pop().unwrap_or_default();
            let was_blocked = stored.active_block(now).is_some();
            let spent_until = stored
                .remote_states()
                .map_or(now, |states| expires(&states));
            let keep_until = spent_until.max(stored.ledger_until());
            let assemble = |block| encode::assemble(block, &stored.ledger, &stored.encoded_states);
            let change = match block {
                None if stored.block.is_none() => ValueChange::Keep,
                None if keep_until <= now => ValueChange::Write(Vec::new(), Some(now)),
                None => ValueChange::Write(assemble(None), Some(keep_until)),
                Some(until) => {
                    let expires_at = until.map(|until| until.max(keep_until));
                    ValueChange::Write(assemble(Some(until)), expires_at)
                }
            };
            (vec![change], was_blocked)
        };
        self.compare_and_set(vec![self.key(key)], compute).await
    }
}

/// Returns whether converting `stored` to the limits of `charge` would lose all counts. If all
/// counts would be lost, a refund leaves the value unchanged, because the counts are still valid
/// for the limits under which they were stored.
fn loses_everything(charge: &Charge<'_>, stored: &StoredValue, now: Timestamp) -> bool {
    !stored.encoded_states.starts_with(&encode::head(charge))
        && stored
            .remote_states()
            .is_some_and(|states| expires(&states) > now)
        && stored.replay(charge, now, Effect::Look).states().1 <= now
}

/// Returns the value that encodes the states of `replay`, which started from `stored`. If the key
/// has an active block, the new value includes it.
fn updated_value(
    charge: &Charge<'_>,
    replay: &Replay<'_>,
    stored: &StoredValue,
    now: Timestamp,
) -> ValueChange {
    let (states, expires) = replay.states();
    let state = encode::value(charge, &states, now);
    let is_from_ahead = stored.is_from_ahead(charge, now);
    let ledger = if is_from_ahead {
        conversion::clamped_ledger(charge, stored, now)
    } else if stored.encoded_states.starts_with(&encode::head(charge)) {
        stored.ledger.clone()
    } else {
        conversion::converted_ledger(stored, now)
    };
    let keep_until = expires.max(decode::kept_until(&ledger));
    let block = stored.active_block(now);
    let expires_at = match block {
        None => Some(keep_until),
        Some(until) => until.map(|until| until.max(keep_until)),
    };
    ValueChange::Write(encode::assemble(block, &ledger, &state), expires_at)
}
