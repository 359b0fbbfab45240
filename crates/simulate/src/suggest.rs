//! Suggests limits: counts the units in the busiest window of each key, and finds the smallest
//! limit that denies at most a given share of the keys.

use std::collections::VecDeque;

use serde::Serialize;
use tidegate_core::{Algorithm, Limit, Limits, Span, Timestamp};

use crate::{replay::Replay, share::Share};

/// The number of parts of a window. A counted window consists of whole parts, so it may be one part
/// longer than the window of the limit. A suggested limit is therefore never too low.
const PARTS: u64 = 60;

/// A suggestion for one limit of a rule.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Suggestion {
    /// The rule.
    pub rule: String,
    /// The length of the window.
    pub window_ms: u64,
    /// The number of keys.
    pub keys: u64,
    /// The number of units in the busiest window of the median key.
    pub p50: u64,
    /// The number of units in the busiest window of the key at the 90th percentile.
    pub p90: u64,
    /// The number of units in the busiest window of the key at the 99th percentile.
    pub p99: u64,
    /// The number of units in the busiest window of the key at the 99.9th percentile.
    pub p99_9: u64,
    /// The number of units in the busiest window of the busiest key.
    pub max: u64,
    /// The smallest limit that denies at most the given share of the keys, such as `34/min`.
    pub limit: String,
    /// The number of keys that the suggested limit would deny.
    pub keys_denied: u64,
}

/// The busiest window of one key.
#[derive(Clone, Debug, Default)]
pub(crate) struct Peak {
    /// The parts of the window: the number of each part, and its units.
    parts: VecDeque<(u64, u64)>,
    /// The sum of the parts. It can exceed `u64`, because a log has any number of requests.
    sum: u128,
    peak: u64,
}

impl Peak {
    /// Counts `units` at `now`, which must not be earlier than in the last call.
    pub(crate) fn count(&mut self, now: Timestamp, window: Span, units: u64) {
        let part = now.as_micros() / (window.as_micros() / PARTS).max(1);
        while let Some((_, old)) = self.parts.pop_front_if(|(first, _)| *first + PARTS < part) {
            self.sum -= u128::from(old);
        }
        match self.parts.back_mut() {
            Some((last, counted)) if *last == part => {
                let before = std::mem::replace(counted, counted.saturating_add(units));
                self.sum += u128::from(*counted - before);
            }
            _ => {
                self.parts.push_back((part, units));
                self.sum += u128::from(units);
            }
        }
        let sum = u64::try_from(self.sum).unwrap_or(u64::MAX);
        self.peak = self.peak.max(sum);
    }
}

/// Returns the windows of a rule's limits that count in windows, without repetition. A bucket has no
/// window: its limits are suggested as rates with bursts.
pub(crate) fn windows(limits: &Limits) -> Vec<Span> {
    let counts_in_windows = |limit: &&Limit| {
        matches!(
            limit.algorithm(),
            Algorithm::FixedWindow { .. }
                | Algorithm::SlidingWindowLog { .. }
                | Algorithm::SlidingWindowCounter { .. }
        )
    };
    let windows = limits.iter().filter(counts_in_windows);
    let mut windows: Vec<Span> = windows.map(Limit::window).collect();
    windows.sort_unstable();
    windows.dedup();
    windows
}

/// Suggests a limit for each window of each rule.
pub(crate) fn suggestions(replay: &Replay<'_>, share: Share) -> Vec<Suggestion> {
    let mut suggestions = Vec::new();
    for (rule, counts) in replay.plan.rules().iter().zip(&replay.rules) {
        for (at, window) in counts.windows.iter().enumerate() {
            let peaks = counts.keys.values().filter_map(|key| key.peaks.get(at));
            let mut peaks: Vec<u64> = peaks.map(|peak| peak.peak).collect();
            peaks.sort_unstable();
            // A length in memory always fits in 64 bits.
            let keys = peaks.len() as u64;
            let Some(max) = peaks.last().copied() else {
                continue;
            };
            let ranked = |rank: u64| {
                let at = usize::try_from(rank.clamp(1, keys) - 1).unwrap_or(0);
                peaks[at]
            };
            // The percentile is the value of the key at the nearest rank.
            let percentile = |per_mille: u64| ranked((keys * per_mille).div_ceil(1_000));
            let limit = ranked(keys - share.of(keys));
            suggestions.push(Suggestion {
                rule: rule.name().to_owned(),
                window_ms: window.as_millis_ceil(),
                keys,
                p50: percentile(500),
                p90: percentile(900),
                p99: percentile(990),
                p99_9: percentile(999),
                max,
                limit: format!("{limit}/{}", period(*window)),
                keys_denied: peaks.iter().filter(|peak| **peak > limit).count() as u64,
            });
        }
    }
    suggestions
}

/// Returns a period in the notation of the rules file: `min`, `5min`, `90s`.
fn period(window: Span) -> String {
    const UNITS: [(u64, &str); 4] = [
        (86_400_000, "d"),
        (3_600_000, "h"),
        (60_000, "min"),
        (1_000, "s"),
    ];
    let millis = window.as_millis_ceil().max(1);
    let unit = UNITS.iter().find(|(unit, _)| millis.is_multiple_of(*unit));
    match unit {
        Some((unit, name)) if millis == *unit => (*name).to_owned(),
        Some((unit, name)) => format!("{}{name}", millis / unit),
        None => format!("{millis}ms"),
    }
}

/// Returns the suggestions in the notation of a rules file.
#[must_use]
pub fn as_yaml(suggestions: &[Suggestion]) -> String {
    let mut yaml = String::from("rules:\n");
    let mut rest = suggestions;
    while let Some(first) = rest.first() {
        let length = rest
            .iter()
            .take_while(|other| other.rule == first.rule)
            .count();
        let (own, others) = rest.split_at(length);
        rest = others;
        let limits: Vec<&str> = own.iter().map(|suggestion| &*suggestion.limit).collect();
        // A name is printable ASCII; a JSON string is valid YAML.
        let is_plain = first
            .rule
            .bytes()
            .all(|byte| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte));
        let name = if is_plain {
            first.rule.clone()
        } else {
            format!("{:?}", first.rule)
        };
        yaml.push_str(&format!(
            "  - name: {name}\n    limits: [{}]\n",
            limits.join(", ")
        ));
    }
    yaml
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_peak_is_the_busiest_window_and_never_too_low() {
        let window = Span::from_secs(60);
        let mut peak = Peak::default();
        let at = |second: u64| Timestamp::from_micros(second * 1_000_000);
        for second in [0, 59, 60, 61, 200, 201] {
            peak.count(at(second), window, 1);
        }
        // The instants 0 and 60 are a window apart. Requests at both instants count together,
        // because parts are counted as a whole.
        assert_eq!(peak.peak, 3);
        peak.count(at(202), window, 5);
        assert_eq!(peak.peak, 7);
        assert!(peak.parts.len() <= 61);
    }

    #[test]
    fn periods_are_written_as_in_a_rules_file() {
        for (millis, expected) in [
            (1_000, "s"),
            (60_000, "min"),
            (300_000, "5min"),
            (90_000, "90s"),
            (1_500, "1500ms"),
            (604_800_000, "7d"),
        ] {
            assert_eq!(period(Span::from_millis(millis)), expected);
            assert!(tidegate_core::notation::rate(&format!("1/{expected}")).is_ok());
        }
    }
}
