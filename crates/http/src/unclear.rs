//! Requests that could mean several things, of which a client would choose the one that is not counted.

use std::{borrow::Cow, fmt};

/// Why a request is refused before any limit is asked: what rules look at in it could mean several things.
///
/// Whoever sent it has to say it once. Nothing of what the request says is in the message.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Unclear {
    /// A header, cookie or parameter, by the name of its entry, has several values. Services differ in which of them they
    /// look at, so that a client could be counted by another.
    Repeated(Box<str>),
    /// `Connection` names the header of this entry, so that a proxy may remove it before the service sees it.
    HopByHop(Box<str>),
    /// Another header has the name of this entry's header with `_` in the place of `-`, which many services read as the same.
    Alias(Box<str>),
    /// A cookie, by the name of its entry, has escapes such as `%61` for a letter. Some services decode them and some do
    /// not, so that rules would see another value than the service.
    HiddenLetters(Box<str>),
    /// The path has segments `.` or `..`. Some resolve them and some do not, so that rules would see another path than the
    /// service.
    DotSegments,
    /// The value of the entry of this name is not one IP address.
    NotAnAddress(Box<str>),
    /// Headers of two families of proxies describe the original request, and one of them may be the client's.
    TwoFamilies {
        /// What nginx would have sent.
        original: &'static str,
        /// What Caddy or Traefik would have sent.
        forwarded: &'static str,
    },
}

impl fmt::Display for Unclear {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Repeated(entry) => write!(f, "{entry}: has several values; send one"),
            Self::HopByHop(entry) => {
                write!(
                    f,
                    "{entry}: is named by `Connection`; send one of the two only"
                )
            }
            Self::Alias(entry) => {
                write!(
                    f,
                    "{entry}: another header spells this name with `_`; send it with `-`"
                )
            }
            Self::HiddenLetters(entry) => {
                write!(
                    f,
                    "{entry}: has letters as escapes such as %61; send them as they are"
                )
            }
            Self::DotSegments => {
                f.write_str("path: has segments `.` or `..`; send it with these resolved")
            }
            Self::NotAnAddress(entry) => write!(
                f,
                "{entry}: is not an IP address; send one address, such as 203.0.113.9"
            ),
            Self::TwoFamilies {
                original,
                forwarded,
            } => write!(
                f,
                "{original} and {forwarded} are both there, and one may be the client's; ask with ?proxy=nginx, caddy or traefik"
            ),
        }
    }
}

impl std::error::Error for Unclear {}

/// The value that all of `values` are, if there are any; `entry` says what they are values of.
pub(crate) fn only<'r>(
    entry: &str,
    mut values: impl Iterator<Item = Cow<'r, str>>,
) -> Result<Option<Cow<'r, str>>, Unclear> {
    let first = values.next();
    let differs = values.any(|other| Some(other) != first);
    if differs {
        return Err(Unclear::Repeated(entry.into()));
    }
    Ok(first)
}
