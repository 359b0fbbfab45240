//! Reads the body of a request if the cost of a rule depends on it.
//!
//! A request to which a rule with a body cost applies waits in this module until its body has
//! arrived. The rule then charges the cost, and the request is forwarded with its body unchanged.
//! This module does not read the bodies of other requests.

use std::{
    convert::Infallible,
    fmt,
    future::poll_fn,
    pin::pin,
    sync::Arc,
    task::{Context, Poll},
};

use bytes::Bytes;
use futures_util::future::{Either, LocalBoxFuture};
use http::{
    Request, Response,
    header::{CONTENT_ENCODING, CONTENT_LENGTH},
    request::Parts,
};
use http_body_util::BodyExt as _;
use hyper::body::{Body as HttpBody, Incoming};
use tidegate_core::BodyNumbers;
use tidegate_net::{BodyReadError, BoundedBody, IdleTimeout};
use tidegate_tower::{BodyCosts, LimitedBody, RateLimitLayer, RuleBodyCost};
use tower_service::Service;

use super::{
    bad_request::BODY_COST,
    error::{ErrorReason, ProxyError},
    headers::lookup,
    inspected_bytes::InspectedBytes,
    json_numbers::{JsonNumbers, NumberError},
    rate_limit::ProxyLimiter,
    request_body::{BufferedBody, RequestBody},
    response_body::ResponseBody,
    runtime::ProxyRuntime,
};

/// The context that all requests of a connection share.
#[derive(Debug)]
pub(crate) struct BodyCostContext {
    pub(crate) runtime: Arc<ProxyRuntime>,
    /// Finds the rules whose cost depends on the body.
    pub(crate) layer: RateLimitLayer<ProxyLimiter>,
}

/// A service that reads request costs from request bodies. The inner service must always be ready.
#[derive(Clone, Debug)]
pub(crate) struct BodyCostService<S> {
    inner: S,
    context: Arc<BodyCostContext>,
}

impl<S> BodyCostService<S> {
    pub(crate) fn new(inner: S, context: BodyCostContext) -> Self {
        Self {
            inner,
            context: Arc::new(context),
        }
    }
}

impl<S> Service<Request<Incoming>> for BodyCostService<S>
where
    S: Service<
            Request<RequestBody>,
            Response = Response<LimitedBody<ResponseBody>>,
            Error = Infallible,
        > + Clone
        + 'static,
{
    type Response = S::Response;
    type Error = Infallible;
    type Future = Either<S::Future, LocalBoxFuture<'static, Result<S::Response, Infallible>>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        self.inner.poll_ready(cx)
    }

    fn call(&mut self, request: Request<Incoming>) -> Self::Future {
        let (mut head, body) = request.into_parts();
        if self.context.layer.body_cost_rules(&head).is_empty() {
            let request = Request::from_parts(head, RequestBody::Incoming(body));
            return Either::Left(self.inner.call(request));
        }
        let (mut inner, context) = (self.inner.clone(), Arc::clone(&self.context));
        Either::Right(Box::pin(async move {
            let undecided = context.runtime.mark_undecided();
            match context.read(&mut head, body).await {
                Ok(body) => {
                    let mut response = pin!(inner.call(Request::from_parts(head, body)));
                    let first = poll_fn(|cx| Poll::Ready(response.as_mut().poll(cx))).await;
                    // The request is decided now, or waits for a concurrency slot.
                    drop(undecided);
                    match first {
                        Poll::Ready(response) => response,
                        Poll::Pending => response.await,
                    }
                }
                Err(reply) => Ok(reply.map(LimitedBody::denial)),
            }
        }))
    }
}

type LocalReply = Box<Response<Bytes>>;

impl BodyCostContext {
    /// Reads `body`, and adds the rules' costs to the extensions of `head`. Returns a response if
    /// the body cannot be read or does not contain a valid cost.
    async fn read(&self, head: &mut Parts, body: Incoming) -> Result<RequestBody, LocalReply> {
        if !is_plain(head) {
            return Err(self.reject(head, &"content-encoding: a rule reads the cost of the request from its body, so the body must not be compressed"));
        }
        let body = match self.collect(head, body).await {
            Ok(body) => body,
            Err(error) => {
                self.runtime.bad_requests().count(error);
                let call = tidegate_tower::grpc_content_type(&head.method, &head.headers);
                return Err(Box::new(error.response(call)));
            }
        };
        // Look up the rules again, because a reload may have changed the rules while the body
        // arrived.
        let rules = self.layer.body_cost_rules(head);
        match costs(&rules, &body.data) {
            Ok(costs) => {
                head.extensions.insert(costs);
                Ok(RequestBody::Buffered(body))
            }
            Err(error) => Err(self.reject(head, &error)),
        }
    }

    fn reject(&self, head: &Parts, error: &dyn fmt::Display) -> LocalReply {
        self.runtime.bad_requests().count_reason(BODY_COST);
        let mut response = self.layer.malformed_response(error, head);
        response.extensions_mut().insert(ErrorReason(BODY_COST));
        Box::new(response)
    }

    /// Reads the whole body.
    async fn collect(&self, head: &Parts, body: Incoming) -> Result<BufferedBody, ProxyError> {
        let settings = Arc::clone(&self.runtime.current().settings);
        let max_bytes = settings
            .max_inspected_body
            .min(settings.max_body.unwrap_or(u64::MAX));
        let length = lookup::first(&head.headers, &CONTENT_LENGTH)
            .and_then(|length| length.to_str().ok()?.parse::<u64>().ok());
        if length.is_some_and(|length| length > max_bytes) {
            return Err(ProxyError::TooLarge(max_bytes));
        }
        let timeout = IdleTimeout::with_min_rate(settings.timeouts.idle, settings.slow.min_rate);
        let mut incoming = BoundedBody::new(body, max_bytes).with_idle_timeout(timeout);
        let mut data = Vec::new();
        let mut had_trailers = false;
        let mut memory = InspectedBytes::default();
        while !incoming.is_end_stream() {
            let Some(frame) = incoming.frame().await else {
                break;
            };
            let frame = frame.map_err(|error| match error {
                BodyReadError::IdleTimeout => ProxyError::BodyTooSlow,
                BodyReadError::TooLarge => ProxyError::TooLarge(max_bytes),
                BodyReadError::Aborted(_) => ProxyError::BodyAborted,
            })?;
            match frame.into_data() {
                Ok(piece) => {
                    if !memory.add(piece.len()) {
                        return Err(ProxyError::Overloaded);
                    }
                    data.extend_from_slice(&piece);
                }
                Err(_) => had_trailers = true,
            }
        }
        Ok(BufferedBody {
            data: data.into(),
            had_trailers,
            memory,
        })
    }
}

/// Returns whether the body is not compressed.
fn is_plain(head: &Parts) -> bool {
    let mut encodings = head.headers.get_all(CONTENT_ENCODING).iter();
    encodings.all(|encoding| encoding.as_bytes().eq_ignore_ascii_case(b"identity"))
}

/// The reason why the cost of a request cannot be read from its body.
#[derive(Debug)]
enum BodyCostError<'r> {
    /// The body is not a JSON document. The variant contains the reason.
    NotJson(String),
    /// The value at `pointer` is not a number from `least` to `most`.
    NotANumber {
        pointer: &'r str,
        error: NumberError,
        least: u64,
        most: u64,
    },
}

impl fmt::Display for BodyCostError<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NotJson(problem) => write!(
                f,
                "body: a rule reads the cost of the request from the body, but the body is not a JSON document: {problem}"
            ),
            Self::NotANumber {
                pointer,
                error: NumberError::Duplicate,
                ..
            } => write!(f, "body: {pointer} occurs twice; send it once"),
            Self::NotANumber {
                pointer,
                least,
                most,
                ..
            } => write!(
                f,
                "body: {pointer} must be an integer from {least} to {most}"
            ),
        }
    }
}

/// Returns the costs of a request with this body under `rules`.
fn costs<'r>(rules: &'r [RuleBodyCost], body: &[u8]) -> Result<BodyCosts, BodyCostError<'r>> {
    let pointers = rules.iter().flat_map(|rule| {
        let cost = rule.body_cost();
        cost.output.iter().chain(&cost.times)
    });
    // A request without a body contains no numbers, so the default cost of each rule is charged.
    let numbers = if body.is_empty() {
        JsonNumbers::default()
    } else {
        JsonNumbers::read(body, pointers)
            .map_err(|error| BodyCostError::NotJson(error.to_string()))?
    };
    // The cast cannot truncate, because a length in memory fits in 64 bits.
    let bytes = body.len() as u64;
    let mut costs = BodyCosts::default();
    for rule in rules {
        let numbers = numbers_of(rule, &numbers, bytes)?;
        costs = costs.with(rule, rule.cost_of(numbers));
    }
    Ok(costs)
}

fn numbers_of<'r>(
    rule: &'r RuleBodyCost,
    found: &JsonNumbers,
    bytes: u64,
) -> Result<BodyNumbers, BodyCostError<'r>> {
    let cost = rule.body_cost();
    let number = |pointer: &'r str, least: u64| {
        let not_a_number = |error| BodyCostError::NotANumber {
            pointer,
            error,
            least,
            most: cost.max,
        };
        let number = found.get(pointer).map_err(not_a_number)?;
        match number {
            Some(number) if !(least..=cost.max).contains(&number) => {
                Err(not_a_number(NumberError::NotANumber))
            }
            number => Ok(number),
        }
    };
    let mut output = None;
    for pointer in &cost.output {
        // If several of these JSON fields are present, different upstreams use different fields, so
        // the largest number is charged. Some upstreams treat 0 as unlimited, so the number 0
        // counts as missing.
        output = output.max(number(pointer.as_str(), 0)?.filter(|number| *number > 0));
    }
    let times = match &cost.times {
        Some(pointer) => number(pointer.as_str(), 1)?,
        None => None,
    };
    Ok(BodyNumbers {
        output,
        times,
        bytes,
    })
}
