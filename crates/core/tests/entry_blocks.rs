//! Tests which requests blocks by entries deny, and compares them with a naive reference model.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::{collections::BTreeMap, net::IpAddr};

use proptest::prelude::*;
use tidegate_core::{
    BLOCK_KEY, Condition, Cost, Decision, Effect, EntryBlock, EntryBlockError, EntryBlockTarget,
    EntryBlocks, Headroom, MemoryBounds, MemoryStore, Mode, Pattern, Reason, Request, RetryAfter,
    Rule, RuleSet, Scratch, Span, Timestamp, UnusedShare, Verdict, When, bounds,
};

const START: Timestamp = Timestamp::from_micros(1_700_000_000_000_000);

fn rule(name: &str, key: &[&str]) -> Rule {
    let rule = Rule::new(name, vec!["10/min".parse().unwrap()]).unwrap();
    rule.keyed_by(key).unwrap()
}

fn target(rule: Option<&str>, entries: &[(&str, &str)]) -> EntryBlockTarget {
    EntryBlockTarget::new(rule, entries).unwrap()
}

fn forever() -> EntryBlock {
    EntryBlock {
        until: None,
        reason: "a test".into(),
    }
}

fn lasting(seconds: u64) -> EntryBlock {
    EntryBlock {
        until: Some(START.after(Span::from_secs(seconds))),
        ..forever()
    }
}

/// Rules with blocks, and a store.
struct Fixture {
    rules: RuleSet,
    blocks: EntryBlocks,
    store: MemoryStore,
}

/// Whether a request is admitted, the reason and the rule of a denial, and when to retry.
type Answer = (bool, Option<Reason>, Option<String>, RetryAfter);

impl Fixture {
    fn new(rules: Vec<Rule>, allow: Vec<When>) -> Self {
        let blocks = EntryBlocks::default();
        let rules = RuleSet::build(rules, allow).unwrap();
        Self {
            rules: rules.with_entry_blocks(&blocks),
            blocks,
            store: MemoryStore::new(MemoryBounds::default()),
        }
    }

    fn set(&self, rule: Option<&str>, entries: &[(&str, &str)], block: EntryBlock) {
        self.blocks
            .set(&target(rule, entries), block, START)
            .unwrap();
    }

    fn ask(&self, entries: &[(&str, &str)], effect: Effect, now: Timestamp) -> Answer {
        let request = Request::new(entries, Cost::ONE).unwrap();
        let (mut scratch, mut outcomes) = (Scratch::default(), Vec::new());
        let charges = self.rules.charges(&request, now, &mut scratch).unwrap();
        let decision = self.store.check(&charges, now, effect, &mut outcomes);
        let verdict = Verdict::of(&decision, &charges, &outcomes);
        let rule = verdict.rule.map(str::to_owned);
        (verdict.allowed, verdict.reason, rule, verdict.retry_after)
    }

    fn is_blocked(&self, entries: &[(&str, &str)]) -> bool {
        self.ask(entries, Effect::Charge, START).1 == Some(Reason::Blocked)
    }
}

fn login_and_api() -> Fixture {
    let path = |path| {
        let condition = Condition::new("path", Pattern::text(path).unwrap()).unwrap();
        When::all(vec![condition])
    };
    let login = rule("login", &["ip"]).when(path("/login"));
    let api = rule("api", &["tenant", "user"]).when(path("/api/**"));
    Fixture::new(vec![login, api], Vec::new())
}

#[test]
fn an_address_is_blocked_in_every_rule_and_where_no_rule_applies() {
    let fixture = login_and_api();
    let login = [("path", "/login"), ("ip", "203.0.113.9")];
    let api = [
        ("path", "/api/a"),
        ("ip", "203.0.113.9"),
        ("tenant", "acme"),
        ("user", "u"),
    ];
    let other = [("path", "/"), ("ip", "203.0.113.9")];
    for entries in [&login[..], &api, &other] {
        assert!(!fixture.is_blocked(entries));
    }
    fixture.set(None, &[("ip", "203.0.113.9")], lasting(60));
    let minute = RetryAfter::After(Span::from_secs(60));
    for (entries, rule) in [
        (&login[..], Some("login")),
        (&api, Some("api")),
        (&other, None),
    ] {
        let blocked = (
            false,
            Some(Reason::Blocked),
            rule.map(str::to_owned),
            minute,
        );
        assert_eq!(fixture.ask(entries, Effect::Charge, START), blocked);
        assert_eq!(fixture.ask(entries, Effect::Peek, START), blocked);
    }
    assert!(!fixture.is_blocked(&[("path", "/login"), ("ip", "203.0.113.8")]));
    assert!(!fixture.is_blocked(&[("path", "/login")]));
    // The two requests before the block were charged, and no blocked request was.
    let after = START.after(Span::from_secs(60));
    let request = Request::new(&login, Cost::ONE).unwrap();
    let (mut scratch, mut outcomes) = (Scratch::default(), Vec::new());
    let charges = fixture.rules.charges(&request, after, &mut scratch);
    let charges = charges.unwrap();
    assert_eq!(charges[0].blocked, None, "the block has ended");
    fixture
        .store
        .check(&charges, START, Effect::Look, &mut outcomes);
    assert_eq!(outcomes[0].remaining, 9);
}

#[test]
fn a_part_of_a_key_is_blocked_in_one_rule_or_in_all() {
    let fixture = Fixture::new(
        vec![
            rule("api", &["tenant", "user"]),
            rule("reports", &["tenant"]),
        ],
        Vec::new(),
    );
    let acme = [("tenant", "acme"), ("user", "u1")];
    fixture.set(Some("api"), &[("tenant", "acme")], forever());
    let rule = || fixture.ask(&acme, Effect::Charge, START).2.unwrap();
    assert_eq!(rule(), "api");
    fixture
        .blocks
        .remove(&target(Some("api"), &[("tenant", "acme")]));
    fixture.set(Some("reports"), &[("tenant", "acme")], lasting(60));
    assert_eq!(rule(), "reports");
    fixture.set(None, &[("tenant", "acme")], lasting(60));
    assert_eq!(
        rule(),
        "api",
        "if the ends are equal, the first rule that applies"
    );
    fixture.set(None, &[("tenant", "acme")], lasting(30));
    assert_eq!(rule(), "reports", "the block that ends last");
    for rule in [None, Some("reports")] {
        fixture.blocks.remove(&target(rule, &[("tenant", "acme")]));
    }
    fixture.set(Some("api"), &[("tenant", "acme")], forever());
    assert!(!fixture.is_blocked(&[("tenant", "acme")]));
    assert!(!fixture.is_blocked(&[("tenant", "initech"), ("user", "u1")]));
    fixture.set(None, &[("tenant", "acme"), ("user", "u2")], forever());
    fixture
        .blocks
        .remove(&target(Some("api"), &[("tenant", "acme")]));
    assert!(!fixture.is_blocked(&acme));
    assert!(fixture.is_blocked(&[("tenant", "acme"), ("user", "u2")]));
}

#[test]
fn networks_are_blocked_by_prefix() {
    let fixture = Fixture::new(vec![rule("each", &["ip"])], Vec::new());
    fixture.set(None, &[("ip", "203.0.113.0/24")], lasting(10));
    fixture.set(None, &[("ip", "203.0.113.128/25")], lasting(20));
    fixture.set(None, &[("ip", "2001:db8::/32")], forever());
    for (address, seconds) in [
        ("203.0.113.0", Some(10)),
        ("203.0.113.127", Some(10)),
        ("203.0.113.128", Some(20)),
        ("203.0.113.255", Some(20)),
        ("::ffff:203.0.113.255", Some(20)),
        ("203.0.112.255", None),
        ("203.0.114.0", None),
        ("203.0.113", None),
    ] {
        let answer = fixture.ask(&[("ip", address)], Effect::Charge, START);
        let expected = seconds.map(|seconds| RetryAfter::After(Span::from_secs(seconds)));
        assert_eq!(answer.3, expected.unwrap_or(RetryAfter::NOW), "{address}");
    }
    for address in ["2001:db8::", "2001:DB8:ffff::1", "2001:db8:1::/64"] {
        let answer = fixture.ask(&[("ip", address)], Effect::Charge, START);
        assert_eq!(answer.3, RetryAfter::Never, "{address}");
    }
    for address in ["2001:db9::", "2001::/16", "203.0.0.0/16"] {
        assert!(!fixture.is_blocked(&[("ip", address)]), "{address}");
    }
}

#[test]
fn shadow_rules_are_blocked_and_the_allow_list_is_not() {
    let office = || {
        let condition = Condition::new("ip", Pattern::networks(&["192.0.2.0/24"]).unwrap());
        When::all(vec![condition.unwrap()])
    };
    let shadow = rule("shadow", &["ip"]).in_mode(Mode::Shadow);
    let fixture = Fixture::new(vec![shadow], vec![office()]);
    fixture.set(None, &[("ip", "0.0.0.0/1")], forever());
    fixture.set(None, &[("ip", "128.0.0.0/1")], forever());
    let shadow = fixture.ask(&[("ip", "203.0.113.9")], Effect::Charge, START);
    assert_eq!(
        (shadow.0, shadow.1, shadow.2.as_deref()),
        (false, Some(Reason::Blocked), Some("shadow"))
    );
    assert!(!fixture.is_blocked(&[("ip", "192.0.2.7")]));
    // A rule's own allow list lifts only the blocks of this rule.
    let exempting = rule("each", &["ip"]).allowing(vec![office()]);
    let fixture = Fixture::new(vec![exempting], Vec::new());
    fixture.set(Some("each"), &[("ip", "192.0.2.7")], forever());
    assert!(!fixture.is_blocked(&[("ip", "192.0.2.7")]));
    fixture.set(None, &[("ip", "192.0.2.7")], forever());
    assert!(fixture.is_blocked(&[("ip", "192.0.2.7")]));
}

#[test]
fn a_refund_and_a_look_are_not_blocked_and_a_reservation_is() {
    let fixture = Fixture::new(vec![rule("each", &["ip"])], Vec::new());
    let entries = [("ip", "203.0.113.9")];
    fixture.set(None, &entries, forever());
    assert!(fixture.ask(&entries, Effect::Look, START).0);
    assert!(fixture.ask(&entries, Effect::Refund, START).0);
    let request = Request::new(&entries, Cost::ONE).unwrap();
    let mut scratch = Scratch::default();
    let charges = fixture.rules.charges(&request, START, &mut scratch);
    let reserved = fixture
        .store
        .reserve(&charges.unwrap(), START, &mut Vec::new());
    assert!(matches!(
        reserved.0,
        Decision::Blocked {
            charge: 0,
            until: None,
            ..
        }
    ));
    assert!(reserved.1.is_empty());
}

#[test]
fn a_request_without_rules_has_a_charge_that_belongs_to_no_rule() {
    let fixture = Fixture::new(Vec::new(), Vec::new());
    fixture.set(None, &[("ip", "203.0.113.9")], forever());
    let entries = [("ip", "203.0.113.9")];
    let request = Request::new(&entries, Cost::ONE).unwrap();
    let mut scratch = Scratch::default();
    let charges = fixture.rules.charges(&request, START, &mut scratch);
    let charges = charges.unwrap();
    assert_eq!(charges.len(), 1);
    assert_eq!(charges[0].key, BLOCK_KEY);
    assert!(fixture.rules.decode_key(&BLOCK_KEY).is_none());
    assert!(fixture.rules.own_limits(&charges[0]).is_some());
}

#[test]
fn the_parent_of_an_elastic_rule_is_not_read_for_a_blocked_request() {
    let unused = Headroom::Unused(UnusedShare::new("all", 50).unwrap());
    let elastic = rule("each", &["ip"]).elastic(200, unused).unwrap();
    let fixture = Fixture::new(vec![elastic, rule("all", &[])], Vec::new());
    fixture.set(Some("each"), &[("ip", "203.0.113.9")], forever());
    for (address, has_parent) in [("203.0.113.8", true), ("203.0.113.9", false)] {
        let entries = [("ip", address)];
        let request = Request::new(&entries, Cost::ONE).unwrap();
        let mut scratch = Scratch::default();
        let charges = fixture.rules.charges(&request, START, &mut scratch);
        let parents = fixture.rules.parents(&charges.unwrap());
        assert_eq!(parents.is_some(), has_parent, "{address}");
    }
}

#[test]
fn the_numbers_of_blocks_and_of_forms_are_bounded() {
    let blocks = EntryBlocks::default();
    let set = |text: &str, block| {
        let target = target(None, &[("ip", text)]);
        blocks.set(&target, block, START)
    };
    for length in 1..=bounds::MAX_ENTRY_BLOCK_FORMS {
        set(&format!("2001:db8::/{}", 32 + length), lasting(1)).unwrap();
    }
    assert_eq!(
        set("2001:db8::/32", forever()),
        Err(EntryBlockError::TooManyForms)
    );
    // A block whose prefix length is in use, and a block of a rule, are still accepted.
    set("2001:db9::/33", lasting(1)).unwrap();
    let of_rule = target(Some("each"), &[("ip", "2001:db8::/32")]);
    blocks.set(&of_rule, lasting(1), START).unwrap();
    // Ended blocks are removed if a new block needs their place.
    let later = START.after(Span::from_secs(1));
    let wide = target(None, &[("ip", "2001:db8::/32")]);
    blocks.set(&wide, forever(), later).unwrap();
    assert_eq!(blocks.len(), 1);

    for number in 1..bounds::MAX_ENTRY_BLOCKS {
        set(&format!("user-{number}"), lasting(1)).unwrap();
    }
    assert_eq!(set("one-more", forever()), Err(EntryBlockError::TooMany));
    // An existing block can still be changed.
    set("user-1", lasting(1)).unwrap();
    blocks.check_room(&wide, START).unwrap();
    let other = target(None, &[("ip", "one-more")]);
    blocks.check_room(&other, later).unwrap();
    assert_eq!(blocks.len(), 1);
}

#[test]
fn a_listing_is_sorted_and_has_pages() {
    let blocks = EntryBlocks::default();
    let targets = [
        target(None, &[("ip", "203.0.113.9")]),
        target(None, &[("tenant", "acme")]),
        target(None, &[("tenant", "initech")]),
        target(Some("api"), &[("tenant", "acme")]),
    ];
    for target in targets.iter().rev() {
        blocks.set(target, forever(), START).unwrap();
    }
    let mut listed = Vec::new();
    while listed.len() < targets.len() {
        let page = blocks.page(listed.last(), 2, |_, _| true);
        assert_eq!(page.len(), 2);
        listed.extend(page.into_iter().map(|(target, _)| target));
    }
    assert_eq!(listed, targets);
    assert!(blocks.page(listed.last(), 2, |_, _| true).is_empty());
    let acme = |target: &EntryBlockTarget, _: &EntryBlock| target.rule().is_some();
    assert_eq!(blocks.page(None, 9, acme).len(), 1);
}

#[test]
fn a_replacement_removes_the_blocks_that_were_not_set_again() {
    let blocks = EntryBlocks::default();
    let (kept, dropped) = (
        target(None, &[("ip", "203.0.113.9")]),
        target(Some("api"), &[("ip", "203.0.113.9")]),
    );
    for target in [&kept, &dropped] {
        blocks.set(target, forever(), START).unwrap();
    }
    blocks.begin_replacement();
    blocks.set(&kept, forever(), START).unwrap();
    assert_eq!(blocks.len(), 2);
    assert_eq!(blocks.end_replacement(), 1);
    assert_eq!(blocks.get(&dropped), None);
    assert_eq!(blocks.get(&kept), Some(forever()));
}

/// The rule and the entries of a block.
type Target = (Option<String>, Vec<(String, String)>);

/// The naive reference model: a list of all blocks, each of which is compared with the request.
#[derive(Default)]
struct Twin(BTreeMap<Target, Option<Timestamp>>);

impl Twin {
    /// Returns the end of the longest block on a request to which the rules `applied` apply.
    fn end(
        &self,
        entries: &[(&str, &str)],
        applied: &[&str],
        now: Timestamp,
    ) -> Option<Option<Timestamp>> {
        let blocks = self.0.iter().filter(|((rule, blocked), until)| {
            let is_of_rule = rule
                .as_ref()
                .is_none_or(|rule| applied.contains(&rule.as_str()));
            let has = |(name, value): &(String, String)| {
                let given = entries.iter().find(|(known, _)| known == name);
                given.is_some_and(|(_, given)| matches(value, given))
            };
            is_of_rule && until.is_none_or(|until| until > now) && blocked.iter().all(has)
        });
        let ends = blocks.map(|(_, until)| *until);
        ends.max_by_key(|until| until.unwrap_or(Timestamp::MAX))
    }
}

/// Compares the bits of two IPv4 addresses one by one, or two texts.
fn matches(blocked: &str, given: &str) -> bool {
    let (address, length) = blocked.split_once('/').unwrap_or((blocked, "32"));
    match (address.parse::<IpAddr>(), given.parse::<IpAddr>()) {
        (Ok(IpAddr::V4(net)), Ok(IpAddr::V4(given))) => {
            let length: u32 = length.parse().unwrap();
            let differing = net.to_bits() ^ given.to_bits();
            (0..length).all(|bit| differing >> (31 - bit) & 1 == 0)
        }
        _ => blocked == given,
    }
}

fn value() -> impl Strategy<Value = String> {
    prop_oneof![
        (0..4_u8, 29..=32_u32).prop_map(|(last, length)| {
            let bits = 0xCB00_7100 | u32::from(last);
            let net = bits >> (32 - length) << (32 - length);
            format!("{}/{length}", std::net::Ipv4Addr::from_bits(net))
        }),
        (0..3_u8).prop_map(|number| format!("v{number}")),
    ]
}

#[derive(Clone, Debug)]
enum Operation {
    Set(
        Option<&'static str>,
        Vec<(&'static str, String)>,
        Option<u64>,
    ),
    Remove(Option<&'static str>, Vec<(&'static str, String)>),
    RemoveEnded,
    Ask(Vec<(&'static str, String)>),
    Wait,
}

fn blocked() -> impl Strategy<Value = (Option<&'static str>, Vec<(&'static str, String)>)> {
    let rule = prop::option::of(prop::sample::select(vec!["one", "two", "gone"]));
    let names = prop::sample::subsequence(vec!["a", "b", "c"], 1..=2);
    (rule, names, value(), value())
        .prop_map(|(rule, names, x, y)| (rule, names.into_iter().zip([x, y]).collect()))
}

fn operation() -> impl Strategy<Value = Operation> {
    let given = prop_oneof![
        (0..8_u8).prop_map(|last| format!("203.0.113.{last}")),
        (0..3_u8).prop_map(|number| format!("v{number}")),
    ];
    let names = prop::sample::subsequence(vec!["a", "b", "c"], 0..=3);
    let asked = (names, prop::collection::vec(given, 3));
    prop_oneof![
        4 => (blocked(), prop::option::of(1..5_u64))
            .prop_map(|((rule, entries), seconds)| Operation::Set(rule, entries, seconds)),
        2 => blocked().prop_map(|(rule, entries)| Operation::Remove(rule, entries)),
        1 => Just(Operation::RemoveEnded),
        1 => Just(Operation::Wait),
        8 => asked.prop_map(|(names, values)| {
            Operation::Ask(names.into_iter().zip(values).collect())
        }),
    ]
}

proptest! {
    #[test]
    fn the_blocks_equal_the_naive_twin(
        operations in prop::collection::vec(operation(), 1..80),
    ) {
        let fixture = Fixture::new(vec![rule("one", &["a"]), rule("two", &["a", "b"])], Vec::new());
        let (mut twin, mut now) = (Twin::default(), START);
        let borrowed = |entries: &[(&'static str, String)]| -> Vec<(&'static str, String)> {
            entries.to_vec()
        };
        for operation in operations {
            match operation {
                Operation::Set(rule, entries, seconds) => {
                    let until = seconds.map(|seconds| now.after(Span::from_secs(seconds)));
                    let pairs: Vec<_> = entries.iter().map(|(n, v)| (*n, v.as_str())).collect();
                    let block = EntryBlock { until, ..forever() };
                    fixture.blocks.set(&target(rule, &pairs), block, now).unwrap();
                    let owned = borrowed(&entries).into_iter().map(|(n, v)| (n.to_owned(), v));
                    twin.0.insert((rule.map(str::to_owned), owned.collect()), until);
                }
                Operation::Remove(rule, entries) => {
                    let pairs: Vec<_> = entries.iter().map(|(n, v)| (*n, v.as_str())).collect();
                    let removed = fixture.blocks.remove(&target(rule, &pairs));
                    let owned = borrowed(&entries).into_iter().map(|(n, v)| (n.to_owned(), v));
                    let key = (rule.map(str::to_owned), owned.collect());
                    prop_assert_eq!(removed.map(|block| block.until), twin.0.remove(&key));
                }
                Operation::RemoveEnded => {
                    fixture.blocks.remove_ended(now);
                    twin.0.retain(|_, until| until.is_none_or(|until| until > now));
                }
                Operation::Wait => now = now.after(Span::from_secs(1)),
                Operation::Ask(entries) => {
                    let pairs: Vec<_> = entries.iter().map(|(n, v)| (*n, v.as_str())).collect();
                    let has = |name| pairs.iter().any(|(known, _)| *known == name);
                    let mut applied = Vec::new();
                    if has("a") { applied.push("one"); }
                    if has("a") && has("b") { applied.push("two"); }
                    let (allowed, reason, _, retry_after) =
                        fixture.ask(&pairs, Effect::Peek, now);
                    let expected = twin.end(&pairs, &applied, now);
                    prop_assert_eq!(allowed, expected.is_none());
                    if let Some(until) = expected {
                        prop_assert_eq!(reason, Some(Reason::Blocked));
                        let wait = until.map_or(RetryAfter::Never, |until| {
                            RetryAfter::After(until.since(now))
                        });
                        prop_assert_eq!(retry_after, wait);
                    }
                }
            }
            prop_assert_eq!(fixture.blocks.len(), twin.0.len());
        }
    }
}
