//! Tests that rules see requests exactly as the upstream receives them.

use std::cell::{Cell, RefCell};

use http_body_util::Full;
use hyper::Response;
use proptest::{prelude::*, test_runner::TestRunner};
use tidegate_core::{Cost, Effect, Request, RuleSet, Scratch};

use crate::{
    http2_smuggling::{OK, send_request},
    listener::TestListener,
    upstream::Upstream,
};

/// Opens a proxy with these rules and additional settings. Also returns the upstream of the proxy.
fn limited(rules: &str, settings: &str) -> (Upstream, TestListener) {
    let upstream = Upstream::ok();
    let text = format!(
        "rules: [{rules}]\nproxy: {{listen: '127.0.0.1:0', {settings} upstreams: [{{name: app, urls: '{}'}}]}}\n",
        upstream.url()
    );
    let listener = TestListener::open(&text);
    (upstream, listener)
}

/// Returns the statuses of `count` requests with these header lines, sent one after the other.
fn statuses(listener: &TestListener, lines: &[(&str, &str)], count: usize) -> Vec<u16> {
    let ask = || listener.connect().ask("GET", "/", lines, b"").status;
    std::iter::repeat_with(ask).take(count).collect()
}

const KEYED: &str = "{name: keyed, key: [header.x-api-key], limits: [1/d]}, \
    {name: anonymous, when: {header.x-api-key: {present: false}}, key: [ip], limits: [2/d]}";

#[test]
fn a_header_named_by_connection_is_removed() {
    let (upstream, listener) = limited(KEYED, "");
    let hidden = [("connection", "close, X-Api-Key"), ("x-api-key", "a")];
    assert_eq!(statuses(&listener, &hidden, 3), [200, 200, 429]);
    assert!(!upstream.heads().concat().contains("x-api-key"));
    // A client must not be able to use `Connection` to remove a trusted proxy's headers.
    let hidden = [("connection", "x-forwarded-for, via")];
    assert_eq!(statuses(&listener, &hidden, 1), [429]);
}

#[test]
fn a_header_name_with_an_underscore_is_dropped_rejected_or_forwarded() {
    let spelled = [("X_Api_Key", "a")];
    let (upstream, listener) = limited(KEYED, "");
    assert_eq!(statuses(&listener, &spelled, 3), [200, 200, 429]);
    assert!(!upstream.heads().concat().contains("x_api_key"));
    let (upstream, listener) = limited(KEYED, "underscores: refuse,");
    let answer = listener.connect().ask("GET", "/", &spelled, b"");
    assert_eq!(answer.status, 400);
    assert_eq!(
        answer.problem(),
        "a header name contains `_`; use `-` instead"
    );
    assert_eq!(upstream.heads().len(), 0);
    let (upstream, listener) = limited(KEYED, "underscores: pass,");
    assert_eq!(statuses(&listener, &spelled, 1), [200]);
    assert!(upstream.heads()[0].contains("\r\nx_api_key: a"));
}

#[test]
fn upgrade_is_forwarded_in_one_spelling() {
    let rule = "{name: sockets, when: {header.upgrade: websocket}, key: [ip], limits: [1/d]}";
    let (upstream, listener) = limited(rule, "");
    for (upgrade, status) in [
        ("WebSocket", 200),
        ("websocket", 429),
        ("websocket, other", 429),
        ("h2c, websocket", 200),
    ] {
        let lines = [("connection", "Upgrade"), ("upgrade", upgrade)];
        assert_eq!(statuses(&listener, &lines, 1), [status], "{upgrade}");
    }
    let heads = upstream.heads();
    assert!(heads[0].contains("\r\nconnection: upgrade"), "{heads:?}");
    assert!(heads[0].contains("\r\nupgrade: websocket"), "{heads:?}");
    assert!(!heads[1].contains("upgrade"), "{heads:?}");
}

#[test]
fn a_removed_identity_header_is_not_a_key() {
    let rules = "{name: users, key: [header.x-forwarded-user], limits: [100/d]}, \
        {name: strangers, when: {header.x-forwarded-user: {present: false}}, key: [ip], limits: [2/d]}";
    let (_upstream, listener) = limited(rules, "");
    assert_eq!(
        statuses(&listener, &[("x-forwarded-user", "admin")], 3),
        [200, 200, 429]
    );
}

#[test]
fn rules_see_the_requested_host() {
    let rule = "{name: hosts, key: [header.host], limits: [1/d]}";
    let (upstream, listener) = limited(rule, "");
    for (host, status) in [("a", "200"), ("b", "429")] {
        let mut client = listener.connect();
        client.send(format!(
            "GET http://one.example/ HTTP/1.1\r\nhost: {host}\r\n\r\n"
        ));
        let head = client.read_until("\r\n\r\n");
        assert_eq!(head.split(' ').nth(1), Some(status));
    }
    assert_eq!(upstream.heads().len(), 1);
}

/// All entries that are rule keys in the property test.
const ENTRIES: [&str; 18] = [
    "method",
    "path",
    "host",
    "header.host",
    "header.x-api-key",
    "header.x-kind",
    "header.upgrade",
    "header.te",
    "header.expect",
    "header.cookie",
    "header.authorization",
    "header.proxy-authorization",
    "header.keep-alive",
    "header.x-real-ip",
    "header.x-forwarded-user",
    "header.true-client-ip",
    "header.x_api_key",
    "header.x_real_ip",
];

/// Headers that the proxy adds to a request. Rules do not see headers that the proxy adds.
const ADDED: [&str; 7] = [
    "via",
    "forwarded",
    "x-forwarded-for",
    "x-forwarded-proto",
    "x-forwarded-host",
    "connection",
    "content-length",
];

const NAMES: [&str; 24] = [
    "x-api-key",
    "x_api_key",
    "x_api-key",
    "x-api-key\"",
    "x-kind",
    "connection",
    "te",
    "upgrade",
    "cookie",
    "authorization",
    "proxy-authorization",
    "proxy-connection",
    "keep-alive",
    "expect",
    "host",
    "x-real-ip",
    "x_real_ip",
    "x-forwarded-for",
    "x-forwarded-user",
    "x_forwarded_user",
    "true-client-ip",
    "forwarded",
    "via",
    "content-length",
];

const VALUES: [&str; 22] = [
    "a",
    "b",
    " a",
    "a ",
    "\ta",
    "a\t",
    "",
    "a,b",
    "A",
    "websocket",
    "WebSocket",
    "h2c, websocket",
    "Echo/2,websocket",
    "close, x-api-key",
    "X-Kind , upgrade",
    "upgrade, te",
    "keep-alive, cookie,authorization",
    "gzip, Trailers",
    "trailers",
    "s=1; t=2",
    "1.1 tidegate",
    "000",
];

#[derive(Clone, Copy, Debug)]
enum Wire {
    Http10,
    Http11,
    Http2,
}

/// The framing of an HTTP/1 request body. HTTP/2 requests always use [`Framing::Length`], but
/// without a `Content-Length` header.
#[derive(Clone, Copy, Debug)]
enum Framing {
    Length,
    Chunked,
}

const BODY: &str = "hello";

const TARGETS: [&str; 22] = [
    "/",
    "/a//b",
    "//a",
    "/a/",
    "/%61?q=1",
    "/%2561",
    "/a%2Fb",
    "/a%2f%2fb",
    "/./a",
    "/a/./b/.",
    "/a/../b",
    "/../a",
    "/a/..",
    "/%2e%2E/a",
    "/a/.%2e/b?q=/../c",
    "/a;p=1/b;q",
    "/caf%C3%A9",
    "/%zz",
    "/a%00b",
    "http://one.example/x",
    "http://one.example//a/./b?q",
    "http://h",
];

/// A request that may be valid or invalid.
#[derive(Clone, Debug)]
struct Head {
    wire: Wire,
    target: &'static str,
    lines: Vec<(&'static str, &'static str)>,
    /// The framing of a POST request's body; `None` for a GET request without a body.
    body: Option<Framing>,
}

fn head() -> impl Strategy<Value = Head> {
    let wire = prop::sample::select(vec![Wire::Http10, Wire::Http11, Wire::Http2]);
    let framing = prop::sample::select(vec![Framing::Length, Framing::Chunked]);
    let body = prop::option::weighted(0.3, framing);
    let line = (
        prop::sample::select(NAMES.to_vec()),
        prop::sample::select(VALUES.to_vec()),
    );
    let lines = prop::collection::vec(line, 0..7);
    // An `Upgrade` request needs two header lines. Random generation rarely produces both lines, so
    // they are added to some requests.
    let protocols = [
        "websocket",
        "WebSocket",
        "h2c, websocket",
        "Echo/2,websocket",
    ];
    let offer = prop::option::weighted(0.2, prop::sample::select(protocols.to_vec()));
    let target = prop::sample::select(TARGETS.to_vec());
    (wire, target, lines, offer, body).prop_map(|(wire, target, mut lines, offer, body)| {
        if let Some(protocol) = offer {
            lines.extend([("connection", "upgrade"), ("upgrade", protocol)]);
        }
        // Over HTTP/2, the proxy makes its decision before it has read the body. If the body
        // contradicts `content-length`, the request is reset although it has been charged.
        if matches!(wire, Wire::Http2) && body.is_some() {
            lines.retain(|line| *line != ("content-length", "000"));
        }
        Head {
            wire,
            target,
            lines,
            body,
        }
    })
}

impl Head {
    /// Sends the request. Returns whether the proxy forwards it.
    fn is_forwarded(&self, listener: &TestListener) -> bool {
        let version = match self.wire {
            Wire::Http10 => "1.0",
            Wire::Http11 => "1.1",
            Wire::Http2 => return self.is_forwarded_over_http2(listener),
        };
        let method = self.method();
        let mut request = format!("{method} {} HTTP/{version}\r\nhost: h\r\n", self.target);
        for (name, value) in &self.lines {
            request.push_str(&format!("{name}: {value}\r\n"));
        }
        request.push_str(&match self.body {
            None => "\r\n".to_owned(),
            Some(Framing::Length) => format!("content-length: {}\r\n\r\n{BODY}", BODY.len()),
            Some(Framing::Chunked) => format!(
                "transfer-encoding: chunked\r\n\r\n{:x}\r\n{BODY}\r\n0\r\n\r\n",
                BODY.len()
            ),
        });
        let mut client = listener.connect();
        client.send_what_fits(request);
        let answer = client.read_until("\r\n\r\n");
        answer.split(' ').nth(1) == Some("200")
    }

    fn method(&self) -> &'static str {
        if self.body.is_some() { "POST" } else { "GET" }
    }

    fn is_forwarded_over_http2(&self, listener: &TestListener) -> bool {
        let path = if self.target.starts_with('/') {
            self.target
        } else {
            "/x"
        };
        let mut lines = vec![
            (":method", self.method()),
            (":scheme", "http"),
            (":path", path),
            (":authority", "h"),
        ];
        lines.extend(&self.lines);
        let body = self.body.map_or("", |_| BODY);
        send_request(listener, &lines, body.as_bytes()) == OK
    }
}

/// Returns the value of the entry `name` in the request that the upstream received with this
/// `head`.
fn received(head: &str, name: &str) -> Option<String> {
    let mut lines = head.lines();
    let mut request = lines.next().unwrap().split(' ');
    let (method, target) = (request.next().unwrap(), request.next().unwrap());
    let header = |wanted: &str| {
        let pairs = head
            .lines()
            .skip(1)
            .map(|line| line.split_once(": ").unwrap());
        let mut values = pairs
            .filter(|(name, _)| *name == wanted)
            .map(|(_, value)| value);
        let first = values.next()?;
        assert!(values.all(|value| value == first), "several values: {head}");
        Some(first.to_owned())
    };
    let value = match name {
        "method" => Some(method.to_owned()),
        "path" => {
            let path = target.split('?').next().unwrap();
            Some(
                tidegate_identity::normalize_path(path)
                    .unwrap()
                    .into_owned(),
            )
        }
        "host" => header("host").map(|host| tidegate_identity::bare_host(&host)),
        _ => header(name.strip_prefix("header.").unwrap()),
    };
    // Trailing white space is not part of a value.
    let value = value.map(|value| value.trim().to_owned());
    value.filter(|value| !value.is_empty())
}

/// Checks that a rule is charged if and only if the upstream received the rule's entry. Resets the
/// keys of the charged rules.
fn check(
    listener: &TestListener,
    rules: &RuleSet,
    passed: Option<&str>,
) -> Result<(), TestCaseError> {
    let store = listener.limiter.local_store();
    if let Some(head) = passed {
        let values = ENTRIES.map(|name| (name, received(head, name)));
        let entries: Vec<(&str, &str)> = values
            .iter()
            .filter_map(|(name, value)| Some((*name, value.as_deref()?)))
            .collect();
        let request = Request::new(&entries, Cost::ONE).unwrap();
        let (mut scratch, mut outcomes) = (Scratch::default(), Vec::new());
        let now = listener.limiter.now();
        for charge in rules.charges(&request, now, &mut scratch).unwrap() {
            let one = std::slice::from_ref(&charge);
            store.check(one, now, Effect::Look, &mut outcomes);
            let key = String::from_utf8_lossy(charge.key);
            prop_assert_eq!(outcomes[0].remaining, 9, "{} of {}", key, head);
            store.reset(charge.key);
        }
    }
    prop_assert_eq!(store.stats().keys, 0, "more was seen than {:?}", passed);
    Ok(())
}

/// Returns an upstream that speaks HTTP/1.1, without additional settings.
fn http1() -> (Upstream, &'static str) {
    (Upstream::ok_after_chunks(), "")
}

/// Returns an upstream that speaks HTTP/2, and the setting that selects HTTP/2.
fn http2() -> (Upstream, &'static str) {
    let ok = |_| async { Response::new(Full::default()) };
    (Upstream::over_http2(ok), "http2: true, ")
}

/// Asserts that rules see what `upstream` receives, for every value of the setting `underscores`.
/// The rules file contains `settings`.
fn entries_agree((upstream, speaks): (Upstream, &str), settings: &str) {
    for underscores in ["drop", "refuse", "pass"] {
        entries_agree_with(&upstream, speaks, settings, underscores);
    }
}

fn entries_agree_with(upstream: &Upstream, speaks: &str, settings: &str, underscores: &str) {
    let rule = |entry: &&str| {
        format!(
            "{{name: '{entry}', key: ['{entry}'], limits: [{{algorithm: fixed_window, limit: 10, window: 1d}}]}}"
        )
    };
    let rules: Vec<String> = ENTRIES.iter().map(rule).collect();
    let text = format!(
        "{settings}rules: [{}]\nproxy: {{listen: '127.0.0.1:0', underscores: {underscores}, upstreams: [{{name: app, {speaks}urls: '{}'}}]}}\n",
        rules.join(", "),
        upstream.url()
    );
    let open = || {
        let listener = TestListener::open(&text);
        let rules = listener.limiter.rules();
        (listener, rules)
    };
    let proxy = RefCell::new(open());
    assert!(
        !ADDED
            .iter()
            .any(|name| ENTRIES.contains(&format!("header.{name}").as_str()))
    );
    // If headers with underscores are rejected, only about a fifth of the requests are forwarded.
    let config = ProptestConfig {
        cases: 512,
        max_shrink_iters: 400,
        failure_persistence: None,
        ..ProptestConfig::default()
    };
    let passed = Cell::new(0);
    let ran = TestRunner::new(config).run(&head(), |head| {
        // Keys that remain after a failed case would make all further cases fail while proptest
        // shrinks the input.
        if proxy.borrow().0.limiter.local_store().stats().keys > 0 {
            proxy.replace(open());
        }
        let (listener, rules) = &*proxy.borrow();
        let before = upstream.heads().len();
        let is_forwarded = head.is_forwarded(listener);
        let heads = upstream.heads();
        prop_assert_eq!(heads.len() - before, usize::from(is_forwarded));
        passed.set(passed.get() + usize::from(is_forwarded));
        let last = heads.last().map(String::as_str);
        check(listener, rules, last.filter(|_| is_forwarded))
    });
    ran.unwrap_or_else(|error| panic!("underscores: {underscores}: {error}"));
    assert!(passed.get() > 50, "only {} were forwarded", passed.get());
}

const TRUSTED: &str = "clients: {proxies: [127.0.0.0/8]}\n";

#[test]
fn rules_and_upstream_see_the_same_request_of_an_untrusted_client() {
    entries_agree(http1(), "");
}

#[test]
fn rules_and_upstream_see_the_same_request_of_a_trusted_proxy() {
    entries_agree(http1(), TRUSTED);
}

#[test]
fn rules_and_http2_upstream_see_the_same_request_of_an_untrusted_client() {
    entries_agree(http2(), "");
}

#[test]
fn rules_and_http2_upstream_see_the_same_request_of_a_trusted_proxy() {
    entries_agree(http2(), TRUSTED);
}
