//! Client identity: extracts from the request head the values that rules use in conditions and
//! keys.
//!
//! A client can write anything into its headers. This crate returns only values that all services
//! interpret in the same way. Examples are the address that the trusted proxies saw, the path in a
//! normal form, and cookies and headers with a single meaning. A request that services might
//! interpret differently from the rules is an [`AmbiguousRequest`], and should be rejected.
//!
//! | task | type |
//! | --- | --- |
//! | find the client address behind proxies | [`Trust`] |
//! | read the entries (named values) of a request that the application serves | [`RequestEntries`]
//! |
//! | read the entries of a request that a proxy describes | [`ForwardAuthRequest`] |
//! | convert entries that another service sends to the same form | [`Trust::normalize`] |
//! | use the owner of an API key without its secret | [`DerivedEntry`] |
//! | find the country and the network operator of an address | [`GeoIpSource`], `MaxMind` |
//!
//! This crate makes no rate limit decisions and uses no sockets.
//!
//! # Examples
//!
//! In this example, a load balancer in `10.0.0.0/8` appends the address of its peer to
//! `X-Forwarded-For`. Elements sent by the client in `X-Forwarded-For` have no effect:
//!
//! ```
//! use http::HeaderMap;
//! use tidegate_identity::{AddressHeader, Proxies, Trust};
//!
//! let proxies = Proxies::Nets(vec!["10.0.0.0/8".parse().unwrap()]);
//! let trust = Trust::new(proxies, AddressHeader::XForwardedFor);
//!
//! let mut headers = HeaderMap::new();
//! headers.insert("x-forwarded-for", "6.6.6.6, 203.0.113.9".parse().unwrap());
//! let peer = "10.0.0.8".parse().unwrap();
//! assert_eq!(trust.client_ip(peer, &headers).to_string(), "203.0.113.9");
//! ```

mod address;
mod ambiguous;
pub mod client_ip;
mod cookies;
mod derived;
mod dialect;
mod entries;
pub mod forward_auth;
mod forwarded;
mod geoip;
mod header;
#[cfg(feature = "maxmind")]
mod maxmind;
mod normalize;
mod path;
mod target;
mod value;

pub use ambiguous::AmbiguousRequest;
pub use client_ip::{AddressHeader, Proxies, Trust};
pub use derived::{DerivedEntry, DerivedEntryError};
pub use dialect::HeaderDialect;
pub use entries::{Entries, EntrySources, Peer, RequestEntries};
pub use forward_auth::{DescribedRequest, ForwardAuthContext, ForwardAuthRequest};
pub use geoip::{GeoIpField, GeoIpSource};
pub use header::{
    MAX_HEADER_LINES, TooManyHeaderLines, header_text, is_never_split, joined_header, joined_lines,
    split_joined_headers,
};
#[cfg(feature = "maxmind")]
pub use maxmind::{MaxMind, MaxMindError};
pub use normalize::bare_host;
pub use path::normalize_path;
pub use value::EntryValue;
