//! Reads the settings of the xDS client from the environment variables of envoyproxy/ratelimit.

use std::path::PathBuf;

use tidegate_config::envoy::{
    MAX_MESSAGE_BYTES, MAX_NODE_METADATA, MAX_XDS_HEADERS, Ratio, XdsConfig, XdsServer, XdsTls,
    header,
};
use tidegate_core::Span;
use tidegate_net::ClientTlsFiles;

use super::{SPAN, span};
use crate::variables::VariableReader;

/// The variables that have an effect only with `CONFIG_GRPC_XDS_SERVER_USE_TLS`.
pub(super) const OF_TLS: &[&str] = &[
    "CONFIG_GRPC_XDS_CLIENT_TLS_CERT",
    "CONFIG_GRPC_XDS_CLIENT_TLS_KEY",
    "CONFIG_GRPC_XDS_SERVER_TLS_CACERT",
    "CONFIG_GRPC_XDS_SERVER_TLS_SAN",
];

/// The other variables for the xDS client.
pub(super) const HONOURED: &[&str] = &[
    "CONFIG_GRPC_XDS_NODE_ID",
    "CONFIG_GRPC_XDS_NODE_METADATA",
    "CONFIG_GRPC_XDS_SERVER_URL",
    "CONFIG_GRPC_XDS_SERVER_CONNECT_RETRY_INTERVAL",
    "CONFIG_GRPC_XDS_CLIENT_ADDITIONAL_HEADERS",
    "CONFIG_GRPC_XDS_SERVER_USE_TLS",
    "XDS_CLIENT_BACKOFF_INITIAL_INTERVAL",
    "XDS_CLIENT_BACKOFF_MAX_INTERVAL",
    "XDS_CLIENT_BACKOFF_RANDOM_FACTOR",
    "XDS_CLIENT_BACKOFF_JITTER",
    "XDS_CLIENT_MAX_MSG_SIZE_IN_BYTES",
];

/// Returns envoyproxy/ratelimit's default server.
fn default_server() -> XdsServer {
    XdsServer {
        host: "localhost".to_owned(),
        port: 18000,
    }
}

/// Reads the settings of the client.
pub(super) fn xds(reader: &mut VariableReader<'_>) -> XdsConfig {
    let what = "a host and a port such as envoy-gateway:18001";
    let server = reader.parsed("CONFIG_GRPC_XDS_SERVER_URL", what, XdsServer::parse);
    let mut config = XdsConfig::new(server.unwrap_or_else(default_server));
    if let Some(id) = reader.text("CONFIG_GRPC_XDS_NODE_ID") {
        config.node.id = id.to_owned();
    }
    let what = format!("at most {MAX_NODE_METADATA} pairs such as team=a,zone=b");
    let metadata = reader.parsed("CONFIG_GRPC_XDS_NODE_METADATA", &what, |text| {
        let pair = |pair: &str| {
            let (name, value) = pair.split_once('=')?;
            Some((name.trim().to_owned(), value.trim().to_owned()))
        };
        let pairs: Option<Vec<_>> = text.split(',').map(pair).collect();
        pairs.filter(|pairs| pairs.len() <= MAX_NODE_METADATA)
    });
    config.node.metadata = metadata.unwrap_or_default();
    headers(&mut config, reader);
    backoff(&mut config, reader);
    let size = format!("a number of bytes from 1 to {MAX_MESSAGE_BYTES}");
    let size = reader.parsed("XDS_CLIENT_MAX_MSG_SIZE_IN_BYTES", &size, |text| {
        let bytes = text.parse().ok()?;
        (1..=MAX_MESSAGE_BYTES).contains(&bytes).then_some(bytes)
    });
    config.max_message = size.unwrap_or(config.max_message);
    if reader.flag("CONFIG_GRPC_XDS_SERVER_USE_TLS") {
        config.tls = Some(tls(reader));
    }
    config
}

/// Reads the additional headers, such as `a:1,b:2`. Error messages do not contain the values, which
/// may be credentials.
fn headers(config: &mut XdsConfig, reader: &mut VariableReader<'_>) {
    const NAME: &str = "CONFIG_GRPC_XDS_CLIENT_ADDITIONAL_HEADERS";
    let Some(text) = reader.text(NAME) else {
        return;
    };
    for (at, pair) in text.split(',').enumerate() {
        let problem = match pair.split_once(':') {
            _ if at == MAX_XDS_HEADERS => "exceeds the maximum of 32 headers",
            None => "has no colon between the name and the value",
            Some((name, value)) => match header(name.trim(), value.trim()) {
                Ok(header) => {
                    config.headers.push(header);
                    continue;
                }
                Err(problem) => problem,
            },
        };
        reader
            .problems
            .push(format!("{NAME}: header {} {problem}", at + 1));
        return;
    }
}

fn backoff(config: &mut XdsConfig, reader: &mut VariableReader<'_>) {
    let backoff = &mut config.backoff;
    for (name, setting) in [
        (
            "CONFIG_GRPC_XDS_SERVER_CONNECT_RETRY_INTERVAL",
            &mut backoff.connect,
        ),
        ("XDS_CLIENT_BACKOFF_INITIAL_INTERVAL", &mut backoff.initial),
        ("XDS_CLIENT_BACKOFF_MAX_INTERVAL", &mut backoff.max),
    ] {
        let wait = reader.parsed(name, SPAN, span);
        let wait = wait.and_then(|wait| u64::try_from(wait.as_micros()).ok());
        *setting = wait.map_or(*setting, Span::from_micros);
    }
    let what = "a share from 0 to 1, such as 0.5";
    let factor = reader.parsed("XDS_CLIENT_BACKOFF_RANDOM_FACTOR", what, Ratio::parse);
    backoff.random_factor = factor.unwrap_or(backoff.random_factor);
    // Jitter is enabled unless the variable disables it.
    let has_jitter = reader.text("XDS_CLIENT_BACKOFF_JITTER").is_none()
        || reader.flag("XDS_CLIENT_BACKOFF_JITTER");
    if !has_jitter {
        backoff.random_factor = Ratio::ZERO;
    }
}

fn tls(reader: &mut VariableReader<'_>) -> XdsTls {
    let path = |name| reader.text(name).map(PathBuf::from);
    let ca = path("CONFIG_GRPC_XDS_SERVER_TLS_CACERT");
    let names = [
        "CONFIG_GRPC_XDS_CLIENT_TLS_CERT",
        "CONFIG_GRPC_XDS_CLIENT_TLS_KEY",
    ];
    let [certificate, key] = names.map(path);
    let name = reader.text("CONFIG_GRPC_XDS_SERVER_TLS_SAN");
    if certificate.is_some() != key.is_some() {
        let [certificate, key] = names;
        let problem = format!("{certificate} and {key}: only one of them is set; set both");
        reader.problems.push(problem);
    }
    XdsTls {
        files: ClientTlsFiles {
            ca,
            certificate: certificate.zip(key),
        },
        name: name.map(str::to_owned),
    }
}
