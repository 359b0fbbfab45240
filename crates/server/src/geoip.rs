//! GeoIP databases: loaded at startup and reloaded when their files change.
//!
//! A database file may be overwritten in place. Therefore a changed file is read only once two
//! consecutive checks have found the same modification time, size and inode. If the new database is
//! invalid, the previous database stays in use.

use std::{
    fs, io,
    path::{Path, PathBuf},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
};

use tidegate_identity::{GeoIpField, GeoIpSource, MaxMind};
use tidegate_net::{
    file_watch::{FileStamp, stamp},
    prometheus::{Metric, Page},
};

/// The maximum size of a database, in bytes. The whole file is kept in memory.
const MAX_BYTES: u64 = 1 << 30;

const LOADS: Metric<2> = Metric::counter(
    "tidegate_geoip_loads_total",
    ["database", "result"],
    "GeoIP database reloads since startup.",
);
const LAST_LOAD_SUCCESS: Metric<1> = Metric::gauge(
    "tidegate_last_geoip_load_success",
    ["database"],
    "0 if the last load of the GeoIP database failed, otherwise 1.",
);

/// A GeoIP database that cannot be used, and the reason.
#[derive(Debug, thiserror::Error)]
#[error("geoip.{}: cannot use {}: {problem}", field.as_str(), path.display())]
pub struct GeoIpError {
    /// The kind of data that the database must contain: countries or autonomous systems.
    pub field: GeoIpField,
    /// The database file.
    pub path: PathBuf,
    /// The problem with the file.
    pub problem: String,
}

/// The GeoIP databases in use, and the database files.
#[derive(Debug)]
pub struct GeoIp {
    databases: Arc<MaxMind>,
    files: Vec<DatabaseFile>,
}

#[derive(Debug)]
struct DatabaseFile {
    field: GeoIpField,
    path: PathBuf,
    seen: Mutex<SeenStamps>,
    /// The error of the last load; `None` if the last load succeeded.
    problem: Mutex<Option<String>>,
    loads: [AtomicU64; 2],
}

/// The modification stamps (time, length and inode) of a database file.
#[derive(Debug)]
struct SeenStamps {
    /// The stamp at the last load.
    read: Option<FileStamp>,
    /// The stamp at the last check.
    checked: Option<FileStamp>,
}

impl GeoIp {
    /// Loads the databases in `files`.
    ///
    /// # Errors
    ///
    /// Returns [`GeoIpError`] for the first file that cannot be read, is not a MaxMind database, is
    /// damaged, or does not contain the configured kind of data.
    pub fn open(files: &[(GeoIpField, PathBuf)]) -> Result<Self, GeoIpError> {
        let databases = Arc::new(MaxMind::default());
        let file = |(field, path): &(GeoIpField, PathBuf)| {
            let file = DatabaseFile::new(*field, path);
            file.load(&databases)?;
            Ok(file)
        };
        let files: Result<Vec<DatabaseFile>, GeoIpError> = files.iter().map(file).collect();
        Ok(Self {
            files: files?,
            databases,
        })
    }

    /// Returns a lookup handle. Each lookup uses the databases that are loaded at the time of the
    /// lookup.
    #[must_use]
    pub fn source(&self) -> Arc<dyn GeoIpSource> {
        Arc::clone(&self.databases) as Arc<dyn GeoIpSource>
    }

    /// Reloads all databases.
    ///
    /// # Errors
    ///
    /// Returns an error for each database that [`Self::open`] would reject. The previous version of
    /// a rejected database stays in use.
    pub fn reload(&self) -> Result<(), Vec<GeoIpError>> {
        let errors: Vec<GeoIpError> = self
            .files
            .iter()
            .filter_map(|file| file.reload(&self.databases).err())
            .collect();
        if errors.is_empty() {
            Ok(())
        } else {
            Err(errors)
        }
    }

    /// Reloads each database whose file has changed since the last load. A file that is still being
    /// written is not read until it has stopped changing.
    pub fn reload_if_changed(&self) {
        let changed = self.files.iter().filter(|file| file.has_changed());
        changed.for_each(|file| drop(file.reload(&self.databases)));
    }

    /// Returns the load error of each database whose last load failed.
    #[must_use]
    pub fn problems(&self) -> Vec<String> {
        self.files
            .iter()
            .filter_map(DatabaseFile::problem)
            .collect()
    }

    /// Adds the GeoIP metrics to `page`.
    pub(crate) fn collect(&self, page: &mut Page<'_>) {
        let loads = self.files.iter().flat_map(|file| {
            let [succeeded, failed] = &file.loads;
            [("ok", succeeded), ("failed", failed)].map(|(result, count)| {
                let labels = [file.field.as_str(), result];
                (labels, count.load(Ordering::Relaxed))
            })
        });
        page.family(&LOADS, loads);
        let successes = self.files.iter().map(|file| {
            let is_in_use = u64::from(file.problem().is_none());
            ([file.field.as_str()], is_in_use)
        });
        page.family(&LAST_LOAD_SUCCESS, successes);
    }
}

impl DatabaseFile {
    fn new(field: GeoIpField, path: &Path) -> Self {
        let now = stamp(path);
        Self {
            field,
            path: path.to_owned(),
            seen: Mutex::new(SeenStamps {
                read: now,
                checked: now,
            }),
            problem: Mutex::default(),
            loads: Default::default(),
        }
    }

    fn load(&self, databases: &MaxMind) -> Result<(), GeoIpError> {
        let put = read(&self.path)
            .map_err(|error| error.to_string())
            .and_then(|bytes| {
                databases
                    .put(self.field, bytes)
                    .map_err(|error| error.to_string())
            });
        put.map_err(|problem| GeoIpError {
            field: self.field,
            path: self.path.clone(),
            problem,
        })
    }

    fn reload(&self, databases: &MaxMind) -> Result<(), GeoIpError> {
        lock(&self.seen).read = stamp(&self.path);
        let loaded = self.load(databases);
        self.loads[usize::from(loaded.is_err())].fetch_add(1, Ordering::Relaxed);
        *lock(&self.problem) = loaded.as_ref().err().map(ToString::to_string);
        match &loaded {
            Ok(()) => {
                tracing::info!(file = %self.path.display(), "reloaded the GeoIP database")
            }
            Err(error) => tracing::error!("kept the old GeoIP database: {error}"),
        }
        loaded
    }

    fn has_changed(&self) -> bool {
        let (mut seen, now) = (lock(&self.seen), stamp(&self.path));
        let is_settled = seen.checked == now;
        // A missing file is probably being replaced, so the reload waits for the new file.
        let has_changed = is_settled && now.is_some() && seen.read != now;
        seen.checked = now;
        has_changed
    }

    fn problem(&self) -> Option<String> {
        lock(&self.problem).clone()
    }
}

fn read(path: &Path) -> io::Result<Vec<u8>> {
    let size = fs::metadata(path)?.len();
    if size > MAX_BYTES {
        let problem = format!("{size} bytes exceed the maximum of {MAX_BYTES}");
        return Err(io::Error::new(io::ErrorKind::FileTooLarge, problem));
    }
    fs::read(path)
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
