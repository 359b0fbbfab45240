//! Hot reload of the rules file. A new version is applied completely or not at all.

mod candidate;
mod diff;
mod inactive_blocks;
mod inactive_overrides;
mod preview;
mod restart_only;

use std::{
    path::{Path, PathBuf},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use serde_json::json;
use tidegate_config::{CandidateConfig, Config, EventType, Mistake, Proxy, ReadError};
use tidegate_core::{MemoryBounds, RuleSet};
use tidegate_envoy::quota::Quotas;
use tidegate_limiter::ServerLimiter;
use tidegate_net::file_watch::{FileStamp, LastRead, in_one_line, may_pass, stamp};
use tidegate_proxy::{ProxyRuntime, RuntimeConfig, TrustAnchorError};

pub(crate) use self::candidate::read as read_candidate;
use self::candidate::{CandidateChange, CandidateFile};
pub use self::{
    candidate::{PromoteError, Promotion},
    diff::{RuleChange, RulesDiff},
    inactive_blocks::{UnknownBlocks, inactive_entry_blocks_advice, report_inactive_blocks},
    inactive_overrides::report_inactive_overrides,
    preview::{RulesPreview, preview},
    restart_only::RestartOnlySettings,
};

/// The target of the log records of this module.
pub const LOG_TARGET: &str = module_path!();

/// Warns if the active rules are replaced by a file without rules.
fn warn_of_no_rules(count: usize, former: &RuleSet, file: &Path) {
    if count == 0 && !former.is_empty() {
        let file = file.display();
        tracing::warn!(%file, rules_before = former.len(), "the file no longer has rules, so no rule limits requests");
    }
}

/// The interval at which the rules file is checked for changes. A check takes one `stat` call.
/// Unlike file system notifications, such a check also works on network file systems and with the
/// symbolic links of a Kubernetes ConfigMap.
pub const CHECK_INTERVAL: Duration = Duration::from_secs(1);

/// The maximum number of errors in the event about a failed reload. The log contains all errors of
/// the file.
const MAX_EVENT_MISTAKES: usize = 20;

/// The reason why a rules file could not be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LoadError {
    /// The file could not be read, or its content is invalid.
    #[error(transparent)]
    File(#[from] ReadError),
    /// The file with the candidate rules could not be read, or its content is invalid.
    #[error("candidate.rules: {0}")]
    Candidate(#[source] ReadError),
    /// TLS to an upstream of the proxy cannot be set up, for example because its trust anchors are
    /// missing.
    #[error(transparent)]
    Proxy(#[from] TrustAnchorError),
    /// A section that takes effect only at startup has changed, and the new rules may depend on it.
    #[error(
        "{0}: has changed, but takes effect only at startup; restart the server to apply this file"
    )]
    Start(&'static str),
}

impl LoadError {
    /// Returns one line for each problem.
    #[must_use]
    pub fn problems(&self) -> Vec<String> {
        match self {
            Self::File(ReadError::Invalid { mistakes, .. }) => {
                mistakes.iter().map(Mistake::to_string).collect()
            }
            Self::Candidate(ReadError::Invalid { path, mistakes }) => {
                let file = path.display();
                let problem = |mistake| format!("candidate.rules: {file}: {mistake}");
                mistakes.iter().map(problem).collect()
            }
            Self::File(_) | Self::Candidate(_) | Self::Proxy(_) | Self::Start(_) => {
                vec![self.to_string()]
            }
        }
    }

    /// Returns whether a later read may succeed even if no change to the file is detected.
    fn may_pass(&self) -> bool {
        let (Self::File(error) | Self::Candidate(error)) = self else {
            return false;
        };
        matches!(error, ReadError::Unreadable { source, .. } if may_pass(source))
    }
}

/// The result of a successful reload.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReloadSummary {
    /// The number of rules.
    pub rules: usize,
    /// The differences from the previously active rules.
    pub diff: RulesDiff,
    /// The warnings for the file, which are also logged.
    pub warnings: Vec<Mistake>,
}

/// Reloads the rules file on request or when it has changed.
#[derive(Debug)]
pub struct Reloader {
    path: PathBuf,
    limiter: Arc<ServerLimiter>,
    quotas: Arc<Quotas>,
    proxy: Option<Arc<ProxyRuntime>>,
    restart_only: RestartOnlySettings,
    /// The state of the last check. The lock is held while a new version is read and applied, so
    /// that versions take effect in the order in which they are read.
    last: Mutex<Last>,
}

/// The state of the last check of the rules file.
#[derive(Debug)]
struct Last {
    read: LastRead<FileStamp>,
    /// Whether the file was missing at the last check.
    is_gone: bool,
    /// The changed settings in the applied file that take effect only after a restart.
    restart_required: Vec<&'static str>,
    /// The candidate rules file, if the rules file names one.
    candidate: Option<CandidateFile>,
    /// The candidate rules file that was promoted after the rules file was applied, if any.
    promoted: Option<PathBuf>,
}

impl Reloader {
    /// Creates a reloader for the file at `path`, which has just been loaded into `limiter`,
    /// `quotas` and, if there is one, `proxy`. `restart_only` contains the settings that need a
    /// restart to change. `candidate` contains the candidate rules file, which has also been
    /// loaded, and the stamp that the candidate file had before it was read.
    #[must_use]
    pub fn new(
        path: PathBuf,
        limiter: Arc<ServerLimiter>,
        quotas: Arc<Quotas>,
        proxy: Option<Arc<ProxyRuntime>>,
        restart_only: RestartOnlySettings,
        candidate: Option<(&CandidateConfig, Option<FileStamp>)>,
    ) -> Self {
        let candidate = candidate.map(|(config, seen)| CandidateFile::applied(config, seen));
        let last = Mutex::new(Last {
            read: LastRead::new(stamp(&path)),
            is_gone: false,
            restart_required: Vec::new(),
            candidate,
            promoted: None,
        });
        Self {
            path,
            limiter,
            quotas,
            proxy,
            restart_only,
            last,
        }
    }

    /// Reads the file and applies its rules; counters are kept. Returns a summary of the applied
    /// file. `by` names the operator or the cause of the reload, for the audit log.
    ///
    /// Changes to listeners, memory bounds and the store take effect only after a restart.
    ///
    /// # Errors
    ///
    /// Returns a [`LoadError`]. After an error, the active rules stay active.
    pub fn reload(&self, by: &str) -> Result<ReloadSummary, LoadError> {
        let mut last = self.last();
        last.read.seen = stamp(&self.path);
        let read = Config::read(&self.path).map_err(LoadError::from);
        let rules_before = self.limiter.rules().len();
        let loaded = self.activate(read, &mut last);
        self.conclude(loaded, rules_before, &mut last, by)
    }

    /// Returns the settings in `config` that differ from the running server's settings and need a
    /// restart. Does not open the files that `config` names, because an operator with a read-only
    /// token must not be able to make the server read files.
    ///
    /// # Errors
    ///
    /// Returns an error if a reload would reject `config`. Errors in the files that `config` names
    /// are not detected.
    pub(crate) fn check(&self, config: &Config) -> Result<Vec<&'static str>, LoadError> {
        let mut restart_required = self.restart_only.check(config)?;
        match (&self.proxy, &config.proxy) {
            (Some(live), Some(settings)) => {
                restart_required.extend(live.restart_required(settings));
            }
            (None, None) => {}
            _ => restart_required.push("proxy"),
        }
        Ok(restart_required)
    }

    /// Reloads the file if it has changed. Returns the result of the reload. Returns `None` if
    /// there was no reload, or if its result need not be reported again.
    ///
    /// After a failed read, the file is read again at every check. The result is reported only when
    /// the file changes or can be read. A missing file is reported when two consecutive checks have
    /// found it missing.
    pub fn reload_if_changed(&self) -> Option<Result<ReloadSummary, LoadError>> {
        let mut last = self.last();
        let now = stamp(&self.path);
        // A missing file is probably being replaced, so it is reported only if it is still missing
        // at the next check.
        let was_gone = std::mem::replace(&mut last.is_gone, now.is_none());
        let has_changed = now != last.read.seen && (now.is_some() || was_gone);
        let candidate = last.candidate.as_mut();
        let has_changed = candidate.is_some_and(CandidateFile::detect_change) || has_changed;
        if !has_changed && !last.read.is_unread {
            return None;
        }
        let read = Config::read(&self.path).map_err(LoadError::from);
        if !has_changed && read.as_ref().is_err_and(LoadError::may_pass) {
            return None;
        }
        last.read.seen = now;
        let rules_before = self.limiter.rules().len();
        let loaded = self.activate(read, &mut last);
        // If the last read failed, the candidate rules file is read again at every check, too.
        if !has_changed && loaded.as_ref().is_err_and(LoadError::may_pass) {
            return None;
        }
        let by = "a file change";
        Some(self.conclude(loaded, rules_before, &mut last, by))
    }

    /// Activates the rules in `read`.
    fn activate(
        &self,
        read: Result<Config, LoadError>,
        last: &mut Last,
    ) -> Result<ReloadSummary, LoadError> {
        read.and_then(|mut config| {
            let mut restart_required = self.restart_only.check(&config)?;
            let proxy = self.prepare_proxy(config.proxy.take(), &mut restart_required)?;
            let candidate = Self::read_candidate(&mut config, last)?;
            for warning in &config.warnings {
                tracing::warn!("{warning}");
            }
            let former = self.limiter.rules();
            let rules = config.rules.inheriting_from(&former);
            let count = rules.len();
            warn_of_no_rules(count, &former, &self.path);
            let diff = RulesDiff::between(&former, &rules);
            let rules = candidate::with_extra_entries(rules, &candidate, &self.limiter);
            self.limiter.swap_rules(rules);
            if let CandidateChange::Replace(candidate) = candidate {
                let candidate = candidate.map(|candidate| *candidate);
                self.limiter.set_candidate(candidate, config.memory);
            }
            last.promoted = None;
            let now = self.limiter.now();
            self.quotas.swap_rules(config.quotas, now);
            if let Some((live, next)) = proxy {
                live.activate(next);
            }
            if !restart_required.is_empty() {
                let settings = restart_required.join(", ");
                tracing::warn!(
                    settings,
                    "changes to these settings take effect after a restart or an upgrade"
                );
            }
            last.restart_required = restart_required;
            Ok(ReloadSummary {
                rules: count,
                diff,
                warnings: config.warnings,
            })
        })
    }

    fn read_candidate(config: &mut Config, last: &mut Last) -> Result<CandidateChange, LoadError> {
        let candidate = config.candidate.take();
        CandidateFile::read(&mut last.candidate, candidate, &config.identity)
    }

    /// Reports a reload: in the log, as a metric, and as an event. Returns `loaded`.
    fn conclude(
        &self,
        loaded: Result<ReloadSummary, LoadError>,
        rules_before: usize,
        last: &mut Last,
        by: &str,
    ) -> Result<ReloadSummary, LoadError> {
        self.report(&loaded, &mut last.read);
        self.emit(&loaded, rules_before, by);
        loaded
    }

    /// Sends an event about a reload.
    fn emit(&self, loaded: &Result<ReloadSummary, LoadError>, rules_before: usize, by: &str) {
        let Some(events) = self.limiter.events() else {
            return;
        };
        let mut data = json!({
            "by": by,
            "file": self.path.display().to_string(),
            "before": {"rules": rules_before},
        });
        let kind = match loaded {
            Ok(reloaded) => {
                data["after"] = json!({"rules": reloaded.rules});
                data["changes"] = reloaded.diff.event_document();
                EventType::RulesReloaded
            }
            Err(error) => {
                let mistakes = error.problems().into_iter().take(MAX_EVENT_MISTAKES);
                data["mistakes"] = mistakes.collect();
                EventType::RulesReloadFailed
            }
        };
        events.emit(kind, self.limiter.now(), &data);
    }

    /// Counts and logs a reload, and keeps its errors.
    fn report(&self, loaded: &Result<ReloadSummary, LoadError>, last: &mut LastRead<FileStamp>) {
        self.limiter.metrics().count_reload(loaded.is_err());
        let error = loaded.as_ref().err();
        last.is_unread = error.is_some_and(LoadError::may_pass);
        last.mistakes = error.map(LoadError::problems).unwrap_or_default();
        let file = self.path.display();
        match loaded {
            Ok(reloaded) => {
                let ReloadSummary {
                    rules,
                    diff,
                    warnings,
                } = reloaded;
                let (added, removed) = (diff.added.len(), diff.removed.len());
                let (changed, warnings) = (diff.changed.len(), warnings.len());
                tracing::info!(
                    %file, rules, added, removed, changed, warnings, "reloaded the rules"
                );
            }
            Err(error) if error.may_pass() => tracing::error!(
                %file, "kept the old rules: {error}; retrying until the file can be read"
            ),
            Err(error) => {
                let mistakes = error.problems();
                tracing::error!(
                    %file, mistakes = mistakes.len(), "kept the old rules: {}", in_one_line(&mistakes)
                );
            }
        }
    }

    /// Activates the candidate rules in place of the rules in the rules file. If a rule with the
    /// same name exists in both rule sets, its keys keep their counters. The next reload or restart
    /// activates the rules in the rules file again.
    ///
    /// # Errors
    ///
    /// Returns a [`PromoteError`]. After an error, the active rules stay active.
    pub fn promote(&self) -> Result<Promotion, PromoteError> {
        let mut last = self.last();
        let candidate = last.candidate.as_ref().ok_or(PromoteError::NoCandidate)?;
        candidate.check_unchanged()?;
        let file = candidate.path().clone();
        // The compared rules themselves are promoted. The file is not read again, because it could
        // have changed since the comparison.
        let compared = self.limiter.candidate().ok_or(PromoteError::NoCandidate)?;
        let rules = compared.rules().clone();
        let count = rules.len();
        warn_of_no_rules(count, &self.limiter.rules(), &file);
        let former = self.limiter.rules();
        let rules = rules.inheriting_from(&former);
        let diff = RulesDiff::between(&former, &rules);
        self.limiter.swap_rules(rules);
        self.limiter.set_candidate(None, MemoryBounds::default());
        last.candidate = None;
        last.promoted = Some(file.clone());
        tracing::warn!(
            file = %file.display(), rules = count,
            "activated the candidate rules until the next reload; to keep them, copy them into the rules file"
        );
        Ok(Promotion {
            file,
            rules: count,
            rules_before: former.len(),
            diff,
        })
    }

    /// Returns the candidate rules file whose promoted rules are active in place of the rules file.
    #[must_use]
    pub fn promoted(&self) -> Option<PathBuf> {
        self.last().promoted.clone()
    }

    /// Prepares the new proxy settings. Returns `None` if there is no proxy to change. If changed
    /// settings need a restart, adds their names to `restart_required`.
    fn prepare_proxy(
        &self,
        settings: Option<Proxy>,
        restart_required: &mut Vec<&'static str>,
    ) -> Result<Option<(&ProxyRuntime, RuntimeConfig)>, TrustAnchorError> {
        match (&self.proxy, settings) {
            (Some(live), Some(settings)) => {
                restart_required.extend(live.restart_required(&settings));
                Ok(Some((live, live.prepare(settings)?)))
            }
            (None, None) => Ok(None),
            // A reload cannot add or remove the proxy.
            _ => {
                restart_required.push("proxy");
                Ok(None)
            }
        }
    }

    /// Returns the changed settings in the current rules file that take effect only after a
    /// restart.
    #[must_use]
    pub fn restart_required(&self) -> Vec<&'static str> {
        self.last().restart_required.clone()
    }

    /// Returns the path of the rules file.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the errors found by the last read of the file. The list of errors is empty if the
    /// file was applied.
    #[must_use]
    pub fn last_mistakes(&self) -> Vec<String> {
        self.last().read.mistakes.clone()
    }

    fn last(&self) -> MutexGuard<'_, Last> {
        self.last.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
