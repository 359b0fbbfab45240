//! Refunds in both stores, at instants that random traces seldom draw.

use tidegate_core::{Charge, Cost, Effect, MemoryBounds, MemoryStore, Settlement, Timestamp};
use tidegate_redis::RedisStore;

use crate::{START, limits, same, server::Server};

/// The refund ledger is dropped a minute after the last refund. A charge after that minute must not
/// count the old sums as refunds that it has seen.
#[tokio::test]
async fn a_charge_after_the_ledger_has_expired_gets_all_of_its_refund() {
    const SECOND: u64 = 1_000_000;
    let limits = limits(&["2/d"]);
    let charge = Charge::new(b"key", &limits, Cost::ONE).unwrap();
    let (charges, refund) = ([charge], [Settlement { unused: 1 }]);
    for server in Server::each() {
        let redis = RedisStore::connect(&server.url(), "tg").await.unwrap();
        let memory = MemoryStore::new(MemoryBounds::default());
        let at = |seconds: u64| Timestamp::from_micros(START + seconds * SECOND);
        let mut receipts = Vec::new();
        // The first charge is refunded long after it was made, the others within the same minute.
        for (reserved, settles) in [(0, false), (3_600, true), (4_000, false)] {
            let now = at(reserved);
            redis.pin_clock(now);
            if settles {
                let (here, there) = receipts.pop().unwrap();
                memory.settle(&charges, here, &refund, now);
                redis.settle(&charges, there, &refund).await.unwrap();
            }
            let (_, here) = memory.reserve(&charges, now, &mut Vec::new());
            let there = redis.reserve(&charges, &mut Vec::new()).await.unwrap().1;
            receipts.push((here, there));
        }
        for (here, there) in receipts {
            memory.settle(&charges, here, &refund, at(4_000));
            redis.settle(&charges, there, &refund).await.unwrap();
            same(&redis, &memory, &charges, (at(4_000), Effect::Look)).await;
        }
    }
}
