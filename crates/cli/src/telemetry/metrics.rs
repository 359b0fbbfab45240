//! Metrics export: the Prometheus page, converted to OTLP.
//!
//! The page is the only source of metrics, so names and values are the same in Prometheus and OTLP.

use std::{
    sync::{Arc, mpsc},
    thread,
    time::Duration,
};

use http::{HeaderMap, Method, Request, Uri, header::CONTENT_TYPE};
use opentelemetry_proto::tonic::{
    collector::metrics::v1::ExportMetricsServiceRequest,
    common::v1::{AnyValue, InstrumentationScope, KeyValue, any_value},
    metrics::v1::{
        AggregationTemporality, Gauge, Histogram, HistogramDataPoint, Metric, NumberDataPoint,
        ResourceMetrics, ScopeMetrics, Sum, metric::Data, number_data_point::Value,
    },
    resource::v1::Resource as ProtoResource,
};
use opentelemetry_sdk::Resource;
use prost::Message as _;
use tidegate_net::prometheus::Format;
use tidegate_server::MetricsPage;

use super::{counts::ExportCounts, http_client::UreqClient, variables::Signal};

/// The settings of the metrics export.
#[derive(Debug)]
pub(super) struct MetricsSettings {
    pub(super) url: Uri,
    pub(super) headers: HeaderMap,
    pub(super) interval: Duration,
    pub(super) timeout: Duration,
    pub(super) resource: Resource,
}

/// A thread that exports the metrics periodically, and once more when it stops.
#[derive(Debug)]
pub(super) struct MetricsExporter {
    stop: mpsc::Sender<()>,
    /// This channel never carries a message, and is disconnected when the thread finishes.
    ended: mpsc::Receiver<()>,
}

impl MetricsExporter {
    pub(super) fn start(
        settings: MetricsSettings,
        page: MetricsPage,
        counts: Arc<ExportCounts>,
    ) -> Self {
        let (stop, stopped) = mpsc::channel();
        let (end, ended) = mpsc::channel();
        thread::spawn(move || {
            // Dropping `end` when the thread finishes disconnects the channel.
            let _end = end;
            let client = UreqClient::new(Signal::Metrics, settings.timeout, &counts);
            let start = unix_nanos(&page);
            loop {
                let waited = stopped.recv_timeout(settings.interval);
                let is_stopping = waited != Err(mpsc::RecvTimeoutError::Timeout);
                let metrics = metrics(&page.encode(Format::Text), start, unix_nanos(&page));
                let points = metrics.iter().map(points).sum();
                let result = export(&settings, &client, metrics);
                counts.count_metrics(points, result.as_ref().err());
                if is_stopping {
                    return;
                }
            }
        });
        Self { stop, ended }
    }

    /// Makes the thread export the metrics once more and finish, and waits for at most `time`.
    /// Returns whether the thread has finished.
    pub(super) fn stop(self, time: Duration) -> bool {
        let _ = self.stop.send(());
        self.ended.recv_timeout(time) == Err(mpsc::RecvTimeoutError::Disconnected)
    }
}

/// Returns the server's current time in nanoseconds since the Unix epoch.
fn unix_nanos(page: &MetricsPage) -> u64 {
    page.now().as_micros().saturating_mul(1_000)
}

fn export(
    settings: &MetricsSettings,
    client: &UreqClient,
    metrics: Vec<Metric>,
) -> Result<(), String> {
    let attributes = settings
        .resource
        .iter()
        .map(|(name, value)| attribute(name.as_str(), &value.as_str()));
    let request = ExportMetricsServiceRequest {
        resource_metrics: vec![ResourceMetrics {
            resource: Some(ProtoResource {
                attributes: attributes.collect(),
                ..ProtoResource::default()
            }),
            scope_metrics: vec![ScopeMetrics {
                scope: Some(InstrumentationScope {
                    name: "tidegate".to_owned(),
                    ..InstrumentationScope::default()
                }),
                metrics,
                ..ScopeMetrics::default()
            }],
            ..ResourceMetrics::default()
        }],
    };
    let mut message = Request::new(request.encode_to_vec().into());
    *message.method_mut() = Method::POST;
    *message.uri_mut() = settings.url.clone();
    *message.headers_mut() = settings.headers.clone();
    let media_type = http::HeaderValue::from_static("application/x-protobuf");
    message.headers_mut().insert(CONTENT_TYPE, media_type);
    let answer = client.send(message).map_err(|error| error.to_string())?;
    match answer.status() {
        status if status.is_success() => Ok(()),
        status => Err(format!("the collector answered with status {status}")),
    }
}

fn attribute(name: &str, value: &str) -> KeyValue {
    KeyValue {
        key: name.to_owned(),
        value: Some(AnyValue {
            value: Some(any_value::Value::StringValue(value.to_owned())),
        }),
        ..KeyValue::default()
    }
}

fn points(metric: &Metric) -> usize {
    match &metric.data {
        Some(Data::Gauge(gauge)) => gauge.data_points.len(),
        Some(Data::Sum(sum)) => sum.data_points.len(),
        Some(Data::Histogram(histogram)) => histogram.data_points.len(),
        _ => 0,
    }
}

/// Converts a page in the Prometheus text format to OTLP metrics. Counting began at `start`, and
/// the values were read at `now`. The unit of both times is nanoseconds since the Unix epoch.
fn metrics(page: &str, start: u64, now: u64) -> Vec<Metric> {
    let mut metrics: Vec<Metric> = Vec::new();
    let mut help = "";
    for line in page.lines() {
        if let Some(text) = line.strip_prefix("# HELP ") {
            help = text.split_once(' ').map_or("", |(_, help)| help);
        } else if let Some(text) = line.strip_prefix("# TYPE ") {
            let (name, kind) = text.split_once(' ').unwrap_or((text, ""));
            metrics.push(Metric {
                name: name.to_owned(),
                description: help.to_owned(),
                data: Some(empty(kind)),
                ..Metric::default()
            });
        } else if let (Some(sample), Some(metric)) = (Sample::parse(line), metrics.last_mut()) {
            sample.add_to(metric, start, now);
        }
    }
    metrics
}

/// Returns OTLP data of this Prometheus metric type, without data points.
fn empty(kind: &str) -> Data {
    let aggregation_temporality = AggregationTemporality::Cumulative.into();
    match kind {
        "counter" => Data::Sum(Sum {
            data_points: Vec::new(),
            aggregation_temporality,
            is_monotonic: true,
        }),
        "histogram" => Data::Histogram(Histogram {
            data_points: Vec::new(),
            aggregation_temporality,
        }),
        _ => Data::Gauge(Gauge::default()),
    }
}

/// A sample line on the page.
#[derive(Debug, PartialEq)]
struct Sample<'p> {
    name: &'p str,
    labels: Vec<(&'p str, String)>,
    value: &'p str,
}

impl<'p> Sample<'p> {
    fn parse(line: &'p str) -> Option<Self> {
        let name_length = line.find(['{', ' '])?;
        let (name, mut rest) = line.split_at(name_length);
        let mut labels = Vec::new();
        if let Some(inside) = rest.strip_prefix('{') {
            rest = inside;
            while !rest.starts_with('}') {
                let (label, quoted) = rest.split_once("=\"")?;
                let (value, after) = unquote(quoted)?;
                labels.push((label, value));
                rest = after.strip_prefix(',').unwrap_or(after);
            }
            rest = &rest[1..];
        }
        let value = rest.trim();
        (!name.is_empty() && !name.starts_with('#')).then_some(Self {
            name,
            labels,
            value,
        })
    }

    fn attributes(&self) -> Vec<KeyValue> {
        let labels = self.labels.iter().filter(|(name, _)| *name != "le");
        labels.map(|(name, value)| attribute(name, value)).collect()
    }

    fn add_to(&self, metric: &mut Metric, start: u64, now: u64) {
        match &mut metric.data {
            Some(Data::Sum(sum)) => sum.data_points.push(self.point(start, now)),
            // A gauge has no start time.
            Some(Data::Gauge(gauge)) => gauge.data_points.push(self.point(0, now)),
            Some(Data::Histogram(histogram)) => {
                self.add_to_histogram(&mut histogram.data_points, start, now);
            }
            _ => {}
        }
    }

    fn point(&self, start: u64, now: u64) -> NumberDataPoint {
        let value = match self.value.parse() {
            Ok(number) => Value::AsInt(number),
            Err(_) => Value::AsDouble(self.value.parse().unwrap_or(f64::NAN)),
        };
        NumberDataPoint {
            attributes: self.attributes(),
            start_time_unix_nano: start,
            time_unix_nano: now,
            value: Some(value),
            ..NumberDataPoint::default()
        }
    }

    /// Adds this line to the data point of its histogram. A data point is created from adjacent
    /// lines: the sum, the count and the buckets.
    fn add_to_histogram(&self, points: &mut Vec<HistogramDataPoint>, start: u64, now: u64) {
        let attributes = self.attributes();
        if points
            .last()
            .is_none_or(|last| last.attributes != attributes)
        {
            points.push(HistogramDataPoint {
                attributes,
                start_time_unix_nano: start,
                time_unix_nano: now,
                ..HistogramDataPoint::default()
            });
        }
        let Some(point) = points.last_mut() else {
            return;
        };
        let count = || self.value.parse::<u64>().unwrap_or(0);
        if self.name.ends_with("_sum") {
            point.sum = self.value.parse().ok();
        } else if self.name.ends_with("_count") {
            point.count = count();
        } else if let Some((_, bound)) = self.labels.iter().find(|(name, _)| *name == "le") {
            let below: u64 = point.bucket_counts.iter().sum();
            point.bucket_counts.push(count().saturating_sub(below));
            if let Some(bound) = bound.parse().ok().filter(|bound: &f64| bound.is_finite()) {
                point.explicit_bounds.push(bound);
            }
        }
    }
}

/// Parses a label value up to its closing quote. Returns the value and the rest of the line.
fn unquote(quoted: &str) -> Option<(String, &str)> {
    let mut value = String::new();
    let mut letters = quoted.char_indices();
    while let Some((at, letter)) = letters.next() {
        match letter {
            '"' => return Some((value, &quoted[at + 1..])),
            '\\' => match letters.next()?.1 {
                'n' => value.push('\n'),
                other => value.push(other),
            },
            other => value.push(other),
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAGE: &str = "# HELP reloads_total Reloads of a file.
# TYPE reloads_total counter
reloads_total{file=\"a\\\\b\\\"c\\nd}\",result=\"ok\"} 3
# HELP store_bytes Memory of the store.
# TYPE store_bytes gauge
store_bytes 17
# HELP wait_seconds Time in the queue.
# TYPE wait_seconds histogram
wait_seconds_sum{rule=\"a\"} 0.5
wait_seconds_count{rule=\"a\"} 6
wait_seconds_bucket{le=\"0.1\",rule=\"a\"} 4
wait_seconds_bucket{le=\"1.0\",rule=\"a\"} 5
wait_seconds_bucket{le=\"+Inf\",rule=\"a\"} 6
wait_seconds_sum{rule=\"b\"} 0.0
wait_seconds_count{rule=\"b\"} 0
wait_seconds_bucket{le=\"+Inf\",rule=\"b\"} 0
";

    #[test]
    fn a_page_is_converted_completely() {
        let metrics = metrics(PAGE, 1, 2);
        let names: Vec<&str> = metrics.iter().map(|metric| &*metric.name).collect();
        assert_eq!(names, ["reloads_total", "store_bytes", "wait_seconds"]);
        assert_eq!(metrics[0].description, "Reloads of a file.");
        let Some(Data::Sum(reloads)) = &metrics[0].data else {
            panic!("{metrics:?}")
        };
        let [point] = &*reloads.data_points else {
            panic!("{reloads:?}")
        };
        assert!(reloads.is_monotonic);
        assert_eq!(point.value, Some(Value::AsInt(3)));
        assert_eq!((point.start_time_unix_nano, point.time_unix_nano), (1, 2));
        assert_eq!(
            point.attributes,
            [attribute("file", "a\\b\"c\nd}"), attribute("result", "ok")]
        );
        let Some(Data::Gauge(bytes)) = &metrics[1].data else {
            panic!("{metrics:?}")
        };
        assert_eq!(bytes.data_points[0].value, Some(Value::AsInt(17)));
        let Some(Data::Histogram(waits)) = &metrics[2].data else {
            panic!("{metrics:?}")
        };
        let [a, b] = &*waits.data_points else {
            panic!("{waits:?}")
        };
        assert_eq!((a.count, a.sum), (6, Some(0.5)));
        assert_eq!(a.bucket_counts, [4, 1, 1]);
        assert_eq!(a.explicit_bounds, [0.1, 1.0]);
        assert_eq!(a.attributes, [attribute("rule", "a")]);
        assert_eq!((b.count, &*b.bucket_counts), (0, &[0][..]));
    }
}
