//! Metrics per rule: each verdict is counted for the rule that decided it.

use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering},
};

use arc_swap::ArcSwap;
use foldhash::HashMap;
use tidegate_core::Verdict;
use tidegate_net::prometheus::Text;

use super::{ANSWERS, answer_index, answer_label};

/// The maximum number of rules with their own label, in the order of the rules file. All further
/// rules are counted together as `other`, so that 10,000 rules do not create 10,000 time series.
pub const MAX_RULE_LABELS: usize = 1_000;

/// The label of the rules without their own label.
const OTHER: &str = "other";

#[derive(Debug, Default)]
pub(super) struct Rules(ArcSwap<Table>);

#[derive(Debug, Default)]
struct Table {
    by_name: HashMap<Box<str>, Arc<Counters>>,
    /// The names in the order of the rules file.
    names: Vec<Box<str>>,
    other: Arc<Counters>,
}

#[derive(Debug, Default)]
struct Counters {
    verdicts: [AtomicU64; ANSWERS.len()],
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
        if let Some(rule) = verdict.rule {
            table.of(rule).verdicts[answer_index(verdict.reason)].fetch_add(1, Ordering::Relaxed);
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

    pub(super) fn write(&self, text: &mut Text) {
        let table = self.0.load();
        let name = "tidegate_rule_decisions_total";
        text.family(name, "counter", "Decisions by deciding rule and outcome.");
        for (rule, counters) in table.labelled() {
            for answer in ANSWERS {
                let count = counters.verdicts[answer_index(answer)].load(Ordering::Relaxed);
                text.sample(
                    name,
                    &[("rule", rule), ("outcome", answer_label(answer))],
                    count,
                );
            }
        }
        let name = "tidegate_rule_shadow_denials_total";
        text.family(
            name,
            "counter",
            "Times that a shadow limit would have denied.",
        );
        for (rule, counters) in table.labelled() {
            text.sample(
                name,
                &[("rule", rule)],
                counters.shadow_denials.load(Ordering::Relaxed),
            );
        }
        let name = "tidegate_rule_soft_admissions_total";
        text.family(
            name,
            "counter",
            "Times that a limit admitted within its soft allowance.",
        );
        for (rule, counters) in table.labelled() {
            text.sample(
                name,
                &[("rule", rule)],
                counters.soft_admissions.load(Ordering::Relaxed),
            );
        }
    }
}

impl Table {
    fn of(&self, rule: &str) -> &Counters {
        self.by_name.get(rule).unwrap_or(&self.other)
    }

    fn labelled(&self) -> impl Iterator<Item = (&str, &Counters)> {
        let named = self.names.iter().map(|name| (&**name, self.of(name)));
        // A rule may itself be named `other`. It then shares that counter, which must be written
        // only once.
        let other = (!self.by_name.contains_key(OTHER)).then_some((OTHER, &*self.other));
        named.chain(other)
    }
}
