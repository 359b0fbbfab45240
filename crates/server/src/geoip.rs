//! The databases that say where addresses are: read at the start, and again when they change.
//!
//! Whoever renews a database may write it in place, so what has just changed is read only once it stays as it is. One that cannot be used
//! changes nothing: where addresses are is then said by the one before.

use std::{
    fs, io,
    path::{Path, PathBuf},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
};

use tidegate_http::{Atlas, MaxMind, Place};

use crate::{
    metrics::Text,
    reload::{Mark, mark},
};

/// The largest database, in bytes. All of it is kept in memory.
const MAX_BYTES: u64 = 1 << 30;

/// A database cannot be used: which, and why.
#[derive(Debug, thiserror::Error)]
#[error("geoip.{}: cannot use {}: {problem}", place.as_str(), path.display())]
pub struct GeoIpError {
    /// What it should say of addresses.
    pub place: Place,
    /// The file.
    pub path: PathBuf,
    /// What is wrong with it.
    pub problem: String,
}

/// The databases in use, and the files that they come from.
#[derive(Debug)]
pub struct GeoIp {
    atlas: Arc<MaxMind>,
    files: Vec<File>,
}

#[derive(Debug)]
struct File {
    place: Place,
    path: PathBuf,
    seen: Mutex<Seen>,
    /// What was wrong with it when it was last read.
    problem: Mutex<Option<String>>,
    loads: [AtomicU64; 2],
}

/// What a file looks like from outside.
#[derive(Debug)]
struct Seen {
    /// When it was last read.
    read: Option<Mark>,
    /// When it was last looked at.
    looked: Option<Mark>,
}

impl GeoIp {
    /// Reads the databases in `files`.
    ///
    /// # Errors
    ///
    /// [`GeoIpError`]: a file that cannot be read, is no database, is damaged, or does not say what it is there for.
    pub fn open(files: &[(Place, PathBuf)]) -> Result<Self, GeoIpError> {
        let atlas = Arc::new(MaxMind::default());
        let file = |(place, path): &(Place, PathBuf)| {
            let file = File::new(*place, path);
            file.load(&atlas)?;
            Ok(file)
        };
        let files: Result<Vec<File>, GeoIpError> = files.iter().map(file).collect();
        Ok(Self {
            files: files?,
            atlas,
        })
    }

    /// Who answers from the databases of the moment.
    #[must_use]
    pub fn atlas(&self) -> Arc<dyn Atlas> {
        Arc::clone(&self.atlas) as Arc<dyn Atlas>
    }

    /// Reads all of them again.
    ///
    /// # Errors
    ///
    /// What [`Self::open`] refuses, for each of them. What cannot be used leaves the one before in use.
    pub fn reload(&self) -> Result<(), Vec<GeoIpError>> {
        let errors: Vec<GeoIpError> = self
            .files
            .iter()
            .filter_map(|file| file.reload(&self.atlas).err())
            .collect();
        if errors.is_empty() {
            Ok(())
        } else {
            Err(errors)
        }
    }

    /// Reads those again that have changed, and not since they were last looked at.
    pub fn follow(&self) {
        let changed = self.files.iter().filter(|file| file.has_changed());
        changed.for_each(|file| drop(file.reload(&self.atlas)));
    }

    /// What was wrong with each when it was last read; empty if all are in use.
    #[must_use]
    pub fn problems(&self) -> Vec<String> {
        self.files.iter().filter_map(File::problem).collect()
    }

    /// Appends what was counted to `text`.
    pub(crate) fn write(&self, text: &mut Text) {
        let name = "tidegate_geoip_loads_total";
        text.family(
            name,
            "counter",
            "Loads of a database of addresses after the start.",
        );
        for file in &self.files {
            let [succeeded, failed] = &file.loads;
            for (result, count) in [("ok", succeeded), ("failed", failed)] {
                let labels = [("database", file.place.as_str()), ("result", result)];
                text.sample(name, &labels, count.load(Ordering::Relaxed));
            }
        }
        let name = "tidegate_last_geoip_load_success";
        let help = "1 unless the last load of the database of addresses failed.";
        text.family(name, "gauge", help);
        for file in &self.files {
            let is_in_use = u64::from(file.problem().is_none());
            text.sample(name, &[("database", file.place.as_str())], is_in_use);
        }
    }
}

impl File {
    fn new(place: Place, path: &Path) -> Self {
        let now = mark(path);
        Self {
            place,
            path: path.to_owned(),
            seen: Mutex::new(Seen {
                read: now,
                looked: now,
            }),
            problem: Mutex::default(),
            loads: Default::default(),
        }
    }

    fn load(&self, atlas: &MaxMind) -> Result<(), GeoIpError> {
        let put = read(&self.path)
            .map_err(|error| error.to_string())
            .and_then(|bytes| {
                atlas
                    .put(self.place, bytes)
                    .map_err(|error| error.to_string())
            });
        put.map_err(|problem| GeoIpError {
            place: self.place,
            path: self.path.clone(),
            problem,
        })
    }

    fn reload(&self, atlas: &MaxMind) -> Result<(), GeoIpError> {
        lock(&self.seen).read = mark(&self.path);
        let loaded = self.load(atlas);
        self.loads[usize::from(loaded.is_err())].fetch_add(1, Ordering::Relaxed);
        *lock(&self.problem) = loaded.as_ref().err().map(ToString::to_string);
        match &loaded {
            Ok(()) => {
                tracing::info!(file = %self.path.display(), "reloaded the database of addresses")
            }
            Err(error) => tracing::error!("kept the old database: {error}"),
        }
        loaded
    }

    fn has_changed(&self) -> bool {
        let (mut seen, now) = (lock(&self.seen), mark(&self.path));
        let is_settled = seen.looked == now;
        // A file that is gone for the moment is being replaced: wait for what comes.
        let has_changed = is_settled && now.is_some() && seen.read != now;
        seen.looked = now;
        has_changed
    }

    fn problem(&self) -> Option<String> {
        lock(&self.problem).clone()
    }
}

fn read(path: &Path) -> io::Result<Vec<u8>> {
    let size = fs::metadata(path)?.len();
    if size > MAX_BYTES {
        let problem = format!("{size} bytes are over the maximum of {MAX_BYTES}");
        return Err(io::Error::new(io::ErrorKind::FileTooLarge, problem));
    }
    fs::read(path)
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
