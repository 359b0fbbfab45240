//! The rules of an envoyproxy/ratelimit configuration, compiled for fast matching.

pub(crate) mod limitador;
mod limits;
mod overridable;
mod rule;
mod rule_names;
mod tree;
mod wildcard;

pub(crate) use self::{
    limits::RuleLimits,
    rule::{Allowance, DescriptorRule, Detail},
    tree::{ChargeMode, DeniedHits, Domain, Domains, MatchedRule, RuleChildren, RuleNode},
};
