//! The retry policy for requests that got no response.
//!
//! | the state of the request | the action |
//! | --- | --- |
//! | not accepted: its pooled connection was stale | send it again |
//! | not accepted: again a stale connection, after several | send it to another endpoint |
//! | not accepted by a new connection | send it to another endpoint; the endpoint has failed |
//! | possibly processed, and not [repeatable](is_repeatable) | answer with an error |
//! | failed because the client's body failed | answer with the error of the body |
//! | failed for another reason | answer with the error; the endpoint has failed |

use super::connection::SendError;
use crate::error::ProxyError;

/// The number of stale pooled connections that a request may encounter, over all endpoints. After
/// the next stale connection, the request is sent to another endpoint. The number matters only for
/// HTTP/2: after a stale HTTP/1.1 connection, a new connection is opened.
const MAX_STALE: u32 = 3;

/// The attempt that failed.
#[derive(Clone, Copy, Debug)]
pub(super) struct FailedAttempt {
    /// Whether the connection came from the pool.
    pub(super) is_pooled: bool,
    /// The number of stale pooled connections that the request has encountered, including this one.
    pub(super) stale: u32,
    /// The error of the request body, if it has failed.
    pub(super) upload_error: Option<ProxyError>,
}

/// The next action for the failed request `R`.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Retry<R> {
    /// Send the request again, possibly to the same endpoint.
    AnyEndpoint(R),
    /// Send the request to another endpoint.
    OtherEndpoint {
        request: R,
        has_endpoint_failed: bool,
    },
    /// Give up, and answer the request with `error`.
    Never {
        error: ProxyError,
        has_endpoint_failed: bool,
    },
}

/// Decides whether and where to send the request again after `error` in this `attempt`.
pub(super) fn retry<R>(error: SendError<R>, attempt: FailedAttempt) -> Retry<R> {
    match (error, attempt.upload_error) {
        // A pooled connection may be stale. But if a new connection does not accept the request,
        // the endpoint has failed.
        (SendError::Retryable(request), _) => {
            if attempt.is_pooled && attempt.stale <= MAX_STALE {
                return Retry::AnyEndpoint(request);
            }
            Retry::OtherEndpoint {
                request,
                has_endpoint_failed: !attempt.is_pooled,
            }
        }
        // If the client aborted its request body, this abort is the reason why there is no
        // response.
        (_, Some(error)) => Retry::Never {
            error,
            has_endpoint_failed: false,
        },
        (SendError::Lost, None) => Retry::Never {
            error: ProxyError::BadResponse,
            has_endpoint_failed: false,
        },
        (SendError::Failed(error), None) => Retry::Never {
            error,
            has_endpoint_failed: true,
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn never(error: ProxyError, has_endpoint_failed: bool) -> Retry<()> {
        Retry::Never {
            error,
            has_endpoint_failed,
        }
    }

    const fn other(has_endpoint_failed: bool) -> Retry<()> {
        Retry::OtherEndpoint {
            request: (),
            has_endpoint_failed,
        }
    }

    #[test]
    fn the_policy_is_a_table() {
        const UNSENT: fn() -> SendError<()> = || SendError::Retryable(());
        const LOST: fn() -> SendError<()> = || SendError::Lost;
        const FAILED: fn() -> SendError<()> = || SendError::Failed(ProxyError::HeadTimeout);
        let upload = Some(ProxyError::BodyAborted);
        for (send_error, is_pooled, stale, upload_error, expected) in [
            (UNSENT, true, 0, None, Retry::AnyEndpoint(())),
            (UNSENT, true, MAX_STALE, None, Retry::AnyEndpoint(())),
            (UNSENT, true, MAX_STALE + 1, None, other(false)),
            (UNSENT, false, 0, None, other(true)),
            (UNSENT, true, 1, upload, Retry::AnyEndpoint(())),
            (LOST, true, 1, None, never(ProxyError::BadResponse, false)),
            (LOST, true, 1, upload, never(ProxyError::BodyAborted, false)),
            (FAILED, true, 1, None, never(ProxyError::HeadTimeout, true)),
            (FAILED, false, 0, None, never(ProxyError::HeadTimeout, true)),
            (
                FAILED,
                false,
                0,
                upload,
                never(ProxyError::BodyAborted, false),
            ),
        ] {
            let attempt = FailedAttempt {
                is_pooled,
                stale,
                upload_error,
            };
            assert_eq!(retry(send_error(), attempt), expected, "{attempt:?}");
        }
    }
}
