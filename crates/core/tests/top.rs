//! Tests top talkers by comparing every number in a list with exact counts.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::{
    collections::{BTreeMap, HashMap},
    hash::BuildHasher as _,
};

use foldhash::fast::FixedState;
use proptest::prelude::*;
use tidegate_core::{
    Rule, RuleSet,
    top::{
        ChargedKey, GroupSummaries, History, Level, Measure, NO_RULE, Period, RecordedRequest,
        Recorder, Sketch, Summary, Tally, TopKey, merge, top_keys,
    },
};

/// The exact sum of each key in a stream of additions.
type Exact = BTreeMap<Vec<u8>, u64>;

/// An addition: the key and the weight.
type Addition = (u32, u64);

fn key(number: u32) -> Vec<u8> {
    format!("key-{number}").into_bytes()
}

/// Returns a hash with many collisions, so that the sketch must compare keys. All of its bits
/// differ between hashes, because the sketch uses the first and the last bits.
fn hash(key: &[u8]) -> u32 {
    let small = key
        .iter()
        .fold(7, |hash, byte| hash * 31 % 61 + u32::from(*byte) % 17);
    spread(small)
}

/// Spreads the numbers over all bits.
fn spread(number: u32) -> u32 {
    number.wrapping_mul(0x9E37_79B9)
}

fn sketch_of(stream: &[Addition], keep: usize) -> Sketch {
    let mut sketch = Sketch::new(keep);
    for &(number, weight) in stream {
        let key = key(number);
        sketch.add(&key, hash(&key), weight);
    }
    sketch
}

fn exact(stream: &[Addition]) -> Exact {
    let mut sums = Exact::new();
    for &(number, weight) in stream {
        *sums.entry(key(number)).or_default() += weight;
    }
    sums
}

/// Checks all guarantees of a summary against the exact sums.
fn check(summary: &Summary, exact: &Exact, keep: usize) {
    let total: u64 = exact.values().sum();
    assert!(
        summary.floor() <= total / (keep as u64 + 1),
        "floor {} of {total}",
        summary.floor()
    );
    check_all_but_the_floor(summary, exact);
}

/// Checks the guarantees that hold even if long keys or a lack of memory leave less than `keep`
/// keys in the sketch.
fn check_all_but_the_floor(summary: &Summary, exact: &Exact) {
    let packed = Summary::unpack(summary.floor(), summary.len(), summary.packed());
    assert!(packed.is_some(), "another server can read the summary");
    let mut listed = HashMap::new();
    for (key, count, error) in summary.iter() {
        let truth = exact[key];
        assert!(
            truth <= count && count - error <= truth,
            "{truth} not in {count} - {error}"
        );
        assert!(error <= summary.floor() && summary.floor() <= count);
        assert!(count > error, "a listed key occurred");
        assert!(listed.insert(key, count).is_none(), "listed twice");
    }
    for (key, &truth) in exact {
        assert!(listed.contains_key(key.as_slice()) || truth <= summary.floor());
    }
}

/// Generates a skewed stream, in which a key's index is about the inverse of a uniformly
/// distributed number.
fn zipf() -> impl Strategy<Value = Vec<Addition>> {
    let key = (1_u32..1_000).prop_map(|number| 1_000 / number);
    prop::collection::vec((key, 1_u64..4), 0..2_000)
}

fn uniform() -> impl Strategy<Value = Vec<Addition>> {
    prop::collection::vec((0_u32..300, 1_u64..4), 0..2_000)
}

/// Generates streams that are difficult for sketches: floods of new keys between additions to a
/// heavy key, keys that occur again just after a sketch may have dropped them, and a flood of new
/// keys at the end.
fn adversarial() -> impl Strategy<Value = Vec<Addition>> {
    let part = prop_oneof![
        // A flood of new keys.
        (1_000_u32..4_000, 1_usize..200)
            .prop_map(|(from, count)| (from..).take(count).map(|key| (key, 1)).collect::<Vec<_>>()),
        // A few keys in turn, often more than the sketch keeps.
        (1_usize..200, 5_u32..40).prop_map(|(count, keys)| (0..keys)
            .cycle()
            .take(count)
            .map(|key| (key, 1))
            .collect()),
        // A key with a high weight.
        (0_u32..3, 1_u64..1_000).prop_map(|addition| vec![addition]),
    ];
    prop::collection::vec(part, 0..20).prop_map(|parts| parts.concat())
}

fn streams() -> impl Strategy<Value = Vec<Addition>> {
    prop_oneof![zipf(), uniform(), adversarial()]
}

proptest! {
    #[test]
    fn a_sketch_bounds_every_key(stream in streams(), keep in 1_usize..60) {
        check(&sketch_of(&stream, keep).summary(), &exact(&stream), keep);
    }

    #[test]
    fn merging_keeps_the_bound(
        stream in streams(),
        keep in 1_usize..60,
        parts in 1_usize..9,
        deal in any::<bool>(),
    ) {
        // Either distribute the additions to the workers in turn, or give each worker a contiguous
        // part of the stream.
        let mut dealt = vec![Vec::new(); parts];
        for (at, addition) in stream.iter().enumerate() {
            let part = if deal { at % parts } else { at * parts / stream.len() };
            dealt[part].push(*addition);
        }
        let summaries: Vec<Summary> =
            dealt.iter().map(|part| sketch_of(part, keep).summary()).collect();
        let exact = exact(&stream);
        check(&merge(&summaries, keep), &exact, keep);
        // Merge the summaries one after the other, as a history merges time slices.
        let mut one_by_one = Summary::default();
        for summary in &summaries {
            one_by_one = merge([&one_by_one, summary], keep);
        }
        check(&one_by_one, &exact, keep);
        let total: u64 = exact.values().sum();
        let rows = top_keys(&summaries, 10);
        for TopKey { key, estimate, error } in &rows {
            let truth = exact[*key];
            prop_assert!(truth <= *estimate && estimate - error <= truth);
            prop_assert!(*error <= total / (keep as u64 + 1));
        }
        // If a key's exact sum is above the estimate of the last row, the key must be in the list.
        let all = top_keys(&summaries, usize::MAX);
        let least = rows.last().map_or(0, |row| row.estimate);
        for (key, truth) in &exact {
            let may_be_absent = *truth <= least || all.len() <= 10;
            prop_assert!(may_be_absent || rows.iter().any(|row| row.key == key));
        }
    }

    #[test]
    fn halving_keeps_every_statement_but_the_floor(stream in streams(), keep in 1_usize..60) {
        let (first, second) = stream.split_at(stream.len() / 2);
        let mut sketch = sketch_of(first, keep);
        sketch.halve();
        for &(number, weight) in second {
            let key = key(number);
            sketch.add(&key, hash(&key), weight);
        }
        check_all_but_the_floor(&sketch.summary(), &exact(&stream));
    }

    #[test]
    fn long_keys_keep_every_statement_but_the_floor(
        stream in streams(),
        keep in 1_usize..60,
        length in 20_usize..300,
    ) {
        let long = |number: u32| {
            let mut key = key(number);
            key.resize(length, b'.');
            key
        };
        let (mut sketch, mut exact) = (Sketch::new(keep), Exact::new());
        for &(number, weight) in &stream {
            let key = long(number);
            sketch.add(&key, hash(&key), weight);
            *exact.entry(key).or_default() += weight;
        }
        check_all_but_the_floor(&sketch.summary(), &exact);
    }
}

/// A decided request in a test.
#[derive(Clone, Debug)]
struct Event {
    worker: usize,
    rule: usize,
    key: u32,
    cost: u64,
    denied: bool,
}

fn event() -> impl Strategy<Value = Event> {
    let key = prop_oneof![0_u32..4, (1_u32..400).prop_map(|number| 400 / number)];
    let cost = prop_oneof![3 => Just(1_u64), 1 => 1_u64..500];
    (0_usize..3, 0_usize..4, key, cost, any::<bool>()).prop_map(
        |(worker, rule, key, cost, denied)| Event {
            worker,
            rule,
            key,
            cost,
            denied,
        },
    )
}

const RULES: [&str; 3] = ["api", "login", "search"];

fn rules() -> RuleSet {
    let limit = || vec!["5/min".parse().unwrap()];
    let rule = |name: &&str| {
        Rule::new(name, limit())
            .unwrap()
            .keyed_by(&["customer"])
            .unwrap()
    };
    RuleSet::build(RULES.iter().map(rule).collect(), Vec::new()).unwrap()
}

fn encoded(rules: &RuleSet, event: &Event) -> (u64, Vec<u8>) {
    let value = format!("customer-{}", event.key);
    match RULES.get(event.rule) {
        Some(name) => {
            let rule = rules.rule(name).unwrap();
            (rule.key_scope(), rule.encode_key(&[&value]).unwrap())
        }
        None => (NO_RULE, value.into_bytes()),
    }
}

const BASE: u64 = 28_000_000;

proptest! {
    /// Several workers record requests, with pauses between them. For every rule, measure and
    /// period, the totals are exact, and the bounds of every row contain the exact number.
    #[test]
    fn lists_over_slices_are_right(
        steps in prop::collection::vec(
            (prop_oneof![4 => 0_u64..3, 1 => 0_u64..200], prop::collection::vec(event(), 0..60)),
            1..25,
        ),
        keep in 2_usize..12,
        last_read in 0_u64..40,
    ) {
        let rules = rules();
        let scopes: Vec<u64> = rules.iter().map(Rule::key_scope).collect();
        let mut recorders: Vec<Recorder> =
            (0..3).map(|_| Recorder::new(keep, usize::MAX)).collect();
        recorders.iter_mut().for_each(|recorder| recorder.set_scopes(&scopes));
        let mut history = History::new(keep, usize::MAX);
        let (mut minute, mut events) = (BASE, Vec::new());
        for (pause, batch) in &steps {
            minute += pause;
            for event in batch {
                let (_, key) = encoded(&rules, event);
                let request = RecordedRequest { cost: event.cost, denied: event.denied };
                let charge = ChargedKey { key: &key, cost: event.cost, denied: event.denied };
                recorders[event.worker].record(minute, request, [charge].into_iter());
                events.push((minute, event.clone()));
            }
            // Only the first worker hands over its completed slices now. The slices of all other
            // workers are added before the lists are read.
            let closed: Vec<_> = recorders[0].take_closed();
            history.add(&closed, minute);
        }
        minute += last_read;
        for recorder in &mut recorders {
            let closed = recorder.take_closed();
            history.add(&closed, minute);
        }
        // Time has advanced since the last request, so complete the live slices.
        for recorder in &mut recorders {
            recorder.advance(minute);
            let closed = recorder.take_closed();
            history.add(&closed, minute);
        }
        for over in Period::ALL {
            let from = over.start(minute).as_micros() / 60_000_000;
            let covered = || events.iter().filter(|(at, _)| *at >= from).map(|(_, event)| event);
            let mut total = Tally::default();
            history.slices(over, minute).for_each(|slice| total += slice.total);
            recorders.iter().for_each(|recorder| total += recorder.total());
            prop_assert_eq!(total, tally(covered()));
            for scope in scopes.iter().copied().chain([NO_RULE]) {
                let of_scope = || covered().filter(|event| encoded(&rules, event).0 == scope);
                let mut groups: Vec<GroupSummaries> = history
                    .slices(over, minute)
                    .filter_map(|slice| slice.groups.get(&scope).cloned())
                    .collect();
                for recorder in &recorders {
                    groups.extend(recorder.groups(scope).map(|group| group.summaries()));
                }
                let mut tallied = Tally::default();
                groups.iter().for_each(|group| tallied += group.tally);
                prop_assert_eq!(tallied, tally(of_scope()));
                for by in Measure::ALL {
                    let mut exact = Exact::new();
                    for event in of_scope() {
                        let weight = match by {
                            Measure::Requests => 1,
                            Measure::Denied => u64::from(event.denied),
                            Measure::Cost => event.cost,
                        };
                        let key = format!("customer-{}", event.key);
                        *exact.entry(key.into_bytes()).or_default() += weight;
                    }
                    let whole: u64 = exact.values().sum();
                    let summaries = groups.iter().flat_map(|group| group.of(by));
                    for TopKey { key, estimate, error } in top_keys(summaries, 5) {
                        let truth = exact[key];
                        prop_assert!(truth <= estimate && estimate - error <= truth);
                        prop_assert!(error <= whole / (keep as u64 + 1));
                    }
                }
            }
        }
    }
}

fn tally<'e>(events: impl Iterator<Item = &'e Event>) -> Tally {
    let mut tally = Tally::default();
    for event in events {
        tally.requests += 1;
        tally.denied += u64::from(event.denied);
        tally.cost += event.cost;
    }
    tally
}

fn one(key: &[u8]) -> (RecordedRequest, std::iter::Once<ChargedKey<'_>>) {
    let (cost, denied) = (3, true);
    (
        RecordedRequest { cost, denied },
        std::iter::once(ChargedKey { key, cost, denied }),
    )
}

#[test]
fn memory_stays_bounded_under_a_million_keys() {
    for length in [20, 1_024] {
        let (max_live, max_closed) = (1 << 20, 2 << 20);
        let mut recorder = Recorder::new(1_000, max_live);
        let mut history = History::new(1_000, max_closed);
        let rules = rules();
        let scopes: Vec<u64> = rules.iter().map(Rule::key_scope).collect();
        recorder.set_scopes(&scopes);
        for number in 0..1_000_000_usize {
            let minute = BASE + (number / 20_000) as u64;
            let value = format!("{number:0length$}");
            let mut key = scopes[number % scopes.len()].to_be_bytes().to_vec();
            key.extend_from_slice(&value.as_bytes()[8..]);
            let (request, charges) = one(&key);
            recorder.record(minute, request, charges);
            let closed = recorder.take_closed();
            if !closed.is_empty() {
                history.add(&closed, minute);
                assert!(history.summary_bytes() <= max_closed);
            }
            if number % 1_000 == 0 {
                let bytes = recorder.heap_bytes();
                assert!(bytes <= max_live + 1_024, "{bytes}");
            }
        }
        let mut total = recorder.total();
        let minute = BASE + 49;
        history
            .slices(Period::Hour, minute)
            .for_each(|slice| total += slice.total);
        let requests = 1_000_000;
        assert_eq!(
            total,
            Tally {
                requests,
                denied: requests,
                cost: 3 * requests
            }
        );
    }
}

#[test]
fn a_sketch_takes_the_documented_memory() {
    let mut sketch = Sketch::new(1_000);
    for number in 0..100_000_u32 {
        let key = format!("customer-{number:020}");
        sketch.add(key.as_bytes(), spread(number), 1);
    }
    let bytes = sketch.heap_bytes();
    assert!((185_000..195_000).contains(&bytes), "{bytes}");
}

/// Without the filter, the floor would be almost 1/100 of the total, the bound for all streams.
#[test]
fn a_flood_of_new_keys_hardly_raises_the_floor() {
    let (keep, flood) = (100, 100_000_u32);
    let hasher = FixedState::with_seed(7);
    let mut sketch = Sketch::new(keep);
    for number in 0..flood {
        let key = key(number);
        let hash = u32::try_from(hasher.hash_one(&key) >> 32).unwrap();
        sketch.add(&key, hash, 1);
    }
    let floor = sketch.summary().floor();
    assert!((1..u64::from(flood) / 300).contains(&floor), "{floor}");
}

#[test]
fn a_reload_keeps_the_counts_of_the_rules_that_stay() {
    let rules = rules();
    let scopes: Vec<u64> = rules.iter().map(Rule::key_scope).collect();
    let mut recorder = Recorder::new(10, usize::MAX);
    recorder.set_scopes(&scopes);
    for name in RULES {
        let key = rules.rule(name).unwrap().encode_key(&["acme"]).unwrap();
        let (request, charges) = one(&key);
        recorder.record(BASE, request, charges);
    }
    recorder.set_scopes(&[scopes[2], scopes[0]]);
    let count = |recorder: &Recorder, scope| {
        recorder
            .groups(scope)
            .map(|group| group.tally().requests)
            .sum::<u64>()
    };
    assert_eq!(
        scopes
            .iter()
            .map(|scope| count(&recorder, *scope))
            .collect::<Vec<_>>(),
        [1, 0, 1]
    );
    assert_eq!(recorder.total().requests, 3);
    let key = rules.rule("search").unwrap().encode_key(&["acme"]).unwrap();
    let (request, charges) = one(&key);
    recorder.record(BASE, request, charges);
    assert_eq!(count(&recorder, scopes[2]), 2);
    recorder.reset_rule(scopes[2]);
    assert_eq!(count(&recorder, scopes[2]), 0);
    assert_eq!(recorder.total().requests, 4);

    let mut history = History::new(10, usize::MAX);
    recorder.advance(BASE + 1);
    history.add(&recorder.take_closed(), BASE + 1);
    history.retain(|scope| scope == NO_RULE);
    assert!(history.scopes(Period::Day, BASE + 1).is_empty());
    let slice = history.slice(Level::Hours, BASE / 60).unwrap();
    assert_eq!(slice.total.requests, 4);
}

#[test]
fn a_clock_that_is_set_back_loses_no_request() {
    let mut recorder = Recorder::new(10, usize::MAX);
    for minute in [BASE, BASE - 1_000, BASE + 1] {
        let (request, charges) = one(b"user:1");
        recorder.record(minute, request, charges);
    }
    let mut history = History::new(10, usize::MAX);
    history.add(&recorder.take_closed(), BASE + 1);
    let closed: Vec<_> = history.slices(Period::FiveMinutes, BASE + 1).collect();
    assert_eq!(closed.len(), 1);
    assert_eq!(closed[0].groups[&NO_RULE].tally.requests, 2);
    assert_eq!(recorder.groups(NO_RULE).count(), 1);
}
