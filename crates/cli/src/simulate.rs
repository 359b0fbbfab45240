//! `simulate`: evaluates a rules file on recorded traffic, and reports which requests the rules
//! would deny.

use std::{
    fmt::Write as _,
    fs,
    io::{self, IsTerminal as _, Write as _},
    path::Path,
    process::ExitCode,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread::JoinHandle,
    time::{Duration, Instant},
};

use tidegate_config::{Config, KeyMask, KeyPrivacy, Password};
use tidegate_server::geoip::GeoIp;
use tidegate_simulate::{
    ComparedKey, LogFormat, LogSource, Logs, RuleReport, RulesUnderTest, SimulateError, Simulation,
    SimulationHandle, SimulationReport, as_html, as_yaml, percent,
};
use tokio::signal::unix::{SignalKind, signal};

use crate::{
    args::Simulate,
    output::{eprint_message, print_result},
    print::{headed, instant, printable, wait_ms},
    serve::key_secret,
};

/// The exit code if a larger share of requests is denied than `--fail-over` allows.
const OVER: u8 = 3;

/// The exit code after Ctrl-C, which is the code that shells report for this signal.
const INTERRUPTED: u8 = 130;

/// The interval at which the progress display is updated.
const PROGRESS_INTERVAL: Duration = Duration::from_millis(250);

pub(crate) fn run(args: &Simulate) -> Result<ExitCode, String> {
    let mut rules = read_rules(&args.file)?;
    let mut against = args.against.as_deref().map(read_rules).transpose()?;
    if !args.what_if.is_empty() {
        against = Some(read_rules(&args.file)?);
        for what_if in &args.what_if {
            rules = rules.with_limits(what_if)?;
        }
    }
    let logs = Logs {
        sources: args
            .logs
            .iter()
            .map(|name| LogSource::named(name))
            .collect(),
        format: args.format.clone().unwrap_or(LogFormat::Detect),
        mappings: args.entries.clone(),
    };
    let stdin = logs
        .sources
        .iter()
        .filter(|source| **source == LogSource::Stdin);
    if stdin.count() > 1 {
        return Err("--log: `-` (standard input) is given more than once; give it once".to_owned());
    }
    let sweep = args.sweep.as_ref();
    let sweep = sweep.map(|sweep| rules.candidates(sweep)).transpose()?;
    let KeyMasking {
        mask,
        note: key_note,
    } = key_hash(args, &rules, against.as_ref())?;
    let handle = Arc::new(SimulationHandle::default());
    interrupt_on_signal(&handle);
    let progress = ProgressDisplay::start(&logs, &handle);
    let simulation = Simulation {
        rules: &rules,
        against: against.as_ref(),
        suggest: args.suggest,
        sweep: sweep.as_ref(),
    };
    let report = simulation.run(&logs, &handle);
    drop(progress);
    let mut report = report
        .map_err(|error| printable_lines(&without_keys(error, &mask).to_string()))?
        .masked(&mask);
    report.notes.extend(key_note);
    if let Some(file) = &args.report {
        fs::write(file, as_html(&report))
            .map_err(|error| format!("cannot write the report to {}: {error}", file.display()))?;
    }
    if args.json {
        let json = serde_json::to_string_pretty(&report);
        print_result(&json.map_err(|error| format!("cannot write the report: {error}"))?);
        for warning in &report.warnings {
            eprint_message(&format!("warning: {}", printable(warning)));
        }
    } else {
        print_result(&text(&report));
    }
    if report.interrupted {
        return Ok(ExitCode::from(INTERRUPTED));
    }
    if args.fail_over.is_some()
        && let Some(problem) = undecided(&report)
    {
        return Err(problem);
    }
    Ok(match excess(args, &report) {
        Some(problem) => {
            eprint_message(&problem);
            ExitCode::from(OVER)
        }
        None => ExitCode::SUCCESS,
    })
}

/// Returns a message if the log does not contain enough information to check `--fail-over`.
fn undecided(report: &SimulationReport) -> Option<String> {
    let lines = &report.lines;
    let problem = if lines.cut_off {
        "a log could not be read completely; repair the file"
    } else if lines.damaged * 20 >= lines.read.max(1) {
        "at least 5 % of the lines are damaged; check --format"
    } else if report.rules.iter().all(|rule| rule.requests == 0) {
        "no rule applies to any request; check --format, --entry and the conditions of the rules"
    } else {
        return None;
    };
    Some(format!("--fail-over cannot be evaluated: {problem}"))
}

/// Returns a message if the share of denied requests exceeds the share in `--fail-over`, or if no
/// request was decided. In a comparison, a request that could be decided only with the other rules
/// file counts as newly denied.
fn excess(args: &Simulate, report: &SimulationReport) -> Option<String> {
    let most = args.fail_over?;
    let (what, denied, all) = match &report.comparison {
        Some(comparison) => {
            let refused = comparison.newly_refused;
            let denied = comparison.newly_denied + refused;
            ("newly denied", denied, comparison.compared + refused)
        }
        None => ("denied", report.requests.denied, report.requests.decided),
    };
    if all == 0 {
        let problem = "no request was decided, so --fail-over has nothing to check; look at the \
                       warnings, and check --format and --entry";
        return Some(problem.to_owned());
    }
    most.is_exceeded(denied, all).then(|| {
        let share = percent(denied, all);
        format!(
            "{denied} of {all} requests ({share}) are {what}, more than --fail-over {most} allows"
        )
    })
}

/// Reads a rules file, and the GeoIP databases that it names.
fn read_rules(file: &Path) -> Result<RulesUnderTest, String> {
    let mut config = Config::read(file).map_err(|error| error.to_string())?;
    if config.rules.is_empty() {
        return Err(format!("{} has no rules to simulate", file.display()));
    }
    if !config.geoip.is_empty() {
        let geoip = GeoIp::open(&config.geoip).map_err(|error| {
            format!("{error}; the rules use this database, so they cannot be simulated without it")
        })?;
        config.identity.geoip = Some(geoip.source());
    }
    Ok(RulesUnderTest::new(file.display().to_string(), config))
}

/// How keys appear in the output. If keys are hashed, `note` tells the user with which secret.
struct KeyMasking {
    mask: KeyMask,
    note: Option<String>,
}

/// Returns a mask that hashes keys if `--hash-keys` is given or one of the rules files requires
/// hashed keys.
fn key_hash(
    args: &Simulate,
    rules: &RulesUnderTest,
    against: Option<&RulesUnderTest>,
) -> Result<KeyMasking, String> {
    let files = [Some(rules), against].into_iter().flatten();
    let hashed = KeyPrivacy::Hashed {
        secret: Password::None,
    };
    let mut configured = files
        .map(RulesUnderTest::key_privacy)
        .filter(|privacy| **privacy != KeyPrivacy::Plain);
    let configured = configured.next();
    let Some(privacy) = configured.or_else(|| args.hash_keys.then_some(&hashed)) else {
        return Ok(KeyMasking {
            mask: KeyMask::plain(),
            note: None,
        });
    };
    // A missing secret does not prevent the simulation, because the keys can be hashed with a
    // random secret instead.
    let (secret, problem) = match key_secret(privacy) {
        Ok(secret) => (secret, None),
        Err(problem) => (None, Some(problem)),
    };
    let mask = privacy
        .mask(secret.as_deref())
        .map_err(|error| error.to_string())?;
    let note = match (&secret, problem) {
        (Some(_), _) => {
            "keys are hashed with the secret in the rules file, as in the server's lists".to_owned()
        }
        (None, None) => {
            "keys are hashed with a random secret, so the hashes differ between runs".to_owned()
        }
        (None, Some(problem)) => format!(
            "keys are hashed with a random secret, so the hashes differ between runs: {problem}"
        ),
    };
    Ok(KeyMasking {
        mask,
        note: Some(note),
    })
}

/// Removes the quoted log line from an error if keys are hashed.
fn without_keys(mut error: SimulateError, mask: &KeyMask) -> SimulateError {
    if let SimulateError::UnknownFormat { line, .. } = &mut error
        && mask.is_hashed()
    {
        *line = "(not shown, because keys are hashed)".to_owned();
    }
    error
}

/// Installs a handler for Ctrl-C, after which the simulation ends early and the results so far are
/// reported. If the handler cannot be installed, Ctrl-C ends the program.
fn interrupt_on_signal(handle: &Arc<SimulationHandle>) {
    let handle = Arc::clone(handle);
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build();
    let Ok(runtime) = runtime else { return };
    let signals = runtime.block_on(async { signal(SignalKind::interrupt()) });
    let Ok(mut signals) = signals else { return };
    // If the thread cannot be started, Ctrl-C has no effect, but SIGTERM still ends the program.
    let _ = std::thread::Builder::new()
        .name("signals".to_owned())
        .spawn(move || {
            runtime.block_on(signals.recv());
            handle.interrupt();
        });
}

/// A progress display on the terminal. The progress display disappears when this value is dropped.
struct ProgressDisplay {
    thread: Option<(JoinHandle<()>, Arc<AtomicBool>)>,
}

impl ProgressDisplay {
    #[expect(
        clippy::disallowed_methods,
        reason = "the clock is used only to show the progress"
    )]
    fn start(logs: &Logs, handle: &Arc<SimulationHandle>) -> Self {
        if !io::stderr().is_terminal() {
            return Self { thread: None };
        }
        let sizes: Option<Vec<u64>> = logs.sources.iter().map(LogSource::size).collect();
        let total = sizes.map(|sizes| sizes.iter().sum());
        let (handle, ended) = (Arc::clone(handle), Arc::<AtomicBool>::default());
        let is_ended = Arc::clone(&ended);
        let thread = std::thread::Builder::new().name("progress".to_owned());
        let thread = thread.spawn(move || {
            let start = Instant::now();
            while !is_ended.load(Ordering::Relaxed) {
                std::thread::park_timeout(PROGRESS_INTERVAL);
                let shown = progress(handle.bytes_read(), total, start.elapsed());
                let _ = write!(io::stderr(), "\r\u{1b}[K{shown}");
            }
            let _ = write!(io::stderr(), "\r\u{1b}[K");
        });
        Self {
            thread: thread.ok().map(|thread| (thread, ended)),
        }
    }
}

impl Drop for ProgressDisplay {
    fn drop(&mut self) {
        if let Some((thread, ended)) = self.thread.take() {
            ended.store(true, Ordering::Relaxed);
            thread.thread().unpark();
            let _ = thread.join();
        }
    }
}

/// Returns, for example, `read 12.0 of 40.0 MB (30%), about 20s left`.
fn progress(read: u64, total: Option<u64>, elapsed: Duration) -> String {
    let megabytes = |bytes: u64| format!("{}.{}", bytes / 1_000_000, bytes / 100_000 % 10);
    let Some(total) = total.filter(|total| *total > 0) else {
        return format!("read {} MB", megabytes(read));
    };
    let read = read.min(total);
    let mut shown = format!(
        "read {} of {} MB ({})",
        megabytes(read),
        megabytes(total),
        percent(read, total)
    );
    let left = u128::from(total - read) * elapsed.as_millis() / u128::from(read.max(1));
    if elapsed > Duration::from_secs(2) && read > 0 {
        let left = u64::try_from(left).unwrap_or(u64::MAX);
        let _ = write!(
            shown,
            ", about {} left",
            wait_ms(left.div_ceil(1_000) * 1_000)
        );
    }
    shown
}

/// Formats a report.
fn text(report: &SimulationReport) -> String {
    let mut out = String::new();
    if report.interrupted {
        out.push_str("interrupted: these are the results so far\n");
    }
    for warning in &report.warnings {
        let _ = writeln!(out, "warning: {}", printable(warning));
    }
    let lines = &report.lines;
    let span = match (lines.from_ms, lines.to_ms) {
        (Some(from), Some(to)) => format!(", {} to {}", instant(from), instant(to)),
        _ => String::new(),
    };
    let _ = writeln!(
        out,
        "{} ({}){span}; {} damaged",
        counted(lines.read, "line"),
        lines.formats.join("; "),
        lines.damaged
    );
    for damaged in &lines.damaged_lines {
        let file = printable(&damaged.file);
        let problem = printable(&damaged.problem);
        let _ = writeln!(out, "  {file}, line {}: {problem}", damaged.line);
        let _ = writeln!(out, "    {}", printable(&damaged.text));
    }
    let requests = &report.requests;
    let _ = writeln!(
        out,
        "{} decided, {} denied ({})",
        counted(requests.decided, "request"),
        requests.denied,
        percent(requests.denied, requests.decided)
    );
    if requests.refused > 0 {
        let reasons: Vec<String> = requests
            .refusals
            .iter()
            .map(|text| printable(text))
            .collect();
        let _ = writeln!(
            out,
            "{} that the proxy would reject with status 400: {}",
            counted(requests.refused, "request"),
            reasons.join("; ")
        );
    }
    out.push('\n');
    out.push_str(&rules_table(report));
    out.push_str(&worst_table(report));
    out.push_str(&comparison(report));
    out.push_str(&sweep(report));
    out.push_str(&suggestions(report));
    out.push_str(&frontier(report));
    out.push_str(&notes(report));
    out
}

fn rules_table(report: &SimulationReport) -> String {
    let head = [
        "RULE",
        "MODE",
        "REQUESTS",
        "DENIED",
        "SHARE",
        "KEYS",
        "KEYS DENIED",
        "SHARE",
    ];
    let row = |rule: &RuleReport| {
        if !rule.simulated {
            let mode = rule.mode.to_owned();
            return vec![printable(&rule.rule), mode, "not simulated".to_owned()];
        }
        vec![
            printable(&rule.rule),
            rule.mode.to_owned(),
            rule.requests.to_string(),
            rule.denied.to_string(),
            percent(rule.denied, rule.requests),
            rule.keys.to_string(),
            rule.keys_denied.to_string(),
            percent(rule.keys_denied, rule.keys),
        ]
    };
    headed(&head, report.rules.iter().map(row).collect())
}

fn worst_table(report: &SimulationReport) -> String {
    let head = ["RULE", "KEY", "DENIED", "FIRST", "LAST"];
    let keys = report.rules.iter().flat_map(|rule| {
        rule.worst.iter().map(|worst| {
            let values = worst.key.iter().map(|value| printable(value));
            let values: Vec<String> = values.collect();
            vec![
                printable(&rule.rule),
                if values.is_empty() {
                    "(all)".to_owned()
                } else {
                    values.join(" ")
                },
                worst.denied.to_string(),
                instant(worst.first_ms),
                instant(worst.last_ms),
            ]
        })
    });
    let rows: Vec<Vec<String>> = keys.collect();
    if rows.is_empty() {
        return String::new();
    }
    format!("\nThe keys with the most denials:\n{}", headed(&head, rows))
}

fn key_text(values: &[String]) -> String {
    if values.is_empty() {
        return "(all)".to_owned();
    }
    let values: Vec<String> = values.iter().map(|value| printable(value)).collect();
    values.join(" ")
}

/// Formats the comparison with other rules.
fn comparison(report: &SimulationReport) -> String {
    let Some(comparison) = &report.comparison else {
        return String::new();
    };
    let mut out = format!(
        "\nCompared with {}: {} newly denied ({}), {} no longer denied\n",
        printable(&comparison.against),
        comparison.newly_denied,
        percent(comparison.newly_denied, comparison.compared),
        comparison.no_longer_denied
    );
    let row = |change: &str, key: &ComparedKey| {
        vec![
            change.to_owned(),
            printable(&key.rule),
            key_text(&key.key),
            key.requests.to_string(),
            instant(key.first_ms),
            instant(key.last_ms),
        ]
    };
    let newly = comparison.newly.iter().map(|key| row("newly denied", key));
    let no_longer = comparison
        .no_longer
        .iter()
        .map(|key| row("no longer denied", key));
    let rows: Vec<Vec<String>> = newly.chain(no_longer).collect();
    if !rows.is_empty() {
        out.push_str(&headed(
            &["CHANGE", "RULE", "KEY", "REQUESTS", "FIRST", "LAST"],
            rows,
        ));
    }
    out
}

/// Formats the number of denials for each limit that `--sweep` tries.
fn sweep(report: &SimulationReport) -> String {
    let Some(sweep) = &report.sweep else {
        return String::new();
    };
    let head = [
        "LIMIT",
        "DENIED",
        "SHARE",
        "KEYS DENIED",
        "SHARE",
        "ALL DENIED",
        "SHARE",
        "ALL KEYS DENIED",
        "SHARE",
    ];
    let rows = sweep.values.iter().map(|value| {
        let mut row = vec![value.limit.clone()];
        for (part, whole) in [
            (value.denied, sweep.requests),
            (value.keys_denied, sweep.keys),
            (value.all_denied, sweep.decided),
            (value.all_keys_denied, sweep.all_keys),
        ] {
            row.extend([part.to_string(), percent(part, whole)]);
        }
        row
    });
    let shadow = if sweep.mode == "shadow" {
        ", which is in shadow mode"
    } else {
        ""
    };
    format!(
        "\nDenials by rule {}{shadow}, and by all enforced rules, for each limit of the sweep:\n{}",
        printable(&sweep.rule),
        headed(&head, rows.collect())
    )
}

/// Formats the suggested limits, both as a table and as YAML for a rules file.
fn suggestions(report: &SimulationReport) -> String {
    if report.suggestions.is_empty() {
        return String::new();
    }
    let head = [
        "RULE",
        "WINDOW",
        "KEYS",
        "P50",
        "P90",
        "P99",
        "P99.9",
        "MAX",
        "LIMIT",
        "KEYS DENIED",
    ];
    let rows = report.suggestions.iter().map(|suggestion| {
        let numbers = [
            suggestion.keys,
            suggestion.p50,
            suggestion.p90,
            suggestion.p99,
            suggestion.p99_9,
            suggestion.max,
        ];
        let mut row = vec![printable(&suggestion.rule), wait_ms(suggestion.window_ms)];
        row.extend(numbers.map(|number| number.to_string()));
        row.extend([suggestion.limit.clone(), suggestion.keys_denied.to_string()]);
        row
    });
    format!(
        "\nThe busiest window of each key, and suggested limits:\n{}\n{}",
        headed(&head, rows.collect()),
        as_yaml(&report.suggestions)
    )
}

/// Formats the suggestions for token buckets: several rates, each with its smallest sufficient
/// burst.
fn frontier(report: &SimulationReport) -> String {
    let Some(first) = report.frontier.first() else {
        return String::new();
    };
    let rows = report.frontier.iter().flat_map(|frontier| {
        frontier.points.iter().map(|point| {
            vec![
                printable(&frontier.rule),
                frontier.limit.clone(),
                point.rate.clone(),
                point.burst.to_string(),
                point.limit.clone(),
                point.keys_denied.to_string(),
            ]
        })
    });
    let head = [
        "RULE",
        "IN THE FILE",
        "RATE",
        "BURST",
        "LIMIT",
        "KEYS DENIED",
    ];
    format!(
        "\nFor several rates, the smallest burst that denies at most {} of the keys:\n{}",
        first.share,
        headed(&head, rows.collect())
    )
}

fn notes(report: &SimulationReport) -> String {
    let delays = report
        .rules
        .iter()
        .filter(|rule| rule.delayed > 0)
        .map(|rule| {
            format!(
                "{}: {} delayed, by up to {}",
                rule.rule,
                counted(rule.delayed, "request"),
                wait_ms(rule.longest_delay_ms)
            )
        });
    let of_rules = report.rules.iter().flat_map(|rule| {
        rule.notes
            .iter()
            .map(|note| format!("{}: {note}", rule.rule))
    });
    let all = delays.chain(of_rules).chain(report.notes.iter().cloned());
    let lines: String = all
        .map(|note| format!("- {}\n", printable(&note)))
        .collect();
    format!("\nNotes:\n{lines}")
}

fn counted(count: u64, what: &str) -> String {
    format!("{count} {what}{}", if count == 1 { "" } else { "s" })
}

/// Escapes control characters in each line.
fn printable_lines(text: &str) -> String {
    text.lines().map(printable).collect::<Vec<_>>().join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn progress_estimates_the_rest() {
        let shown = progress(12_000_000, Some(40_000_000), Duration::from_secs(9));
        assert_eq!(shown, "read 12.0 of 40.0 MB (30%), about 21s left");
        assert_eq!(
            progress(12_345_678, None, Duration::from_secs(9)),
            "read 12.3 MB"
        );
        let soon = progress(5, Some(10), Duration::from_millis(1));
        assert_eq!(soon, "read 0.0 of 0.0 MB (50%)");
        let more = progress(50, Some(10), Duration::from_secs(3));
        assert_eq!(more, "read 0.0 of 0.0 MB (100%), about 0ms left");
    }
}
