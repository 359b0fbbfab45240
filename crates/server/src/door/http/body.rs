//! Reading a body: all of it, but not too much and not for too long.

use std::time::Duration;

use http_body_util::{BodyExt, LengthLimitError, Limited};
use hyper::body::{Body, Bytes, Incoming};

use super::Problem;

/// The most bytes of a request's body.
pub(crate) const MAX_BODY_BYTES: usize = 256 << 10;

/// Reads the whole of `body` within `time`.
pub(crate) async fn read(body: Incoming, time: Duration) -> Result<Bytes, Problem> {
    if body.size_hint().lower() > MAX_BODY_BYTES as u64 {
        return Err(Problem::too_large(MAX_BODY_BYTES));
    }
    let collected = tokio::time::timeout(time, Limited::new(body, MAX_BODY_BYTES).collect()).await;
    match collected {
        Ok(Ok(collected)) => Ok(collected.to_bytes()),
        Ok(Err(error)) if error.is::<LengthLimitError>() => Err(Problem::too_large(MAX_BODY_BYTES)),
        Ok(Err(error)) => Err(Problem::bad("body", format!("broke off: {error}"))),
        Err(_) => Err(Problem::timed_out()),
    }
}
