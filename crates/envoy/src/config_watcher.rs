//! The rate limit service's configuration files, and their hot reload.

use std::{
    fs, io,
    path::{Path, PathBuf},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::SystemTime,
};

use tidegate_config::{
    MAX_FILE_BYTES,
    envoy::{ConfigFiles, FileFormat},
};
use tidegate_net::file_watch::{self, LastRead};

use super::{ConfigLoads, File, FileMistake, LoadedConfig, RateLimitService, read, read_limitador};

/// The log target of messages about configuration files.
pub const CONFIG_LOG_TARGET: &str = module_path!();

/// The maximum number of files in a folder.
pub const MAX_FILES: usize = 10_000;

/// The maximum number of attempts to read files. An attempt fails if the files change during the
/// read.
const TRIES: usize = 3;

/// The maximum nesting depth of folders.
const MAX_DEPTH: usize = 16;

/// The reason why a configuration could not be loaded.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ConfigFilesError {
    /// A file or folder could not be read, for example because of a wrong path or missing
    /// permissions.
    #[error(
        "cannot read {}: {source}; fix the path (with `--from-envoy-env`: RUNTIME_ROOT and \
         RUNTIME_SUBDIRECTORY) or its permissions",
        path.display()
    )]
    Unreadable {
        /// The path of the file or folder.
        path: PathBuf,
        /// The file system error.
        source: io::Error,
    },
    /// The files were read, but contain errors.
    #[error("{} has {} error{}:\n{}", path.display(), mistakes.len(), plural(mistakes.len()), lines(mistakes))]
    Invalid {
        /// The path of the file or folder.
        path: PathBuf,
        /// All errors in the files.
        mistakes: Vec<FileMistake>,
    },
}

impl ConfigFilesError {
    /// Returns the errors, one per line.
    #[must_use]
    pub fn problems(&self) -> Vec<String> {
        match self {
            Self::Unreadable { .. } => vec![self.to_string()],
            Self::Invalid { mistakes, .. } => mistakes.iter().map(FileMistake::to_string).collect(),
        }
    }

    /// Returns whether the error may be temporary, so that the files should be read again even if
    /// they seem unchanged.
    fn may_pass(&self) -> bool {
        matches!(self, Self::Unreadable { source, .. } if file_watch::may_pass(source))
    }
}

/// Reads and parses every file of a configuration.
///
/// # Errors
///
/// Returns a [`ConfigFilesError`] if the files cannot be read or contain errors.
pub fn load_files(folder: &ConfigFiles) -> Result<LoadedConfig, ConfigFilesError> {
    let path = &folder.path;
    let texts = read_unchanged(|| files(path), |files| texts(path, files))?;
    let read = match folder.format {
        FileFormat::Ratelimit => read(texts, folder.merging),
        FileFormat::Limitador => read_limitador(texts),
    };
    read.map_err(|mistakes| ConfigFilesError::Invalid {
        path: path.clone(),
        mistakes,
    })
}

fn texts(folder: &Path, files: &[ListedFile]) -> Result<Vec<File>, ConfigFilesError> {
    let file = |found: &ListedFile| {
        Ok(File {
            name: name_of(folder, &found.path),
            text: text(&found.path)?,
        })
    };
    files.iter().map(file).collect()
}

/// Returns the files in `folder`, sorted by path.
fn files(folder: &Path) -> Result<Vec<ListedFile>, ConfigFilesError> {
    let mut files = Vec::new();
    list_files(folder, 0, &mut files)?;
    files.sort_by(|a, b| a.path.cmp(&b.path));
    Ok(files)
}

/// Returns the name of `file` for messages, which is its path relative to `folder`.
fn name_of(folder: &Path, file: &Path) -> String {
    let inside = file
        .strip_prefix(folder)
        .ok()
        .filter(|inside| *inside != Path::new(""));
    let alone = || file.file_name().map(Path::new);
    inside.or_else(alone).unwrap_or(file).display().to_string()
}

/// Calls `look`, then `read`, then `look` again. If the two calls of `look` return different
/// values, tries again, with at most [`TRIES`] attempts. If files are replaced while `read` runs,
/// the first result could be a mixture of old and new content.
fn read_unchanged<M: PartialEq, T, E>(
    mut look: impl FnMut() -> Result<M, E>,
    mut read: impl FnMut(&M) -> Result<T, E>,
) -> Result<T, E> {
    let mut before = look()?;
    for _ in 1..TRIES {
        let content = read(&before);
        let after = look()?;
        if after == before {
            return content;
        }
        before = after;
    }
    read(&before)
}

/// A file and its metadata. The metadata changes when the file is written or replaced.
#[derive(Clone, Debug, PartialEq, Eq)]
struct ListedFile {
    path: PathBuf,
    modified: Option<SystemTime>,
    len: u64,
    inode: u64,
}

fn list_files(
    path: &Path,
    depth: usize,
    files: &mut Vec<ListedFile>,
) -> Result<(), ConfigFilesError> {
    use std::os::unix::fs::MetadataExt;
    let unreadable = |source| ConfigFilesError::Unreadable {
        path: path.to_owned(),
        source,
    };
    // Follow symbolic links, because a mounted ConfigMap consists of symbolic links.
    let metadata = fs::metadata(path).map_err(unreadable)?;
    if metadata.is_file() {
        if files.len() == MAX_FILES {
            return Err(unreadable(io::Error::other(format!(
                "there are more than {MAX_FILES} files"
            ))));
        }
        files.push(ListedFile {
            path: path.to_owned(),
            modified: metadata.modified().ok(),
            len: metadata.len(),
            inode: metadata.ino(),
        });
        return Ok(());
    }
    if depth == MAX_DEPTH {
        return Err(unreadable(io::Error::other(format!(
            "folders are nested deeper than the maximum of {MAX_DEPTH}"
        ))));
    }
    for entry in fs::read_dir(path).map_err(unreadable)? {
        let entry = entry.map_err(unreadable)?;
        if !entry.file_name().to_string_lossy().starts_with('.') {
            list_files(&entry.path(), depth + 1, files)?;
        }
    }
    Ok(())
}

fn text(path: &Path) -> Result<String, ConfigFilesError> {
    let unreadable = |source| ConfigFilesError::Unreadable {
        path: path.to_owned(),
        source,
    };
    let size = fs::metadata(path).map_err(unreadable)?.len();
    if size > MAX_FILE_BYTES as u64 {
        let problem =
            format!("the file has {size} bytes, which exceeds the maximum of {MAX_FILE_BYTES}");
        return Err(unreadable(io::Error::new(
            io::ErrorKind::FileTooLarge,
            problem,
        )));
    }
    fs::read_to_string(path).map_err(unreadable)
}

/// Reloads the configuration on request, and when its files change.
#[derive(Debug)]
pub struct ConfigWatcher {
    folder: ConfigFiles,
    service: Arc<RateLimitService>,
    /// The state of the last check. A reload holds the lock until its result is applied, so that
    /// concurrent reloads are applied in order.
    last: Mutex<LastCheck>,
    loads: [AtomicU64; 2],
}

/// The state of the last check of the files.
#[derive(Debug)]
struct LastCheck {
    read: LastRead<Vec<ListedFile>>,
    /// The warnings about the active configuration.
    warnings: Vec<String>,
}

impl ConfigWatcher {
    /// Creates a watcher for the files in `folder`, without reading them.
    #[must_use]
    pub fn new(folder: ConfigFiles, service: Arc<RateLimitService>) -> Self {
        Self {
            folder,
            service,
            last: Mutex::new(LastCheck {
                read: LastRead::new(None),
                warnings: Vec::new(),
            }),
            loads: Default::default(),
        }
    }

    /// Returns the service whose configuration is reloaded.
    #[must_use]
    pub fn service(&self) -> &Arc<RateLimitService> {
        &self.service
    }

    /// Reads every file and applies the rules. The counters keep their values. Returns the number
    /// of domains.
    ///
    /// # Errors
    ///
    /// Returns a [`ConfigFilesError`] if the files cannot be read or contain errors. The previous
    /// rules stay active after an error.
    pub fn reload(&self) -> Result<usize, ConfigFilesError> {
        let loaded = self.load();
        self.log_result(&loaded);
        loaded
    }

    /// Reloads the configuration if its files have changed. Returns the reload's result, or `None`
    /// if there is no new result to report.
    ///
    /// After a temporary error, every call reads the files again. As long as the files seem
    /// unchanged, a repeated temporary error is not reported.
    pub fn reload_if_changed(&self) -> Option<Result<usize, ConfigFilesError>> {
        let mut last = self.last();
        let now = files(&self.folder.path).ok();
        let has_changed = now != last.read.seen;
        if !has_changed && !last.read.is_unread {
            return None;
        }
        let read = load_files(&self.folder);
        if !has_changed && read.as_ref().is_err_and(ConfigFilesError::may_pass) {
            return None;
        }
        last.read.seen = now;
        let loaded = self.activate(read, &mut last);
        drop(last);
        self.log_result(&loaded);
        Some(loaded)
    }

    /// Reads every file and applies the rules like [`Self::reload`], without logging the result.
    /// Returns the number of domains.
    ///
    /// # Errors
    ///
    /// Returns a [`ConfigFilesError`] if the files cannot be read or contain errors. The previous
    /// rules stay active after an error. [`Self::last_mistakes`] and [`Self::loads`] reflect the
    /// failure.
    pub fn load(&self) -> Result<usize, ConfigFilesError> {
        let mut last = self.last();
        last.read.seen = files(&self.folder.path).ok();
        self.activate(load_files(&self.folder), &mut last)
    }

    fn activate(
        &self,
        read: Result<LoadedConfig, ConfigFilesError>,
        last: &mut LastCheck,
    ) -> Result<usize, ConfigFilesError> {
        let loaded = read.map(|loaded| {
            last.warnings = loaded.warnings.iter().map(ToString::to_string).collect();
            for warning in &last.warnings {
                tracing::warn!("{warning}");
            }
            let domains = loaded.domains();
            self.service.load(loaded);
            domains
        });
        self.loads[usize::from(loaded.is_err())].fetch_add(1, Ordering::Relaxed);
        let error = loaded.as_ref().err();
        last.read.is_unread = error.is_some_and(ConfigFilesError::may_pass);
        last.read.mistakes = error.map(ConfigFilesError::problems).unwrap_or_default();
        loaded
    }

    /// Logs the result of a reload.
    fn log_result(&self, loaded: &Result<usize, ConfigFilesError>) {
        let path = self.folder.path.display();
        match loaded {
            Ok(0) => {
                tracing::warn!(%path, "the configuration no longer defines a domain: requests from Envoy are not limited")
            }
            Ok(domains) => {
                let descriptors = self.service.descriptors();
                tracing::info!(%path, domains, descriptors, "reloaded the configuration of the rate limit service")
            }
            Err(error) if error.may_pass() => tracing::error!(
                %path, "kept the old configuration of the rate limit service: {error}; retrying until the configuration can be read"
            ),
            Err(error) => {
                let mistakes = error.problems();
                tracing::error!(
                    %path, mistakes = mistakes.len(),
                    "kept the old configuration of the rate limit service: {}", file_watch::in_one_line(&mistakes)
                );
            }
        }
    }

    /// Logs the configuration that is active at startup.
    pub fn log_start(&self) {
        let path = self.folder.path.display();
        match self.service.domains() {
            0 => {
                tracing::warn!(%path, "no domain is configured: requests from Envoy are not limited")
            }
            domains => {
                let descriptors = self.service.descriptors();
                tracing::info!(%path, domains, descriptors, "the configuration of the rate limit service is active")
            }
        }
    }

    /// Returns the errors of the last load. The list of errors is empty if the load succeeded.
    #[must_use]
    pub fn last_mistakes(&self) -> Vec<String> {
        self.last().read.mistakes.clone()
    }

    /// Returns the warnings about the active configuration, which were logged when it was loaded.
    #[must_use]
    pub fn warnings(&self) -> Vec<String> {
        self.last().warnings.clone()
    }

    /// Returns the numbers of successful and of failed loads.
    #[must_use]
    pub fn loads(&self) -> ConfigLoads {
        let [succeeded, failed] = &self.loads;
        ConfigLoads {
            succeeded: succeeded.load(Ordering::Relaxed),
            failed: failed.load(Ordering::Relaxed),
        }
    }

    fn last(&self) -> MutexGuard<'_, LastCheck> {
        self.last.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn plural(count: usize) -> &'static str {
    if count == 1 { "" } else { "s" }
}

fn lines(mistakes: &[FileMistake]) -> String {
    mistakes
        .iter()
        .map(|mistake| format!("  {mistake}"))
        .collect::<Vec<_>>()
        .join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Simulates a folder that changes `moves` times and whose reads return `found`. Returns the
    /// result of `read_unchanged` and the number of reads.
    fn read_counted(moves: u32, found: Result<u32, &str>) -> (Result<u32, &str>, usize) {
        let (mut looks, mut readings) = (0, 0);
        let look = || {
            looks += 1;
            Ok(looks.min(moves + 1))
        };
        let answer = read_unchanged(look, |at| {
            readings += 1;
            found.map(|found| found + at)
        });
        (answer, readings)
    }

    #[test]
    fn an_unchanged_folder_is_read_once_even_if_that_fails() {
        assert_eq!(read_counted(0, Ok(10)), (Ok(11), 1));
        assert_eq!(read_counted(0, Err("gone")), (Err("gone"), 1));
    }

    #[test]
    fn a_changing_folder_is_read_again_a_limited_number_of_times() {
        assert_eq!(read_counted(1, Ok(10)), (Ok(12), 2));
        assert_eq!(read_counted(9, Ok(10)), (Ok(13), TRIES));
        assert_eq!(read_counted(1, Err("gone")), (Err("gone"), 2));
    }
}
