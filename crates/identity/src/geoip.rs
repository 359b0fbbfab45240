//! GeoIP: the country and the autonomous system of an address.

use std::{fmt, net::IpAddr};

/// A GeoIP source. Use a MaxMind database (`MaxMind`, with the feature `maxmind`), or implement
/// this trait.
///
/// The source is called for every request if a rule uses `country` or `asn`. A lookup must not
/// block.
pub trait GeoIpSource: fmt::Debug + Send + Sync {
    /// Returns the country of `address` as a two-letter ISO 3166-1 code, or `None` if the country
    /// is unknown.
    fn country(&self, address: IpAddr) -> Option<String>;

    /// Returns the autonomous system number of `address`, or `None` if it is unknown.
    fn asn(&self, address: IpAddr) -> Option<u32>;
}

/// An entry whose value comes from a GeoIP source.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GeoIpField {
    /// The entry `country`.
    Country,
    /// The entry `asn`.
    Asn,
}

impl GeoIpField {
    /// All GeoIP entries.
    pub const ALL: [Self; 2] = [Self::Country, Self::Asn];

    /// Returns the name of the entry.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Country => "country",
            Self::Asn => "asn",
        }
    }

    /// Returns the GeoIP entry with this name, if there is one.
    pub(crate) fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|field| field.as_str() == name)
    }

    /// Looks up the value of the entry for `address`.
    pub(crate) fn of(self, address: IpAddr, geoip: &dyn GeoIpSource) -> Option<String> {
        match self {
            Self::Country => geoip.country(address),
            Self::Asn => geoip.asn(address).map(|number| number.to_string()),
        }
    }
}
