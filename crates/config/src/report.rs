//! The report, which collects all errors and warnings while a file is read.

use tidegate_net::input::{advice, shown};

use super::Mistake;

/// The maximum number of errors in one report.
const MAX_MISTAKES: usize = 1_000;

/// The errors and warnings about a file.
#[derive(Debug, Default)]
pub struct Report {
    mistakes: Vec<Mistake>,
    warnings: Vec<Mistake>,
    unlisted: usize,
}

impl Report {
    /// Adds an error.
    pub fn mistake(&mut self, mistake: Mistake) {
        if self.mistakes.len() < MAX_MISTAKES {
            self.mistakes.push(mistake);
        } else {
            self.unlisted += 1;
        }
    }

    /// Adds a warning.
    pub fn warn(&mut self, warning: Mistake) {
        self.warnings.push(warning);
    }

    /// Returns the number of errors added so far.
    #[must_use]
    pub fn count(&self) -> usize {
        self.mistakes.len() + self.unlisted
    }

    /// Returns the warnings, sorted by line.
    ///
    /// # Errors
    ///
    /// If there are errors, returns all of them, sorted by line.
    pub fn finish(mut self) -> Result<Vec<Mistake>, Vec<Mistake>> {
        if self.mistakes.is_empty() {
            self.warnings.sort_by_key(|warning| warning.line);
            return Ok(self.warnings);
        }
        self.mistakes.sort_by_key(|mistake| mistake.line);
        self.mistakes.extend(more_errors(self.unlisted));
        Err(self.mistakes)
    }
}

/// Returns the last entry of a list of errors from which `count` errors are missing; `None` if no
/// error is missing.
#[must_use]
pub fn more_errors(count: usize) -> Option<Mistake> {
    let plural = if count == 1 { "" } else { "s" };
    (count > 0).then(|| Mistake {
        path: String::new(),
        line: None,
        message: format!("and {count} more error{plural}"),
    })
}

/// The keys that were renamed before the first release, as pairs of the old and the new name. A key
/// is treated as renamed only in a map in which the new name is valid. In other maps, the old name
/// of the key may still be valid.
const RENAMED: &[(&str, &str)] = &[
    ("by", "extra"),
    ("denials", "denial_cache_ttl"),
    ("for", "duration"),
    ("notice", "pre_stop_delay"),
    ("room", "headroom"),
    ("share", "fallback_share"),
];

/// Returns the new name of `key`, if `key` was renamed and its new name is in `known`.
pub(crate) fn renamed<'k>(key: &str, known: &[&'k str]) -> Option<&'k str> {
    let (_, new) = RENAMED
        .iter()
        .find(|(old, new)| *old == key && known.contains(new))?;
    known.iter().copied().find(|name| name == new)
}

/// Returns the new name of `entry`, if the entry was renamed before the first release.
pub(crate) fn renamed_entry(entry: &str) -> Option<String> {
    let upstream = entry.strip_prefix("room.")?;
    Some(format!("headroom.{upstream}"))
}

/// Returns the message for a key that is not in `known`.
pub(crate) fn unknown_key(key: &str, known: &[&str]) -> String {
    if let Some(new) = renamed(key, known) {
        return format!("was renamed to `{new}`");
    }
    format!("unknown key `{}`; {}", shown(key), advice(key, known))
}
