//! The test vector files: every `*.yaml` file in the project's `vectors/` folder. The environment
//! variable `TIDEGATE_VECTORS` overrides the folder.

use std::path::PathBuf;

use super::{
    format::{self, Case},
    runner::{self, Subject},
};

/// The result of running all test vectors.
#[derive(Debug, Default)]
pub(crate) struct Report {
    pub(crate) ran: usize,
    pub(crate) failures: Vec<String>,
}

impl Report {
    /// Panics if no cases ran or if a case failed.
    #[expect(clippy::print_stdout, reason = "prints the number of cases")]
    pub(crate) fn assert_success(&self) {
        let folder = folder();
        assert!(self.ran > 0, "no case ran in {}", folder.display());
        println!("{} cases of {} ran", self.ran, folder.display());
        self.assert_failures(&[]);
    }

    /// Panics unless the failures are exactly the strings in `expected`.
    pub(crate) fn assert_failures(&self, expected: &[&str]) {
        let got = self.failures.join("\n");
        assert_eq!(
            got,
            expected.join("\n"),
            "the failures of {} cases",
            self.ran
        );
    }
}

/// Runs every case against a new system under test, created by `subject`.
pub(crate) fn run<S: Subject>(mut subject: impl FnMut(&Case) -> S) -> Report {
    let mut report = Report::default();
    for path in files() {
        let text = std::fs::read_to_string(&path)
            .unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        match format::parse(&text) {
            Err(problem) => report
                .failures
                .push(format!("{}: {problem}", path.display())),
            Ok(cases) => {
                for case in &cases {
                    report.ran += 1;
                    let failures = runner::run_case(case, &mut subject(case));
                    report.failures.extend(failures);
                }
            }
        }
    }
    report
}

/// Returns the test vector files, sorted by name.
fn files() -> Vec<PathBuf> {
    let folder = folder();
    let mut files: Vec<_> = std::fs::read_dir(&folder)
        .unwrap_or_else(|error| panic!("{}: {error}", folder.display()))
        .map(|file| file.expect("the folder is readable").path())
        .filter(|path| path.extension().is_some_and(|ending| ending == "yaml"))
        .filter(|path| !has_another_format(path))
        .collect();
    files.sort();
    files
}

#[expect(
    clippy::disallowed_methods,
    reason = "the variable names another folder of vectors"
)]
fn folder() -> PathBuf {
    let own = concat!(env!("CARGO_MANIFEST_DIR"), "/../../vectors");
    std::env::var("TIDEGATE_VECTORS").map_or_else(|_| own.into(), PathBuf::from)
}

/// Returns true for a file with cases for Envoy's rate limit service. Such cases use descriptors
/// and run against the gRPC listener, so this runner skips them.
#[expect(clippy::print_stdout, reason = "a skipped file is printed")]
fn has_another_format(path: &std::path::Path) -> bool {
    let name = path.file_name().map(|name| name.to_string_lossy());
    let other = name.is_some_and(|name| name.starts_with("envoy"));
    if other {
        println!(
            "{} has another format; the gRPC listener runs it",
            path.display()
        );
    }
    other
}
