//! Metrics per rule: each verdict is counted for the rule that decided it.

use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering},
};

use arc_swap::ArcSwap;
use foldhash::HashMap;
use tidegate_core::{Reason, Verdict};
use tidegate_net::prometheus::{Metric, Page};

use super::{Answer, TrafficCounts, answer_index, answer_label};

/// The maximum number of rules with their own label, in the order of the rules file. All further
/// rules are counted together under the label `other`, so that 10,000 rules do not create 10,000
/// time series.
pub const MAX_RULE_LABELS: usize = 1_000;

/// The outcomes of decisions that a rule made. If the store is full or unreachable, no rule makes
/// the decision.
const OUTCOMES: [Answer; 3] = [None, Some(Reason::Limit), Some(Reason::Blocked)];

/// The label of the rules without their own label.
const OTHER: &str = "other";

const DECISIONS: Metric<2> = Metric::counter(
    "tidegate_rule_decisions_total",
    ["rule", "outcome"],
    "Decisions by outcome and by the rule that decided.",
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

#[derive(Debug, Default)]
pub(super) struct Rules(ArcSwap<Table>);

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
}

impl Rules {
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

    pub(super) fn count(&self, verdict: &Verdict<'_>) {
        let table = self.0.load();
        if let Some(rule) = verdict.rule
            && let Some(count) = table.of(rule).verdicts.get(answer_index(verdict.reason))
        {
            count.fetch_add(1, Ordering::Relaxed);
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

    pub(super) fn collect(&self, page: &mut Page<'_>) {
        let table = self.0.load();
        let decisions = table.labelled().flat_map(|(rule, counters)| {
            OUTCOMES.map(|answer| {
                let count = &counters.verdicts[answer_index(answer)];
                ([rule, answer_label(answer)], count.load(Ordering::Relaxed))
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
    }
}

impl Counters {
    fn traffic(&self) -> TrafficCounts {
        let verdicts = OUTCOMES.map(|answer| {
            let count = self.verdicts[answer_index(answer)].load(Ordering::Relaxed);
            (answer, count)
        });
        let denied = verdicts.iter().filter(|(answer, _)| answer.is_some());
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
        // A rule may itself be named `other`. The rule then uses the counter of the label `other`,
        // and this counter must be written only once.
        let other = (!self.by_name.contains_key(OTHER)).then_some((OTHER, &*self.other));
        named.chain(other)
    }
}
