//! The retry policy for requests that received no response.
//!
//! This module only makes the decision. `send_with_retries` in `dispatch.rs` carries out the retry,
//! and `repeatable.rs` determines which requests are repeatable (may be processed twice).
//!
//! | the state of the request | the action |
//! | --- | --- |
//! | not accepted: its pooled connection was stale | send it again |
//! | possibly processed on a stale pooled connection, but repeatable | send it again |
//! | either of these, after more than [`MAX_STALE`] stale connections | send it to another endpoint |
//! | not accepted by a new connection | send it to another endpoint; the endpoint has failed |
//! | possibly processed, and not repeatable | respond with an error |
//! | failed because the client's body failed | respond with the body's error |
//! | failed for another reason | respond with the error; the endpoint has failed |

use super::connection::SendError;
use crate::error::ProxyError;

/// The maximum number of stale pooled connections after which a request can still be sent to the
/// same endpoint. Stale connections to all endpoints are counted together. After one more stale
/// connection, the request is sent to another endpoint. The limit matters only for HTTP/2: after a
/// stale HTTP/1.1 connection, a new connection is opened.
const MAX_STALE: u32 = 3;

/// A failed attempt to send a request.
#[derive(Clone, Copy, Debug)]
pub(super) struct FailedAttempt {
    /// Whether the connection came from the pool.
    pub(super) is_pooled: bool,
    /// The number of stale pooled connections that the request has encountered, including this one.
    pub(super) stale: u32,
    /// The error of the request body, if the body has failed.
    pub(super) upload_error: Option<ProxyError>,
}

/// The decision about a failed request, which has the type `R`.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct RetryDecision<R> {
    /// Where to send the request again, or the error to return to the client.
    pub(super) action: Result<Resend<R>, ProxyError>,
    /// The error that outlier detection counts against the endpoint; `None` if the endpoint did not
    /// fail.
    pub(super) endpoint_error: Option<ProxyError>,
}

/// A request to send again.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Resend<R> {
    /// To the least loaded endpoint, which may be the same endpoint as before.
    AnyEndpoint(R),
    /// To an endpoint that has not been tried.
    OtherEndpoint(R),
}

/// Decides whether to send the request again after `attempt` failed with `error`, and to which
/// endpoint.
pub(super) fn decide<R>(error: SendError<R>, attempt: FailedAttempt) -> RetryDecision<R> {
    let (action, endpoint_error) = match (error, attempt.upload_error) {
        // A pooled connection may be stale. But if a new connection does not accept the request,
        // the endpoint has failed.
        (SendError::Retryable(request), _) if !attempt.is_pooled => (
            Ok(Resend::OtherEndpoint(request)),
            Some(ProxyError::BadResponse),
        ),
        (SendError::Retryable(request), _) if attempt.stale <= MAX_STALE => {
            (Ok(Resend::AnyEndpoint(request)), None)
        }
        (SendError::Retryable(request), _) => (Ok(Resend::OtherEndpoint(request)), None),
        // If the client aborted its request body, the endpoint has not failed, because the abort
        // explains the missing response.
        (_, Some(upload_error)) => (Err(upload_error), None),
        (SendError::Lost, None) => (Err(ProxyError::BadResponse), None),
        (SendError::Failed(error), None) => (Err(error), Some(error)),
    };
    RetryDecision {
        action,
        endpoint_error,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn never(error: ProxyError, endpoint_error: Option<ProxyError>) -> RetryDecision<()> {
        RetryDecision {
            action: Err(error),
            endpoint_error,
        }
    }

    const fn other(endpoint_error: Option<ProxyError>) -> RetryDecision<()> {
        RetryDecision {
            action: Ok(Resend::OtherEndpoint(())),
            endpoint_error,
        }
    }

    const ANY: RetryDecision<()> = RetryDecision {
        action: Ok(Resend::AnyEndpoint(())),
        endpoint_error: None,
    };

    #[test]
    fn the_policy_is_a_table() {
        const UNSENT: fn() -> SendError<()> = || SendError::Retryable(());
        const LOST: fn() -> SendError<()> = || SendError::Lost;
        const FAILED: fn() -> SendError<()> = || SendError::Failed(ProxyError::HeadTimeout);
        let upload = Some(ProxyError::BodyAborted);
        for (send_error, is_pooled, stale, upload_error, expected) in [
            (UNSENT, true, 1, None, ANY),
            (UNSENT, true, MAX_STALE, None, ANY),
            (UNSENT, true, MAX_STALE + 1, None, other(None)),
            (UNSENT, false, 0, None, other(Some(ProxyError::BadResponse))),
            (UNSENT, true, 1, upload, ANY),
            (LOST, true, 1, None, never(ProxyError::BadResponse, None)),
            (LOST, false, 0, None, never(ProxyError::BadResponse, None)),
            (LOST, true, 1, upload, never(ProxyError::BodyAborted, None)),
            (
                FAILED,
                true,
                1,
                None,
                never(ProxyError::HeadTimeout, Some(ProxyError::HeadTimeout)),
            ),
            (
                FAILED,
                false,
                0,
                None,
                never(ProxyError::HeadTimeout, Some(ProxyError::HeadTimeout)),
            ),
            (
                FAILED,
                false,
                0,
                upload,
                never(ProxyError::BodyAborted, None),
            ),
        ] {
            let attempt = FailedAttempt {
                is_pooled,
                stale,
                upload_error,
            };
            assert_eq!(decide(send_error(), attempt), expected, "{attempt:?}");
        }
    }
}
