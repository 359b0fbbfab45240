//! The header dialect of the proxy that sends forward-auth requests. A dialect is the set of
//! headers in which a proxy describes the original request. Only headers of the proxy's dialect are
//! trusted.

use std::borrow::Cow;

use http::HeaderMap;

use crate::{AmbiguousRequest, ambiguous::single_value, header::header_text};

/// The headers in which a proxy describes the original request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum HeaderDialect {
    /// The dialect is detected for each request from its headers. A request with headers of both
    /// dialects is rejected.
    #[default]
    Detect,
    /// The dialect of nginx: `X-Original-*` and `X-Real-IP`.
    Nginx,
    /// The dialect of Caddy and Traefik: only `X-Forwarded-*`.
    XForwarded,
}

impl HeaderDialect {
    /// Returns the dialect of the proxy `name`: `nginx`, `caddy` or `traefik`.
    #[must_use]
    pub fn parse(name: &str) -> Option<Self> {
        match name {
            "nginx" => Some(Self::Nginx),
            "caddy" | "traefik" => Some(Self::XForwarded),
            _ => None,
        }
    }
}

/// The names of the headers in which one dialect sends the method, the target and the host.
#[derive(Debug)]
pub(crate) struct DialectHeaders {
    method: &'static str,
    targets: &'static [&'static str],
    host: &'static [&'static str],
    /// Whether the dialect sends the client address in `X-Real-IP` instead of a list.
    pub(crate) has_real_ip: bool,
}

static ORIGINAL: DialectHeaders = DialectHeaders {
    method: "x-original-method",
    targets: &["x-original-uri", "x-original-url"],
    host: &["host"],
    has_real_ip: true,
};

static FORWARDED: DialectHeaders = DialectHeaders {
    method: "x-forwarded-method",
    targets: &["x-forwarded-uri"],
    host: &["x-forwarded-host", "host"],
    has_real_ip: false,
};

impl DialectHeaders {
    /// Returns the header names of `dialect`. With [`HeaderDialect::Detect`], detects the dialect
    /// from the request.
    ///
    /// The two dialects are never mixed. If they were mixed, a client could add a header of the
    /// other dialect, and thereby set a value that the proxy does not send.
    pub(crate) fn of(
        headers: &HeaderMap,
        dialect: HeaderDialect,
    ) -> Result<&'static Self, AmbiguousRequest> {
        match dialect {
            HeaderDialect::Nginx => Ok(&ORIGINAL),
            HeaderDialect::XForwarded => Ok(&FORWARDED),
            HeaderDialect::Detect => {
                match (ORIGINAL.present(headers), FORWARDED.present(headers)) {
                    (Some(original), Some(forwarded)) => Err(AmbiguousRequest::MixedDialects {
                        original,
                        forwarded,
                    }),
                    (Some(_), None) => Ok(&ORIGINAL),
                    (None, _) => Ok(&FORWARDED),
                }
            }
        }
    }

    pub(crate) fn method<'h>(
        &self,
        headers: &'h HeaderMap,
    ) -> Result<Option<Cow<'h, str>>, AmbiguousRequest> {
        let lines = headers.get_all(self.method).iter();
        single_value(self.method, lines.map(header_text))
    }

    /// Returns the request target. A proxy sets only one of the target headers, so a second target
    /// header would come from the client.
    pub(crate) fn target<'h>(
        &self,
        headers: &'h HeaderMap,
    ) -> Result<Option<Cow<'h, str>>, AmbiguousRequest> {
        let names = self.targets.iter();
        let lines = names.flat_map(|name| headers.get_all(*name));
        single_value("path", lines.map(header_text))
    }

    pub(crate) fn host<'h>(
        &self,
        headers: &'h HeaderMap,
    ) -> Result<Option<Cow<'h, str>>, AmbiguousRequest> {
        let mut names = self.host.iter();
        let name = names.find(|name| headers.contains_key(**name));
        name.map_or(Ok(None), |name| {
            single_value(name, headers.get_all(*name).iter().map(header_text))
        })
    }

    /// Returns the first header in `headers` that identifies this dialect.
    fn present(&self, headers: &HeaderMap) -> Option<&'static str> {
        let mut names = self.targets.iter().copied().chain([self.method]);
        names.find(|name| headers.contains_key(*name))
    }
}
