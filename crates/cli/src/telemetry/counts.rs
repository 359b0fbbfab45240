//! Counts exported and lost records.

use std::{
    fmt,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::Duration,
};

use opentelemetry::{Context, InstrumentationScope};
use opentelemetry_sdk::{
    Resource,
    error::OTelSdkResult,
    logs::{LogBatch, LogExporter, LogProcessor, SdkLogRecord},
    trace::{Span, SpanData, SpanExporter, SpanProcessor},
};
use tidegate_net::prometheus::{Metric, Page};

use super::variables::Signal;

const RECORDS: Metric<2> = Metric::counter(
    "tidegate_otlp_records_total",
    ["signal", "state"],
    "Spans, log records and metric data points for the OpenTelemetry collector, by state.",
);

/// The record counts of all signals.
#[derive(Debug, Default)]
pub(crate) struct ExportCounts {
    traces: SignalCounts,
    logs: SignalCounts,
    metrics: SignalCounts,
}

/// The record counts of one signal.
#[derive(Debug, Default)]
pub(super) struct SignalCounts {
    /// The number of records that were passed to the export queue.
    recorded: AtomicU64,
    /// The number of records that a collector has accepted.
    sent: AtomicU64,
    /// The number of records that could not be sent or that a collector has rejected.
    failed: AtomicU64,
    is_failing: AtomicBool,
    /// The collector's rejection of some records of the current export, if there was one.
    rejection: Mutex<Option<Rejection>>,
}

/// A partial success: the collector has accepted an export, but rejected some of its records.
#[derive(Debug)]
struct Rejection {
    records: u64,
    message: String,
}

impl SignalCounts {
    /// Counts an export of `records` records. Writes to the log when exports begin to fail, and
    /// when exports succeed again.
    fn count_export<E: fmt::Display>(&self, signal: &str, records: usize, error: Option<&E>) {
        let records = u64::try_from(records).unwrap_or(u64::MAX);
        let rejection = self.rejection().take();
        let rejected = rejection.as_ref().map_or(0, |rejection| rejection.records);
        let (failed, problem) = match (error, rejection) {
            (Some(error), _) => (records, Some(error.to_string())),
            (None, Some(Rejection { message, .. })) => {
                let problem = format!("the collector rejected {rejected} of {records}: {message}");
                (rejected.min(records), Some(problem))
            }
            (None, None) => (0, None),
        };
        let was_failing = self.is_failing.swap(problem.is_some(), Ordering::Relaxed);
        match problem {
            Some(error) if !was_failing => tracing::warn!(
                "cannot export {signal} over OTLP: {error}; check OTEL_EXPORTER_OTLP_ENDPOINT and the collector \
                 (further failures are not logged until an export succeeds)"
            ),
            None if was_failing => tracing::info!("{signal} are exported over OTLP again"),
            _ => {}
        }
        self.failed.fetch_add(failed, Ordering::Relaxed);
        self.sent.fetch_add(records - failed, Ordering::Relaxed);
    }

    /// Notes a partial success: the collector has accepted the current export, but rejected
    /// `records` of its records.
    pub(super) fn note_rejection(&self, records: u64, message: String) {
        *self.rejection() = Some(Rejection { records, message });
    }

    fn rejection(&self) -> MutexGuard<'_, Option<Rejection>> {
        self.rejection
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }
}

impl ExportCounts {
    pub(super) fn of(&self, signal: Signal) -> &SignalCounts {
        match signal {
            Signal::Traces => &self.traces,
            Signal::Logs => &self.logs,
            Signal::Metrics => &self.metrics,
        }
    }

    /// Counts a metrics export of `points` data points.
    pub(super) fn count_metrics(&self, points: usize, error: Option<&String>) {
        let recorded = u64::try_from(points).unwrap_or(u64::MAX);
        self.metrics.recorded.fetch_add(recorded, Ordering::Relaxed);
        self.metrics.count_export("metrics", points, error);
    }
}

/// Adds the record counts to the metrics page.
pub(crate) fn collect(counts: &ExportCounts, page: &mut Page<'_>) {
    let signals = [
        ("traces", &counts.traces),
        ("logs", &counts.logs),
        ("metrics", &counts.metrics),
    ];
    let samples = signals.into_iter().flat_map(|(signal, counts)| {
        [
            ("recorded", &counts.recorded),
            ("sent", &counts.sent),
            ("failed", &counts.failed),
        ]
        .map(|(state, count)| ([signal, state], count.load(Ordering::Relaxed)))
    });
    page.family(&RECORDS, samples);
}

/// Counts the records that pass through `inner`, which is an exporter, or a processor in front of
/// an exporter.
#[derive(Debug)]
pub(super) struct RecordCounter<T> {
    inner: T,
    counts: Arc<ExportCounts>,
}

impl<T> RecordCounter<T> {
    pub(super) fn new(inner: T, counts: &Arc<ExportCounts>) -> Self {
        Self {
            inner,
            counts: Arc::clone(counts),
        }
    }
}

impl<E: SpanExporter> SpanExporter for RecordCounter<E> {
    async fn export(&self, batch: Vec<SpanData>) -> OTelSdkResult {
        let records = batch.len();
        let result = self.inner.export(batch).await;
        self.counts
            .traces
            .count_export("traces", records, result.as_ref().err());
        result
    }

    fn shutdown_with_timeout(&self, timeout: Duration) -> OTelSdkResult {
        self.inner.shutdown_with_timeout(timeout)
    }

    fn set_resource(&mut self, resource: &Resource) {
        self.inner.set_resource(resource);
    }
}

impl<P: SpanProcessor> SpanProcessor for RecordCounter<P> {
    fn on_start(&self, span: &mut Span, context: &Context) {
        self.inner.on_start(span, context);
    }

    fn on_end(&self, span: SpanData) {
        self.counts.traces.recorded.fetch_add(1, Ordering::Relaxed);
        self.inner.on_end(span);
    }

    fn force_flush(&self) -> OTelSdkResult {
        self.inner.force_flush()
    }

    fn shutdown_with_timeout(&self, timeout: Duration) -> OTelSdkResult {
        self.inner.shutdown_with_timeout(timeout)
    }

    fn set_resource(&mut self, resource: &Resource) {
        self.inner.set_resource(resource);
    }
}

impl<E: LogExporter> LogExporter for RecordCounter<E> {
    async fn export(&self, batch: LogBatch<'_>) -> OTelSdkResult {
        let records = batch.iter().count();
        let result = self.inner.export(batch).await;
        self.counts
            .logs
            .count_export("logs", records, result.as_ref().err());
        result
    }

    fn shutdown_with_timeout(&self, timeout: Duration) -> OTelSdkResult {
        self.inner.shutdown_with_timeout(timeout)
    }

    fn set_resource(&mut self, resource: &Resource) {
        self.inner.set_resource(resource);
    }
}

impl<P: LogProcessor> LogProcessor for RecordCounter<P> {
    fn emit(&self, record: &mut SdkLogRecord, scope: &InstrumentationScope) {
        self.counts.logs.recorded.fetch_add(1, Ordering::Relaxed);
        self.inner.emit(record, scope);
    }

    fn force_flush(&self) -> OTelSdkResult {
        self.inner.force_flush()
    }

    fn shutdown_with_timeout(&self, timeout: Duration) -> OTelSdkResult {
        self.inner.shutdown_with_timeout(timeout)
    }

    fn set_resource(&mut self, resource: &Resource) {
        self.inner.set_resource(resource);
    }
}
