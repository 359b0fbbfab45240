//! Counts the servers that share this Redis, so that each server can compute its share of the
//! limits. A server uses its share while Redis is slow or unreachable.
//!
//! Every few seconds, each server writes its id into a sorted set. The score is the time of the
//! store's clock. Ids that are not refreshed are removed. While Redis does not reply, the last
//! known count stays in use.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU32, Ordering},
    },
    time::Duration,
};

use redis::Value;
use tidegate_core::FallbackShare;
use tokio::{runtime::Handle, task::AbortHandle, time::Instant};

use crate::{RedisStore, scripts, server_id::random_server_id};

/// Interval between heartbeats.
const HEARTBEAT_INTERVAL: Duration = Duration::from_secs(5);

/// Interval between attempts while Redis does not reply.
const RETRY_INTERVAL: Duration = Duration::from_millis(500);

/// How long a server is counted after its last heartbeat, according to the store's clock.
const EXPIRES_AFTER: Duration = Duration::from_secs(15);

/// How long a lower count must persist before it is used. After Redis has lost its data, the count
/// starts at one and grows until all servers have written their ids again.
const DECREASE_DELAY: Duration = Duration::from_secs(15);

/// For this time after its first heartbeat, a server uses at most the default share. Redis may have
/// lost its data before the first heartbeat. The other servers write their ids again within one
/// heartbeat interval; the rest of the startup period is a margin for late heartbeats.
const STARTUP_PERIOD: Duration = Duration::from_secs(15);

/// Upper bound of the count.
const MAX_SERVERS: u32 = 10_000;

/// Counts the servers that share one Redis. Dropping the value stops the counting.
#[derive(Debug)]
pub(super) struct Census {
    latest: Arc<LatestCount>,
    task: AbortHandle,
}

/// The latest count.
#[derive(Debug, Default)]
struct LatestCount {
    /// The server count in use; 0 if the servers have never been counted.
    servers: AtomicU32,
    /// Whether the startup period is over, so that the server may use more than the default share.
    is_settled: AtomicBool,
}

impl LatestCount {
    /// Records a newly counted number of servers, and returns the server count in use.
    fn record(&self, count: &mut SteadyCount, counted: u32, now: Instant) -> u32 {
        let servers = count.record(counted, now);
        self.servers.store(servers, Ordering::Relaxed);
        self.is_settled.store(count.is_settled(), Ordering::Relaxed);
        servers
    }

    /// Returns the server count in use; `None` if the servers have never been counted.
    fn servers(&self) -> Option<u32> {
        match self.servers.load(Ordering::Relaxed) {
            0 => None,
            servers => Some(servers),
        }
    }

    /// Returns this server's share. The result is the default share if the servers have never been
    /// counted, or if this server has just started and has counted only itself.
    fn share(&self) -> FallbackShare {
        match self.servers() {
            None => FallbackShare::default(),
            Some(1) if !self.is_settled.load(Ordering::Relaxed) => FallbackShare::default(),
            Some(servers) => FallbackShare::one_of(servers).unwrap_or_default(),
        }
    }
}

impl Census {
    /// Starts counting the servers whose keys have the same prefix as `store`, including this
    /// server.
    pub(super) fn start(store: RedisStore, runtime: &Handle) -> Self {
        let latest = Arc::<LatestCount>::default();
        let task = runtime
            .spawn(keep_counting(store, Arc::clone(&latest)))
            .abort_handle();
        Self { latest, task }
    }

    /// Returns the number of servers; `None` if they have never been counted.
    pub(super) fn servers(&self) -> Option<u32> {
        self.latest.servers()
    }

    /// Returns this server's share.
    pub(super) fn share(&self) -> FallbackShare {
        self.latest.share()
    }
}

impl Drop for Census {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn keep_counting(store: RedisStore, latest: Arc<LatestCount>) {
    let mut count = SteadyCount::default();
    let id = random_server_id();
    loop {
        let pause = match send_heartbeat(&store, &id).await {
            Some(counted) => {
                let before = count.servers;
                let servers = latest.record(&mut count, counted, Instant::now());
                if servers != before {
                    tracing::info!(
                        servers,
                        "number of Tidegate servers on this Redis changed; while Redis is unreachable, each server enforces its share of every limit"
                    );
                }
                HEARTBEAT_INTERVAL
            }
            None => {
                count.record_failure();
                RETRY_INTERVAL
            }
        };
        tokio::time::sleep(pause).await;
    }
}

/// Sends a heartbeat, and returns the number of live servers; `None` if Redis does not reply.
async fn send_heartbeat(store: &RedisStore, id: &str) -> Option<u32> {
    let expiry = EXPIRES_AFTER.as_millis().to_string();
    let args = vec![id.as_bytes().to_vec(), expiry.into_bytes()];
    let counted = store.call(&scripts::CENSUS, vec![store.servers_key()], args);
    match counted.await {
        Ok(Value::Int(counted)) => Some(u32::try_from(counted).unwrap_or(MAX_SERVERS)),
        Ok(_) => None,
        Err(problem) => {
            tracing::debug!("failed to count the Tidegate servers on this Redis: {problem}");
            None
        }
    }
}

/// The server count in use. A higher count is used immediately, but a lower count only after a
/// delay, so that a wrong count makes a share too small rather than too large.
#[derive(Debug, Default)]
struct SteadyCount {
    servers: u32,
    decrease: Option<PendingDecrease>,
    start: StartPhase,
}

/// The progress of the startup period, in which counts may be too low because Redis may have lost
/// its data.
#[derive(Clone, Copy, Debug, Default)]
enum StartPhase {
    #[default]
    /// The servers have not been counted since the start or since the last failure.
    Uncounted,
    /// The startup period is in progress: the servers have been counted without a failure since
    /// this instant.
    Counting(Instant),
    /// The startup period is over.
    Over,
}

/// A lower count that is not in use yet: the highest count since the count fell, and the time at
/// which it fell below the count in use.
#[derive(Debug)]
struct PendingDecrease {
    highest: u32,
    since: Instant,
}

impl SteadyCount {
    /// Records a count, and returns the server count in use.
    fn record(&mut self, counted: u32, now: Instant) -> u32 {
        let counted = counted.clamp(1, MAX_SERVERS);
        self.start = match self.start {
            StartPhase::Uncounted => StartPhase::Counting(now),
            StartPhase::Counting(since) if now.duration_since(since) >= STARTUP_PERIOD => {
                StartPhase::Over
            }
            start => start,
        };
        if counted >= self.servers {
            (self.servers, self.decrease) = (counted, None);
            return counted;
        }
        let decrease = self.decrease.get_or_insert(PendingDecrease {
            highest: counted,
            since: now,
        });
        decrease.highest = decrease.highest.max(counted);
        if now.duration_since(decrease.since) >= DECREASE_DELAY {
            self.servers = decrease.highest;
            self.decrease = None;
        }
        self.servers
    }

    /// Returns whether the startup period has ended, because the servers have been counted for its
    /// duration without a failure.
    fn is_settled(&self) -> bool {
        matches!(self.start, StartPhase::Over)
    }

    /// Records that Redis did not reply. Redis may have lost its data by the time it replies again,
    /// so two delays restart: the delay before a lower server count is used, and the startup period
    /// if it is not over.
    fn record_failure(&mut self) {
        self.decrease = None;
        if !self.is_settled() {
            self.start = StartPhase::Uncounted;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_higher_count_applies_at_once_and_a_lower_count_later() {
        let (start, mut count) = (Instant::now(), SteadyCount::default());
        let at = |secs: u64| start + Duration::from_secs(secs);
        assert_eq!(count.record(1, at(0)), 1);
        assert_eq!(count.record(50, at(5)), 50);
        // Redis was restarted and is empty: the servers register again, one after another.
        for (second, counted) in [(10, 1), (11, 20), (15, 45), (20, 50)] {
            assert_eq!(count.record(counted, at(second)), 50);
        }
        // Two servers have shut down.
        assert_eq!(count.record(48, at(30)), 50);
        assert_eq!(count.record(49, at(35)), 50);
        assert_eq!(count.record(48, at(45)), 49);
        assert_eq!(count.record(48, at(50)), 49);
        assert_eq!(count.record(48, at(65)), 48);
    }

    #[test]
    fn an_outage_restarts_the_wait_and_keeps_the_count() {
        let (start, mut count) = (Instant::now(), SteadyCount::default());
        let at = |secs: u64| start + Duration::from_secs(secs);
        assert_eq!(count.record(3, at(0)), 3);
        assert_eq!(count.record(1, at(5)), 3);
        count.record_failure();
        assert_eq!(count.record(1, at(100)), 3);
        assert_eq!(count.record(1, at(115)), 1);
    }

    /// If Redis has lost its data, the other servers may not have rewritten their ids yet, so a
    /// count of one is not trusted at first.
    #[test]
    fn a_server_that_starts_alone_has_the_default_share_at_first() {
        let (start, mut count, latest) = (
            Instant::now(),
            SteadyCount::default(),
            LatestCount::default(),
        );
        let at = |secs: u64| start + Duration::from_secs(secs);
        let mut share = |counted: Option<u32>, secs| {
            match counted {
                Some(counted) => {
                    latest.record(&mut count, counted, at(secs));
                }
                None => count.record_failure(),
            }
            latest.share()
        };
        let one_of = |servers| FallbackShare::one_of(servers).unwrap();
        assert_eq!(share(Some(1), 0), FallbackShare::default());
        assert_eq!(share(Some(1), 10), FallbackShare::default());
        assert_eq!(share(None, 11), FallbackShare::default());
        assert_eq!(share(Some(1), 12), FallbackShare::default());
        assert_eq!(share(Some(1), 26), FallbackShare::default());
        assert_eq!(share(Some(1), 27), one_of(1));
        assert_eq!(share(Some(3), 32), one_of(3));
        assert_eq!(share(None, 33), one_of(3));
        assert_eq!(share(Some(1), 34), one_of(3));
        assert_eq!(share(Some(1), 49), one_of(1));
    }

    #[test]
    fn extreme_counts_are_bounded() {
        let mut count = SteadyCount::default();
        assert_eq!(count.record(0, Instant::now()), 1);
        assert_eq!(count.record(u32::MAX, Instant::now()), MAX_SERVERS);
    }
}
