//! `tidegate`: serve, check, and the operator's verbs.

mod args;
mod check;
mod operate;
mod serve;

use std::process::ExitCode;

use clap::Parser;

use crate::args::{Args, Command};

/// Exit codes as those of `grep`: 0 for yes, 1 for no, 2 for trouble.
const NO: u8 = 1;
const TROUBLE: u8 = 2;

fn main() -> ExitCode {
    let done = match Args::parse().command {
        Command::Serve(serve) => serve::serve(&serve),
        Command::Check(check) => check::check(&check),
        Command::Block {
            key,
            span,
            reason,
            door,
        } => operate::block(&door, &key, span, reason),
        Command::Unblock { key, door } => operate::unblock(&door, &key),
        Command::Blocks { door } => operate::blocks(&door),
        Command::Inspect { key, door } => operate::inspect(&door, &key),
        Command::Reset { key, door } => operate::reset(&door, &key),
    };
    done.unwrap_or_else(|problem| {
        complain(&problem);
        ExitCode::from(TROUBLE)
    })
}

#[expect(
    clippy::print_stderr,
    reason = "a command line speaks to the person who typed it"
)]
fn complain(problem: &str) {
    eprintln!("tidegate: {problem}");
}

#[expect(
    clippy::print_stdout,
    reason = "what was asked for goes to standard output"
)]
fn answer(text: &str) {
    println!("{text}");
}
