//! The rules of an envoyproxy/ratelimit configuration, compiled for fast matching.

pub(crate) mod limitador;
mod rule;
mod tree;
mod wildcard;

pub(crate) use self::{
    rule::{Allowance, Detail, Rule, RuleLimits},
    tree::{ChargeMode, DeniedHits, Domain, Domains, Level, MatchedRule, Node},
};
