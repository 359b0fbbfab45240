//! The configuration on the disk: a file or a folder, read again when it changes.

use std::{
    fs, io,
    path::{Path, PathBuf},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::SystemTime,
};

use super::{DomainFiles, File, FileMistake, Loaded, RateLimitService, read};
use crate::{
    config::MAX_FILE_BYTES,
    reload::{self, LastRead},
};

/// The most files of a folder.
pub const MAX_FILES: usize = 10_000;

/// How often a set of files is read that changes under the reader.
const TRIES: usize = 3;

/// The deepest nesting of folders.
const MAX_DEPTH: usize = 16;

/// Where a configuration is, and how its files come together.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Folder {
    /// A file, or a folder whose files are all read, those of its folders included. Names that begin with a dot are
    /// passed over: a Kubernetes ConfigMap keeps its former versions under such names.
    pub path: PathBuf,
    /// Whether a domain may be in several files.
    pub merging: DomainFiles,
}

/// Why a configuration could not be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FolderError {
    /// It could not be read: the operator's path or permissions.
    #[error("cannot read {}: {source}", path.display())]
    Unreadable {
        /// The file or folder.
        path: PathBuf,
        /// What the file system said.
        source: io::Error,
    },
    /// It was read and is wrong: its author's.
    #[error("{} has {} mistake{}:\n{}", path.display(), mistakes.len(), plural(mistakes.len()), lines(mistakes))]
    Mistaken {
        /// The file or folder.
        path: PathBuf,
        /// Every mistake in it.
        mistakes: Vec<FileMistake>,
    },
}

impl FolderError {
    /// One line for each thing that is wrong.
    #[must_use]
    pub fn problems(&self) -> Vec<String> {
        match self {
            Self::Unreadable { .. } => vec![self.to_string()],
            Self::Mistaken { mistakes, .. } => {
                mistakes.iter().map(FileMistake::to_string).collect()
            }
        }
    }

    /// Whether it may be gone although nothing changes that can be seen from outside.
    fn may_pass(&self) -> bool {
        matches!(self, Self::Unreadable { source, .. } if reload::may_pass(source))
    }
}

impl Folder {
    /// Reads every file.
    ///
    /// # Errors
    ///
    /// [`FolderError`]; see its variants.
    pub fn load(&self) -> Result<Loaded, FolderError> {
        let texts = unmoved(|| self.files(), |files| self.texts(files))?;
        read(texts, self.merging).map_err(|mistakes| FolderError::Mistaken {
            path: self.path.clone(),
            mistakes,
        })
    }

    fn texts(&self, files: &[Found]) -> Result<Vec<File>, FolderError> {
        let file = |found: &Found| {
            Ok(File {
                name: self.name_of(&found.path),
                text: text(&found.path)?,
            })
        };
        files.iter().map(file).collect()
    }

    /// The files, in the order of their paths.
    fn files(&self) -> Result<Vec<Found>, FolderError> {
        let mut files = Vec::new();
        gather(&self.path, 0, &mut files)?;
        files.sort_by(|a, b| a.path.cmp(&b.path));
        Ok(files)
    }

    /// What messages call a file: its path within the folder.
    fn name_of(&self, file: &Path) -> String {
        let inside = file
            .strip_prefix(&self.path)
            .ok()
            .filter(|inside| *inside != Path::new(""));
        let alone = || file.file_name().map(Path::new);
        inside.or_else(alone).unwrap_or(file).display().to_string()
    }
}

/// Reads what does not move meanwhile: what is replaced while it is being read may be half old and half new.
fn unmoved<M: PartialEq, T, E>(
    mut look: impl FnMut() -> Result<M, E>,
    mut read: impl FnMut(&M) -> Result<T, E>,
) -> Result<T, E> {
    let mut before = look()?;
    for _ in 1..TRIES {
        let found = read(&before);
        let after = look()?;
        if after == before {
            return found;
        }
        before = after;
    }
    read(&before)
}

/// A file, and what it looks like from outside: that changes when it is written or replaced.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Found {
    path: PathBuf,
    modified: Option<SystemTime>,
    len: u64,
    inode: u64,
}

fn gather(path: &Path, depth: usize, files: &mut Vec<Found>) -> Result<(), FolderError> {
    use std::os::unix::fs::MetadataExt;
    let unreadable = |source| FolderError::Unreadable {
        path: path.to_owned(),
        source,
    };
    // Links are followed: a ConfigMap is made of them.
    let metadata = fs::metadata(path).map_err(unreadable)?;
    if metadata.is_file() {
        if files.len() == MAX_FILES {
            return Err(unreadable(io::Error::other(format!(
                "more than {MAX_FILES} files"
            ))));
        }
        files.push(Found {
            path: path.to_owned(),
            modified: metadata.modified().ok(),
            len: metadata.len(),
            inode: metadata.ino(),
        });
        return Ok(());
    }
    if depth == MAX_DEPTH {
        return Err(unreadable(io::Error::other(format!(
            "folders are nested deeper than {MAX_DEPTH}"
        ))));
    }
    for entry in fs::read_dir(path).map_err(unreadable)? {
        let entry = entry.map_err(unreadable)?;
        if !entry.file_name().to_string_lossy().starts_with('.') {
            gather(&entry.path(), depth + 1, files)?;
        }
    }
    Ok(())
}

fn text(path: &Path) -> Result<String, FolderError> {
    let unreadable = |source| FolderError::Unreadable {
        path: path.to_owned(),
        source,
    };
    let size = fs::metadata(path).map_err(unreadable)?.len();
    if size > MAX_FILE_BYTES as u64 {
        let problem = format!("{size} bytes are over the maximum of {MAX_FILE_BYTES}");
        return Err(unreadable(io::Error::new(
            io::ErrorKind::FileTooLarge,
            problem,
        )));
    }
    fs::read_to_string(path).map_err(unreadable)
}

/// Reads the configuration again when asked, or when it has changed.
#[derive(Debug)]
pub struct Watch {
    folder: Folder,
    service: Arc<RateLimitService>,
    /// Locked until what was read is in force, so that what was read later is in force later.
    last: Mutex<LastRead<Vec<Found>>>,
    loads: [AtomicU64; 2],
}

impl Watch {
    /// A watch on `folder`, which was not read yet.
    #[must_use]
    pub fn new(folder: Folder, service: Arc<RateLimitService>) -> Self {
        Self {
            folder,
            service,
            last: Mutex::new(LastRead::new(None)),
            loads: Default::default(),
        }
    }

    /// The service for which it watches.
    #[must_use]
    pub fn service(&self) -> &Arc<RateLimitService> {
        &self.service
    }

    /// Reads every file and puts the rules in force; counts are kept. Returns how many domains there are.
    ///
    /// # Errors
    ///
    /// [`FolderError`]. The rules in force stay in force.
    pub fn reload(&self) -> Result<usize, FolderError> {
        let loaded = self.load();
        self.tell(&loaded);
        loaded
    }

    /// Reloads what has changed. What could not be read is tried again each time, and told of again only when that
    /// comes out otherwise. Returns what came of it, if that is anything new.
    pub fn follow(&self) -> Option<Result<usize, FolderError>> {
        let mut last = self.last();
        let now = self.folder.files().ok();
        let has_changed = now != last.seen;
        if !has_changed && !last.is_unread {
            return None;
        }
        let read = self.folder.load();
        if !has_changed && read.as_ref().is_err_and(FolderError::may_pass) {
            return None;
        }
        last.seen = now;
        let loaded = self.put_in_force(read, &mut last);
        drop(last);
        self.tell(&loaded);
        Some(loaded)
    }

    /// Reads every file and puts the rules in force, without a word in the log. Returns how many domains there are.
    ///
    /// # Errors
    ///
    /// [`FolderError`]. The rules in force stay in force, and [`Self::last_mistakes`] and [`Self::loads`] tell of it.
    pub fn load(&self) -> Result<usize, FolderError> {
        let mut last = self.last();
        last.seen = self.folder.files().ok();
        self.put_in_force(self.folder.load(), &mut last)
    }

    fn put_in_force(
        &self,
        read: Result<Loaded, FolderError>,
        last: &mut LastRead<Vec<Found>>,
    ) -> Result<usize, FolderError> {
        let loaded = read.map(|loaded| {
            loaded
                .warnings
                .iter()
                .for_each(|warning| tracing::warn!("{warning}"));
            let domains = loaded.domains();
            self.service.load(loaded);
            domains
        });
        self.loads[usize::from(loaded.is_err())].fetch_add(1, Ordering::Relaxed);
        let error = loaded.as_ref().err();
        last.is_unread = error.is_some_and(FolderError::may_pass);
        last.mistakes = error.map(FolderError::problems).unwrap_or_default();
        loaded
    }

    /// Says in the log what came of a reload.
    fn tell(&self, loaded: &Result<usize, FolderError>) {
        let path = self.folder.path.display();
        match loaded {
            Ok(0) => {
                tracing::warn!(%path, "no domain is configured any more: nothing that Envoy asks about is limited")
            }
            Ok(domains) => {
                let descriptors = self.service.descriptors();
                tracing::info!(%path, domains, descriptors, "reloaded the configuration of the rate limit service")
            }
            Err(error) if error.may_pass() => tracing::error!(
                %path, "kept the old configuration of the rate limit service: {error}; it is tried again until it can be read"
            ),
            Err(error) => {
                let mistakes = error.problems();
                tracing::error!(
                    %path, mistakes = mistakes.len(),
                    "kept the old configuration of the rate limit service: {}", reload::in_one_line(&mistakes)
                );
            }
        }
    }

    /// Says in the log what is in force at the start.
    pub(crate) fn tell_of_the_start(&self) {
        let path = self.folder.path.display();
        match self.service.domains() {
            0 => {
                tracing::warn!(%path, "no domain is configured: nothing that Envoy asks about is limited")
            }
            domains => {
                let descriptors = self.service.descriptors();
                tracing::info!(%path, domains, descriptors, "the configuration of the rate limit service is in force")
            }
        }
    }

    /// What was wrong when it was last read; empty if that is in force.
    #[must_use]
    pub fn last_mistakes(&self) -> Vec<String> {
        self.last().mistakes.clone()
    }

    /// How often it was read, and how often in vain.
    #[must_use]
    pub fn loads(&self) -> (u64, u64) {
        let [succeeded, failed] = &self.loads;
        (
            succeeded.load(Ordering::Relaxed),
            failed.load(Ordering::Relaxed),
        )
    }

    fn last(&self) -> MutexGuard<'_, LastRead<Vec<Found>>> {
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

    /// What `unmoved` answers about a folder that moves so many times, whose reading comes out so, and how often it was read.
    fn asked(moves: u32, found: Result<u32, &str>) -> (Result<u32, &str>, usize) {
        let (mut looks, mut readings) = (0, 0);
        let look = || {
            looks += 1;
            Ok(looks.min(moves + 1))
        };
        let answer = unmoved(look, |at| {
            readings += 1;
            found.map(|found| found + at)
        });
        (answer, readings)
    }

    #[test]
    fn what_stands_still_is_read_once_also_where_that_fails() {
        assert_eq!(asked(0, Ok(10)), (Ok(11), 1));
        assert_eq!(asked(0, Err("gone")), (Err("gone"), 1));
    }

    #[test]
    fn what_moves_is_read_again_but_not_for_ever() {
        assert_eq!(asked(1, Ok(10)), (Ok(12), 2));
        assert_eq!(asked(9, Ok(10)), (Ok(13), TRIES));
        assert_eq!(asked(1, Err("gone")), (Err("gone"), 2));
    }
}
