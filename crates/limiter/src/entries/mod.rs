//! The entries of requests in which services name the entries themselves: `/v1/check`, `/v1/peek`
//! and `TIDEGATE.CHECK`.
//!
//! Forward-auth and the proxy derive exactly the entries that the rules use, in canonical form. A
//! service, however, can send any entries. Therefore, this module normalises the entries of
//! services, and counts and logs entries that do not affect a decision.

mod audit;
mod throttle;

use std::borrow::Cow;

use tidegate_config::entry_name;
use tidegate_core::{Request, RequestError, RuleSet};
use tidegate_identity::{AmbiguousRequest, ForwardAuthRequest, Trust};

pub(crate) use self::audit::EntryAudit;
pub use self::audit::{AuditedRequest, Origin};

/// How the values of a service's entries are interpreted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Spelling {
    /// Paths, hosts and addresses are normalised in the same way as in forward-auth.
    #[default]
    Normalized,
    /// Values are used as the service sent them.
    Raw,
}

/// A normalised entry that differs from the original entry.
#[derive(Debug)]
pub struct NormalizedEntry<'e> {
    at: usize,
    name: Cow<'e, str>,
    value: Cow<'e, str>,
}

/// Returns the normalised form of those `entries` that normalisation changes. Normalisation usually
/// changes no entry, and the result is empty. Header names are always converted to lower case, as
/// in the rules. Values are normalised only for [`Spelling::Normalized`].
///
/// # Errors
///
/// Rejects the request if a rule uses an entry whose value is ambiguous.
pub fn normalize<'e>(
    trust: &Trust,
    rules: &RuleSet,
    spelling: Spelling,
    entries: &[(&'e str, &'e str)],
) -> Result<Vec<NormalizedEntry<'e>>, RequestError> {
    let mut replaced = Vec::new();
    for (at, &(sent, value)) in entries.iter().enumerate() {
        let name = entry_name(sent);
        let value = match spelling {
            Spelling::Raw => Cow::Borrowed(value),
            Spelling::Normalized => match trust.normalize(&name, value) {
                Ok(value) => value,
                Err(ambiguous) if rules.uses_entry(&name) => return Err(refused(sent, &ambiguous)),
                Err(_) => Cow::Borrowed(value),
            },
        };
        if let (Cow::Borrowed(_), Cow::Borrowed(_)) = (&name, &value) {
            continue;
        }
        replaced.push(NormalizedEntry { at, name, value });
    }
    Ok(replaced)
}

/// Returns the names and values of those entries of a forward-auth request that `rules` use.
///
/// # Errors
///
/// Rejects the request if a rule needs an entry whose value is ambiguous. An entry that is only
/// recorded is left out if its value is ambiguous.
pub fn used_entries<'r>(
    forwarded: &'r ForwardAuthRequest<'_>,
    rules: &'r RuleSet,
) -> Result<Vec<(&'r str, Cow<'r, str>)>, AmbiguousRequest> {
    let mut values = Vec::new();
    for name in rules.entry_names() {
        if let Some(value) = forwarded.entry(name)? {
            values.push((name, value));
        }
    }
    for name in rules.extra_entry_names() {
        if let Ok(Some(value)) = forwarded.entry(name)
            && Request::has_room(values.len(), &value)
        {
            values.push((name, value));
        }
    }
    Ok(values)
}

/// Returns a copy of `entries` in which the entries of `replaced` have their normalised form.
#[must_use]
pub fn rewritten<'e>(
    entries: &[(&'e str, &'e str)],
    replaced: &'e [NormalizedEntry<'e>],
) -> Vec<(&'e str, &'e str)> {
    let mut entries = entries.to_vec();
    for NormalizedEntry { at, name, value } in replaced {
        entries[*at] = (name, value);
    }
    entries
}

fn refused(name: &str, ambiguous: &AmbiguousRequest) -> RequestError {
    let problem = match ambiguous {
        AmbiguousRequest::DotSegments => {
            "has segments `.` or `..`, which services resolve differently; send the resolved path"
        }
        AmbiguousRequest::NotAnAddress(_) => {
            "is not an IP address; send one address, such as 203.0.113.9"
        }
        _ => "is ambiguous; send one value",
    };
    let problem = format!("{problem}, or set `raw` to use the value unchanged");
    RequestError::new(format!("entries.{name}"), problem)
}
