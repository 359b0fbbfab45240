//! Tests of rules for language models: `cost: {json: …}` and `settle: {usage: …}`.
use tidegate_config::Config;
use tidegate_core::{BodyCost, BodyNumbers, Cost, Request, Rule, TokenFormula, TokenUsage};

use crate::{PROXY, mistakes, warnings};

fn rule(fields: &str) -> Rule {
    let file = format!("{PROXY}rules: [{{name: tokens, limits: [9/min], {fields}}}]\n");
    let config = Config::parse(&file).unwrap_or_else(|mistakes| panic!("{mistakes:#?}"));
    config.rules.rule("tokens").unwrap().clone()
}

fn body_cost(fields: &str) -> BodyCost {
    rule(fields).body_cost().unwrap().clone()
}

#[test]
fn a_cost_is_read_from_the_body() {
    let cost = body_cost("cost: {json: /max_tokens, default: 1000}");
    let pointers = |cost: &BodyCost| -> Vec<String> {
        let pointers = cost.output.iter();
        pointers
            .map(|pointer| pointer.as_str().to_owned())
            .collect()
    };
    assert_eq!(pointers(&cost), ["/max_tokens"]);
    assert_eq!((cost.default, cost.max), (1_000, 1_000_000_000));
    assert_eq!((cost.times.is_some(), cost.estimates_input), (false, false));
    let cost = body_cost(
        "cost: {json: [/max_completion_tokens, /max_tokens], default: 4096, max: 100000, times: /n, input: estimate}",
    );
    assert_eq!(pointers(&cost), ["/max_completion_tokens", "/max_tokens"]);
    assert_eq!((cost.default, cost.max), (4_096, 100_000));
    assert_eq!(cost.times.unwrap().as_str(), "/n");
    assert!(cost.estimates_input);
    assert!(!body_cost("cost: {json: /n, default: 1, input: off}").estimates_input);
}

#[test]
fn the_formula_also_determines_the_cost_before_the_response() {
    let expected = |settle: &str| {
        let rule = rule(&format!(
            "cost: {{json: /n, default: 10, input: estimate}}{settle}"
        ));
        let usage = rule.body_cost().unwrap().expected(BodyNumbers {
            output: Some(7),
            times: None,
            bytes: 400,
        });
        rule.expected_cost(usage).units()
    };
    assert_eq!(expected(""), 107);
    assert_eq!(expected(", settle: usage"), 107);
    assert_eq!(expected(", settle: {usage: input + 4*output}"), 128);
    assert_eq!(expected(", settle: {usage: 0.1*cached}"), 1, "at least 1");
}

#[test]
fn a_formula_settles_the_cost() {
    let formula = |settle: &str| *rule(settle).response_cost().formula().unwrap();
    assert_eq!(formula("settle: usage"), TokenFormula::SUM);
    let usage = TokenUsage {
        input: 10,
        cached: 101,
        output: 5,
    };
    let weighted = formula("settle: {usage: 'input + 0.1*cached + 4*output'}");
    assert_eq!(weighted.cost(usage), 41);
    let rule = rule("settle: {usage: 2*output}, count: {status: '2*'}");
    let due = |answer: &[(&str, &str)]| {
        let answer = Request::new(answer, Cost::ONE).unwrap();
        rule.response_cost()
            .final_charge(Cost::new(50).unwrap(), &answer)
    };
    assert_eq!(due(&[("status", "200"), ("usage.output", "12")]), 24);
    assert_eq!(due(&[("status", "200"), ("usage.input", "12")]), 0);
    assert_eq!(due(&[("status", "200")]), 50, "a response without usage");
    assert_eq!(due(&[("status", "500"), ("usage.output", "12")]), 0);
}

#[test]
fn mistakes_name_their_field() {
    let file = format!(
        "{PROXY}rules:
  - {{name: a, limits: [5/min], cost: {{json: max_tokens, default: 5}}}}
  - {{name: b, limits: [5/min], cost: {{json: [/a, /b~], default: 5}}}}
  - {{name: c, limits: [5/min], cost: {{json: /a}}}}
  - {{name: d, limits: [5/min], cost: {{default: 5}}}}
  - {{name: e, limits: [5/min], cost: {{json: /a, default: 0}}}}
  - {{name: f, limits: [5/min], cost: {{json: /a, default: 9, max: 8}}}}
  - {{name: g, limits: [5/min], cost: {{json: /a, default: 9, max: 9999999999}}}}
  - {{name: h, limits: [5/min], cost: {{json: [], default: 9}}}}
  - {{name: i, limits: [5/min], cost: {{json: /a, default: 9, input: guess}}}}
  - {{name: j, limits: [5/min], cost: {{json: /a, default: 9, time: /n}}}}
  - {{name: k, limits: [{{algorithm: concurrency, limit: 1}}], cost: {{json: /a, default: 9}}}}
  - {{name: l, limits: [5/min], settle: {{usage: input + inputs}}}}
  - {{name: m, limits: [5/min], settle: {{usage: 0.1234567*input}}}}
  - {{name: n, limits: [5/min], settle: {{}}}}
  - {{name: o, limits: [{{algorithm: concurrency, limit: 1}}], settle: usage}}
  - {{name: p, limits: [5/min], count_denied: true, settle: usage}}
  - {{name: q, limits: [5/min], settle: usages}}
"
    );
    let mistakes = mistakes(&file);
    for (at, (field, problem)) in [
        ("cost.json", "begins with a slash, such as /max_tokens"),
        ("cost.json[1]", "`~` is written as `~0`"),
        ("cost.default", "is missing"),
        ("cost.json", "is missing"),
        ("cost.default", "must be from 1 to 1000000000, got 0"),
        ("cost.default", "must be from 1 to 8, got 9"),
        ("cost.max", "must be from 1 to 1000000000, got 9999999999"),
        ("cost.json", "is empty"),
        ("cost.input", "expected one of estimate, off"),
        ("cost.time", "did you mean `times`"),
        ("cost", "for a concurrency limit"),
        (
            "settle.usage",
            "the term \"inputs\" is not `input`, `cached` or `output`",
        ),
        (
            "settle.usage",
            "the weight \"0.1234567\" is not a number from 0 to 1000000",
        ),
        ("settle.usage", "is missing; write a formula"),
        ("settle", "cannot be combined with a concurrency limit"),
        ("settle", "cannot be combined with count_denied"),
        ("settle", "did you mean `usage`?"),
    ]
    .iter()
    .enumerate()
    {
        let mistake = mistakes.get(at).map_or("none", String::as_str);
        let path = format!("rules[{at}].{field} (line");
        assert!(mistake.starts_with(&path), "{path}: {mistakes:#?}");
        assert!(mistake.contains(problem), "{problem}: {mistake}");
    }
    assert_eq!(mistakes.len(), 17, "{mistakes:#?}");
}

#[test]
fn only_the_proxy_sees_bodies() {
    let rules = "rules: [{name: a, limits: [5/min], cost: {json: /max_tokens, default: 5}}]\n";
    let mistakes = mistakes(rules);
    assert_eq!(mistakes.len(), 1, "{mistakes:#?}");
    let expected =
        "rules[0].cost (line 1): depends on the request body, which only the reverse proxy sees";
    assert!(mistakes[0].starts_with(expected), "{mistakes:#?}");
    let messages = warnings(&format!("{rules}{PROXY}"));
    assert!(messages[0].contains("blind-listener"), "{messages:#?}");
    let shut = format!("{rules}{PROXY}listen: {{http: off, resp: off}}\n");
    assert_eq!(warnings(&shut), [""; 0]);
}

#[test]
fn the_bounds_of_the_proxy_are_validated() {
    for (setting, problem) in [
        ("max_inspected_body: 1000", "must be from 1024 to 67108864"),
        ("max_inspected_body: 65MiB", "must be from 1024 to 67108864"),
        ("error_format: openapi", "did you mean `openai`?"),
    ] {
        let text = format!(
            "proxy: {{listen: '127.0.0.1:8000', {setting}, upstreams: [{{name: app, urls: 'http://h'}}]}}"
        );
        let mistakes = mistakes(&text);
        assert_eq!(mistakes.len(), 1, "{mistakes:#?}");
        assert!(mistakes[0].contains(problem), "{mistakes:#?}");
    }
}
