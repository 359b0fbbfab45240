//! Tests of outlier detection and active health checks: ejection and readmission of endpoints.

use std::sync::{
    Arc,
    atomic::{AtomicBool, Ordering},
};

use crate::{listener::TestListener, upstream::Upstream};

const OK: &str = "HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok";
const UNHEALTHY: &str = "HTTP/1.1 503 Service Unavailable\r\ncontent-length: 0\r\n\r\n";

/// Returns an upstream that closes connections without a response until the returned flag is set.
fn switchable() -> (Upstream, Arc<AtomicBool>) {
    let is_healthy = Arc::new(AtomicBool::new(false));
    let flag = Arc::clone(&is_healthy);
    let upstream = Upstream::start(move |connection| {
        while connection.head().is_some() && is_healthy.load(Ordering::SeqCst) {
            connection.send(OK);
        }
        connection.close();
    });
    (upstream, flag)
}

/// Opens a proxy with one upstream that has these two endpoints.
fn in_front_of(addresses: [&Upstream; 2], settings: &str) -> TestListener {
    let [one, other] = addresses.map(Upstream::url);
    TestListener::open(&format!(
        "proxy:\n  listen: 127.0.0.1:0\n  upstreams: [{{name: app, urls: [\"{one}\", \"{other}\"], {settings}}}]\n"
    ))
}

fn is_up(listener: &TestListener, upstream: &Upstream) -> bool {
    let url = upstream.url();
    let line = format!("tidegate_proxy_endpoint_up{{upstream=\"app\",endpoint=\"{url}\"}} 1\n");
    listener.runtime.exposition().contains(&line)
}

/// Waits until `condition` is true; panics after a timeout.
pub(crate) fn until(condition: impl Fn() -> bool) {
    for _ in 0..1_000 {
        if condition() {
            return;
        }
        std::thread::park_timeout(std::time::Duration::from_millis(10));
    }
    panic!("the condition was never met");
}

#[test]
fn a_failing_endpoint_is_ejected() {
    let (well, (switchable, _)) = (Upstream::responding_with(OK), switchable());
    let listener = in_front_of([&well, &switchable], "eject: {failures: 2, duration: 1d}");
    let statuses: Vec<u16> = (0..20).map(|_| listener.get("/").status).collect();
    assert_eq!(statuses.iter().filter(|status| **status == 502).count(), 2);
    assert_eq!((switchable.heads().len(), well.heads().len()), (2, 18));
    assert!(is_up(&listener, &well) && !is_up(&listener, &switchable));
    let metrics = listener.runtime.exposition();
    let ejected = format!(
        "tidegate_proxy_ejections_total{{upstream=\"app\",endpoint=\"{}\"}} 1\n",
        switchable.url()
    );
    assert!(metrics.contains(&ejected), "{metrics}");
}

#[test]
fn an_ejected_endpoint_is_readmitted() {
    let (well, (switchable, flag)) = (Upstream::responding_with(OK), switchable());
    let listener = in_front_of([&well, &switchable], "eject: {failures: 1, duration: 50ms}");
    while listener.get("/").status == 200 {}
    flag.store(true, Ordering::SeqCst);
    until(|| is_up(&listener, &switchable));
    let before = switchable.heads().len();
    assert!((0..4).all(|_| listener.get("/").status == 200));
    assert_eq!(switchable.heads().len(), before + 2);
}

#[test]
fn all_endpoints_stay_in_use_if_all_are_ejected() {
    let ((one, one_told), (other, other_told)) = (switchable(), switchable());
    let listener = in_front_of([&one, &other], "eject: {failures: 1, duration: 1d}");
    assert!((0..4).all(|_| listener.get("/").status == 502));
    assert!(!is_up(&listener, &one) && !is_up(&listener, &other));
    for flag in [one_told, other_told] {
        flag.store(true, Ordering::SeqCst);
    }
    assert!((0..4).all(|_| listener.get("/").status == 200));
}

#[test]
fn an_endpoint_with_failing_health_checks_is_unused_until_it_recovers() {
    let is_healthy = Arc::new(AtomicBool::new(false));
    let flag = Arc::clone(&is_healthy);
    let sick = Upstream::start(move |connection| {
        while let Some(head) = connection.head() {
            let is_check = head.starts_with("GET /healthz HTTP/1.1\r\nhost: 127.0.0.1:");
            let is_healthy = !is_check || is_healthy.load(Ordering::SeqCst);
            connection.send(if is_healthy { OK } else { UNHEALTHY });
        }
    });
    let well = Upstream::responding_with(OK);
    let check = "health: {path: /healthz, interval: 10ms, timeout: 20s, healthy_after: 2, unhealthy_after: 2}";
    let listener = in_front_of([&well, &sick], check);
    until(|| !is_up(&listener, &sick));
    let asked = || {
        let heads = sick.heads();
        heads
            .iter()
            .filter(|head| head.starts_with("GET / "))
            .count()
    };
    assert!((0..6).all(|_| listener.get("/").status == 200));
    assert_eq!(asked(), 0);
    flag.store(true, Ordering::SeqCst);
    until(|| is_up(&listener, &sick));
    assert!((0..6).all(|_| listener.get("/").status == 200));
    assert_eq!(asked(), 3);
    let metrics = listener.runtime.exposition();
    let good = format!("endpoint=\"{}\",result=\"good\"", well.url());
    assert!(metrics.contains(&good), "{metrics}");
}

#[test]
fn a_failure_is_counted_even_if_another_endpoint_answers() {
    let well = Upstream::responding_with(OK);
    let closed_address = Upstream::closed_address();
    let listener = TestListener::open(&format!(
        "proxy:\n  listen: 127.0.0.1:0\n  upstreams: [{{name: app, urls: [\"http://{closed_address}\", \"{}\"]}}]\n",
        well.url()
    ));
    assert_eq!(listener.get("/").status, 200);
    let metrics = listener.runtime.exposition();
    let failed = format!(
        "tidegate_proxy_endpoint_failures_total{{upstream=\"app\",endpoint=\"http://{closed_address}\",failure=\"unreachable\"}} 1\n"
    );
    assert!(metrics.contains(&failed), "{metrics}");
    let none = "tidegate_proxy_failures_total{upstream=\"app\",failure=\"unreachable\"} 0\n";
    assert!(metrics.contains(none), "{metrics}");
}
