//! Compiled rules of envoyproxy/ratelimit's configuration.

mod rule;
mod tree;
mod wildcard;

pub(crate) use self::{
    rule::{Allowance, Detail, Rule, RuleLimits},
    tree::{Charging, Domain, Domains, Level, MatchedRule, Node},
};
