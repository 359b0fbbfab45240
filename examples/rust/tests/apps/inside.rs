//! Tests of applications that run in this process, with counters in memory and in Redis. Their
//! handlers count calls.

use std::{
    future,
    io::{Read, Write},
    net::{SocketAddr, TcpStream},
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use axum::{Router, extract::Path, routing::get};
use tidegate::{Clock, Limiter, RateLimiter, Rules};
use tidegate_core::{
    Algorithm, Cost, Effect, Limit, Rate, Request, Rule, RuleSet, Scratch, Source, Span, Store,
};
use tidegate_examples::{
    greeter::{
        GreetRequest, GreetResponse,
        greeter_client::GreeterClient,
        greeter_server::{Greeter, GreeterServer},
    },
    in_memory, limit,
};
use tidegate_redis::{Address, FallbackSettings, FallbackStore, Redis, RedisSettings, Topology};
use tidegate_tower::RateLimitLayer;
use tokio::{net::TcpListener, runtime::Handle, task, time};
use tonic::{
    Code, Response, Status,
    transport::server::{Server, TcpIncoming},
};

use crate::support::{RedisServer, TIMEOUT};

const SHORT: &str = "short";
const LONG: &str = "long";

/// The number of calls to a handler.
type Calls = Arc<AtomicUsize>;

struct App<S> {
    address: SocketAddr,
    calls: Calls,
    limiter: Arc<Limiter<S, Rules>>,
}

/// The web framework of the application.
#[derive(Clone, Copy)]
enum Framework {
    Axum,
    Tonic,
}

impl<S: Store + 'static> App<S> {
    async fn start(framework: Framework, limit: Limit, store: S) -> Self {
        let rules =
            RuleSet::build(vec![Rule::new("all", vec![limit]).unwrap()], Vec::new()).unwrap();
        let limiter = Arc::new(Limiter::new(rules, store, Clock::real()));
        let limits =
            RateLimitLayer::new(Arc::clone(&limiter)).longest_wait(Span::from_secs(86_400));
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let app = Self {
            address: listener.local_addr().unwrap(),
            calls: Calls::default(),
            limiter,
        };
        let calls = Arc::clone(&app.calls);
        match framework {
            Framework::Axum => {
                let called = move |Path(name): Path<String>| work(calls, name);
                let router = Router::new().route("/{name}", get(called)).layer(limits);
                tokio::spawn(async move { axum::serve(listener, router).await });
            }
            Framework::Tonic => {
                let server = Server::builder()
                    .layer(limits)
                    .add_service(GreeterServer::new(Counted(calls)));
                tokio::spawn(server.serve_with_incoming(TcpIncoming::from(listener)));
            }
        }
        app
    }

    fn calls(&self) -> usize {
        self.calls.load(Ordering::SeqCst)
    }

    /// Returns whether a request would be admitted now, and which store decided this.
    async fn would_pass(&self) -> (bool, Source) {
        let request = Request::new(&[], Cost::ONE).unwrap();
        let (rules, mut scratch) = (self.limiter.rules(), Scratch::default());
        let verdict = self
            .limiter
            .check(&rules, &mut scratch, &request, Effect::Peek);
        let verdict = verdict.await.unwrap();
        (verdict.allowed, verdict.source)
    }

    /// Waits until `source` decides that a request would be admitted or, if `allowed` is false,
    /// denied.
    async fn until(&self, allowed: bool, source: Source) {
        let pause = Duration::from_millis(10);
        for _ in 0..TIMEOUT.as_millis() / pause.as_millis() {
            if self.would_pass().await == (allowed, source) {
                return;
            }
            time::sleep(pause).await;
        }
        panic!("timed out waiting for allowed = {allowed} from {source:?}");
    }
}

struct Counted(Calls);

#[tonic::async_trait]
impl Greeter for Counted {
    async fn greet(
        &self,
        request: tonic::Request<GreetRequest>,
    ) -> Result<Response<GreetResponse>, Status> {
        let name = request.into_inner().name;
        let greeting = work(Arc::clone(&self.0), name).await;
        Ok(Response::new(GreetResponse { greeting }))
    }
}

/// The code of every handler: counts the call. Never returns if the name is `LONG`.
async fn work(calls: Calls, name: String) -> String {
    calls.fetch_add(1, Ordering::SeqCst);
    if name == LONG {
        future::pending::<()>().await;
    }
    name
}

async fn greet(address: SocketAddr, name: &str) -> Result<(), Code> {
    let client = GreeterClient::connect(format!("http://{address}")).await;
    let request = GreetRequest {
        name: name.to_owned(),
    };
    let greeted = client.unwrap().greet(request).await;
    greeted.map(drop).map_err(|status| status.code())
}

/// Sends a request on a new connection, and returns the connection.
fn ask(address: SocketAddr, name: &str) -> TcpStream {
    let mut stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(TIMEOUT)).unwrap();
    let headers = "host: example.org\r\nconnection: close\r\n";
    write!(stream, "GET /{name} HTTP/1.1\r\n{headers}\r\n").unwrap();
    stream
}

fn status(mut stream: TcpStream) -> String {
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    answer.split(' ').nth(1).unwrap().to_owned()
}

/// Three requests are admitted. The handler must not be called for denied requests.
async fn denied_requests_do_not_reach_the_handler<S: Store + 'static>(
    store: impl Fn() -> S,
    source: Source,
) {
    let app = App::start(Framework::Axum, limit("3/h").unwrap(), store()).await;
    app.until(true, source).await;
    let asked = || {
        (0..9)
            .filter(|_| status(ask(app.address, SHORT)) == "200")
            .count()
    };
    assert_eq!((task::block_in_place(asked), app.calls()), (3, 3));
    app.until(false, source).await;

    let app = App::start(Framework::Tonic, limit("4/h").unwrap(), store()).await;
    app.until(true, source).await;
    for expected in [Ok(()); 4]
        .into_iter()
        .chain([Err(Code::ResourceExhausted); 5])
    {
        assert_eq!(greet(app.address, SHORT).await, expected);
    }
    assert_eq!(app.calls(), 4);
}

/// A queue that serves one request an hour and has room for one waiting request.
fn queue() -> Limit {
    let leak = Rate {
        count: 1,
        period: Span::from_secs(3_600),
    };
    let queue = Algorithm::LeakyBucket {
        capacity: 1,
        leak,
        queue: true,
    };
    Limit::new(queue).unwrap()
}

async fn a_disconnected_client_leaves_the_queue<S: Store + 'static>(
    store: impl Fn() -> S,
    source: Source,
) {
    let app = App::start(Framework::Axum, queue(), store()).await;
    app.until(true, source).await;
    assert_eq!(
        task::block_in_place(|| status(ask(app.address, SHORT))),
        "200"
    );
    for _ in 0..3 {
        let waiting = task::block_in_place(|| ask(app.address, SHORT));
        app.until(false, source).await;
        drop(waiting);
        app.until(true, source).await;
    }
    assert_eq!(app.calls(), 1);

    let app = App::start(Framework::Tonic, queue(), store()).await;
    app.until(true, source).await;
    assert_eq!(greet(app.address, SHORT).await, Ok(()));
    for _ in 0..3 {
        let waiting = tokio::spawn(greet(app.address, SHORT));
        app.until(false, source).await;
        waiting.abort();
        app.until(true, source).await;
    }
    assert_eq!(app.calls(), 1);
}

async fn a_disconnected_client_frees_its_slot<S: Store + 'static>(
    store: impl Fn() -> S,
    source: Source,
) {
    let lease = Span::from_secs(3_600);
    let place = || Limit::new(Algorithm::Concurrency { limit: 1, lease }).unwrap();
    let app = App::start(Framework::Axum, place(), store()).await;
    app.until(true, source).await;
    for _ in 0..3 {
        let working = task::block_in_place(|| ask(app.address, LONG));
        app.until(false, source).await;
        drop(working);
        app.until(true, source).await;
    }
    assert_eq!(app.calls(), 3);

    let app = App::start(Framework::Tonic, place(), store()).await;
    app.until(true, source).await;
    for _ in 0..3 {
        let working = tokio::spawn(greet(app.address, LONG));
        app.until(false, source).await;
        working.abort();
        app.until(true, source).await;
        assert_eq!(greet(app.address, SHORT).await, Ok(()));
        app.until(true, source).await;
    }
    assert_eq!(app.calls(), 6);
}

/// A store with a long timeout, so that a busy machine does not cause a fallback.
fn in_redis(url: &str) -> FallbackStore {
    let (address, login) = Address::parse(url).unwrap();
    let settings = RedisSettings {
        login,
        timeout: TIMEOUT,
        ..RedisSettings::new(Topology::Standalone(address))
    };
    let redis = Arc::new(Redis::start(settings, &Handle::current()));
    FallbackStore::new(redis, "inside", in_memory(), FallbackSettings::default())
}

/// Runs each test in memory and on Redis.
macro_rules! on_every_store {
    ($($test:ident),* $(,)?) => {
        mod in_memory {
            $(#[tokio::test(flavor = "multi_thread")]
            async fn $test() {
                super::$test(super::in_memory, super::Source::Memory).await;
            })*
        }

        mod on_redis {
            $(#[tokio::test(flavor = "multi_thread")]
            async fn $test() {
                let redis = super::task::block_in_place(super::RedisServer::start);
                let store = || {
                    redis.ask(&["FLUSHALL"]);
                    super::in_redis(&redis.url())
                };
                super::$test(store, super::Source::Redis).await;
            })*
        }
    };
}

on_every_store!(
    denied_requests_do_not_reach_the_handler,
    a_disconnected_client_leaves_the_queue,
    a_disconnected_client_frees_its_slot,
);
