//! The result of a simulation.

use serde::Serialize;
use tidegate_config::KeyMask;
use tidegate_core::{CostSource, Mode, Rule, RuleSet, Span, Timestamp};

use crate::{
    backlog::tried_rates,
    compare::Comparison,
    frontier::Frontier,
    replay::{KeyCounts, RuleCounts, RuleSetReplay, key_values},
    stream::{DamagedLine, LineCounts, MAX_HELD, SORT_WINDOW, TimePrecision},
    suggest::Suggestion,
    sweep::SweepReport,
    timeline::Timeline,
};

/// The maximum number of keys that are listed for a rule.
const WORST_KEYS: usize = 10;

/// If the times in the log are in whole seconds, the results are inexact for rules with windows
/// shorter than `COARSE_FOR`.
const COARSE_FOR: Span = Span::from_secs(10);

/// The result of a simulation.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct SimulationReport {
    /// The rules file.
    pub rules_file: String,
    /// Whether the simulation was interrupted, so that the end of the log was not simulated.
    pub interrupted: bool,
    /// Whether key values are hashed.
    pub keys_hashed: bool,
    /// Problems with the log as a whole. The most serious problem comes first.
    pub warnings: Vec<String>,
    /// The counts of log lines.
    pub lines: LogLineCounts,
    /// The counts of requests.
    pub requests: Requests,
    /// The results for the rules, in the order of the rules file.
    pub rules: Vec<RuleReport>,
    /// The differences from the decisions with another rules file, if requested.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub comparison: Option<Comparison>,
    /// Suggested limits, if requested.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub suggestions: Vec<Suggestion>,
    /// Suggested token bucket bursts for several rates, if requested.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub frontier: Vec<Frontier>,
    /// The denials with several alternative limits for one rule, if requested.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sweep: Option<SweepReport>,
    /// Notes on the precision of the log, and on parts that were not simulated.
    pub notes: Vec<String>,
    /// All requests over time.
    pub timeline: Timeline,
}

/// The counts of log lines.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct LogLineCounts {
    /// The number of lines, excluding empty lines and headers.
    pub read: u64,
    /// The number of lines that do not match the format.
    pub damaged: u64,
    /// The first damaged lines.
    pub damaged_lines: Vec<DamagedLine>,
    /// Whether a log could not be read to the end.
    pub cut_off: bool,
    /// The number of lines without a valid HTTP request.
    pub without_request: u64,
    /// The number of lines without the client's address.
    pub without_client: u64,
    /// The number of lines whose time is earlier than the time of a preceding line.
    pub backwards: u64,
    /// The number of lines that were too far out of order to be sorted.
    pub late: u64,
    /// The time of the first request, in milliseconds since the Unix epoch.
    pub from_ms: Option<u64>,
    /// The time of the last request, in milliseconds since the Unix epoch.
    pub to_ms: Option<u64>,
    /// The precision of the times: `second`, `millisecond` or `microsecond`.
    pub precision: &'static str,
    /// The formats of the logs.
    pub formats: Vec<String>,
}

/// The requests of the log.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Requests {
    /// The number of decided requests.
    pub decided: u64,
    /// The number of decided requests that an enforced rule denied.
    pub denied: u64,
    /// The number of requests that the proxy would reject with status 400.
    pub refused: u64,
    /// The reasons for the first of these rejections.
    pub refusals: Vec<String>,
}

/// The result for one rule.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct RuleReport {
    /// The name of the rule.
    pub rule: String,
    /// `enforce` or `shadow`.
    pub mode: &'static str,
    /// Whether the rule was simulated.
    pub simulated: bool,
    /// The number of requests to which the rule applies.
    pub requests: u64,
    /// The number of requests that the rule denies (in shadow mode, would deny).
    pub denied: u64,
    /// The number of denials that depend on the precision of the log. The requests of these denials
    /// would have been admitted if they had arrived slightly later: by at most a second, or by at
    /// most a millisecond if the log times are in milliseconds. Effects on later requests are not
    /// included.
    pub denied_within_precision: u64,
    /// The number of requests that a queue delays.
    pub delayed: u64,
    /// The longest delay by a queue, in milliseconds.
    pub longest_delay_ms: u64,
    /// The number of keys.
    pub keys: u64,
    /// The number of keys with at least one denied request.
    pub keys_denied: u64,
    /// The limits.
    pub limits: Vec<LimitReport>,
    /// The keys with the most denials.
    pub worst: Vec<WorstKey>,
    /// Notes on how to interpret the counts.
    pub notes: Vec<String>,
    /// The requests to which the rule applies, over time.
    pub timeline: Timeline,
}

/// The result for one limit.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct LimitReport {
    /// The limit in short notation.
    pub limit: String,
    /// The number of requests that the limit denies.
    pub denied: u64,
}

/// A key with denials.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct WorstKey {
    /// The values of the key entries.
    pub key: Vec<String>,
    /// The number of denied requests.
    pub denied: u64,
    /// The time of the first denial, in milliseconds since the Unix epoch.
    pub first_ms: u64,
    /// The time of the last denial, in milliseconds since the Unix epoch.
    pub last_ms: u64,
}

impl SimulationReport {
    pub(crate) fn new(
        replay: &RuleSetReplay<'_>,
        counts: LineCounts,
        formats: Vec<String>,
        is_interrupted: bool,
    ) -> Self {
        let rules = replay.plan.rules();
        let reports = rules.iter().enumerate();
        Self {
            rules_file: replay.plan.name.clone(),
            interrupted: is_interrupted,
            keys_hashed: false,
            warnings: warnings(&counts, replay),
            rules: reports
                .map(|(at, _)| rule_report(replay, at, counts.precision))
                .collect(),
            notes: notes(&counts, &formats, replay),
            comparison: None,
            suggestions: Vec::new(),
            frontier: Vec::new(),
            sweep: None,
            timeline: replay.timeline.clone(),
            requests: Requests {
                decided: replay.decided,
                denied: replay.denied,
                refused: replay.refused,
                refusals: replay.refusals.clone(),
            },
            lines: LogLineCounts {
                read: counts.read,
                damaged: counts.damaged,
                damaged_lines: counts.shown,
                cut_off: counts.is_cut_off,
                without_request: counts.no_request,
                without_client: counts.no_peer,
                backwards: counts.backwards,
                late: counts.late,
                from_ms: counts.from.map(Timestamp::as_millis),
                to_ms: counts.to.map(Timestamp::as_millis),
                precision: match counts.precision {
                    TimePrecision::Second => "second",
                    TimePrecision::Millisecond => "millisecond",
                    TimePrecision::Microsecond => "microsecond",
                },
                formats,
            },
        }
    }
}

impl SimulationReport {
    /// If `mask` hashes values, replaces key values with their hashes. Damaged lines may contain
    /// key values, so their text is removed.
    #[must_use]
    pub fn masked(mut self, mask: &KeyMask) -> Self {
        if !mask.is_hashed() {
            return self;
        }
        self.keys_hashed = true;
        for line in &mut self.lines.damaged_lines {
            line.text = "(not shown, because keys are hashed)".to_owned();
        }
        let worst = self.rules.iter_mut().flat_map(|rule| &mut rule.worst);
        let mut keys: Vec<&mut Vec<String>> = worst.map(|worst| &mut worst.key).collect();
        if let Some(comparison) = &mut self.comparison {
            let changed = comparison.newly.iter_mut().chain(&mut comparison.no_longer);
            keys.extend(changed.map(|changed| &mut changed.key));
        }
        for value in keys.into_iter().flatten() {
            *value = mask.value(value).into_owned();
        }
        self
    }
}

fn warnings(counts: &LineCounts, replay: &RuleSetReplay<'_>) -> Vec<String> {
    let mut warnings = Vec::new();
    // Warn if at least 1 in 20 lines is damaged.
    if counts.damaged.saturating_mul(20) >= counts.read && counts.damaged > 0 {
        warnings.push(format!(
            "{} of {} lines ({}) do not match the log format: the results are incomplete",
            counts.damaged,
            counts.read,
            percent(counts.damaged, counts.read)
        ));
    }
    warnings.extend(counts.cut_off.iter().cloned());
    if counts.late > 0 {
        warnings.push(format!(
            "lines that were more than {1} s (or {MAX_HELD} lines) out of order, and were decided late: {0}; sort the log by time",
            counts.late,
            SORT_WINDOW.as_secs_ceil()
        ));
    }
    if replay.full > 0 {
        warnings.push(format!(
            "the memory store was full for {} requests; raise store.memory.max_keys or max_bytes",
            replay.full
        ));
    }
    let evicted = replay.store.stats().evicted;
    if evicted > 0 {
        warnings.push(format!(
            "the memory store evicted {evicted} keys to make room, as the server would"
        ));
    }
    warnings
}

/// Returns the notes on the simulation as a whole.
fn notes(counts: &LineCounts, formats: &[String], replay: &RuleSetReplay<'_>) -> Vec<String> {
    let mut notes = Vec::new();
    match counts.precision {
        TimePrecision::Second => notes.push(
            "the log's timestamps have a resolution of one second; requests within a second are replayed in file order".to_owned(),
        ),
        TimePrecision::Millisecond => notes.push("the log's timestamps have a resolution of one millisecond".to_owned()),
        TimePrecision::Microsecond => notes.push("the log's timestamps have a resolution of one microsecond".to_owned()),
    }
    if counts.only_completion > 0 {
        notes.push(
            "the logged times may be the times at which the responses ended, as in nginx, so long requests are replayed too late; log the duration as well ($request_time), and name it with --format"
                .to_owned(),
        );
    }
    if counts.backwards > 0 {
        notes.push(format!(
            "lines with an earlier time than a line before them, which were sorted within {1} s: {0}",
            counts.backwards,
            SORT_WINDOW.as_secs_ceil()
        ));
    }
    if counts.no_request > 0 {
        notes.push(format!(
            "lines without a valid HTTP request, which were skipped: {}",
            counts.no_request
        ));
    }
    // A recorded request contains an address only in its entries, where it may be hashed.
    if counts.no_peer > 0 && formats.iter().any(|format| format != "record") {
        notes.push(format!(
            "lines without a client address, to which rules that use `ip` do not apply: {}",
            counts.no_peer
        ));
    }
    let used = replay.plan.extractor.names().iter().zip(&replay.has_seen);
    let missing: Vec<&str> = used
        .filter(|(_, seen)| !**seen)
        .map(|(name, _)| &**name)
        .collect();
    if !missing.is_empty() {
        notes.push(format!(
            "no request has these entries that the rules use: {}; if the log has them under another name, use --entry ENTRY=FIELD",
            missing.join(", ")
        ));
    }
    let config = &replay.plan.config;
    if config.envoy.is_some() {
        notes.push("`envoy`: the rules of Envoy's rate limit service are not simulated".to_owned());
    }
    if !config.quotas.is_empty() {
        notes.push(
            "`quotas` are not simulated: their division depends on usage reports from Envoy"
                .to_owned(),
        );
    }
    notes
}

/// Returns the number of denials that depend on the precision of the times in the log.
fn denied_within(counts: &RuleCounts, precision: TimePrecision) -> u64 {
    match precision {
        TimePrecision::Second => counts.denied_within[0],
        TimePrecision::Millisecond => counts.denied_within[1],
        TimePrecision::Microsecond => 0,
    }
}

fn rule_report(replay: &RuleSetReplay<'_>, at: usize, precision: TimePrecision) -> RuleReport {
    let rules = replay.plan.rules();
    let (Some(rule), counts) = (rules.iter().nth(at), &replay.rules[at]) else {
        unreachable!("there are counts for each rule")
    };
    let denied = counts.keys.values().filter(|key| key.denied > 0);
    let limits = rule.limits().iter().zip(&counts.denied_by);
    RuleReport {
        rule: rule.name().to_owned(),
        mode: match rule.mode() {
            Mode::Enforce => "enforce",
            Mode::Shadow => "shadow",
        },
        simulated: !replay.is_excluded[at],
        requests: counts.requests,
        denied: counts.denied,
        denied_within_precision: denied_within(counts, precision),
        delayed: counts.delayed,
        longest_delay_ms: counts.longest_delay.as_millis_ceil(),
        keys: count(counts.keys.len()),
        keys_denied: count(denied.count()),
        limits: limits
            .map(|(limit, denied)| LimitReport {
                limit: limit.policy().to_string(),
                denied: *denied,
            })
            .collect(),
        worst: worst(
            rules,
            counts.keys.iter().map(|(key, counts)| (&**key, counts)),
        ),
        notes: rule_notes(replay, at, precision),
        timeline: counts.timeline.clone(),
    }
}

fn worst<'k>(
    rules: &RuleSet,
    keys: impl Iterator<Item = (&'k [u8], &'k KeyCounts)>,
) -> Vec<WorstKey> {
    let mut denied: Vec<(&[u8], &KeyCounts)> =
        keys.filter(|(_, counts)| counts.denied > 0).collect();
    denied.sort_unstable_by(|(key, one), (other_key, other)| {
        other
            .denied
            .cmp(&one.denied)
            .then_with(|| key.cmp(other_key))
    });
    denied.truncate(WORST_KEYS);
    let report = |(key, counts): (&[u8], &KeyCounts)| WorstKey {
        key: key_values(rules, key),
        denied: counts.denied,
        first_ms: counts.first_denied.as_millis(),
        last_ms: counts.last_denied.as_millis(),
    };
    denied.into_iter().map(report).collect()
}

/// Returns notes on how to interpret the counts of a rule.
fn rule_notes(replay: &RuleSetReplay<'_>, at: usize, precision: TimePrecision) -> Vec<String> {
    let Some(rule) = replay.plan.rules().iter().nth(at) else {
        return Vec::new();
    };
    if replay.is_excluded[at] {
        return vec![
            "not simulated: a concurrency limit depends on how long requests are in flight, which the simulation does not model; its lease is not simulated either"
                .to_owned(),
        ];
    }
    let mut notes = entry_notes(replay, rule);
    notes.extend(response_cost_note(replay, rule));
    notes.extend(suggestion_note(replay, rule));
    notes.extend(precision_notes(rule, &replay.rules[at], precision));
    notes
}

/// Returns notes on entries that the rule uses and no request has.
fn entry_notes(replay: &RuleSetReplay<'_>, rule: &Rule) -> Vec<String> {
    let names = replay.plan.extractor.names();
    let is_missing = |entry: &str| {
        let known = names.iter().position(|name| **name == *entry);
        known.is_some_and(|at| !replay.has_seen[at])
    };
    let mut notes = Vec::new();
    for entry in rule.key().filter(|entry| is_missing(entry)) {
        notes.push(format!(
            "applies to no request: no request has the key entry `{entry}`"
        ));
    }
    let mut conditions: Vec<&str> = rule.applies_when().entry_names().collect();
    conditions.retain(|entry| is_missing(entry));
    conditions.sort_unstable();
    conditions.dedup();
    for entry in conditions {
        notes.push(format!(
            "the condition on `{entry}` was evaluated as if the entry were absent: no request has it"
        ));
    }
    if let CostSource::Entry(entry) = rule.cost()
        && is_missing(entry)
    {
        notes.push(format!(
            "no request has the entry `{entry}` with the cost, so the server would reject all requests of this rule"
        ));
    }
    notes
}

/// Returns a note if the rule's charges depend on the response.
fn response_cost_note(replay: &RuleSetReplay<'_>, rule: &Rule) -> Option<String> {
    let cost = rule.response_cost();
    if cost.is_independent_of_response() {
        return None;
    }
    let mut missing: Vec<&str> = cost.entry_names().collect();
    missing.retain(|name| !replay.seen_response.iter().any(|seen| **seen == **name));
    Some(if missing.is_empty() {
        "charged by the response values in the log; a live request holds its whole cost until its response, so more concurrent requests may be denied"
            .to_owned()
    } else {
        format!(
            "the log does not contain {} of the response, so the initial cost stays charged",
            missing
                .iter()
                .map(|name| format!("`{name}`"))
                .collect::<Vec<_>>()
                .join(", ")
        )
    })
}

/// Returns a note if no burst is suggested because the rule's charges depend on the response.
fn suggestion_note(replay: &RuleSetReplay<'_>, rule: &Rule) -> Option<String> {
    let is_independent = rule.response_cost().is_independent_of_response();
    let is_omitted =
        replay.is_suggesting && !is_independent && !tried_rates(rule.limits()).is_empty();
    is_omitted.then(|| {
        "no burst is suggested, because the response changes what a request costs".to_owned()
    })
}

/// Returns notes on counts that depend on the precision of the log times.
fn precision_notes(rule: &Rule, counts: &RuleCounts, precision: TimePrecision) -> Vec<String> {
    let mut notes = Vec::new();
    let within = denied_within(counts, precision);
    if within > 0 {
        notes.push(format!(
            "{within} of {} denials are within the resolution of the log's timestamps: up to a {} later, the same request would have been admitted",
            counts.denied,
            if precision == TimePrecision::Second { "second" } else { "millisecond" }
        ));
    }
    let is_short = |window: Span| window < COARSE_FOR && window > Span::ZERO;
    let coarse = rule
        .limits()
        .iter()
        .filter(|limit| is_short(limit.window()));
    let coarse: Vec<&str> = coarse.map(|limit| &**limit.policy()).collect();
    if precision == TimePrecision::Second && !coarse.is_empty() && counts.requests > 0 {
        notes.push(format!(
            "imprecise: {} with timestamps in whole seconds; all requests within a second seem to arrive at once",
            coarse.join(", ")
        ));
    }
    notes
}

/// Formats a share in percent, rounded for readability: `3.1%`, `0.04%`, `<0.01%`.
#[must_use]
pub fn percent(part: u64, whole: u64) -> String {
    if part == 0 || whole == 0 {
        return "0%".to_owned();
    }
    // The share in hundredths of a percent. The product fits in 128 bits.
    let exact = u128::from(part) * 10_000 / u128::from(whole);
    match exact {
        0 => "<0.01%".to_owned(),
        1..100 => format!("0.{exact:02}%"),
        _ if exact.is_multiple_of(100) => format!("{}%", exact / 100),
        _ => format!("{}.{}%", exact / 100, exact / 10 % 10),
    }
}

/// Converts a length to 64 bits. A length in memory always fits.
fn count(length: usize) -> u64 {
    length as u64
}

#[cfg(test)]
mod tests {
    use super::percent;

    #[test]
    fn shares_are_rounded_down() {
        for (part, whole, expected) in [
            (0, 0, "0%"),
            (0, 5, "0%"),
            (1, 1, "100%"),
            (1, 2, "50%"),
            (31, 998, "3.1%"),
            (1, 8, "12.5%"),
            (999, 1_000, "99.9%"),
            (1, 1_000, "0.10%"),
            (1, 1_000_000, "<0.01%"),
            (u64::MAX, u64::MAX, "100%"),
        ] {
            assert_eq!(percent(part, whole), expected, "{part} of {whole}");
        }
    }
}
