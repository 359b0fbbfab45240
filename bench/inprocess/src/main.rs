//! Compares Tidegate's memory store with governor and throttlecrab, in one run. See METHOD.md.
//!
//! ```text
//! inprocess [--smoke]            nanoseconds per decision
//! inprocess [--smoke] --library  the same, of the library beside its store, in more rounds
//! inprocess [--smoke] --memory   bytes per key
//! inprocess [--smoke] --growth   no peak as keys grow
//! ```

mod growth;
mod keys;
mod limiters;
mod memory;
mod report;
mod speed;

use std::{env, process::ExitCode};

fn main() -> ExitCode {
    let arguments: Vec<String> = env::args().skip(1).collect();
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    match words[..] {
        [] => speed::run(&speed::FULL),
        ["--smoke"] => speed::run(&speed::SMOKE),
        ["--library"] => speed::run_library(&speed::LIBRARY),
        ["--smoke", "--library"] => speed::run_library(&speed::SMOKE),
        ["--memory"] => memory::run(&memory::FULL),
        ["--smoke", "--memory"] => memory::run(&memory::SMOKE),
        ["--growth"] => growth::run(&growth::FULL),
        ["--smoke", "--growth"] => growth::run(&growth::SMOKE),
        ["--memory-of", name, keys] => memory::child(name, keys.parse().expect("a number of keys")),
        _ => {
            eprintln!("usage: inprocess [--smoke] [--library | --memory | --growth]");
            return ExitCode::from(2);
        }
    }
    ExitCode::SUCCESS
}
