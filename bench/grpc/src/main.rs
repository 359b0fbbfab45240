//! Baseline for Tidegate's gRPC listener: a tonic service that parses the same request and responds
//! OK without making a decision. The program is also a client that prints how many requests for a
//! key were admitted.
//!
//! ```text
//! grpc echo PORT              serves on 127.0.0.1:PORT
//! grpc ask PORT VALUE COUNT   asks for [generic_key=VALUE] COUNT times, prints how many were OK
//! grpc body FILE VALUE        writes the body of one such call
//! ```

use std::{env, error::Error, fs};

use prost::Message as _;
use tonic::{Request, Response, Status, transport::Server};

use messages::envoy::{
    extensions::common::ratelimit::v3::{RateLimitDescriptor, rate_limit_descriptor::Entry},
    service::ratelimit::v3::{
        RateLimitRequest, RateLimitResponse,
        rate_limit_response::{Code, DescriptorStatus},
        rate_limit_service_client::RateLimitServiceClient,
        rate_limit_service_server::{RateLimitService, RateLimitServiceServer},
    },
};

mod messages {
    #![allow(clippy::all, unused_qualifications, reason = "generated")]
    #![allow(
        clippy::allow_attributes_without_reason,
        clippy::use_self,
        reason = "generated"
    )]
    include!(concat!(env!("OUT_DIR"), "/messages.rs"));
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let args: Vec<String> = env::args().skip(1).collect();
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    match args[..] {
        ["echo", port] => echo(port).await,
        ["ask", port, value, count] => ask(port, value, count.parse()?).await,
        ["body", file, value] => Ok(fs::write(file, body(value))?),
        _ => Err("usage: grpc echo PORT | ask PORT VALUE COUNT | body FILE VALUE".into()),
    }
}

struct Echo;

#[tonic::async_trait]
impl RateLimitService for Echo {
    async fn should_rate_limit(
        &self,
        request: Request<RateLimitRequest>,
    ) -> Result<Response<RateLimitResponse>, Status> {
        let descriptors = request.into_inner().descriptors.into_iter();
        let status = |_| DescriptorStatus {
            code: Code::Ok.into(),
            ..DescriptorStatus::default()
        };
        Ok(Response::new(RateLimitResponse {
            overall_code: Code::Ok.into(),
            statuses: descriptors.map(status).collect(),
            ..RateLimitResponse::default()
        }))
    }
}

async fn echo(port: &str) -> Result<(), Box<dyn Error>> {
    let address = format!("127.0.0.1:{port}").parse()?;
    let server = Server::builder().add_service(RateLimitServiceServer::new(Echo));
    Ok(server.serve(address).await?)
}

async fn ask(port: &str, value: &str, count: u32) -> Result<(), Box<dyn Error>> {
    let mut client = RateLimitServiceClient::connect(format!("http://127.0.0.1:{port}")).await?;
    let mut admitted = 0;
    for _ in 0..count {
        let answer = client.should_rate_limit(request(value)).await?.into_inner();
        admitted += u32::from(answer.overall_code() == Code::Ok);
    }
    println!("{admitted}");
    Ok(())
}

/// Returns the request that Envoy sends for a route with two actions.
fn request(value: &str) -> RateLimitRequest {
    let descriptor = |key: &str, value: &str| RateLimitDescriptor {
        entries: vec![Entry {
            key: key.to_owned(),
            value: value.to_owned(),
        }],
        ..RateLimitDescriptor::default()
    };
    RateLimitRequest {
        domain: "bench".to_owned(),
        descriptors: vec![
            descriptor("remote_address", "127.0.0.1"),
            descriptor("generic_key", value),
        ],
        hits_addend: 0,
    }
}

fn body(value: &str) -> Vec<u8> {
    let message = request(value).encode_to_vec();
    let length = u32::try_from(message.len()).expect("a request is short");
    [&[0], length.to_be_bytes().as_slice(), &message].concat()
}
