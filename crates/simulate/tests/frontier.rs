//! Tests that a suggested burst denies at most the given share of the keys, and that the next
//! smaller burst denies more.

#![allow(clippy::unwrap_used, reason = "a panic shows where a test failed")]

mod trace;

use proptest::prelude::*;
use tidegate_config::Config;
use tidegate_simulate::{FrontierPoint, RulesUnderTest, Share, Simulation};

use self::trace::{log, simulate};

/// A limit in the file: its algorithm, its field names (which depend on the algorithm), and its
/// numbers.
#[derive(Clone, Copy, Debug)]
struct Bucket {
    algorithm: &'static str,
    rate: &'static str,
    size: &'static str,
    count: u64,
    seconds: u64,
    soft: u32,
    count_denied: bool,
}

impl Bucket {
    fn rules(self) -> RulesUnderTest {
        let Self {
            algorithm,
            rate,
            size,
            count,
            seconds,
            soft,
            count_denied,
        } = self;
        let file = format!(
            "rules: [{{name: api, key: [ip], cost: units, soft: {soft}%, count_denied: {count_denied}, \
             limits: [{{algorithm: {algorithm}, {rate}: {count}/{seconds}s, {size}: 3}}]}}]"
        );
        RulesUnderTest::new("rules.yaml", Config::parse(&file).unwrap())
    }

    /// Returns the same limit with the burst reduced by one, if it is valid.
    fn one_less(self, point: &FrontierPoint) -> Option<String> {
        let smallest = u64::from(self.size == "capacity");
        let less = point
            .burst
            .checked_sub(1)
            .filter(|less| *less >= smallest)?;
        Some(format!("{} {} {less}", point.rate, self.size))
    }
}

fn buckets() -> impl Strategy<Value = Bucket> {
    let algorithms = vec![
        ("gcra", "rate", "burst"),
        ("token_bucket", "refill", "capacity"),
        ("leaky_bucket", "leak", "capacity"),
    ];
    (
        prop::sample::select(algorithms),
        1..12_u64,
        1..8_u64,
        prop::sample::select(vec![0, 0, 30, 250]),
        any::<bool>(),
    )
        .prop_map(
            |((algorithm, rate, size), count, seconds, soft, count_denied)| Bucket {
                algorithm,
                rate,
                size,
                count,
                seconds,
                soft,
                count_denied,
            },
        )
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]

    #[test]
    fn a_suggested_burst_is_the_smallest(
        steps in prop::collection::vec((0..1_500_000_u64, 0..12_u8, 1..5_u64), 1..120),
        bucket in buckets(),
        percent in prop::sample::select(vec![0_u64, 1, 10, 25, 50, 100]),
    ) {
        let log = log(&steps);
        let rules = bucket.rules();
        let share: Share = format!("{percent}%").parse().unwrap();
        let simulation = Simulation { suggest: Some(share), ..Simulation::of(&rules) };
        let report = simulate(simulation, &log);
        prop_assert_eq!(report.frontier.len(), 1);
        let frontier = &report.frontier[0];
        prop_assert_eq!(frontier.points.len(), 7);
        let most = frontier.keys * percent / 100;
        for point in &frontier.points {
            let less = bucket.one_less(point);
            let limits: Vec<&str> = [Some(&*point.limit), less.as_deref()]
                .into_iter()
                .flatten()
                .collect();
            let sweep = format!("api.limit={}", limits.join(",")).parse().unwrap();
            let candidates = rules.candidates(&sweep).unwrap();
            let sweep = Simulation { sweep: Some(&candidates), ..Simulation::of(&rules) };
            let sweep = simulate(sweep, &log).sweep.unwrap();
            prop_assert_eq!(sweep.values[0].keys_denied, point.keys_denied, "{}", point.limit);
            prop_assert!(point.keys_denied <= most, "{}", point.limit);
            if less.is_some() {
                prop_assert!(sweep.values[1].keys_denied > most, "{}", sweep.values[1].limit);
            }
        }
    }
}
