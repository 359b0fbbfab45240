//! Tests of the recent denials.

use std::sync::Arc;

use tidegate::{Clock, RateLimiter as _};
use tidegate_config::Config;
use tidegate_core::{Cost, Effect, MemoryBounds, MemoryStore, Request, Scratch, Span, bounds};

use super::{
    record::{NewDenial, Record},
    ring::MAX_RECORD_BYTES,
    *,
};
use crate::ServerLimiter;

const START: Timestamp = Timestamp::from_micros(1_700_000_000_000_000);

const RULES: &str = "
rules:
  - {name: login, when: {path: /login}, key: [ip], limits: [1/h, 3/d], algorithm: fixed_window}
  - {name: trial, when: {path: /login}, key: [user], limits: [2/h], algorithm: fixed_window, mode: shadow}
  - {name: all, limits: [5/h], algorithm: fixed_window}
";

/// A test limiter whose clock starts at `START`.
struct Denying {
    limiter: Arc<ServerLimiter>,
    clock: Clock,
}

impl Denying {
    fn new(settings: &DenialsConfig) -> Self {
        let rules = Config::parse(RULES).unwrap().rules;
        let store = MemoryStore::new(MemoryBounds::default());
        let clock = Clock::manual(START);
        let limiter = ServerLimiter::new(rules, store, clock.clone()).with_denials(settings);
        Self {
            limiter: Arc::new(limiter),
            clock,
        }
    }

    fn at_secs(&self, secs: u64) {
        self.clock.set(START.after(Span::from_secs(secs)));
    }

    fn send(&self, entries: &[(&str, &str)]) -> bool {
        let request = Request::new(entries, Cost::ONE).unwrap();
        let (rules, mut scratch) = (self.limiter.rules(), Scratch::default());
        let checked = self
            .limiter
            .check(&rules, &mut scratch, &request, Effect::Charge);
        let verdict = checked.ready().unwrap().unwrap();
        let decided = DecidedRequest {
            request: &request,
            rules: &rules,
            now: self.limiter.now(),
        };
        self.limiter.observe(ListenerKind::Http, decided, &verdict);
        verdict.allowed
    }

    fn login(&self, ip: &str, user: &str) -> bool {
        let secret = ("header.authorization", "Bearer secret");
        self.send(&[("path", "/login"), ("ip", ip), ("user", user), secret])
    }

    fn list(&self, filter: &DenialFilter<'_>) -> Vec<DenialRecord> {
        self.limiter.denials().list(filter, 100).denials
    }
}

#[test]
fn a_denial_names_the_rule_the_key_the_limit_and_the_wait() {
    let denying = Denying::new(&DenialsConfig::default());
    assert!(denying.login("192.0.2.1", "ada"));
    assert!(denying.list(&DenialFilter::default()).is_empty());
    denying.at_secs(600);
    assert!(!denying.login("192.0.2.1", "ada"));
    let denials = denying.list(&DenialFilter::default());
    let texts = |texts: &[&str]| texts.iter().map(|text| (*text).to_owned()).collect();
    let expected = DenialRecord {
        at: START.after(Span::from_secs(600)),
        listener: ListenerKind::Http,
        mode: Mode::Enforce,
        reason: DenialReason::Limit,
        retry_after: denials[0].retry_after,
        rule: Some("login".to_owned()),
        policy: Some("1/h".to_owned()),
        key: texts(&["192.0.2.1"]),
        entries: [("path", "/login"), ("ip", "192.0.2.1")]
            .map(|(name, value)| (name.to_owned(), value.to_owned()))
            .into(),
    };
    let policy = denials[0].policy.clone().unwrap();
    assert!(policy.starts_with("1/h"), "{policy}");
    let denied = DenialRecord {
        policy: expected.policy.clone(),
        ..denials[0].clone()
    };
    assert_eq!((denials.len(), denied), (1, expected));
    let wait = denials[0].retry_after.span().unwrap();
    assert!(wait > Span::ZERO && wait <= Span::from_secs(3_600));
}

/// A denied request is recorded once for each rule that denies it. A shadow rule is recorded even
/// if the request is admitted.
#[test]
fn each_denying_rule_is_recorded_and_shadow_rules_are_marked() {
    let denying = Denying::new(&DenialsConfig::default());
    for number in 0..3 {
        assert!(denying.login(&format!("192.0.2.{number}"), "ada"));
    }
    let shadow = |denial: &DenialRecord| (denial.rule.clone().unwrap(), denial.mode);
    let denials = denying.list(&DenialFilter::default());
    let trial = ("trial".to_owned(), Mode::Shadow);
    assert_eq!(
        denials.iter().map(shadow).collect::<Vec<_>>(),
        std::slice::from_ref(&trial)
    );
    assert_eq!(denials[0].key, ["ada"]);

    denying.at_secs(1);
    assert!(!denying.login("192.0.2.0", "ada"));
    let denials = denying.list(&DenialFilter {
        since: START.after(Span::from_secs(1)),
        ..DenialFilter::default()
    });
    let rules: Vec<_> = denials.iter().map(shadow).collect();
    assert_eq!(rules, [trial, ("login".to_owned(), Mode::Enforce)]);
}

#[test]
fn denials_are_filtered_by_rule_key_and_time_newest_first() {
    let denying = Denying::new(&DenialsConfig::default());
    denying.login("192.0.2.1", "a");
    denying.login("192.0.2.2", "b");
    for secs in [10, 20, 30] {
        denying.at_secs(secs);
        assert!(!denying.login("192.0.2.1", "a"));
    }
    assert!(!denying.login("192.0.2.2", "b"));
    let seconds = |filter: DenialFilter<'_>| -> Vec<u64> {
        let denials = denying.list(&filter).into_iter();
        denials
            .map(|denial| denial.at.since(START).as_micros() / 1_000_000)
            .collect()
    };
    let of_login = DenialFilter {
        rule: Some("login"),
        ..DenialFilter::default()
    };
    assert_eq!(seconds(of_login.clone()), [30, 30, 20, 10]);
    let key = DenialFilter {
        key: &["192.0.2.1"],
        ..of_login.clone()
    };
    assert_eq!(seconds(key.clone()), [30, 20, 10]);
    let since = DenialFilter {
        since: START.after(Span::from_secs(20)),
        ..key
    };
    assert_eq!(seconds(since), [30, 20]);
    let other = DenialFilter {
        rule: Some("all"),
        ..DenialFilter::default()
    };
    assert_eq!(seconds(other), [0; 0]);
    let newest = denying.limiter.denials().list(&of_login, 1);
    assert_eq!(newest.denials[0].key, ["192.0.2.2"]);
}

#[test]
fn a_block_and_a_full_store_are_recorded_without_a_limit() {
    let denying = Denying::new(&DenialsConfig::default());
    let rules = denying.limiter.rules();
    let key = rules.rule("login").unwrap().encode_key(&["192.0.2.1"]);
    let store = denying.limiter.local_store();
    store.block(&key.unwrap(), None, "why", START);
    assert!(!denying.login("192.0.2.1", "ada"));
    let denials = denying.list(&DenialFilter::default());
    assert_eq!(denials.len(), 1);
    let denied = &denials[0];
    assert_eq!(denied.rule.as_deref(), Some("login"));
    assert_eq!(
        (denied.reason, denied.retry_after),
        (DenialReason::Blocked, RetryAfter::Never)
    );
    assert_eq!(
        (&denied.policy, &denied.key),
        (&None, &vec!["192.0.2.1".to_owned()])
    );
}

/// If several threads record denials, the memory stays within the bound, and each denial is either
/// listed or counted as lost.
#[test]
fn the_memory_is_bounded_and_every_lost_denial_is_counted() {
    let settings = DenialsConfig {
        max_bytes: 256 << 10,
        log_percent: 0,
    };
    let log = DenialLog::with_shards(&settings, 4);
    assert_eq!(
        log.heap_bytes(),
        0,
        "no memory is allocated before the first denial"
    );
    let denied = |number: u64, key: &str| {
        let denied = NewDenial {
            at: START.after(Span::from_micros(number)),
            listener: ListenerKind::Resp,
            mode: Mode::Enforce,
            reason: DenialReason::Limit,
            retry_after: RetryAfter::NOW,
            rule: Some("r"),
            policy: Some("1/h"),
            key: &[key],
            entries: &[],
        };
        let selection = Selection {
            is_kept: true,
            is_logged: false,
        };
        log.push(&denied, selection);
    };
    let count = |list: &DenialList| u64::try_from(list.denials.len()).unwrap() + list.lost;
    let everything = || log.list(&DenialFilter::default(), usize::MAX);
    for number in 0..500 {
        denied(number, &"k".repeat(usize::try_from(number).unwrap()));
        assert_eq!(count(&everything()), number + 1);
    }
    thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| (0..5_000).for_each(|number| denied(number, "key")));
        }
    });
    let list = everything();
    assert_eq!(count(&list), 500 + 8 * 5_000);
    assert!(list.lost > 0 && !list.denials.is_empty());
    assert!(
        log.heap_bytes() <= settings.max_bytes,
        "{}",
        log.heap_bytes()
    );
    // The list uses more than half of its maximum memory.
    assert!(
        log.heap_bytes() * 2 > settings.max_bytes,
        "{}",
        log.heap_bytes()
    );
}

/// The largest record fits within the bound and is complete, except that some of its entries are
/// left out.
#[test]
fn a_record_of_the_longest_texts_is_complete_but_for_its_entries() {
    let long = "ü".repeat(bounds::MAX_ENTRY_VALUE_BYTES / 2);
    let name = "n".repeat(bounds::MAX_ENTRY_NAME_BYTES);
    let key = "k".repeat(bounds::MAX_KEY_BYTES - 8);
    let rule = "r".repeat(bounds::MAX_RULE_NAME_BYTES);
    let entries = [(name.as_str(), long.as_str()); bounds::MAX_ENTRIES];
    let mut bytes = Vec::new();
    let denied = NewDenial {
        at: START,
        listener: ListenerKind::Proxy,
        mode: Mode::Shadow,
        reason: DenialReason::Store,
        retry_after: RetryAfter::Never,
        rule: Some(&rule),
        policy: Some("999999999999999/3650d capacity 999999999999999"),
        key: &[&key],
        entries: &entries,
    };
    denied.encode(&mut bytes);
    assert!(bytes.len() <= MAX_RECORD_BYTES);
    let denial = Record::decode(&bytes).unwrap().to_denial();
    assert_eq!(denial.key, [key]);
    assert_eq!(
        (denial.mode, denial.reason),
        (Mode::Shadow, DenialReason::Store)
    );
    assert_eq!(denial.retry_after, RetryAfter::Never);
    assert!(denial.entries.len() > 3, "{}", denial.entries.len());
    for (own, value) in &denial.entries {
        assert_eq!(*own, name);
        assert!(value.ends_with("ü…") && value.len() <= 256, "{value}");
    }
}

#[test]
fn nothing_is_kept_if_denials_are_off() {
    let off = DenialsConfig {
        max_bytes: 0,
        log_percent: 0,
    };
    let denying = Denying::new(&off);
    assert!(denying.login("192.0.2.1", "ada") && !denying.login("192.0.2.1", "ada"));
    let list = denying.limiter.denials().list(&DenialFilter::default(), 9);
    assert_eq!(list, DenialList::default());
    assert!(!denying.limiter.denials().is_kept());
}
