//! Tests that no environment variable of envoyproxy/ratelimit is ignored silently. Every variable
//! either takes effect, is reported as ignored with a reason, or prevents the start.

use tidegate_config::envoy::RuleOrigin;
use tidegate_envoy::{Variables, from_environment};

/// How a variable is handled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fate {
    /// The variable changes the configuration.
    Honoured,
    /// The variable is reported as ignored with a reason, and does not change the configuration.
    Ignored,
    /// The variable prevents the start.
    Refused,
}

use Fate::{Honoured, Ignored, Refused};

/// A variable, its value, how it is handled, and the other variables on which it depends.
type Row = (
    &'static str,
    &'static str,
    Fate,
    &'static [(&'static str, &'static str)],
);

const REDIS: &[(&str, &str)] = &[("REDIS_URL", "127.0.0.1:6379")];
const SENTINEL: &[(&str, &str)] = &[
    ("REDIS_TYPE", "SENTINEL"),
    ("REDIS_URL", "main,127.0.0.1:1"),
];
const HEADERS: &[(&str, &str)] = &[("LIMIT_RESPONSE_HEADERS_ENABLED", "true")];
const TLS: &[(&str, &str)] = &[
    ("GRPC_SERVER_USE_TLS", "true"),
    ("GRPC_SERVER_TLS_CERT", "a"),
    ("GRPC_SERVER_TLS_KEY", "b"),
];

const XDS: &[(&str, &str)] = &[("CONFIG_TYPE", "GRPC_XDS_SOTW")];
const XDS_TLS: &[(&str, &str)] = &[
    ("CONFIG_TYPE", "GRPC_XDS_SOTW"),
    ("CONFIG_GRPC_XDS_SERVER_USE_TLS", "true"),
    ("CONFIG_GRPC_XDS_CLIENT_TLS_CERT", "c"),
    ("CONFIG_GRPC_XDS_CLIENT_TLS_KEY", "k"),
];
const PROMETHEUS: &[(&str, &str)] = &[("USE_PROMETHEUS", "true")];

const VARIABLES: &[Row] = &[
    ("HOST", "127.0.0.2", Honoured, &[]),
    ("PORT", "81", Honoured, &[]),
    ("DEBUG_HOST", "127.0.0.2", Ignored, &[]),
    (
        "DEBUG_HOST",
        "127.0.0.2",
        Honoured,
        &[("TIDEGATE_ADMIN_TOKEN", "secret")],
    ),
    ("DEBUG_PORT", "82", Honoured, &[]),
    ("GRPC_HOST", "127.0.0.2", Honoured, &[]),
    ("GRPC_PORT", "83", Honoured, &[]),
    ("GRPC_UDS", "/run/x", Refused, &[]),
    ("GRPC_MAX_CONNECTION_AGE", "1h", Honoured, &[]),
    ("GRPC_MAX_CONNECTION_AGE_GRACE", "2h", Honoured, &[]),
    (
        "GRPC_SERVER_USE_TLS",
        "true",
        Honoured,
        &[("GRPC_SERVER_TLS_CERT", "a"), ("GRPC_SERVER_TLS_KEY", "b")],
    ),
    ("GRPC_SERVER_TLS_CERT", "other", Honoured, TLS),
    ("GRPC_SERVER_TLS_KEY", "other", Honoured, TLS),
    ("GRPC_CLIENT_TLS_CACERT", "c", Honoured, TLS),
    ("GRPC_CLIENT_TLS_SAN", "client", Refused, TLS),
    ("LOG_LEVEL", "debug", Honoured, &[]),
    ("LOG_FORMAT", "json", Honoured, &[]),
    ("CONFIG_TYPE", "GRPC_XDS_SOTW", Honoured, &[]),
    ("CONFIG_TYPE", "GRPC_XDS_DELTA", Refused, &[]),
    ("FORCE_START_WITHOUT_INITIAL_CONFIG", "true", Honoured, XDS),
    ("RUNTIME_ROOT", "/x", Ignored, XDS),
    ("RUNTIME_SUBDIRECTORY", "y", Ignored, XDS),
    ("RUNTIME_APPDIRECTORY", "z", Ignored, XDS),
    ("RUNTIME_IGNOREDOTFILES", "true", Ignored, XDS),
    ("RUNTIME_WATCH_ROOT", "false", Ignored, XDS),
    ("MERGE_DOMAIN_CONFIG", "true", Honoured, XDS),
    ("GRPC_SERVER_TLS_CA_CERT", "c", Ignored, TLS),
    ("FORCE_START_WITHOUT_INITIAL_CONFIG", "true", Honoured, &[]),
    ("RUNTIME_ROOT", "/x", Honoured, &[]),
    ("RUNTIME_SUBDIRECTORY", "y", Honoured, &[]),
    ("RUNTIME_APPDIRECTORY", "z", Honoured, &[]),
    ("RUNTIME_IGNOREDOTFILES", "true", Ignored, &[]),
    ("RUNTIME_WATCH_ROOT", "false", Ignored, &[]),
    ("MERGE_DOMAIN_CONFIG", "true", Honoured, &[]),
    (
        "HEALTHY_WITH_AT_LEAST_ONE_CONFIG_LOADED",
        "true",
        Honoured,
        &[],
    ),
    ("CONFIG_GRPC_XDS_NODE_ID", "n", Ignored, &[]),
    ("CONFIG_GRPC_XDS_NODE_METADATA", "k=v", Ignored, &[]),
    ("CONFIG_GRPC_XDS_SERVER_URL", "x:1", Ignored, &[]),
    (
        "CONFIG_GRPC_XDS_SERVER_CONNECT_RETRY_INTERVAL",
        "3s",
        Ignored,
        &[],
    ),
    (
        "CONFIG_GRPC_XDS_CLIENT_ADDITIONAL_HEADERS",
        "k:v",
        Ignored,
        &[],
    ),
    ("CONFIG_GRPC_XDS_SERVER_USE_TLS", "true", Ignored, &[]),
    ("CONFIG_GRPC_XDS_CLIENT_TLS_CERT", "a", Ignored, &[]),
    ("CONFIG_GRPC_XDS_CLIENT_TLS_KEY", "a", Ignored, &[]),
    ("CONFIG_GRPC_XDS_SERVER_TLS_CACERT", "a", Ignored, &[]),
    ("CONFIG_GRPC_XDS_SERVER_TLS_SAN", "a", Ignored, &[]),
    ("XDS_CLIENT_BACKOFF_INITIAL_INTERVAL", "1s", Ignored, &[]),
    ("XDS_CLIENT_BACKOFF_MAX_INTERVAL", "1s", Ignored, &[]),
    ("XDS_CLIENT_BACKOFF_RANDOM_FACTOR", "1", Ignored, &[]),
    ("XDS_CLIENT_BACKOFF_JITTER", "true", Ignored, &[]),
    ("XDS_CLIENT_MAX_MSG_SIZE_IN_BYTES", "1", Ignored, &[]),
    ("CONFIG_GRPC_XDS_NODE_ID", "n", Honoured, XDS),
    ("CONFIG_GRPC_XDS_NODE_METADATA", "k=v", Honoured, XDS),
    ("CONFIG_GRPC_XDS_SERVER_URL", "x:1", Honoured, XDS),
    (
        "CONFIG_GRPC_XDS_SERVER_CONNECT_RETRY_INTERVAL",
        "4s",
        Honoured,
        XDS,
    ),
    (
        "CONFIG_GRPC_XDS_CLIENT_ADDITIONAL_HEADERS",
        "k:v",
        Honoured,
        XDS,
    ),
    ("CONFIG_GRPC_XDS_SERVER_USE_TLS", "true", Honoured, XDS),
    ("CONFIG_GRPC_XDS_CLIENT_TLS_CERT", "a", Honoured, XDS_TLS),
    ("CONFIG_GRPC_XDS_CLIENT_TLS_CERT", "a", Ignored, XDS),
    ("CONFIG_GRPC_XDS_CLIENT_TLS_KEY", "a", Honoured, XDS_TLS),
    ("CONFIG_GRPC_XDS_CLIENT_TLS_KEY", "a", Ignored, XDS),
    ("CONFIG_GRPC_XDS_SERVER_TLS_CACERT", "a", Honoured, XDS_TLS),
    ("CONFIG_GRPC_XDS_SERVER_TLS_CACERT", "a", Ignored, XDS),
    ("CONFIG_GRPC_XDS_SERVER_TLS_SAN", "a", Honoured, XDS_TLS),
    ("CONFIG_GRPC_XDS_SERVER_TLS_SAN", "a", Ignored, XDS),
    ("XDS_CLIENT_BACKOFF_INITIAL_INTERVAL", "1s", Honoured, XDS),
    ("XDS_CLIENT_BACKOFF_MAX_INTERVAL", "1s", Honoured, XDS),
    ("XDS_CLIENT_BACKOFF_RANDOM_FACTOR", "1", Honoured, XDS),
    ("XDS_CLIENT_BACKOFF_RANDOM_FACTOR", "2", Refused, XDS),
    ("XDS_CLIENT_BACKOFF_JITTER", "false", Honoured, XDS),
    ("XDS_CLIENT_MAX_MSG_SIZE_IN_BYTES", "1", Honoured, XDS),
    ("CONFIG_GRPC_XDS_SERVER_URL", "x", Refused, XDS),
    (
        "CONFIG_GRPC_XDS_CLIENT_ADDITIONAL_HEADERS",
        "te:v",
        Refused,
        XDS,
    ),
    ("USE_STATSD", "true", Ignored, &[]),
    ("STATSD_HOST", "x", Ignored, &[]),
    ("STATSD_PORT", "1", Ignored, &[]),
    ("USE_DOG_STATSD", "true", Ignored, &[]),
    ("USE_DOG_STATSD_MOGRIFIERS", "X", Ignored, &[]),
    ("DOG_STATSD_MOGRIFIER_X_PATTERN", "x", Ignored, &[]),
    ("DOG_STATSD_MOGRIFIER_X_NAME", "x", Ignored, &[]),
    ("DOG_STATSD_MOGRIFIER_X_TAGS", "x:y", Ignored, &[]),
    ("USE_PROMETHEUS", "true", Honoured, &[]),
    ("PROMETHEUS_ADDR", ":1", Ignored, &[]),
    ("PROMETHEUS_ADDR", ":1", Honoured, PROMETHEUS),
    ("PROMETHEUS_ADDR", "metrics", Refused, PROMETHEUS),
    ("PROMETHEUS_PATH", "/x", Ignored, &[]),
    ("PROMETHEUS_MAPPER_YAML", "x", Ignored, &[]),
    (
        "PROMETHEUS_RESPONSE_TIME_AS_MILLISECONDS",
        "true",
        Ignored,
        &[],
    ),
    ("EXTRA_TAGS", "k:v", Ignored, &[]),
    ("STATS_FLUSH_INTERVAL", "1s", Ignored, &[]),
    ("DISABLE_STATS", "true", Ignored, &[]),
    ("BACKEND_TYPE", "memcache", Refused, &[]),
    ("BACKEND_TYPE", "redis", Ignored, &[]),
    ("EXPIRATION_JITTER_MAX_SECONDS", "1", Ignored, &[]),
    ("LOCAL_CACHE_SIZE_IN_BYTES", "1000", Honoured, &[]),
    ("NEAR_LIMIT_RATIO", "0.5", Honoured, &[]),
    ("CACHE_KEY_PREFIX", "x", Ignored, &[]),
    ("CACHE_KEY_PREFIX", "x", Honoured, REDIS),
    (
        "STOP_CACHE_KEY_INCREMENT_WHEN_OVERLIMIT",
        "true",
        Honoured,
        &[],
    ),
    ("SHADOW_MODE", "true", Honoured, &[]),
    ("QUOTA_MODE", "true", Honoured, &[]),
    ("RESPONSE_DYNAMIC_METADATA", "true", Honoured, &[]),
    ("LIMIT_RESPONSE_HEADERS_ENABLED", "true", Honoured, &[]),
    ("LIMIT_LIMIT_HEADER", "x-a", Honoured, HEADERS),
    ("LIMIT_REMAINING_HEADER", "x-b", Honoured, HEADERS),
    ("LIMIT_RESET_HEADER", "x-c", Honoured, HEADERS),
    ("REDIS_SOCKET_TYPE", "tcp", Ignored, &[]),
    ("REDIS_TYPE", "CLUSTER", Honoured, REDIS),
    ("REDIS_URL", "127.0.0.1:1", Honoured, &[]),
    ("REDIS_POOL_SIZE", "5", Ignored, REDIS),
    ("REDIS_AUTH", "x", Honoured, REDIS),
    ("REDIS_SENTINEL_AUTH", "x", Honoured, SENTINEL),
    ("REDIS_TLS", "true", Honoured, REDIS),
    ("REDIS_TLS_CLIENT_CERT", "a", Refused, REDIS),
    (
        "REDIS_TLS_CACERT",
        "a",
        Honoured,
        &[("REDIS_URL", "127.0.0.1:1"), ("REDIS_TLS", "true")],
    ),
    (
        "REDIS_TLS_SKIP_HOSTNAME_VERIFICATION",
        "true",
        Refused,
        REDIS,
    ),
    ("REDIS_TIMEOUT", "1s", Ignored, REDIS),
    ("REDIS_PIPELINE_WINDOW", "1ms", Ignored, REDIS),
    ("REDIS_PIPELINE_LIMIT", "1", Ignored, REDIS),
    ("REDIS_CLUSTER_PIPELINE_PARALLELISM", "1", Ignored, REDIS),
    ("REDIS_POOL_ON_EMPTY_BEHAVIOR", "WAIT", Ignored, REDIS),
    (
        "REDIS_HEALTH_CHECK_ACTIVE_CONNECTION",
        "true",
        Ignored,
        REDIS,
    ),
    ("REDIS_STARTUP_INITIAL_INTERVAL", "1s", Ignored, REDIS),
    ("REDIS_STARTUP_MAX_INTERVAL", "1s", Ignored, REDIS),
    ("REDIS_STARTUP_MAX_ELAPSED_TIME", "1s", Ignored, REDIS),
    ("REDIS_PERSECOND", "true", Ignored, REDIS),
    ("REDIS_PERSECOND_URL", "127.0.0.1:1", Ignored, REDIS),
    ("REDIS_PERSECOND_AUTH", "x", Ignored, REDIS),
    ("MEMCACHE_HOST_PORT", "x:1", Ignored, &[]),
    ("MEMCACHE_SRV", "x", Ignored, &[]),
    ("MEMCACHE_SRV_REFRESH", "1s", Ignored, &[]),
    ("MEMCACHE_MAX_IDLE_CONNS", "1", Ignored, &[]),
    ("MEMCACHE_TLS", "true", Ignored, &[]),
    ("TRACING_ENABLED", "true", Ignored, &[]),
    ("TRACING_EXPORTER_PROTOCOL", "http", Ignored, &[]),
    ("TRACING_SERVICE_NAME", "x", Ignored, &[]),
    ("TRACING_SERVICE_NAMESPACE", "x", Ignored, &[]),
    ("TRACING_SERVICE_INSTANCE_ID", "x", Ignored, &[]),
    ("TRACING_SAMPLING_RATE", "1", Ignored, &[]),
];

/// Returns how a variable is handled. Returns `None` if the variable changes the configuration
/// although it is reported as ignored, or does neither.
fn fate((name, value, _, beside): &Row) -> Option<Fate> {
    let own = |(name, value): &(&str, &str)| ((*name).to_owned(), (*value).to_owned());
    let without: Variables = beside.iter().map(own).collect();
    let mut with = without.clone();
    with.insert((*name).to_owned(), (*value).to_owned());
    let without = from_environment(&without).unwrap();
    let Ok(with) = from_environment(&with) else {
        return Some(Refused);
    };
    let is_ignored = |line: &String| line.starts_with(&format!("{name} is ignored: "));
    let is_the_same = format!("{:?}{:?}{:?}", with.config, with.log, with.json_log)
        == format!(
            "{:?}{:?}{:?}",
            without.config, without.log, without.json_log
        );
    match (with.ignored.iter().any(is_ignored), is_the_same) {
        (true, true) => Some(Ignored),
        (false, false) => Some(Honoured),
        (true, false) | (false, true) => None,
    }
}

/// The program's OpenTelemetry exporters read these variables, regardless of the configuration.
#[test]
fn the_variables_of_opentelemetry_are_not_ignored() {
    let endpoint = ("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:4318");
    let variables = [endpoint].map(|(name, value)| (name.to_owned(), value.to_owned()));
    let read = from_environment(&variables.into_iter().collect()).unwrap();
    assert!(read.ignored.iter().all(|line| !line.starts_with("OTEL_")));
}

#[test]
fn every_variable_of_envoyproxy_ratelimit_has_an_effect_or_a_report() {
    let wrong: Vec<String> = VARIABLES
        .iter()
        .filter(|row| fate(row) != Some(row.2))
        .map(|row| format!("{}={} with {:?}: {:?}", row.0, row.1, row.3, fate(row)))
        .collect();
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// The environment of the container that Envoy Gateway deploys, with Redis and Prometheus.
const ENVOY_GATEWAY: &str = include_str!("envoy_gateway.env");

#[test]
fn the_environment_of_envoy_gateway_is_a_complete_configuration() {
    let variables = ENVOY_GATEWAY
        .lines()
        .filter(|line| !line.is_empty() && !line.starts_with('#'))
        .map(|line| line.split_once('=').unwrap())
        .map(|(name, value)| (name.to_owned(), value.to_owned()));
    let read = from_environment(&variables.collect()).unwrap();
    let (config, envoy) = (&read.config, read.config.envoy.as_ref().unwrap());
    let any = |port| Some(std::net::SocketAddr::from(([0, 0, 0, 0], port)));
    assert_eq!(config.listen.http, any(8080));
    assert_eq!(config.listen.grpc, any(8081));
    assert_eq!(config.listen.metrics, any(19001));
    assert!(config.redis.is_some());
    assert!(envoy.start_without_config && envoy.settings.ratelimit_metrics);
    let RuleOrigin::Xds(xds) = &envoy.rules else {
        panic!("{:?}", envoy.rules);
    };
    assert_eq!(xds.server.to_string(), "envoy-gateway:18001");
    assert_eq!(xds.node.id, "envoy-ratelimit");
    let files = &xds.tls.as_ref().unwrap().files;
    let certificate = Some(("/certs/tls.crt".into(), "/certs/tls.key".into()));
    assert_eq!(files.ca.as_deref(), Some("/certs/ca.crt".as_ref()));
    assert_eq!(files.certificate, certificate);
    let grpc = config.grpc.tls.as_ref().unwrap();
    assert_eq!(grpc.certificate, std::path::Path::new("/certs/tls.crt"));
    let ignored: Vec<&str> = read
        .ignored
        .iter()
        .filter_map(|line| line.split_once(' '))
        .map(|(name, _)| name)
        .collect();
    assert_eq!(
        ignored,
        [
            "GRPC_SERVER_TLS_CA_CERT",
            "PROMETHEUS_MAPPER_YAML",
            "RUNTIME_IGNOREDOTFILES",
            "RUNTIME_ROOT",
            "RUNTIME_SUBDIRECTORY",
            "RUNTIME_WATCH_ROOT",
            "TRACING_ENABLED",
            "TRACING_SAMPLING_RATE",
            "TRACING_SERVICE_INSTANCE_ID",
            "TRACING_SERVICE_NAME",
            "TRACING_SERVICE_NAMESPACE",
            "USE_STATSD",
        ]
    );
}
