//! Counters over a restart: the memory store in a file.
//!
//! ```text
//! magic │ length, checksum, bytes of part 0 │ … of part 1 │ … │ length 0
//! ```
//!
//! The file is written beside its place and renamed into it, so that whoever reads it sees the old one or
//! the new one whole. Every part carries a CRC-32, and all of them are checked before the first is taken in: a
//! file that was cut short or scribbled on is set aside under another name, and the store starts empty.

use std::{
    ffi::OsString,
    fs::{self, File, OpenOptions},
    io::{self, BufWriter, Write},
    os::unix::fs::OpenOptionsExt,
    path::{Path, PathBuf},
};

use tidegate_core::{MemoryStore, Timestamp};

const MAGIC: &[u8; 16] = b"tidegate-store-2";

/// What became of the snapshot at the start.
#[derive(Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Restored {
    /// There was none.
    Nothing,
    /// So many keys came back.
    Keys(usize),
    /// The file made no sense and was renamed to this.
    SetAside(PathBuf),
}

/// Writes what `store` holds at `now` into the file at `path`, atomically.
///
/// Each shard of the store is locked for no longer than copying it takes.
///
/// # Errors
///
/// What the file system says. The old file stands then.
pub fn save(store: &MemoryStore, path: &Path, now: Timestamp) -> io::Result<()> {
    let draft = beside(path, ".draft");
    let written = write_all(store, &draft, now).and_then(|()| fs::rename(&draft, path));
    if written.is_err() {
        // The error that matters is the first one.
        let _ = fs::remove_file(&draft);
    }
    written
}

/// Whether [`save`] could write at `path` now: makes a file of its own beside it, and takes that away again.
///
/// # Errors
///
/// What the file system says.
pub fn try_out(path: &Path) -> io::Result<()> {
    let trial = beside(path, ".trial");
    create_private(&trial)?;
    fs::remove_file(trial)
}

/// Takes the file at `path` into `store`. Where it was written while the clock was well ahead of `now`, its keys
/// and blocks are moved back by the difference.
///
/// # Errors
///
/// What the file system says. A file whose content is wrong is no error but [`Restored::SetAside`].
pub fn restore(store: &MemoryStore, path: &Path, now: Timestamp) -> io::Result<Restored> {
    let bytes = match fs::read(path) {
        Ok(bytes) => bytes,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Restored::Nothing),
        Err(error) => return Err(error),
    };
    let Some(parts) = sound_parts(&bytes) else {
        return set_aside(path, now);
    };
    let mut keys = 0;
    for part in parts {
        match store.restore(part, now) {
            Ok(restored) => keys += restored,
            Err(_) => return set_aside(path, now),
        }
    }
    Ok(Restored::Keys(keys))
}

fn write_all(store: &MemoryStore, draft: &Path, now: Timestamp) -> io::Result<()> {
    let mut out = BufWriter::new(create_private(draft)?);
    out.write_all(MAGIC)?;
    let mut part = Vec::new();
    for number in 0..store.parts() {
        part.clear();
        store.save(number, now, &mut part);
        if !part.is_empty() {
            out.write_all(&(part.len() as u64).to_le_bytes())?;
            out.write_all(&crc32fast::hash(&part).to_le_bytes())?;
            out.write_all(&part)?;
        }
    }
    out.write_all(&0_u64.to_le_bytes())?;
    out.into_inner()
        .map_err(io::IntoInnerError::into_error)?
        .sync_all()
}

/// Makes a file that nobody else reads: keys are addresses and names of customers.
fn create_private(path: &Path) -> io::Result<File> {
    // One that was left behind may have another mode.
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(path)
}

/// The parts of a file, if all of them are there and none was changed.
fn sound_parts(bytes: &[u8]) -> Option<Vec<&[u8]>> {
    let mut rest = bytes.strip_prefix(MAGIC.as_slice())?;
    let mut parts = Vec::new();
    loop {
        let (length, after) = rest.split_first_chunk::<8>()?;
        let length = usize::try_from(u64::from_le_bytes(*length)).ok()?;
        if length == 0 {
            return after.is_empty().then_some(parts);
        }
        let (checksum, after) = after.split_first_chunk::<4>()?;
        let (part, after) = after.split_at_checked(length)?;
        if crc32fast::hash(part) != u32::from_le_bytes(*checksum) {
            return None;
        }
        parts.push(part);
        rest = after;
    }
}

fn set_aside(path: &Path, now: Timestamp) -> io::Result<Restored> {
    let aside = beside(path, &format!(".damaged-{}", now.as_micros()));
    fs::rename(path, &aside)?;
    Ok(Restored::SetAside(aside))
}

fn beside(path: &Path, suffix: &str) -> PathBuf {
    let mut name = OsString::from(path);
    name.push(suffix);
    PathBuf::from(name)
}
