//! Reads a rules file from disk.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use crate::{CandidateConfig, Config, Identity, MAX_FILE_BYTES, Mistake};

/// The reason why a rules file could not be read.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ReadError {
    /// The file could not be read, for example because it does not exist or because of missing
    /// permissions.
    #[error("cannot read {path}: {source}")]
    Unreadable {
        /// The path of the file.
        path: PathBuf,
        /// The file system error.
        source: io::Error,
    },
    /// The file was read, and its content is invalid.
    #[error("{path} has {} error{}:\n{}{}", mistakes.len(), plural(mistakes.len()), lines(mistakes), hint(mistakes, path))]
    Invalid {
        /// The path of the file.
        path: PathBuf,
        /// All errors in the file.
        mistakes: Vec<Mistake>,
    },
}

impl Config {
    /// Reads and parses the rules file at `path`.
    ///
    /// # Errors
    ///
    /// Returns a [`ReadError`] if the file cannot be read, is larger than [`MAX_FILE_BYTES`], is
    /// empty, or has errors.
    pub fn read(path: impl AsRef<Path>) -> Result<Self, ReadError> {
        let path = path.as_ref();
        let unreadable = |source| ReadError::Unreadable {
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
        let text = fs::read_to_string(path).map_err(unreadable)?;
        let invalid = |mistakes| ReadError::Invalid {
            path: path.to_owned(),
            mistakes,
        };
        Self::parse_file(&text).map_err(invalid)
    }

    /// Parses the content of a file. Unlike [`Self::parse`], rejects content without any settings.
    ///
    /// # Errors
    ///
    /// Returns every error in the content.
    pub fn parse_file(text: &str) -> Result<Self, Vec<Mistake>> {
        // An editor may truncate the file before it writes the new content. Without the check for
        // an empty file, a reload could read the truncated file and remove all limits.
        if says_nothing(text) {
            let message = "the file is empty; to limit nothing, write `rules: []`".to_owned();
            return Err(vec![Mistake {
                path: String::new(),
                line: None,
                message,
            }]);
        }
        Self::parse(text)
    }
}

impl CandidateConfig {
    /// Reads the file with the candidate rules. `identity` contains the settings in the main rules
    /// file for identifying clients. The same settings also apply to the candidate rules.
    ///
    /// # Errors
    ///
    /// Returns the same errors as [`Config::read`]. Also returns an error if the file has a section
    /// `clients` or `entries` that differs from the section in the main rules file. With a
    /// different section, the candidate rules could use entries that no request has, and would
    /// never apply.
    pub fn read(&self, identity: &Identity) -> Result<Config, ReadError> {
        let config = Config::read(&self.file)?;
        let (own, empty) = (&config.identity, Identity::default());
        let differing = [
            (
                "clients",
                own.trust != empty.trust && own.trust != identity.trust,
            ),
            (
                "entries",
                !own.derived.is_empty() && own.derived != identity.derived,
            ),
        ];
        let differing = differing.iter().filter(|(_, differs)| *differs);
        let mistakes: Vec<Mistake> = differing.map(|(section, _)| differs(section)).collect();
        if mistakes.is_empty() {
            return Ok(config);
        }
        let path = self.file.clone();
        Err(ReadError::Invalid { path, mistakes })
    }
}

/// Returns whether the file contains only comments, document markers and null values.
fn says_nothing(text: &str) -> bool {
    text.lines().map(str::trim).all(|line| {
        line.is_empty() || line.starts_with('#') || matches!(line, "---" | "..." | "null" | "~")
    })
}

fn plural(count: usize) -> &'static str {
    if count == 1 { "" } else { "s" }
}

/// Returns a hint for the user if the file was written for another rate limiter. A file for
/// envoyproxy/ratelimit has `domain` and `descriptors`; a file for Limitador is a list of limits.
fn hint(mistakes: &[Mistake], path: &Path) -> String {
    let has = |key: &str| mistakes.iter().any(|mistake| mistake.path == key);
    if has("domain") && has("descriptors") {
        return format!(
            "\nthis looks like an envoyproxy/ratelimit file: check it with `tidegate check --envoy {0}`, and serve it \
             with `envoy: {{config: {0}}}` in a rules file",
            path.display()
        );
    }
    // Reading the file a second time is acceptable, because this function is called only for a
    // rejected file.
    if fs::read_to_string(path).is_ok_and(|text| is_of_limitador(&text)) {
        return format!(
            "\nthis looks like a Limitador limits file: check it with `tidegate check --limitador {0}`, and serve \
             it with `envoy: {{limitador: {0}}}` in a rules file",
            path.display()
        );
    }
    String::new()
}

/// Returns whether `text` contains the keys of a Limitador limit.
fn is_of_limitador(text: &str) -> bool {
    let keys: Vec<&str> = text
        .lines()
        .filter_map(|line| line.trim_start_matches(['-', ' ']).split_once(':'))
        .map(|(key, _)| key.trim())
        .collect();
    ["namespace", "max_value", "seconds"]
        .iter()
        .all(|key| keys.contains(key))
}

fn lines(mistakes: &[Mistake]) -> String {
    mistakes
        .iter()
        .map(|mistake| format!("  {mistake}"))
        .collect::<Vec<_>>()
        .join("\n")
}

fn differs(section: &str) -> Mistake {
    let message = "differs from the section of the rules file, which also applies to the candidate \
                   rules; write the same section in both files, or remove it from this file";
    Mistake {
        path: section.to_owned(),
        line: None,
        message: message.to_owned(),
    }
}
