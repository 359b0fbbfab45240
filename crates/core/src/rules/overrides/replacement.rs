//! The limits of an override, as written by the operator and as compiled for a rule.

use std::{
    fmt,
    sync::{Arc, PoisonError, RwLock},
};

use crate::{
    eval::Limits,
    limit::{Factor, Limit},
    rules::{Rule, RuleError},
};

/// The limits that an override applies instead of its rule's limits.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Replacement {
    /// Limits in short notation, such as `200/min`, with the algorithm and the options of the
    /// rule's first limit (see [`Limit::parse_like`]).
    Limits(Box<[Box<str>]>),
    /// All limits of the rule, multiplied by a factor.
    Factor(Factor),
    /// The limits of the rule for the plan with this name.
    Plan(Box<str>),
}

impl Replacement {
    /// Returns the limits of this replacement for `rule`. Unless the replacement is a plan, its
    /// limits do not share their history with the rule yet.
    pub(super) fn compile(&self, rule: &Rule) -> Result<Arc<Limits>, RuleError> {
        let limits: Vec<Limit> = match self {
            Self::Plan(name) => return rule.plan(name).map(Arc::clone),
            Self::Limits(texts) => {
                let like = rule.limits().first();
                let parse = |text: &str| {
                    Limit::parse_like(text, like).map_err(|error| {
                        RuleError::new("limits", format!("\"{text}\": {}", error.problem))
                    })
                };
                texts
                    .iter()
                    .map(|text| parse(text))
                    .collect::<Result<_, _>>()?
            }
            Self::Factor(factor) => {
                let scaled = rule.limits().iter().map(|limit| {
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

impl fmt::Display for Replacement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Limits(limits) => f.write_str(&limits.join(", ")),
            Self::Factor(factor) => factor.fmt(f),
            Self::Plan(plan) => write!(f, "plan {plan}"),
        }
    }
}

/// A replacement keeps its compiled limits for this number of rule sets: the active rules, the
/// candidate rules, and former rules that requests still use after a reload.
const MAX_COMPILED: usize = 4;

/// A replacement with its compiled limits. All overrides of a rule that have the same replacement
/// share one `CompiledReplacement`.
#[derive(Debug)]
pub(super) struct CompiledReplacement {
    replacement: Replacement,
    compiled: RwLock<Vec<CompiledLimits>>,
}

/// The limits of a replacement for one version of its rule.
#[derive(Debug)]
struct CompiledLimits {
    /// The rule's limits. Each version of the rule has its own `Limits` object.
    of: Arc<Limits>,
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

    /// Returns the limits for `rule`; `None` if the replacement is invalid for the rule.
    pub(super) fn limits(&self, rule: &Rule) -> Option<Arc<Limits>> {
        if let Replacement::Plan(name) = &self.replacement {
            return rule.plan(name).ok().map(Arc::clone);
        }
        let is_of_rule = |compiled: &&CompiledLimits| Arc::ptr_eq(&compiled.of, rule.limits());
        {
            let compiled = self.compiled.read().unwrap_or_else(PoisonError::into_inner);
            if let Some(compiled) = compiled.iter().find(is_of_rule) {
                return compiled.limits.clone();
            }
        }
        let limits = self.replacement.compile(rule).ok();
        let limits = limits.map(|limits| {
            let limits = Limits::clone(&limits);
            Arc::new(limits.inheriting_from(rule.limits()))
        });
        let mut compiled = self
            .compiled
            .write()
            .unwrap_or_else(PoisonError::into_inner);
        // Another thread may have compiled the limits in the meantime. All threads must use the
        // same `Limits` object, because the object contains caches.
        if let Some(compiled) = compiled.iter().find(is_of_rule) {
            return compiled.limits.clone();
        }
        if compiled.len() == MAX_COMPILED {
            compiled.remove(0);
        }
        compiled.push(CompiledLimits {
            of: Arc::clone(rule.limits()),
            limits: limits.clone(),
        });
        limits
    }
}
