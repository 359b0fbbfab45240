//! Compiles the protobuf messages of the gRPC listener and of the xDS client. The protobuf compiler
//! is a Rust crate, so that `protoc` need not be installed.

use std::{env, error::Error, fs, path::Path};

use prost::Message as _;

/// The `.proto` files that define the listener's services. The files that these files import are
/// compiled too.
const SERVED: [&str; 6] = [
    "envoy/service/auth/v3/external_auth.proto",
    "envoy/service/ratelimit/v3/rls.proto",
    "envoy/service/ratelimit/v2/rls.proto",
    "envoy/service/rate_limit_quota/v3/rlqs.proto",
    "kuadrant/service/ratelimit/v1/kuadrantrls.proto",
    "grpc/health/v1/health.proto",
];

/// The `.proto` files for the xDS client. gRPC reflection does not list the services of these
/// files, because the listener does not have a discovery service.
const OF_THE_CLIENT: [&str; 2] = [
    "envoy/service/discovery/v3/ads.proto",
    "ratelimit/config/ratelimit/v3/rls_conf.proto",
];

#[expect(
    clippy::disallowed_methods,
    reason = "cargo says in the environment where to write"
)]
fn main() -> Result<(), Box<dyn Error>> {
    println!("cargo::rerun-if-changed=proto");
    let out = env::var("OUT_DIR")?;
    // Write the message descriptors, for gRPC reflection.
    let served = protox::compile(SERVED, ["proto"])?;
    fs::write(
        Path::new(&out).join("descriptors.bin"),
        served.encode_to_vec(),
    )?;
    let mut descriptors = protox::compile(SERVED.into_iter().chain(OF_THE_CLIENT), ["proto"])?;
    // Add the v2 service, which uses the v3 messages.
    descriptors
        .file
        .retain(|file| !file.name().contains("/v2/"));
    let mut config = tonic_prost_build::Config::new();
    config.include_file("messages.rs");
    // No client code is generated, because the xDS client calls the only method of its service
    // directly. The server code is generated for the tests' control plane.
    tonic_prost_build::configure()
        .build_client(false)
        .build_transport(false)
        .compile_fds_with_config(descriptors, config)?;
    Ok(())
}
