//! Determines the meaning of each field from its name, for formats with named fields.

use http::HeaderName;

use crate::{field::Field, timestamp::TimeForm};

/// Field names with the same meaning. The preferred name comes first.
struct Aliases {
    names: &'static [&'static str],
    field: fn() -> Field,
}

const SECONDS: u64 = 1_000_000;
const MILLISECONDS: u64 = 1_000;

/// All known field names.
const KNOWN: &[Aliases] = &[
    Aliases {
        names: &[
            "client_ip",
            "clientip",
            "client",
            "ip",
            "remote_addr",
            "remote_ip",
            "remoteaddr",
            "remoteip",
            "clienthost",
            "client_addr",
            "client.ip",
            "source.ip",
            "request.remote_ip",
            "request.remote_addr",
            "req.remoteaddress",
            "downstream_remote_address",
            "peer",
            "peer_address",
        ],
        field: || Field::Peer,
    },
    Aliases {
        names: &[
            "method",
            "request_method",
            "requestmethod",
            "http_method",
            "httpmethod",
            "verb",
            "request.method",
            "req.method",
            "http.request.method",
            "http.method",
        ],
        field: || Field::Method,
    },
    Aliases {
        names: &["request", "request_line"],
        field: || Field::RequestLine,
    },
    Aliases {
        names: &[
            "request_uri",
            "request.uri",
            "uri",
            "url",
            "target",
            "requestpath",
            "req.url",
            "http.url",
            "url.original",
            "original_path",
        ],
        field: || Field::Target,
    },
    Aliases {
        names: &[
            "path",
            "request_path",
            "url.path",
            "http.target",
            "endpoint",
        ],
        field: || Field::Path,
    },
    Aliases {
        names: &["query", "args", "query_string", "url.query"],
        field: || Field::Query,
    },
    Aliases {
        names: &[
            "host",
            "http_host",
            "authority",
            "requesthost",
            "request_host",
            "request.host",
            "vhost",
            "url.domain",
        ],
        field: || Field::Host,
    },
    Aliases {
        names: &[
            "user_agent",
            "http_user_agent",
            "useragent",
            "user-agent",
            "agent",
            "user_agent.original",
        ],
        field: || Field::Header(http::header::USER_AGENT),
    },
    Aliases {
        names: &[
            "x_forwarded_for",
            "http_x_forwarded_for",
            "forwarded_for",
            "x-forwarded-for",
            "xff",
        ],
        field: || Field::Header(HeaderName::from_static("x-forwarded-for")),
    },
    Aliases {
        names: &[
            "headers",
            "request_headers",
            "request.headers",
            "req.headers",
        ],
        field: || Field::Headers,
    },
    Aliases {
        names: &[
            "status",
            "status_code",
            "response_code",
            "downstreamstatus",
            "statuscode",
            "res.statuscode",
            "http.response.status_code",
            "code",
        ],
        field: || Field::Response("status".into()),
    },
    Aliases {
        names: &[
            "bytes",
            "body_bytes_sent",
            "bytes_sent",
            "size",
            "downstreamcontentsize",
            "response_size",
            "http.response.body.bytes",
        ],
        field: || Field::Response("bytes".into()),
    },
    Aliases {
        names: &["grpc_status", "grpc_status_number"],
        field: || Field::Response("grpc-status".into()),
    },
];

/// The names of fields with the arrival time.
const STARTS: &[&str] = &[
    "startutc",
    "start_time",
    "starttime",
    "started_at",
    "start",
    "startlocal",
];

/// The names of fields with a time. If the log has a duration, the time is the completion time;
/// otherwise, it is the arrival time.
const TIMES: &[&str] = &["time", "timestamp", "@timestamp", "datetime", "date", "ts"];

/// The names of duration fields with a known unit, and the unit in microseconds. nginx logs
/// `request_time` in seconds.
const DURATIONS: &[(&str, u64)] = &[
    ("request_time", SECONDS),
    ("duration_seconds", SECONDS),
    ("duration_s", SECONDS),
    ("request_time_ms", MILLISECONDS),
    ("duration_ms", MILLISECONDS),
    ("latency_ms", MILLISECONDS),
    ("response_time_ms", MILLISECONDS),
];

/// The names of fields with the completion time.
const COMPLETIONS: &[&str] = &["msec", "time_iso8601", "time_local"];

/// Determines the meaning of the fields with these `names`. Returns the index and the meaning of
/// each known field.
pub(crate) fn fields_of(names: &[&str]) -> Vec<(usize, Field)> {
    let names: Vec<String> = names.iter().map(|name| name.to_lowercase()).collect();
    let at = |wanted: &str| names.iter().position(|name| name == wanted);
    let mut fields = Vec::new();
    for Aliases { names, field } in KNOWN {
        fields.extend(
            names
                .iter()
                .find_map(|name| at(name))
                .map(|at| (at, field())),
        );
    }
    for (index, name) in names.iter().enumerate() {
        let is_known = fields.iter().any(|(known, _)| *known == index);
        // nginx names headers `http_x_api_key`, and Traefik `request_X-Api-Key`.
        let header = name
            .strip_prefix("http_")
            .map(|header| header.replace('_', "-"));
        let header = header.or_else(|| {
            let header = name.strip_prefix("request_")?;
            header.contains('-').then(|| header.to_owned())
        });
        if let Some(header) = header.filter(|_| !is_known)
            && let Ok(header) = HeaderName::from_bytes(header.as_bytes())
        {
            fields.push((index, Field::Header(header)));
        }
    }
    fields.extend(time_of(&at));
    fields
}

/// Returns the fields with the time and the duration.
fn time_of(at: &impl Fn(&str) -> Option<usize>) -> Vec<(usize, Field)> {
    let completion = |time: usize, duration: Option<usize>| {
        let time = (time, Field::Completion(TimeForm::Any));
        let duration = duration.map(|at| (at, Field::Duration(SECONDS)));
        std::iter::once(time).chain(duration).collect()
    };
    // The column names in Caddy's logs.
    if let (Some(time), Some(_)) = (at("ts"), at("request.uri")) {
        return completion(time, at("duration"));
    }
    if let Some(time) = COMPLETIONS.iter().find_map(|name| at(name)) {
        return completion(time, at("request_time"));
    }
    if let Some(time) = STARTS.iter().find_map(|name| at(name)) {
        return vec![(time, Field::Arrival(TimeForm::Any))];
    }
    let Some(time) = TIMES.iter().find_map(|name| at(name)) else {
        return Vec::new();
    };
    let duration = DURATIONS
        .iter()
        .find_map(|(name, unit)| Some((at(name)?, Field::Duration(*unit))));
    match duration {
        // A server that logs the duration writes the line when the request is complete, so the time
        // is usually the completion time.
        Some(duration) => vec![(time, Field::Completion(TimeForm::Any)), duration],
        None => vec![(time, Field::Arrival(TimeForm::Any))],
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_best_name_is_used() {
        let fields = fields_of(&[
            "ts",
            "time",
            "remote_addr",
            "client_ip",
            "http_x_key",
            "other",
        ]);
        let expected = [
            (3, Field::Peer),
            (4, Field::Header(HeaderName::from_static("x-key"))),
            (1, Field::Arrival(TimeForm::Any)),
        ];
        assert_eq!(fields, expected);
    }

    #[test]
    fn a_time_beside_a_duration_is_the_time_of_completion() {
        let time = |names: &[&str]| time_of(&|name: &str| names.iter().position(|n| *n == name));
        let any = || Field::Completion(TimeForm::Any);
        assert_eq!(
            time(&["time", "request_time"]),
            [(0, any()), (1, Field::Duration(SECONDS))]
        );
        assert_eq!(
            time(&["duration_ms", "@timestamp"]),
            [(1, any()), (0, Field::Duration(MILLISECONDS))]
        );
        let arrival = || Field::Arrival(TimeForm::Any);
        assert_eq!(
            time(&["start_time", "time", "duration_ms"]),
            [(0, arrival())]
        );
        // The duration is not used, because its unit is unknown.
        assert_eq!(time(&["time", "duration"]), [(0, arrival())]);
    }

    #[test]
    fn caddy_and_nginx_log_the_time_of_completion() {
        let any = || Field::Completion(TimeForm::Any);
        assert_eq!(
            time_of(&|name: &str| ["ts", "request.uri", "duration"]
                .iter()
                .position(|known| *known == name)),
            [(0, any()), (2, Field::Duration(SECONDS))]
        );
        assert_eq!(
            time_of(&|name: &str| ["time", "msec", "request_time"]
                .iter()
                .position(|known| *known == name)),
            [(1, any()), (2, Field::Duration(SECONDS))]
        );
    }
}
