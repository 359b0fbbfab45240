//! Hot reload of the rules file: a new version is applied as a whole or not at all.

mod restart_only;

use std::{
    fs, io,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use tidegate_config::{Config, MAX_FILE_BYTES, Mistake, Proxy};
use tidegate_envoy::quota::Quotas;
use tidegate_limiter::Limiter;
use tidegate_net::file_watch::{FileStamp, LastRead, in_one_line, may_pass, stamp};
use tidegate_proxy::{ProxyRuntime, RuntimeConfig, TrustAnchorError};

pub use self::restart_only::RestartOnlySettings;

/// The target of the log records of this module.
pub const LOG_TARGET: &str = module_path!();

/// The interval at which the rules file is checked for changes. A check costs one `stat`. Unlike
/// file events it also works on network file systems and for the symbolic links of a Kubernetes
/// ConfigMap.
pub const CHECK_INTERVAL: Duration = Duration::from_secs(1);

/// The reason why a rules file could not be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LoadError {
    /// The file could not be read: its path or its permissions are wrong.
    #[error("cannot read {path}: {source}")]
    Unreadable {
        /// The file.
        path: PathBuf,
        /// The error of the file system.
        source: io::Error,
    },
    /// The file was read, but its content is invalid.
    #[error("{path} has {} mistake{}:\n{}{}", mistakes.len(), plural(mistakes.len()), lines(mistakes), hint(mistakes, path))]
    Mistaken {
        /// The file.
        path: PathBuf,
        /// All mistakes in it.
        mistakes: Vec<Mistake>,
    },
    /// TLS to an upstream of the proxy cannot be set up, for example because its trust anchors are
    /// missing.
    #[error(transparent)]
    Proxy(#[from] TrustAnchorError),
    /// A section that takes effect only at startup has changed, and the rules may depend on it.
    #[error("{0}: has changed, but is read only at startup; restart the server to apply this file")]
    Start(&'static str),
}

impl LoadError {
    /// Returns one line for each problem.
    #[must_use]
    pub fn problems(&self) -> Vec<String> {
        match self {
            Self::Unreadable { .. } | Self::Proxy(_) | Self::Start(_) => vec![self.to_string()],
            Self::Mistaken { mistakes, .. } => mistakes.iter().map(Mistake::to_string).collect(),
        }
    }

    /// Returns whether the error may disappear without a visible change of the file.
    fn may_pass(&self) -> bool {
        matches!(self, Self::Unreadable { source, .. } if may_pass(source))
    }
}

/// Reads and parses a rules file.
///
/// # Errors
///
/// Returns a [`LoadError`]; see its variants.
pub fn load(path: &Path) -> Result<Config, LoadError> {
    let unreadable = |source| LoadError::Unreadable {
        path: path.to_owned(),
        source,
    };
    let size = fs::metadata(path).map_err(unreadable)?.len();
    if size > MAX_FILE_BYTES as u64 {
        let problem = format!("{size} bytes is over the maximum of {MAX_FILE_BYTES}");
        return Err(unreadable(io::Error::new(
            io::ErrorKind::FileTooLarge,
            problem,
        )));
    }
    let text = fs::read_to_string(path).map_err(unreadable)?;
    let mistaken = |mistakes| LoadError::Mistaken {
        path: path.to_owned(),
        mistakes,
    };
    // An editor may truncate the file before it writes it. Without this check, no limit would be in
    // effect in the meantime.
    if says_nothing(&text) {
        let message = "the file is empty; to limit nothing, write `rules: []`".to_owned();
        return Err(mistaken(vec![Mistake {
            path: String::new(),
            line: None,
            message,
        }]));
    }
    Config::parse(&text).map_err(mistaken)
}

/// Returns whether the file contains only comments, document markers and null values.
fn says_nothing(text: &str) -> bool {
    text.lines().map(str::trim).all(|line| {
        line.is_empty() || line.starts_with('#') || matches!(line, "---" | "..." | "null" | "~")
    })
}

/// What a reload applied.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reloaded {
    /// The number of rules.
    pub rules: usize,
    /// The warnings for the file. They are also logged.
    pub warnings: Vec<Mistake>,
}

/// Reloads the rules file on request or when it has changed.
#[derive(Debug)]
pub struct Reloader {
    path: PathBuf,
    limiter: Arc<Limiter>,
    quotas: Arc<Quotas>,
    proxy: Option<Arc<ProxyRuntime>>,
    restart_only: RestartOnlySettings,
    /// Held while a new version is read and applied, so that versions take effect in the order in
    /// which they are read.
    last: Mutex<Last>,
}

/// The state of the last check of the rules file.
#[derive(Debug)]
struct Last {
    read: LastRead<FileStamp>,
    /// Whether the file was missing at the last check.
    is_gone: bool,
    /// The settings of the applied file that take effect only after a restart.
    restart_required: Vec<&'static str>,
}

impl Reloader {
    /// Creates a reloader of the file at `path`, which has just been loaded into `limiter`,
    /// `quotas` and, if there is one, `proxy`. `restart_only` contains the settings that need a
    /// restart to change.
    #[must_use]
    pub fn new(
        path: PathBuf,
        limiter: Arc<Limiter>,
        quotas: Arc<Quotas>,
        proxy: Option<Arc<ProxyRuntime>>,
        restart_only: RestartOnlySettings,
    ) -> Self {
        let last = Mutex::new(Last {
            read: LastRead::new(stamp(&path)),
            is_gone: false,
            restart_required: Vec::new(),
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

    /// Reads the file and applies its rules, keeping counters. Returns what was applied.
    ///
    /// Listeners, bounds and the store do not change until the server is restarted.
    ///
    /// # Errors
    ///
    /// Returns a [`LoadError`]. The current rules stay in use.
    pub fn reload(&self) -> Result<Reloaded, LoadError> {
        let mut last = self.last();
        last.read.seen = stamp(&self.path);
        self.activate(load(&self.path), &mut last)
    }

    /// Reloads the file if it has changed. Returns the result if there is a new one.
    ///
    /// A file that could not be read is tried again at every check, but reported only when the
    /// result changes. A missing file is reported at the second check that finds it missing.
    pub fn reload_if_changed(&self) -> Option<Result<Reloaded, LoadError>> {
        let mut last = self.last();
        let now = stamp(&self.path);
        // A missing file is probably being replaced, so it is reported only at the second check.
        let was_gone = std::mem::replace(&mut last.is_gone, now.is_none());
        let has_changed = now != last.read.seen && (now.is_some() || was_gone);
        if !has_changed && !last.read.is_unread {
            return None;
        }
        let read = load(&self.path);
        if !has_changed && read.as_ref().is_err_and(LoadError::may_pass) {
            return None;
        }
        last.read.seen = now;
        Some(self.activate(read, &mut last))
    }

    fn activate(
        &self,
        read: Result<Config, LoadError>,
        last: &mut Last,
    ) -> Result<Reloaded, LoadError> {
        let loaded = read.and_then(|mut config| {
            let mut restart_required = self.restart_only.check(&config)?;
            let proxy = self.prepare_proxy(config.proxy.take(), &mut restart_required)?;
            for warning in &config.warnings {
                tracing::warn!("{warning}");
            }
            let former = self.limiter.rules();
            let rules = config.rules.inheriting_from(&former);
            let count = rules.len();
            if count == 0 && !former.is_empty() {
                let file = self.path.display();
                tracing::warn!(%file, rules_before = former.len(), "the file has no rules any more: requests are not limited by rules");
            }
            self.limiter.swap_rules(rules);
            let now = self.limiter.now();
            self.quotas.swap_rules(config.quotas, now);
            if let Some((live, next)) = proxy {
                live.activate(next);
            }
            if !restart_required.is_empty() {
                let settings = restart_required.join(", ");
                tracing::warn!(
                    settings,
                    "changes to these settings take effect after a restart"
                );
            }
            last.restart_required = restart_required;
            Ok(Reloaded {
                rules: count,
                warnings: config.warnings,
            })
        });
        self.limiter.metrics().count_reload(loaded.is_err());
        let last = &mut last.read;
        let error = loaded.as_ref().err();
        last.is_unread = error.is_some_and(LoadError::may_pass);
        last.mistakes = error.map(LoadError::problems).unwrap_or_default();
        let file = self.path.display();
        match &loaded {
            Ok(Reloaded { rules, warnings }) => {
                let warnings = warnings.len();
                tracing::info!(%file, rules, warnings, "reloaded the rules");
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
        loaded
    }

    /// Prepares the new proxy settings. Returns `None` if there is no proxy to change. Adds the
    /// settings that differ from the running ones and need a restart to `restart_required`.
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
            // A proxy cannot be added or removed.
            _ => {
                restart_required.push("proxy");
                Ok(None)
            }
        }
    }

    /// Returns the settings of the file in use that differ from the running ones. They take effect
    /// after a restart.
    #[must_use]
    pub fn restart_required(&self) -> Vec<&'static str> {
        self.last().restart_required.clone()
    }

    /// Returns the path of the rules file.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the mistakes of the file when it was last read; empty if it was applied.
    #[must_use]
    pub fn last_mistakes(&self) -> Vec<String> {
        self.last().read.mistakes.clone()
    }

    fn last(&self) -> MutexGuard<'_, Last> {
        self.last.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn plural(count: usize) -> &'static str {
    if count == 1 { "" } else { "s" }
}

/// Suggests what to do with a file of another rate limiter: envoyproxy/ratelimit, with `domain` and
/// `descriptors`, or Limitador, a list of limits.
fn hint(mistakes: &[Mistake], path: &Path) -> String {
    let has = |key: &str| mistakes.iter().any(|mistake| mistake.path == key);
    if has("domain") && has("descriptors") {
        return format!(
            "\nthis looks like a file of envoyproxy/ratelimit: check it with `tidegate check --envoy {0}`, and serve it \
             with `envoy: {{config: {0}}}` in a rules file",
            path.display()
        );
    }
    // The file is read again only after it was rejected.
    if fs::read_to_string(path).is_ok_and(|text| is_of_limitador(&text)) {
        return "\nthis looks like a limits file of Limitador: write each limit as a rule; \
            {namespace: api, max_value: 10, seconds: 60, variables: [user_id]} is \
            {name: api, key: [user_id], limits: [10/60s]}, and its conditions go under `when`"
            .to_owned();
    }
    String::new()
}

/// Returns whether `text` has the keys of Limitador's limits.
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
