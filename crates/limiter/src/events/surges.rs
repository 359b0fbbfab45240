//! Detects surges: requests or denials far above their usual rate.
//!
//! The detector counts in intervals of ten seconds, for each rule and for all rules together. The
//! usual count `u` is an exponential moving average whose time constant is one hour. In the first
//! hour, `u` is the average since the start, and nothing is reported in the first five minutes.
//!
//! - A surge begins after two consecutive intervals with a count above `3 u` and above
//!   `u + 8 √u + 50`.
//! - A surge ends after three consecutive intervals with a count below `1.5 u + 25`.
//!
//! The usual count is not adjusted during the first hour of a surge. After the first hour, the
//! usual count is adjusted again, so that a lasting change becomes the usual count.
//!
//! **False alarms.** If the requests are a Poisson process of constant rate, the count of an
//! interval has the variance `u`. The count is then above `u + 8 √u + 50` with a probability below
//! 1e-13 (a Chernoff bound), and a surge begins only after two such intervals in a row. With 1,000
//! rules, there is less than one false alarm in a million years. Real traffic varies more than a
//! Poisson process; the factor 3 covers the usual daily increase within an hour.

use foldhash::HashMap;
use tidegate_core::Timestamp;

use crate::metrics::TrafficCounts;

/// The length of an interval in seconds.
const INTERVAL_SECS: u64 = 10;

/// The number of intervals before the first report.
const WARM_UP: u32 = 30;

/// The time constant of the moving average, in intervals.
const MEMORY: u32 = 360;

/// The number of consecutive high intervals that begin a surge.
const BEGIN_AFTER: u32 = 2;
/// The number of consecutive low intervals that end a surge.
const END_AFTER: u32 = 3;

/// The usual count is stored in units of 1/256, so that slow traffic is not rounded to zero.
const FRACTION: u64 = 256;

/// The quantity in which a surge is detected.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum SurgeMeasure {
    Requests,
    Denials,
}

impl SurgeMeasure {
    pub(super) const fn as_str(self) -> &'static str {
        match self {
            Self::Requests => "requests",
            Self::Denials => "denials",
        }
    }
}

/// The beginning or the end of a surge.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct SurgeChange {
    /// The name of the rule; `None` for all rules together.
    pub(super) rule: Option<Box<str>>,
    pub(super) measure: SurgeMeasure,
    /// Whether the surge began or ended.
    pub(super) began: bool,
    /// The number of requests or denials in the last interval.
    pub(super) count: u64,
    /// The usual number of requests or denials in an interval.
    pub(super) usual: u64,
}

/// The state of the detector for all rules.
#[derive(Debug, Default)]
pub(super) struct SurgeDetector {
    /// The number of the current interval, counted from 1970.
    interval: Option<u64>,
    total: SurgeSeries,
    rules: HashMap<Box<str>, SurgeSeries>,
}

/// The counters of a rule at the start of the current interval, and the surge detection state for
/// its requests and for its denials.
#[derive(Debug, Default)]
struct SurgeSeries {
    counted: TrafficCounts,
    requests: Baseline,
    denials: Baseline,
}

/// The usual number of requests or denials, and the progress of a surge.
#[derive(Clone, Copy, Debug, Default)]
struct Baseline {
    /// The usual count, in fixed point: units of `1 / FRACTION`.
    average: u64,
    /// The number of intervals in the average, at most [`MEMORY`].
    intervals: u32,
    /// The number of consecutive intervals above the threshold.
    above: u32,
    /// The number of consecutive intervals below the lower threshold, during a surge.
    below: u32,
    /// The number of intervals since the surge began; `None` if there is no surge.
    surging: Option<u32>,
}

impl SurgeDetector {
    /// Samples the current counters. If an interval has ended, returns the surges that began or
    /// ended in it. The state of rules that are missing in `rules` is discarded. Call this method
    /// every second.
    pub(super) fn sample<'n>(
        &mut self,
        now: Timestamp,
        total: TrafficCounts,
        rules: impl Iterator<Item = (&'n str, TrafficCounts)>,
    ) -> Vec<SurgeChange> {
        let interval = now.as_micros() / (INTERVAL_SECS * 1_000_000);
        let ended = match self.interval.replace(interval) {
            // The first interval is incomplete, so only its counters are stored.
            None => false,
            Some(before) if before == interval => return Vec::new(),
            // After a pause or a clock step, the counts cover more or less than one interval, so
            // they are not used.
            Some(before) => interval == before + 1,
        };
        let mut changes = Vec::new();
        self.total.advance(None, total, ended, &mut changes);
        let mut advanced = HashMap::default();
        for (name, counts) in rules {
            let (name, mut series) = self.rules.remove_entry(name).unwrap_or_else(|| {
                (
                    name.into(),
                    SurgeSeries {
                        counted: counts,
                        ..SurgeSeries::default()
                    },
                )
            });
            series.advance(Some(&name), counts, ended, &mut changes);
            advanced.insert(name, series);
        }
        self.rules = advanced;
        changes
    }
}

impl SurgeSeries {
    fn advance(
        &mut self,
        rule: Option<&str>,
        counts: TrafficCounts,
        ended: bool,
        changes: &mut Vec<SurgeChange>,
    ) {
        let increase = counts.since(std::mem::replace(&mut self.counted, counts));
        if !ended {
            return;
        }
        let measures = [
            (
                SurgeMeasure::Requests,
                &mut self.requests,
                increase.requests,
            ),
            (SurgeMeasure::Denials, &mut self.denials, increase.denied),
        ];
        for (measure, usual, count) in measures {
            if let Some(began) = usual.advance(count) {
                changes.push(SurgeChange {
                    rule: rule.map(Box::from),
                    measure,
                    began,
                    count,
                    usual: usual.average / FRACTION,
                });
            }
        }
    }
}

impl Baseline {
    /// Processes the count of an interval. Returns true if a surge began, false if a surge ended,
    /// and `None` otherwise.
    fn advance(&mut self, count: u64) -> Option<bool> {
        let usual = self.average / FRACTION;
        let margin = usual.saturating_add(8 * usual.isqrt()).saturating_add(50);
        let is_above = count > margin && count > usual.saturating_mul(3);
        let is_below = count < usual.saturating_add(usual / 2).saturating_add(25);
        self.above = if is_above {
            self.above.saturating_add(1)
        } else {
            0
        };
        self.below = if is_below {
            self.below.saturating_add(1)
        } else {
            0
        };
        match &mut self.surging {
            Some(intervals) => {
                *intervals = intervals.saturating_add(1);
                let is_lasting = *intervals > MEMORY;
                if self.below >= END_AFTER {
                    self.surging = None;
                    return Some(false);
                }
                if is_lasting {
                    self.learn(count);
                }
                None
            }
            None if self.above >= BEGIN_AFTER && self.intervals >= WARM_UP => {
                self.surging = Some(0);
                self.below = 0;
                Some(true)
            }
            None => {
                // The first interval of a surge must not change the usual count.
                if !is_above || self.intervals < WARM_UP {
                    self.learn(count);
                }
                None
            }
        }
    }

    /// Adds `count` to the average.
    fn learn(&mut self, count: u64) {
        self.intervals = (self.intervals + 1).min(MEMORY);
        let weight = u64::from(self.intervals);
        let count = count.saturating_mul(FRACTION);
        // This form of the weighted average cannot overflow, because only the difference is
        // divided.
        self.average = if count >= self.average {
            self.average + (count - self.average) / weight
        } else {
            self.average - (self.average - count) / weight
        };
    }
}

#[cfg(test)]
mod tests {
    use foldhash::fast::FixedState;
    use std::hash::BuildHasher as _;

    use super::*;

    /// Counters of a server in a test.
    #[derive(Default)]
    struct Traffic {
        detector: SurgeDetector,
        counts: TrafficCounts,
        interval: u64,
    }

    impl Traffic {
        /// Simulates one interval with these numbers of requests and denials.
        fn pass(&mut self, requests: u64, denied: u64) -> Vec<SurgeChange> {
            self.counts.requests += requests;
            self.counts.denied += denied;
            self.interval += 1;
            let now = Timestamp::from_micros(self.interval * INTERVAL_SECS * 1_000_000);
            let rules = [("api", self.counts)];
            self.detector.sample(now, self.counts, rules.into_iter())
        }

        fn pass_many(&mut self, intervals: u32, requests: u64) -> Vec<SurgeChange> {
            (0..intervals)
                .flat_map(|_| self.pass(requests, 0))
                .collect()
        }
    }

    #[test]
    fn a_surge_begins_after_two_intervals_and_ends_after_three() {
        let mut traffic = Traffic::default();
        assert_eq!(traffic.pass_many(60, 100), []);
        assert_eq!(traffic.pass(1_000, 0), []);
        let began = traffic.pass(1_000, 0);
        let expected = |rule: Option<&str>, began, count| SurgeChange {
            rule: rule.map(Box::from),
            measure: SurgeMeasure::Requests,
            began,
            count,
            usual: 100,
        };
        assert_eq!(
            began,
            [
                expected(None, true, 1_000),
                expected(Some("api"), true, 1_000)
            ]
        );
        assert_eq!(traffic.pass_many(30, 1_000), []);
        assert_eq!(traffic.pass_many(2, 100), []);
        let ended = traffic.pass(100, 0);
        assert_eq!(
            ended,
            [
                expected(None, false, 100),
                expected(Some("api"), false, 100)
            ]
        );
        // A single high interval is not a surge.
        assert_eq!(traffic.pass_many(5, 100), []);
        assert_eq!(traffic.pass(5_000, 0), []);
        assert_eq!(traffic.pass_many(5, 100), []);
    }

    #[test]
    fn denials_have_surges_of_their_own() {
        let mut traffic = Traffic::default();
        for _ in 0..60 {
            assert_eq!(traffic.pass(1_000, 5), []);
        }
        assert_eq!(traffic.pass(1_000, 400), []);
        let began = traffic.pass(1_000, 400);
        assert_eq!(began.len(), 2, "{began:?}");
        assert!(
            began
                .iter()
                .all(|change| change.measure == SurgeMeasure::Denials)
        );
    }

    #[test]
    fn nothing_is_reported_at_the_start_or_about_few_requests() {
        let mut traffic = Traffic::default();
        assert_eq!(traffic.pass_many(20, 1), []);
        assert_eq!(traffic.pass_many(5, 100_000), []);
        let mut traffic = Traffic::default();
        assert_eq!(traffic.pass_many(60, 0), []);
        assert_eq!(traffic.pass_many(10, 50), []);
    }

    #[test]
    fn a_lasting_change_becomes_usual() {
        let mut traffic = Traffic::default();
        assert_eq!(traffic.pass_many(60, 100), []);
        assert_eq!(traffic.pass_many(2, 1_000).len(), 2);
        let ended = traffic.pass_many(3 * MEMORY, 1_000);
        assert_eq!(ended.len(), 2, "{ended:?}");
        assert!(ended.iter().all(|change| !change.began));
    }

    #[test]
    fn a_pause_and_a_new_rule_are_no_surges() {
        let mut traffic = Traffic::default();
        assert_eq!(traffic.pass_many(60, 100), []);
        traffic.interval += 500;
        assert_eq!(traffic.pass_many(2, 50_000), []);
        // The counters of a rule begin when the rule is first seen.
        let now = |interval: u64| Timestamp::from_micros(interval * INTERVAL_SECS * 1_000_000);
        let rules = [(
            "new",
            TrafficCounts {
                requests: 1 << 40,
                ..TrafficCounts::default()
            },
        )];
        for interval in 0..40 {
            let at = now(traffic.interval + 1 + interval);
            let changes = traffic
                .detector
                .sample(at, traffic.counts, rules.into_iter());
            assert!(
                changes.iter().all(|change| change.rule.is_none()),
                "{changes:?}"
            );
        }
    }

    /// Draws from a Poisson distribution by adding up exponential gaps, in fixed point.
    fn poisson(mean: u32, seed: &mut u64) -> u64 {
        let (mut left, mut count) = (f64::from(mean), 0);
        loop {
            *seed += 1;
            let bits = FixedState::with_seed(5).hash_one(*seed) >> 11;
            #[expect(clippy::cast_precision_loss, reason = "53 bits fit")]
            let uniform = (bits as f64 + 1.0) / 9_007_199_254_740_993.0;
            left += uniform.ln();
            if left < 0.0 {
                return count;
            }
            count += 1;
        }
    }

    #[test]
    fn random_noise_is_no_surge() {
        let mut seed = 0;
        for mean in [1, 5, 20, 200, 2_000] {
            let mut traffic = Traffic::default();
            for _ in 0..1_000 {
                let count = poisson(mean, &mut seed);
                assert_eq!(traffic.pass(count, count / 2), [], "mean {mean}");
            }
        }
    }
}
