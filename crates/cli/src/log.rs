//! Logging: the operator's filter, silenced libraries, and a rate limit on records that clients can
//! cause.

use std::{fmt, io::IsTerminal};

use tidegate_net::log_throttle::{LogThrottle, ThrottleDecision};
use tracing::{Event, Level, Subscriber, callsite::Identifier};
use tracing_subscriber::{
    EnvFilter,
    fmt::{
        FmtContext, FormatEvent, FormatFields,
        format::{Format, Writer},
        time::{FormatTime, SystemTime},
    },
    registry::LookupSpan,
};

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

/// Starts logging to standard error with this `filter`.
pub(crate) fn to_stderr(filter: &str) -> Result<(), String> {
    // Parse the operator's filter alone first, so that error messages do not show the additions.
    let parse = |filter: &str| {
        EnvFilter::try_new(filter).map_err(|error| {
            format!(
                "--log: {error}; use error, warn, info or debug, or a filter such as tidegate=debug"
            )
        })
    };
    parse(filter)?;
    tracing_subscriber::fmt()
        .with_env_filter(parse(&with_quiet_libraries(filter))?)
        .with_writer(std::io::stderr)
        .with_ansi(std::io::stderr().is_terminal())
        .event_format(ThrottledFormat {
            format: Format::default(),
            throttle: LogThrottle::real(),
        })
        .init();
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
    quiet.fold(filter.to_owned(), |filter, library| {
        format!("{filter},{library}=off")
    })
}

/// A formatter that writes only the records that a [`LogThrottle`] admits.
struct ThrottledFormat {
    format: Format,
    throttle: LogThrottle<Identifier>,
}

impl<S, N> FormatEvent<S, N> for ThrottledFormat
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    N: for<'a> FormatFields<'a> + 'static,
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
                    SystemTime.format_time(&mut writer)?;
                    writeln!(
                        writer,
                        "  INFO tidegate::log: suppressed records like the next one suppressed={suppressed} target={}",
                        metadata.target()
                    )?;
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

    #[test]
    fn the_next_record_reports_how_many_were_suppressed() {
        let at_secs = |secs: u64| Timestamp::from_micros(secs * 1_000_000);
        let (log, clock) = (Log::default(), Clock::manual(at_secs(1_000)));
        let writer = log.clone();
        let subscriber = tracing_subscriber::fmt()
            .with_writer(move || writer.clone())
            .with_ansi(false)
            .event_format(ThrottledFormat {
                format: Format::default(),
                throttle: LogThrottle::new(clock.clone()),
            })
            .finish();
        let attack = || tracing::warn!("wrong");
        tracing::subscriber::with_default(subscriber, || {
            (0..100).for_each(|_| attack());
            tracing::warn!("another");
            clock.set(at_secs(2_000));
            attack();
        });
        let log = String::from_utf8(log.0.lock().unwrap().clone()).unwrap();
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
