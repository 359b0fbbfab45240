//! Applications in this process, whose handlers count how often they are called: limited in memory, and in Redis.

use std::{
    io::{Read, Write},
    net::{SocketAddr, TcpStream},
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use axum::{Router, routing::get};
use tidegate_core::{
    Algorithm, Cost, Effect, Limit, Rate, Request, Rule, Scratch, Source, Span, Store,
};
use tidegate_examples::{
    greeter::{
        GreetRequest, GreetResponse,
        greeter_client::GreeterClient,
        greeter_server::{Greeter, GreeterServer},
    },
    in_memory, in_redis, limit, rule_set,
};
use tidegate_http::{Clock, Gate, Limiter, LimiterLayer};
use tokio::{net::TcpListener, task, time};
use tonic::{
    Code, Response, Status,
    transport::server::{Server, TcpIncoming},
};

use crate::support::{PATIENCE, RedisServer};

/// How often a handler was called.
type Calls = Arc<AtomicUsize>;

struct App<S> {
    address: SocketAddr,
    calls: Calls,
    limiter: Arc<Limiter<S>>,
}

/// What is behind the limiter.
#[derive(Clone, Copy)]
enum Framework {
    Axum,
    Tonic,
}

impl<S: Store + 'static> App<S> {
    async fn start(framework: Framework, limit: Limit, store: S) -> Self {
        let rules = rule_set(vec![Rule::new("all", vec![limit]).unwrap()]).unwrap();
        let limiter = Arc::new(Limiter::new(rules, store, Clock::real()));
        let limits = LimiterLayer::new(Arc::clone(&limiter)).longest_wait(Span::from_secs(86_400));
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let app = Self {
            address: listener.local_addr().unwrap(),
            calls: Calls::default(),
            limiter,
        };
        let calls = Arc::clone(&app.calls);
        match framework {
            Framework::Axum => {
                let called =
                    move || async move { calls.fetch_add(1, Ordering::SeqCst).to_string() };
                let router = Router::new().route("/", get(called)).layer(limits);
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

    /// Whether a request would pass now, and who says so.
    async fn would_pass(&self) -> (bool, Source) {
        let request = Request::new(&[], Cost::ONE).unwrap();
        let (rules, mut scratch) = (self.limiter.rules(), Scratch::default());
        let verdict = self
            .limiter
            .check(&rules, &mut scratch, &request, Effect::Peek);
        let verdict = verdict.await.unwrap();
        (verdict.allowed, verdict.source)
    }

    /// Waits until a request would pass, or would not, as far as `source` knows.
    async fn until(&self, allowed: bool, source: Source) {
        let pause = Duration::from_millis(10);
        for _ in 0..PATIENCE.as_millis() / pause.as_millis() {
            if self.would_pass().await == (allowed, source) {
                return;
            }
            time::sleep(pause).await;
        }
        panic!("it never came to this: allowed {allowed}, as {source:?} says");
    }
}

struct Counted(Calls);

#[tonic::async_trait]
impl Greeter for Counted {
    async fn greet(
        &self,
        _: tonic::Request<GreetRequest>,
    ) -> Result<Response<GreetResponse>, Status> {
        let greeting = self.0.fetch_add(1, Ordering::SeqCst).to_string();
        Ok(Response::new(GreetResponse { greeting }))
    }
}

async fn greet(address: SocketAddr) -> Result<(), Code> {
    let client = GreeterClient::connect(format!("http://{address}")).await;
    let request = GreetRequest {
        name: "you".to_owned(),
    };
    let greeted = client.unwrap().greet(request).await;
    greeted.map(drop).map_err(|status| status.code())
}

/// A request on a connection of its own, which is the caller's to read or to drop.
fn get_root(address: SocketAddr) -> TcpStream {
    let mut stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    let request = "GET / HTTP/1.1\r\nhost: example.org\r\nconnection: close\r\n\r\n";
    stream.write_all(request.as_bytes()).unwrap();
    stream
}

fn status(mut stream: TcpStream) -> String {
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    answer.split(' ').nth(1).unwrap().to_owned()
}

/// Three pass, and the handler knows of no more.
async fn denials_cost_the_handler_nothing<S: Store + 'static>(
    store: impl Fn() -> S,
    source: Source,
) {
    let app = App::start(Framework::Axum, limit("3/h").unwrap(), store()).await;
    app.until(true, source).await;
    let asked = || {
        (0..9)
            .filter(|_| status(get_root(app.address)) == "200")
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
        assert_eq!(greet(app.address).await, expected);
    }
    assert_eq!(app.calls(), 4);
}

/// One is served an hour, and another may wait.
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

async fn whoever_is_gone_leaves_the_queue<S: Store + 'static>(
    store: impl Fn() -> S,
    source: Source,
) {
    let app = App::start(Framework::Axum, queue(), store()).await;
    app.until(true, source).await;
    assert_eq!(
        task::block_in_place(|| status(get_root(app.address))),
        "200"
    );
    for _ in 0..3 {
        let waiting = task::block_in_place(|| get_root(app.address));
        app.until(false, source).await;
        drop(waiting);
        app.until(true, source).await;
    }
    assert_eq!(app.calls(), 1);

    let app = App::start(Framework::Tonic, queue(), store()).await;
    app.until(true, source).await;
    assert_eq!(greet(app.address).await, Ok(()));
    for _ in 0..3 {
        let waiting = tokio::spawn(greet(app.address));
        app.until(false, source).await;
        waiting.abort();
        app.until(true, source).await;
    }
    assert_eq!(app.calls(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn denials_cost_the_handler_nothing_in_memory() {
    denials_cost_the_handler_nothing(in_memory, Source::Memory).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn denials_cost_the_handler_nothing_on_redis() {
    let redis = task::block_in_place(RedisServer::start);
    let store = || {
        redis.ask(&["FLUSHALL"]);
        in_redis(&redis.url()).unwrap()
    };
    denials_cost_the_handler_nothing(store, Source::Redis).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn whoever_is_gone_leaves_the_queue_in_memory() {
    whoever_is_gone_leaves_the_queue(in_memory, Source::Memory).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn whoever_is_gone_leaves_the_queue_on_redis() {
    let redis = task::block_in_place(RedisServer::start);
    let store = || {
        redis.ask(&["FLUSHALL"]);
        in_redis(&redis.url()).unwrap()
    };
    whoever_is_gone_leaves_the_queue(store, Source::Redis).await;
}
