//! Redis Sentinel: finds the current primary, and notices its replacement after a failover.
//!
//! A Sentinel that was paused or partitioned may report a former primary. Each configuration has an
//! epoch, and a majority of the Sentinels has voted for this epoch. Therefore, a configuration with
//! a higher epoch is always newer, whichever Sentinel reports it.
//!
//! - A working primary is replaced if a Sentinel reports a higher epoch. A working primary is also
//!   replaced if a majority of the *configured* Sentinels names another server with at least the
//!   same epoch. Missing replies and a stale minority have no effect.
//! - If no primary is known, the server with the highest epoch wins. If several servers have the
//!   same epoch, the server that most Sentinels name wins. With no known primary, a single reply is
//!   sufficient, so that a server can start even if most Sentinels are down.

use std::{
    sync::atomic::{AtomicU64, Ordering},
    time::Duration,
};

use futures_util::stream::{FuturesUnordered, StreamExt};
use redis::{Pipeline, Value};
use tokio::time::MissedTickBehavior;

use super::{
    error::ConnectError,
    handshake::{self, as_text},
    settings::{Address, RedisSettings},
};

/// Interval at which the Sentinels are queried for the primary. Polling is necessary because a
/// former primary that is partitioned from the Sentinels still serves requests, and does not know
/// that it has been replaced.
const QUERY_INTERVAL: Duration = Duration::from_secs(1);

/// Timeout of a query to one Sentinel, including the time to connect. The timeout is independent of
/// the decision timeout, because no decision waits for a Sentinel.
const SENTINEL_TIMEOUT: Duration = Duration::from_secs(1);

/// The configured Sentinels of one primary.
#[derive(Debug)]
pub(super) struct Sentinels {
    addresses: Vec<Address>,
    /// The primary's name in the Sentinel configuration.
    primary: String,
    settings: RedisSettings,
    /// The epoch of the configuration in use. The epoch outlives the connection to the primary, so
    /// that after a disconnect a stale Sentinel cannot restore an older configuration.
    epoch: AtomicU64,
}

/// The report of one Sentinel.
#[derive(Clone, Debug, PartialEq, Eq)]
struct SentinelReport {
    address: Address,
    /// The configuration epoch; zero if the Sentinel does not report an epoch.
    epoch: u64,
}

impl Sentinels {
    pub(super) fn new(addresses: Vec<Address>, primary: String, settings: &RedisSettings) -> Self {
        Self {
            addresses,
            primary,
            settings: RedisSettings {
                timeout: SENTINEL_TIMEOUT,
                connect_timeout: SENTINEL_TIMEOUT,
                ..settings.clone()
            },
            epoch: AtomicU64::new(0),
        }
    }

    /// Finds the primary to connect to. Returns as soon as a majority of the Sentinels agrees. If
    /// no majority agrees, returns once all Sentinels have replied or timed out.
    pub(super) async fn find_primary(&self) -> Result<Address, ConnectError> {
        let known = self.epoch.load(Ordering::Relaxed);
        let (reports, problem) = self
            .collect_reports(|reports| self.has_agreement(reports, known))
            .await;
        match elect(&reports, self.addresses.len(), known) {
            Some(elected) => {
                self.epoch.store(elected.epoch, Ordering::Relaxed);
                Ok(elected.address)
            }
            None => Err(ConnectError::NoPrimary {
                primary: self.primary.clone(),
                problem: problem.unwrap_or_else(|| {
                    format!(
                        "all reports of the Sentinels are older than configuration epoch {known}"
                    )
                }),
            }),
        }
    }

    /// Completes when another server must be used instead of the primary at `address`.
    pub(super) async fn wait_until_replaced(&self, address: &Address) {
        let mut interval = tokio::time::interval(QUERY_INTERVAL);
        interval.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            interval.tick().await;
            let (reports, _) = self.collect_reports(|_| false).await;
            let current = SentinelReport {
                address: address.clone(),
                epoch: self.epoch.load(Ordering::Relaxed),
            };
            if is_replaced(&reports, self.addresses.len(), &current) {
                return;
            }
            // The same primary may have been elected again, which raises the epoch.
            let own = reports.iter().filter(|report| report.address == *address);
            let latest = own.map(|report| report.epoch).max().unwrap_or(0);
            self.epoch.fetch_max(latest, Ordering::Relaxed);
        }
    }

    /// Returns whether a majority of the Sentinels names the same server, with an epoch that is not
    /// below `known`.
    fn has_agreement(&self, reports: &[SentinelReport], known: u64) -> bool {
        reports.iter().any(|report| {
            report.epoch >= known && has_majority(reports, report, self.addresses.len())
        })
    }

    /// Collects the reports of the Sentinels. If some Sentinels return no report, also returns the
    /// error of one of these Sentinels. Returns early if `enough` returns true for the reports so
    /// far.
    async fn collect_reports(
        &self,
        enough: impl Fn(&[SentinelReport]) -> bool,
    ) -> (Vec<SentinelReport>, Option<String>) {
        let queries = self.addresses.iter().map(|sentinel| self.query(sentinel));
        let mut queries: FuturesUnordered<_> = queries.collect();
        let (mut reports, mut problem) = (Vec::new(), None);
        while let Some(result) = queries.next().await {
            match result {
                Ok(report) => reports.push(report),
                Err(error) => problem = Some(error),
            }
            if enough(&reports) {
                break;
            }
        }
        (reports, problem)
    }

    async fn query(&self, sentinel: &Address) -> Result<SentinelReport, String> {
        let replies = tokio::time::timeout(SENTINEL_TIMEOUT, self.send_query(sentinel));
        let replies = replies
            .await
            .unwrap_or_else(|_| Err(format!("{sentinel} did not answer within a second")))?;
        parse_report(sentinel, &replies)
    }

    async fn send_query(&self, sentinel: &Address) -> Result<Vec<Value>, String> {
        let login = &self.settings.sentinel_login;
        let connected = handshake::open(&self.settings, sentinel, login, || {}).await;
        let mut connection = connected.map_err(|error| error.to_string())?;
        // During a failover, the reply to the first command already names the new primary. The
        // reply to the second command still names the old primary, but with the new epoch.
        // Therefore the address is taken from the first reply, and the epoch from the second.
        let mut pipeline = Pipeline::with_capacity(2);
        for subcommand in ["GET-MASTER-ADDR-BY-NAME", "MASTER"] {
            pipeline.cmd("SENTINEL").arg(subcommand).arg(&self.primary);
        }
        let replies = connection.send_packed_commands(&pipeline, 0, 2).await;
        replies.map_err(|error| format!("{sentinel}: {error}"))
    }
}

/// Parses the replies of a Sentinel.
fn parse_report(sentinel: &Address, replies: &[Value]) -> Result<SentinelReport, String> {
    let named = match replies.first() {
        Some(Value::Array(parts)) => match parts.as_slice() {
            [host, port] => as_text(host).zip(as_text(port).and_then(|port| port.parse().ok())),
            _ => None,
        },
        Some(Value::Nil) => return Err(format!("{sentinel} has no primary of this name")),
        Some(Value::ServerError(error)) => {
            let details = error.details().unwrap_or_default();
            return Err(format!("{sentinel}: {} {details}", error.code()));
        }
        _ => None,
    };
    let (host, port) = named.ok_or_else(|| format!("{sentinel} sent an unexpected reply"))?;
    Ok(SentinelReport {
        address: sentinel.with_endpoint(&host, port),
        epoch: replies.get(1).and_then(parse_epoch).unwrap_or(0),
    })
}

/// Returns the `config-epoch` in the reply to `SENTINEL MASTER`. The reply is a map, or an array of
/// alternating names and values.
fn parse_epoch(fields: &Value) -> Option<u64> {
    let is_epoch = |name: &Value| as_text(name).as_deref() == Some("config-epoch");
    let value = match fields {
        Value::Map(pairs) => pairs.iter().find(|(name, _)| is_epoch(name))?.1.clone(),
        Value::Array(parts) => {
            let mut pairs = parts.chunks_exact(2);
            pairs.find(|pair| is_epoch(&pair[0]))?[1].clone()
        }
        _ => return None,
    };
    as_text(&value)?.parse().ok()
}

/// Chooses the report to use if no primary is known: the report with the highest epoch. Among
/// reports with equal epochs, chooses the server that most Sentinels report. A report with an epoch
/// below `known` is used only if a majority of the `configured` Sentinels agrees with it. A
/// majority can report a lower epoch after an operator has reconfigured all Sentinels.
fn elect(reports: &[SentinelReport], configured: usize, known: u64) -> Option<SentinelReport> {
    let votes = |report: &&SentinelReport| {
        let same = reports.iter().filter(|other| other == report);
        (report.epoch, same.count())
    };
    // The order is reversed because `max_by_key` returns the last of several equal reports, and the
    // earliest report should win.
    let current = reports.iter().filter(|report| report.epoch >= known).rev();
    let majority = || {
        reports
            .iter()
            .find(|report| has_majority(reports, report, configured))
    };
    current.max_by_key(votes).or_else(majority).cloned()
}

/// Returns whether another server must be used instead of the `current` primary, which still works.
fn is_replaced(reports: &[SentinelReport], configured: usize, current: &SentinelReport) -> bool {
    let mut others = reports
        .iter()
        .filter(|report| report.address != current.address);
    others.any(|report| {
        report.epoch > current.epoch
            || (report.epoch == current.epoch && has_majority(reports, report, configured))
    })
}

/// Returns whether a majority of the `configured` Sentinels names the server of `report`, with an
/// epoch that is not below the epoch of `report`.
fn has_majority(reports: &[SentinelReport], report: &SentinelReport, configured: usize) -> bool {
    let same = reports
        .iter()
        .filter(|other| other.address == report.address && other.epoch >= report.epoch);
    same.count() > configured / 2
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reports(of: &[(&str, u64)]) -> Vec<SentinelReport> {
        let report = |(host, epoch): &(&str, u64)| SentinelReport {
            address: Address::parse(&format!("redis://{host}:6379")).unwrap().0,
            epoch: *epoch,
        };
        of.iter().map(report).collect()
    }

    fn replaces(current: (&str, u64), of: &[(&str, u64)]) -> bool {
        is_replaced(&reports(of), 3, &reports(&[current])[0])
    }

    fn elected(of: &[(&str, u64)], known: u64) -> Option<String> {
        elect(&reports(of), 3, known).map(|report| report.address.host)
    }

    #[test]
    fn neither_a_minority_nor_a_stale_majority_replaces_a_working_primary() {
        for of in [
            &[][..],
            &[("old", 4)],
            &[("other", 5)],
            &[("old", 4), ("old", 4)],
            &[("old", 4), ("old", 4), ("now", 5)],
            &[("other", 5), ("now", 5), ("now", 5)],
            &[("x", 5), ("y", 5), ("z", 5)],
            // A majority of the reports, but not of the three configured Sentinels.
            &[("other", 5), ("now", 4)],
            &[("old", 4), ("old", 4), ("old", 4)],
        ] {
            assert!(!replaces(("now", 5), of), "{of:?}");
        }
    }

    /// A majority has voted for each epoch, so a single report of a higher epoch is sufficient.
    #[test]
    fn one_report_with_a_higher_epoch_replaces_a_working_primary() {
        for of in [
            &[("new", 6)][..],
            &[("new", 6), ("now", 5), ("now", 5)],
            &[("old", 4), ("old", 4), ("new", 6)],
            &[("x", 5), ("new", 6), ("now", 5)],
        ] {
            assert!(replaces(("now", 5), of), "{of:?}");
        }
        // The same primary with a higher epoch is not replaced.
        assert!(!replaces(("now", 5), &[("now", 6)]));
    }

    /// An operator has reconfigured the Sentinels. A majority now reports another primary with the
    /// same epoch, because reconfiguration does not increase the epoch.
    #[test]
    fn a_majority_with_an_equal_epoch_replaces_a_working_primary() {
        for of in [
            &[("other", 5), ("other", 5)][..],
            &[("other", 5), ("other", 5), ("now", 5)],
            &[("other", 5), ("other", 6)],
        ] {
            assert!(replaces(("now", 5), of), "{of:?}");
        }
    }

    #[test]
    fn the_first_primary_has_the_highest_epoch_then_the_most_votes() {
        assert_eq!(elected(&[("a", 0)], 0).as_deref(), Some("a"));
        let of = [("a", 4), ("a", 4), ("b", 5)];
        assert_eq!(elected(&of, 0).as_deref(), Some("b"));
        let of = [("a", 4), ("b", 4), ("b", 4)];
        assert_eq!(elected(&of, 0).as_deref(), Some("b"));
        assert_eq!(elected(&[("a", 4), ("b", 4)], 0).as_deref(), Some("a"));
        assert_eq!(elected(&[], 0), None);
    }

    #[test]
    fn an_older_report_needs_a_majority() {
        assert_eq!(elected(&[("old", 4)], 5), None);
        assert_eq!(
            elected(&[("old", 4), ("now", 5)], 5).as_deref(),
            Some("now")
        );
        let reset = [("new", 0), ("new", 0)];
        assert_eq!(elected(&reset, 5).as_deref(), Some("new"));
    }

    #[test]
    fn replies_of_both_protocols_are_parsed() {
        let bulk = |text: &str| Value::BulkString(text.as_bytes().to_vec());
        let (sentinel, _) = Address::parse("redis://10.0.0.9:26379").unwrap();
        let named = Value::Array(vec![bulk("10.0.0.1"), bulk("6379")]);
        let pair = (bulk("config-epoch"), bulk("7"));
        let fields = [
            (
                Value::Map(vec![(bulk("name"), bulk("tide")), pair.clone()]),
                7,
            ),
            (
                Value::Array(vec![bulk("name"), bulk("tide"), pair.0, pair.1]),
                7,
            ),
            (Value::Nil, 0),
        ];
        for (fields, epoch) in fields {
            let found = parse_report(&sentinel, &[named.clone(), fields]).unwrap();
            assert_eq!(
                (found.address, found.epoch),
                (sentinel.with_endpoint("10.0.0.1", 6_379), epoch)
            );
        }
        for wrong in [
            &[][..],
            &[Value::Nil],
            &[Value::Array(vec![bulk("h"), bulk("x")])],
        ] {
            assert!(parse_report(&sentinel, wrong).is_err());
        }
    }
}
