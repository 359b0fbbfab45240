//! The HTTP client of the exporters.

use std::{future::Future, pin::Pin, time::Duration};

use opentelemetry_http::{Bytes, HttpClient, HttpError, Request, Response};
use tidegate_limiter::https_client;
use ureq::Agent;

/// The maximum size of a response of a collector.
const MAX_RESPONSE_BYTES: u64 = 64 << 10;

/// A client that blocks. The exporters run on threads of their own.
#[derive(Debug)]
pub(super) struct UreqClient(Agent);

impl UreqClient {
    pub(super) fn new(timeout: Duration) -> Self {
        Self(https_client::agent(timeout))
    }

    pub(super) fn send(&self, request: Request<Bytes>) -> Result<Response<Bytes>, HttpError> {
        let (head, body) = request.into_parts();
        let request = Request::from_parts(head, body.to_vec());
        let (head, mut body) = self.0.run(request)?.into_parts();
        let bytes = body.with_config().limit(MAX_RESPONSE_BYTES).read_to_vec()?;
        Ok(Response::from_parts(head, bytes.into()))
    }
}

impl HttpClient for UreqClient {
    fn send_bytes<'c, 'f>(
        &'c self,
        request: Request<Bytes>,
    ) -> Pin<Box<dyn Future<Output = Result<Response<Bytes>, HttpError>> + Send + 'f>>
    where
        'c: 'f,
        Self: 'f,
    {
        Box::pin(std::future::ready(self.send(request)))
    }
}
