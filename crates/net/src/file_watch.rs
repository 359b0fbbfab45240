//! Detects file changes by comparing modification stamps, and stores the result of the last read.

use std::{fs, io, path::Path, time::SystemTime};

/// The maximum number of errors that one log line lists. `tidegate check` lists all errors.
const MAX_LOGGED: usize = 20;

/// The result of the last read of a file or folder.
#[derive(Debug)]
pub struct LastRead<M> {
    /// The modification stamp of the file or folder at the last read; `None` if the stamp could not
    /// be read.
    pub seen: Option<M>,
    /// Whether the read failed for a reason that may go away without a change to the file or
    /// folder.
    pub is_unread: bool,
    /// The errors in the file or folder; empty if its content was applied.
    pub mistakes: Vec<String>,
}

impl<M> LastRead<M> {
    /// Creates the result of a read that found no errors. `seen` is the file's modification stamp.
    pub fn new(seen: Option<M>) -> Self {
        Self {
            seen,
            is_unread: false,
            mistakes: Vec::new(),
        }
    }
}

/// The modification stamp of a file. The stamp changes when the file is written or replaced.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FileStamp {
    modified: SystemTime,
    len: u64,
    inode: u64,
}

/// Returns whether a later read may succeed even if the file's content does not change. For
/// example, an operator may fix the permissions or mount a disk again.
pub fn may_pass(error: &io::Error) -> bool {
    use io::ErrorKind::{FileTooLarge, InvalidData, Other};
    !matches!(error.kind(), InvalidData | FileTooLarge | Other)
}

/// Returns the modification stamp of the file at `path`; `None` if the stamp cannot be read.
/// Symbolic links are followed.
pub fn stamp(path: &Path) -> Option<FileStamp> {
    use std::os::unix::fs::MetadataExt;
    let metadata = fs::metadata(path).ok()?;
    Some(FileStamp {
        modified: metadata.modified().ok()?,
        len: metadata.len(),
        inode: metadata.ino(),
    })
}

/// Joins problems into one line, because log collectors treat each line as a separate message.
pub fn in_one_line(problems: &[String]) -> String {
    let mut line = problems
        .iter()
        .take(MAX_LOGGED)
        .map(|problem| problem.replace('\n', "; "))
        .collect::<Vec<_>>()
        .join("; ");
    if problems.len() > MAX_LOGGED {
        line.push_str(&format!("; and {} more", problems.len() - MAX_LOGGED));
    }
    line
}
