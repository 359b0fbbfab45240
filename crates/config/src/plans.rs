//! `plans`: named sets of limits for several rules. The field `plan` of a rule is the name of a
//! request entry, and the value of this entry is the name of the plan.

use std::collections::HashMap;

use tidegate_core::{Limit, Rule, bounds};

use super::{
    limits::{self, Fallback},
    report::Report,
    value::{Fields, Value},
};

/// The plans in the file, grouped by the rule for which they set limits.
#[derive(Debug, Default)]
pub(super) struct RawPlans<'n> {
    by_rule: HashMap<&'n str, Vec<RawPlan<'n>>>,
}

/// The limits of one plan for one rule, as written in the file.
#[derive(Debug)]
struct RawPlan<'n> {
    name: &'n str,
    limits: Value<'n>,
}

/// The parsed limits of one plan for one rule.
#[derive(Debug)]
pub(super) struct PlanLimits<'n> {
    name: &'n str,
    value: Value<'n>,
    limits: Vec<Limit>,
}

/// Reads `plans`.
pub(super) fn plans<'n>(file: &Fields<'n>, report: &mut Report) -> RawPlans<'n> {
    let mut plans = RawPlans::default();
    let Some(value) = file.get("plans") else {
        return plans;
    };
    let what = "a map such as {pro: {api: 1000/min}}";
    for (name, rules) in value.pairs(report, what).unwrap_or_default() {
        let most = bounds::MAX_RULE_NAME_BYTES;
        if name.is_empty() || name.len() > most {
            rules.wrong_key(report, format!("must be a plan name of 1 to {most} bytes"));
        }
        let what = "a map from rules to limits, such as {api: 1000/min}";
        for (rule, limits) in rules.pairs(report, what).unwrap_or_default() {
            plans
                .by_rule
                .entry(rule)
                .or_default()
                .push(RawPlan { name, limits });
        }
    }
    plans
}

impl<'n> RawPlans<'n> {
    /// Reads the limits of all plans for the rule with this name. Limits without an algorithm
    /// inherit the rule's algorithm, like the rule's own limits.
    pub(super) fn of_rule(
        &self,
        rule: Option<&str>,
        fallback: Fallback,
        report: &mut Report,
    ) -> Vec<PlanLimits<'n>> {
        let plans = rule.and_then(|rule| self.by_rule.get(rule));
        let read = |plan: &RawPlan<'n>| {
            let (_, limits) = limits::limits(&plan.limits, fallback, report);
            PlanLimits {
                name: plan.name,
                value: plan.limits.clone(),
                limits,
            }
        };
        plans.into_iter().flatten().map(read).collect()
    }

    /// Reports plans for rules that do not exist.
    pub(super) fn check_rules(&self, names: &HashMap<&str, usize>, report: &mut Report) {
        for (rule, plans) in &self.by_rule {
            if !names.contains_key(rule) {
                for plan in plans {
                    plan.limits
                        .wrong_key(report, format!("there is no rule \"{rule}\""));
                }
            }
        }
    }
}

/// Adds plans to `rule`. `entry` is the name of the request entry that contains the plan's name.
/// Reports limits that are not valid for the rule.
pub(super) fn add(
    rule: Rule,
    entry: Option<&str>,
    plans: &[PlanLimits<'_>],
    fields: &Fields<'_>,
    report: &mut Report,
) -> Option<Rule> {
    let before = report.count();
    for plan in plans {
        let alone = vec![(plan.name, plan.limits.clone())];
        if let Err(error) = rule.clone().with_plans(None, alone) {
            plan.value.wrong(report, error.problem);
        }
    }
    if report.count() > before {
        return None;
    }
    let all = plans.iter().map(|plan| (plan.name, plan.limits.clone()));
    match rule.with_plans(entry, all.collect()) {
        Ok(rule) => Some(rule),
        Err(error) => {
            fields.wrong(report, "plan", error.problem);
            None
        }
    }
}
