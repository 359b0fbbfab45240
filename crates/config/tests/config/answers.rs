//! Tests of rules whose cost depends on the response: `count` and `settle`.
use tidegate_config::Config;
use tidegate_core::{Cost, QuotaUnit, Request, Rule};

use crate::{PROXY, mistakes, warnings};

#[test]
fn count_and_settle_are_read() {
    let config = Config::parse(&format!(
        "{PROXY}rules:
  - {{name: failed, limits: [5/min], count: {{status: [401, 403, '5*']}}}}
  - {{name: tokens, limits: [9/min], cost: 5, settle: header.x-tokens, count: {{status: {{not: '5*'}}}}}}
"
    ));
    let rules = config.unwrap().rules;
    let due = |rule: &str, entries: &[(&str, &str)]| {
        let response_cost = rules.rule(rule).map(Rule::response_cost).unwrap();
        let answer = Request::new(entries, Cost::ONE).unwrap();
        response_cost.final_charge(Cost::new(5).unwrap(), &answer)
    };
    for (status, charged) in [("200", 0), ("401", 5), ("403", 5), ("404", 0), ("503", 5)] {
        assert_eq!(due("failed", &[("status", status)]), charged, "{status}");
    }
    let tokens = ("header.x-tokens", "12");
    assert_eq!(due("tokens", &[("status", "200"), tokens]), 12);
    assert_eq!(due("tokens", &[("status", "200")]), 5);
    assert_eq!(due("tokens", &[("status", "502"), tokens]), 0);
}

#[test]
fn a_rule_that_settles_bytes_counts_bytes() {
    let config = Config::parse(&format!(
        "{PROXY}rules:
  - {{name: settled, limits: [5/min], settle: bytes}}
  - {{name: tokens, limits: [9/min], settle: header.x-tokens}}
  - {{name: sent, limits: [9/min], cost: size, unit: content-bytes}}
  - {{name: plain, limits: [5/min], settle: bytes, unit: requests}}
"
    ));
    let rules = config.unwrap().rules;
    let unit = |rule| rules.rule(rule).unwrap().limits().unit();
    for (rule, expected) in [
        ("settled", QuotaUnit::ContentBytes),
        ("tokens", QuotaUnit::Requests),
        ("sent", QuotaUnit::ContentBytes),
        ("plain", QuotaUnit::Requests),
    ] {
        assert_eq!(unit(rule), expected, "{rule}");
    }
    let file = "rules: [{name: a, limits: 5/min, unit: content-byte}]";
    let expected = "rules[0].unit (line 1): expected one of requests, content-bytes, got \"content-byte\"; did \
                    you mean `content-bytes`?";
    assert_eq!(mistakes(file), [expected]);
}

#[test]
fn mistakes_are_reported() {
    let file = format!(
        "{PROXY}rules:
  - {{name: a, limits: [5/min], count: {{}}}}
  - {{name: b, limits: [5/min], count: {{stauts: 401}}}}
  - {{name: c, limits: [5/min], settle: byte}}
  - {{name: d, limits: [5/min], settle: status}}
  - {{name: e, limits: [5/min], settle: header.}}
  - {{name: f, limits: [5/min], settle: [bytes]}}
  - {{name: g, limits: [5/min], count_denied: true, count: {{status: 401}}}}
  - {{name: h, limits: [{{algorithm: concurrency, limit: 1}}], settle: bytes}}
  - {{name: i, limits: [5/min], count: 401}}
  - {{name: j, limits: [5/min], count: {{status: [401, 4xx, '4*', 999]}}}}
  - {{name: k, limits: [5/min], count: {{status: {{regex: '7..'}}, grpc-status: {{not: OK}}}}}}
"
    );
    assert_eq!(
        mistakes(&file),
        [
            "rules[0].count (line 3): is empty, so every response would count; name at least one condition, such as {status: [401, 403]}",
            "rules[1].count.stauts (line 4): a response at the proxy has no entry \"stauts\"; did you mean `status`?",
            "rules[2].settle (line 5): the response entry \"byte\" cannot hold a cost; did you mean `bytes`?",
            "rules[3].settle (line 6): the response entry \"status\" cannot hold a cost; expected one of bytes, header.NAME, usage",
            "rules[4].settle (line 7): the response entry \"header.\" cannot hold a cost; expected one of bytes, header.NAME, usage",
            "rules[5].settle (line 8): expected the response entry that holds the cost, such as bytes, or a map such as {usage: input + 4*output}, got a list",
            "rules[6].count (line 9): cannot be combined with count_denied, which is never refunded; remove one of the two",
            "rules[7].settle (line 10): cannot be combined with a concurrency limit, which takes its slots before the response is known; put the concurrency limit into another rule",
            "rules[8].count (line 11): expected a map of conditions such as {status: [401, 403]}, got the number 401",
            "rules[9].count.status[1] (line 12): no status matches \"4xx\"; write a number from 100 to 599, or \"4*\"",
            "rules[9].count.status[3] (line 12): no status matches the number 999; write a number from 100 to 599, or \"4*\"",
            "rules[10].count.status (line 13): no status matches this combination of conditions; write a number from 100 to 599, or \"4*\"",
            "rules[10].count.grpc-status.not (line 13): no grpc-status matches \"OK\"; write a number from 0 to 16",
        ]
    );
}

/// Regression test: an error in the map must be reported only once.
#[test]
fn a_repeated_condition_on_a_response_is_one_mistake() {
    let rules = "rules: [{name: a, limits: [5/min], count: {status: 401, status: 403}}]\n";
    let expected = "rules[0].count.status (line 1): duplicate key `status`; remove one of the two";
    assert_eq!(mistakes(&format!("{rules}{PROXY}")), [expected]);
}

#[test]
fn response_based_cost_needs_a_proxy() {
    let rules = "rules:
  - {name: a, limits: [5/min], count: {status: 401}}
  - {name: b, limits: [5/min]}
  - {name: c, limits: [5/min], settle: bytes}
";
    let only_proxy =
        "which only the reverse proxy sees; add a `proxy` section, or remove this field";
    assert_eq!(
        mistakes(rules),
        [
            format!("rules[0].count (line 2): depends on the response, {only_proxy}"),
            format!("rules[2].settle (line 4): depends on the response, {only_proxy}"),
        ]
    );
    let proxied = format!("{rules}{PROXY}");
    let messages = warnings(&proxied);
    assert_eq!(messages.len(), 2, "{messages:?}");
    let blind = "requests at listen.http and listen.resp are charged in full and not refunded";
    assert!(
        messages[0].starts_with("rules[0].count (line 2): blind-listener: ")
            && messages[0].contains(blind),
        "{messages:?}"
    );
    let messages = warnings(&format!("{proxied}listen: {{http: off}}\n"));
    assert!(
        messages[1].contains("requests at listen.resp are"),
        "{messages:?}"
    );
    let shut = format!("{proxied}listen: {{http: off, resp: off}}\n");
    assert_eq!(warnings(&shut), [""; 0]);
    let messages = warnings(&format!("{shut}grpc: {{authorization: true}}\n"));
    assert!(
        messages[1].contains("requests at listen.grpc are"),
        "{messages:?}"
    );
    let closed = format!("{shut}grpc: {{authorization: true}}\n")
        .replace("resp: off", "resp: off, grpc: off");
    assert_eq!(warnings(&closed), [""; 0]);
}
