//! Runs HTTP endpoints without sockets, for fuzzing.

use std::{
    cell::RefCell,
    net::{IpAddr, Ipv4Addr},
    sync::Arc,
    task::{Context, Poll, Waker},
};

use futures_util::FutureExt as _;
use hyper::{HeaderMap, StatusCode, body::Body as _};
use tidegate_limiter::ServerLimiter;
use tidegate_net::{Problem, Shutdown, auth::Authenticator, response::Answer};
use tidegate_tower::{HeaderWriter, Legacy};

use super::{HttpConnectionContext, HttpEndpoint, close_watch::CloseWatch};

/// Handles a request to `endpoint` with this body, without a socket. Returns the status and body of
/// the response. Does not support a Redis-backed limiter.
#[must_use]
pub fn transcript(
    limiter: &Arc<ServerLimiter>,
    endpoint: HttpEndpoint,
    body: &[u8],
) -> (u16, Vec<u8>) {
    let context = HttpConnectionContext {
        limiter: Arc::clone(limiter),
        rate_limits: None,
        headers: RefCell::new(HeaderWriter::new(true, Legacy::Delta)),
        identity: Arc::default(),
        peer: IpAddr::V4(Ipv4Addr::LOCALHOST),
        shutdown: Shutdown::default(),
        authenticator: Arc::new(Authenticator::new("http", None, limiter.clock().clone())),
        hosts: Arc::default(),
        close: CloseWatch::default(),
    };
    let alone =
        "only the memory store can decide here, because a decision by Redis must be awaited";
    let refused = || Err(Problem::new(StatusCode::SERVICE_UNAVAILABLE, alone));
    // A decision in memory completes without waiting, so one poll is sufficient.
    let answer = context
        .answer_body(endpoint, &HeaderMap::new(), body)
        .now_or_never();
    let answer = answer.unwrap_or_else(refused);
    let answer = answer.unwrap_or_else(|problem| context.refuse(problem));
    (answer.status().as_u16(), body_of(answer))
}

/// Returns the bytes of a response body that is complete in memory.
fn body_of(answer: Answer) -> Vec<u8> {
    let body = std::pin::pin!(answer.into_body());
    match body.poll_frame(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(Some(Ok(frame))) => frame.into_data().unwrap_or_default().to_vec(),
        _ => Vec::new(),
    }
}
