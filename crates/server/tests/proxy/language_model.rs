//! Tests of language model traffic: the cost is read from the request body, and settled with the
//! usage in the response.

use std::{
    sync::{Arc, Mutex, mpsc},
    thread,
    time::Duration,
};

use serde_json::json;

use crate::{
    client::{Answer, Client},
    listener::TestListener,
    upstream::{ServerConnection, Upstream},
};

/// A timeout that is longer than any test step takes. The timeout makes a hanging test fail.
const TIMEOUT: Duration = Duration::from_secs(20);

/// A rule that charges tokens, with a limit that no test reaches.
const TOKENS: &str = "
rules:
  - name: tokens
    when: {path: '/v1*/**'}
    limits: [{algorithm: fixed_window, limit: 1000000, window: 1h}]
    cost: {json: [/max_completion_tokens, /max_tokens], default: 5000, max: 100000, times: /n, input: estimate}
    settle: usage
    count: {status: '2*'}
";

/// A response with a usage of 0 tokens, for requests that only read the number of remaining tokens.
const NOTHING: &str = r#"{"usage":{"prompt_tokens":0,"completion_tokens":0}}"#;

/// A fake model server. The request header `x-answer` selects the response. The server records the
/// bodies of all requests.
struct Model {
    upstream: Upstream,
    bodies: Arc<Mutex<Vec<Vec<u8>>>>,
}

impl Model {
    fn start(answer: impl Fn(&mut ServerConnection, &str) + Send + Sync + 'static) -> Self {
        let bodies = Arc::<Mutex<Vec<Vec<u8>>>>::default();
        let recorded = Arc::clone(&bodies);
        let upstream = Upstream::start(move |connection| {
            while let Some(head) = connection.head() {
                let body = connection.body(&head);
                recorded.lock().unwrap().push(body);
                let mut lines = head.lines();
                match lines.find_map(|line| line.strip_prefix("x-answer: ")) {
                    Some(name) => answer(connection, name),
                    None => send_json(connection, NOTHING),
                }
            }
        });
        Self { upstream, bodies }
    }

    /// Starts a model that answers every request with this body.
    fn responding_with(body: &'static str) -> Self {
        Self::start(move |connection, _| send_json(connection, body))
    }

    fn behind(&self, rules: &str, settings: &str) -> TestListener {
        TestListener::open(&format!(
            "{rules}\nproxy: {{listen: '127.0.0.1:0', upstreams: [{{name: model, urls: '{}'}}]{settings}}}\n",
            self.upstream.url()
        ))
    }

    fn bodies(&self) -> Vec<Vec<u8>> {
        self.bodies.lock().unwrap().clone()
    }
}

fn send_json(connection: &mut ServerConnection, body: &str) {
    let length = body.len();
    connection.send(format!(
        "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {length}\r\n\r\n{body}"
    ));
}

fn send_chunk(connection: &mut ServerConnection, chunk: &str) {
    connection.send(format!("{:x}\r\n{chunk}\r\n", chunk.len()));
}

/// Sends the head of an event stream, and these events.
fn send_events(connection: &mut ServerConnection, events: &[&str]) {
    connection.send(
        "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n",
    );
    for event in events {
        // Split each event into two chunks, as the network may.
        let middle = event.len() / 2;
        send_chunk(connection, &event[..middle]);
        send_chunk(connection, &event[middle..]);
    }
}

fn end_events(connection: &mut ServerConnection) {
    connection.send("0\r\n\r\n");
}

/// The request path in most tests.
const CHAT: &str = "/v1/chat/completions";

fn chat(client: &mut Client, answer: &str, body: &str) -> Answer {
    client.ask("POST", CHAT, &[("x-answer", answer)], body.as_bytes())
}

/// Returns the number of charged tokens. The cost of the request that this function sends is
/// refunded completely.
fn charged(listener: &TestListener, limit: u64) -> u64 {
    let answer = listener
        .connect()
        .ask("POST", CHAT, &[], br#"{"max_tokens":1}"#);
    assert_eq!(answer.status, 200, "{answer:?}");
    let status = answer.header("ratelimit").unwrap();
    let remaining = status.split("r=").nth(1).unwrap();
    let remaining: u64 = remaining.split(';').next().unwrap().parse().unwrap();
    // The reservation for this request is 4 tokens for its 16 bytes and 1 output token.
    limit - remaining - 5
}

/// Waits until `expected` tokens are charged.
fn wait_for_charge(listener: &TestListener, expected: u64) {
    for _ in 0..400 {
        if charged(listener, 1_000_000) == expected {
            return;
        }
        thread::park_timeout(Duration::from_millis(10));
    }
    panic!(
        "{} tokens are charged, not {expected}",
        charged(listener, 1_000_000)
    );
}

const OPENAI: &str = r#"{"id":"c","choices":[{"message":{"content":"usage"}}],"usage":{"prompt_tokens":90,"completion_tokens":30,"total_tokens":120,"prompt_tokens_details":{"cached_tokens":80}}}"#;
const RESPONSES: &str = r#"{"object":"response","usage":{"input_tokens":36,"input_tokens_details":{"cached_tokens":30},"output_tokens":87}}"#;
const ANTHROPIC: &str = r#"{"type":"message","usage":{"input_tokens":21,"cache_creation_input_tokens":10,"cache_read_input_tokens":50,"output_tokens":39}}"#;
const GEMINI: &str = r#"{"usageMetadata":{"promptTokenCount":100,"cachedContentTokenCount":90,"candidatesTokenCount":20,"thoughtsTokenCount":30}}"#;

const OPENAI_EVENTS: [&str; 3] = [
    "data: {\"choices\":[{\"delta\":{\"content\":\"Hello\"}}],\"usage\":null}\n\n",
    "data: {\"choices\":[],\"usage\":{\"prompt_tokens\":19,\"completion_tokens\":10}}\n\n",
    "data: [DONE]\n\n",
];
const ANTHROPIC_EVENTS: [&str; 4] = [
    "event: message_start\ndata: {\"type\":\"message_start\",\"message\":{\"usage\":{\"input_tokens\":25,\"cache_read_input_tokens\":40,\"output_tokens\":1}}}\n\n",
    "event: content_block_delta\ndata: {\"type\":\"content_block_delta\",\"delta\":{\"type\":\"text_delta\",\"text\":\"Hello there, my friend!\"}}\n\n",
    "event: message_delta\ndata: {\"type\":\"message_delta\",\"usage\":{\"output_tokens\":15}}\n\n",
    "event: message_stop\ndata: {\"type\":\"message_stop\"}\n\n",
];
const GEMINI_EVENTS: [&str; 2] = [
    "data: {\"usageMetadata\":{\"promptTokenCount\":4,\"candidatesTokenCount\":3}}\r\n\r\n",
    "data: {\"usageMetadata\":{\"promptTokenCount\":4,\"candidatesTokenCount\":9}}\r\n\r\n",
];

/// Sends the response `name`.
fn answer(connection: &mut ServerConnection, name: &str) {
    match name {
        "openai" => send_json(connection, OPENAI),
        "responses" => send_json(connection, RESPONSES),
        "anthropic" => send_json(connection, ANTHROPIC),
        "gemini" => send_json(connection, GEMINI),
        "openai-stream" => send_whole(connection, &OPENAI_EVENTS),
        "openai-without-usage" => send_whole(connection, &OPENAI_EVENTS[..1]),
        "anthropic-stream" => send_whole(connection, &ANTHROPIC_EVENTS),
        "anthropic-unfinished" => send_whole(connection, &ANTHROPIC_EVENTS[..2]),
        "gemini-stream" => send_whole(connection, &GEMINI_EVENTS),
        "lie" => send_json(
            connection,
            r#"{"usage":{"prompt_tokens":99999999999999999999,"completion_tokens":-4}}"#,
        ),
        "compressed" => connection
            .send("HTTP/1.1 200 OK\r\ncontent-encoding: gzip\r\ncontent-length: 4\r\n\r\nxxxx"),
        "error" => {
            connection.send("HTTP/1.1 500 Internal Server Error\r\ncontent-length: 2\r\n\r\n{}")
        }
        other => panic!("{other}"),
    }
}

fn send_whole(connection: &mut ServerConnection, events: &[&str]) {
    send_events(connection, events);
    end_events(connection);
}

#[test]
fn a_request_is_charged_to_the_token() {
    let model = Model::start(answer);
    let listener = model.behind(TOKENS, "");
    let mut total = 0;
    for (name, tokens) in [
        ("openai", 120),
        ("responses", 123),
        ("anthropic", 120),
        ("gemini", 150),
        ("openai-stream", 29),
        ("anthropic-stream", 80),
        ("gemini-stream", 13),
    ] {
        let mut client = listener.connect();
        client.send(format!(
            "POST {CHAT} HTTP/1.1\r\nhost: h\r\nconnection: close\r\nx-answer: {name}\r\ncontent-length: 19\r\n\r\n{{\"max_tokens\":4000}}"
        ));
        let received = client.until_closed();
        assert!(received.starts_with("HTTP/1.1 200"), "{received}");
        total += tokens;
        assert_eq!(charged(&listener, 1_000_000), total, "{name}");
    }
}

#[test]
fn the_response_is_forwarded_unchanged_and_at_once() {
    let (next, steps) = mpsc::channel::<()>();
    let steps = Mutex::new(steps);
    let model = Model::start(move |connection, _| {
        for (at, event) in ANTHROPIC_EVENTS.iter().enumerate() {
            if at == 0 {
                send_events(connection, &[event]);
            } else {
                steps.lock().unwrap().recv().unwrap();
                send_chunk(connection, event);
            }
        }
        end_events(connection);
    });
    let listener = model.behind(TOKENS, "");
    let mut client = listener.connect();
    client.send(format!(
        "POST {CHAT} HTTP/1.1\r\nhost: h\r\nx-answer: x\r\ncontent-length: 2\r\n\r\n{{}}"
    ));
    let mut received = String::new();
    for event in ANTHROPIC_EVENTS {
        let last_line = event.lines().nth(1).unwrap();
        // The event arrives in two chunks, so look only for its end.
        received.push_str(&client.read_until(&last_line[last_line.len() - 20..]));
        let _ = next.send(());
    }
    received.push_str(&client.read_until("0\r\n\r\n"));
    let body = received.split_once("\r\n\r\n").unwrap().1;
    let mut joined = String::new();
    let mut rest = body;
    while let Some((size, after)) = rest.split_once("\r\n") {
        let size = usize::from_str_radix(size, 16).unwrap();
        joined.push_str(&after[..size]);
        rest = &after[size + 2..];
    }
    assert_eq!(joined, ANTHROPIC_EVENTS.concat());
}

#[test]
fn the_body_is_forwarded_byte_for_byte() {
    let model = Model::responding_with(OPENAI);
    let listener = model.behind(TOKENS, "");
    let body =
        "{ \"max_tokens\" : 7,\n\t\"messages\":[{\"content\":\"\u{e9}\\u00e9\"}],\"x\":1.50 }\n";
    assert_eq!(chat(&mut listener.connect(), "x", body).status, 200);
    assert_eq!(model.bodies(), [body.as_bytes()]);
    let head = &model.upstream.heads()[0];
    assert!(
        head.contains(&format!("content-length: {}", body.len())),
        "{head}"
    );
    let mut client = listener.connect();
    client.send(format!(
        "POST {CHAT} HTTP/1.1\r\nhost: h\r\nx-answer: x\r\ntransfer-encoding: chunked\r\n\r\n5\r\n{{\"max\r\n10\r\n_tokens\":     7}}\r\n0\r\n\r\n"
    ));
    assert_eq!(client.read_answer(false).status, 200);
    let chunked = String::from_utf8(model.bodies()[1].clone()).unwrap();
    assert_eq!(chunked, "15\r\n{\"max_tokens\":     7}\r\n0\r\n\r\n");
}

#[test]
fn a_body_is_read_only_if_a_rule_needs_it() {
    let model = Model::responding_with(OPENAI);
    let rules = TOKENS.replace(
        "when: {path: '/v1*/**'}",
        "when: {path: '/v1*/**', header.x-model: big}\n    allow: [{header.x-team: ours}]",
    );
    let listener = model.behind(&rules, "");
    for headers in ["", "x-model: small\r\n", "x-model: big\r\nx-team: ours\r\n"] {
        let before = model.upstream.heads().len();
        let mut client = listener.connect();
        client.send(format!(
            "POST {CHAT} HTTP/1.1\r\nhost: h\r\nx-answer: x\r\n{headers}content-length: 4\r\n\r\nno"
        ));
        for _ in 0..400 {
            if model.upstream.heads().len() > before {
                break;
            }
            thread::park_timeout(Duration::from_millis(10));
        }
        assert_eq!(model.upstream.heads().len(), before + 1, "{headers:?}");
        client.send("pe");
        assert_eq!(client.read_answer(false).status, 200);
    }
    let mut client = listener.connect();
    client.send(format!(
        "POST {CHAT} HTTP/1.1\r\nhost: h\r\nx-answer: x\r\nx-model: big\r\nexpect: 100-continue\r\ncontent-length: 4\r\n\r\n"
    ));
    client.read_until("HTTP/1.1 100 Continue\r\n\r\n");
    assert_eq!(model.upstream.heads().len(), 3);
    client.send("{}  ");
    assert_eq!(client.read_answer(false).status, 200);
}

#[test]
fn the_reservation_covers_what_the_request_may_use() {
    let (hold, held) = mpsc::channel::<()>();
    let held = Mutex::new(held);
    let model = Model::start(move |connection, _| {
        held.lock().unwrap().recv().unwrap();
        send_json(connection, OPENAI);
    });
    for (body, tokens) in [
        (r#"{"max_tokens":4000}"#, 4_005),
        (r#"{"max_completion_tokens":10,"max_tokens":4000}"#, 4_012),
        (r#"{"max_tokens":100,"n":3}"#, 306),
        (r#"{"max_tokens":null}"#, 5_005),
        (r#"{"max_tokens":0}   "#, 5_005),
        ("{}", 5_001),
        ("", 5_000),
    ] {
        let listener = model.behind(TOKENS, "");
        let waiting = thread::spawn({
            let mut client = listener.connect();
            move || chat(&mut client, "x", body)
        });
        wait_for_charge(&listener, tokens);
        hold.send(()).unwrap();
        assert_eq!(waiting.join().unwrap().status, 200);
        assert_eq!(charged(&listener, 1_000_000), 120, "{body}");
    }
}

#[test]
fn a_body_without_a_valid_cost_is_refused_and_not_charged() {
    let model = Model::responding_with(OPENAI);
    let listener = model.behind(TOKENS, ", max_inspected_body: 1KiB, error_format: problem");
    let range = "must be an integer from 0 to 100000";
    let mut client = listener.connect();
    for (body, expected) in [
        (r#"{"max_tokens":-1}"#, format!("body: /max_tokens {range}")),
        (
            r#"{"max_tokens":1.5}"#,
            format!("body: /max_tokens {range}"),
        ),
        (
            r#"{"max_tokens":"7"}"#,
            format!("body: /max_tokens {range}"),
        ),
        (
            r#"{"max_tokens":[7]}"#,
            format!("body: /max_tokens {range}"),
        ),
        (
            r#"{"max_tokens":true}"#,
            format!("body: /max_tokens {range}"),
        ),
        (
            r#"{"max_tokens":100001}"#,
            format!("body: /max_tokens {range}"),
        ),
        (
            r#"{"max_tokens":99999999999999999999999}"#,
            format!("body: /max_tokens {range}"),
        ),
        (
            r#"{"max_tokens":1,"max_completion_tokens":-1}"#,
            format!("body: /max_completion_tokens {range}"),
        ),
        (
            r#"{"max_tokens":1,"n":0}"#,
            "body: /n must be an integer from 1 to 100000".to_owned(),
        ),
        (
            r#"{"max_tokens":1,"max_tokens":90000}"#,
            "body: /max_tokens occurs twice; send it once".to_owned(),
        ),
        (
            "max_tokens=1",
            "body: a rule reads the cost of the request from the body, but the body is not a JSON document"
                .to_owned(),
        ),
    ] {
        let answer = chat(&mut client, "x", body);
        assert_eq!(answer.status, 400, "{body}");
        assert!(
            answer.problem().starts_with(&expected),
            "{}",
            answer.problem()
        );
    }
    let headers = [("content-encoding", "gzip")];
    let answer = client.ask("POST", CHAT, &headers, b"x");
    assert_eq!(answer.status, 400);
    assert!(answer.problem().starts_with("content-encoding: "));
    let too_large = format!("{{\"max_tokens\":1{}}}", " ".repeat(1_100));
    let answer = chat(&mut client, "x", &too_large);
    assert_eq!(answer.status, 413);
    assert_eq!(
        answer.problem(),
        "the body exceeds the maximum of 1024 bytes"
    );
    let mut client = listener.connect();
    client.send(format!(
        "POST {CHAT} HTTP/1.1\r\nhost: h\r\ntransfer-encoding: chunked\r\n\r\n401\r\n{}\r\n0\r\n\r\n",
        " ".repeat(1_025)
    ));
    assert_eq!(client.read_answer(false).status, 413);
    assert_eq!(model.upstream.heads().len(), 0);
    assert_eq!(charged(&listener, 1_000_000), 0);
}

#[test]
fn a_stream_that_is_cut_is_charged_for_what_was_seen() {
    let model = Model::start(|connection, name| match name {
        "open" => {
            send_events(connection, &ANTHROPIC_EVENTS[..2]);
            connection.until_closed();
        }
        "upstream-cuts" => {
            send_events(connection, &ANTHROPIC_EVENTS[..2]);
            connection.close();
        }
        "before-usage" => {
            send_events(connection, &OPENAI_EVENTS[..1]);
            connection.close();
        }
        other => answer(connection, other),
    });
    let listener = model.behind(TOKENS, "");
    // The client disconnects after 23 bytes of text. The cost is 25 + 40 input tokens and 6 output
    // tokens.
    let mut client = listener.connect();
    client.send(format!(
        "POST {CHAT} HTTP/1.1\r\nhost: h\r\nx-answer: open\r\ncontent-length: 2\r\n\r\n{{}}"
    ));
    client.read_until("my friend!\"}}");
    drop(client);
    wait_for_charge(&listener, 71);
    for (name, tokens) in [
        ("upstream-cuts", 71),
        ("anthropic-unfinished", 71),
        // If the response contains no usage, the reserved 5,000 tokens and one input token stay
        // charged.
        ("before-usage", 5_001),
        ("openai-without-usage", 5_001),
        ("compressed", 5_001),
    ] {
        let before = charged(&listener, 1_000_000);
        let mut client = listener.connect();
        client.send(format!(
            "POST {CHAT} HTTP/1.1\r\nhost: h\r\nconnection: close\r\nx-answer: {name}\r\ncontent-length: 2\r\n\r\n{{}}"
        ));
        client.until_closed();
        wait_for_charge(&listener, before + tokens);
    }
}

#[test]
fn a_failed_request_costs_nothing() {
    let model = Model::start(answer);
    let listener = model.behind(TOKENS, "");
    assert_eq!(chat(&mut listener.connect(), "error", "{}").status, 500);
    assert_eq!(charged(&listener, 1_000_000), 0);
}

#[test]
fn an_implausible_usage_is_clamped() {
    let model = Model::start(answer);
    let rules = TOKENS.replace("1000000,", "900000000000000,");
    let listener = model.behind(&rules, "");
    assert_eq!(chat(&mut listener.connect(), "lie", "{}").status, 200);
    assert_eq!(charged(&listener, 900_000_000_000_000), 1_000_000_000);
}

#[test]
fn the_upstream_is_asked_not_to_compress() {
    let model = Model::responding_with(OPENAI);
    let listener = model.behind(TOKENS, "");
    let encoding = ("accept-encoding", "gzip, br");
    let mut client = listener.connect();
    assert_eq!(client.ask("POST", CHAT, &[encoding], b"{}").status, 200);
    assert_eq!(client.ask("POST", "/other", &[encoding], b"{}").status, 200);
    let heads = model.upstream.heads();
    assert!(
        heads[0].contains("accept-encoding: identity"),
        "{}",
        heads[0]
    );
    assert!(
        heads[1].contains("accept-encoding: gzip, br"),
        "{}",
        heads[1]
    );
}

const SMALL: &str = "
rules:
  - name: tokens
    when: {path: '/v1*/**'}
    limits: [{algorithm: fixed_window, limit: 1000, window: 1min}]
    cost: {json: /max_tokens, default: 100}
    settle: usage
";

#[test]
fn a_denial_has_the_format_of_the_api() {
    let model = Model::responding_with(OPENAI);
    let listener = model.behind(SMALL, "");
    let large = br#"{"max_tokens":950}"#;
    let first = listener
        .connect()
        .ask("POST", CHAT, &[("x-answer", "x")], large);
    assert_eq!(first.status, 200);
    let denied = |path: &str, headers: &[(&str, &str)]| {
        let answer = listener.connect().ask("POST", path, headers, large);
        assert_eq!(answer.status, 429);
        assert!(answer.header("retry-after").is_some());
        answer
    };
    let openai = denied(CHAT, &[]);
    assert_eq!(openai.header("content-type"), Some("application/json"));
    assert_eq!(openai.header("x-should-retry"), Some("true"));
    assert_eq!(openai.json()["error"]["code"], "rate_limit_exceeded");
    let message = openai.json()["error"]["message"].clone();
    assert!(
        message.as_str().unwrap().contains("exceeded; retry in"),
        "{message}"
    );
    let anthropic = denied("/v1/messages", &[("anthropic-version", "2023-06-01")]);
    let error = json!({"type": "rate_limit_error", "message": message});
    assert_eq!(anthropic.json(), json!({"type": "error", "error": error}));
    let gemini = denied("/v1beta/models/gemini-2.5-flash:generateContent", &[]);
    assert_eq!(gemini.json()["error"]["status"], "RESOURCE_EXHAUSTED");
    let other = denied("/v1/other", &[]);
    assert_eq!(other.header("x-should-retry"), None);
    assert!(other.problem().contains("exceeded"));
    // If a request can never be admitted, the response must tell the client not to retry it.
    let never = br#"{"max_tokens":2000}"#;
    let never = listener.connect().ask("POST", CHAT, &[], never);
    assert_eq!(never.header("x-should-retry"), Some("false"));
    // The rejection of a body without a valid cost has the same format.
    let invalid = listener.connect().ask("POST", CHAT, &[], b"{");
    assert_eq!(invalid.status, 400);
    assert_eq!(invalid.json()["error"]["type"], "invalid_request_error");
    let forced = model.behind(SMALL, ", error_format: anthropic");
    let invalid = forced.connect().ask("POST", CHAT, &[], b"{");
    assert_eq!(invalid.json()["error"]["type"], "invalid_request_error");
    assert_eq!(invalid.json()["type"], "error");
}

#[test]
fn concurrent_requests_never_exceed_the_limit() {
    let (release, released) = mpsc::channel::<()>();
    let released = Mutex::new(released);
    let model = Model::start(move |connection, _| {
        // Hold every response until all requests have been decided.
        let _ = released.lock().unwrap().recv_timeout(TIMEOUT);
        send_json(connection, OPENAI);
    });
    let listener = model.behind(SMALL, "");
    let address = listener.listener.local_addr();
    let (decided, decisions) = mpsc::channel();
    for _ in 0..50 {
        let decided = decided.clone();
        thread::spawn(move || {
            let mut client = Client::connect(address);
            let answer = chat(&mut client, "x", r#"{"max_tokens":130}"#);
            decided.send(answer.status).unwrap();
        });
    }
    // The limit of 1,000 tokens admits 7 reservations of 130 tokens each.
    for _ in 0..43 {
        assert_eq!(decisions.recv_timeout(TIMEOUT), Ok(429));
    }
    for _ in 0..7 {
        release.send(()).unwrap();
    }
    for _ in 0..7 {
        assert_eq!(decisions.recv_timeout(TIMEOUT), Ok(200));
    }
    // Each of the 7 requests used 120 tokens, so 840 tokens are charged and one more reservation is
    // admitted.
    release.send(()).unwrap();
    let mut client = listener.connect();
    assert_eq!(chat(&mut client, "x", r#"{"max_tokens":130}"#).status, 200);
    assert_eq!(chat(&mut client, "x", r#"{"max_tokens":41}"#).status, 429);
}

#[test]
fn a_monthly_budget_counts_microdollars() {
    let model = Model::responding_with(
        r#"{"usage":{"prompt_tokens":1000000,"completion_tokens":1000000,"prompt_tokens_details":{"cached_tokens":900001}}}"#,
    );
    // The limit is almost a billion dollars a month. The prices are $3, $0.30 and $15 per million
    // tokens.
    let rules = "
rules:
  - name: budget
    limits: [{algorithm: fixed_window, limit: 999999999999999, anchor: {calendar: month, zone: Europe/Berlin}}]
    cost: {json: /max_tokens, default: 1000, input: estimate}
    settle: {usage: 3*input + 0.3*cached + 15*output}
";
    let listener = model.behind(rules, "");
    let mut spent = 0;
    for _ in 0..3 {
        let answer = chat(&mut listener.connect(), "x", r#"{"max_tokens":100}"#);
        let status = answer.header("ratelimit").unwrap();
        // 18 bytes are estimated as 5 input tokens.
        let reserved = 3 * 5 + 15 * 100;
        let expected = 999_999_999_999_999_u64 - spent - reserved;
        assert!(
            status.contains(&format!("r={expected};")),
            "{status} {expected}"
        );
        // 99,999 input tokens and 900,001 cached tokens: 299,997 + 270,000.3 + 15,000,000, rounded
        // up.
        spent += 15_569_998;
    }
}

#[test]
fn trailers_of_a_body_that_was_read_close_the_connection() {
    let model = Model::responding_with(OPENAI);
    let listener = model.behind(TOKENS, "");
    for (trailers, expected) in [("", None), ("x-a: b\r\n", Some("close"))] {
        let mut client = listener.connect();
        client.send(format!(
            "POST {CHAT} HTTP/1.1\r\nhost: h\r\nx-answer: x\r\ntransfer-encoding: chunked\r\n\r\n2\r\n{{}}\r\n0\r\n{trailers}\r\n"
        ));
        let answer = client.read_answer(false);
        assert_eq!(
            (answer.status, answer.header("connection")),
            (200, expected)
        );
    }
}

#[test]
fn a_reload_applies_to_a_body_that_is_arriving() {
    let model = Model::responding_with(OPENAI);
    let listener = model.behind(TOKENS, "");
    let mut client = listener.connect();
    client.send(format!(
        "POST {CHAT} HTTP/1.1\r\nhost: h\r\nx-answer: x\r\nexpect: 100-continue\r\ncontent-length: 18\r\n\r\n"
    ));
    client.read_until("100 Continue\r\n\r\n");
    let denying = TOKENS.replace("limit: 1000000", "limit: 90");
    let config = tidegate_config::Config::parse(&format!(
        "{denying}\nproxy: {{listen: '127.0.0.1:0', upstreams: [{{name: m, urls: 'http://127.0.0.1:1'}}]}}"
    ));
    listener.limiter.swap_rules(config.unwrap().rules);
    client.send("{\"max_tokens\":100}");
    assert_eq!(client.read_answer(false).status, 429);
}
