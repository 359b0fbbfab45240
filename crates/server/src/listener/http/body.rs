//! Reads request bodies up to a maximum size. The connection's
//! [`TimedStream`](tidegate_net::TimedStream) enforces the timeout.

use std::error::Error as _;

use futures_util::TryFutureExt as _;
use hyper::body::{Bytes, Incoming};
use tidegate_net::{BodyReadError, BoundedBody, Problem};

/// The maximum size of a request body, in bytes.
pub(crate) const MAX_BODY_BYTES: usize = 256 << 10;

/// Reads `body` completely.
pub(crate) fn read(body: Incoming) -> impl Future<Output = Result<Bytes, Problem>> {
    read_up_to(body, MAX_BODY_BYTES)
}

/// Reads `body` completely. The body may have at most `most` bytes.
pub(crate) fn read_up_to(
    body: Incoming,
    most: usize,
) -> impl Future<Output = Result<Bytes, Problem>> {
    let body = BoundedBody::new(body, most as u64);
    body.read().map_err(move |error| {
        let why = match error {
            BodyReadError::TooLarge => return Problem::too_large(most),
            // hyper's error only says where reading failed. The source of the error contains the
            // reason.
            BodyReadError::Aborted(error) => match error.source() {
                Some(cause) => cause.to_string(),
                None => error.to_string(),
            },
            BodyReadError::IdleTimeout => error.to_string(),
        };
        Problem::bad("body", format!("is incomplete: {why}"))
    })
}
