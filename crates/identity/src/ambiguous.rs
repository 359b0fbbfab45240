//! Ambiguous requests, which services may interpret differently from the rules. Clients could evade
//! limits with such requests.

use std::{borrow::Cow, fmt};

/// The reason for rejecting a request before any limit is evaluated, because an entry that the
/// rules use is ambiguous.
///
/// The client has to send an unambiguous request. The error message contains no part of the
/// request's values.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum AmbiguousRequest {
    /// A header, cookie or query parameter has several different values. Services differ in which
    /// value they use, so the rules could count a different value than the service uses. This
    /// variant contains the name of the entry.
    Repeated(Box<str>),
    /// `Connection` names the header of this entry, so a proxy may remove it before the service
    /// sees it.
    HopByHop(Box<str>),
    /// Another header has the name of this entry's header with `_` in place of `-`. Many services
    /// treat the two names as equal.
    Alias(Box<str>),
    /// A cookie escapes plain letters, such as `%61`. Some services decode such escapes and some do
    /// not, so the rules could see a different value than the service. This variant contains the
    /// name of the entry.
    HiddenLetters(Box<str>),
    /// The path has `.` or `..` segments. Some services resolve such segments and some do not, so
    /// the rules could see a different path than the service.
    DotSegments,
    /// The value of this entry is not a single IP address.
    NotAnAddress(Box<str>),
    /// The request has headers of two proxy dialects, and one of them may come from the client.
    MixedDialects {
        /// The header that nginx would have sent.
        original: &'static str,
        /// The header that Caddy or Traefik would have sent.
        forwarded: &'static str,
    },
}

impl fmt::Display for AmbiguousRequest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Repeated(entry) => write!(f, "{entry}: has several values; send one"),
            Self::HopByHop(entry) => {
                write!(
                    f,
                    "{entry}: the header is listed in `Connection`; send only one of the two"
                )
            }
            Self::Alias(entry) => {
                write!(
                    f,
                    "{entry}: another header has the same name with `_`; send it with `-`"
                )
            }
            Self::HiddenLetters(entry) => {
                write!(
                    f,
                    "{entry}: has percent-encoded letters such as %61; send them unencoded"
                )
            }
            Self::DotSegments => {
                f.write_str("path: has segments `.` or `..`; send it with these resolved")
            }
            Self::NotAnAddress(entry) => write!(
                f,
                "{entry}: is not an IP address; send one address, such as 203.0.113.9"
            ),
            Self::MixedDialects {
                original,
                forwarded,
            } => write!(
                f,
                "{original} and {forwarded} are both present, and one may come from the client; set ?proxy=nginx, caddy or traefik"
            ),
        }
    }
}

impl std::error::Error for AmbiguousRequest {}

/// Returns the value if all of `values` are equal, and `None` if there are no values. `entry` is
/// the name for the error.
pub(crate) fn single_value<'r>(
    entry: &str,
    mut values: impl Iterator<Item = Cow<'r, str>>,
) -> Result<Option<Cow<'r, str>>, AmbiguousRequest> {
    let first = values.next();
    let differs = values.any(|other| Some(other) != first);
    if differs {
        return Err(AmbiguousRequest::Repeated(entry.into()));
    }
    Ok(first)
}
