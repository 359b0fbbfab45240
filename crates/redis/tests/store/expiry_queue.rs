//! Compares the expiry queue of reservations with a simple reference model.

use std::collections::BTreeMap;

use proptest::{prelude::*, test_runner::TestRunner};
use tidegate_core::{Span, Timestamp};
use tidegate_redis::{ClaimedReservation, ExpiryQueueEntry, RedisStore};
use tokio::runtime::Runtime;

use crate::{START, server::Server, support::RedisServer};

/// How long a claimed reservation is not available, in milliseconds.
const LEASE: u64 = 2_000;

/// The maximum number of reservations in one claim.
const MAX_CLAIM: usize = 64;

#[derive(Clone, Debug)]
enum Step {
    /// Removes `ended`, and writes reservations with these numbers and delays in milliseconds.
    Write {
        ended: Vec<u8>,
        written: Vec<(u8, u64)>,
    },
    Claim,
    /// Releases the reservation with this number.
    Release(u8),
    /// Advances the clock by a number of milliseconds.
    Pass(u64),
}

fn step() -> impl Strategy<Value = Step> {
    let ended = prop::collection::vec(0..100_u8, 0..4);
    let written = prop::collection::vec((0..100_u8, 0..10_000_u64), 0..40);
    prop_oneof![
        2 => (ended, written).prop_map(|(ended, written)| Step::Write { ended, written }),
        2 => Just(Step::Claim),
        1 => (0..100_u8).prop_map(Step::Release),
        2 => (0..3_000_u64).prop_map(Step::Pass),
    ]
}

/// A reservation in the reference model.
struct Modelled {
    /// The time from which on any server may end it.
    due: u64,
    /// The time from which on it can be claimed.
    available: u64,
    value: Vec<u8>,
}

/// The reference model.
#[derive(Default)]
struct Model(BTreeMap<u8, Modelled>);

impl Model {
    /// Returns the reservations that are available first, in order, with the order of simultaneous
    /// ones determined by their IDs.
    fn claim(&mut self, now: u64) -> Vec<ClaimedReservation> {
        let available = self
            .0
            .iter_mut()
            .filter(|(_, entry)| entry.available <= now);
        let mut available: Vec<_> = available.collect();
        available.sort_by_key(|(number, entry)| (entry.available, **number));
        let claimed = available.into_iter().take(MAX_CLAIM);
        let claimed = claimed.map(|(number, entry)| {
            entry.available = now + LEASE;
            ClaimedReservation {
                id: [*number; 16],
                overdue: Span::from_millis(now - entry.due),
                value: entry.value.clone(),
            }
        });
        claimed.collect()
    }
}

fn entry(number: u8, delay: u64, version: usize) -> ExpiryQueueEntry {
    ExpiryQueueEntry {
        id: [number; 16],
        delay: Span::from_millis(delay),
        value: version.to_string().into_bytes(),
    }
}

fn run(runtime: &Runtime, store: &RedisStore, steps: &[Step]) -> Result<(), TestCaseError> {
    let store = store.unpinned();
    let (mut now, mut model) = (START / 1_000, Model::default());
    for (version, step) in steps.iter().enumerate() {
        store.pin_clock(Timestamp::from_micros(now * 1_000));
        match step {
            Step::Write { ended, written } => {
                let ids: Vec<[u8; 16]> = ended.iter().map(|number| [*number; 16]).collect();
                let entries = written.iter();
                let entries: Vec<ExpiryQueueEntry> = entries
                    .map(|(number, delay)| entry(*number, *delay, version))
                    .collect();
                let written_to = runtime.block_on(store.write_expiry_queue(&ids, &entries));
                prop_assert_eq!(written_to, Ok(0));
                model.0.retain(|number, _| !ended.contains(number));
                for ((number, delay), entry) in written.iter().zip(entries) {
                    let (due, value) = (now + delay, entry.value);
                    let available = due;
                    model.0.insert(
                        *number,
                        Modelled {
                            due,
                            available,
                            value,
                        },
                    );
                }
            }
            Step::Claim => {
                let claimed = runtime.block_on(store.claim_expired()).unwrap();
                prop_assert_eq!(claimed, model.claim(now), "step {}", version);
            }
            // Only a server that has claimed a reservation releases it.
            Step::Release(number) => {
                if let Some(entry) = model.0.get_mut(number)
                    && entry.due <= now
                {
                    entry.available = now;
                    let released = runtime.block_on(store.release_claims(&[[*number; 16]]));
                    prop_assert_eq!(released, Ok(()));
                }
            }
            Step::Pass(time) => now += time,
        }
    }
    Ok(())
}

fn compare(runtime: &Runtime, store: &RedisStore, empty: impl Fn()) {
    let config = ProptestConfig {
        cases: 60,
        failure_persistence: None,
        ..ProptestConfig::default()
    };
    let steps = prop::collection::vec(step(), 1..30);
    let result = TestRunner::new(config).run(&steps, |steps| {
        empty();
        run(runtime, store, &steps)
    });
    if let Err(failure) = result {
        panic!("{failure}");
    }
}

#[test]
fn the_expiry_queue_equals_the_model() {
    let runtime = crate::runtime();
    for server in Server::each() {
        let store = runtime.block_on(RedisStore::connect(&server.url(), "tg"));
        compare(&runtime, &store.unwrap(), || {
            server.command(&["FLUSHALL"]);
        });
    }
}

#[test]
fn the_expiry_queue_equals_the_model_on_a_cluster() {
    let (server, runtime) = (RedisServer::slotted("redis-server"), crate::runtime());
    let store = runtime.block_on(crate::cross_slot::store(&server.url()));
    compare(&runtime, &store, || drop(server.ask(&["FLUSHALL"])));
}

/// A claim returns at most 32 KiB, so that decisions in the same batch do not wait long. A larger
/// reservation is claimed alone.
#[tokio::test]
async fn a_claim_is_bounded_in_bytes() {
    let server = Server::redis();
    let store = RedisStore::connect(&server.url(), "tg").await.unwrap();
    store.pin_clock(Timestamp::from_micros(START));
    let sizes = [10, 20, 40, 10, 22].map(|kilobytes| kilobytes * 1_024);
    let entries = (0..).zip(sizes).map(|(number, size)| ExpiryQueueEntry {
        value: vec![number; size],
        ..entry(number, 0, 0)
    });
    let entries: Vec<ExpiryQueueEntry> = entries.collect();
    assert_eq!(store.write_expiry_queue(&[], &entries).await, Ok(0));
    for expected in [&[0, 1][..], &[2], &[3, 4], &[]] {
        let claimed = store.claim_expired().await.unwrap();
        let claimed: Vec<u8> = claimed.into_iter().map(|claimed| claimed.id[0]).collect();
        assert_eq!(claimed, expected);
    }
}

/// The expiry queue of a fleet that was shut down must not stay in Redis forever.
#[tokio::test]
async fn the_expiry_queue_expires_a_minute_after_its_last_reservation() {
    let server = Server::redis();
    let store = RedisStore::connect(&server.url(), "tg").await.unwrap();
    for (number, delay) in [(0, 600_000), (1, 1_000)] {
        let written = store
            .write_expiry_queue(&[], &[entry(number, delay, 0)])
            .await;
        assert_eq!(written, Ok(0));
        for key in ["tg#{reservations}", "tg#{reservations}:due"] {
            let left: u64 = server.command(&["PTTL", key]).parse().unwrap();
            assert!((650_000..=660_000).contains(&left), "{key}: {left} ms");
        }
    }
    let ended = [[0; 16], [1; 16]];
    assert_eq!(store.write_expiry_queue(&ended, &[]).await, Ok(0));
    assert_eq!(server.command(&["KEYS", "*"]), "");
}

#[tokio::test]
async fn a_full_expiry_queue_takes_only_changes() {
    let server = Server::redis();
    let store = RedisStore::connect(&server.url(), "tg").await.unwrap();
    let written = store.write_expiry_queue(&[], &[entry(0, 1_000, 0)]).await;
    assert_eq!(written, Ok(0));
    let fill = "for n = 2, 1000000 do redis.call('ZADD', KEYS[1], n, n) end";
    server.command(&["EVAL", fill, "1", "tg#{reservations}:due"]);
    let entries = [entry(0, 2_000, 1), entry(1, 1_000, 1)];
    assert_eq!(store.write_expiry_queue(&[], &entries).await, Ok(1));
    assert_eq!(
        store.write_expiry_queue(&[[0; 16]], &entries[1..]).await,
        Ok(0)
    );
    assert_eq!(server.command(&["HLEN", "tg#{reservations}"]), "1");
}
