//! Counts the servers that share this Redis, so that each knows its share of the limits while Redis
//! is unreachable.
//!
//! Every few seconds each server writes its id into a sorted set, scored by the store's clock. Ids
//! that are not refreshed are removed. While Redis is unreachable, the last known count stays in
//! use.

use std::{
    hash::{BuildHasher, RandomState},
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
    },
    time::Duration,
};

use redis::Value;
use tidegate_core::Share;
use tokio::{runtime::Handle, task::AbortHandle, time::Instant};

use crate::{RedisStore, scripts};

/// Interval between heartbeats.
const BEAT_EVERY: Duration = Duration::from_secs(5);

/// Interval between attempts while Redis does not answer.
const TRY_AGAIN: Duration = Duration::from_millis(500);

/// How long after its last heartbeat a server is counted, by the store's clock.
const EXPIRES_AFTER: Duration = Duration::from_secs(15);

/// How long a lower count must persist before it is used. A Redis that has lost its data counts one
/// server, then two, until all have written their ids again.
const FEWER_AFTER: Duration = Duration::from_secs(15);

/// Upper bound of the count.
const MAX_SERVERS: u32 = 10_000;

/// Counts the servers on one Redis. Dropping it stops the counting.
#[derive(Debug)]
pub(super) struct Census {
    known: Arc<AtomicU32>,
    counting: AbortHandle,
}

impl Census {
    /// Starts counting this server among those whose keys in `store` have the same prefix.
    pub(super) fn start(store: RedisStore, runtime: &Handle) -> Self {
        let known = Arc::new(AtomicU32::new(0));
        let counting = runtime
            .spawn(keep(store, Arc::clone(&known)))
            .abort_handle();
        Self { known, counting }
    }

    /// Returns the number of servers; `None` if they have never been counted.
    pub(super) fn servers(&self) -> Option<u32> {
        match self.known.load(Ordering::Relaxed) {
            0 => None,
            known => Some(known),
        }
    }

    /// Returns the share of one server; the default share if the servers have never been counted.
    pub(super) fn share(&self) -> Share {
        let share = self.servers().and_then(Share::one_of);
        share.unwrap_or_default()
    }
}

impl Drop for Census {
    fn drop(&mut self) {
        self.counting.abort();
    }
}

async fn keep(store: RedisStore, known: Arc<AtomicU32>) {
    let mut count = Count::default();
    let seed = RandomState::new();
    let id = format!("{:016x}{:016x}", seed.hash_one(0), seed.hash_one(1));
    loop {
        let pause = match beat(&store, &id).await {
            Some(counted) => {
                let before = count.servers;
                let servers = count.note(counted, Instant::now());
                known.store(servers, Ordering::Relaxed);
                if servers != before {
                    tracing::info!(
                        servers,
                        "number of servers on this Redis changed; each enforces its share of every limit while Redis is unreachable"
                    );
                }
                BEAT_EVERY
            }
            None => {
                count.note_silence();
                TRY_AGAIN
            }
        };
        tokio::time::sleep(pause).await;
    }
}

/// Sends a heartbeat, and returns how many servers are alive; `None` if Redis does not answer.
async fn beat(store: &RedisStore, id: &str) -> Option<u32> {
    let expiry = EXPIRES_AFTER.as_millis().to_string();
    let args = vec![id.as_bytes().to_vec(), expiry.into_bytes()];
    let counted = store.call(&scripts::CENSUS, vec![store.servers_key()], args);
    match counted.await {
        Ok(Value::Int(counted)) => Some(u32::try_from(counted).unwrap_or(MAX_SERVERS)),
        Ok(_) => None,
        Err(problem) => {
            tracing::debug!("failed to count the servers on this Redis: {problem}");
            None
        }
    }
}

/// The number of servers in use. A higher count is used at once and a lower one after a delay, so
/// that errors make the shares too small rather than too large.
#[derive(Debug, Default)]
struct Count {
    servers: u32,
    fewer: Option<Fewer>,
}

/// The highest count since the counts became lower.
#[derive(Debug)]
struct Fewer {
    most: u32,
    since: Instant,
}

impl Count {
    /// Records a count, and returns the number of servers in use.
    fn note(&mut self, counted: u32, now: Instant) -> u32 {
        let counted = counted.clamp(1, MAX_SERVERS);
        if counted >= self.servers {
            *self = Self {
                servers: counted,
                fewer: None,
            };
            return counted;
        }
        let fewer = self.fewer.get_or_insert(Fewer {
            most: counted,
            since: now,
        });
        fewer.most = fewer.most.max(counted);
        if now.duration_since(fewer.since) >= FEWER_AFTER {
            self.servers = fewer.most;
            self.fewer = None;
        }
        self.servers
    }

    /// Records that Redis did not answer. When it does again, it may have lost its data, so the
    /// delay for lower counts restarts.
    fn note_silence(&mut self) {
        self.fewer = None;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_higher_count_applies_at_once_and_a_lower_count_later() {
        let (start, mut count) = (Instant::now(), Count::default());
        let at = |secs: u64| start + Duration::from_secs(secs);
        assert_eq!(count.note(1, at(0)), 1);
        assert_eq!(count.note(50, at(5)), 50);
        // Redis was restarted and is empty: the servers register again one after the other.
        for (second, counted) in [(10, 1), (11, 20), (15, 45), (20, 50)] {
            assert_eq!(count.note(counted, at(second)), 50);
        }
        // Two servers have shut down.
        assert_eq!(count.note(48, at(30)), 50);
        assert_eq!(count.note(49, at(35)), 50);
        assert_eq!(count.note(48, at(45)), 49);
        assert_eq!(count.note(48, at(50)), 49);
        assert_eq!(count.note(48, at(65)), 48);
    }

    #[test]
    fn an_outage_restarts_the_wait_and_keeps_the_count() {
        let (start, mut count) = (Instant::now(), Count::default());
        let at = |secs: u64| start + Duration::from_secs(secs);
        assert_eq!(count.note(3, at(0)), 3);
        assert_eq!(count.note(1, at(5)), 3);
        count.note_silence();
        assert_eq!(count.note(1, at(100)), 3);
        assert_eq!(count.note(1, at(115)), 1);
    }

    #[test]
    fn extreme_counts_are_bounded() {
        let mut count = Count::default();
        assert_eq!(count.note(0, Instant::now()), 1);
        assert_eq!(count.note(u32::MAX, Instant::now()), MAX_SERVERS);
    }
}
