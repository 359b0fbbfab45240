//! The entries (named values) of a response. The final charge of a rule can depend on these
//! entries.

use std::{
    borrow::Cow,
    fmt,
    sync::{Arc, Mutex, Once, PoisonError},
};

use http::{HeaderMap, HeaderName, Response, header::CONTENT_ENCODING};
use tidegate_core::{Cost, Request, ResponseCost, USAGE_ENTRIES, bounds};
use tidegate_identity::{header_text, joined_header};

use crate::usage::UsageScanner;

const GRPC_STATUS: HeaderName = HeaderName::from_static("grpc-status");

/// Entries that the application sets for its response, stored as a response extension. For example,
/// an entry can contain the number of tokens used, or say that a login failed. The application's
/// entries take precedence over the entries of the response itself.
///
/// Clones share the entries, so the application can still set an entry at the end of a streamed
/// body, when its value becomes known.
///
/// # Examples
///
/// ```
/// use tidegate_tower::ResponseEntries;
///
/// let entries = ResponseEntries::default();
/// let mut response = http::Response::new(());
/// response.extensions_mut().insert(entries.clone());
/// // Later, as the last of the body is sent:
/// entries.set("tokens", 812);
/// ```
#[derive(Clone, Debug, Default)]
pub struct ResponseEntries(Arc<Mutex<NamedValues>>);

/// The names and values of entries or headers.
type NamedValues = Vec<(Box<str>, Box<str>)>;

impl ResponseEntries {
    /// Sets the entry `name` to `value` and replaces any previous value.
    pub fn set(&self, name: &str, value: impl fmt::Display) {
        let mut values = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        values.retain(|(known, _)| **known != *name);
        values.push((name.into(), value.to_string().into()));
    }

    fn value(&self, name: &str) -> Option<String> {
        let values = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let named = values.iter().find(|(known, _)| **known == *name);
        named.map(|(_, value)| value.to_string())
    }
}

/// The currently known information about a response.
#[derive(Debug)]
pub(super) struct ResponseState {
    status: http::StatusCode,
    report: Option<ResponseEntries>,
    /// The response headers that determine the final charges, by entry name.
    headers: NamedValues,
    grpc_status: Option<Box<str>>,
    /// The number of body bytes sent so far.
    bytes: u64,
    has_ended: bool,
    /// The scanner for the token usage of a language model, if a final charge depends on it.
    usage: Option<Box<UsageScanner>>,
}

impl ResponseState {
    /// Reads the head of `response`. Keeps only the headers in `names`, which contains entry names.
    pub(super) fn of<B>(response: &Response<B>, names: &[&str]) -> Self {
        let header = |name: &&str| {
            let value = joined_header(response.headers(), name.strip_prefix("header.")?, ", ")?;
            Some(((*name).into(), value.into()))
        };
        let mut state = Self {
            status: response.status(),
            report: response.extensions().get().cloned(),
            headers: names.iter().filter_map(header).collect(),
            grpc_status: None,
            bytes: 0,
            has_ended: false,
            usage: usage_scanner(response.headers(), names),
        };
        state.learn(response.headers());
        state
    }

    /// Returns true if the response head determines the entry `name`.
    pub(super) fn is_of_head(name: &str) -> bool {
        name == "status" || name.starts_with("header.")
    }

    /// Reads the next bytes of the body, which are sent to the client.
    pub(super) fn read(&mut self, bytes: &[u8]) {
        // The length of a buffer in memory fits in 64 bits.
        self.bytes = self.bytes.saturating_add(bytes.len() as u64);
        if let Some(usage) = &mut self.usage {
            usage.scan(bytes);
            if usage.was_clamped() {
                warn_of_implausible_usage();
            }
        }
    }

    /// Reads the gRPC status from headers or trailers.
    pub(super) fn learn(&mut self, headers: &HeaderMap) {
        if let Some(status) = headers.get(GRPC_STATUS) {
            self.grpc_status = Some(header_text(status).into());
        }
    }

    /// Records that the response has ended.
    pub(super) fn end(&mut self) {
        self.has_ended = true;
    }

    /// Returns true if the entry `name` can no longer change.
    fn is_final(&self, name: &str) -> bool {
        let value = || self.report.as_ref().and_then(|report| report.value(name));
        let is_known_status = name == GRPC_STATUS.as_str() && self.grpc_status.is_some();
        self.has_ended || Self::is_of_head(name) || is_known_status || value().is_some()
    }

    /// Returns the final charge according to `response_cost`, given the response and the initial
    /// charge.
    pub(super) fn final_charge(&self, response_cost: &ResponseCost, charged: Cost) -> u64 {
        let mut names: Vec<&str> = response_cost.entry_names().collect();
        names.sort_unstable();
        names.dedup();
        let values: Vec<(&str, Cow<'_, str>)> = names
            .into_iter()
            .filter_map(|name| Some((name, self.entry(name)?)))
            .collect();
        let entries: Vec<(&str, &str)> = values
            .iter()
            .map(|(name, value)| (*name, &**value))
            .collect();
        // If a value in the response is not a valid entry value, the initial charge is the final
        // charge.
        let response = Request::new(&entries, Cost::ONE);
        response.map_or_else(
            |_| charged.units(),
            |response| {
                response_cost
                    .final_charge_if_aborted(charged, &response, |name| self.is_final(name))
            },
        )
    }

    fn entry(&self, name: &str) -> Option<Cow<'_, str>> {
        if let Some(value) = self.report.as_ref().and_then(|report| report.value(name)) {
            return Some(Cow::Owned(value));
        }
        match name {
            "status" => Some(Cow::Borrowed(self.status.as_str())),
            "bytes" => Some(Cow::Owned(self.bytes.to_string())),
            "grpc-status" => self.grpc_status.as_deref().map(Cow::Borrowed),
            _ if USAGE_ENTRIES.contains(&name) => self.tokens(name),
            _ => {
                let header = self.headers.iter().find(|(known, _)| **known == *name);
                header.map(|(_, value)| Cow::Borrowed(&**value))
            }
        }
    }

    /// Returns the number of tokens for `name`, which must be one of [`USAGE_ENTRIES`].
    fn tokens(&self, name: &str) -> Option<Cow<'_, str>> {
        let usage = self.usage.as_ref()?.usage_at_end(self.has_ended)?;
        let [input, cached, _] = USAGE_ENTRIES;
        let tokens = if name == input {
            usage.input
        } else if name == cached {
            usage.cached
        } else {
            usage.output
        };
        Some(Cow::Owned(tokens.to_string()))
    }
}

/// Returns a scanner for the body of a response with these headers, if `names` contains a token
/// usage entry.
fn usage_scanner(headers: &HeaderMap, names: &[&str]) -> Option<Box<UsageScanner>> {
    if !names.iter().any(|name| USAGE_ENTRIES.contains(name)) {
        return None;
    }
    let is_plain = headers
        .get_all(CONTENT_ENCODING)
        .iter()
        .all(|encoding| encoding.as_bytes().eq_ignore_ascii_case(b"identity"));
    if !is_plain {
        warn_of_compressed_response();
    }
    is_plain.then(Box::default)
}

/// Logs a warning, only once, about a compressed response whose usage is not read.
fn warn_of_compressed_response() {
    static COMPRESSED: Once = Once::new();
    COMPRESSED.call_once(|| {
        tracing::warn!(
            "compressed-usage: a rule settles by the usage in the response, but a response was compressed although the request accepted only `identity`, so the initial charge was kept; disable compression at the upstream; logged once"
        );
    });
}

/// Logs a warning, only once, about a response with an implausible number of tokens.
fn warn_of_implausible_usage() {
    static IMPLAUSIBLE: Once = Once::new();
    IMPLAUSIBLE.call_once(|| {
        tracing::warn!(
            max = bounds::MAX_TOKENS,
            "implausible-usage: a response reports more tokens than the maximum, and is charged for the maximum; logged once"
        );
    });
}
