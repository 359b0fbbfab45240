//! `--what-if RULE.limit=LIMIT`: simulates other limits for one rule.

use std::str::FromStr;

use tidegate_core::{Algorithm, Limit, LimitError, LimitSpec, Rule};

use crate::replay::RulesUnderTest;

/// Other limits for one rule.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WhatIf {
    rule: Box<str>,
    limits: Vec<Box<str>>,
}

impl FromStr for WhatIf {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let expected = || {
            format!(
                "expected RULE.limit=LIMIT, such as api.limit=200/min or api.limit=10/s,200/min, got \"{text}\""
            )
        };
        let (rule, limits) = text
            .rsplit_once('=')
            .and_then(|(rule, limits)| Some((rule.trim().strip_suffix(".limit")?, limits)))
            .filter(|(rule, limits)| !rule.is_empty() && !limits.trim().is_empty())
            .ok_or_else(expected)?;
        Ok(Self {
            rule: rule.into(),
            limits: limits.split(',').map(|limit| limit.trim().into()).collect(),
        })
    }
}

impl RulesUnderTest {
    /// Replaces the limits of a rule.
    ///
    /// # Errors
    ///
    /// Returns a description of the problem if the rule does not exist, or if a limit is invalid.
    pub fn with_limits(mut self, what_if: &WhatIf) -> Result<Self, String> {
        let WhatIf { rule: name, limits } = what_if;
        let rule = self
            .rule(name)
            .map_err(|problem| format!("--what-if: {problem}"))?;
        let like = rule.limits().iter().next();
        let limits = limits.iter().map(|limit| {
            parse(limit, like)
                .map_err(|problem| format!("--what-if {name}.limit={limit}: {problem}"))
        });
        let limits = limits.collect::<Result<Vec<Limit>, String>>()?;
        let shown: Vec<&str> = limits.iter().map(|limit| &**limit.policy()).collect();
        self.name = format!("{} with {name}.limit={}", self.name, shown.join(","));
        let rules = std::mem::take(&mut self.config.rules).with_limits(name, limits);
        self.config.rules = rules.map_err(|error| format!("--what-if {name}.limit: {error}"))?;
        Ok(self)
    }

    /// Returns the rule with this name.
    ///
    /// # Errors
    ///
    /// If the rule does not exist, returns a message that contains the names of all rules.
    pub(crate) fn rule(&self, name: &str) -> Result<&Rule, String> {
        self.rules().rule(name).ok_or_else(|| {
            let names: Vec<&str> = self.rules().iter().map(Rule::name).collect();
            format!(
                "{} has no rule `{name}`; its rules are {}",
                self.name,
                names.join(", ")
            )
        })
    }
}

/// Parses a limit in short notation, with the algorithm and the options of `like`.
pub(crate) fn parse(limit: &str, like: Option<&Limit>) -> Result<Limit, String> {
    let parsed = match like {
        Some(like) if matches!(like.algorithm(), Algorithm::Concurrency { .. }) => {
            return Err("a concurrency limit is not simulated".to_owned());
        }
        // For a sliding window, the size of the limit determines whether a log or a counter is
        // used, so that limits of any size can be tried.
        Some(like) if is_sliding(like) => by_size(limit, like),
        Some(like) => Limit::parse_like(limit, like),
        None => limit.parse(),
    };
    parsed.map_err(|error| match error.field {
        "rate" | "limit" => error.problem,
        field => format!("{field}: {}", error.problem),
    })
}

fn is_sliding(limit: &Limit) -> bool {
    matches!(
        limit.algorithm(),
        Algorithm::SlidingWindowLog { .. } | Algorithm::SlidingWindowCounter { .. }
    )
}

fn by_size(limit: &str, like: &Limit) -> Result<Limit, LimitError> {
    let spec = LimitSpec {
        soft: Some(like.soft_percent()),
        count_denied: Some(like.count_denied()),
        ..LimitSpec::parse_shorthand(limit, None)?
    };
    let first = |errors: Vec<LimitError>| errors.into_iter().next();
    spec.build()
        .or_else(|errors| first(errors).map_or_else(|| limit.parse(), Err))
}

#[cfg(test)]
mod tests {
    use tidegate_config::Config;

    use super::*;

    #[test]
    fn limits_are_replaced_and_the_algorithm_stays() {
        let file = "rules:\n  - {name: a.b, key: [ip], mode: shadow, limits: [{algorithm: token_bucket, capacity: 5, refill: 1/min}]}\n";
        let rules = || RulesUnderTest::new("rules.yaml", Config::parse(file).unwrap());
        let what_if: WhatIf = "a.b.limit=200/min, 10/s".parse().unwrap();
        let changed = rules().with_limits(&what_if).unwrap();
        let rule = changed.rules().rule("a.b").unwrap();
        assert!(rule.limits().is_shadow() && rule.key().eq(["ip"]));
        let limits: Vec<_> = rule.limits().iter().map(|limit| limit.quota()).collect();
        assert_eq!(limits, [200, 10]);
        let is_bucket = |limit: &Limit| matches!(limit.algorithm(), Algorithm::TokenBucket { .. });
        assert!(rule.limits().iter().all(is_bucket));
        let refused = |text: &str| rules().with_limits(&text.parse().unwrap()).unwrap_err();
        assert!(refused("c.limit=1/s").ends_with("has no rule `c`; its rules are a.b"));
        assert!(
            refused("a.b.limit=often").starts_with("--what-if a.b.limit=often: expected a rate")
        );
        for text in ["", "a", "a=1/s", ".limit=1/s", "a.limit="] {
            assert!(text.parse::<WhatIf>().is_err(), "{text}");
        }
    }
}
