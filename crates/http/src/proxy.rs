//! Which family of headers the proxy at the door writes, and which is therefore believed.

use std::{borrow::Cow, fmt};

use http::HeaderMap;

use crate::describe::text;

/// The family of headers that the proxy at the door sends.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Proxy {
    /// Whichever is there; contradictions are refused.
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

/// Two headers say different things about the original request, and either may be the client's.
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
            "{original} and {forwarded} contradict each other; ask with ?proxy=nginx, caddy or traefik"
        )
    }
}

impl std::error::Error for Ambiguous {}

/// The one of the two headers that the proxy writes.
pub(crate) fn pick<'r>(
    headers: &'r HeaderMap,
    proxy: Proxy,
    original: &'static str,
    forwarded: &'static str,
) -> Result<Option<Cow<'r, str>>, Ambiguous> {
    let nginx = || headers.get(original);
    let forwarding = || headers.get(forwarded);
    let value = match proxy {
        Proxy::Nginx => nginx(),
        Proxy::Forwarding => forwarding(),
        Proxy::Unknown => match (nginx(), forwarding()) {
            (Some(one), Some(other)) if one != other => {
                return Err(Ambiguous {
                    original,
                    forwarded,
                });
            }
            (one, other) => one.or(other),
        },
    };
    Ok(value.map(text))
}
