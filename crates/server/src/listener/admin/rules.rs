//! Lists the active rules in the same order and notation as in the rules file.

use hyper::StatusCode;
use serde_json::{Value, json};
use tidegate_core::Rule;
use tidegate_limiter::ServerLimiter;
use tidegate_net::response::{Answer, json};

pub(super) fn list(limiter: &ServerLimiter) -> Answer {
    let rules = limiter.rules();
    let documents: Vec<Value> = rules.iter().map(document).collect();
    json(StatusCode::OK, &json!({"rules": documents}))
}

fn document(rule: &Rule) -> Value {
    let limits: Vec<&str> = rule
        .limits()
        .iter()
        .map(|limit| &**limit.policy())
        .collect();
    let key: Vec<&str> = rule.key().collect();
    json!({
        "name": rule.name(),
        "when": rule.applies_when().to_string(),
        "key": key,
        "limits": limits,
        "mode": rule.mode().as_str(),
    })
}
