//! The override file: one JSON document per line, in the order of the changes. The file contains
//! the overrides and the blocks by entries. A change is written to disk before it takes effect. The
//! file is compacted when many of its lines may be obsolete, because later lines replace them, or
//! because their override or block has ended.

use std::{
    collections::HashMap,
    fs::{self, File, OpenOptions},
    io::{self, BufRead, BufReader, BufWriter, Split, Write},
    os::unix::fs::OpenOptionsExt as _,
    path::{Path, PathBuf},
};

use tidegate_core::Timestamp;

use super::{
    ChangeError,
    stored::{LiveTables, StoredDocument},
};

/// A file with fewer lines is not compacted. A longer file is compacted once the number of lines is
/// twice the number of overrides and blocks at the time when the file was opened or last compacted.
const MIN_LINES: usize = 10_000;

#[derive(Debug)]
pub(crate) struct OverrideFile {
    path: PathBuf,
    file: File,
    lines: usize,
    /// The file is compacted when it reaches this number of lines.
    compact_at: usize,
}

impl OverrideFile {
    /// Reads the file at `path` into `tables`, and opens the file for changes.
    pub(crate) fn restore(path: &Path, tables: &LiveTables, now: Timestamp) -> io::Result<Self> {
        let lines = match File::open(path) {
            Ok(file) => read(file, path, tables, now)?,
            Err(error) if error.kind() == io::ErrorKind::NotFound => 0,
            Err(error) => return Err(error),
        };
        let file = open(path)?;
        sync_directory(path)?;
        Ok(Self {
            path: path.to_owned(),
            file,
            lines,
            compact_at: MIN_LINES.max(2 * tables.len()),
        })
    }

    /// Makes a change: first writes `document` to the file, and then calls `apply`. Returns the
    /// result of `apply`. If an error occurs, the file is not changed.
    pub(crate) fn change<T, E>(
        &mut self,
        document: &[u8],
        now: Timestamp,
        apply: impl FnOnce() -> Result<T, E>,
    ) -> Result<T, ChangeError<E>> {
        let before = self.file.metadata()?.len();
        let line = [document, b"\n"].concat();
        let written = self
            .file
            .write_all(&line)
            .and_then(|()| self.file.sync_data());
        let changed = match written {
            Ok(()) => apply().map_err(ChangeError::Refused),
            Err(error) => Err(error.into()),
        };
        if changed.is_err() {
            // The line is removed, because an incomplete line would also corrupt the next line.
            self.file.set_len(before)?;
            return changed;
        }
        self.lines += 1;
        if self.lines >= self.compact_at {
            self.compact(now);
        }
        changed
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Renames the file at `path`, if there is one, because it is obsolete.
    pub(crate) fn set_aside(path: &Path) -> io::Result<()> {
        let mut old_path = path.as_os_str().to_owned();
        old_path.push(".old");
        match fs::rename(path, &old_path) {
            Ok(()) => {
                tracing::warn!(
                    file = %path.display(),
                    new_path = %PathBuf::from(old_path).display(),
                    "renamed an override file that the old process did not use; the overrides and blocks of the old process stay in effect"
                );
                Ok(())
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            Err(error) => Err(error),
        }
    }

    /// Adds each of `documents` that is not in the file and whose override or block has not ended.
    pub(crate) fn add_missing(&mut self, documents: &[Vec<u8>], now: Timestamp) -> io::Result<()> {
        let present = last_lines(&self.path, now)?;
        let mut lines = Vec::new();
        for document in documents {
            let is_missing = StoredDocument::decode(document).is_ok_and(|decoded| {
                !decoded.is_obsolete(now) && !present.contains_key(&decoded.id())
            });
            if is_missing {
                lines.extend_from_slice(document);
                lines.push(b'\n');
                self.lines += 1;
            }
        }
        self.file.write_all(&lines)?;
        self.file.sync_data()
    }

    /// Compacts the file, so that it has only the last line of each override and block that has not
    /// ended. If compaction fails, the file is not changed.
    fn compact(&mut self, now: Timestamp) {
        match compact(&self.path, now) {
            Ok((file, lines)) => (self.file, self.lines) = (file, lines),
            Err(error) => {
                let file = self.path.display();
                tracing::warn!(%file, "failed to compact the override file: {error}");
            }
        }
        self.compact_at = MIN_LINES.max(2 * self.lines);
    }
}

fn open(path: &Path) -> io::Result<File> {
    OpenOptions::new()
        .append(true)
        .create(true)
        .mode(0o600)
        .open(path)
}

/// Waits until the file's directory entry is on disk.
fn sync_directory(path: &Path) -> io::Result<()> {
    let folder = path
        .parent()
        .filter(|folder| !folder.as_os_str().is_empty());
    File::open(folder.unwrap_or_else(|| Path::new(".")))?.sync_all()
}

/// Reads all lines, and returns their number.
fn read(file: File, path: &Path, tables: &LiveTables, now: Timestamp) -> io::Result<usize> {
    let mut reader = BufReader::new(file);
    let (mut line, mut number) = (Vec::new(), 0);
    while reader.read_until(b'\n', &mut line)? > 0 {
        let file = path.display();
        if line.last() != Some(&b'\n') {
            // The process stopped while it was writing this line, so the change was never
            // confirmed.
            tracing::warn!(%file, line = number + 1, "removed an incomplete line from the override file: the change was never confirmed");
            let rest = fs::metadata(path)?.len() - line.len() as u64;
            OpenOptions::new().write(true).open(path)?.set_len(rest)?;
            break;
        }
        number += 1;
        let document = StoredDocument::decode(&line);
        let applied = document.and_then(|document| document.apply(tables, now));
        if let Err(problem) = applied {
            tracing::error!(%file, line = number, "failed to read an override or a block, so it has no effect: {problem}");
        }
        line.clear();
    }
    Ok(number)
}

/// Rewrites the file at `path` with only the last line of each override and block that has not
/// ended. Returns the new file and its number of lines. Lines that cannot be parsed are dropped.
fn compact(path: &Path, now: Timestamp) -> io::Result<(File, usize)> {
    let mut kept: Vec<usize> = last_lines(path, now)?.into_values().collect();
    kept.sort_unstable();
    let mut draft_path = path.as_os_str().to_owned();
    draft_path.push(".draft");
    let draft_path = PathBuf::from(draft_path);
    let _ = fs::remove_file(&draft_path);
    let mut draft = BufWriter::new(open(&draft_path)?);
    let mut wanted = kept.iter().peekable();
    for (number, line) in lines(path)?.enumerate() {
        if wanted.next_if(|wanted| **wanted == number).is_some() {
            draft.write_all(&line?)?;
            draft.write_all(b"\n")?;
        }
    }
    let draft = draft.into_inner().map_err(io::IntoInnerError::into_error)?;
    draft.sync_all()?;
    fs::rename(&draft_path, path)?;
    sync_directory(path)?;
    Ok((draft, kept.len()))
}

/// Returns the number of the last line of each override and block that has not been removed and has
/// not ended at `now`, by its ID.
fn last_lines(path: &Path, now: Timestamp) -> io::Result<HashMap<Vec<u8>, usize>> {
    let mut last = HashMap::new();
    for (number, line) in lines(path)?.enumerate() {
        match StoredDocument::decode(&line?) {
            Ok(document) if document.is_obsolete(now) => drop(last.remove(&document.id())),
            Ok(document) => drop(last.insert(document.id(), number)),
            Err(_) => {}
        }
    }
    Ok(last)
}

fn lines(path: &Path) -> io::Result<Split<BufReader<File>>> {
    Ok(BufReader::new(File::open(path)?).split(b'\n'))
}

#[cfg(test)]
mod tests {
    use tidegate_core::{
        EntryBlock, EntryBlockTarget, Override, OverrideTarget, Replacement, Span,
    };

    use super::{
        super::{block_document::BlockDocument, document::OverrideDocument},
        *,
    };

    const NOW: Timestamp = Timestamp::from_micros(1_700_000_000_000_000);

    fn path(name: &str) -> PathBuf {
        let path = std::env::temp_dir().join(format!("tidegate-{name}-{}", std::process::id()));
        let _ = fs::remove_file(&path);
        path
    }

    /// Makes changes in the same way as the limiter: in the file, and then in the table.
    struct Writer {
        file: OverrideFile,
        tables: LiveTables,
    }

    impl Writer {
        fn open(path: &Path) -> Self {
            let tables = LiveTables::default();
            let file = OverrideFile::restore(path, &tables, NOW).unwrap();
            Self { file, tables }
        }

        fn set(&mut self, key: &str, quota: usize) {
            let target = OverrideTarget::of(&[key]);
            let found = Override {
                replacement: Replacement::Limits(Box::new([format!("{quota}/min").into()])),
                until: None,
                reason: "a test".into(),
            };
            self.change(&OverrideDocument::new("api", &target, &found));
        }

        fn change(&mut self, document: &OverrideDocument) {
            let apply = || document.clone().apply(&self.tables.overrides, NOW);
            let changed = self.file.change(&document.encode(), NOW, apply);
            changed.unwrap();
        }

        fn change_block(&mut self, document: &BlockDocument) {
            let apply = || document.clone().apply(&self.tables.entry_blocks, NOW);
            let changed = self.file.change(&document.encode(), NOW, apply);
            changed.unwrap();
        }

        fn remove(&mut self, key: &str) {
            let target = OverrideTarget::of(&[key]);
            self.change(&OverrideDocument::removal("api", &target));
        }

        fn shown(&self, key: &str) -> Option<String> {
            let found = self
                .tables
                .overrides
                .of_rule("api")
                .get(&OverrideTarget::of(&[key]))?;
            Some(found.replacement.to_string())
        }
    }

    #[test]
    fn changes_survive_a_restart() {
        let path = path("overrides-restart");
        let mut writer = Writer::open(&path);
        writer.set("alice", 20);
        writer.set("bob", 30);
        writer.set("acme-*", 40);
        writer.set("alice", 50);
        writer.remove("bob");
        drop(writer);
        let restored = Writer::open(&path);
        assert_eq!(restored.tables.overrides.len(), 2);
        assert_eq!(restored.shown("alice").as_deref(), Some("50/min"));
        assert_eq!(restored.shown("acme-*").as_deref(), Some("40/min"));
        fs::remove_file(&path).unwrap();
    }

    #[test]
    fn blocks_survive_a_restart_beside_the_overrides() {
        let path = path("blocks-restart");
        let target = |entries: &[(&str, &str)]| EntryBlockTarget::new(None, entries).unwrap();
        let (net, tenant) = (
            target(&[("ip", "203.0.113.0/24")]),
            target(&[("tenant", "acme")]),
        );
        let block = EntryBlock {
            until: Some(Timestamp::from_micros(1_800_000_000_000_000)),
            reason: "attack".into(),
        };
        let mut writer = Writer::open(&path);
        writer.set("alice", 20);
        writer.change_block(&BlockDocument::new(&net, &block));
        writer.change_block(&BlockDocument::new(&tenant, &block));
        writer.change_block(&BlockDocument::removal(&tenant));
        writer.file.compact(NOW);
        assert_eq!(fs::read_to_string(&path).unwrap().lines().count(), 2);
        drop(writer);
        let restored = Writer::open(&path);
        assert_eq!(restored.tables.entry_blocks.get(&net), Some(block));
        assert_eq!(restored.tables.entry_blocks.len(), 1);
        assert_eq!(restored.shown("alice").as_deref(), Some("20/min"));
        fs::remove_file(&path).unwrap();
    }

    #[test]
    fn ended_overrides_and_blocks_are_dropped() {
        let path = path("overrides-ended");
        let mut writer = Writer::open(&path);
        let end = NOW.after(Span::from_secs(60));
        let target = EntryBlockTarget::new(None, &[("ip", "203.0.113.0/24")]).unwrap();
        let forever = EntryBlock {
            until: None,
            reason: "attack".into(),
        };
        let ending = EntryBlock {
            until: Some(end),
            ..forever.clone()
        };
        // The line of the replaced block must not take effect again.
        for block in [&forever, &ending] {
            writer.change_block(&BlockDocument::new(&target, block));
        }
        writer.set("alice", 20);
        let found = Override {
            replacement: Replacement::Limits(Box::new(["30/min".into()])),
            until: Some(end),
            reason: "a test".into(),
        };
        let bob = OverrideTarget::of(&["bob"]);
        writer.change(&OverrideDocument::new("api", &bob, &found));
        let lines = || fs::read_to_string(&path).unwrap().lines().count();
        writer.file.compact(NOW);
        assert_eq!(lines(), 3);
        writer.file.compact(end);
        assert_eq!(lines(), 1);
        let ended = BlockDocument::new(&target, &ending);
        writer.file.add_missing(&[ended.encode()], end).unwrap();
        assert_eq!(lines(), 1);
        drop(writer);
        let restored = Writer::open(&path);
        assert_eq!(restored.tables.len(), 1);
        assert_eq!(restored.shown("alice").as_deref(), Some("20/min"));
        fs::remove_file(&path).unwrap();
    }

    #[test]
    fn an_unfinished_line_is_dropped_and_a_damaged_one_is_skipped() {
        let path = path("overrides-damaged");
        let mut writer = Writer::open(&path);
        writer.set("alice", 20);
        drop(writer);
        let whole = fs::read(&path).unwrap();
        let damaged = [
            b"{\"rule\": 7}\n",
            &whole[..],
            b"{\"rule\": \"api\", \"key\"",
        ]
        .concat();
        fs::write(&path, damaged).unwrap();
        let mut writer = Writer::open(&path);
        assert_eq!(writer.tables.overrides.len(), 1);
        writer.set("bob", 30);
        drop(writer);
        let restored = Writer::open(&path);
        assert_eq!(restored.tables.overrides.len(), 2);
        assert_eq!(restored.shown("bob").as_deref(), Some("30/min"));
        fs::remove_file(&path).unwrap();
    }

    #[test]
    fn a_long_file_is_written_again() {
        let path = path("overrides-long");
        // Write the lines in one call, because `Writer` waits for the disk after each line.
        let line = |key: &str, quota: usize| {
            format!("{{\"rule\":\"api\",\"key\":[\"{key}\"],\"limits\":[\"{quota}/min\"]}}\n")
        };
        let lines: String = (1..=MIN_LINES).map(|at| line("alice", at)).collect();
        fs::write(&path, lines).unwrap();
        let mut writer = Writer::open(&path);
        writer.set("bob", 7);
        assert_eq!(fs::read_to_string(&path).unwrap().lines().count(), 2);
        writer.set("carol", 8);
        drop(writer);
        let restored = Writer::open(&path);
        assert_eq!(restored.tables.overrides.len(), 3);
        assert_eq!(restored.shown("alice"), Some(format!("{MIN_LINES}/min")));
        fs::remove_file(&path).unwrap();
    }
}
