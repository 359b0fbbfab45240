//! Suggests limits: calculates the total cost in each key's busiest window, and finds the smallest
//! limit that denies at most a given share of the keys.

use serde::Serialize;
use tidegate_core::Span;

use crate::{replay::RuleSetReplay, share::Share};

/// A suggestion for one of a rule's limits.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Suggestion {
    /// The rule.
    pub rule: String,
    /// The window length, in milliseconds.
    pub window_ms: u64,
    /// The number of keys.
    pub keys: u64,
    /// The total cost in the median key's busiest window.
    pub p50: u64,
    /// The total cost in the busiest window of the key at the 90th percentile.
    pub p90: u64,
    /// The total cost in the busiest window of the key at the 99th percentile.
    pub p99: u64,
    /// The total cost in the busiest window of the key at the 99.9th percentile.
    pub p99_9: u64,
    /// The total cost in the busiest key's busiest window.
    pub max: u64,
    /// The smallest limit that denies at most the given share of the keys, such as `34/min`.
    pub limit: String,
    /// The number of keys that the suggested limit would deny.
    pub keys_denied: u64,
}

/// Suggests a limit for each window length in each rule.
pub(crate) fn suggestions(replay: &RuleSetReplay<'_>, share: Share) -> Vec<Suggestion> {
    let mut suggestions = Vec::new();
    for (rule, counts) in replay.plan.rules().iter().zip(&replay.rules) {
        for (at, window) in counts.windows.iter().enumerate() {
            let units = counts.keys.values().filter_map(|key| key.windows.get(at));
            let mut units: Vec<u64> = units.map(|window| window.units).collect();
            units.sort_unstable();
            // A length in memory always fits in 64 bits.
            let keys = units.len() as u64;
            let Some(max) = units.last().copied() else {
                continue;
            };
            let ranked = |rank: u64| {
                let at = usize::try_from(rank.clamp(1, keys) - 1).unwrap_or(0);
                units[at]
            };
            // Percentiles are computed with the nearest-rank method.
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
                keys_denied: units.iter().filter(|peak| **peak > limit).count() as u64,
            });
        }
    }
    suggestions
}

/// Formats a period in the notation of the rules file: `min`, `5min`, `90s`.
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

/// Formats the suggestions in the notation of a rules file.
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
