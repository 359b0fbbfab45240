//! `proxy.underscores` and `proxy.via`: the changes that the proxy makes to every request's
//! headers.

use http::{HeaderValue, Version};

use crate::{
    report::Report,
    value::{Fields, Value},
};

/// The code of the warning about `underscores: pass`, by which users can search for it.
const UNDERSCORES: &str = "underscores-pass";

/// The maximum length of the proxy's pseudonym in `Via`, in bytes.
const MAX_PSEUDONYM_BYTES: usize = 64;

/// The proxy's default pseudonym in `Via`.
const PSEUDONYM: &str = "tidegate";

/// The settings for request headers.
#[derive(Clone, Debug)]
pub struct Heads {
    /// `underscores`: how the proxy handles headers with `_` in their names; default `drop`.
    pub underscores: Underscores,
    /// `via`: the proxy's pseudonym in the header `Via`; `None` (`off`) means that the proxy does
    /// not add this header.
    pub via: Option<Via>,
}

/// How the proxy handles headers with `_` in their names. Applications that use CGI, WSGI or PHP
/// cannot distinguish a name with `_` from the same name with `-`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Underscores {
    /// The proxy removes the headers.
    #[default]
    Drop,
    /// The proxy rejects the request.
    Refuse,
    /// The proxy forwards the headers to the upstream.
    Pass,
}

/// The element that the proxy adds to the header `Via` (RFC 9110, section 7.6.3). The element
/// contains the HTTP version, so it is precomputed for each version.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Via {
    pseudonym: Box<str>,
    http10: HeaderValue,
    http11: HeaderValue,
    http2: HeaderValue,
}

impl Via {
    /// Creates the elements for a proxy with this pseudonym. Returns `None` if `pseudonym` is not
    /// an HTTP token of at most 64 bytes.
    #[must_use]
    pub fn new(pseudonym: &str) -> Option<Self> {
        let is_token =
            |byte: u8| byte.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~:".contains(&byte);
        let is_sound = (1..=MAX_PSEUDONYM_BYTES).contains(&pseudonym.len());
        if !is_sound || !pseudonym.bytes().all(is_token) {
            return None;
        }
        let element = |version| HeaderValue::try_from(format!("{version} {pseudonym}")).ok();
        Some(Self {
            pseudonym: pseudonym.into(),
            http10: element("1.0")?,
            http11: element("1.1")?,
            http2: element("2")?,
        })
    }

    /// Returns the element for a message received over `version`.
    #[must_use]
    pub const fn element(&self, version: Version) -> &HeaderValue {
        match version {
            Version::HTTP_2 => &self.http2,
            Version::HTTP_10 => &self.http10,
            _ => &self.http11,
        }
    }

    /// Returns this proxy's pseudonym in `Via`.
    #[must_use]
    pub fn pseudonym(&self) -> &str {
        &self.pseudonym
    }
}

pub(super) const FIELDS: [&str; 2] = ["underscores", "via"];

pub(super) fn heads(proxy: &Fields<'_>, report: &mut Report) -> Heads {
    let choices = [
        ("drop", Underscores::Drop),
        ("refuse", Underscores::Refuse),
        ("pass", Underscores::Pass),
    ];
    let underscores = proxy.get("underscores").and_then(|value| {
        let underscores = value.choice(report, &choices)?;
        if underscores == Underscores::Pass {
            let message = format!(
                "{UNDERSCORES}: a client can send both `X_Api_Key` and `X-Api-Key`: rules see only the second, \
                 and CGI, WSGI and PHP applications cannot distinguish the two; use drop or refuse unless no \
                 upstream is such an application"
            );
            value.warn(report, message);
        }
        Some(underscores)
    });
    Heads {
        underscores: underscores.unwrap_or_default(),
        via: match proxy.get("via") {
            None => Via::new(PSEUDONYM),
            Some(value) => via(value, report),
        },
    }
}

fn via(value: &Value<'_>, report: &mut Report) -> Option<Via> {
    let what = "off, or a pseudonym of 1 to 64 letters, digits and `-`, such as edge-1";
    if value.scalar() == Some("off") {
        return None;
    }
    let via = Via::new(value.text(report, what)?);
    if via.is_none() {
        value.expected(report, what);
    }
    via
}
