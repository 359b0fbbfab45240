//! Test helpers, such as limiters and a service that records its requests.

use std::{
    convert::Infallible,
    future::{Ready, ready},
    sync::{Arc, Mutex},
    task::{Context, Poll},
};

use bytes::Bytes;
use http::{HeaderMap, Request, Response};
use http_body_util::{BodyExt, Full};
use tidegate::Clock;
use tidegate_core::{
    AlgorithmName, Condition, LimitSpec, MemoryBounds, MemoryStore, Pattern, Rule, RuleSet,
    Timestamp, When, notation,
};
use tidegate_tower::{LongLivedPermit, RateLimit, RateLimitLayer, RateLimitStatus};
use tower::{Layer, Service, ServiceExt, service_fn, util::BoxCloneService};

pub(crate) type Limiter<S = MemoryStore> = tidegate::Limiter<S, tidegate::Rules>;

/// The start time of the tests. The time is midnight UTC, so that epoch-aligned windows start at
/// it.
const START: Timestamp = Timestamp::from_micros(1_700_006_400_000_000);

/// Creates a service that responds with an empty body and a clone of `permit`. A service that
/// upgrades connections also responds with an empty body.
pub(crate) fn with_permit(
    permit: &LongLivedPermit,
) -> BoxCloneService<Request<()>, Response<Full<Bytes>>, Infallible> {
    let permit = permit.clone();
    BoxCloneService::new(service_fn(move |_| {
        let mut response = Response::new(Full::default());
        response.extensions_mut().insert(permit.clone());
        ready(Ok(response))
    }))
}

/// A service that responds to every request and records the request.
#[derive(Clone, Debug, Default)]
pub(crate) struct Notes {
    requests: Arc<Mutex<Vec<(String, RateLimitStatus)>>>,
    answer: HeaderMap,
    is_ready: bool,
}

impl Notes {
    pub(crate) fn paths(&self) -> Vec<String> {
        let requests = self.requests.lock().unwrap();
        requests.iter().map(|(path, _)| path.clone()).collect()
    }

    pub(crate) fn last(&self) -> RateLimitStatus {
        self.requests.lock().unwrap().last().unwrap().1.clone()
    }

    pub(crate) fn with_header(mut self, name: &'static str, value: &'static str) -> Self {
        self.answer.insert(name, value.parse().unwrap());
        self
    }
}

impl Service<Request<()>> for Notes {
    type Response = Response<Full<Bytes>>;
    type Error = Infallible;
    type Future = Ready<Result<Self::Response, Infallible>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        self.is_ready = true;
        Poll::Ready(Ok(()))
    }

    /// Checks that this clone of the service was polled ready. The original service need not be
    /// polled.
    fn call(&mut self, request: Request<()>) -> Self::Future {
        assert!(
            std::mem::take(&mut self.is_ready),
            "called before it was polled ready"
        );
        let passed = request
            .extensions()
            .get::<RateLimitStatus>()
            .unwrap()
            .clone();
        let path = request.uri().path().to_owned();
        self.requests.lock().unwrap().push((path, passed));
        let mut response = Response::new(Full::from("served"));
        *response.headers_mut() = self.answer.clone();
        ready(Ok(response))
    }
}

/// A response whose body was read completely.
#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) status: u16,
    pub(crate) headers: HeaderMap,
    pub(crate) body: String,
}

impl Answer {
    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        Some(self.headers.get(name)?.to_str().unwrap())
    }
}

/// Returns a rule with one limit. The limit is given in the short form, such as `5/s`.
pub(crate) fn rule(name: &str, algorithm: AlgorithmName, rate: &str) -> Rule {
    let spec = LimitSpec::shorthand(notation::rate(rate).unwrap(), algorithm);
    Rule::new(name, vec![spec.build().unwrap()]).unwrap()
}

pub(crate) fn fixed(name: &str, rate: &str) -> Rule {
    rule(name, AlgorithmName::FixedWindow, rate)
}

pub(crate) fn on(path: &str) -> When {
    let pattern = Pattern::text(path).unwrap();
    When::all(vec![Condition::new("path", pattern).unwrap()])
}

pub(crate) fn limiter(rules: Vec<Rule>) -> Arc<Limiter> {
    limiter_on(MemoryStore::new(MemoryBounds::default()), rules)
}

pub(crate) fn limiter_on<S: tidegate_core::Store>(store: S, rules: Vec<Rule>) -> Arc<Limiter<S>> {
    let rules = RuleSet::build(rules, Vec::new()).unwrap();
    Arc::new(Limiter::new(rules, store, Clock::manual(START)))
}

/// Creates a service that records its requests, behind a limiter with `rules`.
pub(crate) fn limited(rules: Vec<Rule>) -> (Notes, RateLimit<Notes, Limiter>) {
    let notes = Notes::default();
    let service = RateLimitLayer::new(limiter(rules)).layer(notes.clone());
    (notes, service)
}

pub(crate) fn get(uri: &str) -> Request<()> {
    Request::builder().uri(uri).body(()).unwrap()
}

/// Sends `request` and reads the response.
pub(crate) async fn send<S, R>(service: &mut S, request: Request<()>) -> Answer
where
    S: Service<Request<()>, Response = Response<R>, Error = Infallible>,
    R: http_body::Body<Data = Bytes, Error = Infallible>,
{
    let response = service.ready().await.unwrap().call(request).await.unwrap();
    read(response).await
}

pub(crate) async fn read<R>(response: Response<R>) -> Answer
where
    R: http_body::Body<Data = Bytes, Error = Infallible>,
{
    let (parts, body) = response.into_parts();
    let body = body.collect().await.unwrap().to_bytes();
    Answer {
        status: parts.status.as_u16(),
        headers: parts.headers,
        body: String::from_utf8(body.to_vec()).unwrap(),
    }
}

/// Returns the statuses of `count` requests for `uri`.
pub(crate) async fn statuses<S, R>(service: &mut S, uri: &str, count: usize) -> Vec<u16>
where
    S: Service<Request<()>, Response = Response<R>, Error = Infallible>,
    R: http_body::Body<Data = Bytes, Error = Infallible>,
{
    let mut statuses = Vec::new();
    for _ in 0..count {
        statuses.push(send(service, get(uri)).await.status);
    }
    statuses
}
