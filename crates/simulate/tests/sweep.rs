//! Tests that a sweep gives the same results as separate simulations.

#![allow(clippy::unwrap_used, reason = "a panic shows where a test failed")]

mod trace;

use proptest::prelude::*;
use tidegate_config::Config;
use tidegate_simulate::{RulesUnderTest, Simulation, WhatIf};

use self::trace::{log, simulate};

fn rules(algorithm: &str, mode: &str) -> RulesUnderTest {
    let file = format!(
        "rules:
  - {{name: first, key: [ip], limits: [40/10s]}}
  - {{name: swept, key: [path], mode: {mode}, algorithm: {algorithm}, cost: units, limits: [9/s]}}
  - {{name: last, limits: [60/10s]}}
"
    );
    RulesUnderTest::new("rules.yaml", Config::parse(&file).unwrap())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn a_sweep_decides_as_separate_simulations_do(
        steps in prop::collection::vec((0..900_000_u64, 0..6_u8, 1..5_u64), 1..150),
        counts in prop::collection::btree_set(4..60_u64, 1..6),
        algorithm in prop::sample::select(vec![
            "gcra", "token_bucket", "leaky_bucket", "fixed_window", "sliding_window_log",
        ]),
        mode in prop::sample::select(vec!["enforce", "shadow"]),
    ) {
        let log = log(&steps);
        let limits: Vec<String> = counts.iter().map(|count| format!("{count}/5s")).collect();
        let plain = rules(algorithm, mode);
        let sweep = format!("swept.limit={}", limits.join(",")).parse().unwrap();
        let candidates = plain.candidates(&sweep).unwrap();
        let simulation = Simulation { sweep: Some(&candidates), ..Simulation::of(&plain) };
        let report = simulate(simulation, &log);
        // A sweep does not change the report's results for the file itself.
        let alone = simulate(Simulation::of(&plain), &log);
        prop_assert_eq!(&report.rules, &alone.rules);
        let sweep = report.sweep.unwrap();
        prop_assert_eq!(sweep.values.len(), limits.len());
        for (value, limit) in sweep.values.iter().zip(&limits) {
            let what_if: WhatIf = format!("swept.limit={limit}").parse().unwrap();
            let changed = rules(algorithm, mode).with_limits(&what_if).unwrap();
            let changed = simulate(Simulation::of(&changed), &log);
            let rule = &changed.rules[1];
            let enforced = changed.rules.iter().filter(|rule| rule.mode == "enforce");
            prop_assert_eq!(
                (value.denied, value.keys_denied, value.all_denied, value.all_keys_denied),
                (
                    rule.denied,
                    rule.keys_denied,
                    changed.requests.denied,
                    enforced.clone().map(|rule| rule.keys_denied).sum::<u64>(),
                ),
                "{}", limit
            );
            prop_assert_eq!(
                (sweep.requests, sweep.keys, sweep.decided, sweep.all_keys),
                (
                    rule.requests,
                    rule.keys,
                    changed.requests.decided,
                    enforced.map(|rule| rule.keys).sum::<u64>(),
                )
            );
        }
    }
}
