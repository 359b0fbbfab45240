//! `check`: validates files in the same way as `serve`, without starting a server.

use std::{fmt::Display, path::Path, process::ExitCode};

use serde_json::{Value, json};
use tidegate_config::{
    Config, Mistake, ReadError,
    envoy::{ConfigFiles, DomainFiles, FileFormat, RuleOrigin},
};
use tidegate_envoy::{ConfigFilesError, FileMistake, LoadedConfig, load_files};
use tidegate_server::serve::{preflight_errors, preflight_warnings};

use crate::{
    args::{Check, CheckFormat},
    output::{NO, TROUBLE, eprint_message, print_result},
    serve::secret_problems,
};

/// The result of a check, ordered from best to worst. The combined result of several checks is the
/// worst of their results.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum CheckResult {
    Valid,
    HasWarnings,
    HasMistakes,
    Unreadable,
}

/// The severity of a finding in JSON output.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Severity {
    /// The file is valid, but this machine lacks a file or a variable that it names.
    Note,
    Warning,
    Error,
}

impl Severity {
    fn as_str(self) -> &'static str {
        match self {
            Self::Note => "note",
            Self::Warning => "warning",
            Self::Error => "error",
        }
    }
}

/// Prints findings as text immediately, or collects them for JSON.
#[derive(Debug)]
struct Findings {
    format: CheckFormat,
    /// Whether the server is meant to run on this machine (`--this-machine`).
    is_this_machine: bool,
    /// Whether warnings change the exit code (`--strict`).
    is_strict: bool,
    collected: Vec<Value>,
    worst: CheckResult,
    /// The findings about the current file, for the summary line of that file.
    of_file: FileFindings,
}

/// The findings about one file, except for the errors in it.
#[derive(Clone, Copy, Debug, Default)]
struct FileFindings {
    warnings: usize,
    /// The number of problems that would prevent the server from starting on this machine. The
    /// problems are counted only with `--this-machine`.
    obstacles: usize,
}

/// Validates files in the same way as `serve`. The exit code is 0 if the configuration is valid and
/// contains limits. The exit code is 1 if the configuration has errors or, with `--strict`,
/// warnings. The exit code is 2 if a file cannot be read. A file or variable that this machine
/// lacks is reported as a note, which changes the exit code only with `--this-machine`.
pub(crate) fn check(args: &Check) -> ExitCode {
    let mut findings = Findings {
        format: args.format,
        is_this_machine: args.this_machine,
        is_strict: args.strict,
        collected: Vec::new(),
        worst: CheckResult::Valid,
        of_file: FileFindings::default(),
    };
    if let Some(file) = &args.file {
        findings.check_file(file);
    }
    if let Some(path) = &args.envoy {
        let merging = if args.merge_domains {
            DomainFiles::Merged
        } else {
            DomainFiles::One
        };
        let folder = ConfigFiles {
            path: path.clone(),
            format: FileFormat::Ratelimit,
            merging,
        };
        findings.check_envoy(load_files(&folder), &folder.path, "");
    }
    if let Some(path) = &args.limitador {
        let file = ConfigFiles {
            path: path.clone(),
            format: FileFormat::Limitador,
            merging: DomainFiles::One,
        };
        findings.check_envoy(load_files(&file), &file.path, "");
    }
    if findings.format == CheckFormat::Json {
        print_result(&format!("{:#}", Value::Array(findings.collected)));
    }
    match findings.worst {
        CheckResult::Valid => ExitCode::SUCCESS,
        CheckResult::HasWarnings if args.strict => ExitCode::from(NO),
        CheckResult::HasWarnings => ExitCode::SUCCESS,
        CheckResult::HasMistakes => ExitCode::from(NO),
        CheckResult::Unreadable => ExitCode::from(TROUBLE),
    }
}

impl Findings {
    /// Checks a rules file, and the Envoy rules that it refers to. A certificate or other file that
    /// is missing on this machine is reported only as a note, unless the server is meant to run on
    /// this machine.
    fn check_file(&mut self, file: &Path) {
        let config = match Config::read(file) {
            Ok(config) => config,
            Err(error) => return self.report_read_error(&error, file),
        };
        let name = file.display().to_string();
        for warning in &config.warnings {
            self.warn(warning, as_json(&name, warning, Severity::Warning));
        }
        let errors = preflight_errors(&config);
        let errors = errors.iter().map(ToString::to_string);
        for what in errors.chain(secret_problems(&config)) {
            let what = format!("the server would not start on this machine: {what}");
            self.note(&name, &what, CheckResult::HasMistakes);
        }
        if let Some(candidate) = &config.candidate {
            match candidate.read(&config.identity) {
                Ok(read) => {
                    let name = candidate.file.display().to_string();
                    for warning in &read.warnings {
                        self.warn(warning, as_json(&name, warning, Severity::Warning));
                    }
                }
                Err(error @ ReadError::Invalid { .. }) => {
                    return self.report_read_error(&error, &candidate.file);
                }
                Err(error) => {
                    let what = format!(
                        "the server would not start on this machine: candidate.rules: {error}"
                    );
                    self.note(&name, &what, CheckResult::HasMistakes);
                }
            }
        }
        if let Some(what) = preflight_warnings(&config) {
            let what = format!("on this machine {what}");
            self.note(&name, &what, CheckResult::HasWarnings);
        }
        let rules = counted(config.rules.len(), "rule");
        // Only Envoy rules in files are checked, because the rules of a control plane are not
        // fetched.
        let Some(RuleOrigin::Files(folder)) = config.envoy.map(|envoy| envoy.rules) else {
            return self.conclude(&name, &rules);
        };
        let loaded = load_files(&folder);
        // Do not report success for a rules file whose Envoy rules cannot be read.
        if let Err(error @ ConfigFilesError::Unreadable { .. }) = loaded {
            let problem = format!("{name}: {}: {error}", key_of(&folder));
            let found = finding_without_line(&name, "unreadable", &problem, Severity::Error);
            return self.report_failure(CheckResult::Unreadable, &problem, [found]);
        }
        self.conclude(&name, &rules);
        let prefix = format!("{}: ", key_of(&folder));
        self.check_envoy(loaded, &folder.path, &prefix);
    }

    fn report_read_error(&mut self, error: &ReadError, file: &Path) {
        let name = file.display().to_string();
        match error {
            ReadError::Invalid { mistakes, .. } => {
                let found = mistakes.iter();
                let found = found.map(|mistake| as_json(&name, mistake, Severity::Error));
                self.report_failure(CheckResult::HasMistakes, error, found);
            }
            _ => {
                let found =
                    finding_without_line(&name, "unreadable", &error.to_string(), Severity::Error);
                self.report_failure(CheckResult::Unreadable, error, [found]);
            }
        }
        if file.is_dir() && self.format == CheckFormat::Text {
            eprint_message("to check a folder of envoyproxy/ratelimit files, pass it with --envoy");
        }
    }

    /// Checks the Envoy rules at `path`. Messages begin with `prefix`.
    fn check_envoy(
        &mut self,
        loaded: Result<LoadedConfig, ConfigFilesError>,
        path: &Path,
        prefix: &str,
    ) {
        let name = path.display().to_string();
        match loaded {
            Ok(loaded) if loaded.domains() == 0 => {
                let problem = format!(
                    "{prefix}{name} contains no file that defines a domain: requests from Envoy would not be limited"
                );
                let found = finding_without_line(&name, "mistake", &problem, Severity::Error);
                self.report_failure(CheckResult::HasMistakes, &problem, [found]);
            }
            Ok(loaded) => {
                for warning in &loaded.warnings {
                    self.warn(warning, of_envoy(warning, Severity::Warning));
                }
                self.conclude(&name, &counted(loaded.domains(), "domain"));
            }
            Err(error) => {
                let problem = format!("{prefix}{error}");
                if let ConfigFilesError::Invalid { mistakes, .. } = &error {
                    let found = mistakes.iter();
                    let found = found.map(|mistake| of_envoy(mistake, Severity::Error));
                    self.report_failure(CheckResult::HasMistakes, &problem, found);
                } else {
                    let found =
                        finding_without_line(&name, "unreadable", &problem, Severity::Error);
                    self.report_failure(CheckResult::Unreadable, &problem, [found]);
                }
            }
        }
    }

    /// Reports a problem with a file or variable that `file` requires on this machine. If the
    /// server is meant to run on this machine, the check's result becomes `result` or worse.
    fn note(&mut self, file: &str, text: &str, result: CheckResult) {
        let severity = match (self.is_this_machine, result) {
            (false, _) => Severity::Note,
            (true, CheckResult::HasWarnings) => Severity::Warning,
            (true, _) => Severity::Error,
        };
        if self.format == CheckFormat::Text {
            match severity {
                Severity::Error => eprint_message(text),
                Severity::Note | Severity::Warning => {
                    eprint_message(&format!("{}: {text}", severity.as_str()));
                }
            }
        }
        self.collected
            .push(finding_without_line(file, "machine", text, severity));
        if self.is_this_machine {
            self.worst = self.worst.max(result);
            match result {
                CheckResult::HasWarnings => self.of_file.warnings += 1,
                _ => self.of_file.obstacles += 1,
            }
        }
    }

    fn warn(&mut self, text: &dyn Display, found: Value) {
        if self.format == CheckFormat::Text {
            eprint_message(&format!("warning: {text}"));
        }
        self.collected.push(found);
        self.worst = self.worst.max(CheckResult::HasWarnings);
        self.of_file.warnings += 1;
    }

    fn report_failure(
        &mut self,
        worst: CheckResult,
        text: &dyn Display,
        found: impl IntoIterator<Item = Value>,
    ) {
        if self.format == CheckFormat::Text {
            eprint_message(&text.to_string());
        }
        self.collected.extend(found);
        self.worst = self.worst.max(worst);
    }

    /// Prints the summary line for a file without errors. `content` describes what the file
    /// contains. The summary must be consistent with the exit code.
    fn conclude(&mut self, file: &str, content: &str) {
        let FileFindings {
            warnings,
            obstacles,
        } = std::mem::take(&mut self.of_file);
        if self.format != CheckFormat::Text {
            return;
        }
        let warned = counted(warnings, "warning");
        if obstacles > 0 {
            eprint_message(&format!(
                "{file}: {content}, no errors, but the server would not start on this machine"
            ));
        } else if warnings > 0 && self.is_strict {
            eprint_message(&format!(
                "{file}: {content}, {warned}; --strict allows no warnings"
            ));
        } else if warnings > 0 {
            print_result(&format!("{file}: {content}, no errors, {warned}"));
        } else {
            print_result(&format!("{file}: {content}, no errors"));
        }
    }
}

/// Returns a finding in `file` as a JSON object with the documented fields.
fn as_json(file: &str, mistake: &Mistake, severity: Severity) -> Value {
    let code = mistake.code().unwrap_or(match severity {
        Severity::Note | Severity::Warning => "warning",
        Severity::Error => "mistake",
    });
    json!({
        "file": file,
        "line": mistake.line,
        "path": mistake.path,
        "code": code,
        "severity": severity.as_str(),
        "message": mistake.problem(),
        "advice": mistake.advice(),
    })
}

/// Returns the key in the rules file whose value is the path of these files.
fn key_of(files: &ConfigFiles) -> &'static str {
    match files.format {
        FileFormat::Ratelimit => "envoy.config",
        FileFormat::Limitador => "envoy.limitador",
    }
}

fn of_envoy(mistake: &FileMistake, severity: Severity) -> Value {
    as_json(&mistake.file, &mistake.mistake, severity)
}

/// Returns a finding in `file` as a JSON object, for a finding without a line number.
fn finding_without_line(file: &str, code: &str, message: &str, severity: Severity) -> Value {
    json!({
        "file": file,
        "line": null,
        "path": "",
        "code": code,
        "severity": severity.as_str(),
        "message": message,
        "advice": null,
    })
}

fn counted(count: usize, what: &str) -> String {
    format!("{count} {what}{}", if count == 1 { "" } else { "s" })
}
