//! Tests hot reload under traffic.

use std::{
    fs,
    sync::atomic::{AtomicBool, Ordering},
};

use super::Pair;
use crate::support::Ask;

fn limits(requests: u32) -> String {
    format!(
        "domain: shop\n\
         descriptors: [{{key: remote_address, rate_limit: {{unit: year, requests_per_unit: {requests}}}}}]\n"
    )
}

/// One client sends requests continuously. Each response must have the limit of one of the two
/// configurations, and a count that is one higher than in the previous response.
#[test]
fn responses_are_correct_during_a_reload() {
    const SIZES: [u32; 2] = [1_000_000, 2_000_000];
    let mut pair = Pair::start(&limits(SIZES[0]));
    let (front, done) = (pair.envoy.listener("open"), AtomicBool::new(false));
    let asking = || {
        let mut counted = Vec::new();
        while !done.load(Ordering::Relaxed) {
            let answer = Ask::get(front, "/").send();
            assert_eq!(answer.status, 200, "{answer:?}");
            let policy = answer.header("x-ratelimit-limit");
            let size = SIZES
                .into_iter()
                .find(|size| policy == format!("{size}, {size};w=31536000"));
            let size = size.unwrap_or_else(|| panic!("{policy}"));
            counted.push(
                size - answer
                    .header("x-ratelimit-remaining")
                    .parse::<u32>()
                    .unwrap(),
            );
        }
        counted
    };
    let counted = std::thread::scope(|scope| {
        let client = scope.spawn(asking);
        for size in [SIZES[1], SIZES[0], SIZES[1], SIZES[0]] {
            let draft = pair.tidegate.directory().join("draft");
            fs::write(&draft, limits(size)).unwrap();
            fs::rename(draft, pair.tidegate.directory().join("shop.yaml")).unwrap();
            pair.tidegate
                .wait_for(&["loaded the configuration of the rate limit service"]);
        }
        fs::write(pair.tidegate.directory().join("shop.yaml"), "domain: [").unwrap();
        pair.tidegate
            .wait_for(&["kept the old configuration of the rate limit service"]);
        done.store(true, Ordering::Relaxed);
        client.join().unwrap()
    });
    let expected: Vec<u32> = (1..).take(counted.len()).collect();
    assert_eq!(counted, expected, "every request is counted exactly once");
    assert!(counted.len() > 100);
}
