//! The candidate rules, which are reloaded together with the rules file and promoted on request.

use std::path::PathBuf;

use tidegate_config::{CandidateConfig, Config, Identity};
use tidegate_core::RuleSet;
use tidegate_limiter::{ServerLimiter, candidate::CandidateRules};
use tidegate_net::file_watch::{FileStamp, stamp};

use super::{LoadError, RulesDiff};

/// The file with the candidate rules, and its state at the last check.
#[derive(Debug)]
pub(super) struct CandidateFile {
    config: CandidateConfig,
    /// The file's modification stamp (time, length and inode) at the last check.
    seen: Option<FileStamp>,
    /// Whether the file was missing at the last check.
    is_gone: bool,
    /// The file's modification stamp when its rules were last loaded; `None` if the last read
    /// failed.
    applied: Option<FileStamp>,
}

/// What a reload does with the candidate rules.
#[derive(Debug)]
pub(super) enum CandidateChange {
    /// The file is unchanged, so keep the candidate rules and continue to compare them with the
    /// active rules.
    Keep,
    /// Replaces the candidate rules.
    Replace(Option<Box<CandidateRules>>),
}

/// The result of a successful promotion of the candidate rules.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Promotion {
    /// The file with the rules.
    pub file: PathBuf,
    /// The number of rules.
    pub rules: usize,
    /// The number of rules that were active before the promotion.
    pub rules_before: usize,
    /// The differences from the previously active rules.
    pub diff: RulesDiff,
}

/// The reason why candidate rules could not be promoted. After an error, the active rules are
/// unchanged.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PromoteError {
    /// There are no candidate rules.
    #[error("there are no candidate rules; name their file under `candidate` in the rules file")]
    NoCandidate,
    /// The file has changed since its rules were loaded for the comparison, so the comparison does
    /// not apply to the current content.
    #[error(
        "{0} has changed since its rules were compared; look at `tidegate candidate` again, then repeat the command"
    )]
    Changed(PathBuf),
    /// The file could not be read or has errors, so its rules are not being compared.
    #[error("{0} could not be used at the last reload; run `tidegate check {0}`, and fix the file")]
    Unusable(PathBuf),
}

impl CandidateFile {
    /// Creates the state for a file whose rules have just been loaded.
    pub(super) fn applied(config: &CandidateConfig, seen: Option<FileStamp>) -> Self {
        Self {
            config: config.clone(),
            seen,
            is_gone: seen.is_none(),
            applied: seen,
        }
    }

    /// Checks the file. Returns whether the file has changed since the last check. A missing file
    /// is probably being replaced, so a missing file counts as changed only at the second
    /// consecutive check.
    pub(super) fn detect_change(&mut self) -> bool {
        let now = stamp(&self.config.file);
        let was_gone = std::mem::replace(&mut self.is_gone, now.is_none());
        if now.is_none() && !was_gone {
            return false;
        }
        std::mem::replace(&mut self.seen, now) != now
    }

    /// Reads the candidate rules that the rules file names, unless they have already been applied.
    /// `file` is the state after the last reload, and is updated.
    pub(super) fn read(
        file: &mut Option<Self>,
        config: Option<CandidateConfig>,
        identity: &Identity,
    ) -> Result<CandidateChange, LoadError> {
        let Some(config) = config else {
            *file = None;
            return Ok(CandidateChange::Replace(None));
        };
        let seen = stamp(&config.file);
        let is_applied =
            |known: &Self| known.config == config && seen.is_some() && known.applied == seen;
        if file.as_ref().is_some_and(is_applied) {
            return Ok(CandidateChange::Keep);
        }
        let read = read(&config, identity);
        *file = Some(Self {
            applied: seen.filter(|_| read.is_ok()),
            seen,
            is_gone: seen.is_none(),
            config,
        });
        Ok(CandidateChange::Replace(Some(Box::new(read?))))
    }

    /// Checks that the file still contains the rules that are being compared.
    pub(super) fn check_unchanged(&self) -> Result<(), PromoteError> {
        let file = &self.config.file;
        match self.applied {
            None => Err(PromoteError::Unusable(file.clone())),
            applied if stamp(file) != applied => Err(PromoteError::Changed(file.clone())),
            _ => Ok(()),
        }
    }

    pub(super) fn path(&self) -> &PathBuf {
        &self.config.file
    }
}

/// Reads the candidate rules, and logs the warnings for their file. `identity` contains the
/// identity settings of the rules file.
///
/// # Errors
///
/// Returns an error if the file cannot be read or has errors.
pub(crate) fn read(
    config: &CandidateConfig,
    identity: &Identity,
) -> Result<CandidateRules, LoadError> {
    let Config {
        rules, warnings, ..
    } = config.read(identity).map_err(LoadError::Candidate)?;
    for warning in &warnings {
        let file = config.file.display();
        tracing::warn!(%file, "candidate.rules: {warning}");
    }
    Ok(CandidateRules {
        file: config.file.clone(),
        rules,
        until: config.until,
    })
}

/// Adds the entries used by the candidate rules to `rules`, so that the listeners extract these
/// entries, too. If `change` keeps the candidate rules, they are taken from `limiter`.
pub(super) fn with_extra_entries(
    rules: RuleSet,
    change: &CandidateChange,
    limiter: &ServerLimiter,
) -> RuleSet {
    match change {
        CandidateChange::Keep => match limiter.candidate() {
            Some(candidate) => rules.with_extra_entries_of(candidate.rules()),
            None => rules,
        },
        CandidateChange::Replace(Some(candidate)) => rules.with_extra_entries_of(&candidate.rules),
        CandidateChange::Replace(None) => rules,
    }
}
