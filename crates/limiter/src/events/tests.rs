use std::{
    io::{BufRead as _, BufReader, Read as _, Write as _},
    net::TcpListener,
    sync::{Arc, mpsc},
};

use proptest::prelude::*;
use tidegate_config::Config;
use tidegate_core::{Cost, MemoryBounds, MemoryStore, Request, Scratch};

use super::*;
use crate::{ServerLimiter, metrics::ListenerKind};

const START: u64 = 1_700_000_000_000_000;

/// A limiter with events, and a clock that a test sets.
struct Server {
    limiter: ServerLimiter,
    events: Arc<Events>,
    clock: Clock,
}

impl Server {
    fn new(rules: &str, adjust: impl FnOnce(&mut EventsConfig)) -> Self {
        Self::with_webhooks(rules, adjust, Vec::new())
    }

    fn with_webhooks(
        rules: &str,
        adjust: impl FnOnce(&mut EventsConfig),
        webhooks: Vec<WebhookSettings>,
    ) -> Self {
        let clock = Clock::manual(Timestamp::from_micros(START));
        let mut settings = EventsConfig::default();
        adjust(&mut settings);
        let events = Events::open(&settings, webhooks, KeyMask::plain(), &clock).unwrap();
        let events = Arc::new(events);
        let store = MemoryStore::new(MemoryBounds::default());
        let rules = Config::parse(rules).unwrap().rules;
        let limiter =
            ServerLimiter::new(rules, store, clock.clone()).with_events(Some(Arc::clone(&events)));
        Self {
            limiter,
            events,
            clock,
        }
    }

    /// Decides a request from `ip`, and returns whether it is allowed.
    fn ask(&self, ip: &str, cost: u64) -> bool {
        let (rules, now) = (self.limiter.rules(), self.limiter.now());
        let entries = [("ip", ip)];
        let request = Request::new(&entries, Cost::new(cost).unwrap()).unwrap();
        let mut scratch = Scratch::default();
        let charges = rules.charges(&request, now, &mut scratch).unwrap();
        let mut outcomes = Vec::new();
        let request_for_decision = crate::DecisionRequest {
            charges: &charges,
            now,
            effect: tidegate_core::Effect::Charge,
            within: None,
        };
        let decided = self.limiter.decide(request_for_decision, &mut outcomes);
        let decided = decided.ready().expect("the memory store decides at once");
        let verdict = decided.verdict(&charges, &outcomes);
        let context = DecidedRequest {
            request: &request,
            rules: &rules,
            now,
        };
        self.limiter.observe(ListenerKind::Http, context, &verdict);
        verdict.allowed
    }

    fn advance(&self, secs: u64) {
        let now = self.clock.now();
        self.clock.set(now.after(Span::from_secs(secs)));
    }

    /// Returns the types and the data of the events since the last call of this method.
    fn take(&self, seen: &mut u64) -> Vec<(String, Value)> {
        let after: EventId = format!("{}-{seen}", START / 1_000).parse().unwrap();
        let new = self.events.list(Some(after), MAX_RECENT_EVENTS).events;
        let new: Vec<(String, Value)> = new
            .iter()
            .map(|event| {
                let mut event: Value = serde_json::from_str(&event.json).unwrap();
                let kind = event["type"].as_str().unwrap().to_owned();
                (kind, event["data"].take())
            })
            .collect();
        *seen += new.len() as u64;
        new
    }

    fn kinds(&self, seen: &mut u64) -> Vec<String> {
        self.take(seen).into_iter().map(|(kind, _)| kind).collect()
    }
}

const LOGIN: &str = "rules: [{name: login, key: ip, limits: [10/h]}]";

#[test]
fn a_key_has_one_event_when_it_is_nearly_used_up_and_one_when_it_is_denied() {
    let server = Server::new(LOGIN, |_| {});
    let mut seen = 0;
    for _ in 0..7 {
        assert!(server.ask("192.0.2.1", 1));
    }
    assert_eq!(server.kinds(&mut seen), [""; 0]);
    assert!(server.ask("192.0.2.1", 1));
    let near = server.take(&mut seen);
    assert_eq!(
        near,
        [(
            "key.near_limit".to_owned(),
            json!({
                "rule": "login", "key": ["192.0.2.1"], "mode": "enforce",
                "policy": "10/h", "limit": 10, "remaining": 2,
            })
        )]
    );
    for _ in 0..2 {
        assert!(server.ask("192.0.2.1", 1));
    }
    for _ in 0..100 {
        assert!(!server.ask("192.0.2.1", 1));
    }
    let denied = server.take(&mut seen);
    assert_eq!(denied.len(), 1, "{denied:?}");
    let (kind, data) = &denied[0];
    assert_eq!(kind, "key.denied");
    assert_eq!(
        (&data["rule"], &data["key"]),
        (&json!("login"), &json!(["192.0.2.1"]))
    );
    assert_eq!(
        (&data["reason"], &data["policy"]),
        (&json!("limit"), &json!("10/h"))
    );
    assert!(data["retry_after_ms"].as_u64().is_some_and(|wait| wait > 0));
    // Another key has its own events. In the next window, the first key has events again.
    for _ in 0..12 {
        server.ask("192.0.2.2", 1);
    }
    assert_eq!(server.kinds(&mut seen), ["key.near_limit", "key.denied"]);
    server.advance(3_600);
    for _ in 0..30 {
        server.ask("192.0.2.1", 1);
    }
    assert_eq!(server.kinds(&mut seen), ["key.near_limit", "key.denied"]);
}

#[test]
fn a_shadow_rule_says_that_it_would_deny() {
    let shadow = "rules: [{name: login, key: ip, mode: shadow, limits: [2/h]}]";
    let server = Server::new(shadow, |_| {});
    for _ in 0..5 {
        assert!(server.ask("192.0.2.1", 1));
    }
    let mut seen = 0;
    let events = server.take(&mut seen);
    assert_eq!(events.len(), 1, "{events:?}");
    assert_eq!(events[0].0, "key.would_be_denied");
    assert_eq!(events[0].1["mode"], "shadow");
}

#[test]
fn a_limit_of_few_units_is_never_nearly_used_up() {
    let server = Server::new("rules: [{name: r, key: ip, limits: [4/h]}]", |_| {});
    for _ in 0..4 {
        assert!(server.ask("192.0.2.1", 1));
    }
    assert_eq!(server.kinds(&mut 0), [""; 0]);
    let off = Server::new(LOGIN, |settings| settings.near_limit_percent = None);
    for _ in 0..10 {
        assert!(off.ask("192.0.2.1", 1));
    }
    assert_eq!(off.kinds(&mut 0), [""; 0]);
}

#[tokio::test]
async fn a_blocked_key_has_one_event() {
    let server = Server::new(LOGIN, |_| {});
    let rules = server.limiter.rules();
    let rule = rules.rule("login").unwrap();
    let key = rule.encode_key(&["192.0.2.1"]).unwrap();
    let hour = Some(Span::from_secs(3_600));
    assert!(server.limiter.block(&key, hour, "abuse").await.unwrap());
    for _ in 0..50 {
        assert!(!server.ask("192.0.2.1", 1));
        server.advance(60);
    }
    let events = server.take(&mut 0);
    assert_eq!(events.len(), 1, "{events:?}");
    assert_eq!(events[0].1["reason"], "blocked");
}

#[test]
fn the_events_of_a_flood_of_keys_are_bounded_and_counted() {
    let server = Server::new("rules: [{name: r, key: ip, limits: [1/h]}]", |settings| {
        settings.max_per_second = 5;
        settings.log = false;
    });
    for key in 0..1_000 {
        let ip = format!("key-{key}");
        assert!(server.ask(&ip, 1));
        assert!(!server.ask(&ip, 1));
    }
    assert_eq!(server.kinds(&mut 0).len(), 5);
    let limiter = Arc::new(server.limiter);
    let page = limiter.exposition();
    for line in [
        "tidegate_events_total{type=\"key.denied\"} 5",
        "tidegate_events_lost_total{reason=\"rate\"} 995",
    ] {
        assert!(page.lines().any(|found| found == line), "{line} in {page}");
    }
}

#[test]
fn files_have_one_event_in_each_line_and_the_audit_log_has_only_changes() {
    let folder = tempfile::tempdir().unwrap();
    let [all, audit] = ["all", "audit"].map(|name| folder.path().join(name));
    let file = |to: &std::path::Path| {
        Some(EventFile {
            to: to.to_owned(),
            max_bytes: 1 << 20,
        })
    };
    let server = Server::new("rules: [{name: r, key: ip, limits: [1/h]}]", |settings| {
        settings.file = file(&all);
        settings.audit = file(&audit);
    });
    server.ask("<b>&\"\n", 1);
    server.ask("<b>&\"\n", 1);
    let change = json!({"by": "alice", "rule": "r", "key": ["a"]});
    server
        .events
        .emit(EventType::KeyReset, server.limiter.now(), &change);
    server.events.finish();
    let lines = |path: &std::path::Path| -> Vec<Value> {
        let text = std::fs::read_to_string(path).unwrap();
        text.lines()
            .map(|line| serde_json::from_str(line).unwrap())
            .collect()
    };
    let all = lines(&all);
    assert_eq!(all.len(), 2);
    assert_eq!(all[0]["data"]["key"], json!(["<b>&\"\n"]));
    assert_eq!(all[0]["id"], format!("{}-1", START / 1_000));
    assert_eq!(all[0]["timestamp"], "2023-11-14T22:13:20.000Z");
    assert_eq!(all[0]["at_ms"], START / 1_000);
    let audit = lines(&audit);
    assert_eq!(audit.len(), 1);
    assert_eq!(audit[0]["data"]["by"], "alice");
}

#[test]
fn keys_are_hashed_if_the_mask_requires_it() {
    let clock = Clock::manual(Timestamp::from_micros(START));
    let mask = KeyMask::hashed(b"secret");
    let events = Events::open(&EventsConfig::default(), Vec::new(), mask, &clock).unwrap();
    let shown = events.shown_key(&["192.0.2.1"]).to_string();
    assert!(
        shown.contains("hash:") && !shown.contains("192.0.2.1"),
        "{shown}"
    );
}

/// The head and the body of a request that a webhook received.
struct Delivery {
    head: String,
    body: Value,
}

/// Starts an endpoint that responds to its requests with `statuses`, in order, and sends each
/// request to the returned receiver.
fn endpoint(statuses: Vec<u16>) -> (String, mpsc::Receiver<Delivery>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}/hook?token=t", listener.local_addr().unwrap());
    let (sender, deliveries) = mpsc::channel();
    std::thread::spawn(move || {
        for status in statuses {
            let (mut stream, _) = listener.accept().unwrap();
            let mut reader = BufReader::new(stream.try_clone().unwrap());
            let (mut head, mut length) = (String::new(), 0);
            loop {
                let mut line = String::new();
                reader.read_line(&mut line).unwrap();
                let lower = line.to_ascii_lowercase();
                if let Some(value) = lower.strip_prefix("content-length:") {
                    length = value.trim().parse().unwrap();
                }
                head.push_str(&lower);
                if line == "\r\n" {
                    break;
                }
            }
            let mut body = vec![0; length];
            reader.read_exact(&mut body).unwrap();
            let answer =
                format!("HTTP/1.1 {status} X\r\ncontent-length: 0\r\nconnection: close\r\n\r\n");
            stream.write_all(answer.as_bytes()).unwrap();
            let body = serde_json::from_slice(&body).unwrap();
            let _ = sender.send(Delivery { head, body });
        }
    });
    (url, deliveries)
}

fn webhook(url: String, types: Vec<EventType>) -> WebhookSettings {
    WebhookSettings {
        url,
        secret: WebhookSecret::parse("secret").unwrap(),
        types,
    }
}

fn header<'h>(head: &'h str, name: &str) -> &'h str {
    let line = head.lines().find_map(|line| line.strip_prefix(name));
    line.unwrap_or_else(|| panic!("no {name} in {head}"))
        .trim_start_matches(':')
        .trim()
}

#[test]
fn a_webhook_receives_signed_events_and_a_failed_message_again_with_the_same_id() {
    let (url, deliveries) = endpoint(vec![503, 204]);
    let types = vec![EventType::KeyDenied];
    let endpoint = url.split("/hook").next().unwrap().to_owned();
    let hooks = vec![webhook(url, types)];
    let server = Server::with_webhooks(LOGIN, |_| {}, hooks);
    for _ in 0..12 {
        server.ask("192.0.2.1", 1);
    }
    let first = deliveries.recv().unwrap();
    let second = deliveries.recv().unwrap();
    assert_eq!(first.body, second.body);
    assert_eq!(
        header(&first.head, "webhook-id"),
        header(&second.head, "webhook-id")
    );
    assert!(header(&second.head, "webhook-signature").starts_with("v1,"));
    assert_eq!(header(&second.head, "webhook-timestamp"), "1700000000");
    let events = second.body["data"]["events"].as_array().unwrap();
    assert_eq!(events.len(), 1, "only the selected type");
    assert_eq!(events[0]["type"], "key.denied");
    server.events.finish();
    let page = Arc::new(server.limiter).exposition();
    for line in [
        &*format!("tidegate_webhook_events_total{{endpoint=\"{endpoint}\"}} 1"),
        &*format!("tidegate_webhook_failed_attempts_total{{endpoint=\"{endpoint}\"}} 1"),
        "tidegate_events_lost_total{reason=\"webhook\"} 0",
    ] {
        assert!(page.lines().any(|found| found == line), "{line} in {page}");
    }
}

#[test]
fn a_webhook_that_refuses_a_message_is_not_asked_again() {
    let (url, deliveries) = endpoint(vec![400, 204]);
    let hooks = vec![webhook(url, EventType::ALL.to_vec())];
    let server = Server::with_webhooks(LOGIN, |_| {}, hooks);
    let emit = |by: &str| {
        let now = server.limiter.now();
        server
            .events
            .emit(EventType::KeyReset, now, &json!({"by": by}));
    };
    emit("first");
    deliveries.recv().unwrap();
    emit("second");
    let second = deliveries.recv().unwrap();
    assert_eq!(second.body["data"]["events"][0]["data"]["by"], "second");
    assert_eq!(second.body["data"]["lost"], 1);
}

#[test]
fn a_webhook_that_hangs_delays_nothing() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let hooks = vec![webhook(url, EventType::ALL.to_vec())];
    let server = Server::with_webhooks(LOGIN, |settings| settings.log = false, hooks);
    let now = server.limiter.now();
    // The endpoint accepts no connections, so the queue fills up with 1,024 events.
    for number in 0..3_000 {
        server
            .events
            .emit(EventType::KeyReset, now, &json!({"number": number}));
    }
    let page = Arc::new(server.limiter).exposition();
    let lost = page
        .lines()
        .find_map(|line| line.strip_prefix("tidegate_events_lost_total{reason=\"webhook\"} "));
    let lost: u64 = lost.unwrap().parse().unwrap();
    assert!((1_000..=3_000 - 1_024).contains(&lost), "{lost}");
}

#[test]
fn events_that_a_webhook_has_not_received_at_the_shutdown_are_counted_as_lost() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let hooks = vec![webhook(url, EventType::ALL.to_vec())];
    let server = Server::with_webhooks(LOGIN, |settings| settings.log = false, hooks);
    let now = server.limiter.now();
    for number in 0..2_000 {
        server
            .events
            .emit(EventType::KeyReset, now, &json!({"number": number}));
    }
    let clock = Clock::real();
    let began = clock.now();
    server.events.finish();
    assert!(clock.now().since(began) < Span::from_secs(8));
    let page = Arc::new(server.limiter).exposition();
    let lost = "tidegate_events_lost_total{reason=\"webhook\"} 2000";
    assert!(page.lines().any(|line| line == lost), "{page}");
}

#[test]
fn the_events_in_the_queue_are_sent_at_the_shutdown() {
    let (url, deliveries) = endpoint(vec![204; 12]);
    let hooks = vec![webhook(url, EventType::ALL.to_vec())];
    let server = Server::with_webhooks(LOGIN, |settings| settings.log = false, hooks);
    for number in 0..1_000 {
        let now = server.limiter.now();
        server
            .events
            .emit(EventType::KeyReset, now, &json!({"number": number}));
    }
    server.events.finish();
    let page = Arc::new(server.limiter).exposition();
    let sent =
        |line: &str| line.starts_with("tidegate_webhook_events_total{") && line.ends_with(" 1000");
    assert!(page.lines().any(sent), "{page}");
    drop(deliveries);
}

proptest! {
    /// Tests random request times for a few keys. A key has at most one event of a type in each
    /// window, and a denied key always has an event in its window.
    #[test]
    fn each_key_has_at_most_one_event_in_each_window(
        requests in prop::collection::vec((0_u8..3, 0_u64..1_000), 1..300),
    ) {
        let server = Server::new("rules: [{name: r, key: ip, limits: [5/10min]}]", |settings| {
            settings.log = false;
            settings.max_per_second = 10_000;
        });
        let mut events: Vec<(String, String, u64)> = Vec::new();
        let (mut seen, mut now) = (0, 0);
        for (key, wait) in requests {
            now += wait;
            server.advance(wait);
            let ip = key.to_string();
            let allowed = server.ask(&ip, 1);
            let new = server.take(&mut seen);
            prop_assert!(new.len() <= 1, "{:?}", new);
            for (kind, data) in new {
                prop_assert_eq!(&data["key"][0], &json!(ip));
                let before = events.iter().rev().find(|(old, key, _)| *old == kind && *key == ip);
                if let Some((_, _, at)) = before {
                    prop_assert!(now - at >= 600, "{} after {}", now, at);
                }
                events.push((kind, ip.clone(), now));
            }
            if !allowed {
                let recent = events.iter().any(|(kind, key, at)| {
                    kind == "key.denied" && *key == ip && now - at < 600
                });
                prop_assert!(recent, "a denied key without an event");
            }
        }
    }
}
