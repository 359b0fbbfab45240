//! Export of traces, metrics and logs over OTLP (OpenTelemetry), configured by the standard
//! `OTEL_*` variables. Nothing runs unless an endpoint is set.
//!
//! The exporters have their own threads and bounded queues. Decisions never wait for the exporters.
//! If a queue is full, further records are dropped and counted.

mod counts;
mod http_client;
mod metrics;
mod variables;

use std::{sync::Arc, thread, time::Duration};

use http::{HeaderMap, HeaderValue};
use opentelemetry::{
    Context, KeyValue,
    propagation::TextMapPropagator as _,
    trace::{TraceContextExt as _, TracerProvider as _},
};
use opentelemetry_appender_tracing::layer::OpenTelemetryTracingBridge;
use opentelemetry_http::{HeaderExtractor, HeaderInjector};
use opentelemetry_otlp::{LogExporter, SpanExporter, WithHttpConfig as _};
use opentelemetry_sdk::{
    Resource,
    error::OTelSdkError,
    logs::{BatchLogProcessor, SdkLoggerProvider},
    propagation::TraceContextPropagator,
    trace::{BatchSpanProcessor, SdkTracer, SdkTracerProvider},
};
use tidegate_limiter::trace::{self, Propagator};
use tidegate_server::serve::ServerHandle;
use tracing::{Span, Subscriber};
use tracing_opentelemetry::{OpenTelemetryLayer, OpenTelemetrySpanExt as _};
use tracing_subscriber::{
    Layer,
    filter::{LevelFilter, Targets},
    registry::LookupSpan,
};

use self::{
    counts::{ExportCounts, RecordCounter},
    http_client::UreqClient,
    metrics::{MetricsExporter, MetricsSettings},
    variables::{Signal, Variables},
};

/// The maximum time that the server spends on flushing the export queues when it stops.
const FLUSH_TIMEOUT: Duration = Duration::from_secs(5);

/// The running exporters.
#[derive(Debug, Default)]
pub(crate) struct Telemetry {
    traces: Option<SdkTracerProvider>,
    logs: Option<SdkLoggerProvider>,
    /// The settings of the metrics export; `None` once the export has started.
    metrics: Option<MetricsSettings>,
    exporter: Option<MetricsExporter>,
    counts: Arc<ExportCounts>,
    /// The warnings about environment variables. The warnings are kept until logging has started.
    warnings: Vec<String>,
}

impl Telemetry {
    /// Starts the exporters that the environment configures.
    ///
    /// # Errors
    ///
    /// Returns a message with a suggested fix if a variable has an unsupported value.
    pub(crate) fn start() -> Result<Self, String> {
        let variables = Variables::of_process();
        let mut telemetry = Self::default();
        if variables.is_exported(Signal::Traces)? {
            telemetry.traces = Some(telemetry.start_traces(&variables)?);
        }
        if variables.is_exported(Signal::Logs)? {
            telemetry.logs = Some(telemetry.start_logs(&variables)?);
        }
        if variables.is_exported(Signal::Metrics)? {
            telemetry.metrics = Some(MetricsSettings {
                url: variables.url(Signal::Metrics)?,
                headers: variables.headers(Signal::Metrics)?,
                interval: variables.metrics_interval()?,
                timeout: variables.timeout(Signal::Metrics)?,
                resource: resource(&variables),
            });
        }
        if telemetry.traces.is_some() {
            trace::enable(Box::new(TraceContext::default()));
        }
        Ok(telemetry)
    }

    fn start_traces(&mut self, variables: &Variables) -> Result<SdkTracerProvider, String> {
        let signal = Signal::Traces;
        variables.url(signal)?;
        let timeout = variables.timeout(signal)?;
        let (sampler, warning) = variables.sampler();
        self.warnings.extend(warning);
        let exporter = SpanExporter::builder()
            .with_http()
            .with_http_client(UreqClient::new(signal, timeout, &self.counts))
            .build()
            .map_err(|error| unusable(signal, &error))?;
        let exporter = RecordCounter::new(exporter, &self.counts);
        let processor = BatchSpanProcessor::builder(exporter).build();
        Ok(SdkTracerProvider::builder()
            .with_resource(resource(variables))
            .with_sampler(sampler)
            .with_span_processor(RecordCounter::new(processor, &self.counts))
            .build())
    }

    fn start_logs(&self, variables: &Variables) -> Result<SdkLoggerProvider, String> {
        let signal = Signal::Logs;
        variables.url(signal)?;
        let timeout = variables.timeout(signal)?;
        let exporter = LogExporter::builder()
            .with_http()
            .with_http_client(UreqClient::new(signal, timeout, &self.counts))
            .build()
            .map_err(|error| unusable(signal, &error))?;
        let exporter = RecordCounter::new(exporter, &self.counts);
        let processor = BatchLogProcessor::builder(exporter).build();
        Ok(SdkLoggerProvider::builder()
            .with_resource(resource(variables))
            .with_log_processor(RecordCounter::new(processor, &self.counts))
            .build())
    }

    /// Returns the layer that passes decision spans to the exporter.
    pub(crate) fn trace_layer<S>(&self) -> Option<impl Layer<S> + use<S>>
    where
        S: Subscriber + for<'a> LookupSpan<'a>,
    {
        let tracer = self.traces.as_ref()?.tracer("tidegate");
        let layer: OpenTelemetryLayer<S, SdkTracer> = OpenTelemetryLayer::new(tracer)
            .with_location(false)
            .with_threads(false)
            .with_target(false)
            .with_tracked_inactivity(false);
        let spans = Targets::new().with_target(trace::TARGET, LevelFilter::INFO);
        Some(layer.with_filter(spans))
    }

    /// Returns the layer that passes log records to the exporter.
    pub(crate) fn log_layer<S>(&self) -> Option<impl Layer<S> + use<S>>
    where
        S: Subscriber + for<'a> LookupSpan<'a>,
    {
        self.logs.as_ref().map(OpenTelemetryTracingBridge::new)
    }

    /// Logs the warnings about environment variables.
    pub(crate) fn log_warnings(&mut self) {
        for warning in self.warnings.drain(..) {
            tracing::warn!("{warning}");
        }
    }

    /// Starts the metrics export for `server`, and adds the record counts to the server's metrics.
    pub(crate) fn observe(&mut self, server: &ServerHandle) {
        if self.traces.is_some() || self.logs.is_some() || self.metrics.is_some() {
            let counts = Arc::clone(&self.counts);
            server
                .metrics()
                .show(move |page| counts::collect(&counts, page));
        }
        self.exporter = self.metrics.take().map(|settings| {
            let counts = Arc::clone(&self.counts);
            MetricsExporter::start(settings, server.metrics_page(), counts)
        });
    }

    /// Flushes the queues, waiting at most [`FLUSH_TIMEOUT`], and stops the exporters.
    pub(crate) fn stop(self) {
        let Self {
            traces,
            logs,
            exporter,
            ..
        } = self;
        // The exporters stop concurrently, so that they share one timeout.
        let is_timeout = |result| matches!(result, Err(OTelSdkError::Timeout(_)));
        let has_timed_out = thread::scope(|scope| {
            let traces = traces.map(|traces| {
                scope.spawn(move || is_timeout(traces.shutdown_with_timeout(FLUSH_TIMEOUT)))
            });
            let logs = logs.map(|logs| {
                scope.spawn(move || is_timeout(logs.shutdown_with_timeout(FLUSH_TIMEOUT)))
            });
            let metrics = exporter.is_some_and(|exporter| !exporter.stop(FLUSH_TIMEOUT));
            let threads = [traces, logs].into_iter().flatten();
            let others = threads.map(|thread| thread.join().unwrap_or(false));
            others.fold(metrics, |any, one| any | one)
        });
        // The exporters have already logged all errors except timeouts.
        if has_timed_out {
            tracing::warn!(
                "shutdown: not all telemetry could be exported within {} s, and the rest is lost; check the collector",
                FLUSH_TIMEOUT.as_secs()
            );
        }
    }
}

/// Returns the OpenTelemetry resource to which all records belong. The attributes of the resource
/// come from `OTEL_SERVICE_NAME` and `OTEL_RESOURCE_ATTRIBUTES`. In addition, the resource has the
/// program version and an instance ID.
fn resource(variables: &Variables) -> Resource {
    let mut resource = Resource::builder()
        .with_attribute(KeyValue::new("service.version", env!("CARGO_PKG_VERSION")));
    if !variables.has_service_name() {
        resource = resource.with_service_name("tidegate");
    }
    // Without an instance ID, the metrics of all servers in a fleet would be merged into one time
    // series.
    if !variables.has_resource_attribute("service.instance.id") {
        let id = KeyValue::new("service.instance.id", tidegate_limiter::random_server_id());
        resource = resource.with_attribute(id);
    }
    resource.build()
}

fn unusable(signal: Signal, error: &dyn std::error::Error) -> String {
    format!(
        "cannot export {} over OTLP: {error}; check the variables OTEL_EXPORTER_OTLP_*",
        signal.as_str()
    )
}

/// Reads and writes the trace context in the headers `traceparent` and `tracestate`.
#[derive(Debug, Default)]
struct TraceContext(TraceContextPropagator);

impl Propagator for TraceContext {
    fn extract(&self, headers: &HeaderMap, span: &Span) {
        let parent = self
            .0
            .extract_with_context(&Context::new(), &HeaderExtractor(headers));
        // The call fails only if the span is disabled.
        let _ = span.set_parent(parent);
    }

    fn inject(&self, span: &Span, headers: &mut HeaderMap) {
        self.0
            .inject_context(&span.context(), &mut HeaderInjector(headers));
        // The propagator may write an empty `tracestate`, which W3C Trace Context advises against,
        // so it is removed.
        if headers.get("tracestate").is_some_and(HeaderValue::is_empty) {
            headers.remove("tracestate");
        }
    }

    fn trace_id(&self, span: &Span) -> Option<String> {
        let context = span.context();
        let span = context.span();
        let context = span.span_context();
        let is_exported = context.is_valid() && context.is_sampled();
        is_exported.then(|| context.trace_id().to_string())
    }
}
