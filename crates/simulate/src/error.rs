//! The error of a simulation.

use crate::input::{InputError, MAX_LINE_BYTES};

/// The reason why a simulation could not run.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SimulateError {
    /// A log cannot be read.
    #[error("{file}: {problem}")]
    Input {
        /// The log.
        file: String,
        /// The problem.
        problem: InputError,
    },
    /// All logs are empty.
    #[error("{files}: the log is empty")]
    Empty {
        /// The logs.
        files: String,
    },
    /// A log contains only lines that are empty or too long.
    #[error("{file}: the first lines are empty or longer than {} KiB: this is not an access log", MAX_LINE_BYTES >> 10)]
    NoLines {
        /// The log.
        file: String,
    },
    /// No line of a log matches the format.
    #[error(
        "{file}: the log format is unknown; the nearest is `{nearest}`, and the first line differs at column {column}: {problem}\n  {line}\nName the format, or give the format string of the server, with --format"
    )]
    UnknownFormat {
        /// The log.
        file: String,
        /// The most similar format, or the requested format.
        nearest: String,
        /// The one-based column of the first difference.
        column: usize,
        /// A description of the difference at this column.
        problem: String,
        /// The beginning of the log's first line.
        line: String,
    },
}
