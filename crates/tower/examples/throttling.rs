//! Compares throttling methods on one running service. The service handles ten requests at a time,
//! and each request takes 10 ms. The offered load is first half of the service's capacity, then
//! twice the capacity, and then half of the capacity again. Writes an SVG chart.
//!
//! ```sh
//! cargo run --release -p tidegate-tower --example throttling > docs/throttling.svg
//! ```
//!
//! The program takes about 80 s, and needs an otherwise idle machine.

#![allow(
    clippy::print_stdout,
    clippy::print_stderr,
    reason = "it draws a picture, and a live run takes a while"
)]

use std::{
    convert::Infallible,
    fmt::Write,
    sync::{Arc, Mutex},
    time::Duration,
};

use bytes::Bytes;
use http::{Request, Response, StatusCode};
use http_body_util::Full;
use tidegate::{Clock, Limiter, Rules};
use tidegate_core::{
    AlgorithmName, Condition, Headroom, Limit, LimitSpec, MemoryBounds, MemoryStore, Pattern, Rule,
    RuleSet, When, concurrency::AdaptiveSettings, notation,
};
use tidegate_tower::{ConcurrencyLimitLayer, HeadroomCondition, RateLimitLayer};
use tokio::{
    sync::Semaphore,
    time::{Instant, interval, sleep},
};
use tower::{Layer, ServiceExt, service_fn, util::BoxCloneSyncService};

type App = BoxCloneSyncService<Request<()>, StatusCode, Infallible>;

/// The number of requests that the service handles concurrently.
const WORKERS: usize = 10;
/// The processing time of a request.
const TAKES: Duration = Duration::from_millis(10);

/// The offered load. Each element is a number of requests per second and a duration in seconds.
const OFFERED: [(usize, usize); 3] = [(500, 3), (2_000, 6), (500, 3)];

/// The rate of all rate limits in this comparison.
const RATE: &str = "600/s";

/// The time between two points in the chart.
const POINT: Duration = Duration::from_millis(250);

/// The arrival time and the latency of a served request.
type Served = (Duration, Duration);

#[tokio::main(flavor = "current_thread")]
async fn main() {
    let clock = Clock::real();
    let modes: Vec<(&str, App)> = vec![
        ("no limit", boxed(service())),
        (
            "hard: 600/s",
            boxed(limiter(&clock, rule(gcra())).layer(service())),
        ),
        (
            "soft: 20% more, marked",
            boxed(limiter(&clock, soft()).layer(service())),
        ),
        ("elastic: 50% more while capacity is free", elastic(&clock)),
        (
            "concurrency: 15 at once",
            boxed(limiter(&clock, concurrency()).layer(service())),
        ),
        (
            "adaptive: as many as the service can handle",
            boxed(shed(&clock).layer(service())),
        ),
    ];
    let mut runs = Vec::new();
    for (name, app) in modes {
        eprintln!("{name} …");
        let served = offer(app).await;
        runs.push((name, served));
        sleep(Duration::from_secs(1)).await;
    }
    print!("{}", picture(&runs));
}

/// Creates the service. A request that finds all workers busy waits in a queue.
fn service()
-> impl tower::Service<Request<()>, Response = Response<Full<Bytes>>, Error = Infallible, Future: Send>
+ Clone
+ Send
+ Sync
+ 'static {
    let workers = Arc::new(Semaphore::new(WORKERS));
    service_fn(move |_| {
        let workers = Arc::clone(&workers);
        async move {
            let _worker = workers.acquire().await;
            sleep(TAKES).await;
            Ok(Response::new(Full::default()))
        }
    })
}

fn boxed<S, B>(service: S) -> App
where
    S: tower::Service<Request<()>, Response = Response<B>, Error = Infallible>
        + Clone
        + Send
        + Sync
        + 'static,
    S::Future: Send,
    B: 'static,
{
    BoxCloneSyncService::new(service.map_response(|response: Response<B>| response.status()))
}

fn limiter(clock: &Clock, rule: Rule) -> RateLimitLayer<Limiter<MemoryStore, Rules>> {
    let rules = RuleSet::build(vec![rule], Vec::new()).expect("one rule");
    let store = MemoryStore::new(MemoryBounds::default());
    RateLimitLayer::new(Arc::new(Limiter::new(rules, store, clock.clone())))
}

fn rule(limit: Limit) -> Rule {
    Rule::new("all", vec![limit]).expect("a rule")
}

fn gcra() -> Limit {
    let spec = LimitSpec {
        algorithm: Some(AlgorithmName::Gcra),
        rate: Some(notation::rate(RATE).expect("a rate")),
        burst: Some(19),
        ..LimitSpec::default()
    };
    spec.build().expect("a limit")
}

/// Creates a window limit with a soft allowance of 20 %.
fn soft() -> Rule {
    let rate = notation::rate(RATE).expect("a rate");
    let spec = LimitSpec {
        soft: Some(20),
        buckets: Some(20),
        ..LimitSpec::shorthand(rate, AlgorithmName::SlidingWindowCounter)
    };
    rule(spec.build().expect("a limit"))
}

fn concurrency() -> Rule {
    let spec = LimitSpec {
        algorithm: Some(AlgorithmName::Concurrency),
        limit: Some(15),
        ..LimitSpec::default()
    };
    rule(spec.build().expect("a limit"))
}

fn shed(clock: &Clock) -> ConcurrencyLimitLayer {
    ConcurrencyLimitLayer::new(AdaptiveSettings::default(), clock.clone()).expect("valid settings")
}

/// Creates a service behind an elastic window limit. While less than 60 % of the adaptive
/// concurrency limit is in use, the window limit admits 50 % more.
fn elastic(clock: &Clock) -> App {
    let rate = notation::rate(RATE).expect("a rate");
    let spec = LimitSpec {
        buckets: Some(20),
        ..LimitSpec::shorthand(rate, AlgorithmName::SlidingWindowCounter)
    };
    let room = Pattern::text("yes").and_then(|yes| Condition::new("headroom.app", yes));
    let room = When::all(vec![room.expect("a condition")]);
    let rule = rule(spec.build().expect("a limit")).elastic(50, Headroom::When(room));
    let limiter = limiter(clock, rule.expect("it stretches"));
    let shed = shed(clock).export_headroom("headroom.app", HeadroomCondition::InFlight(60));
    boxed(shed.layer(limiter.layer(service())))
}

/// Sends the offered load to `app`. Returns the served requests.
async fn offer(app: App) -> Vec<Served> {
    let (served, began) = (Arc::new(Mutex::new(Vec::new())), now());
    for (rate, seconds) in OFFERED {
        // The timer fires at most a thousand times a second, so each tick may send several
        // requests.
        let mut ticks = interval(Duration::from_millis(2));
        for _ in 0..seconds * 500 {
            ticks.tick().await;
            for _ in 0..rate / 500 {
                let (app, served) = (app.clone(), Arc::clone(&served));
                tokio::spawn(async move {
                    let arrival = now();
                    let Ok(status) = app.oneshot(Request::new(())).await;
                    if status == StatusCode::OK {
                        let mut served = served.lock().expect("no thread panics");
                        served.push((arrival - began, arrival.elapsed()));
                    }
                });
            }
        }
    }
    // After this time, all queued requests have been served or rejected.
    sleep(Duration::from_secs(1)).await;
    served.lock().expect("no thread panics").clone()
}

fn now() -> Instant {
    Instant::now()
}

const WIDTH: f64 = 380.0;
const HEIGHT: f64 = 130.0;
const MOST_SERVED: f64 = 1_500.0;
const MOST_MILLIS: f64 = 100.0;

fn picture(runs: &[(&str, Vec<Served>)]) -> String {
    let rows = runs.len().div_ceil(2);
    let (width, height) = (2.0 * (WIDTH + 60.0), 60.0 + as_f64(rows) * (HEIGHT + 60.0));
    let mut svg = format!(
        r##"<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="sans-serif" font-size="12">
<rect width="100%" height="100%" fill="#fff"/>
<text x="30" y="24" font-size="14">A service with a capacity of 1,000 requests per second receives 500, 2,000 and 500 per second</text>
<text x="30" y="42" fill="#2a7">served per second (top: 1,500)</text>
<text x="220" y="42" fill="#c33">95th-percentile latency (top: 100 ms and more)</text>
"##
    );
    for (number, (name, served)) in runs.iter().enumerate() {
        let (column, row) = (as_f64(number % 2), as_f64(number / 2));
        let (x, y) = (30.0 + column * (WIDTH + 60.0), 80.0 + row * (HEIGHT + 60.0));
        panel(&mut svg, (x, y), name, served);
    }
    svg.push_str("</svg>\n");
    svg
}

fn panel(svg: &mut String, (x, y): (f64, f64), name: &str, served: &[Served]) {
    let seconds: usize = OFFERED.iter().map(|(_, seconds)| seconds).sum();
    let points = seconds * 1_000 / usize::try_from(POINT.as_millis()).unwrap_or(1);
    let mut rates = String::new();
    let mut times = String::new();
    for point in 0..points {
        let from = POINT * u32::try_from(point).unwrap_or(u32::MAX);
        let within = |(arrival, _): &&Served| (from..from + POINT).contains(arrival);
        let mut took: Vec<Duration> = served
            .iter()
            .filter(within)
            .map(|(_, took)| *took)
            .collect();
        took.sort_unstable();
        let at = x + WIDTH * as_f64(point) / as_f64(points);
        let rate = as_f64(took.len()) / POINT.as_secs_f64();
        let slow = took.get(took.len() * 95 / 100).copied().unwrap_or_default();
        let up = |share: f64| y + HEIGHT * (1.0 - share.min(1.0));
        let _ = write!(rates, "{at:.1},{:.1} ", up(rate / MOST_SERVED));
        let _ = write!(
            times,
            "{at:.1},{:.1} ",
            up(slow.as_secs_f64() * 1_000.0 / MOST_MILLIS)
        );
    }
    let mut all: Vec<Duration> = served.iter().map(|(_, took)| *took).collect();
    all.sort_unstable();
    let slow = all.get(all.len() * 95 / 100).copied().unwrap_or_default();
    let _ = writeln!(
        svg,
        r##"<text x="{x}" y="{}">{name}</text>
<text x="{}" y="{}" text-anchor="end" fill="#666">{} served, 95 % within {} ms</text>
<rect x="{x}" y="{y}" width="{WIDTH}" height="{HEIGHT}" fill="none" stroke="#ccc"/>
<polyline points="{rates}" fill="none" stroke="#2a7" stroke-width="1.5"/>
<polyline points="{times}" fill="none" stroke="#c33" stroke-width="1.5"/>"##,
        y - 8.0,
        x + WIDTH,
        y + HEIGHT + 16.0,
        all.len(),
        slow.as_millis(),
    );
}

#[expect(clippy::cast_precision_loss, reason = "some thousands, for a picture")]
fn as_f64(count: usize) -> f64 {
    count as f64
}
