//! Tests that the rule index finds the same rules as a full scan, and that few rules are evaluated
//! per request.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use proptest::prelude::*;
use tidegate_core::{
    AlgorithmName, Condition, Cost, LimitSpec, Pattern, Request, Rule, RuleErrors, RuleSet,
    Scratch, Timestamp, When, notation,
};

/// A generated condition: an entry and its pattern.
type Drawn = (String, Pattern);

/// A generated rule: its conditions and its key entries.
type DrawnRule = (Vec<Drawn>, Vec<String>);

fn entry() -> impl Strategy<Value = String> {
    prop::sample::select(vec!["path", "ip", "customer"]).prop_map(String::from)
}

fn value() -> impl Strategy<Value = String> {
    let addresses = [
        "10.0.0.1",
        "10.1.0.1",
        "::ffff:10.1.0.1",
        "2001:db8::1",
        "192.0.2.1",
    ];
    let paths = ["/", "/a", "/a/", "/a/b", "/a/b/c", "/ab", "b", "vip"];
    prop::sample::select([&addresses[..], &paths[..]].concat()).prop_map(String::from)
}

const GLOBS: &[&str] = &[
    "/a/**", "/a/*", "/a*", "*", "**/b", "/*/b", "v*p", "10.*", "/ab*", "*a*b*", "*/*", "/**/b/*",
    "*b/*", "**", "/*/*/c", "/**b**", "*i*",
];

const NETS: &[&str] = &[
    "10.0.0.0/8",
    "10.1.0.0/16",
    "::ffff:10.1.0.0/112",
    "2001:db8::/32",
    "0.0.0.0/0",
    "192.0.2.1",
];

const EXPRESSIONS: &[&str] = &[
    "/a.*",
    "[0-9.]+",
    "vip|b",
    ".*b.*",
    "(?i).*/B",
    "/a(/b)?(/c)?",
    "(/[ab]+)+",
    ".*[ac]/?",
    "",
    "(|vip)",
    r".*\bvip\b.*",
    "(.*/b/.*|1.*)",
    "[^/]{1,3}",
];

fn pattern() -> impl Strategy<Value = Pattern> {
    let leaf = prop_oneof![
        3 => value().prop_map(|text| Pattern::exact(&text).unwrap()),
        3 => prop::sample::select(GLOBS).prop_map(|text| Pattern::text(text).unwrap()),
        2 => prop::sample::subsequence(NETS, 1..4)
            .prop_map(|nets| Pattern::networks(&nets).unwrap()),
        1 => prop::sample::select(EXPRESSIONS).prop_map(|text| Pattern::regex(text).unwrap()),
        1 => Just(Pattern::present()),
        1 => Just(Pattern::absent()),
    ];
    // Lists of eight or more patterns have their own index.
    leaf.prop_recursive(3, 16, 10, |inner| {
        let several = prop::collection::vec(inner.clone(), 1..11);
        prop_oneof![
            several
                .clone()
                .prop_map(|patterns| Pattern::any_of(patterns).unwrap()),
            several.prop_map(|patterns| Pattern::all_of(patterns).unwrap()),
            inner.prop_map(Pattern::negated),
        ]
    })
}

fn conditions() -> impl Strategy<Value = Vec<Drawn>> {
    prop::collection::vec((entry(), pattern()), 0..4)
}

fn rules() -> impl Strategy<Value = Vec<DrawnRule>> {
    let key = prop::sample::subsequence(
        vec!["path".to_owned(), "ip".to_owned(), "customer".to_owned()],
        0..3,
    );
    prop::collection::vec((conditions(), key), 0..30)
}

fn request() -> impl Strategy<Value = Vec<(String, String)>> {
    let names = prop::sample::subsequence(vec!["path", "ip", "customer", "other"], 0..=4);
    (names, prop::collection::vec(value(), 4))
        .prop_map(|(names, values)| names.into_iter().map(String::from).zip(values).collect())
}

fn when(drawn: &[Drawn]) -> When {
    let condition = |(entry, pattern): &Drawn| Condition::new(entry, pattern.clone()).unwrap();
    When::all(drawn.iter().map(condition).collect())
}

fn build(drawn: &[DrawnRule], allow: &[Vec<Drawn>]) -> RuleSet {
    try_build(drawn, allow).unwrap()
}

fn try_build(drawn: &[DrawnRule], allow: &[Vec<Drawn>]) -> Result<RuleSet, RuleErrors> {
    let rate = notation::rate("1/s").unwrap();
    let limit = LimitSpec::shorthand(rate, AlgorithmName::Gcra)
        .build()
        .unwrap();
    let rules = drawn.iter().enumerate().map(|(at, (conditions, key))| {
        let key: Vec<&str> = key.iter().map(String::as_str).collect();
        let rule = Rule::new(&at.to_string(), vec![limit.clone()]).unwrap();
        rule.when(when(conditions)).keyed_by(&key).unwrap()
    });
    let allow = allow.iter().map(|conditions| when(conditions)).collect();
    RuleSet::build(rules.collect(), allow)
}

fn holds(drawn: &[Drawn], request: &Request<'_>) -> bool {
    drawn
        .iter()
        .all(|(entry, pattern)| pattern.matches(request.entry(entry)))
}

/// Returns the names of the rules that apply, using a simple reference implementation that
/// evaluates every rule.
fn scan(drawn: &[DrawnRule], allow: &[Vec<Drawn>], request: &Request<'_>) -> Vec<String> {
    if allow.iter().any(|conditions| holds(conditions, request)) {
        return Vec::new();
    }
    let applies = |(conditions, key): &DrawnRule| {
        holds(conditions, request) && key.iter().all(|entry| request.entry(entry).is_some())
    };
    let numbered = drawn.iter().enumerate();
    numbered
        .filter(|(_, rule)| applies(rule))
        .map(|(at, _)| at.to_string())
        .collect()
}

fn charged(rules: &RuleSet, request: &Request<'_>, scratch: &mut Scratch) -> Vec<String> {
    let charges = rules
        .charges(request, Timestamp::default(), scratch)
        .unwrap();
    charges
        .iter()
        .map(|charge| charge.limits.name().unwrap().to_owned())
        .collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2_000))]
    #[test]
    fn the_index_finds_what_a_scan_finds(
        drawn in rules(),
        allow in prop::collection::vec(conditions(), 0..2),
        requests in prop::collection::vec(request(), 1..5),
    ) {
        let rules = match try_build(&drawn, &allow) {
            Ok(rules) => rules,
            // If the deeply nested patterns exceed the maximum number of evaluations per request,
            // generate another case.
            Err(errors) => {
                prop_assert!(errors.to_string().contains("exceeds the maximum of 4096"), "{}", errors);
                return Err(TestCaseError::reject("too many evaluations"));
            }
        };
        let mut scratch = Scratch::default();
        for entries in requests {
            let entries: Vec<(&str, &str)> =
                entries.iter().map(|(name, value)| (name.as_str(), value.as_str())).collect();
            let request = Request::new(&entries, Cost::ONE).unwrap();
            let found = charged(&rules, &request, &mut scratch);
            prop_assert_eq!(&found, &scan(&drawn, &allow, &request));
            // If a rule is not charged, one of its conditions fails or the request is on the allow
            // list.
            let is_allowed = rules.allow_listed_by(&request, Timestamp::default()).is_some();
            let applies = |rule: &&Rule| {
                !is_allowed && rule.failed_condition(&request, Timestamp::default()).is_none()
            };
            let applied: Vec<String> =
                rules.iter().filter(applies).map(|rule| rule.name().to_owned()).collect();
            prop_assert_eq!(found, applied);
        }
    }
}

const RULES: usize = 10_000;

fn text(entry: &str, text: &str) -> Drawn {
    (entry.to_owned(), Pattern::text(text).unwrap())
}

/// Builds [`RULES`] rules with conditions generated by `of`. Returns the number of pattern
/// evaluations for a request with `entries`, and the number of rules that apply to it.
fn evaluated(of: impl Fn(usize) -> Vec<Drawn>, entries: &[(&str, &str)]) -> (usize, usize) {
    let drawn: Vec<DrawnRule> = (0..RULES)
        .map(|at| (of(at), vec!["ip".to_owned()]))
        .collect();
    let rules = build(&drawn, &[]);
    let mut scratch = Scratch::default();
    let request = Request::new(entries, Cost::ONE).unwrap();
    let applied = charged(&rules, &request, &mut scratch).len();
    (scratch.conditions_evaluated(), applied)
}

#[test]
fn ten_thousand_rules_are_not_scanned() {
    let by_path = |at: usize| {
        vec![
            text("path", &format!("/tenant-{at}/**")),
            text("method", "POST"),
        ]
    };
    let post = ("method", "POST");
    let ip = ("ip", "10.3.231.0");
    let path = [post, ip, ("path", "/tenant-777/orders")];
    // `/tenant-7` and `/tenant-77` are also prefixes of the path, so the rules with these prefixes
    // are evaluated too, and their first condition fails.
    assert_eq!(evaluated(by_path, &path), (4, 1));

    let by_customer =
        |at: usize| vec![text("path", "/api/**"), text("customer", &format!("c{at}"))];
    let customer = [ip, ("path", "/api/x"), ("customer", "c9999")];
    assert_eq!(evaluated(by_customer, &customer), (2, 1));

    let by_network = |at: usize| {
        let net = format!("10.{}.{}.0/24", at / 256, at % 256);
        vec![
            text("path", "/api/**"),
            ("ip".to_owned(), Pattern::networks(&[&net]).unwrap()),
        ]
    };
    assert_eq!(evaluated(by_network, &[ip, ("path", "/api")]), (2, 1));

    let by_list = |at: usize| {
        let values = [format!("a{at}"), format!("b{at}"), format!("c{at}*")];
        let patterns = values
            .iter()
            .map(|value| Pattern::text(value).unwrap())
            .collect();
        vec![("plan".to_owned(), Pattern::any_of(patterns).unwrap())]
    };
    assert_eq!(evaluated(by_list, &[ip, ("plan", "b5000")]), (1, 1));
}

/// Builds [`RULES`] rules with path patterns generated by `pattern`. Returns the number of pattern
/// evaluations for a request to `path`, and the number of rules that apply to it.
fn by_path(pattern: impl Fn(usize) -> Pattern, path: &str) -> (usize, usize) {
    let of = |at: usize| vec![("path".to_owned(), pattern(at))];
    evaluated(of, &[("ip", "192.0.2.1"), ("path", path)])
}

#[test]
fn ten_thousand_globs_that_begin_with_a_wildcard_are_not_scanned() {
    let glob = |text: String| Pattern::text(&text).unwrap();
    let suffix = |at: usize| glob(format!("/**/orders-{at}"));
    assert_eq!(by_path(suffix, "/shop/7/orders-777"), (1, 1));
    assert_eq!(by_path(suffix, "/shop/7/orders-"), (0, 0));
    let inside = |at: usize| glob(format!("*/tenant-{at}/*"));
    assert_eq!(by_path(inside, "/shop/tenant-777/orders"), (1, 1));
    let segment = |at: usize| glob(format!("/api/*/c{at}/*/orders"));
    assert_eq!(by_path(segment, "/api/v1/c777/2026/orders"), (1, 1));
    // The number of evaluations does not depend on the length of the value.
    let long = format!("/{}/orders-777", "a".repeat(8_000));
    assert_eq!(by_path(suffix, &long), (1, 1));
    assert_eq!(by_path(inside, &long), (0, 0));
}

#[test]
fn ten_thousand_expressions_are_not_scanned() {
    let regex = |text: String| Pattern::regex(&text).unwrap();
    let prefix = |at: usize| regex(format!("/tenant{at}/[a-z]+"));
    assert_eq!(by_path(prefix, "/tenant777/orders"), (1, 1));
    let inside = |at: usize| regex(format!(".*/tenant{at}/.*"));
    assert_eq!(by_path(inside, "/api/tenant777/orders"), (1, 1));
    let suffix = |at: usize| regex(format!("[a-z/]+/orders{at}"));
    assert_eq!(by_path(suffix, "/api/orders777"), (1, 1));
    let any_case = |at: usize| regex(format!("(?i).*bot{at};.*"));
    assert_eq!(by_path(any_case, "Mozilla BoT777; x"), (1, 1));
}

#[test]
fn a_long_list_of_alternatives_is_not_scanned() {
    let bots = (0..RULES).map(|at| Pattern::text(&format!("*bot-{at};*")).unwrap());
    let bots = Pattern::any_of(bots.collect()).unwrap();
    for (pattern, applied) in [(bots.clone(), 1), (bots.negated(), 0)] {
        let rules = build(&[(vec![("agent".to_owned(), pattern)], Vec::new())], &[]);
        let mut scratch = Scratch::default();
        let entries = [(
            "agent",
            "Mozilla/5.0 (compatible; bot-777; +https://example.com)",
        )];
        let request = Request::new(&entries, Cost::ONE).unwrap();
        assert_eq!(charged(&rules, &request, &mut scratch).len(), applied);
        // There are two evaluations: one for the list, and one for the alternative found by the
        // index.
        assert_eq!(scratch.conditions_evaluated(), 2);
    }
}

/// A value that contains the literals of thousands of patterns is rejected, because only an
/// attacker would send it.
#[test]
fn a_value_that_needs_too_many_evaluations_is_refused() {
    let of = |at: usize| vec![text("path", &format!("*{at:04}*/never"))];
    let drawn: Vec<DrawnRule> = (0..RULES).map(|at| (of(at), Vec::new())).collect();
    // All patterns have the same suffix, so the index files them by the literal in the middle.
    let rules = build(&drawn, &[]);
    let digits: String = (0..2_040).map(|at| format!("{at:04}")).collect();
    let entries = [("path", digits.as_str())];
    let request = Request::new(&entries, Cost::ONE).unwrap();
    let mut scratch = Scratch::default();
    let refused = rules.charges(&request, Timestamp::default(), &mut scratch);
    let problem = refused.unwrap_err().problem;
    assert!(
        problem.contains("more than 4096 pattern evaluations"),
        "{problem}"
    );
    // The request is also rejected if an allow list would otherwise admit it.
    let allow: Vec<Vec<Drawn>> = (0..RULES)
        .map(|at| {
            let never = Pattern::text(&format!("*{at:04}*/never")).unwrap();
            let other = Pattern::text("other").unwrap().negated();
            vec![
                ("path".to_owned(), never.negated().negated()),
                ("x".to_owned(), other),
            ]
        })
        .collect();
    let rules = build(&[(Vec::new(), Vec::new())], &allow);
    let refused = rules.charges(&request, Timestamp::default(), &mut scratch);
    assert!(refused.is_err());
    assert!(!rules.is_allow_listed(&request, Timestamp::default(), &mut scratch));
    let entries = [("path", "/0001/never")];
    let request = Request::new(&entries, Cost::ONE).unwrap();
    // The evaluations for the previous request do not count for this request.
    assert!(rules.is_allow_listed(&request, Timestamp::default(), &mut scratch));
    assert!(
        charged(&rules, &request, &mut scratch).is_empty(),
        "allowed"
    );
}

#[test]
fn rules_that_no_index_can_find_are_refused() {
    let limit = || {
        let rate = notation::rate("1/s").unwrap();
        LimitSpec::shorthand(rate, AlgorithmName::Gcra)
            .build()
            .unwrap()
    };
    let rules = |count: usize, pattern: &dyn Fn(usize) -> Pattern| {
        let rule = |at: usize| {
            let condition = Condition::new("path", pattern(at)).unwrap();
            let rule = Rule::new(&at.to_string(), vec![limit()]).unwrap();
            rule.when(When::all(vec![condition]))
        };
        RuleSet::build((0..count).map(rule).collect(), Vec::new())
    };
    let digits = |at: usize| Pattern::regex(&format!("[0-9]{{{}}}", at % 100 + 1)).unwrap();
    // Each regular expression scans the whole value, which counts as nine evaluations for a value
    // of 8 KiB.
    assert!(rules(455, &digits).is_ok());
    let errors = rules(456, &digits).unwrap_err().to_string();
    let expected = "rules: one request could need 4104 pattern evaluations, which exceeds the maximum of 4096: too many \
        rules cannot be found by an index; most of these rules match on \"path\": give them \
        an exact value, or a pattern with literal text outside its wildcards";
    assert_eq!(errors, expected);
    let other = |at: usize| Pattern::exact(&at.to_string()).unwrap().negated();
    assert!(rules(4_096, &other).is_ok());
    let errors = rules(4_097, &other).unwrap_err().to_string();
    assert!(
        errors.contains("no condition that the index can use"),
        "{errors}"
    );
    // Any number of patterns with a literal is accepted, because only the few patterns found by the
    // index are evaluated.
    let found = |at: usize| Pattern::text(&format!("*/{at}/*")).unwrap();
    assert!(rules(10_000, &found).is_ok());
}

#[test]
fn a_request_without_the_needed_entries_is_compared_with_no_rule() {
    let by_path = |at: usize| vec![text("path", &format!("/{at}")), text("agent", "*bot*")];
    assert_eq!(
        evaluated(by_path, &[("path", "/nowhere"), ("agent", "a bot")]),
        (0, 0)
    );
    let bot = |at: usize| Pattern::regex(&format!(".*bot{at};.*")).unwrap();
    let by_expression = |at: usize| vec![("agent".to_owned(), bot(at))];
    assert_eq!(
        evaluated(by_expression, &[("path", "/7"), ("ip", "192.0.2.1")]),
        (0, 0)
    );
}

#[test]
fn a_long_allow_list_is_not_scanned() {
    let allow: Vec<Vec<Drawn>> = (0..RULES)
        .map(|at| vec![text("customer", &format!("c{at}"))])
        .collect();
    let rules = build(&[(Vec::new(), Vec::new())], &allow);
    let mut scratch = Scratch::default();
    let request = |customer| [("customer", customer)];
    let (on, off) = (request("c777"), request("nobody"));
    let on = Request::new(&on, Cost::ONE).unwrap();
    assert!(charged(&rules, &on, &mut scratch).is_empty());
    assert_eq!(scratch.conditions_evaluated(), 1);
    let off = Request::new(&off, Cost::ONE).unwrap();
    assert_eq!(charged(&rules, &off, &mut scratch), ["0"]);
    assert_eq!(scratch.conditions_evaluated(), 0);
}
