//! The access log: one line of JSON per request, written when the request has completed.
//!
//! Headers, queries and keys may contain secrets. Therefore the only logged headers are `Host` and
//! `User-Agent`, and queries and keys are logged only if configured.

mod entry;

use std::io;

use tidegate_net::line_log::{LineLog, LineLogSettings};

pub(crate) use self::entry::{AccessLogService, LogContext, LoggedUpstream, UpgradedSession};

/// A handle to the open access log.
#[derive(Clone, Debug)]
pub struct AccessLog {
    lines: LineLog,
    query: bool,
    key: bool,
}

impl AccessLog {
    /// Opens the log of `settings` for appending.
    ///
    /// # Errors
    ///
    /// Returns the operating system's error if the file cannot be opened or the thread cannot be
    /// started.
    pub fn open(settings: &tidegate_config::AccessLogConfig) -> io::Result<Self> {
        let lines = LineLog::open(LineLogSettings {
            name: "access log",
            path: settings.to.clone(),
            rotate_at: None,
        })?;
        Ok(Self {
            lines,
            query: settings.query,
            key: settings.key,
        })
    }

    /// Reopens the file before the next line is written. Call this method after log rotation has
    /// moved the file.
    pub fn reopen(&self) {
        self.lines.reopen();
    }

    /// Waits until all lines queued so far are written, for at most 2 seconds.
    pub fn finish(&self) {
        self.lines.finish();
    }

    /// Returns the number of dropped lines.
    #[must_use]
    pub fn lost(&self) -> u64 {
        self.lines.lost()
    }

    fn write(&self, line: String) {
        self.lines.write(line);
    }
}
