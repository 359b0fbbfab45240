//! Arbitrary usage reports on four quota streams, while reloads add and remove quotas. Reports must
//! be accepted or rejected without a panic. When all streams have been closed, the stream counts
//! must be zero.

#![no_main]

mod frames;

use std::sync::Arc;

use frames::frames;
use libfuzzer_sys::fuzz_target;
use tidegate::Clock;
use tidegate_config::Config;
use tidegate_core::{Span, Timestamp};
use tidegate_envoy::{grpc::QuotaStream, quota::Quotas};

const START: u64 = 1_700_000_040_000_000;
const STREAMS: usize = 4;

/// A frame whose sender has at least this number is a reload. The last three bits select the
/// quotas.
const RELOADS: usize = 248;

/// A rate, a budget, and a quota of a single request, which can be assigned to only one of the four
/// streams.
const QUOTAS: &str = "
quotas:
  - {name: rate, domain: d, bucket: {k: 'r*'}, limit: 100/s}
  - {name: budget, domain: d, bucket: {k: 'b*'}, limit: 1000/h}
  - {name: one, domain: d, bucket: {k: 'o*'}, limit: 1/min}
";

fuzz_target!(|input: &[u8]| {
    let clock = Clock::manual(Timestamp::from_micros(START));
    let shared = Arc::<Quotas>::default();
    let quotas = Config::parse(QUOTAS)
        .expect("the quotas above are valid")
        .quotas;
    shared.swap_rules(quotas.clone(), clock.now());
    let mut streams: [Option<QuotaStream>; STREAMS] = Default::default();
    let mut now = Timestamp::from_micros(START);
    for frame in frames(input).take(64) {
        // The time advances by up to 17 minutes per frame, so that windows end.
        now = now.after(Span::from_secs(frame.seconds * 4));
        clock.set(now);
        let place = &mut streams[frame.sender % STREAMS];
        if frame.sender >= RELOADS {
            let stays = |number: &usize| frame.sender >> number & 1 == 1;
            let kept = (0..quotas.len()).filter(stays);
            let kept = kept.map(|number| quotas[number].clone()).collect();
            shared.swap_rules(kept, now);
        } else if frame.message.is_empty() {
            *place = None;
            continue;
        } else {
            let stream = place.get_or_insert_with(|| QuotaStream::open(&shared, &clock));
            if let Err(problem) = stream.report(frame.message) {
                assert!(!problem.is_empty(), "an error has a message");
                *place = None;
            }
        }
        for stream in streams.iter_mut().flatten() {
            stream.roll();
            for message in stream.take_responses() {
                assert!(!message.is_empty(), "every reply assigns something");
            }
        }
        let open = streams.iter().flatten().count();
        assert_eq!(shared.counts().streams, open);
    }
    drop(streams);
    assert_eq!(shared.counts().streams, 0);
});
