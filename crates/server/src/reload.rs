//! Live reload: the rules file is read again, and either all of it takes effect or nothing does.

use std::{
    fs, io,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, SystemTime},
};

use crate::{
    config::{Config, MAX_FILE_BYTES, Mistake},
    limiter::Limiter,
};

/// How often the rules file is looked at. Looking costs one `stat`, and works where file events do not:
/// on network file systems, and for the symbolic links of a Kubernetes ConfigMap.
pub const LOOK_EVERY: Duration = Duration::from_secs(1);

/// Why a rules file could not be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LoadError {
    /// The file could not be read: the caller's path or permissions.
    #[error("cannot read {path}: {source}")]
    Unreadable {
        /// The file.
        path: PathBuf,
        /// What the file system said.
        source: io::Error,
    },
    /// The file was read and is wrong: its author's.
    #[error("{path} has {} mistake{}:\n{}", mistakes.len(), plural(mistakes.len()), lines(mistakes))]
    Mistaken {
        /// The file.
        path: PathBuf,
        /// Every mistake in it.
        mistakes: Vec<Mistake>,
    },
}

impl LoadError {
    /// One line for each thing that is wrong.
    #[must_use]
    pub fn problems(&self) -> Vec<String> {
        match self {
            Self::Unreadable { .. } => vec![self.to_string()],
            Self::Mistaken { mistakes, .. } => mistakes.iter().map(Mistake::to_string).collect(),
        }
    }
}

/// Reads a rules file.
///
/// # Errors
///
/// [`LoadError`]; see its variants.
pub fn load(path: &Path) -> Result<Config, LoadError> {
    let unreadable = |source| LoadError::Unreadable {
        path: path.to_owned(),
        source,
    };
    let size = fs::metadata(path).map_err(unreadable)?.len();
    if size > MAX_FILE_BYTES as u64 {
        let problem = format!("{size} bytes is over the maximum of {MAX_FILE_BYTES}");
        return Err(unreadable(io::Error::new(
            io::ErrorKind::FileTooLarge,
            problem,
        )));
    }
    let text = fs::read_to_string(path).map_err(unreadable)?;
    Config::parse(&text).map_err(|mistakes| LoadError::Mistaken {
        path: path.to_owned(),
        mistakes,
    })
}

/// Reads the rules file again when asked, or when it has changed.
#[derive(Debug)]
pub struct Reloader {
    path: PathBuf,
    limiter: Arc<Limiter>,
    seen: Mutex<Option<Mark>>,
    mistakes: Mutex<Vec<String>>,
}

/// What a file looks like from outside; it changes when the file is written or replaced.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Mark {
    modified: SystemTime,
    len: u64,
    inode: u64,
}

impl Reloader {
    /// A reloader of the file at `path`, which has just been loaded into `limiter`.
    #[must_use]
    pub fn new(path: PathBuf, limiter: Arc<Limiter>) -> Self {
        let seen = Mutex::new(mark(&path));
        Self {
            path,
            limiter,
            seen,
            mistakes: Mutex::default(),
        }
    }

    /// Reads the file and puts its rules in force; counts are kept. Returns how many rules there are.
    ///
    /// Addresses, bounds and the store are those of the start until the server starts again.
    ///
    /// # Errors
    ///
    /// [`LoadError`]. The rules in force stay in force.
    pub fn reload(&self) -> Result<usize, LoadError> {
        let mut seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        *seen = mark(&self.path);
        let loaded = load(&self.path).map(|config| {
            let rules = config.rules.succeeding(&self.limiter.rules());
            let count = rules.len();
            self.limiter.swap_rules(rules);
            self.limiter.quotas().swap_rules(config.quotas);
            count
        });
        self.limiter.metrics().count_reload(loaded.is_err());
        *self.mistakes.lock().unwrap_or_else(PoisonError::into_inner) = loaded
            .as_ref()
            .err()
            .map(LoadError::problems)
            .unwrap_or_default();
        match &loaded {
            Ok(rules) => tracing::info!(file = %self.path.display(), rules, "reloaded the rules"),
            Err(error) => {
                tracing::error!(file = %self.path.display(), "kept the old rules: {error}")
            }
        }
        loaded
    }

    /// What was wrong with the file when it was last read; empty if it is in force.
    #[must_use]
    pub fn last_mistakes(&self) -> Vec<String> {
        self.mistakes
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
    }

    /// Whether the file has changed since it was last read.
    #[must_use]
    pub fn has_changed(&self) -> bool {
        let seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        // A file that is gone for the moment is being replaced: wait for what comes.
        mark(&self.path).is_some_and(|now| Some(now) != *seen)
    }
}

/// What the file at `path` looks like now, links followed; `None` if it cannot be looked at.
pub(crate) fn mark(path: &Path) -> Option<Mark> {
    use std::os::unix::fs::MetadataExt;
    let metadata = fs::metadata(path).ok()?;
    Some(Mark {
        modified: metadata.modified().ok()?,
        len: metadata.len(),
        inode: metadata.ino(),
    })
}

fn plural(count: usize) -> &'static str {
    if count == 1 { "" } else { "s" }
}

fn lines(mistakes: &[Mistake]) -> String {
    mistakes
        .iter()
        .map(|mistake| format!("  {mistake}"))
        .collect::<Vec<_>>()
        .join("\n")
}
