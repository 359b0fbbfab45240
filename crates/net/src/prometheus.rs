//! Metrics for Prometheus: the declarations of metrics, and the pages that expose them.
//!
//! The crate `prometheus-client` encodes the pages. The program does not use that crate's counters,
//! because counting would look them up by their labels under a lock. Instead, the program has its
//! own counters, and reads the counters when a page is requested. Counting therefore takes only an
//! atomic addition.

use std::{
    fmt::{self, Debug, Formatter, Write as _},
    sync::{Arc, Mutex, PoisonError},
};

use hyper::{HeaderMap, header::ACCEPT};
use prometheus_client::{
    collector::Collector,
    encoding::{DescriptorEncoder, MetricEncoder, NoLabelSet, text},
    metrics::MetricType,
    registry::{Registry, Unit},
};

/// The declaration of a metric with `N` labels.
#[derive(Debug)]
pub struct Metric<const N: usize = 0> {
    name: &'static str,
    labels: [&'static str; N],
    help: &'static str,
    kind: MetricType,
}

impl<const N: usize> Metric<N> {
    /// Declares a counter.
    ///
    /// # Panics
    ///
    /// Panics if `name` does not end in `_total`. If the declaration is a constant, a panic is a
    /// compile error.
    #[must_use]
    pub const fn counter(
        name: &'static str,
        labels: [&'static str; N],
        help: &'static str,
    ) -> Self {
        assert!(is_total(name), "the name of a counter ends in _total");
        Self::new(name, labels, help, MetricType::Counter)
    }

    /// Declares a counter under a name without `_total` that comes from another program.
    /// OpenMetrics does not allow a counter without `_total`, so in that format the metric has the
    /// type unknown.
    ///
    /// # Panics
    ///
    /// Panics if `name` ends in `_total`. If the declaration is a constant, a panic is a compile
    /// error.
    #[must_use]
    pub const fn foreign_counter(
        name: &'static str,
        labels: [&'static str; N],
        help: &'static str,
    ) -> Self {
        assert!(!is_total(name), "use `counter` for a name in _total");
        Self::new(name, labels, help, MetricType::Counter)
    }

    /// Declares a gauge.
    ///
    /// # Panics
    ///
    /// Panics if `name` ends in `_total`. If the declaration is a constant, a panic is a compile
    /// error.
    #[must_use]
    pub const fn gauge(name: &'static str, labels: [&'static str; N], help: &'static str) -> Self {
        assert!(!is_total(name), "only the name of a counter ends in _total");
        Self::new(name, labels, help, MetricType::Gauge)
    }

    /// Declares a histogram.
    ///
    /// # Panics
    ///
    /// Panics if `name` ends in `_total`. If the declaration is a constant, a panic is a compile
    /// error.
    #[must_use]
    pub const fn histogram(
        name: &'static str,
        labels: [&'static str; N],
        help: &'static str,
    ) -> Self {
        assert!(!is_total(name), "only the name of a counter ends in _total");
        Self::new(name, labels, help, MetricType::Histogram)
    }

    const fn new(
        name: &'static str,
        labels: [&'static str; N],
        help: &'static str,
        kind: MetricType,
    ) -> Self {
        assert!(is_plain(help), "the encoder does not escape the help text");
        Self {
            name,
            labels,
            help,
            kind,
        }
    }
}

impl<const N: usize> Metric<N> {
    /// Returns the metric's labels, each with its value from `values`.
    fn labelled<'l>(&self, values: [&'l str; N]) -> [(&'static str, &'l str); N] {
        std::array::from_fn(|at| (self.labels[at], values[at]))
    }
}

/// One sample of a histogram.
#[derive(Clone, Debug, PartialEq)]
pub struct HistogramSample {
    /// The sum of all observations, in the unit of the metric.
    pub sum: f64,
    /// The upper bounds of the buckets, in ascending order up to infinity. The number that belongs
    /// to a bound is the number of observations between the previous bound and this bound.
    pub buckets: Vec<(f64, u64)>,
    /// The exemplars of buckets. Only a histogram without labels may have exemplars.
    pub exemplars: Vec<Exemplar>,
}

/// An example of an observation in a histogram bucket, with its trace. Only OpenMetrics supports
/// exemplars.
#[derive(Clone, Debug, PartialEq)]
pub struct Exemplar {
    /// The index of the bucket.
    pub bucket: usize,
    /// The id of the trace, as 32 hexadecimal digits.
    pub trace_id: String,
    /// The observed value, in the unit of the metric.
    pub value: f64,
    /// The time of the observation, in milliseconds since 1970.
    pub at_ms: u64,
}

const fn is_total(name: &str) -> bool {
    matches!(name.as_bytes(), [.., b'_', b't', b'o', b't', b'a', b'l'])
}

const fn is_plain(text: &str) -> bool {
    let mut bytes = text.as_bytes();
    while let [first, rest @ ..] = bytes {
        if matches!(first, b'\\' | b'"' | b'\n') {
            return false;
        }
        bytes = rest;
    }
    true
}

/// The format of a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// The Prometheus text format, version 0.0.4.
    Text,
    /// OpenMetrics, version 1.0.0.
    OpenMetrics,
}

impl Format {
    /// Returns the response format for a request with these headers. The format is OpenMetrics if
    /// `Accept` lists it and does not prefer `text/plain`.
    #[must_use]
    pub fn negotiate(headers: &HeaderMap) -> Self {
        let quality = |media_type: &str| {
            headers
                .get_all(ACCEPT)
                .iter()
                .filter_map(|value| value.to_str().ok())
                .flat_map(|value| value.split(','))
                .filter_map(|range| quality_of(range, media_type))
                .fold(0.0, f32::max)
        };
        let open_metrics = quality("application/openmetrics-text");
        if open_metrics > 0.0 && open_metrics >= quality("text/plain") {
            Self::OpenMetrics
        } else {
            Self::Text
        }
    }

    /// Returns the media type of a page in this format.
    #[must_use]
    pub const fn content_type(self) -> &'static str {
        match self {
            Self::Text => "text/plain; version=0.0.4; charset=utf-8",
            Self::OpenMetrics => "application/openmetrics-text; version=1.0.0; charset=utf-8",
        }
    }
}

/// Returns the weight (RFC 9110 §12.4.2) of an element of `Accept`, if the element names
/// `media_type`.
fn quality_of(range: &str, media_type: &str) -> Option<f32> {
    let mut parts = range.split(';').map(str::trim);
    if !parts.next()?.eq_ignore_ascii_case(media_type) {
        return None;
    }
    let weight = parts.find_map(|part| part.strip_prefix("q=").or_else(|| part.strip_prefix("Q=")));
    weight.map_or(Some(1.0), |weight| weight.parse().ok())
}

/// Encodes a page with the metrics that `collect` adds.
pub fn encode(format: Format, collect: impl Fn(&mut Page<'_>) + Send + Sync + 'static) -> String {
    let mut registry = Registry::default();
    let exemplars = Arc::default();
    registry.register_collector(Box::new(Pages {
        format,
        collect,
        exemplars: Arc::clone(&exemplars),
    }));
    let mut page = String::new();
    let encoded = match format {
        Format::Text => text::encode_registry(&mut page, &registry),
        Format::OpenMetrics => text::encode(&mut page, &registry),
    };
    debug_assert!(encoded.is_ok(), "a String accepts every write");
    let exemplars = exemplars.lock().unwrap_or_else(PoisonError::into_inner);
    if exemplars.is_empty() {
        page
    } else {
        with_exemplars(&page, &exemplars)
    }
}

/// The exemplars on a page, each with the name of its metric.
type PageExemplars = Mutex<Vec<(&'static str, Exemplar)>>;

/// Appends each exemplar to the line of its bucket. This function is needed because
/// `prometheus-client` encodes exemplars only for its own histograms.
fn with_exemplars(page: &str, exemplars: &[(&str, Exemplar)]) -> String {
    let mut out = String::with_capacity(page.len() + 128 * exemplars.len());
    let mut bucket = 0;
    for line in page.lines() {
        out.push_str(line);
        let metric = line.split_once("_bucket{le=").map(|(name, _)| name);
        let mut of_metric = exemplars.iter().filter(|(name, _)| Some(*name) == metric);
        if let Some((_, exemplar)) = of_metric.find(|(_, exemplar)| exemplar.bucket == bucket) {
            let Exemplar {
                trace_id,
                value,
                at_ms,
                ..
            } = exemplar;
            let (secs, millis) = (at_ms / 1_000, at_ms % 1_000);
            // Writing into a `String` cannot fail.
            let _ = write!(
                out,
                " # {{trace_id=\"{trace_id}\"}} {value} {secs}.{millis:03}"
            );
        }
        bucket = if metric.is_some() { bucket + 1 } else { 0 };
        out.push('\n');
    }
    out
}

/// A collector that calls a function to add metrics to each encoded page.
struct Pages<C> {
    format: Format,
    collect: C,
    exemplars: Arc<PageExemplars>,
}

impl<C> Debug for Pages<C> {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pages")
            .field("format", &self.format)
            .finish_non_exhaustive()
    }
}

impl<C: Fn(&mut Page<'_>) + Send + Sync + 'static> Collector for Pages<C> {
    fn encode(&self, encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let mut page = Page {
            format: self.format,
            encoder,
            exemplars: Arc::clone(&self.exemplars),
            result: Ok(()),
        };
        (self.collect)(&mut page);
        page.result
    }
}

/// A page of metrics that is being encoded. After an error, no more metrics are added to it.
#[derive(Debug)]
pub struct Page<'p> {
    format: Format,
    encoder: DescriptorEncoder<'p>,
    exemplars: Arc<PageExemplars>,
    result: fmt::Result,
}

impl Page<'_> {
    /// Adds a metric without labels.
    pub fn single(&mut self, metric: &Metric, value: u64) {
        self.family(metric, [([], value)]);
    }

    /// Adds a metric with one sample for each item. An item consists of the label values and the
    /// sample's value.
    pub fn family<'l, const N: usize>(
        &mut self,
        metric: &Metric<N>,
        samples: impl IntoIterator<Item = ([&'l str; N], u64)>,
    ) {
        self.add(metric, |encoder, is_total| {
            for (values, value) in samples {
                if N == 0 {
                    encode_value(encoder, value, is_total)?;
                    continue;
                }
                let labels = metric.labelled(values);
                encode_value(&mut encoder.encode_family(&labels)?, value, is_total)?;
            }
            Ok(())
        });
    }

    /// Adds a histogram with one sample for each item. An item consists of the label values and the
    /// sample.
    pub fn histograms<'l, const N: usize>(
        &mut self,
        metric: &Metric<N>,
        samples: impl IntoIterator<Item = ([&'l str; N], HistogramSample)>,
    ) {
        let is_open_metrics = self.format == Format::OpenMetrics;
        let page_exemplars = Arc::clone(&self.exemplars);
        self.add(metric, |encoder, _| {
            for (values, sample) in samples {
                let HistogramSample {
                    sum,
                    buckets,
                    exemplars,
                } = sample;
                debug_assert!(
                    N == 0 || exemplars.is_empty(),
                    "exemplars are only supported for histograms without labels"
                );
                if is_open_metrics {
                    let mut all = page_exemplars
                        .lock()
                        .unwrap_or_else(PoisonError::into_inner);
                    all.extend(exemplars.into_iter().map(|one| (metric.name, one)));
                }
                let count = buckets.iter().map(|(_, count)| count).sum();
                if N == 0 {
                    encoder.encode_histogram::<NoLabelSet>(sum, count, &buckets, None)?;
                    continue;
                }
                encoder
                    .encode_family(&metric.labelled(values))?
                    .encode_histogram::<NoLabelSet>(sum, count, &buckets, None)?;
            }
            Ok(())
        });
    }

    /// Writes the description of `metric`, followed by the samples that `encode` writes. The second
    /// argument of `encode` says whether the encoder must append `_total` to the name.
    fn add<const N: usize>(
        &mut self,
        metric: &Metric<N>,
        encode: impl FnOnce(&mut MetricEncoder<'_>, bool) -> fmt::Result,
    ) {
        if self.result.is_err() {
            return;
        }
        let mut kind = metric.kind;
        if self.format == Format::OpenMetrics
            && matches!(kind, MetricType::Counter)
            && !is_total(metric.name)
        {
            kind = MetricType::Unknown;
        }
        let (name, unit, is_total) = match self.format {
            // In the text format, the description of a counter contains the full name with
            // `_total`. In OpenMetrics, the description contains the name without `_total`.
            Format::Text => (metric.name, None, false),
            Format::OpenMetrics => {
                let family = metric.name.strip_suffix("_total");
                let (name, unit) = split_unit(family.unwrap_or(metric.name));
                (name, unit, family.is_some())
            }
        };
        self.result = self
            .encoder
            .encode_descriptor(name, metric.help, unit.as_ref(), kind)
            .and_then(|mut encoder| encode(&mut encoder, is_total));
    }
}

/// Encodes a sample's value. `prometheus-client` appends `_total` to the name of a counter, and
/// does not change the name of a gauge.
fn encode_value(encoder: &mut MetricEncoder<'_>, value: u64, is_total: bool) -> fmt::Result {
    if is_total {
        encoder.encode_counter::<NoLabelSet, u64, f64>(&value, None)
    } else {
        encoder.encode_gauge(&value)
    }
}

/// Splits the unit from the name of a metric, because OpenMetrics declares the unit on a separate
/// line.
fn split_unit(name: &str) -> (&str, Option<Unit>) {
    let units = [("_seconds", Unit::Seconds), ("_bytes", Unit::Bytes)];
    let mut matches = units
        .into_iter()
        .filter_map(|(suffix, unit)| Some((name.strip_suffix(suffix)?, Some(unit))));
    matches.next().unwrap_or((name, None))
}

/// Converts a number of objects to a sample's value.
#[must_use]
pub fn count(number: usize) -> u64 {
    u64::try_from(number).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use hyper::header::HeaderValue;

    use super::*;

    const RELOADS: Metric<2> =
        Metric::counter("reloads_total", ["file", "result"], "Reloads of a file.");
    const STORE_BYTES: Metric = Metric::gauge("store_bytes", [], "Memory of the store.");
    const WAIT: Metric = Metric::histogram("wait_seconds", [], "Time in the queue.");
    const SHARE: Metric<1> = Metric::histogram("share_ratio", ["rule"], "Share of the limit.");

    fn page(format: Format) -> String {
        encode(format, |page| {
            page.family(&RELOADS, [(["a\\b\"c\nd", "ok"], 3), (["e", "failed"], 0)]);
            page.single(&STORE_BYTES, u64::MAX);
            let wait = HistogramSample {
                sum: 2.5,
                buckets: vec![(0.5, 2), (1.0, 0), (f64::INFINITY, 1)],
                exemplars: Vec::new(),
            };
            page.histograms(&WAIT, [([], wait)]);
            let share = HistogramSample {
                sum: 0.7,
                buckets: vec![(0.8, 1), (f64::INFINITY, 0)],
                exemplars: Vec::new(),
            };
            page.histograms(&SHARE, [(["a"], share)]);
        })
    }

    #[test]
    fn the_text_format_describes_counters_by_their_full_name() {
        let expected = r#"# HELP reloads_total Reloads of a file.
# TYPE reloads_total counter
reloads_total{file="a\\b\"c\nd",result="ok"} 3
reloads_total{file="e",result="failed"} 0
# HELP store_bytes Memory of the store.
# TYPE store_bytes gauge
store_bytes 18446744073709551615
# HELP wait_seconds Time in the queue.
# TYPE wait_seconds histogram
wait_seconds_sum 2.5
wait_seconds_count 3
wait_seconds_bucket{le="0.5"} 2
wait_seconds_bucket{le="1.0"} 2
wait_seconds_bucket{le="+Inf"} 3
# HELP share_ratio Share of the limit.
# TYPE share_ratio histogram
share_ratio_sum{rule="a"} 0.7
share_ratio_count{rule="a"} 1
share_ratio_bucket{le="0.8",rule="a"} 1
share_ratio_bucket{le="+Inf",rule="a"} 1
"#;
        assert_eq!(page(Format::Text), expected);
    }

    #[test]
    fn open_metrics_has_units_and_an_end() {
        let expected = r#"# HELP reloads Reloads of a file.
# TYPE reloads counter
reloads_total{file="a\\b\"c\nd",result="ok"} 3
reloads_total{file="e",result="failed"} 0
# HELP store_bytes Memory of the store.
# TYPE store_bytes gauge
# UNIT store_bytes bytes
store_bytes 18446744073709551615
# HELP wait_seconds Time in the queue.
# TYPE wait_seconds histogram
# UNIT wait_seconds seconds
wait_seconds_sum 2.5
wait_seconds_count 3
wait_seconds_bucket{le="0.5"} 2
wait_seconds_bucket{le="1.0"} 2
wait_seconds_bucket{le="+Inf"} 3
# HELP share_ratio Share of the limit.
# TYPE share_ratio histogram
share_ratio_sum{rule="a"} 0.7
share_ratio_count{rule="a"} 1
share_ratio_bucket{le="0.8",rule="a"} 1
share_ratio_bucket{le="+Inf",rule="a"} 1
# EOF
"#;
        assert_eq!(page(Format::OpenMetrics), expected);
    }

    #[test]
    fn the_accept_header_selects_the_format() {
        let prometheus = "application/openmetrics-text;version=1.0.0;q=0.5,application/openmetrics-text;version=0.0.1;q=0.4,text/plain;version=0.0.4;q=0.3,*/*;q=0.2";
        for (accept, format) in [
            (&[][..], Format::Text),
            (&["*/*"], Format::Text),
            (&["text/plain;version=0.0.4"], Format::Text),
            (&[prometheus], Format::OpenMetrics),
            (
                &["Application/OpenMetrics-Text; Q=0.1"],
                Format::OpenMetrics,
            ),
            (
                &["text/html", "application/openmetrics-text"],
                Format::OpenMetrics,
            ),
            (&["application/openmetrics-text;q=0"], Format::Text),
            (
                &["application/openmetrics-text;q=0.4,text/plain"],
                Format::Text,
            ),
            (&["application/openmetrics-text;q=high"], Format::Text),
            (&["application/openmetrics-textual"], Format::Text),
        ] {
            let mut headers = HeaderMap::new();
            for value in accept {
                headers.append(ACCEPT, HeaderValue::from_static(value));
            }
            assert_eq!(Format::negotiate(&headers), format, "{accept:?}");
        }
    }

    /// Tests that an exemplar is on the line of its bucket, and only in OpenMetrics.
    #[test]
    fn an_exemplar_is_on_the_line_of_its_bucket() {
        let encoded = |format| {
            encode(format, |page| {
                let sample = HistogramSample {
                    sum: 0.5,
                    buckets: vec![(0.25, 3), (1.0, 1), (f64::INFINITY, 0)],
                    exemplars: vec![Exemplar {
                        bucket: 1,
                        trace_id: "0af7651916cd43dd8448eb211c80319c".to_owned(),
                        value: 0.375,
                        at_ms: 1_700_000_000_042,
                    }],
                };
                page.histograms(&WAIT, [([], sample)]);
                page.single(&STORE_BYTES, 17);
            })
        };
        let page = encoded(Format::OpenMetrics);
        let with: Vec<&str> = page.lines().filter(|line| line.contains(" # {")).collect();
        let expected = "wait_seconds_bucket{le=\"1.0\"} 4 # \
             {trace_id=\"0af7651916cd43dd8448eb211c80319c\"} 0.375 1700000000.042";
        assert_eq!(with, [expected]);
        assert!(page.ends_with("# EOF\n"), "{page}");
        assert!(!encoded(Format::Text).contains("trace_id"));
    }
}
