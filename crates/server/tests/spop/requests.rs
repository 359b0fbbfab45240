//! Tests of the requests in SPOP messages, and of the variables in the responses.

use tidegate_core::{EntryBlock, EntryBlockTarget};

use crate::haproxy::{Argument, NOTIFY, TestListener, frame, hello, items, notify};

const RULES: &str = "\
rules:
  - {name: logins, when: {path: /login, method: POST}, key: [ip], limits: [2/min]}
  - {name: customers, when: {path: /api/*}, key: [customer], limits: [2/min]}
  - {name: exports, when: {path: /export}, limits: [{algorithm: concurrency, limit: 1}]}
  - {name: uploads, when: {header.x-kind: upload}, limits: [10/min]}
";

fn text(text: &str) -> Argument<'_> {
    Argument::Text(text.as_bytes())
}

fn login(path: &str) -> [(&'static str, Argument<'_>); 3] {
    [
        ("ip", Argument::Ip([192, 0, 2, 7])),
        ("method", Argument::Text(b"POST")),
        ("path", text(path)),
    ]
}

#[test]
fn an_ack_sets_the_variables_of_the_verdict() {
    let listener = TestListener::open(RULES);
    let mut client = listener.connect_and_handshake();
    for remaining in ["1", "0"] {
        let ack = client.notify(&login("//login?x"));
        assert_eq!(ack.ids, (7, 1));
        let variables = ack.variables();
        for (name, value) in [
            ("allowed", "true"),
            ("status", "200"),
            ("remaining", remaining),
            ("limit", "2"),
            ("rule", "logins"),
            ("ratelimit_policy", "\"2/min\";q=2;w=60"),
        ] {
            assert_eq!(variables[name], value, "{name} of {variables:?}");
        }
        assert!(!variables.contains_key("retry_after"), "{variables:?}");
    }
    let variables = client.notify(&login("/login")).variables();
    for (name, value) in [
        ("allowed", "false"),
        ("status", "429"),
        ("retry_after", "60"),
        ("remaining", "0"),
        ("reason", "limit"),
        ("ratelimit", "\"2/min\";r=0;t=60"),
    ] {
        assert_eq!(variables[name], value, "{name} of {variables:?}");
    }
    let exposition = listener.limiter.exposition();
    for line in [
        "tidegate_decisions_total{listener=\"spop\",outcome=\"allowed\"} 2\n",
        "tidegate_decisions_total{listener=\"spop\",outcome=\"limit\"} 1\n",
    ] {
        assert!(exposition.contains(line), "{exposition}");
    }
}

#[test]
fn a_block_by_entries_denies_requests() {
    let listener = TestListener::open(RULES);
    let target = EntryBlockTarget::new(None, &[("ip", "192.0.2.0/24")]).unwrap();
    let block = EntryBlock {
        until: None,
        reason: "abuse".into(),
    };
    let (limiter, mut client) = (&listener.limiter, listener.connect_and_handshake());
    (limiter.entry_blocks().set(&target, block, limiter.now())).unwrap();
    for path in ["/login", "/"] {
        let variables = client.notify(&login(path)).variables();
        let verdict = ["allowed", "status", "reason"].map(|name| variables[name].as_str());
        assert_eq!(verdict, ["false", "429", "blocked"], "{path}");
    }
}

#[test]
fn values_of_every_type_are_entries() {
    let rules = "rules: [{name: all, when: {tls: 'true', port: '443', absent: {present: false}}, key: [ip], limits: [1/min]}]";
    let listener = TestListener::open(rules);
    let mut client = listener.connect_and_handshake();
    let arguments = [
        ("tls", Argument::Bool(true)),
        ("port", Argument::Int(443)),
        ("absent", Argument::Null),
        ("ip", text("::ffff:192.0.2.7")),
    ];
    assert_eq!(client.notify(&arguments).variables()["rule"], "all");
    let arguments = [
        ("tls", Argument::Bool(true)),
        ("port", Argument::Int(443)),
        ("absent", text("")),
        ("ip", Argument::Ip([192, 0, 2, 7])),
    ];
    assert_eq!(client.notify(&arguments).variables()["status"], "429");
}

#[test]
fn the_messages_of_a_notify_are_one_request() {
    let listener = TestListener::open(RULES);
    let mut client = listener.connect_and_handshake();
    let first = [("path", text("/api/orders"))];
    let second = [("customer", text("acme")), ("cost", Argument::Int(2))];
    let mut payload = b"\x05where\x01".to_vec();
    payload.extend(items(&first));
    payload.extend(b"\x03who\x02");
    payload.extend(items(&second));
    client.send(&frame(NOTIFY, 1, (1, 1), &payload));
    let variables = client.frame().unwrap().variables();
    assert_eq!(variables["rule"], "customers");
    assert_eq!(variables["remaining"], "0", "the cost was 2");
}

/// Returns a NOTIFY frame with one message for each list of arguments.
fn messages(messages: &[&[(&str, Argument<'_>)]]) -> Vec<u8> {
    let mut payload = Vec::new();
    for arguments in messages {
        payload.extend(b"\x05check");
        payload.push(arguments.len().try_into().unwrap());
        payload.extend(items(arguments));
    }
    frame(NOTIFY, 1, (1, 1), &payload)
}

#[test]
fn two_messages_may_repeat_an_argument_with_the_same_value() {
    let rules = "rules: [{name: customers, key: [customer], limits: [9/min]}]";
    let listener = TestListener::open(rules);
    let mut client = listener.connect_and_handshake();
    let mut ask = |first: &[(&str, Argument<'_>)], second: &[(&str, Argument<'_>)]| {
        client.send(&messages(&[first, second]));
        client.frame().unwrap().variables()
    };
    let (acme, other) = (("customer", text("acme")), ("customer", text("other")));
    let cost = |cost| ("cost", Argument::Int(cost));
    assert_eq!(ask(&[acme], &[acme])["remaining"], "8");
    assert_eq!(ask(&[acme, cost(2)], &[cost(2)])["remaining"], "6");
    assert_eq!(
        ask(&[acme, cost(2)], &[("cost", text("2"))])["remaining"],
        "4"
    );
    assert_eq!(
        ask(&[acme, cost(2)], &[("cost", Argument::Null)])["remaining"],
        "2"
    );
    assert_eq!(ask(&[acme], &[other])["status"], "400");
    let two_costs = ask(&[acme, cost(2)], &[cost(1)]);
    assert_eq!(two_costs["status"], "400");
    assert_eq!(two_costs["problem"], "cost: has several different values");
}

#[test]
fn a_second_event_keeps_no_variable_of_the_first() {
    let rules = format!("headers: {{legacy: delta}}\n{RULES}");
    let listener = TestListener::open(&rules);
    let mut client = listener.connect_and_handshake();
    let set = client.notify(&login("/login")).variables();
    for arguments in [&[("path", text("/about"))][..], &login("/../login")] {
        let second = client.notify(arguments).actions();
        for name in set.keys() {
            assert!(second.contains_key(name), "{name} of {set:?} in {second:?}");
        }
        for name in ["ratelimit", "ratelimit_policy", "x_ratelimit_limit"] {
            assert!(set.contains_key(name), "{set:?}");
            assert_eq!(second[name], None, "{second:?}");
        }
    }
}

#[test]
fn a_request_without_a_rule_is_allowed() {
    let listener = TestListener::open(RULES);
    let mut client = listener.connect_and_handshake();
    let variables = client.notify(&[("path", text("/about"))]).variables();
    let names: Vec<&str> = variables.keys().map(|name| &**name).collect();
    assert_eq!(names, ["allowed", "status"]);
    assert_eq!(variables["allowed"], "true");
}

#[test]
fn a_full_service_is_503() {
    let listener = TestListener::open(RULES);
    let mut client = listener.connect_and_handshake();
    let export = [("path", text("/export"))];
    assert_eq!(client.notify(&export).variables()["status"], "200");
    assert_eq!(client.notify(&export).variables()["status"], "503");
}

/// If the agent did not respond, HAProxy would admit the request.
#[test]
fn a_request_that_cannot_be_counted_is_denied() {
    let listener = TestListener::open(RULES);
    let mut client = listener.connect_and_handshake();
    let long = "x".repeat(5_000);
    let many: Vec<String> = (0..100).map(|number| format!("n{number}")).collect();
    let many: Vec<(&str, Argument<'_>)> = many.iter().map(|name| (&**name, text("1"))).collect();
    let api = |customer| [("path", text("/api/a")), ("customer", customer)];
    for (arguments, problem) in [
        (
            &login("/x/../login")[..],
            "entries.path: has segments `.` or `..`",
        ),
        (
            &login("/%2e%2e/login"),
            "entries.path: has segments `.` or `..`",
        ),
        (&api(text(&long)), "entries.customer: "),
        (&many, "entries: "),
        (&[("cost", Argument::Int(0))], "cost: "),
        (
            &[("cost", Argument::Int(-1))],
            "cost: must be an integer from 1 to 999999999999999",
        ),
        (
            &[("cost", text("two"))],
            "cost: must be an integer from 1 to 999999999999999",
        ),
        (
            &[("cost", text("1_000"))],
            "cost: must be an integer from 1 to 999999999999999; write 1000",
        ),
    ] {
        let variables = client.notify(arguments).variables();
        assert_eq!(variables["allowed"], "false", "{problem}");
        assert_eq!(variables["status"], "400", "{problem}");
        let value = &variables["problem"];
        assert!(
            value.starts_with(problem),
            "{value} does not begin with {problem}"
        );
    }
    // A value that is not valid UTF-8 is accepted and counted.
    let variables = client.notify(&api(Argument::Text(b"a\xff"))).variables();
    assert_eq!(variables["rule"], "customers");
    let exposition = listener.limiter.exposition();
    let counted = "tidegate_bad_requests_total{listener=\"spop\"} 8\n";
    assert!(exposition.contains(counted), "{exposition}");
}

#[test]
fn header_names_are_compared_in_lower_case() {
    let listener = TestListener::open(RULES);
    let mut client = listener.connect_and_handshake();
    let variables = client
        .notify(&[("header.X-Kind", text("upload"))])
        .variables();
    assert_eq!(variables["rule"], "uploads");
}

#[test]
fn pipelined_requests_are_all_answered_and_counted_exactly() {
    const REQUESTS: u64 = 5_000;
    let listener = TestListener::open("rules: [{name: all, limits: [1000/min]}]");
    let mut client = listener.connect();
    let mut pipeline = hello(16_380);
    for number in 1..=REQUESTS {
        pipeline.extend(notify((number, 1), &[("path", text("/"))]));
    }
    let mut sender = client.handle();
    let sending = std::thread::spawn(move || sender.send(&pipeline));
    client.frame().unwrap();
    let mut admitted = 0;
    for number in 1..=REQUESTS {
        let ack = client.frame().unwrap();
        assert_eq!(ack.ids, (number, 1));
        admitted += u32::from(ack.variables()["allowed"] == "true");
    }
    sending.join().unwrap();
    assert_eq!(admitted, 1_000);
}

#[test]
fn an_ack_fits_into_the_shortest_frames() {
    let name = "r".repeat(120);
    let rules = format!("rules: [{{name: {name}, limits: [1/s, 2/min, 3/h, 4/d]}}]");
    let listener = TestListener::open(&rules);
    let mut client = listener.connect();
    client.send(&hello(256));
    client.frame().unwrap();
    let ack = client.notify(&[]);
    assert!(ack.bytes() <= 256, "{}", ack.bytes());
    let variables = ack.variables();
    assert_eq!(variables["allowed"], "true");
    assert_eq!(variables["remaining"], "0");
    assert!(!variables.contains_key("ratelimit"), "does not fit");
}
