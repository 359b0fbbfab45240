//! The limits of an override, as written by the operator and as compiled for a rule.

use std::{
    fmt,
    sync::{Arc, PoisonError, RwLock, Weak},
};

use crate::{
    eval::{Charge, Limits},
    limit::{Algorithm, Factor, Limit, bounds},
    rules::{Rule, RuleError, rule::is_charged},
};

/// The limits that an override applies instead of its rule's limits.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Replacement {
    /// Limits in short notation, such as `200/min`, with the algorithm and the options of the
    /// rule's first limit (see [`Limit::parse_like`]).
    Limits(Box<[Box<str>]>),
    /// All limits that would apply without the override, multiplied by a factor: the limits of the
    /// plan that the request names, or the rule's own limits.
    Factor(Factor),
    /// The limits of the rule for the plan with this name.
    Plan(Box<str>),
}

impl Replacement {
    /// Checks whether this replacement is valid for `rule`. A factor must be valid for the rule's
    /// own limits and for the limits of each plan.
    pub(super) fn check(&self, rule: &Rule) -> Result<(), RuleError> {
        self.check_with(rule, rule.limits())?;
        if let Self::Factor(_) = self {
            for (name, limits) in rule.plans() {
                self.check_with(rule, limits).map_err(|error| {
                    RuleError::new(error.field, format!("plan {name}: {}", error.problem))
                })?;
            }
        }
        Ok(())
    }

    /// Checks whether this replacement decides the requests of `rule` to which the limits `base`
    /// would apply without the override. The error says why `base` applies instead.
    pub(super) fn check_with(&self, rule: &Rule, base: &Limits) -> Result<(), RuleError> {
        self.compile(rule, base).map(drop)
    }

    /// Returns the limits of this replacement for `rule`. `base` are the limits that a factor
    /// multiplies. Unless the replacement is a plan, its limits do not share their history with the
    /// rule yet.
    fn compile(&self, rule: &Rule, base: &Limits) -> Result<Arc<Limits>, RuleError> {
        let limits: Vec<Limit> = match self {
            Self::Plan(name) => return rule.plan(name).map(Arc::clone),
            Self::Limits(texts) => {
                check_listable(rule)?;
                let like = rule.limits().first();
                let parse = |text: &str| {
                    Limit::parse_like(text, like).map_err(|error| {
                        let problem = format!("\"{text}\": {}", error.problem);
                        let problem = match format!("{text}x").parse::<Factor>() {
                            Ok(factor) => {
                                format!("{problem}; to multiply the limits, write {factor}")
                            }
                            Err(_) => problem,
                        };
                        RuleError::new("limits", problem)
                    })
                };
                texts
                    .iter()
                    .map(|text| parse(text))
                    .collect::<Result<_, _>>()?
            }
            Self::Factor(factor) => {
                let scaled = base.iter().map(|limit| {
                    factor.of(limit).map_err(|error| {
                        let problem = format!("{factor} of {}: {}", limit.policy(), error.problem);
                        RuleError::new("limits", problem)
                    })
                });
                scaled.collect::<Result<_, _>>()?
            }
        };
        rule.compile_other(limits).map(Arc::new)
    }
}

/// The maximum number of plans that an error names.
const MAX_NAMED: usize = 20;

/// Rejects limits in short notation for a rule with both rates and slots. All limits of an override
/// have the algorithm of the rule's first limit, so an override cannot contain both.
fn check_listable(rule: &Rule) -> Result<(), RuleError> {
    let limits = rule.limits();
    let mut algorithms = limits.iter().map(Limit::algorithm);
    if !rule.has_slots() || algorithms.all(|own| matches!(own, Algorithm::Concurrency { .. })) {
        return Ok(());
    }
    let policies: Vec<&str> = limits.iter().map(|limit| &**limit.policy()).collect();
    let plans: Vec<&str> = rule.plans().map(|(name, _)| name).take(MAX_NAMED).collect();
    let plan = match plans.as_slice() {
        [] => "add a plan for the rule to the rules file (`plans`), and select it".to_owned(),
        plans => format!("select a plan of the rule ({})", plans.join(", ")),
    };
    let problem = format!(
        "rule \"{}\" has both rates and slots ({}), which an override cannot list; write a factor such as 2x, \
         which multiplies all of them, or {plan}",
        rule.name(),
        policies.join(", ")
    );
    Err(RuleError::new("limits", problem))
}

impl fmt::Display for Replacement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Limits(limits) => f.write_str(&limits.join(", ")),
            Self::Factor(factor) => factor.fmt(f),
            Self::Plan(plan) => write!(f, "plan {plan}"),
        }
    }
}

/// The maximum number of compiled limits that a replacement keeps. They suffice for four rule sets
/// with the maximum number of plans: the active rules, the candidate rules, and former rules that
/// requests still use after a reload. The maximum does not depend on the number of plans of a rule,
/// because otherwise the candidate rules, with fewer plans, could discard the limits of the active
/// rules again and again.
const MAX_COMPILED: usize = 4 * (1 + bounds::MAX_PLANS);

/// A replacement with its compiled limits. All overrides of a rule that have the same replacement
/// share one `CompiledReplacement`.
#[derive(Debug)]
pub(super) struct CompiledReplacement {
    replacement: Replacement,
    /// Sorted by the address of `base`.
    compiled: RwLock<Vec<CompiledLimits>>,
}

/// The limits of a replacement for one version of its rule and, if the replacement is a factor, for
/// one plan.
#[derive(Debug)]
struct CompiledLimits {
    /// The limits of the rule or of the plan. Each version of the rule has its own `Limits`
    /// objects. As long as this reference exists, no other object has the same address.
    base: Weak<Limits>,
    /// The limits of the replacement; `None` if the replacement is invalid for the rule.
    limits: Option<Arc<Limits>>,
}

impl CompiledReplacement {
    pub(super) fn new(replacement: Replacement) -> Self {
        Self {
            replacement,
            compiled: RwLock::default(),
        }
    }

    pub(super) fn replacement(&self) -> &Replacement {
        &self.replacement
    }

    /// Returns the limits for `rule`; `None` if the replacement is invalid for the rule. `base` are
    /// the limits that would apply without the override: the limits of a plan, or the rule's own.
    pub(super) fn limits(&self, rule: &Rule, base: &Arc<Limits>) -> Option<Arc<Limits>> {
        let base = match &self.replacement {
            Replacement::Plan(name) => return rule.plan(name).ok().map(Arc::clone),
            Replacement::Limits(_) => rule.limits(),
            Replacement::Factor(_) => base,
        };
        let find = |compiled: &[CompiledLimits]| {
            compiled.binary_search_by_key(&Arc::as_ptr(base), |known| known.base.as_ptr())
        };
        {
            let compiled = self.compiled.read().unwrap_or_else(PoisonError::into_inner);
            if let Ok(at) = find(&compiled) {
                return compiled[at].limits.clone();
            }
        }
        let limits = self.replacement.compile(rule, base).ok();
        let limits = limits.map(|limits| {
            let limits = Limits::clone(&limits);
            Arc::new(limits.inheriting_from(base))
        });
        let mut compiled = self
            .compiled
            .write()
            .unwrap_or_else(PoisonError::into_inner);
        // Another thread may have compiled the limits in the meantime. All threads must use the
        // same `Limits` object, because the object contains caches.
        if let Ok(at) = find(&compiled) {
            return compiled[at].limits.clone();
        }
        // Remove the limits for former rules that requests no longer use.
        compiled.retain(|known| known.base.strong_count() > 0);
        if compiled.len() >= MAX_COMPILED {
            compiled.clear();
        }
        let (Ok(at) | Err(at)) = find(&compiled);
        let new = CompiledLimits {
            base: Arc::downgrade(base),
            limits: limits.clone(),
        };
        compiled.insert(at, new);
        limits
    }

    /// Returns the compiled limits on which `charge` was made. Returns `None` if they are no longer
    /// kept.
    pub(super) fn limits_of(&self, charge: &Charge<'_>) -> Option<Arc<Limits>> {
        let compiled = self.compiled.read().unwrap_or_else(PoisonError::into_inner);
        let mut limits = compiled.iter().filter_map(|known| known.limits.as_ref());
        limits.find(|limits| is_charged(limits, charge)).cloned()
    }
}
