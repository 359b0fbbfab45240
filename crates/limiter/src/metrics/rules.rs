//! Metrics per rule. Each verdict counts for the rule that it names.

use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering},
};

use arc_swap::ArcSwap;
use foldhash::HashMap;
use tidegate::DecidedRequest;
use tidegate_core::{Charge, Cost, DESCRIPTOR_KEY, Limit, Outcome, Reason, RuleSet, Verdict};
use tidegate_net::prometheus::{Metric, Page};

use super::{
    TrafficCounts, VerdictKind,
    histogram::{Histogram, nanos_to_seconds},
    verdict_kind_index, verdict_kind_label,
};

/// The maximum number of rules with their own label, in the order of the rules file. All further
/// rules are counted together under the label `other`, so that 10,000 rules do not create 10,000
/// time series.
pub const MAX_RULE_LABELS: usize = 1_000;

/// The outcomes that are counted per rule. A denial because the store is full or unreachable is not
/// counted for a rule.
const OUTCOMES: [VerdictKind; 3] = [None, Some(Reason::Limit), Some(Reason::Blocked)];

/// The label of the rules without their own label.
const OTHER: &str = "other";

const DECISIONS: Metric<2> = Metric::counter(
    "tidegate_rule_decisions_total",
    ["rule", "outcome"],
    "Decisions by outcome and deciding rule.",
);
const SHADOW_DENIALS: Metric<1> = Metric::counter(
    "tidegate_rule_shadow_denials_total",
    ["rule"],
    "Times that a limit in shadow mode would have denied a request.",
);
const SOFT_ADMISSIONS: Metric<1> = Metric::counter(
    "tidegate_rule_soft_admissions_total",
    ["rule"],
    "Times that a limit admitted a request within its soft allowance.",
);

const DENIED_COST: Metric<1> = Metric::counter(
    "tidegate_rule_denied_cost_total",
    ["rule"],
    "Total cost of the requests that a rule denied.",
);
const UTILIZATION: Metric<1> = Metric::histogram(
    "tidegate_rule_utilization_ratio",
    ["rule"],
    "Share of the limit that the key of a request had used after the decision; with several limits, the share of the most used limit. Each thread measures one in 64 of its decisions.",
);
const LATENCY: Metric<1> = Metric::histogram(
    "tidegate_rule_decision_duration_seconds",
    ["rule"],
    "Latency of the decisions about requests to which a rule applied. Each thread measures one in 64 of its decisions.",
);
const LIMIT: Metric<2> = Metric::gauge(
    "tidegate_limit",
    ["rule", "policy"],
    "Maximum number of units that a limit of a rule admits at once for an idle key.",
);

/// The upper bounds of the utilization buckets: each bound as a percentage and as a ratio.
const UTILIZATION_BOUNDS: [(u64, f64); 8] = [
    (10, 0.1),
    (25, 0.25),
    (50, 0.5),
    (75, 0.75),
    (80, 0.8),
    (90, 0.9),
    (95, 0.95),
    (100, 1.0),
];

/// The upper bounds of a rule's latency buckets: each bound in nanoseconds and in seconds. These
/// histograms have fewer buckets than the histogram of all decisions, because there can be a
/// thousand of them.
const LATENCY_BOUNDS: [(u64, f64); 6] = [
    (1_000, 1e-6),
    (10_000, 1e-5),
    (100_000, 1e-4),
    (1_000_000, 1e-3),
    (10_000_000, 1e-2),
    (100_000_000, 1e-1),
];

#[derive(Debug, Default)]
pub(super) struct RuleMetrics(ArcSwap<Table>);

#[derive(Debug, Default)]
struct Table {
    by_name: HashMap<Box<str>, Arc<Counters>>,
    /// The names of the rules with their own label, in the order of the rules file.
    names: Vec<Box<str>>,
    other: Arc<Counters>,
}

#[derive(Debug, Default)]
struct Counters {
    verdicts: [AtomicU64; OUTCOMES.len()],
    shadow_denials: AtomicU64,
    soft_admissions: AtomicU64,
    denied_cost: AtomicU64,
    utilization: Histogram<{ UTILIZATION_BOUNDS.len() + 1 }>,
    latency: Histogram<{ LATENCY_BOUNDS.len() + 1 }>,
}

impl RuleMetrics {
    pub(super) fn rename<'n>(&self, names: impl Iterator<Item = &'n str>) {
        let old = self.0.load();
        let names: Vec<Box<str>> = names.take(MAX_RULE_LABELS).map(Box::from).collect();
        let counters = |name: &str| old.by_name.get(name).map(Arc::clone).unwrap_or_default();
        let by_name = names
            .iter()
            .map(|name| (name.clone(), counters(name)))
            .collect();
        let other = Arc::clone(&old.other);
        self.0.store(Arc::new(Table {
            by_name,
            names,
            other,
        }));
    }

    pub(super) fn count(&self, decided: DecidedRequest<'_>, verdict: &Verdict<'_>) {
        let table = self.0.load();
        if let Some(rule) = verdict.rule
            && let Some(count) = table
                .of(rule)
                .verdicts
                .get(verdict_kind_index(verdict.reason))
        {
            count.fetch_add(1, Ordering::Relaxed);
            if !verdict.allowed {
                let cost = decided.rules.rule(rule);
                let cost = cost.and_then(|rule| rule.cost_of(decided.request).ok());
                let units = cost.map_or(0, Cost::units);
                table
                    .of(rule)
                    .denied_cost
                    .fetch_add(units, Ordering::Relaxed);
            }
        }
        for line in &verdict.lines {
            let Some(rule) = line.rule else { continue };
            if line.shadow && !line.outcome.allowed {
                table
                    .of(rule)
                    .shadow_denials
                    .fetch_add(1, Ordering::Relaxed);
            }
            if line.outcome.over_limit && verdict.allowed {
                table
                    .of(rule)
                    .soft_admissions
                    .fetch_add(1, Ordering::Relaxed);
            }
        }
    }

    /// Records a sampled decision on `charges` that took `nanos` nanoseconds. `outcomes` contains
    /// the outcomes of the charges' limits. Outcomes are missing if a fallback policy was applied.
    #[cold]
    pub(super) fn observe_sample(&self, nanos: u64, charges: &[Charge<'_>], outcomes: &[Outcome]) {
        let table = self.0.load();
        let mut rest = outcomes;
        for charge in charges {
            let (own, others) = rest.split_at(charge.limits.len().min(rest.len()));
            rest = others;
            // The limits of an override of a descriptor have a rule name, but belong to Envoy's
            // rate limit service, which has its own statistics.
            let is_of_descriptor = charge.key.starts_with(&DESCRIPTOR_KEY);
            let Some(rule) = charge.limits.name().filter(|_| !is_of_descriptor) else {
                continue;
            };
            let counters = table.of(rule);
            counters.latency.observe(&LATENCY_BOUNDS, nanos);
            let utilizations = charge.limits.iter().zip(own);
            let utilizations = utilizations.map(|(limit, outcome)| used_percent(limit, outcome));
            if let Some(percent) = utilizations.max() {
                counters.utilization.observe(&UTILIZATION_BOUNDS, percent);
            }
        }
    }

    /// Calls `read` with the counts of each rule.
    pub(super) fn with_counts(
        &self,
        read: impl FnOnce(&mut dyn Iterator<Item = (&str, TrafficCounts)>),
    ) {
        let table = self.0.load();
        let mut counts = table
            .labelled()
            .map(|(rule, counters)| (rule, counters.traffic()));
        read(&mut counts);
    }

    pub(super) fn collect(&self, rules: &RuleSet, page: &mut Page<'_>) {
        let table = self.0.load();
        let decisions = table.labelled().flat_map(|(rule, counters)| {
            OUTCOMES.map(|kind| {
                let count = &counters.verdicts[verdict_kind_index(kind)];
                (
                    [rule, verdict_kind_label(kind)],
                    count.load(Ordering::Relaxed),
                )
            })
        });
        page.family(&DECISIONS, decisions);
        let shadow_denials = table
            .labelled()
            .map(|(rule, counters)| ([rule], counters.shadow_denials.load(Ordering::Relaxed)));
        page.family(&SHADOW_DENIALS, shadow_denials);
        let soft_admissions = table
            .labelled()
            .map(|(rule, counters)| ([rule], counters.soft_admissions.load(Ordering::Relaxed)));
        page.family(&SOFT_ADMISSIONS, soft_admissions);
        let denied_costs = table
            .labelled()
            .map(|(rule, counters)| ([rule], counters.denied_cost.load(Ordering::Relaxed)));
        page.family(&DENIED_COST, denied_costs);
        // The histogram of a rule is exported only after its first sample, because each histogram
        // adds many time series.
        let utilizations = table.labelled().filter_map(|(rule, counters)| {
            let counts = Histogram::sum(std::iter::once(&counters.utilization));
            let sample = || counts.to_sample(&UTILIZATION_BOUNDS, percent_to_ratio);
            (!counts.is_empty()).then(|| ([rule], sample()))
        });
        page.histograms(&UTILIZATION, utilizations);
        let latencies = table.labelled().filter_map(|(rule, counters)| {
            let counts = Histogram::sum(std::iter::once(&counters.latency));
            let sample = || counts.to_sample(&LATENCY_BOUNDS, nanos_to_seconds);
            (!counts.is_empty()).then(|| ([rule], sample()))
        });
        page.histograms(&LATENCY, latencies);
        let limits = rules.iter().take(MAX_RULE_LABELS).flat_map(|rule| {
            // Two equal limits of a rule would export the same time series twice.
            let mut limits: Vec<&Limit> = rule.limits().iter().collect();
            limits.sort_by_key(|limit| limit.policy());
            limits.dedup_by_key(|limit| limit.policy());
            limits
                .into_iter()
                .map(|limit| ([rule.name(), limit.policy()], limit.quota()))
        });
        page.family(&LIMIT, limits);
    }
}

/// Returns how much of a limit a key has used, in percent, rounded down. The soft allowance is part
/// of the limit.
fn used_percent(limit: &Limit, outcome: &Outcome) -> u64 {
    let hard = outcome.limit.saturating_add(limit.soft_allowance());
    let used = hard.saturating_sub(outcome.remaining);
    let percent = u128::from(used) * 100 / u128::from(hard.max(1));
    u64::try_from(percent).unwrap_or(u64::MAX)
}

/// Converts a sum of percentages to a sum of ratios.
#[expect(
    clippy::cast_precision_loss,
    reason = "a histogram's sum is a float in the exposition format"
)]
fn percent_to_ratio(percent: u64) -> f64 {
    percent as f64 / 100.0
}

impl Counters {
    fn traffic(&self) -> TrafficCounts {
        let verdicts = OUTCOMES.map(|kind| {
            let count = self.verdicts[verdict_kind_index(kind)].load(Ordering::Relaxed);
            (kind, count)
        });
        let denied = verdicts.iter().filter(|(kind, _)| kind.is_some());
        TrafficCounts {
            requests: verdicts.iter().map(|(_, count)| count).sum(),
            denied: denied.map(|(_, count)| count).sum(),
            shadow_denied: self.shadow_denials.load(Ordering::Relaxed),
        }
    }
}

impl Table {
    fn of(&self, rule: &str) -> &Counters {
        self.by_name.get(rule).unwrap_or(&self.other)
    }

    fn labelled(&self) -> impl Iterator<Item = (&str, &Counters)> {
        let named = self.names.iter().map(|name| (&**name, self.of(name)));
        // A rule may itself be named `other`. If a rule is named `other`, the label `other` must
        // not be written a second time.
        let other = (!self.by_name.contains_key(OTHER)).then_some((OTHER, &*self.other));
        named.chain(other)
    }
}

#[cfg(test)]
mod tests {
    use tidegate_core::Limits;

    use super::*;

    #[test]
    fn an_override_of_a_descriptor_is_not_counted_for_a_rule() {
        let metrics = RuleMetrics::default();
        let limits = Limits::new(vec!["10/s".parse().unwrap()]).unwrap();
        let limits = limits.named("envoy:shop/api_key");
        let key = [&DESCRIPTOR_KEY[..], b"shop"].concat();
        for (key, samples) in [(&*key, false), (b"a rule of the file", true)] {
            let charge = Charge::new(key, &limits, Cost::ONE).unwrap();
            metrics.observe_sample(500, &[charge], &[]);
            let latency = Histogram::sum(std::iter::once(&metrics.0.load().other.latency));
            assert_eq!(!latency.is_empty(), samples);
        }
    }
}
