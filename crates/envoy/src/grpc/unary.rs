//! Handles unary calls without tonic.
//!
//! Envoy makes one unary call for each request that it receives, so unary calls dominate the CPU
//! cost. tonic prepares every call for streaming, compression and metadata in both directions,
//! which takes two 8 KiB buffers and about six allocations. A unary call needs neither streaming
//! nor compression nor metadata.

use std::{
    convert::Infallible,
    future::Future,
    pin::Pin,
    task::{Context, Poll},
};

use bytes::{Buf as _, BufMut as _, Bytes, BytesMut};
use http::{
    HeaderMap, HeaderValue, Method, Request, Response, StatusCode,
    header::{ALLOW, CONTENT_TYPE},
};
use http_body::{Frame, SizeHint};
use hyper::body::Incoming;
use prost::Message;
use tidegate_net::{BodyReadError, BoundedBody};
use tonic::{Status, body::Body};

use super::MAX_MESSAGE_BYTES;

/// The length in bytes of the message prefix, which contains the compression flag and the message
/// length.
const PREFIX_BYTES: usize = 5;

const GRPC: HeaderValue = HeaderValue::from_static("application/grpc");

/// The body of a response.
pub(super) enum GrpcResponseBody {
    /// One message, followed by the trailers of a successful call.
    Message(Option<Bytes>, Option<HeaderMap>),
    /// The response of a tonic service.
    Streamed(Body),
}

impl http_body::Body for GrpcResponseBody {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        match self.get_mut() {
            Self::Message(message, trailers) => {
                let frame = message.take().map(Frame::data);
                let frame = frame.or_else(|| trailers.take().map(Frame::trailers));
                Poll::Ready(frame.map(Ok))
            }
            Self::Streamed(body) => Pin::new(body).poll_frame(cx),
        }
    }

    fn is_end_stream(&self) -> bool {
        match self {
            Self::Message(_, trailers) => trailers.is_none(),
            Self::Streamed(body) => body.is_end_stream(),
        }
    }

    fn size_hint(&self) -> SizeHint {
        match self {
            Self::Message(..) => SizeHint::default(),
            Self::Streamed(body) => body.size_hint(),
        }
    }
}

/// Reads the request message and passes it, or the read error, to `answer`. Responds to the call
/// with the result of `answer`.
pub(super) async fn call<M, F>(
    request: Request<Incoming>,
    answer: impl FnOnce(Result<Bytes, Status>) -> F,
) -> Result<Response<GrpcResponseBody>, Infallible>
where
    M: Message,
    F: Future<Output = Result<M, Status>>,
{
    if let Some(refusal) = refusal(&request) {
        return Ok(refusal);
    }
    let answered = answer(message(request.into_body()).await).await;
    Ok(answered.map_or_else(|status| failure(&status), |message| success(&message)))
}

/// Builds the response to a call that failed with `status`.
pub(super) fn failure(status: &Status) -> Response<GrpcResponseBody> {
    status.clone().into_http().map(GrpcResponseBody::Streamed)
}

/// Builds the response to a request that is not gRPC; `None` for a gRPC request.
fn refusal(request: &Request<Incoming>) -> Option<Response<GrpcResponseBody>> {
    let is_grpc = |value: &HeaderValue| value.as_bytes().starts_with(GRPC.as_bytes());
    let mut refusal = Response::new(GrpcResponseBody::Streamed(Body::empty()));
    if request.method() != Method::POST {
        *refusal.status_mut() = StatusCode::METHOD_NOT_ALLOWED;
        refusal
            .headers_mut()
            .insert(ALLOW, HeaderValue::from_static("POST"));
        return Some(refusal);
    }
    if !request.headers().get(CONTENT_TYPE).is_some_and(is_grpc) {
        *refusal.status_mut() = StatusCode::UNSUPPORTED_MEDIA_TYPE;
        return Some(refusal);
    }
    None
}

/// Reads the single message of a call.
async fn message(body: Incoming) -> Result<Bytes, Status> {
    let body = BoundedBody::new(body, (PREFIX_BYTES + MAX_MESSAGE_BYTES) as u64);
    let mut bytes = body.read().await.map_err(|error| match error {
        BodyReadError::TooLarge => Status::resource_exhausted(format!(
            "the message exceeds the maximum of {MAX_MESSAGE_BYTES} bytes"
        )),
        BodyReadError::Aborted(error) => {
            Status::cancelled(format!("cannot read the request: {error}"))
        }
        BodyReadError::IdleTimeout => Status::cancelled(error.to_string()),
    })?;
    if bytes.len() < PREFIX_BYTES {
        return Err(Status::invalid_argument("the request has no message"));
    }
    let is_compressed = bytes.get_u8() != 0;
    let length = bytes.get_u32();
    if is_compressed {
        return Err(Status::unimplemented(
            "the message is compressed; only the identity encoding is supported",
        ));
    }
    if usize::try_from(length) != Ok(bytes.len()) {
        return Err(Status::invalid_argument(
            "the length of the message does not match its prefix",
        ));
    }
    Ok(bytes)
}

fn success(message: &impl Message) -> Response<GrpcResponseBody> {
    let length = message.encoded_len();
    let mut bytes = BytesMut::with_capacity(PREFIX_BYTES + length);
    bytes.put_u8(0);
    // A response is only a few bytes per descriptor longer than its request, so its length fits in
    // 32 bits.
    bytes.put_u32(u32::try_from(length).unwrap_or(u32::MAX));
    message.encode_raw(&mut bytes);
    let mut trailers = HeaderMap::with_capacity(1);
    trailers.insert(Status::GRPC_STATUS, HeaderValue::from_static("0"));
    let mut response = Response::new(GrpcResponseBody::Message(
        Some(bytes.freeze()),
        Some(trailers),
    ));
    response.headers_mut().insert(CONTENT_TYPE, GRPC);
    response
}
