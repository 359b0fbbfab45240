//! Reads request bodies of limited size. [`TimedStream`](super::stream::TimedStream) limits the
//! time.

use std::error::Error as _;

use http_body_util::BodyExt;
use hyper::body::{Body, Bytes, Incoming};
use tidegate_net::Problem;

/// The maximum size of a request body, in bytes.
pub(crate) const MAX_BODY_BYTES: usize = 256 << 10;

/// Reads the whole of `body`.
pub(crate) async fn read(mut body: Incoming) -> Result<Bytes, Problem> {
    if body.size_hint().lower() > MAX_BODY_BYTES as u64 {
        return Err(Problem::too_large(MAX_BODY_BYTES));
    }
    let first = next(&mut body).await?.unwrap_or_default();
    // Nearly every body arrives in one piece, which needs no copy.
    if body.is_end_stream() {
        return Ok(first);
    }
    let mut whole = first.to_vec();
    while let Some(piece) = next(&mut body).await? {
        if piece.len() > MAX_BODY_BYTES - whole.len() {
            return Err(Problem::too_large(MAX_BODY_BYTES));
        }
        whole.extend_from_slice(&piece);
    }
    Ok(whole.into())
}

async fn next(body: &mut Incoming) -> Result<Option<Bytes>, Problem> {
    while let Some(frame) = body.frame().await {
        let frame = frame.map_err(|error| {
            // hyper's error says where it failed; the source of the error says why.
            let cause = error.source().map(ToString::to_string);
            let why = cause.unwrap_or_else(|| error.to_string());
            Problem::bad("body", format!("is incomplete: {why}"))
        })?;
        // Trailers are ignored.
        if let Ok(piece) = frame.into_data() {
            return Ok(Some(piece));
        }
    }
    Ok(None)
}
