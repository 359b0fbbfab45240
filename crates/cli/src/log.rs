//! Logging: the operator's filter, silenced libraries, and a rate limit on records that clients can
//! cause.

use std::{fmt, io::IsTerminal};

use tidegate_net::log_throttle::{LogThrottle, ThrottleDecision};
use tracing::{Event, Level, Subscriber, callsite::Identifier};
use tracing_subscriber::{
    EnvFilter, Layer as _,
    fmt::{
        FmtContext, FormatEvent, FormatFields,
        format::{Format, JsonFields, Writer},
        time::{FormatTime, SystemTime},
    },
    layer::SubscriberExt as _,
    registry::LookupSpan,
    util::SubscriberInitExt as _,
};

use crate::args::LogFormatName;
#[cfg(feature = "telemetry")]
use crate::telemetry::Telemetry;

/// Libraries that log peer input at `warn` and above. Such a library is silent unless the
/// operator's filter names it. Otherwise, a client could cause one record for every 17 bytes that
/// the client sends.
const QUIET: [&str; 7] = [
    "h2",
    "hyper",
    "hyper_util",
    "rustls",
    "tokio_rustls",
    "tonic",
    "tower",
];

/// Modules that only log operator actions: the start and reloads. The records of these modules are
/// not throttled, because a file may have hundreds of warnings.
const UNTHROTTLED: [&str; 3] = [
    tidegate_server::serve::LOG_TARGET,
    tidegate_server::reload::LOG_TARGET,
    tidegate_envoy::CONFIG_LOG_TARGET,
];

/// Starts logging to standard error with this `filter`, in this `format`, and to the exporters of
/// `telemetry`.
pub(crate) fn start(
    filter: &str,
    format: LogFormatName,
    #[cfg(feature = "telemetry")] telemetry: &Telemetry,
) -> Result<(), String> {
    // Parse the operator's filter alone first, so that error messages do not show the additions.
    let parse = |filter: &str| {
        EnvFilter::try_new(filter).map_err(|error| {
            format!(
                "--log: {error}; use error, warn, info or debug, or a filter such as tidegate=debug"
            )
        })
    };
    parse(filter)?;
    let is_terminal = format == LogFormatName::Text && std::io::stderr().is_terminal();
    let logger = tracing_subscriber::fmt::layer()
        .with_writer(std::io::stderr)
        .with_ansi(is_terminal);
    let throttle = LogThrottle::real();
    let logger = match format {
        LogFormatName::Text => {
            let format = Format::default();
            let note = note_as_text;
            logger
                .event_format(ThrottledFormat {
                    format,
                    note,
                    throttle,
                })
                .boxed()
        }
        LogFormatName::Json => {
            let format = Format::default().json().flatten_event(true);
            let note = note_as_json;
            let format = ThrottledFormat {
                format,
                note,
                throttle,
            };
            logger
                .fmt_fields(JsonFields::new())
                .event_format(format)
                .boxed()
        }
    };
    let filter = || parse(&with_quiet_libraries(filter));
    let registry = tracing_subscriber::registry().with(logger.with_filter(filter()?));
    #[cfg(feature = "telemetry")]
    let registry = {
        let logs = telemetry.log_layer();
        let logs = logs.map(|logs| Ok::<_, String>(logs.with_filter(filter()?)));
        registry
            .with(logs.transpose()?)
            .with(telemetry.trace_layer())
    };
    registry.init();
    Ok(())
}

/// Returns `filter` with directives that silence each library in [`QUIET`] that `filter` does not
/// name.
fn with_quiet_libraries(filter: &str) -> String {
    let is_named = |library: &str| {
        filter.split(',').any(|directive| {
            let rest = directive.trim().strip_prefix(library);
            rest.is_some_and(|rest| rest.is_empty() || rest.starts_with(['=', ':', '[']))
        })
    };
    let quiet = QUIET.iter().filter(|library| !is_named(library));
    let filter = quiet.fold(filter.to_owned(), |filter, library| {
        format!("{filter},{library}=off")
    });
    // The spans of decisions are exported, and are not part of the log.
    format!("{filter},{}=off", tidegate_limiter::trace::TARGET)
}

/// Writes the number of suppressed records of a log target.
type WriteNote = fn(&mut Writer<'_>, Suppressed<'_>) -> fmt::Result;

/// The number of records of one log target that were suppressed since the last one.
#[derive(Clone, Copy, Debug)]
struct Suppressed<'t> {
    records: u64,
    target: &'t str,
}

const SUPPRESSED: &str = "suppressed records like the next one";

fn note_as_text(writer: &mut Writer<'_>, suppressed: Suppressed<'_>) -> fmt::Result {
    let Suppressed { records, target } = suppressed;
    SystemTime.format_time(writer)?;
    writeln!(
        writer,
        "  INFO tidegate::log: {SUPPRESSED} suppressed={records} target={target}"
    )
}

fn note_as_json(writer: &mut Writer<'_>, suppressed: Suppressed<'_>) -> fmt::Result {
    let Suppressed { records, target } = suppressed;
    let mut time = String::new();
    SystemTime.format_time(&mut Writer::new(&mut time))?;
    let note = serde_json::json!({
        "timestamp": time,
        "level": "INFO",
        "message": SUPPRESSED,
        "suppressed": records,
        "suppressed_target": target,
        "target": "tidegate::log",
    });
    writeln!(writer, "{note}")
}

/// A formatter that writes only the records that a [`LogThrottle`] admits.
struct ThrottledFormat<F> {
    format: F,
    note: WriteNote,
    throttle: LogThrottle<Identifier>,
}

impl<S, N, F> FormatEvent<S, N> for ThrottledFormat<F>
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    N: for<'a> FormatFields<'a> + 'static,
    F: FormatEvent<S, N>,
{
    fn format_event(
        &self,
        context: &FmtContext<'_, S, N>,
        mut writer: Writer<'_>,
        event: &Event<'_>,
    ) -> fmt::Result {
        let metadata = event.metadata();
        // At `debug` and `trace` level, operators want every record.
        let is_verbose = *metadata.level() > Level::INFO;
        if is_verbose || UNTHROTTLED.contains(&metadata.target()) {
            return self.format.format_event(context, writer, event);
        }
        match self.throttle.admit(metadata.callsite()) {
            // With an empty buffer, the writer writes no record.
            ThrottleDecision::Suppress => Ok(()),
            ThrottleDecision::Write { suppressed } => {
                if suppressed > 0 {
                    let target = metadata.target();
                    let suppressed = Suppressed {
                        records: suppressed,
                        target,
                    };
                    (self.note)(&mut writer, suppressed)?;
                }
                self.format.format_event(context, writer, event)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{
        io,
        sync::{Arc, Mutex},
    };

    use tidegate::Clock;
    use tidegate_core::Timestamp;

    use super::*;

    /// A log in memory.
    #[derive(Clone, Default)]
    struct Log(Arc<Mutex<Vec<u8>>>);

    impl io::Write for Log {
        fn write(&mut self, octets: &[u8]) -> io::Result<usize> {
            self.0.lock().unwrap().extend_from_slice(octets);
            Ok(octets.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    /// Logs 100 records at once and another later. Returns the log.
    fn flooded(format: LogFormatName) -> String {
        let at_secs = |secs: u64| Timestamp::from_micros(secs * 1_000_000);
        let (log, clock) = (Log::default(), Clock::manual(at_secs(1_000)));
        let writer = log.clone();
        let throttle = LogThrottle::new(clock.clone());
        let logger = tracing_subscriber::fmt()
            .with_writer(move || writer.clone())
            .with_ansi(false);
        let subscriber: Box<dyn Subscriber + Send + Sync> = match format {
            LogFormatName::Text => {
                let (format, note) = (Format::default(), note_as_text as WriteNote);
                Box::new(
                    logger
                        .event_format(ThrottledFormat {
                            format,
                            note,
                            throttle,
                        })
                        .finish(),
                )
            }
            LogFormatName::Json => {
                let format = Format::default().json().flatten_event(true);
                let format = ThrottledFormat {
                    format,
                    note: note_as_json,
                    throttle,
                };
                Box::new(
                    logger
                        .fmt_fields(JsonFields::new())
                        .event_format(format)
                        .finish(),
                )
            }
        };
        let attack = || tracing::warn!("wrong");
        tracing::subscriber::with_default(subscriber, || {
            (0..100).for_each(|_| attack());
            tracing::warn!("another");
            clock.set(at_secs(2_000));
            attack();
        });
        let log = log.0.lock().unwrap().clone();
        String::from_utf8(log).unwrap()
    }

    #[test]
    fn every_line_of_a_json_log_is_an_object() {
        let log = flooded(LogFormatName::Json);
        let lines: Vec<serde_json::Value> = log
            .lines()
            .map(|line| serde_json::from_str(line).unwrap())
            .collect();
        assert_eq!(lines.len(), 33, "{log}");
        let note = &lines[31];
        assert_eq!(note["suppressed"], 70);
        assert_eq!(note["suppressed_target"], "tidegate::log::tests");
        for line in &lines {
            assert!(
                line["timestamp"].is_string() && line["message"].is_string(),
                "{line}"
            );
        }
        assert_eq!(
            (&lines[32]["level"], &lines[32]["message"]),
            (&"WARN".into(), &"wrong".into())
        );
    }

    #[test]
    fn the_next_record_reports_how_many_were_suppressed() {
        let log = flooded(LogFormatName::Text);
        let lines: Vec<&str> = log.lines().collect();
        // The burst of 30 records, the record of another call site, the number of suppressed
        // records, and the late record.
        assert_eq!(lines.len(), 33, "{log}");
        assert!(
            lines[31].ends_with(
                "INFO tidegate::log: suppressed records like the next one suppressed=70 \
                 target=tidegate::log::tests"
            ),
            "{log}"
        );
        assert!(
            lines[32].ends_with("WARN tidegate::log::tests: wrong"),
            "{log}"
        );
    }

    #[test]
    fn libraries_are_silent_unless_the_filter_names_them() {
        let all = with_quiet_libraries("info");
        assert!(
            all.starts_with("info,h2=off,hyper=off,hyper_util=off,"),
            "{all}"
        );
        let named = with_quiet_libraries("warn, h2=debug,rustls::msgs=trace,hyper");
        for library in ["h2=off", "rustls=off", "hyper=off"] {
            assert!(!named.split(',').any(|part| part == library), "{named}");
        }
        assert!(named.contains(",hyper_util=off"), "{named}");
    }
}
