//! Builds a configuration from the environment variables of envoyproxy/ratelimit.
//!
//! A deployment of envoyproxy/ratelimit can start Tidegate with the same environment variables.
//! Unsupported variables are reported with the reason. The server does not start if ignoring a
//! variable would expose a listener or change a listener's address.

mod xds;

use std::{
    net::{IpAddr, Ipv4Addr, SocketAddr},
    path::PathBuf,
    time::Duration,
};

use tidegate_config::{
    AdminToken, Config, Envoy, Mistake,
    envoy::{ConfigFiles, DomainFiles, FileFormat, RuleOrigin},
    open_listener,
};
use tidegate_net::TlsFiles;

use super::{
    Variables, redis_variables,
    variables::{self, VariableReader},
};

/// The variable for the admin token. Without the token, the admin listener is not reachable from
/// other machines.
pub const ADMIN_TOKEN: &str = "TIDEGATE_ADMIN_TOKEN";

/// The result of reading the environment variables.
#[derive(Debug)]
pub struct FromEnvironment {
    /// The configuration described by the variables.
    pub config: Config,
    /// The log level in `LOG_LEVEL`: `error`, `warn`, `info`, `debug` or `trace`; `None` if
    /// `LOG_LEVEL` is not set.
    pub log: Option<&'static str>,
    /// Whether `LOG_FORMAT` selects a log with one JSON object per line; `None` if `LOG_FORMAT` is
    /// not set.
    pub json_log: Option<bool>,
    /// The ignored variables, each with the reason.
    pub ignored: Vec<String>,
}

/// The reason for ignoring Redis variables without `REDIS_URL`.
const WITHOUT_REDIS: &str = "without REDIS_URL, counts are kept in the memory of this process";

/// The prefixes of ignored variables, each with the reason.
const IGNORED: &[(&str, &str)] = &[
    (
        "REDIS_",
        "the Redis store has its own settings; set them under `store` in a rules file",
    ),
    (
        "MEMCACHE_",
        "Memcached is not supported; counts are kept in Redis or in the memory of this process",
    ),
    (
        "EXPIRATION_JITTER_MAX_SECONDS",
        "counts do not expire all at once, so no jitter is needed",
    ),
    (
        "RUNTIME_IGNOREDOTFILES",
        "files and folders whose names begin with a dot are always ignored",
    ),
    (
        "RUNTIME_WATCH_ROOT",
        "files are reloaded whenever they or symbolic links on their path change",
    ),
    (
        "DEBUG_HOST",
        "the admin listener is on loopback unless TIDEGATE_ADMIN_TOKEN is set",
    ),
    (
        "USE_STATSD",
        "metrics are in the Prometheus format, at /metrics of the admin listener",
    ),
    (
        "STATSD_",
        "metrics are in the Prometheus format, at /metrics of the admin listener",
    ),
    (
        "USE_DOG_STATSD",
        "metrics are in the Prometheus format, at /metrics of the admin listener",
    ),
    (
        "DOG_STATSD_",
        "metrics are in the Prometheus format, at /metrics of the admin listener",
    ),
    (
        "PROMETHEUS_ADDR",
        "USE_PROMETHEUS is not true; metrics are at /metrics of the admin listener",
    ),
    (
        "PROMETHEUS_PATH",
        "metrics are at /metrics; change the path in the scrape configuration of Prometheus",
    ),
    (
        "PROMETHEUS_MAPPER_YAML",
        "metrics always have the names of the default mapping; docs/envoy.md lists them",
    ),
    (
        "PROMETHEUS_RESPONSE_TIME_AS_MILLISECONDS",
        "the metric is always in seconds, as its name says",
    ),
    (
        "EXTRA_TAGS",
        "set labels in the scrape configuration of Prometheus",
    ),
    (
        "STATS_FLUSH_INTERVAL",
        "metrics are computed when Prometheus scrapes them",
    ),
    (
        "DISABLE_STATS",
        "metrics are always on; they are computed only when Prometheus scrapes them",
    ),
    (
        "TRACING_",
        "tracing is configured by OTEL_EXPORTER_OTLP_ENDPOINT and the other variables OTEL_*",
    ),
    (
        "GRPC_SERVER_TLS_CA_CERT",
        "envoyproxy/ratelimit does not read this variable either; to require client certificates, set \
         GRPC_CLIENT_TLS_CACERT",
    ),
    ("CONFIG_GRPC_XDS_", WITHOUT_XDS),
    ("XDS_", WITHOUT_XDS),
];

/// The reason for ignoring the variables that configure the xDS client.
const WITHOUT_XDS: &str = "CONFIG_TYPE is not GRPC_XDS_SOTW, so rules are read from files";

/// The reason for ignoring the variables that configure rule files.
const WITHOUT_FILES: &str = "CONFIG_TYPE is GRPC_XDS_SOTW, so rules come from the control plane";

/// The reason for ignoring the variables that configure TLS to the control plane.
const WITHOUT_TLS: &str = "CONFIG_GRPC_XDS_SERVER_USE_TLS is not true";

/// Builds the configuration from the `variables`.
///
/// # Errors
///
/// Returns an error for each invalid value, and for each unsupported feature that cannot safely be
/// ignored. Each error contains the name of the variable.
pub fn from_environment(variables: &Variables) -> Result<FromEnvironment, Vec<String>> {
    let mut reader = VariableReader::new(variables);
    refuse(&mut reader);
    let mut config = Config::default();
    listen(&mut config, &mut reader);
    config.redis = redis_variables::redis(&mut reader);
    config.envoy = Some(envoy(&mut reader));
    grpc(&mut config, &mut reader);
    warn_of_open(&mut config);
    let log = log_level(&mut reader);
    let json_log = json_log(&mut reader);
    if reader.problems.is_empty() {
        let ignored = ignored(variables, &config);
        Ok(FromEnvironment {
            config,
            log,
            json_log,
            ignored,
        })
    } else {
        Err(reader.problems)
    }
}

/// Rejects variables for features that Tidegate does not support and cannot safely ignore.
fn refuse(reader: &mut VariableReader<'_>) {
    if reader
        .text("BACKEND_TYPE")
        .is_some_and(|kind| kind != "redis")
    {
        let problem = "BACKEND_TYPE: counts are kept in Redis or in the memory of this process only; \
                       for several servers, set it to redis and set REDIS_URL; for one server, unset it";
        reader.problems.push(problem.into());
    }
    if reader.text("GRPC_UDS").is_some() {
        reader.problems.push(
            "GRPC_UDS: the gRPC listener does not support Unix sockets; use GRPC_HOST and GRPC_PORT"
                .into(),
        );
    }
    if reader.text("GRPC_CLIENT_TLS_SAN").is_some() {
        let problem = "GRPC_CLIENT_TLS_SAN: names in client certificates are not checked; set \
            GRPC_CLIENT_TLS_CACERT to a CA that signs certificates for these clients only";
        reader.problems.push(problem.into());
    }
}

fn listen(config: &mut Config, reader: &mut VariableReader<'_>) {
    config.listen.http = Some(address("HOST", "PORT", 8080, reader));
    config.listen.grpc = Some(address("GRPC_HOST", "GRPC_PORT", 8081, reader));
    config.listen.resp = None;
    if reader.flag("USE_PROMETHEUS") {
        let what = "an address such as :9090 or 127.0.0.1:9090";
        let address = reader.parsed("PROMETHEUS_ADDR", what, metrics_address);
        let default = SocketAddr::new(IpAddr::V4(Ipv4Addr::UNSPECIFIED), 9090);
        config.listen.metrics = Some(address.unwrap_or(default));
    }
    let debug = address("DEBUG_HOST", "DEBUG_PORT", 6070, reader);
    config.listen.admin = if reader.text(ADMIN_TOKEN).is_some() {
        config.admin_token = AdminToken::Env(ADMIN_TOKEN.into());
        Some(debug)
    } else {
        Some(SocketAddr::new(
            IpAddr::V4(Ipv4Addr::LOCALHOST),
            debug.port(),
        ))
    };
}

fn address(host: &str, port: &str, default: u16, reader: &mut VariableReader<'_>) -> SocketAddr {
    let host = reader.parsed(host, "an IP address", |text| match text {
        "localhost" => Some(IpAddr::V4(Ipv4Addr::LOCALHOST)),
        address => address.parse().ok(),
    });
    let port = reader.parsed(port, "a port from 0 to 65535", |text| text.parse().ok());
    SocketAddr::new(
        host.unwrap_or(IpAddr::V4(Ipv4Addr::UNSPECIFIED)),
        port.unwrap_or(default),
    )
}

/// Parses an address in Go's notation, where the host can be omitted.
fn metrics_address(text: &str) -> Option<SocketAddr> {
    let (host, port) = text.rsplit_once(':')?;
    let host = match host {
        "" => IpAddr::V4(Ipv4Addr::UNSPECIFIED),
        "localhost" => IpAddr::V4(Ipv4Addr::LOCALHOST),
        host => host.trim_matches(['[', ']']).parse().ok()?,
    };
    Some(SocketAddr::new(host, port.parse().ok()?))
}

/// Returns whether the rules come from a control plane.
fn is_xds(reader: &mut VariableReader<'_>) -> bool {
    let what = "FILE or GRPC_XDS_SOTW";
    let is_xds = reader.parsed("CONFIG_TYPE", what, |text| match text {
        "FILE" => Some(false),
        "GRPC_XDS_SOTW" => Some(true),
        _ => None,
    });
    is_xds.unwrap_or(false)
}

fn envoy(reader: &mut VariableReader<'_>) -> Envoy {
    let mut envoy = Envoy::new(rules(reader));
    envoy.settings = variables::settings(reader);
    // Existing dashboards expect the metric names of envoyproxy/ratelimit.
    envoy.settings.ratelimit_metrics = true;
    envoy.start_without_config = reader.flag("FORCE_START_WITHOUT_INITIAL_CONFIG");
    envoy
}

fn rules(reader: &mut VariableReader<'_>) -> RuleOrigin {
    let merging = if reader.flag("MERGE_DOMAIN_CONFIG") {
        DomainFiles::Merged
    } else {
        DomainFiles::One
    };
    if is_xds(reader) {
        let mut xds = xds::xds(reader);
        xds.merging = merging;
        return RuleOrigin::Xds(Box::new(xds));
    }
    let mut path = PathBuf::from(
        reader
            .text("RUNTIME_ROOT")
            .unwrap_or("/srv/runtime_data/current"),
    );
    path.extend(reader.text("RUNTIME_SUBDIRECTORY"));
    path.push(reader.text("RUNTIME_APPDIRECTORY").unwrap_or("config"));
    RuleOrigin::Files(ConfigFiles {
        path,
        format: FileFormat::Ratelimit,
        merging,
    })
}

fn grpc(config: &mut Config, reader: &mut VariableReader<'_>) {
    let age = reader.parsed("GRPC_MAX_CONNECTION_AGE", SPAN, span);
    config.grpc.max_connection_age = age.unwrap_or(config.grpc.max_connection_age);
    let grace = reader.parsed("GRPC_MAX_CONNECTION_AGE_GRACE", SPAN, span);
    config.grpc.max_connection_age_grace = grace.unwrap_or(config.grpc.max_connection_age_grace);
    if !reader.flag("GRPC_SERVER_USE_TLS") {
        return;
    }
    let mut path = |name: &str| {
        let path = reader.text(name).map(PathBuf::from);
        if path.is_none() {
            reader
                .problems
                .push(format!("{name}: is missing, but GRPC_SERVER_USE_TLS is true; set it to the path of a PEM file"));
        }
        path.unwrap_or_default()
    };
    let (certificate, key) = (path("GRPC_SERVER_TLS_CERT"), path("GRPC_SERVER_TLS_KEY"));
    let client_ca = reader.text("GRPC_CLIENT_TLS_CACERT").map(PathBuf::from);
    config.grpc.tls = Some(TlsFiles {
        certificate,
        key,
        client_ca,
    });
}

/// Warns about listeners that other machines can reach without authentication. A rules file causes
/// the same warnings. By default, the listeners accept connections on all addresses, as in
/// envoyproxy/ratelimit.
fn warn_of_open(config: &mut Config) {
    let tls = config.grpc.tls.as_ref();
    let grpc_asks = tls.is_some_and(|tls| tls.client_ca.is_some());
    let http_advice =
        "set HOST to 127.0.0.1, or write a rules file with `envoy` and a token in `listen.http`";
    let grpc_advice =
        "set GRPC_SERVER_USE_TLS and GRPC_CLIENT_TLS_CACERT, or GRPC_HOST to 127.0.0.1";
    for (variable, address, is_guarded, advice) in [
        ("HOST", config.listen.http, false, http_advice),
        ("GRPC_HOST", config.listen.grpc, grpc_asks, grpc_advice),
    ] {
        let message = address.and_then(|address| open_listener(address, is_guarded, advice));
        config.warnings.extend(message.map(|message| Mistake {
            path: variable.into(),
            line: None,
            message,
        }));
    }
}

fn log_level(reader: &mut VariableReader<'_>) -> Option<&'static str> {
    let what = "one of error, warn, info, debug, trace";
    reader.parsed("LOG_LEVEL", what, |text| {
        match text.to_lowercase().as_str() {
            "panic" | "fatal" | "error" => Some("error"),
            "warn" | "warning" => Some("warn"),
            "info" => Some("info"),
            "debug" => Some("debug"),
            "trace" => Some("trace"),
            _ => None,
        }
    })
}

fn json_log(reader: &mut VariableReader<'_>) -> Option<bool> {
    reader.parsed("LOG_FORMAT", "one of text, json", |text| {
        match text.to_lowercase().as_str() {
            "json" => Some(true),
            "text" => Some(false),
            _ => None,
        }
    })
}

const SPAN: &str = "a duration such as 30s, 10m or 24h";

/// Parses a duration in Go's notation, such as `1h30m` or `500ms`.
fn span(text: &str) -> Option<Duration> {
    let (mut rest, mut whole) = (text, Duration::ZERO);
    while !rest.is_empty() {
        let digits = rest.bytes().take_while(u8::is_ascii_digit).count();
        let (number, after) = rest.split_at(digits);
        let letters = after.bytes().take_while(u8::is_ascii_alphabetic).count();
        let (unit, after) = after.split_at(letters);
        let number: u64 = number.parse().ok()?;
        let part = match unit {
            "ms" => Duration::from_millis(number),
            "s" => Duration::from_secs(number),
            "m" => Duration::from_secs(number.checked_mul(60)?),
            "h" => Duration::from_secs(number.checked_mul(3_600)?),
            _ => return None,
        };
        whole = whole.checked_add(part)?;
        rest = after;
    }
    (whole > Duration::ZERO).then_some(whole)
}

fn ignored(variables: &Variables, config: &Config) -> Vec<String> {
    let set = variables.iter().filter(|(_, value)| !value.is_empty());
    set.filter_map(|(name, value)| {
        reason(name, value, config).map(|why| format!("{name} is ignored: {why}"))
    })
    .collect()
}

/// Returns the reason for ignoring the variable `name`; `None` if it has an effect.
fn reason(name: &str, value: &str, config: &Config) -> Option<&'static str> {
    if redis_variables::HONOURED.contains(&name) {
        return config.redis.is_none().then_some(WITHOUT_REDIS);
    }
    let rules = config.envoy.as_ref().map(|envoy| &envoy.rules);
    if let Some(RuleOrigin::Xds(client)) = rules {
        if xds::OF_TLS.contains(&name) {
            return client.tls.is_none().then_some(WITHOUT_TLS);
        }
        if xds::HONOURED.contains(&name) {
            return None;
        }
        if name.starts_with("RUNTIME_") {
            return Some(WITHOUT_FILES);
        }
    }
    let is_honoured = match name {
        "DEBUG_HOST" => config.admin_token != AdminToken::None,
        "PROMETHEUS_ADDR" => config.listen.metrics.is_some(),
        "PROMETHEUS_PATH" => value == "/metrics",
        _ => false,
    };
    let ignored = IGNORED.iter().find(|(begins, _)| name.starts_with(begins));
    ignored.filter(|_| !is_honoured).map(|(_, why)| *why)
}

#[cfg(test)]
mod tests;
