//! Where in the world an address is, and in whose network.

use std::{fmt, net::IpAddr};

/// Who knows where addresses are: a MaxMind database (`MaxMind`, with the feature `maxmind`), or a source of your own.
///
/// It is asked for every request whose rules name `country` or `asn`, and must answer at once.
pub trait Atlas: fmt::Debug + Send + Sync {
    /// The country of `address`: a code of two letters, ISO 3166-1. `None` where it is not known.
    fn country(&self, address: IpAddr) -> Option<String>;

    /// The number of the autonomous system to which `address` belongs. `None` where it is not known.
    fn asn(&self, address: IpAddr) -> Option<u32>;
}

/// What an atlas says of an address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// The entry `country`.
    Country,
    /// The entry `asn`.
    Asn,
}

impl Place {
    /// Every one.
    pub const ALL: [Self; 2] = [Self::Country, Self::Asn];

    /// The name of the entry.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Country => "country",
            Self::Asn => "asn",
        }
    }

    /// What the entry `name` says of an address; `None` if that is nothing for an atlas.
    pub(crate) fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|place| place.as_str() == name)
    }

    /// The value of the entry, by what `atlas` says of `address`.
    pub(crate) fn of(self, address: IpAddr, atlas: &dyn Atlas) -> Option<String> {
        match self {
            Self::Country => atlas.country(address),
            Self::Asn => atlas.asn(address).map(|number| number.to_string()),
        }
    }
}
