//! Tests of `plans`, and of `plan` in a rule.

use tidegate_config::Config;

use crate::mistakes;

#[test]
fn plans_give_limits_to_several_rules() {
    let config = Config::parse(
        "
plans:
  free: {api: [10/min, 200/d], exports: 5/d}
  pro: {api: [1000/min, 20000/d]}
rules:
  - {name: api, key: customer, algorithm: token_bucket, limits: [5/min, 50/d], plan: Tier}
  - {name: exports, key: customer, limits: 1/d}
",
    );
    let rules = config.unwrap().rules;
    let plans = |rule: &str| {
        let rule = rules.rule(rule).unwrap();
        let plans = rule.plans().map(|(name, limits)| {
            let policies: Vec<&str> = limits.iter().map(|limit| &**limit.policy()).collect();
            format!("{name} {}", policies.join(", "))
        });
        plans.collect::<Vec<_>>()
    };
    assert_eq!(
        plans("api"),
        ["free 10/min, 200/d", "pro 1000/min, 20000/d"]
    );
    assert_eq!(plans("exports"), ["free 5/d"]);
    assert_eq!(rules.rule("api").unwrap().plan_entry(), Some("Tier"));
    assert_eq!(rules.rule("exports").unwrap().plan_entry(), None);
    assert!(rules.uses_entry("Tier"), "listeners extract the entry");
}

#[test]
fn every_mistake_is_reported_with_its_line() {
    let file = "
plans:
  free: {api: often, none: 5/d}
  pro: {api: [10/min, 200/d]}
  max: {api: 5000/min}
  team: 7
rules:
  - {name: api, key: customer, limits: 5/min, plan: [a]}
";
    assert_eq!(
        mistakes(file),
        [
            "plans.free.api (line 3): expected a rate such as 20/min or 5/10s, got \"often\"; a slash separates the number of requests and the period",
            "plans.free.none (line 3): there is no rule \"none\"",
            "plans.team (line 6): expected a map from rules to limits, such as {api: 1000/min}, got the number 7",
            "rules[0].plan (line 8): expected the entry that names the plan of a request, got a list",
        ]
    );
    let file = "
plans:
  pro: {api: [10/min, 200/d]}
  max: {api: 5000/min}
rules:
  - {name: api, key: customer, limits: 5/min}
";
    let mistakes = mistakes(file);
    assert_eq!(mistakes.len(), 2, "{mistakes:?}");
    for (mistake, expected) in mistakes.iter().zip([
        "plans.pro.api (line 3): has 2 limits, but rule \"api\" has 1; give every plan the same windows",
        "plans.max.api (line 4): 5000/min (sliding_window_counter) must have the algorithm and the window of the limit 5/min (sliding_window_log) of rule \"api\"",
    ]) {
        assert!(mistake.starts_with(expected), "{mistake}");
    }
}

/// All plans share the slots of a key, and the lease is a property of the key.
#[test]
fn a_plan_with_another_lease_is_an_error_about_the_lease() {
    let file = "
plans:
  pro: {exports: {algorithm: concurrency, limit: 10, lease: 90s}}
rules:
  - {name: exports, key: customer, limits: {algorithm: concurrency, limit: 2, lease: 30s}}
";
    assert_eq!(
        mistakes(file),
        [
            "plans.pro.exports (line 3): the lease 90s must be equal to the lease 30s of rule \"exports\", \
             because a key's slots are held for the same time whichever plan applies; set \
             `lease: 30s` in the plan"
        ]
    );
}
