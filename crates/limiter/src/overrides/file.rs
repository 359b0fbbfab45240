//! The file of overrides: one JSON document a line, in the order of the changes. A change is written
//! before it is confirmed. A start reads the whole file and writes it again without the changes that
//! later changes have replaced.

use std::{
    fs::{self, File, OpenOptions},
    io::{self, BufRead, BufReader, BufWriter, Write},
    os::unix::fs::OpenOptionsExt as _,
    path::{Path, PathBuf},
};

use tidegate_core::{Overrides, Rule, RuleOverrides, RuleSet, Timestamp};

use super::document::OverrideDocument;

/// The number of lines at which the file is written again, if fewer than half of its lines are
/// needed.
const MIN_LINES: usize = 10_000;

/// The number of overrides of a rule that are listed at a time.
const PAGE: usize = 10_000;

#[derive(Debug)]
pub(super) struct OverrideFile {
    path: PathBuf,
    file: File,
    lines: usize,
}

impl OverrideFile {
    /// Reads the overrides of the file at `path` into `overrides`, and opens the file for changes.
    pub(super) fn restore(path: &Path, overrides: &Overrides, now: Timestamp) -> io::Result<Self> {
        let lines = match File::open(path) {
            Ok(file) => read(file, path, overrides, now)?,
            Err(error) if error.kind() == io::ErrorKind::NotFound => 0,
            Err(error) => return Err(error),
        };
        Ok(Self {
            path: path.to_owned(),
            file: open(path)?,
            lines,
        })
    }

    /// Writes a change at the end of the file, and waits until the disk has it.
    pub(super) fn append(
        &mut self,
        document: &[u8],
        rules: &RuleSet,
        overrides: &Overrides,
    ) -> io::Result<()> {
        let before = self.file.metadata()?.len();
        let written = self
            .file
            .write_all(&[document, b"\n"].concat())
            .and_then(|()| self.file.sync_data());
        if let Err(error) = written {
            // A line that is not whole would end the next line, too.
            self.file.set_len(before)?;
            return Err(error);
        }
        self.lines += 1;
        if self.lines > MIN_LINES.max(2 * overrides.len()) {
            self.compact(rules, overrides);
        }
        Ok(())
    }

    /// Writes the file again, with the current overrides of the current rules. If this fails, the
    /// file stays as it is.
    fn compact(&mut self, rules: &RuleSet, overrides: &Overrides) {
        // The overrides of rules that do not exist can only be kept by keeping the lines.
        let known: usize = overrides_of(rules).map(|(_, found)| found.len()).sum();
        if known < overrides.len() {
            return;
        }
        let mut draft = self.path.clone().into_os_string();
        draft.push(".draft");
        let draft = PathBuf::from(draft);
        let compacted = write_all(&draft, rules)
            .and_then(|lines| fs::rename(&draft, &self.path).map(|()| lines))
            .and_then(|lines| Ok((lines, open(&self.path)?)));
        match compacted {
            Ok((lines, file)) => (self.lines, self.file) = (lines, file),
            Err(error) => {
                let file = self.path.display();
                tracing::warn!(%file, "failed to compact the file of overrides: {error}");
            }
        }
    }
}

fn open(path: &Path) -> io::Result<File> {
    OpenOptions::new()
        .append(true)
        .create(true)
        .mode(0o600)
        .open(path)
}

/// Reads all lines, and returns their number.
fn read(file: File, path: &Path, overrides: &Overrides, now: Timestamp) -> io::Result<usize> {
    let mut reader = BufReader::new(file);
    let (mut line, mut number) = (Vec::new(), 0);
    while reader.read_until(b'\n', &mut line)? > 0 {
        number += 1;
        let is_whole = line.last() == Some(&b'\n');
        let applied = OverrideDocument::decode(&line).and_then(|document| {
            let (rule, target) = (document.rule().to_owned(), document.target());
            let Some(found) = document.into_override() else {
                overrides.remove(&rule, &target);
                return Ok(());
            };
            let set = overrides.set(&rule, &target, found, now);
            set.map(drop).map_err(|error| error.to_string())
        });
        if let Err(problem) = applied {
            let file = path.display();
            if !is_whole {
                // The program ended while it wrote the line, so the change was not confirmed.
                tracing::warn!(%file, line = number, "an unfinished override was removed");
                let rest = fs::metadata(path)?.len() - line.len() as u64;
                OpenOptions::new().write(true).open(path)?.set_len(rest)?;
                return Ok(number - 1);
            }
            tracing::error!(%file, line = number, "an override cannot be read, and has no effect: {problem}");
        }
        line.clear();
    }
    Ok(number)
}

/// Returns the rules with their overrides.
fn overrides_of(rules: &RuleSet) -> impl Iterator<Item = (&Rule, &RuleOverrides)> {
    rules
        .iter()
        .filter_map(|rule| Some((rule, rules.overrides(rule)?)))
}

/// Writes all overrides of `rules`, and returns their number.
fn write_all(path: &Path, rules: &RuleSet) -> io::Result<usize> {
    let _ = fs::remove_file(path);
    let mut out = BufWriter::new(open(path)?);
    let mut lines = 0;
    for (rule, overrides) in overrides_of(rules) {
        let mut after = None;
        loop {
            let page = overrides.page(rule, after.as_ref(), PAGE, |_, _| true);
            for (target, found) in &page {
                out.write_all(&OverrideDocument::new(rule.name(), target, found).encode())?;
                out.write_all(b"\n")?;
            }
            lines += page.len();
            match page.into_iter().next_back() {
                Some((last, _)) => after = Some(last),
                None => break,
            }
        }
    }
    let file = out.into_inner().map_err(io::IntoInnerError::into_error)?;
    file.sync_all()?;
    Ok(lines)
}

#[cfg(test)]
mod tests {
    use tidegate_core::{Limit, Override, OverrideTarget, Replacement};

    use super::*;

    const NOW: Timestamp = Timestamp::from_micros(1_700_000_000_000_000);

    fn path(name: &str) -> PathBuf {
        let path = std::env::temp_dir().join(format!("tidegate-{name}-{}", std::process::id()));
        let _ = fs::remove_file(&path);
        path
    }

    fn rules(overrides: &Overrides) -> RuleSet {
        let limit: Limit = "10/min".parse().unwrap();
        let rule = Rule::new("api", vec![limit])
            .unwrap()
            .keyed_by(&["customer"]);
        let rules = RuleSet::build(vec![rule.unwrap()], Vec::new()).unwrap();
        rules.with_overrides(overrides)
    }

    /// Makes changes as the limiter makes them: in the table, and in the file.
    struct Writer {
        file: OverrideFile,
        overrides: Overrides,
        rules: RuleSet,
    }

    impl Writer {
        fn open(path: &Path) -> Self {
            let overrides = Overrides::default();
            let file = OverrideFile::restore(path, &overrides, NOW).unwrap();
            let rules = rules(&overrides);
            Self {
                file,
                overrides,
                rules,
            }
        }

        fn set(&mut self, key: &str, quota: usize) {
            let target = OverrideTarget::of(&[key]);
            let found = Override {
                replacement: Replacement::Limits(Box::new([format!("{quota}/min").into()])),
                until: None,
                reason: "a test".into(),
            };
            self.overrides
                .set("api", &target, found.clone(), NOW)
                .unwrap();
            let document = OverrideDocument::new("api", &target, &found).encode();
            self.file
                .append(&document, &self.rules, &self.overrides)
                .unwrap();
        }

        fn remove(&mut self, key: &str) {
            let target = OverrideTarget::of(&[key]);
            self.overrides.remove("api", &target);
            let document = OverrideDocument::removal("api", &target).encode();
            self.file
                .append(&document, &self.rules, &self.overrides)
                .unwrap();
        }

        fn shown(&self, key: &str) -> Option<String> {
            let found = self
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
        assert_eq!(restored.overrides.len(), 2);
        assert_eq!(restored.shown("alice").as_deref(), Some("50/min"));
        assert_eq!(restored.shown("acme-*").as_deref(), Some("40/min"));
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
        assert_eq!(writer.overrides.len(), 1);
        writer.set("bob", 30);
        drop(writer);
        let restored = Writer::open(&path);
        assert_eq!(restored.overrides.len(), 2);
        assert_eq!(restored.shown("bob").as_deref(), Some("30/min"));
        fs::remove_file(&path).unwrap();
    }

    #[test]
    fn a_long_file_is_written_again() {
        let path = path("overrides-long");
        // Written at once, because each line of a writer waits for the disk.
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
        assert_eq!(restored.overrides.len(), 3);
        assert_eq!(restored.shown("alice"), Some(format!("{MIN_LINES}/min")));
        fs::remove_file(&path).unwrap();
    }
}
