//! Makes decisions with the memory store, with and without recording their keys, so that their
//! instructions can be counted.
//!
//! ```sh
//! cargo build --release -p top
//! for mode in plain recorded; do
//!     for keys in 500 10000; do
//!         valgrind --tool=callgrind --callgrind-out-file=/dev/null \
//!             target/release/top --decisions $mode $keys
//!     done
//! done
//! ```
//!
//! The difference between the two totals, divided by [`DECISIONS`], is the cost of recording per
//! decision. Some keys are much more frequent than others. 500 keys fit completely into a sketch.
//! Of 10,000 keys, a sketch keeps only a tenth, so recording a key often evicts another key.

use std::sync::Mutex;

use tidegate_core::{
    AlgorithmName, Charge, Cost, Decision, Effect, LimitSpec, MemoryBounds, MemoryStore, Rule,
    Timestamp, notation,
    top::{ChargedKey, RecordedRequest, Recorder, TopBounds, minute_of},
};

const DECISIONS: usize = 1_000_000;

/// Makes the decisions, with `count` keys. `mode` is `plain` or `recorded`.
pub(crate) fn run(mode: &str, count: usize, skewed: &[u32]) {
    let rate = notation::rate("10/s").expect("a rate");
    let limit = LimitSpec::shorthand(rate, AlgorithmName::Gcra)
        .build()
        .expect("a limit");
    let rule = Rule::new("api", vec![limit]).expect("a rule");
    let rule = rule.keyed_by(&["customer"]).expect("a key");
    let keys: Vec<Vec<u8>> = (0..count)
        .map(|key| {
            rule.encode_key(&[&format!("customer-{key:08}")])
                .expect("a key")
        })
        .collect();
    let bounds = TopBounds::default();
    let recorder = Mutex::new(Recorder::new(bounds.keys, bounds.max_bytes / 8));
    recorder
        .lock()
        .expect("no panic")
        .set_scopes(&[rule.key_scope()]);
    let (store, mut outcomes, mut denied) = (
        MemoryStore::new(MemoryBounds::default()),
        Vec::new(),
        0_usize,
    );
    for (at, key) in skewed.iter().cycle().take(DECISIONS).enumerate() {
        let now = Timestamp::from_micros(1_700_000_000_000_000 + at as u64);
        let key = &keys[*key as usize % count];
        let charge = Charge::new(key, rule.limits(), Cost::ONE).expect("a charge");
        let decision = store.check(&[charge], now, Effect::Charge, &mut outcomes);
        denied += usize::from(decision != Decision::Admitted);
        if mode == "recorded" {
            let request = RecordedRequest {
                cost: 1,
                denied: decision != Decision::Admitted,
            };
            let keys = [ChargedKey {
                key: charge.key,
                cost: charge.cost.units(),
                denied: outcomes.iter().any(|outcome| !outcome.allowed),
            }];
            let mut recorder = recorder.lock().expect("no panic");
            recorder.record(minute_of(now), request, keys.into_iter());
        }
    }
    let recorded = recorder.lock().expect("no panic").total().requests;
    println!("{mode}: {DECISIONS} decisions, {denied} denied, {recorded} recorded");
}
