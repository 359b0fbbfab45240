//! `grpc`: the settings of the gRPC listener.

use std::time::Duration;

use tidegate_core::{Span, notation};
use tidegate_net::TlsFiles;

use super::{
    report::Report,
    value::{Fields, Value},
};

/// The settings of the gRPC listener.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Grpc {
    /// `grpc.authorization`: whether the listener offers Envoy's service `Authorization`, which
    /// applies the rules to the requests that Envoy describes; default false.
    pub authorization: bool,
    /// `grpc.tls`: the certificate of the listener; `None` means HTTP/2 over plaintext (h2c).
    pub tls: Option<TlsFiles>,
    /// `grpc.keep_alive`: the interval of keep-alive pings; default 30 s.
    pub keep_alive: Duration,
    /// `grpc.keep_alive_timeout`: how long a client may take to respond to a ping; default 10 s.
    pub keep_alive_timeout: Duration,
    /// `grpc.max_connection_age`: the age (±10 % jitter) at which the server asks the client to
    /// replace a connection; default one day.
    pub max_connection_age: Duration,
    /// `grpc.max_connection_age_grace`: how long calls in progress may continue after a connection
    /// has reached the maximum age; default one hour.
    pub max_connection_age_grace: Duration,
    /// `grpc.max_streams`: the maximum number of concurrent calls on one connection; default 1,000.
    pub max_streams: u32,
}

impl Default for Grpc {
    fn default() -> Self {
        Self {
            authorization: false,
            tls: None,
            keep_alive: Duration::from_secs(30),
            keep_alive_timeout: Duration::from_secs(10),
            max_connection_age: Duration::from_secs(86_400),
            max_connection_age_grace: Duration::from_secs(3_600),
            max_streams: 1_000,
        }
    }
}

/// The maximum of all durations in the section `grpc`.
const LONGEST: Span = Span::from_secs(366 * 86_400);

/// The maximum of `max_streams`.
const MAX_STREAMS: u32 = 100_000;

const FIELDS: &[&str] = &[
    "authorization",
    "tls",
    "keep_alive",
    "keep_alive_timeout",
    "max_connection_age",
    "max_connection_age_grace",
    "max_streams",
];

pub(super) fn grpc(file: &Fields<'_>, report: &mut Report) -> Grpc {
    let mut grpc = Grpc::default();
    let value = file.get("grpc");
    let Some(fields) =
        value.and_then(|value| value.fields(report, "a map such as {max_streams: 100}", FIELDS))
    else {
        return grpc;
    };
    for (name, setting) in [
        ("keep_alive", &mut grpc.keep_alive),
        ("keep_alive_timeout", &mut grpc.keep_alive_timeout),
        ("max_connection_age", &mut grpc.max_connection_age),
        (
            "max_connection_age_grace",
            &mut grpc.max_connection_age_grace,
        ),
    ] {
        if let Some(time) = fields.get(name).and_then(|value| time(value, report)) {
            *setting = time;
        }
    }
    if let Some(value) = fields.get("max_streams") {
        grpc.max_streams = streams(value, report).unwrap_or(grpc.max_streams);
    }
    let authorization = fields.get("authorization");
    grpc.authorization = authorization
        .and_then(|value| value.flag(report))
        .unwrap_or_default();
    grpc.tls = fields.get("tls").and_then(|value| tls(value, report));
    grpc
}

pub(super) fn time(value: &Value<'_>, report: &mut Report) -> Option<Duration> {
    let span = value.parsed(report, "a duration such as 30s", notation::span)?;
    if span < Span::from_millis(1) || span > LONGEST {
        value.wrong(report, "must be 1ms to 366d");
        return None;
    }
    Some(Duration::from_micros(span.as_micros()))
}

fn streams(value: &Value<'_>, report: &mut Report) -> Option<u32> {
    let streams = value.small_number::<u32>(report)?;
    if !(1..=MAX_STREAMS).contains(&streams) {
        value.wrong(report, format!("must be 1 to {MAX_STREAMS}"));
        return None;
    }
    Some(streams)
}

pub(super) fn tls(value: &Value<'_>, report: &mut Report) -> Option<TlsFiles> {
    let what = "a map such as {certificate: server.pem, key: server.key}";
    let fields = value.fields(report, what, &["certificate", "key", "client_ca"])?;
    let mut path = |name| {
        let path = fields.get(name)?.text(report, "the path of a PEM file")?;
        Some(path.into())
    };
    let (certificate, key, client_ca) = (path("certificate"), path("key"), path("client_ca"));
    for name in ["certificate", "key"] {
        if !fields.tries(name) {
            fields.wrong(report, name, "is missing; name a PEM file");
        }
    }
    Some(TlsFiles {
        certificate: certificate?,
        key: key?,
        client_ca,
    })
}
