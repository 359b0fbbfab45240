//! Log line fields, and the part of a request that each field contains.

use http::HeaderName;

use crate::timestamp::TimeForm;

/// The meaning of a field in a log line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Field {
    /// The arrival time of the request.
    Arrival(TimeForm),
    /// The completion time of the request. Subtracting [`Self::Duration`] gives the arrival time.
    Completion(TimeForm),
    /// The duration of the request. The value is the unit of the duration in microseconds.
    Duration(u64),
    /// The peer address of the client's connection.
    Peer,
    /// The peer address, followed by a colon and the port. An IPv6 address has no brackets.
    PeerAndPort,
    /// `X-Forwarded-For` with the peer address as its last element.
    ForwardedForAndPeer,
    /// The request line: method, target and version.
    RequestLine,
    /// The method.
    Method,
    /// The path with the query, or a URI.
    Target,
    /// The path, used only if the line has no target.
    Path,
    /// The query, with or without its question mark, used only if the line has no target.
    Query,
    /// The host, used only if the line has no `Host` header.
    Host,
    /// A request header.
    Header(HeaderName),
    /// An object with request headers: each name has a value or a list of values.
    Headers,
    /// A cookie.
    Cookie(Box<str>),
    /// A query parameter, as encoded in the query.
    Parameter(Box<str>),
    /// An entry that the application sets.
    Entry(Box<str>),
    /// A response entry, such as `status`.
    Response(Box<str>),
}

impl Field {
    /// Returns the field that sets the request entry `name`. The name `time` means the arrival
    /// time.
    pub(crate) fn of_entry(name: &str) -> Option<Self> {
        let header = |name: &str| HeaderName::from_bytes(name.as_bytes()).ok();
        Some(match name {
            "time" => Self::Arrival(TimeForm::Any),
            "ip" | "ip.exact" => Self::Peer,
            "method" => Self::Method,
            "path" => Self::Target,
            "host" => Self::Host,
            "status" | "bytes" | "grpc-status" => Self::Response(name.into()),
            "" => return None,
            _ => {
                if let Some(name) = name.strip_prefix("header.") {
                    Self::Header(header(name)?)
                } else if let Some(name) = name.strip_prefix("cookie.") {
                    Self::Cookie(name.into())
                } else if let Some(name) = name.strip_prefix("query.") {
                    Self::Parameter(name.into())
                } else {
                    Self::Entry(name.into())
                }
            }
        })
    }

    /// Returns true if the field is the time of the request.
    pub(crate) fn is_time(&self) -> bool {
        matches!(self, Self::Arrival(_) | Self::Completion(_))
    }

    /// Returns a description of the field's required content, for error messages.
    pub(crate) fn expected(&self) -> &'static str {
        match self {
            Self::Arrival(_) | Self::Completion(_) => {
                "a time such as 10/Oct/2026:13:55:36 +0200, 2026-10-10T13:55:36Z or 1791640536.123"
            }
            Self::Duration(_) => "a duration, a number",
            Self::Response(_) => "a number",
            Self::Peer => "an address",
            Self::PeerAndPort => "an address and a port",
            Self::Headers => "an object with headers",
            _ => "text",
        }
    }
}

/// `--entry NAME=FIELD`: the log field that contains an entry.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EntryMapping {
    /// The name of the field.
    pub(crate) field: Box<str>,
    pub(crate) meaning: Field,
}

impl EntryMapping {
    /// Parses `NAME=FIELD`.
    ///
    /// # Errors
    ///
    /// Returns a description of the problem if `text` is invalid.
    pub fn parse(text: &str) -> Result<Self, String> {
        let expected = "expected ENTRY=FIELD, such as customer=http_x_customer or time=started_at";
        let (entry, field) = text.split_once('=').ok_or(expected)?;
        let (entry, field) = (entry.trim(), field.trim().trim_start_matches('$'));
        if field.is_empty() {
            return Err(expected.to_owned());
        }
        let entry = tidegate_config::entry_name(entry);
        let meaning = Field::of_entry(&entry)
            .ok_or_else(|| format!("`{entry}` is not the name of an entry; {expected}"))?;
        Ok(Self {
            field: field.into(),
            meaning,
        })
    }
}
