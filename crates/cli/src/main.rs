//! `tidegate`: serve, check, and the operator's verbs.

mod args;
mod check;
mod log;
mod operate;
mod print;
mod serve;

use std::{
    io::{self, Write},
    process::ExitCode,
};

use clap::Parser;

use crate::args::{Args, Command};

/// Exit codes as those of `grep`: 0 for yes, 1 for no, 2 for trouble.
const NO: u8 = 1;
const TROUBLE: u8 = 2;

fn main() -> ExitCode {
    let done = match Args::parse().command {
        Command::Serve(serve) => serve::serve(&serve),
        Command::Check(check) => Ok(check::check(&check)),
        Command::Status { admin } => operate::status(&admin),
        Command::Rules { admin } => operate::rules(&admin),
        Command::Reload { admin } => operate::reload(&admin),
        Command::Block {
            key,
            span,
            reason,
            admin,
        } => operate::block(&admin, &key, span, reason),
        Command::Unblock { key, admin } => operate::unblock(&admin, &key),
        Command::Blocks { admin } => operate::blocks(&admin),
        Command::Inspect { key, admin } => operate::inspect(&admin, &key),
        Command::Reset { key, admin } => operate::reset(&admin, &key),
    };
    done.unwrap_or_else(|problem| {
        complain(&problem);
        ExitCode::from(TROUBLE)
    })
}

/// Complaints go to standard error. Whoever does not listen any more misses nothing that was asked for.
fn complain(problem: &str) {
    let _ = writeln!(io::stderr(), "tidegate: {problem}");
}

/// What was asked for goes to standard output. A pipe that is closed, as by `head`, has had enough.
fn answer(text: &str) {
    let _ = writeln!(io::stdout(), "{text}");
}
