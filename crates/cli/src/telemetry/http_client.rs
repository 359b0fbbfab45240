//! The HTTP client of the exporters.

use std::{future::Future, pin::Pin, sync::Arc, time::Duration};

use opentelemetry_http::{Bytes, HttpClient, HttpError, Request, Response};
use opentelemetry_proto::tonic::collector::metrics::v1::ExportMetricsServiceResponse;
use prost::Message as _;
use tidegate_limiter::https_client;
use ureq::Agent;

use super::{counts::ExportCounts, variables::Signal};

/// The maximum size of a collector's response, in bytes.
const MAX_RESPONSE_BYTES: u64 = 64 << 10;

/// A blocking HTTP client. Blocking is acceptable, because the exporters run on their own threads.
#[derive(Debug)]
pub(super) struct UreqClient {
    agent: Agent,
    signal: Signal,
    counts: Arc<ExportCounts>,
}

impl UreqClient {
    /// Creates a client for exporting `signal`.
    pub(super) fn new(signal: Signal, timeout: Duration, counts: &Arc<ExportCounts>) -> Self {
        Self {
            agent: https_client::agent(timeout),
            signal,
            counts: Arc::clone(counts),
        }
    }

    pub(super) fn send(&self, request: Request<Bytes>) -> Result<Response<Bytes>, HttpError> {
        let (head, body) = request.into_parts();
        let request = Request::from_parts(head, body.to_vec());
        let (head, mut body) = self.agent.run(request)?.into_parts();
        let bytes = body.with_config().limit(MAX_RESPONSE_BYTES).read_to_vec()?;
        if head.status.is_success() {
            self.note_rejection(&bytes);
        }
        Ok(Response::from_parts(head, bytes.into()))
    }

    /// Records the number of rejected records, if the response reports a partial success.
    fn note_rejection(&self, response: &[u8]) {
        // The responses for traces, logs and metrics have the same fields, so all of them can be
        // decoded as one type.
        let Ok(response) = ExportMetricsServiceResponse::decode(response) else {
            return;
        };
        let partial = response.partial_success.unwrap_or_default();
        let rejected = u64::try_from(partial.rejected_data_points).unwrap_or(0);
        if rejected > 0 {
            let counts = self.counts.of(self.signal);
            counts.note_rejection(rejected, partial.error_message);
        }
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
