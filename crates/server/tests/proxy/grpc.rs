//! Tests of gRPC through the proxy. The client is a tonic channel, and the upstream is Tidegate's
//! own gRPC listener.

use std::time::Duration;

use futures_util::stream;
use prost::Message;
use tokio::{sync::mpsc::unbounded_channel, time::timeout};
use tonic::{Code, Status};
use tonic_reflection::pb::v1::{
    ServerReflectionRequest, ServerReflectionResponse, server_reflection_request::MessageRequest,
    server_reflection_response::MessageResponse,
};

use crate::{
    grpc_client::Client, listener::TestListener, upstream::Upstream,
    upstream_http2::in_front_of_grpc,
};

const CHECK: &str = "/grpc.health.v1.Health/Check";
const REFLECTION: &str = "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo";

/// A timeout that is longer than any test step takes. The timeout makes a hanging test fail.
const TIMEOUT: Duration = Duration::from_secs(20);

#[derive(Clone, PartialEq, Message)]
struct Question {
    #[prost(string, tag = "1")]
    service: String,
}

#[derive(Clone, PartialEq, Message)]
struct Health {
    #[prost(int32, tag = "1")]
    status: i32,
}

const SERVING: Health = Health { status: 1 };

/// Opens a server whose gRPC listener is the upstream in these tests. This server's own proxy and
/// its upstream are never used.
fn behind() -> TestListener {
    TestListener::in_front_of("http://127.0.0.1:1")
}

async fn check(client: &mut Client, service: &str) -> Result<Health, Status> {
    let service = service.to_owned();
    let call = client.call(CHECK, Question { service });
    timeout(TIMEOUT, call).await.unwrap()
}

#[tokio::test]
async fn calls_and_their_errors_are_forwarded() {
    let behind = behind();
    let listener = in_front_of_grpc(&behind, "");
    let mut client = Client::connect(listener.listener.local_addr()).await;
    assert_eq!(check(&mut client, "").await.unwrap(), SERVING);
    // A trailers-only response carries the gRPC status in its head.
    let unknown = check(&mut client, "no.such.Service").await.unwrap_err();
    assert_eq!(unknown.code(), Code::NotFound);
    let path = "/no.such.Service/Call";
    let unimplemented = client.call::<_, Health>(path, Question::default()).await;
    assert_eq!(unimplemented.unwrap_err().code(), Code::Unimplemented);
}

/// The upstream answers each message before the client sends the next message.
#[tokio::test]
async fn a_bidirectional_stream_is_forwarded_message_by_message() {
    let behind = behind();
    let listener = in_front_of_grpc(&behind, "");
    let mut client = Client::connect(listener.listener.local_addr()).await;
    let (ask, asked) = unbounded_channel();
    let asked = stream::unfold(asked, |mut asked| async {
        Some((asked.recv().await?, asked))
    });
    let answers =
        client.stream::<ServerReflectionRequest, ServerReflectionResponse>(REFLECTION, asked);
    let mut answers = timeout(TIMEOUT, answers).await.unwrap().unwrap();
    for _ in 0..20 {
        let symbol = "grpc.health.v1.Health".to_owned();
        let question = ServerReflectionRequest {
            host: String::new(),
            message_request: Some(MessageRequest::FileContainingSymbol(symbol)),
        };
        ask.send(question.clone()).unwrap();
        let answer = timeout(TIMEOUT, answers.message()).await.unwrap();
        let answer = answer.unwrap().unwrap();
        assert_eq!(answer.original_request, Some(question));
        assert!(matches!(
            answer.message_response,
            Some(MessageResponse::FileDescriptorResponse(_))
        ));
    }
    drop(ask);
    // The stream ends with its trailers.
    let end = timeout(TIMEOUT, answers.message()).await.unwrap();
    assert_eq!(end.unwrap(), None);
    assert!(answers.trailers().await.unwrap().is_some());
}

#[tokio::test]
async fn a_denial_is_resource_exhausted_and_does_not_reach_the_service() {
    let behind = behind();
    let rules = "rules: [{name: checks, when: {path: /grpc.health.v1.Health/*}, limits: [2/h], algorithm: fixed_window}]";
    let listener = in_front_of_grpc(&behind, rules);
    let mut client = Client::connect(listener.listener.local_addr()).await;
    for _ in 0..2 {
        assert_eq!(check(&mut client, "").await.unwrap(), SERVING);
    }
    let denied = check(&mut client, "").await.unwrap_err();
    assert_eq!(denied.code(), Code::ResourceExhausted, "{denied:?}");
    assert!(denied.message().contains("2/h exceeded"), "{denied:?}");
    let retry = denied.metadata().get("retry-after").unwrap();
    assert!(retry.to_str().unwrap().parse::<u32>().unwrap() > 0);
    let answers = "tidegate_proxy_responses_total{upstream=\"grpc\",status=\"2xx\"} 2\n";
    let metrics = listener.runtime.exposition();
    assert!(metrics.contains(answers), "{metrics}");
}

#[tokio::test]
async fn an_unreachable_service_is_unavailable() {
    let address = Upstream::closed_address();
    let listener = TestListener::open(&format!(
        "proxy: {{listen: '127.0.0.1:0', upstreams: [{{name: grpc, http2: true, urls: 'http://{address}'}}]}}\n"
    ));
    let mut client = Client::connect(listener.listener.local_addr()).await;
    let refused = check(&mut client, "").await.unwrap_err();
    assert_eq!(refused.code(), Code::Unavailable, "{refused:?}");
    assert_eq!(refused.message(), "the service cannot be reached");
}
