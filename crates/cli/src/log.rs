//! Logging: the operator's filter, silenced libraries, and a rate limit on records that clients can
//! cause.

use std::{fmt, io::IsTerminal};

use tidegate_net::log_throttle::{Admission, LogThrottle};
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

/// Libraries that log peer input at `warn` and above. They are silent unless the operator's filter
/// names them: otherwise, a client could cause one record for every 17 bytes that it sends.
const QUIET: [&str; 7] = [
    "h2",
    "hyper",
    "hyper_util",
    "rustls",
    "tokio_rustls",
    "tonic",
    "tower",
];

/// Modules that only log operator actions: the start and reloads. They are not throttled, because a
/// file may have hundreds of warnings.
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
            Admission::Suppress => Ok(()),
            Admission::Write { suppressed } => {
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
    use super::*;

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
