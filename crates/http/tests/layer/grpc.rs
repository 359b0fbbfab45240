//! Denials in gRPC's words, read by tonic.

use http::{HeaderValue, header::CONTENT_TYPE};
use tidegate_http::LimiterLayer;
use tonic_types::StatusExt;
use tower::Layer;

use crate::{
    stores::Closed,
    support::{Answer, Notes, fixed, get, limited, limiter_on, send},
};

fn call() -> http::Request<()> {
    let mut request = get("/package.Service/Method");
    let content_type = HeaderValue::from_static("application/grpc+proto");
    request.headers_mut().insert(CONTENT_TYPE, content_type);
    request
}

fn status(answer: &Answer) -> tonic::Status {
    assert_eq!((answer.status, answer.body.as_str()), (200, ""));
    assert_eq!(
        answer.header("content-type"),
        Some("application/grpc+proto")
    );
    tonic::Status::from_header_map(&answer.headers).unwrap()
}

#[tokio::test]
async fn a_spent_limit_is_exhausted_and_says_when_to_retry() {
    let (_, mut service) = limited(vec![fixed("100%", "1/min")]);
    assert_eq!(send(&mut service, call()).await.body, "served");
    let denied = send(&mut service, call()).await;
    let status = status(&denied);
    assert_eq!(status.code(), tonic::Code::ResourceExhausted);
    assert_eq!(
        status.message(),
        "1/min of \"100%\" is spent; ask again in 1min"
    );
    let details = status.get_error_details();
    let delay = details.retry_info().unwrap().retry_delay;
    assert_eq!(delay, Some(std::time::Duration::from_secs(60)));
    let violation = &details.quota_failure().unwrap().violations[0];
    assert_eq!(
        (violation.subject.as_str(), violation.quota_value),
        ("100%", 1)
    );
    assert_eq!(violation.quota_id, "100%:1/min");
    assert_eq!(denied.header("retry-after"), Some("60"));
}

#[tokio::test]
async fn a_store_that_cannot_decide_is_unavailable() {
    let limiter = limiter_on(Closed, vec![fixed("all", "2/h")]);
    let mut service = LimiterLayer::new(limiter).layer(Notes::default());
    let status = status(&send(&mut service, call()).await);
    assert_eq!(status.code(), tonic::Code::Unavailable);
    let delay = status.get_error_details().retry_info().unwrap().retry_delay;
    assert_eq!(delay, Some(std::time::Duration::from_millis(1_200)));
}

#[tokio::test]
async fn a_call_that_cannot_be_counted_is_an_invalid_argument() {
    let (_, mut service) = limited(vec![fixed("h", "1/min").keyed_by(&["header.h"]).unwrap()]);
    let mut request = call();
    let long = HeaderValue::try_from("x".repeat(9_000)).unwrap();
    request.headers_mut().insert("h", long);
    let status = status(&send(&mut service, request).await);
    assert_eq!(status.code(), tonic::Code::InvalidArgument);
}
