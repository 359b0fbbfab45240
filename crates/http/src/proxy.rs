//! Which family of headers the proxy at the door writes, and which is therefore believed.

use std::fmt;

use http::{HeaderMap, HeaderValue};

/// The family of headers that the proxy at the door sends.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Proxy {
    /// Whichever is there; if both are, the request is refused.
    #[default]
    Unknown,
    /// `X-Original-*` and `X-Real-IP`.
    Nginx,
    /// `X-Forwarded-*` alone: Caddy and Traefik.
    Forwarding,
}

impl Proxy {
    /// The family of the proxy called `name`: `nginx`, `caddy` or `traefik`.
    #[must_use]
    pub fn parse(name: &str) -> Option<Self> {
        match name {
            "nginx" => Some(Self::Nginx),
            "caddy" | "traefik" => Some(Self::Forwarding),
            _ => None,
        }
    }
}

/// Headers of both families describe the original request, and one of them may be the client's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ambiguous {
    /// What nginx would have sent.
    pub original: &'static str,
    /// What Caddy or Traefik would have sent.
    pub forwarded: &'static str,
}

impl fmt::Display for Ambiguous {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            original,
            forwarded,
        } = self;
        write!(
            f,
            "{original} and {forwarded} are both there, and one may be the client's; ask with ?proxy=nginx, caddy or traefik"
        )
    }
}

impl std::error::Error for Ambiguous {}

/// The headers of one family that name the method and the target.
#[derive(Debug)]
pub(crate) struct Family {
    method: &'static str,
    targets: &'static [&'static str],
    host: &'static [&'static str],
    /// Whether it names the client in `X-Real-IP`, and not in a list.
    pub(crate) has_real_ip: bool,
}

static ORIGINAL: Family = Family {
    method: "x-original-method",
    targets: &["x-original-uri", "x-original-url"],
    host: &["host"],
    has_real_ip: true,
};

static FORWARDED: Family = Family {
    method: "x-forwarded-method",
    targets: &["x-forwarded-uri"],
    host: &["x-forwarded-host", "host"],
    has_real_ip: false,
};

impl Family {
    /// The family of `proxy`, or of the headers that are there.
    ///
    /// The two are never mixed. A client that adds a header of the other family to its request would else
    /// choose what its own proxy does not say.
    pub(crate) fn of(headers: &HeaderMap, proxy: Proxy) -> Result<&'static Self, Ambiguous> {
        match proxy {
            Proxy::Nginx => Ok(&ORIGINAL),
            Proxy::Forwarding => Ok(&FORWARDED),
            Proxy::Unknown => match (ORIGINAL.present(headers), FORWARDED.present(headers)) {
                (Some(original), Some(forwarded)) => Err(Ambiguous {
                    original,
                    forwarded,
                }),
                (Some(_), None) => Ok(&ORIGINAL),
                (None, _) => Ok(&FORWARDED),
            },
        }
    }

    pub(crate) fn method<'h>(&self, headers: &'h HeaderMap) -> Option<&'h HeaderValue> {
        headers.get(self.method)
    }

    pub(crate) fn target<'h>(&self, headers: &'h HeaderMap) -> Option<&'h HeaderValue> {
        self.targets.iter().find_map(|name| headers.get(*name))
    }

    pub(crate) fn host<'h>(&self, headers: &'h HeaderMap) -> Option<&'h HeaderValue> {
        self.host.iter().find_map(|name| headers.get(*name))
    }

    /// The first header that tells this family.
    fn present(&self, headers: &HeaderMap) -> Option<&'static str> {
        let mut names = self.targets.iter().copied().chain([self.method]);
        names.find(|name| headers.contains_key(*name))
    }
}
