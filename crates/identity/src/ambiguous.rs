//! Ambiguous requests, which a service may interpret differently from the rules. Clients could use
//! ambiguous requests to evade limits.

use std::{borrow::Cow, fmt};

/// The reason for rejecting an ambiguous request before any limit is evaluated. A request is
/// ambiguous if an entry that the rules use can be read in more than one way. An entry is a named
/// value of a request, such as a header or the path.
///
/// Only the client can fix the problem, by sending an unambiguous request. The error message does
/// not contain any part of the request's values.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum AmbiguousRequest {
    /// A header, cookie or query parameter has several different values. Services differ in which
    /// value they use, so the rules could use a different value than the service. The variant
    /// contains the entry name.
    Repeated(Box<str>),
    /// The header `Connection` names the header of this entry, so a proxy may remove the header
    /// before the service sees it. The variant contains the entry name.
    HopByHop(Box<str>),
    /// The request has a second header, whose name is that of the entry's header with `_` instead
    /// of `-`. Many services treat the two names as equal. The variant contains the entry name.
    Alias(Box<str>),
    /// A cookie value contains an escaped character that does not need escaping, such as `%61` for
    /// `a`. Some services decode `%61` and others do not, so the rules and the service could use
    /// different values. The variant contains the entry name.
    HiddenLetters(Box<str>),
    /// The path has `.` or `..` segments. Some services resolve `.` and `..` and others do not, so
    /// the rules and the service could use different paths.
    DotSegments,
    /// The value of this entry is not a single IP address. The variant contains the entry name.
    NotAnAddress(Box<str>),
    /// The request has the forwarding headers of two kinds of proxies, and the client may have sent
    /// one kind.
    MixedDialects {
        /// The header of the nginx dialect.
        original: &'static str,
        /// The header of the Caddy and Traefik dialect.
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
                    "{entry}: the header `Connection` lists this header, so a proxy may remove it; do not list it there"
                )
            }
            Self::Alias(entry) => {
                write!(
                    f,
                    "{entry}: another header has this name with `_` in place of `-`; send only the name with `-`"
                )
            }
            Self::HiddenLetters(entry) => {
                write!(
                    f,
                    "{entry}: has percent-encoded letters such as %61; send them unencoded"
                )
            }
            Self::DotSegments => {
                f.write_str("path: has segments `.` or `..`; send the resolved path")
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
                "{original} and {forwarded} are both present, and one may come from the client; add ?proxy=nginx, \
                 ?proxy=caddy or ?proxy=traefik to the URL to which the proxy sends its subrequests"
            ),
        }
    }
}

impl std::error::Error for AmbiguousRequest {}

/// Returns the common value if all of `values` are equal, and `None` if there are no values.
/// `entry` is the name for the error.
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
