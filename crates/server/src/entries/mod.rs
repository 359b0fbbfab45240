//! The entries of requests that a service describes itself, with `/v1/check`, `/v1/peek` and
//! `TIDEGATE.CHECK`.
//!
//! Forward-auth and the proxy derive exactly the entries that the rules use, in canonical form.
//! Services can send any entries. So these are normalised here, and entries that affect no decision
//! are counted and logged.

mod audit;
mod throttle;

use std::borrow::Cow;

use tidegate_core::{RequestError, RuleSet};
use tidegate_http::{Trust, Unclear};

pub(crate) use self::audit::{AuditedRequest, EntryAudit, Origin};

/// How the values of entries are interpreted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Spelling {
    /// Paths, hosts and addresses are normalised as forward-auth does.
    #[default]
    Normalized,
    /// Values are used as sent.
    Raw,
}

/// The normalised value of an entry, where it differs from the value that was sent.
#[derive(Debug)]
pub(crate) struct NormalizedEntry {
    pub(crate) at: usize,
    pub(crate) value: String,
}

/// Returns the values of `entries` that differ once normalised, usually none.
///
/// # Errors
///
/// Rejects an ambiguous value of an entry that a rule uses.
pub(crate) fn normalize(
    trust: &Trust,
    rules: &RuleSet,
    entries: &[(&str, &str)],
) -> Result<Vec<NormalizedEntry>, RequestError> {
    let mut replaced = Vec::new();
    for (at, (name, value)) in entries.iter().enumerate() {
        match trust.normalize(name, value) {
            Ok(Cow::Borrowed(_)) => {}
            Ok(Cow::Owned(value)) => replaced.push(NormalizedEntry { at, value }),
            Err(unclear) if rules.looks_at(name) => return Err(refused(name, &unclear)),
            Err(_) => {}
        }
    }
    Ok(replaced)
}

/// Returns `entries` with the `replaced` values applied.
pub(crate) fn rewritten<'e>(
    entries: &[(&'e str, &'e str)],
    replaced: &'e [NormalizedEntry],
) -> Vec<(&'e str, &'e str)> {
    let mut entries = entries.to_vec();
    for NormalizedEntry { at, value } in replaced {
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
        _ => "is ambiguous; send one value",
    };
    let problem = format!("{problem}, or set `raw` to use the value unchanged");
    RequestError::new(format!("entries.{name}"), problem)
}
