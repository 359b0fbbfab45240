//! How many servers share this Redis, so that each knows its share of the limits while Redis is out of reach.
//!
//! Every server writes its id into a sorted set, with the time of the store's clock, every few seconds; ids that were
//! not written for a while are removed. The last known count is kept while Redis is away.

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

/// How often a server says that it lives.
const BEAT_EVERY: Duration = Duration::from_secs(5);

/// How often it tries while Redis does not answer.
const TRY_AGAIN: Duration = Duration::from_millis(500);

/// How long after its last heartbeat a server counts, by the store's clock.
const EXPIRES_AFTER: Duration = Duration::from_secs(15);

/// How long fewer servers must have been counted before that is believed: a Redis that has lost its data counts one
/// server, then two, until all have written their ids again.
const FEWER_AFTER: Duration = Duration::from_secs(15);

/// More servers than this are counted as this many.
const MAX_SERVERS: u32 = 10_000;

/// Counts the servers on one Redis; the counting ends when it is dropped.
#[derive(Debug)]
pub(super) struct Census {
    known: Arc<AtomicU32>,
    counting: AbortHandle,
}

impl Census {
    /// Counts this server among those whose keys in `store` have the same prefix.
    pub(super) fn start(store: RedisStore, runtime: &Handle) -> Self {
        let known = Arc::new(AtomicU32::new(0));
        let counting = runtime
            .spawn(keep(store, Arc::clone(&known)))
            .abort_handle();
        Self { known, counting }
    }

    /// How many servers there are; `None` while they have never been counted.
    pub(super) fn servers(&self) -> Option<u32> {
        match self.known.load(Ordering::Relaxed) {
            0 => None,
            known => Some(known),
        }
    }

    /// The share of one of them; the default one while they have never been counted.
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
                        "servers on this Redis counted; each decides on its part of every limit while Redis is out of reach"
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

/// Says that this server lives, and answers how many do; `None` if Redis does not answer.
async fn beat(store: &RedisStore, id: &str) -> Option<u32> {
    let expiry = EXPIRES_AFTER.as_millis().to_string();
    let args = vec![id.as_bytes().to_vec(), expiry.into_bytes()];
    let counted = store.call(&scripts::CENSUS, vec![store.servers_key()], args);
    match counted.await {
        Ok(Value::Int(counted)) => Some(u32::try_from(counted).unwrap_or(MAX_SERVERS)),
        Ok(_) => None,
        Err(problem) => {
            tracing::debug!("the servers on this Redis cannot be counted: {problem}");
            None
        }
    }
}

/// What is known of the number of servers: more are believed at once, fewer after a while, so that a mistake makes the
/// shares too small rather than too large.
#[derive(Debug, Default)]
struct Count {
    servers: u32,
    fewer: Option<Fewer>,
}

/// The most that were counted since fewer were.
#[derive(Debug)]
struct Fewer {
    most: u32,
    since: Instant,
}

impl Count {
    /// Notes that so many were counted, and answers how many there are.
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

    /// Notes that Redis did not answer: what it says next may be said by one that has lost its data.
    fn note_silence(&mut self) {
        self.fewer = None;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn more_servers_are_believed_at_once_and_fewer_after_a_while() {
        let (start, mut count) = (Instant::now(), Count::default());
        let at = |secs: u64| start + Duration::from_secs(secs);
        assert_eq!(count.note(1, at(0)), 1);
        assert_eq!(count.note(50, at(5)), 50);
        // Redis was restarted and is empty: the servers come back one after the other.
        for (second, counted) in [(10, 1), (11, 20), (15, 45), (20, 50)] {
            assert_eq!(count.note(counted, at(second)), 50);
        }
        // Two have ended.
        assert_eq!(count.note(48, at(30)), 50);
        assert_eq!(count.note(49, at(35)), 50);
        assert_eq!(count.note(48, at(45)), 49);
        assert_eq!(count.note(48, at(50)), 49);
        assert_eq!(count.note(48, at(65)), 48);
    }

    #[test]
    fn an_outage_begins_the_wait_anew_and_keeps_what_is_known() {
        let (start, mut count) = (Instant::now(), Count::default());
        let at = |secs: u64| start + Duration::from_secs(secs);
        assert_eq!(count.note(3, at(0)), 3);
        assert_eq!(count.note(1, at(5)), 3);
        count.note_silence();
        assert_eq!(count.note(1, at(100)), 3);
        assert_eq!(count.note(1, at(115)), 1);
    }

    #[test]
    fn hostile_counts_are_bounded() {
        let mut count = Count::default();
        assert_eq!(count.note(0, Instant::now()), 1);
        assert_eq!(count.note(u32::MAX, Instant::now()), MAX_SERVERS);
    }
}
