//! Tests that denied requests do not reach an upstream.

use std::{
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering},
        mpsc,
    },
    thread,
    time::Duration,
};

use http_body_util::{BodyExt, Full};
use hyper::Response;
use tokio::{
    sync::{Semaphore, SemaphorePermit},
    time::Instant,
};

use crate::{client::Client, listener::TestListener, upstream::Upstream};

/// A timeout that is longer than any test step takes. The timeout makes a hanging test fail.
const TIMEOUT: Duration = Duration::from_secs(20);

fn limited(rules: &str) -> (Upstream, TestListener) {
    let upstream = Upstream::responding_with("HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok");
    let text = format!(
        "{rules}\nproxy: {{listen: '127.0.0.1:0', upstreams: [{{name: app, urls: '{}'}}]}}\n",
        upstream.url()
    );
    let listener = TestListener::open(&text);
    (upstream, listener)
}

const LOGIN: &str = "rules: [{name: login, when: {path: /login, method: POST}, key: [ip], limits: [2/min], algorithm: fixed_window}]";

#[test]
fn a_denial_is_answered_by_the_proxy() {
    let (upstream, listener) = limited(LOGIN);
    let mut client = listener.connect();
    for remaining in [1, 0] {
        let answer = client.ask("POST", "/login", &[], b"x");
        assert_eq!((answer.status, &*answer.body), (200, "ok"));
        let header = answer.header("ratelimit").unwrap();
        assert!(
            header.starts_with(&format!("\"2/min\";r={remaining}")),
            "{header}"
        );
    }
    let answer = client.ask("POST", "/login", &[], b"x");
    assert_eq!(
        (answer.status, answer.header("retry-after")),
        (429, Some("60"))
    );
    assert_eq!(answer.json()["violated-policies"][0], "2/min");
    assert!(
        !answer.json().to_string().contains("login"),
        "{}",
        answer.body
    );
    assert_eq!(
        upstream.heads().len(),
        2,
        "a denied request does not reach the upstream"
    );
    // The rule does not apply to other methods and other paths, but matches all spellings of its
    // path.
    assert_eq!(client.ask("GET", "/login", &[], b"").status, 200);
    assert_eq!(client.ask("POST", "/%6Cogin", &[], b"").status, 429);
    let dots = client.ask("POST", "/x/../login", &[], b"");
    assert_eq!(dots.status, 400);
    assert!(dots.problem().starts_with("path: "), "{}", dots.problem());
    let metrics = listener.limiter.exposition();
    let denied = "tidegate_decisions_total{listener=\"proxy\",outcome=\"limit\"} 2";
    assert!(metrics.contains(denied), "{metrics}");
}

#[test]
fn a_client_cannot_choose_its_key() {
    let (_upstream, listener) = limited(LOGIN);
    for claim in ["6.6.6.6", "7.7.7.7", "8.8.8.8"] {
        let claims = [("x-forwarded-for", claim), ("x-real-ip", claim)];
        let answer = listener.connect().ask("POST", "/login", &claims, b"x");
        assert_eq!(answer.status, if claim == "8.8.8.8" { 429 } else { 200 });
    }
}

#[test]
fn a_trusted_proxy_determines_the_key() {
    let (_upstream, listener) = limited(&format!("clients: {{proxies: [127.0.0.1]}}\n{LOGIN}"));
    for client in ["203.0.113.9", "203.0.113.10", "203.0.113.9", "203.0.113.10"] {
        let headers = [("x-forwarded-for", client)];
        assert_eq!(
            listener
                .connect()
                .ask("POST", "/login", &headers, b"x")
                .status,
            200
        );
    }
    let headers = [("x-forwarded-for", "203.0.113.9")];
    assert_eq!(
        listener
            .connect()
            .ask("POST", "/login", &headers, b"x")
            .status,
        429
    );
}

#[test]
fn rules_can_match_countries() {
    let database = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../identity/tests/maxmind/GeoLite2-Country-Test.mmdb"
    );
    let (_upstream, listener) = limited(&format!(
        "geoip: {{country: {database}}}\nclients: {{proxies: 1}}\n\
         rules: [{{name: islands, when: {{country: GB}}, limits: [{{algorithm: fixed_window, limit: 0, window: 1h}}]}}]"
    ));
    for (client, status) in [
        ("2.125.160.216", 429),
        ("50.114.0.1", 200),
        ("192.0.2.1", 200),
    ] {
        let headers = [("x-forwarded-for", client), ("x-country", "GB")];
        assert_eq!(
            listener.connect().ask("GET", "/", &headers, b"").status,
            status,
            "{client}"
        );
    }
}

#[test]
fn a_denied_client_need_not_send_its_body() {
    let (upstream, listener) =
        limited("rules: [{name: all, limits: [{algorithm: fixed_window, limit: 1, window: 1h}]}]");
    assert_eq!(listener.get("/").status, 200);
    let mut client = listener.connect();
    client.send(
        "POST / HTTP/1.1\r\nhost: h\r\nexpect: 100-continue\r\ncontent-length: 1000000\r\n\r\n",
    );
    assert_eq!(client.read_answer(false).status, 429);
    assert_eq!(upstream.heads().len(), 1);
}

/// Returns an upstream that answers `/NUMBER` with the status NUMBER, and reports a cost of 12
/// tokens.
fn statuses() -> Upstream {
    Upstream::start(|connection| {
        while let Some(head) = connection.head() {
            let status = head.split([' ', '/']).nth(2).unwrap();
            connection.send(format!(
                "HTTP/1.1 {status} Whatever\r\nx-tokens: 12\r\ncontent-length: 2\r\n\r\nok"
            ));
        }
    })
}

fn behind(upstream: &Upstream, rules: &str) -> TestListener {
    TestListener::open(&format!(
        "{rules}\nproxy: {{listen: '127.0.0.1:0', upstreams: [{{name: app, urls: '{}'}}]}}\n",
        upstream.url()
    ))
}

#[test]
fn only_responses_with_a_counted_status_are_charged() {
    let upstream = statuses();
    let rules = "rules: [{name: failed, key: [ip], limits: [2/h], algorithm: fixed_window, count: {status: [401, 403]}}]";
    let listener = behind(&upstream, rules);
    let mut client = listener.connect();
    for status in [200, 200, 200, 401, 500, 404, 200, 403] {
        let answer = client.ask("GET", &format!("/{status}"), &[], b"");
        assert_eq!(answer.status, status);
    }
    assert_eq!(client.ask("GET", "/200", &[], b"").status, 429);
    assert_eq!(upstream.heads().len(), 8);
}

/// A guess is charged while it is in flight, so a response that is still missing cannot let further
/// guesses pass. The upstream holds its responses until all other guesses are denied.
#[test]
fn parallel_failures_never_exceed_the_limit() {
    let (release, released) = mpsc::channel();
    let released = Mutex::new(released);
    let upstream = Upstream::start(move |connection| {
        while let Some(head) = connection.head() {
            let status = if head.starts_with("POST /login/guess") {
                let _: Result<(), _> = released.lock().unwrap().recv_timeout(TIMEOUT);
                401
            } else {
                200
            };
            connection.send(format!(
                "HTTP/1.1 {status} Whatever\r\ncontent-length: 2\r\n\r\nok"
            ));
        }
    });
    let rules = "rules: [{name: failed, key: [ip], limits: [5/h], algorithm: fixed_window, count: {status: [401]}}]";
    let listener = behind(&upstream, rules);
    let login = |path: &str| listener.connect().ask("POST", path, &[], b"").status;
    for _ in 0..8 {
        assert_eq!(login("/login"), 200, "an accepted login costs nothing");
    }
    let address = listener.listener.local_addr();
    let (decided, decisions) = mpsc::channel();
    for _ in 0..60 {
        let decided = decided.clone();
        thread::spawn(move || {
            let mut client = Client::connect(address);
            let answer = client.ask("POST", "/login/guess", &[], b"");
            decided.send(answer.status).unwrap();
        });
    }
    for _ in 0..55 {
        assert_eq!(decisions.recv_timeout(TIMEOUT), Ok(429));
    }
    for _ in 0..5 {
        release.send(()).unwrap();
    }
    for _ in 0..5 {
        assert_eq!(decisions.recv_timeout(TIMEOUT), Ok(401));
    }
    assert_eq!(login("/login"), 429, "the limit is used up");
    assert_eq!(upstream.heads().len(), 8 + 5);
}

#[test]
fn a_response_header_sets_the_cost() {
    let upstream = statuses();
    let rules = "rules: [{name: tokens, limits: [30/h], algorithm: fixed_window, cost: 5, settle: header.x-tokens}]";
    let listener = behind(&upstream, rules);
    let mut client = listener.connect();
    let left = |header: &str| -> u64 {
        let left = header.split("r=").nth(1).unwrap();
        left.split(';').next().unwrap().parse().unwrap()
    };
    for expected in [25, 13, 1] {
        let answer = client.ask("GET", "/200", &[], b"");
        assert_eq!(left(answer.header("ratelimit").unwrap()), expected);
    }
    assert_eq!(client.ask("GET", "/200", &[], b"").status, 429);
}

#[test]
fn a_slot_is_held_until_the_response_ends_or_the_client_disconnects() {
    let upstream = Upstream::start(|connection| {
        while let Some(head) = connection.head() {
            if head.starts_with("GET /slow") {
                connection.send("HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\nhalf");
            } else {
                connection.send("HTTP/1.1 200 OK\r\ncontent-length: 8\r\n\r\nhalf");
            }
        }
    });
    let rules = "rules: [{name: places, limits: [{algorithm: concurrency, limit: 2}]}]";
    let listener = behind(&upstream, rules);
    for _ in 0..3 {
        assert_eq!(listener.get("/slow").status, 200);
    }
    let held: Vec<_> = (0..2)
        .map(|_| {
            let mut client = listener.connect();
            client.send("GET /never HTTP/1.1\r\nhost: h\r\n\r\n");
            client.read_until("half");
            client
        })
        .collect();
    assert_eq!(listener.get("/slow").status, 503);
    drop(held);
    // The proxy may need several polls to notice that the client has disconnected.
    let is_free = (0..10_000).any(|_| listener.get("/slow").status == 200);
    assert!(is_free, "a disconnected client still holds its slot");
}

/// The concurrency limit in [`early_answers`].
const SLOTS: usize = 20;

/// The state of an upstream that responds before the uploads are complete.
struct Uploads {
    /// The number of uploads that have begun and that the proxy has not yet ended. The number
    /// includes uploads to which the upstream has already responded.
    open: AtomicUsize,
    /// The highest number of open uploads so far.
    peak: AtomicUsize,
    /// One permit for each response that the upstream may send.
    answers: Semaphore,
}

impl Uploads {
    fn new() -> Arc<Self> {
        Arc::new(Self {
            open: AtomicUsize::new(0),
            peak: AtomicUsize::new(0),
            answers: Semaphore::new(0),
        })
    }

    fn begin(&self) {
        let open = self.open.fetch_add(1, Ordering::SeqCst) + 1;
        self.peak.fetch_max(open, Ordering::SeqCst);
    }

    fn end(&self) {
        self.open.fetch_sub(1, Ordering::SeqCst);
    }

    fn until_open(&self, count: usize) {
        let start = Instant::now();
        loop {
            let open = self.open.load(Ordering::SeqCst);
            if open == count {
                return;
            }
            assert!(start.elapsed() < TIMEOUT, "{open} are open, not {count}");
            thread::yield_now();
        }
    }
}

/// Lets 64 clients upload to an upstream that responds early and continues to read each upload. The
/// limit is 20 concurrent requests. If the proxy released a slot at the end of the response
/// although the upload continues, the upstream would have 64 uploads in flight.
fn early_answers(upstream: &Upstream, settings: &str, uploads: &Uploads) {
    const CLIENTS: usize = 64;
    let listener = TestListener::open(&format!(
        "rules: [{{name: slots, limits: [{{algorithm: concurrency, limit: {SLOTS}}}]}}]\n\
         proxy: {{listen: '127.0.0.1:0', upstreams: [{{name: app, {settings} urls: '{}'}}]}}\n",
        upstream.url()
    ));
    let mut admitted: Vec<Client> = Vec::new();
    while admitted.len() < CLIENTS {
        let first = admitted.len();
        for number in 1..=CLIENTS - first {
            let mut client = listener.connect();
            client.send("POST / HTTP/1.1\r\nhost: h\r\ncontent-length: 1000\r\n\r\nbegun");
            if number <= SLOTS {
                uploads.until_open(number);
                admitted.push(client);
            } else {
                assert_eq!(client.read_answer(false).status, 503);
            }
        }
        uploads.answers.add_permits(admitted.len() - first);
        for client in &mut admitted[first..] {
            assert_eq!(client.read_answer(false).body, "ok");
        }
        // The clients do not end their uploads, so the proxy must end them.
        uploads.until_open(0);
    }
    assert_eq!(uploads.peak.load(Ordering::SeqCst), SLOTS);
}

#[test]
fn early_answers_do_not_exceed_the_concurrency_limit() {
    let uploads = Uploads::new();
    let seen = Arc::clone(&uploads);
    let upstream = Upstream::start(move |connection| {
        connection.head().unwrap();
        seen.begin();
        while seen
            .answers
            .try_acquire()
            .map(SemaphorePermit::forget)
            .is_err()
        {
            thread::yield_now();
        }
        connection.send("HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok");
        connection.until_closed();
        seen.end();
    });
    early_answers(&upstream, "", &uploads);
}

#[test]
fn early_answers_over_http2_do_not_exceed_the_concurrency_limit() {
    let uploads = Uploads::new();
    let seen = Arc::clone(&uploads);
    let upstream = Upstream::over_http2(move |request| {
        let seen = Arc::clone(&seen);
        async move {
            seen.begin();
            seen.answers.acquire().await.unwrap().forget();
            tokio::spawn(async move {
                // Reads the body until it ends, or until the proxy resets the stream.
                let _ = request.into_body().collect().await;
                seen.end();
            });
            Response::new(Full::from("ok"))
        }
    });
    early_answers(&upstream, "http2: true,", &uploads);
}

#[test]
fn a_queue_delays_requests() {
    let queue = "rules: [{name: slow, limits: [{algorithm: leaky_bucket, capacity: 3, leak: 20/s, queue: true}]}]";
    let (upstream, listener) = limited(queue);
    let asked: Vec<_> = (0..4)
        .map(|_| {
            let mut client = listener.connect();
            client.send("GET / HTTP/1.1\r\nhost: h\r\n\r\n");
            client
        })
        .collect();
    for mut client in asked {
        assert_eq!(client.read_answer(false).status, 200);
    }
    assert_eq!(upstream.heads().len(), 4, "later, but all are served");
    assert_eq!(
        listener.get("/").status,
        429,
        "the clock of this test stands still, so the queue is full"
    );
}
