//! Runs queries for top talkers, which are the keys with the most traffic. The admin listener and
//! the Redis protocol listener use this module. The module also parses the query parameters.

use std::{sync::Arc, time::Duration};

use tidegate_core::top::{MAX_TOP_KEYS, Measure, Period};
use tidegate_limiter::{
    ServerLimiter,
    top::{HistoryQuery, KeyHistory, OtherServers, PublishedHistory, TopError, TopList, TopQuery},
};
use tidegate_net::input::shown;
use tokio::sync::{Semaphore, SemaphorePermit};

/// The default number of rows.
const DEFAULT_COUNT: usize = 20;

/// The timeout for reading the counts that other servers have published in Redis. After the
/// timeout, the response includes only this server's requests.
const REDIS_TIMEOUT: Duration = Duration::from_secs(2);

/// The maximum number of concurrent queries. Each query occupies a thread and may need megabytes of
/// memory for other servers' counts, so the number of concurrent queries must be small.
const MAX_QUERIES: usize = 2;

static QUERIES: Semaphore = Semaphore::const_new(MAX_QUERIES);

/// Returns the query for a request without parameters.
pub(super) fn default_query() -> TopQuery {
    TopQuery {
        rule: None,
        by: Measure::default(),
        over: Period::default(),
        count: DEFAULT_COUNT,
    }
}

/// Parses the measure that is used to rank keys, or returns an error message.
pub(super) fn measure(text: &str) -> Result<Measure, String> {
    Measure::parse(text).ok_or_else(|| unknown(Measure::ALL.map(Measure::as_str), text))
}

/// Parses the period, or returns an error message.
pub(super) fn period(text: &str) -> Result<Period, String> {
    Period::parse(text).ok_or_else(|| unknown(Period::ALL.map(Period::as_str), text))
}

/// Parses the number of rows, or returns an error message.
pub(super) fn count(text: &str) -> Result<usize, String> {
    let count = text.parse().ok();
    count
        .filter(|count| (1..=MAX_TOP_KEYS).contains(count))
        .ok_or_else(|| {
            let text = shown(text);
            format!("must be a number from 1 to {MAX_TOP_KEYS}, got `{text}`")
        })
}

fn unknown<const N: usize>(accepted: [&str; N], text: &str) -> String {
    let (last, others) = accepted.split_last().unwrap_or((&"", &[]));
    let others = others.join(", ");
    format!("must be {others} or {last}, got `{}`", shown(text))
}

/// Runs `query` on a thread that serves no requests, because sorting the keys of many time slices
/// takes milliseconds.
pub(super) async fn answer(
    limiter: &Arc<ServerLimiter>,
    query: TopQuery,
) -> Result<TopList, TopFailure> {
    let permit = acquire_permit().await?;
    let others = with_timeout(limiter.top_of_others(&query)).await;
    let others = others.unwrap_or_else(OtherServers::unknown);
    let limiter = Arc::clone(limiter);
    compute(permit, move || limiter.top(&query, &others)).await
}

/// Returns the history of a key. The bounds on memory and time are the same as for [`answer`].
pub(super) async fn history(
    limiter: &Arc<ServerLimiter>,
    query: HistoryQuery,
) -> Result<KeyHistory, TopFailure> {
    let permit = acquire_permit().await?;
    let others = with_timeout(limiter.history_of_others(&query)).await;
    let others = others.unwrap_or_else(PublishedHistory::unknown);
    let limiter = Arc::clone(limiter);
    compute(permit, move || limiter.key_history(&query, &others)).await
}

/// Waits while [`MAX_QUERIES`] other queries are running.
pub(super) async fn acquire_permit() -> Result<SemaphorePermit<'static>, TopFailure> {
    let permit = QUERIES.acquire().await;
    permit.map_err(|_| TopFailure::ShuttingDown)
}

/// Waits at most [`REDIS_TIMEOUT`] for `read`, which reads other servers' counts. After the
/// timeout, returns an error message.
pub(super) async fn with_timeout<T>(read: impl Future<Output = T>) -> Result<T, String> {
    let read = tokio::time::timeout(REDIS_TIMEOUT, read).await;
    read.map_err(|_| "Redis did not answer within 2 seconds".to_owned())
}

/// Runs `query` on a thread that serves no requests. If the client disconnects, the thread still
/// needs memory for the counts until the query is complete. Therefore, the thread also holds
/// `permit` until the query is complete.
async fn compute<T: Send + 'static>(
    permit: SemaphorePermit<'static>,
    query: impl FnOnce() -> Result<T, TopError> + Send + 'static,
) -> Result<T, TopFailure> {
    let answered = tokio::task::spawn_blocking(move || {
        let _permit = permit;
        query()
    });
    let answered = answered.await;
    let answered = answered.map_err(|_| TopFailure::ShuttingDown)?;
    answered.map_err(TopFailure::Top)
}

/// The reason why a query failed.
#[derive(Debug, thiserror::Error)]
pub(super) enum TopFailure {
    #[error(transparent)]
    Top(TopError),
    #[error("the server is shutting down")]
    ShuttingDown,
}

#[cfg(test)]
mod tests {
    use tidegate::Clock;
    use tidegate_core::{MemoryBounds, MemoryStore, RuleSet, Timestamp, top::TopBounds};

    use super::*;

    #[test]
    fn a_query_waits_while_others_are_answered() {
        let store = MemoryStore::new(MemoryBounds::default());
        let limiter = ServerLimiter::new(
            RuleSet::default(),
            store,
            Clock::manual(Timestamp::from_micros(1_700_000_000_000_000)),
        );
        let limiter = Arc::new(limiter.with_top(Some(TopBounds::default())));
        let mut runtime = tokio::runtime::Builder::new_current_thread();
        // The runtime has only one blocking thread, so the blocking tasks run one after another.
        let runtime = runtime
            .max_blocking_threads(1)
            .enable_time()
            .build()
            .unwrap();
        runtime.block_on(async {
            let permits: Vec<_> = (0..MAX_QUERIES).map(|_| QUERIES.try_acquire()).collect();
            let query = tokio::spawn(async move { answer(&limiter, default_query()).await });
            for _ in 0..3 {
                tokio::task::yield_now().await;
                tokio::task::spawn_blocking(|| ()).await.unwrap();
            }
            assert!(!query.is_finished());
            drop(permits);
            assert!(query.await.unwrap().is_ok());
        });
    }
}
