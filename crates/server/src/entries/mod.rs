//! The entries of requests that a service describes itself: `/v1/check`, `/v1/peek` and `TIDEGATE.CHECK`.
//!
//! Forward-auth and the proxy derive the entries that the rules name, each in one spelling. A service sends what it likes: so its
//! entries are normalised here, and those that take no part in any decision are counted and reported.

mod audit;
mod throttle;

use std::borrow::Cow;

use tidegate_core::{RequestError, RuleSet};
use tidegate_http::{Trust, Unclear};

pub(crate) use self::audit::{Audited, EntryAudit, Origin};

/// How the entries of a request are read.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Spelling {
    /// Paths, hosts and addresses are brought into the form that forward-auth gives them.
    #[default]
    Normalized,
    /// As they were sent.
    Raw,
}

/// An entry whose value is written in another way than it was sent.
#[derive(Debug)]
pub(crate) struct Replaced {
    pub(crate) at: usize,
    pub(crate) value: String,
}

/// The values of `entries` that have to be replaced before `rules` look at them, usually none.
///
/// # Errors
///
/// Refuses a value of an entry that a rule looks at and that could mean several things.
pub(crate) fn normalize(
    trust: &Trust,
    rules: &RuleSet,
    entries: &[(&str, &str)],
) -> Result<Vec<Replaced>, RequestError> {
    let mut replaced = Vec::new();
    for (at, (name, value)) in entries.iter().enumerate() {
        match trust.normalize(name, value) {
            Ok(Cow::Borrowed(_)) => {}
            Ok(Cow::Owned(value)) => replaced.push(Replaced { at, value }),
            Err(unclear) if rules.looks_at(name) => return Err(refused(name, &unclear)),
            Err(_) => {}
        }
    }
    Ok(replaced)
}

/// `entries` with the values that are `replaced`.
pub(crate) fn rewritten<'e>(
    entries: &[(&'e str, &'e str)],
    replaced: &'e [Replaced],
) -> Vec<(&'e str, &'e str)> {
    let mut entries = entries.to_vec();
    for Replaced { at, value } in replaced {
        entries[*at].1 = value;
    }
    entries
}

fn refused(name: &str, unclear: &Unclear) -> RequestError {
    let problem = match unclear {
        Unclear::DotSegments => {
            "has segments `.` or `..`, which services resolve differently; send the resolved path"
        }
        Unclear::NotAnAddress(_) => "is not an IP address; send one address, such as 203.0.113.9",
        _ => "could mean several things; send one",
    };
    let problem = format!("{problem}, or ask with `raw` to use the value as it is");
    RequestError::new(format!("entries.{name}"), problem)
}
