//! Tests of adaptive concurrency limits, and of the `headroom.*` entries for elastic rules. The
//! clock is manual.

use std::{cmp::Reverse, collections::BinaryHeap, sync::mpsc::Sender};

use tidegate_core::{Span, Timestamp};

use crate::{
    gated_upstream::{Event, GatedUpstream, RequestState},
    health::until,
    listener::TestListener,
    reload::ReloadableListener,
    upstream::Upstream,
};

fn file(url: &str, adaptive: &str, rules: &str) -> String {
    format!(
        "{rules}\nproxy:\n  listen: 127.0.0.1:0\n  upstreams: [{{name: app, urls: \"{url}\", adaptive: {adaptive}}}]\n"
    )
}

fn in_front_of(gated: &GatedUpstream, adaptive: &str, rules: &str) -> TestListener {
    TestListener::open(&file(&gated.upstream.url(), adaptive, rules))
}

/// Returns the settings for a concurrency limit that stays at `slots` requests.
fn fixed(slots: u32, more: &str) -> String {
    format!("{{algorithm: aimd, min: {slots}, max: {slots}{more}}}")
}

/// Returns the value of the metric with this name and these labels.
fn metric(listener: &TestListener, name: &str) -> u64 {
    let text = listener.runtime.exposition();
    let line = text.lines().find_map(|line| line.strip_prefix(name));
    line.unwrap_or_else(|| panic!("no {name} in {text}"))
        .trim()
        .parse()
        .unwrap()
}

const LIMIT: &str = "tidegate_proxy_adaptive_limit{upstream=\"app\"}";
const IN_FLIGHT: &str = "tidegate_proxy_adaptive_in_flight{upstream=\"app\"}";
const GET: &str = "GET / HTTP/1.1\r\n";

/// The upstream has 4 workers, each of which takes 10 ms per request. A request arrives every 1,250
/// µs, so the request rate is twice the rate that the upstream can serve.
#[test]
fn an_overloaded_upstream_is_at_most_four_times_slower() {
    const WORKERS: usize = 4;
    const LATENCY: u64 = 10_000;
    const INTERVAL: u64 = 1_250;
    const SECONDS: u64 = 4;
    let mut gated = GatedUpstream::start();
    let listener = in_front_of(&gated, "{algorithm: gradient}", "");
    let start = listener.limiter.now().as_micros();
    let mut free: BinaryHeap<Reverse<u64>> = (0..WORKERS).map(|_| Reverse(start)).collect();
    // The completion time of each request that the upstream is processing.
    let mut working: BinaryHeap<Reverse<(u64, usize, u64)>> = BinaryHeap::new();
    let (mut served, mut shed, mut slowest) = (0_u64, 0_u64, 0);
    let set = |micros| listener.limiter.clock().set(Timestamp::from_micros(micros));
    for arrival in 0..SECONDS * 1_000_000 / INTERVAL {
        let now = start + arrival * INTERVAL;
        while let Some(Reverse((done, number, arrival))) =
            working.peek().copied().filter(|next| next.0.0 <= now)
        {
            working.pop();
            set(done);
            assert_eq!(gated.release(number).status, 200);
            served += 1;
            if now > start + (SECONDS - 1) * 1_000_000 {
                slowest = slowest.max(done - arrival);
            }
        }
        set(now);
        match gated.ask(&listener, GET) {
            (number, RequestState::Pending) => {
                let Reverse(worker) = free.pop().unwrap();
                let done = worker.max(now) + LATENCY;
                free.push(Reverse(done));
                working.push(Reverse((done, number, now)));
            }
            (_, RequestState::Responded(answer)) => {
                assert_eq!(
                    (answer.status, answer.header("retry-after")),
                    (503, Some("1"))
                );
                assert!(answer.problem().contains("overloaded; retry in 1s"));
                shed += 1;
            }
        }
    }
    let could = SECONDS * 1_000_000 / LATENCY * WORKERS as u64;
    assert!(
        served * 5 >= could * 4,
        "{served} of {could}, {shed} were shed"
    );
    assert!(
        (LATENCY..=4 * LATENCY).contains(&slowest),
        "the slowest request took {slowest} us at the end"
    );
    let counted = metric(
        &listener,
        "tidegate_proxy_shed_total{upstream=\"app\",class=\"default\"}",
    );
    assert_eq!(counted, shed);
    assert_eq!(metric(&listener, IN_FLIGHT), working.len() as u64);
    let limit = metric(&listener, LIMIT);
    assert!((2..=4 * WORKERS as u64).contains(&limit), "{limit}");
}

#[test]
fn lower_classes_are_shed_first_and_shed_requests_are_not_charged() {
    let mut gated = GatedUpstream::start();
    let classes = ", classes: [{name: health, when: {path: /healthz}}, {name: batch, when: {header.x-kind: batch, ip: {cidr: 127.0.0.0/8}}, share: 50%}, {name: usual, when: {path: /**}, share: 75%}]";
    let rules = "rules: [{name: all, limits: [9/h], algorithm: fixed_window}]";
    let listener = in_front_of(&gated, &fixed(4, classes), rules);
    let batch = "GET / HTTP/1.1\r\nx-kind: batch\r\n";
    let health = "GET /healthz HTTP/1.1\r\n";
    let mut numbers = Vec::new();
    for (request, is_held) in [
        (batch, true),
        (batch, true),
        (batch, false),
        (GET, true),
        (GET, false),
        (health, true),
        (health, false),
    ] {
        match gated.ask(&listener, request) {
            (number, RequestState::Pending) => {
                assert!(is_held, "{request}");
                numbers.push(number);
            }
            (_, RequestState::Responded(answer)) => {
                assert_eq!((answer.status, is_held), (503, false))
            }
        }
    }
    assert_eq!(metric(&listener, IN_FLIGHT), 4);
    for class in ["batch", "usual", "health"] {
        let shed = format!("tidegate_proxy_shed_total{{upstream=\"app\",class=\"{class}\"}}");
        assert_eq!(metric(&listener, &shed), 1, "{class}");
    }
    let last = numbers.pop().unwrap();
    for number in numbers {
        gated.release(number);
    }
    let answer = gated.release(last);
    assert!(
        answer.header("ratelimit").unwrap().contains("r=5"),
        "{answer:?}"
    );
    assert_eq!(metric(&listener, IN_FLIGHT), 0);
    assert_eq!(gated.upstream.heads().len(), 4);
}

#[test]
fn an_ambiguous_request_does_not_escape_its_class() {
    let mut gated = GatedUpstream::start();
    let classes = ", classes: [{name: batch, when: {header.x-kind: batch}, share: 25%}, {name: usual, when: {path: /**}, share: 50%}]";
    let listener = in_front_of(&gated, &fixed(4, classes), "");
    let long = format!("GET / HTTP/1.1\r\nx-kind: {}\r\n", "x".repeat(20_000));
    for unclear in [
        "GET /./x HTTP/1.1\r\n",
        "GET /a/%2e%2e/batch HTTP/1.1\r\n",
        "GET / HTTP/1.1\r\nx-kind: batch\r\nx-kind: other\r\n",
        &long,
    ] {
        let (_, RequestState::Responded(answer)) = gated.ask(&listener, unclear) else {
            panic!("{unclear} was forwarded");
        };
        assert_eq!(answer.status, 400, "{unclear}");
        answer.problem();
    }
    assert_eq!(gated.status(&listener, GET, Span::ZERO), 200);
}

/// A slow upload causes no load on the upstream, so it must not hold a concurrency slot.
#[test]
fn a_slow_upload_does_not_hold_a_slot() {
    let mut gated = GatedUpstream::start();
    let listener = in_front_of(&gated, &fixed(1, ""), "");
    let [mut silent, mut dripping] = [0; 2].map(|_| listener.connect());
    let upload = "POST / HTTP/1.1\r\nhost: h\r\nx-number: 1000\r\ncontent-length: 3\r\n";
    silent.send(format!("{upload}expect: 100-continue\r\n\r\n"));
    let _silent = until_waiting(&gated, &listener, 1);
    dripping.send(format!("{upload}\r\na"));
    let _dripping = until_waiting(&gated, &listener, 2);
    assert_eq!(gated.status(&listener, GET, Span::from_millis(5)), 200);
    assert_eq!(metric(&listener, IN_FLIGHT), 0);
    dripping.send("bc");
    until(|| metric(&listener, IN_FLIGHT) == 1);
    let (_, RequestState::Responded(answer)) = gated.ask(&listener, GET) else {
        panic!("a fully sent request holds a slot");
    };
    assert_eq!(answer.status, 503);
    drop((silent, dripping));
    until(|| metric(&listener, IN_FLIGHT) == 0);
}

/// Waits until the upstream has received this many heads and no concurrency slot is in use. Returns
/// the channel on which the test sends the response to the last request.
fn until_waiting(
    gated: &GatedUpstream,
    listener: &TestListener,
    heads: usize,
) -> Sender<&'static str> {
    until(|| gated.upstream.heads().len() == heads && metric(listener, IN_FLIGHT) == 0);
    let Ok(Event::Arrived(_, answer)) = gated.events.recv() else {
        panic!("it was answered");
    };
    answer
}

#[test]
fn a_shed_grpc_call_gets_a_grpc_status() {
    let mut gated = GatedUpstream::start();
    let listener = in_front_of(&gated, &fixed(1, ""), "");
    let (first, _) = gated.ask(&listener, GET);
    let call = "POST /pkg.Service/Method HTTP/1.1\r\ncontent-type: application/grpc\r\ncontent-length: 0\r\n";
    let (_, RequestState::Responded(answer)) = gated.ask(&listener, call) else {
        panic!("there was a free slot");
    };
    assert_eq!(
        (answer.status, answer.header("grpc-status")),
        (200, Some("14"))
    );
    gated.release(first);
}

#[test]
fn an_unreachable_upstream_lowers_its_limit() {
    let url = format!("http://{}", Upstream::closed_address());
    let settings = "{algorithm: aimd, initial: 20, samples: 1, window: 1ms}";
    let listener = TestListener::open(&file(&url, settings, ""));
    for _ in 0..4 {
        assert_eq!(listener.get("/").status, 502);
        let clock = listener.limiter.clock();
        clock.set(clock.now().after(Span::from_millis(10)));
    }
    assert!(metric(&listener, LIMIT) < 20);
    assert_eq!(metric(&listener, IN_FLIGHT), 0);
}

/// The maximum number of connections is a proxy setting. Reaching the maximum does not mean that
/// the upstream is overloaded.
#[test]
fn a_missing_free_connection_does_not_lower_the_limit() {
    let mut gated = GatedUpstream::start();
    let listener = TestListener::open(&format!(
        "proxy:\n  listen: 127.0.0.1:0\n  upstreams: [{{name: app, urls: \"{}\", max_connections: 1, adaptive: {{algorithm: aimd, initial: 20, samples: 1, window: 1ms}}}}]\n",
        gated.upstream.url()
    ));
    let (held, _) = gated.ask(&listener, GET);
    for _ in 0..4 {
        assert_eq!(listener.get("/").status, 503);
        let clock = listener.limiter.clock();
        clock.set(clock.now().after(Span::from_millis(10)));
    }
    assert_eq!(metric(&listener, LIMIT), 20);
    assert_eq!(gated.release(held).status, 200);
}

const ELASTIC: &str = "rules: [{name: each, key: [header.x-customer], limits: [1/d], algorithm: fixed_window, elastic: {extra: 100%, when: {headroom.app: 'yes'}}}]";

fn customer(name: &str) -> String {
    format!("GET / HTTP/1.1\r\nx-customer: {name}\r\n")
}

#[test]
fn an_elastic_rule_stretches_while_latency_is_low() {
    let mut gated = GatedUpstream::start();
    let listener = in_front_of(&gated, "{samples: 1, headroom: {latency: 120%}}", ELASTIC);
    let (usual, slow) = (Span::from_millis(100), Span::from_millis(130));
    let mut ask = |request: &str, takes| gated.status(&listener, request, takes);
    let early = customer("early");
    assert_eq!(
        [ask(&early, usual), ask(&early, usual)],
        [200, 429],
        "nothing is known yet"
    );
    for _ in 0..3 {
        ask(GET, usual);
    }
    let first = customer("first");
    assert_eq!([0; 3].map(|_| ask(&first, usual)), [200, 200, 429]);
    for _ in 0..4 {
        ask(GET, slow);
    }
    let second = customer("second");
    assert_eq!([0; 2].map(|_| ask(&second, slow)), [200, 429]);
    for _ in 0..4 {
        ask(GET, usual);
    }
    assert_eq!([0; 2].map(|_| ask(&second, usual)), [200, 429]);
}

#[test]
fn an_elastic_rule_stretches_while_few_requests_are_in_flight() {
    let mut gated = GatedUpstream::start();
    let adaptive = fixed(4, ", headroom: {in_flight: 50%}");
    let listener = in_front_of(&gated, &adaptive, ELASTIC);
    let none = Span::ZERO;
    assert_eq!(
        [0; 3].map(|_| gated.status(&listener, &customer("first"), none)),
        [200, 200, 429]
    );
    let busy = [0; 2].map(|_| gated.ask(&listener, GET).0);
    // A client must not be able to claim headroom with its own headers.
    let claims = "GET / HTTP/1.1\r\nx-customer: second\r\nroom.app: yes\r\n";
    assert_eq!(
        [0; 2].map(|_| gated.status(&listener, claims, none)),
        [200, 429]
    );
    for number in busy {
        gated.release(number);
    }
    assert_eq!(
        [0; 2].map(|_| gated.status(&listener, &customer("second"), none)),
        [200, 429]
    );
}

#[test]
fn a_reload_changes_the_limit_and_keeps_the_in_flight_count() {
    let mut gated = GatedUpstream::start();
    let url = gated.upstream.url();
    let reloaded = ReloadableListener::open(&file(&url, &fixed(2, ""), ""));
    let listener = &reloaded.listener;
    let is_held = |gated: &mut GatedUpstream| match gated.ask(listener, GET) {
        (number, RequestState::Pending) => Some(number),
        (_, RequestState::Responded(answer)) => {
            assert_eq!(answer.status, 503);
            None
        }
    };
    let mut numbers: Vec<usize> = (0..3).filter_map(|_| is_held(&mut gated)).collect();
    assert_eq!(numbers.len(), 2);
    let class = ", classes: [{name: batch, when: {path: /batch}, share: 20%}]";
    reloaded.reload(&file(&url, &fixed(3, class), "")).unwrap();
    assert_eq!(
        (metric(listener, LIMIT), metric(listener, IN_FLIGHT)),
        (3, 2)
    );
    numbers.extend((0..2).filter_map(|_| is_held(&mut gated)));
    assert_eq!(numbers.len(), 3, "one more slot, and two are still held");
    let shed = "tidegate_proxy_shed_total{upstream=\"app\",class=\"default\"}";
    assert_eq!(metric(listener, shed), 2, "the counters are kept");
    // An invalid file changes nothing.
    assert!(reloaded.reload(&file(&url, &fixed(0, ""), "")).is_err());
    assert_eq!(metric(listener, LIMIT), 3);
    let plain =
        format!("proxy: {{listen: '127.0.0.1:0', upstreams: [{{name: app, urls: '{url}'}}]}}\n");
    reloaded.reload(&plain).unwrap();
    numbers.extend((0..2).filter_map(|_| is_held(&mut gated)));
    assert_eq!(numbers.len(), 5, "no limit applies any more");
    for number in numbers {
        assert_eq!(gated.release(number).status, 200);
    }
}
