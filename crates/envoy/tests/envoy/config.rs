//! Tests of configuration files: error reports, warnings, YAML 1.1, and Tidegate's extensions.

use tidegate_config::envoy::DomainFiles;
use tidegate_envoy::{self as envoy, File, LoadedConfig};

fn read(text: &str) -> Result<LoadedConfig, Vec<String>> {
    let file = File {
        name: "f.yaml".into(),
        text: text.into(),
    };
    let read = envoy::read(vec![file], DomainFiles::One);
    read.map_err(|mistakes| mistakes.iter().map(ToString::to_string).collect())
}

fn mistakes(text: &str) -> Vec<String> {
    read(text).unwrap_err()
}

fn warnings(text: &str) -> Vec<String> {
    read(text)
        .unwrap()
        .warnings
        .iter()
        .map(ToString::to_string)
        .collect()
}

#[test]
fn envoy_mistakes_are_all_reported_at_once() {
    let text = "\
domain: d
descriptorz: []
descriptors:
  - value: v
  - key: a
    rate_limit: {unit: fortnight, requests_per_unit: '5'}
  - {key: a}
  - key: b
    share_threshold: true
    shadow_mode: perhaps
    rate_limit:
      unlimited: true
      unit: day
  - key: c
    rate_limit:
      name: n
      unit: day
      requests_per_unit: 4294967296
      replaces: [{name: ''}, {name: n}, x]
    descriptors:
      - {key: c1, value: 1.5}
      - {key: c1, value: 2}
      - {key: c1, value: 2}
  - 0.25: d
";
    assert_eq!(
        mistakes(text),
        [
            "f.yaml: descriptorz (line 2): config error, unknown key 'descriptorz'; did you mean `descriptors`?",
            "f.yaml: descriptors[0] (line 4): descriptor has empty key",
            "f.yaml: descriptors[1].rate_limit.requests_per_unit (line 6): error loading config file: expected an integer from 0 to 4294967295, got \"5\"",
            "f.yaml: descriptors[1].rate_limit.unit (line 6): invalid rate limit unit 'fortnight'; use one of second, minute, hour, day, week, month, year",
            "f.yaml: descriptors[2] (line 7): duplicate descriptor composite key 'd.a'",
            "f.yaml: descriptors[3].share_threshold (line 9): share_threshold can only be used with wildcard values (containing '*'), but found key 'b'",
            "f.yaml: descriptors[3].shadow_mode (line 10): error loading config file: expected true or false, got \"perhaps\"",
            "f.yaml: descriptors[3].rate_limit.unit (line 13): should not specify rate limit unit when unlimited",
            "f.yaml: descriptors[4].rate_limit.requests_per_unit (line 18): error loading config file: expected an integer from 0 to 4294967295, got the number 4294967296",
            "f.yaml: descriptors[4].rate_limit.replaces[2] (line 19): config error, yaml file contains list of type other than map: x",
            "f.yaml: descriptors[4].rate_limit.replaces[0] (line 19): should not have an empty replaces entry",
            "f.yaml: descriptors[4].rate_limit.replaces[1] (line 19): replaces should not contain name of same descriptor",
            "f.yaml: descriptors[4].descriptors[0].value (line 21): error checking config: a fraction is not a \
             valid value here; quote the value if it is a string",
            "f.yaml: descriptors[4].descriptors[2] (line 23): duplicate descriptor composite key 'd.c.c1_2'",
            "f.yaml: descriptors[5].0.25 (line 24): config error, key is not of type string: 0.25",
            "f.yaml: descriptors[5] (line 24): descriptor has empty key",
        ]
    );
}

#[test]
fn envoy_files_are_read_as_yaml_1_1() {
    let sound = "\
domain: yes
shared: &limit {unit: MINUTE, requests_per_unit: 0x10}
";
    assert!(mistakes(sound)[0].contains("unknown key 'shared'"));
    let text = "\
domain: 5
descriptors:
  - {key: a, value: no, rate_limit: &limit {unit: MINUTE, requests_per_unit: 0x10}, shadow_mode: yes}
  - {key: a, value: 0x10, rate_limit: *limit}
  - key: b
    rate_limit: {<<: *limit, requests_per_unit: 7}
  - key: c
    key: d
    metadata: {0.5: x, list: [1, 2.5, true, null, {deep: yes}]}
---
domain: never read
domain: [
";
    assert_eq!(read(text).unwrap().domains(), 1);
    assert_eq!(
        warnings(text),
        ["f.yaml: line 8: duplicate key `key` in one map; the last value is used"]
    );
    let laughs = "domain: &a [x, x, x, x, x, x, x, x]\nb: &b [*a, *a, *a, *a, *a, *a, *a, *a]\n".to_owned()
        + &(0..9).map(|n| {
            let (one, other) = (char::from(b'b' + n), char::from(b'c' + n));
            format!("{other}: &{other} [*{one}, *{one}, *{one}, *{one}, *{one}, *{one}, *{one}, *{one}]\n")
        }).collect::<String>();
    assert!(
        mistakes(&laughs)[0].contains("values in one file"),
        "{:?}",
        mistakes(&laughs)
    );
}

#[test]
fn envoy_warnings_report_misleading_settings() {
    let text = "\
domain: d
descriptors:
  - key: user
    rate_limit: {unit: day, requests_per_unit: 1, shadow_mode: true}
  - key: user_id
    rate_limit: {unit: day}
  - key: generic_key
    unit: day
";
    assert_eq!(
        warnings(text),
        [
            "f.yaml: descriptors[0].rate_limit.shadow_mode (line 4): `shadow_mode` has no effect here; move it next to `key`",
            "f.yaml: descriptors[1] (line 5): keys and values are joined with `_`, so this rule also applies \
             to the entry `user` = `id`, and takes precedence over the rule with the key `user`; rename one of the \
             two keys if this is not intended",
            "f.yaml: descriptors[1].rate_limit (line 6): requests_per_unit is missing and defaults to 0: every request is over the limit; set it",
            "f.yaml: descriptors[2].unit (line 8): `unit` has no effect here; move it into `rate_limit`",
        ]
    );
}

#[test]
fn invalid_envoy_extensions_are_rejected() {
    for (limit, expected) in [
        (
            "rate_limit: {algorithm: magic, unit: day, requests_per_unit: 1}",
            "rate_limit.algorithm (line 1): expected one of gcra",
        ),
        (
            "rate_limit: {algorithm: gcra, capacity: 5, rate: 1/s}",
            "rate_limit.capacity (line 1): is not a field of gcra",
        ),
        (
            "rate_limit: {window: 30s, unit: day, requests_per_unit: 1}",
            "rate_limit.window (line 1): has the same meaning as unit or requests_per_unit",
        ),
        (
            "rate_limit: {anchor: {calendar: month}, unit: day, requests_per_unit: 1}",
            "has the same meaning as unit or requests_per_unit",
        ),
        (
            "rate_limit: {anchor: {calender: month}, requests_per_unit: 1}",
            "rate_limit.anchor.calender (line 1): config error, unknown key 'calender'; did you mean `calendar`?",
        ),
        (
            "rate_limit: {unlimited: true, burst: 5}",
            "rate_limit.burst (line 1): conflicts with `unlimited`",
        ),
        (
            "rate_limit: {algorithm: token_bucket, unit: day, requests_per_unit: 0}",
            "capacity",
        ),
        (
            "rate_limits: []",
            "rate_limits (line 1): must name at least one limit, such as 20/min",
        ),
        ("rate_limits: [5/fortnight]", "rate_limits[0] (line 1)"),
        (
            "rate_limits: [{unlimited: true}]",
            "rate_limits[0].unlimited (line 1): is not allowed in a list of limits; remove it",
        ),
        (
            "rate_limits: [1/s], rate_limit: {unit: day}",
            "rate_limits (line 1): conflicts with `rate_limit`; move that limit into the list",
        ),
        (
            "window: 30s",
            "window (line 1): config error, unknown key 'window'",
        ),
        (
            "all_or_nothing: true",
            "config error, unknown key 'all_or_nothing'",
        ),
    ] {
        let found = mistakes(&format!(
            "{{domain: d, descriptors: [{{key: k, {limit}}}]}}"
        ));
        assert!(found[0].contains(expected), "{limit}: {found:?}");
    }
    assert!(mistakes("{domain: d, all_or_nothing: often}")[0].contains("expected true or false"));
}

/// Every configuration in the documentation must be valid.
#[test]
fn envoy_examples_in_the_documentation_are_valid() {
    let page = include_str!("../../../../docs/envoy.md");
    let blocks = page
        .split("```yaml\n")
        .skip(1)
        .filter_map(|rest| rest.split("```").next());
    let configurations: Vec<&str> = blocks
        .filter(|block| block.starts_with("domain:"))
        .collect();
    assert_eq!(configurations.len(), 2);
    for text in configurations {
        assert_eq!(warnings(text), Vec::<String>::new(), "{text}");
    }
}
