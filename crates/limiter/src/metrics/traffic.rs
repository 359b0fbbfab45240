//! Traffic from the last 15 minutes, by rule, in buckets of five seconds.
//!
//! The counts are differences between samples of the counters that each decision updates anyway. A
//! decision therefore does no extra work for the traffic. The server takes a sample every second.

use std::{
    collections::{BTreeMap, VecDeque},
    sync::{Arc, Mutex, PoisonError},
};

use foldhash::HashMap;
use tidegate_core::{Span, Timestamp};

/// The length of a bucket.
pub const TRAFFIC_BUCKET: Span = Span::from_secs(5);

/// The number of kept buckets. Together, the buckets cover 15 minutes.
pub const TRAFFIC_BUCKETS: usize = 180;

/// The decision counts of a period.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TrafficCounts {
    /// The number of all decisions.
    pub requests: u64,
    /// The number of denials by a limit, a block or the store.
    pub denied: u64,
    /// The number of times that a shadow limit would have denied a request.
    pub shadow_denied: u64,
}

impl TrafficCounts {
    fn is_zero(self) -> bool {
        self == Self::default()
    }

    /// Returns the increase since `earlier`. If a counter is lower than before, it was reset
    /// because its rule was removed and added again.
    pub(crate) fn since(self, earlier: Self) -> Self {
        let increase = |now: u64, before: u64| now.checked_sub(before).unwrap_or(now);
        Self {
            requests: increase(self.requests, earlier.requests),
            denied: increase(self.denied, earlier.denied),
            shadow_denied: increase(self.shadow_denied, earlier.shadow_denied),
        }
    }

    fn add(&mut self, other: Self) {
        self.requests += other.requests;
        self.denied += other.denied;
        self.shadow_denied += other.shadow_denied;
    }
}

/// The traffic of consecutive buckets, oldest first. All lists have the same length. The last
/// bucket is incomplete.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Traffic {
    /// The start of the first bucket.
    pub from: Timestamp,
    /// The decisions of all listeners, including decisions that are not counted for a rule.
    pub total: Vec<TrafficCounts>,
    /// The traffic by rule name. Rules without traffic are left out. A decision is counted for the
    /// rule that its verdict names. A shadow denial is counted for the shadow rule.
    pub rules: BTreeMap<Arc<str>, Vec<TrafficCounts>>,
}

/// The counts of one bucket. Rules without traffic have no entry.
#[derive(Debug, Default)]
struct TrafficBucket {
    /// The number of the bucket, counted from 1970.
    number: u64,
    total: TrafficCounts,
    rules: HashMap<Arc<str>, TrafficCounts>,
}

/// The counters at the last sample, and the buckets, oldest first. A bucket takes at most about 80
/// bytes for each rule with traffic in it. If all [`MAX_RULE_LABELS`](super::MAX_RULE_LABELS) rules
/// have traffic all the time, the buckets take about 15 MB.
#[derive(Debug, Default)]
struct TrafficRing {
    sampled_total: TrafficCounts,
    sampled_rules: HashMap<Arc<str>, TrafficCounts>,
    buckets: VecDeque<TrafficBucket>,
}

/// A recorder of traffic.
#[derive(Debug, Default)]
pub(super) struct TrafficRecorder(Mutex<TrafficRing>);

impl TrafficRecorder {
    /// Adds the decisions since the last sample to the bucket of `now`. `total` contains the
    /// current counters of all decisions, and `rules` the current counters of each rule. Shadow
    /// denials are counted only per rule.
    pub(super) fn sample<'n>(
        &self,
        now: Timestamp,
        total: TrafficCounts,
        rules: impl Iterator<Item = (&'n str, TrafficCounts)>,
    ) {
        let mut ring = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        ring.sample(now, total, rules);
    }

    /// Returns the last `count` buckets up to `now`, at most [`TRAFFIC_BUCKETS`].
    pub(super) fn traffic(&self, now: Timestamp, count: usize) -> Traffic {
        let ring = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        ring.traffic(now, count.clamp(1, TRAFFIC_BUCKETS))
    }
}

impl TrafficRing {
    fn sample<'n>(
        &mut self,
        now: Timestamp,
        total: TrafficCounts,
        rules: impl Iterator<Item = (&'n str, TrafficCounts)>,
    ) {
        let mut bucket = match self.buckets.pop_back() {
            Some(last) if last.number >= bucket_number(now) => last,
            last => {
                self.buckets.extend(last);
                TrafficBucket {
                    number: bucket_number(now),
                    ..TrafficBucket::default()
                }
            }
        };
        let mut sampled = HashMap::default();
        for (name, counts) in rules {
            let before = self.sampled_rules.remove_entry(name);
            let (name, before) = before.unwrap_or_else(|| (name.into(), TrafficCounts::default()));
            let increase = counts.since(before);
            if !increase.is_zero() {
                let counted = bucket.rules.entry(Arc::clone(&name)).or_default();
                counted.add(increase);
                bucket.total.shadow_denied += increase.shadow_denied;
            }
            sampled.insert(name, counts);
        }
        let total = TrafficCounts {
            shadow_denied: 0,
            ..total
        };
        bucket.total.add(total.since(self.sampled_total));
        self.sampled_total = total;
        // The samples of rules that no longer exist are dropped.
        self.sampled_rules = sampled;
        self.buckets.push_back(bucket);
        while self.buckets.len() > TRAFFIC_BUCKETS {
            self.buckets.pop_front();
        }
    }

    fn traffic(&self, now: Timestamp, count: usize) -> Traffic {
        let last = self.buckets.back().map(|bucket| bucket.number);
        let last = last.unwrap_or_default().max(bucket_number(now));
        let first = (last + 1).saturating_sub(number(count));
        let none = || vec![TrafficCounts::default(); count];
        let mut traffic = Traffic {
            from: Timestamp::from_micros(first * TRAFFIC_BUCKET.as_micros()),
            total: none(),
            rules: BTreeMap::new(),
        };
        for bucket in &self.buckets {
            // Skip buckets that are older than the requested period.
            let index = bucket.number.checked_sub(first);
            let Some(index) = index.and_then(|index| usize::try_from(index).ok()) else {
                continue;
            };
            // The index is within bounds, because the last bucket has the highest number.
            traffic.total[index] = bucket.total;
            for (name, counts) in &bucket.rules {
                let rule = traffic.rules.entry(Arc::clone(name)).or_insert_with(none);
                rule[index] = *counts;
            }
        }
        traffic
    }
}

fn bucket_number(at: Timestamp) -> u64 {
    at.as_micros() / TRAFFIC_BUCKET.as_micros()
}

fn number(count: usize) -> u64 {
    u64::try_from(count).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn at(secs: u64) -> Timestamp {
        Timestamp::from_micros(secs * 1_000_000)
    }

    fn counts(requests: u64, denied: u64, shadow_denied: u64) -> TrafficCounts {
        TrafficCounts {
            requests,
            denied,
            shadow_denied,
        }
    }

    fn requests(counts: &[TrafficCounts]) -> Vec<u64> {
        counts.iter().map(|counts| counts.requests).collect()
    }

    /// Samples counters in which rule `a` made all decisions.
    fn sample(recorder: &TrafficRecorder, secs: u64, counts: TrafficCounts) {
        recorder.sample(at(secs), counts, [("a", counts)].into_iter());
    }

    #[test]
    fn increases_are_added_to_the_bucket_of_the_sample() {
        let recorder = TrafficRecorder::default();
        sample(&recorder, 1_000, counts(3, 1, 0));
        sample(&recorder, 1_004, counts(5, 1, 2));
        sample(&recorder, 1_005, counts(6, 2, 2));
        let traffic = recorder.traffic(at(1_011), 4);
        assert_eq!(traffic.from, at(995));
        let expected = [
            counts(0, 0, 0),
            counts(5, 1, 2),
            counts(1, 1, 0),
            counts(0, 0, 0),
        ];
        assert_eq!(traffic.total, expected);
        assert_eq!(traffic.rules["a"], expected);
    }

    #[test]
    fn rules_without_traffic_are_omitted() {
        let recorder = TrafficRecorder::default();
        let quiet = [("a", counts(0, 0, 1)), ("b", counts(0, 0, 0))];
        recorder.sample(at(10), counts(7, 0, 0), quiet.into_iter());
        let traffic = recorder.traffic(at(10), 1);
        let names: Vec<&str> = traffic.rules.keys().map(|name| &**name).collect();
        assert_eq!(names, ["a"]);
        assert_eq!(requests(&traffic.total), [7]);
    }

    #[test]
    fn at_most_fifteen_minutes_are_kept() {
        let recorder = TrafficRecorder::default();
        for second in 0..2_000 {
            sample(&recorder, second, counts(second, 0, 0));
        }
        assert_eq!(recorder.0.lock().unwrap().buckets.len(), TRAFFIC_BUCKETS);
        let traffic = recorder.traffic(at(1_999), usize::MAX);
        assert_eq!(traffic.from, at(1_100));
        assert_eq!(requests(&traffic.total), [5; TRAFFIC_BUCKETS]);
        // The last sample was taken before the 15 minutes that the buckets cover.
        let traffic = recorder.traffic(at(9_000), TRAFFIC_BUCKETS);
        assert_eq!(requests(&traffic.total), [0; TRAFFIC_BUCKETS]);
        assert!(traffic.rules.is_empty());
    }

    #[test]
    fn a_rule_that_was_removed_and_added_again_counts_from_zero() {
        let recorder = TrafficRecorder::default();
        sample(&recorder, 10, counts(100, 0, 0));
        recorder.sample(at(11), counts(100, 0, 0), std::iter::empty());
        recorder.sample(
            at(15),
            counts(102, 0, 0),
            [("a", counts(2, 0, 0))].into_iter(),
        );
        assert_eq!(requests(&recorder.traffic(at(15), 2).rules["a"]), [100, 2]);
        // A rule is removed and added again between two samples.
        recorder.sample(
            at(20),
            counts(103, 0, 0),
            [("a", counts(1, 0, 0))].into_iter(),
        );
        assert_eq!(requests(&recorder.traffic(at(20), 1).rules["a"]), [1]);
    }

    #[test]
    fn a_clock_that_was_set_back_loses_no_decisions() {
        let recorder = TrafficRecorder::default();
        sample(&recorder, 100, counts(1, 0, 0));
        sample(&recorder, 50, counts(3, 0, 0));
        let traffic = recorder.traffic(at(50), 2);
        assert_eq!(traffic.from, at(95));
        assert_eq!(requests(&traffic.total), [0, 3]);
    }
}
