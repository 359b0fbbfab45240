//! The header family of the proxy that sends forward-auth requests. Only its headers are trusted.

use std::borrow::Cow;

use http::HeaderMap;

use crate::{Unclear, describe::text, unclear::only};

/// The family of headers that the proxy sends.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Proxy {
    /// Detected from the headers. A request with headers of both families is rejected.
    #[default]
    Unknown,
    /// nginx: `X-Original-*` and `X-Real-IP`.
    Nginx,
    /// Caddy and Traefik: only `X-Forwarded-*`.
    Forwarding,
}

impl Proxy {
    /// Returns the family of the proxy `name`: `nginx`, `caddy` or `traefik`.
    #[must_use]
    pub fn parse(name: &str) -> Option<Self> {
        match name {
            "nginx" => Some(Self::Nginx),
            "caddy" | "traefik" => Some(Self::Forwarding),
            _ => None,
        }
    }
}

/// The headers of one family that contain the method, the target and the host.
#[derive(Debug)]
pub(crate) struct Family {
    method: &'static str,
    targets: &'static [&'static str],
    host: &'static [&'static str],
    /// Whether the client address is in `X-Real-IP` and not in a list.
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
    /// Returns the family of `proxy`, or detects it from the headers.
    ///
    /// The two families are never mixed. Otherwise a client could add a header of the other family
    /// to its request and set a value that its proxy does not send.
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

    /// Returns the target. A proxy sets only one of these headers, so a second one may be the
    /// client's.
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

    /// Returns the first header that identifies this family.
    fn present(&self, headers: &HeaderMap) -> Option<&'static str> {
        let mut names = self.targets.iter().copied().chain([self.method]);
        names.find(|name| headers.contains_key(*name))
    }
}
