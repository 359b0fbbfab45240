//! `tidegate`: serving, checking, and operating a running server.

mod admin_address;
mod args;
mod check;
mod log;
mod operate;
mod print;
mod serve;
mod tls;
mod unreachable;

use std::{
    io::{self, Write},
    process::ExitCode,
};

use clap::Parser;

use crate::args::{Args, Command};

/// Exit codes like those of `grep`: 0 for success, 1 for a negative result, 2 for errors.
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
            raw,
            shorten,
            admin,
        } => {
            let block = operate::BlockOptions {
                span,
                reason,
                is_raw: raw,
                may_shorten: shorten,
            };
            operate::block(&admin, &key, block)
        }
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

/// Prints a problem to standard error. Write errors are ignored, because they mean that the output
/// is not read.
fn complain(problem: &str) {
    let _ = writeln!(io::stderr(), "tidegate: {problem}");
}

/// Prints a result to standard output. A closed pipe, as with `head`, is not an error.
fn answer(text: &str) {
    let _ = writeln!(io::stdout(), "{text}");
}
