//! Tests that the plot in the documentation is identical to the output of the example, and that the
//! documentation's text agrees with the plot.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use tidegate_client::Jitter;

#[path = "../examples/herd/picture.rs"]
mod picture;
#[path = "../examples/herd/simulation.rs"]
mod simulation;

use simulation::{Herd, RetryAfter};

#[test]
fn the_committed_picture_is_up_to_date() {
    let drawn = picture::svg(&simulation::all());
    let committed = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/herd.svg");
    let committed = std::fs::read_to_string(committed).unwrap();
    assert!(
        drawn == committed,
        "outdated; regenerate with: cargo run -p tidegate-client --example herd > docs/herd.svg"
    );
}

#[test]
fn jitter_and_retry_after_reduce_the_load() {
    let herds = simulation::all();
    let herd = |jitter, retry_after| {
        let found = herds
            .iter()
            .find(|herd: &&Herd| (herd.jitter, herd.retry_after) == (jitter, retry_after));
        found.unwrap()
    };
    for herd in &herds {
        let admitted: u32 = herd.bars.iter().map(|bar| bar.admitted).sum();
        assert_eq!(admitted, simulation::CLIENTS, "no request is lost");
    }
    for retry_after in [RetryAfter::Ignored, RetryAfter::Honored] {
        assert!(herd(Jitter::Full, retry_after).done < herd(Jitter::None, retry_after).done);
    }
    for jitter in [Jitter::None, Jitter::Equal, Jitter::Full] {
        assert!(
            herd(jitter, RetryAfter::Honored).refused <= herd(jitter, RetryAfter::Ignored).refused
        );
    }
}
