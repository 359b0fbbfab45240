//! `envoy.config.xds`: rules from a control plane, over Envoy's discovery protocol xDS.

use std::{fmt, path::PathBuf, time::Duration};

use http::{HeaderName, HeaderValue};
use tidegate_core::{Span, notation};
use tidegate_net::ClientTlsFiles;

use super::{DomainFiles, Ratio};
use crate::{
    report::Report,
    store::{path_of, size},
    value::{Fields, Value},
};

/// The minimum of all timeouts and intervals.
const SHORTEST: Span = Span::from_millis(1);
/// The maximum of all timeouts and intervals.
const LONGEST: Span = Span::from_secs(3_600);

/// The default of `max_message`, in bytes.
const DEFAULT_MESSAGE_BYTES: usize = 4 << 20;

/// The maximum of `max_message`, in bytes.
pub const MAX_MESSAGE_BYTES: usize = 256 << 20;

/// The maximum number of additional headers.
pub const MAX_XDS_HEADERS: usize = 32;

/// The maximum number of entries in the node metadata.
pub const MAX_NODE_METADATA: usize = 64;

/// The maximum length of the strings that describe the node, in bytes.
const MAX_NODE_BYTES: usize = 1_024;

/// A control plane that configures the rate limit service.
#[derive(Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct XdsConfig {
    /// `server`: the address of the control plane.
    pub server: XdsServer,
    /// `tls`: TLS to the control plane; `None` means plaintext.
    pub tls: Option<XdsTls>,
    /// `node`: the description of this server. The control plane uses it to select the rules to
    /// send.
    pub node: XdsNode,
    /// `headers`: additional headers to send when opening the gRPC stream.
    pub headers: Vec<(HeaderName, HeaderValue)>,
    /// `connect_timeout`: the maximum time to connect, including the TLS handshake; default 5 s.
    pub connect_timeout: Duration,
    /// `backoff`: the wait times between connection attempts.
    pub backoff: XdsBackoff,
    /// `keep_alive`: the keep-alive pings that detect a dead connection.
    pub keep_alive: KeepAlive,
    /// `max_message`: the maximum size of a message in bytes; default 4 MiB.
    pub max_message: usize,
    /// Whether several resources are allowed to define the same domain.
    pub merging: DomainFiles,
}

/// Omits the header values, which may be credentials.
impl fmt::Debug for XdsConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names: Vec<&str> = self.headers.iter().map(|(name, _)| name.as_str()).collect();
        f.debug_struct("XdsConfig")
            .field("server", &self.server)
            .field("tls", &self.tls)
            .field("node", &self.node)
            .field("headers", &names)
            .field("connect_timeout", &self.connect_timeout)
            .field("backoff", &self.backoff)
            .field("keep_alive", &self.keep_alive)
            .field("max_message", &self.max_message)
            .field("merging", &self.merging)
            .finish()
    }
}

impl XdsConfig {
    /// Creates the configuration for a plaintext connection to `server` with default settings.
    #[must_use]
    pub fn new(server: XdsServer) -> Self {
        Self {
            server,
            tls: None,
            node: XdsNode::default(),
            headers: Vec::new(),
            connect_timeout: Duration::from_secs(5),
            backoff: XdsBackoff::default(),
            keep_alive: KeepAlive::default(),
            max_message: DEFAULT_MESSAGE_BYTES,
            merging: DomainFiles::One,
        }
    }
}

/// The address of a control plane.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct XdsServer {
    /// The host name or IP address, without brackets.
    pub host: String,
    /// The port.
    pub port: u16,
}

impl XdsServer {
    /// Parses an address such as `envoy-gateway:18001`. The gRPC prefix `dns:///` is accepted.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        let text = text.strip_prefix("dns:///").unwrap_or(text);
        let (host, port) = text.rsplit_once(':')?;
        let port = port.parse().ok().filter(|port| *port > 0)?;
        let bare = host
            .strip_prefix('[')
            .and_then(|host| host.strip_suffix(']'));
        let is_sound = |byte: u8| byte.is_ascii_alphanumeric() || b".-_".contains(&byte);
        let is_host = match bare {
            Some(address) => address.parse::<std::net::Ipv6Addr>().is_ok(),
            None => !host.is_empty() && host.bytes().all(is_sound),
        };
        let host = bare.unwrap_or(host).to_owned();
        // A DNS name has at most 253 bytes.
        (is_host && host.len() <= 253).then_some(Self { host, port })
    }
}

/// Formats the address as in a URL.
impl fmt::Display for XdsServer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.host.contains(':') {
            write!(f, "[{}]:{}", self.host, self.port)
        } else {
            write!(f, "{}:{}", self.host, self.port)
        }
    }
}

/// TLS to a control plane.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct XdsTls {
    /// `ca`, `certificate` and `key`: the TLS files.
    pub files: ClientTlsFiles,
    /// `name`: the name that the control plane's certificate must have; the default is the host in
    /// `server`.
    pub name: Option<String>,
}

/// The description of this server for the control plane.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct XdsNode {
    /// `id`; default `default`.
    pub id: String,
    /// `cluster`.
    pub cluster: String,
    /// `metadata`: string values by name.
    pub metadata: Vec<(String, String)>,
    /// `locality.region`.
    pub region: String,
    /// `locality.zone`.
    pub zone: String,
    /// `locality.sub_zone`.
    pub sub_zone: String,
}

/// The default ID is the same as in envoyproxy/ratelimit.
impl Default for XdsNode {
    fn default() -> Self {
        Self {
            id: "default".to_owned(),
            cluster: String::new(),
            metadata: Vec::new(),
            region: String::new(),
            zone: String::new(),
            sub_zone: String::new(),
        }
    }
}

/// The keep-alive pings that detect a dead connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KeepAlive {
    /// `keep_alive.interval`: the time without data after which the client sends a ping; default
    /// 30 s.
    pub interval: Duration,
    /// `keep_alive.timeout`: the maximum time until the reply to a ping; default 10 s.
    pub timeout: Duration,
}

impl Default for KeepAlive {
    fn default() -> Self {
        Self {
            interval: Duration::from_secs(30),
            timeout: Duration::from_secs(10),
        }
    }
}

/// The exponential backoff between connection attempts. The wait time doubles after each failure,
/// up to a maximum.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct XdsBackoff {
    /// `connect`: the first wait time after a failed connection attempt; default 3 s.
    pub connect: Span,
    /// `initial`: the first wait time after a stream has ended; default 10 s.
    pub initial: Span,
    /// `max`: the longest wait time; default 60 s.
    pub max: Span,
    /// `random_factor`: the fraction by which a wait time is randomly shortened or extended;
    /// default 0.5.
    pub random_factor: Ratio,
}

/// The defaults are the same as in envoyproxy/ratelimit.
impl Default for XdsBackoff {
    fn default() -> Self {
        Self {
            connect: Span::from_secs(3),
            initial: Span::from_secs(10),
            max: Span::from_secs(60),
            random_factor: Ratio::HALF,
        }
    }
}

impl XdsBackoff {
    /// Returns the wait time before the attempt with the number `attempt`, counted from 0. Before
    /// attempt 0, the wait time without jitter is `first`. `random` must be uniformly distributed
    /// over the whole range of `u64`.
    #[must_use]
    pub fn wait(&self, first: Span, attempt: u32, random: u64) -> Span {
        let factor = 1_u64.checked_shl(attempt).unwrap_or(u64::MAX);
        let doubled = first.as_micros().saturating_mul(factor);
        let wait = doubled.min(self.max.as_micros());
        let part = self.random_factor.of(wait);
        // The product of two 64-bit numbers fits in a u128. The upper half of the product is a
        // random number from 0 to `2 * part`.
        let extra = (u128::from(random) * (2 * u128::from(part) + 1)) >> 64;
        let extra = u64::try_from(extra).unwrap_or(0);
        let wait = (wait - part).saturating_add(extra);
        Span::from_micros(wait.min(self.max.as_micros()))
    }
}

const FIELDS: &[&str] = &[
    "server",
    "tls",
    "node",
    "headers",
    "connect_timeout",
    "backoff",
    "keep_alive",
    "max_message",
];

/// Reads the map in `envoy.config.xds`.
pub(super) fn xds(
    value: &Value<'_>,
    merging: DomainFiles,
    report: &mut Report,
) -> Option<XdsConfig> {
    let what = "a map such as {server: \"control-plane:18000\"}";
    let fields = value.fields(report, what, FIELDS)?;
    let server = server(&fields, report);
    let tls = fields.get("tls").map(|value| tls(value, report));
    let node = fields.get("node").and_then(|value| node(value, report));
    let headers = fields.get("headers");
    let headers = headers.and_then(|value| headers_of(value, report));
    let backoff = fields.get("backoff");
    let backoff = backoff.and_then(|value| backoff_of(value, report));
    let keep_alive = fields.get("keep_alive");
    let keep_alive = keep_alive.and_then(|value| keep_alive_of(value, report));
    let timeout = fields.get("connect_timeout");
    let timeout = timeout.and_then(|value| span(value, report));
    let max_message = fields.get("max_message");
    let max_message = max_message.and_then(|value| message_size(value, report));
    let mut config = XdsConfig::new(server?);
    // If the section `tls` is invalid, the whole file is invalid. Therefore, an error in `tls`
    // never leads to a plaintext connection.
    config.tls = tls.flatten();
    config.node = node.unwrap_or_default();
    config.headers = headers.unwrap_or_default();
    config.backoff = backoff.unwrap_or_default();
    config.keep_alive = keep_alive.unwrap_or_default();
    config.connect_timeout = timeout.map_or(config.connect_timeout, duration);
    config.max_message = max_message.unwrap_or(config.max_message);
    config.merging = merging;
    Some(config)
}

fn server(fields: &Fields<'_>, report: &mut Report) -> Option<XdsServer> {
    let what = "a host and a port such as envoy-gateway:18001";
    let Some(value) = fields.get("server") else {
        if !fields.tries("server") {
            fields.wrong(report, "server", format!("is missing; set it to {what}"));
        }
        return None;
    };
    let server = XdsServer::parse(value.text(report, what)?);
    if server.is_none() {
        value.expected(report, what);
    }
    server
}

fn tls(value: &Value<'_>, report: &mut Report) -> Option<XdsTls> {
    let what = "a map such as {ca: ca.pem, certificate: client.pem, key: client.key}";
    let fields = value.fields(report, what, &["ca", "certificate", "key", "name"])?;
    let mut path = |name| -> Option<PathBuf> {
        let value = fields.get(name)?;
        let text = value.text(report, "the path of a PEM file")?;
        path_of(value, text, report)
    };
    let (ca, certificate, key) = (path("ca"), path("certificate"), path("key"));
    for (name, other) in [("certificate", "key"), ("key", "certificate")] {
        if fields.get(other).is_some() && !fields.tries(name) {
            let message = format!("is missing, but `{other}` is set; name a PEM file");
            fields.wrong(report, name, message);
        }
    }
    let name = fields.get("name").and_then(|value| text(value, report));
    Some(XdsTls {
        files: ClientTlsFiles {
            ca,
            certificate: certificate.zip(key),
        },
        name,
    })
}

fn node(value: &Value<'_>, report: &mut Report) -> Option<XdsNode> {
    let what = "a map such as {id: tidegate-1, cluster: edge}";
    let fields = value.fields(report, what, &["id", "cluster", "metadata", "locality"])?;
    let mut node = XdsNode::default();
    if let Some(id) = fields.get("id").and_then(|value| text(value, report)) {
        node.id = id;
    }
    if let Some(cluster) = fields.get("cluster").and_then(|value| text(value, report)) {
        node.cluster = cluster;
    }
    if let Some(metadata) = fields.get("metadata") {
        let entries = metadata.pairs(report, "a map of strings")?;
        if entries.len() > MAX_NODE_METADATA {
            metadata.wrong(
                report,
                format!("must have at most {MAX_NODE_METADATA} entries"),
            );
        }
        for (name, value) in entries {
            let value = text(&value, report);
            node.metadata
                .extend(value.map(|value| (name.to_owned(), value)));
        }
    }
    if let Some(locality) = fields.get("locality") {
        let what = "a map such as {region: eu, zone: eu-1a}";
        let fields = locality.fields(report, what, &["region", "zone", "sub_zone"])?;
        let mut of = |name| {
            let text = fields.get(name).and_then(|value| text(value, report));
            text.unwrap_or_default()
        };
        (node.region, node.zone, node.sub_zone) = (of("region"), of("zone"), of("sub_zone"));
    }
    Some(node)
}

/// Reads a string in the node description.
fn text(value: &Value<'_>, report: &mut Report) -> Option<String> {
    let text = value.text(report, "a string")?;
    if text.len() > MAX_NODE_BYTES {
        value.wrong(report, format!("must have at most {MAX_NODE_BYTES} bytes"));
        return None;
    }
    Some(text.to_owned())
}

fn headers_of(value: &Value<'_>, report: &mut Report) -> Option<Vec<(HeaderName, HeaderValue)>> {
    let entries = value.pairs(report, "a map of headers")?;
    if entries.len() > MAX_XDS_HEADERS {
        value.wrong(
            report,
            format!("must have at most {MAX_XDS_HEADERS} headers"),
        );
    }
    let mut headers = Vec::with_capacity(entries.len());
    for (name, value) in entries {
        let Some(text) = value.scalar() else {
            value.wrong(report, "expected a header value");
            continue;
        };
        match header(name, text) {
            Ok(header) => headers.push(header),
            Err(problem) => value.wrong(report, problem),
        }
    }
    Some(headers)
}

/// Parses a header to send with the stream.
///
/// # Errors
///
/// Returns an error message that says why the header cannot be sent. The message does not contain
/// the value, which may be a credential.
pub fn header(name: &str, value: &str) -> Result<(HeaderName, HeaderValue), &'static str> {
    let name = HeaderName::try_from(name).map_err(|_| "is not a header name")?;
    let known = name.as_str();
    let is_of_grpc = matches!(known, "te" | "content-type" | "connection" | "host");
    if is_of_grpc || known.starts_with("grpc-") || known.ends_with("-bin") {
        return Err("is a header that gRPC sets itself; remove it");
    }
    let mut value = HeaderValue::try_from(value).map_err(|_| "is not a header value")?;
    value.set_sensitive(true);
    Ok((name, value))
}

fn backoff_of(value: &Value<'_>, report: &mut Report) -> Option<XdsBackoff> {
    let what = "a map such as {initial: 1s, max: 30s}";
    let known = &["connect", "initial", "max", "random_factor"];
    let fields = value.fields(report, what, known)?;
    let mut backoff = XdsBackoff::default();
    for (name, setting) in [
        ("connect", &mut backoff.connect),
        ("initial", &mut backoff.initial),
        ("max", &mut backoff.max),
    ] {
        let read = fields.get(name).and_then(|value| span(value, report));
        *setting = read.unwrap_or(*setting);
    }
    if let Some(value) = fields.get("random_factor") {
        let what = "a share from 0 to 1, such as 0.5";
        let ratio = value.text(report, what).and_then(Ratio::parse);
        if ratio.is_none() && value.scalar().is_some() {
            value.expected(report, what);
        }
        backoff.random_factor = ratio.unwrap_or(backoff.random_factor);
    }
    Some(backoff)
}

fn keep_alive_of(value: &Value<'_>, report: &mut Report) -> Option<KeepAlive> {
    let what = "a map such as {interval: 30s, timeout: 10s}";
    let fields = value.fields(report, what, &["interval", "timeout"])?;
    let mut keep_alive = KeepAlive::default();
    for (name, setting) in [
        ("interval", &mut keep_alive.interval),
        ("timeout", &mut keep_alive.timeout),
    ] {
        let read = fields.get(name).and_then(|value| span(value, report));
        *setting = read.map_or(*setting, duration);
    }
    Some(keep_alive)
}

fn span(value: &Value<'_>, report: &mut Report) -> Option<Span> {
    let span = value.parsed(report, "a duration such as 5s", notation::span)?;
    if span < SHORTEST || span > LONGEST {
        value.wrong(report, "must be 1ms to 1h");
        return None;
    }
    Some(span)
}

fn duration(span: Span) -> Duration {
    Duration::from_micros(span.as_micros())
}

fn message_size(value: &Value<'_>, report: &mut Report) -> Option<usize> {
    let bytes = size(value, report)?;
    if !(1..=MAX_MESSAGE_BYTES).contains(&bytes) {
        value.wrong(report, "must be 1 byte to 256MiB");
        return None;
    }
    Some(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Config, envoy::RuleOrigin};

    #[test]
    fn a_server_is_a_host_and_a_port() {
        for (text, host, shown) in [
            (
                "envoy-gateway:18001",
                "envoy-gateway",
                "envoy-gateway:18001",
            ),
            ("dns:///a.b.svc:1", "a.b.svc", "a.b.svc:1"),
            ("[::1]:65535", "::1", "[::1]:65535"),
            ("127.0.0.1:80", "127.0.0.1", "127.0.0.1:80"),
        ] {
            let server = XdsServer::parse(text).unwrap();
            assert_eq!(
                (server.host.as_str(), server.to_string().as_str()),
                (host, shown)
            );
        }
        for text in [
            "",
            "a",
            ":1",
            "a:0",
            "a:65536",
            "::1:1",
            "[x]:1",
            "http://a:1",
            "a b:1",
        ] {
            assert_eq!(XdsServer::parse(text), None, "{text}");
        }
    }

    #[test]
    fn a_wait_doubles_up_to_the_maximum_and_is_random() {
        let backoff = XdsBackoff::default();
        let wait = |attempt, random| backoff.wait(backoff.initial, attempt, random).as_micros();
        assert_eq!((wait(0, 0), wait(0, u64::MAX)), (5_000_000, 15_000_000));
        assert_eq!((wait(1, 0), wait(1, u64::MAX)), (10_000_000, 30_000_000));
        assert_eq!((wait(9, 0), wait(99, u64::MAX)), (30_000_000, 60_000_000));
        let exact = XdsBackoff {
            random_factor: Ratio::parse("0").unwrap(),
            ..backoff
        };
        assert_eq!(exact.wait(exact.connect, 1, u64::MAX), Span::from_secs(6));
    }

    fn parse(xds: &str) -> Result<XdsConfig, Vec<String>> {
        let config = Config::parse(&format!("envoy: {{config: {{xds: {xds}}}}}"));
        let config = config.map_err(|mistakes| -> Vec<String> {
            mistakes.iter().map(ToString::to_string).collect()
        })?;
        match config.envoy.unwrap().rules {
            RuleOrigin::Xds(xds) => Ok(*xds),
            RuleOrigin::Files(files) => panic!("{files:?}"),
        }
    }

    #[test]
    fn a_control_plane_is_read_with_all_its_settings() {
        let read = parse("{server: 'a:1'}").unwrap();
        assert_eq!(read, XdsConfig::new(XdsServer::parse("a:1").unwrap()));
        let read = parse(
            "{server: 'a:1', tls: {ca: ca.pem, certificate: c.pem, key: c.key, name: b}, \
             node: {id: n, cluster: c, metadata: {k: v}, locality: {region: r, zone: z, sub_zone: s}}, \
             headers: {authorization: secret}, connect_timeout: 1s, \
             backoff: {connect: 2s, initial: 3s, max: 4s, random_factor: 0.25}, \
             keep_alive: {interval: 5s, timeout: 6s}, max_message: 1MiB}",
        );
        let read = read.unwrap();
        let tls = read.tls.unwrap();
        assert_eq!(tls.name.as_deref(), Some("b"));
        assert_eq!(
            tls.files.certificate,
            Some(("c.pem".into(), "c.key".into()))
        );
        assert_eq!(read.node.metadata, [("k".to_owned(), "v".to_owned())]);
        assert_eq!((&*read.node.id, &*read.node.sub_zone), ("n", "s"));
        assert_eq!(read.headers, [header("authorization", "secret").unwrap()]);
        assert_eq!(read.backoff.connect, Span::from_secs(2));
        assert_eq!(read.backoff.random_factor.to_string(), "0.25");
        assert_eq!(read.keep_alive.timeout, Duration::from_secs(6));
        assert_eq!(
            (read.connect_timeout, read.max_message),
            (Duration::from_secs(1), 1 << 20)
        );
    }

    #[test]
    fn every_mistake_in_a_control_plane_is_reported() {
        let at = |field: &str, text: &str| format!("envoy.config.xds{field} (line 1): {text}");
        for (xds, expected) in [
            (
                "{}",
                at(".server", "is missing; set it to a host and a port"),
            ),
            ("{server: a}", at(".server", "expected a host and a port")),
            (
                "{server: 'a:1', node: {idd: x}}",
                at(".node.idd", "unknown key"),
            ),
            (
                "{server: 'a:1', tls: {key: k}}",
                at(".tls.certificate", "is missing, but `key` is set"),
            ),
            (
                "{server: 'a:1', headers: {te: x}}",
                at(".headers.te", "is a header that gRPC sets"),
            ),
            (
                "{server: 'a:1', connect_timeout: 2h}",
                at(".connect_timeout", "must be 1ms to 1h"),
            ),
            (
                "{server: 'a:1', max_message: 1GiB}",
                at(".max_message", "must be 1 byte to 256MiB"),
            ),
            (
                "{server: 'a:1', backoff: {random_factor: 2}}",
                at(".backoff.random_factor", "expected a share from 0 to 1"),
            ),
        ] {
            let found = parse(xds).unwrap_err();
            assert!(
                found.len() == 1 && found[0].starts_with(&expected),
                "{xds}: {found:?}"
            );
        }
        let wrong = Config::parse("envoy: {config: {xdss: {server: 'a:1'}}}").unwrap_err();
        assert!(
            wrong[0].to_string().contains("did you mean `xds`?"),
            "{wrong:?}"
        );
        let invalid =
            parse("{server: 'a:1', headers: {authorization: \"secret\\n\"}}").unwrap_err();
        assert!(!invalid[0].contains("secret"), "{invalid:?}");
    }

    #[test]
    fn the_value_of_a_header_is_not_shown() {
        let mut config = XdsConfig::new(XdsServer::parse("a:1").unwrap());
        config.headers = vec![header("authorization", "Bearer secret").unwrap()];
        let shown = format!("{config:?}");
        assert!(
            shown.contains("authorization") && !shown.contains("secret"),
            "{shown}"
        );
        for name in ["te", "grpc-timeout", "a b", "trace-bin"] {
            assert!(header(name, "x").is_err(), "{name}");
        }
    }
}
