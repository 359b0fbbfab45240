//! Which family of headers the proxy at the door writes, and which is therefore believed.

use std::borrow::Cow;

use http::HeaderMap;

use crate::{Unclear, describe::text, unclear::only};

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
    pub(crate) fn of(headers: &HeaderMap, proxy: Proxy) -> Result<&'static Self, Unclear> {
        match proxy {
            Proxy::Nginx => Ok(&ORIGINAL),
            Proxy::Forwarding => Ok(&FORWARDED),
            Proxy::Unknown => match (ORIGINAL.present(headers), FORWARDED.present(headers)) {
                (Some(original), Some(forwarded)) => Err(Unclear::TwoFamilies {
                    original,
                    forwarded,
                }),
                (Some(_), None) => Ok(&ORIGINAL),
                (None, _) => Ok(&FORWARDED),
            },
        }
    }

    pub(crate) fn method<'h>(
        &self,
        headers: &'h HeaderMap,
    ) -> Result<Option<Cow<'h, str>>, Unclear> {
        let lines = headers.get_all(self.method).iter();
        only(self.method, lines.map(text))
    }

    /// Of its headers that name the target a proxy sets one, so another is the client's.
    pub(crate) fn target<'h>(
        &self,
        headers: &'h HeaderMap,
    ) -> Result<Option<Cow<'h, str>>, Unclear> {
        let names = self.targets.iter();
        let lines = names.flat_map(|name| headers.get_all(*name));
        only("path", lines.map(text))
    }

    pub(crate) fn host<'h>(&self, headers: &'h HeaderMap) -> Result<Option<Cow<'h, str>>, Unclear> {
        let mut names = self.host.iter();
        let name = names.find(|name| headers.contains_key(**name));
        name.map_or(Ok(None), |name| {
            only(name, headers.get_all(*name).iter().map(text))
        })
    }

    /// The first header that tells this family.
    fn present(&self, headers: &HeaderMap) -> Option<&'static str> {
        let mut names = self.targets.iter().copied().chain([self.method]);
        names.find(|name| headers.contains_key(*name))
    }
}
