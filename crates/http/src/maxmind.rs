//! A GeoIP source that reads MaxMind databases, and others in the same format.

use std::{fmt, net::IpAddr};

use arc_swap::ArcSwapOption;
use maxminddb::{Reader, path};

use crate::atlas::{Atlas, Place};

type Database = Reader<Vec<u8>>;

/// The maximum number of networks that are validated before a database is used. The largest
/// databases have a few million.
const MAX_NETWORKS: usize = 1 << 24;

/// A GeoIP source with MaxMind databases: GeoLite2 or GeoIP2, Country or City, and ASN or ISP.
///
/// The databases are kept in memory. [`put`](Self::put) replaces one while requests are served.
/// Without a database, its entry is unknown.
///
/// # Examples
///
/// ```
/// use tidegate_http::{Atlas, MaxMind, Place};
///
/// let atlas = MaxMind::default();
/// let file = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/maxmind/GeoLite2-Country-Test.mmdb");
/// atlas.put(Place::Country, std::fs::read(file).unwrap()).unwrap();
/// assert_eq!(atlas.country("81.2.69.160".parse().unwrap()).as_deref(), Some("GB"));
/// assert_eq!(atlas.asn("81.2.69.160".parse().unwrap()), None);
/// ```
#[derive(Default)]
pub struct MaxMind {
    country: ArcSwapOption<Database>,
    asn: ArcSwapOption<Database>,
}

/// An error that says why a database cannot be used.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MaxMindError(String);

impl fmt::Display for MaxMindError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for MaxMindError {}

impl MaxMind {
    /// Uses the database `bytes` for `place` from now on. The whole database is validated first,
    /// which takes a fraction of a second for a million networks.
    ///
    /// # Errors
    ///
    /// Rejects bytes that are not such a database, a damaged database, and one without `place` for
    /// any address. The previous database then stays in use.
    pub fn put(&self, place: Place, bytes: Vec<u8>) -> Result<(), MaxMindError> {
        let database = Reader::from_source(bytes).map_err(|error| {
            MaxMindError(format!(
                "it is not a MaxMind database: {}",
                one_line(&error)
            ))
        })?;
        check(place, &database)?;
        self.database(place).store(Some(database.into()));
        Ok(())
    }

    fn database(&self, place: Place) -> &ArcSwapOption<Database> {
        match place {
            Place::Country => &self.country,
            Place::Asn => &self.asn,
        }
    }
}

impl Atlas for MaxMind {
    fn country(&self, address: IpAddr) -> Option<String> {
        let database = self.country.load();
        let found = database.as_ref()?.lookup(address).ok()?;
        found.decode_path(&path!["country", "iso_code"]).ok()?
    }

    fn asn(&self, address: IpAddr) -> Option<u32> {
        let database = self.asn.load();
        let found = database.as_ref()?.lookup(address).ok()?;
        found.decode_path(&path!["autonomous_system_number"]).ok()?
    }
}

/// Prints the types of the databases only, because a database has megabytes.
impl fmt::Debug for MaxMind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = |place| {
            let database = self.database(place).load();
            let kind = database
                .as_ref()
                .map(|database| &database.metadata().database_type);
            kind.cloned()
        };
        f.debug_struct("MaxMind")
            .field("country", &kind(Place::Country))
            .field("asn", &kind(Place::Asn))
            .finish()
    }
}

/// Checks that all of `database` can be read and that it has `place` for at least one address.
fn check(place: Place, database: &Database) -> Result<(), MaxMindError> {
    let damaged = |error| MaxMindError(format!("it is damaged: {}", one_line(&error)));
    let networks = database.networks(Default::default()).map_err(damaged)?;
    let mut says = 0_usize;
    for network in networks.take(MAX_NETWORKS) {
        let network = network.map_err(damaged)?;
        let is_said = match place {
            Place::Country => {
                let code = network.decode_path::<&str>(&path!["country", "iso_code"]);
                code.map_err(damaged)?.is_some()
            }
            Place::Asn => {
                let number = network.decode_path::<u32>(&path!["autonomous_system_number"]);
                number.map_err(damaged)?.is_some()
            }
        };
        says += usize::from(is_said);
    }
    if says > 0 {
        return Ok(());
    }
    let (kind, place) = (&database.metadata().database_type, place.as_str());
    Err(MaxMindError(format!(
        "it is a {kind:?} database, which has no {place} for any address"
    )))
}

/// Returns the error of the reader in one line.
fn one_line(error: &maxminddb::MaxMindDbError) -> String {
    error.to_string().replace(['\n', '\r'], " ")
}
