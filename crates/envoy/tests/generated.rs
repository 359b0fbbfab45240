//! Compiles the files in `proto/`, and compares the result with the generated code in
//! `proto/generated/`. After a change of `proto/`, write the new code with this command:
//!
//! ```sh
//! UPDATE_GENERATED=1 cargo test -p tidegate-envoy --test generated
//! ```
//!
//! A build script would add the protobuf compiler and 20 other crates to every build of the
//! program. The compiler is a Rust crate, so that `protoc` need not be installed.

use std::{collections::BTreeMap, env, error::Error, ffi::OsString, fs, io, path::Path};

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
const XDS_CLIENT: [&str; 2] = [
    "envoy/service/discovery/v3/ads.proto",
    "ratelimit/config/ratelimit/v3/rls_conf.proto",
];

#[test]
#[expect(
    clippy::disallowed_methods,
    reason = "the environment says whether to write"
)]
fn generated_code_matches_the_definitions() {
    let proto = Path::new(env!("CARGO_MANIFEST_DIR")).join("proto");
    let folder = proto.join("generated");
    let compiled = tempfile::tempdir().unwrap();
    compile(&proto, compiled.path()).unwrap();
    let expected = files(compiled.path()).unwrap();
    if env::var("UPDATE_GENERATED").is_ok_and(|value| value == "1") {
        fs::create_dir_all(&folder).unwrap();
        for name in files(&folder).unwrap().into_keys() {
            fs::remove_file(folder.join(name)).unwrap();
        }
        for (name, content) in &expected {
            fs::write(folder.join(name), content).unwrap();
        }
    }
    let found = files(&folder).unwrap();
    assert!(found.keys().eq(expected.keys()), "other files: {ADVICE}");
    for (name, content) in expected {
        assert!(found[&name] == content, "{}: {ADVICE}", name.display());
    }
}

const ADVICE: &str = "proto/generated is stale. Write it with `UPDATE_GENERATED=1 cargo test -p \
                      tidegate-envoy --test generated`.";

/// Writes the messages, the services and the descriptors of the `.proto` files to `out`.
fn compile(proto: &Path, out: &Path) -> Result<(), Box<dyn Error>> {
    // The message descriptors are for gRPC reflection.
    let served = protox::compile(SERVED, [proto])?;
    fs::write(out.join("descriptors.bin"), served.encode_to_vec())?;
    let mut descriptors = protox::compile(SERVED.into_iter().chain(XDS_CLIENT), [proto])?;
    // Omit the v2 service, which uses the v3 messages.
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
        .out_dir(out)
        .compile_fds_with_config(descriptors, config)?;
    Ok(())
}

/// Returns the name and the content of each file in `folder`.
fn files(folder: &Path) -> io::Result<BTreeMap<OsString, Vec<u8>>> {
    fs::read_dir(folder)?
        .map(|entry| {
            let entry = entry?;
            Ok((entry.file_name(), fs::read(entry.path())?))
        })
        .collect()
}
