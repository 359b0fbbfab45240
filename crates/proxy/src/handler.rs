//! The request handler: forwards a request to an upstream and returns the response.
//!
//! ```text
//! Upstreams::route    picks the upstream; the head was normalised by `crate::normalise`
//! forwarded           adds forwarding headers: here for HTTP/2, in `upstream::h1` for HTTP/1.1
//! Dispatcher          gets a connection, sends the request, awaits the response head
//! ResponseBody        streams the response body; at its end the connection returns to the pool
//! ```
//!
//! A request is retried in only two cases:
//!
//! - The upstream received no part of the request.
//! - A reused connection was closed before the first byte of the response, and the request is
//!   repeatable: it is idempotent and has no body.

use std::{
    convert::Infallible,
    future::Future,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
};

use http::{
    HeaderValue, Method, Version,
    header::{CONTENT_LENGTH, UPGRADE, VIA},
    request::Parts,
};
use hyper::{Request, Response, StatusCode, body::Bytes, upgrade::OnUpgrade};
use tidegate_limiter::trace;
use tidegate_tower::LongLivedPermit;
use tower_service::Service;

use super::{
    access_log::{LoggedUpstream, UpgradedSession},
    client_limit::ClientRequests,
    error::ProxyError,
    headers::{forwarded::ForwardingHeaders, hop_by_hop, lookup, target},
    permit::PausablePermit,
    request_body::{RequestBody, Upload, UploadLimits, UploadProgress},
    response_body::{self, ResponseBody, StreamingOptions},
    runtime::ProxyRuntime,
    tunnel::{PendingTunnel, Tunnel},
    upstream::{
        balancer::Upstream,
        checkout::Checkout,
        connection::ResponseSource,
        dispatch::{Dispatcher, PendingRequest},
    },
};

/// The service that forwards the requests of one client connection.
#[derive(Clone, Debug)]
pub(crate) struct ProxyHandler(Arc<HandlerContext>);

/// The context that all requests of a client connection share.
#[derive(Debug)]
pub(crate) struct HandlerContext {
    pub(crate) runtime: Arc<ProxyRuntime>,
    pub(crate) forwarding: Arc<ForwardingHeaders>,
    /// The counter of the client's requests in flight, if they are limited.
    pub(crate) in_flight: Option<Arc<ClientRequests>>,
    pub(crate) worker: usize,
    /// The tunnel to start once the `101` response is sent.
    pub(crate) pending_tunnel: PendingTunnel,
    /// Whether to store the upstream's name in response extensions for the access log.
    pub(crate) logs_upstream: bool,
}

impl ProxyHandler {
    pub(crate) fn new(context: HandlerContext) -> Self {
        Self(Arc::new(context))
    }
}

/// The handler is always ready. The handler never fails, because every error becomes a response.
impl Service<Request<RequestBody>> for ProxyHandler {
    type Response = Response<ResponseBody>;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Response<ResponseBody>, Infallible>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<RequestBody>) -> Self::Future {
        let context = Arc::clone(&self.0);
        let grpc_content_type =
            tidegate_tower::grpc_content_type(request.method(), request.headers()).cloned();
        // Run the synchronous part outside the future, to keep the future that waits for the
        // response small.
        let routed = context.route_and_send(request);
        Box::pin(async move {
            Ok(match routed {
                Ok(routed) => {
                    context
                        .await_response(routed, grpc_content_type.as_ref())
                        .await
                }
                Err(rejected) => context.reject(rejected, grpc_content_type.as_ref()),
            })
        })
    }
}

/// A protocol upgrade that the client offers.
struct UpgradeOffer {
    protocol: HeaderValue,
    /// The client side of the connection after the upgrade.
    client: OnUpgrade,
}

/// A request for which an upstream has been selected. If a pooled connection was available, the
/// request is already being sent.
struct RoutedRequest {
    dispatcher: Dispatcher,
    upstream: Arc<Upstream>,
    upgrade: Option<UpgradeOffer>,
    /// The progress of sending the request body.
    progress: UploadProgress,
    /// The request's concurrency permit, if the upstream has an adaptive concurrency limit.
    permit: Option<PausablePermit>,
    pending: PendingRequest,
    is_head: bool,
}

/// A request that is rejected before it is sent to an upstream.
struct RejectedRequest {
    error: ProxyError,
    /// The upstream of the request, if one was selected.
    upstream: Option<Arc<Upstream>>,
}

impl From<ProxyError> for RejectedRequest {
    fn from(error: ProxyError) -> Self {
        Self {
            error,
            upstream: None,
        }
    }
}

impl HandlerContext {
    fn route_and_send(
        &self,
        mut request: Request<RequestBody>,
    ) -> Result<RoutedRequest, RejectedRequest> {
        // The head is normalised, so an `Upgrade` header in it is a valid offer of one protocol.
        let protocol = lookup::first(request.headers(), &UPGRADE).cloned();
        let upgrade = protocol.map(|protocol| UpgradeOffer {
            protocol,
            client: hyper::upgrade::on(&mut request),
        });
        let is_head = *request.method() == Method::HEAD;
        let (mut head, body) = request.into_parts();
        let dispatcher = Dispatcher::new(self.runtime.current(), self.worker);
        let settings = &dispatcher.current.settings;
        let upstream = Arc::clone(dispatcher.current.upstreams.route(&head)?);
        trace::inject(&mut head.headers);
        let rejected = |error| RejectedRequest {
            error,
            upstream: Some(Arc::clone(&upstream)),
        };
        let max_bytes = settings.max_body.unwrap_or(u64::MAX);
        let permit = acquire_permit(&upstream, &mut head, max_bytes).map_err(rejected)?;
        if let Some(scheme) = &upstream.http2 {
            self.forwarding.write(head.version, &mut head.headers);
            target::to_http2(&mut head, scheme).map_err(rejected)?;
        } else {
            hop_by_hop::set_connection(&mut head.headers);
        }
        let limits = UploadLimits {
            max_bytes,
            idle: settings.timeouts.idle,
            // Do not enforce a minimum rate for HTTP/2 upstreams: a slow body occupies only a
            // stream and not a connection, and gRPC streams may be idle.
            min_rate: settings.slow.min_rate.filter(|_| upstream.http2.is_none()),
        };
        let handle = permit
            .as_ref()
            .map(PausablePermit::handle)
            .unwrap_or_default();
        let upload = Upload::new(body, limits, handle);
        let progress = upload.progress();
        let request = Request::from_parts(head, upload);
        let pending = dispatcher.try_send_idle(&upstream, request, &self.forwarding);
        Ok(RoutedRequest {
            dispatcher,
            upstream,
            upgrade,
            progress,
            permit,
            pending,
            is_head,
        })
    }

    async fn await_response(
        &self,
        routed: RoutedRequest,
        grpc_content_type: Option<&HeaderValue>,
    ) -> Response<ResponseBody> {
        let RoutedRequest {
            dispatcher,
            upstream,
            upgrade,
            progress,
            permit,
            pending,
            is_head,
        } = routed;
        let result = dispatcher
            .response_head(&upstream, pending, &self.forwarding, &progress)
            .await;
        let settings = &dispatcher.current.settings;
        let result = result.and_then(|(response, checkout)| {
            let options = StreamingOptions {
                idle: settings.timeouts.idle,
                slow: settings.slow,
                progress: progress.clone(),
            };
            let upstream_response = UpstreamResponse {
                response,
                checkout,
                options,
                is_head,
            };
            self.build_response(upstream_response, upgrade)
        });
        let result = result.map(|mut response| {
            if let Some(via) = &settings.heads.via {
                let received = response.version();
                let element = via.element(received).clone();
                response.headers_mut().append(VIA, element);
            }
            *response.version_mut() = Version::HTTP_11;
            if progress.is_complete_without_trailers() {
                response.extensions_mut().insert(CompleteRequest);
            }
            response
        });
        if let Some(permit) = permit.and_then(PausablePermit::take) {
            match &result {
                Ok(response) => permit.finish(response),
                Err(error) if error.is_of_upstream() => permit.fail(),
                Err(_) => permit.ignore(),
            }
        }
        match &result {
            Ok(response) => upstream
                .metrics
                .count_response(self.worker, response.status()),
            Err(error) => upstream.metrics.count_failure(self.worker, *error),
        }
        let mut response = result.unwrap_or_else(|error| {
            error
                .response(grpc_content_type)
                .map(ResponseBody::complete)
        });
        if self.logs_upstream {
            let logged = LoggedUpstream::new(&upstream, dispatcher.last_endpoint(&upstream));
            response.extensions_mut().insert(logged);
        }
        response
    }

    /// Builds the response for the client. `upgrade` is present if the client offered a protocol
    /// upgrade. If the upstream accepts the offer, the tunnel is stored in `pending_tunnel`.
    fn build_response(
        &self,
        upstream_response: UpstreamResponse,
        upgrade: Option<UpgradeOffer>,
    ) -> Result<Response<ResponseBody>, ProxyError> {
        let UpstreamResponse {
            response,
            checkout,
            options,
            is_head,
        } = upstream_response;
        if response.status() == StatusCode::SWITCHING_PROTOCOLS {
            // An upstream may switch only to a protocol that the client offered.
            let offer = upgrade.ok_or(ProxyError::BadResponse)?;
            let protocol = hop_by_hop::switched_protocol(response.headers(), &offer.protocol);
            let protocol = protocol.ok_or(ProxyError::BadResponse)?;
            let (mut head, _) = response.into_parts();
            hop_by_hop::strip_response(&mut head.headers);
            hop_by_hop::set_upgrade(&mut head.headers, protocol);
            let rate_limit_permit = LongLivedPermit::default();
            head.extensions.insert(rate_limit_permit.clone());
            let session = UpgradedSession::default();
            head.extensions.insert(session.clone());
            self.pending_tunnel.set(Tunnel {
                rate_limit_permit,
                session,
                client: offer.client,
                checkout,
                in_flight: self.in_flight.as_ref().map(ClientRequests::begin_unlimited),
            });
            return Ok(Response::from_parts(
                head,
                ResponseBody::complete(Bytes::new()),
            ));
        }
        let (mut head, body) = response.into_parts();
        hop_by_hop::strip_response(&mut head.headers);
        let body = if is_head {
            // Drop the upstream body: an HTTP/1.1 upgrade response has no body, and dropping an
            // HTTP/2 body resets its stream.
            drop(body);
            response_body::finish(checkout, &options.progress);
            ResponseBody::complete(Bytes::new())
        } else {
            ResponseBody::streaming(body, checkout, options)
        };
        Ok(Response::from_parts(head, body))
    }

    fn reject(
        &self,
        rejected: RejectedRequest,
        grpc_content_type: Option<&HeaderValue>,
    ) -> Response<ResponseBody> {
        let mut response = rejected
            .error
            .response(grpc_content_type)
            .map(ResponseBody::complete);
        if let Some(upstream) = rejected.upstream
            && self.logs_upstream
        {
            response
                .extensions_mut()
                .insert(LoggedUpstream::new(&upstream, None));
        }
        response
    }
}

/// A response extension for a request whose body has arrived completely and without trailers. The
/// next bytes on the client connection belong to the next request.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CompleteRequest;

/// A response to return to the client, with the options for streaming its body.
struct UpstreamResponse {
    response: Response<ResponseSource>,
    checkout: Checkout,
    options: StreamingOptions,
    /// Whether the request was a `HEAD`.
    is_head: bool,
}

/// Checks that the declared body length is at most `max_bytes`. Then acquires a concurrency permit
/// for the request, if `upstream` has an adaptive concurrency limit.
fn acquire_permit(
    upstream: &Upstream,
    head: &mut Parts,
    max_bytes: u64,
) -> Result<Option<PausablePermit>, ProxyError> {
    if body_length(head).is_some_and(|length| length > max_bytes) {
        return Err(ProxyError::TooLarge(max_bytes));
    }
    let Some(concurrency) = &upstream.concurrency else {
        return Ok(None);
    };
    let permit = concurrency.acquire(&mut head.extensions);
    Ok(Some(PausablePermit::new(
        permit.ok_or(ProxyError::Overloaded)?,
    )))
}

/// Returns the value of `Content-Length`, if there is one.
fn body_length(head: &Parts) -> Option<u64> {
    let length = lookup::first(&head.headers, &CONTENT_LENGTH)?;
    length.to_str().ok()?.parse().ok()
}
