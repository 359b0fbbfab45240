//! Runs the cases against the service over gRPC, in process and over real sockets.

use std::{net::TcpListener, sync::Arc};

use prost_types::{Struct, Value as WireValue, value::Kind};
use tidegate_config::Grpc;
use tidegate_core::Span;
use tidegate_envoy::{
    Code, CurrentLimit, Descriptor, DescriptorStatus, LimitOverride, Metadata, RateLimitAnswer,
    RateLimitRequest, ResponseHeader, Unit,
    grpc::{self, GrpcContext, Http2},
};
use tidegate_net::{Bounds, Listener, Server};
use tonic::Code as Status;

use crate::{
    cases::hold,
    grpc_client::Client,
    proto::envoy::{
        extensions::common::ratelimit::v3::{
            RateLimitDescriptor,
            rate_limit_descriptor::{Entry, RateLimitOverride},
        },
        service::ratelimit::v3::{
            RateLimitRequest as WireRequest, RateLimitResponse,
            rate_limit_response::{Code as WireCode, DescriptorStatus as WireStatus, rate_limit},
        },
    },
    subject::{Started, Subject},
};

const PATH: &str = "/envoy.service.ratelimit.v3.RateLimitService/ShouldRateLimit";

/// A subject that calls the service over gRPC.
pub(crate) struct OverGrpc {
    listener: Listener,
    client: tokio::sync::OnceCell<Client>,
    _server: Server,
}

impl OverGrpc {
    fn new(started: &Started) -> Self {
        let server = Server::start(1).unwrap();
        let socket = TcpListener::bind("127.0.0.1:0").unwrap();
        let context = GrpcContext {
            limiter: Arc::clone(&started.limiter),
            quotas: Arc::default(),
            rate_limits: Some(Arc::clone(&started.service)),
            authorization: None,
        };
        let http2 = Http2::new(Grpc::default(), None);
        let listener = grpc::listen(&server, socket, Bounds::default(), context, http2).unwrap();
        Self {
            listener,
            client: tokio::sync::OnceCell::new(),
            _server: server,
        }
    }
}

impl Subject for OverGrpc {
    async fn ask(&self, request: &RateLimitRequest) -> Result<RateLimitAnswer, String> {
        let connect = || Client::connect(self.listener.local_addr());
        let mut client = self.client.get_or_init(connect).await.clone();
        let answer: Result<RateLimitResponse, _> = client.call(PATH, written(request)).await;
        answer.map(|answer| read(&answer)).map_err(|status| {
            assert!(
                matches!(status.code(), Status::Unknown | Status::InvalidArgument),
                "{status:?}"
            );
            status.message().to_owned()
        })
    }
}

fn written(request: &RateLimitRequest) -> WireRequest {
    WireRequest {
        domain: request.domain.clone(),
        descriptors: request.descriptors.iter().map(described).collect(),
        hits_addend: request.hits_addend,
    }
}

fn described(descriptor: &Descriptor) -> RateLimitDescriptor {
    let entry = |(key, value): &(String, String)| Entry {
        key: key.clone(),
        value: value.clone(),
    };
    RateLimitDescriptor {
        entries: descriptor.entries.iter().map(entry).collect(),
        limit: descriptor.limit.map(
            |LimitOverride {
                 requests_per_unit,
                 unit,
             }| RateLimitOverride {
                requests_per_unit,
                unit: number_of(unit),
            },
        ),
        hits_addend: descriptor.hits_addend,
        is_negative_hits: descriptor.is_negative_hits,
    }
}

/// Returns the enum value of a unit in `envoy.type.v3.RateLimitUnit`. The week has the highest
/// value, because it was added after the other units.
fn number_of(unit: Unit) -> i32 {
    match unit {
        Unit::Unknown => 0,
        Unit::Second => 1,
        Unit::Minute => 2,
        Unit::Hour => 3,
        Unit::Day => 4,
        Unit::Month => 5,
        Unit::Year => 6,
        Unit::Week => 7,
    }
}

fn read(answer: &RateLimitResponse) -> RateLimitAnswer {
    RateLimitAnswer {
        overall_code: code(answer.overall_code()),
        statuses: answer.statuses.iter().map(status).collect(),
        response_headers: answer
            .response_headers_to_add
            .iter()
            .map(|header| ResponseHeader {
                name: header.key.as_str().into(),
                value: header.value.clone(),
            })
            .collect(),
        dynamic_metadata: answer.dynamic_metadata.as_ref().map(map),
    }
}

fn status(status: &WireStatus) -> DescriptorStatus {
    DescriptorStatus {
        code: code(status.code()),
        current_limit: status.current_limit.as_ref().map(|limit| CurrentLimit {
            requests_per_unit: limit.requests_per_unit,
            unit: unit(limit.unit()),
            name: Some(limit.name.as_str())
                .filter(|name| !name.is_empty())
                .map(Arc::from),
        }),
        limit_remaining: status.limit_remaining,
        duration_until_reset: status.duration_until_reset.as_ref().map(|span| {
            assert_eq!(span.nanos, 0, "whole seconds");
            Span::from_secs(u64::try_from(span.seconds).unwrap())
        }),
    }
}

fn code(code: WireCode) -> Code {
    match code {
        WireCode::Ok => Code::Ok,
        WireCode::OverLimit => Code::OverLimit,
        WireCode::Unknown => panic!("no response has this code"),
    }
}

fn unit(unit: rate_limit::Unit) -> Unit {
    match unit {
        rate_limit::Unit::Unknown => Unit::Unknown,
        rate_limit::Unit::Second => Unit::Second,
        rate_limit::Unit::Minute => Unit::Minute,
        rate_limit::Unit::Hour => Unit::Hour,
        rate_limit::Unit::Day => Unit::Day,
        rate_limit::Unit::Week => Unit::Week,
        rate_limit::Unit::Month => Unit::Month,
        rate_limit::Unit::Year => Unit::Year,
    }
}

fn map(fields: &Struct) -> Metadata {
    Metadata::map(
        fields
            .fields
            .iter()
            .map(|(name, field)| (Arc::from(name.as_str()), value(field))),
    )
}

fn value(field: &WireValue) -> Metadata {
    match field.kind.as_ref().unwrap() {
        Kind::NullValue(_) => Metadata::Null,
        Kind::NumberValue(number) => Metadata::Number(*number),
        Kind::StringValue(text) => Metadata::text(text),
        Kind::BoolValue(truth) => Metadata::Truth(*truth),
        Kind::StructValue(fields) => map(fields),
        Kind::ListValue(list) => Metadata::List(list.values.iter().map(value).collect()),
    }
}

#[tokio::test]
async fn envoy_cases_hold_over_grpc() {
    hold(OverGrpc::new).await;
}
