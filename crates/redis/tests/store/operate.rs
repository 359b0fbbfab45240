//! Tests the operator commands, and checks which keys remain on the server.

use tidegate_core::{
    Algorithm, BlockNote, BlockedRule, Charge, Cost, Counting, Decision, Effect, Limit, Limits,
    Rate, RefillMode, Span, Timestamp, Window, bounds, former_key,
};
use tidegate_redis::{RedisStore, ScanPosition};

use crate::{START, limits, server::Server};

/// The script reads all states before it writes any state, so if a key occurred twice, one of its
/// two charges would be lost.
#[tokio::test]
async fn one_key_twice_in_one_call_is_refused() {
    for server in Server::each() {
        let store = RedisStore::connect(&server.url(), "tg").await.unwrap();
        let limits = limits(&["2/d"]);
        let charge = |key| Charge::new(key, &limits, Cost::ONE).unwrap();
        let repeated = [charge(b"a"), charge(b"b"), charge(b"a")];
        let mut outcomes = Vec::new();
        let decision = store
            .check(&repeated, Effect::Charge, &mut outcomes)
            .await
            .unwrap();
        assert_eq!((decision, outcomes.len()), (Decision::UNDECIDABLE, 0));
        let (decision, receipt) = store.reserve(&repeated, &mut outcomes).await.unwrap();
        assert_eq!(decision, Decision::UNDECIDABLE);
        assert!(receipt.is_empty());
        store
            .check(&repeated[..2], Effect::Look, &mut outcomes)
            .await
            .unwrap();
        let remaining: Vec<u64> = outcomes.iter().map(|outcome| outcome.remaining).collect();
        assert_eq!(remaining, [2, 2], "nothing is charged");
    }
}

#[tokio::test]
async fn blocks_are_listed_enforced_and_lifted() {
    for server in Server::each() {
        let store = RedisStore::connect(&server.url(), "tg").await.unwrap();
        let limits = limits(&["2/d"]);
        let charge = Charge::new(b"user:1", &limits, Cost::ONE).unwrap();
        let mut outcomes = Vec::new();
        store
            .check(&[charge], Effect::Charge, &mut outcomes)
            .await
            .unwrap();
        assert!(store.block(b"user:1", None, "abuse").await.unwrap());
        assert!(
            store
                .block(b"user:2", Some(Span::from_secs(60)), "")
                .await
                .unwrap()
        );

        let mut blocks = store.blocks().await.unwrap();
        blocks.sort_by(|a, b| a.key.cmp(&b.key));
        assert_eq!(
            (&*blocks[0].key, blocks[0].until, &*blocks[0].reason),
            (&b"user:1"[..], None, "abuse")
        );
        assert!(blocks.len() == 2 && blocks[1].until.is_some());
        assert_eq!(
            store.block_on(b"user:1").await.unwrap().as_ref(),
            blocks.first()
        );

        // A reset keeps the block, and lifting the block keeps the counts.
        let blocked = store
            .check(&[charge], Effect::Charge, &mut outcomes)
            .await
            .unwrap();
        assert!(
            matches!(blocked, Decision::Blocked { until: None, .. }),
            "{blocked:?}"
        );
        assert!(store.unblock(b"user:1").await.unwrap());
        assert!(!store.unblock(b"user:1").await.unwrap());
        store
            .check(&[charge], Effect::Look, &mut outcomes)
            .await
            .unwrap();
        assert_eq!(outcomes[0].remaining, 1);
        assert!(store.block(b"user:1", None, "").await.unwrap());
        assert!(store.reset(b"user:1").await.unwrap());
        assert!(!store.reset(b"user:1").await.unwrap());
        let blocked = store
            .check(&[charge], Effect::Peek, &mut outcomes)
            .await
            .unwrap();
        assert!(matches!(blocked, Decision::Blocked { .. }), "{blocked:?}");
        assert!(store.unblock(b"user:1").await.unwrap());
        store
            .check(&[charge], Effect::Look, &mut outcomes)
            .await
            .unwrap();
        assert_eq!(outcomes[0].remaining, 2);
        assert_eq!(store.blocks().await.unwrap().len(), 1);
    }
}

/// Expired blocks are removed from a full index, one page at a time, so that no script reads the
/// whole index.
#[tokio::test]
async fn a_full_index_is_swept_of_the_blocks_that_have_ended() {
    for server in Server::each() {
        let store = RedisStore::connect(&server.url(), "tg").await.unwrap();
        store.pin_clock(Timestamp::from_micros(START));
        assert!(store.block(b"kept", None, "abuse").await.unwrap());
        assert!(
            store
                .block(b"ended", Some(Span::from_secs(1)), "")
                .await
                .unwrap()
        );
        let index = server.command(&["KEYS", "*blocks*"]);
        // The index is filled with copies of the two entries, up to the maximum number of blocks.
        let fill = format!(
            "local kept, ended = redis.call('HGET', KEYS[1], 'kept'), redis.call('HGET', KEYS[1], \
             'ended') for n = 3, {} do redis.call('HSET', KEYS[1], 'n' .. n, n % 2 == 0 and kept or \
             ended) end",
            bounds::MAX_BLOCKS
        );
        server.command(&["EVAL", &fill, "1", &index]);
        let most = bounds::MAX_BLOCKS.to_string();
        assert_eq!(server.command(&["HLEN", &index]), most);
        assert!(
            !store.block(b"new", None, "").await.unwrap(),
            "all are in effect"
        );
        store.pin_clock(Timestamp::from_micros(START + 2_000_000));
        server.command(&["CONFIG", "RESETSTAT"]);
        assert!(store.block(b"new", None, "").await.unwrap());
        let left = bounds::MAX_BLOCKS / 2 + 1;
        assert_eq!(server.command(&["HLEN", &index]), left.to_string());
        let calls = server.command(&["INFO", "commandstats"]);
        assert!(!calls.contains("cmdstat_hgetall"), "{calls}");
        let scans = calls.split("cmdstat_hscan:calls=").nth(1).unwrap();
        let scans: usize = scans.split(',').next().unwrap().parse().unwrap();
        assert!(scans > 50, "{scans} pages");
    }
}

/// A key contains only a hash of the rule's name, so the name is stored with the block.
#[tokio::test]
async fn a_block_keeps_the_name_of_its_rule() {
    for server in Server::each() {
        let store = RedisStore::connect(&server.url(), "tg").await.unwrap();
        let rule = BlockedRule {
            name: "login".into(),
            key: ["ip".into(), "user".into()].into(),
        };
        let note = BlockNote {
            reason: "why",
            rule: Some(&rule),
        };
        let key = former_key("login", &["a", "b"]);
        assert!(store.block(&key, None, note).await.unwrap());
        let block = store.block_on(&key).await.unwrap().unwrap();
        assert_eq!(
            (block.reason.as_str(), &block.rule),
            ("why", &Some(rule.clone()))
        );
        assert_eq!(block.values(), Some(vec!["a", "b"]));
        assert_eq!(store.blocks().await.unwrap(), [block]);
        // A block without a rule is stored in the same form as in earlier versions.
        assert!(store.block(&key, None, "why").await.unwrap());
        let block = store.block_on(&key).await.unwrap().unwrap();
        assert_eq!((block.reason.as_str(), &block.rule), ("why", &None));
    }
}

#[tokio::test]
async fn a_key_of_every_kernel_expires_with_its_state() {
    const HOUR: u64 = 3_600_000;
    let server = Server::redis();
    let store = RedisStore::connect(&server.url(), "tg").await.unwrap();
    // The instant is 20 minutes past the hour. A pinned clock adds a day to the time to live.
    let now = 1_767_225_600_000_000 + 1_200_000_000;
    store.pin_clock(Timestamp::from_micros(now));
    let (day, hour) = (24 * HOUR, Span::from_millis(HOUR));
    let rate = Rate {
        count: 10,
        period: hour,
    };
    let window = |window| Algorithm::FixedWindow { limit: 10, window };
    for (number, (algorithm, millis)) in [
        (Algorithm::Gcra { rate, burst: 9 }, HOUR / 10),
        (
            Algorithm::TokenBucket {
                capacity: 10,
                refill: rate,
                mode: RefillMode::Interval,
            },
            HOUR,
        ),
        (window(Window::Epoch(hour)), HOUR * 2 / 3),
        (window(Window::FirstRequest(hour)), HOUR),
        (
            Algorithm::SlidingWindowCounter {
                limit: 10,
                window: hour,
                counting: Counting::Weighted,
            },
            HOUR * 5 / 3,
        ),
    ]
    .into_iter()
    .enumerate()
    {
        let limits = Limits::new(vec![Limit::new(algorithm.clone()).unwrap()]).unwrap();
        // One key is charged by the fast path, and one by the general script.
        for (path, reserves) in [("fast", false), ("general", true)] {
            let key = format!("{path}{number}");
            let charges = [Charge::new(key.as_bytes(), &limits, Cost::ONE).unwrap()];
            let mut outcomes = Vec::new();
            let decision = if reserves {
                store.reserve(&charges, &mut outcomes).await.unwrap().0
            } else {
                let checked = store.check(&charges, Effect::Charge, &mut outcomes);
                checked.await.unwrap()
            };
            assert_eq!(decision, Decision::Admitted);
            let left: u64 = server
                .command(&["PTTL", &format!("tg:{key}")])
                .parse()
                .unwrap();
            // The bounds assume that the test itself takes less than ten minutes.
            let (least, most) = (day + millis - HOUR / 6, day + millis);
            assert!((least..=most).contains(&left), "{algorithm:?}: {left} ms");
        }
    }
}

#[tokio::test]
async fn keys_are_small_and_expire_by_themselves() {
    let server = Server::redis();
    let store = RedisStore::connect(&server.url(), "tg").await.unwrap();
    let mut outcomes = Vec::new();
    for (key, rates) in [
        ("one", &["2/d"][..]),
        ("four", &["2/d", "3/d", "4/d", "5/d"]),
    ] {
        let limits = limits(rates);
        let charge = Charge::new(key.as_bytes(), &limits, Cost::ONE).unwrap();
        store
            .check(&[charge], Effect::Charge, &mut outcomes)
            .await
            .unwrap();
        let key = format!("tg:{key}");
        let usage: u64 = server.command(&["MEMORY", "USAGE", &key]).parse().unwrap();
        assert!(usage <= 120, "{key} takes {usage} bytes");
        // The slowest of these limits takes half a day to refill one unit.
        let millis: u64 = server.command(&["PTTL", &key]).parse().unwrap();
        assert!(
            (43_100_000..=43_200_002).contains(&millis),
            "{key} lives {millis} ms"
        );
    }
}

/// Every key of the rule is listed. Keys of other rules, of other stores, and of limits specified
/// in a request are not listed.
#[tokio::test]
async fn the_keys_of_a_rule_are_listed() {
    for server in Server::each() {
        // The first prefix contains `*`. As a pattern, the first prefix would also match the second
        // prefix.
        let store = RedisStore::connect(&server.url(), "t*g").await.unwrap();
        let other = RedisStore::connect(&server.url(), "tig").await.unwrap();
        let limits = limits(&["2/d"]);
        let charge = async |store: &RedisStore, key: &[u8]| {
            let charge = Charge::new(key, &limits, Cost::ONE).unwrap();
            store
                .check(&[charge], Effect::Charge, &mut Vec::new())
                .await
                .unwrap();
        };
        let mut expected = Vec::new();
        for number in 0..200 {
            let value = format!("{{u}}*{number}");
            expected.push(former_key("api", &[&value]));
            charge(&store, &former_key("api", &[&value])).await;
            charge(&store, &former_key("login", &[&value])).await;
            charge(&other, &former_key("api", &["other", &value])).await;
            charge(&store, value.as_bytes()).await;
        }
        let scope = *former_key("api", &[]).first_chunk().unwrap();
        // Even for a page of one key, the server visits 100 keys, so a listing of 800 keys does not
        // take 800 pages.
        for (most, max_pages) in [(1, 40), (7, 40), (1_000, 5)] {
            let (mut listed, mut from) = (Vec::new(), ScanPosition::default());
            let mut pages = 0;
            loop {
                pages += 1;
                let page = store.scan_keys(scope, &from, most).await.unwrap();
                listed.extend(page.keys);
                match page.next {
                    Some(next) => from = next,
                    None => break,
                }
            }
            listed.sort_unstable();
            listed.dedup();
            expected.sort_unstable();
            assert_eq!(listed, expected);
            assert!(pages <= max_pages, "{pages} pages of {most}");
        }
        let unknown = ScanPosition {
            server: "127.0.0.1:1".to_owned(),
            cursor: 0,
        };
        assert!(store.scan_keys(scope, &unknown, 7).await.is_err());
    }
}
