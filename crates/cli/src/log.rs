//! Logging: the operator's filter, silenced libraries, the formats, and a rate limit on log records
//! that clients can cause.

mod throttle;

use std::{fmt, io::IsTerminal};

use tidegate_net::log_throttle::LogThrottle;
use tracing::{Event, Subscriber};
use tracing_subscriber::{
    EnvFilter, Layer,
    fmt::{
        FmtContext, FormatEvent, FormatFields, MakeWriter,
        format::{Format, Json, JsonFields, Writer},
    },
    layer::SubscriberExt as _,
    registry::LookupSpan,
    util::SubscriberInitExt as _,
};

use self::throttle::ThrottledLayer;
use crate::args::LogFormatName;
#[cfg(feature = "telemetry")]
use crate::telemetry::Telemetry;

/// Libraries that log at `warn` or above in response to input from a peer. A library is silenced
/// unless the operator's filter names the library. Without this filter, a client could cause one
/// log record with every 17 bytes that it sends.
const QUIET: [&str; 7] = [
    "h2",
    "hyper",
    "hyper_util",
    "rustls",
    "tokio_rustls",
    "tonic",
    "tower",
];

/// Starts logging. Records that pass `filter` are written to standard error in this `format`, and
/// passed to the exporters in `telemetry`.
pub(crate) fn start(
    filter: &str,
    format: LogFormatName,
    #[cfg(feature = "telemetry")] telemetry: &Telemetry,
) -> Result<(), String> {
    // Parse the operator's filter alone first, so that error messages do not contain the added
    // directives.
    let parse = |filter: &str| {
        EnvFilter::try_new(filter).map_err(|error| {
            format!(
                "--log: \"{filter}\": {error}; use error, warn, info or debug, or a filter such as tidegate=debug"
            )
        })
    };
    parse(filter)?;
    let registry = tracing_subscriber::registry();
    #[cfg(feature = "telemetry")]
    let registry = registry.with(telemetry.trace_layer());
    let is_terminal = format == LogFormatName::Text && std::io::stderr().is_terminal();
    let stderr = layer(format, is_terminal, std::io::stderr);
    #[cfg(feature = "telemetry")]
    let outputs: Vec<BoxedLayer<_>> = [stderr]
        .into_iter()
        .chain(telemetry.log_layer().map(Layer::boxed))
        .collect();
    #[cfg(not(feature = "telemetry"))]
    let outputs: Vec<BoxedLayer<_>> = vec![stderr];
    // The throttle comes after the filter, so that it counts only records that pass the filter.
    let log = ThrottledLayer::new(outputs, LogThrottle::real());
    let log = log.with_filter(parse(&with_quiet_libraries(filter))?);
    registry.with(log).init();
    Ok(())
}

type BoxedLayer<S> = Box<dyn Layer<S> + Send + Sync>;

/// Returns the layer that writes records in `format`.
fn layer<S, W>(format: LogFormatName, has_colors: bool, writer: W) -> BoxedLayer<S>
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    W: for<'w> MakeWriter<'w> + Send + Sync + 'static,
{
    let layer = tracing_subscriber::fmt::layer()
        .with_writer(writer)
        .with_ansi(has_colors);
    match format {
        LogFormatName::Text => layer.boxed(),
        LogFormatName::Json => layer
            .fmt_fields(JsonFields::new())
            .event_format(JsonFormat(Format::default().json().flatten_event(true)))
            .boxed(),
    }
}

/// Returns `filter` with additional directives, which silence the libraries in [`QUIET`] that
/// `filter` does not name.
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
    // Decision spans are exported, but are not part of the log.
    format!("{filter},{}=off", tidegate_limiter::trace::TARGET)
}

/// The JSON format. An event's field `data` is written as an object instead of a string.
struct JsonFormat(Format<Json>);

impl<S, N> FormatEvent<S, N> for JsonFormat
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
        if event.metadata().target() != tidegate_limiter::events::LOG_TARGET {
            return self.0.format_event(context, writer, event);
        }
        // `tracing` fields cannot be objects, so `data` is a string that contains JSON.
        let mut line = String::new();
        self.0
            .format_event(context, Writer::new(&mut line), event)?;
        match with_object(&line) {
            Some(line) => writeln!(writer, "{line}"),
            None => writer.write_str(&line),
        }
    }
}

/// Returns `line` with the field `data` as an object; `None` if the line or its `data` is not JSON.
fn with_object(line: &str) -> Option<serde_json::Value> {
    let mut record: serde_json::Value = serde_json::from_str(line).ok()?;
    let data = serde_json::from_str(record["data"].as_str()?).ok()?;
    record["data"] = data;
    Some(record)
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
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().unwrap().extend_from_slice(bytes);
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    /// Logs 100 records at once, a record from another call site, and a late record, to two outputs
    /// in `format`. Checks that both logs are equal, and returns one of them.
    fn flooded(format: LogFormatName) -> String {
        let at_secs = |secs: u64| Timestamp::from_micros(secs * 1_000_000);
        let clock = Clock::manual(at_secs(1_000));
        let logs = [Log::default(), Log::default()];
        let outputs: Vec<BoxedLayer<_>> = logs
            .iter()
            .map(|log| {
                let log = log.clone();
                layer(format, false, move || log.clone())
            })
            .collect();
        let throttled = ThrottledLayer::new(outputs, LogThrottle::new(clock.clone()));
        // The record that reports suppressed records has the level `info`, but is written despite
        // this filter.
        let subscriber = tracing_subscriber::registry()
            .with(throttled.with_filter(tracing_subscriber::filter::LevelFilter::WARN));
        let attack = || tracing::warn!("wrong");
        tracing::subscriber::with_default(subscriber, || {
            (0..100).for_each(|_| attack());
            tracing::warn!("another");
            clock.set(at_secs(2_000));
            attack();
        });
        let [one, other] = logs.map(|log| {
            let log = log.0.lock().unwrap().clone();
            String::from_utf8(log).unwrap()
        });
        let without_times = |log: &str| -> Vec<String> {
            let lines = log.lines().map(|line| {
                let words = line.split([' ', ',']);
                let words = words.filter(|word| !word.contains('T') || !word.contains('Z'));
                words.collect::<Vec<_>>().join(" ")
            });
            lines.collect()
        };
        assert_eq!(without_times(&one), without_times(&other));
        one
    }

    #[test]
    fn the_data_of_an_event_is_an_object_in_a_json_log() {
        let log = Log::default();
        let writer = log.clone();
        let json = layer(LogFormatName::Json, false, move || writer.clone());
        let subscriber = tracing_subscriber::registry().with(json);
        tracing::subscriber::with_default(subscriber, || {
            let data = serde_json::json!({"rule": "r", "key": ["a\"b"], "policy": null});
            tracing::info!(target: "tidegate::events", event = "key.denied", %data, "denied");
            tracing::info!(data = "{}", "another module");
        });
        let log = String::from_utf8(log.0.lock().unwrap().clone()).unwrap();
        let lines: Vec<serde_json::Value> = log
            .lines()
            .map(|line| serde_json::from_str(line).unwrap())
            .collect();
        assert_eq!(lines.len(), 2, "{log}");
        assert_eq!(lines[0]["data"]["key"][0], "a\"b");
        assert_eq!(
            (&lines[0]["event"], &lines[0]["message"]),
            (&"key.denied".into(), &"denied".into())
        );
        assert!(lines[0]["timestamp"].is_string(), "{log}");
        assert_eq!(lines[1]["data"], "{}");
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
        // The burst of 30 records, the record from another call site, the record with the number of
        // suppressed records, and the late record.
        assert_eq!(lines.len(), 33, "{log}");
        assert!(
            lines[31].ends_with(
                "INFO tidegate::log: suppressed records similar to the next one suppressed=70 \
                 suppressed_target=\"tidegate::log::tests\""
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
