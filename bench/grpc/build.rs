//! Compiles Tidegate's own protobuf messages, with client and server code.

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let proto = "../../crates/envoy/proto";
    println!("cargo::rerun-if-changed={proto}");
    let files = protox::compile(["envoy/service/ratelimit/v3/rls.proto"], [proto])?;
    let mut config = tonic_prost_build::Config::new();
    config.include_file("messages.rs");
    tonic_prost_build::configure().compile_fds_with_config(files, config)?;
    Ok(())
}
