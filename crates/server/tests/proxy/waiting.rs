//! Tests of requests waiting in the proxy for a concurrency slot. The clock is manual.

use std::{sync::mpsc::Sender, thread, time::Duration};

use tidegate::RateLimiter as _;

use crate::{
    client::Client,
    gated_upstream::{Event, GatedUpstream, OK},
    listener::TestListener,
};

/// A timeout that is longer than any test step takes. The timeout makes a hanging test fail.
const TIMEOUT: Duration = Duration::from_secs(30);

/// The maximum number of attempts, one per millisecond. All attempts together take longer than any
/// test step.
const ATTEMPTS: usize = 30_000;

fn listener(upstream: &GatedUpstream, limit: &str) -> TestListener {
    TestListener::open(&format!(
        "rules: [{{name: at-work, limits: {{algorithm: concurrency, {limit}}}}}]\n\
         proxy: {{listen: '127.0.0.1:0', upstreams: [{{name: app, urls: '{}'}}]}}\n",
        upstream.upstream.url()
    ))
}

fn until_waiting(listener: &TestListener, count: usize) {
    for _ in 0..ATTEMPTS {
        if listener.limiter.wait_queues().count() == count {
            return;
        }
        #[expect(clippy::disallowed_methods, reason = "another thread is waited for")]
        thread::sleep(Duration::from_millis(1));
    }
    panic!("{count} requests should wait");
}

fn send(listener: &TestListener, number: usize) -> Client {
    let mut client = listener.connect();
    client.send(format!(
        "GET / HTTP/1.1\r\nx-number: {number}\r\nhost: h\r\n\r\n"
    ));
    client
}

/// Waits for the next request to reach the upstream. Returns the request's number, and the channel
/// for its response.
fn arrival(upstream: &GatedUpstream) -> (usize, Sender<&'static str>) {
    match upstream.events.recv_timeout(TIMEOUT).unwrap() {
        Event::Arrived(number, answer) => (number, answer),
        Event::Responded(number, answer) => panic!("{number}: {answer:?}"),
    }
}

/// 20 requests are in progress, and 40 are waiting. All requests are served, in the order of
/// arrival.
#[test]
fn sixty_arrivals_at_twenty_slots_are_served_in_order() {
    let upstream = GatedUpstream::start();
    let listener = listener(&upstream, "limit: 20, wait: 30s");
    let (mut clients, mut answers) = (Vec::new(), Vec::new());
    for number in 0..60 {
        clients.push(send(&listener, number));
        if number < 20 {
            let (arrived, answer) = arrival(&upstream);
            assert_eq!(arrived, number);
            answers.push(answer);
        } else {
            until_waiting(&listener, number - 19);
        }
    }
    for (number, client) in clients.iter_mut().enumerate() {
        answers[number].send(OK).unwrap();
        assert_eq!(client.read_answer(false).status, 200);
        if number < 40 {
            let (arrived, answer) = arrival(&upstream);
            assert_eq!(arrived, number + 20, "first in, first out");
            answers.push(answer);
        }
    }
    assert_eq!(listener.limiter.wait_queues().count(), 0);
}

#[test]
fn a_client_that_disconnects_gives_its_turn_on() {
    let upstream = GatedUpstream::start();
    let listener = listener(&upstream, "limit: 1, wait: 30s");
    let mut first = send(&listener, 0);
    let (_, answer) = arrival(&upstream);
    let gone = send(&listener, 1);
    until_waiting(&listener, 1);
    let mut patient = send(&listener, 2);
    until_waiting(&listener, 2);
    drop(gone);
    until_waiting(&listener, 1);
    answer.send(OK).unwrap();
    assert_eq!(first.read_answer(false).status, 200);
    let (arrived, answer) = arrival(&upstream);
    assert_eq!(arrived, 2);
    answer.send(OK).unwrap();
    assert_eq!(patient.read_answer(false).status, 200);
}

#[test]
fn a_request_that_waits_in_vain_is_answered_503() {
    let upstream = GatedUpstream::start();
    let listener = listener(&upstream, "limit: 1, wait: 20ms, queue: 1");
    let _first = send(&listener, 0);
    let (_, answer) = arrival(&upstream);
    let denied = send(&listener, 1).read_answer(false);
    assert_eq!(denied.status, 503);
    let problem = denied.json();
    let kind = problem["type"].as_str().unwrap();
    assert!(kind.ends_with("#temporary-reduced-capacity"), "{kind}");
    assert!(denied.header("retry-after").is_some());
    answer.send(OK).unwrap();
    let metrics = listener.limiter.exposition();
    let counted = "tidegate_decisions_total{listener=\"proxy\",outcome=\"limit\"} 1\n";
    assert!(metrics.contains(counted), "{metrics}");
}
