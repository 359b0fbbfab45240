//! What is known of an answer, in entries: by these a rule may charge in the end.

use std::{
    borrow::Cow,
    fmt,
    sync::{Arc, Mutex, PoisonError},
};

use http::{HeaderMap, HeaderName, Response};
use tidegate_core::{Bill, Cost, Request};

use crate::describe::{joined, text};

const GRPC_STATUS: HeaderName = HeaderName::from_static("grpc-status");

/// What the application says of its answer, as an extension of the response: how many tokens it took, or that it was a
/// login that failed. It comes before what the answer says of itself.
///
/// Clones are one report, so that what is only known at the end of a streamed body may be said then.
///
/// # Examples
///
/// ```
/// use tidegate_http::Report;
///
/// let report = Report::default();
/// let mut response = http::Response::new(());
/// response.extensions_mut().insert(report.clone());
/// // Later, as the last of the body is sent:
/// report.say("tokens", 812);
/// ```
#[derive(Clone, Debug, Default)]
pub struct Report(Arc<Mutex<Said>>);

/// Names and values.
type Said = Vec<(Box<str>, Box<str>)>;

impl Report {
    /// Says that the entry `name` is `value`, whatever was said of it before.
    pub fn say(&self, name: &str, value: impl fmt::Display) {
        let mut said = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        said.retain(|(known, _)| **known != *name);
        said.push((name.into(), value.to_string().into()));
    }

    fn said(&self, name: &str) -> Option<String> {
        let said = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let named = said.iter().find(|(known, _)| **known == *name);
        named.map(|(_, value)| value.to_string())
    }
}

/// What is known of an answer by now.
#[derive(Debug)]
pub(super) struct Answer {
    status: http::StatusCode,
    report: Option<Report>,
    /// Those of its headers that bills look at, by the names of their entries.
    headers: Said,
    grpc_status: Option<Box<str>>,
    /// How long its body was so far.
    bytes: u64,
    has_ended: bool,
}

impl Answer {
    /// What the head of `response` says, of which the entries `names` are looked at.
    pub(super) fn of<B>(response: &Response<B>, names: &[&str]) -> Self {
        let header = |name: &&str| {
            let value = joined(response.headers(), name.strip_prefix("header.")?, ", ")?;
            Some(((*name).into(), value.into()))
        };
        let mut answer = Self {
            status: response.status(),
            report: response.extensions().get().cloned(),
            headers: names.iter().filter_map(header).collect(),
            grpc_status: None,
            bytes: 0,
            has_ended: false,
        };
        answer.learn(response.headers());
        answer
    }

    /// Whether an entry of this name is known as soon as the head of an answer is.
    pub(super) fn is_of_head(name: &str) -> bool {
        name == "status" || name.starts_with("header.")
    }

    /// So many bytes more of the body have been sent.
    pub(super) fn add(&mut self, bytes: usize) {
        // What is in memory fits 64 bits.
        self.bytes = self.bytes.saturating_add(bytes as u64);
    }

    /// What headers or trailers say of how a gRPC call has ended.
    pub(super) fn learn(&mut self, headers: &HeaderMap) {
        if let Some(status) = headers.get(GRPC_STATUS) {
            self.grpc_status = Some(text(status).into());
        }
    }

    /// Nothing more comes of it.
    pub(super) fn end(&mut self) {
        self.has_ended = true;
    }

    /// Whether an entry of this name stays what it is, or is not.
    fn is_final(&self, name: &str) -> bool {
        let is_said = || self.report.as_ref().and_then(|report| report.said(name));
        let is_told = name == GRPC_STATUS.as_str() && self.grpc_status.is_some();
        self.has_ended || Self::is_of_head(name) || is_told || is_said().is_some()
    }

    /// What is due for it by `bill`, where `charged` was charged.
    pub(super) fn due(&self, bill: &Bill, charged: Cost) -> u64 {
        let mut names: Vec<&str> = bill.entry_names().collect();
        names.sort_unstable();
        names.dedup();
        let known: Vec<(&str, Cow<'_, str>)> = names
            .into_iter()
            .filter_map(|name| Some((name, self.entry(name)?)))
            .collect();
        let entries: Vec<(&str, &str)> = known
            .iter()
            .map(|(name, value)| (*name, &**value))
            .collect();
        // An answer that says what no entry can hold is charged what it was.
        let answer = Request::new(&entries, Cost::ONE);
        answer.map_or_else(
            |_| charged.units(),
            |answer| bill.due_so_far(charged, &answer, |name| self.is_final(name)),
        )
    }

    fn entry(&self, name: &str) -> Option<Cow<'_, str>> {
        if let Some(said) = self.report.as_ref().and_then(|report| report.said(name)) {
            return Some(Cow::Owned(said));
        }
        match name {
            "status" => Some(Cow::Borrowed(self.status.as_str())),
            "bytes" => Some(Cow::Owned(self.bytes.to_string())),
            "grpc-status" => self.grpc_status.as_deref().map(Cow::Borrowed),
            _ => {
                let header = self.headers.iter().find(|(known, _)| **known == *name);
                header.map(|(_, value)| Cow::Borrowed(&**value))
            }
        }
    }
}
