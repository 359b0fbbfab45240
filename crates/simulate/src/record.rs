//! The content of one log line, and its conversion to a request.

use std::{
    borrow::Cow,
    net::{IpAddr, SocketAddr},
};

use http::{HeaderMap, HeaderName, HeaderValue, Method, Request, Uri, header, request::Parts};
use tidegate_core::{Cost, Timestamp};
use tidegate_identity::{Entries, Peer, Trust};

use crate::{field::Field, timestamp::duration_micros};

/// The value that servers log in place of a secret.
const REDACTED: &str = "REDACTED";

/// The content of one log line.
#[derive(Debug, Default)]
pub(crate) struct LogRecord<'l> {
    time: Option<Timestamp>,
    is_completion: bool,
    duration: Option<u64>,
    peer: Option<IpAddr>,
    method: Option<Cow<'l, str>>,
    target: Option<Cow<'l, str>>,
    path: Option<Cow<'l, str>>,
    query: Option<Cow<'l, str>>,
    host: Option<Cow<'l, str>>,
    headers: HeaderMap,
    cookies: Vec<String>,
    parameters: Vec<String>,
    entries: Entries,
    /// The cost, if it is not 1.
    cost: Option<Cost>,
    /// The response entries.
    response: Vec<(Box<str>, Cow<'l, str>)>,
    /// Whether the line is about a connection without a valid request.
    is_garbage: bool,
}

/// The reason why a line contains no request that a server could serve. For example, a client sent
/// a TLS handshake to a plaintext port.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct NoRequest(pub(crate) &'static str);

impl<'l> LogRecord<'l> {
    /// Sets `field` to `value`, which must not be empty. Returns false if the value is invalid.
    pub(crate) fn set(&mut self, field: &Field, value: Cow<'l, str>) -> bool {
        match field {
            Field::Arrival(form) | Field::Completion(form) => {
                self.time = form.parse(&value);
                self.is_completion = matches!(field, Field::Completion(_));
                return self.time.is_some();
            }
            Field::Duration(unit) => {
                self.duration = duration_micros(&value, *unit);
                return self.duration.is_some();
            }
            Field::Peer => {
                // The value may also be a host name, but must not contain a space.
                if value.contains(' ') {
                    return false;
                }
                self.peer = address(&value).or(self.peer);
            }
            Field::PeerAndPort => {
                self.peer = value.rsplit_once(':').and_then(|(ip, _)| address(ip));
                return self.peer.is_some();
            }
            Field::ForwardedForAndPeer => {
                let (before, peer) = value.rsplit_once(',').unwrap_or(("", &*value));
                self.peer = address(peer).or(self.peer);
                self.add_header(&HeaderName::from_static("x-forwarded-for"), before.trim());
            }
            Field::RequestLine => self.set_request_line(&value),
            Field::Method => self.method = Some(value),
            Field::Target => self.target = Some(value),
            Field::Path => self.path = Some(value),
            Field::Query => self.query = Some(value),
            Field::Host => self.host = Some(value),
            Field::Header(name) => self.add_header(name, &value),
            // This case cannot occur. Only JSON logs have objects with headers, and the headers of
            // an object are added one by one.
            Field::Headers => return false,
            Field::Cookie(name) => self.cookies.push(format!("{name}={value}")),
            Field::Parameter(name) => self.parameters.push(format!("{name}={value}")),
            Field::Entry(name) => {
                let entries = std::mem::take(&mut self.entries);
                self.entries = entries.with(name, &*value);
            }
            Field::Response(name) => {
                let is_number = value.bytes().all(|byte| byte.is_ascii_digit());
                if !name.starts_with("header.") && !is_number {
                    return false;
                }
                self.response.push((name.clone(), value));
            }
        }
        true
    }

    /// Sets the cost. Returns false if the cost is out of range.
    pub(crate) fn set_cost(&mut self, units: u64) -> bool {
        self.cost = Cost::new(units).ok();
        self.cost.is_some()
    }

    /// Returns the cost of the request.
    pub(crate) fn cost(&self) -> Cost {
        self.cost.unwrap_or(Cost::ONE)
    }

    /// Adds a value of the header `name`. Redacted values are treated as absent, because they are
    /// all equal and therefore cannot distinguish clients.
    pub(crate) fn add_header(&mut self, name: &HeaderName, value: &str) {
        if value.is_empty() || value == REDACTED {
            return;
        }
        if let Ok(value) = HeaderValue::from_bytes(value.as_bytes()) {
            self.headers.append(name, value);
        }
    }

    /// Returns the time in the line, which may be the completion time.
    pub(crate) fn time(&self) -> Option<Timestamp> {
        self.time
    }

    /// Returns the request's arrival time. If the line contains only the completion time, returns
    /// the completion time.
    pub(crate) fn arrival(&self) -> Option<Timestamp> {
        let took = self.duration.filter(|_| self.is_completion).unwrap_or(0);
        let time = self.time?.as_micros();
        Some(Timestamp::from_micros(time.saturating_sub(took)))
    }

    /// Returns true if the line contains only the completion time of the request.
    pub(crate) fn has_only_completion(&self) -> bool {
        self.is_completion && self.duration.is_none()
    }

    /// Returns true if the line contains the client's address.
    pub(crate) fn has_peer(&self) -> bool {
        self.peer.is_some()
    }

    /// Returns the value of a response entry.
    pub(crate) fn response(&self, name: &str) -> Option<&str> {
        let mut entries = self.response.iter();
        let named = entries.find(|(known, _)| **known == *name);
        named.map(|(_, value)| &**value)
    }

    fn set_request_line(&mut self, line: &str) {
        let mut words = line.split(' ');
        let (method, target) = (words.next(), words.next());
        let (Some(method), Some(target)) = (method, target.filter(|target| !target.is_empty()))
        else {
            self.is_garbage = true;
            return;
        };
        self.method = Some(Cow::Owned(method.to_owned()));
        self.target = Some(Cow::Owned(target.to_owned()));
    }

    /// Returns the head of the request.
    ///
    /// # Errors
    ///
    /// Returns [`NoRequest`] if a server would reject the request before evaluating any rule.
    pub(crate) fn into_parts(self) -> Result<Parts, NoRequest> {
        if self.is_garbage {
            return Err(NoRequest("the line has no HTTP request"));
        }
        let (mut parts, ()) = Request::new(()).into_parts();
        let mut entries = self.entries;
        // A request head always has a method and a path. If the line has no method or no path, an
        // empty entry overrides the value in the head. An empty entry is treated as absent.
        match self.method {
            Some(method) => {
                parts.method = Method::from_bytes(method.as_bytes())
                    .map_err(|_| NoRequest("the method is invalid"))?;
            }
            None if entries.get("method").is_none() => entries = entries.with("method", ""),
            None => {}
        }
        let query = self
            .query
            .as_deref()
            .map(|query| query.strip_prefix('?').unwrap_or(query));
        let target = match (self.target, self.path) {
            (Some(target), _) => Some(target),
            (None, Some(path)) => Some(match query {
                Some(query) if !query.is_empty() => Cow::Owned(format!("{path}?{query}")),
                _ => path,
            }),
            (None, None) => None,
        };
        match target {
            Some(target) => {
                let target = with_parameters(target, &self.parameters);
                parts.uri = Uri::try_from(&*target)
                    .map_err(|_| NoRequest("the request target is invalid"))?;
            }
            None if entries.get("path").is_none() => entries = entries.with("path", ""),
            None => {}
        }
        parts.headers = self.headers;
        if let Some(host) = self
            .host
            .filter(|_| !parts.headers.contains_key(header::HOST))
            && let Ok(host) = HeaderValue::from_str(&host)
        {
            parts.headers.insert(header::HOST, host);
        }
        if !self.cookies.is_empty()
            && !parts.headers.contains_key(header::COOKIE)
            && let Ok(cookies) = HeaderValue::from_str(&self.cookies.join("; "))
        {
            parts.headers.insert(header::COOKIE, cookies);
        }
        if let Some(peer) = self.peer {
            parts.extensions.insert(Peer(SocketAddr::new(peer, 0)));
        }
        if entries != Entries::default() {
            parts.extensions.insert(entries);
        }
        Ok(parts)
    }
}

/// Adds query parameters to a target that lacks them because the log contains only the path.
fn with_parameters<'t>(target: Cow<'t, str>, parameters: &[String]) -> Cow<'t, str> {
    if parameters.is_empty() || target.contains('?') {
        return target;
    }
    Cow::Owned(format!("{target}?{}", parameters.join("&")))
}

/// Parses an address in any notation that proxies use.
fn address(text: &str) -> Option<IpAddr> {
    let text = text.trim();
    if let Ok(ip) = text.parse() {
        return Some(ip);
    }
    let normal = Trust::default().normalize("ip.exact", text).ok()?;
    normal.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_line_is_split_at_spaces() {
        for (line, method, target) in [
            ("GET /a?b=c HTTP/1.1", "GET", "/a?b=c"),
            (
                "POST http://h.example/x HTTP/1.1",
                "POST",
                "http://h.example/x",
            ),
            ("GET /", "GET", "/"),
        ] {
            let mut record = LogRecord::default();
            assert!(record.set(&Field::RequestLine, Cow::Borrowed(line)));
            let parts = record.into_parts().unwrap();
            assert_eq!(parts.method, method);
            assert_eq!(parts.uri.to_string(), target);
        }
        for (line, problem) in [
            ("\u{16}\u{3}\u{1}", "the line has no HTTP request"),
            ("G\u{1}T / HTTP/1.1", "the method is invalid"),
            ("GET /\u{0} HTTP/1.1", "the request target is invalid"),
        ] {
            let mut record = LogRecord::default();
            record.set(&Field::RequestLine, Cow::Borrowed(line));
            assert_eq!(record.into_parts().unwrap_err(), NoRequest(problem));
        }
    }

    #[test]
    fn a_field_that_the_log_lacks_is_no_entry() {
        let parts = LogRecord::default().into_parts().unwrap();
        let entries = parts.extensions.get::<Entries>().unwrap();
        assert_eq!(
            (entries.get("path"), entries.get("method")),
            (Some(""), Some(""))
        );
        assert!(parts.extensions.get::<Peer>().is_none());
    }

    #[test]
    fn redacted_headers_are_absent() {
        let mut record = LogRecord::default();
        record.add_header(&header::AUTHORIZATION, "REDACTED");
        record.add_header(&header::ACCEPT, "*/*");
        assert_eq!(record.into_parts().unwrap().headers.len(), 1);
    }

    #[test]
    fn the_last_forwarded_element_is_the_peer() {
        let mut record = LogRecord::default();
        record.set(
            &Field::ForwardedForAndPeer,
            Cow::Borrowed("203.0.113.9, 10.0.0.8"),
        );
        assert_eq!(record.peer, Some("10.0.0.8".parse().unwrap()));
        assert_eq!(record.headers["x-forwarded-for"], "203.0.113.9");
    }

    #[test]
    fn the_duration_is_subtracted_from_a_completion_time_only() {
        for (field, expected) in [
            (
                Field::Completion(crate::timestamp::TimeForm::Any),
                9_500_000,
            ),
            (Field::Arrival(crate::timestamp::TimeForm::Any), 10_000_000),
        ] {
            let mut record = LogRecord::default();
            record.set(&field, Cow::Borrowed("10"));
            record.set(&Field::Duration(1_000_000), Cow::Borrowed("0.5"));
            assert_eq!(record.arrival().unwrap().as_micros(), expected);
        }
    }
}
