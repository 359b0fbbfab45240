//! The output of the program, and its exit codes.

use std::{
    io::{self, Write},
    sync::atomic::{AtomicBool, Ordering},
};

/// The exit code for a negative result. The exit codes have the same meaning as those of `grep`: 0
/// is success, 1 is a negative result, and 2 is an error.
pub(crate) const NO: u8 = 1;
/// The exit code for an error.
pub(crate) const TROUBLE: u8 = 2;

/// Whether writing a result to standard output has failed.
static IS_OUTPUT_LOST: AtomicBool = AtomicBool::new(false);

/// Whether standard output is a pipe whose reader has closed it.
static IS_OUTPUT_CLOSED: AtomicBool = AtomicBool::new(false);

/// Returns whether further output would be lost, because standard output is closed or has failed.
pub(crate) fn is_output_closed() -> bool {
    IS_OUTPUT_CLOSED.load(Ordering::Relaxed) || IS_OUTPUT_LOST.load(Ordering::Relaxed)
}

/// Returns whether writing a result to standard output has failed.
pub(crate) fn is_output_lost() -> bool {
    IS_OUTPUT_LOST.load(Ordering::Relaxed)
}

/// Prints a problem to standard error. Write errors are ignored, because there is nowhere else to
/// report them.
pub(crate) fn eprint_message(message: &str) {
    let _ = writeln!(io::stderr(), "tidegate: {message}");
}

/// Prints a result to standard output. If the reader of a pipe (for example `head`) has closed the
/// pipe, the failure is not an error. Any other failure, such as a full disk, is an error.
pub(crate) fn print_result(text: &str) {
    let mut out = io::stdout();
    let written = writeln!(out, "{}", text.trim_end()).and_then(|()| out.flush());
    match written {
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => {
            IS_OUTPUT_CLOSED.store(true, Ordering::Relaxed);
        }
        Err(error) => {
            eprint_message(&format!(
                "cannot write the result to standard output: {error}"
            ));
            IS_OUTPUT_LOST.store(true, Ordering::Relaxed);
        }
        Ok(()) => {}
    }
}
