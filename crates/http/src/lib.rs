//! The HTTP edge: request parts into entries, verdicts into headers.
