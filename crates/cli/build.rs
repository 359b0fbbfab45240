//! Finds the source commit that `tidegate --version` prints.

use std::{env, fs, path::Path, process::Command};

/// The length of the printed commit ID, in hexadecimal digits.
const DIGITS: usize = 12;

/// The file that `cargo package` adds to a release's sources.
const VCS_INFO: &str = ".cargo_vcs_info.json";

fn main() {
    println!("cargo::rerun-if-env-changed=TIDEGATE_COMMIT");
    println!("cargo::rerun-if-changed=build.rs");
    // A packager can set `TIDEGATE_COMMIT`. A release from crates.io contains `VCS_INFO`. If
    // neither is present, the sources are usually a Git clone.
    let commit = variable().or_else(packaged).or_else(cloned);
    if let Some(commit) = commit {
        println!("cargo::rustc-env=TIDEGATE_BUILD_COMMIT={commit}");
    }
}

#[expect(
    clippy::disallowed_methods,
    reason = "cargo and packagers pass values in the environment"
)]
fn variable() -> Option<String> {
    let commit = env::var("TIDEGATE_COMMIT").ok()?;
    // `packaging/build` marks a checkout with changes.
    match commit.strip_suffix("-dirty") {
        Some(commit) => Some(shortened(commit)? + "-dirty"),
        None => shortened(&commit),
    }
}

fn packaged() -> Option<String> {
    if Path::new(VCS_INFO).exists() {
        println!("cargo::rerun-if-changed={VCS_INFO}");
    }
    let info = fs::read_to_string(VCS_INFO).ok()?;
    let (_, rest) = info.split_once("\"sha1\"")?;
    shortened(rest.split('"').nth(1)?)
}

fn cloned() -> Option<String> {
    // The sources may have been unpacked inside another Git repository. The outer repository does
    // not track `build.rs`, and its commit must not be used.
    git(&["ls-files", "--error-unmatch", "build.rs"])?;
    // Git appends a line to `logs/HEAD` when the checked-out commit changes.
    let log = git(&["rev-parse", "--git-path", "logs/HEAD"])?;
    if Path::new(&log).exists() {
        println!("cargo::rerun-if-changed={log}");
    }
    shortened(&git(&["rev-parse", "HEAD"])?)
}

fn git(arguments: &[&str]) -> Option<String> {
    let output = Command::new("git").args(arguments).output().ok()?;
    let printed = String::from_utf8(output.stdout).ok()?;
    output.status.success().then(|| printed.trim().to_owned())
}

/// Returns the first `DIGITS` digits of `commit`; `None` if `commit` is not a commit ID.
fn shortened(commit: &str) -> Option<String> {
    let is_commit = commit.len() >= DIGITS && commit.chars().all(|digit| digit.is_ascii_hexdigit());
    is_commit.then(|| commit[..DIGITS].to_owned())
}
