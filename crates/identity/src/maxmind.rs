//! A GeoIP source that reads MaxMind databases, and other databases in the same format.

use std::{fmt, net::IpAddr};

use arc_swap::ArcSwapOption;
use maxminddb::{Reader, path};

use crate::geoip::{GeoIpField, GeoIpSource};

type MaxMindDatabase = Reader<Vec<u8>>;

/// The maximum number of networks in a database, all of which are validated before use. The largest
/// databases have a few million networks.
const MAX_NETWORKS: usize = 1 << 24;

/// A GeoIP source with MaxMind databases. The source accepts GeoLite2 and GeoIP2 databases of the
/// types Country, City, ASN and ISP.
///
/// The databases are kept in memory. The method [`put`](Self::put) can replace a database at any
/// time, without interrupting requests. An entry without a database is absent.
///
/// # Examples
///
/// ```
/// use tidegate_identity::{GeoIpSource, MaxMind, GeoIpField};
///
/// let geoip = MaxMind::default();
/// let file = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/maxmind/GeoLite2-Country-Test.mmdb");
/// geoip.put(GeoIpField::Country, std::fs::read(file).unwrap()).unwrap();
/// assert_eq!(geoip.country("81.2.69.160".parse().unwrap()).as_deref(), Some("GB"));
/// assert_eq!(geoip.asn("81.2.69.160".parse().unwrap()), None);
/// ```
#[derive(Default)]
pub struct MaxMind {
    country: ArcSwapOption<MaxMindDatabase>,
    asn: ArcSwapOption<MaxMindDatabase>,
}

/// The reason why a database cannot be used.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MaxMindError(String);

impl fmt::Display for MaxMindError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for MaxMindError {}

impl MaxMind {
    /// Validates the whole database in `bytes`, and uses it for `field` from now on. Validation
    /// takes a fraction of a second for a million networks.
    ///
    /// # Errors
    ///
    /// Returns an error if the bytes are not a MaxMind database, if the database is damaged, or if
    /// it does not contain `field` for any address. The previous database then stays in use.
    pub fn put(&self, field: GeoIpField, bytes: Vec<u8>) -> Result<(), MaxMindError> {
        let database = Reader::from_source(bytes).map_err(|error| {
            MaxMindError(format!(
                "it is not a MaxMind database: {}",
                one_line(&error)
            ))
        })?;
        check(field, &database)?;
        self.database(field).store(Some(database.into()));
        Ok(())
    }

    fn database(&self, field: GeoIpField) -> &ArcSwapOption<MaxMindDatabase> {
        match field {
            GeoIpField::Country => &self.country,
            GeoIpField::Asn => &self.asn,
        }
    }
}

impl GeoIpSource for MaxMind {
    fn country(&self, address: IpAddr) -> Option<String> {
        let database = self.country.load();
        let record = database.as_ref()?.lookup(address).ok()?;
        record.decode_path(&path!["country", "iso_code"]).ok()?
    }

    fn asn(&self, address: IpAddr) -> Option<u32> {
        let database = self.asn.load();
        let record = database.as_ref()?.lookup(address).ok()?;
        record
            .decode_path(&path!["autonomous_system_number"])
            .ok()?
    }
}

/// Prints only the types of the databases, because a database contains megabytes of data.
impl fmt::Debug for MaxMind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = |field| {
            let database = self.database(field).load();
            let kind = database
                .as_ref()
                .map(|database| &database.metadata().database_type);
            kind.cloned()
        };
        f.debug_struct("MaxMind")
            .field("country", &kind(GeoIpField::Country))
            .field("asn", &kind(GeoIpField::Asn))
            .finish()
    }
}

/// Checks that the whole `database` can be read, and that it contains `field` for at least one
/// address.
fn check(field: GeoIpField, database: &MaxMindDatabase) -> Result<(), MaxMindError> {
    let damaged = |error| MaxMindError(format!("it is damaged: {}", one_line(&error)));
    let networks = database.networks(Default::default()).map_err(damaged)?;
    let mut says = 0_usize;
    for network in networks.take(MAX_NETWORKS) {
        let network = network.map_err(damaged)?;
        let is_said = match field {
            GeoIpField::Country => {
                let code = network.decode_path::<&str>(&path!["country", "iso_code"]);
                code.map_err(damaged)?.is_some()
            }
            GeoIpField::Asn => {
                let number = network.decode_path::<u32>(&path!["autonomous_system_number"]);
                number.map_err(damaged)?.is_some()
            }
        };
        says += usize::from(is_said);
    }
    if says > 0 {
        return Ok(());
    }
    let (kind, field) = (&database.metadata().database_type, field.as_str());
    Err(MaxMindError(format!(
        "it is a {kind:?} database, which has no {field} for any address"
    )))
}

/// Formats the database reader's error as one line.
fn one_line(error: &maxminddb::MaxMindDbError) -> String {
    error.to_string().replace(['\n', '\r'], " ")
}
