//! Tests denials of gRPC calls, parsed with tonic.

use http::{HeaderValue, Method, header::CONTENT_TYPE};
use tidegate_tower::RateLimitLayer;
use tonic_types::StatusExt;
use tower::Layer;

use crate::{
    stores::Closed,
    support::{Answer, Notes, fixed, get, limited, limiter, limiter_on, send},
};

fn call() -> http::Request<()> {
    claiming(Method::POST, "application/grpc+proto")
}

fn claiming(method: Method, content_type: &'static str) -> http::Request<()> {
    let mut request = get("/package.Service/Method");
    *request.method_mut() = method;
    let content_type = HeaderValue::from_static(content_type);
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
async fn a_denied_call_is_resource_exhausted_with_a_retry_delay() {
    let (_, mut service) = limited(vec![fixed("100%", "1/min")]);
    assert_eq!(send(&mut service, call()).await.body, "served");
    let denied = send(&mut service, call()).await;
    let status = status(&denied);
    assert_eq!(status.code(), tonic::Code::ResourceExhausted);
    assert_eq!(status.message(), "1/min exceeded; retry in 1min");
    let details = status.get_error_details();
    let delay = details.retry_info().unwrap().retry_delay;
    assert_eq!(delay, Some(std::time::Duration::from_secs(60)));
    let violation = &details.quota_failure().unwrap().violations[0];
    assert_eq!(
        (violation.subject.as_str(), violation.quota_value),
        ("1/min", 1)
    );
    assert_eq!(violation.quota_id, "1/min");
    assert_eq!(denied.header("retry-after"), Some("60"));
}

/// The denial of a gRPC call has HTTP status 200. A client or cache that does not speak gRPC would
/// treat a status of 200 as a success.
#[tokio::test]
async fn a_fake_grpc_call_is_denied_as_http() {
    let (_, mut service) = limited(vec![fixed("none", "1/h")]);
    assert_eq!(send(&mut service, call()).await.body, "served");
    for (method, content_type, expected) in [
        (Method::POST, "application/grpc", 200),
        (Method::POST, "application/grpc;x=y", 200),
        (Method::GET, "application/grpc", 429),
        (Method::HEAD, "application/grpc+proto", 429),
        (Method::POST, "application/grpc-web+proto", 429),
        (Method::POST, "application/grpcs", 429),
    ] {
        let denied = send(&mut service, claiming(method.clone(), content_type)).await;
        assert_eq!(denied.status, expected, "{method} {content_type}");
    }
}

/// gRPC clients retry automatically unless the response forbids it.
#[tokio::test]
async fn a_cost_that_never_fits_is_not_retried() {
    let limiter = limiter(vec![fixed("all", "5/min")]);
    let mut service = RateLimitLayer::new(limiter)
        .cost(tidegate_core::Cost::new(6).unwrap())
        .layer(Notes::default());
    let denied = send(&mut service, call()).await;
    assert_eq!(status(&denied).code(), tonic::Code::ResourceExhausted);
    assert_eq!(denied.header("grpc-retry-pushback-ms"), Some("-1"));
    let (_, mut service) = limited(vec![fixed("all", "1/min")]);
    send(&mut service, call()).await;
    let denied = send(&mut service, call()).await;
    assert_eq!(denied.header("grpc-retry-pushback-ms"), None);
}

#[tokio::test]
async fn a_store_that_cannot_decide_is_unavailable() {
    let limiter = limiter_on(Closed, vec![fixed("all", "2/h")]);
    let mut service = RateLimitLayer::new(limiter).layer(Notes::default());
    let status = status(&send(&mut service, call()).await);
    assert_eq!(status.code(), tonic::Code::Unavailable);
    let delay = status.get_error_details().retry_info().unwrap().retry_delay;
    assert_eq!(delay, Some(std::time::Duration::from_millis(1_200)));
}

#[tokio::test]
async fn an_uncountable_call_is_an_invalid_argument() {
    let (_, mut service) = limited(vec![fixed("h", "1/min").keyed_by(&["header.h"]).unwrap()]);
    let mut request = call();
    let long = HeaderValue::try_from("x".repeat(9_000)).unwrap();
    request.headers_mut().insert("h", long);
    let status = status(&send(&mut service, request).await);
    assert_eq!(status.code(), tonic::Code::InvalidArgument);
}
