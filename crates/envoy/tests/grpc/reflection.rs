//! Tests of gRPC reflection, which serves clients without the `.proto` files.

use futures_util::stream;
use tonic_reflection::pb::{v1, v1alpha};

use crate::listener::TestListener;

#[tokio::test]
async fn every_service_is_listed_and_described() {
    use v1::{
        ServerReflectionRequest, ServerReflectionResponse,
        server_reflection_request::MessageRequest, server_reflection_response::MessageResponse,
    };
    let listener = TestListener::open("");
    let mut client = listener.connect().await;
    let ask = |message_request| ServerReflectionRequest {
        host: String::new(),
        message_request: Some(message_request),
    };
    let requests = [
        ask(MessageRequest::ListServices(String::new())),
        ask(MessageRequest::FileContainingSymbol(
            "envoy.service.ratelimit.v2.RateLimitService".into(),
        )),
    ];
    let mut answers = client
        .stream::<_, ServerReflectionResponse>(
            "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo",
            stream::iter(requests),
        )
        .await
        .unwrap();
    let Some(MessageResponse::ListServicesResponse(list)) =
        answers.message().await.unwrap().unwrap().message_response
    else {
        panic!("no list");
    };
    let names: Vec<_> = list
        .service
        .iter()
        .map(|service| service.name.as_str())
        .collect();
    for name in [
        "envoy.service.ratelimit.v3.RateLimitService",
        "envoy.service.ratelimit.v2.RateLimitService",
        "envoy.service.rate_limit_quota.v3.RateLimitQuotaService",
        "kuadrant.service.ratelimit.v1.RateLimitService",
        "grpc.health.v1.Health",
    ] {
        assert!(names.contains(&name), "{name} is not in {names:?}");
    }
    let file = answers.message().await.unwrap().unwrap().message_response;
    assert!(
        matches!(file, Some(MessageResponse::FileDescriptorResponse(_))),
        "{file:?}"
    );
}

#[tokio::test]
async fn older_clients_are_answered_too() {
    use v1alpha::{
        ServerReflectionRequest, ServerReflectionResponse,
        server_reflection_request::MessageRequest, server_reflection_response::MessageResponse,
    };
    let listener = TestListener::open("");
    let request = ServerReflectionRequest {
        host: String::new(),
        message_request: Some(MessageRequest::ListServices(String::new())),
    };
    let mut answers = listener
        .connect()
        .await
        .watch::<_, ServerReflectionResponse>(
            "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
            request,
        )
        .await;
    let list = answers.message().await.unwrap().unwrap().message_response;
    assert!(
        matches!(list, Some(MessageResponse::ListServicesResponse(_))),
        "{list:?}"
    );
}
